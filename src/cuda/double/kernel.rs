//! Kernels that exchange, played by tasks of a stream: where they wait, and when they leave.

use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

/// A kernel that is several tasks. Where it waits it leaves if the host has told it to, and sets a latch;
/// those that find that when they begin leave at once. What is left of it does nothing.
#[derive(Debug)]
pub(super) struct Kernel {
    /// The host's word, and the latch: told and set if not 0.
    pub(super) words: [Place; 2],
    begun: AtomicBool,
    left: AtomicBool,
}

impl Kernel {
    pub(super) fn new(abort: u64, latch: u64) -> Kernel {
        let words = [abort, latch].map(|address| Place { address, bytes: 4 });
        Kernel { words, begun: AtomicBool::new(false), left: AtomicBool::new(false) }
    }

    /// The same of another launch.
    pub(super) fn launched_anew(&self) -> Arc<Kernel> {
        Arc::new(Kernel { words: self.words, begun: AtomicBool::new(false), left: AtomicBool::new(false) })
    }
}

impl Machine {
    /// Whether what waits for a value finds it.
    pub(super) fn is_there(&self, address: u64, value: u32) -> bool {
        match self.heap.slice(Place { address, bytes: 4 }) {
            Ok(found) => {
                let found = u32::from_ne_bytes(found.try_into().expect("four bytes"));
                found.wrapping_sub(value) as i32 >= 0
            }
            // Ready to be complained about.
            Err(_) => true,
        }
    }

    /// Whether a kernel that waits is to leave.
    pub(super) fn ends(&self, kernel: &Kernel) -> bool {
        kernel.words.iter().any(|word| self.is_set(*word))
    }

    fn is_set(&self, word: Place) -> bool {
        self.heap.slice(word).is_ok_and(|word| word.iter().any(|byte| *byte != 0))
    }

    /// Whether a kernel that comes to its next step does nothing any more.
    pub(super) fn leaves(&mut self, kernel: &Kernel, step: &Task) -> bool {
        let [_, latch] = kernel.words;
        let begins = !kernel.begun.swap(true, Ordering::Relaxed);
        let waits = matches!(*step, Task::WaitValue { address, value } if !self.is_there(address, value));
        if waits || (begins && self.is_set(latch)) {
            kernel.left.store(true, Ordering::Relaxed);
            if let Ok(latch) = self.heap.slice_mut(latch) {
                latch.copy_from_slice(&1u32.to_ne_bytes());
            }
        }
        kernel.left.load(Ordering::Relaxed)
    }
}
