//! What ranks set up together, now or at the end of a group: communicators meet, windows are shared.
//!
//! All that one group has does so side by side, in a thread each: the ranks of a communicator may all be
//! here, and wait for each other. What is made of one communicator has its turns there: see [`crate::order`].

use std::io;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;

use unisono::communicator::{Child, Context, Options, Recall, Rendezvous};
use unisono::rendezvous::id::served;
use unisono::sys::process;

use crate::abi::{ncclComm_t, ncclResult_t};
use crate::communicator::{COMMUNICATORS, Communicator, Making};
use crate::error::{Error, IN_PROGRESS, Result, SUCCESS, Status, caught};
use crate::grow::Growth;
use crate::order::Turn;

/// A communicator that is to meet the other ranks.
pub(crate) struct Joining {
    pub(crate) communicator: Arc<Communicator>,
    pub(crate) handle: ncclComm_t,
    /// Where the client keeps the handle, writable until the group ends: NULL is written if the ranks do not
    /// meet.
    pub(crate) place: *mut ncclComm_t,
    pub(crate) ranks: Ranks,
}

/// Which ranks are to meet.
pub(crate) enum Ranks {
    /// Those that find each other so.
    Of(Box<Options>),
    /// Those of this communicator that give the same colour, in the order of their keys.
    Alike(Arc<Communicator>, Option<u32>, i64),
    /// The same, where nothing can be exchanged over it any more.
    AlikeAnew(Arc<Communicator>, Option<u32>, i64),
    /// These of this communicator.
    Remaining(Arc<Communicator>, Vec<u32>),
    /// All of this communicator, and others that join them.
    Grown(Arc<Communicator>, Box<Growth>),
}

impl Ranks {
    /// The communicator that they are of.
    fn parent(&self) -> Option<&Arc<Communicator>> {
        match self {
            Ranks::Of(_) => None,
            Ranks::Alike(parent, ..)
            | Ranks::AlikeAnew(parent, ..)
            | Ranks::Remaining(parent, _)
            | Ranks::Grown(parent, _) => Some(parent),
        }
    }

    /// Whether they meet where unique ids are served, not over their parent.
    fn meet_by_id(&self) -> bool {
        matches!(self, Ranks::Of(_) | Ranks::Grown(..))
    }

    /// Whether the call by which this communicator is made of them waits until it is.
    fn call_blocks(&self, communicator: &Communicator) -> bool {
        match self {
            Ranks::Of(_) => communicator.config.blocking,
            // The client may ask either.
            Ranks::Grown(parent, _) => parent.config.blocking && communicator.config.blocking,
            // It is the parent that the client calls.
            Ranks::Alike(parent, ..) | Ranks::AlikeAnew(parent, ..) | Ranks::Remaining(parent, _) => {
                parent.config.blocking
            }
        }
    }

    /// Has them meet, unless `recall` calls it off; `turn` is one of their parent's, `label` what the client
    /// calls them. `None`: this rank is not one of them.
    fn meet(self, mut turn: Option<Turn>, label: Option<String>, recall: &Recall) -> Result<Option<Context>> {
        if let Some(turn) = &turn {
            turn.wait();
        }
        let mut child = match self {
            Ranks::Of(options) => return Context::create_unless(recall, *options, label).map(Some),
            Ranks::Alike(parent, color, key) => parent.group()?.begin_split(color, key)?,
            Ranks::AlikeAnew(parent, color, key) => {
                let parent = parent.group()?;
                let all: Vec<u32> = (0..parent.size()).collect();
                let all = parent.begin_regroup("revoked", &all)?.labelled(parent.name().to_owned());
                drop(turn.take());
                all.meet_and_split_unless(recall, color, key)?
            }
            Ranks::Remaining(parent, ranks) => Some(begin_shrink(parent.group()?, &ranks)?),
            Ranks::Grown(parent, growth) => {
                let (options, _served) = growth.agree(&parent)?;
                drop(turn);
                let parent = parent.group()?;
                recall.tie(parent);
                let label = label.unwrap_or_else(|| format!("{}/grown", parent.name()));
                return Context::create_unless(recall, options, Some(label)).map(Some);
            }
        };
        // The rest is the child's own.
        drop(turn);
        if let Some(label) = label {
            child = child.map(|child| child.labelled(label));
        }
        child.map(|child| child.meet_unless(recall)).transpose()
    }
}

/// What remains of a group; in its parent's turn, as all its ranks count those.
fn begin_shrink(parent: &Context, ranks: &[u32]) -> Result<Child> {
    let child = parent.begin_regroup("shrunk", ranks)?;
    Ok(child.labelled(format!("{}/shrunk", parent.name())))
}

/// This rank does not shrink `parent` to `ranks`, for the cause `why`, which those hear who do. It counts as
/// if it had: they find each other when all try again.
pub(crate) fn refuse_shrink(parent: &Communicator, ranks: &[u32], why: Error) -> Error {
    let turn = parent.order().take();
    turn.wait();
    // It has met, and these are ranks of it.
    if let Ok(child) = parent.group().and_then(|parent| begin_shrink(parent, ranks)) {
        child.decline(&why);
    }
    why
}

impl Joining {
    /// Gives a communicator its handle, so that it can be polled and aborted while it meets the others.
    ///
    /// # Safety
    /// `place` is writable until the thread's group ends.
    pub(crate) unsafe fn new(
        communicator: Arc<Communicator>,
        place: *mut ncclComm_t,
        ranks: Ranks,
    ) -> Joining {
        let handle = match ranks {
            // It takes part in the splitting, and in nothing after that.
            Ranks::Alike(_, None, _) | Ranks::AlikeAnew(_, None, _) => std::ptr::null_mut(),
            _ => communicator.give_handle(),
        };
        // SAFETY: this function's contract.
        unsafe { place.write(handle) };
        Joining { communicator, handle, place, ranks }
    }

    /// The client gets no communicator.
    pub(crate) fn discard(self) {
        take_back(self.handle, self.place);
    }

    /// The client keeps the handle of a communicator that was not made. Where it keeps that is nothing to
    /// write to any more.
    pub(crate) fn give_up(self, why: Error) {
        self.communicator.meet(|_| Err(why));
    }
}

/// Takes a handle back; `place` is that of its [`Joining`].
fn take_back(handle: ncclComm_t, place: *mut ncclComm_t) {
    COMMUNICATORS.take(handle);
    // SAFETY: as the field says.
    unsafe { place.write(std::ptr::null_mut()) };
}

/// Has communicators meet. Those that block, or whose parents do, have met when this returns; the client has
/// no handle of one that failed.
pub(crate) fn meet(joinings: Vec<Joining>) -> Result<ncclResult_t> {
    meet_by(joinings, |meet| process::spawn("unisono-meet", meet))
}

/// What is to be done for one of them, by whoever comes to it first.
struct Meet {
    communicator: Arc<Communicator>,
    ranks: Ranks,
    /// Of their parent.
    turn: Option<Turn>,
    making: Option<Making>,
}

impl Meet {
    fn of(communicator: &Arc<Communicator>, ranks: Ranks) -> Meet {
        let (turn, making) =
            ranks.parent().map(|parent| (parent.order().take(), Making::of(parent, communicator))).unzip();
        Meet { communicator: communicator.clone(), ranks, turn, making }
    }

    fn run(self) {
        let Meet { communicator, ranks, turn, making } = self;
        let by_id = ranks.meet_by_id();
        communicator.meet(|recall| ranks.meet(turn, communicator.config.name.clone(), recall));
        if let Some(making) = making {
            making.end(communicator.met().and_then(|met| met.as_ref().err()));
        }
        // Of others its servers are its parent's, which has met.
        if by_id {
            served::is_over(&communicator.servers(), matches!(communicator.met(), Some(Ok(_))));
        }
    }

    /// This rank does not come, for the cause `why`: those who wait for it hear that, where no others are to
    /// be heard first.
    fn decline(self, why: &Error) {
        self.communicator.meet(|_| Err(why.clone()));
        match self.ranks {
            // Others in this process are told otherwise.
            Ranks::Of(options)
                if matches!(options.rendezvous, Rendezvous::Id(_) | Rendezvous::Invitation(_)) =>
            {
                Context::decline(&options, why.clone());
            }
            Ranks::Remaining(parent, ranks) if self.turn.is_some_and(|turn| turn.is_next()) => {
                let child = parent.group().and_then(|parent| begin_shrink(parent, &ranks));
                let _ = child.map(|child| child.decline(why));
            }
            _ => {}
        }
    }
}

/// The same, with threads that `spawn` starts. The last one, if its call waits, needs none of its own. If
/// another one has none, the others that have begun may wait for it: then none is made, and nobody waits.
fn meet_by(
    joinings: Vec<Joining>,
    spawn: impl Fn(Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>>,
) -> Result<ncclResult_t> {
    let mut begun = Vec::with_capacity(joinings.len());
    let mut joinings = joinings.into_iter();
    while let Some(Joining { communicator, handle, place, ranks }) = joinings.next() {
        let blocks = ranks.call_blocks(&communicator);
        let meet = Arc::new(Mutex::new(Some(Meet::of(&communicator, ranks))));
        let take = |meet: &Mutex<Option<Meet>>| meet.lock().unwrap_or_else(PoisonError::into_inner).take();
        let taken = meet.clone();
        let started = spawn(Box::new(move || {
            process::stand_in();
            if let Some(meet) = take(&taken) {
                meet.run();
            }
        }));
        match started {
            Ok(thread) => begun.push((communicator, handle, place, blocks, Some(thread))),
            Err(_) if blocks && joinings.len() == 0 => {
                if let Some(meet) = take(&meet) {
                    meet.run();
                }
                begun.push((communicator, handle, place, blocks, None));
            }
            Err(cause) => {
                let error = Error::system("a thread to meet the other ranks cannot be started", cause);
                for (communicator, handle, place, ..) in begun {
                    communicator.abort();
                    take_back(handle, place);
                }
                let rest = joinings.map(|other| {
                    (Some(Meet::of(&other.communicator, other.ranks)), other.handle, other.place)
                });
                for (meet, handle, place) in [(take(&meet), handle, place)].into_iter().chain(rest) {
                    if let Some(meet) = meet {
                        meet.decline(&error);
                    }
                    take_back(handle, place);
                }
                return Err(error);
            }
        }
    }
    let mut result = Ok(SUCCESS);
    for (communicator, handle, place, blocks, thread) in begun {
        if !blocks {
            if let Some(thread) = thread {
                communicator.keep_thread(thread);
            }
            result = result.map(|_| IN_PROGRESS);
            continue;
        }
        let ended = communicator.wait();
        if communicator.met().is_some() {
            // It lets go of the communicator, which may be destroyed next. Panics are caught within.
            let _ = thread.map(JoinHandle::join);
        }
        if let Err(error) = ended {
            take_back(handle, place);
            result = result.and(Err(error));
        }
    }
    result
}

/// What the ranks of a communicator set up over it, a window or that it is suspended: all of them do, and
/// wait for each other.
pub(crate) struct Sharing {
    pub(crate) communicator: Arc<Communicator>,
    pub(crate) share: Box<dyn FnOnce() -> Result<()> + Send>,
}

impl Sharing {
    /// Sets it up on this thread, when its turn comes. Nothing of the communicator is kept but what `share`
    /// has: what is suspended is to go back.
    fn set_up(self, turn: Turn) -> Result<()> {
        let Sharing { communicator, share } = self;
        drop(communicator);
        turn.wait();
        caught(share)
    }
}

/// Sets that up.
pub(crate) fn share(sharings: Vec<Sharing>) -> Result<()> {
    share_by(sharings, |share| process::spawn("unisono-share", share))
}

/// The same, with threads that `spawn` starts. The last one needs none of its own. If another one has none,
/// none begins: the others would wait for the one that has no thread.
fn share_by(
    sharings: Vec<Sharing>,
    spawn: impl Fn(Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>>,
) -> Result<()> {
    let turns: Vec<Turn> = sharings.iter().map(|sharing| sharing.communicator.order().take()).collect();
    let count = sharings.len();
    let mut threads = Vec::with_capacity(count);
    let mut own = None;
    for (index, (turn, sharing)) in turns.into_iter().zip(sharings).enumerate() {
        let (begin, begins) = mpsc::channel::<()>();
        let (end, ends) = mpsc::channel();
        let share = Arc::new(Mutex::new(Some((turn, sharing))));
        let take = |share: &Mutex<Option<_>>| share.lock().unwrap_or_else(PoisonError::into_inner).take();
        let taken = share.clone();
        let started = spawn(Box::new(move || {
            if begins.recv().is_ok()
                && let Some((turn, sharing)) = take(&taken)
            {
                // Who began it waits for that.
                let _ = end.send(sharing.set_up(turn));
            }
        }));
        match started {
            Ok(thread) => threads.push((begin, ends, thread)),
            Err(_) if index + 1 == count => own = take(&share),
            Err(cause) => {
                for (begin, _, thread) in threads {
                    drop(begin);
                    // It has done nothing.
                    let _ = thread.join();
                }
                return Err(Error::system(
                    "a thread to set up a window or a suspension cannot be started",
                    cause,
                ));
            }
        }
    }
    for (begin, ..) in &threads {
        // Every thread is there: each may begin.
        let _ = begin.send(());
    }
    let own = own.map_or(Ok(()), |(turn, sharing)| sharing.set_up(turn));
    let all = threads.into_iter().map(|(_, ends, thread)| {
        let end = ends.recv().unwrap_or_else(|_| {
            Err(Error::new(Status::Internal, "a thread ended before it had set up a window or a suspension"))
        });
        // Panics are caught within.
        let _ = thread.join();
        end
    });
    all.fold(Ok(()), Result::and).and(own)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
    use std::time::{Duration, Instant};

    use unisono::rendezvous::hash::HashStore;

    use super::*;
    use crate::config::Config;
    use crate::place::Place;

    fn communicator(blocking: bool) -> Arc<Communicator> {
        Communicator::new(Place::Host(0), Config { blocking, ..Config::unset() }, Vec::new())
    }

    fn options(rank: u32, size: u32, rendezvous: Rendezvous) -> Options {
        Options {
            rank,
            size,
            rendezvous,
            name: "made".into(),
            timeout: Duration::from_secs(60),
            interface: Some("127.0.0.1".into()),
            transports: Some("shm".into()),
            host: None,
        }
    }

    #[test]
    fn a_group_that_has_no_thread_for_one_of_its_ranks_fails_at_once() {
        let store = Arc::new(HashStore::new());
        let communicators = [0, 1, 2].map(|_| Communicator::new(Place::Host(0), Config::unset(), Vec::new()));
        let mut places = [std::ptr::dangling_mut(); 3];
        let joinings = communicators.iter().zip(&mut places).enumerate();
        let joinings = joinings.map(|(rank, (communicator, place))| {
            let options = Options {
                rank: rank as u32,
                size: 3,
                rendezvous: Rendezvous::Store(store.clone()),
                name: String::new(),
                timeout: Duration::from_secs(60),
                interface: None,
                transports: None,
                host: None,
            };
            // SAFETY: it lives as long as what is called here.
            unsafe { Joining::new(communicator.clone(), place, Ranks::Of(Box::new(options))) }
        });
        let (start, count) = (Instant::now(), Cell::new(0));
        let error = meet_by(joinings.collect(), |meet| {
            count.set(count.get() + 1);
            if count.get() == 2 {
                Err(io::ErrorKind::WouldBlock.into())
            } else {
                process::spawn("meets", meet)
            }
        })
        .unwrap_err();
        assert!(start.elapsed() < Duration::from_secs(30), "it has waited for a rank that never comes");
        assert_eq!(error.status(), Status::System, "{error}");
        assert!(error.text().contains("a thread to meet the other ranks"), "{error}");
        assert_eq!((places, count.get()), ([std::ptr::null_mut(); 3], 2));
        let ends = communicators.map(|communicator| communicator.wait().unwrap_err().status());
        assert_eq!(ends, [Status::Aborted, Status::System, Status::System]);
    }

    /// Else that thread would be the last to hold it, and the process might end before the others have heard
    /// that it has left.
    #[test]
    fn who_lets_go_of_a_communicator_waits_for_the_thread_that_has_made_it() {
        for end in [crate::end::ncclCommDestroy, crate::end::ncclCommAbort] {
            let communicator = communicator(false);
            let options = options(0, 1, Rendezvous::Store(Arc::new(HashStore::new())));
            let mut place = std::ptr::null_mut();
            let ranks = Ranks::Of(Box::new(options));
            // SAFETY: it lives as long as what is called here.
            let joining = unsafe { Joining::new(communicator.clone(), &raw mut place, ranks) };
            let has_ended = Arc::new(AtomicBool::new(false));
            let begun = meet_by(vec![joining], |meet| {
                let ended = has_ended.clone();
                process::spawn("meets", move || {
                    meet();
                    std::thread::sleep(Duration::from_millis(100));
                    ended.store(true, Ordering::SeqCst);
                })
            });
            assert_eq!((begun, communicator.wait()), (Ok(IN_PROGRESS), Ok(())));
            assert_eq!((end(place), has_ended.load(Ordering::SeqCst)), (SUCCESS, true));
            assert_eq!(Arc::strong_count(&communicator), 1);
        }
    }

    type Begun = (Result<ncclResult_t>, Arc<Communicator>);

    /// Makes a communicator of `ranks` where no thread can be started.
    fn meets_without_a_thread(blocking: bool, ranks: Ranks) -> Begun {
        let (communicator, mut place) = (communicator(blocking), std::ptr::null_mut());
        // SAFETY: it lives as long as what is called here.
        let joining = unsafe { Joining::new(communicator.clone(), &raw mut place, ranks) };
        let met = meet_by(vec![joining], |_| Err(io::ErrorKind::WouldBlock.into()));
        assert_eq!(COMMUNICATORS.take(place).is_some(), met.is_ok());
        (met, communicator)
    }

    /// Long before [`options`] has it wait no more.
    fn hears_that_there_is_no_thread<T>(waits: JoinHandle<unisono::error::Result<T>>, since: Instant) {
        let error = waits.join().expect("no panic").err().expect("the other does not come");
        assert!(error.text().contains("a thread to meet the other ranks"), "{error}");
        assert!(since.elapsed() < Duration::from_secs(30), "{error}");
    }

    #[test]
    fn a_rank_that_has_no_thread_and_waits_meets_the_others_itself() {
        let store = Arc::new(HashStore::new());
        let other = options(1, 2, Rendezvous::Store(store.clone()));
        let other = std::thread::spawn(|| Context::create(other));
        let ranks = Ranks::Of(Box::new(options(0, 2, Rendezvous::Store(store))));
        let (met, communicator) = meets_without_a_thread(true, ranks);
        assert_eq!((met, communicator.wait()), (Ok(SUCCESS), Ok(())));
        assert!(other.join().expect("no panic").is_ok());
    }

    #[test]
    fn who_meets_a_rank_by_an_id_hears_that_it_has_no_thread() {
        // As they begin, and where ranks join.
        for rendezvous in [Rendezvous::Id, Rendezvous::Invitation] {
            let id = served::create(Some("127.0.0.1")).expect("an id");
            let since = Instant::now();
            let other = options(1, 2, rendezvous(id));
            let other = std::thread::spawn(|| Context::create(other));
            let ranks = Ranks::Of(Box::new(options(0, 2, rendezvous(id))));
            let (met, _communicator) = meets_without_a_thread(false, ranks);
            assert_eq!(met.map_err(|error| error.status()), Err(Status::System));
            hears_that_there_is_no_thread(other, since);
            served::release(&id);
        }
    }

    #[test]
    fn who_shrinks_hears_that_another_rank_has_no_thread() {
        let store = Arc::new(HashStore::new());
        let [parent, other] = [0, 1]
            .map(|rank| {
                let options = options(rank, 2, Rendezvous::Store(store.clone()));
                std::thread::spawn(|| {
                    let communicator = communicator(false);
                    communicator.meet(|_| Context::create(options).map(Some));
                    communicator
                })
            })
            .map(|meets| meets.join().expect("no panic"));
        let shrinks = |parent: Arc<Communicator>| {
            std::thread::spawn(move || begin_shrink(parent.group()?, &[0, 1])?.meet())
        };
        let since = Instant::now();
        let waits = shrinks(other.clone());
        let (met, _communicator) =
            meets_without_a_thread(false, Ranks::Remaining(parent.clone(), vec![0, 1]));
        assert_eq!(met.map_err(|error| error.status()), Err(Status::System));
        hears_that_there_is_no_thread(waits, since);
        // Both have begun it as often as each other.
        for again in [parent, other].map(shrinks) {
            assert!(again.join().expect("no panic").is_ok());
        }
    }

    #[test]
    fn an_id_whose_meeting_has_failed_is_served_for_those_who_come_later() {
        for (size, met) in [(1, true), (2, false)] {
            let bytes = served::create(Some("127.0.0.1")).unwrap();
            let servers = served::server(&bytes).into_iter().collect();
            let communicator = Communicator::new(Place::Host(0), Config::unset(), servers);
            let options = Options {
                rank: 0,
                size,
                rendezvous: Rendezvous::Id(bytes),
                name: String::new(),
                timeout: Duration::from_millis(50),
                interface: None,
                transports: None,
                host: None,
            };
            let mut place = std::ptr::null_mut();
            // SAFETY: it lives as long as what is called here.
            let joining = unsafe { Joining::new(communicator, &raw mut place, Ranks::Of(Box::new(options))) };
            assert_eq!(meet(vec![joining]).is_ok(), met);
            assert!(served::server(&bytes).is_some(), "of {size}");
            assert_eq!(COMMUNICATORS.take(place).is_some(), met);
            assert_eq!(served::server(&bytes).is_some(), !met, "of {size}");
        }
    }

    /// UNISONO_NCCL_TIMEOUT may be anything: it is not what they have waited for.
    #[test]
    fn who_waits_in_vain_to_split_is_told_which_setting_says_how_long() {
        let store = Arc::new(HashStore::new());
        let [parent, _stays_away] = [0, 1]
            .map(|rank| {
                let store = store.clone();
                std::thread::spawn(move || {
                    let communicator = Communicator::new(Place::Host(0), Config::unset(), Vec::new());
                    let options = Options {
                        rank,
                        size: 2,
                        rendezvous: Rendezvous::Store(store),
                        name: String::new(),
                        timeout: Duration::from_secs(1),
                        interface: None,
                        transports: None,
                        host: None,
                    };
                    communicator.meet(|_| Context::create(options).map(Some));
                    communicator
                })
            })
            .map(|meets| meets.join().expect("no panic"));
        let handle = COMMUNICATORS.insert(parent);
        let mut child = std::ptr::null_mut();
        // SAFETY: live memory.
        let split = unsafe { crate::create::ncclCommSplit(handle, 0, 0, &mut child, std::ptr::null_mut()) };
        // SAFETY: a C string, until the next call of this thread fails.
        let text =
            unsafe { std::ffi::CStr::from_ptr(crate::error::ncclGetLastError(handle)) }.to_string_lossy();
        assert_eq!((split, child), (crate::error::result(Status::Timeout), std::ptr::null_mut()), "{text}");
        assert!(text.contains("raise UNISONO_NCCL_MEETING_TIMEOUT"), "{text}");
        COMMUNICATORS.take(handle);
    }

    #[test]
    fn a_group_that_has_no_thread_for_one_of_its_windows_shares_none() {
        let begun = Arc::new(AtomicU32::new(0));
        let sharings = [0, 1, 2].map(|_| {
            let begun = begun.clone();
            let communicator = Communicator::new(Place::Host(0), Config::unset(), Vec::new());
            let share = move || {
                begun.fetch_add(1, Ordering::Relaxed);
                Ok(())
            };
            Sharing { communicator, share: Box::new(share) }
        });
        let count = Cell::new(0);
        let error = share_by(sharings.into(), |share| {
            count.set(count.get() + 1);
            if count.get() == 2 {
                Err(io::ErrorKind::WouldBlock.into())
            } else {
                process::spawn("shares", share)
            }
        })
        .unwrap_err();
        assert_eq!(error.status(), Status::System, "{error}");
        assert_eq!((begun.load(Ordering::Relaxed), count.get()), (0, 2));
    }

    /// The other ranks would wait for it.
    #[test]
    fn the_last_window_is_shared_also_where_there_is_no_thread() {
        for threads in 0..2 {
            // Over one communicator: the last one waits for its turn.
            let (communicator, shared) = (communicator(true), Arc::new(AtomicU32::new(0)));
            let sharings = (0..=threads).map(|index| {
                let shared = shared.clone();
                let share = move || {
                    assert_eq!(shared.fetch_add(1, Ordering::Relaxed), index);
                    Ok(())
                };
                Sharing { communicator: communicator.clone(), share: Box::new(share) }
            });
            let count = Cell::new(0);
            let spawn = |share| {
                count.set(count.get() + 1);
                if count.get() > threads {
                    Err(io::ErrorKind::WouldBlock.into())
                } else {
                    process::spawn("shares", share)
                }
            };
            assert_eq!(share_by(sharings.collect(), spawn), Ok(()));
            assert_eq!(shared.load(Ordering::Relaxed), threads + 1);
        }
    }

    /// Its memory goes back with it.
    #[test]
    fn who_shares_lets_go_of_a_communicator_while_it_does() {
        for has_thread in [false, true] {
            let communicator = communicator(true);
            let (last, kept) = (Arc::downgrade(&communicator), communicator.clone());
            let share = move || {
                assert!(last.upgrade().is_some());
                drop(kept);
                assert!(last.upgrade().is_none(), "somebody else has it");
                Ok(())
            };
            let spawn = |share| match has_thread {
                true => process::spawn("shares", share),
                false => Err(io::ErrorKind::WouldBlock.into()),
            };
            assert_eq!(share_by([Sharing { communicator, share: Box::new(share) }].into(), spawn), Ok(()));
        }
    }

    /// The calling thread's blocked signals, as bits.
    fn blocked_signals() -> u64 {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap();
        u64::from_str_radix(mask.trim(), 16).unwrap()
    }

    #[test]
    fn threads_that_share_windows_take_no_signals() {
        const SIGSEGV: u32 = 11;
        const SIGTERM: u32 = 15;
        let bit = |signal: u32| 1u64 << (signal - 1);
        let (sender, receiver) = std::sync::mpsc::channel();
        let sharing = Sharing {
            communicator: Communicator::new(Place::Host(0), Config::unset(), Vec::new()),
            share: Box::new(move || {
                sender.send(blocked_signals()).unwrap();
                Ok(())
            }),
        };
        share(vec![sharing]).unwrap();
        let blocked = receiver.recv().unwrap();
        assert_ne!(blocked & bit(SIGTERM), 0, "{blocked:#x}");
        // A fault is the thread's own.
        assert_eq!(blocked & bit(SIGSEGV), 0, "{blocked:#x}");
    }
}
