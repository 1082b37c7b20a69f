//! What runs work in, kept between runs.

use std::sync::{Arc, Mutex};

use super::{Group, lock};
use crate::engine::executor::{self, Workspace};
use crate::error::Result;

/// What runs work in, kept between runs.
#[derive(Default)]
pub(super) struct Spare {
    progress: Vec<executor::Progress>,
    workspaces: Vec<Workspace>,
}

/// Workspaces above this size are given back after use.
const KEPT_BYTES: usize = 128 * 1024 * 1024;

/// How many workspaces are kept.
const KEPT: usize = 4;

impl Spare {
    /// A kept workspace of at least `bytes` bytes: the least, so that what needs more finds the others. Else
    /// the largest, which is too small for what this group does.
    fn take(&mut self, bytes: usize) -> Option<Workspace> {
        let fits = |workspace: &Workspace| workspace.bytes() >= bytes;
        let kept = self.workspaces.iter().enumerate();
        let (index, _) = kept.min_by_key(|(_, kept)| match fits(kept) {
            true => (false, kept.bytes()),
            false => (true, usize::MAX - kept.bytes()),
        })?;
        Some(self.workspaces.swap_remove(index))
    }

    fn keep(&mut self, workspace: Workspace) {
        if (1..=KEPT_BYTES).contains(&workspace.bytes()) && self.workspaces.len() < KEPT {
            self.workspaces.push(workspace);
        }
    }
}

/// A workspace that goes back to its group when this is dropped.
pub struct Lent {
    workspace: Option<Workspace>,
    to: Arc<Mutex<Spare>>,
}

impl Lent {
    /// Its start.
    pub fn address(&self) -> *mut u8 {
        self.workspace.as_ref().map_or(std::ptr::null_mut(), Workspace::address)
    }
}

#[cfg(test)]
impl Lent {
    /// Of no group.
    pub fn alone(bytes: usize) -> Result<Lent> {
        Ok(Lent { workspace: Some(Workspace::new(bytes)?), to: Arc::default() })
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(workspace) = self.workspace.take() {
            lock(&self.to).keep(workspace);
        }
    }
}

impl Group {
    /// Lists for one run.
    pub fn progress(&self) -> executor::Progress {
        lock(&self.spare).progress.pop().unwrap_or_default()
    }

    /// A workspace of at least `bytes` bytes.
    pub fn workspace(&self, bytes: usize) -> Result<Workspace> {
        if bytes == 0 {
            return Workspace::new(0);
        }
        // One that is too small is given back before a larger one takes its place.
        let kept = lock(&self.spare).take(bytes);
        match kept.filter(|workspace| workspace.bytes() >= bytes) {
            Some(workspace) => Ok(workspace),
            None => Workspace::new(bytes),
        }
    }

    /// The same, for whoever has it for as long as it lives.
    pub fn lend(&self, bytes: usize) -> Result<Lent> {
        Ok(Lent { workspace: Some(self.workspace(bytes)?), to: self.spare.clone() })
    }

    /// Gives lists back.
    pub fn keep_progress(&self, progress: executor::Progress) {
        let mut spare = lock(&self.spare);
        if spare.progress.len() < KEPT {
            spare.progress.push(progress);
        }
    }

    /// Gives a workspace back.
    pub fn keep_workspace(&self, workspace: Workspace) {
        lock(&self.spare).keep(workspace);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workspaces_of_several_sizes_do_not_push_each_other_out() {
        let spare = Arc::new(Mutex::new(Spare::default()));
        let lend = |bytes: usize| {
            let kept = lock(&spare).take(bytes).filter(|kept| kept.bytes() >= bytes);
            let is_new = kept.is_none();
            let workspace = Some(kept.unwrap_or(Workspace::new(bytes).expect("room")));
            (Lent { workspace, to: spare.clone() }, is_new)
        };
        // A call that works in two at once, the larger one first or last, and others between its runs.
        for round in 0..6 {
            for sizes in [[3000, 100], [100, 3000], [900, 100], [20, 50]] {
                let [(first, one), (second, other)] = sizes.map(lend);
                assert_ne!(first.address(), second.address());
                assert!(round == 0 || !one && !other, "{sizes:?} in round {round}");
            }
        }
        let sizes: Vec<usize> = lock(&spare).workspaces.iter().map(Workspace::bytes).collect();
        assert_eq!(sizes.len(), 2, "{sizes:?}");
    }

    #[test]
    fn what_nobody_would_take_again_is_not_kept() {
        let mut spare = Spare::default();
        spare.keep(Workspace::new(0).expect("nothing"));
        spare.keep(Workspace::new(KEPT_BYTES + 1).expect("address space"));
        assert!(spare.workspaces.is_empty());
        // The largest of those that are too small makes way.
        for bytes in [10, 30, 20] {
            spare.keep(Workspace::new(bytes).expect("room"));
        }
        assert_eq!(spare.take(40).map(|kept| kept.bytes()), Some(30));
        assert_eq!(spare.take(15).map(|kept| kept.bytes()), Some(20));
    }
}
