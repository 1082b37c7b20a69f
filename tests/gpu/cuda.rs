//! What the tests do with CUDA as its users: calls that the library has no need of, memory with known
//! contents, graphs.

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cudarc::driver::sys;
use unisono::cuda::context::Devices;
use unisono::cuda::driver::StreamHandle;
use unisono::cuda::memory::{DeviceBuffer, PinnedBuffer};
use unisono::cuda::stream::Stream;
use unisono::deadline::Deadline;

/// Longer than anything here takes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) fn soon() -> Deadline {
    Deadline::after(PATIENCE)
}

pub(crate) fn devices() -> Arc<Devices> {
    Devices::open().expect("a CUDA driver")
}

/// How many ranks jobs have at most that are long where ranks share GPUs: RANKS in the environment.
pub(crate) fn most_ranks() -> u32 {
    std::env::var("RANKS").ok().and_then(|most| most.parse().ok()).unwrap_or(u32::MAX)
}

/// Whether there are as few GPUs as that, and says so.
pub(crate) fn fewer_than(needed: u32) -> bool {
    let few = devices().count() < needed;
    if few {
        println!("skipped: needs {needed} GPUs");
    }
    few
}

macro_rules! calls {
    ($($name:ident($($argument:ty),* $(,)?);)*) => {
        /// The driver's functions by the names of their symbols.
        #[allow(non_snake_case)]
        pub(crate) struct Calls {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        /// Those of the library that the tests' process has loaded.
        pub(crate) fn calls() -> &'static Calls {
            static CALLS: OnceLock<Calls> = OnceLock::new();
            CALLS.get_or_init(|| {
                // SAFETY: a C string; the library is loaded by then, or can be.
                let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
                assert!(!library.is_null(), "libcuda.so.1 loads");
                let symbol = |name: &CStr| {
                    // SAFETY: an open library and a C string.
                    let symbol = unsafe { libc::dlsym(library, name.as_ptr()) };
                    assert!(!symbol.is_null(), "libcuda has {name:?}");
                    symbol
                };
                Calls {
                    $($name: {
                        let name = concat!(stringify!($name), "\0");
                        let name = CStr::from_bytes_with_nul(name.as_bytes()).expect("one zero byte");
                        // SAFETY: a symbol of this name has this signature; a CUresult is an int.
                        unsafe {
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> c_int>(
                                symbol(name),
                            )
                        }
                    },)*
                }
            })
        }
    };
}

calls! {
    cuCtxCreate_v2(*mut sys::CUcontext, c_uint, sys::CUdevice);
    cuCtxDestroy_v2(sys::CUcontext);
    cuCtxGetCurrent(*mut sys::CUcontext);
    cuCtxSetCurrent(sys::CUcontext);
    cuMemAllocManaged(*mut u64, usize, c_uint);
    cuMemFree_v2(u64);
    cuMemAllocAsync(*mut u64, usize, sys::CUstream);
    cuMemFreeAsync(u64, sys::CUstream);
    cuMemHostRegister_v2(*mut c_void, usize, c_uint);
    cuMemHostUnregister(*mut c_void);
    cuMemGetAllocationGranularity(*mut usize, *const sys::CUmemAllocationProp, c_uint);
    cuMemCreate(*mut u64, usize, *const sys::CUmemAllocationProp, u64);
    cuMemRelease(u64);
    cuMemAddressReserve(*mut u64, usize, usize, u64, u64);
    cuMemAddressFree(u64, usize);
    cuMemMap(u64, usize, usize, u64, u64);
    cuMemUnmap(u64, usize);
    cuMemSetAccess(u64, usize, *const sys::CUmemAccessDesc, usize);
    cuStreamCreate(*mut sys::CUstream, c_uint);
    cuStreamQuery(sys::CUstream);
    cuStreamBeginCapture_v2(sys::CUstream, c_uint);
    cuStreamEndCapture(sys::CUstream, *mut sys::CUgraph);
    cuGraphInstantiateWithFlags(*mut sys::CUgraphExec, sys::CUgraph, u64);
    cuGraphLaunch(sys::CUgraphExec, sys::CUstream);
    cuGraphExecDestroy(sys::CUgraphExec);
    cuGraphDestroy(sys::CUgraph);
}

/// Makes a failed test of any result but success.
#[track_caller]
pub(crate) fn ok(what: &str, result: c_int) {
    assert_eq!(result, 0, "{what} answers CUDA error {result}");
}

/// A handle as the driver knows it.
pub(crate) fn raw<T>(handle: usize) -> *mut T {
    std::ptr::with_exposed_provenance_mut(handle)
}

/// The calling thread's current context, 0 for none.
pub(crate) fn current_context() -> usize {
    let mut context = std::ptr::null_mut();
    // SAFETY: fills `context`.
    ok("cuCtxGetCurrent", unsafe { (calls().cuCtxGetCurrent)(&raw mut context) });
    context.expose_provenance()
}

/// A stream of the tests' own, as a caller would have it: not one of the library's.
pub(crate) fn stream(device: u32) -> Stream {
    Stream::new(&devices(), device, false).expect("a stream")
}

/// Device memory with these contents, there when this returns.
pub(crate) fn filled(device: u32, bytes: &[u8]) -> DeviceBuffer {
    let buffer = DeviceBuffer::new(&devices(), device, bytes.len()).expect("device memory");
    write(device, buffer.address(), bytes);
    buffer
}

/// Writes device memory and waits until it is there.
pub(crate) fn write(device: u32, address: u64, bytes: &[u8]) {
    let stream = stream(device);
    let pinned = Upload::new(&stream, address, bytes);
    stream.synchronize(soon()).expect("a copy");
    drop(pinned);
}

/// What device memory holds once `stream` has done what it was given.
pub(crate) fn read(stream: &Stream, address: u64, len: usize) -> Vec<u8> {
    let pinned = PinnedBuffer::new(&devices(), stream.device(), len).expect("pinned memory");
    // SAFETY: both have `len` bytes, and the copy is waited for.
    unsafe {
        stream.copy_to_host(pinned.address(), address, len).expect("a copy");
        stream.synchronize(soon()).expect("the stream ends");
        std::slice::from_raw_parts(pinned.address(), len).to_vec()
    }
}

/// A copy to the device in the order of a stream; the source lives until this is dropped.
pub(crate) struct Upload(#[allow(dead_code)] PinnedBuffer);

impl Upload {
    pub(crate) fn new(stream: &Stream, address: u64, bytes: &[u8]) -> Upload {
        let pinned = PinnedBuffer::new(&devices(), stream.device(), bytes.len()).expect("pinned memory");
        // SAFETY: both have so many bytes; the caller keeps both until the stream is done.
        unsafe {
            pinned.address().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            stream.copy_to_device(address, pinned.address(), bytes.len()).expect("a copy");
        }
        Upload(pinned)
    }
}

/// Begins to capture a stream, in the mode that CUDA has as its default.
pub(crate) fn begin_capture(stream: &Stream) {
    // SAFETY: a live stream.
    ok("cuStreamBeginCapture", unsafe { (calls().cuStreamBeginCapture_v2)(raw(stream.handle().0), 0) });
}

/// A captured graph, ready to be launched.
pub(crate) struct Graph {
    device: u32,
    graph: sys::CUgraph,
    ready: sys::CUgraphExec,
}

impl Graph {
    /// Ends the capture that began with `stream`.
    pub(crate) fn end_capture(stream: &Stream) -> Graph {
        let devices = devices();
        let _entered = devices.enter(stream.device()).expect("a context");
        let (mut graph, mut ready) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: a live stream; fills both.
        unsafe {
            ok("cuStreamEndCapture", (calls().cuStreamEndCapture)(raw(stream.handle().0), &raw mut graph));
            ok("cuGraphInstantiate", (calls().cuGraphInstantiateWithFlags)(&raw mut ready, graph, 0));
        }
        Graph { device: stream.device(), graph, ready }
    }

    pub(crate) fn launch(&self, stream: StreamHandle) {
        let devices = devices();
        let _entered = devices.enter(self.device).expect("a context");
        // SAFETY: a live graph and a live stream.
        ok("cuGraphLaunch", unsafe { (calls().cuGraphLaunch)(self.ready, raw(stream.0)) });
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: ours; launches that are under way keep what they need.
        unsafe {
            (calls().cuGraphExecDestroy)(self.ready);
            (calls().cuGraphDestroy)(self.graph);
        }
    }
}

/// A stream of bits that is the same in every run (xorshift64*).
pub(crate) struct Noise(pub(crate) u64);

impl Noise {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..len.div_ceil(8)).flat_map(|_| self.next().to_ne_bytes()).collect();
        bytes.truncate(len);
        bytes
    }
}
