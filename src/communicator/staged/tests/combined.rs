//! Reductions to one of two ranks, whose courier combines.

use std::sync::Mutex;

use super::*;
use crate::cuda::courier::{self, Combiner};
use crate::cuda::double::DoubleKernels;
use crate::cuda::local::{Fold, Kernels};
use crate::cuda::stream::Stream;

/// Kernels that note what couriers were to combine.
#[derive(Debug)]
struct Noted {
    kernels: DoubleKernels,
    combiners: Mutex<Vec<Option<Combiner>>>,
}

impl Kernels for Noted {
    fn prepare(&self, devices: &Arc<Devices>, device: u32, dtype: DataType, operator: Operator) -> Result<()> {
        self.kernels.prepare(devices, device, dtype, operator)
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

/// Runs `body` on two ranks, with what runs a reduction: whether its courier was to combine.
fn two(body: impl Fn(&Rank, &dyn Fn(&Request) -> bool) + Sync) {
    let complaints = ranks(2, "tcp", Order::RoundRobin, |rank| {
        let kernels =
            Arc::new(Noted { kernels: DoubleKernels(rank.double.clone()), combiners: Mutex::default() });
        rank.context.cuda().pretend_kernels(kernels.clone());
        rank.double.shrink(132);
        body(rank, &|request| {
            let work = rank.start(request, &rank.call()).expect("it starts");
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
            let combiners = std::mem::take(&mut *kernels.combiners.lock().expect("no panic"));
            assert_eq!(combiners.len(), 1, "a courier");
            combiners[0].is_some()
        });
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}

#[test]
fn the_root_combines_what_comes_with_what_it_has() {
    two(|rank, run| {
        let of_each = [0, 1].map(|from| given(from, 1, 50));
        let operators: [(Operator, fn(i32, i32) -> i32); 3] = [
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
