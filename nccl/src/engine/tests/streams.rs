//! One communicator on several streams: its calls are in one order.

use super::*;
use crate::one_sided::{ncclWaitSignal, ncclWaitSignalDesc_t};

const KERNEL: isize = 1;
const WAIT: isize = 3;
const WAIT_FOR_VALUE: isize = 4;
const COPY: isize = 5;

/// A rank of a communicator on two streams of its GPU, with three words there.
#[derive(Clone, Copy)]
struct Rank {
    communicator: usize,
    streams: [usize; 2],
    words: [usize; 3],
}

impl Rank {
    fn new(driver: &Driver, communicator: ncclComm_t, gpu: c_int) -> Rank {
        let streams = [(); 2].map(|()| driver.stream(gpu, 4).0.addr());
        let words = [(); 3].map(|()| driver.stream(gpu, 4).1.expose_provenance());
        Rank { communicator: communicator.addr(), streams, words }
    }

    fn communicator(&self) -> ncclComm_t {
        std::ptr::without_provenance_mut(self.communicator)
    }

    fn stream(&self, number: usize) -> cudaStream_t {
        std::ptr::without_provenance_mut(self.streams[number])
    }

    fn memory(&self, number: usize) -> *mut c_void {
        std::ptr::with_exposed_provenance_mut(self.words[number])
    }

    fn word(&self, number: usize) -> &AtomicI32 {
        // SAFETY: an int there, which lives as long as the process, and is read and written like this alone;
        // couriers copy it.
        unsafe { AtomicI32::from_ptr(self.memory(number).cast()) }
    }

    /// Makes a call, by which it gets from the first of these words into the second.
    fn call(&self, call: Call, [from, to]: [usize; 2], stream: usize) {
        let (from, to) = (self.memory(from), self.memory(to));
        let (communicator, stream) = (self.communicator(), self.stream(stream));
        // SAFETY: live memory.
        let called = unsafe {
            match call {
                Call::Sum => ncclAllReduce(from, to, 1, INT, 0, communicator, stream),
                Call::Broadcast => ncclBroadcast(from, to, 1, INT, 0, communicator, stream),
                Call::Send(peer) => ncclSend(from, 1, INT, peer, communicator, stream),
                Call::Receive(peer) => ncclRecv(to, 1, INT, peer, communicator, stream),
                Call::Signal(peer) => ncclSignal(peer, 0, 0, 0, communicator, stream),
                Call::WaitFor(peer) => {
                    let mut from = ncclWaitSignalDesc_t { opCnt: 1, peer, sigIdx: 0, ctx: 0 };
                    ncclWaitSignal(1, &mut from, communicator, stream)
                }
            }
        };
        assert_eq!(called, SUCCESS, "{}", last_error(null_mut()));
    }
}

#[derive(Clone, Copy, Debug)]
enum Call {
    Sum,
    /// From rank 0.
    Broadcast,
    Send(c_int),
    Receive(c_int),
    Signal(c_int),
    WaitFor(c_int),
}

fn two_ranks(driver: &Driver) -> [Rank; 2] {
    let communicators: [ncclComm_t; 2] = communicators();
    [0, 1].map(|rank| Rank::new(driver, communicators[rank], rank as c_int))
}

fn in_a_group(calls: impl FnOnce()) {
    assert_eq!(ncclGroupStart(), SUCCESS);
    calls();
    assert_eq!(ncclGroupEnd(), SUCCESS, "{}", last_error(null_mut()));
}

/// Each has learnt where the other is.
fn call_once(ranks: &[Rank]) {
    in_a_group(|| ranks.iter().for_each(|rank| rank.call(Call::Sum, [2, 2], 0)));
}

/// Which of what streams were given is the first that is so.
fn first(steps: &[Step], so: impl Fn(&Step) -> bool) -> usize {
    steps.iter().position(so).unwrap_or_else(|| panic!("none of {steps:?}"))
}

fn is_kernel_on(stream: usize) -> impl Fn(&Step) -> bool {
    move |step| step.what == KERNEL && step.stream == stream
}

fn waits_for(stream: usize, of: usize) -> impl Fn(&Step) -> bool {
    move |step| *step == Step { what: WAIT, stream, of }
}

/// Rank 0 gives on one stream what it gets on another, from a rank that is late.
#[test]
fn calls_on_two_streams_by_way_of_the_host_find_what_those_before_have_stored() {
    let name = "streams::calls_on_two_streams_by_way_of_the_host_find_what_those_before_have_stored";
    over_driver(name, &[("UNISONO_P2P", "0"), ("UNISONO_NCCL_TIMEOUT", "60")], |driver| {
        let ranks = two_ranks(driver);
        call_once(&ranks);
        use Call::{Broadcast, Receive, Send, Sum};
        // What each rank calls, and what rank 1 then has.
        let cases = [
            ([(Sum, Sum), (Broadcast, Broadcast)], 1 + 7),
            ([(Sum, Sum), (Send(1), Receive(0))], 1 + 7),
            ([(Receive(1), Send(0)), (Send(1), Receive(0))], 7),
            ([(Receive(1), Send(0)), (Sum, Sum)], 7 + 20),
        ];
        for (calls, wanted) in cases {
            for (rank, values) in ranks.iter().zip([[1, -1, 0], [7, 20, 0]]) {
                let words = (0..3).map(|number| rank.word(number));
                words.zip(values).for_each(|(word, value)| word.store(value, Ordering::SeqCst));
            }
            let [(first, from), (second, to)] = calls;
            ranks[0].call(first, [0, 0], 0);
            ranks[0].call(second, [0, 1], 1);
            // If the second did not wait it would have begun by then, mostly.
            std::thread::sleep(Duration::from_millis(50));
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    ranks[1].call(from, [0, 0], 0);
                    ranks[1].call(to, [1, 2], 0);
                });
            });
            let (start, found) = (Instant::now(), ranks[1].word(2));
            while found.load(Ordering::SeqCst) == 0 && start.elapsed() < SOON {
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(found.load(Ordering::SeqCst), wanted, "{calls:?}");
        }
        ranks.iter().for_each(|rank| is_well(rank.communicator()));
    });
}

#[test]
fn who_stays_on_one_stream_has_it_wait_for_nothing() {
    let body = |driver: &Driver| {
        let ranks = two_ranks(driver);
        let is_wait = |step: &&Step| [WAIT, WAIT_FOR_VALUE].contains(&step.what);
        let waits = |stream: usize| {
            driver.steps();
            let call = |rank: &Rank| {
                for call in [Call::Sum, Call::Broadcast] {
                    rank.call(call, [0, 0], stream);
                }
            };
            std::thread::scope(|scope| ranks.iter().for_each(|rank| drop(scope.spawn(move || call(rank)))));
            driver.steps().iter().filter(is_wait).count()
        };
        call_once(&ranks);
        assert_eq!(waits(0), 0);
        waits(1);
        assert_eq!(waits(1), 0);
    };
    let name = "streams::who_stays_on_one_stream_has_it_wait_for_nothing";
    over_driver(name, &[("UNISONO_P2P", "0")], body);
    over_driver(name, &[], body);
}

#[test]
fn a_group_of_one_sided_operations_and_calls_on_two_streams_is_one_operation() {
    let name = "streams::a_group_of_one_sided_operations_and_calls_on_two_streams_is_one_operation";
    over_driver(name, &[], |driver| {
        let ranks = two_ranks(driver);
        call_once(&ranks);
        let [rank, other] = ranks;
        for [call, others] in [[Call::Sum, Call::Sum], [Call::Send(1), Call::Receive(0)]] {
            driver.steps();
            in_a_group(|| {
                rank.call(Call::Signal(1), [0, 0], 0);
                rank.call(Call::WaitFor(1), [0, 0], 0);
                rank.call(call, [0, 0], 1);
                other.call(others, [0, 0], 0);
            });
            let ([a, b], steps) = (rank.streams, driver.steps());
            let is_signal = is_kernel_on(a);
            assert_eq!(steps.iter().filter(|step| is_signal(step)).count(), 2, "{call:?}: {steps:?}");
            let (signals, calls) = (first(&steps, is_signal), first(&steps, is_kernel_on(b)));
            assert!(first(&steps, waits_for(a, b)) < signals, "{call:?}: {steps:?}");
            // Behind the signals.
            let waits = signals + first(&steps[signals..], waits_for(b, a));
            assert!(waits < calls, "{call:?}: {steps:?}");
            assert!(steps[calls..].iter().any(waits_for(a, b)), "{call:?}: {steps:?}");
        }
    });
}

/// What comes on another stream than the call before it waits for that.
#[test]
fn what_a_rank_sends_to_itself_and_one_sided_operations_have_their_places_among_the_calls() {
    let name =
        "streams::what_a_rank_sends_to_itself_and_one_sided_operations_have_their_places_among_the_calls";
    over_driver(name, &[], |driver| {
        let ranks = two_ranks(driver);
        call_once(&ranks);
        let [rank, other] = ranks;
        let [alone] = communicators();
        let alone = Rank::new(driver, alone, 0);
        let to_itself = |rank: Rank, stream| {
            rank.call(Call::Send(0), [0, 0], stream);
            rank.call(Call::Receive(0), [1, 1], stream);
        };
        let with_a_peer = |stream| {
            in_a_group(|| {
                to_itself(rank, stream);
                rank.call(Call::Send(1), [0, 0], stream);
                other.call(Call::Receive(0), [0, 0], 0);
            });
        };
        let signal = |stream| rank.call(Call::Signal(1), [0, 0], stream);
        let sum = |stream| {
            in_a_group(|| {
                rank.call(Call::Sum, [0, 0], stream);
                other.call(Call::Sum, [0, 0], 0);
            });
        };
        // Each is called on one stream, and the next on the other.
        type Kind<'a> = (&'a str, Rank, &'a dyn Fn(usize));
        let to_itself_alone = |stream| in_a_group(|| to_itself(alone, stream));
        let to_itself_only = |stream| in_a_group(|| to_itself(rank, stream));
        let copies: Kind<'_> = ("what it sends itself", rank, &to_itself_only);
        let with_peer: Kind<'_> = ("what it sends itself and another", rank, &with_a_peer);
        let (signals, sums): (Kind<'_>, Kind<'_>) = (("a signal", rank, &signal), ("a sum", rank, &sum));
        let apart: Kind<'_> = ("what is sent by a rank that is alone", alone, &to_itself_alone);
        let all = [
            apart, apart, copies, copies, sums, copies, with_peer, with_peer, signals, sums, signals, copies,
        ];
        let mut before: Option<Kind<'_>> = None;
        // Nothing is over.
        driver.hold(true);
        for (place, now) in all.into_iter().enumerate() {
            let (name, Rank { streams, communicator, .. }, call) = now;
            let (own, last) = (streams[place % 2], streams[1 - place % 2]);
            driver.steps();
            call(place % 2);
            let steps = driver.steps();
            if let Some((earlier, ..)) = before.filter(|(_, rank, _)| rank.communicator == communicator) {
                let begins = first(&steps, |step| [KERNEL, COPY].contains(&step.what) && step.stream == own);
                let waits = first(&steps, waits_for(own, last));
                assert!(waits < begins, "{name} behind {earlier}: {steps:?}");
            }
            before = Some(now);
        }
        driver.hold(false);
    });
}
