//! Where the ranks' lines go: this program's standard output or standard error.
#![forbid(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::time::Duration;

use super::output::Lines;
use crate::deadline::Deadline;
use crate::sys::child::{self, Readiness};

/// How much may wait to be written before the ranks have to wait too.
const ROOM: usize = 1 << 20;
/// How much one write takes: what a pipe that is ready takes without blocking (PIPE_BUF).
const PIECE: usize = 4096;
/// How long a write may block that may.
const MOMENT: Duration = Duration::from_millis(10);

/// One output, written to only as far as it does not block: a reader that has stopped must not stop the
/// launcher.
pub(super) struct Sink {
    file: File,
    lines: Lines,
    pending: Vec<u8>,
    written: usize,
    terminal: bool,
    /// Whether a write that was found ready may block all the same.
    blocks: bool,
    closed: bool,
}

impl Sink {
    /// Over standard output or standard error.
    pub(super) fn new(output: &(impl AsFd + IsTerminal), lines: Lines) -> io::Result<Sink> {
        let (file, terminal) = (File::from(output.as_fd().try_clone_to_owned()?), output.is_terminal());
        let (file, blocks) = match terminal.then(|| without_blocking(&file)) {
            Some(Ok(opened)) => (opened, false),
            Some(Err(_)) => (file, true),
            None => (file, false),
        };
        Ok(Sink { file, lines, pending: Vec::new(), written: 0, terminal, blocks, closed: false })
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

    /// Whether a rank's unfinished line should be shown to the person at the terminal: a prompt, a progress
    /// bar.
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

    /// Writes a piece, if the output is ready. Answers how much of it went; `None`: nobody reads any more.
    pub(super) fn write(&mut self) -> io::Result<Option<usize>> {
        // The other output may be the same pipe, and have filled it since both were found ready.
        let now = Deadline::after(Duration::ZERO);
        if child::poll(&[(self.as_fd(), Readiness::Write)], now)? != [true] {
            return Ok(Some(0));
        }
        let end = self.pending.len().min(self.written + PIECE);
        let piece = &self.pending[self.written..end];
        let written = match self.blocks {
            true => child::interrupted(MOMENT, || self.file.write(piece)),
            false => self.file.write(piece),
        };
        let count = match written {
            Ok(count) => count,
            Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => 0,
            Err(error) => {
                self.closed = true;
                return if error.kind() == ErrorKind::BrokenPipe { Ok(None) } else { Err(error) };
            }
        };
        self.written += count;
        if self.written == self.pending.len() || self.written >= ROOM {
            self.pending.drain(..self.written);
            self.written = 0;
        }
        Ok(Some(count))
    }
}

/// The terminal opened anew, such that writing to it does not block: that it is ready means room for some
/// bytes only. What it was opened as before belongs to the shell as well, and stays as it is. An error where
/// this user may not open it (after `su`).
fn without_blocking(terminal: &File) -> io::Result<File> {
    // The side of a pseudo-terminal that shows it would be that of a new one.
    if terminal.metadata()?.rdev() == libc::makedev(5, 2) {
        return Err(ErrorKind::Unsupported.into());
    }
    let path = format!("/proc/self/fd/{}", terminal.as_raw_fd());
    OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)
}

impl AsFd for Sink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
