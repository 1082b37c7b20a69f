//! Ranks on several hosts, equally many on each, numbered host by host: what a call that is composed of an
//! exchange between the GPUs of each host and of messages between the hosts needs on this rank. How calls are
//! composed is in `communicator/hosts`.

use std::ops::Range;
use std::sync::Arc;

use super::exchange::DeviceExchange;
use crate::cuda::context::Devices;
use crate::cuda::local::Kernels as Folds;
use crate::engine::staged;
use crate::engine::staged::relay::{Crew, Seat};
use crate::error::Result;
use crate::reduce::{DataType, Operator};

/// Bytes of device memory that calls across hosts work in, two chunks: a part of the rank's arena, since
/// beside it they would take a slab of their own.
#[cfg(not(test))]
pub(super) const WORKSPACE_BYTES: usize = 16 << 20;
/// Tests cut short calls.
#[cfg(test)]
pub(super) const WORKSPACE_BYTES: usize = 16 << 10;

/// Where a rank sits: `inside` consecutive ranks are on each of `hosts` hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// Ranks of a host.
    pub inside: u32,
    /// Hosts.
    pub hosts: u32,
    rank: u32,
}

impl Layout {
    /// Rank `rank` of `size`, of which `inside` are on each host; `None`: they do not fill the last host.
    pub fn new(rank: u32, size: u32, inside: u32) -> Option<Layout> {
        let whole = inside > 0 && size.is_multiple_of(inside);
        whole.then(|| Layout { inside, hosts: size / inside, rank })
    }

    /// The rank itself.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// All ranks.
    pub fn size(&self) -> u32 {
        self.inside * self.hosts
    }

    /// The host's number.
    pub fn host(&self) -> u32 {
        self.rank / self.inside
    }

    /// The rank's number on its host.
    pub fn place(&self) -> u32 {
        self.rank % self.inside
    }

    /// The first rank of this host.
    pub fn first(&self) -> u32 {
        self.rank - self.place()
    }

    /// Whether `rank` is on this host.
    pub fn is_here(&self, rank: u32) -> bool {
        rank / self.inside == self.host()
    }

    /// Whether the ranks of a host make an inner node of the tree in whose order reductions combine.
    pub fn keeps_order(&self) -> bool {
        self.inside.is_power_of_two()
    }

    /// The ranks of this host, as indices.
    pub(super) fn neighbours(&self) -> Range<usize> {
        let first = self.first() as usize;
        first..first + self.inside as usize
    }

    /// Those of `members`, which are all ranks, that are on this host, without this rank.
    pub(super) fn others(&self, members: &[u32]) -> Vec<u32> {
        let own = self.rank as usize;
        self.neighbours().filter(|&index| index != own).map(|index| members[index]).collect()
    }
}

/// What one rank composes calls with.
#[derive(Debug)]
pub struct Hosts {
    exchange: Arc<DeviceExchange>,
    layout: Layout,
    means: Means,
    relay: Arc<Seat>,
}

impl Hosts {
    pub(super) fn new(exchange: Arc<DeviceExchange>, layout: Layout, means: Means) -> Hosts {
        let Layout { hosts, inside, .. } = layout;
        let crew = Crew { first: layout.place(), step: inside, size: hosts, number: layout.host() };
        Hosts { exchange, layout, means, relay: Arc::new(Seat::new(crew)) }
    }

    /// What the ranks of this place keep for parts that are relayed between hosts.
    pub fn relay(&self) -> &Arc<Seat> {
        &self.relay
    }

    /// With the GPUs of this host; its members are numbered from 0.
    pub fn exchange(&self) -> &Arc<DeviceExchange> {
        &self.exchange
    }

    /// Where this rank sits.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// What folds on this rank's device; prepared for every type and operator that it knows.
    pub fn folds(&self) -> &Arc<dyn Folds> {
        &self.means.folds
    }

    /// Device memory that calls work in, one after the other: its first byte and its size.
    pub fn workspace(&self) -> (u64, usize) {
        self.means.workspace
    }
}

/// What calls are made with. Made before the ranks agree, since it may fail.
#[derive(Debug)]
pub(super) struct Means {
    folds: Arc<dyn Folds>,
    workspace: (u64, usize),
}

impl Means {
    /// Loads what folds, also what the parts between hosts run in: may wait for the device. `workspace`: the
    /// first byte of [`WORKSPACE_BYTES`], which the exchange keeps until its last call has left them.
    pub(super) fn new(
        devices: &Arc<Devices>,
        device: u32,
        folds: &Arc<dyn Folds>,
        workspace: u64,
    ) -> Result<Means> {
        for dtype in DataType::ALL {
            let scaled = [Operator::Average, Operator::PreMulSum(1.0)];
            // Accumulators of other types are elements, and every other operator leaves them as they are.
            let others = [Operator::Sum, Operator::Product, Operator::Min, Operator::Max];
            let others = others.into_iter().filter(|_| dtype.accumulator() != dtype);
            for operator in others.chain(scaled) {
                folds.prepare(devices, device, dtype, operator)?;
            }
        }
        staged::prepare(devices, device)?;
        Ok(Means { folds: folds.clone(), workspace: (workspace, WORKSPACE_BYTES) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_know_their_neighbours() {
        let layout = Layout::new(6, 8, 4).unwrap();
        assert_eq!((layout.host(), layout.place(), layout.first(), layout.hosts), (1, 2, 4, 2));
        assert_eq!(layout.neighbours(), 4..8);
        assert_eq!(layout.others(&[10, 11, 12, 13, 14, 15, 16, 17]), [14, 15, 17]);
        assert!(layout.is_here(4) && !layout.is_here(3));
        assert!(layout.keeps_order() && !Layout::new(0, 6, 3).unwrap().keeps_order());
        assert_eq!(Layout::new(0, 7, 4), None, "the last host is not full");
    }
}
