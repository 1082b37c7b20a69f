//! Communicators that hold no memory of their devices for a while.
//!
//! That memory goes back with the group that it was set up for. So while a communicator is suspended its
//! handle stands for another one, whose group has the same ranks and none of that memory, and the one before
//! ends as if it were destroyed. Resuming is what a new communicator does, too: the devices agree. Where the
//! program refers to the memory, by graphs, windows or signals, it stays.

use std::sync::Arc;
use std::time::Duration;

use unisono::communicator::{Context, HeldMemory};
use unisono::deadline::Deadline;

use super::{COMMUNICATORS, Communicator, Making, Phase, aborted};
use crate::error::{Result, fail};
use crate::place::Place;

/// How long who suspends waits for the memory to be given back, once all ranks have come: they let go of it
/// at the same time.
const GIVING_BACK: Duration = Duration::from_secs(2);

impl Communicator {
    /// Suspends a communicator that has a handle; all ranks do. Returns when the memory has gone back.
    pub(crate) fn suspend(self: Arc<Self>) -> Result<()> {
        let gives = matches!(self.place, Place::Device(_));
        self.suspend_by(gives)
    }

    /// The same; whether another communicator is to take its place, if that is all the same to graphs,
    /// windows and signals.
    fn suspend_by(self: Arc<Self>, gives: bool) -> Result<()> {
        let name = self.called_group()?.name().to_owned();
        let Some(memory) = self.give_way(gives)? else { return Ok(()) };
        // Nobody else has it who does not call it.
        drop(self);
        if !memory.await_return(Deadline::after(GIVING_BACK)) {
            log::warn!(
                "'{name}' is suspended, but its device memory is still in use: it is given back later"
            );
        }
        Ok(())
    }

    /// Suspends it, or another communicator that its handle stands for from then on. The memory that goes
    /// back, if there is any.
    fn give_way(self: &Arc<Self>, gives: bool) -> Result<Option<HeldMemory>> {
        let context = self.called_group()?;
        let mut phase = self.phase();
        phase.check_open(context)?;
        // Before anybody looks: no call is captured any more, and no window made.
        *phase = Phase::Suspended;
        drop(phase);
        let given = self.replace(context, gives);
        let mut phase = self.phase();
        if given.is_err() && *phase == Phase::Suspended {
            *phase = Phase::Open;
        }
        drop(phase);
        given
    }

    fn replace(self: &Arc<Self>, context: &Context, gives: bool) -> Result<Option<HeldMemory>> {
        let memory = context.held_memory();
        let is_at_rest = self.come_to_rest();
        let next = self.successor();
        let making = Making::of(self, &next);
        next.meet(|recall| {
            let child = context.begin_successor(is_at_rest.map(|()| gives && !context.is_referred_to()))?;
            child.map(|child| child.meet_unless(recall)).transpose()
        });
        drop(making);
        next.wait()?;
        if next.met().is_none() {
            if memory.is_some() {
                log::info!(
                    "'{}' is suspended with its device memory, which graphs, windows or signals of some rank refer to",
                    context.name()
                );
            }
            return Ok(None);
        }
        // Locked until the handle stands for the other one: who changes the phase changes that one's then.
        let mut phase = self.phase();
        if *phase != Phase::Suspended {
            // Another thread has finalized or revoked it meanwhile.
            next.abort();
            phase.check_open(context)?;
        }
        *phase = Phase::Replaced;
        // Ranks may have got it that are to join.
        let invitation = self.invitation().take();
        *next.invitation() = invitation;
        let handle = self.handle.get().map_or(0, |handle| handle.number);
        let before = COMMUNICATORS.replace(std::ptr::without_provenance::<()>(handle), next.clone());
        drop(phase);
        if before.is_none() {
            // It has been destroyed or aborted.
            next.abort();
            return Err(aborted());
        }
        Ok(memory)
    }

    /// Waits for what was called here. As long as the others are well that takes as long as it takes, as for
    /// who destroys it.
    fn come_to_rest(&self) -> Result<()> {
        self.finish_started(Deadline::NEVER)?;
        // They and their failures are known by this one.
        if !self.making().is_empty() {
            fail!(
                InvalidUsage,
                "children of the communicator are still being made: poll ncclCommGetAsyncError until it answers no more ncclInProgress"
            );
        }
        Ok(())
    }

    /// One in this one's place, suspended, which has yet to meet the others.
    fn successor(&self) -> Arc<Communicator> {
        let new = Communicator::unmet(self.place, self.config.clone(), self.servers());
        let (operators, order) = (self.operators.clone(), self.order.clone());
        let (handle, phase) = (self.handle.clone(), Phase::Suspended.into());
        Arc::new(Communicator { handle, operators, order, phase, ..new })
    }

    /// Undoes that; all ranks do.
    pub(crate) fn resume(&self) -> Result<()> {
        let context = self.group()?;
        self.check_suspended()?;
        self.connect(context)?;
        let mut phase = self.phase();
        if *phase == Phase::Suspended {
            *phase = Phase::Open;
        }
        Ok(())
    }

    /// Refuses what only suspended communicators do.
    pub(crate) fn check_suspended(&self) -> Result<()> {
        if *self.phase() != Phase::Suspended {
            fail!(InvalidUsage, "the communicator is not suspended: ncclCommResume undoes ncclCommSuspend");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::{CStr, c_int};
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicBool, Ordering};

    use unisono::communicator::{Context, Options, Rendezvous};
    use unisono::rendezvous::hash::HashStore;

    use super::*;
    use crate::abi::ncclComm_t;
    use crate::collective::ncclAllReduce;
    use crate::config::Config;
    use crate::error::{SUCCESS, Status, ncclGetLastError, result};
    use crate::suspend::{NCCL_SUSPEND_MEM, ncclCommResume, ncclCommSuspend};

    /// A handle, for another thread.
    #[derive(Clone, Copy)]
    struct Sent(ncclComm_t);

    // SAFETY: it is a number.
    unsafe impl Send for Sent {}

    /// Runs `each` in a thread for each of two ranks in host memory.
    fn two(each: fn(ncclComm_t)) {
        let store = Arc::new(HashStore::new());
        // An abort ends what another rank has not quite come to the end of.
        let met = Arc::new(Barrier::new(2));
        let ranks = [0, 1].map(|rank| {
            let (store, met) = (store.clone(), met.clone());
            std::thread::spawn(move || {
                let communicator = Communicator::new(Place::Host(0), Config::unset(), Vec::new());
                let handle = communicator.give_handle();
                let options = Options {
                    rank,
                    size: 2,
                    rendezvous: Rendezvous::Store(store),
                    name: "pair".into(),
                    timeout: Duration::from_secs(20),
                    interface: None,
                    transports: None,
                    host: None,
                };
                communicator.meet(|_| Context::create(options).map(Some));
                communicator.wait().expect("they have met");
                drop(communicator);
                met.wait();
                each(handle);
                COMMUNICATORS.take(handle);
            })
        });
        for rank in ranks {
            rank.join().expect("no panic");
        }
    }

    fn until(so: impl Fn() -> bool) {
        let soon = Deadline::after(Duration::from_secs(20));
        while !so() {
            assert!(!soon.expired(), "it takes too long");
            std::thread::yield_now();
        }
    }

    fn reduce(comm: ncclComm_t) -> c_int {
        let (from, mut to) = ([3u8], [0u8]);
        let stream = std::ptr::null_mut();
        // SAFETY: live memory.
        let answer =
            unsafe { ncclAllReduce(from.as_ptr().cast(), to.as_mut_ptr().cast(), 1, 1, 0, comm, stream) };
        assert!(answer != SUCCESS || to == [6]);
        answer
    }

    fn text(comm: ncclComm_t) -> String {
        // SAFETY: a C string, until the next call of this thread fails.
        unsafe { CStr::from_ptr(ncclGetLastError(comm)) }.to_string_lossy().into_owned()
    }

    #[test]
    fn what_is_suspended_takes_no_calls_until_it_is_resumed() {
        two(|comm| {
            let refused = result(Status::InvalidUsage);
            assert_eq!(reduce(comm), SUCCESS);
            assert_eq!(ncclCommResume(comm), refused);
            assert!(text(comm).contains("not suspended"), "{}", text(comm));
            for _ in 0..3 {
                assert_eq!(ncclCommSuspend(comm, NCCL_SUSPEND_MEM), SUCCESS, "{}", text(comm));
                for answer in [reduce(comm), ncclCommSuspend(comm, NCCL_SUSPEND_MEM)] {
                    assert_eq!(answer, refused);
                    assert!(text(comm).contains("is suspended: call ncclCommResume"), "{}", text(comm));
                }
                assert_eq!(ncclCommResume(comm), SUCCESS, "{}", text(comm));
                assert_eq!(reduce(comm), SUCCESS, "{}", text(comm));
            }
            assert_eq!(ncclCommSuspend(comm, 2), result(Status::InvalidArgument));
        });
    }

    /// These have no memory to give back, but do as if they had.
    #[test]
    fn a_communicator_that_takes_the_place_of_another_has_its_handle_operators_and_registrations() {
        two(|comm| {
            let mut registered = std::ptr::null_mut();
            // SAFETY: live memory.
            let registers = unsafe {
                crate::memory::ncclCommRegister(comm, std::ptr::dangling_mut(), 1, &raw mut registered)
            };
            assert_eq!(registers, SUCCESS);
            for _ in 0..3 {
                let before = crate::communicator::find(comm).expect("a communicator");
                before.clone().suspend_by(true).expect("all suspend it");
                let next = crate::communicator::find(comm).expect("another one");
                assert!(!Arc::ptr_eq(&before, &next) && Arc::ptr_eq(&before.operators, &next.operators));
                assert_eq!([&before, &next].map(|one| *one.phase()), [Phase::Replaced, Phase::Suspended]);
                let weak = Arc::downgrade(&before);
                drop(before);
                assert_eq!(weak.strong_count(), 0, "nothing else has it");
                assert_eq!(reduce(comm), result(Status::InvalidUsage));
                assert_eq!(ncclCommResume(comm), SUCCESS, "{}", text(comm));
                assert_eq!(reduce(comm), SUCCESS, "{}", text(comm));
            }
            assert_eq!(crate::memory::ncclCommDeregister(comm, registered), SUCCESS, "{}", text(comm));
        });
    }

    #[test]
    fn what_is_suspended_can_be_finalized_revoked_and_shrunk_after_a_failure() {
        // As above.
        static BOTH: Barrier = Barrier::new(2);
        two(|comm| {
            let found = || crate::communicator::find(comm).expect("a communicator");
            found().suspend_by(true).expect("all suspend it");
            BOTH.wait();
            let mut child = std::ptr::null_mut();
            let mut shrink = |flags| {
                let rank = found().group().expect("a group").rank();
                let mut other = 1 - rank as c_int;
                // SAFETY: live memory.
                unsafe {
                    crate::create::ncclCommShrink(
                        comm,
                        &mut other,
                        1,
                        &mut child,
                        std::ptr::null_mut(),
                        flags,
                    )
                }
            };
            assert_eq!(shrink(crate::create::NCCL_SHRINK_DEFAULT), result(Status::InvalidUsage));
            assert_eq!(shrink(crate::create::NCCL_SHRINK_ABORT), SUCCESS, "{}", text(comm));
            assert_eq!(crate::end::ncclCommDestroy(child), SUCCESS);
            assert_eq!(crate::end::ncclCommRevoke(comm, 0), SUCCESS, "{}", text(comm));
            assert_eq!(ncclCommResume(comm), result(Status::InvalidUsage));
        });
        two(|comm| {
            let before = crate::communicator::find(comm).expect("a communicator");
            before.suspend_by(true).expect("all suspend it");
            assert_eq!(crate::end::ncclCommFinalize(comm), SUCCESS, "{}", text(comm));
        });
    }

    #[test]
    fn ranks_split_what_is_revoked_on_one_of_them_in_the_last_moment_of_its_suspension() {
        static HELD_UP: AtomicBool = AtomicBool::new(false);
        static REPLACED: AtomicBool = AtomicBool::new(false);
        fn has_come(what: &AtomicBool) {
            until(|| what.load(Ordering::Relaxed));
        }
        two(|comm| {
            let communicator = crate::communicator::find(comm).expect("a communicator");
            let rank = communicator.group().expect("a group").rank();
            if rank == 0 {
                has_come(&HELD_UP);
                communicator.suspend_by(true).expect("the other has come, too");
                REPLACED.store(true, Ordering::Relaxed);
                assert_eq!(crate::end::ncclCommRevoke(comm, 0), SUCCESS, "{}", text(comm));
            } else {
                let revoked = communicator.clone();
                let revokes = std::thread::spawn(move || {
                    until(|| *revoked.phase() == Phase::Suspended);
                    // As ncclCommRevoke, which is there before the handle stands for another one.
                    let mut phase = revoked.phase();
                    HELD_UP.store(true, Ordering::Relaxed);
                    has_come(&REPLACED);
                    *phase = Phase::Revoked;
                    drop(phase);
                    revoked.stop();
                });
                communicator.suspend_by(true).expect_err("it is revoked");
                revokes.join().expect("no panic");
            }
            let mut child = std::ptr::null_mut();
            // SAFETY: live memory.
            let split = unsafe {
                crate::create::ncclCommSplit(comm, 0, rank as c_int, &mut child, std::ptr::null_mut())
            };
            assert_eq!(split, SUCCESS, "{}", text(comm));
            assert_eq!(reduce(child), SUCCESS, "{}", text(child));
            assert_eq!(crate::end::ncclCommDestroy(child), SUCCESS);
        });
    }

    #[test]
    fn calls_of_a_group_come_before_its_suspensions() {
        two(|comm| {
            let (from, mut to) = ([3u8], [0u8]);
            assert_eq!(crate::group::ncclGroupStart(), SUCCESS);
            // SAFETY: live memory until the group ends.
            let called = unsafe {
                ncclAllReduce(
                    from.as_ptr().cast(),
                    to.as_mut_ptr().cast(),
                    1,
                    1,
                    0,
                    comm,
                    std::ptr::null_mut(),
                )
            };
            assert_eq!((called, ncclCommSuspend(comm, NCCL_SUSPEND_MEM)), (SUCCESS, SUCCESS));
            assert_eq!(crate::group::ncclGroupEnd(), SUCCESS, "{}", text(comm));
            assert_eq!(to, [6]);
            assert_eq!(reduce(comm), result(Status::InvalidUsage));
        });
    }

    #[test]
    fn children_that_are_being_made_keep_all_ranks_from_suspending() {
        two(|comm| {
            let communicator = crate::communicator::find(comm).expect("a communicator");
            let child = Communicator::new(communicator.place, Config::unset(), Vec::new());
            let rank = communicator.group().expect("a group").rank();
            let making = (rank == 0).then(|| Making::of(&communicator, &child));
            let status = if rank == 0 { Status::InvalidUsage } else { Status::PeerFailed };
            assert_eq!(ncclCommSuspend(comm, NCCL_SUSPEND_MEM), result(status), "{}", text(comm));
            let part = if rank == 0 { "children of the communicator" } else { "rank 0" };
            assert!(text(comm).contains(part), "{}", text(comm));
            drop(making);
            assert_eq!(ncclCommSuspend(comm, NCCL_SUSPEND_MEM), SUCCESS, "{}", text(comm));
        });
    }

    #[test]
    fn one_rank_that_is_not_willing_keeps_all_of_them() {
        two(|comm| {
            let communicator = crate::communicator::find(comm).expect("a communicator");
            let context = communicator.group().expect("a group");
            let child = context.begin_successor(Ok(context.rank() == 0)).expect("both have come");
            assert!(child.is_none());
        });
    }

    #[test]
    fn who_suspends_alone_hears_that_another_rank_has_aborted() {
        two(|comm| {
            let rank = crate::communicator::find(comm).and_then(|found| Ok(found.group()?.rank()));
            if rank == Ok(1) {
                assert_eq!(crate::end::ncclCommAbort(comm), SUCCESS);
                return;
            }
            assert_ne!(ncclCommSuspend(comm, NCCL_SUSPEND_MEM), SUCCESS);
            assert!(text(comm).contains("rank 1"), "{}", text(comm));
        });
    }

    #[test]
    fn another_thread_ends_what_is_being_suspended() {
        two(|comm| {
            let rank = crate::communicator::find(comm).and_then(|found| Ok(found.group()?.rank()));
            if rank == Ok(1) {
                // It never comes, and hears of the other's end.
                let communicator = crate::communicator::find(comm).expect("a communicator");
                until(|| communicator.failure().is_some());
                return;
            }
            let sent = Sent(comm);
            let aborts = std::thread::spawn(move || {
                let Sent(comm) = { sent };
                until(|| crate::communicator::find(comm).is_ok_and(|found| found.is_setting_up()));
                assert_eq!(crate::end::ncclCommAbort(comm), SUCCESS);
            });
            assert_eq!(ncclCommSuspend(comm, NCCL_SUSPEND_MEM), result(Status::Aborted));
            aborts.join().expect("no panic");
        });
    }
}
