//! What other ranks are asked, and what they have answered.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::lock;
use crate::engine::control::Answer;

/// Questions to other ranks that have not ended, by their tokens.
#[derive(Default)]
pub(super) struct Questions {
    /// What was asked, and what was answered.
    answers: Mutex<HashMap<u64, Option<Answer>>>,
    next_token: AtomicU64,
}

impl Questions {
    /// A new question. No other of this endpoint has its token.
    pub(super) fn begin(&self) -> u64 {
        let token = self.next_token.fetch_add(1, Ordering::Relaxed);
        lock(&self.answers).insert(token, None);
        token
    }

    /// An answer has come. To what nobody asks any more it says nothing.
    pub(super) fn answer(&self, token: u64, answer: Answer) {
        if let Some(place) = lock(&self.answers).get_mut(&token) {
            *place = Some(answer);
        }
    }

    /// Whether each is answered; then, whether each answer is of a rank that may wait itself.
    pub(super) fn are_answered(&self, tokens: &[u64]) -> Option<bool> {
        let answers = lock(&self.answers);
        let answered: Option<Vec<&Answer>> =
            tokens.iter().map(|token| answers.get(token).and_then(Option::as_ref)).collect();
        answered.map(|answers| !answers.is_empty() && answers.iter().all(|answer| answer.waits))
    }

    /// Ends the questions: their answers, or `None` where there is none.
    pub(super) fn end(&self, tokens: &[u64]) -> Vec<Option<Answer>> {
        let mut answers = lock(&self.answers);
        tokens.iter().map(|token| answers.remove(token).flatten()).collect()
    }
}
