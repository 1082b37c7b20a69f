//! Reading and writing the lanes, and when they are left unread.

use std::sync::atomic::Ordering;
use std::time::Instant;

use super::Messages;
use super::peer::{Peer, PeerState};
use crate::engine::lane::{self, Event, Watch};
use crate::engine::wire::Frame;
use crate::transport::bell::Bell;

/// Frames handled on one lane before the next lane has its turn.
const TURN: usize = 64;

impl Messages {
    /// Reads and writes what it can on the lanes of `peer` that are in use. Whether anything moved.
    pub fn progress(&mut self, peer: u32) -> bool {
        self.progress_lanes(peer, self.peers[peer as usize].reads_from().len())
    }

    /// The same for all lanes of a peer, one of which the kernel says is ready.
    pub fn serve(&mut self, peer: u32, ready: usize) -> bool {
        if let Some(mut lane) = self.peers[peer as usize].lanes.get(ready).and_then(|lane| lane.try_lock()) {
            lane.revive();
        }
        self.progress_lanes(peer, self.peers[peer as usize].lanes.len())
    }

    /// The same for one lane, of which something has been hauled.
    pub fn serve_lane(&mut self, peer: u32, lane: usize) {
        self.read_lane(peer, lane);
        if self.peers[peer as usize].has_backlog() {
            self.flush(peer);
        }
        // What was read may be the end that was still missing: nothing tells of it again.
        if matches!(self.peers[peer as usize].state, PeerState::Left) {
            self.progress(peer);
        }
    }

    fn progress_lanes(&mut self, peer: u32, lanes: usize) -> bool {
        let mut any = false;
        loop {
            let mut moved = false;
            // What is read may be the end of what needs the others.
            let noted = lanes.max(self.peers[peer as usize].in_use().len());
            for lane in 0..lanes {
                moved |= self.read_lane(peer, lane);
            }
            self.note_watches_of(peer, noted);
            if self.peers[peer as usize].has_backlog() {
                moved |= self.flush(peer);
            }
            any |= moved;
            if !matches!(self.peers[peer as usize].state, PeerState::Left) {
                return any;
            }
            // What is pulled has more turns: it may be long.
            if moved && self.is_pulling(peer) {
                return any;
            }
            // The end may have come with what was read: nothing tells of it again.
            if moved {
                continue;
            }
            let slot = &mut self.peers[peer as usize];
            // A goodbye may overtake data on other connections; their end comes behind the data. What is in
            // shared memory was there before the goodbye.
            slot.drained = slot.short.is_none()
                && slot.lanes.iter().all(|lane| lane.try_lock().is_some_and(|lane| lane.is_drained()));
            if slot.drained {
                self.forget_begun(peer);
                self.strand(peer);
            }
            return any;
        }
    }

    /// Transfers posted with `peer` that have not ended.
    pub fn expected(&self, peer: u32) -> usize {
        self.peers[peer as usize].expected
    }

    fn read_lane(&mut self, peer: u32, lane: usize) -> bool {
        let (mut moved, mut rests) = (false, false);
        for turn in 0.. {
            // What the lane has read already the kernel does not tell of again.
            if turn >= TURN && !self.is_ahead(peer, lane) {
                break;
            }
            let short = self.peers[peer as usize].short.is_some();
            if !self.reads(peer) || short && !self.resume(peer) {
                self.hold(peer);
                rests = true;
                break;
            }
            // Whoever hauls reads on when the load is there.
            let track = &self.peers[peer as usize].lanes[lane];
            let Some(mut reading) = track.try_lock() else { return moved };
            let event = reading.read();
            if matches!(event, Ok(Event::Load)) && reading.offers(&mut 1) {
                self.loads.push(track.clone());
            }
            drop(reading);
            let event = match event {
                Ok(event) => event,
                // What it had sent over the others still counts.
                Err(_) if matches!(self.peers[peer as usize].state, PeerState::Left) => {
                    self.peers[peer as usize].lanes[lane].lock().shut();
                    return moved;
                }
                Err(why) => {
                    self.broken(peer, why);
                    return true;
                }
            };
            match event {
                Event::Load => return moved,
                Event::Broken(why) => {
                    self.doubt(peer, why);
                    return true;
                }
                Event::Idle | Event::Closed => {
                    rests = true;
                    break;
                }
                Event::Frame(frame) => {
                    moved = true;
                    if let Err(why) = self.arrive(peer, lane, frame) {
                        self.broken(peer, why);
                        return true;
                    }
                }
                Event::Complete(incoming) => {
                    moved = true;
                    self.completed(peer, incoming);
                }
            }
        }
        // What is pulled needs no memory of the engine's.
        moved | (rests && lane == 0 && self.pull(peer))
    }

    /// Whether a lane has something that takes no system call to read.
    fn is_ahead(&self, peer: u32, lane: usize) -> bool {
        self.peers[peer as usize].lanes[lane].try_lock().is_some_and(|lane| lane.is_ahead())
    }

    /// Goes on with what is pulled from `peer`. Whether there was anything.
    fn pull(&mut self, peer: u32) -> bool {
        let pulled = self.pull_on(peer);
        pulled | self.count_pulled(peer)
    }

    /// Writes what fits on the lanes of `peer`.
    pub(super) fn flush(&mut self, peer: u32) -> bool {
        let mut moved = false;
        let mut broken = None;
        let slot = &mut self.peers[peer as usize];
        let lanes = slot.in_use().len();
        let mut spare = slot.flows.outlet.pieces();
        let mut left = spare > 0;
        for track in &slot.lanes[..lanes] {
            let Some(mut lane) = track.try_lock() else {
                left = true;
                continue;
            };
            let result = lane.flush(|ticket, piece| {
                if let Some(key) = piece {
                    if self.sending.remove(&(peer, key)).is_none() {
                        return;
                    }
                    slot.expected -= 1;
                }
                self.mailboxes[ticket.mailbox as usize].tell(ticket.step, &self.wakes);
            });
            match result {
                Ok(progress) => moved |= progress,
                Err(error) => broken = Some(lane::broke(&error)),
            }
            if lane.offers(&mut spare) {
                self.loads.push(track.clone());
            }
            left |= lane.backlog() > 0;
        }
        slot.strews &= left;
        if left {
            self.backlog.store(true, Ordering::Relaxed);
        }
        self.note_watches_of(peer, lanes);
        if let Some(why) = broken {
            self.doubt(peer, why);
        }
        moved
    }

    /// Whether words wait to go out that no operation waits for.
    pub fn owes(&mut self) -> bool {
        let peers = || self.open.iter().map(|&peer| &self.peers[peer as usize]);
        let left = peers().any(Peer::has_backlog);
        self.backlog.store(left, Ordering::Relaxed);
        let owes = |peer: &Peer| peer.lanes.iter().any(|lane| lane.try_lock().is_none_or(|lane| lane.owes()));
        left && peers().any(|peer| matches!(peer.state, PeerState::Open) && owes(peer))
    }

    /// Writes what fits of them.
    pub fn flush_all(&mut self) {
        (0..self.open.len()).for_each(|index| _ = self.flush(self.open[index]));
    }

    /// This rank has left. Unless an operation is under way, nothing more goes out: the others need not wait
    /// for the end of the process.
    pub fn finish(&mut self) {
        if self.operations() > 0 {
            return;
        }
        for lane in self.peers.iter().flat_map(|peer| &peer.lanes) {
            if let Some(mut lane) = lane.try_lock() {
                lane.finish();
            }
        }
    }

    pub(super) fn control(&mut self, peer: u32, frame: &Frame) {
        if let Some(lane) = self.peers[peer as usize].lanes.first() {
            lane.lock().push_bare(frame);
        }
    }

    /// Has `bell` watch what the lanes need: readable unless they are left unread, writable while something
    /// waits for room. Whether anything has moved.
    pub fn watch(&mut self, bell: &Bell) -> bool {
        let moved = self.release();
        for (peer, index) in std::mem::take(&mut self.restless) {
            let Some(track) = self.peers[peer as usize].lanes.get(index as usize) else { continue };
            let mut lane = track.lock();
            let wanted = lane.watch();
            let Some(fd) = lane.stream().poll_fd() else { continue };
            let token = u64::from(peer) << 8 | u64::from(index);
            let result = match wanted {
                Watch::Nothing => {
                    bell.unwatch(fd);
                    Ok(())
                }
                Watch::Reading { blocked } => bell.watch(fd, token, !lane.closed(), blocked),
            };
            match result {
                Ok(()) => lane.watched = wanted,
                Err(error) => log::error!("a stream cannot be watched: {error}"),
            }
        }
        moved
    }

    /// Whether what `peer` sends is read now. What a transfer waits for may come behind any number of
    /// messages that nobody has asked for, so where one waits, the limit does not count. (One that writes
    /// counts too: its peer may be reading only as fast as we do.) What is left of a peer that has gone is
    /// bounded by the system's buffers. Nothing is read where there was no memory for what comes next, until
    /// it is time to ask for it again.
    fn reads(&self, peer: u32) -> bool {
        let slot = &self.peers[peer as usize];
        if slot.short.is_some() && self.asks_again_at.is_some_and(|moment| moment > Instant::now()) {
            return false;
        }
        self.unexpected_bytes <= self.unexpected_limit
            || slot.expected > 0
            || !matches!(slot.state, PeerState::Open)
            || slot.has_backlog()
            || self.pulled.iter().any(|pulled| pulled.peer == peer)
            || self.pairs.waiting().any(|waiting| waiting.from.accepts(peer))
    }

    /// Leaves the lanes of `peer` unread and unwatched: what waits there would wake every sleeper at once.
    fn hold(&mut self, peer: u32) {
        if !self.held.contains(&peer) {
            log::debug!("rank {}: what comes from rank {peer} waits until somebody asks for it", self.rank);
            self.held.push(peer);
            self.peers[peer as usize].lanes.iter().for_each(|lane| lane.lock().held = true);
            self.note_watches(peer);
        }
    }

    /// Ends [`Messages::hold`] where it has lost its reason, and reads what the lanes have read ahead.
    /// Whether there was anything.
    fn release(&mut self) -> bool {
        let mut moved = false;
        for peer in std::mem::take(&mut self.held) {
            if self.reads(peer) {
                self.peers[peer as usize].lanes.iter().for_each(|lane| lane.lock().held = false);
                self.note_watches(peer);
                let slot = &self.peers[peer as usize];
                if slot.short.is_some() || (0..slot.lanes.len()).any(|lane| self.is_ahead(peer, lane)) {
                    moved |= self.progress(peer);
                }
            } else {
                self.held.push(peer);
            }
        }
        moved
    }

    /// Notes which lanes the bell is to watch for something else. Who hauls one does so before sleeping.
    pub fn note_watches(&mut self, peer: u32) {
        self.note_watches_of(peer, self.peers[peer as usize].lanes.len());
    }

    /// The same for the first `lanes` of them.
    fn note_watches_of(&mut self, peer: u32, lanes: usize) {
        for (index, track) in self.peers[peer as usize].lanes[..lanes].iter().enumerate() {
            if track.try_lock().is_some_and(|lane| lane.watch() != lane.watched) {
                self.restless.push((peer, index as u32));
            }
        }
    }
}
