//! How threads of the library hold an endpoint: for a moment at a time.

#![forbid(unsafe_code)]

use std::ops::Deref;
use std::sync::{Arc, Weak};

use super::Endpoint;
use crate::transport::service::{Visit, Visits};

/// An endpoint that a thread works for now and then, and does not keep.
pub struct Visitor {
    endpoint: Weak<Endpoint>,
    visits: Arc<Visits>,
}

/// An endpoint while a thread works for it. Who lets go of it otherwise waits for the end of this, and for
/// the goodbyes if it goes with this.
pub struct Visiting {
    endpoint: Arc<Endpoint>,
    /// Goes behind it.
    _visit: Visit,
}

impl Visitor {
    /// Of an endpoint that the caller holds.
    pub fn of(endpoint: &Weak<Endpoint>) -> Visitor {
        let visits = endpoint.upgrade().map(|endpoint| Arc::clone(endpoint.registration().visits()));
        Visitor { endpoint: endpoint.clone(), visits: visits.unwrap_or_default() }
    }

    /// The endpoint, if it is there still.
    pub fn enter(&self) -> Option<Visiting> {
        let visit = self.visits.enter();
        Some(Visiting { endpoint: self.endpoint.upgrade()?, _visit: visit })
    }
}

impl Deref for Visiting {
    type Target = Endpoint;

    fn deref(&self) -> &Endpoint {
        &self.endpoint
    }
}
