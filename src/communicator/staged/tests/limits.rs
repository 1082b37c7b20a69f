//! How many blocks a call may have.

use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;

use super::*;
use crate::cuda::context::Devices;
use crate::cuda::courier::{self, Combiner};
use crate::cuda::double::DoubleKernels;
use crate::cuda::local::{Fold, Kernels};
use crate::cuda::stream::Stream;
use crate::engine::staged::relay::Limits;

/// Kernels that tell how many blocks couriers were launched with, and folds may have.
#[derive(Debug)]
struct Told {
    kernels: DoubleKernels,
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
        self.kernels.prepare(devices, device, dtype, operator)
    }

    fn most_operands(&self) -> usize {
        self.kernels.most_operands()
    }

    unsafe fn fold(&self, devices: &Devices, fold: &Fold<'_>) -> Result<()> {
        self.blocks.lock().expect("no panic").push(fold.max_blocks);
        // SAFETY: the caller's promise.
        unsafe { self.kernels.fold(devices, fold) }
    }

    fn combiner(&self, dtype: DataType, operator: Operator) -> Option<Combiner> {
        self.kernels.combiner(dtype, operator)
    }

    unsafe fn carry(&self, stream: &Stream, call: &courier::Call, combiner: Option<Combiner>) -> Result<()> {
        self.blocks.lock().expect("no panic").push(call.grid().blocks);
        // SAFETY: the caller's promise.
        unsafe { self.kernels.carry(stream, call, combiner) }
    }
}

#[test]
fn couriers_have_no_more_blocks_than_their_context_and_their_call_allow() {
    const COUNT: usize = 1 << 19;
    let complaints = ranks(2, "tcp", Order::RoundRobin, |rank| {
        let kernels =
            Arc::new(Told { kernels: DoubleKernels(rank.double.clone()), blocks: Mutex::default() });
        rank.context.cuda().pretend_limits(Limits { piece: 1 << 20, above: 0 });
        rank.context.cuda().pretend_kernels(kernels.clone());
        rank.double.shrink(132);
        rank.warm_up();
        let of_each = [0, 1].map(|from| given(from, 1, COUNT));
        let due: Vec<i32> = of_each[0].iter().zip(&of_each[1]).map(|(one, other)| one + other).collect();
        let own = &of_each[rank.rank as usize];
        let [input, output] = [(); 2].map(|()| rank.memory(own));
        rank.fill(input, own);
        // Limits of the context, of the call, and what a sum of so many bytes has then.
        for (context, call, due_blocks) in [(0, 0, 16), (6, 0, 6), (6, 3, 3), (0, 12, 12), (1, 1, 3)] {
            rank.context.limit_blocks(context);
            kernels.blocks.lock().expect("no panic").clear();
            let options = Call { max_blocks: call, ..rank.call() };
            let sum = request(Kind::Allreduce, input, output, COUNT as u64, 0);
            let work = rank.start(&sum, &options).expect("it starts");
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
            assert_eq!(*kernels.blocks.lock().expect("no panic"), [due_blocks], "{context}, {call}");
            rank.expect(output, &due, "the sum");
        }
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}

/// Without a stream side streams copy and combine, by launches of their own: through lanes that others combine from, or staged.
#[test]
fn side_streams_have_no_more_blocks_than_their_context_and_their_call_allow() {
    const COUNT: usize = 700;
    for above in [0, usize::MAX] {
        let complaints = ranks(2, "tcp", Order::RoundRobin, |rank| {
            let kernels =
                Arc::new(Told { kernels: DoubleKernels(rank.double.clone()), blocks: Mutex::default() });
            rank.context.cuda().pretend_limits(Limits { piece: PIECE, above });
            rank.context.cuda().pretend_kernels(kernels.clone());
            if above == 0 {
                rank.warm_up();
            }
            let of_each = [0, 1].map(|from| given(from, 1, COUNT));
            let due: Vec<i32> = of_each[0].iter().zip(&of_each[1]).map(|(one, other)| one + other).collect();
            let own = &of_each[rank.rank as usize];
            let [input, output] = [(); 2].map(|()| rank.memory(own));
            rank.fill(input, own);
            rank.stream().synchronize(Deadline::NEVER).expect("it is filled");
            for (context, call, limit) in [(0, 0, 0), (6, 0, 6), (6, 3, 3), (0, 12, 12)] {
                rank.context.limit_blocks(context);
                kernels.blocks.lock().expect("no panic").clear();
                let options = Call { max_blocks: call, ..Call::default() };
                let sum = request(Kind::Allreduce, input, output, COUNT as u64, 0);
                rank.run(&sum, &options).expect("it ends well");
                let told = kernels.blocks.lock().expect("no panic").clone();
                assert!(!told.is_empty() && told.iter().all(|&blocks| blocks == limit), "{limit}: {told:?}");
                rank.expect(output, &due, "the sum");
            }
            rank.drain()
        });
        assert_eq!(complaints.concat(), Vec::<String>::new());
    }
}

/// Kernels that cannot be loaded, and how often that was tried.
#[derive(Debug)]
struct Unloadable {
    kernels: DoubleKernels,
    tries: AtomicUsize,
}

impl Kernels for Unloadable {
    fn prepare(&self, _: &Arc<Devices>, _: u32, _: DataType, _: Operator) -> Result<()> {
        self.tries.fetch_add(1, Ordering::Relaxed);
        Err(Error::new(Status::Timeout, "loading takes long".to_owned()))
    }

    fn most_operands(&self) -> usize {
        self.kernels.most_operands()
    }

    unsafe fn fold(&self, _: &Devices, _: &Fold<'_>) -> Result<()> {
        panic!("they were not loaded")
    }

    fn combiner(&self, dtype: DataType, operator: Operator) -> Option<Combiner> {
        self.kernels.combiner(dtype, operator)
    }

    unsafe fn carry(&self, _: &Stream, _: &courier::Call, _: Option<Combiner>) -> Result<()> {
        panic!("they were not loaded")
    }
}

/// Each try may take a minute.
#[test]
fn what_cannot_be_loaded_is_tried_once() {
    let complaints = ranks(2, "tcp", Order::RoundRobin, |rank| {
        let kernels = Unloadable { kernels: DoubleKernels(rank.double.clone()), tries: AtomicUsize::new(0) };
        let kernels = Arc::new(kernels);
        rank.context.cuda().pretend_limits(Limits { piece: PIECE, above: 0 });
        rank.context.cuda().pretend_kernels(kernels.clone());
        for round in 0..3 {
            let work = super::exercise(rank, Kind::Allreduce, 300, false, round).expect("it starts");
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
        }
        assert_eq!(kernels.tries.load(Ordering::Relaxed), 1);
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}
