//! How GPUs are linked, also those that this process does not see: NVIDIA's management library knows them
//! all.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};

use once_cell::sync::OnceCell;

type Init = unsafe extern "C" fn() -> c_int;
type HandleByUuid = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;
type P2pStatus = unsafe extern "C" fn(*mut c_void, *mut c_void, c_uint, *mut c_uint) -> c_int;

/// The management library, which comes with the driver.
struct Nvml {
    handle_by_uuid: HandleByUuid,
    p2p_status: P2pStatus,
}

const SUCCESS: c_int = 0;
/// `NVML_P2P_CAPS_INDEX_NVLINK` and `NVML_P2P_STATUS_OK`.
const NVLINK: c_uint = 2;
const OK: c_uint = 0;

/// Whether NVLink connects two GPUs. Not, as far as is known, where the library is missing or does not say.
pub(super) fn are_linked(one: [u8; 16], other: [u8; 16]) -> bool {
    static NVML: OnceCell<Option<Nvml>> = OnceCell::new();
    let Some(nvml) = NVML.get_or_init(Nvml::load) else { return false };
    let (Some(one), Some(other)) = (nvml.device(one), nvml.device(other)) else { return false };
    let mut status = c_uint::MAX;
    // SAFETY: two of its handles; fills `status`.
    unsafe { (nvml.p2p_status)(one, other, NVLINK, &raw mut status) == SUCCESS && status == OK }
}

impl Nvml {
    fn load() -> Option<Nvml> {
        // SAFETY: a C string, and a library whose constructors NVIDIA made for being loaded at any time.
        let library = unsafe { libc::dlopen(c"libnvidia-ml.so.1".as_ptr(), libc::RTLD_NOW) };
        if library.is_null() {
            log::debug!(
                "no libnvidia-ml.so.1: how GPUs are linked is not known where this process does not see them"
            );
            return None;
        }
        let symbol = |name: &CStr| {
            // SAFETY: an open library and a C string.
            let found = unsafe { libc::dlsym(library, name.as_ptr()) };
            (!found.is_null()).then_some(found)
        };
        let init = symbol(c"nvmlInit_v2")?;
        let (handle_by_uuid, p2p_status) =
            (symbol(c"nvmlDeviceGetHandleByUUID")?, symbol(c"nvmlDeviceGetP2PStatus")?);
        // SAFETY: symbols of these names have these signatures; nvmlReturn_t and NVML's enumerations are
        // ints.
        let (init, nvml) = unsafe {
            let handle_by_uuid = std::mem::transmute::<*mut c_void, HandleByUuid>(handle_by_uuid);
            let p2p_status = std::mem::transmute::<*mut c_void, P2pStatus>(p2p_status);
            (std::mem::transmute::<*mut c_void, Init>(init), Nvml { handle_by_uuid, p2p_status })
        };
        // SAFETY: may be called at any time, and as often as anybody likes. It is never shut down.
        let result = unsafe { init() };
        if result != SUCCESS {
            log::debug!(
                "nvmlInit_v2 failed ({result}): how GPUs are linked is not known where this process does not see them"
            );
            return None;
        }
        Some(nvml)
    }

    fn device(&self, uuid: [u8; 16]) -> Option<*mut c_void> {
        let uuid = CString::new(name(uuid)).ok()?;
        let mut device = std::ptr::null_mut();
        // SAFETY: a C string; fills `device`.
        let result = unsafe { (self.handle_by_uuid)(uuid.as_ptr(), &raw mut device) };
        (result == SUCCESS).then_some(device)
    }
}

/// A GPU as NVIDIA's tools name it.
fn name(uuid: [u8; 16]) -> String {
    let mut name = String::from("GPU-");
    for (index, byte) in uuid.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            name.push('-');
        }
        name.push_str(&format!("{byte:02x}"));
    }
    name
}

#[cfg(test)]
mod tests {
    #[test]
    fn gpus_have_the_names_that_tools_give_them() {
        let uuid = std::array::from_fn(|index| 16 * index as u8 + 1);
        assert_eq!(super::name(uuid), "GPU-01112131-4151-6171-8191-a1b1c1d1e1f1");
    }
}
