//! How many blocks a call may have.

use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;

use super::*;
use crate::communicator::cuda::LOADED_AGAIN;
use crate::cuda::context::Devices;
use crate::cuda::courier::{self, Combiner};
use crate::cuda::double::DoubleKernels;
use crate::cuda::local::{Fold, Kernels};
use crate::cuda::stream::Stream;
use crate::engine::staged::relay::Limits;

/// Kernels that tell how often they were to be loaded, which may fail, how many couriers were launched, and
/// how many blocks those had and folds may have.
#[derive(Debug)]
struct Told {
    kernels: DoubleKernels,
    loads: AtomicBool,
    tries: AtomicUsize,
    carried: AtomicUsize,
    blocks: Mutex<Vec<u32>>,
}

impl Kernels for Told {
    fn prepare(
        &self,
        devices: &Arc<Devices>,
        device: u32,
        dtype: DataType,
        operator: Operator,
    ) -> Result<()> {
        self.tries.fetch_add(1, Ordering::Relaxed);
        match self.loads.load(Ordering::Relaxed) {
            true => self.kernels.prepare(devices, device, dtype, operator),
            false => Err(Error::new(Status::Timeout, "loading takes long".to_owned())),
        }
    }

    fn most_operands(&self) -> usize {
        self.kernels.most_operands()
    }

    unsafe fn fold(&self, devices: &Devices, fold: &Fold<'_>) -> Result<()> {
        self.note(fold.max_blocks);
        // SAFETY: the caller's promise.
        unsafe { self.kernels.fold(devices, fold) }
    }

    fn combiner(&self, dtype: DataType, operator: Operator) -> Option<Combiner> {
        self.kernels.combiner(dtype, operator)
    }

    unsafe fn carry(&self, stream: &Stream, call: &courier::Call, combiner: Option<Combiner>) -> Result<()> {
        self.carried.fetch_add(1, Ordering::Relaxed);
        self.note(call.grid().blocks);
        // SAFETY: the caller's promise.
        unsafe { self.kernels.carry(stream, call, combiner) }
    }
}

impl Told {
    fn new(rank: &Rank, loads: bool) -> Arc<Told> {
        Arc::new(Told {
            kernels: DoubleKernels(rank.double.clone()),
            loads: loads.into(),
            tries: AtomicUsize::new(0),
            carried: AtomicUsize::new(0),
            blocks: Mutex::default(),
        })
    }

    /// A launch of so many blocks.
    fn note(&self, blocks: u32) {
        assert!(self.loads.load(Ordering::Relaxed), "they were not loaded");
        self.blocks.lock().expect("no panic").push(blocks);
    }

    /// What a call is told to have.
    fn of(&self, call: impl FnOnce()) -> Vec<u32> {
        self.blocks.lock().expect("no panic").clear();
        call();
        self.blocks.lock().expect("no panic").clone()
    }
}

/// Runs `body` on two ranks whose kernels tell of their blocks, with a sum of so many elements that it may
/// call, and what expects the result when the rank's stream comes to it.
fn sums(count: usize, limits: Limits, body: impl Fn(&Rank, &Told, &Request, &dyn Fn()) + Sync) {
    let complaints = ranks(2, "tcp", Order::RoundRobin, |rank| {
        let kernels = Told::new(rank, true);
        rank.context.cuda().pretend_limits(limits);
        rank.context.cuda().pretend_kernels(kernels.clone());
        rank.double.shrink(132);
        if limits.above < Some(usize::MAX) {
            rank.warm_up();
        }
        let of_each = [0, 1].map(|from| given(from, 1, count));
        let due: Vec<i32> = of_each[0].iter().zip(&of_each[1]).map(|(one, other)| one + other).collect();
        let own = &of_each[rank.rank as usize];
        let [input, output] = [(); 2].map(|()| rank.memory(own));
        rank.fill(input, own);
        let sum = request(Kind::Allreduce, input, output, count as u64, 0);
        body(rank, &kernels, &sum, &|| rank.expect(output, &due, "the sum"));
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}

#[test]
fn couriers_have_no_more_blocks_than_their_context_and_their_call_allow() {
    sums(1 << 19, Limits { piece: 1 << 20, above: Some(0) }, |rank, kernels, sum, find| {
        // Limits of the context, of the call, and what a sum of so many bytes has then.
        for (context, call, due) in [(0, 0, 16), (6, 0, 6), (6, 3, 3), (0, 12, 12), (1, 1, 3)] {
            rank.context.limit_blocks(context);
            let options = Call { max_blocks: call, ..rank.call() };
            let told = kernels.of(|| {
                let work = rank.start(sum, &options).expect("it starts");
                work.wait(Deadline::after(PATIENCE)).expect("it ends well");
            });
            assert_eq!(told, [due], "{context}, {call}");
            find();
        }
    });
}

/// Without a stream side streams copy and combine, by launches of their own: through lanes that others
/// combine from, or staged.
#[test]
fn side_streams_have_no_more_blocks_than_their_context_and_their_call_allow() {
    for above in [0, usize::MAX].map(Some) {
        sums(700, Limits { piece: PIECE, above }, |rank, kernels, sum, find| {
            rank.stream().synchronize(Deadline::NEVER).expect("it is filled");
            for (context, call, limit) in [(0, 0, 0), (6, 0, 6), (6, 3, 3), (0, 12, 12)] {
                rank.context.limit_blocks(context);
                let options = Call { max_blocks: call, ..Call::default() };
                let told = kernels.of(|| {
                    rank.run(sum, &options).expect("it ends well");
                });
                assert!(!told.is_empty() && told.iter().all(|&blocks| blocks == limit), "{limit}: {told:?}");
                find();
            }
        });
    }
}

/// Each try may take a minute.
#[test]
fn what_cannot_be_loaded_is_tried_once_in_a_minute() {
    let complaints = ranks(2, "tcp", Order::RoundRobin, |rank| {
        let kernels = Told::new(rank, false);
        rank.context.cuda().pretend_limits(Limits { piece: PIECE, above: Some(0) });
        rank.context.cuda().pretend_kernels(kernels.clone());
        let mut round = 0;
        let mut tries_after_a_call = || {
            let work = super::exercise(rank, Kind::Allreduce, 300, false, round).expect("it starts");
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
            round += 1;
            kernels.tries.load(Ordering::Relaxed)
        };
        assert_eq!([(); 3].map(|()| tries_after_a_call()), [1; 3]);
        rank.context.cuda().pretend_later(LOADED_AGAIN / 2);
        assert_eq!(tries_after_a_call(), 1);
        rank.context.cuda().pretend_later(LOADED_AGAIN);
        assert_eq!([(); 3].map(|()| tries_after_a_call()), [2; 3]);
        assert_eq!(kernels.carried.load(Ordering::Relaxed), 0);
        rank.context.cuda().pretend_later(LOADED_AGAIN);
        kernels.loads.store(true, Ordering::Relaxed);
        assert!(tries_after_a_call() > 2);
        assert_eq!(kernels.carried.load(Ordering::Relaxed), 1);
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}
