//! A context that takes the place of another: for what is suspended, and goes on later.
//!
//! What GPUs exchange in goes back with the context that it was made for. So who wants that memory for
//! something else makes a new context of the same ranks and drops the old one, which waits for nobody but
//! them. The new one has no memory of the devices before it needs some.

use std::sync::Arc;

use super::{Child, Context, Membership};
use crate::communicator::limits::Limits;
use crate::engine::device::{DeviceExchange, HeldMemory, Way};
use crate::error::{Result, fail};
use crate::signature::Making;

/// What a rank says that cannot do its part.
const FAILED: u64 = 2;

impl Context {
    /// Collective: a context of the same ranks that is to take the place of this one, which they drop when
    /// they have met; `None`, on all of them, unless every one is `willing`. An error if a rank comes with
    /// one.
    ///
    /// Children of listed ranks ([`Context::regroup`]) are the same whichever of the two they are made of.
    pub fn begin_successor(&self, willing: Result<bool>) -> Result<Option<Child>> {
        let limits = Limits::begin(self.timeout());
        let ranks = (0..self.size()).collect();
        let child = || self.child(Making::Suspend, "~", self.name().to_owned(), ranks).succeeding();
        let Membership::Group(group) = &self.0.membership else {
            return self.failure().map_or_else(|| willing.map(|willing| willing.then(child)), Err);
        };
        let mine = willing.as_ref().map_or(FAILED, |&willing| willing.into());
        let all = self.exchange(group, [mine], limits.come, Making::Suspend)?;
        willing?;
        if let Some(rank) = all.iter().position(|&[other]| other == FAILED) {
            fail!(
                PeerFailed,
                "{} could not suspend '{}', so no rank does: its error tells why",
                group.describe_rank(rank as u32),
                self.name()
            );
        }
        let agreed = all.iter().all(|&[other]| other == 1);
        Ok(agreed.then(|| child().agreed(limits)))
    }

    /// Whether something of the program refers to the memory that the GPUs exchange in: a call that was
    /// captured, a window, or signals that this rank has sent. It stays where it is as long as this context
    /// lives.
    pub fn is_referred_to(&self) -> bool {
        self.exchange_of_devices().is_some_and(|exchange| exchange.is_referred_to())
    }

    /// What tells when that memory has been given back. `None`: there is none.
    pub fn held_memory(&self) -> Option<HeldMemory> {
        self.exchange_of_devices().map(|exchange| exchange.held_memory())
    }

    fn exchange_of_devices(&self) -> Option<&Arc<DeviceExchange>> {
        let Membership::Group(group) = &self.0.membership else { return None };
        group.devices().and_then(Way::exchange)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use crate::communicator::context::Context;
    use crate::communicator::context::tests::pair;
    use crate::error::{Error, Result, Status};

    const PATIENCE: Duration = Duration::from_secs(20);

    /// What `each` of two ranks does, by rank.
    fn two<T: Send + 'static>(each: fn(Context) -> T) -> [T; 2] {
        let ranks = pair([PATIENCE; 2]).map(|context| thread::spawn(move || each(context)));
        ranks.map(|rank| rank.join().expect("no panic"))
    }

    fn successor(context: &Context) -> Context {
        let child = context.begin_successor(Ok(true)).expect("both come");
        child.expect("both are willing").meet().expect("they meet")
    }

    /// One may have failed in the last moment.
    #[test]
    fn ranks_go_on_together_though_one_has_the_successor_and_one_the_context_before() {
        two(|context| {
            let before = context.regroup("all", &[0, 1]).expect("a child");
            let next = successor(&context);
            let mut ids = vec![context.id(), before.id(), next.id()];
            // As who suspends lets go of the one, and who could not of the other.
            let (of, gone) = if context.rank() == 0 { (next, context) } else { (context, next) };
            drop(gone);
            let children = ["all", "others", "all"].map(|name| of.regroup(name, &[0, 1]).expect("a child"));
            ids.extend(children.iter().map(Context::id));
            ids.sort_unstable();
            ids.dedup();
            assert_eq!(ids.len(), 6, "none of them is another");
        });
    }

    /// Rank 0 leaves before rank 1 waits for it, or most likely while it does. What it has last, rank 1 has let
    /// go of, or has it yet.
    #[test]
    fn who_waits_for_a_member_that_has_let_go_of_the_context_and_all_its_successors_is_told() {
        two(|kept| {
            for (before, stays) in [(true, 0), (false, 0), (true, 1), (false, 1), (true, 2), (false, 2)] {
                let mut contexts = vec![kept.duplicate().expect("both come")];
                for _ in 0..2 {
                    contexts.push(successor(contexts.last().expect("one")));
                }
                let own = contexts.swap_remove(if kept.rank() == 0 { 2 - stays } else { stays });
                drop(contexts);
                if kept.rank() == 0 {
                    let mut own = Some(own);
                    own.take_if(|_| before);
                    kept.duplicate().expect("both come");
                    if !before {
                        thread::sleep(Duration::from_millis(20));
                    }
                    drop(own);
                } else {
                    kept.duplicate().expect("both come");
                    let error = own.regroup("all", &[0, 1]).err().expect("rank 0 does not come");
                    assert_eq!(error.status(), Status::PeerFailed, "{error}");
                    assert!(error.text().contains("rank 0"), "{error}");
                    assert_eq!(own.failure(), None, "a goodbye alone fails no group");
                }
            }
        });
    }

    #[test]
    fn all_hear_of_a_rank_that_comes_with_an_error() {
        let [first, second] = two(|context| -> Result<bool> {
            let willing = match context.rank() {
                0 => Err(Error::new(Status::Timeout, "a message is late")),
                _ => Ok(true),
            };
            context.begin_successor(willing).map(|child| child.is_some())
        });
        assert_eq!(first.expect_err("its own").text(), "a message is late");
        let error = second.expect_err("the other's");
        assert!(error.text().contains("rank 0") && error.text().contains("so no rank does"), "{error}");
    }
}
