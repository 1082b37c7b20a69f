//! Windows through contexts: ranks as processes and as threads, eager and in graphs. Ranks share the GPUs
//! that there are.

use unisono::collective::request::Kind;
use unisono::communicator::Context;
use unisono::error::Status;

use super::calls::{Caller, between_processes, between_threads};
use super::cuda::soon;
use super::support::processes::{Seat, report};

/// The longest call.
const LONGEST: usize = 33 << 20;

/// `graphs`: threads of one process cannot capture beside each other's other calls.
fn calls(context: &Context, graphs: bool) {
    let caller = Caller::new(context, LONGEST);
    let window = |address| context.register_window(address, LONGEST as u64 + 32).expect("a window");
    let windows = [window(caller.input.address()), window(caller.output.address())];
    assert!(windows.iter().all(|window| window.serves()) && context.device_way() == Some(Ok(())));
    let size = context.size();
    let mut call = 0;
    for kind in [Kind::Allgather, Kind::Alltoall, Kind::Broadcast, Kind::Allreduce, Kind::ReduceScatter] {
        let parts = if matches!(kind, Kind::Broadcast | Kind::Allreduce) { 1 } else { size as usize };
        for bytes in [5_000_003, 4_200_000, LONGEST, 10_000] {
            call += 1;
            let in_place = call % 2 == 0 && kind != Kind::Alltoall;
            let skew = [0, 1, 4, 16][call / 2 % 4];
            let request = caller.request(kind, bytes / parts, call as u32 % size, in_place, skew);
            // SAFETY: the buffers outlive what the stream does.
            let launch = || unsafe { context.launch(&request, &caller.call()) }.expect("a launch");
            caller.check(call, &request, launch);
            if !graphs {
                continue;
            }
            let graph = caller.captured(|| {
                launch();
                launch();
            });
            caller.check(call + 100, &request, || graph.launch(caller.stream.handle()));
            caller.check(call + 200, &request, || {
                launch();
                graph.launch(caller.stream.handle());
            });
        }
    }
    // Ended, calls are staged.
    drop(windows);
    for kind in [Kind::Allgather, Kind::Allreduce] {
        let request = caller.request(kind, 5_000_000, 0, false, 0);
        // SAFETY: as above.
        let launch = || unsafe { context.launch(&request, &caller.call()) }.expect("a launch");
        caller.check(300, &request, launch);
    }
}

/// One rank breaks the promise that all have their memory in windows, or none.
fn broken(context: &Context, kind: Kind) {
    let child = context.duplicate().expect("a child");
    let caller = Caller::new(&child, LONGEST);
    let window = |address| child.register_window(address, LONGEST as u64).expect("a window");
    let _windows = [window(caller.input.address()), window(caller.output.address())];
    let apart = Caller::new(&child, LONGEST);
    let memory = if context.rank() == 0 { &caller } else { &apart };
    let mine = memory.request(kind, 6_000_000, 0, false, 0);
    // SAFETY: the buffers outlive the call.
    let error = unsafe { child.run(&mine, &caller.call()) }.expect_err("they differ");
    assert_eq!(error.status(), Status::Mismatch, "{error}");
    assert!(error.text().contains("its memory in windows"), "{error}");
    caller.stream.synchronize(soon()).expect("the kernels have left");
}

fn all(context: &Context, graphs: bool) {
    calls(context, graphs);
    broken(context, Kind::Allgather);
    broken(context, Kind::Allreduce);
}

pub(crate) fn scenario(seat: &Seat) {
    let context = Context::create(seat.options("windows")).expect("the ranks meet");
    all(&context, true);
    report("fine");
}

#[test]
fn windows_between_processes() {
    between_processes("windows");
}

#[test]
fn windows_between_threads() {
    between_threads(|context| all(context, false));
}
