//! Relayed calls where there are few queues.

use std::sync::Mutex;

use super::*;
use crate::cuda::courier::{self, Combiner};
use crate::cuda::local::{Fold, Kernels};

both_ways! {
    a_call_without_a_stream_is_held_up_by_nothing_that_came_behind_a_copy,
    a_call_without_a_stream_is_held_up_by_nothing_that_came_behind_a_sum,
}

/// One for what waits, and one for each step.
const QUEUES: usize = 4;

/// Kernels, one of which comes into a queue when another thread gives its streams something.
#[derive(Debug)]
struct Beside {
    kernels: DoubleKernels,
    devices: Arc<Devices>,
    /// Those streams: two for each queue. All wait when the kernel comes,
    streams: Vec<StreamHandle>,
    /// and go on at once, but for those that have its queue: what they wait for, and what one of them waits
    /// for behind the kernel, which is in that queue between the two.
    waiting: Mutex<Option<(Vec<Word>, Word)>>,
    /// How many operands it has.
    operands: u32,
    /// Whether the next one is it.
    is_next: AtomicBool,
}

impl Beside {
    fn stream(&self, stream: StreamHandle) -> Stream {
        // SAFETY: the double's streams last.
        unsafe { Stream::borrow(&self.devices, 0, stream) }.expect("a stream")
    }

    /// Has a stream wait until the answer is released.
    fn wait(&self, stream: StreamHandle) -> Word {
        let word = self.devices.word(0).expect("a word");
        self.stream(stream).wait_word(&word).expect("it waits");
        word
    }

    /// The kernel comes, by `give`.
    fn come(&self, kernel: StreamHandle, give: impl FnOnce() -> Result<()>) -> Result<()> {
        let gates: Vec<Word> = self.streams.iter().map(|stream| self.wait(*stream)).collect();
        give()?;
        let queue = self.kernels.0.queue_of(kernel);
        let has_it = |stream: &StreamHandle| self.kernels.0.queue_of(*stream) == queue;
        let behind = *self.streams.iter().find(|stream| has_it(stream)).expect("one has it");
        let behind = self.wait(behind);
        let mut ahead = Vec::new();
        for (stream, gate) in self.streams.iter().zip(gates) {
            if has_it(stream) {
                ahead.push(gate);
                continue;
            }
            gate.release();
            // What comes later finds its queue empty.
            while !self.stream(*stream).query()? {
                std::thread::yield_now();
            }
        }
        *self.waiting.lock().expect("no thread has panicked") = Some((ahead, behind));
        Ok(())
    }
}

impl Kernels for Beside {
    fn prepare(
        &self,
        devices: &Arc<Devices>,
        device: u32,
        dtype: DataType,
        operator: Operator,
    ) -> Result<()> {
        self.kernels.prepare(devices, device, dtype, operator)
    }

    fn most_operands(&self) -> usize {
        self.kernels.most_operands()
    }

    unsafe fn fold(&self, devices: &Devices, fold: &Fold<'_>) -> Result<()> {
        if fold.ranks != self.operands || !self.is_next.swap(false, Ordering::Relaxed) {
            // SAFETY: the caller's promise.
            return unsafe { self.kernels.fold(devices, fold) };
        }
        // SAFETY: the caller's promise.
        self.come(fold.stream.handle(), || unsafe { self.kernels.fold(devices, fold) })
    }

    fn combiner(&self, dtype: DataType, operator: Operator) -> Option<Combiner> {
        self.kernels.combiner(dtype, operator)
    }

    unsafe fn carry(&self, stream: &Stream, call: &courier::Call, combiner: Option<Combiner>) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.kernels.carry(stream, call, combiner) }
    }
}

fn a_call_without_a_stream_is_held_up_by_nothing_that_came_behind_a_copy(way: &str) {
    held_up_by_nothing(way, 1);
}

fn a_call_without_a_stream_is_held_up_by_nothing_that_came_behind_a_sum(way: &str) {
    held_up_by_nothing(way, 2);
}

/// What has so many operands comes into a queue, and behind it another stream's wait for the call: neither
/// what tells of its end nor what is done next may come behind that.
fn held_up_by_nothing(way: &str, operands: u32) {
    const LONG: usize = 8 * PIECE / 4;
    let doubles = [with_queues(QUEUES, Order::RoundRobin), with_queues(QUEUES, Order::RoundRobin)];
    let complaints = ranks_on(&doubles, way, |rank| {
        let beside = Arc::new(Beside {
            kernels: DoubleKernels(rank.double.clone()),
            devices: rank.devices.clone(),
            streams: (0..2 * QUEUES).map(|_| rank.double.stream(0)).collect(),
            waiting: Mutex::default(),
            operands,
            is_next: AtomicBool::new(false),
        });
        // The first kernels that are pretended count.
        rank.context.cuda().pretend_kernels(beside.clone());
        rank.relay();
        rank.warm_up();
        let before = rank.relayed();
        let memory = rank.memory(&[0; LONG]);
        rank.fill(memory, &given(rank.rank, 0, LONG));
        rank.stream().synchronize(Deadline::after(PATIENCE)).expect("it is filled");
        // A stream of another thread waits for calls from here on.
        let held = rank.devices.note_held();
        beside.is_next.store(rank.rank == 1, Ordering::Relaxed);
        let sum = request(Kind::Allreduce, memory, memory, LONG as u64, 0);
        let call = Call { timeout: Some(Duration::from_secs(20)), ..Call::default() };
        let work = rank.start(&sum, &call).expect("it starts");
        let mut behind = None;
        if rank.rank == 1 {
            let until = Instant::now() + PATIENCE;
            let wait_for = |there: &dyn Fn() -> bool, what: &str| {
                while !there() {
                    assert!(Instant::now() < until, "{what}");
                    std::thread::sleep(Duration::from_micros(100));
                }
            };
            let waiting = || beside.waiting.lock().expect("no thread has panicked");
            wait_for(&|| waiting().is_some(), "the kernel comes");
            // Whoever moves the call has given what comes next, if anything does, when it looks for the end.
            let asked = rank.double.synchronizations();
            wait_for(&|| rank.double.synchronizations() > asked + 20, "somebody looks for its end");
            let (ahead, last) = waiting().take().expect("they wait");
            ahead.iter().for_each(Word::release);
            behind = Some(last);
        }
        let ended = work.wait(Deadline::after(PATIENCE));
        behind.iter().for_each(Word::release);
        ended.expect("it ends well");
        drop(held);
        assert_eq!(rank.relayed() - before, 8);
        let due = expected(Kind::Allreduce, LONG, 2, rank.rank, 0, 0);
        assert_eq!(rank.double.peek(memory, 4 * LONG), bytes(&due));
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}
