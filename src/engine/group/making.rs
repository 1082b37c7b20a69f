//! Children that are being made: they fail with their parent, since those who are refused one do not tell the
//! others.

#![forbid(unsafe_code)]

use std::sync::{Arc, Weak};

use super::Group;
use crate::engine::endpoint::lock;
use crate::error::Error;

/// A child that is being made, until this is dropped.
pub struct Making<'a> {
    parent: &'a Group,
    child: Weak<Group>,
}

impl Group {
    /// A child of this group is set up, and fails if this does before the guard is dropped.
    pub fn make<'a>(&'a self, child: &Arc<Group>) -> Making<'a> {
        lock(&self.making).push(Arc::downgrade(child));
        let making = Making { parent: self, child: Arc::downgrade(child) };
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
        lock(&self.parent.making).retain(|child| !Weak::ptr_eq(child, &self.child));
    }
}
