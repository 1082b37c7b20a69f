//! Groups that grow: their ranks tell each other how, and meet again, with others, by an id.

#![forbid(unsafe_code)]

use std::time::Duration;

use super::context::{Context, Membership};
use super::limits::Limits;
use super::meeting::{self, Found};
use super::{Options, Rendezvous};
use crate::deadline::Deadline;
use crate::engine::bootstrap::{self, Meeting};
use crate::error::{Error, Result};
use crate::signature::Making;

/// How long it may take to leave word.
const WORD: Duration = Duration::from_secs(5);

impl Context {
    /// What all ranks of this group do before they meet again with ranks that join them, in the same order as
    /// [`Context::begin_split`]: each tells a few words, and has everybody's, in rank order. Then
    /// [`Context::create_unless`] makes the larger group, with a [`Recall`](super::Recall) that is tied to
    /// this one.
    pub fn begin_growth<const WORDS: usize>(&self, mine: [u64; WORDS]) -> Result<Vec<[u64; WORDS]>> {
        let Membership::Group(group) = self.membership() else {
            return self.failure().map_or(Ok(vec![mine]), Err);
        };
        self.exchange(group, mine, Limits::begin(self.timeout()).come, Making::Grow)
    }

    /// In place of [`Context::create`], for a rank that does not come, for the cause `why`: those who wait
    /// for it hear that. By an id; it takes a few seconds at most.
    pub fn decline(options: &Options, why: Error) {
        let deadline = Deadline::after(WORD);
        let told = meeting::find(options, deadline, None).and_then(|found| {
            let Found { rank, size, store, secret, .. } = found;
            let (name, store, recalled) = (options.name.as_str(), &*store, None);
            let once = matches!(options.rendezvous, Rendezvous::Invitation(_));
            let (options, tied) = (Err(why), false);
            let meeting =
                Meeting { rank, size, name, store, secret, options, deadline, recalled, tied, once };
            bootstrap::meet(meeting).map(drop)
        });
        // It ends with what was to be told, or with why that could not be.
        if let Err(error) = told {
            log::info!("{error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;
    use std::thread;
    use std::time::Instant;

    use super::*;
    use crate::communicator::Recall;
    use crate::error::{Status, fail};
    use crate::rendezvous::hash::HashStore;
    use crate::rendezvous::store::Store;

    /// How long the ranks that wait may, and how soon they are to hear.
    const PATIENCE: Duration = Duration::from_secs(600);
    const SOON: Duration = Duration::from_secs(30);

    fn options(rank: u32, size: u32, store: &Arc<dyn Store>) -> Options {
        Options {
            rank,
            size,
            rendezvous: Rendezvous::Store(store.clone()),
            name: "grown".into(),
            timeout: PATIENCE,
            interface: Some("127.0.0.1".into()),
            transports: Some("shm".into()),
            host: None,
        }
    }

    fn store() -> Arc<dyn Store> {
        Arc::new(HashStore::new())
    }

    fn pair() -> [Context; 2] {
        let store = store();
        let ranks = [0, 1].map(|rank| {
            let options = options(rank, 2, &store);
            thread::spawn(move || Context::create(options))
        });
        ranks.map(|rank| rank.join().expect("no panic").expect("the ranks meet"))
    }

    #[test]
    fn ranks_tell_each_other_in_their_order() {
        let ranks = pair().map(|context| {
            thread::spawn(move || context.begin_growth([u64::from(context.rank()), 7, u64::MAX]))
        });
        for rank in ranks {
            let told = rank.join().expect("no panic").expect("all tell");
            assert_eq!(told, [[0, 7, u64::MAX], [1, 7, u64::MAX]]);
        }
    }

    #[test]
    fn a_rank_that_splits_while_another_grows_is_told_so() {
        let [grows, splits] = pair();
        let grows = thread::spawn(move || grows.begin_growth([0; 3]).map(drop));
        let splits = thread::spawn(move || splits.split(Some(0), 0).map(drop));
        for rank in [grows, splits] {
            let error = rank.join().expect("no panic").expect_err("they differ");
            assert_eq!(error.status(), Status::Mismatch, "{error}");
            assert!(["grow()", "split()"].iter().all(|call| error.text().contains(call)), "{error}");
        }
    }

    /// A rank of the group may be gone before the store knows it, where the others would wait for it.
    #[test]
    fn who_meets_ranks_that_join_hears_that_the_group_has_failed_and_so_do_they() {
        let [first, second] = pair();
        let store = store();
        let joins = options(2, 3, &store);
        let joins = thread::spawn(move || Context::create_unless(&Recall::default(), joins, None).map(drop));
        let (meets, parent) = (options(0, 3, &store), first.clone());
        let meets = thread::spawn(move || {
            let recall = Recall::default();
            recall.tie(&parent);
            let met = Context::create_unless(&recall, meets, None).map(drop);
            recall.end();
            met
        });
        for rank in [0, 2] {
            store.get(&format!("grown/0/rank/{rank}"), Deadline::after(SOON)).expect("it comes");
        }
        let since = Instant::now();
        second.abort_because(Some("it has no memory"));
        for rank in [meets, joins] {
            let error = rank.join().expect("no panic").expect_err("rank 1 does not come");
            assert_eq!(error.status(), Status::Aborted, "{error}");
            assert!(error.text().contains("it has no memory"), "{error}");
        }
        assert!(since.elapsed() < SOON);
    }

    /// A store that is lost once that is asked for, and tells when somebody has seen it.
    struct Losing {
        entries: HashStore,
        is_lost: AtomicBool,
        seen: mpsc::SyncSender<()>,
    }

    impl Losing {
        fn answer<T>(&self, answer: Result<T>) -> Result<T> {
            if !self.is_lost.load(Ordering::SeqCst) {
                return answer;
            }
            let _ = self.seen.try_send(());
            fail!(PeerFailed, "lost the store")
        }
    }

    impl Store for Losing {
        fn set(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()> {
            self.answer(self.entries.set(key, value, deadline))
        }

        fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
            self.answer(self.entries.get(key, deadline))
        }

        fn try_get(&self, key: &str, deadline: Deadline) -> Result<Option<Vec<u8>>> {
            self.answer(self.entries.try_get(key, deadline))
        }

        fn add(&self, key: &str, amount: i64, deadline: Deadline) -> Result<i64> {
            self.answer(self.entries.add(key, amount, deadline))
        }

        fn describe(&self) -> String {
            "a store".into()
        }
    }

    /// As where the rank that has made the id dies: the connections to its store end before those of the
    /// group.
    #[test]
    fn who_loses_the_store_says_what_the_group_knows_of_that() {
        let [first, second] = pair();
        let (seen, sees) = mpsc::sync_channel(1);
        let losing = Arc::new(Losing { entries: HashStore::new(), is_lost: AtomicBool::new(false), seen });
        let store: Arc<dyn Store> = losing.clone();
        let meets = options(0, 3, &store);
        let meets = thread::spawn(move || {
            let recall = Recall::default();
            recall.tie(&first);
            let met = Context::create_unless(&recall, meets, None).map(drop);
            recall.end();
            met
        });
        store.get("grown/0/rank/0", Deadline::after(SOON)).expect("it comes");
        losing.is_lost.store(true, Ordering::SeqCst);
        sees.recv_timeout(SOON).expect("it looks again");
        second.abort_because(Some("it has no memory"));
        let error = meets.join().expect("no panic").expect_err("rank 1 does not come");
        assert!(error.text().contains("it has no memory"), "{error}");
    }

    #[test]
    fn those_who_wait_for_a_rank_that_declines_hear_why() {
        let store = store();
        let joins = options(1, 2, &store);
        let joins = thread::spawn(move || Context::create_unless(&Recall::default(), joins, None).map(drop));
        let why = Error::new(Status::InvalidUsage, "the ranks do not agree");
        let since = Instant::now();
        Context::decline(&options(0, 2, &store), why);
        let error = joins.join().expect("no panic").expect_err("rank 0 does not come");
        assert_eq!(error.status(), Status::PeerFailed, "{error}");
        assert!(error.text().contains("the ranks do not agree"), "{error}");
        assert!(since.elapsed() < SOON);
    }
}
