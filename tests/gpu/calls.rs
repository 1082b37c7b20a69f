//! Collectives of bytes whose results are known, through contexts: who makes them, in graphs too, on ranks
//! that are processes or threads. Ranks share the GPUs that there are.

use unisono::collective::request::{Counts, Kind, Request};
use unisono::communicator::{Call, Context};
use unisono::cuda::memory::DeviceBuffer;
use unisono::cuda::stream::Stream;
use unisono::reduce::{DataType, Operator};

use super::cuda::{Graph, begin_capture, devices, fewer_than, filled, read, stream, write};
use super::support;
use super::support::processes::Job;

/// Room in front of a buffer's bytes, for calls that begin at odd addresses.
const ROOM: usize = 64;

/// A rank with a stream and two buffers.
pub(crate) struct Caller<'a> {
    pub(crate) context: &'a Context,
    pub(crate) device: u32,
    pub(crate) stream: Stream,
    pub(crate) input: DeviceBuffer,
    pub(crate) output: DeviceBuffer,
}

/// What a rank gives in a call.
fn given(call: usize, rank: u32, bytes: usize) -> Vec<u8> {
    let seed = call.wrapping_mul(77) ^ (rank as usize).wrapping_mul(131);
    (0..bytes).map(|i| (i.wrapping_mul(31) ^ (i >> 9) ^ seed) as u8).collect()
}

impl<'a> Caller<'a> {
    /// One whose buffers hold calls of `longest` bytes.
    pub(crate) fn new(context: &'a Context, longest: usize) -> Caller<'a> {
        let device = context.rank() % devices().count();
        let buffer = || filled(device, &vec![0; longest + ROOM]);
        Caller { context, device, stream: stream(device), input: buffer(), output: buffer() }
    }

    /// On the rank's stream.
    pub(crate) fn call(&self) -> Call {
        Call { stream: Some(self.stream.handle()), ..Call::default() }
    }

    /// A call of parts of `count` bytes, `skew` bytes into the buffers. In place it is in the output, and may
    /// be made again on its own result: reductions are maxima then, else sums.
    pub(crate) fn request(
        &self,
        kind: Kind,
        count: usize,
        root: u32,
        in_place: bool,
        skew: usize,
    ) -> Request {
        let place = self.output.address() as usize + skew;
        let own = self.context.rank() as usize * count;
        let (input, output) = match kind {
            _ if !in_place => (self.input.address() as usize + skew, place),
            Kind::Allgather => (place + own, place),
            Kind::ReduceScatter => (place, place + own),
            _ => (place, place),
        };
        Request {
            kind,
            input: std::ptr::without_provenance(input),
            output: std::ptr::without_provenance_mut(output),
            counts: Counts::Uniform(count as u64),
            dtype: DataType::U8,
            operator: if in_place { Operator::Max } else { Operator::Sum },
            root,
        }
    }

    /// Puts what the ranks give in a call where they have it, and other bytes into the outputs; runs;
    /// compares.
    pub(crate) fn check(&self, call: usize, request: &Request, run: impl FnOnce()) {
        let Counts::Uniform(count) = request.counts else { panic!("one count") };
        let (count, me) = (count as usize, self.context.rank());
        let wanted = self.wanted(call, request, count);
        write(self.device, request.output.addr() as u64, &vec![0xa5; wanted.len() + 1]);
        if request.kind != Kind::Broadcast || me == request.root {
            let given = given(call, me, self.given_bytes(request.kind, count));
            write(self.device, request.input.addr() as u64, &given);
        }
        let end = || read(&self.stream, (request.output.addr() + wanted.len()) as u64, 1);
        let before = end();
        run();
        let got = read(&self.stream, request.output.addr() as u64, wanted.len());
        assert!(got == wanted, "call {call}, rank {me}: {request:?}");
        assert_eq!(end(), before, "call {call}: nothing is written past the end");
    }

    fn given_bytes(&self, kind: Kind, count: usize) -> usize {
        match kind {
            Kind::Alltoall | Kind::ReduceScatter => count * self.context.size() as usize,
            _ => count,
        }
    }

    fn wanted(&self, call: usize, request: &Request, count: usize) -> Vec<u8> {
        let ranks = 0..self.context.size();
        let bytes = self.given_bytes(request.kind, count);
        let begin = if bytes > count { self.context.rank() as usize * count } else { 0 };
        let part = |rank: u32| given(call, rank, begin + count)[begin..].to_vec();
        match request.kind {
            Kind::Broadcast => part(request.root),
            Kind::Allgather | Kind::Alltoall => ranks.flat_map(part).collect(),
            Kind::Allreduce | Kind::ReduceScatter => {
                let combine = |a: u8, b: u8| match request.operator {
                    Operator::Max => a.max(b),
                    _ => a.wrapping_add(b),
                };
                let join = |a: Vec<u8>, b: Vec<u8>| a.iter().zip(&b).map(|(a, b)| combine(*a, *b)).collect();
                ranks.map(part).reduce(join).expect("ranks")
            }
            other => panic!("{other:?} is not called here"),
        }
    }

    /// What `launches` gives to the stream, as a graph.
    pub(crate) fn captured(&self, launches: impl FnOnce()) -> Graph {
        let devices = devices();
        let _entered = devices.enter(self.device).expect("a context");
        begin_capture(&self.stream);
        launches();
        Graph::end_capture(&self.stream)
    }
}

/// Has 2, 3 and 4 processes run a scenario.
pub(crate) fn between_processes(scenario: &str) {
    for size in [2, 3, 4] {
        let mut job = Job::start(scenario, size, "shm");
        let all: Vec<u32> = (0..size).collect();
        job.await_all(&all, "fine");
        job.all_end_well(&all);
    }
}

/// Runs `body` on a thread for each GPU, four at most.
pub(crate) fn between_threads(body: impl Fn(&Context) + Sync) {
    if !fewer_than(2) {
        support::ranks(devices().count().min(4), "shm", body);
    }
}
