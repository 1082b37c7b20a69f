//! Children that are being made. Whoever has let go of the parent, and of what takes its place, makes none
//! any more, so what is waited for from it is waited for in vain; and they fail with their parent, since
//! those who are refused one do not tell the others.

#![forbid(unsafe_code)]

use std::sync::{Arc, Weak};

use super::Group;
use crate::engine::endpoint::lock;
use crate::error::Error;

/// A child that is being made, until this is dropped.
pub struct Making<'a> {
    parent: &'a Group,
    child: &'a Arc<Group>,
}

impl Group {
    /// The number that tells this group's children from those of others: that of what takes its place, too.
    pub fn line(&self) -> u64 {
        self.line.id()
    }

    /// How many children of this name and these ranks there are of them, with a new one.
    pub fn count_child(&self, name: &str, ranks: &[u32]) -> u32 {
        self.line.count(name, ranks)
    }

    /// A child of this group is set up, until the guard is dropped. If it is `tied`, it fails if this group
    /// does meanwhile.
    pub fn make<'a>(&'a self, child: &'a Arc<Group>, tied: bool) -> Making<'a> {
        // In a forked child, where nothing is made, the lock may be held by a thread that does not exist.
        if self.endpoint.check_fork().is_ok() {
            // If this has failed, a child that is tied hears why, and not who has let go of it for that.
            let parent = if tied { self.id } else { self.line() };
            self.endpoint.messages().begin_child(child.id, parent);
        }
        let making = Making { parent: self, child };
        if !tied {
            return making;
        }
        lock(&self.making).push(Arc::downgrade(child));
        // It may have failed before the child was known.
        if let Some(error) = self.latched() {
            child.fail_with(self, &error);
        }
        making
    }

    /// This group has failed.
    pub(super) fn fail_children(&self, error: &Error) {
        let making: Vec<_> = lock(&self.making).iter().filter_map(Weak::upgrade).collect();
        making.iter().for_each(|child| child.fail_with(self, error));
    }

    fn fail_with(&self, parent: &Group, error: &Error) {
        self.fail(error.context(format_args!("group '{}' has failed before", parent.name)));
    }
}

impl Drop for Making<'_> {
    fn drop(&mut self) {
        lock(&self.parent.making).retain(|child| child.as_ptr() != Arc::as_ptr(self.child));
        if self.parent.endpoint.check_fork().is_ok() {
            self.parent.endpoint.messages().end_child(self.child.id);
        }
    }
}
