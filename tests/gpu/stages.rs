//! The broadcast by stages through contexts, by name: ranks as processes and as threads, in graphs, with few
//! blocks. Ranks share the GPUs that there are.

use unisono::collective::request::Kind;
use unisono::communicator::{Call, Context, Overlap};
use unisono::error::Status;

use super::calls::{Caller, between_processes, between_threads};
use super::cuda::{devices, soon};
use super::support::processes::{Seat, report};

const ONE_STAGE: i32 = 21;
const TWO_STAGE: i32 = 22;
const STAGES: i32 = 23;

/// The longest broadcast.
const LONGEST: usize = (20 << 20) + 7;

fn broadcasts(context: &Context) {
    let caller = Caller::new(context, LONGEST);
    context.connect_device(caller.device).expect("an agreement");
    assert_eq!(context.device_way(), Some(Ok(())));
    let size = context.size();
    let mut call = 0;
    let levels = if size <= devices().count() { 3 } else { 2 };
    for max_blocks in [0, 5] {
        for algorithm in [ONE_STAGE, TWO_STAGE, STAGES] {
            for bytes in [1, 100, 70_001, 3_000_005, LONGEST] {
                call += 1;
                let (root, skew) = (call as u32 % size, [0, 1, 4, 16, 8][call % 5]);
                let request = caller.request(Kind::Broadcast, bytes, root, call % 3 == 0, skew);
                let options = Call {
                    algorithm: Some(algorithm),
                    max_blocks,
                    overlap: [Overlap::Off, Overlap::Wait, Overlap::Early][call % levels],
                    ..caller.call()
                };
                // SAFETY: the buffers outlive the call.
                caller.check(call, &request, || unsafe {
                    context.launch(&request, &options).expect("a launch");
                });
            }
        }
    }

    // In a graph, between calls that are not.
    let request = caller.request(Kind::Broadcast, LONGEST, size - 1, false, 0);
    let options = |algorithm| Call { algorithm: Some(algorithm), ..caller.call() };
    // SAFETY: the buffers outlive what the stream does.
    let launch = |algorithm| unsafe { context.launch(&request, &options(algorithm)).expect("a launch") };
    caller.check(100, &request, || launch(TWO_STAGE));
    let graph = caller.captured(|| {
        launch(ONE_STAGE);
        launch(TWO_STAGE);
    });
    for replay in 0..4 {
        caller.check(101 + replay, &request, || {
            launch(STAGES);
            graph.launch(caller.stream.handle());
        });
    }

    // A limit that the ranks agree on, and a call that differs in it.
    let child = {
        context.limit_blocks(10 + context.rank());
        context.duplicate().expect("a child")
    };
    child.connect_device(caller.device).expect("an agreement");
    let on_child = Caller::new(&child, LONGEST);
    let request = on_child.request(Kind::Broadcast, 1_000_000, 0, false, 0);
    let call = Call { algorithm: Some(TWO_STAGE), ..on_child.call() };
    // SAFETY: the buffers outlive the calls.
    on_child.check(200, &request, || unsafe { child.launch(&request, &call).expect("a launch") });
    let call = Call { max_blocks: 1 + context.rank(), ..call };
    // SAFETY: as above.
    let error = unsafe { child.run(&request, &call) }.expect_err("they differ");
    assert_eq!(error.status(), Status::Mismatch, "{error}");
    on_child.stream.synchronize(soon()).expect("the kernels have left");
}

pub(crate) fn scenario(seat: &Seat) {
    let context = Context::create(seat.options("stages")).expect("the ranks meet");
    broadcasts(&context);
    report("fine");
}

#[test]
fn broadcasts_by_stages_between_processes() {
    between_processes("stages");
}

#[test]
fn broadcasts_by_stages_between_threads() {
    between_threads(broadcasts);
}
