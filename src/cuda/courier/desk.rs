//! Desks as they lie in pinned memory, and what stands on their slips.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::super::context::Devices;
use super::super::driver::Grid;
use super::super::kernels::Launch;
use crate::error::Result;

/// What courier.cuh calls these: desks, slips of one, the most blocks that serve it, and words of a slip.
pub(super) const DESKS: usize = 3;
pub(super) const SLIPS: u32 = 64;
pub(super) const BLOCKS: usize = 16;
pub(super) const FIELDS: usize = 8;

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

/// A stand: desks, and a sheet for each slip of the last.
#[repr(C, align(64))]
struct Room {
    boards: [Board; DESKS],
    sheets: [Sheet; SLIPS as usize],
}

/// What is combined: a [`Launch`], and as it lies in memory.
pub(super) type Words = Box<[u64; Launch::WORDS]>;
type Sheet = [AtomicU64; Launch::WORDS];

/// The parameter of the kernels: where the desks are, which of those of the device's memory, the number of the next order at
/// each, and how many blocks serve it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Call {
    pub(super) desks: u64,
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

    /// Where a desk lies.
    #[cfg(test)]
    pub(in crate::cuda) fn board(&self, desk: Desk) -> u64 {
        self.desks + (desk as usize * size_of::<Board>()) as u64
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
    /// Write up to [`PLACED`] bytes that stand where `from` does.
    Place,
}

/// The most bytes that stand on a slip itself.
pub const PLACED: usize = 8;

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
    /// Of the sheet that goes with it.
    pub(super) const COMBINE: Order = Order { action: Action::Combine, ..Order::LEAVE };

    pub(super) fn fields(self) -> [u32; FIELDS] {
        let Order { to, from, bytes, action } = self;
        let halves = |word: u64| [word as u32, (word >> 32) as u32];
        let ([a, b], [c, d], [e, f]) = (halves(to), halves(from), halves(bytes));
        [a, b, c, d, e, f, action as u32, 0]
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

    /// The first that is free: those have desks in the device's memory. What has been left is looked at when all of those are taken, since
    /// each look reads what devices wrote.
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

    /// Frees what has been left. Couriers leave mostly in their order, so the others are looked at only if there is need.
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
        // SAFETY: it lies in a page of stands, which was zeroed and lives as long as the devices, aligned as it has to be. Hosts
        // and devices access it by whole words alone.
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

    pub(super) fn write(&self, desk: Desk, number: u32, mut order: Order, sheet: Option<&Words>) {
        let slip = (number % SLIPS) as usize;
        if let Some(words) = sheet {
            let sheet = &self.room().sheets[slip];
            for (word, value) in sheet.iter().zip(&**words) {
                word.store(*value, Ordering::Relaxed);
            }
            order.from = std::ptr::from_ref(sheet).expose_provenance() as u64;
        }
        let slip = &self.board(desk).slips[slip];
        for (word, field) in slip.iter().zip(order.fields()) {
            word.store(u64::from(number) << 32 | u64::from(field), Ordering::Release);
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

    /// A board at `address`, if one is there.
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
            _ => Action::Place,
        };
        Some(Order { to: wide(0), from: wide(2), bytes: wide(4), action })
    }

    /// What an order says that is to be combined: a [`Launch`].
    pub(in crate::cuda) fn sheet(order: &Order) -> [u64; Launch::WORDS] {
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
