//! One connection of the service: bytes and descriptors in and out without blocking, and the frames of a
//! control connection: a kind (1 byte), a length (4 bytes, little-endian), the payload.

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use socket2::Socket;

use super::MAX_CONTROL;
use crate::error::{Error, Result, Status, fail};
use crate::sys::fork::Unshared;
use crate::sys::socket::{MAX_FDS, receive, send};

/// More bytes than this are not queued for a peer that does not read.
const MAX_QUEUED: usize = 16 << 20;

const HEADER: usize = 5;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// [`super::setup::Setup`].
    Setup = 1,
    /// The link will not be: a text that says why.
    Refuse = 2,
    /// Of the engine.
    Message = 3,
    /// The sender leaves in peace. Nothing follows.
    Goodbye = 4,
}

/// A frame that has arrived whole.
pub(super) struct Frame {
    pub(super) kind: Kind,
    pub(super) payload: Vec<u8>,
    /// The descriptors that came with it.
    pub(super) fds: Vec<OwnedFd>,
}

/// A non-blocking stream socket with its queues.
pub(super) struct Connection {
    socket: Unshared<Socket>,
    inbox: Vec<u8>,
    fds: Vec<OwnedFd>,
    outbox: VecDeque<Chunk>,
    queued: usize,
    /// The kernel passes no descriptors for now: see [`Connection::is_crowded`].
    crowded: bool,
}

/// Bytes to send. The descriptors go with the first of them.
struct Chunk {
    bytes: Vec<u8>,
    sent: usize,
    fds: Vec<OwnedFd>,
}

impl Connection {
    pub(super) fn new(socket: Unshared<Socket>) -> Connection {
        let (inbox, fds, outbox) = (Vec::new(), Vec::new(), VecDeque::new());
        Connection { socket, inbox, fds, outbox, queued: 0, crowded: false }
    }

    pub(super) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// The socket, for another use.
    pub(super) fn into_socket(self) -> Unshared<Socket> {
        self.socket
    }

    pub(super) fn queue(&mut self, bytes: Vec<u8>) {
        self.queue_with(bytes, Vec::new());
    }

    /// Queues a frame with descriptors (at most [`MAX_FDS`]). `false` when too much is queued already.
    pub(super) fn queue_frame(&mut self, kind: Kind, payload: &[u8], fds: Vec<OwnedFd>) -> bool {
        if self.queued + payload.len() > MAX_QUEUED {
            return false;
        }
        let mut bytes = Vec::with_capacity(HEADER + payload.len());
        bytes.push(kind as u8);
        bytes.extend_from_slice(&(payload.len() as u32).to_le_bytes());
        bytes.extend_from_slice(payload);
        self.queue_with(bytes, fds);
        true
    }

    fn queue_with(&mut self, bytes: Vec<u8>, fds: Vec<OwnedFd>) {
        if !bytes.is_empty() {
            self.queued += bytes.len();
            self.outbox.push_back(Chunk { bytes, sent: 0, fds });
        }
    }

    pub(super) fn has_output(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Whether descriptors wait at the front of what is to be sent since too many of this user's are under
    /// way: those that were sent and not received yet count together, whoever sent them, and may be as many
    /// as one process may have open. The socket has room all the while, so nothing but another attempt shows
    /// when it is over.
    pub(super) fn is_crowded(&self) -> bool {
        self.crowded
    }

    /// Sends what the kernel takes now.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.crowded = false;
        while let Some(chunk) = self.outbox.front_mut() {
            let fds: Vec<_> = chunk.fds.iter().map(AsFd::as_fd).collect();
            match send(self.socket.as_fd(), &chunk.bytes[chunk.sent..], &fds) {
                Ok(count) => {
                    chunk.fds.clear();
                    chunk.sent += count;
                    self.queued -= count;
                    if chunk.sent == chunk.bytes.len() {
                        self.outbox.pop_front();
                    }
                }
                Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => break,
                Err(cause) if cause.raw_os_error() == Some(libc::ETOOMANYREFS) && !chunk.fds.is_empty() => {
                    self.crowded = true;
                    break;
                }
                Err(cause) => return Err(cause),
            }
        }
        Ok(())
    }

    /// Reads on until `count` bytes are in hand and takes them; `None` when they are not all there yet. Never
    /// reads beyond them: what follows a handshake may be for somebody else. The end of the stream is
    /// `UnexpectedEof`.
    pub(super) fn take_exactly(&mut self, count: usize) -> io::Result<Option<Vec<u8>>> {
        while self.inbox.len() < count {
            if !self.read_more(count - self.inbox.len())? {
                return Ok(None);
            }
        }
        Ok(Some(self.inbox.drain(..count).collect()))
    }

    /// The next frame; `None` when there is no whole one yet.
    pub(super) fn take_frame(&mut self) -> Result<Option<Frame>> {
        loop {
            let need = match self.inbox.first_chunk::<HEADER>() {
                None => HEADER,
                Some(&[kind, length @ ..]) => {
                    let kind = match kind {
                        1 => Kind::Setup,
                        2 => Kind::Refuse,
                        3 => Kind::Message,
                        4 => Kind::Goodbye,
                        _ => fail!(PeerFailed, "it sent a control frame of unknown kind {kind}"),
                    };
                    let length = u32::from_le_bytes(length) as usize;
                    if length > MAX_CONTROL {
                        fail!(
                            PeerFailed,
                            "it sent a control frame of {length} bytes, the limit is {MAX_CONTROL}"
                        );
                    }
                    if self.inbox.len() >= HEADER + length {
                        let payload = self.inbox.drain(..HEADER + length).skip(HEADER).collect();
                        return Ok(Some(Frame { kind, payload, fds: std::mem::take(&mut self.fds) }));
                    }
                    HEADER + length
                }
            };
            // One frame at a time: the descriptors that arrive belong to it.
            let more = self.read_more(need - self.inbox.len());
            if !more.map_err(|cause| Error::new(Status::PeerFailed, cause.to_string()))? {
                return Ok(None);
            }
        }
    }

    /// Reads at most `count` bytes; `false` when nothing is there.
    fn read_more(&mut self, count: usize) -> io::Result<bool> {
        let start = self.inbox.len();
        self.inbox.resize(start + count, 0);
        let answer = receive(self.socket.as_fd(), &mut self.inbox[start..], &mut self.fds);
        self.inbox.truncate(start + answer.as_ref().map_or(0, |&count| count));
        if self.fds.len() > MAX_FDS {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it passed too many descriptors"));
        }
        match answer {
            Ok(0) => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection")),
            Ok(_) => Ok(true),
            Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(cause) => Err(cause),
        }
    }
}
