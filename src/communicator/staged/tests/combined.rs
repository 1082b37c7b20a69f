//! Reductions to one of two ranks, whose courier combines.

use std::sync::Mutex;

use super::*;
use crate::cuda::courier::{self, Combiner};
use crate::cuda::double::DoubleKernels;
use crate::cuda::local::{Fold, Kernels};
use crate::cuda::stream::Stream;
use crate::engine::staged::COPY;

/// Kernels that note what couriers were to combine. Those that copy may not be there.
#[derive(Debug)]
struct Noted {
    kernels: DoubleKernels,
    copies: bool,
    combiners: Mutex<Vec<Option<Combiner>>>,
}

impl Kernels for Noted {
    fn prepare(
        &self,
        devices: &Arc<Devices>,
        device: u32,
        dtype: DataType,
        operator: Operator,
    ) -> Result<()> {
        match self.copies || (dtype, operator) != COPY {
            true => self.kernels.prepare(devices, device, dtype, operator),
            false => Err(Error::new(Status::Timeout, "loading takes long")),
        }
    }

    fn most_operands(&self) -> usize {
        self.kernels.most_operands()
    }

    unsafe fn fold(&self, devices: &Devices, fold: &Fold<'_>) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.kernels.fold(devices, fold) }
    }

    fn combiner(&self, dtype: DataType, operator: Operator) -> Option<Combiner> {
        self.kernels.combiner(dtype, operator)
    }

    unsafe fn carry(&self, stream: &Stream, call: &courier::Call, combiner: Option<Combiner>) -> Result<()> {
        self.combiners.lock().expect("no panic").push(combiner);
        // SAFETY: the caller's promise.
        unsafe { self.kernels.carry(stream, call, combiner) }
    }
}

type Combination = fn(i32, i32) -> i32;

/// Runs `body` on two ranks with such kernels.
fn noted(copies: bool, body: impl Fn(&Rank, &Noted) + Sync) {
    let complaints = ranks(2, "tcp", Order::RoundRobin, |rank| {
        let kernels = DoubleKernels(rank.double.clone());
        let kernels = Arc::new(Noted { kernels, copies, combiners: Mutex::default() });
        rank.context.cuda().pretend_kernels(kernels.clone());
        rank.double.shrink(132);
        body(rank, &kernels);
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}

/// The same, with what runs a reduction: whether its courier was to combine.
fn two(body: impl Fn(&Rank, &dyn Fn(&Request) -> bool) + Sync) {
    noted(true, |rank, kernels| {
        body(rank, &|request| {
            let work = rank.start(request, &rank.call()).expect("it starts");
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
            let combiners = std::mem::take(&mut *kernels.combiners.lock().expect("no panic"));
            assert_eq!(combiners.len(), 1, "a courier");
            combiners[0].is_some()
        });
    });
}

/// Where kernels that copy could not be loaded there is no courier.
#[test]
fn without_couriers_the_processor_combines() {
    noted(false, |rank, kernels| {
        let own = given(rank.rank, 1, 50);
        let memory = rank.memory(&own);
        for _ in 0..2 {
            rank.fill(memory, &own);
            let call = request(Kind::Reduce, memory, memory, 50, 0);
            let work = rank.start(&call, &rank.call()).expect("it starts");
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
            if rank.rank == 0 {
                let due: Vec<i32> = own.iter().zip(given(1, 1, 50)).map(|(one, other)| one + other).collect();
                rank.expect(memory, &due, "the sum");
            }
        }
        assert_eq!(kernels.combiners.lock().expect("no panic").len(), 0);
    });
}

/// What has come is not combined any more when the stream comes to it.
#[test]
fn a_root_that_gives_up_before_its_stream_comes_writes_nothing() {
    noted(true, |rank, kernels| {
        let own = given(rank.rank, 1, 50);
        let [input, output] = [(); 2].map(|()| rank.memory(&own));
        rank.fill(input, &own);
        rank.fill(output, &[5; 50]);
        let call = request(Kind::Reduce, input, output, 50, 0);
        if rank.rank == 1 {
            let work = rank.start(&call, &rank.call()).expect("it starts");
            work.wait(Deadline::after(PATIENCE)).expect("what it sends goes");
            return;
        }
        let gate = rank.devices.word(0).expect("a word");
        rank.stream().wait_word(&gate).expect("it waits");
        let options = Call { timeout: Some(Duration::from_millis(200)), ..rank.call() };
        let work = rank.start(&call, &options).expect("it starts");
        let error = work.wait(Deadline::after(PATIENCE)).expect_err("its stream does not come");
        assert_eq!(error.status(), Status::Timeout, "{error}");
        assert!(kernels.combiners.lock().expect("no panic")[0].is_some(), "a courier that combines");
        gate.release();
        rank.expect(output, &[5; 50], "what was there");
    });
}

#[test]
fn the_root_combines_what_comes_with_what_it_has() {
    two(|rank, run| {
        let of_each = [0, 1].map(|from| given(from, 1, 50));
        let operators: [(Operator, Combination); 3] = [
            (Operator::Sum, |one, other| one + other),
            (Operator::Max, i32::max),
            (Operator::Average, |one, other| (one + other) / 2),
        ];
        for (operator, combine) in operators {
            for (root, in_place) in [(0, false), (0, true), (1, false), (1, true)] {
                let own = &of_each[rank.rank as usize];
                let input = rank.memory(own);
                rank.fill(input, own);
                let output = if in_place { input } else { rank.memory(own) };
                let call = Request { operator, ..request(Kind::Reduce, input, output, 50, root) };
                let is_root = rank.rank == root;
                assert_eq!(run(&call), is_root, "{operator:?} to {root}");
                let due: Vec<i32> =
                    of_each[0].iter().zip(&of_each[1]).map(|(&one, &other)| combine(one, other)).collect();
                if is_root {
                    rank.expect(output, &due, "the result");
                }
                if !(is_root && in_place) {
                    rank.expect(input, own, "the input");
                }
            }
        }
    });
}

#[test]
fn what_its_courier_cannot_combine_the_root_loads() {
    two(|rank, run| {
        let of_each = [0, 1].map(|from| given(from, 1, 51));
        // Between two elements; more than a piece; by scalars of their own.
        let long = [0, 1].map(|from| given(from, 1, 65));
        let scaled = Operator::PreMulSum(f64::from(rank.rank + 2));
        for (values, shift, operator) in
            [(&of_each, 2, Operator::Sum), (&long, 0, Operator::Sum), (&of_each, 0, scaled)]
        {
            let own = &values[rank.rank as usize];
            let input = rank.memory(&[&own[..], &[0]].concat()) + shift;
            rank.fill(input, own);
            let call = Request { operator, ..request(Kind::Reduce, input, input, own.len() as u64, 0) };
            assert!(!run(&call), "{operator:?} of {}", own.len());
            if rank.rank == 0 {
                let factors = if matches!(operator, Operator::Sum) { [1, 1] } else { [2, 3] };
                let due: Vec<i32> = values[0]
                    .iter()
                    .zip(&values[1])
                    .map(|(one, other)| factors[0] * one + factors[1] * other)
                    .collect();
                rank.expect(input, &due, "the result");
            }
        }
    });
}
