//! Calls on GPUs, over a driver that has none: see tests/driver.c. Each test is a process of its own, which
//! has loaded it.

mod streams;

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::path::Path;
use std::process::Command;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::abi::{cudaStream_t, ncclComm_t, ncclDataType_t, ncclResult_t, ncclUniqueId};
use crate::collective::{ncclAllReduce, ncclBroadcast};
use crate::create::{ncclCommInitAll, ncclCommInitRank};
use crate::end::{ncclCommAbort, ncclCommDestroy, ncclCommFinalize};
use crate::error::{SUCCESS, Status, ncclGetLastError, result};
use crate::group::{ncclGroupEnd, ncclGroupStart};
use crate::memory::{NCCL_WIN_COLL_SYMMETRIC, ncclCommWindowRegister};
use crate::one_sided::{ncclPutSignal, ncclSignal};
use crate::point_to_point::{ncclRecv, ncclSend};
use crate::query::ncclCommGetAsyncError;
use crate::unique_id::ncclGetUniqueId;

const SOON: Duration = Duration::from_secs(30);
const INT: ncclDataType_t = 2;
const FLOAT: ncclDataType_t = 7;

/// Runs `body`, of the test of this name, in a process that finds the driver, with these settings.
fn over_driver(name: &str, settings: &[(&str, &str)], body: fn(&Driver)) {
    const IS_THERE: &str = "UNISONO_TEST_DRIVER";
    if std::env::var_os(IS_THERE).is_some() {
        return body(&Driver::load());
    }
    let folder = std::env::temp_dir().join(format!(
        "unisono-driver-{}-{}",
        std::process::id(),
        name.replace("::", "-")
    ));
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

    /// The next call of this kind but so many is refused.
    fn refuse(&self, calls: &CStr, after: c_int) {
        // SAFETY: an int of the driver's, which it reads like this.
        let place = unsafe { AtomicI32::from_ptr(self.symbol(calls).cast()) };
        place.store(after, Ordering::SeqCst);
    }

    /// Takes that back. How many would have been left, below zero if it has been refused.
    fn refuse_no_more(&self, calls: &CStr) -> c_int {
        // SAFETY: as above.
        let place = unsafe { AtomicI32::from_ptr(self.symbol(calls).cast()) };
        place.swap(-1, Ordering::SeqCst)
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

    /// How many kernels each GPU was given.
    fn given(&self) -> [c_int; 2] {
        // SAFETY: ints of the driver's; no thread launches anything just now.
        unsafe { self.symbol(c"given").cast::<[c_int; 2]>().read() }
    }

    /// Whether the last kernel that each GPU was given is a courier.
    fn courier_is_last(&self) -> [c_int; 2] {
        // SAFETY: as above.
        unsafe { self.symbol(c"courier_is_last").cast::<[c_int; 2]>().read() }
    }

    /// What streams were given since they were asked for last.
    fn steps(&self) -> Vec<Step> {
        // SAFETY: an int of the driver's, and so many of its structs; no thread gives a stream anything just
        // now.
        unsafe {
            let count = self.symbol(c"step_count").cast::<c_int>().replace(0);
            assert!(count <= 1 << 14, "it notes no more");
            std::slice::from_raw_parts(self.symbol(c"steps").cast::<Step>(), count as usize).to_vec()
        }
    }

    /// Does something with a GPU current.
    fn on<T>(&self, gpu: c_int, body: impl FnOnce() -> T) -> T {
        type Retain = unsafe extern "C" fn(*mut isize, c_int) -> c_int;
        type Push = unsafe extern "C" fn(isize) -> c_int;
        type Pop = unsafe extern "C" fn(*mut isize) -> c_int;
        let mut context = 0;
        // SAFETY: the signatures are those of cuda.h.
        let (answers, pop) = unsafe {
            let retain: Retain = std::mem::transmute(self.symbol(c"cuDevicePrimaryCtxRetain"));
            let push: Push = std::mem::transmute(self.symbol(c"cuCtxPushCurrent_v2"));
            let pop: Pop = std::mem::transmute(self.symbol(c"cuCtxPopCurrent_v2"));
            ([retain(&mut context, gpu), push(context)], pop)
        };
        assert_eq!(answers, [0; 2]);
        let done = body();
        // SAFETY: live memory.
        assert_eq!(unsafe { pop(&mut context) }, 0);
        done
    }

    /// A stream of a GPU, and memory there.
    fn stream(&self, gpu: c_int, bytes: usize) -> (cudaStream_t, *mut c_void) {
        type Create = unsafe extern "C" fn(*mut cudaStream_t, c_uint, c_int) -> c_int;
        type Allocate = unsafe extern "C" fn(*mut *mut c_void, usize) -> c_int;
        let (mut stream, mut memory) = (null_mut(), null_mut());
        // SAFETY: the signatures are those of cuda.h.
        let answers = self.on(gpu, || unsafe {
            let create: Create = std::mem::transmute(self.symbol(c"cuStreamCreateWithPriority"));
            let allocate: Allocate = std::mem::transmute(self.symbol(c"cuMemAlloc_v2"));
            [create(&mut stream, 1, 0), allocate(&mut memory, bytes)]
        });
        assert_eq!(answers, [0; 2]);
        (stream, memory)
    }
}

/// What a stream was given, as the driver has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
struct Step {
    what: isize,
    stream: usize,
    of: usize,
}

/// Communicators of this process, one for each GPU.
fn communicators<const N: usize>() -> [ncclComm_t; N] {
    let mut made = [null_mut(); N];
    // SAFETY: live memory.
    let answer = unsafe { ncclCommInitAll(made.as_mut_ptr(), N as c_int, std::ptr::null()) };
    assert_eq!(answer, SUCCESS, "{}", last_error(null_mut()));
    made
}

/// What has become of it, as its polling tells.
/// The GPU of each rank of [`two_on_each_gpu`].
const GPUS_OF_TWO: [c_int; 4] = [0, 0, 1, 1];

/// The ranks of a communicator of which each GPU has two: they do not exchange.
fn two_on_each_gpu(driver: &Driver) -> [ncclComm_t; 4] {
    let (mut id, mut made) = (ncclUniqueId { internal: [0; 128] }, [null_mut(); 4]);
    // SAFETY: live memory.
    assert_eq!(unsafe { ncclGetUniqueId(&mut id) }, SUCCESS, "{}", last_error(null_mut()));
    assert_eq!(ncclGroupStart(), SUCCESS);
    for (rank, (gpu, place)) in GPUS_OF_TWO.into_iter().zip(&mut made).enumerate() {
        // SAFETY: live memory.
        let answer = driver.on(gpu, || unsafe { ncclCommInitRank(place, 4, id, rank as c_int) });
        assert_eq!(answer, SUCCESS, "{}", last_error(null_mut()));
    }
    assert_eq!(ncclGroupEnd(), SUCCESS, "{}", last_error(null_mut()));
    made
}

fn state_of(communicator: ncclComm_t) -> ncclResult_t {
    let mut state = SUCCESS;
    // SAFETY: live memory.
    assert_eq!(unsafe { ncclCommGetAsyncError(communicator, &mut state) }, SUCCESS);
    state
}

fn is_well(communicator: ncclComm_t) {
    assert_eq!(state_of(communicator), SUCCESS, "{}", last_error(communicator));
}

/// Waits until it has failed with what the driver has refused.
fn hears_of_the_driver(communicator: ncclComm_t) {
    let start = Instant::now();
    while state_of(communicator) == SUCCESS {
        assert!(start.elapsed() < SOON, "nobody has told it");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(state_of(communicator), result(Status::Cuda), "{}", last_error(communicator));
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
            state = state_of(communicator);
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

/// Nor of other ranks of it that the thread has: their kernels would wait.
#[test]
fn nothing_of_a_communicator_is_started_of_which_a_group_has_a_call_refused() {
    let name = "nothing_of_a_communicator_is_started_of_which_a_group_has_a_call_refused";
    over_driver(name, &[], |driver| {
        let (one, other): ([ncclComm_t; 2], [ncclComm_t; 2]) = (communicators(), communicators());
        let places = [0, 1].map(|gpu| driver.stream(gpu, 4096));
        let outputs = [0, 1].map(|gpu| driver.stream(gpu, 4096).1);
        // Each collective is a kernel, and all messages to others are one. So many collectives are more than
        // one turn.
        const COLLECTIVES: usize = 70;
        let call = |spoilt: Option<(usize, usize)>| {
            let before = driver.given();
            assert_eq!(ncclGroupStart(), SUCCESS);
            for (rank, (stream, memory)) in places.into_iter().enumerate() {
                let count = |place| if spoilt == Some((rank, place)) { 1025 } else { 64 };
                for place in 0..COLLECTIVES {
                    let dtype = [INT, FLOAT][place % 2];
                    // SAFETY: the driver's kernels touch no memory.
                    let called =
                        unsafe { ncclAllReduce(memory, memory, count(place), dtype, 0, one[rank], stream) };
                    assert_eq!(called, SUCCESS, "{}", last_error(null_mut()));
                }
                let (own, peer) = (rank as c_int, 1 - rank as c_int);
                let to_itself = count(COLLECTIVES + 1);
                // Two kernels that come first.
                for communicator in [one[rank], other[rank]] {
                    // SAFETY: as above.
                    let called = unsafe { ncclSignal(peer, 0, 0, 0, communicator, stream) };
                    assert_eq!(called, SUCCESS, "{}", last_error(null_mut()));
                }
                // SAFETY: as above.
                let called = unsafe {
                    [
                        ncclSend(memory, count(COLLECTIVES), FLOAT, peer, one[rank], stream),
                        ncclRecv(memory, 64, FLOAT, peer, one[rank], stream),
                        ncclSend(memory, to_itself, FLOAT, own, one[rank], stream),
                        ncclRecv(outputs[rank], to_itself, FLOAT, own, one[rank], stream),
                        ncclAllReduce(memory, memory, 64, FLOAT, 0, other[rank], stream),
                    ]
                };
                assert_eq!(called, [SUCCESS; 5], "{}", last_error(null_mut()));
            }
            let ended = ncclGroupEnd();
            let text = last_error(null_mut());
            match spoilt {
                None => assert_eq!(ended, SUCCESS, "{text}"),
                Some(_) => {
                    assert_eq!(ended, result(Status::InvalidArgument), "{text}");
                    assert!(text.contains("has 4096 bytes left in its allocation"), "{text}");
                }
            }
            let given = driver.given();
            [0, 1].map(|gpu| given[gpu] - before[gpu])
        };
        // The other communicator's alone.
        for place in [0, 1, COLLECTIVES - 1, COLLECTIVES] {
            for rank in [0, 1] {
                assert_eq!(call(Some((rank, place))), [2; 2], "rank {rank}, call {place}");
            }
        }
        // What goes to itself comes behind what is sent.
        for rank in [0, 1] {
            assert_eq!(call(Some((rank, COLLECTIVES + 1))), [3; 2], "rank {rank}");
        }
        assert_eq!(call(None), [COLLECTIVES as c_int + 4; 2]);
        one.into_iter().chain(other).for_each(is_well);
    });
}

/// As a call of the group that is refused, not as one that fails when others have been started.
#[test]
fn a_put_of_too_much_is_refused_in_its_group_and_nothing_of_that_is_sent() {
    let name = "a_put_of_too_much_is_refused_in_its_group_and_nothing_of_that_is_sent";
    over_driver(name, &[], |driver| {
        let communicators: [ncclComm_t; 2] = communicators();
        let places = [0, 1].map(|gpu| driver.stream(gpu, 4096));
        let mut windows = [null_mut(); 2];
        assert_eq!(ncclGroupStart(), SUCCESS);
        for (rank, (_, memory)) in places.into_iter().enumerate() {
            // SAFETY: live memory, also of the window's place.
            let registered = unsafe {
                let place = &mut windows[rank];
                ncclCommWindowRegister(communicators[rank], memory, 4096, place, NCCL_WIN_COLL_SYMMETRIC)
            };
            assert_eq!(registered, SUCCESS, "{}", last_error(null_mut()));
        }
        assert_eq!(ncclGroupEnd(), SUCCESS, "{}", last_error(null_mut()));
        let (stream, memory) = places[0];
        let put = |count, offset| {
            // SAFETY: the driver's copies touch no memory.
            unsafe {
                let (window, communicator) = (windows[0], communicators[0]);
                ncclPutSignal(memory, count, FLOAT, 1, window, offset, 0, 0, 0, communicator, stream)
            }
        };
        let before = driver.given();
        for (count, offset, what) in
            [(1025, 0, "has 4096 bytes left in its allocation"), (1024, 4, "do not lie in the window")]
        {
            assert_eq!(ncclGroupStart(), SUCCESS);
            // SAFETY: the stream lives.
            let signalled = unsafe { ncclSignal(1, 0, 0, 0, communicators[0], stream) };
            let answers = [signalled, put(count, offset)];
            let text = last_error(null_mut());
            assert_eq!(answers, [SUCCESS, result(Status::InvalidArgument)], "{text}");
            assert!(text.contains(what), "{text}");
            assert_eq!(ncclGroupEnd(), result(Status::InvalidArgument));
        }
        assert_eq!(driver.given(), before);
        assert_eq!(ncclGroupStart(), SUCCESS);
        assert_eq!([put(1024, 0), ncclGroupEnd()], [SUCCESS; 2], "{}", last_error(null_mut()));
        assert_eq!(driver.given()[0], before[0] + 1);
    });
}

/// Nobody would end them before their deadline.
#[test]
fn calls_of_other_ranks_of_the_thread_do_not_wait_for_a_refused_one_by_way_of_the_host() {
    let name = "calls_of_other_ranks_of_the_thread_do_not_wait_for_a_refused_one_by_way_of_the_host";
    over_driver(name, &[("UNISONO_P2P", "0"), ("UNISONO_NCCL_TIMEOUT", "60")], |driver| {
        let communicators: [ncclComm_t; 2] = communicators();
        let places = [0, 1].map(|gpu| driver.stream(gpu, 4096));
        let outputs = [0, 1].map(|gpu| driver.stream(gpu, 4096).1);
        let message = |rank: usize, count| {
            let ((stream, memory), communicator) = (places[rank], communicators[rank]);
            // SAFETY: what is longer than the memory is refused.
            unsafe {
                match rank {
                    0 => ncclSend(memory, count, INT, 1, communicator, stream),
                    _ => ncclRecv(outputs[rank], count, INT, 0, communicator, stream),
                }
            }
        };
        let sum = |rank: usize, count| {
            let ((stream, memory), communicator) = (places[rank], communicators[rank]);
            // SAFETY: as above.
            unsafe { ncclAllReduce(memory, outputs[rank], count, INT, 0, communicator, stream) }
        };
        type Call<'a> = &'a dyn Fn(usize, usize) -> ncclResult_t;
        let calls: [Call<'_>; 2] = [&message, &sum];
        for call in calls {
            for spoilt in [Some(0), Some(1), None] {
                let before = driver.given();
                assert_eq!(ncclGroupStart(), SUCCESS);
                for rank in [0, 1] {
                    for count in [1, if spoilt == Some(rank) { 1025 } else { 1 }] {
                        assert_eq!(call(rank, count), SUCCESS, "{}", last_error(null_mut()));
                    }
                }
                let ended = ncclGroupEnd();
                let text = last_error(null_mut());
                if spoilt.is_none() {
                    assert_eq!(ended, SUCCESS, "{text}");
                    continue;
                }
                assert_eq!(ended, result(Status::InvalidArgument), "{text}");
                assert!(text.contains("has 4096 bytes left in its allocation"), "{text}");
                assert_eq!(driver.given(), before, "nothing is begun");
            }
        }
        communicators.into_iter().for_each(is_well);
    });
}

/// Where a GPU with few queues has several of them, the thread waits for their calls.
#[test]
fn what_a_thread_waits_for_on_one_gpu_finds_the_calls_of_others_given() {
    let name = "what_a_thread_waits_for_on_one_gpu_finds_the_calls_of_others_given";
    let settings =
        [("UNISONO_P2P", "0"), ("CUDA_DEVICE_MAX_CONNECTIONS", "8"), ("UNISONO_NCCL_TIMEOUT", "30")];
    over_driver(name, &settings, |driver| {
        let communicators = two_on_each_gpu(driver);
        let places = GPUS_OF_TWO.map(|gpu| driver.stream(gpu, 256));
        // Of the first each learns where the others are.
        for round in 0..3 {
            assert_eq!(ncclGroupStart(), SUCCESS);
            for (communicator, (stream, memory)) in communicators.into_iter().zip(places) {
                // SAFETY: live memory.
                let called = unsafe { ncclAllReduce(memory, memory, 64, FLOAT, 0, communicator, stream) };
                assert_eq!(called, SUCCESS, "{}", last_error(null_mut()));
            }
            assert_eq!(ncclGroupEnd(), SUCCESS, "round {round}: {}", last_error(null_mut()));
            communicators.into_iter().for_each(is_well);
        }
    });
}

/// Else a rank with the group and one that calls the same one by one, the sums first, wait for each other.
#[test]
fn messages_between_gpus_come_behind_collectives_by_way_of_the_host_of_other_communicators() {
    let name = "messages_between_gpus_come_behind_collectives_by_way_of_the_host_of_other_communicators";
    over_driver(name, &[("UNISONO_NCCL_TIMEOUT", "60")], |driver| {
        let (exchanging, staged): ([ncclComm_t; 2], _) = (communicators(), two_on_each_gpu(driver));
        let places = GPUS_OF_TWO.map(|gpu| driver.stream(gpu, 256));
        let sums = || {
            for (communicator, (stream, memory)) in staged.into_iter().zip(places) {
                // SAFETY: live memory.
                let called = unsafe { ncclAllReduce(memory, memory, 64, FLOAT, 0, communicator, stream) };
                assert_eq!(called, SUCCESS, "{}", last_error(null_mut()));
            }
        };
        let messages = || {
            let [(sender, from), _, (receiver, to), _] = places;
            // SAFETY: as above.
            let called = unsafe {
                [
                    ncclSend(from, 64, FLOAT, 1, exchanging[0], sender),
                    ncclRecv(to, 64, FLOAT, 0, exchanging[1], receiver),
                ]
            };
            assert_eq!(called, [SUCCESS; 2], "{}", last_error(null_mut()));
        };
        for (calls, courier_is_last) in
            [(vec![&sums as &dyn Fn()], 1), (vec![&sums, &messages], 0), (vec![&messages, &sums], 0)]
        {
            assert_eq!(ncclGroupStart(), SUCCESS);
            calls.iter().for_each(|call| call());
            assert_eq!(ncclGroupEnd(), SUCCESS, "{}", last_error(null_mut()));
            assert_eq!(driver.courier_is_last(), [courier_is_last; 2]);
        }
        exchanging.into_iter().chain(staged).for_each(is_well);
    });
}

/// By way of the host, where calls of a group are begun one by one.
#[test]
fn what_stands_behind_a_refused_call_by_way_of_the_host_does_not_take_its_place() {
    let name = "what_stands_behind_a_refused_call_by_way_of_the_host_does_not_take_its_place";
    over_driver(name, &[("UNISONO_P2P", "0"), ("UNISONO_NCCL_TIMEOUT", "60")], |driver| {
        type Call = fn(c_int, *mut c_void, usize, ncclComm_t, cudaStream_t) -> ncclResult_t;
        let message: Call = |rank, memory, count, communicator, stream| {
            // SAFETY: what is longer than the memory is refused.
            unsafe {
                match rank {
                    0 => ncclSend(memory, count, INT, 1, communicator, stream),
                    _ => ncclRecv(memory, count, INT, 0, communicator, stream),
                }
            }
        };
        let broadcast: Call = |_, memory, count, communicator, stream| {
            // SAFETY: as above.
            unsafe { ncclBroadcast(memory, memory, count, INT, 0, communicator, stream) }
        };
        let communicators: [ncclComm_t; 2] = communicators();
        let communicators = communicators.map(|communicator| communicator.addr());
        for call in [message, broadcast] {
            // A group of two calls, the first of so many words; what it answers.
            let group = |rank: c_int, first: usize, (stream, memory): (usize, [usize; 2])| {
                let communicator = std::ptr::without_provenance_mut(communicators[rank as usize]);
                assert_eq!(ncclGroupStart(), SUCCESS);
                for (count, memory) in [first, 1].into_iter().zip(memory) {
                    let memory = std::ptr::with_exposed_provenance_mut(memory);
                    let called =
                        call(rank, memory, count, communicator, std::ptr::without_provenance_mut(stream));
                    assert_eq!(called, SUCCESS, "{}", last_error(null_mut()));
                }
                (ncclGroupEnd(), last_error(null_mut()))
            };
            // The driver's memory is the process's.
            let place = |gpu| {
                let made = [(); 2].map(|()| driver.stream(gpu, 4));
                (made[0].0.addr(), made.map(|(_, memory)| memory.expose_provenance()))
            };
            // SAFETY: an int there, which is read and written like this alone; couriers copy it.
            let word = |memory: usize| unsafe {
                AtomicI32::from_ptr(std::ptr::with_exposed_provenance_mut::<c_int>(memory))
            };
            let [from, to] = [place(0), place(1)];
            for (memory, value) in from.1.into_iter().zip([1, 2]) {
                word(memory).store(value, Ordering::SeqCst);
            }
            std::thread::scope(|scope| {
                let other = scope.spawn(|| group(1, 1, to));
                let (answer, text) = group(0, 2, from);
                assert_eq!(answer, result(Status::InvalidArgument), "{text}");
                assert!(text.contains("has 4 bytes left in its allocation"), "{text}");
                let (answer, text) = group(0, 1, from);
                assert_eq!(answer, SUCCESS, "{text}");
                let (answer, text) = other.join().expect("no panic");
                assert_eq!(answer, SUCCESS, "{text}");
            });
            // Their streams may not have come so far yet.
            let start = Instant::now();
            let mut received = [0; 2];
            while received.contains(&0) && start.elapsed() < SOON {
                std::thread::sleep(Duration::from_millis(1));
                received = to.1.map(|memory| word(memory).load(Ordering::SeqCst));
            }
            assert_eq!(received, [1, 2]);
        }
    });
}

/// They would wait for what stands behind it, which is not started.
#[test]
fn the_others_hear_that_the_driver_refuses_what_a_rank_sends_to_itself() {
    over_driver("the_others_hear_that_the_driver_refuses_what_a_rank_sends_to_itself", &[], |driver| {
        let (streams, output) = ([(); 2].map(|()| driver.stream(0, 4096)), driver.stream(0, 4096).1);
        let [(from, memory), (to, _)] = streams;
        for receives_on in [from, to] {
            let communicators: [ncclComm_t; 2] = communicators();
            let [own, other] = communicators;
            assert_eq!(ncclGroupStart(), SUCCESS);
            // SAFETY: the driver's copies and kernels touch no memory.
            let called = unsafe {
                [
                    ncclSend(memory, 64, FLOAT, 0, own, from),
                    ncclRecv(output, 64, FLOAT, 0, own, receives_on),
                    ncclSend(memory, 64, FLOAT, 1, own, from),
                ]
            };
            assert_eq!(called, [SUCCESS; 3], "{}", last_error(null_mut()));
            let before = driver.given();
            driver.refuse(c"records", 0);
            assert_eq!(ncclGroupEnd(), result(Status::Cuda), "{}", last_error(null_mut()));
            assert_eq!(driver.refuse_no_more(c"records"), -1);
            assert_eq!(driver.given(), before, "nothing is sent behind it");
            [own, other].into_iter().for_each(hears_of_the_driver);
        }
    });
}

/// Neither before the calls, which nothing would order, nor behind them, where the streams would go on before
/// they are done.
#[test]
fn a_communicator_fails_whose_streams_cannot_be_made_one() {
    over_driver("a_communicator_fails_whose_streams_cannot_be_made_one", &[], |driver| {
        const MANY: c_int = 1 << 20;
        let places = [0, 1].map(|gpu| [(); 2].map(|()| driver.stream(gpu, 4096)));
        // Of one communicator each rank has two streams meet, by two of these calls. How many are made.
        let group = |refused: &CStr, after: c_int, is_first: bool| {
            let (one, other): ([ncclComm_t; 2], [ncclComm_t; 2]) = (communicators(), communicators());
            assert_eq!(ncclGroupStart(), SUCCESS);
            for (rank, [(first, memory), (second, _)]) in places.into_iter().enumerate() {
                for (communicator, stream) in [(one, first), (one, second), (other, first)] {
                    // SAFETY: the driver's kernels touch no memory.
                    let called =
                        unsafe { ncclAllReduce(memory, memory, 64, FLOAT, 0, communicator[rank], stream) };
                    assert_eq!(called, SUCCESS, "{}", last_error(null_mut()));
                }
            }
            let before = driver.given();
            driver.refuse(refused, after);
            let (ended, left) = (ncclGroupEnd(), driver.refuse_no_more(refused));
            let (given, text) = (driver.given(), last_error(null_mut()));
            other.into_iter().for_each(is_well);
            if left < 0 {
                assert_eq!(ended, result(Status::Cuda), "{refused:?} {after}: {text}");
                one.into_iter().for_each(hears_of_the_driver);
            } else {
                assert_eq!(ended, SUCCESS, "{text}");
                one.into_iter().for_each(is_well);
            }
            // The two sums of one communicator are a kernel together.
            let kernels = if is_first { 1 } else { 2 };
            assert_eq!([0, 1].map(|gpu| given[gpu] - before[gpu]), [kernels; 2], "{refused:?} {after}");
            for communicator in one.into_iter().chain(other) {
                assert_eq!(ncclCommAbort(communicator), SUCCESS);
            }
            after - left
        };
        for refused in [c"records", c"waits"] {
            let count = group(refused, MANY, false);
            assert!(count >= 8, "{refused:?}: {count}");
            // The first and the last of each meeting.
            for (after, is_first) in [(0, true), (3, true), (count - 4, false), (count - 1, false)] {
                group(refused, after, is_first);
            }
        }
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
