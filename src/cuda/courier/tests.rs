//! Couriers over the driver double.

mod kernel;

use std::time::Duration;

use super::*;
use crate::cuda::double::{Double, DoubleKernels, Order as Turns};
use crate::cuda::driver::Memory;
use crate::cuda::local;
use crate::reduce::Representation;

/// What is short.
const SHORT: Duty = Duty { bytes: 8, networked: false, combiner: None, max_blocks: 0 };
const LONG: Duty = Duty { bytes: 64 << 20, ..SHORT };

const ELEMENT: Representation = Representation::Element;

/// A double with so few queues that a courier shares one, and its caller's stream.
fn given(order: Turns) -> (Arc<Double>, Arc<Devices>, Stream) {
    let double = Double::new(1, order);
    double.share_queues(1, 1);
    let devices = Devices::over(double.clone()).expect("a driver");
    let handle = double.stream(0);
    // SAFETY: the double trusts no handles.
    let stream = unsafe { Stream::borrow(&devices, 0, handle) }.expect("a stream");
    (double, devices, stream)
}

fn launch(courier: &Arc<Courier>, stream: &Stream, double: &Arc<Double>) -> Result<()> {
    // SAFETY: the double trusts no address.
    unsafe { courier.launch(stream, false, &DoubleKernels(double.clone())) }
}

/// More orders than there are slips, in the order of a stream, on either desk.
fn carries_all(order: Turns) -> Vec<String> {
    let (double, devices, stream) = given(order);
    const COUNT: u64 = 3 * SLIPS as u64;
    let [from, host, to] = [0; 3].map(|_| double.memory(0, 8 * COUNT as usize));
    for round in 1..=3 {
        let bytes: Vec<u8> = (0..8 * COUNT).map(|at| (at as u8).wrapping_mul(round)).collect();
        double.fill(stream.handle(), 0, from, &bytes);
        let errand = Errand::new(&devices, 0, SHORT).expect("a courier");
        let courier = errand.courier().clone();
        launch(&courier, &stream, &double).expect("it is launched");
        double.fill(stream.handle(), 0, from, &[0xee; 8]);
        double.expect(stream.handle(), 0, to, &bytes, "carried before the stream goes on");
        // SAFETY: the double trusts no address.
        let order = |desk, to, from| unsafe { errand.order(desk, to, from, 8) };
        let loads: Vec<u32> = (0..COUNT).map(|i| order(Desk::Load, host + 8 * i, from + 8 * i)).collect();
        let mut stores = Vec::new();
        for (index, load) in (0..COUNT).zip(loads) {
            while !courier.has_done(Desk::Load, load) {
                assert!(double.step(), "it has orders");
            }
            stores.push(order(Desk::Store, to + 8 * index, host + 8 * index));
        }
        drop(errand);
        while !stores.iter().all(|store| courier.has_done(Desk::Store, *store)) {
            assert!(double.step(), "it has orders");
        }
        double.drain();
        assert!(courier.has_come() && courier.is_gone());
    }
    double.complaints()
}

#[test]
fn orders_are_carried_out_in_the_order_of_the_stream() {
    for order in Turns::all(1) {
        assert_eq!(carries_all(order), Vec::<String>::new(), "{order:?}");
    }
}

/// The driver may give two idle streams one queue when they are given something at the same moment.
#[test]
fn idle_streams_are_roused_one_at_a_time() {
    let double = Double::new(1, Turns::Eager);
    let devices = Devices::over(double.clone()).expect("a driver");
    let [roused, busy, idle] = [(); 3].map(|()| {
        // SAFETY: the double trusts no handles.
        unsafe { Stream::borrow(&devices, 0, double.stream(0)) }.expect("a stream")
    });
    let word = devices.word(0).expect("a word");
    busy.wait_word(&word).expect("it waits");
    let errands = [(); 2].map(|()| Errand::new(&devices, 0, SHORT).expect("a courier"));
    let alone = devices.rousing(&roused).expect("it is asked").expect("it is idle");
    std::thread::scope(|scope| {
        let [first, second] = errands.each_ref().map(Errand::courier);
        // What has a queue waits for nobody.
        launch(second, &busy, &double).expect("it is launched");
        assert!(!second.is_new());
        let later = scope.spawn(|| launch(first, &idle, &double));
        std::thread::sleep(Duration::from_millis(50));
        assert!(first.is_new(), "another stream is being roused");
        drop(alone);
        later.join().expect("no panic").expect("it is launched");
        assert!(!first.is_new());
    });
    word.release();
    drop(errands);
    double.drain();
    assert_eq!(double.complaints(), Vec::<String>::new());
}

#[test]
fn a_stream_whose_last_courier_has_not_left_is_busy_and_nobody_is_asked() {
    let (double, devices, stream) = given(Turns::Eager);
    let [first, second] = [(); 2].map(|()| Errand::new(&devices, 0, SHORT).expect("a courier"));
    assert!(!first.courier().is_under_way(), "it is still to be launched");
    launch(first.courier(), &stream, &double).expect("it is launched");
    assert!(first.courier().is_under_way());
    // Whoever rouses a stream keeps others from that.
    // SAFETY: the double trusts no handles.
    let other = unsafe { Stream::borrow(&devices, 0, double.stream(0)) }.expect("a stream");
    let alone = devices.rousing(&other).expect("it is asked").expect("it is idle");
    let busy = first.courier().is_under_way();
    // SAFETY: nothing is ordered.
    unsafe { second.courier().launch(&stream, busy, &DoubleKernels(double.clone())) }
        .expect("it is launched");
    drop(alone);
    let couriers = [&first, &second].map(|errand| errand.courier().clone());
    drop((first, second));
    double.drain();
    assert!(couriers.iter().all(|courier| courier.is_gone() && !courier.is_under_way()));
    assert_eq!(double.complaints(), Vec::<String>::new());
}

#[test]
fn one_that_is_given_up_carries_no_more_and_leaves() {
    let (double, devices, stream) = given(Turns::RoundRobin);
    let (from, to) = (double.memory(0, 8), double.memory(0, 8));
    let errand = Errand::new(&devices, 0, SHORT).expect("a courier");
    let courier = errand.courier().clone();
    launch(&courier, &stream, &double).expect("it is launched");
    for _ in 0..2 * SLIPS {
        // SAFETY: the double trusts no address.
        unsafe { errand.order(Desk::Store, to, from, 8) };
    }
    let beside = courier.join(SHORT).expect("one more who orders");
    let (customer, other) = (errand.customer().clone(), beside.customer().clone());
    drop(errand);
    customer.give_up();
    assert!(!courier.is_dismissed(), "the other still orders");
    drop(beside);
    other.give_up();
    double.fill(stream.handle(), 0, to, &[7; 8]);
    double.drain();
    assert!(courier.is_gone());
    assert_eq!(double.peek(to, 8), [7; 8]);
    assert_eq!(double.complaints(), Vec::<String>::new());
}

/// One of two who share it gives up, in whichever order they let go: what the other has ordered is carried
/// out, and the numbers that it waits for are those of its own orders.
#[test]
fn who_gives_up_takes_nothing_from_another() {
    for first_lets_go in [true, false] {
        let (double, devices, stream) = given(Turns::RoundRobin);
        let count = 2 * SLIPS as u64;
        let [from, to, lost] = [0; 3].map(|_| double.memory(0, 8 * count as usize));
        let bytes: Vec<u8> = (0..8 * count).map(|at| at as u8 | 1).collect();
        double.fill(stream.handle(), 0, from, &bytes);
        let before = double.peek(lost + 8 * (count - 1), 8);
        let stays = Errand::new(&devices, 0, SHORT).expect("a courier");
        let gives_up = stays.courier().join(SHORT).expect("one more who orders");
        let (courier, customer) = (stays.courier().clone(), gives_up.customer().clone());
        launch(&courier, &stream, &double).expect("it is launched");
        double.fill(stream.handle(), 0, from, &[0xee; 8]);
        let orders: Vec<u32> = (0..count)
            .map(|at| {
                // SAFETY: the double trusts no address.
                unsafe {
                    gives_up.order(Desk::Store, lost + 8 * at, from + 8 * at, 8);
                    stays.order(Desk::Store, to + 8 * at, from + 8 * at, 8)
                }
            })
            .collect();
        // SAFETY: as above.
        unsafe { gives_up.order(Desk::Store, lost, from, 8) };
        if first_lets_go {
            drop(stays);
            drop(gives_up);
            customer.give_up();
        } else {
            drop(gives_up);
            customer.give_up();
            drop(stays);
        }
        for (order, at) in orders.iter().zip((0..).step_by(8)) {
            while !courier.has_done(Desk::Store, *order) {
                assert!(double.step(), "it has orders");
            }
            assert_eq!(double.peek(to + at, 8), bytes[at as usize..][..8]);
        }
        double.drain();
        assert!(courier.is_gone());
        assert_eq!(double.peek(lost + 8 * (count - 1), 8), before, "not begun when it was given up");
        assert_eq!(double.complaints(), Vec::<String>::new());
    }
}

#[test]
fn one_on_a_small_device_has_no_more_blocks_than_run_at_once() {
    let sums = Some((DataType::F32, Operator::Sum));
    for (multiprocessors, networked, combiner, carriers, workers) in [
        (132, false, sums, 3, 16),
        (132, true, sums, 4, 16),
        (132, true, None, 8, 0),
        (70, true, None, 4, 0),
        (14, false, sums, 3, 8),
        (14, true, sums, 3, 8),
        (7, true, sums, 3, 1),
        (6, true, sums, 3, 0),
    ] {
        let (double, devices, _) = given(Turns::RoundRobin);
        double.shrink(multiprocessors);
        let errand = Errand::new(&devices, 0, Duty { networked, combiner, ..LONG }).expect("a courier");
        assert_eq!(errand.courier().seal().0, [carriers, carriers, workers], "{multiprocessors}");
        assert_eq!(errand.courier().combines_by((DataType::F32, Operator::Sum)), workers > 0);
    }
}

#[test]
fn one_has_no_more_blocks_than_its_callers_allow() {
    let sums = Some((DataType::F32, Operator::Sum));
    for (limits, combiner, carriers, workers) in [
        ([0, 0], None, 8, 0),
        ([8, 0], None, 4, 0),
        ([0, 7], None, 3, 0),
        ([2, 9], None, 1, 0),
        ([1, 1], None, 1, 0),
        ([0, 0], sums, 4, 16),
        ([24, 20], sums, 4, 12),
        ([8, 0], sums, 2, 4),
        ([3, 0], sums, 1, 1),
        // Less it cannot do with.
        ([1, 0], sums, 1, 1),
    ] {
        let (double, devices, _) = given(Turns::RoundRobin);
        double.shrink(132);
        let duty = |max_blocks| Duty { networked: true, combiner, max_blocks, ..LONG };
        let errand = Errand::new(&devices, 0, duty(limits[0])).expect("a courier");
        let shared = errand.courier().join(duty(limits[1])).expect("one more");
        let (blocks, threads, _) = errand.courier().seal();
        assert_eq!((blocks, threads), ([carriers, carriers, workers], 1024), "{limits:?}");
        drop(shared);
    }
}

#[test]
fn one_that_nobody_needs_any_more_is_not_launched() {
    for has_ordered in [false, true] {
        let (double, devices, stream) = given(Turns::RoundRobin);
        let [from, to] = [0; 2].map(|_| double.memory(0, 8));
        let errand = Errand::new(&devices, 0, SHORT).expect("a courier");
        let (courier, customer) = (errand.courier().clone(), errand.customer().clone());
        if has_ordered {
            // SAFETY: the double trusts no address.
            unsafe { errand.order(Desk::Load, to, from, 8) };
        }
        drop(errand);
        customer.give_up();
        launch(&courier, &stream, &double).expect("there is nothing to do");
        assert!(courier.is_gone() && double.is_idle());
        assert!(courier.join(SHORT).is_none(), "nobody orders of it any more");
    }
}

#[test]
fn one_that_somebody_has_ordered_of_is_launched_though_the_others_give_up() {
    let (double, devices, stream) = given(Turns::RoundRobin);
    let [from, to] = [0; 2].map(|_| double.memory(0, 8));
    double.fill(stream.handle(), 0, from, &[7; 8]);
    let gives_up = Errand::new(&devices, 0, SHORT).expect("a courier");
    let lets_go = gives_up.courier().join(SHORT).expect("one more who orders");
    let (courier, customer) = (gives_up.courier().clone(), gives_up.customer().clone());
    // SAFETY: the double trusts no address.
    let loaded = unsafe { lets_go.order(Desk::Load, to, from, 8) };
    drop(lets_go);
    // SAFETY: as above.
    unsafe { gives_up.order(Desk::Load, to, from, 8) };
    drop(gives_up);
    customer.give_up();
    launch(&courier, &stream, &double).expect("it is launched");
    double.drain();
    assert!(courier.has_done(Desk::Load, loaded) && courier.is_gone());
    assert_eq!(double.peek(to, 8), [7; 8]);
    assert_eq!(double.complaints(), Vec::<String>::new());
}

#[test]
fn one_that_a_call_does_not_launch_is_left_to_the_others() {
    let (double, devices, stream) = given(Turns::RoundRobin);
    let errand = Errand::new(&devices, 0, SHORT).expect("a courier");
    let courier = errand.courier();
    courier.promise();
    courier.promise();
    courier.withdraw();
    launch(courier, &stream, &double).expect("the other may");
    courier.withdraw();
    let refused = Errand::new(&devices, 0, SHORT).expect("a courier");
    refused.courier().promise();
    refused.courier().withdraw();
    launch(refused.courier(), &stream, &double).expect_err("nobody meant to any more");
    drop((errand, refused));
    double.drain();
    assert_eq!(double.complaints(), Vec::<String>::new());
}

#[test]
fn one_that_the_driver_refuses_is_refused_to_all_who_order() {
    let mut refused = 0;
    for failing in 0..8 {
        let (double, devices, stream) = given(Turns::RoundRobin);
        let errand = Errand::new(&devices, 0, SHORT).expect("a courier");
        let beside = errand.courier().join(SHORT).expect("one more who orders");
        double.fail_call(failing);
        let first = launch(errand.courier(), &stream, &double);
        // Before the launch itself, the other may have it launched.
        match launch(beside.courier(), &stream, &double) {
            Ok(()) => assert!(first.is_ok() || !beside.courier().is_gone()),
            Err(error) if error.text().contains("could not be launched") => {
                assert!(first.is_err() && errand.courier().is_gone());
                refused += 1;
            }
            Err(error) => assert!(first.is_ok() && !double.is_to_fail(), "{error}"),
        }
        drop((errand, beside));
        // Its stand serves the next.
        let next = Errand::new(&devices, 0, SHORT).expect("a courier");
        if !double.is_to_fail() {
            launch(next.courier(), &stream, &double).expect("it is launched");
        }
        drop(next);
        double.drain();
        assert_eq!(double.complaints(), Vec::<String>::new());
    }
    assert!(refused > 0);
}

#[test]
fn what_is_short_is_placed_and_told_by_its_length() {
    let (double, devices, stream) = given(Turns::RoundRobin);
    let errand = Errand::new(&devices, 0, SHORT).expect("a courier");
    let courier = errand.courier().clone();
    let bytes: Vec<u8> = (0..TOLD).map(|at| (at * 7 + 1) as u8).collect();
    let rounds = [bytes.clone(), bytes.iter().map(|byte| !byte).collect()];
    let given = rounds.each_ref().map(|bytes| {
        let from = double.memory(0, TOLD);
        double.fill(stream.handle(), 0, from, bytes);
        from
    });
    launch(&courier, &stream, &double).expect("it is launched");
    let to = double.memory(0, TOLD);
    for length in [1, 7, 8, 9, 12, PLACED - 1, PLACED] {
        let before = double.peek(to, TOLD);
        // SAFETY: the double trusts no address.
        let order = unsafe { errand.place(to, &bytes[..length]) };
        while !courier.has_done(Desk::Store, order) {
            assert!(double.step(), "it has orders");
        }
        assert_eq!(double.peek(to, TOLD), [&bytes[..length], &before[length..]].concat(), "{length}");
    }
    for length in [1, 3, 4, 5, 8, 13, TOLD] {
        let at = double.memory_of(Memory::Host, 0, 2 * TOLD + 8);
        let before = double.peek(at, 2 * TOLD + 8);
        // SAFETY: it has room for twice as many, and nothing but the double accesses it.
        let told = unsafe { Told::at(std::ptr::with_exposed_provenance_mut(at as usize), length) };
        // At the same place, as calls follow each other.
        for (from, bytes) in given.iter().zip(&rounds) {
            told.clear();
            // SAFETY: the double trusts no address.
            let order = unsafe { errand.tell(at, *from, length) };
            while !told.take(order) {
                assert!(double.step(), "it has orders");
            }
            assert_eq!(double.peek(at, length), bytes[..length], "{length}");
        }
        let used = length.div_ceil(4) * 8;
        assert_eq!(double.peek(at, 2 * TOLD + 8)[used..], before[used..], "{length}");
    }
    drop(errand);
    double.drain();
    assert!(courier.is_gone());
    assert_eq!(double.complaints(), Vec::<String>::new());
}

/// What is combined is there when the next order carries it, at the same desk.
#[test]
fn one_combines_and_carries_the_sum() {
    for order in Turns::all(1) {
        let (double, devices, stream) = given(order);
        let combiner = Some((DataType::F32, Operator::Average));
        let errand = Errand::new(&devices, 0, Duty { combiner, ..SHORT }).expect("a courier");
        let courier = errand.courier().clone();
        assert!(courier.combines_by((DataType::F32, Operator::Average)));
        let bytes = |values: [f32; 3]| values.map(f32::to_ne_bytes).concat();
        let operands = [[1.0, 2.0, 3.0], [3.0, 0.5, 9.0]].map(|values| {
            let memory = double.memory(0, 12);
            double.fill(stream.handle(), 0, memory, &bytes(values));
            memory
        });
        let (sum, copy) = (double.memory(0, 12), double.memory(0, 12));
        launch(&courier, &stream, &double).expect("it is launched");
        let operand = |address: u64| local::Operand { address, representation: ELEMENT, scale: 1.0 };
        let operands: Vec<_> = operands.iter().map(|&from| operand(from).as_pointer()).collect();
        let out = std::ptr::with_exposed_provenance_mut(sum as usize);
        let sums = Launch::new(DataType::F32, &Operator::Average, 2, &operands, out, ELEMENT, 3);
        // SAFETY: the double trusts no address.
        let last = unsafe {
            errand.combine(sums);
            errand.order_behind(copy, sum, 12)
        };
        drop(errand);
        double.drain();
        assert!(courier.has_done(Desk::Work, last) && courier.is_gone());
        for at in [sum, copy] {
            assert_eq!(double.peek(at, 12), bytes([2.0, 1.25, 6.0]), "{order:?}");
        }
        assert_eq!(double.complaints(), Vec::<String>::new());
    }
}

#[test]
fn what_is_folded_can_be_combined() {
    let [_, (_, combiners)] = programs();
    for (dtype, operator) in kernels::all() {
        let fold = kernels::kernel(dtype, &operator).expect("a kernel").to_str().expect("letters");
        let combiner = combiner(dtype, operator);
        let found: Vec<_> = combiners.iter().filter(|(other, _)| *other == combiner).collect();
        let [(_, name)] = found[..] else { panic!("{} couriers for {dtype:?}, {operator:?}", found.len()) };
        assert_eq!(name.to_str(), Ok(&*fold.replace("unisono_fold", "unisono_combine")));
    }
    assert_eq!(combiner(DataType::I32, Operator::PreMulSum(3.0)), combiner(DataType::U32, Operator::Sum));
    assert_ne!(combiner(DataType::I32, Operator::Average), combiner(DataType::I32, Operator::Sum));
    assert_eq!(combiner(DataType::F32, Operator::BitAnd), None);
}

#[test]
fn several_share_what_one_can_combine() {
    let (double, devices, stream) = given(Turns::RoundRobin);
    let (sums, largest) = ((DataType::F32, Operator::Sum), (DataType::F32, Operator::Max));
    let carries = Errand::new(&devices, 0, SHORT).expect("a courier");
    let courier = carries.courier().clone();
    assert!(!courier.combines_by(sums));
    let beside = [Some(sums), Some(largest), None]
        .map(|combiner| courier.join(Duty { combiner, ..SHORT }).expect("one more"));
    assert!(courier.combines_by(sums) && !courier.combines_by(largest));
    launch(&courier, &stream, &double).expect("it is launched");
    // What comes too late changes nothing.
    let late = courier.join(Duty { bytes: 1 << 30, combiner: Some(largest), ..SHORT }).expect("one more");
    assert!(courier.combines_by(sums) && !courier.combines_by(largest));
    drop((carries, beside, late));
    double.drain();
    assert!(courier.is_gone());
    assert_eq!(double.complaints(), Vec::<String>::new());
}

/// Whoever looks meanwhile, at whatever moment, must not take the first for the only one.
#[test]
fn one_that_is_joined_before_it_is_launched_never_stays_unshared() {
    let (double, devices, stream) = given(Turns::RoundRobin);
    for _ in 0..2000 {
        let first = Errand::new(&devices, 0, SHORT).expect("a courier");
        let (courier, looks) = (first.courier().clone(), std::sync::Barrier::new(2));
        std::thread::scope(|scope| {
            let looker = scope.spawn(|| {
                looks.wait();
                (0..500).any(|_| courier.stays_unshared())
            });
            looks.wait();
            let second = courier.join(SHORT).expect("it is there");
            launch(&courier, &stream, &double).expect("it is launched");
            assert!(!looker.join().expect("it has looked"));
            drop(second);
        });
        drop(first);
        while !courier.is_gone() {
            assert!(double.step(), "it leaves");
        }
    }
}

#[test]
fn stands_are_used_again_and_never_while_one_is_there() {
    let (double, devices, stream) = given(Turns::RoundRobin);
    let made = |count: usize| -> Vec<Arc<Courier>> {
        let errands: Vec<_> =
            (0..count).map(|_| Errand::new(&devices, 0, SHORT).expect("a courier")).collect();
        let couriers = errands.iter().map(|errand| errand.courier().clone()).collect::<Vec<_>>();
        couriers.iter().for_each(|courier| launch(courier, &stream, &double).expect("it is launched"));
        couriers
    };
    let most = desk::STANDS;
    drop(made(most));
    let before = double.creations();
    // None has been seen to leave.
    drop(made(1));
    assert_eq!(double.creations(), before + 1);
    double.drain();
    let before = double.creations();
    drop(made(2 * most));
    assert_eq!(double.creations(), before);
    double.drain();
    // Those with desks in the device's memory are taken first.
    assert!(made(1)[0].stand().index < most as u32);
    double.drain();
    assert_eq!(double.complaints(), Vec::<String>::new());
}

#[test]
fn who_rouses_a_stream_of_one_device_holds_up_no_other_device() {
    let double = Double::new(2, Turns::Eager);
    let devices = Devices::over(double.clone()).expect("a driver");
    let [first, second] = [0, 1].map(|device| {
        // SAFETY: the double trusts no handles.
        unsafe { Stream::borrow(&devices, device, double.stream(device)) }.expect("a stream")
    });
    let errand = Errand::new(&devices, 1, SHORT).expect("a courier");
    // A thread is in its launch on device 0, behind the lock of that device's context.
    let alone = devices.rousing(&first).expect("it is asked").expect("it is idle");
    let launched = std::thread::scope(|scope| {
        let other = scope.spawn(|| launch(errand.courier(), &second, &double));
        let until = std::time::Instant::now() + Duration::from_secs(5);
        while errand.courier().is_new() && std::time::Instant::now() < until {
            std::thread::yield_now();
        }
        let launched = !errand.courier().is_new();
        drop(alone);
        other.join().expect("no panic").expect("it is launched");
        launched
    });
    drop(errand);
    double.drain();
    assert!(launched, "device 1 waits for who is at device 0");
}
