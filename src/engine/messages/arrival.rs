//! What comes in, and where it goes.

use std::time::{Duration, Instant};

use super::failure::{Trouble, differing};
use super::peer::spreads;
use super::transfer::{Early, Posted, Receive, Receiving, Sending, deliver};
use super::{Messages, kept};
use crate::engine::lane::{Incoming, Target};
use crate::engine::pairs::{From, Waiting};
use crate::engine::shelf::Shelved;
use crate::engine::wire::{Class, Frame, FrameKind, Key};
use crate::error::{Error, Result, Status, fail};

/// How long what a peer sends stays unread when there is no memory for it.
const SHORT_PAUSE: Duration = Duration::from_millis(10);

impl Messages {
    /// A frame has come; if a payload follows, says where it goes.
    pub(super) fn arrive(&mut self, peer: u32, lane: usize, frame: Frame) -> Result<()> {
        match frame.kind {
            // It would count as sent while pieces of it still go out, out of the caller's memory.
            FrameKind::Ready | FrameKind::Done | FrameKind::Refuse | FrameKind::Decline
                if self.streams(peer, &frame.key) =>
            {
                return Err(Error::new(Status::Internal, "a message that is being sent was answered again"));
            }
            // It would be written to while it is read, or after that.
            FrameKind::Eager | FrameKind::Request | FrameKind::Data if self.is_pulled(peer, &frame.key) => {
                return Err(Error::new(Status::Internal, "a message came that is being read already"));
            }
            FrameKind::Ready => self.peer_is_ready(peer, frame),
            FrameKind::Done => {
                if let Some(Sending::Posted { ticket, .. }) = self.sending.remove(&(peer, frame.key)) {
                    self.peers[peer as usize].expected -= 1;
                    self.note_done(ticket);
                }
            }
            FrameKind::Refuse => {
                if let Some(Sending::Posted { from, signature, ticket, announced, .. }) =
                    self.sending.remove(&(peer, frame.key))
                {
                    self.stands_no_longer(peer, announced);
                    self.peers[peer as usize].expected -= 1;
                    let mismatch =
                        differing(peer, frame.key, frame.signature, signature, frame.total, from.len);
                    self.mismatch(ticket, mismatch);
                }
            }
            FrameKind::Decline => self.declined(peer, frame),
            FrameKind::Withdraw => self.withdrawn(peer, frame.key),
            FrameKind::Part => self.parts(peer, lane, frame.key.group),
            FrameKind::Data => {
                let mut reading = self.peers[peer as usize].lanes[lane].lock();
                let target = match self.receiving.get_mut(&(peer, frame.key)) {
                    Some(Receiving::Posted(posted)) if posted.into.len as u64 == frame.total => {
                        if let Some(inflow) = posted.inflow() {
                            let Some(into) = inflow.begin(&frame) else {
                                fail!(
                                    Internal,
                                    "more came of a message than the {} bytes it has",
                                    frame.total
                                );
                            };
                            reading.begin_piece(frame, into, inflow.clone());
                            return Ok(());
                        }
                        posted.take(frame.length)?;
                        // SAFETY: the frame's end is at most its total, which is the length of the buffer.
                        Target::User(unsafe { posted.into.part(frame.offset as usize, frame.length) })
                    }
                    _ => Target::Discard,
                };
                reading.begin(frame, target);
            }
            FrameKind::Eager | FrameKind::Request => return self.message(peer, lane, frame),
        }
        Ok(())
    }

    /// Whether pieces of a message are on their way to `peer`, which has said that it is ready. It says no
    /// more of it: who pulls a message or refuses it has not said so, and who gives up says nothing.
    fn streams(&self, peer: u32, key: &Key) -> bool {
        matches!(self.sending.get(&(peer, *key)), Some(Sending::Posted { pieces: Some(_), .. }))
    }

    fn is_pulled(&self, peer: u32, key: &Key) -> bool {
        self.pulled.iter().any(|pulled| pulled.peer == peer && pulled.frame.key == *key)
    }

    /// A message has come, or the announcement of one.
    pub(super) fn message(&mut self, peer: u32, lane: usize, frame: Frame) -> Result<()> {
        let key = (peer, frame.key);
        let eager = frame.kind == FrameKind::Eager;
        if eager && frame.total > self.peers[peer as usize].eager_bytes() as u64 {
            return Err(Error::new(
                Status::Internal,
                format!("a message of {} bytes came unasked", frame.total),
            ));
        }
        if self.departed.contains(frame.key.group) && !self.receiving.contains_key(&key) {
            match eager {
                true => self.peers[peer as usize].lanes[lane].lock().begin(frame, Target::Discard),
                false => self.decline(peer, frame, 0),
            }
            return Ok(());
        }
        if self.is_of_no_course(peer, &frame.key) && !self.receiving.contains_key(&key) {
            if eager {
                self.peers[peer as usize].lanes[lane].lock().begin(frame, Target::Discard);
            }
            return Ok(());
        }
        // The other pieces of a message are named by the first.
        if frame.key.class == Class::PointToPoint && frame.key.slot == 0 && !self.receiving.contains_key(&key)
        {
            self.offer(peer, &frame);
        }
        match self.receiving.get_mut(&key) {
            // Bytes of it may be on their way into the caller's memory: the entry has to stay until they are
            // here.
            Some(Receiving::Posted(posted)) if !posted.close() => {
                return Err(Error::new(Status::Internal, "a message came twice"));
            }
            Some(Receiving::Posted(posted)) => {
                if let Some(mismatch) = posted.check(peer, frame.key, frame.signature, frame.total) {
                    let Some(Receiving::Posted(posted)) = self.receiving.remove(&key) else { return Ok(()) };
                    self.peers[peer as usize].received(posted.into.len);
                    if eager {
                        self.peers[peer as usize].lanes[lane].lock().begin(frame, Target::Discard);
                    } else {
                        self.refuse(peer, &posted, frame.key);
                    }
                    self.mismatch(posted.ticket, mismatch);
                } else if eager && frame.length == 0 {
                    // Whole with its header: who has the lane next may be another.
                    let ticket = posted.ticket;
                    self.receiving.remove(&key);
                    self.peers[peer as usize].received(0);
                    self.note_done(ticket);
                    self.peers[peer as usize].lanes[lane].lock().begin(frame, Target::Discard);
                } else if eager {
                    posted.take(frame.length)?;
                    let target = Target::User(posted.into);
                    self.peers[peer as usize].lanes[lane].lock().begin(frame, target);
                } else {
                    self.accept(peer, frame);
                }
            }
            Some(_) => return Err(Error::new(Status::Internal, "a message came twice")),
            None => {
                self.unasked(peer, &frame);
                let early = if eager && frame.length == 0 {
                    self.unexpected_bytes += kept(0);
                    self.peers[peer as usize].lanes[lane].lock().begin(frame, Target::Discard);
                    Early::Eager(frame.signature, Shelved::default())
                } else if eager {
                    self.unexpected_bytes += kept(frame.length as usize);
                    match self.shelf.take(frame.length as usize) {
                        Some(shelved) => {
                            self.peers[peer as usize].lanes[lane].lock().begin(frame, Target::Kept(shelved));
                        }
                        None => self.run_short(peer, lane, frame),
                    }
                    Early::Begun(frame.signature, frame.total)
                } else {
                    Early::Request { frame }
                };
                self.receiving.insert(key, Receiving::Early(early));
            }
        }
        Ok(())
    }

    /// There is no memory for a message that nobody has asked for: what the peer sends waits until there is.
    #[cold]
    fn run_short(&mut self, peer: u32, lane: usize, frame: Frame) {
        self.peers[peer as usize].short = Some((lane, frame));
        self.asks_again_at = Some(Instant::now() + SHORT_PAUSE);
        self.troubles.push(Trouble::Short { peer, bytes: frame.length });
    }

    /// Goes on with the message of `peer` that there was no memory for. Whether it may be read from.
    #[cold]
    pub(super) fn resume(&mut self, peer: u32) -> bool {
        let Some((lane, frame)) = self.peers[peer as usize].short.take() else { return true };
        let len = frame.length as usize;
        let target = match self.receiving.get(&(peer, frame.key)) {
            Some(Receiving::Early(_)) => match self.shelf.take(len) {
                Some(shelved) => Target::Kept(shelved),
                None => {
                    self.run_short(peer, lane, frame);
                    return false;
                }
            },
            other => {
                self.unexpected_bytes -= kept(len);
                match other {
                    // Whoever has asked meanwhile has memory for all of it.
                    Some(Receiving::Claimed(posted)) => Target::User(posted.into),
                    _ => Target::Discard,
                }
            }
        };
        self.peers[peer as usize].lanes[lane].lock().begin(frame, target);
        true
    }

    /// If a receive waits for a message like this one, it gets it.
    fn offer(&mut self, peer: u32, frame: &Frame) {
        let key = frame.key;
        let Some(waiting) = self.pairs.arrive(peer, (key.group, key.tag), key.sequence) else { return };
        let Waiting { from, place, ticket, receive: Receive { into, signature } } = waiting;
        self.mailboxes[ticket.mailbox as usize].source = Some((peer, key.sequence));
        self.courses.begin(peer, &key, &signature, into.len, false);
        let slot = &mut self.peers[peer as usize];
        match from {
            From::Any(_) => slot.receives(into.len),
            // Counted as expected since it was posted.
            From::Rank(_) => slot.spread += usize::from(spreads(into.len)),
        }
        let posted = Posted::new(into, signature, ticket, Some((from, place)));
        self.receiving.insert((peer, key), Receiving::Posted(posted));
    }

    /// Tells the sender of an announced message that the receiver's call is another.
    pub(super) fn refuse(&mut self, peer: u32, posted: &Posted, key: Key) {
        let frame = Frame { kind: FrameKind::Refuse, ..posted.ready(key) };
        self.control(peer, &frame);
        self.flush(peer);
    }

    pub(super) fn completed(&mut self, peer: u32, mut incoming: Incoming) {
        let key = (peer, incoming.frame.key);
        let whole = incoming.count();
        match incoming.target {
            Target::Discard => {}
            Target::Kept(shelved) => match self.receiving.remove(&key) {
                Some(Receiving::Claimed(posted)) => {
                    deliver(shelved.bytes(), &posted);
                    self.unexpected_bytes -= kept(shelved.bytes().len());
                    self.shelf.give_back(shelved);
                    self.peers[peer as usize].received(posted.into.len);
                    self.note_done(posted.ticket);
                }
                Some(Receiving::Early(_)) => {
                    let early = Early::Eager(incoming.frame.signature, shelved);
                    self.receiving.insert(key, Receiving::Early(early));
                }
                // Its receiver claimed it and gave up.
                _ => {
                    self.unexpected_bytes -= kept(shelved.bytes().len());
                    self.shelf.give_back(shelved);
                }
            },
            Target::User(_) => {
                if let Some(Receiving::Posted(posted) | Receiving::Claimed(posted)) =
                    self.receiving.get_mut(&key)
                {
                    posted.received += incoming.frame.length as usize;
                    if whole.unwrap_or(posted.received == posted.into.len) {
                        let (ticket, len) = (posted.ticket, posted.into.len);
                        self.receiving.remove(&key);
                        self.peers[peer as usize].received(len);
                        self.note_done(ticket);
                    }
                }
            }
        }
    }
}
