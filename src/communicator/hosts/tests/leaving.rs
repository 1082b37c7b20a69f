//! A call that fails between two of its launches, when the hosts have begun to copy for it.

use super::members::AHEAD;
use super::*;
use crate::cuda::double::Refusal;
use crate::cuda::event::Event;
use crate::cuda::queues::MOST;
use crate::cuda::stream::Stream;
use crate::cuda::word::Word;
use crate::engine::device::GRACE_PERIOD;

/// Elements of several chunks.
const COUNT: u64 = 4001;

/// Has what is over of exchanges given back: one rank says so, then the others' is, too.
fn sweep(all: &[Arc<Devices>]) {
    (0..2).for_each(|_| all.iter().for_each(|devices| devices.give_back()));
}

impl Rank {
    /// Copies of this device wait until the word is released.
    fn hold_copies(&self) -> Word {
        // All stand in one queue, behind one that waits.
        self.double.share_queues(MOST, 1);
        let (first, gate) =
            (self.double.stream(self.device), self.devices.word(self.device).expect("a word"));
        // SAFETY: the stream lives as long as the double.
        let borrowed = unsafe { Stream::borrow(&self.devices, self.device, first) }.expect("a stream");
        borrowed.wait_word(&gate).expect("it waits");
        self.double.fill(first, self.device, self.double.memory(self.device, 4), &[0; 4]);
        gate
    }

    /// The second launch from here on fails, once the hosts' copies for the first are under way, and then
    /// something else does.
    fn fail_second_launch(&self, mut then: impl FnMut() + 'static) {
        let (double, mut launches) = (self.double.clone(), 0);
        AHEAD.set(Some(Box::new(move || {
            launches += 1;
            if launches < 2 {
                return Ok(());
            }
            let start = Instant::now();
            while double.copies() == 0 {
                assert!(start.elapsed() < PATIENCE, "nothing is copied");
                std::thread::sleep(Duration::from_millis(1));
            }
            then();
            fail!(Cuda, "no second launch");
        })));
    }

    /// The caller's stream.
    fn borrowed(&self) -> Stream {
        // SAFETY: it lives as long as the double.
        unsafe { Stream::borrow(&self.devices, self.device, self.stream) }.expect("a stream")
    }

    /// Whether what the caller's stream is given now comes behind something that cannot run.
    fn stream_waits(&self) -> bool {
        let stream = self.borrowed();
        let event = Event::new(&self.devices, self.device).expect("an event");
        event.record(&stream).expect("a record");
        while self.double.step() {}
        !event.query().expect("an answer")
    }
}

/// What the caller's stream is given next comes behind them, and the workspace lasts until they are done. If
/// the driver refuses twice to have the stream wait, nobody knows when that is, and the workspace is kept.
#[test]
fn copies_of_the_hosts_that_have_begun_outlast_a_call_that_fails() {
    for refused in [0, 1, 2] {
        let (mut seats, doubles) = ranks_of(2, 2, Order::RoundRobin, 2, Carriers::SideStreams, |rank| {
            let (_, request) = rank.sum(COUNT);
            if rank.context.rank() > 0 {
                rank.run(&request, &rank.call()).expect_err("rank 0 fails");
                return (rank.devices.clone(), None);
            }
            let gate = rank.hold_copies();
            let (double, call) = (rank.double.clone(), Some("cuStreamWaitValue32"));
            let refusal = Refusal { times: refused, call, ..Refusal::default() };
            rank.fail_second_launch(move || double.refuse(refusal));
            let error = rank.run(&request, &rank.call()).expect_err("a launch is refused");
            AHEAD.set(None);
            assert!(error.text().contains("no second launch"), "{error}");
            assert_eq!(rank.stream_waits(), refused < 2, "refused {refused} times");
            (rank.devices.clone(), Some(gate))
        });
        let gate = seats[0].1.take().expect("rank 0 has it");
        let all: Vec<Arc<Devices>> = seats.into_iter().map(|(devices, _)| devices).collect();
        sweep(&all);
        assert!(doubles[0].copies() > 0, "they are still to run");
        assert_eq!(doubles[0].complaints(), Vec::<String>::new(), "refused {refused} times");
        gate.release();
        see_out(&doubles[0]);
        sweep(&all);
        assert_eq!(doubles[0].complaints(), Vec::<String>::new(), "refused {refused} times");
        // The test's own.
        let left = COUNT as usize * 4 + 4;
        assert_eq!(doubles[0].allocated(0) > left, refused == 2, "refused {refused} times");
    }
}

/// How often something is tried that a busy processor may hide.
const TRIES: usize = 5;

/// The hosts' copies take long, and so does what the stream has been given: the caller waits for both
/// together.
#[test]
fn a_call_that_fails_in_its_course_is_waited_for_once() {
    let mut waited = Vec::new();
    for _ in 0..TRIES {
        let (mut seats, doubles) = ranks_of(2, 2, Order::RoundRobin, 2, Carriers::SideStreams, |rank| {
            let (_, request) = rank.sum(COUNT);
            if rank.context.rank() > 0 {
                rank.run(&request, &rank.call()).expect_err("rank 0 fails");
                return None;
            }
            let (gate, late) =
                (rank.hold_copies(), Arc::new(rank.devices.word(rank.device).expect("a word")));
            let (stream, double, word) = (rank.borrowed(), rank.double.clone(), late.clone());
            rank.fail_second_launch(move || {
                stream.wait_word(&word).expect("it waits");
                // Whoever gives up the copies waits for them, since no stream can tell when they have ended.
                let call = Some("cuStreamWriteValue32");
                double.refuse(Refusal { times: usize::MAX, call, ..Refusal::default() });
            });
            let start = Instant::now();
            rank.run(&request, &rank.call()).expect_err("a launch is refused");
            AHEAD.set(None);
            assert!(rank.double.copies() > 0, "they are still to run");
            Some((start.elapsed(), gate, late))
        });
        let (took, gate, late) = seats[0].take().expect("rank 0 has it");
        gate.release();
        late.release();
        see_out(&doubles[0]);
        assert!(took >= LATE, "{took:?}");
        if took < LATE + GRACE_PERIOD {
            return;
        }
        waited.push(took);
    }
    panic!("{waited:?}");
}

/// More driver calls than a rank needs until its call has a number.
const FIRST: usize = 12;

/// The others would wait for it.
#[test]
fn a_call_that_the_driver_keeps_a_rank_from_fails_for_all() {
    // What the doubles of so many groups hold stays with the pools of the process: one status each.
    for (after, status) in (0..FIRST).zip([Status::Cuda, Status::OutOfMemory].into_iter().cycle()) {
        let (all, doubles) = ranks_of(2, 2, Order::RoundRobin, 2, Carriers::Couriers, |rank| {
            let start = Instant::now();
            if rank.context.rank() > 0 {
                while rank.context.failure().is_none() {
                    assert!(start.elapsed() < PATIENCE, "rank 0 fails it at last");
                    std::thread::sleep(Duration::from_millis(1));
                }
                return rank.devices.clone();
            }
            let (_, request) = rank.sum(64);
            rank.double.refuse(Refusal { after, status, ..Refusal::default() });
            let started = rank.start(&request, &rank.call());
            rank.double.fail_call(usize::MAX);
            let is_told = rank.context.failure().is_some();
            rank.context.abort();
            if let Err(error) = started {
                assert_eq!(error.status(), status, "{error}");
                assert!(is_told, "call {after} was refused: {error}");
            }
            rank.devices.clone()
        });
        doubles.iter().for_each(|double| see_out(double));
        sweep(&all);
    }
}

/// It is no call, and will be none.
#[test]
fn a_capture_that_the_driver_refuses_concerns_no_other() {
    let met = Barrier::new(4);
    let (failures, doubles) = ranks_of(2, 2, Order::RoundRobin, 2, Carriers::Couriers, |rank| {
        let (_, request) = rank.sum(64);
        for after in (0..FIRST).filter(|_| rank.context.rank() == 0) {
            let stream = rank.double.stream(rank.device);
            rank.double.begin_capture(stream, rank.device);
            rank.double.fail_call(after);
            let started = rank.start(&request, &Call { stream: Some(stream), ..Call::default() });
            rank.double.fail_call(usize::MAX);
            drop(rank.double.end_capture(stream, rank.device));
            started.map(drop).expect_err("a call between hosts cannot be captured");
        }
        met.wait();
        let failure = rank.context.failure();
        met.wait();
        failure
    });
    assert_eq!(failures, vec![None; 4]);
    doubles.iter().for_each(|double| see_out(double));
}
