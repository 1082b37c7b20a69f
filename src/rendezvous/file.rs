//! A store in a directory that all ranks see: one host's disk or memory, or a shared file system.
//!
//! A key is a file. Values appear whole, by a rename of a temporary file, so readers need no lock; `add`
//! takes the lock of one file in the directory. Names that begin with a dot are ours, all others are keys.

#![forbid(unsafe_code)]

use std::fmt::Write as _;
use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use super::store::{self, Store};
use crate::deadline::Deadline;
use crate::error::{Error, Result, fail};
use crate::sys::lock::{self, Lock};
use crate::sys::random;

/// The longest name of a key's file; file systems take 255 bytes, and encrypting ones somewhat less.
const LONGEST_NAME: usize = 140;
/// How long one process may hold the lock while `add` waits for it. It needs microseconds; seconds mean that
/// it is stopped.
const LONGEST_LOCK: Duration = Duration::from_secs(30);
/// How often a file is looked for that is replaced each time.
const MOST_LOOKS: u32 = 8;
const LOCK: &str = ".lock";
/// Bytes that whoever takes the lock writes into its file.
const MARK: usize = 20;

/// A directory as a store. Nothing is removed: a directory serves one run of a job, and a later run needs
/// another. How long the kernel takes to read or write a file is not ours to bound; deadlines end what waits
/// between.
pub struct FileStore {
    directory: PathBuf,
    /// Makes the names of temporary files unique among all processes, also of other hosts.
    nonce: u64,
    written: AtomicU64,
}

impl FileStore {
    /// The store in `directory`, which is created for this user alone if it is absent.
    pub fn open(directory: impl Into<PathBuf>) -> Result<FileStore> {
        let directory = directory.into();
        // It would mean the folder that the process is in; most likely a variable was not set.
        if directory.as_os_str().is_empty() {
            fail!(InvalidArgument, "the path of a file store is empty; give it a directory");
        }
        DirBuilder::new().recursive(true).mode(0o700).create(&directory).map_err(|cause| {
            Error::system(format!("cannot create the directory {}", directory.display()), cause)
        })?;
        FileStore::at(directory)
    }

    /// The store in `directory`, which somebody has created; if it is gone, it stays so.
    pub(super) fn at(directory: PathBuf) -> Result<FileStore> {
        // The same one wherever the process goes.
        let directory = std::path::absolute(&directory)
            .map_err(|cause| Error::system(format!("cannot find {}", directory.display()), cause))?;
        let mut nonce = [0; 8];
        random::fill(&mut nonce)?;
        Ok(FileStore { directory, nonce: u64::from_le_bytes(nonce), written: AtomicU64::new(0) })
    }

    /// Where the values are.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    fn path(&self, key: &str) -> PathBuf {
        self.directory.join(file_name(key))
    }

    /// A name that nobody else uses, for a file that is about to be renamed.
    fn temporary(&self) -> PathBuf {
        let number = self.written.fetch_add(1, Ordering::Relaxed);
        // A forked child has the same nonce and counter.
        let process = std::process::id();
        self.directory.join(format!(".new-{:016x}-{process}-{number}", self.nonce))
    }

    fn read(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let path = self.path(key);
        find(|| fs::read(&path)).map_err(|cause| self.refused("read", key, &path, cause))
    }

    /// Fills `new`, open at `temporary`, and makes it the value of `key`. On failure nothing of it stays.
    fn publish(&self, key: &str, value: &[u8], temporary: &Path, new: File) -> Result<()> {
        let path = self.path(key);
        let mut new = new;
        let written =
            new.write_all(value).and_then(|()| lock::close(new)).and_then(|()| fs::rename(temporary, &path));
        written.map_err(|cause| {
            // The first cause is the one to tell; a temporary file that cannot be removed harms nobody.
            let _ = fs::remove_file(temporary);
            self.refused("write", key, &path, cause)
        })
    }

    fn lock(&self, deadline: Deadline) -> Result<Lock> {
        let path = self.directory.join(LOCK);
        let refused = |cause| Error::system(format!("cannot lock {}", path.display()), cause);
        let opened =
            File::options().create(true).truncate(false).read(true).write(true).mode(0o600).open(&path);
        let lock = Lock::on(opened.map_err(refused)?);
        let begun = Instant::now();
        let mut holder = Holder { mark: mark_of(&lock), since: begun };
        let mut pause = Pause::default();
        while !lock.try_take().map_err(refused)? {
            let now = Instant::now();
            holder.look(mark_of(&lock), now);
            let held = now - holder.since;
            if held >= LONGEST_LOCK || (deadline.expired() && holder.since == begun) {
                fail!(
                    Timeout,
                    "{} has been locked for {:.1} s by another process; look for a stopped rank (fuser {} names it)",
                    path.display(),
                    held.as_secs_f64(),
                    path.display()
                );
            }
            if deadline.expired() {
                fail!(
                    Timeout,
                    "{} was locked by other processes in turn for {:.1} s: too many add to the store at once, or its file system is slow",
                    path.display(),
                    (now - begun).as_secs_f64()
                );
            }
            pause.sleep(deadline.min(Deadline::after(LONGEST_LOCK - held)));
        }
        // One that cannot be written only makes those who wait take the next holder for this one.
        let _ = lock.file().write_all_at(&self.mark(), 0);
        Ok(lock)
    }

    /// What tells one taking of the lock from all others.
    fn mark(&self) -> [u8; MARK] {
        let number = self.written.fetch_add(1, Ordering::Relaxed);
        let mut mark = [0; MARK];
        mark[..8].copy_from_slice(&self.nonce.to_le_bytes());
        mark[8..16].copy_from_slice(&number.to_le_bytes());
        // A forked child has the same nonce and counter.
        mark[16..].copy_from_slice(&std::process::id().to_le_bytes());
        mark
    }

    fn refused(&self, verb: &str, key: &str, path: &Path, cause: io::Error) -> Error {
        Error::system(format!("cannot {verb} {} (key {})", path.display(), store::quoted(key)), cause)
    }
}

impl Store for FileStore {
    fn set(&self, key: &str, value: &[u8], _deadline: Deadline) -> Result<()> {
        let temporary = self.temporary();
        let new = File::options()
            .create_new(true)
            .write(true)
            .mode(0o600)
            .open(&temporary)
            .map_err(|cause| self.refused("write", key, &temporary, cause))?;
        self.publish(key, value, &temporary, new)
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        let since = Instant::now();
        let mut pause = Pause::default();
        loop {
            if let Some(value) = self.read(key)? {
                return Ok(value);
            }
            if deadline.expired() {
                return Err(store::timed_out(self, key, since));
            }
            if pause.is_long() {
                // Opening the directory makes a network file system ask its server again instead of
                // remembering that the file was absent. It also finds out when the directory is gone, and the
                // wait is vain.
                File::open(&self.directory).map_err(|cause| {
                    Error::system(
                        format!("cannot wait for key {} in {}", store::quoted(key), self.describe()),
                        cause,
                    )
                })?;
            }
            pause.sleep(deadline);
        }
    }

    fn try_get(&self, key: &str, _deadline: Deadline) -> Result<Option<Vec<u8>>> {
        self.read(key)
    }

    fn add(&self, key: &str, amount: i64, deadline: Deadline) -> Result<i64> {
        let _lock = self.lock(deadline)?;
        let sum = store::sum(self, key, self.read(key)?.as_deref(), amount)?;
        self.set(key, sum.to_string().as_bytes(), deadline)?;
        Ok(sum)
    }

    fn describe(&self) -> String {
        format!("file store {}", self.directory.display())
    }

    fn file_of(&self, key: &str) -> Option<PathBuf> {
        Some(self.path(key))
    }
}

/// What `look` finds in a file, if there is one. Where another host has put a new file in its place meanwhile,
/// a network file system's handle of it is stale: then it looks again.
pub(super) fn find<T>(mut look: impl FnMut() -> io::Result<T>) -> io::Result<Option<T>> {
    let mut looks = 0;
    loop {
        looks += 1;
        match look() {
            Ok(found) => return Ok(Some(found)),
            Err(cause) if cause.kind() == ErrorKind::NotFound => return Ok(None),
            // Of a directory that is gone from its server all are stale.
            Err(cause) if cause.kind() == ErrorKind::StaleNetworkFileHandle && looks < MOST_LOOKS => {}
            Err(cause) => return Err(cause),
        }
    }
}

/// Who seems to hold a lock that others wait for, and since when.
struct Holder {
    mark: [u8; MARK],
    since: Instant,
}

impl Holder {
    /// What the lock's file says now.
    fn look(&mut self, mark: [u8; MARK], now: Instant) {
        if mark != self.mark {
            *self = Holder { mark, since: now };
        }
    }
}

/// The mark of who took the lock last; zeros if it cannot be read.
fn mark_of(lock: &Lock) -> [u8; MARK] {
    let mut mark = [0; MARK];
    match lock.file().read_exact_at(&mut mark, 0) {
        Ok(()) => mark,
        Err(_) => [0; MARK],
    }
}

/// Sleeps between two looks, longer each time: who has waited for long may be a little later, and the server
/// of a file system has many who wait.
pub(super) struct Pause {
    next: Duration,
    slept: Duration,
}

impl Pause {
    const LONG: Duration = Duration::from_millis(10);
    const LONGEST: Duration = Duration::from_millis(250);

    /// Sleeps, not beyond `deadline`.
    pub(super) fn sleep(&mut self, deadline: Deadline) {
        thread::sleep(deadline.remaining_capped(self.next()));
    }

    /// How long to sleep now.
    fn next(&mut self) -> Duration {
        let now = self.next;
        self.slept += now;
        let longest = (self.slept / 64).clamp(Pause::LONG, Pause::LONGEST);
        self.next = (now * 3 / 2).min(longest);
        now
    }

    pub(super) fn is_long(&self) -> bool {
        self.next >= Pause::LONG
    }
}

impl Default for Pause {
    fn default() -> Pause {
        Pause { next: Duration::from_micros(200), slept: Duration::ZERO }
    }
}

/// The file of a key: letters, digits, `-`, `_` and inner dots as they are, all other bytes as `%` and two
/// digits. A name that would be too long is `~` and the hash of the key; the empty key is `%`.
fn file_name(key: &str) -> String {
    if key.is_empty() {
        return "%".to_owned();
    }
    let mut name = String::with_capacity(key.len());
    for (index, byte) in key.bytes().enumerate() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => name.push(char::from(byte)),
            b'.' if index > 0 => name.push('.'),
            _ => push_hex(&mut name, "%", &[byte]),
        }
    }
    if name.len() > LONGEST_NAME {
        name.clear();
        push_hex(&mut name, "~", &Sha256::digest(key.as_bytes()));
    }
    name
}

fn push_hex(text: &mut String, mark: &str, bytes: &[u8]) {
    text.push_str(mark);
    for byte in bytes {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Status;
    use crate::rendezvous::battery;
    use crate::rendezvous::scratch::Scratch;

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(20))
    }

    #[test]
    fn passes_the_battery() {
        let scratch = Scratch::new();
        battery::run(|| FileStore::open(scratch.path().join("a/b")).unwrap());
        let left: Vec<_> = fs::read_dir(scratch.path().join("a/b"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.starts_with('.') && name != LOCK)
            .collect();
        assert!(left.is_empty(), "temporary files stay: {left:?}");
    }

    /// There is no network file system here; its answers are given as they would be.
    #[test]
    fn a_file_that_another_host_replaces_is_looked_for_again() {
        let stale = || io::Error::from_raw_os_error(libc::ESTALE);
        let mut answers = vec![Ok(7), Err(stale()), Err(stale())];
        assert_eq!(find(|| answers.pop().unwrap()).unwrap(), Some(7));
        let mut answers = vec![Err(ErrorKind::NotFound.into()), Err(stale())];
        assert_eq!(find(|| answers.pop().unwrap()).unwrap(), None::<()>);
        assert_eq!(find(|| Err::<(), _>(stale())).unwrap_err().raw_os_error(), Some(libc::ESTALE));
    }

    #[test]
    fn a_lock_that_changes_hands_is_not_one_that_is_held() {
        let scratch = Scratch::new();
        let store = FileStore::open(scratch.path()).unwrap();
        let marks: Vec<_> = (0..3).map(|_| mark_of(&store.lock(soon()).unwrap())).collect();
        assert!(marks[0] != marks[1] && marks[1] != marks[2], "{marks:?}");
        let start = Instant::now();
        let mut holder = Holder { mark: marks[0], since: start };
        holder.look(marks[0], start + Duration::from_secs(20));
        assert_eq!(holder.since, start);
        holder.look(marks[1], start + Duration::from_secs(25));
        holder.look(marks[1], start + Duration::from_secs(40));
        assert_eq!(holder.since, start + Duration::from_secs(25));
    }

    #[test]
    fn who_holds_the_lock_beyond_a_deadline_is_looked_for() {
        let scratch = Scratch::new();
        let store = FileStore::open(scratch.path()).unwrap();
        let held = store.lock(soon()).unwrap();
        let error = store.add("k", 1, Deadline::after(Duration::from_millis(20))).unwrap_err();
        assert_eq!(error.status(), Status::Timeout);
        assert!(error.text().contains("look for a stopped rank"), "{error}");
        drop(held);
        assert_eq!(store.add("k", 1, soon()).unwrap(), 1);
    }

    #[test]
    fn a_new_directory_and_its_files_are_private() {
        use std::os::unix::fs::PermissionsExt;
        let scratch = Scratch::new();
        let store = FileStore::open(scratch.path().join("new")).unwrap();
        store.set("k", b"v", soon()).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(store.directory()), 0o700);
        assert_eq!(mode(&store.path("k")), 0o600);
    }

    #[test]
    fn a_full_disk_names_path_and_cause_and_leaves_nothing() {
        let scratch = Scratch::new();
        let store = FileStore::open(scratch.path()).unwrap();
        store.set("k", b"old", soon()).unwrap();
        let temporary = store.temporary();
        fs::write(&temporary, b"").unwrap();
        let full = File::options().write(true).open("/dev/full").unwrap();
        let error = store.publish("k", b"new", &temporary, full).unwrap_err();
        assert_eq!(error.status(), Status::System);
        assert!(error.text().contains("No space left on device"), "{error}");
        assert!(error.text().contains(store.path("k").to_str().unwrap()), "{error}");
        assert!(!temporary.exists());
        assert_eq!(store.try_get("k", soon()).unwrap().as_deref(), Some(&b"old"[..]));
    }

    #[test]
    fn a_path_that_cannot_be_a_directory_is_named() {
        let scratch = Scratch::new();
        let file = scratch.path().join("file");
        fs::write(&file, b"").unwrap();
        // Not by permissions: tests may run as root, who may write anywhere. /proc refuses root too.
        for directory in [file.join("below"), PathBuf::from("/proc/self/unisono")] {
            let error = FileStore::open(&directory).err().expect("the directory cannot exist");
            assert_eq!(error.status(), Status::System);
            assert!(error.text().contains(directory.to_str().unwrap()), "{error}");
        }
    }

    #[test]
    fn an_unwritable_directory_is_named() {
        // Reading a directory of /proc works, creating a file in it never does.
        let store = FileStore::open("/proc/self/fd").unwrap();
        for error in [store.set("k", b"v", soon()).unwrap_err(), store.add("k", 1, soon()).unwrap_err()] {
            assert_eq!(error.status(), Status::System);
            assert!(error.text().contains("/proc/self/fd"), "{error}");
        }
        assert_eq!(store.try_get("k", soon()).unwrap(), None);
    }

    #[test]
    fn a_directory_removed_during_a_wait_ends_the_wait() {
        let scratch = Scratch::new();
        let store = FileStore::open(scratch.path().join("gone")).unwrap();
        fs::remove_dir(store.directory()).unwrap();
        let error = store.get("k", Deadline::after(Duration::from_secs(20))).unwrap_err();
        assert_eq!(error.status(), Status::System, "{error}");
    }

    #[test]
    fn who_waits_for_long_looks_seldom_and_is_hardly_later() {
        let (mut pause, mut looks) = (Pause::default(), 0);
        while pause.slept < Duration::from_secs(300) {
            let before = pause.slept;
            let next = pause.next();
            assert!(next <= Pause::LONG || next <= before / 32, "{next:?} after {before:?}");
            looks += 1;
        }
        assert!(looks < 2000, "{looks}");
    }

    #[test]
    fn names_are_safe_and_distinct() {
        assert_eq!(file_name("rank_3-a.b"), "rank_3-a.b");
        assert_eq!(file_name("../x"), "%2e.%2fx");
        assert_eq!(file_name(""), "%");
        assert_eq!(file_name("%"), "%25");
        let long = file_name(&"ä".repeat(5000));
        assert!(long.starts_with('~') && long.len() == 65, "{long}");
        assert_ne!(long, file_name(&"ä".repeat(4999)));
    }
}
