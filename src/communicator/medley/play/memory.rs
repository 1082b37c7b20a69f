//! Memory of a rank's calls: what it is filled with, and whether it holds what it is to hold.

use std::ptr;
use std::sync::Arc;

use super::{Left, Player};
use crate::cuda::double::Double;
use crate::cuda::driver::StreamHandle;

/// Memory of the host that lasts as long as anybody may use it.
#[derive(Debug)]
pub(super) struct Host(*mut [u8]);

// SAFETY: it is plain memory, which its owner alone frees.
unsafe impl Send for Host {}

impl Host {
    fn new(len: usize) -> Host {
        Host(Box::into_raw(vec![0xaa; len].into_boxed_slice()))
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // SAFETY: it comes from a box.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

/// Memory of a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct At {
    pub(super) on_host: bool,
    pub(super) address: u64,
}

/// What some memory is to hold.
#[derive(Clone, Debug)]
pub(super) struct Due {
    pub(super) at: At,
    pub(super) bytes: Vec<u8>,
    pub(super) what: String,
}

pub(super) fn pointer(address: u64) -> *mut u8 {
    ptr::with_exposed_provenance_mut(address as usize)
}

impl Player<'_> {
    pub(super) fn memory(&mut self, on_host: bool, bytes: usize) -> At {
        let address = match &self.seat {
            Some(seat) if !on_host => seat.double.memory(seat.device, bytes.max(1)),
            _ => {
                let host = Host::new(bytes.max(1));
                let address = host.0.cast::<u8>().expose_provenance() as u64;
                self.left.host.push(host);
                address
            }
        };
        At { on_host, address }
    }

    /// Writes in the order of the stream, on the host at once.
    pub(super) fn fill(&self, stream: Option<StreamHandle>, at: At, bytes: &[u8]) {
        match &self.seat {
            Some(seat) if !at.on_host => {
                seat.double.fill(stream.unwrap_or(StreamHandle::NULL), seat.device, at.address, bytes);
            }
            // SAFETY: it is as long, and lives; the library has no call on it.
            _ => unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), pointer(at.address), bytes.len()) },
        }
    }

    pub(super) fn holds(&self, due: &Due) -> bool {
        self.first_wrong(due).is_none()
    }

    /// The first byte that is not what is due, and what it is.
    fn first_wrong(&self, due: &Due) -> Option<(usize, u8)> {
        let found = match &self.seat {
            Some(seat) if !due.at.on_host => seat.double.peek(due.at.address, due.bytes.len().max(1)),
            _ => {
                // SAFETY: it is as long, and lives. The library may write it meanwhile.
                let byte = |at: usize| unsafe { pointer(due.at.address).add(at).read_volatile() };
                (0..due.bytes.len()).map(byte).collect()
            }
        };
        let at = due.bytes.iter().zip(&found).position(|(due, found)| due != found)?;
        Some((at, found[at]))
    }

    pub(super) fn check(&mut self, due: &Due) {
        if let Some((at, found)) = self.first_wrong(due) {
            self.left.wrong.push(format!("wrong from byte {at}, which is {found:#x}: {}", due.what));
        }
    }

    /// What a failed call may not write any more.
    pub(super) fn mark(&mut self, stream: Option<StreamHandle>, due: Due) {
        if self.fault().is_none() {
            return;
        }
        let bytes = vec![0x77; due.bytes.len()];
        self.fill(stream, due.at, &bytes);
        self.left.marks.push(Due { bytes, what: format!("written after the end: {}", due.what), ..due });
    }
}

impl Left {
    /// What has been written after calls had failed; for when all is over.
    pub(in super::super) fn look(&mut self, double: Option<&Arc<Double>>) {
        for mark in std::mem::take(&mut self.marks) {
            let held = match double {
                Some(double) if !mark.at.on_host => {
                    double.peek(mark.at.address, mark.bytes.len().max(1))[..mark.bytes.len()] == mark.bytes
                }
                // SAFETY: it is as long, and lives; nobody uses it any more.
                _ => unsafe {
                    std::slice::from_raw_parts(pointer(mark.at.address), mark.bytes.len()) == mark.bytes
                },
            };
            if !held {
                self.wrong.push(mark.what);
            }
        }
    }
}
