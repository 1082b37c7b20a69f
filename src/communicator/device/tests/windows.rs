//! Memory in windows.

use super::leaving::{behind_a_gate, while_closed};
use super::stages::by_stages;
use super::*;
use crate::communicator::Window;

/// An allgather of so many bytes of each rank.
pub(super) fn allgather(context: &Context, count: u64, input: u64, output: u64) -> OnDevices {
    let (group, exchange) = exchange(context);
    let (kind, dtype, operator) = (Kind::Allgather, DataType::U8, Operator::Sum);
    let job = Job { kind, input, output, count, dtype, operator, root: 0, max_blocks: 0 };
    let signature = Signature { kind, dtype, operator: 0, algorithm: 0, root: 0, count, device: true };
    let caller = Caller { stream: None, timeout: Some(PATIENCE), memory: "buffer" };
    OnDevices { group, exchange, caller, what: What::Collective(job, signature) }
}

/// Captures a call. What launches it, on the stream on which it was captured.
fn captured(double: &Double, device: u32, mut call: OnDevices) -> impl Fn() {
    let stream = double.stream(device);
    call.caller.stream = Some(stream);
    double.begin_capture(stream, device);
    // SAFETY: the double trusts no addresses.
    unsafe { call.enqueue() }.expect("it is captured");
    let graph = double.end_capture(stream, device).expect("a graph");
    move || double.launch_graph(&graph, stream, device)
}

/// Registers `bytes` from `address` on with all ranks.
pub(super) fn window(context: &Context, address: u64, bytes: u64) -> Result<Window> {
    context.register_at(&exchange(context).1, Ok((address, bytes)))
}

pub(super) const MIB: u64 = 1 << 20;

#[test]
fn outputs_in_windows_are_written_by_the_other_ranks() {
    let check = |seats: &[Seat]| {
        ranks(seats, words, |context, (double, _, device)| {
            // A window in the midst of an allocation, and an output in the midst of a window; others on each
            // rank.
            let skew = 64 * u64::from(context.rank() + 1);
            let memory = double.memory(*device, 5 * MIB as usize);
            let served = window(context, memory + skew, 4 * MIB).expect("a window");
            assert!(served.serves());
            let output = memory + 2 * skew;
            let gathered = |output: u64, count: u64| {
                run(&allgather(context, count, memory, output)).expect("an allgather");
                [0, 1, 2].map(|rank| word(double, output + 4 * rank))
            };
            assert_eq!(gathered(output, MIB), [1000, 1001, 1002]);
            // What is short, or ends outside, is staged: then the double writes how often the ranks have met.
            assert_eq!(gathered(output, 100)[0], 2);
            assert_eq!(gathered(output, 4 * MIB / 3 + 1)[0], 3);
            drop(served);
            assert_eq!(gathered(output, MIB)[0], 4);
            assert_eq!(double.complaints(), Vec::<String>::new());
        });
    };
    check(&processes(3));
    let (double, devices) = process(3);
    let seats: Vec<Seat> = (0..3).map(|device| (double.clone(), devices.clone(), device)).collect();
    check(&seats);
}

#[test]
fn a_window_that_ends_under_a_replay_stays_mapped() {
    ranks(&processes(2), words, |context, (double, _, device)| {
        let memory = double.memory(*device, 5 * MIB as usize);
        let served = window(context, memory, 4 * MIB).expect("a window");
        let launch = captured(double, *device, allgather(context, MIB, memory, memory));
        if context.rank() == 0 {
            launch();
            let mapped = double.mapped_memory();
            drop(served);
            // The other rank has launched nothing yet, so it cannot be done.
            assert_eq!(double.mapped_memory(), mapped);
            captures::barrier(context);
        } else {
            captures::barrier(context);
            launch();
        }
        context.settle(Deadline::after(PATIENCE)).expect("both have launched");
        assert_eq!(double.complaints(), Vec::<String>::new());
    });
}

/// No call comes after it. Its rank is busy for longer than the library looks at nothing.
#[test]
fn a_window_that_ended_under_a_replay_is_unmapped_behind_it() {
    ranks(&processes(2), words, |context, (double, _, device)| {
        let memory = double.memory(*device, 5 * MIB as usize);
        let before = double.mapped_memory();
        let served = window(context, memory, 4 * MIB).expect("a window");
        assert!(double.mapped_memory() > before);
        let launch = captured(double, *device, allgather(context, MIB, memory, memory));
        if context.rank() == 0 {
            launch();
            drop(served);
            std::thread::sleep(Duration::from_millis(1500));
            assert!(double.mapped_memory() > before, "it is in use");
            captures::barrier(context);
        } else {
            captures::barrier(context);
            launch();
            drop(served);
        }
        context.settle(Deadline::after(PATIENCE)).expect("both have launched");
        until("the window is unmapped", || double.mapped_memory() == before);
        assert_eq!(double.complaints(), Vec::<String>::new());
    });
}

/// Kernels that find all that they wait for do not ask the host whether to go on: what a stream comes to
/// after a failure would still write into the windows of ranks that have been told of it.
#[test]
fn a_failure_sets_the_latch_of_kernels_that_write_into_windows() {
    let ready = std::sync::Barrier::new(2);
    ranks(&processes(2), words, |context, (double, _, device)| {
        let memory = double.memory(*device, 5 * MIB as usize);
        let _window = window(context, memory, 4 * MIB).expect("a window");
        let (_, exchange) = exchange(context);
        assert_eq!(word(double, exchange.latch_address()), 0);
        ready.wait();
        if context.rank() == 0 {
            context.abort();
        }
        until("the latch", || word(double, exchange.latch_address()) == 1);
    });
}

/// The driver waits for all that the device was given before it ends a mapping: kernels of another group
/// among it, which whoever ends this one may be about to end.
#[test]
fn windows_of_a_group_that_has_failed_are_ended_without_waiting_for_the_device() {
    ranks(&processes(2), words, |context, (double, devices, device)| {
        let window = window(context, double.memory(*device, MIB as usize), MIB).expect("a window");
        captures::barrier(context);
        let (_, _, gate) = behind_a_gate(double, devices);
        double.hold_lock(Waiting::All, PATIENCE);
        context.abort();
        let is_late = while_closed(&gate, || {
            let start = Instant::now();
            drop(window);
            start.elapsed() > PATIENCE / 8
        });
        assert!(!is_late, "it waits for the gate");
    });
}

/// So would those of broadcasts by stages read what the root of the same process has back.
#[test]
fn a_failure_sets_the_latch_of_kernels_of_one_process() {
    let (double, devices) = process(2);
    let seats: Vec<Seat> = (0..2).map(|device| (double.clone(), devices.clone(), device)).collect();
    ranks(&seats, words, |context, (double, _, device)| {
        let output = double.memory(*device, 8);
        // The double's kernels leave the number of a call there.
        for _ in 0..2 {
            run(&by_stages(context, output, 0)).expect("a broadcast");
        }
        let (_, exchange) = exchange(context);
        assert_ne!(word(double, exchange.latch_address()), 1);
        captures::barrier(context);
        if context.rank() == 0 {
            context.abort();
        }
        until("the latch", || word(double, exchange.latch_address()) == 1);
    });
}

#[test]
fn a_reduction_in_windows_has_all_that_it_shares_there() {
    ranks(&processes(2), words, |context, (double, _, device)| {
        let memory = double.memory(*device, 40 * MIB as usize);
        let (inside, outside) = (memory, memory + 20 * MIB);
        let _window = window(context, inside, 18 * MIB).expect("a window");
        let (group, exchange) = exchange(context);
        let result = |kind, input, output| {
            let (count, dtype, operator) = (8 * MIB / 4, DataType::F32, Operator::Sum);
            let job = Job { kind, input, output, count, dtype, operator, root: 0, max_blocks: 0 };
            let signature =
                Signature { kind, dtype, operator: 0, algorithm: 0, root: 0, count, device: true };
            let caller = Caller { stream: None, timeout: Some(PATIENCE), memory: "buffer" };
            let what = What::Collective(job, signature);
            run(&OnDevices { group: group.clone(), exchange: exchange.clone(), caller, what })
                .expect("a call");
            word(double, output)
        };
        // What is staged has the number of the call.
        assert_eq!(result(Kind::Allreduce, inside, inside + 9 * MIB), 1000);
        assert_eq!(result(Kind::Allreduce, inside, inside), 1000);
        assert_eq!(result(Kind::Allreduce, inside, outside), 3);
        assert_eq!(result(Kind::Allreduce, outside, inside), 4);
        // Here the output is the rank's own.
        assert_eq!(result(Kind::ReduceScatter, inside, outside), 1000);
        assert_eq!(result(Kind::ReduceScatter, outside, inside), 6);
        assert_eq!(result(Kind::Reduce, inside, inside), 7);
        assert_eq!(double.complaints(), Vec::<String>::new());
    });
}

#[test]
fn windows_of_several_threads_are_registered_one_by_one() {
    ranks(&processes(2), words, |context, (double, _, device)| {
        for round in 0..20 {
            let memory = [0, 1].map(|_| double.memory(*device, 4 * MIB as usize));
            let windows = std::thread::scope(|scope| {
                // Each rank in another order.
                let first = (context.rank() as usize + round) % 2;
                let register = |memory: u64| scope.spawn(move || window(context, memory, 4 * MIB));
                let threads = [memory[first], memory[1 - first]].map(register);
                threads.map(|thread| thread.join().expect("no panic").expect("a window"))
            });
            assert!(windows.iter().all(Window::serves));
            for output in memory {
                run(&allgather(context, 2 * MIB, output, output)).expect("an allgather");
                assert_eq!([0, 1].map(|rank| word(double, output + 4 * rank)), [1000, 1001]);
            }
        }
        assert_eq!(double.complaints(), Vec::<String>::new());
    });
}

#[test]
fn windows_serve_all_ranks_or_none() {
    let (double, devices) = process(2);
    // No memory that peers map; arenas need none in one process.
    double.forbid_sharing();
    let seats: Vec<Seat> = (0..2).map(|device| (double.clone(), devices.clone(), device)).collect();
    ranks(&seats, words, |context, (double, _, device)| {
        let memory = double.memory(*device, MIB as usize);
        assert!(!window(context, memory, MIB).expect("a window").serves());
    });
    ranks(&processes(2), words, |context, (double, _, device)| {
        let memory = double.memory(*device, 100);
        let error = window(context, memory, 101).unwrap_err();
        assert_eq!(error.status(), Status::InvalidArgument);
        assert!(error.text().contains("has 100 bytes left in its allocation, but 101 are needed"), "{error}");
        let error = window(context, 4096, 1).unwrap_err();
        assert!(error.text().contains("no device memory"), "{error}");
        for (address, bytes) in [(0, 1), (memory, 0), (memory, u64::MAX)] {
            let error = context.register_window(address, bytes).unwrap_err();
            assert_eq!(error.status(), Status::InvalidArgument, "{error}");
        }
    });
}

#[test]
fn a_rank_that_splits_where_another_makes_a_window_is_told_of_both() {
    let errors = ranks(&processes(2), words, |context, (double, _, device)| {
        let memory = double.memory(*device, MIB as usize);
        match context.rank() {
            0 => window(context, memory, MIB).map(drop).expect_err("rank 1 makes none"),
            _ => context.split(Some(0), 0).map(drop).expect_err("rank 0 does not split"),
        }
    });
    for error in errors {
        assert_eq!(error.status(), Status::Mismatch, "{error}");
        assert!(error.text().contains("called register_window()"), "{error}");
        assert!(error.text().contains("called split()"), "{error}");
    }
}

/// What comes of a window on each rank, where only that of rank 1 is refused, for this reason.
#[track_caller]
fn check_refusal(results: Vec<Result<Window>>, why: &str) {
    for (rank, result) in results.into_iter().enumerate() {
        let error = result.expect_err("it is refused on all ranks");
        assert_eq!(error.status(), Status::InvalidArgument, "{error}");
        assert!(error.text().contains(why), "{error}");
        let names_it = error.text().contains("rank 1 ");
        assert_eq!(names_it, rank != 1, "{error}");
    }
}

#[test]
fn a_window_that_one_rank_refuses_is_an_error_on_all_at_once() {
    let begun = Instant::now();
    let seats = processes(3);
    /// What rank 1 gives, and why it is refused; of its memory.
    type Refusal = fn(u64) -> (u64, u64, &'static str);
    let refusals: [Refusal; 5] = [
        |_| (0, 1, "1 bytes from 0x0 on are none"),
        |memory| (memory, 0, "0 bytes from"),
        |memory| (memory, u64::MAX, "end beyond the address space"),
        |_| (4096, 1, "0x1000 is no device memory"),
        |memory| (memory, MIB + 1, "has 1048576 bytes left in its allocation"),
    ];
    for refusal in refusals {
        let results = ranks(&seats, words, |context, (double, devices, device)| {
            context.cuda().pretend(devices, 1 << 12);
            let memory = double.memory(*device, MIB as usize);
            let given = if context.rank() == 1 { refusal(memory) } else { (memory, MIB, "") };
            let result = context.register_window(given.0, given.1);
            // The group goes on.
            assert!(context.register_window(memory, MIB).expect("a window").serves());
            (result, given.2)
        });
        let why = results[1].1;
        check_refusal(results.into_iter().map(|(result, _)| result).collect(), why);
    }
    assert!(begun.elapsed() < PATIENCE, "nobody has waited for a rank that did not come");
}

#[test]
fn a_refused_window_is_an_error_on_all_ranks_whose_gpus_have_agreed_on_nothing() {
    let (store, seats) = (Arc::new(HashStore::new()), processes(2));
    let results = std::thread::scope(|scope| {
        let spawn = |(rank, (double, devices, device)): (usize, &Seat)| {
            let (store, double, devices, device) = (store.clone(), double.clone(), devices.clone(), *device);
            scope.spawn(move || {
                let context = Context::create(options(rank as u32, 2, &store, "")).expect("ranks meet");
                context.cuda().pretend(&devices, 1 << 12);
                context.cuda().pretend_loads(only(words));
                let memory = double.memory(device, MIB as usize);
                let result = context.register_window(if rank == 1 { 4096 } else { memory }, MIB);
                assert_eq!(context.device_way(), None, "nothing is agreed on");
                assert!(context.register_window(memory, MIB).expect("a window").serves());
                result
            })
        };
        let threads: Vec<_> = seats.iter().enumerate().map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank")).collect()
    });
    check_refusal(results, "0x1000 is no device memory");
}

#[test]
fn an_output_in_a_window_on_one_rank_only_fails_and_names_both() {
    let errors = ranks(&processes(2), words, |context, (double, _, device)| {
        let memory = double.memory(*device, 8 * MIB as usize);
        let _window = window(context, memory, 4 * MIB).expect("a window");
        let output = memory + 4 * MIB * u64::from(context.rank());
        run(&allgather(context, 2 * MIB, memory, output)).unwrap_err()
    });
    for error in errors {
        assert_eq!(error.status(), Status::Mismatch);
        for part in ["allgather(2097152 × uint8)", "its memory in windows", "its memory in no windows"] {
            assert!(error.text().contains(part), "{error}");
        }
    }
}
