//! The compiled kernels that this library carries: compressed, and unpacked for the devices that are there.
#![forbid(unsafe_code)]

use std::io::Read;

use lzma_rust2::Lzma2Reader;
use once_cell::sync::OnceCell;

use super::driver::Driver;
use super::names;
use crate::error::{Error, Result, Status, fail};

/// The compute capability from which on devices are served: major, minor.
const LOWEST_CAPABILITY: (i32, i32) = (8, 0);

/// What a source in `kernels/` compiles to, for each generation of devices. `scripts/kernels` writes it.
pub struct Image {
    /// Machine code for compute capabilities 9.x.
    sm_90: Packed,
    /// Machine code for compute capabilities 10.x.
    sm_100: Packed,
    /// PTX, which the driver compiles for any other from 8.0 up: half a minute the first time. Drivers
    /// before 550 refuse that of kernels which exchange.
    compute_80: Packed,
}

/// The PTX of all programs, much of which is alike.
static TEXTS: &[u8] = include_bytes!("../../kernels/compute_80.xz");

/// In their order there.
#[derive(Clone, Copy)]
pub(super) enum Program {
    Fold,
    Exchange,
    Stages,
    Windowed,
    Courier,
    Combine,
}

impl Image {
    /// Of a program, with its compressed files of machine code.
    pub(super) const fn new(program: Program, sm_90: &'static [u8], sm_100: &'static [u8]) -> Image {
        Image {
            sm_90: Packed::new(sm_90, None),
            sm_100: Packed::new(sm_100, None),
            compute_80: Packed::new(TEXTS, Some(program)),
        }
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
        self.of_capability(usual(major)).unpack()
    }

    /// Whether kernels of this device can wait for what their stream was given before: those of machine code
    /// can. A kernel that cannot must not be launched before that has ended.
    pub fn awaits_streams(driver: &dyn Driver, device: u32) -> Result<bool> {
        Ok(is_machine_code(usual(driver.capability(device)?.0)))
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

/// The capability whose code devices of this one get: where CUDA_FORCE_PTX_JIT says so, that of those without
/// machine code.
fn usual(major: i32) -> i32 {
    let forces = |value: std::ffi::OsString| !value.is_empty() && value != "0";
    if std::env::var_os("CUDA_FORCE_PTX_JIT").is_some_and(forces) { LOWEST_CAPABILITY.0 } else { major }
}

struct Packed {
    bytes: &'static [u8],
    /// Whose text it is there, if it is PTX, taken apart.
    text: Option<Program>,
    unpacked: OnceCell<Vec<u8>>,
}

impl Packed {
    const fn new(bytes: &'static [u8], text: Option<Program>) -> Packed {
        Packed { bytes, text, unpacked: OnceCell::new() }
    }

    fn unpack(&self) -> Result<&[u8]> {
        let unpacked = self.unpacked.get_or_try_init(|| {
            let bad = |cause: &dyn std::fmt::Display| {
                let text =
                    format!("the kernels in this library cannot be unpacked ({cause}): install it anew");
                Error::new(Status::Internal, text)
            };
            let mut bytes = Vec::new();
            let (packed, dictionary) = lzma2_of(self.bytes).ok_or_else(|| bad(&"another format"))?;
            Lzma2Reader::new(packed, dictionary, None)
                .read_to_end(&mut bytes)
                .map_err(|cause| bad(&cause))?;
            if let Some(program) = self.text {
                let text = names::together(&bytes, program as usize);
                bytes = text.ok_or_else(|| bad(&"it lacks a program"))?;
            }
            Ok(bytes)
        })?;
        Ok(unpacked)
    }
}

/// What is packed in a file as `xz` writes it, one block of LZMA2, and the bytes of its dictionary. Its
/// checksums are for files: this one is a part of the library, and readers of the whole format are 25 KB of
/// code.
fn lzma2_of(file: &[u8]) -> Option<(&[u8], u32)> {
    const STREAM_HEADER: usize = 12;
    const FILTERS: u8 = 3;
    const SIZES: [u8; 2] = [0x40, 0x80];
    const LZMA2: u8 = 0x21;
    let block = file.get(STREAM_HEADER..)?;
    let header = 4 * (usize::from(*block.first()?) + 1);
    let (flags, mut fields) = (*block.get(1)?, block.get(2..header)?);
    for size in SIZES {
        if flags & size != 0 {
            // Seven bits a byte; the last one has none above them.
            let last = fields.iter().position(|byte| byte & 0x80 == 0)?;
            fields = &fields[last + 1..];
        }
    }
    match *fields {
        [LZMA2, 1, bits @ 0..40, ..] if flags & FILTERS == 0 => {
            Some((block.get(header..)?, (2 | u32::from(bits & 1)) << (bits / 2 + 11)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::lzma2_of;
    use crate::cuda::{courier, exchange, kernels};

    /// A file with one block: `flags` and `fields` of its header, and what is packed.
    fn file(flags: u8, fields: &[u8]) -> Vec<u8> {
        let words = (2 + fields.len() + 4).div_ceil(4);
        let mut file = [&[0; 12], &[words as u8 - 1, flags][..], fields].concat();
        file.resize(12 + 4 * words, 0);
        file.extend(b"packed");
        file
    }

    #[test]
    fn what_is_packed_is_found_behind_headers_of_any_length() {
        for (flags, fields) in [
            (0, &[0x21, 1, 22][..]),
            (0x40, &[0x85, 0x83, 0x01, 0x21, 1, 22]),
            (0xc0, &[0x85, 0x01, 0x07, 0x21, 1, 22]),
        ] {
            assert_eq!(lzma2_of(&file(flags, fields)), Some((&b"packed"[..], 8 << 20)));
        }
        assert_eq!(lzma2_of(&file(0, &[0x21, 1, 23])), Some((&b"packed"[..], 12 << 20)));
        // Another filter, two of them, a dictionary of 4 GiB, sizes without an end, no file.
        for (flags, fields) in
            [(0, &[0x04, 0][..]), (1, &[0x04, 0, 0x21, 1, 22]), (0, &[0x21, 1, 40]), (0x40, &[0x85; 14])]
        {
            assert_eq!(lzma2_of(&file(flags, fields)), None, "{flags} {fields:?}");
        }
        assert!((0..16).all(|bytes| lzma2_of(&file(0, &[0x21, 1, 22])[..bytes]).is_none()));
    }

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
                assert_eq!(undeclared(&text).first(), None);
            }
        }
    }

    /// A driver compiles PTX up to the version of its CUDA: 525 up to 8.0, 535 up to 8.2, 550 up to 8.4.
    #[test]
    fn drivers_from_525_compile_what_copies_and_reduces_and_those_from_550_what_exchanges() {
        let exchange = [&exchange::IMAGE, &exchange::STAGES, &exchange::WINDOWED].map(|image| (image, "8.4"));
        let others = courier::programs().map(|(image, _)| (image, "8.0"));
        for (image, version) in exchange.into_iter().chain([(&kernels::IMAGE, "8.0")]).chain(others) {
            let text = String::from_utf8_lossy(image.of_capability(8).unpack().expect("it was packed well"));
            assert!(text.starts_with(&format!(".version {version}\n")), "{}", &text[..15]);
            // 8.3 has it.
            assert!(!text.contains("used_bytes_mask"));
        }
    }

    /// Lines of PTX that name a register or label which its function does not have.
    fn undeclared(text: &str) -> Vec<&str> {
        let mut found = Vec::new();
        let begins = |line: &str| line.contains(".entry") || line.contains(".func");
        for function in text.lines().collect::<Vec<_>>().chunk_by(|_, line| !begins(line)) {
            let (mut counts, mut labels) =
                (std::collections::HashMap::new(), std::collections::HashSet::new());
            for line in function {
                if let Some((kind, count)) = line.strip_prefix(".reg ").and_then(|line| line.split_once('<'))
                {
                    let count: u32 = count.trim_end_matches(">;").parse().expect("how many");
                    counts.insert(kind.split_once('%').expect("a kind").1, count);
                } else if line.starts_with('$') {
                    assert!(labels.insert(line.trim_end_matches(':')), "{line} is there twice");
                }
            }
            let is_known = |name: &str| {
                let digits = name.find(|byte: char| byte.is_ascii_digit()).unwrap_or(name.len());
                match name.split_at(digits) {
                    _ if name.starts_with('$') => labels.contains(name),
                    (_, "") => true,
                    (kind, number) => counts
                        .get(&kind[1..])
                        .is_some_and(|&count| number.parse::<u32>().expect("a number") < count),
                }
            };
            let is_apart =
                |byte: char| !(byte.is_ascii_alphanumeric() || matches!(byte, '%' | '$' | '_' | '<'));
            let is_good = |line: &&&str| {
                line.split(is_apart).filter(|word| word.starts_with(['%', '$'])).all(&is_known)
            };
            found.extend(function.iter().filter(|line| !line.starts_with(".reg ") && !is_good(line)));
        }
        found
    }
}
