//! Who has which part of an area: numbers only, whatever the area consists of.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;

/// The free spans of an area: first fit, neighbours joined.
#[derive(Debug)]
pub struct Heap {
    /// Start to length; no two touch.
    free: BTreeMap<usize, usize>,
    /// No byte from here on was ever handed out, so all are zero.
    untouched: usize,
}

impl Heap {
    /// All of `start..end` is free.
    pub fn new(start: usize, end: usize) -> Heap {
        Heap { free: BTreeMap::from([(start, end - start)]), untouched: start }
    }

    /// How many bytes are free, in all spans together.
    pub fn free_bytes(&self) -> usize {
        self.free.values().sum()
    }

    /// Takes `len` bytes, at least one, at a multiple of `align` (a power of two): the offset, and how many
    /// bytes from there were handed out before. `None`: there is no room.
    pub fn take(&mut self, len: usize, align: usize) -> Option<(usize, usize)> {
        let len = len.max(1);
        let (start, space, offset) = self.free.iter().find_map(|(&start, &space)| {
            let offset = start.checked_next_multiple_of(align)?;
            let end = offset.checked_add(len)?;
            (end <= start + space).then_some((start, space, offset))
        })?;
        self.free.remove(&start);
        if offset > start {
            self.free.insert(start, offset - start);
        }
        let (end, space_end) = (offset + len, start + space);
        if space_end > end {
            self.free.insert(end, space_end - end);
        }
        let used = self.untouched.saturating_sub(offset);
        self.untouched = self.untouched.max(end);
        Some((offset, used))
    }

    /// Gives back what was taken, with the length that was asked for.
    pub fn give_back(&mut self, offset: usize, len: usize) {
        let (mut start, mut end) = (offset, offset + len.max(1));
        if let Some((&before, &space)) = self.free.range(..start).next_back()
            && before + space == start
        {
            self.free.remove(&before);
            start = before;
        }
        if let Some(space) = self.free.remove(&end) {
            end += space;
        }
        self.free.insert(start, end - start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const START: usize = 12288;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn the_heap_never_overlaps_and_joins_again(
            requests in prop::collection::vec((0usize..5000, 0u32..13, any::<bool>()), 1..60),
        ) {
            let mut heap = Heap::new(START, 1 << 18);
            let mut live: Vec<(usize, usize)> = Vec::new();
            for (len, shift, release) in requests {
                if release && !live.is_empty() {
                    let (offset, len) = live.swap_remove(len % live.len());
                    heap.give_back(offset, len);
                } else if let Some((offset, _)) = heap.take(len, 1 << shift) {
                    prop_assert_eq!(offset % (1 << shift), 0);
                    prop_assert!(offset >= START && offset + len <= 1 << 18);
                    for &(other, other_len) in &live {
                        prop_assert!(offset + len.max(1) <= other || other + other_len.max(1) <= offset);
                    }
                    live.push((offset, len));
                }
            }
            for (offset, len) in live {
                heap.give_back(offset, len);
            }
            prop_assert_eq!(heap.free, BTreeMap::from([(START, (1 << 18) - START)]));
        }
    }
}
