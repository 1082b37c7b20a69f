//! Children of a context: parts, groups and duplicates.

use std::sync::Arc;

use super::{Context, Membership};
use crate::communicator::Recall;
use crate::communicator::limits::Limits;
use crate::engine::group::Group;
use crate::error::{Error, Result, fail};
use crate::rendezvous::secret::SecretKey;
use crate::signature::Making;

impl Context {
    /// Collective over this group: a child group for each colour, ranks ordered by key, then by rank here.
    /// `None`: this rank takes part in no child.
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Context>> {
        self.begin_split(color, key)?.map(Child::meet).transpose()
    }

    /// The first half of [`Context::split`]: what all ranks of this group do, in the same order if they split
    /// it several times. The members of the child have yet to meet.
    pub fn begin_split(&self, color: Option<u32>, key: i64) -> Result<Option<Child>> {
        self.begin_split_within(Limits::begin(self.timeout()), color, key)
    }

    fn begin_split_within(&self, limits: Limits, color: Option<u32>, key: i64) -> Result<Option<Child>> {
        let child = |color: u32, ranks| {
            self.child(Making::Part, &format!("/{color}"), format!("{}/{color}", self.name()), ranks)
        };
        let Membership::Group(group) = &self.0.membership else {
            return self.failure().map_or(Ok(color.map(|color| child(color, vec![0]))), Err);
        };
        // Colour (with one bit for "none") and key of each rank.
        let mine = [color.map_or(u64::MAX, u64::from), key as u64];
        let all = self.exchange(group, mine, limits.come, Making::Split)?;
        let Some(color) = color else { return Ok(None) };
        let mut ranks: Vec<[u64; 2]> = all
            .iter()
            .zip(0..)
            .filter(|([other, _], _)| *other == u64::from(color))
            // Keys less than 0 come first.
            .map(|([_, key], rank)| [key ^ 1 << 63, rank])
            .collect();
        ranks.sort_unstable();
        let ranks = ranks.into_iter().map(|[_, rank]| rank as u32).collect();
        Ok(Some(child(color, ranks).agreed(limits)))
    }

    /// A named child group of the listed ranks, in that order; called by its members only. Another rank's
    /// call is `NotMember` and names rank and group. If this group has failed it is refused, and members that
    /// do not know of that yet are told.
    pub fn group(&self, name: &str, ranks: &[u32]) -> Result<Context> {
        Child { tied: true, ..self.begin_regroup(name, ranks)? }.meet_if_sound()
    }

    /// As [`Context::group`], also when this group has failed: the listed ranks, which are alive, go on
    /// without the others. For programs in Rust: `libnccl.so.2` has [`Context::begin_regroup`].
    pub fn regroup(&self, name: &str, ranks: &[u32]) -> Result<Context> {
        self.begin_regroup(name, ranks)?.meet()
    }

    /// The first half of [`Context::regroup`], in the same order on all members, as [`Context::begin_split`].
    /// Waits for nobody.
    pub fn begin_regroup(&self, name: &str, ranks: &[u32]) -> Result<Child> {
        let size = self.size();
        if ranks.is_empty() {
            fail!(InvalidArgument, "group '{name}' has no ranks");
        }
        for (index, &rank) in ranks.iter().enumerate() {
            if rank >= size {
                fail!(
                    InvalidArgument,
                    "rank {rank} of group '{name}' is out of range: '{}' has {size}",
                    self.name()
                );
            }
            if ranks[..index].contains(&rank) {
                fail!(InvalidArgument, "rank {rank} is twice in group '{name}'");
            }
        }
        if !ranks.contains(&self.rank()) {
            fail!(NotMember, "rank {} of '{}' is not a member of group '{name}'", self.rank(), self.name());
        }
        Ok(Child { tied: false, ..self.child(Making::Group, name, name.to_string(), ranks.to_vec()) })
    }

    /// Collective: the same ranks, independent operations.
    pub fn duplicate(&self) -> Result<Context> {
        let ranks = (0..self.size()).collect();
        self.child(Making::Duplicate, "+", format!("{}+", self.name()), ranks).meet_if_sound()
    }

    /// What tells it from the other children of this group: `name`, the members, and how many there have been
    /// of these.
    pub(super) fn child(&self, making: Making, name: &str, label: String, ranks: Vec<u32>) -> Child {
        let count = match &self.0.membership {
            Membership::Solo => 1,
            Membership::Group(group) => group.count_child(name, &ranks),
        };
        Child {
            parent: self.clone(),
            making,
            name: name.to_string(),
            label,
            ranks,
            count,
            limits: Limits::begin(self.timeout()),
            tied: true,
            succeeds: false,
        }
    }

    /// Sets up what the members of a new group have to set up together. A child's members exchange words
    /// whether they share memory or not: so links join them, by which each hears what ends another, and all
    /// know that they are members, though the parent may have failed before some were told.
    pub(super) fn settled(self, limits: Limits, making: Making) -> Result<Context> {
        if let Membership::Group(group) = &self.0.membership {
            let exchange = |mine, until| self.exchange(group, mine, until, making);
            let met = group.share_memory(limits.come, limits.settled, exchange).and_then(|exchanged| {
                // Ranks that are created have met already.
                if exchanged || making == Making::Create {
                    return Ok(());
                }
                exchange([0, 0], limits.come).map(drop).inspect_err(|error| group.fail_here(error))
            });
            met.map_err(|error| limits.tell(self.name(), error))?;
        }
        Ok(self)
    }
}

/// A child group that is agreed on: this rank is a member.
pub struct Child {
    parent: Context,
    /// By what call.
    making: Making,
    name: String,
    label: String,
    /// Of the parent, in the child's order.
    ranks: Vec<u32>,
    /// How many of the same name and members there have been, with this one.
    count: u32,
    /// Since it was begun.
    limits: Limits,
    /// Whether it is not made if the parent fails.
    tied: bool,
    /// Whether it takes the parent's place.
    succeeds: bool,
}

impl Child {
    /// With a name for errors and logs that need not be the other ranks'.
    pub fn labelled(self, label: String) -> Child {
        Child { label, ..self }
    }

    /// All ranks of the parent have agreed on it within `limits`.
    pub(super) fn agreed(self, limits: Limits) -> Child {
        Child { limits: limits.have_come(), ..self }
    }

    /// It takes the parent's place.
    pub(super) fn succeeding(self) -> Child {
        Child { succeeds: true, ..self }
    }

    /// Meets the other members; the second half of [`Context::split`] and [`Context::regroup`], which has
    /// what the first has left of the deadline.
    pub fn meet(self) -> Result<Context> {
        self.meet_unless(&Recall::default())
    }

    /// [`Child::meet`], unless `recall` calls it off.
    pub fn meet_unless(self, recall: &Recall) -> Result<Context> {
        let group = self.group();
        let Child { parent, label, tied, limits, making, .. } = self;
        let timeout = parent.timeout();
        let (Membership::Group(over), Some(group)) = (&parent.0.membership, group) else {
            let child = Context::new(label, timeout, Membership::Solo, None);
            child.limit_blocks(parent.max_blocks());
            return Ok(child);
        };
        let _making = over.make(&group, tied);
        let (membership, store) = (Membership::Group(group.clone()), parent.0._store.clone());
        let child = Context::new(label, timeout, membership, store);
        child.limit_blocks(parent.max_blocks());
        recall.enter(&child);
        child.settled(limits, making)
    }

    /// [`Child::meet_unless`], and then [`Context::begin_split`] of that group, which is for nothing else:
    /// both have one deadline.
    pub fn meet_and_split_unless(
        self,
        recall: &Recall,
        color: Option<u32>,
        key: i64,
    ) -> Result<Option<Child>> {
        let limits = self.limits.have_come();
        let all = self.meet_unless(recall)?;
        let name = color.map_or(all.name().to_owned(), |color| format!("{}/{color}", all.name()));
        all.begin_split_within(limits, color, key).map_err(|error| limits.tell(&name, error))
    }

    /// As [`Child::meet`], unless the parent has failed. The others may not have heard of that yet, and wait
    /// for this rank: they hear of it as the child's failure.
    fn meet_if_sound(self) -> Result<Context> {
        let Some(error) = self.parent.failure() else { return self.meet() };
        let error = error.context(format!("group '{}' has failed before", self.parent.name()));
        self.decline(&error);
        Err(error)
    }

    /// In place of [`Child::meet`], for a member that does not come, for the cause `why`: the others, who may
    /// wait for it, hear that as the child's failure.
    pub fn decline(self, why: &Error) {
        if let Some(group) = self.group() {
            group.fail_here(why);
        }
    }

    /// This rank's end of the group, unless it is alone in it.
    fn group(&self) -> Option<Arc<Group>> {
        let Child { parent, name, label, ranks, count, succeeds, .. } = self;
        let Membership::Group(parent) = &parent.0.membership else { return None };
        if ranks.len() == 1 {
            return None;
        }
        let members: Arc<[u32]> = ranks.iter().map(|&rank| parent.members()[rank as usize]).collect();
        // PROOF: whoever makes a child has checked that this rank is among them.
        let own = ranks.iter().position(|&rank| rank == parent.rank()).unwrap_or(0) as u32;
        let (id, timeout) = (child_id(parent.line(), name, &members, *count), parent.timeout());
        if *succeeds {
            return Some(parent.successor(id, label.clone(), timeout));
        }
        Some(Group::new(parent.endpoint().clone(), id, label.clone(), own, members, timeout))
    }
}

/// The same number on all members, and (with the certainty of a 64-bit digest) on no other group.
fn child_id(line: u64, name: &str, members: &[u32], count: u32) -> u64 {
    let members: Vec<u8> = members.iter().flat_map(|member| member.to_le_bytes()).collect();
    let key = SecretKey::from_text("unisono group");
    let digest = key.tag(&[&line.to_le_bytes(), name.as_bytes(), &members, &count.to_le_bytes()]);
    u64::from_le_bytes(std::array::from_fn(|i| digest[i]))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::collective::request::{Counts, Kind, Request};
    use crate::communicator::Call;
    use crate::communicator::context::tests::{Held, PATIENCE, TIMEOUT, pair, times_out};
    use crate::deadline::Deadline;
    use crate::error::Status;
    use crate::reduce::{DataType, Operator};

    #[test]
    fn a_child_of_one_rank_has_its_parents_limit_of_blocks_too() {
        let [first, second] = pair([PATIENCE; 2]);
        first.limit_blocks(3);
        let own = first.group("own", &[0]).expect("alone");
        assert_eq!(own.max_blocks(), 3);
        let copy = own.duplicate().expect("alone");
        assert_eq!(copy.max_blocks(), 3);
        drop(second);
    }

    #[test]
    fn all_steps_of_a_split_have_one_timeout() {
        let [first, second] = pair([TIMEOUT; 2]);
        times_out(
            "default/0",
            || first.split(Some(0), 0).map(|child| child.expect("a colour")),
            || Held(Box::new(second.begin_split(Some(0), 0).expect("the ranks split"))),
        );
    }

    #[test]
    fn a_group_that_meets_to_be_split_has_one_timeout_for_both() {
        let [first, second] = pair([TIMEOUT; 2]);
        times_out(
            "all/0",
            || {
                let all = first.begin_regroup("all", &[0, 1])?;
                let child = all.meet_and_split_unless(&Recall::default(), Some(0), 0)?;
                child.expect("a colour").meet()
            },
            || Held(Box::new(second.regroup("all", &[0, 1]).expect("the ranks meet"))),
        );
    }

    #[test]
    fn all_steps_of_a_duplicate_have_one_timeout() {
        let [first, second] = pair([TIMEOUT; 2]);
        times_out(
            "default+",
            || first.duplicate(),
            || {
                let child = second.child(Making::Duplicate, "+", "default+".into(), vec![0, 1]);
                let group = child.group().expect("two ranks");
                let context = Context::new(child.label, PATIENCE, Membership::Group(group.clone()), None);
                // As if this rank had a board, and its turn in the next step.
                let soon = Deadline::after(PATIENCE);
                context.exchange(&group, [0, 0], soon, Making::Duplicate).expect("the other has come");
                Held(Box::new((context, group)))
            },
        );
    }

    #[test]
    fn a_child_has_the_timeout_that_was_set_last_for_its_making_and_for_itself() {
        const SHORT: Duration = Duration::from_millis(500);
        let [first, second] = pair([TIMEOUT; 2]);
        for (timeout, late) in [(PATIENCE, TIMEOUT + Duration::from_millis(1500)), (SHORT, PATIENCE)] {
            for context in [&first, &second] {
                context.set_timeout(timeout);
            }
            std::thread::scope(|scope| {
                let began = Instant::now();
                let makes = scope.spawn(|| first.duplicate());
                while began.elapsed() < late && !makes.is_finished() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                if timeout == SHORT {
                    let error = makes.join().expect("no panic").err().expect("rank 1 does not come");
                    assert_eq!(error.status(), Status::Timeout, "{error}");
                    assert!(began.elapsed() < late, "{error}");
                    return;
                }
                let comes = second.duplicate().expect("the ranks meet");
                for child in [makes.join().expect("no panic").expect("the ranks meet"), comes] {
                    let Membership::Group(group) = child.membership() else { panic!("two ranks") };
                    assert_eq!([child.timeout(), group.timeout()], [timeout; 2]);
                    child.set_timeout(SHORT);
                    assert_eq!([child.timeout(), group.timeout()], [SHORT; 2]);
                    child.set_timeout(Duration::MAX);
                    assert_eq!([child.timeout(), group.timeout()], [Duration::MAX; 2]);
                }
                assert_eq!(first.timeout(), timeout);
            });
        }
    }

    /// Rank 0 splits while rank 1 duplicates: who gives up first is told what the other does.
    #[test]
    fn who_makes_another_group_is_told_by_what_call_and_which() {
        let texts = [
            [
                "split of 'default' (rank 0 of 2",
                "in 'default+' its last call is duplicate(), still running, waiting for rank 0",
                "Look at rank 1",
            ],
            [
                "setting up 'default+' (rank 1 of 2",
                "in 'default' its last call is split(), still running, waiting for rank 1",
                "Look at rank 0",
            ],
        ];
        for (hasty, parts) in texts.into_iter().enumerate() {
            let mut timeouts = [PATIENCE; 2];
            timeouts[hasty] = Duration::from_secs(1);
            let [first, second] = pair(timeouts);
            let errors = std::thread::scope(|scope| {
                let split = scope.spawn(|| first.split(Some(0), 0).map(drop).expect_err("rank 1 does not"));
                let duplicate = scope.spawn(|| second.duplicate().map(drop).expect_err("rank 0 does not"));
                if hasty == 1 {
                    let told = duplicate.join().expect("no panic");
                    first.abort();
                    return [split.join().expect("no panic"), told];
                }
                [split, duplicate].map(|rank| rank.join().expect("no panic"))
            });
            assert_eq!(errors[hasty].status(), Status::Timeout, "{}", errors[hasty]);
            for part in parts {
                assert!(errors[hasty].text().contains(part), "no '{part}' in: {}", errors[hasty]);
            }
        }
    }

    /// Rank 1 waits for rank 0 in another group, in which that is rank 1.
    #[test]
    fn who_is_held_up_in_another_group_tells_in_which_and_by_whom() {
        let ranks = pair([PATIENCE; 2]);
        let barrier = |context: &Context, timeout| {
            let (input, output) = (std::ptr::null(), std::ptr::null_mut());
            let (kind, counts, operator) = (Kind::Barrier, Counts::Uniform(0), Operator::Sum);
            let request = Request { kind, input, output, counts, dtype: DataType::U8, operator, root: 0 };
            // SAFETY: it has no memory.
            unsafe { context.run(&request, &Call { timeout: Some(timeout), ..Call::default() }) }.map(drop)
        };
        std::thread::scope(|scope| {
            let threads = ranks.each_ref().map(|context| {
                scope.spawn(move || {
                    let child = context.group("turned", &[1, 0]).expect("the ranks meet");
                    // What a group does once is done then.
                    for group in [context, &child] {
                        barrier(group, PATIENCE).expect("both come");
                    }
                    child
                })
            });
            let [absent, held_up] = threads.map(|rank| rank.join().expect("no panic"));
            let Membership::Group(group) = held_up.membership() else { panic!("two ranks") };
            let group = group.clone();
            let waits = scope.spawn(move || barrier(&held_up, PATIENCE));
            let call = || group.endpoint().recorder().running(group.id());
            while call().is_none_or(|call| call.awaited.rank().is_none()) {
                std::thread::sleep(Duration::from_millis(1));
            }
            let error = barrier(&ranks[0], Duration::from_millis(500)).expect_err("rank 1 does not come");
            let part = "in 'turned' it is in barrier() #1, still running, waiting for rank 1 there (rank 0 of the job)";
            assert!(error.text().contains(part), "no '{part}' in: {error}");
            absent.abort();
            waits.join().expect("no panic").expect_err("its group is aborted");
        });
    }

    #[test]
    fn ranks_that_make_one_group_by_different_calls_are_told_which() {
        let [first, second] = pair([PATIENCE; 2]);
        let errors = std::thread::scope(|scope| {
            let duplicate = scope.spawn(|| first.duplicate().map(drop));
            let group = scope.spawn(|| second.group("+", &[0, 1]).map(drop));
            [duplicate, group].map(|rank| rank.join().expect("no panic").expect_err("they differ"))
        });
        for error in errors {
            assert_eq!(error.status(), Status::Mismatch, "{error}");
            assert!(["duplicate()", "group()"].iter().all(|call| error.text().contains(call)), "{error}");
        }
    }

    /// One has come to make a child when the other aborts, and is refused its own part in that.
    #[test]
    fn who_is_refused_a_child_of_a_group_that_has_failed_keeps_nobody_waiting_for_it() {
        type Deed = fn(&Context) -> Result<Context>;
        let deeds: [(&str, Deed); 2] =
            [("pair", |context| context.group("pair", &[0, 1])), ("+", Context::duplicate)];
        for (name, deed) in deeds {
            let [first, second] = pair([PATIENCE; 2]);
            let Membership::Group(group) = second.membership() else { panic!("two ranks") };
            std::thread::scope(|scope| {
                let waits = scope.spawn(|| deed(&second));
                while group.endpoint().recorder().setting_up().is_none() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                // By then it waits for the other; if not, the test finds less.
                std::thread::sleep(Duration::from_millis(50));
                let since = Instant::now();
                first.abort();
                let refused = deed(&first).err().expect("its group has failed");
                assert!(refused.text().contains("has failed before"), "{refused}");
                let told = waits.join().expect("no panic").err().expect("the other does not come");
                assert_eq!(told.status(), Status::Aborted, "{told}");
                assert!(since.elapsed() < PATIENCE / 2, "{told}");
            });
            // Both have called it as often as each other: they find each other again.
            std::thread::scope(|scope| {
                let ranks = [&first, &second].map(|context| scope.spawn(|| context.regroup(name, &[0, 1])));
                for rank in ranks {
                    rank.join().expect("no panic").expect("a group that goes on");
                }
            });
        }
    }

    /// It has another group of the job, so no goodbye tells of it. It goes before the other one comes, or
    /// most likely while that waits for it.
    #[test]
    fn who_meets_over_a_group_that_has_failed_is_told_of_a_member_that_has_let_go_of_it() {
        for before in [true, false] {
            let [first, second] = pair([PATIENCE; 2]);
            let kept = std::thread::scope(|scope| {
                let ranks = [&first, &second].map(|context| scope.spawn(|| context.duplicate()));
                ranks.map(|rank| rank.join().expect("no panic").expect("another"))
            });
            first.abort();
            let mut first = Some(first);
            first.take_if(|_| before);
            let error = std::thread::scope(|scope| {
                let meets = scope.spawn(|| second.regroup("both", &[0, 1]).map(drop));
                std::thread::sleep(Duration::from_millis(20));
                drop(first);
                meets.join().expect("no panic").expect_err("rank 0 does not come")
            });
            assert_eq!(error.status(), Status::PeerFailed, "{error}");
            assert!(error.text().contains("rank 0") && error.text().contains("has left"), "{error}");
            assert!(kept.iter().all(|other| other.failure().is_none()));
        }
    }
}
