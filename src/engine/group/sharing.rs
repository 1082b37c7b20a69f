//! The direct exchange of a group, set up when its members are all on one host.

#![forbid(unsafe_code)]

use std::sync::Arc;

use super::Group;
use crate::deadline::Deadline;
use crate::engine::direct::{BOARD_BYTES, Direct, MAX_MEMBERS, label, say_goodbye};
use crate::engine::staged::relay;
use crate::error::{Result, Status};
use crate::transport::memory::PeerMemory;
use crate::transport::segment::Region;

impl Group {
    /// The members' shared memory, when all are on this host and it could be set up.
    pub fn direct(&self) -> Option<&Arc<Direct>> {
        self.direct.get()
    }

    /// What is kept for calls on device memory that are relayed.
    pub fn relay(&self) -> &Arc<relay::Seat> {
        &self.relay
    }

    /// Sets up the direct exchange if the members are all on this host, and can. `exchange` gathers two words
    /// from every member by a deadline; every member calls this at the same point, to which they `come` by
    /// the first deadline, and the rest is done by the second. Whether they have exchanged anything. A
    /// failure is everybody's: the others may wait for this rank.
    pub fn share_memory(
        &self,
        come: Deadline,
        settled: Deadline,
        exchange: impl Fn([u64; 2], Deadline) -> Result<Vec<[u64; 2]>>,
    ) -> Result<bool> {
        let local = self.members.iter().all(|&peer| self.endpoint.is_local(peer));
        if !local || self.members.len() < 2 || self.members.len() > MAX_MEMBERS {
            return Ok(false);
        }
        let agreed = self.agree_on_memory(self.offer_board(), come, settled, exchange);
        agreed.map(|()| true).inspect_err(|error| self.fail_here(error))
    }

    /// This rank's board, labelled, if its segment has room for one.
    fn offer_board(&self) -> Option<Region> {
        self.endpoint.retired().sweep();
        if !self.endpoint.shares_memory() {
            return None;
        }
        let board = self.endpoint.registration().segment().allocate(BOARD_BYTES, 4096)?;
        label(&board, self.id);
        Some(board)
    }

    /// Sets the direct exchange up if every member has a board, and all say that they reach each other's.
    fn agree_on_memory(
        &self,
        board: Option<Region>,
        come: Deadline,
        settled: Deadline,
        exchange: impl Fn([u64; 2], Deadline) -> Result<Vec<[u64; 2]>>,
    ) -> Result<()> {
        let offset = board.as_ref().map_or(u64::MAX, |board| board.offset() as u64);
        let offsets: Vec<u64> = exchange([offset, 0], come)?.into_iter().map(|[offset, _]| offset).collect();
        if offsets.contains(&u64::MAX) {
            return Ok(());
        }
        // PROOF: this rank's offset is among them, so it has a board.
        let Some(board) = board else { return Ok(()) };
        let (peers, agreed) = self.reach_memory(settled, |mine| exchange(mine, settled));
        let reached = peers.iter().flatten().count() + 1 == self.members.len();
        // If all said that they reach all; where this rank has not heard them, they may have agreed with it.
        let shared = agreed.as_ref().map_or(reached, |pulls| pulls.is_some());
        if !shared {
            say_goodbye(self.id, self.rank as usize, &peers, &offsets);
            return agreed.map(drop);
        }
        let pulls = matches!(agreed, Ok(Some(true)));
        let retired = self.endpoint.retired().clone();
        let direct = Direct::new(self.id, self.rank as usize, board, retired, peers, &offsets, pulls);
        // This rank's goodbye, without which those that have agreed keep their boards, is said as `direct` is
        // dropped.
        agreed?;
        let direct = direct?;
        log::debug!("group '{}' exchanges through shared memory, pulls: {pulls}", self.name);
        let _ = self.direct.set(Arc::new(direct));
        Ok(())
    }

    /// [`Endpoint::open_links`], unless the group fails; a member that does not link is told by its rank here,
    /// too.
    pub(in crate::engine) fn open_links(&self, peers: &[u32], deadline: Deadline) -> Result<()> {
        self.endpoint.open_links(peers, deadline, || self.failure()).map_err(|error| match error.status() {
            Status::Timeout if self.failure().is_none() => {
                let missing = self.endpoint.unlinked(peers);
                missing.map_or(error.clone(), |peer| self.lost(peer, error))
            }
            _ => error,
        })
    }

    /// Every member's memory that this rank reaches, but its own. And if all members reach each other's,
    /// whether they can read what is private there.
    fn reach_memory(
        &self,
        deadline: Deadline,
        exchange: impl Fn([u64; 2]) -> Result<Vec<[u64; 2]>>,
    ) -> (Vec<Option<Arc<PeerMemory>>>, Result<Option<bool>>) {
        let others: Vec<u32> =
            self.members.iter().copied().filter(|&peer| peer != self.endpoint.rank()).collect();
        let linked = self.open_links(&others, deadline);
        let peers: Vec<Option<Arc<PeerMemory>>> = {
            let messages = self.endpoint.messages();
            self.members.iter().map(|&peer| messages.memory(peer).cloned()).collect()
        };
        let reachable = peers.iter().flatten().count() == others.len();
        let pulls = reachable && peers.iter().flatten().all(|memory| memory.can_pull);
        let agreed = linked.and_then(|()| exchange([u64::from(reachable), u64::from(pulls)]));
        let pulls = agreed.map(|agreed| {
            let all = agreed.iter().all(|[reachable, _]| *reachable == 1);
            all.then(|| agreed.iter().all(|[_, pulls]| *pulls == 1))
        });
        (peers, pulls)
    }
}
