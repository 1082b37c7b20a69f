//! What may differ from call to call.

use std::ffi::c_void;
use std::marker::{PhantomData, PhantomPinned};

use unisono::communicator::{Call, Overlap};
use unisono::cuda::driver::StreamHandle;
use unisono::error::{Result, fail};

use super::argument::{Options, options, timeout};
use super::datatype::unisono_reduce_function_t;

/// CUDA's stream, declared so that no CUDA header is needed: a CUstream or a cudaStream_t points to it.
pub struct CUstream_st {
    _private: [u8; 0],
    _marker: PhantomData<(*mut u8, PhantomPinned)>,
}

/// The options of one call. Start from UNISONO_CALL_INIT; what is zero or NULL is unset. The struct is read
/// during the call only.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct unisono_call_t {
    /// sizeof(unisono_call_t), as UNISONO_CALL_INIT sets it.
    pub size: u64,
    /// Operations with the same tag match each other in the order of the calls with that tag, and run beside
    /// those with other tags. 0, the tag of calls without options, is a tag like any other: those run in the
    /// order of the calls.
    pub tag: u64,
    /// Milliseconds until the operation fails with UNISONO_TIMEOUT; 0: the context's; UNISONO_FOREVER: never.
    pub timeout_ms: u64,
    /// An algorithm (enum unisono_algorithm_kind); 0: the library chooses. The same on every rank.
    pub algorithm: i32,
    /// The most thread blocks of a kernel by which GPUs exchange a collective, and so the most
    /// multiprocessors that it takes; 0: no more word on it than the context's options. The same on every
    /// rank. Sends and receives go by the context's. Kernels that carry by way of the host have it, too, but
    /// two at least, or three where they combine, and those that copy or combine by themselves, as of several
    /// pointers of a process.
    pub max_blocks: u32,
    /// A CUDA stream that the operation is ordered on, for device and host memory alike: the operation starts
    /// when the stream comes to the call, and what the stream is given afterwards waits for it. A call
    /// without a `work` returns then, at once between GPUs that exchange directly; what fails later, a
    /// message too, is told by unisono_context_error and by every later call of the context. NULL: no stream.
    /// Without one, an operation on device memory comes after what the device's default stream was given
    /// before, and a call without a `work` returns when the result is there; so does one of no elements where
    /// GPUs exchange directly, whatever its pointers. The stream lives until the operation is complete.
    ///
    /// Streams, and default streams, are those of the device's primary context, which is the CUDA runtime's.
    /// UNISONO_INVALID_ARGUMENT for a stream of a context that the program has made (cuCtxCreate), and for a
    /// call without one on a thread whose current context is such a one of the device.
    ///
    /// Where GPUs do not exchange directly (memory goes through the host), the stream runs a small kernel
    /// that copies as the host orders and ends with the call, or for a send when what is sent has been read.
    /// This has limits:
    /// - How far ahead. A call waits, instead of returning at once, while its stream waits for 16 earlier
    ///   ones: at first for 50 ms, since those may need what the thread does next, then each time until there
    ///   are twice as many. At 64 it waits until one has ended, and fails with UNISONO_TIMEOUT when none has
    ///   in its time. What you give the stream yourself is not counted; the driver has room for about 1000
    ///   launches and copies, and keeps a thread waiting that has no room.
    /// - Streams. What a stream is given behind a call that waits may hold up others that share its queue on
    ///   the device, of which a process has 8, or CUDA_DEVICE_MAX_CONNECTIONS. So calls on two streams come
    ///   in one order on all ranks, as if the two were one, or you have no more streams than queues.
    /// - Graphs. The call cannot be captured: UNISONO_INVALID_USAGE.
    /// - The first long calls of a communicator take longer, until a thread has made the pinned memory that
    ///   the others go through.
    /// - Reductions. The kernel combines elements of up to 8 ranks at addresses that are multiples of their
    ///   size, by one type and operator for all calls that were started together on a stream. All else is
    ///   combined by the processors, which takes some five times as long.
    pub stream: *mut CUstream_st,
    /// This rank's factor for UNISONO_PREMULSUM; for integers a whole number that fits their type.
    pub scale: f64,
    /// The operation of UNISONO_CUSTOM.
    pub function: unisono_reduce_function_t,
    /// Handed to `function` on every call.
    pub user: *mut c_void,
    /// What the kernel of UNISONO_ALGORITHM_BROADCAST_ONE_STAGE, _TWO_STAGE and _STAGES overlaps with (enum
    /// unisono_pdl); other algorithms do not look at it. Ranks may differ in it.
    pub pdl: i32,
    /// 0.
    pub reserved: u32,
}

/// Levels of programmatic dependent launch, for GPUs of compute capability 9 and 10. On others all are
/// UNISONO_PDL_OFF.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum unisono_pdl {
    /// None: the kernel begins when what its stream was given before has ended.
    UNISONO_PDL_OFF = 0,
    /// The kernel is launched while the one before it ends, and waits for that before it does anything.
    UNISONO_PDL_WAIT = 1,
    /// The same, and it lets the kernel after it be launched at once. That one takes its multiprocessors
    /// early, and has to wait for this one's end itself.
    UNISONO_PDL_EARLY = 2,
}

impl Default for unisono_call_t {
    fn default() -> unisono_call_t {
        unisono_call_t {
            size: size_of::<unisono_call_t>() as u64,
            tag: 0,
            timeout_ms: 0,
            algorithm: 0,
            max_blocks: 0,
            stream: std::ptr::null_mut(),
            scale: 0.0,
            function: None,
            user: std::ptr::null_mut(),
            pdl: 0,
            reserved: 0,
        }
    }
}

// SAFETY: repr(C) from `size: u64` on, eight bytes a field (pairs of four), and integers, pointers, an
// optional function and a float are valid as zeros.
unsafe impl Options for unisono_call_t {
    const INIT: &'static str = "UNISONO_CALL_INIT";
    const FIRST_SIZE: u64 = 64;
}

/// The options of a call, defaults for NULL.
///
/// # Safety
/// As [`options`].
pub(super) unsafe fn call_options(call: *const unisono_call_t, name: &str) -> Result<unisono_call_t> {
    // SAFETY: this function's contract.
    let call = unsafe { options(call, name) }?.unwrap_or_default();
    if call.reserved != 0 {
        fail!(
            InvalidArgument,
            "{name}->reserved is {}; initialise the struct with UNISONO_CALL_INIT",
            call.reserved
        );
    }
    Overlap::from_number(call.pdl).map_err(|error| error.context(format_args!("{name}->pdl")))?;
    Ok(call)
}

impl From<&unisono_call_t> for Call {
    fn from(call: &unisono_call_t) -> Call {
        Call {
            tag: (call.tag != 0).then_some(call.tag),
            timeout: timeout(call.timeout_ms),
            algorithm: (call.algorithm != 0).then_some(call.algorithm),
            max_blocks: call.max_blocks,
            // Checked by `call_options`.
            overlap: Overlap::from_number(call.pdl).unwrap_or_default(),
            stream: (!call.stream.is_null()).then(|| StreamHandle(call.stream.expose_provenance())),
            on_device: false,
            averaged: 0,
            combined: None,
        }
    }
}
