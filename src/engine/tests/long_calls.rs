//! A long direct call moves a part in each look: in between, deadlines, failures and other operations have
//! their turn.

use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::thread::{self, ThreadId};

use super::*;
use crate::engine::observed::Observed;
use crate::reduce::{Operator, Reducer};

/// Elements of a call that takes many looks.
const COUNT: usize = 3 << 20;
const BYTES: usize = COUNT * size_of::<u32>();

/// What is moved in a look, at most: a block of a reduction.
const LOOK: usize = 256 * 1024;

/// The first look moves a part, and so do two more before a deadline is found to have passed. None comes so
/// far.
const UNTOUCHED: usize = COUNT / 2;

/// What a rank gives.
fn given(rank: usize, count: usize) -> Vec<u32> {
    (0..count as u32).map(|at| at.wrapping_mul(2_654_435_761) ^ (rank as u32 + 1)).collect()
}

/// One rank's side of a call.
struct Side {
    collective: Collective,
    input: Vec<u32>,
    output: Vec<u32>,
    /// What is to be there at the end.
    expected: Vec<u32>,
    listed: bool,
    in_place: bool,
}

impl Side {
    /// A side whose output is another buffer.
    fn apart(collective: Collective, input: Vec<u32>, expected: Vec<u32>) -> Side {
        let output = vec![0; expected.len()];
        Side { collective, input, output, expected, listed: false, in_place: false }
    }

    fn in_place(self) -> Side {
        Side { output: self.input.clone(), in_place: true, ..self }
    }

    fn listed(self) -> Side {
        Side { listed: true, ..self }
    }

    /// The run of `turn`.
    ///
    /// # Safety
    /// The side stays where it is until the run has ended or is abandoned.
    unsafe fn run(&mut self, group: &Group, turn: &Turn) -> DirectRun {
        let reduces = turn.signature.kind.reduces();
        let output = self.output.as_mut_ptr().cast::<u8>();
        let job = Job {
            collective: self.collective.clone(),
            listed: self.listed,
            input: if self.in_place { output } else { self.input.as_ptr().cast() },
            output,
            in_place: self.in_place,
            dtype: DataType::U32,
            reducer: reduces.then(|| Reducer::new(DataType::U32, Operator::Sum, 2).expect("it is known")),
        };
        let direct = group.direct().expect("shared memory").clone();
        // SAFETY: the caller's promise.
        unsafe { DirectRun::new(group, turn, direct, job, Path::Long) }
    }
}

fn signature(kind: Kind) -> Signature {
    Signature { kind, dtype: DataType::U32, count: COUNT as u64, ..BARRIER }
}

const BROADCAST: Collective = Collective::Broadcast { count: COUNT as u64, root: 0 };

/// A broadcast from rank 0 to rank 1.
fn broadcast_sides() -> [Side; 2] {
    let root = Side::apart(BROADCAST, given(0, COUNT), given(0, COUNT)).in_place();
    [root, Side::apart(BROADCAST, Vec::new(), given(0, COUNT))]
}

/// Calls of every kind, in which each rank that moves anything moves `COUNT` elements or more; and which
/// ranks do.
fn calls() -> Vec<(Kind, [Side; 2], [bool; 2])> {
    let both = |side: &dyn Fn(usize) -> Side| [side(0), side(1)];
    let sum: Vec<u32> =
        given(0, 2 * COUNT).iter().zip(given(1, 2 * COUNT)).map(|(a, b)| a.wrapping_add(b)).collect();
    let joined = |parts: [&[u32]; 2]| parts.concat();
    // Of neither rank as many as of the other, and no multiple of what a look moves.
    let uneven = [COUNT - 1000, COUNT + 1000];
    let counts: Vec<u64> = uneven.map(|count| count as u64).into();
    let (count, all) = (COUNT as u64, 2 * COUNT as u64);
    let gathered = joined([&given(0, uneven[0]), &given(1, uneven[1])]);
    let allreduce =
        |rank| Side::apart(Collective::Allreduce { count: all }, given(rank, 2 * COUNT), sum.clone());
    let reduce = |rank| {
        let expected = if rank == 1 { sum.clone() } else { Vec::new() };
        Side::apart(Collective::Reduce { count: all, root: 1 }, given(rank, 2 * COUNT), expected)
    };
    let reduce_scatter = |rank: usize| {
        let expected = if rank == 0 { &sum[..uneven[0]] } else { &sum[uneven[0]..] };
        let collective = Collective::ReduceScatter { counts: counts.clone() };
        Side::apart(collective, given(rank, 2 * COUNT), expected.to_vec())
    };
    let allgather = |rank: usize| {
        let collective = Collective::Allgather { counts: counts.clone() };
        Side::apart(collective, given(rank, uneven[rank]), gathered.clone())
    };
    let gather = |rank: usize| {
        let expected = if rank == 0 { gathered.clone() } else { Vec::new() };
        let collective = Collective::Gather { counts: counts.clone(), root: 0 };
        Side::apart(collective, given(rank, uneven[rank]), expected).listed()
    };
    let scatter = |rank: usize| {
        let all = given(1, 2 * COUNT);
        let expected = if rank == 0 { &all[..uneven[0]] } else { &all[uneven[0]..] };
        let collective = Collective::Scatter { counts: counts.clone(), root: 1 };
        let input = if rank == 1 { all.clone() } else { Vec::new() };
        Side::apart(collective, input, expected.to_vec()).listed()
    };
    let alltoall = |rank: usize| {
        let half = rank * COUNT..(rank + 1) * COUNT;
        let expected = joined([&given(0, 2 * COUNT)[half.clone()], &given(1, 2 * COUNT)[half]]);
        let counts = vec![count; 2];
        let collective = Collective::Alltoall { send_counts: counts.clone(), recv_counts: counts };
        Side::apart(collective, given(rank, 2 * COUNT), expected)
    };
    let alltoallv = |rank: usize| {
        // Each sends the first so many elements to rank 0.
        let halves = [0, 1].map(|from| given(from, 2 * COUNT));
        let parts = [0, 1].map(|from: usize| match rank {
            0 => &halves[from][..uneven[from]],
            _ => &halves[from][uneven[from]..],
        });
        let send_counts = vec![uneven[rank] as u64, uneven[1 - rank] as u64];
        let recv_counts = parts.map(|part| part.len() as u64).into();
        let collective = Collective::Alltoall { send_counts, recv_counts };
        Side::apart(collective, halves[rank].clone(), joined(parts)).listed()
    };
    vec![
        (Kind::Broadcast, broadcast_sides(), [false, true]),
        (Kind::Broadcast, both(&|_| Side::apart(BROADCAST, given(0, COUNT), given(0, COUNT))), [true; 2]),
        (Kind::Allreduce, both(&allreduce), [true; 2]),
        (Kind::Allreduce, both(&|rank| allreduce(rank).in_place()), [true; 2]),
        (Kind::Reduce, both(&reduce), [true; 2]),
        (Kind::ReduceScatter, both(&reduce_scatter), [true; 2]),
        (Kind::Allgather, both(&allgather), [true; 2]),
        (Kind::Gather, both(&gather), [true, false]),
        (Kind::Scatter, both(&scatter), [true; 2]),
        (Kind::Alltoall, both(&alltoall), [true; 2]),
        (Kind::Alltoall, both(&|rank| alltoall(rank).in_place()), [true; 2]),
        (Kind::Alltoall, both(&alltoallv), [true; 2]),
    ]
}

#[test]
fn every_long_call_goes_on_where_its_last_look_stopped() {
    let groups = direct_pair();
    for (kind, mut sides, moves) in calls() {
        let turns = groups.each_ref().map(|group| turn(group, signature(kind)));
        let mut looks = [0; 2];
        let mut runs: Vec<_> = (0..2)
            // SAFETY: the sides are kept until the runs have ended.
            .map(|rank| Some(unsafe { sides[rank].run(&groups[rank], &turns[rank]) }))
            .collect();
        for _ in 0..2000 {
            for rank in 0..2 {
                let Some(run) = &mut runs[rank] else { continue };
                match run.advance(&groups[rank]) {
                    Poll::Ready(result) => {
                        result.expect("it succeeds");
                        runs[rank] = None;
                    }
                    Poll::Pending => looks[rank] += usize::from(run.is_at_work()),
                }
            }
        }
        assert!(runs.iter().all(Option::is_none), "{kind:?} does not end");
        for (rank, (side, moves)) in sides.iter().zip(moves).enumerate() {
            let least = if moves { BYTES / LOOK - 2 } else { 0 };
            assert!(looks[rank] >= least, "{kind:?}: rank {rank} has stopped {} times", looks[rank]);
            assert!(moves || looks[rank] == 0, "{kind:?}: rank {rank} has nothing to move");
            assert!(side.output[..side.expected.len()] == side.expected, "{kind:?}: rank {rank} has others");
        }
    }
}

/// How rank 1 takes a broadcast of which rank 0 has given all: its bytes, how the call ended, and its looks.
fn take_broadcast(waits: bool, timeout: Duration, fails_in: usize) -> (Vec<u32>, Result<Completion>, usize) {
    let [group, other] = direct_pair();
    let [mut root, mut leaf] = broadcast_sides();
    let looks = Arc::new(AtomicUsize::new(0));
    // SAFETY: the sides are kept until the runs have ended or are abandoned.
    let mut giving = unsafe { root.run(&group, &turn(&group, signature(Kind::Broadcast))) };
    assert!(giving.advance(&group).is_pending(), "nobody has read yet");
    let make = |turn: &Turn| {
        // SAFETY: as above.
        let run = unsafe { leaf.run(&other, turn) };
        Observed::new(run, None, counting(&looks, fails_in))
    };
    let (signature, timeout) = (signature(Kind::Broadcast), Some(timeout));
    let result = if waits {
        other.run(calling(Class::Ordered, 0, signature, timeout), make)
    } else {
        let running = other.start(calling(Class::Ordered, 0, signature, timeout), make).expect("it starts");
        running.wait(Deadline::after(Duration::from_secs(20))).expect("it ends")
    };
    giving.abandon(&group);
    (leaf.output, result, looks.load(Ordering::Relaxed))
}

#[test]
fn a_deadline_that_passes_in_the_middle_of_a_long_call_ends_it_there() {
    for waits in [true, false] {
        let (output, result, looks) = take_broadcast(waits, Duration::ZERO, usize::MAX);
        let error = result.expect_err("it is late");
        assert_eq!(error.status(), Status::Timeout);
        assert!(error.text().contains("its bytes are still being moved"), "{error}");
        assert!(looks <= 3, "{looks} looks after the deadline");
        assert!(output[UNTOUCHED..].iter().all(|&element| element == 0), "memory that was given back");
    }
}

#[test]
fn a_failure_in_the_middle_of_a_long_call_ends_it_there() {
    for waits in [true, false] {
        let (output, result, looks) = take_broadcast(waits, Duration::from_secs(20), 2);
        assert_eq!(result.expect_err("its group has failed").status(), Status::Aborted);
        assert_eq!(looks, 2);
        assert!(output[UNTOUCHED..].iter().all(|&element| element == 0), "memory that was given back");
    }
}

#[test]
fn what_is_done_before_and_behind_a_call_is_done_a_part_a_look() {
    let [group, _other] = pair(true);
    let parts = Arc::new(AtomicUsize::new(0));
    let three = || {
        let parts = parts.clone();
        move || parts.fetch_add(1, Ordering::Relaxed) % 3 == 2
    };
    let (first, last) = (three(), three());
    let abandoned = Arc::new(AtomicUsize::new(0));
    let ended = Scripted(Some(Ok(Completion::default())), abandoned.clone());
    let then = move |_: &Group, _: &Poll<Result<Completion>>| last();
    let mut observed = Observed::new(ended, Some(Box::new(move |_: &Group| first())), then);
    // The third part of what comes first is followed by the first part of what comes last.
    for due in [1, 2, 4, 5] {
        assert!(observed.advance(&group).is_pending());
        assert_eq!((parts.load(Ordering::Relaxed), observed.is_at_work()), (due, true));
        assert!(observed.waits_for(&group).is_empty(), "it waits for nobody");
    }
    // It has ended, and has let go of what it had.
    observed.abandon(&group);
    assert_eq!(abandoned.load(Ordering::Relaxed), 0);
    assert_eq!(observed.advance(&group), Poll::Ready(Ok(Completion::default())));
    assert_eq!((parts.load(Ordering::Relaxed), observed.is_at_work()), (6, false));
}

#[test]
fn a_deadline_that_passes_while_buffers_are_combined_ends_the_call_there() {
    for waits in [true, false] {
        let [group, _other] = pair(true);
        let abandoned = Arc::new(AtomicUsize::new(0));
        let stuck = Scripted(None, abandoned.clone());
        let make = |_: &Turn| {
            // There is always more to do.
            let first = Box::new(|_: &Group| false);
            Observed::new(stuck, Some(first), |_: &Group, _: &Poll<Result<Completion>>| true)
        };
        let timeout = Some(Duration::from_millis(50));
        let result = if waits {
            group.run(calling(Class::Ordered, 0, BARRIER, timeout), make)
        } else {
            let running = group.start(calling(Class::Ordered, 0, BARRIER, timeout), make).expect("it starts");
            running.wait(Deadline::after(Duration::from_secs(20))).expect("it ends")
        };
        let error = result.expect_err("it is late");
        assert_eq!(error.status(), Status::Timeout);
        assert!(error.text().contains("buffers of this rank are still being combined"), "{error}");
        assert_eq!(abandoned.load(Ordering::Relaxed), 1);
    }
}

/// Ends after three looks since a call has had its first.
struct Beside(Arc<AtomicUsize>, u32);

impl Operation for Beside {
    fn advance(&mut self, _group: &Group) -> Poll<Result<Completion>> {
        self.1 += u32::from(self.0.load(Ordering::Relaxed) > 0);
        if self.1 < 3 { Poll::Pending } else { Poll::Ready(Ok(Completion::default())) }
    }

    fn abandon(&mut self, _group: &Group) {}

    fn waits_for(&self, _group: &Group) -> Vec<u32> {
        vec![0]
    }
}

#[test]
fn an_operation_beside_a_long_call_that_nobody_waits_for_goes_on_meanwhile() {
    let [group, other] = direct_pair();
    let [mut root, mut leaf] = broadcast_sides();
    // SAFETY: the sides are kept until the runs have ended or are abandoned.
    let mut giving = unsafe { root.run(&group, &turn(&group, signature(Kind::Broadcast))) };
    assert!(giving.advance(&group).is_pending(), "nobody has read yet");
    let looks = Arc::new(AtomicUsize::new(0));
    let (tell, told) = mpsc::channel();
    let note = |name: &'static str| {
        let tell = tell.clone();
        Box::new(move |result: Result<Completion>| tell.send((name, result)).expect("the test waits"))
    };
    let beside = Beside(looks.clone(), 0);
    let beside = other.start(calling(Class::PointToPoint, 0, BARRIER, None), |_| beside).expect("it starts");
    beside.on_complete(note("beside"));
    let make = |turn: &Turn| {
        // SAFETY: as above.
        let run = unsafe { leaf.run(&other, turn) };
        Observed::new(run, None, counting(&looks, usize::MAX))
    };
    let long =
        other.start(calling(Class::Ordered, 0, signature(Kind::Broadcast), None), make).expect("it starts");
    long.on_complete(note("long"));
    for due in ["beside", "long"] {
        let (name, result) = told.recv_timeout(Duration::from_secs(20)).expect("it ends");
        result.expect("it succeeds");
        assert_eq!(name, due);
    }
    assert!(leaf.output == leaf.expected);
    assert!(giving.advance(&group).is_ready());
}

/// Is at work for so many looks, each of a thread.
struct Busy {
    looks: usize,
    by: Arc<Mutex<Vec<ThreadId>>>,
}

impl Operation for Busy {
    fn advance(&mut self, _group: &Group) -> Poll<Result<Completion>> {
        self.by.lock().expect("no panic").push(thread::current().id());
        self.looks -= 1;
        if self.looks > 0 { Poll::Pending } else { Poll::Ready(Ok(Completion::default())) }
    }

    fn abandon(&mut self, _group: &Group) {}

    fn waits_for(&self, _group: &Group) -> Vec<u32> {
        Vec::new()
    }

    fn is_at_work(&self) -> bool {
        self.looks > 0
    }
}

#[test]
fn whoever_looks_at_an_operation_at_work_knows_that_it_is_to_look_again() {
    let [group, _other] = pair(true);
    let by = Arc::default();
    let busy = Busy { looks: 1_000_000, by: Arc::clone(&by) };
    let running = group.start(calling(Class::PointToPoint, 0, BARRIER, None), |_| busy).expect("it starts");
    let own = || by.lock().expect("no panic").iter().filter(|&&by| by == thread::current().id()).count();
    let before = own();
    assert!(before > 0, "whoever starts it looks");
    // The service thread looks, too: this one's turn comes.
    let end = Deadline::after(Duration::from_secs(20));
    let moved = loop {
        let moved = group.endpoint().progress(0, Through::Messages);
        if own() > before || end.expired() {
            break moved;
        }
    };
    assert!(moved, "it is at work");
    running.cancel();
}

#[test]
fn the_deadline_of_who_waits_for_something_else_passes_in_the_middle_of_a_long_call() {
    let [group, _other] = pair(true);
    let by = Arc::default();
    let busy = Busy { looks: 1_000_000, by: Arc::clone(&by) };
    let running = group.start(calling(Class::PointToPoint, 0, BARRIER, None), |_| busy).expect("it starts");
    let own = || by.lock().expect("no panic").iter().filter(|&&by| by == thread::current().id()).count();
    let before = own();
    let deadline = Deadline::after(Duration::ZERO);
    assert_eq!(group.endpoint().wait(deadline, Through::Messages, || None::<()>), None);
    let looks = own() - before;
    running.cancel();
    assert!(looks <= 3, "{looks} looks after the deadline");
}

/// Waits for rank 0 or, where it is told to, is at work.
struct WorksAtTimes(Arc<AtomicBool>);

impl Operation for WorksAtTimes {
    fn advance(&mut self, _group: &Group) -> Poll<Result<Completion>> {
        Poll::Pending
    }

    fn abandon(&mut self, _group: &Group) {}

    fn waits_for(&self, _group: &Group) -> Vec<u32> {
        vec![0]
    }

    fn is_at_work(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

#[test]
fn a_rank_at_work_is_not_told_to_wait_for_whom_it_has_waited_for() {
    let [group, other] = pair(true);
    group.endpoint().open_links(&[1], Deadline::after(Duration::from_secs(20)), || None).expect("a link");
    let (at_work, mut call) = (Arc::new(AtomicBool::new(false)), None);
    let make = |turn: &Turn| {
        call = Some(*turn);
        WorksAtTimes(at_work.clone())
    };
    let working = other.start(calling(Class::Ordered, 0, BARRIER, None), make).expect("it starts");
    other.compare(&call.expect("its turn came"), &[0]);
    let late = turn(&group, BARRIER);
    for (works, says, culprit) in [
        (false, "still running, waiting for rank 0", "Look at what ranks 0 and 1 have called"),
        (true, "still running, at work by itself", "Look at rank 1"),
        (false, "still running, waiting for rank 0", "Look at what ranks 0 and 1 have called"),
    ] {
        at_work.store(works, Ordering::Relaxed);
        working.advance();
        let inquiry = group.ask(&late, vec![1], None);
        while !group.answered(&inquiry) {
            thread::sleep(Duration::from_millis(2));
        }
        let error = group.overdue(&late, &inquiry);
        assert!(error.text().contains(says) && error.text().contains(culprit), "{error}");
    }
    working.cancel();
}

#[test]
fn whoever_waits_for_a_long_call_does_not_sleep_in_the_middle_of_it() {
    let groups = direct_pair();
    for (kind, mut sides, _) in calls() {
        std::thread::scope(|scope| {
            for (group, side) in groups.iter().zip(&mut sides) {
                // A sleeper would sleep until its deadline.
                let timeout = Some(Duration::from_secs(15));
                scope.spawn(move || {
                    // SAFETY: the side is kept until the run has ended.
                    let make = |turn: &Turn| unsafe { side.run(group, turn) };
                    group.run(calling(Class::Ordered, 0, signature(kind), timeout), make).expect("in time");
                });
            }
        });
        for side in &sides {
            assert!(side.output[..side.expected.len()] == side.expected, "{kind:?}");
        }
    }
}
