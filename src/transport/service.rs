//! The background thread of the process: it opens links, watches over peers, and moves work that nobody waits for.

use std::net::IpAddr;
use std::sync::{Arc, Weak};
use std::time::Instant;

use super::Link;
use super::address::PeerAddress;
use super::bell::Bell;
use super::segment::Segment;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::rendezvous::secret::SecretKey;

/// How an endpoint links to its peers. The default reads nothing from the environment.
#[derive(Clone, Debug)]
pub struct Options {
    /// Shared memory between ranks of one host.
    pub shm: bool,
    /// TCP.
    pub tcp: bool,
    /// Reading a peer's private pages (process_vm_readv) where the kernel allows it.
    pub pull: bool,
    /// TCP data connections of one link, 1 to 64.
    pub tcp_streams: usize,
    /// The addresses to listen on and publish; empty: loopback only.
    pub addresses: Vec<IpAddr>,
    /// Stands for the host's identity instead of its boot id.
    pub host: Option<String>,
    /// Bytes of the ring that one peer writes to; a power of two.
    pub ring_bytes: usize,
    /// Bytes of the endpoint's segment. Only touched pages take memory.
    pub segment_bytes: usize,
}

impl Default for Options {
    fn default() -> Options {
        todo!()
    }
}

impl Options {
    /// The defaults, changed by `UNISONO_TRANSPORT` (`shm`, `tcp` or `shm,tcp`), `UNISONO_CMA` (`0`, `1`),
    /// `UNISONO_TCP_STREAMS` (1 to 64) and `UNISONO_HOST`. `lookup` answers for the environment.
    pub fn from_environment(_lookup: impl Fn(&str) -> Option<String>) -> Result<Options> {
        todo!()
    }
}

/// Who an endpoint is.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Its rank in the job.
    pub rank: u32,
    /// The ranks of the job.
    pub size: u32,
    /// What authenticates every link.
    pub secret: SecretKey,
    /// The same number on all ranks of the job, different for every job.
    pub job: u64,
}

/// The longest control message in bytes.
pub const MAX_CONTROL: usize = 64 * 1024;

/// What the service tells an endpoint. Called on the service thread, no lock of the service held; must not block.
pub trait Port: Send + Sync {
    /// A link is open: asked for by [`Registration::open`] or by the peer. At most one for each peer.
    fn link_opened(&self, peer: u32, link: Link);
    /// Opening failed. `open` may be called again.
    fn link_refused(&self, peer: u32, why: Error);
    /// The peer said goodbye.
    fn peer_left(&self, peer: u32);
    /// The control connection ended without a goodbye. `why` names the host, the pid and whether the process is gone.
    fn peer_lost(&self, peer: u32, why: Error);
    /// A control message from the peer's engine.
    fn control(&self, peer: u32, message: &[u8]);
    /// Move work that nobody waits for.
    fn attend(&self) -> Attendance;
}

/// When an endpoint wants [`Port::attend`] next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attendance {
    /// Not before the next [`Registration::kick`].
    Idle,
    /// At this moment.
    Again(Instant),
    /// At this moment, or as soon as the bell's descriptor is readable. `attend` has called
    /// [`Bell::prepare_park`] and checked again; on the next call it polls the bell.
    Watch(Instant),
}

/// An endpoint's presence in the service. Dropping it closes it.
pub struct Registration {}

impl Registration {
    /// Listens, starts the service thread if this is the first endpoint, and accepts links from now on.
    pub fn new(_identity: Identity, _options: Options, _port: Weak<dyn Port>) -> Result<Registration> {
        todo!()
    }
    /// Where this endpoint is reached.
    pub fn address(&self) -> &PeerAddress {
        todo!()
    }
    /// Its segment.
    pub fn segment(&self) -> &Arc<Segment> {
        todo!()
    }
    /// Its bell.
    pub fn bell(&self) -> &Arc<Bell> {
        todo!()
    }
    /// Opens the link to `peer`. Answered by [`Port::link_opened`] or [`Port::link_refused`]; nothing happens when it
    /// is open or opening already.
    pub fn open(&self, _peer: PeerAddress, _deadline: Deadline) {
        todo!()
    }
    /// Queues a control message of at most [`MAX_CONTROL`] bytes; dropped when there is no link. Never blocks.
    pub fn send_control(&self, _peer: u32, _message: &[u8]) {
        todo!()
    }
    /// Has [`Port::attend`] called soon: after about 100 µs, so that a caller who waits at once is not disturbed.
    pub fn kick(&self) {
        todo!()
    }
    /// Says goodbye to every peer, flushes and closes. Later calls do nothing.
    pub fn close(&self, _deadline: Deadline) {
        todo!()
    }
}
