//! One client, or stranger: what it said that is not yet understood, and the answer on its way to it.

use std::io::ErrorKind;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Instant;

use crate::rendezvous::tcp_wire::{Answer, ServerHello};
use crate::sys::epoll::Interest;
use crate::sys::fork::Unshared;

pub(super) struct Connection {
    pub(super) stream: Unshared<TcpStream>,
    pub(super) state: State,
    pub(super) timer: Option<Instant>,
    pub(super) interest: Interest,
    /// What has arrived and is not yet understood.
    pub(super) input: Vec<u8>,
    /// Bytes of its request, if that is long and has been let in.
    pub(super) let_in: usize,
    /// Its request is long, and waits to be let in.
    pub(super) delayed: bool,
    pub(super) wills: Vec<Will>,
    /// The last words are yet to be told to it.
    pub(super) untold: bool,
    pub(super) output: Output,
}

/// What a client wants to be set if it goes before `key` exists.
pub(super) struct Will {
    pub(super) key: Vec<u8>,
    pub(super) refusal: Vec<u8>,
    pub(super) notice: Vec<u8>,
}

pub(super) enum State {
    /// Has been greeted with this and has not answered yet.
    Stranger(ServerHello),
    /// Between two requests.
    Ready,
    /// Waits for this key.
    Waiting(Vec<u8>),
    /// To be closed once the output is written.
    Leaving,
}

/// An answer on its way. The body is shared with the dictionary: many clients may wait for one large value.
#[derive(Default)]
pub(super) struct Output {
    pub(super) head: Vec<u8>,
    body: Option<Arc<[u8]>>,
    written: usize,
}

/// Why a connection is closed. Nobody but the log is told.
pub(super) type Farewell = &'static str;

impl Connection {
    /// Whether the next request may be read, or the rest of this one. Not while an answer is due: a client
    /// that never reads its answers could fill our memory with requests.
    pub(super) fn wants_input(&self) -> bool {
        self.output.is_empty() && !self.delayed && matches!(self.state, State::Stranger(_) | State::Ready)
    }

    pub(super) fn answer(&mut self, answer: Answer, body: Option<Arc<[u8]>>) {
        let length = body.as_ref().map_or(0, |body| body.len());
        self.output.head.extend_from_slice(&answer.head(length));
        self.output.body = body;
    }

    /// What is said before the next answer. Nothing is on its way.
    pub(super) fn tell(&mut self, words: &[u8]) {
        self.untold = false;
        self.output = Output::of([&Answer::Words.head(words.len()), words].concat());
    }

    pub(super) fn answer_done(&mut self, outcome: std::result::Result<Option<Arc<[u8]>>, String>) {
        match outcome {
            Ok(body) => self.answer(Answer::Done, body),
            Err(text) => self.answer(Answer::Refused, Some(text.into_bytes().into())),
        }
    }

    /// Writes; whether everything has been written.
    pub(super) fn flush(&mut self) -> std::result::Result<bool, Farewell> {
        while !self.output.is_empty() {
            let (head, body) = self.output.rest();
            match super::write(&self.stream, head, body) {
                Ok(0) => return Err("it takes no bytes"),
                Ok(count) => self.output.advance(count),
                Err(cause) if cause.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(cause) if cause.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Err("it cannot be written to"),
            }
        }
        Ok(true)
    }
}

impl Output {
    /// Bytes that are nobody else's.
    pub(super) fn of(head: Vec<u8>) -> Output {
        Output { head, ..Output::default() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.head.is_empty()
    }

    fn rest(&self) -> (&[u8], &[u8]) {
        let body = self.body.as_deref().unwrap_or_default();
        match self.written.checked_sub(self.head.len()) {
            None => (&self.head[self.written..], body),
            Some(written) => (&[], &body[written..]),
        }
    }

    fn advance(&mut self, count: usize) {
        self.written += count;
        let length = self.head.len() + self.body.as_ref().map_or(0, |body| body.len());
        if self.written == length {
            *self = Output::default();
        }
    }
}
