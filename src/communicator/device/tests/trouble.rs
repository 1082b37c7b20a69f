//! Calls that must not reach a GPU, and first calls on device memory that some ranks do not make.

use std::ops::Range;

use super::*;
use crate::communicator::{AlgorithmOptions, Prepared, start_together};
use crate::cuda::driver::Memory;

/// One rank, whose calls go by way of the host or, if they can, by kernels.
struct Rank<'a> {
    context: &'a Context,
    double: &'a Double,
    devices: &'a Devices,
    exchanges: bool,
}

/// Runs `body` on ranks with two devices each, of which they use the first.
fn troubled<T: Send>(size: u32, exchanges: bool, body: impl Fn(&Rank<'_>) -> T + Sync) -> Vec<T> {
    let store = Arc::new(HashStore::new());
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..size)
            .map(|rank| {
                let (store, body) = (store.clone(), &body);
                scope.spawn(move || {
                    let (double, devices) = process(2);
                    let context = Context::create(options(rank, size, &store, "")).expect("ranks meet");
                    context.cuda().pretend(&devices, 256);
                    if exchanges {
                        context.cuda().pretend_loads(only(words));
                    }
                    let answer =
                        body(&Rank { context: &context, double: &double, devices: &devices, exchanges });
                    // Kernels of the double wait on when their group has failed.
                    if context.failure().is_none() {
                        double.drain();
                    }
                    assert_eq!(double.complaints(), Vec::<String>::new());
                    answer
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

/// Elements of a call, and its bytes.
const COUNT: u64 = 100;
const BYTES: usize = 400;

impl Rank<'_> {
    fn request(&self, kind: Kind, input: u64, output: u64) -> Request {
        Request {
            kind,
            input: std::ptr::with_exposed_provenance(input as usize),
            output: std::ptr::with_exposed_provenance_mut(output as usize),
            counts: Counts::Uniform(COUNT),
            dtype: DataType::U32,
            operator: Operator::Sum,
            root: 0,
        }
    }

    fn run(&self, kind: Kind, input: u64, output: u64, call: &Call) -> Result<()> {
        // SAFETY: the double trusts no address; host memory of the tests lives.
        unsafe { self.context.run(&self.request(kind, input, output), call) }.map(drop)
    }

    fn sum(&self, input: u64, output: u64, call: &Call) -> Result<()> {
        self.run(Kind::Allreduce, input, output, call)
    }

    /// Has every rank make a good call.
    fn goes_on(&self) {
        let memory = self.double.memory(0, BYTES);
        self.sum(memory, memory, &Call::default()).expect("a good call");
    }
}

fn refusal(result: Result<()>) -> (Status, String) {
    let error = result.expect_err("a bad argument");
    (error.status(), error.text().to_owned())
}

#[test]
fn bad_arguments_are_named_whichever_way_calls_go() {
    for exchanges in [true, false] {
        troubled(2, exchanges, |rank| {
            let double = rank.double;
            let (here, there) = (double.memory(0, BYTES), double.memory(1, BYTES));
            let (short, freed) = (double.memory(0, BYTES - 1), double.memory(0, BYTES + 1));
            let pieces = double.mapped(0, 128, 3);
            let [managed, pinned] =
                [Memory::Managed, Memory::Host].map(|memory| double.memory_of(memory, 0, BYTES - 1));
            double.free(freed);
            let stream = |device| Call { stream: Some(double.stream(device)), ..Call::default() };
            let (plain, on_stream, elsewhere) = (Call::default(), stream(0), stream(1));
            let on_device = Call { on_device: true, ..stream(0) };
            let refused = |input, output, call: &Call, text: &str| {
                let found = refusal(rank.sum(input, output, call));
                assert_eq!(found, (Status::InvalidArgument, text.to_owned()), "exchanges: {exchanges}");
            };
            for first in [true, false] {
                refused(
                    here,
                    short,
                    &plain,
                    "recvbuf has 399 bytes left in its allocation, but 400 are needed",
                );
                refused(
                    managed,
                    here,
                    &plain,
                    "sendbuf has 399 bytes left in its allocation, but 400 are needed",
                );
                let part = "recvbuf has 399 bytes left that are pinned, but GPUs are to reach 400: register all of it with CUDA, \
                            or give memory of the GPU";
                refused(here, pinned, &on_device, part);
                refused(
                    here,
                    there,
                    &plain,
                    "sendbuf is memory of GPU 0, but recvbuf of GPU 1: buffers of a call share a device",
                );
                let nowhere = "sendbuf (0x10) is neither memory that CUDA knows nor memory of this process: has it been freed?";
                refused(16, here, &plain, nowhere);
                refused(16, here, &on_stream, nowhere);
                refused(
                    pieces,
                    here,
                    &plain,
                    "sendbuf has 384 bytes left in its allocation, but 400 are needed",
                );
                if !first {
                    let stream = "call->stream is a stream of GPU 1, but sendbuf is memory of GPU 0";
                    refused(here, here, &elsewhere, stream);
                }
                if rank.exchanges {
                    refused(here, pinned, &plain, part);
                    let text = |name, address| {
                        format!(
                            "{name} ({address:#x}) is host memory that is not pinned, which GPUs do not reach: give memory of \
                             the GPU, or register it with CUDA"
                        )
                    };
                    let host = [0u8; BYTES];
                    let host = host.as_ptr().expose_provenance() as u64;
                    refused(host, here, &plain, &text("sendbuf", host));
                    // The double keeps what is freed, and nobody has taken so much again: it looks like the
                    // host's.
                    refused(here, freed, &on_stream, &text("recvbuf", freed));
                    if !first {
                        let text = "sendbuf is memory of GPU 1, but rank";
                        let (_, found) = refusal(rank.sum(there, there, &plain));
                        assert!(found.starts_with(text) && found.contains("a rank of its own"), "{found}");
                    }
                }
                // The first of them has the devices agree.
                rank.goes_on();
            }
            let way = rank.context.device_way();
            assert_eq!(way, rank.exchanges.then_some(Ok(())));
        });
    }
}

#[test]
fn what_kernels_reach_is_taken() {
    for exchanges in [true, false] {
        troubled(2, exchanges, |rank| {
            let double = rank.double;
            let here = double.memory(0, BYTES);
            let [managed, pinned] =
                [Memory::Managed, Memory::Host].map(|memory| double.memory_of(memory, 0, BYTES));
            let pieces = double.mapped(0, 128, 4);
            let plain = Call { stream: Some(double.stream(0)), ..Call::default() };
            let on_device = Call { on_device: true, ..plain.clone() };
            for input in [here, managed, pinned, pieces, pieces + 64] {
                rank.sum(input, here, &plain).expect("kernels reach it");
                rank.sum(input, here, &on_device).expect("kernels reach it");
            }
            rank.sum(managed, managed, &plain).expect("it moves to the device");
            rank.sum(pinned, pinned, &on_device).expect("it is said to be reached");
            let host = [0u8; BYTES];
            let host = host.as_ptr().expose_provenance() as u64;
            let (status, text) = refusal(rank.sum(host, host, &on_device));
            assert_eq!(status, Status::InvalidArgument);
            assert!(text.starts_with("sendbuf (") && text.contains("not pinned"), "{text}");
            rank.goes_on();
        });
    }
}

/// GPUs reach all of it. The host reaches all of a buffer, whatever part of that is pinned.
#[test]
fn memory_that_is_pinned_piece_by_piece_is_taken() {
    for exchanges in [true, false] {
        troubled(2, exchanges, |rank| {
            let here = rank.double.memory(0, BYTES);
            let on_device = Call { stream: Some(rank.double.stream(0)), on_device: true, ..Call::default() };
            let buffer = [0u8; BYTES + 1];
            let pin = |range: Range<usize>| {
                let address = buffer[range.clone()].as_ptr().cast_mut();
                let _entered = rank.devices.enter(0).expect("a context");
                // SAFETY: the memory outlives the double's streams.
                unsafe { rank.devices.driver().register_host(address, range.len()) }.expect("it is pinned");
            };
            let start = buffer.as_ptr().expose_provenance() as u64;
            pin(0..100);
            pin(101..BYTES + 1);
            let (_, text) = refusal(rank.sum(start, here, &on_device));
            assert!(text.starts_with("sendbuf has 100 bytes left that are pinned"), "{text}");
            if !exchanges {
                rank.sum(start, here, &Call::default()).expect("the host reaches it");
            }
            pin(100..101);
            rank.sum(start, here, &on_device).expect("GPUs reach it");
            rank.goes_on();
            rank.double.drain();
        });
    }
}

#[test]
fn freed_memory_of_a_group_that_works_on_devices_is_not_taken_for_the_hosts() {
    troubled(2, true, |rank| {
        rank.goes_on();
        let (status, text) = refusal(rank.sum(16, 16, &Call::default()));
        assert_eq!(status, Status::InvalidArgument);
        assert!(text.starts_with("sendbuf (0x10) is neither memory that CUDA knows"), "{text}");
        rank.goes_on();
    });
}

/// It has no memory, whatever the pointers, streams and buffers are that it is called with.
#[test]
fn a_call_of_nothing_is_the_same_whichever_pointers_and_streams_ranks_give() {
    for exchanges in [true, false] {
        troubled(2, exchanges, |rank| {
            let own = rank.context.rank() as usize;
            let pointer = [rank.double.memory(0, BYTES), 0][own];
            let [plain, on_stream] =
                [None, Some(rank.double.stream(0))].map(|stream| Call { stream, ..Call::default() });
            for agreed in [false, true] {
                for kind in [Kind::Allreduce, Kind::Broadcast, Kind::Allgather, Kind::Gather] {
                    let nothing =
                        Request { counts: Counts::Uniform(0), ..rank.request(kind, pointer, pointer) };
                    for calls in [[&plain; 2], [&on_stream; 2], [&plain, &on_stream], [&on_stream, &plain]] {
                        // SAFETY: there is no memory.
                        let ended = unsafe { rank.context.run(&nothing, calls[own]) };
                        ended.unwrap_or_else(|error| panic!("agreed: {agreed}: {error}"));
                    }
                }
                let several = AlgorithmOptions {
                    kind: Kind::Allreduce,
                    algorithm: 0,
                    buffers: vec![std::ptr::null_mut(); 1 + own],
                    streams: Vec::new(),
                    count: 0,
                    dtype: DataType::U32,
                    operator: Operator::Sum,
                    root: 0,
                    root_buffer: 0,
                    call: Call::default(),
                };
                // SAFETY: as above.
                let object = unsafe { Prepared::new(rank.context, several) }.expect("an object");
                object.run().unwrap_or_else(|error| panic!("agreed: {agreed}: {error}"));
                rank.goes_on();
            }
        });
    }
}

// ---- several groups that agree side by side

/// Which of two groups fails, and when: before the devices of rank 0 are to agree, or while they do.
#[test]
fn a_group_that_fails_keeps_no_other_from_agreeing_beside_it() {
    for early in [true, false] {
        troubled(2, true, |rank| {
            let devices = rank.context.cuda().devices().expect("a driver").clone();
            let agree = |contexts: &[&Context]| {
                let contexts: Vec<_> = contexts.iter().map(|&context| (context, 0)).collect();
                meet(&contexts, || Ok(devices.clone()), choose, words)
            };
            let sound = rank.context.duplicate().expect("a child");
            // While it is made it would fail with its parent.
            captures::barrier(&sound);
            let agreed = match (rank.context.rank(), early) {
                (0, _) => {
                    if early {
                        rank.context.abort();
                    }
                    let error = agree(&[&sound, rank.context, &sound]).expect_err("one has failed");
                    assert_eq!(error.status(), Status::Aborted, "{error}");
                    Ok(())
                }
                (_, true) => agree(&[&sound]),
                (_, false) => {
                    // By then the other has begun; if not, the test finds less.
                    std::thread::sleep(Duration::from_millis(50));
                    rank.context.abort();
                    agree(&[&sound])
                }
            };
            agreed.expect("an agreement");
            assert_eq!(sound.device_way(), Some(Ok(())), "early: {early}");
        });
    }
}

/// The second of two calls cannot be begun: its group has failed, or its memory is too short.
#[test]
fn a_first_call_runs_on_though_one_that_starts_with_it_cannot_be_begun() {
    for has_failed in [true, false] {
        troubled(2, true, |rank| {
            let devices = rank.context.cuda().devices().expect("a driver").clone();
            let first = rank.context.duplicate().expect("a child");
            captures::barrier(&first);
            first.cuda().pretend(&devices, 256);
            first.cuda().pretend_loads(only(words));
            let [memory, short] = [BYTES, BYTES - 1].map(|bytes| rank.double.memory(0, bytes));
            let sum = |address| rank.request(Kind::Allreduce, address, address);
            let (good, bad) = (sum(memory), sum(if has_failed { memory } else { short }));
            let call = Call { stream: Some(rank.double.stream(0)), ..Call::default() };
            let mut calls = vec![(&first, &good, &call)];
            if rank.context.rank() == 0 {
                if has_failed {
                    rank.context.abort();
                }
                calls.push((rank.context, &bad, &call));
            }
            // SAFETY: the double trusts no address.
            let works = unsafe { start_together(&calls) };
            assert_eq!(works.is_err(), rank.context.rank() == 0, "the second is not begun");
            first.settle(Deadline::after(PATIENCE)).expect("both ranks have begun the first");
            assert_eq!(word(rank.double, memory), 1);
        });
    }
}

/// It is not made, so its number is the next call's.
#[test]
fn a_first_call_for_which_devices_cannot_agree_is_compared_with_no_other() {
    troubled(2, true, |rank| {
        let devices = rank.context.cuda().devices().expect("a driver").clone();
        let wrong = |_: &Devices, _: u32| -> Result<Chosen> { fail!(InvalidArgument, "it is no table") };
        let signature = Signature {
            kind: Kind::Allreduce,
            dtype: DataType::U32,
            operator: Operator::Sum.number(),
            algorithm: 0,
            root: 0,
            count: COUNT,
            device: true,
        };
        let first = Some(First { signature, timeout: None });
        let candidate = Candidate { context: rank.context, device: 0, first, points: true };
        let error = connect(&[candidate], || Ok(devices.clone()), wrong, only(words)).expect_err("no table");
        assert_eq!(error.status(), Status::InvalidArgument, "{error}");
        if rank.context.rank() == 1 {
            // By then the other has told what it calls now; if not, the test finds less.
            std::thread::sleep(Duration::from_millis(600));
        }
        captures::barrier(rank.context);
        assert_eq!(rank.context.failure(), None);
    });
}

// ---- a first call that some ranks do not make

/// The errors of all ranks, each of which tells a mismatch and holds `parts`.
fn mismatch(errors: Vec<Error>, parts: &[&str]) {
    for error in errors {
        assert_eq!(error.status(), Status::Mismatch, "{error}");
        assert!(parts.iter().all(|part| error.text().contains(part)), "{error}");
    }
}

#[test]
fn a_rank_with_host_memory_is_a_mismatch_that_names_both() {
    let errors = troubled(3, true, |rank| {
        let host = [0u8; BYTES];
        let memory = match rank.context.rank() {
            1 => host.as_ptr().expose_provenance() as u64,
            _ => rank.double.memory(0, BYTES),
        };
        let output = rank.double.memory_of(Memory::Host, 0, BYTES);
        let output = if rank.context.rank() == 1 { output } else { memory };
        rank.sum(memory, output, &Call::default()).expect_err("they differ")
    });
    mismatch(errors, &["rank 1 called allreduce(100 × uint32, sum)", "(100 × uint32, sum) on device memory"]);
}

#[test]
fn a_call_on_host_memory_that_nobody_waits_for_is_a_mismatch_too() {
    // The other rank goes on to a call on device memory, or does not.
    for goes_on in [false, true] {
        let errors = troubled(2, true, |rank| {
            let memory = rank.double.memory(0, BYTES);
            if rank.context.rank() == 0 {
                return rank.sum(memory, memory, &Call::default()).expect_err("they differ");
            }
            let mut host = [0u8; BYTES];
            let host = host.as_mut_ptr().expose_provenance() as u64;
            let request = Request { root: 1, ..rank.request(Kind::Broadcast, host, host) };
            // SAFETY: the buffer outlives the work, which is waited for.
            let work = unsafe { rank.context.start(&request, &Call::default()) }.expect("it starts");
            if goes_on {
                return rank.sum(memory, memory, &Call::default()).expect_err("they differ");
            }
            work.wait(Deadline::after(PATIENCE)).expect_err("they differ")
        });
        // Told by the offers, or by the calls.
        for error in &errors {
            let told = ["rank 1 something that is not on device", "rank 1 called broadcast(100"];
            assert!(told.iter().any(|text| error.text().contains(text)), "{error}");
        }
        mismatch(errors, &["call #0", "rank 0 called allreduce(100 × uint32, sum) on device memory"]);
    }
}

#[test]
fn kernels_of_different_calls_do_not_meet() {
    let errors = troubled(2, true, |rank| {
        rank.goes_on();
        let memory = rank.double.memory(0, BYTES);
        if rank.context.rank() == 0 {
            return rank.sum(memory, memory, &Call::default()).expect_err("they differ");
        }
        // A call that goes on by itself, and one that looks like the other rank's.
        let mut host = [0u8; BYTES];
        let host = host.as_mut_ptr().expose_provenance() as u64;
        let request = rank.request(Kind::Allreduce, host, host);
        // SAFETY: the buffer outlives the work, which is waited for.
        let work = unsafe { rank.context.start(&request, &Call::default()) }.expect("it starts");
        let error = rank.sum(memory, memory, &Call::default()).expect_err("they differ");
        work.wait(Deadline::after(PATIENCE)).expect_err("they differ");
        error
    });
    for error in &errors {
        let told = [
            "as its call #2; one has called",
            "as its call #1; one has called",
            "call #1 of 'default' differs",
        ];
        assert!(told.iter().any(|text| error.text().contains(text)), "{error}");
    }
    mismatch(errors, &["rank 0 ", "rank 1 ", "allreduce(100 × uint32, sum) on device memory"]);
}

#[test]
fn a_rank_that_does_not_come_is_named_in_time() {
    let started = Instant::now();
    let errors = troubled(3, true, |rank| {
        if rank.context.rank() == 2 {
            until("the news", || rank.context.failure().is_some());
            return rank.context.failure().expect("it has failed");
        }
        let memory = rank.double.memory(0, BYTES);
        let call = Call { timeout: Some(Duration::from_secs(2)), ..Call::default() };
        let error = rank.sum(memory, memory, &call).expect_err("rank 2 does not call");
        assert!(error.text().contains("allreduce #0 of 'default' (rank "), "{error}");
        let later = rank.sum(memory, memory, &call).expect_err("the group has failed");
        assert!(later.text().contains("has failed before"), "{later}");
        error
    });
    for error in errors {
        assert_eq!(error.status(), Status::Timeout, "{error}");
        for part in ["nothing from rank 2 (", "it has called nothing yet", "Look at rank 2"] {
            assert!(error.text().contains(part), "{error}");
        }
    }
    assert!(started.elapsed() < PATIENCE);
}
