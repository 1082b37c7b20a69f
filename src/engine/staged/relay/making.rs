//! Lanes on their way.
//!
//! They are made between calls, by a thread of its own: whoever pins memory asks the driver, which may wait
//! for a stream, which waits for a call (cuda/quiet.rs). In each call the members say how far they have come.
//! Until all have their lanes, calls go the ordinary way.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::lanes::{Crew, Lanes};
use super::shared;
use super::tracks;
use super::wired::Wire;
use crate::cuda::context::Devices;
use crate::engine::direct::Direct;
use crate::engine::group::Group;
use crate::error::{Error, Result};
use crate::sys;
use crate::transport::address::PeerAddress;

/// What a member says of itself in a call: that it can relay it,
pub(super) const CAN: u64 = 1;
/// that it has its lanes,
pub(super) const READY: u64 = 2;
/// that it never will.
pub(super) const NEVER: u64 = 4;

/// What has come of a thread's work: lanes, or none.
type Made = OnceLock<Option<Arc<Lanes>>>;

/// How far this rank has come with its lanes.
pub(super) enum Making {
    /// The members have not met yet in a call that all of them could have relayed. What listens for them, from
    /// the first call on that met by messages.
    Unbegun(Option<Wire>),
    /// Ranks that share memory: this one has told the others where its lanes are.
    Offered,
    /// A thread is at work, or has been.
    Underway(Arc<Made>),
    /// Nothing will come of it.
    Never,
}

impl Default for Making {
    fn default() -> Making {
        Making::Unbegun(None)
    }
}

impl Making {
    /// What this rank says of its lanes.
    pub(super) fn says(&self) -> u64 {
        match self {
            Making::Unbegun(_) | Making::Offered => 0,
            Making::Underway(made) => match made.get() {
                None => 0,
                // They were, but no call would come through.
                Some(Some(lanes)) if lanes.are_broken() => NEVER,
                Some(Some(_)) => READY,
                Some(None) => NEVER,
            },
            Making::Never => NEVER,
        }
    }

    /// The lanes, if they are there.
    pub(super) fn made(&self) -> Option<Arc<Lanes>> {
        match self {
            Making::Underway(made) => made.get().cloned().flatten(),
            _ => None,
        }
    }

    /// A call has met on the boards, in which nobody has said `NEVER`.
    pub(super) fn meet_on_boards(
        &mut self,
        group: &Group,
        direct: &Arc<Direct>,
        (devices, device): (&Arc<Devices>, u32),
    ) {
        match self {
            Making::Unbegun(_) => {
                shared::offer(group, direct);
                *self = Making::Offered;
            }
            // All have offered theirs in the call before.
            Making::Offered => {
                let (direct, devices) = (direct.clone(), devices.clone());
                *self = Making::start(group, move |is_wanted| {
                    shared::pin(&direct, &devices, device, is_wanted).map(Lanes::Shared)
                });
            }
            Making::Underway(_) | Making::Never => {}
        }
    }

    /// What listens for the other members, the same in all calls. `None`: they have met.
    pub(super) fn listen(&mut self, group: &Group, crew: Crew) -> Option<Result<&Wire>> {
        let Making::Unbegun(listening) = self else { return None };
        if listening.is_none() {
            match Wire::listen(group, crew) {
                Ok(wire) => *listening = Some(wire),
                Err(error) => return Some(Err(error)),
            }
        }
        listening.as_ref().map(Ok)
    }

    /// A call has met by messages that all members could have relayed, and where they listen is known, if all
    /// do.
    pub(super) fn connect(
        &mut self,
        group: &Group,
        addresses: Option<Vec<PeerAddress>>,
        (devices, device): (&Arc<Devices>, u32),
    ) {
        let begun = std::mem::replace(self, Making::Never);
        let (Making::Unbegun(Some(wire)), Some(addresses)) = (begun, addresses) else { return };
        let devices = devices.clone();
        *self = Making::start(group, move |is_wanted| {
            wire.connect(addresses, &devices, device, is_wanted)?;
            Ok(Lanes::Wired(wire))
        });
    }

    /// Starts a thread. `make` may ask whether anybody still waits for what it makes.
    fn start(
        group: &Group,
        make: impl FnOnce(&dyn Fn() -> bool) -> Result<Lanes> + Send + 'static,
    ) -> Making {
        let made = Arc::new(Made::new());
        let (name, waiting) = (group.name().to_string(), Arc::downgrade(&made));
        let run = move || {
            let begun = Instant::now();
            // Those of calls that were given up may be what there is no room for, and then no call is relayed
            // that would let go of them.
            tracks::unpark();
            let lanes = make(&|| waiting.strong_count() > 0).inspect_err(|error| say_no(&name, error)).ok();
            if lanes.is_some() {
                log::debug!("'{name}' has what it relays by, made in {:.1?}", begun.elapsed());
            }
            if let Some(made) = waiting.upgrade() {
                let _ = made.set(lanes.map(Arc::new));
            }
        };
        match sys::process::spawn("unisono-lanes", run) {
            Ok(_) => Making::Underway(made),
            Err(cause) => {
                say_no(group.name(), &Error::system("no thread to make lanes", cause));
                Making::Never
            }
        }
    }
}

/// Why a group relays nothing.
pub(super) fn say_no(group: &str, error: &Error) {
    log::debug!("'{group}' relays nothing: {error}");
}
