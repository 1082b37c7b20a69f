//! Where the ranks' lines go: this program's standard output or standard error.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use super::output::Lines;
use crate::deadline::Deadline;
use crate::sys::child::{self, Readiness};

/// How much may wait to be written before the ranks have to wait too.
const ROOM: usize = 1 << 20;
/// How much one write takes: what a pipe that is ready takes without blocking (PIPE_BUF).
const PIECE: usize = 4096;

/// One output, written to only as far as it does not block: a reader that has stopped must not stop the launcher.
pub(super) struct Sink {
    file: File,
    lines: Lines,
    pending: Vec<u8>,
    written: usize,
    terminal: bool,
    closed: bool,
}

impl Sink {
    /// Over standard output or standard error.
    pub(super) fn new(output: &(impl AsFd + IsTerminal), lines: Lines) -> io::Result<Sink> {
        let file = File::from(output.as_fd().try_clone_to_owned()?);
        Ok(Sink {
            file,
            lines,
            pending: Vec::new(),
            written: 0,
            terminal: output.is_terminal(),
            closed: false,
        })
    }

    /// Takes what a rank has written.
    pub(super) fn feed(&mut self, rank: usize, bytes: &[u8]) {
        if !self.closed {
            self.lines.feed(rank, bytes, &mut self.pending);
        }
    }

    /// Shows a rank's unfinished line: it ends there.
    pub(super) fn flush(&mut self, rank: usize) {
        if !self.closed {
            self.lines.flush(rank, &mut self.pending);
        }
    }

    /// Whether a rank's unfinished line should be shown to the person at the terminal: a prompt, a progress bar.
    pub(super) fn prompts(&self, rank: usize) -> bool {
        self.terminal && !self.closed && self.lines.holds(rank)
    }

    /// A line of the launcher's own.
    pub(super) fn say(&mut self, text: &str) {
        self.lines.close(&mut self.pending);
        self.pending.extend_from_slice(format!("unisono-run: {text}\n").as_bytes());
    }

    /// Writes nothing more.
    pub(super) fn give_up(&mut self) {
        self.closed = true;
    }

    /// Whether there is something to write.
    pub(super) fn wants_to_write(&self) -> bool {
        !self.closed && self.written < self.pending.len()
    }

    /// Whether more may be fed.
    pub(super) fn has_room(&self) -> bool {
        self.pending.len() - self.written < ROOM
    }

    /// Writes a piece, if the output is ready. `false`: nobody reads any more, or nothing more can be written.
    pub(super) fn write(&mut self) -> io::Result<bool> {
        // The other output may be the same pipe, and have filled it since both were found ready.
        let now = Deadline::after(Duration::ZERO);
        if child::poll(&[(self.as_fd(), Readiness::Write)], now)? != [true] {
            return Ok(true);
        }
        let end = self.pending.len().min(self.written + PIECE);
        match self.file.write(&self.pending[self.written..end]) {
            Ok(count) => self.written += count,
            Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
            Err(error) => {
                self.closed = true;
                return if error.kind() == ErrorKind::BrokenPipe { Ok(false) } else { Err(error) };
            }
        }
        if self.written == self.pending.len() || self.written >= ROOM {
            self.pending.drain(..self.written);
            self.written = 0;
        }
        Ok(true)
    }
}

impl AsFd for Sink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
