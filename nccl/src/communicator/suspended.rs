//! Communicators that hold no memory of their devices for a while.
//!
//! That memory goes back with the group that it was set up for. So while a communicator is suspended its handle stands for another one, whose
//! group has the same ranks and none of that memory, and the one before ends as if it were destroyed. Resuming is what a new
//! communicator does, too: the devices agree. Where the program refers to the memory, by graphs or windows, it stays.

use std::sync::Arc;
use std::time::Duration;

use unisono::communicator::HeldMemory;
use unisono::deadline::Deadline;

use super::{COMMUNICATORS, Communicator, Making, Phase, aborted};
use crate::error::{Result, fail};

/// How long who suspends waits for the memory to be given back, once all ranks have come: they let go of it at the same time.
const GIVING_BACK: Duration = Duration::from_secs(2);

impl Communicator {
    /// Suspends a communicator that has a handle; all ranks do. Returns when the memory has gone back.
    pub(crate) fn suspend(self: Arc<Self>) -> Result<()> {
        let name = self.called_group()?.name().to_owned();
        let Some(memory) = self.give_way()? else { return Ok(()) };
        // Nobody else has it who does not call it.
        drop(self);
        if !memory.await_return(Deadline::after(GIVING_BACK)) {
            log::warn!(
                "'{name}' is suspended, but its device memory is still in use: it is given back later"
            );
        }
        Ok(())
    }

    /// Has its handle stand for another communicator, which is suspended; `None`: there is nothing to give back, and it is suspended itself.
    fn give_way(self: &Arc<Self>) -> Result<Option<HeldMemory>> {
        let context = self.called_group()?;
        // As long as the others are well it waits for them, as who destroys it does.
        self.finish_started(Deadline::NEVER)?;
        let memory = context.held_memory();
        let willing = memory.is_some() && !context.is_referred_to();
        let next = self.successor();
        let making = Making::of(self, &next);
        next.meet(|recall| {
            context.begin_successor(willing)?.map(|child| child.meet_unless(recall)).transpose()
        });
        drop(making);
        next.wait()?;
        let mut phase = self.phase();
        if *phase != Phase::Open {
            next.abort();
            phase.check_open(context)?;
        }
        *phase = Phase::Suspended;
        drop(phase);
        if next.met().is_none() {
            if memory.is_some() {
                log::info!(
                    "'{}' is suspended with its device memory, which graphs or windows of some rank refer to",
                    context.name()
                );
            }
            return Ok(None);
        }
        // Ranks may have got it that are to join.
        let invitation = self.invitation().take();
        *next.invitation() = invitation;
        let handle = self.handle.get().map_or(0, |handle| handle.number);
        if COMMUNICATORS.replace(std::ptr::without_provenance::<()>(handle), next.clone()).is_none() {
            // Another thread has ended it meanwhile.
            next.abort();
            return Err(aborted());
        }
        Ok(memory)
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

    use unisono::communicator::{Context, Options, Rendezvous};
    use unisono::rendezvous::hash::HashStore;

    use super::*;
    use crate::abi::ncclComm_t;
    use crate::collective::ncclAllReduce;
    use crate::config::Config;
    use crate::error::{SUCCESS, Status, ncclGetLastError, result};
    use crate::place::Place;
    use crate::suspend::{NCCL_SUSPEND_MEM, ncclCommResume, ncclCommSuspend};

    /// A handle, for another thread.
    #[derive(Clone, Copy)]
    struct Sent(ncclComm_t);

    // SAFETY: it is a number.
    unsafe impl Send for Sent {}

    /// Runs `each` in a thread for each of two ranks in host memory.
    fn two(each: fn(ncclComm_t)) {
        let store = Arc::new(HashStore::new());
        let ranks = [0, 1].map(|rank| {
            let store = store.clone();
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
                each(handle);
                COMMUNICATORS.take(handle);
            })
        });
        for rank in ranks {
            rank.join().expect("no panic");
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

    /// Where there is memory to give back the handle stands for another communicator. These have none, so it is put in the place by hand.
    #[test]
    fn a_communicator_that_takes_the_place_of_another_has_its_handle_and_operators() {
        two(|comm| {
            let before = crate::communicator::find(comm).expect("a communicator");
            let context = before.group().expect("a group");
            let next = before.successor();
            next.meet(|recall| {
                context.begin_successor(true)?.map(|child| child.meet_unless(recall)).transpose()
            });
            assert!(matches!(next.met(), Some(Ok(_))) && Arc::ptr_eq(&before.operators, &next.operators));
            let mut registered = std::ptr::null_mut();
            // SAFETY: live memory.
            let registers = unsafe {
                crate::memory::ncclCommRegister(comm, std::ptr::dangling_mut(), 1, &raw mut registered)
            };
            assert_eq!(registers, SUCCESS);
            let replaced = COMMUNICATORS.replace(comm, next).expect("it is there");
            assert!(Arc::ptr_eq(&replaced, &before));
            drop((before, replaced));
            assert_eq!(reduce(comm), result(Status::InvalidUsage));
            assert_eq!(ncclCommResume(comm), SUCCESS, "{}", text(comm));
            assert_eq!(reduce(comm), SUCCESS, "{}", text(comm));
            assert_eq!(crate::memory::ncclCommDeregister(comm, registered), SUCCESS, "{}", text(comm));
        });
    }

    #[test]
    fn one_rank_that_is_not_willing_keeps_all_of_them() {
        two(|comm| {
            let communicator = crate::communicator::find(comm).expect("a communicator");
            let context = communicator.group().expect("a group");
            let child = context.begin_successor(context.rank() == 0).expect("both have come");
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
                while communicator.failure().is_none() {
                    std::thread::yield_now();
                }
                return;
            }
            let sent = Sent(comm);
            let aborts = std::thread::spawn(move || {
                let Sent(comm) = { sent };
                while !crate::communicator::find(comm).is_ok_and(|found| found.is_setting_up()) {
                    std::thread::yield_now();
                }
                assert_eq!(crate::end::ncclCommAbort(comm), SUCCESS);
            });
            assert_eq!(ncclCommSuspend(comm, NCCL_SUSPEND_MEM), result(Status::Aborted));
            aborts.join().expect("no panic");
        });
    }
}
