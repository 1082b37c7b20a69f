//! No wake-up is lost, whoever else looks at the endpoint at that moment.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Barrier, OnceLock};
use std::time::{Duration, Instant};

use super::losing::{receive_any, unlinked_of};
use super::*;
use crate::engine::endpoint::{Endpoint, Look};
use crate::transport::service::{Attendance, Port, hold_service};

/// Much longer than a wait that is woken takes, and shorter than what a sleeper sleeps at most.
const LOST: Duration = Duration::from_secs(10);

/// A group whose endpoint looks at descriptors while it waits: it has a link over TCP.
fn half_linked() -> [Arc<Group>; 2] {
    let groups = pair(false);
    groups[0].endpoint().open_links(&[1], Deadline::after(Duration::from_secs(20)), || None).expect("a link");
    groups
}

#[test]
fn a_ring_between_the_last_look_and_the_sleep_wakes() {
    let [group, _other] = half_linked();
    let endpoint = group.endpoint();
    let rings: [fn(&Endpoint); 3] = [Endpoint::wake, Endpoint::nudge, Endpoint::rouse];
    for (name, ring) in ["wake", "nudge", "rouse"].into_iter().zip(rings) {
        let start = Instant::now();
        let mut there = false;
        let answer = endpoint.wait(Deadline::NEVER, Through::Messages, || {
            if there {
                return Some(());
            }
            // In the last look before it sleeps, what is waited for comes right after it was looked for.
            if endpoint.is_parking() {
                there = true;
                ring(endpoint);
            }
            None
        });
        assert_eq!(answer, Some(()));
        assert!(start.elapsed() < LOST, "{name} was lost");
    }
}

#[test]
fn a_ring_wakes_the_sleeper_though_another_thread_looks_at_the_descriptors() {
    let [group, _other] = half_linked();
    let endpoint = group.endpoint();
    let (over, there) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let looking = scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                endpoint.progress(0, Through::Messages);
            }
        });
        let mut slowest = Duration::ZERO;
        for _ in 0..20 {
            let start = Instant::now();
            there.store(false, Ordering::SeqCst);
            let mut asked = false;
            let answer = endpoint.wait(Deadline::NEVER, Through::Messages, || {
                if endpoint.is_parking() && !std::mem::replace(&mut asked, true) {
                    // From another thread, when this one sleeps.
                    scope.spawn(|| {
                        std::thread::sleep(Duration::from_millis(1));
                        there.store(true, Ordering::SeqCst);
                        endpoint.rouse();
                    });
                }
                there.load(Ordering::SeqCst).then_some(())
            });
            assert_eq!(answer, Some(()));
            slowest = slowest.max(start.elapsed());
            if slowest > LOST {
                break;
            }
        }
        over.store(true, Ordering::Relaxed);
        looking.join().expect("it does not panic");
        assert!(slowest < LOST, "a ring was lost");
    });
}

#[test]
fn one_of_several_sleepers_always_has_the_bell() {
    const ROUNDS: u64 = 2000;
    const THREADS: u64 = 2;
    let [group, _other] = half_linked();
    let endpoint = group.endpoint();
    let (round, arrived) = (AtomicU64::new(0), AtomicU64::new(0));
    let start = Barrier::new(THREADS as usize + 1);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (round, arrived, start) = (&round, &arrived, &start);
            scope.spawn(move || {
                start.wait();
                // Each number is one thread's.
                for number in (thread + 1..=ROUNDS).step_by(THREADS as usize) {
                    let there = || (round.load(Ordering::SeqCst) >= number).then_some(());
                    endpoint.wait(Deadline::NEVER, Through::Messages, there).expect("it comes");
                    arrived.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        start.wait();
        let mut last = Instant::now();
        let mut lost = None;
        for number in 1..=ROUNDS {
            round.store(number, Ordering::SeqCst);
            endpoint.rouse();
            // Long enough for both to sleep, now and then.
            let pause = Duration::from_micros(number % 16 * 20);
            while arrived.load(Ordering::SeqCst) < number || last.elapsed() < pause {
                if last.elapsed() > LOST {
                    lost.get_or_insert(number);
                    round.store(ROUNDS, Ordering::SeqCst);
                    endpoint.wake();
                }
                std::thread::yield_now();
            }
            if lost.is_some() {
                break;
            }
            last = Instant::now();
        }
        assert_eq!(lost, None, "nobody woke for it");
    });
}

/// How a thread waits for a message.
type Waits = fn(&Arc<Group>, u64, Deadline) -> bool;

/// In the call.
fn in_call(group: &Arc<Group>, tag: u64, until: Deadline) -> bool {
    let mut came = [0; 8];
    let message = Message::Receive { from: 0, into: Destination { address: came.as_mut_ptr(), len: 8 } };
    let signature = Signature { kind: Kind::Receive, count: 8, ..BARRIER };
    let calling = calling(Class::PointToPoint, tag, signature, Some(until.remaining_capped(4 * LOST)));
    // SAFETY: the memory is there until the call has ended.
    group.run(calling, |turn| unsafe { Point::new(group, turn, message, usize::MAX) }).is_ok()
}

/// For what it has begun. Whoever gives up does so without word.
fn for_work(group: &Arc<Group>, tag: u64, until: Deadline) -> bool {
    let mut came = [0; 8];
    let running = receive(group, tag, &mut came);
    let ended = running.wait(until);
    running.cancel();
    ended.is_some_and(|result| result.is_ok())
}

const WAYS: [Waits; 2] = [in_call, for_work];

/// Whether this is so in time.
fn comes_true(mut is_so: impl FnMut() -> bool) -> bool {
    let end = Deadline::after(LOST);
    while !is_so() {
        if end.expired() {
            return false;
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    true
}

/// Has so many threads of rank 1 sleep, each for a message with its own number as tag, then calls `then`, and
/// sends what has not been sent.
fn beside_sleepers<T>(
    groups: &[Arc<Group>; 2],
    threads: u64,
    waits: Waits,
    then: impl FnOnce(&Endpoint) -> T,
) -> T {
    std::thread::scope(|scope| {
        for tag in 0..threads {
            scope.spawn(move || waits(&groups[1], tag, Deadline::after(4 * LOST)));
        }
        let answer = then(groups[1].endpoint());
        (0..threads).for_each(|tag| done(&send(&groups[0], tag, &[1; 8])));
        answer
    })
}

#[test]
fn who_sleeps_is_not_woken_by_what_concerns_others() {
    const THREADS: u64 = 24;
    const MESSAGES: usize = 50;
    for (shm, waits) in [true, false].into_iter().flat_map(|shm| WAYS.map(|waits| (shm, waits))) {
        let groups = linked_pair(shm);
        let woken = beside_sleepers(&groups, THREADS, waits, |endpoint| {
            let (mut counts, end) = ((0, 0), Deadline::after(2 * LOST));
            for _ in 0..MESSAGES {
                comes_true(|| endpoint.asleep() == THREADS as usize);
                counts.0 = if counts.0 == 0 { endpoint.returns() } else { counts.0 };
                done(&send(&groups[0], THREADS, &[1; 8]));
                assert!(in_call(&groups[1], THREADS, end), "it has been sent");
            }
            counts.1 = endpoint.returns();
            counts.1 - counts.0
        });
        // Who has the bell, this thread if it sleeps, and who takes the bell then.
        assert!(woken <= 6 * MESSAGES, "{woken} wake-ups for {MESSAGES} messages, shm: {shm}");
    }
}

/// The order in which they leave is that in which they came, the other way round, and neither.
#[test]
fn each_of_those_who_sleep_has_its_message_whoever_has_left() {
    const THREADS: u64 = 7;
    for (shm, waits) in [true, false].into_iter().flat_map(|shm| WAYS.map(|waits| (shm, waits))) {
        let groups = linked_pair(shm);
        for step in [1, THREADS - 1, 3] {
            let (ended, begun) = (&AtomicU64::new(0), &AtomicU64::new(0));
            let in_time = std::thread::scope(|scope| {
                let groups = &groups;
                for tag in 0..THREADS {
                    begun.fetch_add(1, Ordering::SeqCst);
                    scope.spawn(move || {
                        let came = waits(&groups[1], tag, Deadline::after(4 * LOST));
                        ended.fetch_add(u64::from(came), Ordering::SeqCst);
                    });
                    comes_true(|| groups[1].endpoint().asleep() as u64 == begun.load(Ordering::SeqCst));
                }
                let mut in_time = true;
                for number in 0..THREADS {
                    let left = (THREADS - number) as usize;
                    in_time &= comes_true(|| groups[1].endpoint().asleep() == left);
                    done(&send(&groups[0], (number + 1) * step % THREADS, &[1; 8]));
                    in_time &= comes_true(|| ended.load(Ordering::SeqCst) > number);
                }
                in_time
            });
            assert!(in_time, "one was not woken, shm: {shm}, step {step}");
        }
    }
}

/// The one that is woken to take it has found at that moment that what it waits for is there.
#[test]
fn the_bell_is_passed_on_by_who_is_woken_to_take_it_and_leaves() {
    let groups = linked_pair(true);
    let endpoint = groups[1].endpoint();
    let (first_leaves, first_has_left) = (&AtomicBool::new(false), &AtomicBool::new(false));
    let is_taken = std::thread::scope(|scope| {
        scope.spawn(|| {
            let leaves = || first_leaves.load(Ordering::SeqCst).then_some(());
            endpoint.wait(Deadline::NEVER, Through::Messages, leaves);
            first_has_left.store(true, Ordering::SeqCst);
        });
        assert!(comes_true(|| endpoint.asleep() == 1 && endpoint.bell_is_taken()));
        let last = scope.spawn(|| in_call(&groups[1], 1, Deadline::after(4 * LOST)));
        assert!(comes_true(|| endpoint.asleep() == 2));
        endpoint.wait(Deadline::NEVER, Through::Messages, || {
            // The others sleep: it is this one that looks for the last time.
            endpoint.is_parking().then(|| {
                first_leaves.store(true, Ordering::SeqCst);
                endpoint.wake_any();
                comes_true(|| first_has_left.load(Ordering::SeqCst))
            })
        });
        let is_taken = comes_true(|| endpoint.bell_is_taken());
        first_leaves.store(true, Ordering::SeqCst);
        endpoint.wake();
        done(&send(&groups[0], 1, &[1; 8]));
        assert!(last.join().expect("no panic"));
        is_taken
    });
    assert!(is_taken, "nobody has the bell");
}

/// A thread that is about to sleep with the bell has a work end in its last look, whose callback takes as long as
/// it likes. Whether another's message comes in time beside that: one that a thread waits for, or that was only
/// begun. `None` if another thread has called back.
fn comes_beside_a_callback_in_the_last_look(waits: bool) -> Option<bool> {
    let groups = linked_pair(true);
    let endpoint = groups[1].endpoint();
    let mut came = [[0; 8]; 2];
    let [called, begun] = &mut came;
    let called = receive(&groups[1], 5, called);
    let (calls, called_back) = (Arc::new(OnceLock::new()), Arc::new(OnceLock::new()));
    let goes_on = Arc::new(AtomicBool::new(false));
    let (caller, tells, ends) = (calls.clone(), called_back.clone(), goes_on.clone());
    called.on_complete(Box::new(move |_| {
        let is_caller = Some(&std::thread::current().id()) == caller.get();
        tells.set(is_caller).expect("it is called once");
        assert!(!is_caller || comes_true(|| ends.load(Ordering::SeqCst)));
    }));
    let phase = &AtomicU64::new(0);
    std::thread::scope(|scope| {
        let groups = &groups;
        let sleeps = scope.spawn(move || {
            endpoint.wait(Deadline::NEVER, Through::Messages, || match phase.load(Ordering::SeqCst) {
                1 if endpoint.is_parking() => {
                    phase.store(2, Ordering::SeqCst);
                    done(&send(&groups[0], 5, &[1; 8]));
                    None
                }
                3 => Some(()),
                _ => None,
            })
        });
        calls.set(sleeps.thread().id()).expect("it is set once");
        assert!(comes_true(|| endpoint.asleep() == 1 && endpoint.bell_is_taken()));
        let has_come = Arc::new(AtomicBool::new(false));
        let comes = has_come.clone();
        let running = if waits {
            scope.spawn(move || {
                comes.store(in_call(&groups[1], 9, Deadline::after(4 * LOST)), Ordering::SeqCst);
            });
            assert!(comes_true(|| endpoint.asleep() == 2));
            None
        } else {
            let running = receive(&groups[1], 9, begun);
            running.on_complete(Box::new(move |_| comes.store(true, Ordering::SeqCst)));
            Some(running)
        };
        // By then the library leaves it to the thread that sleeps; if not, the test finds less.
        std::thread::sleep(Duration::from_millis(20));
        phase.store(1, Ordering::SeqCst);
        endpoint.wake_any();
        assert!(comes_true(|| called_back.get().is_some()));
        let beside = called_back.get() == Some(&true);
        done(&send(&groups[0], 9, &[1; 8]));
        // Less than the callback takes if nothing comes.
        let end = Deadline::after(LOST / 2);
        while !has_come.load(Ordering::SeqCst) && !end.expired() {
            std::thread::sleep(Duration::from_micros(100));
        }
        let in_time = has_come.load(Ordering::SeqCst);
        goes_on.store(true, Ordering::SeqCst);
        phase.store(3, Ordering::SeqCst);
        endpoint.wake();
        running.iter().for_each(|running| done(running));
        beside.then_some(in_time)
    })
}

#[test]
fn a_callback_in_the_last_look_before_sleep_keeps_no_other_from_its_message() {
    for waits in [true, false] {
        let rounds = (0..10).filter_map(|_| comes_beside_a_callback_in_the_last_look(waits));
        let beside: Vec<bool> = rounds.collect();
        assert!(beside.iter().all(|in_time| *in_time), "a thread waits: {waits}: {beside:?}");
    }
}

/// As by the driver: it has no bell yet, but is among those who sleep.
#[test]
fn who_is_held_up_in_its_last_look_at_a_device_keeps_nothing_from_moving() {
    let groups = linked_pair(true);
    let endpoint = groups[1].endpoint();
    let (held_up, goes_on) = (&AtomicBool::new(false), &AtomicBool::new(false));
    let has_come = Arc::new(AtomicBool::new(false));
    let (comes, mut came) = (has_come.clone(), [0; 8]);
    let in_time = std::thread::scope(|scope| {
        scope.spawn(|| {
            endpoint.wait(Deadline::NEVER, Through::Device, || {
                endpoint.is_parking().then(|| {
                    held_up.store(true, Ordering::SeqCst);
                    comes_true(|| goes_on.load(Ordering::SeqCst))
                })
            })
        });
        assert!(comes_true(|| held_up.load(Ordering::SeqCst)));
        let running = receive(&groups[1], 9, &mut came);
        running.on_complete(Box::new(move |_| comes.store(true, Ordering::SeqCst)));
        // By then the library has looked at it; if not, the test finds less.
        std::thread::sleep(Duration::from_millis(20));
        done(&send(&groups[0], 9, &[1; 8]));
        let end = Deadline::after(LOST / 2);
        while !has_come.load(Ordering::SeqCst) && !end.expired() {
            std::thread::sleep(Duration::from_micros(100));
        }
        let in_time = has_come.load(Ordering::SeqCst);
        goes_on.store(true, Ordering::SeqCst);
        done(&running);
        in_time
    });
    assert!(in_time, "nobody looked at it");
}

/// Threads that give up at the moment at which others have their messages.
#[test]
fn a_message_finds_who_waits_among_those_who_give_up() {
    const ROUNDS: u64 = 150;
    for shm in [true, false] {
        let groups = linked_pair(shm);
        let lost = (0..ROUNDS).find(|round| {
            let groups = &groups;
            let begun = Instant::now();
            std::thread::scope(|scope| {
                for thread in 1..4 {
                    let until = Deadline::since(begun, Duration::from_micros(400 + 50 * thread));
                    scope.spawn(move || for_work(&groups[1], thread, until));
                }
                let came = scope.spawn(move || in_call(&groups[1], 9, Deadline::after(4 * LOST)));
                while begun.elapsed() < Duration::from_micros(300 + round * 3) {
                    std::thread::yield_now();
                }
                done(&send(&groups[0], 9, &[1; 8]));
                let in_time = comes_true(|| came.is_finished());
                groups[1].endpoint().wake();
                !(came.join().expect("no panic") && in_time)
            })
        });
        assert_eq!(lost, None, "it slept on, shm: {shm}");
    }
}

/// Rank 0 has told where a long message is, and then looks at nothing; rank 1 fills the ring to it, and
/// receives the message. That rank 0 may let go of it has to wait for room, and rank 1 has no operation left
/// that would wait for that.
fn receives_behind_a_full_ring(ends: impl FnOnce(&Running), then: impl FnOnce(Arc<Group>) + Send) {
    let [sender, receiver] = linked_pair(true);
    let (bytes, mut came) = (vec![7; LARGE], vec![0; LARGE]);
    let sent = send(&sender, 1, &bytes);
    let end = Deadline::after(LOST);
    let stopped = loop {
        // Another thread may have been at it, and have that before it.
        let messages = sender.endpoint().messages();
        if messages.operations() > 0 && messages.backlog(1) == 0 {
            break messages;
        }
        drop(messages);
        assert!(!end.expired(), "where the message is has not been told");
        std::thread::yield_now();
    };
    // A frame has 64 bytes, too, and the ring 256 KiB.
    for _ in 0..2048 {
        done(&send(&receiver, 2, &[0; 64]));
    }
    ends(&receive(&receiver, 1, &mut came));
    assert!(came == bytes);
    assert_eq!(receiver.endpoint().messages().backlog(0), 1, "the last word waits");
    std::thread::scope(|scope| {
        scope.spawn(|| then(receiver));
        std::thread::sleep(Duration::from_millis(50));
        drop(stopped);
        done(&sent);
    });
}

/// Until the other has heard the last word.
fn goes_on(receiver: Arc<Group>) {
    let end = Deadline::after(LOST);
    while receiver.endpoint().messages().backlog(0) > 0 {
        assert!(!end.expired(), "it waits for an operation");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_last_word_goes_out_though_its_operation_is_over() {
    receives_behind_a_full_ring(done, goes_on);
}

#[test]
fn a_last_word_goes_out_though_its_operation_was_never_waited_for() {
    receives_behind_a_full_ring(
        |running| {
            let end = Deadline::after(LOST);
            while running.test().is_none() {
                assert!(!end.expired(), "the message has not come");
            }
        },
        goes_on,
    );
}

#[test]
fn a_last_word_goes_out_before_its_rank_leaves() {
    receives_behind_a_full_ring(done, drop);
}

#[test]
fn a_last_word_goes_out_before_the_goodbyes_of_a_process_that_ends() {
    // As a process does that has destroyed nothing.
    receives_behind_a_full_ring(done, |receiver| {
        receiver.endpoint().registration().close(Deadline::after(LOST));
    });
}

/// As in a process that ends, has destroyed nothing, and still has other things to do.
#[test]
fn streams_end_behind_the_goodbyes_unless_an_operation_is_under_way() {
    for is_under_way in [false, true] {
        let [leaving, other] = linked_pair(false);
        let mut bytes = [[0]; 2];
        let [here, there] = &mut bytes;
        let under_way = is_under_way.then(|| receive(&leaving, 1, here));
        let waiting = receive(&other, 2, there);
        leaving.endpoint().registration().close(Deadline::after(LOST));
        let time = if is_under_way { Duration::from_millis(300) } else { LOST };
        let ended = waiting.wait(Deadline::after(time));
        assert_eq!(ended.is_none(), is_under_way, "{ended:?}");
        if let Some(ended) = ended {
            let error = ended.expect_err("nothing was sent");
            assert!(error.text().contains("has left"), "{error}");
        }
        for running in under_way.iter().chain([&waiting]) {
            running.cancel();
        }
    }
}

#[test]
fn what_nobody_waits_for_leaves_the_service_asleep() {
    let [group, _other] = pair(true);
    group.endpoint().open_links(&[1], Deadline::after(Duration::from_secs(20)), || None).expect("a link");
    let looks = Arc::new(AtomicUsize::new(0));
    let counting = Counting(looks.clone());
    let running =
        group.start(calling(Class::PointToPoint, 0, BARRIER, None), |_| counting).expect("it starts");
    // A ring, and then nothing more.
    std::thread::sleep(Duration::from_millis(50));
    group.endpoint().wake();
    std::thread::sleep(Duration::from_millis(50));
    let before = looks.load(Ordering::Relaxed);
    std::thread::sleep(Duration::from_millis(200));
    let after = looks.load(Ordering::Relaxed);
    assert!(after - before < 100, "{} looks at what has not moved", after - before);
    running.cancel();
}

/// It moves all that is under way, and peers would ring the bell for what it is about to see.
#[test]
fn the_library_does_not_watch_the_bell_beside_a_thread_that_waits() {
    let [group, _other] = linked_pair(true);
    let endpoint = group.endpoint();
    let _held = hold_service();
    let mut came = [[0; 8]; 3];
    let running: Vec<_> = (0..).zip(&mut came).map(|(tag, came)| receive(&group, tag, came)).collect();
    // By then nobody means to wait for them.
    std::thread::sleep(Duration::from_millis(1));
    let (waits, over) = (&AtomicBool::new(false), &AtomicBool::new(false));
    let attend = || Port::attend(&**endpoint);
    let watches = |attendance| matches!(attendance, Attendance::Watch(_));
    let (mut has_watched, mut leaves) = (false, false);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // It does not sleep.
            endpoint.follow(Deadline::NEVER, Through::Messages, |_| match over.load(Ordering::SeqCst) {
                true => Look::Over(()),
                false => {
                    waits.store(endpoint.waiting() > 0, Ordering::SeqCst);
                    Look::AtWork
                }
            })
        });
        comes_true(|| waits.load(Ordering::SeqCst));
        // Where it finds the waiting thread at the messages it looks again.
        comes_true(|| {
            let attendance = attend();
            has_watched |= watches(attendance);
            leaves = matches!(attendance, Attendance::Leave(_));
            has_watched || leaves
        });
        over.store(true, Ordering::SeqCst);
    });
    assert!(leaves && !has_watched);
    assert!(comes_true(|| watches(attend())), "nobody else does");
    running.iter().for_each(|running| assert!(running.cancel()));
}

/// An operation that never ends, and counts how often it is looked at.
struct Counting(Arc<AtomicUsize>);

impl Operation for Counting {
    fn advance(&mut self, _group: &Group) -> Poll<Result<Completion>> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Poll::Pending
    }

    fn abandon(&mut self, _group: &Group) {}

    fn waits_for(&self, _group: &Group) -> Vec<u32> {
        vec![1]
    }
}

/// An operation that needs a link as soon as it is looked at, and counts that.
struct Wanting(Arc<AtomicUsize>);

impl Operation for Wanting {
    fn advance(&mut self, group: &Group) -> Poll<Result<Completion>> {
        self.0.fetch_add(1, Ordering::Relaxed);
        group.endpoint().messages().want(1);
        Poll::Pending
    }

    fn abandon(&mut self, _group: &Group) {}

    fn waits_for(&self, _group: &Group) -> Vec<u32> {
        vec![1]
    }
}

/// Whoever looks at it next may be asleep, and has nothing to wake for.
#[test]
fn what_an_operation_has_asked_for_is_seen_to_in_the_look_that_finds_nothing_more() {
    let groups = unlinked_of(&vec![Options::default(); 2]);
    let (_held, looks) = (hold_service(), Arc::new(AtomicUsize::new(0)));
    let wanting = Wanting(looks.clone());
    let running =
        groups[0].start(calling(Class::PointToPoint, 0, BARRIER, None), |_| wanting).expect("it starts");
    assert_eq!(looks.load(Ordering::Relaxed), 1, "it is looked at as it starts");
    assert!(groups[0].endpoint().messages().wanted.is_empty(), "its link is opened");
    running.cancel();
}

/// Whoever sleeps has looked when to wake before there was the operation, and moves it.
#[test]
fn the_deadline_of_what_is_begun_beside_a_sleeper_passes_in_time() {
    let [group, _other] = pair(true);
    let endpoint = group.endpoint();
    endpoint.open_links(&[1], Deadline::after(Duration::from_secs(20)), || None).expect("a link");
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let is_over = || over.load(Ordering::SeqCst).then_some(());
            endpoint.wait(Deadline::NEVER, Through::Messages, is_over)
        });
        // By then it sleeps; if not, the test finds less.
        std::thread::sleep(Duration::from_millis(100));
        let (stuck, timeout) = (Scripted(None, Arc::default()), Some(Duration::from_millis(50)));
        let running =
            group.start(calling(Class::PointToPoint, 0, BARRIER, timeout), |_| stuck).expect("it starts");
        let (tell, told) = mpsc::channel();
        running.on_complete(Box::new(move |result| tell.send(result).expect("the test waits")));
        let result = told.recv_timeout(LOST);
        over.store(true, Ordering::SeqCst);
        endpoint.wake();
        let error = result.expect("somebody looks in time").expect_err("it does not end well");
        assert_eq!(error.status(), Status::Timeout, "{error}");
    });
}

/// A rank that sends in shared memory so fast that each look finds something, and one on the network, whose
/// link is looked at when nothing else moves.
#[test]
fn a_peer_that_sends_all_the_time_keeps_nothing_of_others_away() {
    let [shm, tcp] = [true, false].map(|shm| Options { shm, ..Options::default() });
    let groups = unlinked_of(&[shm.clone(), shm, tcp]);
    let deadline = Deadline::after(Duration::from_secs(20));
    for (rank, others) in [[1, 2], [0, 2], [0, 1]].iter().enumerate() {
        groups[rank].endpoint().open_links(others, deadline, || None).expect("links");
    }
    let mut came = [0; 3];
    let any = receive_any(&groups[0], &[2], &mut came);
    let sends = |rank: usize, tag, bytes: &'static [u8]| {
        let from = Source { address: bytes.as_ptr(), len: bytes.len() };
        done(&post(&groups[rank], tag, bytes.len(), Message::Send { to: 0, from }));
    };
    sends(2, 1, b"yes");
    let mut looks = 0;
    let has_come = groups[0].endpoint().wait(deadline, Through::Messages, || {
        looks += 1;
        sends(1, 2, b"more");
        any.result().map(|result| result.is_ok()).or((looks == 20_000).then_some(false))
    });
    assert_eq!(has_come, Some(true), "{looks} looks");
    assert_eq!(&came, b"yes");
}
