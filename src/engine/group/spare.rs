//! What runs work in, kept between runs.

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

impl Group {
    /// Lists for one run.
    pub fn progress(&self) -> executor::Progress {
        lock(&self.spare).progress.pop().unwrap_or_default()
    }

    /// A workspace of at least `bytes` bytes.
    pub fn workspace(&self, bytes: usize) -> Result<Workspace> {
        let mut spare = lock(&self.spare);
        match spare.workspaces.iter().position(|workspace| workspace.bytes() >= bytes) {
            Some(index) => Ok(spare.workspaces.swap_remove(index)),
            None => {
                // A larger one replaces one that is too small for what this group does.
                let outgrown = spare.workspaces.pop();
                drop(spare);
                drop(outgrown);
                Workspace::new(bytes)
            }
        }
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
        let mut spare = lock(&self.spare);
        if workspace.bytes() <= KEPT_BYTES && spare.workspaces.len() < KEPT {
            spare.workspaces.push(workspace);
        }
    }
}
