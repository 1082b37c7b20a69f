//! The compiled kernels that this library carries: compressed, and unpacked for the devices that are there.
#![forbid(unsafe_code)]

use std::io::Read;

use lzma_rust2::XzReader;
use once_cell::sync::OnceCell;

use super::driver::Driver;
use crate::error::{Error, Result, Status, fail};

/// The compute capability from which on devices are served: major, minor.
const LOWEST_CAPABILITY: (i32, i32) = (8, 0);

/// What a source in `kernels/` compiles to, for each generation of devices. `scripts/kernels` writes it.
pub struct Image {
    /// Machine code for compute capabilities 9.x.
    sm_90: Packed,
    /// Machine code for compute capabilities 10.x.
    sm_100: Packed,
    /// PTX, which the driver compiles for any other from 8.0 up. That takes seconds the first time.
    compute_80: Packed,
}

impl Image {
    /// Of compressed files.
    pub(super) const fn new(sm_90: &'static [u8], sm_100: &'static [u8], compute_80: &'static [u8]) -> Image {
        Image { sm_90: Packed::new(sm_90), sm_100: Packed::new(sm_100), compute_80: Packed::new(compute_80) }
    }

    /// What `cuModuleLoadData` takes on this device. Unpacked once in a process, in some 30 ms, and kept.
    pub fn of_device(&self, driver: &dyn Driver, device: u32) -> Result<&[u8]> {
        let (major, minor) = driver.capability(device)?;
        if (major, minor) < LOWEST_CAPABILITY {
            fail!(
                Unsupported,
                "GPU {device} has compute capability {major}.{minor}; the kernels need {}.{} or newer: use host memory",
                LOWEST_CAPABILITY.0,
                LOWEST_CAPABILITY.1
            );
        }
        self.of_capability(major).unpack()
    }

    /// Whether kernels of this device can wait for what their stream was given before: those of machine code can. A kernel that
    /// cannot must not be launched before that has ended.
    pub fn awaits_streams(driver: &dyn Driver, device: u32) -> Result<bool> {
        Ok(is_machine_code(driver.capability(device)?.0))
    }

    fn of_capability(&self, major: i32) -> &Packed {
        match major {
            9 => &self.sm_90,
            10 => &self.sm_100,
            _ => &self.compute_80,
        }
    }
}

/// Whether devices of such capabilities have machine code.
fn is_machine_code(major: i32) -> bool {
    matches!(major, 9 | 10)
}

struct Packed {
    bytes: &'static [u8],
    unpacked: OnceCell<Vec<u8>>,
}

impl Packed {
    const fn new(bytes: &'static [u8]) -> Packed {
        Packed { bytes, unpacked: OnceCell::new() }
    }

    fn unpack(&self) -> Result<&[u8]> {
        let unpacked = self.unpacked.get_or_try_init(|| {
            let mut bytes = Vec::new();
            match XzReader::new(self.bytes, false).read_to_end(&mut bytes) {
                Ok(_) => Ok(bytes),
                Err(cause) => Err(Error::new(
                    Status::Internal,
                    format!("the kernels in this library cannot be unpacked ({cause}): install it anew"),
                )),
            }
        })?;
        Ok(unpacked)
    }
}

#[cfg(test)]
mod tests {
    use crate::cuda::{courier, exchange, kernels};

    #[test]
    fn every_generation_has_code_of_its_own() {
        let exchange = [&exchange::IMAGE, &exchange::STAGES, &exchange::WINDOWED];
        for image in
            exchange.into_iter().chain([&kernels::IMAGE]).chain(courier::programs().map(|(image, _)| image))
        {
            for (major, architecture) in [(9, 90), (10, 100)] {
                let code = image.of_capability(major).unpack().expect("it was packed well");
                assert!(code.starts_with(b"\x7fELF") && super::is_machine_code(major));
                // e_machine, and e_flags, where the architecture is the first byte or the second.
                assert_eq!(code[18..20], 190u16.to_le_bytes(), "CUDA");
                assert!(code[48..50].contains(&architecture), "{:x?}", &code[48..52]);
            }
            for major in [8, 11, 12] {
                let text = image.of_capability(major).unpack().expect("it was packed well");
                assert!(text.ends_with(b"\0") && !text[..text.len() - 1].contains(&0));
                let text = String::from_utf8_lossy(text);
                assert!(text.contains("\n.target sm_80\n"));
                assert!(!text.contains("griddepcontrol") && !super::is_machine_code(major));
            }
        }
    }
}
