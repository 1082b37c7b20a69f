//! What other ranks are asked, and what they have answered.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::lock;

/// Questions to other ranks that have not ended, by their tokens.
#[derive(Default)]
pub(super) struct Questions {
    /// What was asked, and what was answered.
    answers: Mutex<HashMap<u64, Option<String>>>,
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
    pub(super) fn answer(&self, token: u64, text: String) {
        if let Some(answer) = lock(&self.answers).get_mut(&token) {
            *answer = Some(text);
        }
    }

    /// Whether there is an answer to each.
    pub(super) fn are_answered(&self, tokens: &[u64]) -> bool {
        let answers = lock(&self.answers);
        tokens.iter().all(|token| answers.get(token).is_none_or(Option::is_some))
    }

    /// Ends the questions: their answers, or `None` where there is none.
    pub(super) fn end(&self, tokens: &[u64]) -> Vec<Option<String>> {
        let mut answers = lock(&self.answers);
        tokens.iter().map(|token| answers.remove(token).flatten()).collect()
    }
}
