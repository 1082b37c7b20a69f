//! Windows: memory of every rank of a group that all of them have mapped, so that their kernels reach it
//! where it is.
//!
//! Registering one is collective, in two rounds of fixed-size messages. First each rank tells where its
//! memory lies, and each maps that of the others. Then each tells where it has mapped them: so every rank
//! knows its own memory as each other one reaches it, and can tell their kernels. A rank that cannot go on
//! says why and still takes part, so all come to the same answer: the window serves, or it does not. One
//! whose caller gave it what is no window's memory says that in the first round, which is the last one then:
//! an error on every rank.

use std::sync::Arc;

use super::exchange::DeviceExchange;
use super::offer::MESSAGE_BYTES;
use crate::cuda::context::Devices;
use crate::cuda::driver::Location;
use crate::cuda::exchange::MAX_RANKS;
use crate::cuda::slab::{self, Kept, Opened, Place};
use crate::error::{Error, Result, fail};

/// Set in the number of the allocation that a window lies in, where slabs have theirs: allocations are no
/// slabs.
const NO_SLAB: u64 = 1 << 63;

/// The windows of an exchange.
#[derive(Debug, Default)]
pub(super) struct Windows {
    live: Vec<Window>,
    /// Deregistered; kernels that were launched before may still be running.
    ended: Vec<Window>,
    numbers: u64,
}

/// One rank's memory, and the others' mapped.
#[derive(Debug)]
pub(super) struct Window {
    number: u64,
    address: u64,
    bytes: u64,
    /// What tells the allocation from a later one at the same address.
    buffer: u64,
    /// This rank's memory as each rank reaches it.
    seen: [u64; MAX_RANKS],
    /// Each rank's memory as this one reaches it, and how much it is.
    reached: [u64; MAX_RANKS],
    sizes: [u64; MAX_RANKS],
    /// The device that the driver takes that for.
    devices: [u32; MAX_RANKS],
    _opened: Vec<Arc<Opened>>,
}

impl Windows {
    /// Whether there are any that have not ended.
    pub(super) fn any(&self) -> bool {
        !self.live.is_empty()
    }

    /// Memory that lies in a window, as each rank reaches it. `buffer`: its allocation.
    pub(super) fn find(&self, address: u64, bytes: u64, buffer: u64) -> Option<[u64; MAX_RANKS]> {
        let window =
            self.live.iter().find(|window| window.holds(address, bytes) && window.buffer == buffer)?;
        Some(window.seen.map(|seen| seen.wrapping_add(address - window.address)))
    }

    /// Where this rank reaches `bytes` bytes of another's part of a window, from `offset` bytes after its
    /// beginning, and the device that this is of here.
    pub(super) fn reach(&self, number: u64, member: usize, offset: u64, bytes: u64) -> Result<(u64, u32)> {
        let Some(window) = self.live.iter().find(|window| window.number == number) else {
            fail!(InvalidUsage, "the window has ended")
        };
        let size = window.sizes[member];
        if offset.checked_add(bytes).is_none_or(|end| end > size) {
            fail!(
                InvalidArgument,
                "{bytes} bytes from byte {offset} on do not lie in the window, which has {size} on rank {member}"
            );
        }
        Ok((window.reached[member] + offset, window.devices[member]))
    }

    /// Whether any window holds this memory, if its allocation is still the one that was registered.
    pub(super) fn may_hold(&self, address: u64, bytes: u64) -> bool {
        self.live.iter().any(|window| window.holds(address, bytes))
    }

    /// Whether there has been one: the same on all ranks, which register together, between the same two
    /// calls.
    pub(super) fn have_been(&self) -> bool {
        self.numbers > 0
    }

    /// Adds one; answers its number.
    pub(super) fn add(&mut self, mut window: Window) -> u64 {
        self.numbers += 1;
        window.number = self.numbers;
        self.live.push(window);
        self.numbers
    }

    /// Ends one. It goes once no kernel uses it: see [`Windows::take_ended`].
    pub(super) fn end(&mut self, number: u64) {
        if let Some(index) = self.live.iter().position(|window| window.number == number) {
            self.ended.push(self.live.swap_remove(index));
        }
    }

    /// What has ended, to be dropped where that may take time, if no kernel of this exchange is running.
    #[must_use]
    pub(super) fn take_ended(&mut self) -> Vec<Window> {
        std::mem::take(&mut self.ended)
    }

    /// That one is.
    pub(super) fn put_back(&mut self, ended: Vec<Window>) {
        self.ended.extend(ended);
    }
}

/// Those that no kernel uses any more.
impl Kept for Vec<Window> {
    fn is_over(&self) -> bool {
        true
    }
}

impl Window {
    fn holds(&self, address: u64, bytes: u64) -> bool {
        let end = self.address + self.bytes;
        address >= self.address && address <= end && end - address >= bytes
    }
}

/// A registration under way on one rank: [`Registration::message`] is gathered twice, with
/// [`Registration::map`] in between and [`Registration::finish`] at the end.
#[derive(Debug)]
pub struct Registration {
    exchange: Arc<DeviceExchange>,
    rank: usize,
    /// Or why it is refused.
    own: Result<Own>,
    said: Message,
    /// The others' memory as this rank reaches it, and how much it is.
    mapped: [u64; MAX_RANKS],
    sizes: [u64; MAX_RANKS],
    /// The device that it is of here.
    devices: [u32; MAX_RANKS],
    opened: Vec<Arc<Opened>>,
}

#[derive(Clone, Copy, Debug)]
struct Own {
    address: u64,
    bytes: u64,
    buffer: u64,
    /// Where its allocation begins.
    base: u64,
}

impl Own {
    /// Refuses what is not memory of the exchange's GPU.
    fn find(exchange: &DeviceExchange, address: u64, bytes: u64) -> Result<Own> {
        let Location { base, buffer, .. } = exchange.own_memory("the window", address, bytes)?;
        Ok(Own { address, bytes, buffer, base })
    }

    /// For the other ranks.
    fn offer(&self, exchange: &DeviceExchange) -> Result<Message> {
        let Own { address, bytes, buffer, base } = *self;
        let devices = exchange.devices();
        let _entered = devices.enter(exchange.device())?;
        if !devices.driver().is_shareable(address)? {
            fail!(Unsupported, "it was not allocated by cudaMalloc, cuMemAlloc or ncclMemAlloc");
        }
        exchange.prepare_to_latch()?;
        // SAFETY: the first byte of a live allocation: the caller owns it.
        let handle = unsafe { devices.driver().export_memory(base) }?;
        let (process, slab) = (slab::identity(devices), NO_SLAB | buffer);
        Ok(Message::Offer { address, bytes, place: Place { process, slab, handle, offset: address - base } })
    }
}

/// One rank's word.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Message {
    /// Here so many bytes lie: in its process, and for other processes.
    Offer { address: u64, bytes: u64, place: Place },
    /// There I have mapped yours, by rank.
    Mapped([u64; MAX_RANKS]),
    /// I cannot, for this reason.
    Refusal(String),
    /// What I was told to do makes no sense, for this reason.
    Wrong(String),
}

impl Registration {
    /// Begins on one rank, whose `memory` is so many bytes from an address on, or was refused before. What is
    /// not memory of the exchange's GPU is refused here. Either way the rank takes part, and all hear of it.
    pub fn begin(exchange: &Arc<DeviceExchange>, rank: u32, memory: Result<(u64, u64)>) -> Registration {
        let own = memory.and_then(|(address, bytes)| Own::find(exchange, address, bytes));
        let said = match &own {
            Ok(own) => own.offer(exchange).unwrap_or_else(|error| Message::refusal(&error)),
            Err(error) => Message::Wrong(error.text().to_owned()),
        };
        let exchange = exchange.clone();
        let (mapped, sizes, devices) = ([0; MAX_RANKS], [0; MAX_RANKS], [exchange.device(); MAX_RANKS]);
        Registration { exchange, rank: rank as usize, own, said, mapped, sizes, devices, opened: Vec::new() }
    }

    /// What the other ranks are to hear now.
    pub fn message(&self) -> [u8; MESSAGE_BYTES] {
        self.said.encode()
    }

    /// Maps what the others have offered. May wait for the GPU. If a rank's memory is refused, that is an
    /// error on all, and nothing is gathered again.
    pub fn map(&mut self, gathered: &[u8]) -> Result<()> {
        let messages = parse(gathered)?;
        for (rank, message) in messages.iter().enumerate() {
            if let Message::Wrong(why) = message {
                // This rank's caller hears of its own first.
                self.own.as_ref().map_err(Error::clone)?;
                fail!(InvalidArgument, "the window of rank {rank} is refused there: {why}");
            }
        }
        if messages.iter().any(|message| matches!(message, Message::Refusal(_))) {
            // All know; the next round is for nothing, but all take part in it.
            return Ok(());
        }
        let devices = self.exchange.devices().clone();
        self.said = match self.map_all(&devices, &messages) {
            Ok(()) => Message::Mapped(self.mapped),
            Err(error) => Message::refusal(&error),
        };
        Ok(())
    }

    fn map_all(&mut self, devices: &Arc<Devices>, messages: &[Message]) -> Result<()> {
        for (rank, message) in messages.iter().enumerate() {
            let Message::Offer { address, bytes, place } = message else {
                fail!(Internal, "a rank sent something else than an offer")
            };
            let (Some(mapped), Some(size)) = (self.mapped.get_mut(rank), self.sizes.get_mut(rank)) else {
                fail!(Internal, "a window of {} ranks", messages.len())
            };
            *size = *bytes;
            *mapped = if place.process == slab::identity(devices) {
                if let Some(location) = devices.locate(*address)? {
                    self.devices[rank] = location.device;
                }
                *address
            } else {
                let opened = Opened::new(devices, self.exchange.device(), place)
                    .map_err(|error| error.context(format_args!("rank {rank}'s memory")))?;
                let at = opened.address(place);
                self.opened.push(opened);
                at
            };
        }
        Ok(())
    }

    /// The window's number on this rank, or why it does not serve: the same answer on every rank.
    pub fn finish(self, gathered: &[u8]) -> Result<std::result::Result<u64, String>> {
        let messages = parse(gathered)?;
        let (mut seen, mut unmapped) = ([0; MAX_RANKS], None);
        for (rank, message) in messages.iter().enumerate() {
            match message {
                Message::Refusal(why) => return Ok(Err(format!("rank {rank}: {why}"))),
                Message::Mapped(mapped) => seen[rank] = mapped[self.rank],
                // A rank that has heard a refusal says again what it has said; so does the one that has
                // refused.
                Message::Offer { .. } | Message::Wrong(_) => unmapped = Some(rank),
            }
        }
        if let Some(rank) = unmapped {
            fail!(Internal, "rank {rank} has not mapped what it was offered, and nobody has refused")
        }
        let Own { address, bytes, buffer, .. } = self.own?;
        let (reached, sizes, devices) = (self.mapped, self.sizes, self.devices);
        let window =
            Window { number: 0, address, bytes, buffer, seen, reached, sizes, devices, _opened: self.opened };
        Ok(Ok(self.exchange.add_window(window)))
    }
}

fn parse(gathered: &[u8]) -> Result<Vec<Message>> {
    let messages: Vec<Message> =
        gathered.chunks_exact(MESSAGE_BYTES).map(Message::decode).collect::<Result<_>>()?;
    if messages.len() > MAX_RANKS {
        fail!(Internal, "{} messages came about a window", messages.len());
    }
    Ok(messages)
}

const OFFER: u8 = 1;
const MAPPED: u8 = 2;
const REFUSAL: u8 = 3;
const WRONG: u8 = 4;

impl Message {
    fn refusal(error: &Error) -> Message {
        Message::Refusal(error.text().to_owned())
    }

    fn encode(&self) -> [u8; MESSAGE_BYTES] {
        let mut bytes = Vec::with_capacity(MESSAGE_BYTES);
        match self {
            Message::Offer { address, bytes: length, place } => {
                bytes.push(OFFER);
                bytes.extend_from_slice(&place.process);
                bytes.extend_from_slice(&place.handle);
                for word in [*address, *length, place.slab, place.offset] {
                    bytes.extend_from_slice(&word.to_le_bytes());
                }
            }
            Message::Mapped(mapped) => {
                bytes.push(MAPPED);
                mapped.iter().for_each(|word| bytes.extend_from_slice(&word.to_le_bytes()));
            }
            Message::Refusal(why) | Message::Wrong(why) => {
                bytes.push(if matches!(self, Message::Wrong(_)) { WRONG } else { REFUSAL });
                let most = why.len().min(MESSAGE_BYTES - 2);
                let end = (0..=most).rev().find(|&end| why.is_char_boundary(end)).unwrap_or(0);
                // PROOF: at most 254.
                bytes.push(end as u8);
                bytes.extend_from_slice(&why.as_bytes()[..end]);
            }
        }
        bytes.resize(MESSAGE_BYTES, 0);
        std::array::from_fn(|i| bytes[i])
    }

    fn decode(bytes: &[u8]) -> Result<Message> {
        let Some(message) = Message::parse(bytes) else {
            fail!(Internal, "a rank sent no message of this version; run the same unisono on all ranks")
        };
        Ok(message)
    }

    fn parse(bytes: &[u8]) -> Option<Message> {
        let (&kind, rest) = bytes.split_first()?;
        match kind {
            OFFER => {
                let (process, rest) = rest.split_first_chunk()?;
                let (handle, rest) = rest.split_first_chunk()?;
                let [address, bytes, slab, offset] = words(rest)?;
                let place = Place { process: *process, slab, handle: *handle, offset };
                Some(Message::Offer { address, bytes, place })
            }
            MAPPED => words(rest).map(Message::Mapped),
            REFUSAL | WRONG => {
                let (&len, text) = rest.split_first()?;
                let why = String::from_utf8_lossy(text.get(..usize::from(len))?).into_owned();
                Some(if kind == WRONG { Message::Wrong(why) } else { Message::Refusal(why) })
            }
            _ => None,
        }
    }
}

fn words<const N: usize>(mut bytes: &[u8]) -> Option<[u64; N]> {
    let mut words = [0; N];
    for word in &mut words {
        let (chunk, rest) = bytes.split_first_chunk()?;
        (*word, bytes) = (u64::from_le_bytes(*chunk), rest);
    }
    Some(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn messages_survive_the_wire() {
        let place = Place { process: [3; 16], slab: NO_SLAB | 4, handle: [5; 64], offset: 6 };
        for message in [
            Message::Offer { address: 7, bytes: 8, place },
            Message::Mapped([1, 2, 3, 4, 5, 6, 7, u64::MAX]),
            Message::Refusal("no such memory".into()),
            Message::Wrong("no memory at all".into()),
        ] {
            assert_eq!(Message::decode(&message.encode()), Ok(message));
        }
    }

    #[test]
    fn memory_is_found_in_the_window_that_holds_it_whole() {
        let window = |number, address, buffer| Window {
            number,
            address,
            bytes: 100,
            buffer,
            seen: [address + 1000, address + 2000, 0, 0, 0, 0, 0, 0],
            reached: [address, address + 3000, 0, 0, 0, 0, 0, 0],
            sizes: [100, 50, 0, 0, 0, 0, 0, 0],
            devices: [0, 3, 0, 0, 0, 0, 0, 0],
            _opened: Vec::new(),
        };
        let mut windows =
            Windows { live: vec![window(1, 4000, 7), window(2, 5000, 8)], ended: Vec::new(), numbers: 2 };
        assert_eq!(windows.find(5010, 90, 8).map(|seen| [seen[0], seen[1]]), Some([6010, 7010]));
        assert_eq!(windows.find(5010, 91, 8), None, "it ends outside");
        assert_eq!(windows.find(4999, 1, 8), None, "it begins outside");
        assert_eq!(windows.find(5010, 1, 9), None, "another allocation at the same address");
        assert_eq!(windows.reach(2, 1, 10, 40), Ok((8010, 3)));
        assert!(windows.reach(2, 1, 10, 41).is_err_and(|error| error.text().contains("has 50 on rank 1")));
        assert!(windows.reach(2, 1, u64::MAX, 2).is_err());
        windows.end(2);
        assert!(windows.reach(2, 1, 10, 40).is_err(), "it has ended");
        assert!(windows.find(5010, 90, 8).is_none() && windows.may_hold(4000, 100));
        drop(windows.take_ended());
        assert!(windows.ended.is_empty());
    }

    proptest! {
        #[test]
        fn hostile_bytes_do_no_harm(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Message::decode(&bytes);
        }
    }
}
