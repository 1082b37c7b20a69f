//! Calls that fail or are refused: what is said, and that the stream goes on.

use std::sync::atomic::AtomicUsize;

use super::*;
use crate::cuda::double::Refusal;
use crate::cuda::driver::DeviceCalls;
use crate::cuda::event::Event;
use crate::cuda::joined;
use crate::transport::service::hold_service;

/// Elements of a short call.
const LEN: usize = 16;

/// Has every driver call of `call` fail on rank 0, one in `step`, one at a time: both ranks say
/// so, and their streams go on.
pub(super) fn failing_calls_are_named(
    transports: &str,
    step: usize,
    call: impl Fn(&Rank) -> Result<Work> + Sync,
) {
    for failing in (0..).step_by(step) {
        let met = Barrier::new(2);
        let outcomes = ranks(2, transports, Order::RoundRobin, |rank| {
            // Everybody is there before anything goes wrong.
            rank.run(&request(Kind::Barrier, 0, 0, 0, 0), &Call::default()).expect("a barrier");
            met.wait();
            if rank.rank == 0 {
                rank.double.fail_call(failing);
            }
            let result = call(rank).and_then(|work| work.wait(Deadline::after(PATIENCE)));
            if result.is_err() {
                assert!(rank.context.failure().is_some(), "the group has failed");
            }
            (result.err(), grave(rank.drain()))
        });
        let errors: Vec<Error> = outcomes.iter().filter_map(|(error, _)| error.clone()).collect();
        for (_, complaints) in outcomes {
            assert_eq!(complaints, Vec::<String>::new(), "call {failing}: {errors:?}");
        }
        if errors.is_empty() {
            assert!(failing > 50, "only {failing} calls");
            return;
        }
        for error in &errors {
            assert!(error.text().contains(" failed: CUDA_ERROR_INJECTED: "), "call {failing}: {error}");
            assert_eq!(error.status(), Status::Cuda);
        }
    }
}

#[test]
fn a_driver_call_that_fails_is_named_on_all_ranks() {
    failing_calls_are_named("shm", 1, |rank| exercise(rank, Kind::Allreduce, 201, false, 0));
}

/// Its stream goes on with what it had, when that is known. Else the failure of a message concerns its two
/// ends alone.
#[test]
fn a_message_that_nobody_follows_fails_its_context() {
    for couriers in [false, true] {
        let errors = ranks(2, "shm", Order::RoundRobin, |rank| {
            let start = Instant::now();
            if couriers {
                rank.copy_by_kernels();
            }
            if rank.rank == 0 {
                let output = rank.memory(&[0; LEN]);
                let call = Call { timeout: Some(Duration::from_millis(50)), ..rank.call() };
                let receive = request(Kind::Receive, 0, output, LEN as u64, 1);
                let event = Event::new(&rank.devices, 0).expect("an event");
                // The other rank does not answer why it does not send.
                let mut held = Some(hold_service());
                // SAFETY: the double trusts no addresses.
                unsafe { rank.context.launch(&receive, &call) }.expect("it is given to its stream");
                event.record(&rank.stream()).expect("it is recorded");
                while !event.query().expect("it can be asked") {
                    assert!(start.elapsed() < PATIENCE, "the stream hangs");
                    held.take_if(|_| start.elapsed() > Duration::from_millis(500));
                    std::thread::sleep(Duration::from_millis(1));
                }
                assert!(rank.context.failure().is_some(), "the stream goes on, couriers: {couriers}");
            }
            while rank.context.failure().is_none() && start.elapsed() < PATIENCE {
                rank.double.step();
                std::thread::sleep(Duration::from_millis(1));
            }
            rank.context.failure()
        });
        for error in errors {
            let error = error.expect("nobody sends");
            assert_eq!(error.status(), Status::Timeout, "{error}");
        }
    }
}

/// No stream is behind the copies of a call that its thread waits for.
/// As where its thread panics in the midst of a list.
#[test]
fn a_call_that_has_begun_and_is_never_closed_fails_its_context_on_all_ranks() {
    for couriers in [false, true] {
        for kind in [Kind::Allreduce, Kind::Send] {
            let met = Barrier::new(2);
            ranks(2, "shm", Order::RoundRobin, |rank| {
                // Everybody is there before anything goes wrong.
                met.wait();
                if couriers {
                    rank.copy_by_kernels();
                }
                let memory = rank.memory(&given(rank.rank, 0, 201));
                let kind = if kind == Kind::Send && rank.rank == 1 { Kind::Receive } else { kind };
                let request = request(kind, memory, memory, 201, 1 - rank.rank);
                let case = format!("{kind:?}, couriers: {couriers}");
                if rank.rank == 0 {
                    // It has not ended before it is dropped.
                    let gate = rank.gate();
                    // SAFETY: the double trusts no address, and keeps memory until it is dropped.
                    drop(unsafe { rank.context.begin(&request, &rank.call()) }.expect("it begins"));
                    gate.release();
                } else {
                    let work = rank.start(&request, &rank.call());
                    let ended = work.and_then(|work| work.wait(Deadline::after(PATIENCE)));
                    let error = ended.map(drop).expect_err("rank 0 has no part in it");
                    assert!(error.text().contains("was not made to wait"), "{case}: {error}");
                    assert!(error.text().contains("rank 0"), "{case}: {error}");
                }
                assert!(rank.context.failure().is_some(), "{case}");
                rank.fill(memory, &[-7; 201]);
                assert_eq!(grave(rank.drain()), Vec::<String>::new(), "{case}");
                assert!(
                    rank.double.peek(memory, 201 * 4) == bytes(&[-7; 201]),
                    "{case}: written after its end"
                );
            });
        }
    }
}

#[test]
fn memory_is_the_callers_again_when_a_call_that_its_thread_waits_for_has_failed() {
    let doubles = [(); 2].map(|()| with_queues(MOST, Order::RoundRobin));
    // What copies has one queue.
    doubles[1].share_queues(MOST, 1);
    let met = Barrier::new(2);
    let complaints = ranks_on(&doubles, "shm", |rank| {
        rank.completes.store(true, Ordering::Relaxed);
        exercise(rank, Kind::Broadcast, LEN, false, 0).expect("it ends well");
        assert_eq!(rank.drain(), Vec::<String>::new());
        let memory = rank.memory(&[0; LEN]);
        let broadcast = request(Kind::Broadcast, memory, memory, LEN as u64, 0);
        met.wait();
        if rank.rank == 0 {
            rank.fill(memory, &[7; LEN]);
            rank.start(&broadcast, &rank.call()).expect("it ends well");
            // By then the other has something to store; if not, the test finds less.
            std::thread::sleep(Duration::from_millis(50));
            rank.context.abort();
            met.wait();
            return rank.drain();
        }
        // The copies of the call come behind one that waits.
        let other = rank.double.stream(0);
        // SAFETY: it lives as long as the double.
        let stream = unsafe { Stream::borrow(&rank.devices, 0, other) }.expect("a stream");
        let gate = rank.devices.word(0).expect("a word");
        stream.wait_word(&gate).expect("it waits");
        rank.double.fill(other, 0, rank.memory(&[0]), &[0; 4]);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                met.wait();
                // The other hears of it, and its call ends.
                std::thread::sleep(Duration::from_millis(50));
                gate.release();
            });
            let error = rank.start(&broadcast, &rank.call()).err().expect("it is aborted");
            let then = rank.double.peek(memory, 4 * LEN);
            let complaints = rank.drain();
            assert!(rank.double.peek(memory, 4 * LEN) == then, "written after the end: {error}");
            complaints
        })
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}

/// A group of one copies on the stream, and what comes behind that may be refused.
#[test]
fn memory_is_the_callers_again_when_a_call_of_a_group_of_one_has_failed() {
    for failing in 0.. {
        let failed = ranks(1, "shm", Order::RoundRobin, |rank| {
            let (input, mut output) = ([7; LEN], [0; LEN]);
            let from = input.as_ptr().expose_provenance() as u64;
            let to = output.as_mut_ptr().expose_provenance() as u64;
            let gate = rank.gate();
            rank.double.fail_call(failing);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(20));
                    gate.release();
                });
                let failed =
                    rank.start(&request(Kind::Allreduce, from, to, LEN as u64, 0), &rank.call()).is_err();
                // SAFETY: the memory is there.
                let now = || unsafe { pointer(to).cast::<[i32; LEN]>().read_volatile() };
                let then = now();
                assert_eq!(grave(rank.drain()), Vec::<String>::new());
                assert!(!failed || now() == then, "written after call {failing} had been refused");
                failed || !rank.double.is_to_fail()
            })
        });
        if failed == [false] {
            assert!(failing > 5, "only {failing} calls");
            return;
        }
    }
}

/// Of one that has begun the stream still writes host memory, unless its owner is told that it will.
#[test]
fn host_memory_is_the_callers_again_when_the_work_of_a_group_of_one_has_failed() {
    for opens in [true, false] {
        ranks(1, "shm", Order::RoundRobin, |rank| {
            let (input, mut output) = ([7; LEN], [0; LEN]);
            let from = input.as_ptr().expose_provenance() as u64;
            let to = output.as_mut_ptr().expose_provenance() as u64;
            let gate = rank.gate();
            let work = rank
                .start(&request(Kind::Allreduce, from, to, LEN as u64, 0), &rank.call())
                .expect("it begins");
            // SAFETY: the memory is there.
            let now = || unsafe { pointer(to).cast::<[i32; LEN]>().read_volatile() };
            rank.context.abort();
            std::thread::scope(|scope| {
                if opens {
                    scope.spawn(|| {
                        std::thread::sleep(Duration::from_millis(20));
                        gate.release();
                    });
                }
                let error = work.wait(Deadline::after(PATIENCE)).expect_err("it is aborted");
                assert_eq!(error.status(), Status::Aborted, "{error}");
                assert_eq!(
                    error.text().contains("is written until call->stream is through"),
                    !opens,
                    "{error}"
                );
                let then = now();
                gate.release();
                assert_eq!(rank.drain(), Vec::<String>::new());
                assert!(!opens || now() == then, "written after the end");
            });
        });
    }
}

/// How a call ends that rank 1 does not make and that has so much time.
fn overdue(timeout: Duration) -> Error {
    let outcomes = ranks(2, "shm", Order::RoundRobin, |rank| {
        let mut answer = (None, Vec::new());
        if rank.rank == 0 {
            let values = given(0, 0, 201);
            let (input, output) = (rank.memory(&values), rank.memory(&values));
            rank.fill(input, &values);
            let call = Call { timeout: Some(timeout), ..rank.call() };
            let work =
                rank.start(&request(Kind::Allreduce, input, output, 201, 0), &call).expect("it starts");
            let error = work.wait(Deadline::after(PATIENCE)).expect_err("rank 1 does not call");
            answer = (Some(error), grave(rank.drain()));
        } else {
            let until = Instant::now() + PATIENCE;
            while rank.context.failure().is_none() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        answer
    });
    let (error, complaints) = &outcomes[0];
    assert_eq!(complaints, &Vec::<String>::new());
    error.clone().expect("it has failed")
}

#[test]
fn a_deadline_lets_the_stream_go_on() {
    // Where the machine is busy with something else, the own copies may be what is late.
    for milliseconds in [100, 1000, 10_000] {
        let error = overdue(Duration::from_millis(milliseconds));
        assert_eq!(error.status(), Status::Timeout);
        if error.text().contains("nothing from rank 1") {
            return;
        }
        assert!(error.text().contains("has not ended"), "{error}");
    }
    panic!("it never says for whom it waits");
}

#[test]
fn a_stream_that_comes_late_to_a_failed_call_goes_on_all_the_same() {
    let outcomes = ranks(2, "shm", Order::RoundRobin, |rank| {
        let values = given(rank.rank, 0, 201);
        let (input, output) = (rank.memory(&values), rank.memory(&values));
        let gate = rank.memory(&[0]);
        rank.fill(gate, &[0]);
        let devices = Devices::over(rank.double.clone()).unwrap();
        {
            let _entered = devices.enter(0).unwrap();
            // SAFETY: the double trusts nothing.
            unsafe { devices.driver().wait_value(rank.stream, gate, 1) }.unwrap();
        }
        rank.fill(input, &values);
        let call = Call { timeout: Some(Duration::from_millis(100)), ..rank.call() };
        // It may have ended on the other rank before it begins here.
        let result = rank.start(&request(Kind::Allreduce, input, output, 201, 0), &call);
        let result = result.and_then(|work| work.wait(Deadline::after(PATIENCE)));
        let error = result.expect_err("the streams do not come to it");
        assert!(!rank.double.is_idle(), "the stream is still waiting");
        let opener = rank.double.stream(0);
        rank.double.fill(opener, 0, gate, &1u32.to_ne_bytes());
        (error.status(), grave(rank.drain()))
    });
    for (status, complaints) in outcomes {
        assert_eq!((status, complaints), (Status::Timeout, Vec::<String>::new()));
    }
}

#[test]
fn ranks_that_differ_in_their_memory_are_told() {
    let errors = ranks(2, "shm", Order::RoundRobin, |rank| {
        let values = given(rank.rank, 0, 201);
        let mut host = values.clone();
        let address = match rank.rank {
            0 => rank.memory(&values),
            _ => host.as_mut_ptr().expose_provenance() as u64,
        };
        rank.run(&request(Kind::Allreduce, address, address, 201, 0), &Call::default())
            .expect_err("they differ")
    });
    for error in errors {
        assert_eq!(error.status(), Status::Mismatch);
        let [host, device] = ["allreduce(201 × int32, sum)", "allreduce(201 × int32, sum) on device memory"];
        assert!(error.text().contains(host) && error.text().contains(device), "{error}");
    }
}

/// As of objects over several device pointers, which have combined those.
#[test]
fn ranks_that_differ_in_the_number_of_buffers_that_they_average_over_are_told() {
    for numbers in [[2, 3], [0, 2]] {
        let errors = ranks(2, "shm", Order::RoundRobin, |rank| {
            let memory = rank.memory(&[0; LEN]);
            let sum = request(Kind::Allreduce, memory, memory, LEN as u64, 0);
            let call = |averaged| Call { averaged, ..Call::default() };
            rank.run(&sum, &call(2)).expect("they have equally many");
            rank.run(&sum, &call(numbers[rank.rank as usize])).expect_err("they differ")
        });
        for error in errors {
            assert_eq!(error.status(), Status::Mismatch, "{error}");
            for words in ["average over 2 buffers of each rank", "numbers of their buffers differ"] {
                assert!(error.text().contains(words), "{error}");
            }
        }
    }
}

/// A type, an operator, and how many pointers of it an algorithm object combines.
type Combined = (DataType, Operator, usize);

/// How runs of such objects end, one of either rank.
fn run_combined(objects: [Combined; 2]) -> Vec<Result<()>> {
    ranks(2, "shm", Order::RoundRobin, |rank| {
        rank.double.load_modules();
        let (dtype, operator, pointers) = objects[rank.rank as usize];
        let memory = [0, 1].map(|_| rank.memory(&[0; LEN]));
        let mut options =
            AlgorithmOptions { dtype, operator, ..algorithm(Kind::Allreduce, memory, &[], LEN) };
        options.buffers.truncate(pointers);
        rank.prepare(options).run()
    })
}

/// They are left with accumulators of one type, and a sum of them.
#[test]
fn ranks_that_have_combined_other_types_or_by_other_operators_are_told() {
    let [half, brain, float] =
        [DataType::F16, DataType::Bf16, DataType::F32].map(|dtype| (dtype, Operator::Sum, 2));
    let scaled = (DataType::F32, Operator::PreMulSum(2.0), 2);
    let average = |dtype| (dtype, Operator::Average, 2);
    let several = "over several buffers";
    let cases = [
        ([half, brain], [format!("float16, sum {several}"), format!("bfloat16, sum {several}")]),
        ([half, float], [format!("float16, sum {several}"), "float32, sum)".into()]),
        ([half, (float.0, float.1, 1)], [format!("float16, sum {several}"), "float32, sum)".into()]),
        ([scaled, float], [format!("premulsum {several}"), "float32, sum)".into()]),
        ([scaled, (float.0, float.1, 1)], [format!("premulsum {several}"), "float32, sum)".into()]),
        ([scaled, (scaled.0, scaled.1, 1)], [format!("premulsum {several}"), "scaled already".into()]),
        (
            [average(DataType::F16), average(DataType::Bf16)],
            [" float16, average", "bfloat16, average"].map(str::to_owned),
        ),
    ];
    for (objects, words) in cases {
        for result in run_combined(objects) {
            let error = result.expect_err("they differ");
            assert_eq!(error.status(), Status::Mismatch, "{error}");
            assert!(words.iter().all(|words| error.text().contains(words)), "{error}");
        }
    }
    // Scalars are each rank's own, and accumulators of whole floats are elements.
    let other = (DataType::F32, Operator::PreMulSum(3.0), 2);
    for objects in [[half; 2], [scaled, other], [float, (float.0, float.1, 1)], [average(DataType::F16); 2]] {
        assert_eq!(run_combined(objects), [Ok(()), Ok(())], "{objects:?}");
    }
}

#[test]
fn wrong_memory_and_wrong_streams_are_named() {
    ranks(2, "shm", Order::Eager, |rank| {
        let (here, there) = (rank.double.memory(0, 400), rank.double.memory(1, 400));
        let refused = |input, output, call: &Call| -> (Status, String) {
            let error = rank.run(&request(Kind::Allreduce, input, output, 100, 0), call).unwrap_err();
            (error.status(), error.text().to_owned())
        };
        let argument = |text: &str| (Status::InvalidArgument, text.to_owned());
        assert_eq!(
            refused(here, there, &Call::default()),
            argument("sendbuf is memory of GPU 0, but recvbuf of GPU 1: buffers of a call share a device")
        );
        assert_eq!(
            refused(there, there, &rank.call()),
            argument("call->stream is a stream of GPU 0, but sendbuf is memory of GPU 1")
        );
        assert_eq!(
            refused(here, rank.double.memory(0, 399), &Call::default()),
            argument("recvbuf has 399 bytes left in its allocation, but 400 are needed")
        );
        let (status, text) = refused(16, here, &Call::default());
        assert_eq!(status, Status::InvalidArgument);
        assert!(text.starts_with("sendbuf (0x10) is neither memory that CUDA knows nor"), "{text}");
        let own = rank.double.make_context(0);
        let call = Call { stream: Some(rank.double.stream_of(own, false)), ..Call::default() };
        let (status, text) = refused(here, here, &call);
        assert_eq!(status, Status::InvalidArgument);
        assert!(text.starts_with("the stream is of a context that the program has made on GPU 0"), "{text}");
        // SAFETY: it lives as long as the double.
        unsafe { rank.double.push_context(own) }.expect("it is there");
        for call in [Call::default(), Call { stream: Some(StreamHandle::LEGACY), ..Call::default() }] {
            let (status, text) = refused(here, here, &call);
            assert_eq!(status, Status::InvalidArgument);
            assert!(text.starts_with("this thread's context on GPU 0 is one that the program"), "{text}");
        }
        // SAFETY: pushed above.
        unsafe { rank.double.pop_context() }.expect("what was pushed");
        rank.double.begin_capture(rank.stream, 0);
        let (status, text) = refused(here, here, &rank.call());
        assert_eq!(status, Status::InvalidUsage);
        assert_eq!(text, "call->stream is being captured: a call by way of the host cannot be captured");
        assert!(rank.double.end_capture(rank.stream, 0).is_ok(), "the capture is still good");
        // Nothing has begun: the group still works.
        exercise(rank, Kind::Allreduce, 201, true, 0)
            .and_then(|work| work.wait(Deadline::after(PATIENCE)))
            .expect("it ends well");
        assert_eq!(rank.drain(), Vec::<String>::new());
    });
}

/// More driver calls than a run makes before that between the ranks.
const FIRST: usize = 24;

/// What is wrong with it is this rank's program's alone, also when the driver has ended the capture for it.
#[test]
fn a_run_one_of_whose_streams_is_captured_concerns_no_other() {
    let failures = failures_of_runs(Kind::Allgather, |rank, object, [_, output]| {
        rank.double.begin_capture(output, 0);
        // The second time the capture is what the first has made of it.
        for _ in 0..2 {
            object.start().map(drop).expect_err("its input is not captured");
        }
        drop(rank.double.end_capture(output, 0));
    });
    assert_eq!(failures, [None, None]);
}

/// It is no call, and will be none. Two pointers, which are combined before.
#[test]
fn a_run_that_the_driver_refuses_in_a_capture_concerns_no_other() {
    let failures = failures_of_runs(Kind::Allreduce, |rank, object, streams| {
        // SAFETY: they live as long as the double.
        let [first, second] = streams.map(|it| unsafe { Stream::borrow(&rank.devices, 0, it) }.unwrap());
        // The last is never called: what the driver refuses by itself ends the capture, too.
        for call in ["cuEventRecord", "cuStreamWaitEvent", "cuNothing"] {
            rank.double.begin_capture(streams[0], 0);
            joined::gather(&second, std::slice::from_ref(&first)).expect("the second joins it");
            rank.double.refuse(Refusal { call: Some(call), ..Refusal::default() });
            let error = object.start().map(drop).expect_err("it is refused");
            assert_eq!(error.status(), Status::Cuda, "{call}: {error}");
            rank.double.fail_call(usize::MAX);
            drop(rank.double.end_capture(streams[0], 0));
        }
    });
    assert_eq!(failures, [None, None]);
}

/// Has each of two ranks do something with an algorithm object over an input and an output, or two pointers,
/// with a stream for each.
fn with_runs<T: Send>(kind: Kind, body: impl Fn(&Rank, &Prepared, [StreamHandle; 2]) -> T + Sync) -> Vec<T> {
    let met = Barrier::new(2);
    ranks(2, "tcp", Order::RoundRobin, |rank| {
        rank.double.load_modules();
        let pointers = [1, 2].map(|blocks| rank.memory(&vec![0; blocks * LEN]));
        let streams = [rank.stream, rank.double.stream(0)];
        let object = rank.prepare(algorithm(kind, pointers, &streams, LEN));
        // Nobody fails it while others still meet.
        met.wait();
        body(rank, &object, streams)
    })
}

/// Has rank 0 run one, and the other do nothing. How the group has failed on each of them.
fn failures_of_runs(
    kind: Kind,
    run: impl Fn(&Rank, &Prepared, [StreamHandle; 2]) + Sync,
) -> Vec<Option<Error>> {
    let met = Barrier::new(2);
    with_runs(kind, |rank, object, streams| {
        if rank.rank == 0 {
            run(rank, object, streams);
        }
        met.wait();
        let failure = rank.context.failure();
        met.wait();
        failure
    })
}

/// What comes before the call between the ranks counts as that: the others would wait for it.
#[test]
fn a_run_that_the_driver_keeps_a_rank_from_fails_for_all() {
    // An input and an output on a stream each; two pointers, which are combined before.
    for (kind, least) in [(Kind::Allgather, 4), (Kind::Allreduce, 4)] {
        for status in [Status::Cuda, Status::OutOfMemory] {
            let refused = AtomicUsize::new(0);
            // Some of these are behind the call: for what the input's stream is given next, and for whoever
            // waits for the run.
            let records = (0..8).map(|after| (after, Some("cuEventRecord")));
            for (after, call) in (0..FIRST).map(|after| (after, None)).chain(records) {
                with_runs(kind, |rank, object, _| {
                    if rank.rank == 1 {
                        let start = Instant::now();
                        while rank.context.failure().is_none() {
                            assert!(start.elapsed() < PATIENCE, "rank 0 fails it at last");
                            std::thread::sleep(Duration::from_millis(1));
                        }
                        return;
                    }
                    rank.double.refuse(Refusal { after, status, call, ..Refusal::default() });
                    let started = object.start();
                    rank.double.fail_call(usize::MAX);
                    let is_told = rank.context.failure().is_some();
                    rank.context.abort();
                    if let Err(error) = started {
                        assert_eq!(error.status(), status, "{error}");
                        assert!(is_told, "{kind:?}, call {after} {call:?} was refused: {error}");
                        refused.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            let refused = refused.into_inner();
            assert!(refused >= least, "{kind:?}, {status:?}: {refused} were refused");
        }
    }
}
