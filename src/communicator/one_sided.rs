//! One-sided operations of GPUs: a rank writes into another's part of a window, and signals it; that one
//! waits for signals.

use std::sync::Arc;

use super::context::{Context, Membership};
use super::window::Window;
use super::{Call, device};
use crate::engine::device::{DeviceExchange, Put, Way};
use crate::engine::group::Group;
use crate::error::{Result, fail};

impl Context {
    /// Has the call's stream write `bytes` bytes of device memory from `from` on into rank `peer`'s part of
    /// `window`, `offset` bytes from where that begins, and then signal that rank. What a rank puts and
    /// signals goes one after the other, in the order in which it is called, whatever the streams; it is in
    /// no order with other calls but that of its stream. Returns at once. In a capture it is sent in each
    /// replay, in no order with what is sent beside that.
    ///
    /// # Safety
    /// The stream lives, and the memory is valid until it has done this. Nobody else uses what is written to
    /// meanwhile.
    pub unsafe fn put_signal(
        &self,
        from: u64,
        bytes: u64,
        peer: u32,
        window: &Window,
        offset: u64,
        call: &Call,
    ) -> Result<()> {
        let (group, exchange) = self.one_sided()?;
        let put = checked(exchange, from, bytes, window, offset)?;
        // SAFETY: the caller's promise.
        unsafe { exchange.put(group, peer, &put, device::caller(call, "localbuff")) }
    }

    /// Refuses what [`Context::put_signal`] would refuse for where it reads or writes.
    pub fn check_put(&self, from: u64, bytes: u64, peer: u32, window: &Window, offset: u64) -> Result<()> {
        let (group, exchange) = self.one_sided()?;
        exchange.reach(group, peer, &checked(exchange, from, bytes, window, offset)?).map(drop)
    }

    /// Has the call's stream signal rank `peer`, which may be this one, as [`Context::put_signal`].
    ///
    /// # Safety
    /// The stream lives.
    pub unsafe fn signal(&self, peer: u32, call: &Call) -> Result<()> {
        let (group, exchange) = self.one_sided()?;
        // SAFETY: the caller's promise.
        unsafe { exchange.signal(group, peer, device::caller(call, "the signal")) }
    }

    /// Has the call's stream wait for signals: so many of each of these ranks, which no other wait is for.
    /// What was put before them is there then. In no order with other calls, and other waits, but that of the
    /// stream. Returns at once. If they do not come in the call's time-out, or one of these ranks, no graph
    /// of which signals this one, has destroyed its context without sending them, the context fails, and the
    /// stream goes on; in a graph nothing but a failure ends the wait.
    ///
    /// # Safety
    /// The stream lives.
    pub unsafe fn wait_signals(&self, from: &[(u32, u32)], call: &Call) -> Result<()> {
        let (group, exchange) = self.one_sided()?;
        // SAFETY: the caller's promise.
        unsafe { exchange.await_signals(group, from, device::caller(call, "the wait")) }
    }

    fn one_sided(&self) -> Result<(&Arc<Group>, &Arc<DeviceExchange>)> {
        if let Some(failure) = self.failure() {
            return Err(failure);
        }
        let Membership::Group(group) = self.membership() else {
            fail!(
                Unsupported,
                "one-sided operations are between several ranks, and '{}' has one",
                self.name()
            )
        };
        match group.devices() {
            Some(Way::Exchange(exchange)) => Ok((group, exchange)),
            Some(Way::Hosts(_)) => fail!(
                Unsupported,
                "one-sided operations are between GPUs of one host, and those of '{}' are on several: send and receive",
                self.name()
            ),
            Some(Way::Staged(_)) | None => fail!(
                Unsupported,
                "one-sided operations are between GPUs that reach each other, and those of '{}' do not: send and receive",
                self.name()
            ),
        }
    }
}

/// What is put, from memory of this rank's.
fn checked(
    exchange: &Arc<DeviceExchange>,
    from: u64,
    bytes: u64,
    window: &Window,
    offset: u64,
) -> Result<Put> {
    let put = Put { from, bytes, window: window.number(exchange)?, offset };
    if bytes > 0 {
        exchange.own_memory("localbuff", from, bytes)?;
    }
    Ok(put)
}
