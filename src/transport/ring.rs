//! A byte stream through shared memory: one ring for each direction, each in the segment of the rank that
//! reads it.
//!
//! | offset | written by | what |
//! |---|---|---|
//! | 0 | reader | `head`: bytes consumed so far; `reader_closed` |
//! | 128 | writer | `tail`: bytes published so far; `writer_waits`; `writer_closed` |
//! | 256 | both | the numbers that stand announced |
//! | 2304 | writer | the bytes; their count is a power of two |
//!
//! Counts only grow; a byte's place is its count modulo the capacity. Each side keeps the other's count as it
//! last saw it and looks again only when that does not suffice, so that in steady flow no cache line goes to
//! and fro for each call. A byte crosses by two copies: into the ring, and out of it.
//!
//! Whoever finds nothing to do sleeps on its endpoint's bell. The writer rings the reader's after each
//! publication. A writer that found the ring full raises `writer_waits`, looks once more, and the reader
//! rings when a quarter is free.
//!
//! What the writer announces has a word beside the bytes, with its number for as long as it stands. Who takes
//! or withdraws it makes that 0, by one exchange that fails where the other was first: so both sides know
//! which it was, whatever waits in the rings.

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use super::Stream;
use super::memory::PeerMemory;
use super::segment::{Region, Segment};
use crate::error::{Result, fail};
use crate::sys::fork;

/// The head line, the tail line, the announcements, and then the bytes.
const DATA_AT: usize = ANNOUNCED_AT + size_of::<Announced>();
const ANNOUNCED_AT: usize = 256;

/// The capacities that a ring may have.
pub const CAPACITIES: std::ops::RangeInclusive<usize> = 4096..=1 << 30;

#[repr(C, align(128))]
struct ReaderLine {
    head: AtomicU64,
    closed: AtomicU32,
}

#[repr(C, align(128))]
struct WriterLine {
    tail: AtomicU64,
    waits: AtomicU32,
    closed: AtomicU32,
}

/// How many announcements can stand in a ring.
pub const STANDING: usize = 512;

/// Those numbers that stand, each at its place: the number modulo [`STANDING`]. 0: none.
type Announced = [AtomicU32; STANDING];

/// Memory for a ring in this endpoint's segment, to be written by one peer.
#[derive(Debug)]
pub struct RingMemory {
    region: Region,
    capacity: usize,
}

impl RingMemory {
    /// `capacity` is a power of two in [`CAPACITIES`]. `None` when the segment has no room.
    pub fn allocate(segment: &Arc<Segment>, capacity: usize) -> Option<RingMemory> {
        assert!(capacity.is_power_of_two() && CAPACITIES.contains(&capacity), "ring capacity {capacity}");
        let region = segment.allocate(DATA_AT + capacity, 128)?;
        Some(RingMemory { region, capacity })
    }

    /// Where it is in the segment: what the peer is told.
    pub fn offset(&self) -> usize {
        self.region.offset()
    }

    /// Has the memory never be used for something else: the peer may still write to it.
    pub fn retire(&mut self) {
        self.region.retire();
    }

    /// How many bytes fit.
    pub fn capacity(&self) -> usize {
        self.capacity
    }
}

/// The ring in a peer's segment that this endpoint writes to.
pub struct PeerRing {
    memory: Arc<PeerMemory>,
    address: NonNull<u8>,
    capacity: usize,
}

impl PeerRing {
    /// The ring of `capacity` bytes that the peer says it keeps at `offset` of its segment.
    pub fn new(memory: Arc<PeerMemory>, offset: u64, capacity: u64) -> Result<PeerRing> {
        let (Ok(offset), Ok(capacity)) = (usize::try_from(offset), usize::try_from(capacity)) else {
            fail!(System, "the peer's ring at {offset} with {capacity} bytes is out of range")
        };
        if !capacity.is_power_of_two() || !CAPACITIES.contains(&capacity) || !offset.is_multiple_of(128) {
            fail!(System, "the peer's ring at {offset} with {capacity} bytes has an impossible shape");
        }
        let Some(address) = memory.segment.address(offset, DATA_AT + capacity) else {
            fail!(System, "the peer's ring at {offset} with {capacity} bytes is not inside its segment")
        };
        Ok(PeerRing { memory, address, capacity })
    }

    /// The peer's memory.
    pub fn memory(&self) -> &Arc<PeerMemory> {
        &self.memory
    }
}

/// A stream in both directions between this endpoint and a peer.
pub struct Ring {
    incoming: RingMemory,
    outgoing: NonNull<u8>,
    outgoing_capacity: usize,
    peer: Arc<PeerMemory>,
    fork: u32,
    /// Bytes consumed, and bytes known to be published.
    head: u64,
    seen_tail: u64,
    /// Bytes published, and bytes known to be consumed.
    tail: u64,
    seen_head: u64,
    /// The last number under which something was announced.
    announced: u32,
}

// SAFETY: `outgoing` points into the peer's mapped segment, which `peer` keeps and which is the same in every
// thread.
unsafe impl Send for Ring {}

impl Ring {
    /// Reads from `incoming` and writes to `outgoing`.
    pub fn new(incoming: RingMemory, outgoing: PeerRing) -> Ring {
        let PeerRing { memory: peer, address: outgoing, capacity: outgoing_capacity } = outgoing;
        let (head, seen_tail, tail, seen_head) = (0, 0, 0, 0);
        let fork = fork::generation();
        let announced = 0;
        Ring {
            incoming,
            outgoing,
            outgoing_capacity,
            peer,
            fork,
            head,
            seen_tail,
            tail,
            seen_head,
            announced,
        }
    }

    /// How many bytes can be read now.
    fn readable(&mut self) -> io::Result<usize> {
        if self.seen_tail == self.head {
            self.seen_tail = writer_line(self.incoming.region.address()).tail.load(Ordering::Acquire);
        }
        let count = self.seen_tail.wrapping_sub(self.head);
        if count > self.incoming.capacity as u64 {
            return Err(corrupt("tail", self.seen_tail, self.head));
        }
        Ok(count as usize)
    }

    /// How many bytes can be written now, when `wanted` are to be.
    fn writable(&mut self, wanted: usize) -> io::Result<usize> {
        let capacity = self.outgoing_capacity as u64;
        let known = capacity - (self.tail - self.seen_head);
        if known >= wanted as u64 {
            return Ok(known as usize);
        }
        let head = reader_line(self.outgoing).head.load(Ordering::Acquire);
        if self.tail.wrapping_sub(head) > capacity || head < self.seen_head {
            return Err(corrupt("head", head, self.tail));
        }
        self.seen_head = head;
        Ok((capacity - (self.tail - head)) as usize)
    }

    /// What is readable without a wrap, from the incoming ring's data.
    fn readable_span(&mut self) -> io::Result<&[u8]> {
        let count = self.readable()?;
        let start = (self.head % self.incoming.capacity as u64) as usize;
        let len = count.min(self.incoming.capacity - start);
        // SAFETY: `start + len` is at most the capacity, so the span is inside the region. The writer
        // published these bytes and leaves them alone until they are consumed, which takes `&mut self`. A
        // peer holds the job's secret; one that breaks this rule can change what is read, never where.
        Ok(unsafe {
            std::slice::from_raw_parts(self.incoming.region.address().as_ptr().add(DATA_AT + start), len)
        })
    }

    /// Gives `count` bytes back to the writer and wakes it if it waits for them.
    fn release(&mut self, count: usize) {
        self.head += count as u64;
        let address = self.incoming.region.address();
        reader_line(address).head.store(self.head, Ordering::Release);
        // Against the fence of a writer that found the ring full: either it sees the new head, or this sees
        // it wait.
        fence(Ordering::SeqCst);
        let writer = writer_line(address);
        if writer.waits.load(Ordering::Relaxed) != 0 {
            let tail = writer.tail.load(Ordering::Relaxed);
            let left = tail.wrapping_sub(self.head);
            if left <= self.incoming.capacity as u64 / 4 * 3 && writer.waits.swap(0, Ordering::Relaxed) != 0 {
                self.peer.bell.ring_if_parked();
            }
        }
    }

    /// Copies as much of `parts` as fits into `room` bytes after the tail; returns how much.
    fn fill(&mut self, parts: &[IoSlice<'_>], room: usize) -> usize {
        let mut done = 0;
        for part in parts {
            let mut rest = &part[..part.len().min(room - done)];
            while !rest.is_empty() {
                let start = ((self.tail + done as u64) % self.outgoing_capacity as u64) as usize;
                let len = rest.len().min(self.outgoing_capacity - start);
                // SAFETY: `start + len` is at most the capacity, so the target is inside the peer's ring, and
                // the `room` bytes after the tail belong to the writer until they are published.
                unsafe {
                    let target = self.outgoing.add(DATA_AT + start);
                    std::ptr::copy_nonoverlapping(rest.as_ptr(), target.as_ptr(), len);
                }
                done += len;
                rest = &rest[len..];
            }
        }
        done
    }
}

impl Stream for Ring {
    fn write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let wanted = parts.iter().map(|part| part.len()).fold(0, usize::saturating_add);
        if wanted == 0 {
            return Ok(0);
        }
        if reader_line(self.outgoing).closed.load(Ordering::Relaxed) != 0 {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let mut room = self.writable(wanted)?;
        if room == 0 {
            writer_line(self.outgoing).waits.store(1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            room = self.writable(wanted)?;
            if room == 0 {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            writer_line(self.outgoing).waits.store(0, Ordering::Relaxed);
        }
        let done = self.fill(parts, room);
        self.tail += done as u64;
        writer_line(self.outgoing).tail.store(self.tail, Ordering::Release);
        self.peer.bell.ring_if_parked();
        Ok(done)
    }

    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let mut done = 0;
        // Twice: up to the end of the ring, and on from its start.
        for _ in 0..2 {
            let span = self.readable_span()?;
            let count = span.len().min(into.len() - done);
            into[done..done + count].copy_from_slice(&span[..count]);
            // Released below, in one step.
            self.head += count as u64;
            done += count;
        }
        if done > 0 {
            self.release(0);
            return Ok(done);
        }
        if into.is_empty() { Ok(0) } else { self.nothing() }
    }

    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn peek(&mut self) -> io::Result<Option<&[u8]>> {
        if self.readable()? == 0 && self.writer_closed() && self.readable()? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.readable_span().map(Some)
    }

    fn announce(&mut self) -> u32 {
        for _ in 0..STANDING {
            // Numbers do not come again for long: what is withdrawn may be tried to be taken until the peer
            // has read that.
            self.announced = self.announced.wrapping_add(1).max(1);
            let place = place(self.outgoing, self.announced);
            if place.load(Ordering::Relaxed) == 0 {
                // Published with the bytes that tell of it.
                place.store(self.announced, Ordering::Relaxed);
                return self.announced;
            }
        }
        0
    }

    fn withdraw(&self, number: u32) -> bool {
        number == 0 || ends(self.outgoing, number)
    }

    fn take(&self, number: u32) -> bool {
        number != 0 && ends(self.incoming.region.address(), number)
    }

    fn stands(&self, number: u32) -> bool {
        number != 0 && place(self.incoming.region.address(), number).load(Ordering::SeqCst) == number
    }

    fn consume(&mut self, count: usize) {
        let shown = self.seen_tail - self.head;
        assert!(count as u64 <= shown, "consume {count} of {shown}");
        self.release(count);
    }
}

impl Ring {
    /// What a read says that found no byte.
    fn nothing(&mut self) -> io::Result<usize> {
        // A byte may have come between the look at the tail and the look at the flag: then there is no end
        // yet.
        if self.writer_closed() && self.readable()? == 0 {
            return Ok(0);
        }
        Err(io::ErrorKind::WouldBlock.into())
    }

    fn writer_closed(&self) -> bool {
        writer_line(self.incoming.region.address()).closed.load(Ordering::Acquire) != 0
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        if self.fork != fork::generation() {
            // In a forked child: the parent's link stays open.
            self.incoming.retire();
            return;
        }
        reader_line(self.incoming.region.address()).closed.store(1, Ordering::Release);
        writer_line(self.outgoing).closed.store(1, Ordering::Release);
        self.peer.bell.ring_if_parked();
        if !self.writer_closed() {
            self.incoming.retire();
        }
    }
}

fn reader_line<'a>(ring: NonNull<u8>) -> &'a ReaderLine {
    // SAFETY: `ring` is aligned to 128 bytes and at least DATA_AT long (both checked where it came from), its
    // mapping outlives the Ring in whose methods this is called, and the line is only ever accessed as
    // atomics.
    unsafe { ring.cast().as_ref() }
}

fn writer_line<'a>(ring: NonNull<u8>) -> &'a WriterLine {
    // SAFETY: as above; 128 + size_of::<WriterLine>() is ANNOUNCED_AT.
    unsafe { ring.add(128).cast().as_ref() }
}

/// Where a number stands that is announced in a ring.
fn place<'a>(ring: NonNull<u8>, number: u32) -> &'a AtomicU32 {
    // SAFETY: as above; ANNOUNCED_AT + size_of::<Announced>() is DATA_AT.
    let announced: &Announced = unsafe { ring.add(ANNOUNCED_AT).cast().as_ref() };
    &announced[number as usize % STANDING]
}

/// Has a number stand no longer. Whether it did.
fn ends(ring: NonNull<u8>, number: u32) -> bool {
    place(ring, number).compare_exchange(number, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok()
}

fn corrupt(which: &str, theirs: u64, ours: u64) -> io::Error {
    let text = format!("the peer's ring is corrupt: its {which} is {theirs} where ours is {ours}");
    io::Error::new(io::ErrorKind::InvalidData, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::bell::Bell;
    use proptest::prelude::*;
    use std::thread;

    /// Two ends of a link within this process: each with its bell.
    fn pair(capacity: usize) -> [(Ring, Bell); 2] {
        let make = || {
            let segment = Segment::new(4 << 20).unwrap();
            let bell = Bell::new(Arc::clone(&segment)).unwrap();
            let memory = RingMemory::allocate(&segment, capacity).unwrap();
            let fds =
                (segment.fd().try_clone_to_owned().unwrap(), bell.ringer().try_clone_to_owned().unwrap());
            let peer = Arc::new(PeerMemory::new(fds.0, fds.1, std::process::id()).unwrap());
            (memory, bell, peer)
        };
        let ((a, a_bell, see_a), (b, b_bell, see_b)) = (make(), make());
        let (a_at, b_at) = (a.offset() as u64, b.offset() as u64);
        let left = Ring::new(a, PeerRing::new(see_b, b_at, capacity as u64).unwrap());
        let right = Ring::new(b, PeerRing::new(see_a, a_at, capacity as u64).unwrap());
        [(left, a_bell), (right, b_bell)]
    }

    /// The byte at `place` of the stream that `seed` stands for.
    fn byte(seed: u64, place: usize) -> u8 {
        (place as u64).wrapping_mul(seed | 1).wrapping_add(place as u64 >> 7) as u8
    }

    /// Sleeps until `ready` is true; a lost wake-up hangs here.
    fn wait(bell: &Bell, mut attempt: impl FnMut() -> io::Result<usize>) -> usize {
        let blocked = |answer: &io::Result<usize>| matches!(answer, Err(cause) if cause.kind() == io::ErrorKind::WouldBlock);
        loop {
            let mut answer = attempt();
            if blocked(&answer) {
                bell.prepare_park();
                answer = attempt();
                if blocked(&answer) {
                    bell.park(None, &mut Vec::new()).unwrap();
                    continue;
                }
                bell.cancel_park();
            }
            return answer.unwrap();
        }
    }

    #[test]
    fn streams_flow_both_ways_at_once_in_any_chunking() {
        const TOTAL: usize = 3_000_000;
        for capacity in [4096, 65536] {
            let [(mut left, left_bell), (mut right, right_bell)] = pair(capacity);
            // Each end sends its stream and checks the other's, one step of each in turn, and sleeps when
            // neither moves.
            let play = |ring: &mut Ring, bell: &Bell, own: u64, other: u64| {
                let (mut sent, mut got, mut dice) = (0, 0, own);
                let mut buffer = vec![0; 20_000];
                while sent < TOTAL || got < TOTAL {
                    dice = dice.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let (chunk, cut) = (1 + (dice >> 33) as usize % 20_000, (dice >> 48) as usize);
                    let chunk = chunk.min(TOTAL - sent);
                    let out: Vec<u8> = (sent..sent + chunk).map(|place| byte(own, place)).collect();
                    let cut = cut.min(chunk);
                    wait(bell, || {
                        let mut moved = 0;
                        if sent < TOTAL {
                            match ring.write(&[IoSlice::new(&out[..cut]), IoSlice::new(&out[cut..])]) {
                                Ok(count) => moved += count,
                                Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => {}
                                Err(cause) => return Err(cause),
                            }
                        }
                        let wrote = moved;
                        match ring.read(&mut buffer[..1 + cut % 20_000]) {
                            Ok(count) => {
                                for (index, &seen) in buffer[..count].iter().enumerate() {
                                    assert_eq!(seen, byte(other, got + index), "at {}", got + index);
                                }
                                got += count;
                                moved += count;
                            }
                            Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => {}
                            Err(cause) => return Err(cause),
                        }
                        sent += wrote;
                        if moved == 0 { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(moved) }
                    });
                }
            };
            thread::scope(|scope| {
                scope.spawn(|| play(&mut left, &left_bell, 11, 23));
                scope.spawn(|| play(&mut right, &right_bell, 23, 11));
            });
        }
    }

    #[test]
    fn reading_in_place_shows_up_to_the_end_of_the_ring() {
        let [(mut left, _), (mut right, _)] = pair(4096);
        assert_eq!(right.peek().unwrap(), Some(&[][..]));
        assert_eq!(left.write(&[IoSlice::new(&[1; 4000])]).unwrap(), 4000);
        assert_eq!(right.peek().unwrap().unwrap(), &[1; 4000]);
        right.consume(3900);
        assert_eq!(left.write(&[IoSlice::new(&[2; 5000])]).unwrap(), 3996);
        assert_eq!(right.peek().unwrap().unwrap(), &[1; 100]);
        right.consume(100);
        assert_eq!(right.peek().unwrap().unwrap(), &[2; 96]);
        right.consume(96);
        assert_eq!(right.peek().unwrap().unwrap(), &[2; 3900]);
        let mut rest = [0; 5000];
        assert_eq!(right.read(&mut rest).unwrap(), 3900);
        assert_eq!(right.read(&mut rest).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn a_closed_end_is_seen_after_its_last_byte() {
        let [(mut left, _), (mut right, right_bell)] = pair(4096);
        left.write(&[IoSlice::new(b"last")]).unwrap();
        right_bell.prepare_park();
        drop(left);
        right_bell.park(None, &mut Vec::new()).unwrap();
        let mut bytes = [0; 8];
        assert_eq!(right.read(&mut bytes).unwrap(), 4);
        assert_eq!(right.read(&mut bytes).unwrap(), 0);
        assert_eq!(right.peek().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(right.write(&[IoSlice::new(b"x")]).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn a_full_ring_wakes_its_writer_once_a_quarter_is_free() {
        let [(mut left, left_bell), (mut right, _)] = pair(4096);
        assert_eq!(left.write(&[IoSlice::new(&[0; 9000])]).unwrap(), 4096);
        let full = left.write(&[IoSlice::new(&[0; 1])]).unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        let parked = || left_bell.prepare_park();
        parked();
        let is_parked = |ring: &Ring| ring.peer.segment.parked().load(Ordering::Relaxed);
        right.consume_all(1023);
        assert_eq!(is_parked(&right), 1, "asleep while there is little room");
        right.consume_all(1);
        assert_eq!(is_parked(&right), 0, "woken");
        left_bell.park(None, &mut Vec::new()).unwrap();
    }

    #[test]
    fn what_is_announced_is_taken_or_withdrawn_and_never_both() {
        let [(mut left, _), (mut right, _)] = pair(4096);
        let numbers = [(); 3].map(|()| left.announce());
        assert!(numbers.iter().all(|&number| right.stands(number)));
        assert!(right.take(numbers[0]) && !left.withdraw(numbers[0]), "taken");
        assert!(left.withdraw(numbers[1]) && !right.take(numbers[1]), "withdrawn");
        assert!(numbers.map(|number| right.stands(number)) == [false, false, true]);
        // At the same moment, again and again.
        for _ in 0..1000 {
            let number = left.announce();
            let (taker, both) = (&mut right, &std::sync::Barrier::new(2));
            let (took, withdrew) = thread::scope(|scope| {
                let takes = scope.spawn(move || {
                    both.wait();
                    taker.take(number)
                });
                both.wait();
                let withdrew = left.withdraw(number);
                (takes.join().unwrap(), withdrew)
            });
            assert!(took != withdrew, "taken: {took}, withdrawn: {withdrew}");
        }
    }

    #[test]
    fn as_much_as_can_stand_announced_does_and_what_is_over_is_not_taken_for_what_has_its_place() {
        let [(mut left, _), (right, _)] = pair(4096);
        // Numbers begin again in the middle.
        left.announced = u32::MAX - 100;
        let mut standing: Vec<u32> = (0..STANDING).map(|_| left.announce()).collect();
        for round in 0..2 * STANDING {
            assert_eq!(left.announce(), 0, "there is no room");
            let over = standing.remove(round * 7 % STANDING);
            assert!(if round % 2 == 0 { right.take(over) } else { left.withdraw(over) });
            let next = left.announce();
            assert_eq!(next % STANDING as u32, over % STANDING as u32, "at the same place");
            assert!(!right.take(over) && !left.withdraw(over) && !right.stands(over));
            assert!(right.stands(next) && !standing.contains(&next));
            standing.push(next);
        }
        assert!(standing.iter().all(|&number| right.take(number)));
        // What has no number is asked for otherwise.
        assert!(left.withdraw(0) && !right.take(0) && !right.stands(0));
    }

    impl Ring {
        /// Looks, then consumes.
        fn consume_all(&mut self, count: usize) {
            assert!(self.peek().unwrap().unwrap().len() >= count);
            self.consume(count);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn a_hostile_peer_gets_an_error(head in any::<u64>(), tail in any::<u64>()) {
            let [(mut left, _), (right, _)] = pair(4096);
            // The peer writes its own two words at will.
            writer_line(right.outgoing).tail.store(tail, Ordering::Release);
            reader_line(right.incoming.region.address()).head.store(head, Ordering::Release);
            let mut bytes = [0; 64];
            let read = left.read(&mut bytes);
            let corrupt = |answer: io::Result<usize>| answer.is_err_and(|it| it.kind() == io::ErrorKind::InvalidData);
            prop_assert_eq!(corrupt(read), tail > 4096);
            let written = left.write(&[IoSlice::new(&[0; 5000])]);
            prop_assert_eq!(corrupt(written), head > 0);
        }

        #[test]
        fn a_ring_that_is_not_there_is_refused(offset in any::<u64>(), capacity in any::<u64>()) {
            let [(left, _), _] = pair(4096);
            let good = offset.is_multiple_of(128) && capacity.is_power_of_two() && capacity >= 4096
                && offset.checked_add(capacity).is_some_and(|end| end + DATA_AT as u64 <= left.peer.segment.size() as u64);
            prop_assert_eq!(PeerRing::new(Arc::clone(&left.peer), offset, capacity).is_ok(), good);
        }
    }
}
