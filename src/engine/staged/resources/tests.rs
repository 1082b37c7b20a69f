//! What is kept between calls, and what waits until nobody uses it.

use std::sync::atomic::{AtomicBool, Ordering};

use super::super::parting::tests::{memory_comes_back_behind_copies, order_of_nothing};
use super::*;
use crate::cuda::courier::{Duty, Errand};
use crate::cuda::double::{Double, DoubleKernels, Order, Refusal};
use crate::cuda::word::Word;
use crate::deadline::Deadline;

#[test]
fn a_call_that_is_made_again_finds_its_memory_whatever_there_was_before() {
    let double = Double::new(1, Order::Eager);
    double.share_queues(8, 8);
    let devices = Devices::over(double.clone()).expect("a driver");
    let lane = |bytes| PinnedLane::take(&devices, 0, bytes).expect("a lane");
    let most = KEPT_BYTES;
    give_back([most / 4; 3].map(lane).into());
    // More than there is room for beside them.
    give_back(vec![lane(most / 2 + 1)]);
    let made = double.creations();
    give_back(vec![lane(most / 2 + 1)]);
    assert_eq!(double.creations(), made);
    // More than is kept at all: nothing else goes for it.
    give_back(vec![lane(most + 1)]);
    let made = double.creations();
    give_back(vec![lane(most / 2 + 1)]);
    assert_eq!(double.creations(), made);
}

#[test]
fn a_call_has_the_memory_that_was_used_last() {
    let devices = Devices::over(Double::new(1, Order::Eager)).expect("a driver");
    let lane = || PinnedLane::take(&devices, 0, SMALLEST).expect("a lane");
    let [first, second, third] = [lane(), lane(), lane()];
    let last = second.address();
    give_back(vec![third, first]);
    give_back(vec![second]);
    assert_eq!(lane().address(), last);
}

#[test]
fn calls_have_so_much_between_them_and_first_lanes_as_much_again() {
    let double = Double::new(1, Order::Eager);
    let devices = Devices::over(double.clone()).expect("a driver");
    let supply = Supply::ahead(&devices, 0);
    let take = |first| -> Vec<PinnedLane> {
        let lanes = std::iter::from_fn(|| supply.lane(SPARE_BYTES, first).expect("a driver"));
        lanes.take(3 * LENT_BYTES / SPARE_BYTES).collect()
    };
    let bytes = |lanes: &[PinnedLane]| lanes.iter().map(|lane| lane.memory.bytes()).sum::<usize>();
    let lanes = take(false);
    assert_eq!(bytes(&lanes), LENT_BYTES);
    let firsts = take(true);
    assert_eq!(bytes(&firsts), LENT_BYTES);
    let long = supply.lane(SPARE_BYTES + 1, false).expect("a driver");
    give_back(vec![long.expect("there is no way without it")]);
    // What nobody uses is kept for calls, and is no reason against lanes of another size.
    give_back(firsts);
    assert_eq!(bytes(&take(false)), LENT_BYTES, "those that nobody used");
    assert!(supply.lane(SMALLEST, false).expect("a driver").is_none());
    give_back(lanes);
    assert!(supply.lane(SMALLEST, false).expect("a driver").is_some());
}

#[test]
fn where_streams_may_wait_no_pinned_memory_is_given_back() {
    let double = Double::new(1, Order::Eager);
    let devices = Devices::over(double.clone()).expect("a driver");
    let lane = |bytes| PinnedLane::take(&devices, 0, bytes).expect("a lane");
    give_back([KEPT_BYTES + 1; 2].map(lane).into());
    let made = double.creations();
    give_back([KEPT_BYTES + 1; 2].map(lane).into());
    assert_eq!(double.creations(), made);
}

/// The driver would wait for the device then, with a lock that the launch may need of what the courier waits
/// for.
#[test]
fn no_pinned_memory_is_given_back_while_a_courier_is_on_its_way() {
    let double = Double::new(1, Order::Eager);
    double.share_queues(8, 8);
    let devices = Devices::over(double.clone()).expect("a driver");
    let stream = Stream::new(&devices, 0, false).expect("a stream");
    let before = double.registered();
    let lane = PinnedLane::take(&devices, 0, KEPT_BYTES + 1).expect("a lane");
    let pinned = double.registered();
    assert!(pinned > before + KEPT_BYTES, "{pinned} bytes");
    let errand = Errand::new(&devices, 0, Duty::default()).expect("a courier");
    // SAFETY: nothing is ordered.
    unsafe { errand.courier().launch(&stream, false, &DoubleKernels(double.clone())) }
        .expect("it is launched");
    give_back(vec![lane]);
    // Time for what comes too early.
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(double.registered(), pinned, "the driver waits for the courier");
    drop(errand);
    let soon = Deadline::after(Duration::from_secs(20));
    // The double's devices do nothing unless somebody asks.
    stream.synchronize(soon).expect("it leaves");
    while double.registered() > before && !soon.expired() {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(double.registered(), before);
}

#[test]
fn pinned_memory_that_cannot_be_given_back_yet_is_used_again() {
    let double = Double::new(1, Order::Eager);
    double.share_queues(8, 8);
    let devices = Devices::over(double.clone()).expect("a driver");
    let before = double.registered();
    let held = devices.note_held();
    for _ in 0..4 {
        give_back(vec![PinnedLane::take(&devices, 0, KEPT_BYTES + 1).expect("a lane")]);
    }
    assert_eq!(double.registered(), before + rounded(KEPT_BYTES + 1));
    drop(held);
    let soon = Deadline::after(Duration::from_secs(20));
    while double.registered() > before && !soon.expired() {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(double.registered(), before);
}

#[test]
fn a_lane_comes_back_although_the_driver_refuses_once_to_say_whether_it_is_used() {
    let double = Double::new(1, Order::Eager);
    let devices = Devices::over(double.clone()).expect("a driver");
    let parked = PinnedLane::take(&devices, 0, SMALLEST).expect("a lane");
    let address = parked.address();
    park(vec![parked]);
    double.refuse(Refusal { call: Some("cuEventQuery"), ..Refusal::default() });
    let next = PinnedLane::take(&devices, 0, SMALLEST).expect("a lane");
    assert!(!double.is_to_fail(), "the driver is asked");
    assert_eq!(next.address(), address);
}

/// Leaves a call whose copies come behind a gate, the `failing`-th driver call refused; the gate `opens` when
/// the host looks whether they have ended, or else behind all. Whether a call was refused, and which words of
/// those used next a late release undid.
fn leave_behind_gate(failing: usize, opens: bool) -> (bool, usize) {
    let double = Double::new(1, Order::RoundRobin);
    let devices = Devices::over(double.clone()).expect("a driver");
    let bay = Bay::take(&devices, 0).expect("side streams");
    let [exit, gate] = [(); 2].map(|()| Arc::new(devices.word(0).expect("a word")));
    // The copies of the call are under way.
    bay.store.wait_word(&gate).expect("it waits");
    let order = order_of_nothing(&devices, Some(exit));
    let (looks, has_left) = (double.synchronizations(), AtomicBool::new(false));
    double.fail_call(failing);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !has_left.load(Ordering::Relaxed) {
                if opens && double.synchronizations() > looks {
                    gate.release();
                }
                std::thread::yield_now();
            }
        });
        leave(&order, &bay, Vec::new(), false);
        has_left.store(true, Ordering::Relaxed);
    });
    let failed = !double.is_to_fail();
    drop(order);
    // As many as there are, if need be.
    let next: Vec<Word> = (0..300).map_while(|_| devices.word(0).ok()).collect();
    next.iter().for_each(Word::release);
    gate.release();
    double.drain();
    (failed, next.iter().filter(|word| !word.is_released()).count())
}

#[test]
fn a_word_whose_release_a_stream_has_yet_to_come_to_is_not_used_again_whatever_fails() {
    let end = (0..40).find(|&failing| {
        let (failed, undone) = leave_behind_gate(failing, true);
        assert_eq!(undone, 0, "call {failing}");
        !failed
    });
    let end = end.expect("there are more calls");
    assert_eq!(leave_behind_gate(0, false), (true, 0), "call 0");
    // The last call comes behind the release. Which one that is depends on how often the gate was found
    // closed.
    let last = (0..=end).rev().find(|&failing| {
        let (failed, undone) = leave_behind_gate(failing, false);
        assert_eq!(undone, 0, "call {failing}");
        failed
    });
    assert!(last.is_some_and(|last| last > 0), "{last:?}");
}

/// It may wait for nothing else, with nobody to ask for it.
#[test]
fn a_call_on_side_streams_finds_the_spare_lane_when_what_was_given_up_has_been_copied() {
    let double = Double::new(1, Order::RoundRobin);
    let devices = Devices::over(double.clone()).expect("a driver");
    let bay = Bay::take(&devices, 0).expect("side streams");
    let [exit, gate] = [(); 2].map(|()| Arc::new(devices.word(0).expect("a word")));
    let order = order_of_nothing(&devices, Some(exit));
    let spare = PinnedLane::take_spare(&order).expect("nobody has it");
    bay.store.wait_word(&gate).expect("it waits");
    leave(&order, &bay, vec![spare], false);
    assert!(PinnedLane::take_spare(&order).is_none(), "it is in use");
    gate.release();
    double.drain();
    assert!(PinnedLane::take_spare(&order).is_some());
    assert_eq!(double.complaints(), Vec::<String>::new());
}

#[test]
fn memory_comes_back_behind_what_side_streams_copy_whatever_fails() {
    memory_comes_back_behind_copies(
        |devices| Bay::take(devices, 0).expect("side streams"),
        |bay| vec![&bay.load, &bay.store],
        |bay, order| leave(order, &bay, Vec::new(), false),
    );
}
