//! Algorithm objects over several host buffers of each rank.

mod support;

use support::{PATIENCE, TRANSPORTS, ranks};
use unisono::collective::request::Kind;
use unisono::communicator::{AlgorithmOptions, Call, Context, Prepared};
use unisono::deadline::Deadline;
use unisono::reduce::{DataType, Operand, Operator, Reducer, Representation};
use unisono::schedule::{self, Algorithm};

const SIZE: u32 = 3;
const BUFFERS: usize = 2;
const COUNT: usize = 2003;
const ROOT: u32 = 1;

/// Element `index` of one rank's buffer, whose sums are rounded.
fn input(rank: u32, buffer: usize, round: usize) -> Vec<u8> {
    let value = |index: usize| ((index * 37 + rank as usize * 101 + buffer * 53 + round) % 97) as f32 / 7.0;
    (0..COUNT).flat_map(|index| half::bf16::from_f32(value(index)).to_ne_bytes()).collect()
}

/// What all buffers of all ranks combine to: those of each rank first, and one rounding.
fn expected(operator: Operator, round: usize) -> Vec<u8> {
    let contributions = SIZE * BUFFERS as u32;
    let fold = |inputs: &[Vec<u8>], from, to, size: usize| {
        let scale = if let Operator::PreMulSum(scale) = operator { scale } else { 1.0 };
        let operand = |input: &Vec<u8>| Operand { address: input.as_ptr(), representation: from, scale };
        let operands: Vec<Operand> = inputs.iter().map(operand).collect();
        let mut out = vec![0; COUNT * size];
        let reducer = Reducer::new(DataType::Bf16, operator, contributions).expect("a reduction");
        // SAFETY: inputs and output have this many positions.
        unsafe { reducer.fold(&operands, out.as_mut_ptr(), to, COUNT) };
        out
    };
    let (element, wide) = (Representation::Element, Representation::Accumulator);
    let of_rank = |rank| {
        let inputs: Vec<_> = (0..BUFFERS).map(|buffer| input(rank, buffer, round)).collect();
        fold(&inputs, element, wide, 4)
    };
    let partials: Vec<_> = (0..SIZE).map(of_rank).collect();
    fold(&partials, wide, element, 2)
}

/// Runs one object several times, and starts it once.
fn check(context: &Context, kind: Kind, algorithm: i32, operator: Operator) {
    let mut buffers = vec![vec![0u8; 2 * COUNT]; BUFFERS];
    let options = AlgorithmOptions {
        kind,
        algorithm,
        buffers: buffers.iter_mut().map(|buffer| buffer.as_mut_ptr()).collect(),
        streams: Vec::new(),
        count: COUNT as u64,
        dtype: DataType::Bf16,
        operator,
        root: ROOT,
        root_buffer: 0,
        call: Call::default(),
    };
    // SAFETY: the buffers outlive the object, whose runs are waited for.
    let prepared = unsafe { Prepared::new(context, options) }.expect("an object");
    for round in 0..3 {
        let inputs: Vec<_> = (0..BUFFERS).map(|buffer| input(context.rank(), buffer, round)).collect();
        for (buffer, input) in buffers.iter_mut().zip(&inputs) {
            buffer.copy_from_slice(input);
        }
        if round == 1 {
            prepared.start().expect("a start").wait(Deadline::after(PATIENCE)).expect("an end");
        } else {
            prepared.run().expect("a run");
        }
        let obtains = kind == Kind::Allreduce || context.rank() == ROOT;
        for (buffer, input) in buffers.iter().zip(inputs) {
            let due = if obtains { expected(operator, round) } else { input };
            assert!(*buffer == due, "{kind:?} by {} {operator:?}, round {round}", prepared.algorithm());
        }
    }
}

#[test]
fn several_buffers_are_rounded_once_by_every_algorithm() {
    for transports in TRANSPORTS {
        ranks(SIZE, transports, |context| {
            for (kind, named) in
                [(Kind::Reduce, schedule::Kind::Reduce), (Kind::Allreduce, schedule::Kind::Allreduce)]
            {
                let by_name = Algorithm::ALL
                    .into_iter()
                    // The rings add up in another order.
                    .filter(|a| !matches!(a, Algorithm::Local | Algorithm::Ring | Algorithm::RingChunked))
                    .filter(|algorithm| algorithm.serves(named))
                    .map(|algorithm| algorithm as i32);
                for algorithm in std::iter::once(0).chain(by_name) {
                    for operator in [Operator::Sum, Operator::Average, Operator::PreMulSum(0.3)] {
                        check(context, kind, algorithm, operator);
                    }
                }
            }
        });
    }
}

/// Runs of one object come after each other, whatever they combine first: a run reads what the one before has left.
#[test]
fn a_run_that_is_started_behind_another_has_its_result() {
    const RANKS: u32 = 2;
    for transports in TRANSPORTS {
        ranks(RANKS, transports, |context| {
            for (operator, buffers) in [
                (Operator::Sum, 1),
                (Operator::Sum, 2),
                (Operator::PreMulSum(1.0), 1),
                (Operator::PreMulSum(1.0), 2),
            ] {
                for count in [1, 60_000] {
                    let mut memory = vec![vec![1.0_f32; count]; buffers];
                    let options = AlgorithmOptions {
                        kind: Kind::Allreduce,
                        algorithm: 0,
                        buffers: memory.iter_mut().map(|buffer| buffer.as_mut_ptr().cast()).collect(),
                        streams: Vec::new(),
                        count: count as u64,
                        dtype: DataType::F32,
                        operator,
                        root: 0,
                        root_buffer: 0,
                        call: Call::default(),
                    };
                    // SAFETY: the buffers outlive the object, whose runs are waited for.
                    let prepared = unsafe { Prepared::new(context, options) }.expect("an object");
                    let runs = [(); 3].map(|()| prepared.start().expect("a start"));
                    for run in runs {
                        run.wait(Deadline::after(PATIENCE)).expect("an end");
                    }
                    let due = (RANKS as f32 * buffers as f32).powi(3);
                    let what = format!("{operator:?} of {buffers} buffers, {transports}");
                    assert!(memory.iter().flatten().all(|&value| value == due), "{what}: {}", memory[0][0]);
                }
            }
        });
    }
}
