//! Memory for messages that come before anybody asks for them.

#![forbid(unsafe_code)]

/// The bytes of one message.
#[derive(Debug, Default)]
pub struct Shelved {
    memory: Box<[u8]>,
    len: usize,
}

impl Shelved {
    /// All of it.
    pub fn bytes(&self) -> &[u8] {
        &self.memory[..self.len]
    }

    /// All of it, to be filled. What is not filled yet may be another message's.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[..self.len]
    }
}

/// Keeps the memory of large messages for the next ones: what the allocator hands out afresh costs a fault a
/// page, more than moving the bytes.
#[derive(Debug, Default)]
pub struct Shelf(Vec<Box<[u8]>>);

/// Smaller ones are left to the allocator.
const LARGE: usize = 16 * 1024;

/// The most memory that is kept.
const KEPT_BYTES: usize = 4 * 1024 * 1024;

impl Shelf {
    /// `len` bytes, if there is memory for them.
    pub fn take(&mut self, len: usize) -> Option<Shelved> {
        let fit = if len < LARGE { None } else { self.0.iter().position(|memory| memory.len() >= len) };
        let memory = match fit {
            Some(index) => self.0.swap_remove(index),
            None => {
                let mut memory = Vec::new();
                memory.try_reserve_exact(len).ok()?;
                memory.resize(len, 0);
                memory.into_boxed_slice()
            }
        };
        Some(Shelved { memory, len })
    }

    /// One that is needed no more.
    pub fn give_back(&mut self, shelved: Shelved) {
        let len = shelved.memory.len();
        if (LARGE..=KEPT_BYTES).contains(&len) {
            // Those that have lain longest go first: what is asked for now is like what came last.
            while self.0.iter().map(|memory| memory.len()).sum::<usize>() + len > KEPT_BYTES {
                self.0.remove(0);
            }
            self.0.push(shelved.memory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_has_its_length_whatever_memory_it_gets() {
        let mut shelf = Shelf::default();
        let long = shelf.take(3 * LARGE).expect("memory");
        shelf.give_back(long);
        for len in [0, 10, LARGE, 2 * LARGE, 5 * LARGE] {
            let mut shelved = shelf.take(len).expect("memory");
            assert_eq!((shelved.bytes().len(), shelved.bytes_mut().len()), (len, len));
            shelf.give_back(shelved);
        }
    }

    #[test]
    fn what_there_is_no_memory_for_is_not_there() {
        let mut shelf = Shelf::default();
        assert!(shelf.take(isize::MAX as usize).is_none());
        assert!(shelf.take(usize::MAX).is_none());
    }

    #[test]
    fn little_is_kept() {
        let mut shelf = Shelf::default();
        for _ in 0..100 {
            let shelved = Shelved { memory: vec![0; KEPT_BYTES / 3].into(), len: 1 };
            shelf.give_back(shelved);
        }
        shelf.give_back(Shelved { memory: vec![0; KEPT_BYTES + 1].into(), len: 1 });
        assert_eq!(shelf.0.len(), 3);
    }
}
