//! What every call between ranks of one host looks at: whether the others have called the same, and are still
//! there.

use std::sync::atomic::Ordering;

use super::board::Direct;
use crate::engine::group::Group;
use crate::engine::messages::Mismatch;
use crate::engine::wire::Key;
use crate::error::{Error, Result, Status};
use crate::signature::Signature;

/// Fruitless looks between two checks whether the awaited rank has left.
const PATIENCE: u32 = 8;

/// What is said of one that has, after its name.
pub const HAS_LEFT: &str = "has left: it destroyed its context, or its process ended";

/// Notices that an awaited member has left for good.
#[derive(Debug, Default)]
pub struct Watch {
    looks: u32,
    /// The awaited member, once it is seen to have left. What it did before is there at the next look.
    leaver: Option<usize>,
}

impl Watch {
    /// The awaited `member` has not done yet what this rank waits for. An error when it never will.
    pub fn look(&mut self, group: &Group, member: usize) -> Result<()> {
        self.looks = self.looks.wrapping_add(1);
        if self.looks.is_multiple_of(PATIENCE)
            && group.endpoint().misses_any()
            && let Some(&peer) = group.members().get(member)
            && group.endpoint().messages().gone_from(peer, group.id())
            && self.leaver.replace(member) == Some(member)
        {
            let who = group.describe_rank(member as u32);
            return Err(Error::new(Status::PeerFailed, format!("{who} {HAS_LEFT}")));
        }
        Ok(())
    }
}

impl Direct {
    /// Compares what a member that has entered `call` has posted with this rank's own call, to which it
    /// contributes `own` bytes.
    pub fn compare(
        &self,
        group: &Group,
        member: usize,
        call: u64,
        key: Key,
        signature: &Signature,
        own: u64,
    ) -> Result<()> {
        let post = self.post(member, call);
        let (theirs, bytes) = (post.signature(), post.bytes.load(Ordering::Relaxed));
        // Accumulators of several buffers are longer than the elements of one.
        let bytes = (signature.kind.reduces() && bytes != own).then_some((bytes, own));
        if theirs == Some(*signature) && bytes.is_none() {
            return Ok(());
        }
        let Some(theirs) = theirs else {
            return Err(Error::new(Status::Internal, format!("rank {member} has posted something unknown")));
        };
        let peer = group.members()[member];
        let bytes = bytes.filter(|_| theirs == *signature);
        let mismatch = Mismatch { peer, key, theirs, ours: Some(*signature), bytes };
        Err(group.explain(&mismatch, group.endpoint().recorder()))
    }
}
