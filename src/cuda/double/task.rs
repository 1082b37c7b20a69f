//! What streams are given to do.

use super::heap::{Allocation, Heap, pointer};
use super::*;
use crate::cuda::courier::{Action, Desk};
use crate::cuda::kernels::{Launch, Told, is_bitwise};
use crate::cuda::local::Operand;
use crate::reduce::{self, Representation};

/// Bytes that the system gives memory for, or a part of that.
const PAGE: usize = 4096;

/// One thing for a stream to do.
#[derive(Clone, Debug)]
pub(super) enum Task {
    /// Nothing: an event, a wait, the end of a graph.
    Mark,
    /// Bytes, each side on a device or, if none, in pinned memory.
    Copy {
        to: (u64, Option<u32>),
        from: (u64, Option<u32>),
        bytes: usize,
    },
    Fill {
        to: u64,
        bytes: Box<[u8]>,
    },
    Expect {
        at: u64,
        bytes: Box<[u8]>,
        what: String,
    },
    WriteValue {
        address: u64,
        value: u32,
    },
    WaitValue {
        address: u64,
        value: u32,
    },
    Host {
        function: HostFunction,
        user: usize,
    },
    Fold {
        device: u32,
        reducer: Reducer,
        operands: Box<[Operand]>,
        out: u64,
        representation: Representation,
        count: usize,
    },
    /// A courier: it goes on for as long as the host has orders.
    Carry(Arc<Carrying>),
}

/// A courier under way.
#[derive(Debug)]
pub(super) struct Carrying {
    device: u32,
    /// Where desks are, and the backs of their slips.
    boards: [u64; 3],
    backs: [u64; 3],
    /// Of each desk.
    blocks: [u32; 3],
    combiner: Option<Combiner>,
    /// The next order at each desk, until it leaves that; `None` before it has come.
    next: Mutex<Option<[Option<u32>; 3]>>,
    first: [u32; 3],
    /// Whether it stores nothing for now.
    holds: Arc<AtomicBool>,
}

impl Carrying {
    pub(super) fn new(
        device: u32,
        call: &courier::Call,
        combiner: Option<Combiner>,
        holds: &Arc<AtomicBool>,
    ) -> Carrying {
        let courier::Call { next: first, blocks, .. } = *call;
        let boards = Desk::ALL.map(|desk| call.board(desk).0);
        let backs = Desk::ALL.map(|desk| call.board(desk).1);
        Carrying {
            device,
            boards,
            backs,
            blocks,
            combiner,
            next: Mutex::default(),
            first,
            holds: holds.clone(),
        }
    }

    fn next(&self) -> MutexGuard<'_, Option<[Option<u32>; 3]>> {
        self.next.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it has come.
    pub(super) fn has_come(&self) -> bool {
        self.next().is_some()
    }

    /// Whether it has left.
    pub(super) fn is_over(&self) -> bool {
        *self.next() == Some([None; 3])
    }

    /// What it waits for.
    pub(super) fn describe(&self) -> String {
        let Some(next) = *self.next() else { return "a courier that has not come".into() };
        let orders = Desk::ALL.into_iter().filter_map(|desk| {
            next[desk as usize]
                .map(|number| format!("{number} at {desk:?} ({:#x})", self.boards[desk as usize]))
        });
        format!("a courier that waits for the orders {}", orders.collect::<Vec<_>>().join(", "))
    }

    /// Whether there is something for it to do.
    pub(super) fn is_ready(&self) -> bool {
        let Some(next) = *self.next() else { return true };
        Desk::ALL.into_iter().any(|desk| {
            let (number, board) = (next[desk as usize], self.boards[desk as usize]);
            self.serves(desk) && number.is_some_and(|number| courier::reader::order(board, number).is_some())
        })
    }

    fn serves(&self, desk: Desk) -> bool {
        !matches!(desk, Desk::Store) || !self.holds.load(Ordering::SeqCst)
    }

    /// Does one thing.
    fn run(&self, heap: &mut Heap) -> Result<(), String> {
        let mut next = self.next();
        let Some(next) = &mut *next else {
            // A desk that no block serves is left at once.
            let serves = |desk: usize| (self.blocks[desk] > 0).then_some(self.first[desk]);
            *next = Some(std::array::from_fn(serves));
            courier::reader::come(self.boards[0], self.first[0]);
            return Ok(());
        };
        for desk in Desk::ALL.into_iter().filter(|desk| self.serves(*desk)) {
            let at = desk as usize;
            let (next, board, blocks) = (&mut next[at], self.boards[at], self.blocks[at]);
            let Some((number, order)) =
                next.and_then(|number| Some((number, courier::reader::order(board, number)?)))
            else {
                continue;
            };
            *next = (order.action != Action::Leave).then(|| number.wrapping_add(1));
            let done = match order.action {
                Action::Leave => Ok(()),
                // Nothing is touched.
                Action::Carry | Action::CarryBehind if order.bytes == 0 => Ok(()),
                Action::Carry | Action::CarryBehind => self.carry(&order, heap),
                Action::Combine => {
                    self.combine(Launch::told(&courier::reader::sheet(&order), self.dtype()?), heap)
                }
                Action::Pair => {
                    self.combine(courier::reader::pair(&order, self.backs[at], number).into(), heap)
                }
                Action::Place => {
                    self.write(order.to, &courier::reader::placed(&order, self.backs[at], number), heap)
                }
                Action::Tell => {
                    let from = Place { address: order.from, bytes: order.bytes as usize };
                    self.check(from, heap)?;
                    let told = courier::reader::told(heap.slice(from)?, number);
                    self.write(order.to, &told, heap)
                }
            };
            courier::reader::done(board, blocks, number);
            return done;
        }
        Ok(())
    }

    /// Refuses memory that is not there, or another device's.
    fn check(&self, place: Place, heap: &Heap) -> Result<(), String> {
        heap.slice(place)?;
        let found = heap.find(place).map(Allocation::location);
        match found.filter(|at| at.memory == Memory::Device && at.device != self.device) {
            Some(at) => Err(format!("a courier of device {} touches memory of {}", self.device, at.device)),
            None => Ok(()),
        }
    }

    fn carry(&self, order: &courier::Order, heap: &mut Heap) -> Result<(), String> {
        let bytes = order.bytes as usize;
        for address in [order.to, order.from] {
            self.check(Place { address, bytes }, heap)?;
        }
        let carried = heap.slice(Place { address: order.from, bytes })?.to_vec();
        heap.slice_mut(Place { address: order.to, bytes })?.copy_from_slice(&carried);
        Ok(())
    }

    fn write(&self, to: u64, bytes: &[u8], heap: &mut Heap) -> Result<(), String> {
        let place = Place { address: to, bytes: bytes.len() };
        self.check(place, heap)?;
        heap.slice_mut(place)?.copy_from_slice(bytes);
        Ok(())
    }

    /// The types of what it combines.
    fn dtype(&self) -> Result<DataType, String> {
        self.combiner.map(|(dtype, _)| dtype).ok_or_else(|| "this courier cannot combine".into())
    }

    fn combine(&self, told: Told, heap: &mut Heap) -> Result<(), String> {
        let Some((dtype, operator)) = self.combiner else { return Err("this courier cannot combine".into()) };
        let reducer = Reducer::new(dtype, operator, told.ranks.max(1)).map_err(|error| error.to_string())?;
        let count = told.count as usize / if is_bitwise(&operator) { dtype.size() } else { 1 };
        let bytes = count * dtype.size();
        let element = |&(address, scale)| Operand { address, representation: Representation::Element, scale };
        let operands: Vec<Operand> = told.operands.iter().map(element).collect();
        for address in operands.iter().map(|operand| operand.address).chain([told.out]) {
            self.check(Place { address, bytes }, heap)?;
        }
        let mut sums = Vec::new();
        let operands = halves(&reducer, &operands, count, &mut sums);
        // SAFETY: every place is live memory, as found above; one task runs at a time.
        unsafe { reducer.fold(&operands, pointer(told.out), Representation::Element, count) };
        Ok(())
    }

    /// What it is to use.
    fn places(&self) -> Vec<Place> {
        self.boards.map(|address| Place { address, bytes: 4 }).into()
    }
}

impl Task {
    /// What it is, in few words.
    pub(super) fn describe(&self) -> String {
        match self {
            Task::Mark => "an event, or the wait for one".into(),
            Task::Copy { to, from, bytes } => {
                format!("a copy of {bytes} bytes from {:#x} to {:#x}", from.0, to.0)
            }
            Task::Fill { to, bytes } => format!("a fill of {} bytes at {to:#x}", bytes.len()),
            Task::Expect { at, what, .. } => format!("the test's look at {at:#x} ({what})"),
            Task::WriteValue { address, value } => format!("a write of {value} at {address:#x}"),
            Task::WaitValue { address, value } => format!("a wait for {value} at {address:#x}"),
            Task::Host { .. } => "a function of the host".into(),
            Task::Fold { out, count, .. } => format!("a fold of {count} elements to {out:#x}"),
            Task::Carry(carrying) => carrying.describe(),
        }
    }

    /// The memory that it touches.
    pub(super) fn places(&self) -> Vec<Place> {
        let place = |address, bytes| Place { address, bytes };
        match self {
            Task::Mark | Task::Host { .. } => Vec::new(),
            Task::Copy { to, from, bytes } => vec![place(to.0, *bytes), place(from.0, *bytes)],
            Task::Fill { to, bytes } => vec![place(*to, bytes.len())],
            Task::Expect { at, bytes, .. } => vec![place(*at, bytes.len())],
            Task::WriteValue { address, .. } | Task::WaitValue { address, .. } => vec![place(*address, 4)],
            Task::Fold { reducer, operands, out, representation, count, .. } => {
                let size = |representation: Representation| match representation {
                    Representation::Element => reducer.element_size() * count,
                    Representation::Accumulator => reducer.accumulator_size() * count,
                };
                let mut places = vec![place(*out, size(*representation))];
                let present = operands.iter().filter(|operand| **operand != Operand::ABSENT);
                places.extend(present.map(|o| place(o.address, size(o.representation))));
                places
            }
            Task::Carry(carrying) => carrying.places(),
        }
    }

    /// Does it, if all memory that it touches is there and within reach: `reached` are the devices that reach
    /// each other. Says what is wrong otherwise.
    pub(super) fn run(&self, heap: &mut Heap, reached: &HashSet<(u32, u32)>) -> Result<(), String> {
        self.places().into_iter().try_for_each(|place| heap.slice(place).map(drop))?;
        match self {
            Task::Mark | Task::WaitValue { .. } | Task::Host { .. } => {}
            Task::Copy { to, from, bytes } => {
                for (address, device) in [*to, *from] {
                    let place = Place { address, bytes: *bytes };
                    let found = heap.find(place).map(Allocation::location);
                    let found = found.map(|at| match at.memory {
                        Memory::Host => None,
                        Memory::Device => Some(at.device),
                        Memory::Managed => device,
                    });
                    if found != Some(device) {
                        return Err(format!("{address:#x} copied as of {device:?}, but it is of {found:?}"));
                    }
                }
                let bytes_read = heap.slice(Place { address: from.0, bytes: *bytes })?.to_vec();
                heap.slice_mut(Place { address: to.0, bytes: *bytes })?.copy_from_slice(&bytes_read);
            }
            Task::Fill { to, bytes } => {
                let to = heap.slice_mut(Place { address: *to, bytes: bytes.len() })?;
                // What is new and cleared takes no memory so.
                for (to, bytes) in to.chunks_mut(PAGE).zip(bytes.chunks(PAGE)) {
                    if to != bytes {
                        to.copy_from_slice(bytes);
                    }
                }
            }
            Task::Expect { at, bytes, what } => {
                let found = heap.slice(Place { address: *at, bytes: bytes.len() })?;
                if let Some(index) = (0..bytes.len()).find(|&index| found[index] != bytes[index]) {
                    let (found, due) = (found[index], bytes[index]);
                    return Err(format!("{what}: byte {index} is {found:#x}, but {due:#x} is due"));
                }
            }
            Task::WriteValue { address, value } => {
                heap.slice_mut(Place { address: *address, bytes: 4 })?.copy_from_slice(&value.to_ne_bytes());
            }
            Task::Fold { device, reducer, operands, out, representation, count } => {
                for place in self.places() {
                    let Some(found) = heap.find(place).map(Allocation::location) else { continue };
                    let owner = found.device;
                    if owner != *device && (found.mapped || !reached.contains(&(*device, owner))) {
                        return Err(format!("device {device} has no access to device {owner}"));
                    }
                }
                let mut sums = Vec::new();
                let operands = halves(reducer, operands, *count, &mut sums);
                // SAFETY: every place is live memory, as found above; one task runs at a time.
                unsafe { reducer.fold(&operands, pointer(*out), *representation, *count) };
            }
            Task::Carry(carrying) => carrying.run(heap)?,
        }
        Ok(())
    }
}

/// At most two operands that combine to the same as these, some of which may be absent; `sums` keeps what the
/// halves of the canonical tree were folded to. The operands have `count` positions of live memory.
fn halves(
    reducer: &Reducer,
    operands: &[Operand],
    count: usize,
    sums: &mut Vec<Vec<u64>>,
) -> Vec<reduce::Operand> {
    let operand = |operand: &Operand| reduce::Operand {
        address: pointer(operand.address),
        representation: operand.representation,
        scale: operand.scale,
    };
    if operands[1..].iter().all(|operand| *operand == Operand::ABSENT) {
        return vec![operand(&operands[0])];
    }
    let (left, right) = operands.split_at(operands.len().next_power_of_two() / 2);
    let mut both = Vec::new();
    for half in [left, right].into_iter().filter(|half| half[0] != Operand::ABSENT) {
        let parts = halves(reducer, half, count, sums);
        if let [single] = parts[..] {
            both.push(single);
            continue;
        }
        let mut sum = vec![0u64; (count * reducer.accumulator_size()).div_ceil(8)];
        let (address, representation) = (sum.as_mut_ptr().cast::<u8>(), Representation::Accumulator);
        // SAFETY: the parts are live memory or sums of as many positions, and `sum` has room for those.
        unsafe { reducer.fold(&parts, address, representation, count) };
        sums.push(sum);
        both.push(reduce::Operand { address, representation, scale: 1.0 });
    }
    both
}
