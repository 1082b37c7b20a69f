//! Words of pinned memory that streams wait for: an operation of the host ends in the order of a stream.
//!
//! A word is used many times. Each use waits for the next value, and a wait is met by that value or any
//! further on, so a stream that comes late to its wait never misses it. Pages of words are never freed before
//! the [`Devices`] are: nobody knows when the last stream has come past its wait.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::context::Devices;
use crate::error::Result;

/// Bytes of a page of words, which are a cache line apart: hosts and devices write them.
const PAGE: usize = 16384;
const STRIDE: usize = 64;

/// The words of all devices.
#[derive(Default)]
pub(super) struct Words {
    pages: Vec<usize>,
    /// Address, and the value of the last use.
    free: Vec<(usize, u32)>,
    /// Those that a stream has yet to release.
    late: Vec<(usize, u32)>,
}

impl Words {
    /// The pages, for whoever frees them.
    pub(super) fn pages(&mut self) -> Vec<usize> {
        self.free.clear();
        self.late.clear();
        std::mem::take(&mut self.pages)
    }

    /// One that nobody uses, if there is one.
    fn take(&mut self) -> Option<(usize, u32)> {
        if self.free.is_empty() {
            self.sweep();
        }
        self.free.pop()
    }

    /// Adds a page; its first word.
    fn add(&mut self, start: usize) -> (usize, u32) {
        self.pages.push(start);
        self.free.extend((1..PAGE / STRIDE).map(|index| (start + index * STRIDE, 0)));
        (start, 0)
    }

    /// Has those at hand that streams have released meanwhile.
    fn sweep(&mut self) {
        let free = &mut self.free;
        self.late.retain(|&(address, value)| {
            let released = is_released(address, value);
            if released {
                free.push((address, value));
            }
            !released
        });
    }
}

/// The word at an address that [`Devices::word`] has given out.
fn at(address: usize) -> &'static AtomicU32 {
    // SAFETY: it lies in a page of pinned memory that lives as long as the devices, which whoever has the
    // address keeps, aligned to a cache line, and is only accessed as an atomic here and as a 32-bit word by
    // streams.
    unsafe { &*std::ptr::with_exposed_provenance::<AtomicU32>(address) }
}

fn is_released(address: usize, value: u32) -> bool {
    at(address).load(Ordering::Acquire).wrapping_sub(value) as i32 >= 0
}

/// One use of a word: streams wait until it is released. Dropping it releases it, unless a stream will.
pub struct Word {
    devices: Arc<Devices>,
    address: usize,
    value: u32,
    /// Whether a stream was given the release.
    given: AtomicBool,
    /// Whether it may be released a second time.
    forced: AtomicBool,
}

impl Devices {
    /// A word that has not been released. `device` is any that will use it.
    pub fn word(self: &Arc<Self>, device: u32) -> Result<Word> {
        let free = self.words().take();
        let (address, last) = match free {
            Some(free) => free,
            // Without the lock: the driver may wait for streams that wait for whoever lets go of a word.
            None => {
                let start = self.pinned_page(device, PAGE)?;
                self.words().add(start)
            }
        };
        Ok(Word {
            devices: self.clone(),
            address,
            value: last.wrapping_add(1),
            given: AtomicBool::new(false),
            forced: AtomicBool::new(false),
        })
    }
}

impl Word {
    /// Where it is, for streams.
    pub fn address(&self) -> u64 {
        self.address as u64
    }

    /// What a stream waits for, or writes to release it.
    pub fn value(&self) -> u32 {
        self.value
    }

    /// Whether it has been released.
    pub fn is_released(&self) -> bool {
        is_released(self.address, self.value)
    }

    /// Lets the streams go on.
    pub fn release(&self) {
        if !self.is_released() {
            at(self.address).store(self.value, Ordering::Release);
        }
    }

    /// Lets the streams go on although somebody else is to release it, maybe later. Whether it was not
    /// released before.
    pub fn force(&self) -> bool {
        if self.is_released() {
            return false;
        }
        self.forced.store(true, Ordering::Relaxed);
        self.release();
        true
    }

    /// A stream is about to be given the release.
    pub(super) fn give(&self) {
        self.given.store(true, Ordering::Relaxed);
    }
}

impl fmt::Debug for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Word({:#x} to {})", self.address, self.value)
    }
}

impl Drop for Word {
    fn drop(&mut self) {
        // A release that a stream has yet to come to would undo later ones. Of one that was forced nobody
        // sees when that is: such a word is not used again.
        if *self.forced.get_mut() {
            return;
        }
        if *self.given.get_mut() && !self.is_released() {
            self.devices.words().late.push((self.address, self.value));
            return;
        }
        self.release();
        self.devices.words().free.push((self.address, self.value));
    }
}
