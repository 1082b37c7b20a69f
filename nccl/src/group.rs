//! Groups: between ncclGroupStart and the outermost ncclGroupEnd a thread's calls are kept, and then started
//! together.

use std::cell::RefCell;
use std::mem::{ManuallyDrop, replace};
use std::sync::Arc;

use unisono::sys::thread_end::ThreadEnd;

use crate::abi::{SIM_MAGIC, ncclResult_t, ncclSimInfo_t};
use crate::communicator::Communicator;
use crate::end;
use crate::engine::{self, Calls, Launch, OneSided};
use crate::error::{Error, Result, SUCCESS, Status, fail, guard, guard_or, result};
use crate::estimate;
use crate::setup::{self, Joining, Sharing};

/// What a thread has called in its group so far.
struct Group {
    depth: u32,
    error: Option<Error>,
    joinings: Vec<Joining>,
    sharings: Vec<Sharing>,
    suspensions: Vec<Sharing>,
    calls: Calls,
    sent: Vec<OneSided>,
    waits: Vec<OneSided>,
    finalized: Vec<Arc<Communicator>>,
    /// Without a handle; of those that the group has called before.
    destroyed: Vec<Arc<Communicator>>,
}

impl Group {
    const NONE: Group = Group {
        depth: 0,
        error: None,
        joinings: Vec::new(),
        sharings: Vec::new(),
        suspensions: Vec::new(),
        calls: Calls::NONE,
        sent: Vec::new(),
        waits: Vec::new(),
        finalized: Vec::new(),
        destroyed: Vec::new(),
    };
}

/// The group of a thread.
struct Kept {
    group: Group,
    /// Whether it is given up when the thread ends.
    is_armed: bool,
}

thread_local! {
    /// Not dropped with its thread, but given up behind all that runs there: destructors of the program, and
    /// what runs at the end of the process, make calls, too.
    static KEPT: RefCell<ManuallyDrop<Kept>> =
        const { RefCell::new(ManuallyDrop::new(Kept { group: Group::NONE, is_armed: false })) };
}

static GIVE_UP: ThreadEnd = ThreadEnd::new(|| {
    let kept =
        KEPT.with_borrow_mut(|kept| replace(&mut **kept, Kept { group: Group::NONE, is_armed: false }));
    if kept.group.depth > 0 {
        kept.group.give_up();
    }
});

/// Starts a group on this thread. Calls up to the outermost ncclGroupEnd are started together there. A thread
/// that ends before starts nothing, and communicators that it was to make answer ncclInvalidUsage.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> ncclResult_t {
    guard(|| {
        KEPT.with_borrow_mut(|kept| {
            if !kept.is_armed {
                GIVE_UP.arm();
                kept.is_armed = true;
            }
            kept.group.depth += 1;
        });
        Ok(SUCCESS)
    })
}

/// Ends a group. The outermost end starts everything that was called since. If one of these calls has failed,
/// it starts nothing and answers with the first one's error. What fails only as it is started, since
/// its memory is too short, say, does not keep calls of other communicators from starting. Of its own nothing
/// is started behind it, which would take its place on the other ranks, or signal what was not put; where GPUs
/// exchange, and where this thread has several of its ranks, nothing that others would wait for is if the
/// memory of any of that is refused. The answer is then an error of communicators that were to be made, of
/// windows, of other calls or of finalizing, in this order. It returns once all is enqueued on the streams;
/// communicators that are made in the group have met when it returns or, if they do not block, answer
/// ncclInProgress.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> ncclResult_t {
    guard(|| match end("ncclGroupEnd")? {
        None => Ok(SUCCESS),
        Some(group) => group.run(),
    })
}

/// Ends a group as ncclGroupEnd does, but starts nothing: `*simInfo` tells how many microseconds it would
/// take, roughly.
///
/// The estimate is for ranks that share NVLink, by the latency and the bytes of each call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGroupSimulateEnd(simInfo: *mut ncclSimInfo_t) -> ncclResult_t {
    guard(|| {
        let mut ended = end("ncclGroupSimulateEnd")?;
        // Whatever becomes of this call: nobody else will make them meet.
        if let Some(group) = &mut ended {
            group.joinings.drain(..).for_each(Joining::discard);
        }
        if simInfo.is_null() {
            fail!(InvalidArgument, "simInfo is NULL");
        }
        // SAFETY: the contract of the header: an initialised struct.
        let info = unsafe { &mut *simInfo };
        if info.magic != SIM_MAGIC || info.size < size_of::<ncclSimInfo_t>() {
            fail!(InvalidArgument, "simInfo is not initialised: use NCCL_SIM_INFO_INITIALIZER");
        }
        if let Some(group) = ended {
            if let Some(error) = group.error {
                return Err(error);
            }
            info.estimatedTime = estimate::microseconds(&group.calls);
        }
        Ok(SUCCESS)
    })
}

/// One step out. The group, if that was the outermost.
fn end(name: &str) -> Result<Option<Group>> {
    KEPT.with_borrow_mut(|kept| match kept.group.depth {
        0 => fail!(InvalidUsage, "{name} without ncclGroupStart on this thread"),
        1 => Ok(Some(replace(&mut kept.group, Group::NONE))),
        _ => {
            kept.group.depth -= 1;
            Ok(None)
        }
    })
}

/// Runs the body of a call that may be in a group: its failure is the group's, too.
pub(crate) fn in_group(body: impl FnOnce() -> Result<ncclResult_t>) -> ncclResult_t {
    let note = |error: &Error| {
        KEPT.with_borrow_mut(|kept| {
            let group = &mut kept.group;
            if group.depth > 0 && group.error.is_none() {
                group.error = Some(error.clone());
            }
        });
        result(error.status())
    };
    guard_or(note, body)
}

/// Keeps `thing` for the end of this thread's group; outside of a group it comes back, to be done now.
fn keep<T>(thing: T, keep: impl FnOnce(&mut Group, T)) -> Option<T> {
    KEPT.with_borrow_mut(|kept| match kept.group.depth {
        0 => Some(thing),
        _ => {
            keep(&mut kept.group, thing);
            None
        }
    })
}

/// Starts a call, now or at the end of the group.
pub(crate) fn launch(launch: Launch) -> Result<ncclResult_t> {
    let mut kept = Ok(());
    let now = keep(launch, |group, launch| kept = group.calls.add(launch));
    now.map_or(kept, engine::launch_one).map(|()| SUCCESS)
}

/// Puts or signals, now or at the end of the group.
pub(crate) fn put_or_signal(
    communicator: Arc<Communicator>,
    stream: usize,
    start: impl FnOnce() -> Result<()> + 'static,
) -> Result<ncclResult_t> {
    one_sided(OneSided { communicator, stream, start: Box::new(start) }, |group| &mut group.sent)
}

/// Waits for signals, now or at the end of the group, behind what it puts and signals: others may wait for
/// that first.
pub(crate) fn wait_signals(
    communicator: Arc<Communicator>,
    stream: usize,
    start: impl FnOnce() -> Result<()> + 'static,
) -> Result<ncclResult_t> {
    one_sided(OneSided { communicator, stream, start: Box::new(start) }, |group| &mut group.waits)
}

fn one_sided(one: OneSided, list: fn(&mut Group) -> &mut Vec<OneSided>) -> Result<ncclResult_t> {
    let now = keep(one, |group, one| list(group).push(one));
    now.map_or(Ok(()), engine::start_one_sided).map(|()| SUCCESS)
}

/// Whether this thread is in a group.
pub(crate) fn is_open() -> bool {
    KEPT.with_borrow(|kept| kept.group.depth > 0)
}

/// Shares a window, now or at the end of the group.
pub(crate) fn share(sharing: Sharing) -> Result<()> {
    let now = keep(sharing, |group, sharing| group.sharings.push(sharing));
    now.map_or(Ok(()), |sharing| setup::share(vec![sharing]))
}

/// Suspends a communicator, now or at the end of the group, behind what the group has called.
pub(crate) fn suspend(sharing: Sharing) -> Result<()> {
    let now = keep(sharing, |group, sharing| group.suspensions.push(sharing));
    now.map_or(Ok(()), |sharing| setup::share(vec![sharing]))
}

/// Finalizes a communicator, now or at the end of the group.
pub(crate) fn finalize(communicator: Arc<Communicator>) -> Result<ncclResult_t> {
    end::finish(keep(communicator, |group, communicator| group.finalized.push(communicator)))
}

/// A communicator was destroyed: what the group has called before is waited for at its end.
pub(crate) fn destroy(communicator: Arc<Communicator>) {
    keep(communicator, |group, communicator| group.destroyed.push(communicator));
}

/// Makes a communicator meet, now or at the end of the group.
pub(crate) fn join(joining: Joining) -> Result<ncclResult_t> {
    join_all(vec![joining])
}

/// Makes communicators meet, which may wait for each other, now or at the end of the group.
pub(crate) fn join_all(joinings: Vec<Joining>) -> Result<ncclResult_t> {
    setup::meet(keep(joinings, |group, joinings| group.joinings.extend(joinings)).unwrap_or_default())
}

impl Group {
    fn run(self) -> Result<ncclResult_t> {
        if let Some(error) = self.error {
            self.joinings.into_iter().for_each(Joining::discard);
            return Err(error);
        }
        let met = setup::meet(self.joinings);
        let shared = setup::share(self.sharings);
        let mut one_sided = self.sent;
        one_sided.extend(self.waits);
        let launched = engine::launch_all(self.calls, one_sided);
        // Other ranks wait for this one, whatever has failed.
        let suspended = setup::share(self.suspensions);
        let met = met?;
        shared?;
        launched?;
        suspended?;
        // Not behind a failure: calls of other ranks of this thread may wait for one that was not started.
        let finalized = end::finish(self.finalized)?;
        self.destroyed.iter().for_each(|communicator| end::drain_destroyed(communicator));
        Ok(if met == SUCCESS { finalized } else { met })
    }

    /// Its thread has ended: nobody will start it.
    fn give_up(self) {
        log::warn!(
            "a thread has ended before ncclGroupEnd: nothing of its group is started ({} calls, {} communicators, {} windows or suspensions)",
            self.calls.len() + self.sent.len() + self.waits.len(),
            self.joinings.len(),
            self.sharings.len() + self.suspensions.len()
        );
        for joining in self.joinings {
            joining.give_up(Error::new(
                Status::InvalidUsage,
                "the thread that was to make the communicator has ended in its group: call ncclGroupEnd there first",
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU8, Ordering};
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use unisono::collective::request::{Counts, Kind, Request};
    use unisono::communicator::{Context, Options, Rendezvous};
    use unisono::reduce::{DataType, Operator};
    use unisono::rendezvous::hash::HashStore;

    use super::*;
    use crate::abi::ncclComm_t;
    use crate::collective::ncclAllReduce;
    use crate::communicator::{COMMUNICATORS, Phase};
    use crate::config::Config;
    use crate::place::Place;
    use crate::setup::Ranks;

    fn communicator_to_be() -> Arc<Communicator> {
        Communicator::new(Place::Host(0), Config::unset(), Vec::new())
    }

    /// One of this rank alone.
    fn communicator() -> Arc<Communicator> {
        let communicator = communicator_to_be();
        communicator.meet(|_| Communicator::alone(&communicator).cloned().map(Some));
        communicator
    }

    fn call(communicator: &Arc<Communicator>) -> Launch {
        let request = Request {
            kind: Kind::Allreduce,
            input: [1u8].as_ptr(),
            output: std::ptr::dangling_mut(),
            counts: Counts::Uniform(1),
            dtype: DataType::U8,
            operator: Operator::Sum,
            root: 0,
        };
        Launch { communicator: communicator.clone(), request, stream: 0, factor: None, max_blocks: 0 }
    }

    #[test]
    fn a_thread_that_ends_in_a_group_leaves_nothing_of_its_calls() {
        let communicator = communicator();
        thread::scope(|scope| {
            let body = || {
                assert_eq!([ncclGroupStart(), ncclGroupStart()], [SUCCESS; 2]);
                for _ in 0..10 {
                    launch(call(&communicator)).expect("it is kept");
                }
                assert_eq!(Arc::strong_count(&communicator), 11);
            };
            // The end of the closure is not yet that of the thread.
            scope.spawn(body).join().expect("no panic");
        });
        assert_eq!(Arc::strong_count(&communicator), 1);
    }

    #[test]
    fn a_thread_that_ends_in_a_group_says_so_to_whoever_waits_for_its_communicators() {
        let (parent, child) = (communicator(), communicator_to_be());
        thread::scope(|scope| {
            let body = || {
                assert_eq!(ncclGroupStart(), SUCCESS);
                let mut place = std::ptr::null_mut();
                let ranks = Ranks::Alike(parent.clone(), Some(0), 0);
                // SAFETY: it lives as long as what is called here.
                let joining = unsafe { Joining::new(child.clone(), &mut place, ranks) };
                assert_eq!(join(joining), Ok(SUCCESS));
                assert!(child.met().is_none());
            };
            scope.spawn(body).join().expect("no panic");
        });
        let error = child.wait().expect_err("nobody makes it");
        assert_eq!(error.status(), Status::InvalidUsage);
        assert!(error.text().contains("has ended in its group"), "{error}");
        assert_eq!(Arc::strong_count(&parent), 1);
    }

    /// What comes of two allreduces, and of what ends the communicator behind them, in one group.
    fn group_that_ends_with(end: extern "C" fn(ncclComm_t) -> ncclResult_t) -> ([ncclResult_t; 5], [u8; 4]) {
        let communicator = communicator();
        let handle = COMMUNICATORS.insert(communicator.clone());
        let (from, mut to) = ([7u8, 8, 9, 10], [0u8; 4]);
        // SAFETY: live memory.
        let call = |place: &mut [u8]| unsafe {
            let (from, to) = (from.as_ptr().cast(), place.as_mut_ptr().cast());
            ncclAllReduce(from, to, place.len(), 1, 0, handle, std::ptr::null_mut())
        };
        let started = ncclGroupStart();
        let (first, second) = to.split_at_mut(2);
        let called = [call(first), call(second)];
        let ended = end(handle);
        let group = ncclGroupEnd();
        COMMUNICATORS.take(handle);
        // It was kept for the group only.
        assert_eq!(Arc::strong_count(&communicator), 1);
        ([started, called[0], called[1], ended, group], to)
    }

    #[test]
    fn calls_of_a_group_that_finalizes_their_communicator_behind_them_are_made() {
        assert_eq!(group_that_ends_with(end::ncclCommFinalize), ([SUCCESS; 5], [7, 8, 7, 8]));
    }

    #[test]
    fn calls_of_a_group_that_destroys_their_communicator_behind_them_are_made() {
        assert_eq!(group_that_ends_with(end::ncclCommDestroy), ([SUCCESS; 5], [7, 8, 7, 8]));
    }

    #[test]
    fn a_call_alone_in_a_group_that_finalizes_its_communicator_is_made() {
        let communicator = communicator();
        let handle = COMMUNICATORS.insert(communicator);
        let (from, mut to) = ([7u8], [0u8]);
        let (input, output, stream) = (from.as_ptr().cast(), to.as_mut_ptr().cast(), std::ptr::null_mut());
        assert_eq!(ncclGroupStart(), SUCCESS);
        // SAFETY: live memory.
        let called = unsafe { ncclAllReduce(input, output, 1, 1, 0, handle, stream) };
        assert_eq!([called, end::ncclCommFinalize(handle), ncclGroupEnd()], [SUCCESS; 3]);
        // SAFETY: as above.
        let late = unsafe { ncclAllReduce(input, output, 1, 1, 0, handle, stream) };
        COMMUNICATORS.take(handle);
        assert_eq!((late, to), (result(Status::InvalidUsage), from));
    }

    #[test]
    fn a_group_starts_nothing_on_a_communicator_that_was_revoked_since_it_was_called() {
        let communicator = communicator();
        let handle = COMMUNICATORS.insert(communicator);
        let (from, mut to) = ([7u8; 2], [0u8; 2]);
        let (input, output, stream) = (from.as_ptr().cast(), to.as_mut_ptr().cast(), std::ptr::null_mut());
        assert_eq!(ncclGroupStart(), SUCCESS);
        // SAFETY: live memory.
        let called = [0, 1].map(|_| unsafe { ncclAllReduce(input, output, 2, 1, 0, handle, stream) });
        let revoked = end::ncclCommRevoke(handle, end::NCCL_REVOKE_DEFAULT);
        let ended = ncclGroupEnd();
        COMMUNICATORS.take(handle);
        assert_eq!((called, revoked, to), ([SUCCESS; 2], SUCCESS, [0; 2]));
        assert_eq!(ended, result(Status::InvalidUsage));
    }

    #[test]
    fn what_a_rank_sends_to_itself_is_not_sent_on_a_communicator_that_was_ended_since() {
        let revoke = |handle| end::ncclCommRevoke(handle, end::NCCL_REVOKE_DEFAULT);
        let abort = |handle| end::ncclCommAbort(handle);
        let ends: [(&dyn Fn(ncclComm_t) -> ncclResult_t, Status); 2] =
            [(&revoke, Status::InvalidUsage), (&abort, Status::Aborted)];
        for (end, why) in ends {
            let communicator = communicator_to_be();
            // The group of another: its own is the one by which it sends to itself.
            communicator.meet(|_| communicator_to_be().alone().cloned().map(Some));
            let handle = COMMUNICATORS.insert(communicator);
            let (from, mut to) = ([7u8], [0u8]);
            let (input, output, stream) =
                (from.as_ptr().cast(), to.as_mut_ptr().cast(), std::ptr::null_mut());
            assert_eq!(ncclGroupStart(), SUCCESS);
            // SAFETY: live memory.
            let called = unsafe {
                [
                    crate::point_to_point::ncclSend(input, 1, 1, 0, handle, stream),
                    crate::point_to_point::ncclRecv(output, 1, 1, 0, handle, stream),
                ]
            };
            let ended = [end(handle), ncclGroupEnd()];
            COMMUNICATORS.take(handle);
            assert_eq!((called, ended, to), ([SUCCESS; 2], [SUCCESS, result(why)], [0]));
        }
    }

    const SOON: Duration = Duration::from_secs(10);

    /// The communicators of two ranks.
    fn pair() -> [Arc<Communicator>; 2] {
        let store = Arc::new(HashStore::new());
        let meet = |rank| {
            let options = Options {
                rank,
                size: 2,
                rendezvous: Rendezvous::Store(store.clone()),
                name: String::new(),
                timeout: 3 * SOON,
                interface: None,
                transports: None,
                host: None,
            };
            thread::spawn(|| {
                let communicator = communicator_to_be();
                communicator.meet(|_| Context::create(options).map(Some));
                communicator
            })
        };
        [0, 1].map(meet).map(|meets| meets.join().expect("no panic"))
    }

    /// The sum of what both ranks have at `place`, to be there.
    fn sum(communicator: &Arc<Communicator>, place: &AtomicU8) -> Launch {
        let mut launch = call(communicator);
        (launch.request.input, launch.request.output) = (place.as_ptr().cast_const(), place.as_ptr());
        launch
    }

    fn answers(rank: thread::ScopedJoinHandle<'_, [Result<ncclResult_t>; 3]>) {
        assert_eq!(rank.join().expect("no panic"), [(); 3].map(|()| Ok(SUCCESS)));
    }

    /// In host memory a call is complete when it returns, as it is for what a stream is given next. There are
    /// no signals: a channel stands for them.
    #[test]
    fn what_a_group_waits_for_is_there_when_its_calls_begin() {
        static PLACES: [AtomicU8; 2] = [AtomicU8::new(1), AtomicU8::new(0)];
        let ([first, second], (signal, signalled)) = (pair(), mpsc::channel());
        thread::scope(|scope| {
            let puts = scope.spawn(|| {
                let put = put_or_signal(first.clone(), 0, move || {
                    PLACES[1].store(4, Ordering::SeqCst);
                    signal.send(()).expect("the other waits");
                    Ok(())
                });
                [put, launch(sum(&first, &PLACES[0])), Ok(SUCCESS)]
            });
            let waits = scope.spawn(|| {
                assert_eq!(ncclGroupStart(), SUCCESS);
                let waits = wait_signals(second.clone(), 0, move || {
                    signalled.recv_timeout(SOON).expect("the other signals");
                    assert_eq!(PLACES[1].load(Ordering::SeqCst), 4, "the sum is there before what it is of");
                    Ok(())
                });
                [waits, launch(sum(&second, &PLACES[1])), Ok(ncclGroupEnd())]
            });
            [puts, waits].into_iter().for_each(answers);
        });
        assert_eq!(PLACES.each_ref().map(|place| place.load(Ordering::SeqCst)), [5; 2]);
    }

    #[test]
    fn what_a_group_puts_is_sent_before_its_calls_and_as_it_was() {
        static PLACES: [AtomicU8; 2] = [AtomicU8::new(1), AtomicU8::new(4)];
        let ([first, second], (put, received)) = (pair(), mpsc::channel());
        thread::scope(|scope| {
            let puts = scope.spawn(|| {
                assert_eq!(ncclGroupStart(), SUCCESS);
                let puts = put_or_signal(first.clone(), 0, move || {
                    put.send(PLACES[0].load(Ordering::SeqCst)).expect("the other waits");
                    Ok(())
                });
                [puts, launch(sum(&first, &PLACES[0])), Ok(ncclGroupEnd())]
            });
            let waits = scope.spawn(move || {
                let got = received.recv_timeout(SOON);
                // Also if nothing has come: the other waits for it.
                let summed = launch(sum(&second, &PLACES[1]));
                assert_eq!(got, Ok(1));
                [Ok(SUCCESS), summed, Ok(SUCCESS)]
            });
            [puts, waits].into_iter().for_each(answers);
        });
        assert_eq!(PLACES.each_ref().map(|place| place.load(Ordering::SeqCst)), [5; 2]);
    }

    /// The other rank would take for put what was not.
    #[test]
    fn nothing_is_sent_or_called_behind_a_put_that_is_refused_but_on_other_communicators() {
        let ([one, other], mut to) = ([(); 2].map(|()| communicator()), [0u8; 2]);
        let (tell, told) = mpsc::channel();
        let sends = |communicator: &Arc<Communicator>, name, result: Result<()>| {
            let (communicator, tell) = (communicator.clone(), tell.clone());
            put_or_signal(communicator, 0, move || {
                tell.send(name).expect("the test listens");
                result
            })
        };
        let refused = Error::new(Status::InvalidArgument, "the memory was freed");
        assert_eq!(ncclGroupStart(), SUCCESS);
        let waits = tell.clone();
        let [first, second] = [&one, &other].map(call);
        let calls = [first, second].into_iter().zip(&mut to).map(|(mut call, to)| {
            call.request.output = to;
            launch(call)
        });
        assert!(calls.eq([Ok(SUCCESS), Ok(SUCCESS)]));
        let kept = [
            wait_signals(one.clone(), 0, move || {
                waits.send("a wait").expect("the test listens");
                Ok(())
            }),
            sends(&one, "a put", Ok(())),
            sends(&one, "a put that is refused", Err(refused)),
            sends(&one, "a signal", Ok(())),
            sends(&other, "a signal of another", Ok(())),
        ];
        assert_eq!(kept, [(); 5].map(|()| Ok(SUCCESS)));
        assert_eq!(ncclGroupEnd(), result(Status::InvalidArgument));
        let sent: Vec<&str> = told.try_iter().collect();
        assert_eq!(sent, ["a put", "a put that is refused", "a signal of another"]);
        assert_eq!(to, [0, 1]);
    }

    /// Whoever waits for those has no part in it.
    #[test]
    fn a_factor_that_cannot_be_read_keeps_no_other_call_of_its_group_from_being_made() {
        let ([first, second], mut to) = ([(); 2].map(|()| communicator()), [0u8]);
        // No device has it: these communicators are in host memory.
        let without = Launch { factor: Some(0), ..call(&first) };
        let mut with = call(&second);
        with.request.output = to.as_mut_ptr();
        assert_eq!(ncclGroupStart(), SUCCESS);
        let called = [without, with].map(launch);
        assert_eq!(called, [Ok(SUCCESS), Ok(SUCCESS)]);
        assert_eq!(ncclGroupEnd(), result(Status::Internal));
        assert_eq!(to, [1]);
    }

    #[test]
    fn a_group_ends_though_other_ranks_of_its_thread_wait_for_an_aborted_one() {
        let (tell, told) = mpsc::channel();
        let communicators = pair();
        thread::spawn(move || {
            let handles: [ncclComm_t; 2] = communicators.map(|communicator| communicator.give_handle());
            let (from, mut to) = ([7u8; 2], [0u8; 2]);
            assert_eq!(ncclGroupStart(), SUCCESS);
            for (rank, handle) in handles.into_iter().enumerate() {
                let (peer, stream) = (1 - rank as i32, std::ptr::null_mut());
                // SAFETY: live memory.
                let called = unsafe {
                    [
                        crate::point_to_point::ncclSend(
                            from[rank..].as_ptr().cast(),
                            1,
                            1,
                            peer,
                            handle,
                            stream,
                        ),
                        crate::point_to_point::ncclRecv(
                            to[rank..].as_mut_ptr().cast(),
                            1,
                            1,
                            peer,
                            handle,
                            stream,
                        ),
                    ]
                };
                assert_eq!(called, [SUCCESS; 2]);
            }
            let aborted = end::ncclCommAbort(handles[0]);
            let ended = ncclGroupEnd();
            COMMUNICATORS.take(handles[1]);
            tell.send((aborted, ended, to))
        });
        let ended = told.recv_timeout(3 * SOON).expect("it ends");
        assert_eq!(ended, (SUCCESS, result(Status::Aborted), [0; 2]));
    }

    #[test]
    fn messages_of_a_finalized_communicator_are_refused_as_they_are_called() {
        let communicator = communicator();
        let handle = COMMUNICATORS.insert(communicator.clone());
        *communicator.phase() = Phase::Finalized;
        let (from, mut to) = ([7u8], [0u8]);
        let stream = std::ptr::null_mut();
        assert_eq!(ncclGroupStart(), SUCCESS);
        // SAFETY: live memory.
        let answers = unsafe {
            [
                crate::point_to_point::ncclSend(from.as_ptr().cast(), 1, 1, 0, handle, stream),
                crate::point_to_point::ncclRecv(to.as_mut_ptr().cast(), 1, 1, 0, handle, stream),
            ]
        };
        let ended = ncclGroupEnd();
        COMMUNICATORS.take(handle);
        let refused = result(Status::InvalidUsage);
        assert_eq!((answers, ended, to), ([refused; 2], refused, [0]));
    }
}
