//! What a link is made of: this side's setup, and the [`Link`] that both setups amount to.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use socket2::Socket;

use super::endpoint::Endpoint;
use super::setup::{Data, Setup};
use crate::error::{Error, Result, Status, fail};
use crate::sys::fork::Unshared;
use crate::sys::memory::Reservation;
use crate::transport::address::PeerAddress;
use crate::transport::memory::PeerMemory;
use crate::transport::ring::{PeerRing, Ring, RingMemory};
use crate::transport::tcp::TcpLane;
use crate::transport::{Link, LinkKind, Stream};

/// The peer's setup and what came with it.
pub(super) struct Theirs {
    pub(super) setup: Setup,
    pub(super) fds: Vec<OwnedFd>,
    /// From the kernel, over a Unix socket.
    pub(super) pid: Option<u32>,
}

impl Endpoint {
    pub(super) fn setup(&self, data: Data) -> Setup {
        let PeerAddress { hostname, pid, .. } = &self.shared.address;
        Setup { hostname: hostname.clone(), pid: *pid, data }
    }

    pub(super) fn allocate_ring(&self) -> Result<RingMemory> {
        let bytes = self.options.ring_bytes;
        RingMemory::allocate(&self.shared.segment, bytes).ok_or_else(|| {
            let size = self.shared.segment.size();
            Error::new(
                Status::OutOfMemory,
                format!("no room, or no memory, for a ring of {bytes} bytes in the segment of {size}"),
            )
        })
    }

    /// Room in the address space for the peer's segment, which is taken to be as long as this side's.
    pub(super) fn reserve(&self) -> Result<Reservation> {
        let bytes = self.shared.segment.size();
        Reservation::new(bytes).map_err(|cause| {
            Error::system(format_args!("no address space for a segment of {bytes} bytes (ulimit -v)"), cause)
        })
    }

    pub(super) fn shm_setup(&self, ring: &RingMemory) -> Result<(Setup, Vec<OwnedFd>)> {
        let copy = || -> io::Result<_> {
            let segment = self.shared.segment.fd().try_clone_to_owned()?;
            Ok(vec![segment, self.shared.bell.ringer().try_clone_to_owned()?])
        };
        let fds = copy().map_err(|cause| Error::system("cannot pass the segment", cause))?;
        let data = Data::Shm {
            ring_offset: ring.offset() as u64,
            ring_bytes: ring.capacity() as u64,
            cookie_address: self.cookie.as_ptr().expose_provenance() as u64,
            cookie: *self.cookie,
        };
        Ok((self.setup(data), fds))
    }

    /// The peer's memory and the ring in it, from its setup.
    pub(super) fn peer_ring(&self, theirs: Theirs) -> Result<PeerRing> {
        let Data::Shm { ring_offset, ring_bytes, cookie_address, cookie } = theirs.setup.data else {
            fail!(Internal, "a setup for TCP on a Unix socket")
        };
        let Ok([segment, ringer]) = <[OwnedFd; 2]>::try_from(theirs.fds) else {
            fail!(PeerFailed, "its segment came without descriptors: too many open files?")
        };
        let mut memory = PeerMemory::new(segment, ringer, theirs.pid.unwrap_or(0))?;
        if self.options.pull {
            memory.prove_pull(cookie_address, &cookie);
        }
        PeerRing::new(Arc::new(memory), ring_offset, ring_bytes)
    }
}

pub(super) fn shm_link(own: RingMemory, theirs: PeerRing) -> Link {
    let memory = Arc::clone(theirs.memory());
    Link { kind: LinkKind::Shm, streams: vec![Box::new(Ring::new(own, theirs))], memory: Some(memory) }
}

pub(super) fn tcp_link(lanes: BTreeMap<u8, Unshared<Socket>>) -> Link {
    let streams = lanes.into_values().map(|lane| Box::new(TcpLane::new(lane)) as Box<dyn Stream>).collect();
    Link { kind: LinkKind::Tcp, streams, memory: None }
}

pub(super) fn describe(peer: u32, setup: &Setup) -> String {
    format!("rank {peer} (host {}, pid {})", setup.hostname, setup.pid)
}
