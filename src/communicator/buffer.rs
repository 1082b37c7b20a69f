//! A range of memory for many messages.

use crate::communicator::{Call, Context};
use crate::deadline::Deadline;
use crate::error::Result;
use crate::reduce::DataType;

/// A range of memory for many messages.
pub struct Buffer {}

impl Buffer {
    /// # Safety
    /// Valid until dropped.
    pub unsafe fn new(context: &Context, pointer: *mut u8, bytes: u64) -> Buffer {
        let _ = (context, pointer, bytes);
        todo!()
    }
    /// Its size.
    pub fn bytes(&self) -> u64 {
        todo!()
    }
    /// Starts a send.
    pub fn send(&self, offset: u64, count: u64, dtype: DataType, to: u32, call: &Call) -> Result<()> {
        let _ = (offset, count, dtype, to, call);
        todo!()
    }
    /// Starts a receive.
    pub fn receive(&self, offset: u64, count: u64, dtype: DataType, from: &[u32], call: &Call) -> Result<()> {
        let _ = (offset, count, dtype, from, call);
        todo!()
    }
    /// Waits for a send.
    pub fn wait_send(&self, deadline: Deadline) -> Result<u32> {
        let _ = deadline;
        todo!()
    }
    /// Waits for a receive.
    pub fn wait_receive(&self, deadline: Deadline) -> Result<u32> {
        let _ = deadline;
        todo!()
    }
    /// Ends waits.
    pub fn abort_wait(&self) {
        todo!()
    }
}
