//! Many streams of one process on one GPU: it has fewer queues than that, and what waits in one holds up
//! others.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use unisono::collective::request::{Counts, Kind, Request};
use unisono::communicator::{Call, Context, start_together};
use unisono::cuda::driver::Priority;
use unisono::cuda::event::Event;
use unisono::cuda::memory::{DeviceBuffer, PinnedBuffer};
use unisono::cuda::queues;
use unisono::cuda::stream::Stream;
use unisono::deadline::Deadline;
use unisono::reduce::{DataType, Operator};

use super::cuda::{devices, filled, read, stream};
use super::support::ranks;

/// Calls enqueued ahead of each rank's stream.
const CALLS: usize = 64;

/// Elements of each.
const COUNT: usize = 1024;
const BYTES: usize = COUNT * 4;

/// Far longer than it takes. A call that is held up fails then, and its stream goes on.
const LIMIT: Duration = Duration::from_secs(15);

/// Other streams of the caller with work of their own.
const OTHERS: usize = 40;

fn request(kind: Kind, input: u64, output: u64, count: usize, root: u32) -> Request {
    let pointer = |address: u64| std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
    Request {
        kind,
        input: pointer(input).cast_const(),
        output: pointer(output),
        counts: Counts::Uniform(count as u64),
        dtype: DataType::I32,
        operator: Operator::Sum,
        root,
    }
}

fn bytes(value: i32, count: usize) -> Vec<u8> {
    value.to_ne_bytes().repeat(count)
}

fn call(stream: &Stream) -> Call {
    Call { stream: Some(stream.handle()), timeout: Some(LIMIT), ..Call::default() }
}

/// What a rank's calls work on, allocated before any stream waits: a free waits for the device.
struct Memory {
    input: DeviceBuffer,
    output: DeviceBuffer,
    /// The caller's own copies of each result.
    copies: PinnedBuffer,
}

impl Memory {
    fn new(rank: u32) -> Memory {
        let input: Vec<u8> =
            (0..CALLS).flat_map(|index| bytes(index as i32 * 10 + rank as i32, COUNT)).collect();
        Memory {
            input: filled(0, &input),
            output: filled(0, &vec![0; CALLS * BYTES]),
            copies: PinnedBuffer::new(&devices(), 0, CALLS * BYTES).expect("pinned memory"),
        }
    }
}

/// Gives `stream` all calls, each with a copy of the caller's behind it: sums, and both halves of an exchange
/// in turn.
fn enqueue(context: &Context, stream: &Stream, memory: &Memory) {
    let peer = 1 - context.rank();
    let call = call(stream);
    for index in 0..CALLS {
        let at = (index * BYTES) as u64;
        let (input, output) = (memory.input.address() + at, memory.output.address() + at);
        let requests = match index % 2 {
            0 => vec![request(Kind::Allreduce, input, output, COUNT, 0)],
            _ => vec![
                request(Kind::Send, input, 0, COUNT, peer),
                request(Kind::Receive, 0, output, COUNT, peer),
            ],
        };
        let calls: Vec<_> = requests.iter().map(|request| (context, request, &call)).collect();
        // SAFETY: the memory outlives the stream's work.
        drop(unsafe { start_together(&calls) }.expect("they start"));
        let copy = memory.copies.address().wrapping_add(index * BYTES);
        // SAFETY: as above.
        unsafe { stream.copy_to_host(copy, output, BYTES) }.expect("a copy");
    }
}

/// What the calls of both ranks yield.
fn check(rank: u32, memory: &Memory) {
    // SAFETY: the copies are complete, and fill it.
    let copies = unsafe { std::slice::from_raw_parts(memory.copies.address(), CALLS * BYTES) };
    for (index, copy) in copies.chunks(BYTES).enumerate() {
        let base = index as i32 * 10;
        let due = if index % 2 == 0 { base * 2 + 1 } else { base + 1 - rank as i32 };
        assert!(copy == bytes(due, COUNT), "call {index} on rank {rank}");
    }
}

#[test]
fn two_ranks_of_a_process_share_a_gpu_with_many_streams() {
    let began = Instant::now();
    // Before the other streams: two streams of callers that share a queue would hold up each other.
    let streams = [stream(0), stream(0)];
    let others: Vec<Stream> = (0..OTHERS).map(|_| stream(0)).collect();
    let work = filled(0, &vec![0; 1 << 20]);
    let pinned = PinnedBuffer::new(&devices(), 0, 1 << 20).expect("pinned memory");
    let busy = || {
        for other in &others {
            // SAFETY: both outlive the streams' work, and what they hold means nothing.
            unsafe {
                other.copy_to_host(pinned.address(), work.address(), 1 << 18).expect("a copy");
                other.copy_to_device(work.address() + (1 << 18), pinned.address(), 1 << 18).expect("a copy");
            }
        }
    };
    ranks(2, "shm", |context| {
        let rank = context.rank();
        let (stream, memory) = (&streams[rank as usize], Memory::new(rank));
        // With few queues, a thread waits for its calls once it knows that the other rank is on its GPU, too.
        let (at, first) = (memory.output.address(), call(stream));
        // SAFETY: the memory outlives the call.
        unsafe { context.run(&request(Kind::Allreduce, at, at, COUNT, 0), &first) }.expect("a sum");
        // Everything is allocated.
        let barrier = request(Kind::Barrier, 0, 0, 0, 0);
        // SAFETY: it names no memory.
        unsafe { context.run(&barrier, &Call::default()) }.expect("a barrier");
        busy();
        enqueue(context, stream, &memory);
        busy();
        stream.synchronize(Deadline::after(LIMIT * 2)).expect("the stream ends");
        assert_eq!(context.failure().map(|error| error.to_string()), None);
        check(rank, &memory);
        // SAFETY: it names no memory.
        unsafe { context.run(&barrier, &Call::default()) }.expect("a barrier");
    });
    for other in &others {
        other.synchronize(Deadline::after(LIMIT)).expect("the others end");
    }
    println!("queues: {CALLS} calls ahead, {OTHERS} other streams: {:.0?}", began.elapsed());
}

#[test]
fn what_fills_a_queue_behind_a_call_does_not_hold_it_up() {
    let streams = [stream(0), stream(0)];
    ranks(2, "shm", |context| {
        let rank = context.rank();
        let stream = &streams[rank as usize];
        let memory = filled(0, &bytes(1, COUNT));
        let word = filled(0, &[0; 4]);
        let barrier = request(Kind::Barrier, 0, 0, 0, 0);
        // SAFETY: it names no memory.
        unsafe { context.run(&barrier, &Call::default()) }.expect("a barrier");
        if rank == 1 {
            // Until the other rank's queue is full.
            std::thread::sleep(Duration::from_millis(300));
        }
        let sum = request(Kind::Allreduce, memory.address(), memory.address(), COUNT, 0);
        // SAFETY: the memory outlives the stream's work.
        unsafe {
            context.launch(&sum, &call(stream)).expect("it starts");
            for value in 0..5000 {
                stream.write_value(word.address(), value).expect("a write");
            }
        }
        stream.synchronize(Deadline::after(LIMIT * 2)).expect("the stream ends");
        // What follows frees memory, for which the driver waits for the device, with a lock that the other's
        // call may need. SAFETY: it names no memory.
        unsafe { context.run(&barrier, &Call::default()) }.expect("a barrier");
        assert_eq!(context.failure().map(|error| error.to_string()), None);
        assert!(read(stream, memory.address(), BYTES) == bytes(2, COUNT), "rank {rank}");
    });
}

/// The driver gives a stream that has been idle a queue. When two threads give streams something at the same
/// moment it may be one for both, if there are few: so what a call has a device do may come behind what waits
/// for the call.
#[test]
fn a_program_that_launches_all_the_time_holds_up_no_call() {
    const ROUNDS: usize = 1000;
    const IDLE: Duration = Duration::from_millis(2);
    let streams = [stream(0), stream(0)];
    let others: Vec<[Stream; 2]> = (0..2).map(|_| [stream(0), stream(0)]).collect();
    let word = filled(0, &[0; 4]);
    let (stop, began) = (AtomicBool::new(false), Instant::now());
    let keep_busy = |both: &[Stream]| {
        while !stop.load(Ordering::Relaxed) {
            for other in both {
                // SAFETY: the memory outlives the streams' work.
                unsafe { other.write_value(word.address(), 1) }.expect("a write");
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    };
    std::thread::scope(|scope| {
        for both in &others {
            scope.spawn(|| keep_busy(both));
        }
        ranks(2, "shm", |context| {
            let stream = &streams[context.rank() as usize];
            let memory = filled(0, &bytes(1, COUNT));
            let most = Request {
                operator: Operator::Max,
                ..request(Kind::Allreduce, memory.address(), memory.address(), COUNT, 0)
            };
            let call = Call { timeout: Some(Duration::from_secs(5)), ..call(stream) };
            for _ in 0..ROUNDS {
                std::thread::sleep(IDLE);
                // SAFETY: the memory outlives the stream's work.
                unsafe { context.launch(&most, &call) }.expect("it starts");
                stream.synchronize(Deadline::after(LIMIT)).expect("it ends");
                assert_eq!(context.failure().map(|error| error.to_string()), None);
            }
        });
        stop.store(true, Ordering::Relaxed);
    });
    println!("queues: {ROUNDS} calls beside a busy program: {:.1?}", began.elapsed());
}

/// How many streams that wait it takes until nothing else of this process runs. The library has
/// [`queues::WAITING`] wait, where there are queues enough.
#[test]
fn streams_that_wait_leave_queues_to_others() {
    let waiting: Vec<Stream> = (0..40).map(|_| stream(0)).collect();
    let highest = |_| Stream::with_priority(&devices(), 0, false, Priority::Highest).expect("a stream");
    let ours: Vec<Stream> = (0..8).map(highest).collect();
    let (word, event) = (filled(0, &[0; 4]), Event::new(&devices(), 0).expect("an event"));
    for count in [1, 7, 8, queues::WAITING, 24, 31, 33, 40] {
        std::thread::sleep(Duration::from_millis(20));
        let gate = devices().word(0).expect("a word");
        waiting[..count].iter().for_each(|one| one.wait_word(&gate).expect("a wait"));
        let goes_on = |one: &&Stream| {
            // SAFETY: the memory outlives the streams' work.
            unsafe { one.write_value(word.address(), 1) }.expect("a write");
            event.record(one).expect("a record");
            let until = Instant::now() + Duration::from_millis(20);
            while !event.query().expect("an answer") && Instant::now() < until {}
            event.query().expect("an answer")
        };
        let going = ours.iter().filter(goes_on).count();
        gate.release();
        println!("queues: {count} streams wait: {going} of {} others go on", ours.len());
        if queues::are_many() && count <= queues::WAITING {
            assert_eq!(going, ours.len());
        }
        for one in waiting.iter().chain(&ours) {
            one.synchronize(Deadline::after(LIMIT)).expect("it goes on");
        }
    }
}

#[test]
fn how_long_small_calls_take() {
    const ROUNDS: usize = 200;
    let streams = [stream(0), stream(0)];
    ranks(2, "shm", |context| {
        let rank = context.rank();
        let stream = &streams[rank as usize];
        let memory = filled(0, &[0; 8]);
        let other = filled(0, &vec![0; 32 << 20]);
        let pinned = PinnedBuffer::new(&devices(), 0, 32 << 20).expect("pinned memory");
        let sum = request(Kind::Allreduce, memory.address(), memory.address(), 2, 0);
        let run = |call: &Call| {
            // SAFETY: the memory outlives the call.
            unsafe { context.run(&sum, call) }.expect("a sum");
        };
        let time = |what: &str, rounds: usize, round: &dyn Fn() -> Duration| {
            let mut times: Vec<Duration> = (0..rounds).map(|_| round()).collect();
            times.sort_unstable();
            if rank == 0 {
                println!("queues: 8 bytes {what}: {:.1?}, at best {:.1?}", times[rounds / 2], times[0]);
            }
        };
        let idle = Duration::from_millis(5);
        let timed = |call: &Call| {
            let began = Instant::now();
            run(call);
            began.elapsed()
        };
        let (plain, on_stream) = (Call::default(), call(stream));
        time("blocking", ROUNDS, &|| timed(&plain));
        time("blocking, after a pause", ROUNDS, &|| {
            std::thread::sleep(idle);
            timed(&plain)
        });
        time("on a stream, waited for", ROUNDS, &|| timed(&on_stream));
        time("on a stream, waited for, after a pause", ROUNDS, &|| {
            std::thread::sleep(idle);
            timed(&on_stream)
        });
        // From the end of the work before the call, about, to that of the call.
        let copy = || {
            // SAFETY: both outlive the copy.
            unsafe { stream.copy_to_host(pinned.address(), other.address(), 32 << 20) }.expect("a copy");
        };
        let alone = || {
            let began = Instant::now();
            copy();
            stream.synchronize(Deadline::NEVER).expect("it ends");
            began.elapsed()
        };
        let copying = (0..20).map(|_| alone()).min().unwrap_or_default();
        time("behind 32 MiB of copies, beyond those", ROUNDS, &|| {
            let began = Instant::now();
            copy();
            // SAFETY: the memory outlives the call.
            unsafe { context.launch(&sum, &on_stream) }.expect("it starts");
            stream.synchronize(Deadline::NEVER).expect("it ends");
            began.elapsed().saturating_sub(copying)
        });
    });
}
