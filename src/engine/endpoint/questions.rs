//! What other ranks are asked, and what they have answered.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::lock;
use crate::engine::control::Answer;

/// Questions to other ranks that have not ended, by their tokens.
#[derive(Debug, Default)]
pub(super) struct Questions {
    /// What was asked, and what was answered.
    answers: Mutex<HashMap<u64, Option<Answer>>>,
    next_token: AtomicU64,
}

impl Questions {
    /// A new question, one of those that were `asked`: its token, which no other of this endpoint has.
    pub(super) fn begin(&self, asked: &mut Asked) -> u64 {
        let token = self.next_token.fetch_add(1, Ordering::Relaxed);
        lock(&self.answers).insert(token, None);
        asked.tokens.push(token);
        token
    }

    /// An answer has come. To what nobody asks any more it says nothing.
    pub(super) fn answer(&self, token: u64, answer: Answer) {
        if let Some(place) = lock(&self.answers).get_mut(&token) {
            *place = Some(answer);
        }
    }

    /// How many have not ended.
    #[cfg(test)]
    pub(super) fn open(&self) -> usize {
        lock(&self.answers).len()
    }
}

/// Questions that were asked together. They end with it.
#[derive(Debug, Default)]
pub struct Asked {
    of: Arc<Questions>,
    tokens: Vec<u64>,
}

impl Asked {
    /// None yet.
    pub(super) fn new(of: &Arc<Questions>) -> Asked {
        Asked { of: of.clone(), tokens: Vec::new() }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.tokens.len()
    }

    /// Whether each is answered; then, whether each answer is of a rank that may wait itself.
    pub fn are_answered(&self) -> Option<bool> {
        let answers = lock(&self.of.answers);
        let answered: Option<Vec<&Answer>> =
            self.tokens.iter().map(|token| answers.get(token).and_then(Option::as_ref)).collect();
        answered.map(|answers| !answers.is_empty() && answers.iter().all(|answer| answer.waits))
    }

    /// Takes their answers, or `None` where there is none. None comes after that.
    pub fn take(&self) -> Vec<Option<Answer>> {
        let mut answers = lock(&self.of.answers);
        self.tokens.iter().map(|token| answers.remove(token).flatten()).collect()
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        self.take();
    }
}
