//! Calls without a stream, on host memory, and seen from other streams.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicU32;
use std::sync::mpsc;

use super::*;
use crate::schedule::Algorithm;

#[test]
fn without_a_stream_the_result_is_there_on_return() {
    for order in [Order::Eager, Order::RoundRobin, Order::Backward] {
        let complaints = ranks(2, "shm", order, |rank| {
            for round in 0..3 {
                let values = given(rank.rank, round, 201);
                let (input, output) = (rank.memory(&values), rank.memory(&values));
                // The caller's work on its default stream comes first.
                rank.double.fill(StreamHandle::NULL, 0, input, &bytes(&values));
                let sum = request(Kind::Allreduce, input, output, 201, 0);
                if round == 1 {
                    let work = rank.start(&sum, &Call::default()).expect("it starts");
                    work.wait(Deadline::after(PATIENCE)).expect("it ends well");
                } else {
                    rank.run(&sum, &Call::default()).expect("it ends well");
                }
                let due = bytes(&expected(Kind::Allreduce, 201, 2, rank.rank, 0, round));
                assert_eq!(rank.double.peek(output, due.len()), due);
            }
            rank.drain()
        });
        assert_eq!(complaints.concat(), Vec::<String>::new(), "{order:?}");
    }
}

#[test]
fn host_memory_and_barriers_are_ordered_on_streams() {
    for order in [Order::Eager, Order::RoundRobin, Order::Last(0)] {
        let complaints = ranks(2, "shm", order, |rank| {
            // One side on the host, one on the device: every rank another.
            let values = given(rank.rank, 0, 201);
            let mut host = vec![0; 201];
            let device = rank.memory(&values);
            rank.fill(device, &values);
            let out = host.as_mut_ptr().expose_provenance() as u64;
            let work = rank.start(&request(Kind::Allreduce, device, out, 201, 0), &rank.call());
            work.expect("it starts").wait(Deadline::after(PATIENCE)).expect("it ends well");
            assert_eq!(host, expected(Kind::Allreduce, 201, 2, rank.rank, 0, 0));
            // Both on the host; the other rank makes an ordinary call.
            let mut sum = given(rank.rank, 1, 201);
            let address = sum.as_mut_ptr().expose_provenance() as u64;
            let call = if rank.rank == 0 { rank.call() } else { Call::default() };
            rank.run(&request(Kind::Allreduce, address, address, 201, 0), &call).expect("it ends well");
            assert_eq!(sum, expected(Kind::Allreduce, 201, 2, rank.rank, 0, 1));
            // A barrier tells the others when the stream has come to it.
            let flag = rank.memory(&[0]);
            rank.fill(flag, &[0]);
            let work = rank.start(&request(Kind::Barrier, 0, 0, 0, 0), &rank.call()).expect("it starts");
            rank.fill(flag, &[1]);
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
            rank.drain()
        });
        assert_eq!(complaints.concat(), Vec::<String>::new(), "{order:?}");
    }
}

#[test]
fn other_streams_and_callbacks_wait_for_a_work() {
    for order in Order::all(4) {
        let complaints = ranks(2, "shm", order, |rank| {
            let other = rank.double.stream(0);
            let values = given(rank.rank, 0, 201);
            let (input, output) = (rank.memory(&values), rank.memory(&values));
            rank.fill(input, &values);
            let sum = request(Kind::Allreduce, input, output, 201, 0);
            let work = rank.start(&sum, &rank.call()).expect("it starts");
            let called = Arc::new(AtomicU32::new(0));
            let counted = called.clone();
            work.on_complete(Box::new(move |result| {
                assert!(result.is_ok());
                counted.fetch_add(1, Ordering::SeqCst);
            }));
            // SAFETY: the double trusts no handle.
            unsafe { work.block_stream(other) }.expect("it waits");
            let due = bytes(&expected(Kind::Allreduce, 201, 2, rank.rank, 0, 0));
            rank.double.expect(other, 0, output, &due, "before the work was done");
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
            let complaints = rank.drain();
            assert_eq!(called.load(Ordering::SeqCst), 1);
            complaints
        });
        assert_eq!(complaints.concat(), Vec::<String>::new(), "{order:?}");
    }
}

#[test]
fn streams_that_cannot_wait_for_the_host_have_the_host_wait() {
    let complaints = ranks(2, "shm", Order::RoundRobin, |rank| {
        rank.double.forbid_wait_value();
        for (round, kind) in COLLECTIVES.into_iter().enumerate() {
            exercise(rank, kind, 201, round % 2 == 0, round as u32).expect("it ends well");
        }
        assert_eq!(rank.double.values(), 0);
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}

#[test]
fn a_run_over_several_pointers_is_complete_when_the_host_is_done_too() {
    const COUNT: usize = 100_000;
    let called = Barrier::new(2);
    let complaints = ranks(2, "shm", Order::RoundRobin, |rank| {
        rank.copy_by_kernels();
        rank.context.cuda().pretend(&rank.devices, 8 * COUNT);
        let values = given(0, 1, COUNT);
        let memory = [0, 1].map(|_| rank.memory(&values));
        let streams = [rank.stream, rank.double.stream(0)];
        let options = AlgorithmOptions {
            algorithm: Algorithm::OneToAll as i32,
            ..algorithm(Kind::Broadcast, memory, &streams, COUNT)
        };
        let broadcast = rank.prepare(options);
        if rank.rank == 0 {
            rank.fill(memory[0], &values);
            let work = broadcast.start().expect("it starts");
            // The root's streams have read what it sends, which nobody has taken.
            let complaints = rank.drain();
            let early = work.test();
            called.wait();
            assert!(early.is_none() && complaints.is_empty(), "{early:?}, {complaints:?}");
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
        } else {
            called.wait();
            broadcast.run().expect("it is given");
        }
        for (stream, memory) in streams.into_iter().zip(memory) {
            rank.double.expect(stream, 0, memory, &bytes(&values), "broadcast");
        }
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}

/// Nobody looks at what its pointers are.
#[test]
fn a_run_over_nothing_with_streams_is_given_to_them() {
    let met = Barrier::new(2);
    let complaints = ranks(2, "shm,tcp", Order::RoundRobin, |rank| {
        rank.copy_by_kernels();
        let second = rank.double.stream(0);
        let one = AlgorithmOptions {
            buffers: vec![std::ptr::null_mut()],
            streams: vec![rank.stream],
            ..algorithm(Kind::Allreduce, [0; 2], &[], 0)
        };
        // Of several short floats each, also beside a rank that gives no streams.
        let streams: &[StreamHandle] = if rank.rank == 0 { &[rank.stream, second] } else { &[] };
        let mixed =
            AlgorithmOptions { dtype: DataType::F16, ..algorithm(Kind::Allreduce, [0; 2], streams, 0) };
        // The second is the output's.
        let apart = algorithm(Kind::Allgather, [8, 16], &[second, rank.stream], 0);
        let mut wrong = Vec::new();
        for (name, options) in [("one", one), ("mixed", mixed), ("apart", apart)] {
            let object = rank.prepare(options);
            let ended = if rank.rank == 0 {
                let gate = rank.gate();
                let given = object.run();
                met.wait();
                // The other looks whether it ends.
                met.wait();
                gate.release();
                given
            } else {
                met.wait();
                let work = object.start();
                std::thread::sleep(Duration::from_millis(20));
                let early = work.as_ref().ok().and_then(Work::test);
                wrong.extend(early.map(|early| format!("{name} ended before rank 0's stream: {early:?}")));
                met.wait();
                work.and_then(|work| work.wait(Deadline::after(PATIENCE))).map(drop)
            };
            wrong.extend(ended.err().map(|error| format!("{name} on rank {}: {error}", rank.rank)));
        }
        wrong.extend(rank.drain());
        wrong
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}

#[test]
fn a_run_without_streams_that_fails_has_done_with_its_pointers() {
    let met = Barrier::new(2);
    let complaints = ranks(2, "shm", Order::RoundRobin, |rank| {
        let memory = [0, 1].map(|device| rank.double.memory(device, 400));
        let options = AlgorithmOptions {
            algorithm: Algorithm::OneToAll as i32,
            root: rank.rank,
            // Of the other device: what is local comes before the call between the ranks.
            root_buffer: 1,
            ..algorithm(Kind::Broadcast, memory, &[], 100)
        };
        let broadcast = rank.prepare(options);
        // What is local comes after what the default stream was given before.
        let gate = rank.gate_default(1);
        met.wait();
        rank.context.abort();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(50));
                gate.release();
            });
            broadcast.run().expect_err("the group has failed");
            memory.into_iter().for_each(|memory| rank.double.free(memory));
        });
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}

#[test]
fn an_algorithm_without_streams_has_done_with_its_pointers_when_it_ends() {
    let met = Barrier::new(2);
    let complaints = ranks(2, "shm", Order::RoundRobin, |rank| {
        if rank.rank == 0 {
            met.wait();
            return Vec::new();
        }
        let memory = [0, 1].map(|device| rank.double.memory(device, 400));
        let options = AlgorithmOptions {
            algorithm: Algorithm::OneToAll as i32,
            // Rank 0 does not call: what is local comes behind what it would send.
            ..algorithm(Kind::Broadcast, memory, &[], 100)
        };
        let broadcast = rank.prepare(options);
        let gate = rank.gate_default(1);
        let work = broadcast.start().expect("it starts");
        met.wait();
        rank.context.abort();
        work.wait(Deadline::after(PATIENCE)).expect_err("the group has failed");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(50));
                gate.release();
            });
            drop(broadcast);
            memory.into_iter().for_each(|memory| rank.double.free(memory));
        });
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}

/// The call between the ranks is the first stream's, and ends well; the second does not come to its copy.
#[test]
fn a_run_one_of_whose_streams_is_held_up_ends_at_its_deadline() {
    const TIMEOUT: Duration = Duration::from_secs(2);
    let met = Barrier::new(2);
    let complaints = ranks(2, "shm", Order::RoundRobin, |rank| {
        rank.copy_by_kernels();
        let memory = [0, 1].map(|_| rank.memory(&given(0, 0, 100)));
        let streams = [rank.stream, rank.double.stream(0)];
        let is_root = rank.rank == 0;
        let options = AlgorithmOptions {
            algorithm: Algorithm::OneToAll as i32,
            call: Call { timeout: (!is_root).then_some(TIMEOUT), ..Call::default() },
            ..algorithm(Kind::Broadcast, memory, &streams, 100)
        };
        let broadcast = rank.prepare(options);
        if is_root {
            let work = broadcast.start().expect("it starts");
            met.wait();
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
        } else {
            let gate = rank.devices.word(0).expect("a word");
            // SAFETY: it lives as long as the double.
            let second = unsafe { Stream::borrow(&rank.devices, 0, streams[1]) }.expect("a stream");
            second.wait_word(&gate).expect("it waits");
            met.wait();
            let start = Instant::now();
            let work = broadcast.start().expect("it starts");
            let ended = work.wait(Deadline::after(PATIENCE / 4));
            let took = start.elapsed();
            let failure = rank.context.failure();
            gate.release();
            let error = ended.expect_err("its second stream is not through with it");
            assert_eq!(error.status(), Status::Timeout, "{error}");
            assert!(error.text().contains("are not through with its run"), "{error}");
            assert!(took >= TIMEOUT, "{took:?}");
            assert_eq!(failure, None, "it is this rank's alone");
        }
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}

/// Makes calls when its thread ends.
struct Late {
    rank: Rank,
    went_well: mpsc::Sender<bool>,
}

impl Late {
    fn call(&self, round: u32) {
        for work in exchange(&self.rank, &self.rank.context, round) {
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
        }
    }
}

impl Drop for Late {
    fn drop(&mut self) {
        let called = catch_unwind(AssertUnwindSafe(|| self.call(1)));
        self.went_well.send(called.is_ok()).expect("the test listens");
    }
}

thread_local! {
    static LATE: Cell<Option<Late>> = const { Cell::new(None) };
}

#[test]
fn destructors_of_a_thread_make_calls_that_belong_together() {
    let complaints = ranks(2, "shm", Order::RoundRobin, |rank| {
        let (went_well, told) = mpsc::channel();
        let own = Rank {
            context: rank.context.clone(),
            double: rank.double.clone(),
            devices: rank.devices.clone(),
            completes: AtomicBool::new(false),
            ..*rank
        };
        let late = Late { rank: own, went_well };
        let thread = std::thread::spawn(|| {
            // The first thread-local of this thread that has a destructor, which so is the last to run.
            LATE.set(None);
            late.call(0);
            LATE.set(Some(late));
        });
        thread.join().expect("no panic");
        assert!(told.recv_timeout(PATIENCE).expect("the destructor has run"));
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}
