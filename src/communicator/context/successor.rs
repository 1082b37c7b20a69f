//! A context that takes the place of another: for what is suspended, and goes on later.
//!
//! What GPUs exchange in goes back with the context that it was made for. So who wants that memory for something else makes a new context
//! of the same ranks and drops the old one, which waits for nobody but them. The new one has no memory of the devices before it needs some.

use std::sync::Arc;

use super::{Child, Context, Place};
use crate::communicator::limits::Limits;
use crate::engine::device::{DeviceExchange, HeldMemory, Way};
use crate::error::Result;
use crate::signature::Making;

impl Context {
    /// Collective: a context of the same ranks that is to take the place of this one, which they drop when they have met; `None`, on all of
    /// them, unless every one is `willing`.
    pub fn begin_successor(&self, willing: bool) -> Result<Option<Child>> {
        let limits = Limits::begin(self.timeout());
        let ranks = (0..self.size()).collect();
        let child = || self.child(Making::Suspend, "~", self.name().to_owned(), ranks);
        let Place::Group(group) = &self.0.place else {
            return self.failure().map_or(Ok(willing.then(child)), Err);
        };
        let all = self.exchange(group, [willing.into(), 0], limits.come, Making::Suspend)?;
        let agreed = all.iter().all(|[willing, _]| *willing == 1);
        Ok(agreed.then(|| Child { limits: limits.have_come(), ..child() }))
    }

    /// Whether something of the program refers to the memory that the GPUs exchange in: a call in a graph, or a window. It stays where it is
    /// as long as this context lives.
    pub fn is_referred_to(&self) -> bool {
        self.exchange_of_devices().is_some_and(|exchange| exchange.is_referred_to())
    }

    /// What tells when that memory has been given back. `None`: there is none.
    pub fn held_memory(&self) -> Option<HeldMemory> {
        self.exchange_of_devices().map(|exchange| exchange.held_memory())
    }

    fn exchange_of_devices(&self) -> Option<&Arc<DeviceExchange>> {
        let Place::Group(group) = &self.0.place else { return None };
        group.devices().and_then(Way::exchange)
    }
}
