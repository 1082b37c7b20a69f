//! The CUDA driver of this machine: libcuda, opened at run time.
//!
//! cudarc lends the types. Its loader is not used: it tries `libcuda.so` first, which may be the toolkit's
//! stub, panics at a missing symbol, and its result type is a closed enum, where a code that it has not heard
//! of is undefined behaviour. Here every function returns a plain integer, and every symbol is there before
//! the first call.

mod devices;
mod launches;
mod links;
pub mod measuring;
mod memory;
mod sharing;
mod streams;
mod symbols;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys;
use once_cell::sync::OnceCell;
use symbols::Calls;

use super::driver::Driver;
use crate::error::{Error, Result, Status, fail};

/// What the driver is loaded as.
const LIBRARY: &CStr = c"libcuda.so.1";

/// The functions, once the library is loaded by anybody. Nothing unloads it after that: we hold a reference.
static LOADED: OnceCell<Arc<Libcuda>> = OnceCell::new();

/// The functions, once `cuInit` succeeded.
static READY: OnceCell<Arc<Libcuda>> = OnceCell::new();

/// The number of libraries that this process had ever loaded when libcuda was last found not to be among
/// them.
static ABSENT_AT: AtomicU64 = AtomicU64::new(0);

/// The driver's functions.
pub struct Libcuda {
    calls: Calls,
    /// `cuFuncLoad`, since 12.4. Drivers before that load a kernel when it is looked up.
    load_function: Option<LoadFunction>,
    /// `cuStreamGetGreenCtx`, since 12.4, as green contexts are.
    green_context: Option<GreenContext>,
}

type LoadFunction = unsafe extern "C" fn(sys::CUfunction) -> c_int;
type GreenContext = unsafe extern "C" fn(sys::CUstream, *mut *mut c_void) -> c_int;

impl Libcuda {
    /// Loads and initialises the driver. The first success is kept; a failure is tried again by the next
    /// call.
    pub fn open() -> Result<Arc<Libcuda>> {
        READY
            .get_or_try_init(|| {
                let cuda = LOADED.get_or_try_init(|| Libcuda::load(0))?;
                // SAFETY: takes no pointers.
                cuda.check("cuInit", unsafe { (cuda.calls.cuInit)(0) })?;
                Ok(cuda.clone())
            })
            .cloned()
    }

    /// Whether the library is in this process already.
    pub fn is_loaded() -> bool {
        Libcuda::loaded().is_some()
    }

    /// The functions, if the library is in this process already.
    pub fn loaded() -> Option<&'static Arc<Libcuda>> {
        if let Some(cuda) = LOADED.get() {
            return Some(cuda);
        }
        // Counted before it is looked for: who loads it in between changes the count.
        let libraries = libraries_ever_loaded();
        if ABSENT_AT.load(Ordering::Relaxed) == libraries {
            return None;
        }
        let found = LOADED.get_or_try_init(|| Libcuda::load(libc::RTLD_NOLOAD)).ok();
        if found.is_none() {
            // Asking with RTLD_NOLOAD loads nothing, so the count still stands for what was seen.
            ABSENT_AT.store(libraries, Ordering::Relaxed);
        }
        found
    }

    fn load(flags: c_int) -> Result<Arc<Libcuda>> {
        // SAFETY: a C string, and a library whose constructors NVIDIA made for being loaded at any time.
        let library = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW | flags) };
        if library.is_null() {
            // SAFETY: takes no pointers; the answer is NULL or a C string that this thread's next dl call
            // ends.
            let cause = unsafe { text(libc::dlerror()) };
            let cause = cause.as_deref().unwrap_or("libcuda.so.1: not found");
            let cause = cause.strip_suffix(": No such file or directory").unwrap_or(cause);
            fail!(Cuda, "device memory was given, but no CUDA driver could be loaded ({cause}).");
        }
        // SAFETY: an open library and a C string.
        let symbol = |name: &CStr| unsafe { libc::dlsym(library, name.as_ptr()) };
        let symbol = |name| Some(symbol(name)).filter(|symbol| !symbol.is_null());
        // SAFETY: symbols of these names have these signatures; a CUresult is an int.
        let (load_function, green_context) = unsafe {
            let load = symbol(c"cuFuncLoad").map(|it| std::mem::transmute::<*mut c_void, LoadFunction>(it));
            let green = symbol(c"cuStreamGetGreenCtx");
            (load, green.map(|it| std::mem::transmute::<*mut c_void, GreenContext>(it)))
        };
        // SAFETY: an open library, which stays open.
        let calls = unsafe { Calls::resolve(library) }?;
        Ok(Arc::new(Libcuda { calls, load_function, green_context }))
    }

    /// Makes an error of any result but success.
    fn check(&self, call: &'static str, result: c_int) -> Result<()> {
        if result == SUCCESS { Ok(()) } else { Err(self.error(call, result)) }
    }

    #[cold]
    fn error(&self, call: &'static str, result: c_int) -> Error {
        let describe = |ask: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int| {
            let mut answer = std::ptr::null();
            // SAFETY: any number may be asked about; the answer is NULL or a constant of the library.
            unsafe {
                let known = ask(result, &raw mut answer) == SUCCESS;
                if known { text(answer) } else { None }
            }
        };
        let name = describe(self.calls.cuGetErrorName).unwrap_or_else(|| "an unknown CUresult".into());
        let text = describe(self.calls.cuGetErrorString).unwrap_or_else(|| "no description".into());
        let status = if result == OUT_OF_MEMORY { Status::OutOfMemory } else { Status::Cuda };
        Error::new(status, format!("{call} failed: {name} ({result}): {text}"))
    }
}

const SUCCESS: c_int = sys::CUresult::CUDA_SUCCESS as c_int;
const OUT_OF_MEMORY: c_int = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as c_int;

impl Driver for Libcuda {}

impl fmt::Debug for Libcuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Libcuda")
    }
}

const INVALID_CONTEXT: c_int = sys::CUresult::CUDA_ERROR_INVALID_CONTEXT as c_int;

/// A handle as the driver knows it.
fn raw<T>(handle: usize) -> *mut T {
    std::ptr::with_exposed_provenance_mut(handle)
}

/// A device as the driver counts it. What does not fit becomes a number that the driver refuses.
fn ordinal(device: u32) -> c_int {
    c_int::try_from(device).unwrap_or(c_int::MAX)
}

/// A copy of a C string, if there is one.
///
/// # Safety
/// `text` is NULL or a C string.
unsafe fn text(text: *const c_char) -> Option<String> {
    // SAFETY: the caller's promise.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// How many libraries this process has loaded since it began; it grows with every `dlopen` that maps
/// something.
fn libraries_ever_loaded() -> u64 {
    unsafe extern "C" fn first(info: *mut libc::dl_phdr_info, _: libc::size_t, count: *mut c_void) -> c_int {
        // SAFETY: the loader gives a filled structure, and `count` is what was given below.
        unsafe { *count.cast::<u64>() = (*info).dlpi_adds };
        // One library is enough: the count is the same in all.
        1
    }
    let mut count = 0u64;
    // SAFETY: `first` writes the u64 that it is given.
    unsafe { libc::dl_iterate_phdr(Some(first), (&raw mut count).cast()) };
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_driver_the_status_says_so() {
        if let Err(error) = Libcuda::open() {
            // Either there is no driver, or there is one without a device that it can use.
            assert_eq!(error.status(), Status::Cuda);
            let expected = [
                "device memory was given, but no CUDA driver could be loaded (libcuda.so.1: ",
                "cuInit failed: CUDA_ERROR_",
            ];
            assert!(expected.iter().any(|start| error.text().starts_with(start)), "{error}");
        }
    }
}
