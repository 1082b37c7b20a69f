//! Desks as they lie in pinned memory, and what stands on their slips.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::super::context::Devices;
use super::super::driver::Grid;
use super::super::kernels::{Launch, Pair};
use crate::error::Result;

/// What courier.cuh calls these: desks, slips of one, the most blocks that serve it, and words of a slip and
/// of its back.
pub(super) const DESKS: usize = 3;
pub(super) const SLIPS: u32 = 64;
pub(super) const BLOCKS: usize = 16;
pub(super) const FIELDS: usize = 8;
pub(super) const BACK_WORDS: usize = 32;

/// How many stands there are on a page. Couriers of the first have desks in the memory of their device, too.
pub(super) const STANDS: usize = 16;

/// Bytes from stand to stand.
pub(super) const STRIDE: usize = size_of::<Room>();

/// Which of the desks. Orders of one follow each other; what is ordered at another goes on beside them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Desk {
    /// From the device to pinned memory.
    Load,
    /// From pinned memory to the device.
    Store,
    /// Where operands are combined, by couriers that can.
    Work,
}

impl Desk {
    /// All of them.
    pub const ALL: [Desk; DESKS] = [Desk::Load, Desk::Store, Desk::Work];

    /// What is done there.
    pub(super) fn verb(self) -> &'static str {
        match self {
            Desk::Load => "load",
            Desk::Store => "store",
            Desk::Work => "combine",
        }
    }
}

/// A desk as it lies in pinned memory.
#[repr(C, align(64))]
pub(super) struct Board {
    /// Above each field of a slip, the order's number.
    slips: [[AtomicU64; FIELDS]; SLIPS as usize],
    done: [AtomicU32; BLOCKS],
    pub(super) here: AtomicU32,
    apart: [u32; 15],
}

/// A stand: desks, the backs of the slips of all but the first, and a sheet for each slip of the last. The
/// kernel's `Stand` is how it begins.
#[repr(C, align(64))]
pub(super) struct Room {
    pub(super) boards: [Board; DESKS],
    /// Above each word the order's number.
    backs: [Backs; DESKS - 1],
    sheets: [Sheet; SLIPS as usize],
}

type Backs = [[AtomicU64; BACK_WORDS]; SLIPS as usize];

/// What is combined by a [`Launch`] of [`MAX_OPERANDS`], as it lies in memory.
type Sheet = [AtomicU64; Launch::SHEET_WORDS];

/// What an order needs besides its slip.
pub(in crate::cuda) enum Annex {
    Nothing,
    Sheet([u64; Launch::SHEET_WORDS]),
    Back(Back),
}

/// What stands on the back of a slip.
pub(in crate::cuda) struct Back {
    words: [u32; BACK_WORDS],
    count: usize,
}

impl Back {
    /// Up to [`PLACED`] bytes.
    fn of(bytes: &[u8]) -> Back {
        let mut words = [0; BACK_WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks(4)) {
            let mut whole = [0; 4];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = u32::from_le_bytes(whole);
        }
        Back { words, count: bytes.len().div_ceil(4) }
    }

    #[cfg(test)]
    pub(super) fn words(&self) -> [u32; BACK_WORDS] {
        self.words
    }
}

/// The parameter of the kernels: where the stand is, which of the desks in the device's memory, the number of
/// the next order at each, and how many blocks serve it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Call {
    pub(super) stand: u64,
    pub(super) near: u32,
    pub(in crate::cuda) next: [u32; DESKS],
    pub(in crate::cuda) blocks: [u32; DESKS],
    /// Threads of a block. The kernels are not told.
    pub(super) threads: u32,
}

impl Call {
    /// The launch.
    pub(crate) fn grid(&self) -> Grid {
        Grid { blocks: self.blocks.iter().sum(), threads: self.threads, shared: 0, overlaps: false }
    }

    /// Where a desk lies, and the backs of its slips, if they have any.
    #[cfg(test)]
    pub(in crate::cuda) fn board(&self, desk: Desk) -> (u64, u64) {
        let board = self.stand + (desk as usize * size_of::<Board>()) as u64;
        let backs = (desk as usize).checked_sub(1).map_or(0, |at| {
            self.stand + (std::mem::offset_of!(Room, backs) + at * size_of::<Backs>()) as u64
        });
        (board, backs)
    }
}

/// What is to be done; the kernel's `Action`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) enum Action {
    /// Carry bytes.
    Carry,
    /// Carry what the order before it has written, and so when all of it has been.
    CarryBehind,
    /// Combine what the sheet at `from` says.
    Combine,
    /// Leave.
    Leave,
    /// Write bytes that stand where `from` does, or on the back if they are more than [`ON_FRONT`].
    Place,
    /// Write what is at `from` by words of [`Told`].
    Tell,
    /// Combine `bytes` elements at `from` with those at the address that the back begins with; behind it
    /// stands what an average divides by.
    Pair,
}

/// The most bytes that stand on a slip.
pub const PLACED: usize = 4 * BACK_WORDS;

/// The most that stand on its front.
pub(super) const ON_FRONT: usize = 8;

/// The most bytes that are told: more take longer to be read, word by word, than a device takes to say that
/// all are there.
pub const TOLD: usize = 1024;

/// What stands on a slip.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct Order {
    pub(in crate::cuda) to: u64,
    pub(in crate::cuda) from: u64,
    pub(in crate::cuda) bytes: u64,
    pub(in crate::cuda) action: Action,
}

impl Order {
    pub(super) const LEAVE: Order = Order { to: 0, from: 0, bytes: 0, action: Action::Leave };
    pub(super) const NOTHING: Order = Order { action: Action::Carry, ..Order::LEAVE };

    /// To write up to [`PLACED`] bytes to `to`.
    pub(super) fn place(to: u64, bytes: &[u8]) -> (Order, Annex) {
        let mut order = Order { to, from: 0, bytes: bytes.len() as u64, action: Action::Place };
        if bytes.len() > ON_FRONT {
            debug_assert!(bytes.len() <= PLACED);
            return (order, Annex::Back(Back::of(bytes)));
        }
        let mut word = [0; ON_FRONT];
        word[..bytes.len()].copy_from_slice(bytes);
        order.from = u64::from_le_bytes(word);
        (order, Annex::Nothing)
    }

    /// To combine. Two operands that are nothing but elements need no sheet, which the device would have to
    /// read behind the slip.
    pub(super) fn combine(launch: &Launch) -> (Order, Annex) {
        let Some(Pair { out, count, operands: [left, right], ranks }) = launch.pair() else {
            let order = Order { action: Action::Combine, ..Order::LEAVE };
            return (order, Annex::Sheet(launch.sheet()));
        };
        let mut back = Back::of(&right.to_le_bytes());
        back.words[back.count] = ranks;
        back.count += 1;
        (Order { to: out, from: left, bytes: count, action: Action::Pair }, Annex::Back(back))
    }

    pub(super) fn fields(self, annex: &Annex) -> [u32; FIELDS] {
        let Order { to, from, bytes, action } = self;
        let halves = |word: u64| [word as u32, (word >> 32) as u32];
        let ([a, b], [c, d], [e, f]) = (halves(to), halves(from), halves(bytes));
        let on_back = if let Annex::Back(back) = annex { back.count as u32 } else { 0 };
        [a, b, c, d, e, f, action as u32, on_back]
    }
}

/// Bytes that a device tells, in memory of the host that it reaches: each word is four of them below the
/// order's number, so that who sees it has it, in whatever order the words come.
#[derive(Clone, Copy, Debug)]
pub struct Told<'a>(&'a [AtomicU64]);

impl Told<'_> {
    /// Where `bytes` are to be told: from `at` on, where there is room for twice as many.
    ///
    /// # Safety
    /// It is aligned to 8 bytes, and nothing but the device and this accesses it meanwhile.
    pub unsafe fn at<'a>(at: *mut u8, bytes: usize) -> Told<'a> {
        // SAFETY: the caller's promise, and words of memory have values whatever is there.
        Told(unsafe { std::slice::from_raw_parts(at.cast::<AtomicU64>(), bytes.div_ceil(4)) })
    }

    /// Forgets what is there: numbers of other couriers may be the same. Before it is ordered.
    pub fn clear(&self) {
        self.0.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }

    /// What the order of this number tells, to where the words began; whether all of it has come.
    pub fn take(&self, number: u32) -> bool {
        // Those that come last mostly do last.
        let has_come = |word: &AtomicU64| (word.load(Ordering::Acquire) >> 32) as u32 == number;
        if !self.0.iter().rev().all(has_come) {
            return false;
        }
        let word = |at: usize| self.0.get(at).map_or(0, |word| word.load(Ordering::Relaxed) & 0xffff_ffff);
        for at in (0..self.0.len()).step_by(2) {
            self.0[at / 2].store(u64::to_le(word(at) | word(at + 1) << 32), Ordering::Relaxed);
        }
        true
    }
}

/// Numbers of orders from which on a stand is not taken any more: far below where they would wrap.
const RETIRED: u32 = 1 << 30;

/// Whether `number` is `other` or comes after it.
pub(super) fn reaches(number: u32, other: u32) -> bool {
    number.wrapping_sub(other) as i32 >= 0
}

/// The desks of all devices.
#[derive(Default)]
pub(in crate::cuda) struct Stands {
    pages: Vec<usize>,
    pub(super) free: Vec<Stand>,
    /// Those of couriers that were dismissed but have not been seen to leave.
    pub(super) parked: VecDeque<Left>,
}

impl Stands {
    /// The pages, for whoever frees them.
    pub(in crate::cuda) fn pages(&mut self) -> Vec<usize> {
        self.free.clear();
        self.parked.clear();
        std::mem::take(&mut self.pages)
    }

    /// The first that is free: those have desks in the device's memory. What has been left is looked at when
    /// all of those are taken, since each look reads what devices wrote.
    fn take(&mut self) -> Option<Stand> {
        if !self.free.iter().any(|stand| (stand.index as usize) < STANDS) {
            self.tidy();
        }
        let first = (0..self.free.len()).min_by_key(|&at| self.free[at].index)?;
        Some(self.free.swap_remove(first))
    }

    fn has_any(&mut self) -> bool {
        self.tidy();
        !self.free.is_empty()
    }

    /// Whether a courier that was dismissed has not left a device that is not lost, as far as is known.
    pub(in crate::cuda) fn has_parked(&self, is_lost: &dyn Fn(u32) -> bool) -> bool {
        !self.parked.iter().all(|left| left.is_over() || is_lost(left.device))
    }

    /// The devices of those that were dismissed and may not have left.
    pub(in crate::cuda) fn parked_devices(&self) -> Vec<u32> {
        self.parked.iter().map(|left| left.device).collect()
    }

    /// Frees what has been left. Couriers leave mostly in their order, so the others are looked at only if
    /// there is need.
    fn tidy(&mut self) {
        while self.parked.front().is_some_and(Left::is_over) {
            self.parked.pop_front().into_iter().for_each(|left| self.release(left));
        }
        if self.free.is_empty() {
            let (over, parked) = std::mem::take(&mut self.parked).into_iter().partition(Left::is_over);
            self.parked = parked;
            VecDeque::into_iter(over).for_each(|left: Left| self.release(left));
        }
    }

    fn release(&mut self, left: Left) {
        // A block that has not served for so long would seem to have carried out what has not been ordered.
        if left.stand.next.iter().all(|&next| next < RETIRED) {
            self.free.push(left.stand);
        }
    }
}

/// Desks in pinned memory, and the number of the next order at each.
pub(super) struct Stand {
    pub(super) address: usize,
    /// Which stand of all it is.
    pub(super) index: u32,
    pub(super) next: [u32; DESKS],
}

impl Stand {
    fn room(&self) -> &Room {
        // SAFETY: it lies in a page of stands, which was zeroed and lives as long as the devices, aligned as
        // it has to be. Hosts and devices access it by whole words alone.
        unsafe { &*std::ptr::with_exposed_provenance::<Room>(self.address) }
    }

    pub(super) fn board(&self, desk: Desk) -> &Board {
        &self.room().boards[desk as usize]
    }

    /// Whether so many blocks have all carried out the order of this number.
    pub(super) fn has_done(&self, desk: Desk, blocks: u32, number: u32) -> bool {
        self.board(desk).done[..blocks as usize]
            .iter()
            .all(|done| reaches(done.load(Ordering::Acquire), number))
    }

    pub(super) fn write(&self, desk: Desk, number: u32, mut order: Order, annex: &Annex) {
        let slip = (number % SLIPS) as usize;
        let numbered = |word: u32| u64::from(number) << 32 | u64::from(word);
        match annex {
            Annex::Nothing => {}
            Annex::Sheet(words) => {
                let sheet = &self.room().sheets[slip];
                for (word, value) in sheet.iter().zip(words) {
                    word.store(*value, Ordering::Relaxed);
                }
                order.from = std::ptr::from_ref(sheet).expose_provenance() as u64;
            }
            // Before the front, so that mostly both are seen at once.
            Annex::Back(back) => {
                let words = &self.room().backs[desk as usize - 1][slip];
                for (word, value) in words.iter().zip(&back.words[..back.count]) {
                    word.store(numbered(*value), Ordering::Relaxed);
                }
            }
        }
        for (word, field) in self.board(desk).slips[slip].iter().zip(order.fields(annex)) {
            word.store(numbered(field), Ordering::Release);
        }
    }
}

/// A stand with a courier that was dismissed.
pub(super) struct Left {
    pub(super) stand: Stand,
    pub(super) blocks: [u32; DESKS],
    /// The numbers of its last orders.
    pub(super) last: [u32; DESKS],
    /// Where it was launched.
    pub(super) device: u32,
}

impl Left {
    fn is_over(&self) -> bool {
        let has_left = |desk: Desk| {
            let index = desk as usize;
            self.stand.has_done(desk, self.blocks[index], self.last[index])
        };
        Desk::ALL.into_iter().all(has_left)
    }
}

impl Devices {
    /// Has stands ready, so that calls need not ask the driver for any.
    pub fn prepare_couriers(&self, device: u32) -> Result<()> {
        self.multiprocessors(device)?;
        if self.stands().has_any() { Ok(()) } else { self.add_stands(device) }
    }

    pub(super) fn take_stand(&self, device: u32) -> Result<Stand> {
        loop {
            if let Some(stand) = self.stands().take() {
                return Ok(stand);
            }
            self.add_stands(device)?;
        }
    }

    fn add_stands(&self, device: u32) -> Result<()> {
        let start = self.pinned_page(device, STANDS * STRIDE)?;
        let mut stands = self.stands();
        let before = stands.pages.len() * STANDS;
        stands.pages.push(start);
        let stand = |index| Stand {
            address: start + index * STRIDE,
            index: (before + index) as u32,
            next: [1; DESKS],
        };
        stands.free.extend((0..STANDS).map(stand));
        Ok(())
    }
}

/// How a device reads its orders, for the driver double.
#[cfg(test)]
pub(in crate::cuda) mod reader {
    use super::*;

    /// A board at `address`.
    fn board(address: u64) -> &'static Board {
        // SAFETY: the double keeps freed memory, so a stand's page is there as long as its tasks.
        unsafe { &*std::ptr::with_exposed_provenance::<Board>(address as usize) }
    }

    /// Tells the host that the courier has come.
    pub(in crate::cuda) fn come(address: u64, number: u32) {
        board(address).here.store(number, Ordering::Release);
    }

    /// The order of this number, if it is there.
    pub(in crate::cuda) fn order(address: u64, number: u32) -> Option<Order> {
        let slip = &board(address).slips[(number % SLIPS) as usize];
        let words: Vec<u64> = slip.iter().map(|word| word.load(Ordering::Acquire)).collect();
        if words.iter().any(|word| (word >> 32) as u32 != number) {
            return None;
        }
        let wide = |low: usize| words[low] & 0xffff_ffff | words[low + 1] << 32;
        let action = match words[6] as u32 {
            0 => Action::Carry,
            1 => Action::CarryBehind,
            2 => Action::Combine,
            3 => Action::Leave,
            4 => Action::Place,
            5 => Action::Tell,
            _ => Action::Pair,
        };
        Some(Order { to: wide(0), from: wide(2), bytes: wide(4), action })
    }

    /// What stands on the back of an order's slip: so many bytes.
    fn back(address: u64, number: u32, bytes: usize) -> Vec<u8> {
        // SAFETY: as above, of a stand's backs.
        let backs = unsafe { &*std::ptr::with_exposed_provenance::<Backs>(address as usize) };
        let back = &backs[(number % SLIPS) as usize];
        let word = |word: &AtomicU64| {
            let found = word.load(Ordering::Acquire);
            assert_eq!((found >> 32) as u32, number, "the back is written before the front");
            found as u32
        };
        let mut back: Vec<u8> =
            back[..bytes.div_ceil(4)].iter().flat_map(|at| word(at).to_le_bytes()).collect();
        back.truncate(bytes);
        back
    }

    /// The bytes that an order places; `backs`: those of its desk's slips.
    pub(in crate::cuda) fn placed(order: &Order, backs: u64, number: u32) -> Vec<u8> {
        let bytes = order.bytes as usize;
        if bytes > ON_FRONT { back(backs, number, bytes) } else { order.from.to_le_bytes()[..bytes].to_vec() }
    }

    /// The operands that an order combines.
    pub(in crate::cuda) fn pair(order: &Order, backs: u64, number: u32) -> Pair {
        let back = back(backs, number, 12);
        let half = |at: usize| u32::from_le_bytes(std::array::from_fn(|byte| back[at + byte]));
        let right = u64::from(half(0)) | u64::from(half(4)) << 32;
        Pair { out: order.to, count: order.bytes, operands: [order.from, right], ranks: half(8) }
    }

    /// What a courier tells.
    pub(in crate::cuda) fn told(bytes: &[u8], number: u32) -> Vec<u8> {
        let word = |bytes: &[u8]| {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            (u64::from(number) << 32 | u64::from_le_bytes(word)).to_le_bytes()
        };
        bytes.chunks(4).flat_map(word).collect()
    }

    /// What an order says that is to be combined: a [`Launch`].
    pub(in crate::cuda) fn sheet(order: &Order) -> [u64; Launch::SHEET_WORDS] {
        // SAFETY: a sheet is there for as long as its page, as above.
        let sheet = unsafe { &*std::ptr::with_exposed_provenance::<Sheet>(order.from as usize) };
        std::array::from_fn(|index| sheet[index].load(Ordering::Relaxed))
    }

    /// Tells the host that it has been carried out.
    pub(in crate::cuda) fn done(address: u64, blocks: u32, number: u32) {
        for done in &board(address).done[..blocks as usize] {
            done.store(number, Ordering::Release);
        }
    }
}
