//! The loads of a lane, pieces of large messages, which it leaves to its hauler.

use std::io::{self, IoSlice};
use std::sync::Arc;

use super::reading::Incoming;
use super::{Flows, Lane, Target};
use crate::engine::wire::{FRAME_BYTES, Frame, FrameKind};

/// What [`Lane::haul`] has done.
#[derive(Clone, Copy, Debug)]
pub struct Hauled {
    /// Whether anything moved.
    pub moved: bool,
    /// Whether there is something for [`Lane::read`] or [`Lane::flush`] to tell.
    pub tells: bool,
    /// Whether a load is left, so that whoever hauls goes on. If not, it will be offered again.
    pub more: bool,
}

/// A piece of a large message of which at least this much is missing is a load.
const LOAD: usize = 64 * 1024;

/// Bytes that are hauled in one system call: each direction has its turn, and who wants the lane does not
/// wait long.
const HAUL: usize = 256 * 1024;

/// Reads of one turn.
const READS: usize = 4;

impl Lane {
    /// Leaves loads, the pieces of large messages, to [`Lane::haul`] from here on, which finds in `flows` what
    /// they are pieces of. Not where data costs no system call.
    pub fn leave_loads(&mut self, flows: &Arc<Flows>) {
        self.flows = self.reads_ahead.then(|| flows.clone());
    }

    /// Whether there is a load that can be moved and that its hauler has not been told of. Whoever asks tells
    /// it. Of the pieces that nobody has taken so many are `spare`: no more haulers than these are told.
    pub fn offers(&mut self, spare: &mut usize) -> bool {
        let takes = !self.blocked && self.has_load_out();
        let is_spare = takes && self.outgoing.is_empty();
        let moves = self.has_load_in() && !self.dry || takes && (!is_spare || *spare > 0);
        *spare -= usize::from(is_spare && *spare > 0);
        let offers = moves && !self.offered;
        self.offered |= offers;
        offers
    }

    /// The hauler gives up loads that do not move. [`Lane::revive`] has them offered again.
    pub fn give_back(&mut self) {
        self.offered = false;
        self.dry = self.has_load_in();
    }

    /// The kernel says that something moves.
    pub fn revive(&mut self) {
        self.dry = false;
        self.blocked &= !self.has_load_out();
    }

    /// Moves a part of the loads, each direction's, less if somebody else wants the lane. Whoever has been
    /// told of them calls this until there is no more.
    pub fn haul(&mut self, is_wanted: &dyn Fn() -> bool) -> Hauled {
        let mut moved = false;
        // First what has come: of what is under way little is then out of the caches.
        for _ in 0..READS {
            if !self.haul_in() {
                break;
            }
            moved = true;
            if is_wanted() {
                break;
            }
        }
        // Words that wait for whoever has the lane go along.
        if self.has_load_out() || !self.outgoing.is_empty() && self.can_haul() && !self.takes_nothing {
            match self.haul_out() {
                Ok(count) => moved |= count > 0,
                Err(error) if is_for_now(&error) => {}
                Err(error) => {
                    (self.blocked, self.takes_nothing) = (false, true);
                    self.refused = Some(error);
                }
            }
        }
        let more = self.has_load_in() || self.has_load_out() || self.awaits_piece();
        self.offered = more;
        let tells = !self.has_load_in() && (self.incoming.is_some() || self.start < self.end)
            || !self.finished.is_empty()
            || !self.outgoing.is_empty() && !self.takes_nothing && !self.has_load_out()
            || self.closed
            || self.ended.is_some()
            || self.refused.is_some();
        Hauled { moved, tells, more }
    }

    /// Reads a part of what comes in. Whether there was anything.
    fn haul_in(&mut self) -> bool {
        if self.has_load_in()
            && let Some(incoming) = &mut self.incoming
        {
            let missing = incoming.frame.length as usize - incoming.filled;
            let read = incoming.read_from(&mut *self.stream, missing.min(HAUL), &mut self.buffer);
            let came = self.has_come(read);
            if came {
                self.take_next();
            }
            return came;
        }
        self.take_next()
    }

    /// Notes what a hauler has read. Whether anything came, be it the end.
    fn has_come(&mut self, read: io::Result<usize>) -> bool {
        match read {
            Ok(0) => self.shut(),
            Ok(_) => self.drained = false,
            Err(error) if is_for_now(&error) => return false,
            Err(error) => {
                self.ended = Some(error);
                return false;
            }
        }
        true
    }

    fn haul_out(&mut self) -> io::Result<usize> {
        if self.outgoing.is_empty()
            && let Some(piece) = self.flows.as_ref().and_then(|flows| flows.outlet.take())
        {
            self.push_piece(piece);
        }
        let Some(front) = self.outgoing.front_mut() else { return Ok(0) };
        let [header, payload] = front.rest();
        let parts = [IoSlice::new(header), IoSlice::new(&payload[..payload.len().min(HAUL)])];
        let parts = if header.is_empty() { &parts[1..] } else { &parts[..] };
        self.blocked = true;
        let count = self.stream.write(parts)?;
        self.blocked = false;
        front.written += count;
        if front.left() == 0
            && let Some(gone) = self.outgoing.pop_front()
        {
            self.owed -= usize::from(gone.ticket.is_none());
            self.finished.extend(gone.tells());
        }
        Ok(count)
    }

    /// Whether the next piece of a message may come, whose others do.
    fn awaits_piece(&self) -> bool {
        self.flows.as_ref().is_some_and(|flows| !flows.intake.is_empty())
            && self.can_haul()
            && self.incoming.is_none()
            && !self.untold
            && self.start == self.end
    }

    /// Goes on to the next piece, if what has come is one that others of its message follow. What is not the
    /// hauler's is left to [`Lane::read`]. Whether anything moved.
    #[inline(never)]
    fn take_next(&mut self) -> bool {
        if let Some(incoming) = &mut self.incoming
            && incoming.filled == incoming.frame.length as usize
            && incoming.count() == Some(false)
        {
            // Who counts the last tells.
            self.incoming = None;
        }
        if !self.awaits_piece() {
            return false;
        }
        let read = self.fill();
        if !self.has_come(read) {
            return false;
        }
        let piece = || {
            let header = self.buffer[self.start..self.end].first_chunk::<FRAME_BYTES>()?;
            let frame = Frame::decode(header).ok()?;
            let inflow = self.flows.as_ref()?.intake.find(&frame.key)?;
            Some((frame, inflow.begin(&frame)?, inflow))
        };
        if let Some((frame, into, inflow)) = piece() {
            self.start += FRAME_BYTES;
            self.begin_piece(frame, into, inflow);
            if let Some(incoming) = &mut self.incoming {
                let count = (frame.length as usize).min(self.end - self.start);
                incoming.put(&self.buffer[self.start..self.start + count]);
                self.start += count;
            }
        }
        true
    }

    /// Whether what comes next is the payload of a frame, and a load. The last of it is hauled with the rest.
    pub(super) fn has_load_in(&self) -> bool {
        let goes_on = |incoming: &Incoming| {
            let missing = incoming.frame.length as usize - incoming.filled;
            let begun = self.offered && missing > 0 && incoming.filled > 0;
            let is_piece =
                incoming.frame.kind == FrameKind::Data && matches!(incoming.target, Target::User(_));
            is_piece && (missing >= LOAD || begun)
        };
        self.flows.is_some()
            && self.can_haul()
            && self.start == self.end
            && self.incoming.as_ref().is_some_and(goes_on)
    }

    fn has_load_out(&self) -> bool {
        let Some(flows) = &self.flows else { return false };
        self.can_haul()
            && !self.takes_nothing
            && match self.outgoing.front() {
                Some(front) => front.piece.is_some(),
                None => !flows.outlet.is_empty(),
            }
    }

    pub(super) fn can_haul(&self) -> bool {
        !self.closed && self.ended.is_none()
    }
}

/// Whether an error says only that nothing moves now.
fn is_for_now(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::{AsFd, BorrowedFd};
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    use super::super::tests::{KEY, frame};
    use super::super::{Destination, Event, Frames, Piece, Source, Ticket};
    use super::*;
    use crate::deadline::Deadline;
    use crate::engine::wire::Key;
    use crate::transport::Stream;

    struct Pipe(UnixStream);

    impl Stream for Pipe {
        fn write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
            self.0.write_vectored(parts)
        }

        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            self.0.read(into)
        }

        fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
            Some(self.0.as_fd())
        }
    }

    /// A lane whose loads are hauled, what it has them in, and the other end of its stream.
    fn hauled() -> (Lane, Arc<Flows>, UnixStream) {
        let (near, far) = UnixStream::pair().expect("a pair");
        near.set_nonblocking(true).expect("it is a socket");
        let (mut lane, flows) = (Lane::new(Box::new(Pipe(near))), Arc::new(Flows::default()));
        lane.leave_loads(&flows);
        (lane, flows, far)
    }

    #[test]
    fn a_hauler_goes_on_from_piece_to_piece_and_tells_with_the_last() {
        const LEN: usize = 3 * LOAD;
        let (mut lane, flows, mut far) = hauled();
        let mut memory = vec![0u8; LEN];
        let into = Destination { address: memory.as_mut_ptr(), len: LEN };
        let opened = flows.intake.open(KEY, into);
        let bytes: Vec<u8> = (0..LEN).map(|at| (at ^ at >> 8) as u8).collect();
        let piece = |number: usize| {
            let at = number * LOAD;
            let header = frame(FrameKind::Data, KEY, at, LOAD, LEN).encode();
            [&header, &bytes[at..at + LOAD]].concat()
        };
        // Behind the last comes a word that is nobody's load.
        let word = frame(FrameKind::Ready, Key { sequence: 1, ..KEY }, 0, 0, 8).encode();
        let all = [piece(2), piece(0), piece(1), word.to_vec()].concat();
        // As by who has read a piece before these.
        lane.offered = true;
        std::thread::scope(|scope| {
            scope.spawn(|| far.write_all(&all).expect("it is read"));
            let mut told = Vec::new();
            while told.len() < 2 {
                let hauled = lane.haul(&|| false);
                if !hauled.tells {
                    continue;
                }
                match lane.read().expect("frames") {
                    Event::Complete(mut piece) => told.push((piece.frame.kind, piece.count())),
                    Event::Frame(frame) => told.push((frame.kind, None)),
                    _ => {}
                }
            }
            // The hauler has counted the others.
            assert_eq!(told, [(FrameKind::Data, Some(true)), (FrameKind::Ready, None)]);
        });
        assert!(memory == bytes, "other bytes");
        drop(opened);
    }

    #[test]
    fn a_frame_that_is_told_keeps_its_place_before_a_piece_though_it_has_no_bytes() {
        let (mut lane, flows, mut far) = hauled();
        let mut memory = [0u8; 8];
        let opened = flows.intake.open(KEY, Destination { address: memory.as_mut_ptr(), len: 8 });
        // As by who has read a piece before these.
        lane.offered = true;
        let other = Key { sequence: 1, ..KEY };
        far.write_all(&frame(FrameKind::Eager, other, 0, 0, 0).encode()).expect("there is room");
        let Event::Frame(told) = lane.read().expect("a frame") else { panic!("not told") };
        let piece = [&frame(FrameKind::Data, KEY, 0, 8, 8).encode()[..], &[9; 8]].concat();
        far.write_all(&piece).expect("there is room");
        // Whoever was told has yet to say where its payload goes, though there is none.
        assert!(!lane.haul(&|| false).moved);
        lane.begin(told, Target::Discard);
        let mut came = std::iter::repeat_with(|| lane.read().expect("frames"));
        let mut came = came.by_ref().filter(|event| !matches!(event, Event::Idle));
        assert!(matches!(came.next(), Some(Event::Complete(word)) if word.frame.key == other));
        assert!(matches!(came.next(), Some(Event::Frame(piece)) if piece.key == KEY));
        drop(opened);
    }

    #[test]
    fn a_piece_that_is_given_up_midway_is_seen_out_by_who_flushes() {
        const LEN: usize = 4 << 20;
        let (mut lane, _flows, mut far) = hauled();
        let (bytes, ticket) = (vec![7u8; LEN], Ticket { mailbox: 1, step: 0 });
        let piece = Piece { key: KEY, left: Arc::new(AtomicUsize::new(1)) };
        let from = Source { address: bytes.as_ptr(), len: LEN };
        lane.push_piece((frame(FrameKind::Data, KEY, 0, LEN, LEN), from, ticket, piece));
        while lane.haul(&|| false).moved {}
        assert!(lane.cancel(1, Frames::Any, |_| panic!("some of it has gone")));
        drop(bytes);
        std::thread::scope(|scope| {
            let all = scope.spawn(move || {
                let mut all = vec![0; FRAME_BYTES + LEN];
                far.read_exact(&mut all).map(|()| all)
            });
            // Nobody hauls any more.
            let end = Deadline::after(Duration::from_secs(20));
            while lane.owes() && !end.expired() {
                assert!(lane.flush(|_, _| panic!("nobody is to be told")).is_ok());
            }
            let owes = lane.owes();
            drop(lane);
            assert!(!owes, "the rest does not go out");
            let all = all.join().expect("no panic").expect("all of it comes");
            assert!(all[FRAME_BYTES..] == vec![7; LEN], "other bytes");
        });
    }

    #[test]
    fn a_payload_that_looks_like_a_piece_is_none() {
        let (mut lane, flows, mut far) = hauled();
        let mut memory = [1u8; 8];
        let opened = flows.intake.open(KEY, Destination { address: memory.as_mut_ptr(), len: 8 });
        let forged = [&frame(FrameKind::Data, KEY, 0, 8, 8).encode()[..], &[9; 8]].concat();
        let other = Key { sequence: 1, ..KEY };
        let header = frame(FrameKind::Eager, other, 0, forged.len(), forged.len()).encode();
        far.write_all(&header).expect("there is room");
        let Event::Frame(told) = lane.read().expect("a frame") else { panic!("not told") };
        // Whoever was told has yet to say where its payload goes.
        far.write_all(&forged).expect("there is room");
        let hauled = lane.haul(&|| false);
        assert!(!hauled.moved && !hauled.more);
        let mut payload = vec![0u8; forged.len()];
        let into = Destination { address: payload.as_mut_ptr(), len: payload.len() };
        lane.begin(told, Target::User(into));
        // Once it says that all had been read that was there.
        let came = std::iter::repeat_with(|| lane.read().expect("its payload"));
        let mut came = came.skip_while(|event| matches!(event, Event::Idle));
        assert!(matches!(came.next(), Some(Event::Complete(_))));
        drop(came);
        assert!(payload == forged && memory == [1; 8]);
        drop(opened);
    }
}
