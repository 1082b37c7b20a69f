//! What a batch of the C face does: messages between GPUs, with both halves of each exchange on one stream, and
//! both ranks of the group in one thread, which connects their devices together, too.

use std::thread;
use std::time::Instant;

use unisono::collective::request::{Counts, Kind, Request};
use unisono::communicator::{Call, Context, Part, connect_devices, start_parts};
use unisono::cuda::memory::DeviceBuffer;
use unisono::reduce::{DataType, Operator};
use unisono::rendezvous::hash::HashStore;

use super::cuda::{devices, read, soon, write};
use super::device::Rank;
use super::support::options;

/// Elements of the longest message.
const MOST: usize = 16 << 20;
const RANKS: u32 = 2;

/// A rank of the thread, and its buffers.
struct Seat<'a> {
    rank: Rank<'a>,
    input: DeviceBuffer,
    output: DeviceBuffer,
}

impl Seat<'_> {
    /// One half of its exchange with the other rank.
    fn half(&self, kind: Kind, count: usize) -> Request {
        Request {
            kind,
            input: std::ptr::without_provenance(self.input.address() as usize),
            output: std::ptr::without_provenance_mut(self.output.address() as usize),
            counts: Counts::Uniform(count as u64),
            dtype: DataType::F32,
            operator: Operator::Sum,
            root: 1 - self.rank.context.rank(),
        }
    }
}

/// Each rank sends its input to the other one, and receives, on its own stream.
fn exchange(seats: &[Seat<'_>], count: usize) {
    let calls: Vec<(&Seat<'_>, Request, Call)> = seats
        .iter()
        .flat_map(|seat| [Kind::Send, Kind::Receive].map(|kind| (seat, kind)))
        .map(|(seat, kind)| (seat, seat.half(kind, count), seat.rank.on_stream()))
        .collect();
    let parts: Vec<Part<'_>> = calls
        .iter()
        .map(|(seat, request, call)| Part { context: seat.rank.context, request, call, awaited: false })
        .collect();
    // SAFETY: the buffers hold as much, and outlive the streams' work.
    for started in unsafe { start_parts(&parts) } {
        started.expect("a start");
    }
}

#[test]
fn one_thread_exchanges_messages_between_its_gpus() {
    let store = std::sync::Arc::new(HashStore::new());
    let contexts: Vec<Context> = thread::scope(|scope| {
        let create = |rank| Context::create(options(rank, RANKS, store.clone(), "shm")).expect("ranks meet");
        let threads: Vec<_> = (0..RANKS).map(|rank| scope.spawn(move || create(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank")).collect()
    });
    let seats: Vec<Seat<'_>> = contexts
        .iter()
        .map(|context| {
            let rank = Rank::new(context);
            let buffer = || DeviceBuffer::new(&devices(), rank.device, 4 * MOST).expect("memory");
            Seat { input: buffer(), output: buffer(), rank }
        })
        .collect();
    let places: Vec<_> = seats.iter().map(|seat| (seat.rank.context, seat.rank.device)).collect();
    connect_devices(&places).expect("an agreement");
    let mut best = f64::MAX;
    for (turn, count) in [1, 1000, 100_003, MOST, MOST, MOST].into_iter().enumerate() {
        for (rank, me) in seats.iter().enumerate() {
            let value = (10 * turn + rank) as f32;
            write(me.rank.device, me.input.address(), &value.to_ne_bytes().repeat(count));
            write(me.rank.device, me.output.address(), &(-1f32).to_ne_bytes().repeat(count));
        }
        let start = Instant::now();
        exchange(&seats, count);
        for me in &seats {
            me.rank.stream.synchronize(soon()).expect("the stream ends");
        }
        best = if count == MOST { best.min(start.elapsed().as_secs_f64()) } else { best };
        for (rank, me) in seats.iter().enumerate() {
            let wanted = ((10 * turn + 1 - rank) as f32).to_ne_bytes();
            let found = read(&me.rank.stream, me.output.address(), 4 * count);
            assert!(found.chunks_exact(4).all(|value| value == wanted), "rank {rank}, turn {turn}");
        }
    }
    println!("@ batches: {} MiB each way in {:.0} us", (4 * MOST) >> 20, best * 1e6);
}
