//! The courier: a kernel on a caller's stream that carries bytes between its device and pinned memory as the
//! host orders, and combines them.
//!
//! What the host does with device memory in the order of a stream usually takes driver calls while the stream
//! waits: copies on other streams, events. Those may be held up by what waits: a queue of the device that the
//! stream's wait stands in, a lock that another thread has in the driver until the device is idle. A courier
//! needs none of that. It is launched when the call is made, and from then on the host orders and learns by
//! words of pinned memory alone, until it dismisses the courier and the stream goes on. As with other kernels
//! that wait for somebody else, what the stream is given behind it waits in a queue of the device.
//!
//! `kernels/courier.cuh` is the other side. A courier serves two desks side by side ([`Desk`]), or three if
//! it combines: then it is one of the kernels of `kernels/combine.cu` ([`combiner`]). Orders of one desk are
//! carried out in their order. Desks lie in *stands* of pinned memory, which go from courier to courier and
//! are never freed before the [`Devices`] are.

use std::collections::VecDeque;
use std::ffi::{CStr, CString};
use std::fmt;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

mod desk;

#[cfg(test)]
pub(super) use desk::reader;
pub(super) use desk::{Action, Order, Stands};
use desk::{Annex, BLOCKS, DESKS, Left, SLIPS, Stand, reaches};
pub use desk::{Call, Desk, PLACED, TOLD, Told};

use super::context::Devices;
use super::driver::least_limit;
use super::image::{Image, Program};
use super::kernels::{self, Launch};
use super::local::Kernels;
use super::stream::Stream;
use crate::error::{Result, fail};
use crate::reduce::{DataType, Operator};

/// The kernel that carries,
static IMAGE: Image = Image::new(
    Program::Courier,
    include_bytes!("../../kernels/courier.sm_90.xz"),
    include_bytes!("../../kernels/courier.sm_100.xz"),
);

/// and its name.
const NAME: &CStr = c"unisono_courier";

/// The kernels that combine, too.
static COMBINERS: Image = Image::new(
    Program::Combine,
    include_bytes!("../../kernels/combine.sm_90.xz"),
    include_bytes!("../../kernels/combine.sm_100.xz"),
);

/// The most operands that a courier combines.
pub const MAX_OPERANDS: usize = kernels::SHEET_OPERANDS;

/// What a courier combines: elements of a type, by an operator, which may stand for others that its kernel
/// does as well.
pub type Combiner = (DataType, Operator);

/// A program, with what the kernels in it combine and are called.
type Listed = (&'static Image, Vec<(Option<Combiner>, CString)>);

/// Those of couriers. One that combines is called as the kernel of folds that does the same.
pub(super) fn programs() -> [Listed; 2] {
    let all =
        kernels::all().filter(|&(dtype, operator)| combiner(dtype, operator) == Some((dtype, operator)));
    let combiners = all.filter_map(|(dtype, operator)| {
        let what = kernels::kernel(dtype, &operator)?.to_bytes().strip_prefix(b"unisono_fold")?;
        Some((Some((dtype, operator)), CString::new([b"unisono_combine", what].concat()).ok()?))
    });
    [(&IMAGE, vec![(None, NAME.to_owned())]), (&COMBINERS, combiners.collect())]
}

/// What a courier has to be able to do for it to combine elements of a type by an operator; `None`: none can.
pub(super) fn combiner(dtype: DataType, operator: Operator) -> Option<Combiner> {
    kernels::representative(dtype, operator)
}

/// What has been ordered at one desk.
#[derive(Default)]
struct Book {
    /// The number of the next order that is written.
    next: u32,
    /// For which there is no slip yet.
    waiting: VecDeque<Waiting>,
    /// Up to this number slips are free again.
    seen: u32,
    /// The number of the last order.
    last: Option<u32>,
    /// The [`Customer`]s who ordered before it was launched and have not given up.
    early: Vec<u32>,
}

struct Waiting {
    order: Order,
    annex: Annex,
    /// The [`Customer`]; `None`: one who has given up, or nobody, who has it leave.
    of: Option<u32>,
}

/// What has become of the kernel: it may be launched yet,
const NEW: u8 = 0;
/// it has been,
const LAUNCHED: u8 = 1;
/// it will not be, since nobody orders any more, which is no error,
const VOID: u8 = 2;
/// or it cannot be: the driver has refused it, or the last who had promised to launch it did not. Whoever
/// waits for it fails.
const REFUSED: u8 = 3;

/// One launch. All methods from any thread.
pub struct Courier {
    devices: Arc<Devices>,
    /// On which it may be launched.
    device: u32,
    /// Set until the drop.
    stand: Option<Stand>,
    first: [u32; DESKS],
    /// What it is to do, until it is launched,
    trade: Mutex<Trade>,
    /// and how many blocks serve each desk, from then on: none where nothing is ordered.
    blocks: OnceLock<[u32; DESKS]>,
    books: [Mutex<Book>; DESKS],
    /// Who may still order.
    users: AtomicUsize,
    /// How many have joined.
    customers: AtomicU32,
    /// Multiprocessors of the device.
    multiprocessors: u32,
    /// Who may still launch it.
    promises: AtomicUsize,
    state: AtomicU8,
}

/// What a courier is to do for those who order.
#[derive(Clone, Copy, Debug, Default)]
pub struct Duty {
    /// Bytes that it carries one way, about.
    pub bytes: usize,
    /// Whether it is relayed over connections: processors move the pinned memory's bytes meanwhile.
    pub networked: bool,
    /// How it combines, if it is to; where several order, one of them says so.
    pub combiner: Option<Combiner>,
    /// By how many blocks at most; 0: no limit. It has one for each way at least, and one more if it
    /// combines: those who order wait for them.
    pub max_blocks: u32,
}

impl Duty {
    fn and(self, other: Duty) -> Duty {
        Duty {
            bytes: self.bytes.max(other.bytes),
            networked: self.networked || other.networked,
            combiner: self.combiner.or(other.combiner),
            max_blocks: least_limit([self.max_blocks, other.max_blocks]),
        }
    }

    /// What it can do of that on a device with so many multiprocessors.
    fn on(self, multiprocessors: u32) -> Duty {
        Duty { combiner: self.combiner.filter(|_| has_room(multiprocessors)), ..self }
    }
}

struct Trade {
    duty: Duty,
    /// Whether nothing can be added any more.
    sealed: bool,
}

impl Courier {
    /// Gives it to `stream`: orders are carried out when the stream comes to it. Once. Whether the stream
    /// `is_busy` for certain: else the driver is asked.
    ///
    /// # Safety
    /// As [`Stream`] says, of all memory that is ordered to be carried. Who may order ends that in any case.
    pub unsafe fn launch(
        self: &Arc<Self>,
        stream: &Stream,
        is_busy: bool,
        kernels: &dyn Kernels,
    ) -> Result<()> {
        let _launching = self.is_new().then(|| self.devices.launching());
        let _entered = self.devices.enter(stream.device())?;
        // Calls that share it come here, too, when it has been launched.
        let _alone = if self.is_new() && !is_busy { self.devices.rousing(stream)? } else { None };
        // SAFETY: the caller's promise.
        self.launch_by(|call, combiner| unsafe { kernels.carry(stream, call, combiner) })
    }

    /// As [`Courier::launch`], by whatever launches the kernel, one of those that combine if one is named.
    pub(super) fn launch_by(
        self: &Arc<Self>,
        launch: impl FnOnce(&Call, Option<Combiner>) -> Result<()>,
    ) -> Result<()> {
        match self.state.compare_exchange(NEW, LAUNCHED, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {}
            Err(REFUSED) => {
                fail!(Cuda, "the courier of this call, and of others beside it, could not be launched")
            }
            // It has been, or who might order has given up.
            Err(_) => return Ok(()),
        }
        self.devices.quiet().begin(self);
        let (blocks, threads, combiner) = self.seal();
        let Stand { address, index, .. } = *self.stand();
        let call = Call { stand: address as u64, near: index, next: self.first, blocks, threads };
        launch(&call, combiner).inspect_err(|_| {
            self.state.store(REFUSED, Ordering::Release);
            self.devices.quiet().end();
        })
    }

    /// From now on it is what it is.
    fn seal(&self) -> ([u32; DESKS], u32, Option<Combiner>) {
        let mut trade = self.trade();
        trade.sealed = true;
        let duty = trade.duty;
        let limit = if duty.max_blocks == 0 { u32::MAX } else { duty.max_blocks };
        // Half of a limit is for those who combine.
        let carriers_limit = limit / if duty.combiner.is_some() { 4 } else { 2 };
        let carriers = blocks_for(duty, self.multiprocessors).min(carriers_limit).max(1);
        // Blocks wait for each other: all of them have to be there at the same time.
        let room = self.multiprocessors.min(limit.max(2 * carriers + 1)).saturating_sub(2 * carriers);
        let workers = duty.combiner.map_or(0, |_| workers_for(duty.bytes).min(room));
        let blocks = *self.blocks.get_or_init(|| [carriers, carriers, workers]);
        (blocks, threads_for(duty), duty.combiner)
    }

    fn trade(&self) -> MutexGuard<'_, Trade> {
        self.trade.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it combines so.
    pub fn combines_by(&self, combiner: Combiner) -> bool {
        self.trade().duty.combiner == Some(combiner)
    }

    /// Whether it is still to be launched.
    pub fn is_new(&self) -> bool {
        self.state.load(Ordering::Acquire) == NEW
    }

    /// The device that it may be launched on.
    pub(super) fn device(&self) -> u32 {
        self.device
    }

    /// Whether it has been launched.
    pub(super) fn was_launched(&self) -> bool {
        self.state.load(Ordering::Acquire) == LAUNCHED
    }

    /// One more who may order, what `duty` says; `None` if all have been dismissed already.
    pub fn join(self: &Arc<Self>, duty: Duty) -> Option<Errand> {
        let mut users = self.users.load(Ordering::Acquire);
        while users > 0 {
            match self.users.compare_exchange(users, users + 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    let mut trade = self.trade();
                    if !trade.sealed {
                        trade.duty = trade.duty.and(duty.on(self.multiprocessors));
                    }
                    drop(trade);
                    return Some(Errand { customer: self.customer() });
                }
                Err(found) => users = found,
            }
        }
        None
    }

    fn customer(self: &Arc<Self>) -> Customer {
        Customer { courier: self.clone(), number: self.customers.fetch_add(1, Ordering::Relaxed) }
    }

    /// One more means to launch it: whoever comes first does.
    pub fn promise(&self) {
        self.promises.fetch_add(1, Ordering::Relaxed);
    }

    /// One who has promised to launch it has, or will not. After the last it will not be launched, if it has
    /// not been: whoever orders waits in vain.
    pub fn withdraw(&self) {
        if self.promises.fetch_sub(1, Ordering::AcqRel) == 1 {
            let _ = self.state.compare_exchange(NEW, REFUSED, Ordering::AcqRel, Ordering::Acquire);
        }
    }

    /// Whether several order, or have: one may need what another does.
    pub fn is_shared(&self) -> bool {
        self.customers.load(Ordering::Relaxed) > 1
    }

    /// Whether one alone orders, or has ordered, and no other will.
    pub fn stays_unshared(&self) -> bool {
        // In this order: nobody joins what has been launched, and others may until then.
        !self.is_new() && !self.is_shared()
    }

    /// Whether nobody orders any more.
    pub fn is_dismissed(&self) -> bool {
        self.users.load(Ordering::Acquire) == 0
    }

    /// Whether the stream has come to it.
    pub fn has_come(&self) -> bool {
        reaches(self.stand().board(Desk::Load).here.load(Ordering::Acquire), self.first[0])
    }

    /// How far it is, for whoever waits in vain.
    pub fn standing(&self) -> String {
        let come = if self.has_come() { "has come" } else { "has not come" };
        let desks = Desk::ALL.map(|desk| {
            let first = self.first[desk as usize];
            let book = self.book(desk);
            let written = book.next.wrapping_sub(first);
            let is_done = |order: &u32| self.has_reached(desk, first.wrapping_add(*order));
            let (done, all) =
                ((0..written).take_while(is_done).count(), written as usize + book.waiting.len());
            format!("{done} of {all} to {}", desk.verb())
        });
        format!("its courier {come}, and has done {} of its orders, with those to leave", desks.join(", "))
    }

    /// Whether the order of this number has been carried out.
    pub fn has_done(&self, desk: Desk, number: u32) -> bool {
        let done = self.has_reached(desk, number);
        let mut book = self.book(desk);
        if !book.waiting.is_empty() {
            self.write_on(desk, &mut book);
        }
        done
    }

    /// Whether it touches nothing any more: it has left, or will not come.
    pub fn is_gone(&self) -> bool {
        match self.state.load(Ordering::Acquire) {
            NEW => false,
            VOID | REFUSED => true,
            _ => Desk::ALL.iter().all(|&desk| {
                let last = self.book(desk).last;
                last.is_some_and(|last| self.has_reached(desk, last))
            }),
        }
    }

    /// Whether it has been launched and has not left, so that its stream has something to do.
    pub fn is_under_way(&self) -> bool {
        self.was_launched() && !self.is_gone()
    }

    /// Of orders that have no slip yet, those of a customer, or everybody's, are not carried out. Numbers
    /// that others wait for stay theirs. If nobody orders any more it leaves behind theirs; if nobody has
    /// ordered either who has not given up, it is not launched if it has not been.
    fn void(&self, whose: Option<u32>) {
        for desk in Desk::ALL {
            let mut book = self.book(desk);
            book.early.retain(|&customer| whose.is_some_and(|whose| customer != whose));
            for waiting in &mut book.waiting {
                if waiting.order.action != Action::Leave && (whose.is_none() || waiting.of == whose) {
                    *waiting = Waiting { order: Order::NOTHING, annex: Annex::Nothing, of: None };
                }
            }
            let leaves = book.waiting.back().is_some_and(|last| last.order.action == Action::Leave);
            // Nobody waits for these, nor looks after them.
            while book.waiting.back().is_some_and(|last| last.of.is_none()) {
                book.waiting.pop_back();
            }
            if leaves {
                book.last = Some(book.number());
                book.waiting.push_back(Waiting { order: Order::LEAVE, annex: Annex::Nothing, of: None });
            }
            self.write_on(desk, &mut book);
        }
        if self.is_dismissed() && Desk::ALL.iter().all(|&desk| self.book(desk).early.is_empty()) {
            let _ = self.state.compare_exchange(NEW, VOID, Ordering::AcqRel, Ordering::Acquire);
        }
    }

    /// Whether all blocks of a desk have carried out the order of this number.
    fn has_reached(&self, desk: Desk, number: u32) -> bool {
        let blocks = self.blocks.get();
        blocks.is_some_and(|blocks| self.stand().has_done(desk, blocks[desk as usize], number))
    }

    fn stand(&self) -> &Stand {
        // PROOF: nothing but the drop takes it.
        self.stand.as_ref().expect("held until the drop")
    }

    fn book(&self, desk: Desk) -> MutexGuard<'_, Book> {
        self.books[desk as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Orders; its number.
    fn order(&self, desk: Desk, order: Order, annex: Annex, of: Option<u32>) -> u32 {
        let mut book = self.book(desk);
        let number = book.number();
        if order.action == Action::Leave {
            book.last = Some(number);
        }
        if let Some(customer) = of
            && self.is_new()
            && !book.early.contains(&customer)
        {
            book.early.push(customer);
        }
        if book.waiting.is_empty() && self.has_slip(desk, &mut book, order.action) {
            self.write(desk, &mut book, order, &annex);
        } else {
            book.waiting.push_back(Waiting { order, annex, of });
        }
        number
    }

    /// Writes what there are slips for.
    fn write_on(&self, desk: Desk, book: &mut Book) {
        while let Some(action) = book.waiting.front().map(|waiting| waiting.order.action) {
            if !self.has_slip(desk, book, action) {
                return;
            }
            if let Some(Waiting { order, annex, .. }) = book.waiting.pop_front() {
                self.write(desk, book, order, &annex);
            }
        }
    }

    /// Whether there is a slip for what is ordered next. One is kept for the last.
    fn has_slip(&self, desk: Desk, book: &mut Book, action: Action) -> bool {
        let most = if action == Action::Leave { SLIPS } else { SLIPS - 1 };
        if book.next.wrapping_sub(book.seen) > most {
            // The slip of this order was that of an earlier one, and all between are free if that is.
            let earlier = book.next.wrapping_sub(most);
            if !self.has_reached(desk, earlier) {
                return false;
            }
            book.seen = earlier;
        }
        true
    }

    fn write(&self, desk: Desk, book: &mut Book, order: Order, annex: &Annex) {
        self.stand().write(desk, book.next, order, annex);
        book.next = book.next.wrapping_add(1);
    }

    fn dismiss(&self) {
        for desk in Desk::ALL {
            self.order(desk, Order::LEAVE, Annex::Nothing, None);
        }
    }
}

impl Book {
    /// The number of the next order.
    fn number(&self) -> u32 {
        self.next.wrapping_add(self.waiting.len() as u32)
    }
}

impl Drop for Courier {
    fn drop(&mut self) {
        self.void(None);
        let Some(mut stand) = self.stand.take() else { return };
        let last = Desk::ALL.map(|desk| {
            let book = self.book(desk);
            stand.next[desk as usize] = book.next;
            book.next.wrapping_sub(1)
        });
        let mut stands = self.devices.stands();
        match self.blocks.get() {
            Some(&blocks) if *self.state.get_mut() == LAUNCHED => {
                stands.parked.push_back(Left { stand, blocks, last, device: self.device });
                self.devices.quiet().end();
            }
            _ => stands.free.push(stand),
        }
    }
}

impl fmt::Debug for Courier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Courier")
            .field("first", &self.first)
            .field("users", &self.users)
            .finish_non_exhaustive()
    }
}

/// One who orders, or has ordered, of a courier. Holding it does not keep that from leaving.
#[derive(Clone, Debug)]
pub struct Customer {
    courier: Arc<Courier>,
    number: u32,
}

impl Customer {
    /// The courier.
    pub fn courier(&self) -> &Arc<Courier> {
        &self.courier
    }

    /// What this one has ordered is not carried out as far as it has not been begun. After its last order.
    pub fn give_up(&self) {
        self.courier.void(Some(self.number));
    }
}

/// The right to order. When the last is dropped, the courier leaves behind what has been ordered.
#[derive(Debug)]
pub struct Errand {
    customer: Customer,
}

impl Errand {
    /// The first with a courier that may be launched on a stream of `device`.
    pub fn new(devices: &Arc<Devices>, device: u32, duty: Duty) -> Result<Errand> {
        let stand = devices.take_stand(device)?;
        let multiprocessors = devices.multiprocessors(device)?;
        let first = stand.next;
        let book = |next: u32| Mutex::new(Book { next, seen: next.wrapping_sub(1), ..Book::default() });
        let courier = Courier {
            devices: devices.clone(),
            device,
            stand: Some(stand),
            first,
            trade: Mutex::new(Trade { duty: duty.on(multiprocessors), sealed: false }),
            blocks: OnceLock::new(),
            books: first.map(book),
            users: AtomicUsize::new(1),
            customers: AtomicU32::new(0),
            multiprocessors,
            promises: AtomicUsize::new(0),
            state: AtomicU8::new(NEW),
        };
        Ok(Errand { customer: Arc::new(courier).customer() })
    }

    /// Says what its courier is to do, which nobody has joined or launched.
    pub fn with(self, duty: Duty) -> Errand {
        let courier = self.courier();
        courier.trade().duty = duty.on(courier.multiprocessors);
        self
    }

    /// The courier.
    pub fn courier(&self) -> &Arc<Courier> {
        &self.customer.courier
    }

    /// Who orders. Holding it does not keep the courier from leaving.
    pub fn customer(&self) -> &Customer {
        &self.customer
    }

    fn give(&self, desk: Desk, (order, annex): (Order, Annex)) -> u32 {
        self.courier().order(desk, order, annex, Some(self.customer.number))
    }

    /// Orders bytes to be carried; the order's number at that desk.
    ///
    /// # Safety
    /// Both sides are memory that the courier's device reaches at these addresses, for as long as [`Stream`]
    /// says, and the order is carried out before the courier is gone, if it is.
    pub unsafe fn order(&self, desk: Desk, to: u64, from: u64, bytes: usize) -> u32 {
        let order = Order { to, from, bytes: bytes as u64, action: Action::Carry };
        self.give(desk, (order, Annex::Nothing))
    }

    /// Orders up to [`PLACED`] bytes to be written, which are on their way with the order, at
    /// [`Desk::Store`]; the order's number.
    ///
    /// # Safety
    /// As [`Errand::order`], of `to`.
    pub unsafe fn place(&self, to: u64, bytes: &[u8]) -> u32 {
        self.give(Desk::Store, Order::place(to, bytes))
    }

    /// Orders up to [`TOLD`] bytes to be told at `to`, in words of [`Told`], at [`Desk::Load`]; the order's
    /// number.
    ///
    /// # Safety
    /// As [`Errand::order`]; at `to` there is room for twice as many.
    pub unsafe fn tell(&self, to: u64, from: u64, bytes: usize) -> u32 {
        let order = Order { to, from, bytes: bytes as u64, action: Action::Tell };
        self.give(Desk::Load, (order, Annex::Nothing))
    }

    /// Orders operands to be combined, at [`Desk::Work`], by the kernel that the courier has for that
    /// ([`Courier::combines_by`]); the order's number.
    ///
    /// # Safety
    /// As [`Errand::order`], of everything that `launch` names. It has [`MAX_OPERANDS`] operands at most, and
    /// elements alone, each at a multiple of its size.
    pub unsafe fn combine(&self, launch: Launch) -> u32 {
        self.give(Desk::Work, Order::combine(&launch))
    }

    /// As [`Errand::order`] at [`Desk::Work`], of what the order before it wrote.
    ///
    /// # Safety
    /// As [`Errand::order`].
    pub unsafe fn order_behind(&self, to: u64, from: u64, bytes: usize) -> u32 {
        let order = Order { to, from, bytes: bytes as u64, action: Action::CarryBehind };
        self.give(Desk::Work, (order, Annex::Nothing))
    }
}

impl Clone for Errand {
    fn clone(&self) -> Errand {
        self.courier().users.fetch_add(1, Ordering::Relaxed);
        Errand { customer: self.customer.clone() }
    }
}

impl Drop for Errand {
    fn drop(&mut self) {
        if self.courier().users.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.courier().dismiss();
        }
    }
}

/// Whether a device has room for blocks that combine beside those that carry.
fn has_room(multiprocessors: u32) -> bool {
    multiprocessors > 2 * PLAIN_CARRIERS
}

/// The most of [`blocks_for`] on small devices, or beside no network.
const PLAIN_CARRIERS: u32 = 3;

/// How many blocks carry at each desk: enough for the bus, and no more. Up to four, each asks the host's
/// memory for orders, which is slow where many do: with 1, 2, 4 and 8 blocks an allreduce of 8 bytes takes
/// 21, 23, 29 and 49 µs. While processors write and read the same memory it is slower, and more has to be
/// under way: a broadcast of 16 MiB over TCP takes 735 µs with 3, 770 with 4, 612 with 8 and 632 with 16, one
/// of 4 MiB 256 with 2 and 185 with 4 (two H100s); within one host 3 are the best.
fn blocks_for(duty: Duty, multiprocessors: u32) -> u32 {
    let networked = |wanted: u32| wanted.min(multiprocessors / 16).max(PLAIN_CARRIERS);
    match (duty.networked, duty.bytes) {
        (_, ..=SHORT) => 1,
        (_, ..=MIB) => 2,
        (false, ..=FOUR_MIB) => 2,
        (true, ..=EIGHT_MIB) => networked(4),
        // Others combine beside them, and 8 were no faster there.
        (true, _) => networked(if duty.combiner.is_some() { 4 } else { 8 }),
        (false, _) => PLAIN_CARRIERS,
    }
}

/// How many threads a block has: 256 have up to 16 KiB under way at once, and a block of them begins and
/// meets sooner than one of 1024.
fn threads_for(duty: Duty) -> u32 {
    if duty.bytes <= SHORT { 256 } else { 1024 }
}

/// How many blocks combine. Each thread asks for little, so the bus has enough to do with many; but each
/// block takes time to come, to be told and to leave: an allreduce of 128 KiB through the host takes 44 µs
/// with 4 and 52 with 8, one of 64 MiB 3.4 ms with 4, 3.0 with 8 and 2.8 with 16 (two H100s).
fn workers_for(bytes: usize) -> u32 {
    let most = [(TINY, 1), (QUARTER_MIB, 4), (FOUR_MIB, 8)];
    most.into_iter().find(|&(most, _)| bytes <= most).map_or(BLOCKS as u32, |(_, blocks)| blocks)
}

/// What one block of 256 threads combines with one access of each thread,
const TINY: usize = 4 << 10;
/// and what it carries with four.
const SHORT: usize = 16 << 10;
const QUARTER_MIB: usize = 256 << 10;
const MIB: usize = 1 << 20;
const FOUR_MIB: usize = 4 << 20;
const EIGHT_MIB: usize = 8 << 20;

#[cfg(test)]
mod tests;
