//! Algorithm objects over several host buffers of each rank.

mod support;

use support::{PATIENCE, TRANSPORTS, Verb, ranks, within};
use unisono::collective::request::Kind;
use unisono::communicator::{AlgorithmOptions, Call, Context, Prepared};
use unisono::deadline::Deadline;
use unisono::error::{Result, Status};
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

/// A run over so many buffers of ones on each rank, and what they hold then.
fn run_over<T: Copy>(
    context: &Context,
    (kind, algorithm, operator): (Kind, i32, Operator),
    (buffers, count): (usize, usize),
    (dtype, one): (DataType, T),
) -> (Result<()>, Vec<Vec<T>>) {
    let mut memory = vec![vec![one; count]; buffers];
    let options = AlgorithmOptions {
        kind,
        algorithm,
        buffers: memory.iter_mut().map(|buffer| buffer.as_mut_ptr().cast()).collect(),
        streams: Vec::new(),
        count: count as u64,
        dtype,
        operator,
        root: 0,
        root_buffer: 0,
        call: within(20_000),
    };
    // SAFETY: the buffers outlive the object.
    let ended = unsafe { Prepared::new(context, options) }.expect("an object").run();
    (ended, memory)
}

/// The ranks combine accumulators then, whatever the elements are.
#[test]
fn an_object_has_the_name_of_what_the_ranks_run() {
    let name = |context: &Context, count: usize, buffers: usize, dtype: DataType, operator| {
        let mut memory = vec![vec![0u8; count * 4]; buffers];
        let options = AlgorithmOptions {
            kind: Kind::Allreduce,
            algorithm: 0,
            buffers: memory.iter_mut().map(|buffer| buffer.as_mut_ptr()).collect(),
            streams: Vec::new(),
            count: count as u64,
            dtype,
            operator,
            root: 0,
            root_buffer: 0,
            call: Call::default(),
        };
        // SAFETY: the buffers outlive the object.
        unsafe { Prepared::new(context, options) }.expect("an object").algorithm()
    };
    ranks(4, TRANSPORTS[0], |context| {
        let mut differ = 0;
        for count in (8..22).map(|digits| 1 << digits) {
            let of_one = |dtype| name(context, count, 1, dtype, Operator::Sum);
            differ += usize::from(of_one(DataType::Bf16) != of_one(DataType::F32));
            for (buffers, operator) in
                [(2, Operator::Sum), (2, Operator::Average), (1, Operator::PreMulSum(0.5))]
            {
                let found = name(context, count, buffers, DataType::Bf16, operator);
                assert_eq!(found, of_one(DataType::F32), "{count} elements, {operator:?}");
            }
        }
        assert!(differ > 0, "elements of both sizes go by one algorithm at each count");
    });
}

#[test]
fn an_average_over_different_numbers_of_buffers_is_a_mismatch() {
    let floats = (DataType::F32, 1.0_f32);
    for transports in TRANSPORTS {
        for (kind, count) in [(Kind::Allreduce, 8), (Kind::Allreduce, 100_000), (Kind::Reduce, 8)] {
            for algorithm in [0, Algorithm::Binomial as i32] {
                // One against several, and several against others.
                for numbers in [[1, 2], [3, 2]] {
                    let errors = ranks(2, transports, |context| {
                        let own = numbers[context.rank() as usize];
                        // In step, whatever they have: a sum, and an average over equally many.
                        let sums = (kind, algorithm, Operator::Sum);
                        let (sum, memory) = run_over(context, sums, (own, count), floats);
                        sum.expect("a sum");
                        let due = (numbers[0] + numbers[1]) as f32;
                        let obtains = kind == Kind::Allreduce || context.rank() == 0;
                        assert!(!obtains || memory.iter().flatten().all(|&value| value == due));
                        let averages = (kind, algorithm, Operator::Average);
                        let (average, memory) = run_over(context, averages, (numbers[0], count), floats);
                        average.expect("an average");
                        assert!(memory.iter().flatten().all(|&value| value == 1.0));
                        let (average, _) = run_over(context, averages, (own, count), floats);
                        // Whoever has given its part by then hears of it in its next call.
                        let next =
                            || Verb::new(Kind::Barrier, 0).run_in::<u8>(context, &mut [], &within(20_000));
                        average.and_then(|()| next()).expect_err("they would divide by different numbers")
                    });
                    for error in errors {
                        let case = format!("{kind:?} of {count} by {algorithm}, {transports}: {error}");
                        assert_eq!(error.status(), Status::Mismatch, "{case}");
                        for words in ["numbers of their buffers differ", "average over 2 buffers"] {
                            assert!(error.text().contains(words), "{case}");
                        }
                    }
                }
            }
        }
    }
}

/// A rank with one buffer sends elements, one with several what they come to, and both may be of the same
/// bytes.
#[test]
fn short_floats_of_one_buffer_here_and_of_several_there_are_a_mismatch() {
    let floats = (DataType::Bf16, half::bf16::from_f32(1.0));
    for transports in TRANSPORTS {
        for (kind, operator, count) in [
            (Kind::Allreduce, Operator::Sum, 8),
            (Kind::Allreduce, Operator::Sum, 1 << 21),
            (Kind::Allreduce, Operator::Product, 8),
            (Kind::Allreduce, Operator::Min, 8),
            (Kind::Allreduce, Operator::Max, 8),
            (Kind::Reduce, Operator::Sum, 8),
        ] {
            for algorithm in [0, Algorithm::TwoShot as i32] {
                let errors = ranks(2, transports, |context| {
                    let run = |operator, numbers: [usize; 2]| {
                        let own = numbers[context.rank() as usize];
                        run_over(context, (kind, algorithm, operator), (own, count), floats)
                    };
                    // One each, several each, and what is scaled first, of which a rank with one buffer sends
                    // no elements either.
                    for (operator, numbers, due) in [
                        (Operator::Sum, [1, 1], 2.0),
                        (Operator::Sum, [2, 3], 5.0),
                        (Operator::Max, [3, 2], 1.0),
                        (Operator::PreMulSum(2.0), [1, 2], 6.0),
                    ] {
                        let (ended, memory) = run(operator, numbers);
                        ended.expect("they fit each other");
                        let obtains = kind == Kind::Allreduce || context.rank() == 0;
                        assert!(!obtains || memory.iter().flatten().all(|value| value.to_f32() == due));
                    }
                    let (ended, _) = run(operator, [1, 2]);
                    // Whoever has given its part by then hears of it in its next call.
                    let next = || Verb::new(Kind::Barrier, 0).run_in::<u8>(context, &mut [], &within(20_000));
                    ended.and_then(|()| next()).expect_err("one has elements, the other what they come to")
                });
                for error in errors {
                    let case = format!("{kind:?} of {count} by {algorithm}, {transports}: {error}");
                    assert_eq!(error.status(), Status::Mismatch, "{case}");
                    for words in ["one rank has one buffer, another several", "over several buffers"] {
                        assert!(error.text().contains(words), "{case}");
                    }
                }
            }
        }
    }
}

/// Runs of one object come after each other, whatever they combine first: a run reads what the one before has
/// left.
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

/// Ranks count direct calls for themselves: a call that has failed before it had a number of those leaves it
/// to the next.
#[test]
fn a_call_behind_one_that_failed_before_its_first_step_does_not_take_its_place() {
    const COUNT: usize = 16 * 1024;
    let both = std::sync::Barrier::new(2);
    ranks(2, "shm", |context| {
        let mut data = vec![5.0f32; COUNT];
        let verb = Verb::new(Kind::Allreduce, COUNT as u64);
        if context.rank() == 1 {
            both.wait();
            let error = verb.run_in(context, &mut data, &Call::default()).expect_err("rank 0 is late");
            assert_eq!(error.status(), Status::Timeout, "{error}");
            return;
        }
        // More than is combined in a millisecond.
        let mut memory = vec![vec![1.0f32; COUNT]; 1000];
        let options = AlgorithmOptions {
            streams: Vec::new(),
            kind: Kind::Allreduce,
            algorithm: 0,
            buffers: memory.iter_mut().map(|buffer| buffer.as_mut_ptr().cast()).collect(),
            count: COUNT as u64,
            dtype: DataType::F32,
            operator: Operator::Sum,
            root: 0,
            root_buffer: 0,
            call: within(1),
        };
        // SAFETY: the buffers outlive the object and its run.
        let late = unsafe { Prepared::new(context, options) }.expect("it is sound");
        both.wait();
        let first = late.start().expect("it starts");
        let second = verb.start_in(context, &mut data, &Call::default());
        first.wait(Deadline::after(PATIENCE)).expect_err("it is late");
        // It may have been refused.
        let second = second.and_then(|second| second.wait(Deadline::after(PATIENCE)));
        assert_eq!(second.expect_err("the group has failed").status(), Status::Timeout);
    });
}

#[test]
fn algorithms_that_no_run_would_take_are_refused_when_an_object_is_made() {
    ranks(2, TRANSPORTS[0], |context| {
        let mut memory = [1.0f32; 10];
        for algorithm in 21..=23 {
            let mut make = |kind| {
                let options = AlgorithmOptions {
                    kind,
                    algorithm,
                    buffers: vec![memory.as_mut_ptr().cast()],
                    streams: Vec::new(),
                    count: 10,
                    dtype: DataType::F32,
                    operator: Operator::Sum,
                    root: 0,
                    root_buffer: 0,
                    call: within(20_000),
                };
                // SAFETY: the memory outlives the object.
                unsafe { Prepared::new(context, options) }.map(drop).expect_err("no run would take it")
            };
            for (kind, why) in [
                (Kind::Allreduce, "serves broadcast, not allreduce"),
                (Kind::Broadcast, "is for device memory"),
            ] {
                let error = make(kind);
                assert_eq!(error.status(), Status::InvalidArgument, "{error}");
                assert!(error.text().contains(why), "{error}");
            }
        }
    });
}

#[test]
fn buffers_that_overlap_in_part_and_a_call_that_names_another_algorithm_are_refused() {
    ranks(2, TRANSPORTS[0], |context| {
        let mut memory = vec![1.0f32; 30];
        let base = memory.as_mut_ptr();
        let make = |kind, offsets: &[usize], named| {
            let options = AlgorithmOptions {
                kind,
                algorithm: Algorithm::Binomial as i32,
                buffers: offsets.iter().map(|&offset| base.wrapping_add(offset).cast()).collect(),
                streams: Vec::new(),
                count: 10,
                dtype: DataType::F32,
                operator: Operator::Sum,
                root: 0,
                root_buffer: 0,
                call: Call { algorithm: named, ..within(20_000) },
            };
            // SAFETY: the memory outlives the object.
            unsafe { Prepared::new(context, options) }
        };
        for kind in [Kind::Allreduce, Kind::Reduce, Kind::Broadcast] {
            let error = make(kind, &[20, 0, 9], None).err().expect("they overlap");
            assert_eq!(error.status(), Status::InvalidArgument);
            assert!(
                error.text().starts_with("options->pointers[1] and options->pointers[2] overlap"),
                "{error}"
            );
        }
        let other =
            make(Kind::Allreduce, &[0], Some(Algorithm::Ring as i32)).err().expect("it names another");
        assert_eq!(other.status(), Status::InvalidArgument);
        assert!(other.text().starts_with("options->call->algorithm is 4, but options->algorithm"), "{other}");
        // The same buffer twice counts twice; neighbours are apart.
        for named in [None, Some(0), Some(Algorithm::Binomial as i32)] {
            // SAFETY: as above; no run is under way.
            unsafe { std::slice::from_raw_parts_mut(base, 30) }.fill(1.0);
            let object = make(Kind::Allreduce, &[0, 10, 0], named).expect("an object");
            object.run().expect("a run");
            // SAFETY: as above.
            let memory = unsafe { std::slice::from_raw_parts(base, 30) };
            assert!(
                memory[..20].iter().all(|&value| value == 6.0)
                    && memory[20..].iter().all(|&value| value == 1.0)
            );
        }
    });
}

/// Each rank's block of a scatter, of which any two differ.
fn block(rank: usize, count: usize) -> Vec<u16> {
    (0..count).map(|index| (index * 31 + (index >> 9) + rank * 7919) as u16).collect()
}

/// The options of a scatter from rank 1, over `buffers`.
fn scattering(buffers: Vec<*mut u8>, count: usize, algorithm: i32, tag: Option<u64>) -> AlgorithmOptions {
    AlgorithmOptions {
        kind: Kind::Scatter,
        algorithm,
        buffers,
        streams: Vec::new(),
        count: count as u64,
        dtype: DataType::Bf16,
        operator: Operator::Sum,
        root: ROOT,
        root_buffer: 0,
        call: Call { tag, ..Call::default() },
    }
}

#[test]
fn blocks_of_a_scatter_lie_anywhere() {
    let algorithms = [0, Algorithm::Linear as i32, Algorithm::Binomial as i32];
    for transports in TRANSPORTS {
        ranks(5, transports, |context| {
            let (rank, size) = (context.rank() as usize, context.size() as usize);
            for (algorithm, tag) in algorithms.into_iter().flat_map(|a| [(a, None), (a, Some(9))]) {
                for (count, in_place) in
                    [0, 1, 5000, 300_001].into_iter().flat_map(|c| [(c, false), (c, true)])
                {
                    // In reverse, with gaps; ranks 3 and 4 have one block.
                    let stride = count + 3;
                    let mut all = vec![7u16; size * stride];
                    let at = |to: usize| (size - 1 - to.min(3)) * stride;
                    for to in 0..size {
                        all[at(to)..][..count].copy_from_slice(&block(to.min(3), count));
                    }
                    let given = all.clone();
                    let mut out = vec![9u16; count];
                    let start = all.as_mut_ptr();
                    let mut buffers: Vec<*mut u8> =
                        (0..size).map(|to| start.wrapping_add(at(to)).cast()).collect();
                    buffers.push(if in_place { buffers[rank] } else { out.as_mut_ptr().cast() });
                    // On others than the root the blocks are not looked at, nor how many there are.
                    if context.rank() != ROOT {
                        let output = buffers[size];
                        let nothing = if rank == 0 { 1 } else { size };
                        buffers = vec![std::ptr::null_mut(); nothing];
                        buffers.push(output);
                    }
                    let options = scattering(buffers, count, algorithm, tag);
                    // SAFETY: the buffers outlive the object, whose runs are waited for.
                    let prepared = unsafe { Prepared::new(context, options) }.expect("an object");
                    prepared.run().expect("a run");
                    prepared.start().expect("a start").wait(Deadline::after(PATIENCE)).expect("an end");
                    let due = block(rank.min(3), count);
                    let case = format!("{count} by {algorithm}, {tag:?}, {transports}");
                    let found = if in_place { &all[at(rank)..][..count] } else { &out };
                    assert!(found == due, "{case}");
                    assert!(all == given, "{case}");
                }
            }
        });
    }
}

#[test]
fn blocks_of_a_scatter_that_overlap_its_output_are_refused() {
    ranks(2, TRANSPORTS[0], |context| {
        if context.rank() != ROOT {
            return;
        }
        let mut memory = [0u16; 64];
        let start = memory.as_mut_ptr();
        let at = |index: usize| start.wrapping_add(index).cast::<u8>();
        for ([first, own, output], named) in [([0, 20, 0], 0), ([0, 20, 9], 0), ([0, 20, 21], 1)] {
            let options = scattering(vec![at(first), at(own), at(output)], 10, 0, None);
            // SAFETY: the memory outlives the object.
            let refused = unsafe { Prepared::new(context, options) }.map(drop).expect_err("they overlap");
            assert_eq!(refused.status(), Status::InvalidArgument);
            let words = format!("the block of rank {named} and the output overlap");
            assert!(refused.text().contains(&words), "{refused}");
        }
        for buffers in [1, 4] {
            let options = scattering(vec![at(0); buffers], 1, 0, None);
            // SAFETY: as above.
            let refused =
                unsafe { Prepared::new(context, options) }.map(drop).expect_err("too few, too many");
            assert!(refused.text().contains("or a block for each rank"), "{refused}");
        }
    });
}
