//! The store in which the ranks find each other, and in which the launcher tells how ranks ended.

use super::job::Trouble;

pub(super) struct Board {}

impl Board {
    pub(super) fn open() -> Result<Board, Trouble> {
        Ok(Board {})
    }
    pub(super) fn id(&self) -> String {
        "00".repeat(128)
    }
    pub(super) fn publish(&self, _rank: usize, _cause: &str) {}
}
