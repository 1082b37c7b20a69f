//! One run of a job among those that use the same directory.
//!
//! A directory outlives the processes: what an earlier run left must never be taken for this one's. Rank 0
//! begins a run: it makes a new subdirectory of a random name, writes that name into a file, locks the file
//! and renames it to `leader`. The kernel ends the lock with the process, however it ends. The other ranks
//! believe a `leader` only while it is locked, and take a seat in its run by creating a file; where the seat
//! of their rank is taken, the run is an older one that is just ending, and they wait for the next. Its seats
//! stay taken for as long as they find it: a run's directory gets another name before it is removed. Rank 0
//! keeps a run whose meeting has failed, and marks it: who waited for a run to begin joins it also when rank
//! 0 has ended since, and finds there what went wrong.

#![forbid(unsafe_code)]

use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::file::{self, FileStore, Pause};
use crate::deadline::Deadline;
use crate::error::{Error, Result, Status, fail};
use crate::sys::lock::{self, Lock};
use crate::sys::{random, user};

const LEADER: &str = "leader";
/// The name of a run: 16 hexadecimal digits after this.
const RUN: &str = "run-";
/// The key by which rank 0 marks a run whose meeting has failed.
pub(super) const FAILED: &str = "failed";

/// Rank 0's hold on its run: while it lives, the others find the run. Dropping it removes the run's
/// directory.
pub(super) struct Leader {
    base: PathBuf,
    name: String,
    /// Whether the base is to go, too, when nothing else is in it. Not one that somebody else made.
    removes_base: bool,
    _lock: Lock,
    /// A forked child has a copy, and must not end its parent's run.
    process: u32,
}

/// Begins a run in `base`, as rank 0.
pub(super) fn lead(base: &Path) -> Result<(FileStore, Leader)> {
    let refused = |cause| Error::system(format!("cannot begin a run in {}", base.display()), cause);
    let mut last = io::Error::from(ErrorKind::NotFound);
    // A run of the same job that ends at this moment may remove the empty directory under our feet.
    for _ in 0..8 {
        let mut number = [0; 8];
        random::fill(&mut number)?;
        let name = format!("{RUN}{:016x}", u64::from_le_bytes(number));
        match try_lead(base, &name) {
            Ok((lock, removes_base)) => {
                let process = std::process::id();
                let leader = Leader { base: base.to_owned(), name, removes_base, _lock: lock, process };
                let store = FileStore::open(base.join(&leader.name))?;
                return Ok((store, leader));
            }
            Err(cause) => {
                // What has been made of it, a full disk perhaps being the cause. The first cause is the one
                // to tell.
                let _ = fs::remove_file(new_leader(base, &name));
                let _ = fs::remove_dir_all(base.join(&name));
                if cause.kind() != ErrorKind::NotFound {
                    return Err(refused(cause));
                }
                last = cause;
            }
        }
    }
    Err(refused(last))
}

/// Finds rank 0's run in `base` and takes the seat of `rank`.
pub(super) fn follow(base: &Path, rank: usize, deadline: Deadline) -> Result<FileStore> {
    let refused =
        |cause| Error::system(format!("rank {rank} cannot join a run in {}", base.display()), cause);
    let since = Instant::now();
    let mut pause = Pause::default();
    let before = believed(base).map_err(refused)?.map(|(name, _)| name);
    let mut was_taken = false;
    loop {
        match seat(base, rank, before.as_deref()).map_err(refused)? {
            Seat::Ours(run) => return FileStore::at(run),
            Seat::Taken => was_taken = true,
            Seat::None => {}
        }
        if deadline.expired() {
            let seconds = since.elapsed().as_secs_f64();
            if was_taken {
                fail!(
                    Timeout,
                    "rank 0's run in {} has its rank {rank} already, and rank 0 has begun no other within {seconds:.1} s; if that is \
                     another job's, one at a time meets there: give each job an UNISONO_STORE of its own",
                    base.display()
                );
            }
            fail!(
                Timeout,
                "rank 0 has not begun a run in {} within {seconds:.1} s; if it is up, the ranks do not see the same directory: \
                 give all the same TMPDIR, or UNISONO_STORE=tcp://HOST-OF-RANK-0:PORT",
                base.display()
            );
        }
        if pause.is_long() {
            // As in `FileStore::get`, against a remembered absence; the directory itself may be absent yet.
            for directory in [base.parent(), Some(base)].into_iter().flatten() {
                let _ = File::open(directory);
            }
        }
        pause.sleep(deadline);
    }
}

/// Removes what jobs beside `base` have left whose rank 0 was killed, where `is_over` tells by the
/// directory's name that none comes there any more.
pub(super) fn tidy(base: &Path, is_over: impl Fn(&str) -> bool) {
    let Some(entries) = base.parent().and_then(|all| fs::read_dir(all).ok()) else { return };
    for job in entries.flatten() {
        let is_left = || matches!(believed(&job.path()), Ok(Some((_, false))));
        if job.file_name().to_str().is_some_and(&is_over) && is_left() {
            let _ = fs::remove_dir_all(job.path());
        }
    }
}

/// The directory of `job`'s runs, in one of this user alone.
pub(super) fn private_base(job: &str) -> Result<PathBuf> {
    let directory = std::env::temp_dir().join(format!("unisono-{}", user::effective_id()));
    private_directory(&directory)?;
    Ok(directory.join(job))
}

/// Makes sure that `directory` exists and that nobody else can read or write in it: under a `TMPDIR` that all
/// may write to, another user may have made it first.
fn private_directory(directory: &Path) -> Result<()> {
    let refused = |cause| Error::system(format!("cannot use the directory {}", directory.display()), cause);
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(cause) if cause.kind() != ErrorKind::AlreadyExists => return Err(refused(cause)),
        _ => {}
    }
    let found = fs::symlink_metadata(directory).map_err(refused)?;
    let wrong = if !found.is_dir() {
        "it is not a directory".to_owned()
    } else if found.uid() != user::effective_id() {
        format!("it belongs to user {}, not to {}", found.uid(), user::effective_id())
    } else if found.mode() & 0o077 != 0 {
        format!("its mode {:o} lets others in", found.mode() & 0o7777)
    } else {
        return Ok(());
    };
    Err(Error::new(
        Status::System,
        format!("{} cannot hold a job's secret: {wrong}; remove it, or set TMPDIR", directory.display()),
    ))
}

impl Leader {
    /// The base is unisono's own, whichever run made it.
    pub(super) fn own_base(&mut self) {
        self.removes_base = true;
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        if std::process::id() != self.process {
            return;
        }
        // What cannot be removed does no harm: without our lock nobody believes it.
        if fs::read(self.base.join(LEADER)).is_ok_and(|name| name == self.name.as_bytes()) {
            let _ = withdraw(&self.base, &self.name);
        }
        remove(&self.base, &self.name);
        if self.removes_base {
            // Fails while there is anything else in it, as it should.
            let _ = fs::remove_dir(&self.base);
        }
    }
}

/// The run's lock, and whether the base was made for it.
fn try_lead(base: &Path, name: &str) -> io::Result<(Lock, bool)> {
    let made = make(base)?;
    DirBuilder::new().mode(0o700).create(base.join(name))?;
    let new = new_leader(base, name);
    let mut leader = File::options().create_new(true).write(true).mode(0o600).open(&new)?;
    leader.write_all(name.as_bytes())?;
    let lock = Lock::on(leader);
    if !lock.try_take()? {
        return Err(io::Error::new(
            ErrorKind::WouldBlock,
            "a new file is locked: the file system's locks do not work",
        ));
    }
    let old = believed(base)?;
    fs::rename(&new, base.join(LEADER))?;
    if let Some((old, false)) = old {
        // Its rank 0 was killed and could not tidy up.
        remove(base, &old);
    }
    Ok((lock, made))
}

/// Makes `base`, and what it is to be in, for this user alone where they are absent; whether `base` was.
fn make(base: &Path) -> io::Result<bool> {
    let mut directory = DirBuilder::new();
    directory.mode(0o700);
    if let Some(above) = base.parent() {
        directory.recursive(true).create(above)?;
    }
    match directory.recursive(false).create(base) {
        Ok(()) => Ok(true),
        Err(_) if base.is_dir() => Ok(false),
        Err(cause) => Err(cause),
    }
}

/// Removes the directory of the run `name`. Ranks that have read that name may be about to take their seats,
/// and none is to become free where they look.
fn remove(base: &Path, name: &str) {
    remove_by(base, name, |directory| fs::remove_dir_all(directory));
}

/// [`remove`], where `delete` deletes the directory that it is given.
fn remove_by(base: &Path, name: &str, delete: impl FnOnce(&Path) -> io::Result<()>) {
    let over = over(base, name);
    if fs::rename(base.join(name), &over).is_ok() {
        let _ = delete(&over);
    }
}

/// What a run's directory becomes when it is about to be removed: no rank looks there.
fn over(base: &Path, name: &str) -> PathBuf {
    base.join(format!(".{name}-over"))
}

/// What becomes `leader` when it is complete.
fn new_leader(base: &Path, name: &str) -> PathBuf {
    base.join(format!(".{name}"))
}

/// Removes the file `leader` if it is that of the run `name`. The leader of another run may put its own in
/// its place at any moment: so it is taken away first, and put back if it turns out to be another's, unless
/// there is a newer one by then.
fn withdraw(base: &Path, name: &str) -> io::Result<()> {
    let (leader, taken) = (base.join(LEADER), base.join(format!(".{name}-taken")));
    fs::rename(&leader, &taken)?;
    if fs::read(&taken)? != name.as_bytes() {
        match fs::hard_link(&taken, &leader) {
            Err(cause) if cause.kind() != ErrorKind::AlreadyExists => return fs::rename(&taken, &leader),
            _ => {}
        }
    }
    fs::remove_file(&taken)
}

/// The run that `leader` names, and whether its rank 0 lives.
fn believed(base: &Path) -> io::Result<Option<(String, bool)>> {
    let found = file::find(|| {
        let leader = File::open(base.join(LEADER))?;
        let mut name = String::new();
        // A name has 20 bytes; whatever is longer is not one.
        if (&leader).take(64).read_to_string(&mut name).is_err() {
            return Ok(None);
        }
        let digits = name.strip_prefix(RUN).unwrap_or_default();
        if digits.len() != 16 || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Ok(None);
        }
        Ok(Some((name, lock::is_locked(&leader)?)))
    })?;
    Ok(found.flatten())
}

/// What a rank that looks for its seat finds.
enum Seat {
    /// It has got it, in the run of this directory.
    Ours(PathBuf),
    /// Somebody has it, in a run whose rank 0 lives.
    Taken,
    /// There is no run to join.
    None,
}

/// Takes our seat, if there is a run. Of those whose rank 0 has ended it may be one that has failed, unless
/// it was there `before` we came.
fn seat(base: &Path, rank: usize, before: Option<&str>) -> io::Result<Seat> {
    let Some((name, is_led)) = believed(base)? else { return Ok(Seat::None) };
    if !is_led && (before == Some(&name) || !base.join(&name).join(FAILED).exists()) {
        return Ok(Seat::None);
    }
    take(base, &name, is_led, rank)
}

/// Takes our seat in the run `name`.
fn take(base: &Path, name: &str, is_led: bool, rank: usize) -> io::Result<Seat> {
    let run = base.join(name);
    let seat = run.join(format!(".seat-{rank}"));
    match File::options().create_new(true).write(true).mode(0o600).open(&seat) {
        Ok(_) if is_found(base, &seat)? => Ok(Seat::Ours(run)),
        Ok(_) => {
            // Who removes the run may have come past our seat already.
            let _ = fs::remove_dir_all(over(base, name));
            Ok(Seat::None)
        }
        Err(cause) if cause.kind() == ErrorKind::AlreadyExists && is_led => Ok(Seat::Taken),
        Err(cause) if matches!(cause.kind(), ErrorKind::AlreadyExists | ErrorKind::NotFound) => {
            Ok(Seat::None)
        }
        Err(cause) => Err(cause),
    }
}

/// Whether a seat that we have taken is where others look for it. Its run may have got its other name while
/// the file was made, which then is in a directory that is being removed: perhaps in the place of an older one
/// of our rank.
fn is_found(base: &Path, seat: &Path) -> io::Result<bool> {
    // As in `FileStore::get`, against a remembered name of the run.
    let _ = File::open(base);
    seat.try_exists()
}

#[cfg(test)]
mod tests {
    use std::mem::ManuallyDrop;
    use std::os::unix::fs::symlink;
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::rendezvous::scratch::Scratch;
    use crate::rendezvous::store::Store;

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(20))
    }

    fn at_once() -> Deadline {
        Deadline::after(Duration::ZERO)
    }

    #[test]
    fn a_run_is_found_by_the_others_and_leaves_nothing() {
        let scratch = Scratch::new();
        let base = scratch.path().join("job");
        thread::scope(|scope| {
            let other = scope.spawn(|| follow(&base, 1, soon()).unwrap().get("k", soon()).unwrap());
            let (store, leader) = lead(&base).unwrap();
            store.set("k", b"v", soon()).unwrap();
            assert_eq!(other.join().unwrap(), b"v");
            drop(leader);
        });
        assert!(!base.exists());
    }

    #[test]
    fn what_a_killed_run_left_is_not_believed_and_is_removed() {
        let scratch = Scratch::new();
        let base = scratch.path().join("job");
        let (store, leader) = lead(&base).unwrap();
        store.set("k", b"old", soon()).unwrap();
        let left = store.directory().to_owned();
        // As the kernel leaves it: the lock is gone, the files are there.
        let mut leader = ManuallyDrop::new(leader);
        leader._lock = Lock::on(File::open("/dev/null").unwrap());
        assert!(left.exists() && base.join(LEADER).exists());
        let error = follow(&base, 1, at_once()).err().expect("there is no run");
        assert_eq!(error.status(), Status::Timeout);
        assert!(error.text().contains(base.to_str().unwrap()), "{error}");
        let (_store, _leader) = lead(&base).unwrap();
        assert_eq!(follow(&base, 1, soon()).unwrap().try_get("k", soon()).unwrap(), None);
        assert!(!left.exists());
    }

    #[test]
    fn a_run_that_began_and_failed_while_others_waited_tells_them_why() {
        let scratch = Scratch::new();
        // Some rank 0 fails and ends, in any case before the others look again.
        let fail = || {
            let (store, leader) = lead(scratch.path()).unwrap();
            store.set(FAILED, &[], soon()).unwrap();
            ManuallyDrop::new(leader)._lock = Lock::on(File::open("/dev/null").unwrap());
            store
        };
        let old = fail();
        thread::scope(|scope| {
            let other = scope.spawn(|| follow(scratch.path(), 1, soon()).unwrap());
            // Until it has begun to wait before one of them.
            let mut new = Vec::new();
            while !other.is_finished() {
                thread::sleep(Duration::from_millis(50));
                new.push(fail());
                thread::sleep(Duration::from_millis(200));
            }
            let joined = other.join().unwrap();
            assert!(new.iter().any(|store| store.directory() == joined.directory()));
        });
        assert!(!old.directory().exists());
        // To who comes later it is an old one.
        assert!(follow(scratch.path(), 2, at_once()).is_err());
    }

    #[test]
    fn a_run_that_is_just_ending_is_not_joined_twice() {
        let scratch = Scratch::new();
        let (first, ending) = lead(scratch.path()).unwrap();
        assert_eq!(follow(scratch.path(), 1, soon()).unwrap().directory(), first.directory());
        // Rank 1 comes again: rank 0 still holds the old run.
        let error = follow(scratch.path(), 1, at_once()).err().expect("its seat is taken");
        assert_eq!(error.status(), Status::Timeout);
        for part in [scratch.path().to_str().unwrap(), "has its rank 1 already", "UNISONO_STORE"] {
            assert!(error.text().contains(part) && !error.text().contains("TMPDIR"), "{error}");
        }
        thread::scope(|scope| {
            let again = scope.spawn(|| follow(scratch.path(), 1, soon()).unwrap());
            let (second, _next) = lead(scratch.path()).unwrap();
            assert_eq!(again.join().unwrap().directory(), second.directory());
            // The end of the old run does not end the new one.
            drop(ending);
            assert_eq!(follow(scratch.path(), 2, soon()).unwrap().directory(), second.directory());
        });
    }

    #[test]
    fn a_seat_does_not_become_free_while_its_run_is_removed() {
        let scratch = Scratch::new();
        let (_store, leader) = lead(scratch.path()).unwrap();
        // Rank 1 comes again, and has read the run's name just before that was withdrawn.
        let seat = || take(scratch.path(), &leader.name, true, 1).unwrap();
        assert!(matches!(seat(), Seat::Ours(_)));
        let mut again = None;
        remove_by(scratch.path(), &leader.name, |directory| {
            // As `remove_dir_all` does: what is in it goes first.
            fs::remove_file(directory.join(".seat-1"))?;
            again = Some(seat());
            fs::remove_dir_all(directory)
        });
        assert!(matches!(again, Some(Seat::None)), "a seat in a run that is over");
        let names = fs::read_dir(scratch.path()).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(names.collect::<Vec<_>>(), [LEADER]);
    }

    #[test]
    fn a_seat_in_a_directory_that_has_its_other_name_is_none() {
        let scratch = Scratch::new();
        let (_store, leader) = lead(scratch.path()).unwrap();
        let Seat::Ours(run) = take(scratch.path(), &leader.name, true, 1).unwrap() else {
            panic!("it is free");
        };
        let seat = run.join(".seat-1");
        assert!(is_found(scratch.path(), &seat).unwrap());
        // As if the run had got its other name after its path was looked up.
        let over = over(scratch.path(), &leader.name);
        fs::rename(&run, &over).unwrap();
        assert!(over.join(".seat-1").exists());
        assert!(!is_found(scratch.path(), &seat).unwrap());
        // Who has looked before that must not make the run again, which others would find.
        FileStore::at(run.clone()).unwrap();
        assert!(!run.exists());
    }

    #[test]
    fn a_run_that_begins_while_the_old_one_is_withdrawn_is_found() {
        let scratch = Scratch::new();
        let (_old, ending) = lead(scratch.path()).unwrap();
        // The end of the old run has seen its own name in the file; then the new one replaces the file.
        let (new, _next) = lead(scratch.path()).unwrap();
        withdraw(scratch.path(), &ending.name).unwrap();
        assert_eq!(follow(scratch.path(), 1, soon()).unwrap().directory(), new.directory());
        let names = fs::read_dir(scratch.path()).unwrap().map(|entry| entry.unwrap().file_name());
        assert!(names.into_iter().all(|name| !name.to_str().unwrap().ends_with("-taken")));
    }

    #[test]
    fn a_run_that_cannot_begin_leaves_nothing() {
        let scratch = Scratch::new();
        // Nothing can be renamed to that.
        fs::create_dir(scratch.path().join(LEADER)).unwrap();
        let error = lead(scratch.path()).err().expect("it cannot begin");
        assert!(error.text().contains(scratch.path().to_str().unwrap()), "{error}");
        let left: Vec<_> =
            fs::read_dir(scratch.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, [LEADER]);
    }

    #[test]
    fn a_leader_file_with_other_content_is_ignored() {
        let scratch = Scratch::new();
        for content in [&b""[..], b"run-", b"run-../../../../etc", b"run-00000000000000zz", &[0xff; 100]] {
            fs::write(scratch.path().join(LEADER), content).unwrap();
            let lock = Lock::on(File::open(scratch.path().join(LEADER)).unwrap());
            assert!(lock.try_take().unwrap());
            assert!(follow(scratch.path(), 1, at_once()).is_err());
        }
        lead(scratch.path()).unwrap();
    }

    #[test]
    fn a_directory_that_others_could_have_prepared_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let scratch = Scratch::new();
        let directory = scratch.path().join("d");
        private_directory(&directory).unwrap();
        private_directory(&directory).unwrap();
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o770)).unwrap();
        let open = private_directory(&directory).unwrap_err();
        assert!(open.text().contains("770") && open.text().contains("TMPDIR"), "{open}");
        let link = scratch.path().join("l");
        symlink(&directory, &link).unwrap();
        assert!(private_directory(&link).unwrap_err().text().contains("not a directory"));
    }
}
