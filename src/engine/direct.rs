//! Direct exchange between ranks of one host: each reads what it needs out of the others' memory.
//!
//! Every member has a *board* in its shared segment: two posts, a mark and two slots. A call posts what it is
//! (its signature, where its buffers lie) under the number of the call, and waits for the posts of those it
//! depends on; a post of another call is a mismatch, noticed before anything is written.
//!
//! - *Short* calls put their contribution into the slot before they post. Whoever has seen the post reads the
//!   slot: one write, one read, one wait. Allreduce is one-shot: everybody reads everything.
//! - *Long* calls read each other's private memory (process_vm_readv): no copy in between. Allreduce is
//!   two-shot: each reduces its shard, then all gather the shards. Marks say how far a rank has come; nobody
//!   leaves while others may still read from it.
//!
//! A rank that gives up a call withdraws before it lets go of its memory, for good: its group has failed.
//! What was read of its private memory counts only if it had not withdrawn by then; whoever finds that it has
//! waits for the news of the failure. Ranks of one process read each other's memory without the kernel's
//! protection, so there the one that gives up also waits until nobody reads.
//!
//! Posts and slots exist twice, for odd and even calls. A rank may enter call `e` when all others have
//! entered `e − 1`, hence have ended `e − 2` and read what it had posted there.

mod board;
mod copies;
mod run;
mod watch;
mod work;

pub use board::{BOARD_BYTES, Direct, MAX_MEMBERS, Mark, Retired, label, say_goodbye};
pub use run::DirectRun;
pub use watch::{HAS_LEFT, Watch};

use crate::reduce::{DataType, Reducer};
use crate::schedule::Collective;

/// Shards begin at multiples of this many elements.
const SHARD_ELEMENTS: u64 = 64;

/// The share of member `index` of `size` in a reduction of `count` elements: first element and length.
pub fn shard(count: u64, index: usize, size: usize) -> (u64, u64) {
    let each = count.div_ceil(size as u64).next_multiple_of(SHARD_ELEMENTS);
    let start = (each * index as u64).min(count);
    (start, each.min(count - start))
}

/// How a call is exchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// Through the slots.
    Short,
    /// Out of private memory.
    Long,
}

/// One call, as far as the exchange is concerned.
#[derive(Clone, Debug)]
pub struct Job {
    /// What is asked for.
    pub collective: Collective,
    /// Whether counts may differ between ranks in a way that not every rank knows.
    pub listed: bool,
    /// What this rank contributes.
    pub input: *const u8,
    /// Where its result goes.
    pub output: *mut u8,
    /// Whether output and input share memory.
    pub in_place: bool,
    /// Type of the elements.
    pub dtype: DataType,
    /// Set when the operation reduces.
    pub reducer: Option<Reducer>,
}
