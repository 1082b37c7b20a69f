//! What the tests of the engine share: ranks as threads, ranks as processes, calls over plain slices, random
//! numbers.

// Each test file uses its part of this.
#![allow(dead_code)]

pub(crate) mod processes;
pub(crate) mod reference;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use unisono::collective::request::{Counts, Kind, Request};
use unisono::communicator::{Call, Completion, Context, Options, Rendezvous, Work};
use unisono::error::Result;
use unisono::reduce::{DataType, Operator};
use unisono::rendezvous::hash::HashStore;
use unisono::rendezvous::store::Store;

/// Every way that the tests link ranks.
pub(crate) const TRANSPORTS: [&str; 2] = ["shm", "tcp"];

/// Longer than anything here takes, on a machine with far too much to do.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// How a rank comes to its context in the tests.
pub(crate) fn options(rank: u32, size: u32, store: Arc<dyn Store>, transports: &str) -> Options {
    Options {
        rank,
        size,
        rendezvous: Rendezvous::Store(store),
        name: String::new(),
        timeout: PATIENCE,
        interface: Some("127.0.0.1".into()),
        transports: Some(transports.into()),
        host: None,
    }
}

/// Runs `body` on `size` ranks, a thread each, in a fresh group over `transports`, when all have met: one
/// that fails in it would end the meeting of the others. What they return, by rank.
pub(crate) fn ranks<T: Send>(size: u32, transports: &str, body: impl Fn(&Context) -> T + Sync) -> Vec<T> {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let met = AtomicU32::new(0);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..size)
            .map(|rank| {
                let (store, body, met) = (store.clone(), &body, &met);
                std::thread::Builder::new()
                    .name(format!("rank {rank} of {size}, {transports}"))
                    .spawn_scoped(scope, move || {
                        let options = options(rank, size, store, transports);
                        let context = Context::create(options).expect("the ranks meet");
                        let aborts = AbortOnPanic(&context);
                        met.fetch_add(1, Ordering::SeqCst);
                        let began = Instant::now();
                        while met.load(Ordering::SeqCst) < size && began.elapsed() < PATIENCE {
                            std::thread::yield_now();
                        }
                        let answer = body(&context);
                        drop(aborts);
                        answer
                    })
                    .expect("a thread")
            })
            .collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

/// A rank that fails its test takes the others with it at once.
struct AbortOnPanic<'a>(&'a Context);

impl Drop for AbortOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.abort();
        }
    }
}

/// A call, before its buffers are known.
#[derive(Clone, Debug)]
pub(crate) struct Verb {
    pub(crate) kind: Kind,
    pub(crate) counts: Counts,
    pub(crate) dtype: DataType,
    pub(crate) operator: Operator,
    pub(crate) root: u32,
}

impl Verb {
    pub(crate) fn new(kind: Kind, count: u64) -> Verb {
        let counts = Counts::Uniform(count);
        Verb { kind, counts, dtype: DataType::F32, operator: Operator::Sum, root: 0 }
    }

    pub(crate) fn root(self, root: u32) -> Verb {
        Verb { root, ..self }
    }

    pub(crate) fn dtype(self, dtype: DataType) -> Verb {
        Verb { dtype, ..self }
    }

    pub(crate) fn operator(self, operator: Operator) -> Verb {
        Verb { operator, ..self }
    }

    /// The request over these buffers.
    pub(crate) fn over(&self, input: *const u8, output: *mut u8) -> Request {
        let Verb { kind, ref counts, dtype, operator, root } = *self;
        Request { kind, input, output, counts: counts.clone(), dtype, operator, root }
    }

    /// Runs it on separate buffers, which are as long as the call says.
    pub(crate) fn run<I: Copy, O: Copy>(
        &self,
        context: &Context,
        input: &[I],
        output: &mut [O],
        call: &Call,
    ) -> Result<Completion> {
        let request = self.over(input.as_ptr().cast(), output.as_mut_ptr().cast());
        // SAFETY: the slices outlive the call, and the tests make them as long as the call says.
        unsafe { context.run(&request, call) }
    }

    /// Runs it in place.
    pub(crate) fn run_in<T: Copy>(
        &self,
        context: &Context,
        data: &mut [T],
        call: &Call,
    ) -> Result<Completion> {
        let address: *mut u8 = data.as_mut_ptr().cast();
        // SAFETY: the slice outlives the call, and the tests make it as long as the call says.
        unsafe { context.run(&self.over(address, address), call) }
    }

    /// Starts it in place, on memory that lives until the work has ended.
    pub(crate) fn start_in<T: Copy>(&self, context: &Context, data: &mut [T], call: &Call) -> Result<Work> {
        let address: *mut u8 = data.as_mut_ptr().cast();
        // SAFETY: the tests wait for the work, or its failure, before they let go of the memory.
        unsafe { context.start(&self.over(address, address), call) }
    }
}

/// A blocking sum over all ranks, in place, that must succeed.
pub(crate) fn sum(context: &Context, data: &mut [f32]) {
    Verb::new(Kind::Allreduce, data.len() as u64)
        .run_in(context, data, &Call::default())
        .expect("an allreduce");
}

/// A barrier that must succeed.
pub(crate) fn barrier(context: &Context) {
    Verb::new(Kind::Barrier, 0).run_in::<u8>(context, &mut [], &Call::default()).expect("a barrier");
}

/// A call with a tag.
pub(crate) fn tagged(tag: u64) -> Call {
    Call { tag: Some(tag), ..Call::default() }
}

/// A call with a timeout in milliseconds.
pub(crate) fn within(milliseconds: u64) -> Call {
    Call { timeout: Some(Duration::from_millis(milliseconds)), ..Call::default() }
}

/// Within this time everybody learns of a failure.
const SOON: Duration = Duration::from_secs(1);

/// Attempts something until it is as quick as failures are told, by the longest time that it says it took. A
/// busy processor may hold up any process for a second, but not every time.
pub(crate) fn in_time(mut attempt: impl FnMut() -> Duration) {
    let mut all = Vec::new();
    while all.len() < 10 {
        let took = attempt();
        if took < SOON {
            return;
        }
        all.push(took);
    }
    panic!("every time it took longer than {SOON:?}: {all:?}");
}

/// Sends bytes, blocking.
pub(crate) fn send(context: &Context, to: u32, bytes: &[u8], call: &Call) -> Result<()> {
    let verb = Verb::new(Kind::Send, bytes.len() as u64).dtype(DataType::U8).root(to);
    verb.run::<u8, u8>(context, bytes, &mut [], call).map(|_| ())
}

/// Receives bytes, blocking.
pub(crate) fn receive(context: &Context, from: u32, bytes: &mut [u8], call: &Call) -> Result<()> {
    let verb = Verb::new(Kind::Receive, bytes.len() as u64).dtype(DataType::U8).root(from);
    verb.run_in(context, bytes, call).map(|_| ())
}

/// Receives bytes from whoever sends, blocking. The rank that did.
pub(crate) fn receive_any(context: &Context, bytes: &mut [u8], call: &Call) -> Result<u32> {
    let verb = Verb::new(Kind::ReceiveAny, bytes.len() as u64).dtype(DataType::U8);
    verb.run_in(context, bytes, call).map(|completion| completion.source.expect("a source"))
}

/// Numbers that look random and are the same every time (splitmix64).
#[derive(Clone)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

/// A number that looks random, made from another.
pub(crate) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Bytes that tell where they come from.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len).map(|i| mix(seed << 32 | i as u64) as u8).collect()
}
