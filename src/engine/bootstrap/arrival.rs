//! To which meeting of a name a rank has come.
//!
//! Meetings of one name in one store are numbered. A rank comes to the newest, and goes on to the next where
//! that has all its ranks, or has failed and has had this one. How many ranks there are says who comes first.
//! Who was told another number says so there, so that all hear it, and nobody waits for ranks in a meeting
//! that they never come to.
#![forbid(unsafe_code)]

use super::Meeting;
use super::notice::Notice;
use crate::error::{Error, Result, Status, fail};
use crate::rendezvous::store::Store;
use crate::sys::process;

/// A rank that has come.
pub(super) struct Arrival<'a> {
    /// What the keys of its meeting begin with.
    pub(super) prefix: String,
    pub(super) notice: Notice<'a>,
    /// Whether its number of ranks is that of the meeting. If not, the others are to hear it.
    pub(super) fits: Result<()>,
}

impl<'a> Arrival<'a> {
    /// Comes to a meeting.
    pub(super) fn new(meeting: &Meeting<'a>) -> Result<Arrival<'a>> {
        let &Meeting { rank, size, name, store, recalled, deadline, once, .. } = meeting;
        let newest = format!("{name}/newest");
        let mut number = match store.try_get(&newest, deadline)? {
            Some(bytes) => u64::from_le_bytes(words(store, &newest, &bytes)?),
            None => 0,
        };
        loop {
            let prefix = format!("{name}/{number}");
            let notice = Notice::new(store, &prefix, rank, recalled);
            let arrivals = store.add(&format!("{prefix}/arrivals"), 1, deadline)?;
            let first = begun(meeting, &prefix, &notice, arrivals == 1, || match number {
                0 => Ok(()),
                // Before anybody can go on to the one after it.
                number => store.set(&newest, &number.to_le_bytes(), deadline),
            });
            let first = first.map_err(|error| {
                notice.leave(error.context(format_args!("rank {rank} of {size} cannot join '{name}'")))
            })?;
            let is_again = store.add(&format!("{prefix}/rank/{rank}/came"), 1, deadline)? > 1;
            let fits = first.fits(meeting);
            // Only who may take part takes a place: where the others are taken, a rank of another number is
            // one of the next meeting.
            let own = i64::from(!is_again && fits.is_ok());
            let others = store.add(&format!("{prefix}/places"), own, deadline)? - own;
            let is_full = others >= i64::from(first.size);
            if !is_full && !is_again {
                if arrivals > 1 {
                    notice.leave_if_gone(&place(&prefix, rank), gone(meeting), deadline)?;
                }
                return Ok(Arrival { prefix, notice, fits });
            }
            let told = notice.read()?;
            if !is_full {
                // A second process would go on for ever from one meeting to the next.
                let twice = format!("{prefix}/rank/{rank}/twice");
                if told.is_none() || store.try_get(&twice, deadline)?.is_some() {
                    store.set(&twice, &[], deadline)?;
                    return Err(notice.leave(second(meeting)));
                }
            }
            match told {
                Some(told) if once => return Err(notice.hear(told)),
                None if once => fail!(
                    InvalidUsage,
                    "rank {rank} of {size} cannot join '{name}': all {} ranks have come there before it, and the id serves one meeting: \
                     make another",
                    first.size
                ),
                _ => number += 1,
            }
        }
    }
}

/// Where a rank says where it is.
pub(super) fn place(prefix: &str, rank: u32) -> String {
    format!("{prefix}/rank/{rank}")
}

/// Who has come first.
struct First {
    rank: u32,
    /// As how many ranks they meet.
    size: u32,
}

impl First {
    fn fits(&self, &Meeting { rank, size, name, .. }: &Meeting<'_>) -> Result<()> {
        if self.size != size {
            fail!(
                Mismatch,
                "rank {rank} has come to '{name}' as one of {size} ranks, rank {} as one of {}: give all ranks the same number",
                self.rank,
                self.size
            );
        }
        Ok(())
    }
}

/// Who has come first. If it is this rank, it says so, after `before`.
fn begun(
    meeting: &Meeting<'_>,
    prefix: &str,
    notice: &Notice<'_>,
    is_first: bool,
    before: impl FnOnce() -> Result<()>,
) -> Result<First> {
    let &Meeting { rank, size, store, deadline, .. } = meeting;
    let key = format!("{prefix}/first");
    if !is_first {
        let bytes = words(store, &key, &notice.get(&key, None, deadline)?)?;
        let [rank, size] = [0, 4].map(|at| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i])));
        return Ok(First { rank, size });
    }
    before()?;
    notice.leave_if_gone(&place(prefix, rank), gone(meeting), deadline)?;
    store.set(&key, &[rank.to_le_bytes(), size.to_le_bytes()].concat(), deadline)?;
    Ok(First { rank, size })
}

/// What is told of this rank if its process is killed before the others know where it is.
fn gone(&Meeting { rank, size, name, store, .. }: &Meeting<'_>) -> Error {
    let text = format!(
        "rank {rank} of {size} (host {}, pid {}) has gone before it had joined '{name}': its connection to the {} has ended, as when its \
         process is killed",
        process::hostname(),
        std::process::id(),
        store.describe()
    );
    Error::new(Status::PeerFailed, text)
}

/// What is told by a rank that another process has come as.
fn second(&Meeting { rank, size, name, store, .. }: &Meeting<'_>) -> Error {
    let text = format!(
        "two processes have come to '{name}' as rank {rank} of {size}, the second of them on {}, pid {}: give each a rank of its own; or a \
         job before this one has left its traces in the {}: then take another",
        process::hostname(),
        std::process::id(),
        store.describe()
    );
    Error::new(Status::InvalidUsage, text)
}

fn words(store: &dyn Store, key: &str, bytes: &[u8]) -> Result<[u8; 8]> {
    match bytes.try_into() {
        Ok(bytes) => Ok(bytes),
        Err(_) => fail!(
            InvalidUsage,
            "the {} holds something else than the number of a meeting, or of its ranks, under '{key}': is it used by another program?",
            store.describe()
        ),
    }
}
