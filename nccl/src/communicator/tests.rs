//! A communicator's life: its errors, its end, and what is still under way then.

use unisono::collective::request::{Counts, Kind, Request};
use unisono::communicator::Call;
use unisono::reduce::{DataType, Operator};
use unisono::rendezvous::store::Store;

use super::*;
use crate::abi::ncclResult_t;
use crate::collective::ncclAllReduce;
use crate::end::{ncclCommAbort, ncclCommDestroy};
use crate::error::{SUCCESS, result};
use crate::group::{ncclGroupEnd, ncclGroupStart};

fn options(rank: u32, store: Arc<HashStore>, timeout: Duration) -> Options {
    Options {
        rank,
        size: 2,
        rendezvous: Rendezvous::Store(store),
        name: "pair".into(),
        timeout,
        interface: None,
        transports: None,
        host: None,
    }
}

fn pair(rank: u32, store: Arc<HashStore>) -> Context {
    Context::create(options(rank, store, SOON)).expect("the ranks meet")
}

const SOON: Duration = Duration::from_secs(30);

/// What comes of `body`, which ends long before the ranks' own deadline.
fn soon<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> T {
    let (give, given) = std::sync::mpsc::channel();
    std::thread::spawn(move || give.send(body()));
    given.recv_timeout(2 * SOON).expect("it ends")
}

fn message(context: &Context, kind: Kind, bytes: &mut [u8]) -> Work {
    let request = Request {
        kind,
        input: bytes.as_ptr(),
        output: bytes.as_mut_ptr(),
        counts: Counts::Uniform(bytes.len() as u64),
        dtype: DataType::U8,
        operator: Operator::Sum,
        root: 1 - context.rank(),
    };
    // SAFETY: the callers keep the bytes until the work has ended.
    unsafe { context.start(&request, &Call::default()) }.expect("a message is started")
}

/// A message that fails does not fail its group, and its stream goes on: nobody else would tell.
#[test]
fn the_failure_of_a_message_is_the_communicators() {
    let store = Arc::new(HashStore::new());
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let context = pair(1, store.clone());
            let mut long = [7; 8];
            let _ = message(&context, Kind::Send, &mut long).wait(Deadline::NEVER);
            let mut short = [8; 4];
            let sent = message(&context, Kind::Send, &mut short).wait(Deadline::NEVER);
            sent.expect("a message of the right length");
            context
        });
        let communicator = Communicator::new(Place::Host(0), Config::unset(), Vec::new());
        communicator.meet(|_| Ok(Some(pair(0, store.clone()))));
        let context = communicator.group().expect("they have met");
        let (mut first, mut second) = ([0; 4], [0; 4]);
        // The second is behind the first on its stream, and well.
        let works = [&mut first, &mut second].map(|bytes| message(context, Kind::Receive, bytes));
        for work in &works {
            communicator.keep(5, [work.clone()]);
        }
        let _stays = sender.join().expect("no panic");
        let results = works.map(|work| work.wait(Deadline::NEVER));
        assert!(results[0].is_err() && results[1].is_ok(), "{results:?}");
        assert!(context.failure().is_none());
        assert_eq!(communicator.failure().as_ref(), results[0].as_ref().err());
        assert!(communicator.drain(Deadline::NEVER).is_err() && communicator.idle());
    });
}

/// One thread ends a communicator, and another one, which looks after it, is to abort it: nobody else knows
/// of the failure.
#[test]
fn the_failure_of_a_message_is_seen_while_another_thread_waits_for_the_rest() {
    let store = Arc::new(HashStore::new());
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| pair(1, store.clone()));
        let communicator = Communicator::new(Place::Host(0), Config::unset(), Vec::new());
        communicator.meet(|_| Ok(Some(pair(0, store.clone()))));
        let sender = sender.join().expect("no panic");
        let context = communicator.group().expect("they have met");
        let (mut first, mut second) = ([0; 4], [0; 4]);
        let works = [&mut first, &mut second].map(|bytes| message(context, Kind::Receive, bytes));
        communicator.keep(5, works.clone());
        let ended = communicator.clone();
        let drains = scope.spawn(move || ended.drain(Deadline::NEVER));
        // It has begun to wait by then, mostly.
        std::thread::sleep(Duration::from_millis(50));
        let mut long = [7; 8];
        let sent = message(&sender, Kind::Send, &mut long);
        let why = works[0].wait(Deadline::NEVER).expect_err("it is too long");
        let (failure, is_idle) = (communicator.failure(), communicator.idle());
        communicator.abort();
        let drained = drains.join().expect("no panic");
        let _ = sent.wait(Deadline::NEVER);
        assert_eq!((failure, is_idle), (Some(why.clone()), false));
        assert_eq!(drained, Err(why));
    });
}

/// Nobody has looked before.
#[test]
fn the_failure_of_a_message_that_ending_has_waited_for_is_the_communicators() {
    let store = Arc::new(HashStore::new());
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let context = pair(1, store.clone());
            let _ = message(&context, Kind::Send, &mut [7; 8]).wait(Deadline::NEVER);
            context
        });
        let communicator = Communicator::new(Place::Host(0), Config::unset(), Vec::new());
        communicator.meet(|_| Ok(Some(pair(0, store.clone()))));
        let mut bytes = [0; 4];
        let received = message(communicator.group().expect("they have met"), Kind::Receive, &mut bytes);
        communicator.keep(5, [received]);
        let drained = communicator.drain(Deadline::NEVER);
        let _stays = sender.join().expect("no panic");
        assert!(drained.is_err() && communicator.idle());
        assert_eq!(communicator.failure(), drained.err());
    });
}

/// Also if the others come after all.
#[test]
fn what_is_revoked_before_it_has_met_the_others_says_that_it_cannot_be_shrunk() {
    let config = Config { blocking: false, ..Config::unset() };
    let communicator = Communicator::new(Place::Host(0), config, Vec::new());
    let told = std::cell::RefCell::new(Vec::new());
    let handle = COMMUNICATORS.insert(communicator.clone());
    let ask = || {
        let (mut state, mut child, mut excluded) = (SUCCESS, std::ptr::null_mut(), 0);
        // SAFETY: live memory.
        let shrunk = unsafe {
            assert_eq!(crate::query::ncclCommGetAsyncError(handle, &mut state), SUCCESS);
            let config = std::ptr::null_mut();
            crate::create::ncclCommShrink(handle, &mut excluded, 1, &mut child, config, 0)
        };
        let why = communicator.group().map(Context::id).expect_err("it has not met them");
        assert_eq!(communicator.wait(), Err(revoked()));
        told.borrow_mut().push(([state, shrunk], why.text().to_owned()));
    };
    communicator.meet(|_| {
        assert_eq!(crate::end::ncclCommRevoke(handle, crate::end::NCCL_REVOKE_DEFAULT), SUCCESS);
        ask();
        Communicator::alone(&communicator).cloned().map(Some)
    });
    ask();
    COMMUNICATORS.take(handle);
    for (results, why) in told.take() {
        assert_eq!(results, [result(Status::InvalidUsage); 2], "{why}");
        assert!(why.contains("was revoked before it had met the other ranks"), "{why}");
    }
    // The others hear of it.
    assert_eq!(communicator.alone().map(|group| group.failure().is_some()), Ok(true));
}

#[test]
fn what_is_revoked_in_the_instant_in_which_it_meets_the_others_has_met_them() {
    let communicator = Communicator::new(Place::Host(0), Config::unset(), Vec::new());
    let context = communicator.alone().cloned();
    std::thread::scope(|scope| {
        // As whoever meets has it, and has seen that nobody has revoked it.
        let meeting = communicator.meeting();
        let revokes = scope.spawn(|| communicator.stop());
        while !communicator.is_stopped() {
            std::thread::yield_now();
        }
        let asks = [
            scope.spawn(|| communicator.group().map(Context::size)),
            scope.spawn(|| communicator.failure().map_or(Ok(1), Err)),
        ];
        std::thread::sleep(Duration::from_millis(50));
        let _ = communicator.met.set(context);
        drop(meeting);
        assert_eq!(asks.map(|asks| asks.join().expect("no panic")), [Ok(1), Ok(1)]);
        revokes.join().expect("no panic");
    });
}

#[test]
fn what_a_rank_is_to_send_to_itself_goes_nowhere_once_it_is_aborted() {
    let communicators = [(); 2].map(|()| Communicator::new(Place::Host(0), Config::unset(), Vec::new()));
    communicators[0].alone().expect("it needs nobody");
    communicators.iter().for_each(|communicator| communicator.abort());
    let failures = communicators.each_ref().map(|communicator| communicator.alone().map(Context::failure));
    let why = failures.map(|failure| failure.expect("it needs nobody").map(|error| error.status()));
    assert_eq!(why, [Some(Status::Aborted); 2]);
}

/// They wait for two hours otherwise, and so does the thread that meets them here.
#[test]
fn who_is_aborted_while_it_meets_the_others_goes_soon_and_they_hear_of_it() {
    let store = Arc::new(HashStore::new());
    let communicator = Communicator::new(Place::Host(0), Config::unset(), Vec::new());
    let meet = {
        let (communicator, options) = (communicator.clone(), options(0, store.clone(), MEETING));
        move || communicator.meet(|recall| Context::create_unless(recall, options, None).map(Some))
    };
    let meets = std::thread::spawn(meet);
    // It has come, and waits for the other.
    store.get("pair/0/rank/0", Deadline::after(SOON)).expect("it comes");
    communicator.abort();
    assert_eq!(communicator.wait(), Err(aborted()));
    soon(move || meets.join()).expect("no panic");
    assert_eq!(communicator.failure(), Some(aborted()));
    let late = options(1, store, MEETING);
    let late = soon(|| Context::create_unless(&Recall::default(), late, None).map(drop));
    let error = late.expect_err("there is nobody");
    assert_eq!(error.status(), Status::Aborted, "{error}");
    assert!(error.text().contains("rank 0 has called the meeting off"), "{error}");
}

#[test]
fn a_child_that_is_aborted_while_it_meets_the_others_goes_soon_and_they_hear_of_it() {
    for pause in [0, 50].map(Duration::from_millis) {
        let store = Arc::new(HashStore::new());
        let other = options(1, store.clone(), MEETING);
        let other = std::thread::spawn(|| Context::create(other));
        let parent = Context::create(options(0, store, MEETING)).expect("the ranks meet");
        let other = other.join().expect("no panic").expect("the ranks meet");
        let child = Communicator::new(Place::Host(0), Config::unset(), Vec::new());
        let meet = {
            let (parent, child) = (parent.clone(), child.clone());
            move || {
                child.meet(|recall| parent.begin_regroup("pair", &[0, 1])?.meet_unless(recall).map(Some));
            }
        };
        let meets = std::thread::spawn(meet);
        std::thread::sleep(pause);
        child.abort();
        soon(move || meets.join()).expect("no panic");
        assert_eq!(child.failure(), Some(aborted()));
        let late = soon(move || other.regroup("pair", &[0, 1]).map(drop));
        assert_eq!(late.map_err(|error| error.status()), Err(Status::Aborted));
        assert!(parent.failure().is_none());
    }
}

/// Ranks 0 and 1 in host memory, with a handle of rank 0's.
fn pair_with_a_handle() -> (ncclComm_t, Context) {
    let store = Arc::new(HashStore::new());
    let other = std::thread::spawn({
        let store = store.clone();
        move || pair(1, store)
    });
    let communicator = Communicator::new(Place::Host(0), Config::unset(), Vec::new());
    communicator.meet(|_| Ok(Some(pair(0, store))));
    (communicator.give_handle(), other.join().expect("no panic"))
}

/// Has a thread of its own sum with rank 1, alone or as one of a group, and ends when it waits for that.
fn sums(comm: ncclComm_t, in_group: bool) -> std::thread::JoinHandle<ncclResult_t> {
    let number = comm.addr();
    let call = std::thread::spawn(move || {
        let (comm, x, mut y) = (std::ptr::without_provenance_mut(number), [1i32; 2], [0i32; 2]);
        let sum = |at: usize, y: *mut i32| {
            // SAFETY: live memory until the call is complete.
            unsafe {
                ncclAllReduce(
                    x[at..].as_ptr().cast(),
                    y.wrapping_add(at).cast(),
                    1,
                    2,
                    0,
                    comm,
                    std::ptr::null_mut(),
                )
            }
        };
        if !in_group {
            return sum(0, y.as_mut_ptr());
        }
        assert_eq!(ncclGroupStart(), SUCCESS);
        assert_eq!([sum(0, y.as_mut_ptr()), sum(1, y.as_mut_ptr())], [SUCCESS; 2]);
        ncclGroupEnd()
    });
    let communicator = find(comm).expect("a communicator");
    while communicator.waits.are_over() {
        std::thread::sleep(Duration::from_millis(1));
    }
    call
}

/// Has a thread of its own destroy it, and ends when that has begun.
fn destroys(comm: ncclComm_t) -> std::thread::JoinHandle<ncclResult_t> {
    let communicator = find(comm).expect("a communicator");
    let (number, holders) = (comm.addr(), Arc::strong_count(&communicator));
    let destroys = std::thread::spawn(move || ncclCommDestroy(std::ptr::without_provenance_mut(number)));
    while Arc::strong_count(&communicator) == holders {
        std::thread::sleep(Duration::from_millis(1));
    }
    destroys
}

/// The header says so, and that it can be aborted meanwhile.
#[test]
fn who_destroys_a_communicator_waits_for_the_calls_of_other_threads() {
    for in_group in [false, true] {
        let (comm, other) = pair_with_a_handle();
        let (call, destroys) = (sums(comm, in_group), destroys(comm));
        std::thread::sleep(Duration::from_millis(50));
        assert!(!destroys.is_finished() && !call.is_finished());
        assert!(!find(comm).expect("it has its handle").idle());
        other.abort();
        let ended = soon(move || (call.join().expect("no panic"), destroys.join().expect("no panic")));
        assert_eq!(ended, (result(Status::Aborted), SUCCESS));
        assert!(find(comm).is_err());
    }
}

/// The driver may be waiting for what the abort is to end.
#[test]
fn who_aborts_a_communicator_does_not_wait_for_who_asks_the_driver_about_its_works() {
    let (comm, other) = pair_with_a_handle();
    let communicator = find(comm).expect("it has its handle");
    let asks = communicator.started();
    let comm = comm.addr();
    assert_eq!(soon(move || ncclCommAbort(std::ptr::without_provenance_mut(comm))), SUCCESS);
    drop(asks);
    assert_eq!(communicator.failure().map(|error| error.status()), Some(Status::Aborted));
    let start = std::time::Instant::now();
    while other.failure().is_none() {
        assert!(start.elapsed() < SOON, "it may have something under way, so the other is told");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_communicator_that_is_destroyed_during_a_call_can_be_aborted() {
    let (comm, _other) = pair_with_a_handle();
    let (call, destroys) = (sums(comm, false), destroys(comm));
    std::thread::sleep(Duration::from_millis(50));
    assert!(!destroys.is_finished());
    assert_eq!(ncclCommAbort(comm), SUCCESS);
    let ended = soon(move || (call.join().expect("no panic"), destroys.join().expect("no panic")));
    assert_eq!(ended, (result(Status::Aborted), SUCCESS));
}

/// Those keep it from being let go of.
#[test]
fn who_waits_for_an_aborted_rank_hears_while_a_thread_has_a_group_with_its_calls() {
    type Call = fn(ncclComm_t, &mut ncclComm_t) -> ncclResult_t;
    let send: Call = |comm, _| {
        // SAFETY: nothing is sent.
        unsafe {
            crate::point_to_point::ncclSend([7u8; 4].as_ptr().cast(), 4, 1, 1, comm, std::ptr::null_mut())
        }
    };
    let split: Call = |comm, child| {
        // SAFETY: the place lives until the group ends.
        unsafe { crate::create::ncclCommSplit(comm, 0, 0, child, std::ptr::null_mut()) }
    };
    let finalize: Call = |comm, _| crate::end::ncclCommFinalize(comm);
    for call in [send, split, finalize] {
        let (comm, other) = pair_with_a_handle();
        let (tell, told) = std::sync::mpsc::channel();
        let (end, ends) = std::sync::mpsc::channel::<()>();
        let number = comm.addr();
        let thread = std::thread::spawn(move || {
            let mut child = std::ptr::null_mut();
            assert_eq!(ncclGroupStart(), SUCCESS);
            assert_eq!(call(std::ptr::without_provenance_mut(number), &mut child), SUCCESS);
            tell.send(()).expect("the test waits");
            let _ = ends.recv_timeout(2 * SOON);
            ncclGroupEnd()
        });
        told.recv_timeout(SOON).expect("it has called");
        let mut bytes = [0; 4];
        let receives = message(&other, Kind::Receive, &mut bytes);
        assert_eq!(ncclCommAbort(comm), SUCCESS);
        let error = receives.wait(Deadline::NEVER).expect_err("nothing is sent");
        // Not at its deadline; and what needs nothing of this rank goes on.
        assert_eq!((error.status(), other.failure()), (Status::PeerFailed, None), "{error}");
        end.send(()).expect("it waits");
        assert_ne!(soon(move || thread.join().expect("no panic")), SUCCESS);
    }
}
