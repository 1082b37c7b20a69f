//! The broadcast by stages through contexts, by name: ranks as processes and as threads, in graphs, with few blocks. Ranks
//! share the GPUs that there are.

use unisono::collective::request::{Counts, Kind, Request};
use unisono::communicator::{Call, Context, Overlap};
use unisono::cuda::memory::DeviceBuffer;
use unisono::cuda::stream::Stream;
use unisono::error::Status;
use unisono::reduce::{DataType, Operator};

use super::cuda::{Graph, begin_capture, devices, fewer_than, filled, read, soon, stream, write};
use super::support::processes::{Job, Seat, report};

const ONE_STAGE: i32 = 21;
const TWO_STAGE: i32 = 22;
const STAGES: i32 = 23;

/// The longest broadcast, and room before it.
const LONGEST: usize = (20 << 20) + 7;
const ROOM: usize = 64;

struct Rank<'a> {
    context: &'a Context,
    device: u32,
    stream: Stream,
    input: DeviceBuffer,
    output: DeviceBuffer,
}

/// Bytes that are different from call to call.
fn pattern(call: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i.wrapping_mul(31) ^ (i >> 9) ^ call.wrapping_mul(77)) as u8).collect()
}

impl Rank<'_> {
    fn request(&self, bytes: usize, root: u32, in_place: bool, skew: usize) -> Request {
        let output = self.output.address() as usize + skew;
        let input = if in_place { output } else { self.input.address() as usize + skew };
        Request {
            kind: Kind::Broadcast,
            input: std::ptr::without_provenance(input),
            output: std::ptr::without_provenance_mut(output),
            counts: Counts::Uniform(bytes as u64),
            dtype: DataType::U8,
            operator: Operator::Sum,
            root,
        }
    }

    /// Puts a call's bytes where the root has them, and others everywhere else; runs; compares.
    fn check(&self, call: usize, request: &Request, run: impl FnOnce()) {
        let Counts::Uniform(bytes) = request.counts else { panic!("one count") };
        let bytes = bytes as usize;
        let wanted = pattern(call, bytes);
        write(self.device, request.output.addr() as u64, &vec![0xa5; bytes + 1]);
        if self.context.rank() == request.root {
            write(self.device, request.input.addr() as u64, &wanted);
        }
        run();
        let got = read(&self.stream, request.output.addr() as u64, bytes + 1);
        assert!(got[..bytes] == wanted, "call {call}, rank {}: {request:?}", self.context.rank());
        assert_eq!(got[bytes], 0xa5, "call {call}: nothing is written past the end");
    }
}

fn broadcasts(context: &Context) {
    let device = context.rank() % devices().count();
    let buffer = || filled(device, &vec![0; LONGEST + ROOM]);
    let rank = Rank { context, device, stream: stream(device), input: buffer(), output: buffer() };
    context.connect_device(device).expect("an agreement");
    assert_eq!(context.device_way(), Some(Ok(())));
    let size = context.size();
    let mut call = 0;
    let levels = if size <= devices().count() { 3 } else { 2 };
    for max_blocks in [0, 5] {
        for algorithm in [ONE_STAGE, TWO_STAGE, STAGES] {
            for bytes in [1, 100, 70_001, 3_000_005, LONGEST] {
                call += 1;
                let request =
                    rank.request(bytes, call as u32 % size, call % 3 == 0, [0, 1, 4, 16, 8][call % 5]);
                let options = Call {
                    algorithm: Some(algorithm),
                    stream: Some(rank.stream.handle()),
                    max_blocks,
                    overlap: [Overlap::Off, Overlap::Wait, Overlap::Early][call % levels],
                    ..Call::default()
                };
                // SAFETY: the buffers outlive the call.
                rank.check(call, &request, || unsafe {
                    context.launch(&request, &options).expect("a launch");
                });
            }
        }
    }

    // In a graph, between calls that are not.
    let request = rank.request(LONGEST, size - 1, false, 0);
    let options = |algorithm| Call {
        algorithm: Some(algorithm),
        stream: Some(rank.stream.handle()),
        ..Call::default()
    };
    // SAFETY: the buffers outlive what the stream does.
    let launch = |algorithm| unsafe { context.launch(&request, &options(algorithm)).expect("a launch") };
    rank.check(100, &request, || launch(TWO_STAGE));
    let graph = {
        let devices = devices();
        let _entered = devices.enter(device).expect("a context");
        begin_capture(&rank.stream);
        launch(ONE_STAGE);
        launch(TWO_STAGE);
        Graph::end_capture(&rank.stream)
    };
    for replay in 0..4 {
        rank.check(101 + replay, &request, || {
            launch(STAGES);
            graph.launch(rank.stream.handle());
        });
    }

    // A limit that the ranks agree on, and a call that differs in it.
    let child = {
        context.limit_blocks(10 + context.rank());
        context.duplicate().expect("a child")
    };
    child.connect_device(device).expect("an agreement");
    let on_child =
        Rank { context: &child, stream: stream(device), input: buffer(), output: buffer(), ..rank };
    let request = on_child.request(1_000_000, 0, false, 0);
    let call = Call { algorithm: Some(TWO_STAGE), stream: Some(on_child.stream.handle()), ..Call::default() };
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
    for size in [2, 3, 4] {
        let mut job = Job::start("stages", size, "shm");
        let all: Vec<u32> = (0..size).collect();
        job.await_all(&all, "fine");
        job.all_end_well(&all);
    }
}

#[test]
fn broadcasts_by_stages_between_threads() {
    if fewer_than(2) {
        return;
    }
    super::support::ranks(devices().count().min(4), "shm", broadcasts);
}
