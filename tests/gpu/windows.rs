//! Windows through contexts: ranks as processes and as threads, eager and in graphs. Ranks share the GPUs that there are.

use unisono::collective::request::{Counts, Kind, Request};
use unisono::communicator::{Call, Context};
use unisono::cuda::memory::DeviceBuffer;
use unisono::cuda::stream::Stream;
use unisono::error::Status;
use unisono::reduce::{DataType, Operator};

use super::cuda::{Graph, begin_capture, devices, fewer_than, filled, read, soon, stream, write};
use super::support::processes::{Job, Seat, report};

/// The longest output, with room before it.
const LONGEST: usize = 33 << 20;

struct Rank<'a> {
    context: &'a Context,
    device: u32,
    stream: Stream,
    input: DeviceBuffer,
    output: DeviceBuffer,
}

/// What a rank gives in a call.
fn given(call: usize, rank: u32, bytes: usize) -> Vec<u8> {
    let seed = call.wrapping_mul(77) ^ (rank as usize).wrapping_mul(131);
    (0..bytes).map(|i| (i.wrapping_mul(31) ^ (i >> 9) ^ seed) as u8).collect()
}

impl Rank<'_> {
    /// A call of parts of `count` bytes.
    fn request(&self, kind: Kind, count: usize, root: u32, in_place: bool, skew: usize) -> Request {
        let output = self.output.address() as usize + skew;
        let own = if kind == Kind::Allgather { self.context.rank() as usize * count } else { 0 };
        let input = if in_place { output + own } else { self.input.address() as usize + skew };
        Request {
            kind,
            input: std::ptr::without_provenance(input),
            output: std::ptr::without_provenance_mut(output),
            counts: Counts::Uniform(count as u64),
            dtype: DataType::U8,
            operator: Operator::Sum,
            root,
        }
    }

    fn call(&self) -> Call {
        Call { stream: Some(self.stream.handle()), ..Call::default() }
    }

    fn check(&self, call: usize, request: &Request, run: impl FnOnce()) {
        let Counts::Uniform(count) = request.counts else { panic!("one count") };
        let (count, size, me) = (count as usize, self.context.size(), self.context.rank());
        let parts = if request.kind == Kind::Broadcast { 1 } else { size as usize };
        let gives = if request.kind == Kind::Alltoall { count * parts } else { count };
        write(self.device, request.output.addr() as u64, &vec![0xa5; count * parts + 1]);
        if request.kind != Kind::Broadcast || me == request.root {
            write(self.device, request.input.addr() as u64, &given(call, me, gives));
        }
        run();
        let got = read(&self.stream, request.output.addr() as u64, count * parts + 1);
        for part in 0..parts {
            let from = if parts == 1 { request.root } else { part as u32 };
            let begin = if request.kind == Kind::Alltoall { me as usize * count } else { 0 };
            let wanted = &given(call, from, begin + count)[begin..];
            assert!(
                got[part * count..][..count] == *wanted,
                "call {call}, rank {me}, part {part}: {request:?}"
            );
        }
        assert_eq!(got[count * parts], 0xa5, "call {call}: nothing is written past the end");
    }
}

/// `graphs`: threads of one process cannot capture beside each other's other calls.
fn calls(context: &Context, graphs: bool) {
    let device = context.rank() % devices().count();
    let buffer = || filled(device, &vec![0; LONGEST + 64]);
    let rank = Rank { context, device, stream: stream(device), input: buffer(), output: buffer() };
    let window = context.register_window(rank.output.address(), LONGEST as u64 + 32).expect("a window");
    assert!(window.serves() && context.device_way() == Some(Ok(())));
    let size = context.size();
    let mut call = 0;
    for kind in [Kind::Allgather, Kind::Alltoall, Kind::Broadcast] {
        let parts = if kind == Kind::Broadcast { 1 } else { size as usize };
        for bytes in [5_000_003, 4_200_000, LONGEST, 10_000] {
            call += 1;
            let in_place = call % 2 == 0 && kind != Kind::Alltoall;
            let request =
                rank.request(kind, bytes / parts, call as u32 % size, in_place, [0, 1, 4, 16][call % 4]);
            // SAFETY: the buffers outlive what the stream does.
            let launch = || unsafe { context.launch(&request, &rank.call()) }.expect("a launch");
            rank.check(call, &request, launch);
            if !graphs {
                continue;
            }
            let graph = {
                let devices = devices();
                let _entered = devices.enter(device).expect("a context");
                begin_capture(&rank.stream);
                launch();
                launch();
                Graph::end_capture(&rank.stream)
            };
            rank.check(call + 100, &request, || graph.launch(rank.stream.handle()));
            rank.check(call + 200, &request, || {
                launch();
                graph.launch(rank.stream.handle());
            });
        }
    }
    // Ended, calls are staged.
    drop(window);
    let request = rank.request(Kind::Allgather, 1_000_000, 0, false, 0);
    // SAFETY: as above.
    rank.check(300, &request, || unsafe { context.launch(&request, &rank.call()) }.expect("a launch"));

    // One rank that breaks the promise.
    let child = context.duplicate().expect("a child");
    let window = child.register_window(rank.output.address(), LONGEST as u64).expect("a window");
    let other = Rank { context: &child, stream: stream(device), input: buffer(), output: buffer(), ..rank };
    let output = if context.rank() == 0 { &other.output } else { &other.input };
    let mine = Request {
        input: std::ptr::without_provenance(rank.input.address() as usize),
        output: std::ptr::without_provenance_mut(output.address() as usize),
        ..other.request(Kind::Allgather, 3_000_000, 0, false, 0)
    };
    let apart = child.register_window(other.output.address(), LONGEST as u64).expect("a window");
    // SAFETY: as above.
    let error = unsafe { child.run(&mine, &other.call()) }.expect_err("they differ");
    assert_eq!(error.status(), Status::Mismatch, "{error}");
    assert!(error.text().contains("its output in a window"), "{error}");
    other.stream.synchronize(soon()).expect("the kernels have left");
    drop((window, apart));
}

pub(crate) fn scenario(seat: &Seat) {
    let context = Context::create(seat.options("windows")).expect("the ranks meet");
    calls(&context, true);
    report("fine");
}

#[test]
fn windows_between_processes() {
    for size in [2, 3, 4] {
        let mut job = Job::start("windows", size, "shm");
        let all: Vec<u32> = (0..size).collect();
        job.await_all(&all, "fine");
        job.all_end_well(&all);
    }
}

#[test]
fn windows_between_threads() {
    if fewer_than(2) {
        return;
    }
    super::support::ranks(devices().count().min(4), "shm", |context| calls(context, false));
}
