//! A queue that mostly has one in it, for which nothing is allocated: one thread begins a call and another
//! ends it, and what that frees costs the next call's thread more than memory of its own.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::ops::{Index, IndexMut};

/// A queue.
pub(super) struct Few<T> {
    /// `None`: there are none.
    first: Option<T>,
    others: VecDeque<T>,
}

impl<T> Few<T> {
    /// None.
    pub(super) const fn new() -> Few<T> {
        Few { first: None, others: VecDeque::new() }
    }

    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        usize::from(self.first.is_some()) + self.others.len()
    }

    /// One more, behind the others.
    pub(super) fn push(&mut self, one: T) {
        match &self.first {
            None => self.first = Some(one),
            Some(_) => self.others.push_back(one),
        }
    }

    /// The first of them.
    pub(super) fn pop(&mut self) -> Option<T> {
        std::mem::replace(&mut self.first, self.others.pop_front())
    }

    /// The first of them, to change it.
    pub(super) fn first_mut(&mut self) -> Option<&mut T> {
        self.first.as_mut()
    }

    /// The one behind so many others.
    pub(super) fn get(&self, index: usize) -> Option<&T> {
        match index.checked_sub(1) {
            None => self.first.as_ref(),
            Some(index) => self.others.get(index),
        }
    }

    /// All of them, in their order.
    pub(super) fn take_all(&mut self) -> impl Iterator<Item = T> + use<T> {
        self.first.take().into_iter().chain(std::mem::take(&mut self.others))
    }
}

/// As of a [`VecDeque`]: one that is not there is a mistake of the caller.
impl<T> Index<usize> for Few<T> {
    type Output = T;

    fn index(&self, index: usize) -> &T {
        match (index, &self.first) {
            (0, Some(first)) => first,
            _ => &self.others[index - 1],
        }
    }
}

impl<T> IndexMut<usize> for Few<T> {
    fn index_mut(&mut self, index: usize) -> &mut T {
        match (index, &mut self.first) {
            (0, Some(first)) => first,
            _ => &mut self.others[index - 1],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_it_keeps_its_order() {
        let mut few = Few::new();
        assert!(few.is_empty() && few.pop().is_none() && few.get(0).is_none());
        for round in 0..3 {
            for one in 0..=round {
                few.push(one);
            }
            assert_eq!((0..=round + 1).map(|at| few.get(at).copied()).collect::<Vec<_>>(), {
                (0..=round).map(Some).chain([None]).collect::<Vec<_>>()
            });
            few[round] += 10;
            assert_eq!((few[round], few.len()), (round + 10, round + 1));
            assert_eq!(few.pop(), Some(if round == 0 { 10 } else { 0 }));
            few.push(7);
            let all: Vec<usize> = few.take_all().collect();
            let expected = [vec![7], vec![11, 7], vec![1, 12, 7]];
            assert_eq!(all, expected[round]);
            assert!(few.is_empty());
        }
    }
}
