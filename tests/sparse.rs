//! Sparse allreduce: blocking and with work handles, beside other calls, and when something goes wrong.

mod support;

use std::collections::BTreeMap;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use support::processes::{Job, Seat, enter, report};
use support::{PATIENCE, Random, TRANSPORTS, Verb, barrier, in_time, ranks, tagged, within};
use unisono::collective::request::Kind;
use unisono::communicator::sparse::{Input, Sparse};
use unisono::communicator::{Call, Context, Work};
use unisono::deadline::Deadline;
use unisono::error::{Result, Status};
use unisono::reduce::{DataType, Operator};

#[test]
fn rank() {
    enter(&[("sparse", until_it_fails)]);
}

/// A rank's tensor of whole numbers, with duplicates.
#[derive(Clone)]
struct Tensor {
    dims: u32,
    block: u64,
    indices: Vec<i64>,
    values: Vec<i64>,
}

impl Tensor {
    /// `nnz` elements that only `seed` and `rank` decide.
    fn new(seed: u64, rank: u32, dims: u32, block: u64, nnz: usize) -> Tensor {
        let mut random = Random(seed << 16 | u64::from(rank));
        // Few enough places that ranks share some.
        let places = nnz as u64 * 2 + 1;
        let mut number = |limit: u64| random.below(limit) as i64 - (limit / 2) as i64;
        let indices =
            (0..nnz * dims as usize).map(|at| if at < nnz { number(places) } else { number(3) }).collect();
        let values = (0..nnz as u64 * block).map(|_| number(1000)).collect();
        Tensor { dims, block, indices, values }
    }

    fn nnz(&self) -> usize {
        self.indices.len() / self.dims as usize
    }

    fn bytes(&self) -> Vec<u8> {
        self.values.iter().flat_map(|value| value.to_ne_bytes()).collect()
    }

    fn with<T>(&self, call: impl FnOnce(&Input<'_>) -> T) -> T {
        let (nnz, values, dtype) = (self.nnz() as u64, self.bytes(), DataType::I64);
        let (dims, block) = (self.dims, self.block);
        call(&Input { indices: &self.indices, values: &values, nnz, dims, block, dtype })
    }

    fn run(&self, context: &Context, call: &Call) -> Result<Sparse> {
        self.with(|input| context.sparse_allreduce(input, Operator::Sum, call))
    }

    fn start(&self, context: &Context, call: &Call) -> (Work, Sparse) {
        self.with(|input| context.start_sparse_allreduce(input, Operator::Sum, call)).expect("it starts")
    }
}

type Places = BTreeMap<Vec<i64>, Vec<i64>>;

/// The sum of tensors, the slow way.
fn sum(tensors: &[Tensor]) -> Places {
    let mut places = Places::new();
    for tensor in tensors {
        let (nnz, block) = (tensor.nnz(), tensor.block as usize);
        for element in 0..nnz {
            let index = (0..tensor.dims as usize).map(|dim| tensor.indices[dim * nnz + element]).collect();
            let place = places.entry(index).or_insert_with(|| vec![0; block]);
            for (sum, value) in place.iter_mut().zip(&tensor.values[element * block..]) {
                *sum += value;
            }
        }
    }
    places
}

/// The same for a result, which is also checked for its order.
fn places(sparse: &Sparse) -> Places {
    let (nnz, dims) = (sparse.nnz() as usize, sparse.dims() as usize);
    let values: Vec<i64> =
        sparse.values().as_chunks().0.iter().map(|bytes| i64::from_ne_bytes(*bytes)).collect();
    let index =
        |element: usize| -> Vec<i64> { (0..dims).map(|dim| sparse.indices()[dim * nnz + element]).collect() };
    assert!((1..nnz).all(|element| index(element - 1) < index(element)), "sorted, each once");
    let block = values.len().checked_div(nnz).unwrap_or(0);
    (0..nnz).map(|element| (index(element), values[element * block..][..block].to_vec())).collect()
}

fn tensors(seed: u64, size: u32, dims: u32, block: u64, nnz: impl Fn(u32) -> usize) -> Vec<Tensor> {
    (0..size).map(|rank| Tensor::new(seed, rank, dims, block, nnz(rank))).collect()
}

#[test]
fn every_rank_gets_the_sum_whether_it_waits_or_not() {
    for transports in TRANSPORTS {
        for size in [1, 2, 3, 5] {
            ranks(size, transports, |context| {
                for (seed, (dims, block, nnz)) in
                    [(1, 1, 0), (1, 1, 7), (2, 3, 100), (3, 1, 2000), (1, 64, 3000), (3, 40, 3000)]
                        .into_iter()
                        .enumerate()
                {
                    // Ranks have different numbers of elements, the second none.
                    let all = tensors(seed as u64, size, dims, block, |rank| match rank {
                        1 => 0,
                        _ => nnz * (rank as usize + 1) / size as usize,
                    });
                    let mine = &all[context.rank() as usize];
                    let wanted = sum(&all);
                    let blocking = mine.run(context, &Call::default()).expect("a sparse allreduce");
                    assert!(places(&blocking) == wanted, "{transports}, {size} ranks, case {seed}");
                    let (work, started) = mine.start(context, &Call::default());
                    work.wait(Deadline::after(PATIENCE)).expect("the work ends well");
                    assert_eq!(started.dims(), dims);
                    assert!(places(&started) == wanted, "{transports}, {size} ranks, case {seed}");
                }
            });
        }
    }
}

/// Long enough that each rank merges a part, with a tag and without: the sums are those of the tree over the
/// ranks.
#[test]
fn long_tensors_have_the_bits_of_the_tree() {
    const BLOCK: usize = 32;
    /// Rank and element decide what is there, and where: more and more ranks have a place the lower it is.
    fn list(rank: u32) -> (Vec<i64>, Vec<f32>) {
        let mut random = Random(u64::from(rank) + 77);
        let mut indices: Vec<i64> =
            (0..6000).filter(|&place| random.below(6000) >= place).map(|place| place as i64 - 3000).collect();
        if rank == 1 {
            indices.reverse();
        }
        let values = indices.iter().flat_map(|&index| (0..BLOCK).map(move |at| value(rank, index, at)));
        let values = values.collect();
        (indices, values)
    }
    fn value(rank: u32, index: i64, at: usize) -> f32 {
        ((index * 31 + at as i64) as f32 * (0.37 + rank as f32)).sin() * 10_f32.powi(rank as i32 * 2 % 5)
    }
    fn tree(values: &[Option<f32>]) -> Option<f32> {
        if let [single] = values {
            return *single;
        }
        let (left, right) = values.split_at(values.len().next_power_of_two() / 2);
        match (tree(left), tree(right)) {
            (Some(left), Some(right)) => Some(left + right),
            (left, right) => left.or(right),
        }
    }
    for size in [3, 5] {
        let lists: Vec<_> = (0..size).map(list).collect();
        let mut having: BTreeMap<i64, Vec<bool>> = BTreeMap::new();
        for (rank, (indices, _)) in lists.iter().enumerate() {
            for &index in indices {
                having.entry(index).or_insert_with(|| vec![false; size as usize])[rank] = true;
            }
        }
        let sum = |index: i64, has: &[bool], at: usize| {
            let values: Vec<_> =
                (0..size).zip(has).map(|(rank, has)| has.then(|| value(rank, index, at))).collect();
            tree(&values).expect("a rank has it").to_bits()
        };
        let due: Vec<u32> = having
            .iter()
            .flat_map(|(&index, has)| (0..BLOCK).map(move |at| (index, has, at)))
            .map(|(index, has, at)| sum(index, has, at))
            .collect();
        for transports in TRANSPORTS {
            ranks(size, transports, |context| {
                let (indices, values) = &lists[context.rank() as usize];
                let values: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
                let (nnz, dims, block, dtype) = (indices.len() as u64, 1, BLOCK as u64, DataType::F32);
                let input = Input { indices, values: &values, nnz, dims, block, dtype };
                for call in [Call::default(), tagged(3)] {
                    let result =
                        context.sparse_allreduce(&input, Operator::Sum, &call).expect("a sparse allreduce");
                    let bits = result.values().as_chunks().0.iter().map(|bytes| u32::from_ne_bytes(*bytes));
                    assert!(result.indices().iter().eq(having.keys()), "{transports}, {size} ranks");
                    assert!(bits.eq(due.iter().copied()), "{transports}, {size} ranks");
                }
            });
        }
    }
}

#[test]
fn many_in_flight_run_in_the_order_of_their_tags_beside_other_calls() {
    for transports in TRANSPORTS {
        ranks(3, transports, |context| {
            let rank = context.rank();
            let call = |which: u64| if which.is_multiple_of(3) { Call::default() } else { tagged(which % 3) };
            let all =
                |which: u64| tensors(which, 3, 2, 4, |rank| (which * 97 % 800) as usize + rank as usize);
            // The ranks start the tags in different orders, those of one tag in the same.
            let mut order: Vec<u64> = (0..18).collect();
            order.sort_by_key(|which| (which % 3 + u64::from(rank)) % 3);
            let mut dense = vec![[1.0f32; 100]; 18];
            let mut works = Vec::new();
            for &which in &order {
                works.push((which, all(which)[rank as usize].start(context, &call(which))));
                let verb = Verb::new(Kind::Allreduce, 100);
                verb.start_in(context, &mut dense[which as usize], &call(which)).expect("it starts");
            }
            for (which, (work, result)) in works.iter().rev() {
                work.wait(Deadline::after(PATIENCE)).expect("the work ends well");
                assert!(places(result) == sum(&all(*which)), "{transports}, number {which}");
            }
            // The calls of a tag run in their order: behind these, all have ended.
            for tag in 0..3 {
                Verb::new(Kind::Barrier, 0).run_in::<u8>(context, &mut [], &call(tag)).expect("a barrier");
            }
            assert!(dense.iter().flatten().all(|&value| value == 3.0), "{transports}");
        });
    }
}

#[test]
fn nobody_needs_to_wait_and_the_callback_finds_the_result() {
    for transports in TRANSPORTS {
        ranks(4, transports, |context| {
            let all = tensors(5, 4, 1, 2, |rank| 500 * rank as usize);
            let (tell, told) = mpsc::channel();
            let (work, result) = all[context.rank() as usize].start(context, &Call::default());
            let seen = result.clone();
            work.on_complete(Box::new(move |outcome| {
                outcome.expect("it ends well");
                tell.send(places(&seen)).expect("somebody listens");
            }));
            drop((work, result));
            // No call of unisono from here: its background thread does it all.
            assert!(told.recv_timeout(PATIENCE).expect("it ends") == sum(&all), "{transports}");
        });
    }
}

#[test]
fn the_input_is_free_and_the_result_empty_when_a_started_call_returns() {
    for transports in TRANSPORTS {
        ranks(2, transports, |context| {
            let all = tensors(6, 2, 1, 1, |_| 4);
            if context.rank() == 0 {
                let mut mine = all[0].clone();
                let mut values = mine.bytes();
                let (nnz, dims, block, dtype) = (4, 1, 1, DataType::I64);
                let input = Input { indices: &mine.indices, values: &values, nnz, dims, block, dtype };
                let (work, result) = context
                    .start_sparse_allreduce(&input, Operator::Sum, &Call::default())
                    .expect("it starts");
                mine.indices.fill(77);
                values.fill(77);
                assert!(work.test().is_none(), "rank 1 has not called");
                assert_eq!((result.dims(), result.nnz()), (1, 0));
                assert!(result.indices().is_empty() && result.values().is_empty());
                support::send(context, 1, &[1], &Call::default()).expect("a send");
                work.wait(Deadline::after(PATIENCE)).expect("the work ends well");
                assert!(places(&result) == sum(&all), "{transports}");
            } else {
                support::receive(context, 0, &mut [0], &Call::default()).expect("a receive");
                let result = all[1].run(context, &Call::default()).expect("a sparse allreduce");
                assert!(places(&result) == sum(&all), "{transports}");
            }
        });
    }
}

#[test]
fn calls_that_differ_are_named_on_every_rank() {
    type Change = fn(&mut Input<'_>, &mut Operator);
    let changes: [(Change, &str, &str); 4] = [
        (|input, _| input.dims = 2, "sparse_allreduce(1 dims", "sparse_allreduce(2 dims"),
        (|input, _| input.block = 5, "blocks of 1 × int64", "blocks of 5 × int64"),
        (|input, _| input.dtype = DataType::F64, "int64", "float64"),
        (|_, operator| *operator = Operator::Max, "sum", "max"),
    ];
    for transports in TRANSPORTS {
        for call in [Call::default(), tagged(9)] {
            for (change, one, other) in changes {
                ranks(2, transports, |context| {
                    let mut operator = Operator::Sum;
                    let (dims, block, dtype) = (1, 1, DataType::I64);
                    let mut input = Input { indices: &[], values: &[], nnz: 0, dims, block, dtype };
                    if context.rank() == 1 {
                        change(&mut input, &mut operator);
                    }
                    // The other may have been so much faster that the group has failed.
                    let error = match context.start_sparse_allreduce(&input, operator, &call) {
                        Ok((work, result)) => {
                            let error = work.wait(Deadline::after(PATIENCE)).expect_err("they differ");
                            assert_eq!(result.nnz(), 0);
                            error
                        }
                        Err(error) => error,
                    };
                    assert_eq!(error.status(), Status::Mismatch, "{error}");
                    for words in [one, other, "rank 0", "rank 1"] {
                        assert!(error.text().contains(words), "{transports}: {error} does not say {words}");
                    }
                    let again = context.sparse_allreduce(&input, operator, &call).expect_err("it stays");
                    assert_eq!(again.status(), Status::Mismatch, "{again}");
                });
            }
        }
    }
}

#[test]
fn another_operation_is_a_mismatch_too() {
    for transports in TRANSPORTS {
        ranks(2, transports, |context| {
            let error = if context.rank() == 0 {
                tensors(7, 2, 1, 1, |_| 3)[0].run(context, &Call::default()).expect_err("they differ")
            } else {
                let verb = Verb::new(Kind::Allreduce, 3);
                verb.run_in(context, &mut [1.0f32; 3], &Call::default()).expect_err("they differ")
            };
            assert_eq!(error.status(), Status::Mismatch, "{error}");
            for words in ["sparse_allreduce(1 dims, blocks of 1 × int64, sum)", "allreduce(3 × float32, sum)"]
            {
                assert!(error.text().contains(words), "{transports}: {error} does not say {words}");
            }
        });
    }
}

#[test]
fn a_deadline_names_the_rank_that_did_not_come() {
    for transports in TRANSPORTS {
        for blocking in [false, true] {
            ranks(2, transports, |context| {
                let child = context.duplicate().expect("a second context");
                if context.rank() == 0 {
                    let mine = Tensor::new(8, 0, 1, 1, 3);
                    let error = match blocking {
                        true => mine.run(&child, &within(200)).expect_err("rank 1 does not come"),
                        false => {
                            let (work, _) = mine.start(&child, &within(200));
                            work.wait(Deadline::after(PATIENCE)).expect_err("rank 1 does not come")
                        }
                    };
                    assert_eq!(error.status(), Status::Timeout, "{error}");
                    for words in ["sparse_allreduce #0", "rank 1"] {
                        assert!(error.text().contains(words), "{transports}: {error} does not say {words}");
                    }
                }
                barrier(context);
            });
        }
    }
}

#[test]
fn an_abort_ends_what_is_in_flight() {
    for transports in TRANSPORTS {
        ranks(3, transports, |context| {
            if context.rank() == 2 {
                for other in 0..2 {
                    support::receive(context, other, &mut [0], &Call::default()).expect("it has started");
                }
                context.abort();
            } else {
                let works: Vec<_> =
                    (0..4).map(|tag| Tensor::new(9, 0, 1, 1, 9).start(context, &tagged(tag))).collect();
                support::send(context, 2, &[1], &Call::default()).expect("a send");
                for (work, result) in works {
                    let error = work.wait(Deadline::after(PATIENCE)).expect_err("rank 2 aborts");
                    assert_eq!(error.status(), Status::Aborted, "{error}");
                    assert_eq!(result.nnz(), 0);
                    let cancelled = work.cancel();
                    assert!(cancelled.is_ok(), "it has ended");
                }
            }
        });
    }
}

fn until_it_fails(seat: &Seat) {
    let context = Context::create(seat.options("")).expect("the ranks meet");
    let tensor = Tensor::new(3, seat.rank, 1, 16, 20_000);
    let mut works = std::collections::VecDeque::new();
    let mut rounds = 0;
    // Some are always in flight.
    let error = loop {
        let mut refused = None;
        while works.len() < 3 {
            match tensor.with(|input| context.start_sparse_allreduce(input, Operator::Sum, &Call::default()))
            {
                Ok((work, _)) => works.push_back(work),
                Err(error) => {
                    refused = Some(error);
                    break;
                }
            }
        }
        // Those before may all have ended well.
        let Some(work) = works.pop_front() else { break refused.expect("one is started, or refused") };
        match work.wait(Deadline::after(PATIENCE)) {
            Ok(_) => rounds += 1,
            Err(error) => break error,
        }
        if rounds == 3 {
            report("looping");
        }
    };
    report(format_args!("failed {:?} {error}", error.status()));
}

#[test]
fn all_learn_within_a_second_of_a_rank_killed_meanwhile() {
    for transports in TRANSPORTS {
        in_time(|| survivors_of_a_kill(transports));
    }
}

/// How long it takes until all survivors know.
fn survivors_of_a_kill(transports: &str) -> Duration {
    let mut took = Duration::ZERO;
    let mut job = Job::start("sparse", 3, transports);
    job.await_all(&[0, 1, 2], "looping");
    let killed = Instant::now();
    job.signal(1, libc::SIGKILL);
    for failed in job.await_all(&[0, 2], "failed") {
        let text = &failed.line;
        took = took.max(failed.at - killed);
        assert!(text.starts_with("PeerFailed"), "{transports}: {text}");
        for words in ["rank 1", &format!("pid {}", job.pid(1)), "sparse_allreduce"] {
            assert!(text.contains(words), "{transports}: {text} does not say {words}");
        }
    }
    job.all_end_well(&[0, 2]);
    took
}
