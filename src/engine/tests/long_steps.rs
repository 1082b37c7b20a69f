//! A long local step of a schedule is done a part in each look: in between, deadlines, failures and aborts
//! have their turn.

use super::*;
use crate::engine::executor::{Plan, Run};
use crate::engine::observed::Observed;
use crate::reduce::Operator;
use crate::schedule::{Algorithm, Shape, plan};

/// Elements of a step that takes many looks, and no multiple of what a look does.
const COUNT: usize = (1 << 20) + 12_345;

/// Bytes that are written in a look, at most.
const LOOK: usize = 64 * 1024;

/// None of these is written in three looks.
const UNTOUCHED: usize = COUNT / 2;

/// One rank's run of a collective.
///
/// # Safety
/// As [`Run::new`].
unsafe fn run<T>(
    group: &Group,
    turn: &Turn,
    (collective, algorithm): (&Collective, Algorithm),
    (dtype, operator): (DataType, Option<Operator>),
    (input, output): (&[T], *mut T),
) -> Run {
    let schedule = plan(algorithm, collective, &Shape::new(group.rank(), 2)).expect("it is planned");
    let plan = Plan::new(schedule, dtype, operator, 2).expect("it is known");
    // SAFETY: the caller's promise.
    unsafe { Run::new(group, turn, Arc::new(plan), input.as_ptr().cast(), output.cast()) }
}

/// How an allgather ends of which the other rank has given nothing yet, how many looks that took, and what of
/// the output it must not have come to.
fn gather(waits: bool, timeout: Duration, fails_in: usize) -> (Error, usize, Vec<u32>) {
    let [group, _other] = linked_pair(false);
    let collective = Collective::Allgather { counts: vec![COUNT as u64; 2] };
    let (input, mut output) = (vec![7u32; COUNT], vec![0u32; 2 * COUNT]);
    let (looks, to) = (Arc::new(AtomicUsize::new(0)), output.as_mut_ptr());
    let make = |turn: &Turn| {
        let (what, side) = ((&collective, Algorithm::Linear), (input.as_slice(), to));
        // SAFETY: the buffers are kept until the call has ended.
        let run = unsafe { run(&group, turn, what, (DataType::U32, None), side) };
        Observed::new(run, None, counting(&looks, fails_in))
    };
    let signature = Signature { kind: Kind::Allgather, dtype: DataType::U32, count: COUNT as u64, ..BARRIER };
    let calling = calling(Class::Ordered, 0, signature, Some(timeout));
    let result = match waits {
        true => group.run(calling, make),
        false => {
            let running = group.start(calling, make).expect("it starts");
            running.wait(Deadline::after(Duration::from_secs(20))).expect("it ends")
        }
    };
    let error = result.expect_err("the other rank gives nothing");
    (error, looks.load(Ordering::Relaxed), output.split_off(UNTOUCHED))
}

#[test]
fn a_failure_in_the_middle_of_a_long_copy_ends_it_there() {
    for waits in [true, false] {
        let (error, looks, untouched) = gather(waits, Duration::from_secs(20), 2);
        assert_eq!((error.status(), looks), (Status::Aborted, 2), "{error}");
        assert!(untouched.iter().all(|&element| element == 0), "memory that was given back");
    }
}

#[test]
fn a_deadline_that_passes_in_the_middle_of_a_long_copy_ends_it_there() {
    for waits in [true, false] {
        let (error, looks, untouched) = gather(waits, Duration::ZERO, usize::MAX);
        assert_eq!(error.status(), Status::Timeout);
        assert!(error.text().contains("its bytes are still being moved"), "{error}");
        assert!(looks <= 3, "{looks} looks after the deadline");
        assert!(untouched.iter().all(|&element| element == 0), "memory that was given back");
    }
}

/// Runs an allreduce on both ranks, each with its input: the results are `due`. Each has stopped in the
/// middle many times.
fn combine<T: Copy + Default + PartialEq + Send + Sync>(
    dtype: DataType,
    algorithm: Algorithm,
    inputs: [Vec<T>; 2],
    due: &[T],
) {
    let groups = linked_pair(false);
    let collective = Collective::Allreduce { count: COUNT as u64 };
    let signature = Signature { kind: Kind::Allreduce, dtype, count: COUNT as u64, ..BARRIER };
    std::thread::scope(|scope| {
        for (group, input) in groups.iter().zip(&inputs) {
            let collective = &collective;
            scope.spawn(move || {
                let mut output = vec![T::default(); COUNT];
                let (looks, to) = (Arc::new(AtomicUsize::new(0)), output.as_mut_ptr());
                let make = |turn: &Turn| {
                    let (what, side) = ((collective, algorithm), (input.as_slice(), to));
                    // SAFETY: the buffers are kept until the call has ended.
                    let run = unsafe { run(group, turn, what, (dtype, Some(Operator::Sum)), side) };
                    Observed::new(run, None, counting(&looks, usize::MAX))
                };
                let calling = calling(Class::Ordered, 0, signature, None);
                group.run(calling, make).expect("it ends well");
                assert!(output == due, "{algorithm:?} of {dtype:?}: other elements");
                let looks = looks.load(Ordering::Relaxed);
                assert!(looks > COUNT * size_of::<T>() / 2 / LOOK, "{algorithm:?} of {dtype:?}: {looks}");
            });
        }
    });
}

#[test]
fn what_is_combined_goes_on_where_the_last_look_stopped() {
    // Sums that bfloat16 has, too.
    let given = |rank: usize, at: usize| (at * 31 + rank * 17) % 101;
    let bfloat16 = |number: usize| ((number as f32).to_bits() >> 16) as u16;
    let of = |rank: usize| (0..COUNT).map(move |at| given(rank, at));
    let sums = || (0..COUNT).map(|at| given(0, at) + given(1, at));
    for algorithm in [Algorithm::TwoShot, Algorithm::Ring, Algorithm::HalvingDoubling] {
        let due: Vec<u32> = sums().map(|sum| sum as u32).collect();
        let inputs = [0, 1].map(|rank| of(rank).map(|number| number as u32).collect());
        combine(DataType::U32, algorithm, inputs, &due);
        let due: Vec<u16> = sums().map(bfloat16).collect();
        let inputs = [0, 1].map(|rank| of(rank).map(bfloat16).collect());
        combine(DataType::Bf16, algorithm, inputs, &due);
    }
}
