//! What a rank writes and reads.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::ChildStdin;
use std::time::{Duration, Instant};

use crate::sys::child::Readiness;

/// The most that a pipe can hold (fs.pipe-max-size for users).
const CAPACITY: usize = 1 << 20;
/// What a pipe that is ready takes without blocking (PIPE_BUF).
const PIECE: usize = 4096;

/// One of a rank's outputs.
pub(super) struct Pipe {
    file: File,
    last: Instant,
    /// What may still come after the job is over: what a pipe can hold, not what somebody goes on writing.
    allowance: usize,
}

impl Pipe {
    pub(super) fn new(fd: OwnedFd) -> Pipe {
        Pipe { file: fd.into(), last: Instant::now(), allowance: CAPACITY }
    }

    /// Reads once; it was found ready. `None`: it is not after all. 0: the end.
    pub(super) fn read(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        match self.file.read(buffer) {
            Ok(count) => {
                self.last = Instant::now();
                Ok(Some(count))
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether `count` more bytes, read after the job was over, were the last that count.
    pub(super) fn exhausts(&mut self, count: usize) -> bool {
        self.allowance = self.allowance.saturating_sub(count);
        self.allowance == 0
    }

    /// For how long nothing has come.
    pub(super) fn rested(&self) -> Duration {
        self.last.elapsed()
    }
}

impl AsFd for Pipe {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Standard input on its way to rank 0.
pub(super) struct Input {
    from: File,
    to: ChildStdin,
    buffer: Vec<u8>,
    sent: usize,
}

impl Input {
    pub(super) fn new(from: &impl AsFd, to: ChildStdin) -> io::Result<Input> {
        let from = File::from(from.as_fd().try_clone_to_owned()?);
        Ok(Input { from, to, buffer: Vec::new(), sent: 0 })
    }

    /// What [`Input::step`] needs to be ready.
    pub(super) fn wait_for(&self) -> (BorrowedFd<'_>, Readiness) {
        if self.buffer.is_empty() {
            (self.from.as_fd(), Readiness::Read)
        } else {
            (self.to.as_fd(), Readiness::Write)
        }
    }

    /// Reads or writes once. `false` at the end of the input.
    pub(super) fn step(&mut self) -> io::Result<bool> {
        if self.buffer.is_empty() {
            self.buffer.resize(CAPACITY, 0);
            let count = self.from.read(&mut self.buffer);
            self.buffer.truncate(*count.as_ref().unwrap_or(&0));
            return match count {
                Ok(count) => Ok(count > 0),
                Err(error) if error.kind() == ErrorKind::Interrupted => Ok(true),
                Err(error) => Err(error),
            };
        }
        let end = self.buffer.len().min(self.sent + PIECE);
        self.sent += self.to.write(&self.buffer[self.sent..end])?;
        if self.sent == self.buffer.len() {
            self.buffer.clear();
            self.sent = 0;
        }
        Ok(true)
    }
}
