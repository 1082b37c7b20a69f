//! Calls on GPUs, over a driver that has none: see tests/driver.c. Each test is a process of its own, which
//! has loaded it.

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::path::Path;
use std::process::Command;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::abi::{cudaStream_t, ncclComm_t, ncclDataType_t, ncclResult_t};
use crate::collective::ncclAllReduce;
use crate::create::ncclCommInitAll;
use crate::end::{ncclCommAbort, ncclCommDestroy, ncclCommFinalize};
use crate::error::{SUCCESS, Status, ncclGetLastError, result};
use crate::group::{ncclGroupEnd, ncclGroupStart};
use crate::point_to_point::{ncclRecv, ncclSend};
use crate::query::ncclCommGetAsyncError;

const SOON: Duration = Duration::from_secs(30);
const INT: ncclDataType_t = 2;
const FLOAT: ncclDataType_t = 7;

/// Runs `body`, of the test of this name, in a process that finds the driver, with these settings.
fn over_driver(name: &str, settings: &[(&str, &str)], body: fn(&Driver)) {
    const IS_THERE: &str = "UNISONO_TEST_DRIVER";
    if std::env::var_os(IS_THERE).is_some() {
        return body(&Driver::load());
    }
    let folder = std::env::temp_dir().join(format!("unisono-driver-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let built = Command::new("cc")
        .args(["-std=gnu11", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"])
        .args([root.join("src/engine/tests/driver.c"), root.join("../scripts/host-time/courier.c")])
        .args([Path::new("-o"), &folder.join("libcuda.so.1"), Path::new("-lpthread")])
        .status();
    assert!(built.expect("a compiler").success());
    let ended = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", &format!("engine::tests::{name}"), "--nocapture"])
        .envs([(IS_THERE, "1"), ("CUDA_DEVICE_MAX_CONNECTIONS", "32")])
        .env("LD_LIBRARY_PATH", &folder)
        .envs(settings.iter().copied())
        .status();
    // It has ended, whatever it is.
    let _ = std::fs::remove_dir_all(&folder);
    assert!(ended.expect("it runs").success(), "see above");
}

/// What the tests need of the driver.
struct Driver(*mut c_void);

impl Driver {
    fn load() -> Driver {
        // SAFETY: a C string, and a library that does nothing as it is loaded.
        let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
        assert!(!library.is_null());
        Driver(library)
    }

    fn symbol(&self, name: &CStr) -> *mut c_void {
        // SAFETY: a library that is open, and a C string.
        let symbol = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        assert!(!symbol.is_null(), "{name:?}");
        symbol
    }

    /// Whether streams stand still.
    fn hold(&self, held: bool) {
        // SAFETY: an int of the driver's, which it reads like this.
        let place = unsafe { AtomicI32::from_ptr(self.symbol(c"held").cast()) };
        place.store(held.into(), Ordering::SeqCst);
    }

    /// Makes it that of CUDA 12.`minor`, for what it compiles.
    fn compiles_as_of_12(&self, minor: c_int) {
        // SAFETY: an int of the driver's; no thread loads anything just now.
        unsafe { self.symbol(c"last_text").cast::<c_int>().write(80 + minor) }
    }

    /// By how many kernels one GPU was ahead of another at most.
    fn most_ahead(&self) -> c_int {
        // SAFETY: an int of the driver's; no thread launches anything just now.
        unsafe { self.symbol(c"most_ahead").cast::<c_int>().read() }
    }

    /// A stream of a GPU, and memory there.
    fn stream(&self, gpu: c_int, bytes: usize) -> (cudaStream_t, *mut c_void) {
        type Retain = unsafe extern "C" fn(*mut isize, c_int) -> c_int;
        type Push = unsafe extern "C" fn(isize) -> c_int;
        type Pop = unsafe extern "C" fn(*mut isize) -> c_int;
        type Create = unsafe extern "C" fn(*mut cudaStream_t, c_uint, c_int) -> c_int;
        type Allocate = unsafe extern "C" fn(*mut *mut c_void, usize) -> c_int;
        let (mut context, mut stream, mut memory) = (0, null_mut(), null_mut());
        // SAFETY: the signatures are those of cuda.h.
        let answers = unsafe {
            let retain: Retain = std::mem::transmute(self.symbol(c"cuDevicePrimaryCtxRetain"));
            let push: Push = std::mem::transmute(self.symbol(c"cuCtxPushCurrent_v2"));
            let pop: Pop = std::mem::transmute(self.symbol(c"cuCtxPopCurrent_v2"));
            let create: Create = std::mem::transmute(self.symbol(c"cuStreamCreateWithPriority"));
            let allocate: Allocate = std::mem::transmute(self.symbol(c"cuMemAlloc_v2"));
            let retained = retain(&mut context, gpu);
            [
                retained,
                push(context),
                create(&mut stream, 1, 0),
                allocate(&mut memory, bytes),
                pop(&mut context),
            ]
        };
        assert_eq!(answers, [0; 5]);
        (stream, memory)
    }
}

/// Communicators of this process, one for each GPU.
fn communicators<const N: usize>() -> [ncclComm_t; N] {
    let mut made = [null_mut(); N];
    // SAFETY: live memory.
    let answer = unsafe { ncclCommInitAll(made.as_mut_ptr(), N as c_int, std::ptr::null()) };
    assert_eq!(answer, SUCCESS, "{}", last_error(null_mut()));
    made
}

fn last_error(communicator: ncclComm_t) -> String {
    let text = ncclGetLastError(communicator);
    // SAFETY: a C string of this thread.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// A communicator of one rank that sends itself something, by a stream that stands still.
fn sends_to_itself(driver: &Driver) -> ncclComm_t {
    let [communicator] = communicators();
    let (stream, memory) = driver.stream(0, 8192);
    driver.hold(true);
    assert_eq!(ncclGroupStart(), SUCCESS);
    // SAFETY: live memory.
    let called = unsafe {
        [
            ncclSend(memory, 1024, FLOAT, 0, communicator, stream),
            ncclRecv(memory.byte_add(4096), 1024, FLOAT, 0, communicator, stream),
        ]
    };
    assert_eq!((called, ncclGroupEnd()), ([SUCCESS; 2], SUCCESS), "{}", last_error(null_mut()));
    communicator
}

#[test]
fn what_a_rank_sends_to_itself_has_the_time_of_an_operation() {
    let name = "what_a_rank_sends_to_itself_has_the_time_of_an_operation";
    over_driver(name, &[("UNISONO_NCCL_TIMEOUT", "1")], |driver| {
        let start = Instant::now();
        let communicator = sends_to_itself(driver);
        let mut state = SUCCESS;
        while state == SUCCESS && start.elapsed() < SOON {
            std::thread::sleep(Duration::from_millis(10));
            // SAFETY: live memory.
            assert_eq!(unsafe { ncclCommGetAsyncError(communicator, &mut state) }, SUCCESS);
        }
        let text = last_error(communicator);
        assert_eq!(state, result(Status::Timeout), "{text}");
        assert!(start.elapsed() >= Duration::from_secs(1));
        assert!(text.contains("Raise UNISONO_NCCL_TIMEOUT"), "{text}");
    });
}

#[test]
fn who_ends_a_communicator_that_sends_to_itself_goes_when_another_thread_aborts_it() {
    let name = "who_ends_a_communicator_that_sends_to_itself_goes_when_another_thread_aborts_it";
    over_driver(name, &[], |driver| {
        let ends: [extern "C" fn(ncclComm_t) -> ncclResult_t; 2] = [ncclCommDestroy, ncclCommFinalize];
        for end in ends {
            let communicator = sends_to_itself(driver).addr();
            let (tell, told) = mpsc::channel();
            std::thread::spawn(move || tell.send(end(std::ptr::without_provenance_mut(communicator))));
            // It waits for its stream.
            assert!(told.recv_timeout(Duration::from_millis(200)).is_err());
            assert_eq!(ncclCommAbort(std::ptr::without_provenance_mut(communicator)), SUCCESS);
            told.recv_timeout(SOON).expect("it ends");
            driver.hold(false);
        }
    });
}

/// A kernel ends when all ranks have begun it, and a stream has room for some thousand entries: a thread that
/// gave one rank all it has to do would wait for room there, and the next rank for that thread.
#[test]
fn ranks_of_one_thread_are_given_long_groups_in_turns() {
    over_driver("ranks_of_one_thread_are_given_long_groups_in_turns", &[], |driver| {
        let communicators: [ncclComm_t; 2] = communicators();
        let streams = [0, 1].map(|gpu| driver.stream(gpu, 4096));
        assert_eq!(ncclGroupStart(), SUCCESS);
        for (communicator, (stream, memory)) in communicators.into_iter().zip(streams) {
            // No two that follow each other are one launch.
            for dtype in [INT, FLOAT].repeat(400) {
                // SAFETY: live memory.
                let called = unsafe { ncclAllReduce(memory, memory, 64, dtype, 0, communicator, stream) };
                assert_eq!(called, SUCCESS, "{}", last_error(null_mut()));
            }
        }
        assert_eq!(ncclGroupEnd(), SUCCESS, "{}", last_error(null_mut()));
        let ahead = driver.most_ahead();
        assert!((1..=128).contains(&ahead), "by {ahead} launches");
    });
}

/// On GPUs without machine code.
#[test]
fn a_driver_that_is_too_old_for_the_exchange_is_told_of_and_couriers_run() {
    let name = "a_driver_that_is_too_old_for_the_exchange_is_told_of_and_couriers_run";
    let log = std::env::temp_dir().join(format!("unisono-{}-{name}", std::process::id()));
    let log = log.to_str().expect("letters");
    let settings = [("CUDA_FORCE_PTX_JIT", "1"), ("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_FILE", log)];
    over_driver(name, &settings, |driver| {
        driver.compiles_as_of_12(0);
        let communicators: [ncclComm_t; 2] = communicators();
        let streams = [0, 1].map(|gpu| driver.stream(gpu, 4096));
        assert_eq!(ncclGroupStart(), SUCCESS);
        for (communicator, (stream, memory)) in communicators.into_iter().zip(streams) {
            // SAFETY: live memory.
            let called = unsafe { ncclAllReduce(memory, memory, 64, FLOAT, 0, communicator, stream) };
            assert_eq!(called, SUCCESS, "{}", last_error(null_mut()));
        }
        assert_eq!(ncclGroupEnd(), SUCCESS, "{}", last_error(null_mut()));
        for communicator in communicators {
            assert_eq!(ncclCommDestroy(communicator), SUCCESS, "{}", last_error(null_mut()));
        }
        let log = std::env::var_os("NCCL_DEBUG_FILE").expect("it is set");
        let log = std::fs::read_to_string(log).expect("it was written");
        let told = log.lines().find(|line| line.contains("goes through the host, because of"));
        assert!(told.is_some_and(|line| line.contains("install driver 550 (CUDA 12.4) or newer")), "{log}");
        assert!(!log.contains("copy engines"), "{log}");
    });
    let _ = std::fs::remove_file(log);
}
