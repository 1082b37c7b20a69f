//! Ranks are threads; a host is a driver double with a device for each of its ranks.

mod calls;
mod failure;
mod leaving;
mod loading;
pub(in crate::communicator) mod members;
mod turns;

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use self::members::{DRIVER, LOADS};
use super::*;
use crate::collective::request::Counts;
use crate::communicator::context::Membership;
use crate::communicator::device::{Candidate, connect};
use crate::communicator::{Call, Completion, Options, Rendezvous};
use crate::cuda::context::Devices;
use crate::cuda::double::{Clock, Double, DoubleKernels, Order};
use crate::cuda::driver::StreamHandle;
use crate::cuda::exchange::{Chosen, Table};
use crate::engine::device::Way;
use crate::engine::endpoint::Through;
use crate::engine::staged::relay::Limits;
use crate::error::Status;
use crate::reduce::DataType;
use crate::rendezvous::hash::HashStore;

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Bytes of a piece between hosts.
const PIECE: usize = 1024;

pub(in crate::communicator) fn agree(context: &Context, device: u32, devices: &Arc<Devices>) -> Result<()> {
    let candidate = Candidate { context, device, first: None, points: true };
    connect(&[candidate], || Ok(devices.clone()), choose, LOADS)
}

fn choose(_: &Devices, _: u32) -> Result<Chosen> {
    Ok(Chosen { table: Table::default(), by_hand: false })
}

struct Rank {
    context: Context,
    double: Arc<Double>,
    devices: Arc<Devices>,
    device: u32,
    stream: StreamHandle,
}

/// Runs `body` on `inside` ranks of each of `hosts` hosts; what it answers, by rank. Streams come to an end.
fn ranks<T: Send>(hosts: u32, inside: u32, order: Order, body: impl Fn(&Rank) -> T + Sync) -> Vec<T> {
    ranks_by(hosts, inside, order, Carriers::SideStreams, body)
}

/// As [`ranks`], with other carriers.
fn ranks_by<T: Send>(
    hosts: u32,
    inside: u32,
    order: Order,
    carriers: Carriers,
    body: impl Fn(&Rank) -> T + Sync,
) -> Vec<T> {
    let (answers, doubles) = ranks_of(hosts, inside, order, 1, carriers, body);
    for double in doubles {
        see_out(&double);
        assert_eq!(double.complaints(), Vec::<String>::new(), "{order:?}");
    }
    answers
}

/// Runs what streams were given until that has ended. What is late is given up just after its group has
/// failed, and nobody waits for it who destroys a context then.
fn see_out(double: &Double) {
    let until = Instant::now() + PATIENCE;
    while !double.is_idle() && Instant::now() < until {
        if !double.step() {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
    // Complains if streams wait for each other.
    double.drain();
}

/// As [`ranks`]; nobody waits for what streams were given.
fn ranks_that_fail<T: Send>(carriers: Carriers, body: impl Fn(&Rank) -> T + Sync) -> Vec<T> {
    ranks_of(2, 2, Order::RoundRobin, 1, carriers, body).0
}

/// What copies between devices and pinned memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Carriers {
    SideStreams,
    Couriers,
    /// Couriers, and between hosts the devices combine. From the first call of the test on.
    Relays,
}

/// Runs `body` on `inside` ranks of each of `hosts` hosts, which has so many processes: a driver double for
/// each, with a device for each of its ranks. What it answers, by rank, and the doubles.
fn ranks_of<T: Send>(
    hosts: u32,
    inside: u32,
    order: Order,
    processes: u32,
    carriers: Carriers,
    body: impl Fn(&Rank) -> T + Sync,
) -> (Vec<T>, Vec<Arc<Double>>) {
    let seats = inside / processes;
    let doubles: Vec<_> = (0..hosts * processes).map(|_| Double::new(seats, order)).collect();
    let devices: Vec<_> = doubles.iter().map(|double| Devices::over(double.clone()).unwrap()).collect();
    let streams: Vec<StreamHandle> =
        (0..hosts * inside).map(|rank| doubles[(rank / seats) as usize].stream(rank % seats)).collect();
    let (store, met) = (Arc::new(HashStore::new()), Barrier::new((hosts * inside) as usize));
    let answers = std::thread::scope(|scope| {
        let clocks: Vec<_> = doubles.iter().map(Clock::start).collect();
        let threads: Vec<_> = (0..hosts * inside)
            .map(|rank| {
                let (store, body, met) = (store.clone(), &body, &met);
                let (host, stream) = (rank / inside, streams[rank as usize]);
                let process = (rank / seats) as usize;
                let (double, devices) = (doubles[process].clone(), devices[process].clone());
                scope.spawn(move || {
                    DRIVER.set(Some(double.clone()));
                    let context = Context::create(Options {
                        rank,
                        size: hosts * inside,
                        rendezvous: Rendezvous::Store(store),
                        name: String::new(),
                        timeout: PATIENCE,
                        interface: Some("127.0.0.1".into()),
                        transports: Some("shm,tcp".into()),
                        host: Some(format!("host {host}")),
                    })
                    .expect("the ranks meet");
                    let device = rank % seats;
                    context.cuda().pretend(&devices, PIECE);
                    context.cuda().pretend_loads(LOADS);
                    if carriers != Carriers::SideStreams {
                        context.cuda().pretend_kernels(Arc::new(DoubleKernels(double.clone())));
                    }
                    let agreed = agree(&context, device, &devices);
                    // Nobody fails a call while others still agree.
                    met.wait();
                    agreed.expect("an agreement");
                    assert_eq!(context.device_way(), Some(Ok(())));
                    let rank = Rank { context, double, devices, device, stream };
                    if carriers == Carriers::Relays {
                        rank.relay();
                        // Nor while others still make their lanes.
                        met.wait();
                    }
                    body(&rank)
                })
            })
            .collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, T>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        let answers: Vec<T> = threads.into_iter().map(join).collect();
        drop(clocks);
        answers
    });
    (answers, doubles)
}

fn pointer(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

/// A call, without its memory.
#[derive(Clone, Copy, Debug)]
struct What {
    kind: Kind,
    count: u64,
    dtype: DataType,
    operator: Operator,
    root: u32,
}

impl What {
    fn request(&self, input: *const u8, output: *mut u8) -> Request {
        let What { kind, count, dtype, operator, root } = *self;
        Request { kind, input, output, counts: Counts::Uniform(count), dtype, operator, root }
    }

    /// Bytes that a rank reads and writes.
    fn lengths(&self, size: u32, is_root: bool) -> (usize, usize) {
        let one = self.count as usize * self.dtype.size();
        let all = one * size as usize;
        match self.kind {
            Kind::Reduce => (one, if is_root { one } else { 0 }),
            Kind::Allgather => (one, all),
            Kind::ReduceScatter => (all, one),
            Kind::Alltoall => (all, all),
            _ => (one, one),
        }
    }
}

/// Elements of about the same size, with all their digits.
fn elements(dtype: DataType, count: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut bytes = Vec::new();
    for _ in 0..count {
        let random = next();
        let word = match dtype {
            DataType::F16 => random & 0x8bff | 0x3400,
            DataType::Bf16 => random & 0x80ff | 0x3f00,
            DataType::F8E4M3 => random & 0x8f | 0x30,
            DataType::F8E5M2 => random & 0x87 | 0x38,
            DataType::F32 => random & 0x80ff_ffff | 0x3f00_0000,
            DataType::F64 => random & 0x800f_ffff_ffff_ffff | 0x3fe0_0000_0000_0000,
            _ => random,
        };
        bytes.extend_from_slice(&word.to_le_bytes()[..dtype.size()]);
    }
    bytes
}

impl Rank {
    fn call(&self) -> Call {
        Call { stream: Some(self.stream), ..Call::default() }
    }

    fn start(&self, request: &Request, call: &Call) -> Result<Work> {
        // SAFETY: the double trusts no address.
        unsafe { self.context.begin(request, call) }?.close()
    }

    /// Runs it on a stream and on none, apart and in place, and compares with what host memory has.
    fn exercise(&self, what: What, seed: u64) {
        let (rank, size) = (self.context.rank(), self.context.size());
        let (reads, writes) = what.lengths(size, rank == what.root);
        let input = elements(what.dtype, reads / what.dtype.size(), seed + u64::from(rank));
        let mut due = vec![0u8; writes];
        if what.kind == Kind::Broadcast {
            due.copy_from_slice(&input);
        }
        let to = if writes > 0 { due.as_mut_ptr() } else { std::ptr::null_mut() };
        // SAFETY: both are as long as the request says.
        unsafe { self.context.run(&what.request(input.as_ptr(), to), &Call::default()) }
            .unwrap_or_else(|error| panic!("{what:?} on host memory: {error}"));
        let apart = Call { stream: None, ..self.call() };
        for (call, in_place) in [(self.call(), false), (self.call(), true), (apart, false)] {
            let before = u64::from(rank) * what.count * what.dtype.size() as u64;
            let (from, to) = if in_place {
                let base = self.double.memory(self.device, reads.max(writes).max(1));
                match what.kind {
                    Kind::Allgather => (base + before, base),
                    Kind::ReduceScatter => (base, base + before),
                    _ => (base, base),
                }
            } else {
                let memory = |bytes: usize| self.double.memory(self.device, bytes.max(1));
                (memory(reads), memory(writes))
            };
            // The exchange's own stream comes after the default stream.
            let stream = call.stream.unwrap_or(StreamHandle::NULL);
            self.double.fill(stream, self.device, from, &input);
            let request = what.request(pointer(from).cast_const(), pointer(to));
            if call.stream.is_some() {
                let work = self.start(&request, &call).expect("it starts");
                if writes > 0 {
                    self.double.expect(
                        stream,
                        self.device,
                        to,
                        &due,
                        &format!("{what:?}, in place: {in_place}"),
                    );
                }
                if !in_place {
                    self.double.fill(stream, self.device, from, &vec![0xee; reads]);
                }
                work.wait(Deadline::after(PATIENCE)).unwrap_or_else(|error| panic!("{what:?}: {error}"));
            } else {
                self.run(&request, &call).unwrap_or_else(|error| panic!("{what:?}: {error}"));
                assert!(writes == 0 || self.double.peek(to, writes) == due, "{what:?}");
            }
        }
    }

    fn run(&self, request: &Request, call: &Call) -> Result<Completion> {
        // SAFETY: the double trusts no address.
        unsafe { self.context.run(request, call) }
    }

    /// Relays what crosses, in pieces of [`PIECE`] bytes however short a call is; calls until there are
    /// lanes.
    fn relay(&self) {
        self.context.cuda().pretend_limits(Limits { piece: PIECE, above: Some(0) });
        let (kind, dtype, operator, root) = (Kind::Allreduce, DataType::U32, Operator::Min, 0);
        let what = What { kind, count: 1, dtype, operator, root };
        let (started, mut all) = (Instant::now(), [0u8; 4]);
        // The ranks of each place agree among themselves.
        while all == [0; 4] {
            assert!(started.elapsed() < PATIENCE, "no lanes");
            let (memory, request) = self.sum(300);
            self.run(&request, &self.call()).expect("a sum");
            // Not relayed yet, but for the last.
            assert_eq!(self.double.peek(memory, 1200), [self.context.size() as u8; 1200]);
            let own = u32::from(self.hosts().relay().relays().is_some()).to_le_bytes();
            self.run(&what.request(own.as_ptr(), all.as_mut_ptr()), &Call::default()).expect("a minimum");
        }
        assert_eq!(self.hosts().relay().relays(), Some(true));
    }

    /// Waits until no messages are under way: whoever moves a call may end it a moment after its caller
    /// knows.
    fn has_ended_all(&self) -> bool {
        let started = Instant::now();
        while self.group().endpoint().messages().operations() > 0 && started.elapsed() < PATIENCE / 4 {
            std::thread::yield_now();
        }
        self.group().endpoint().messages().operations() == 0
    }

    /// Looks whether a message has come that nobody has asked for.
    fn has_unexpected(&self) -> bool {
        let endpoint = self.group().endpoint();
        endpoint.progress(0, Through::Messages);
        endpoint.messages().unexpected_bytes() > 0
    }

    fn group(&self) -> &Arc<Group> {
        let Membership::Group(group) = self.context.membership() else { panic!("a group") };
        group
    }

    fn hosts(&self) -> Arc<Hosts> {
        let Some(Way::Hosts(hosts)) = self.group().devices() else { panic!("hosts") };
        hosts.clone()
    }

    /// A sum of words, in place.
    fn sum(&self, count: u64) -> (u64, Request) {
        let memory = self.double.memory(self.device, count as usize * 4);
        self.double.fill(self.stream, self.device, memory, &vec![1; count as usize * 4]);
        let (kind, dtype, operator, root) = (Kind::Allreduce, DataType::U32, Operator::Sum, 0);
        let what = What { kind, count, dtype, operator, root };
        (memory, what.request(pointer(memory).cast_const(), pointer(memory)))
    }
}

/// Counts with and without a rest, of one chunk and of several.
const COUNTS: [u64; 3] = [1, 37, 4001];
