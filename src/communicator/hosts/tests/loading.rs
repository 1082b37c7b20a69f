//! Driver calls that wait for the device, while the device waits for a call.

use std::sync::atomic::AtomicUsize;

use super::*;
use crate::cuda::double::Waiting;

/// Nothing moves for so long only if nothing ever will, also on a processor that has much else to do.
const STUCK: Duration = Duration::from_secs(30);

/// The program launches kernels for the first time: the driver then waits for the device, with a lock held
/// that copies through the host need.
#[test]
fn kernels_may_be_loaded_while_a_stream_waits_for_a_composed_call() {
    for carriers in [Carriers::Couriers, Carriers::Relays] {
        let (_, doubles) = ranks_of(2, 2, Order::RoundRobin, 2, carriers, |rank| {
            rank.double.hold_lock(Waiting::All, STUCK);
            let stop = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        rank.double.launch_first(rank.device);
                        std::thread::sleep(Duration::from_micros(100));
                    }
                });
                for (seed, kind) in (1..).zip([
                    Kind::Allreduce,
                    Kind::Broadcast,
                    Kind::ReduceScatter,
                    Kind::Reduce,
                    Kind::Allgather,
                ]) {
                    for count in COUNTS {
                        let (dtype, operator, root) = (DataType::Bf16, Operator::Sum, (seed % 4) as u32);
                        rank.exercise(What { kind, count, dtype, operator, root }, seed);
                    }
                }
                stop.store(true, Ordering::Relaxed);
            });
        });
        for double in doubles {
            see_out(&double);
            assert_eq!(double.complaints(), Vec::<String>::new());
        }
    }
}

/// A stream that waits for the call waits for its end: what ends it makes no stream, for which the driver may
/// wait for that one.
#[test]
fn a_failure_makes_no_stream_while_streams_wait() {
    for carriers in [Carriers::Couriers, Carriers::Relays] {
        let (_, doubles) = ranks_of(2, 2, Order::RoundRobin, 1, carriers, |rank| {
            rank.double.hold_lock(Waiting::Seen, Duration::from_secs(2));
            if rank.context.rank() == 3 {
                std::thread::sleep(Duration::from_millis(50));
                rank.context.abort();
                return;
            }
            let (_, request) = rank.sum(1000);
            let error = rank.run(&request, &rank.call()).expect_err("aborted");
            assert_eq!(error.status(), Status::Aborted, "{error}");
        });
        for double in doubles {
            let complaints = double.complaints().concat();
            assert!(!complaints.contains("cuStreamCreate"), "{complaints}");
        }
    }
}

/// A call has failed whose stream the driver waits for, with a lock held: what ends it does not wait for the
/// driver.
#[test]
fn a_call_that_fails_while_the_driver_does_not_answer_ends() {
    const HELD: Duration = Duration::from_secs(16);
    let given = AtomicUsize::new(0);
    ranks_of(2, 2, Order::RoundRobin, 1, Carriers::Couriers, |rank| {
        rank.double.hold_lock(Waiting::All, HELD);
        let start = Instant::now();
        if rank.context.rank() == 3 {
            while rank.context.failure().is_none() {
                assert!(start.elapsed() < STUCK, "the others fail");
                std::thread::sleep(Duration::from_millis(5));
            }
            return;
        }
        let (_, request) = rank.sum(1000);
        let call = Call { timeout: Some(Duration::from_millis(500)), ..rank.call() };
        std::thread::scope(|scope| {
            // SAFETY: the double trusts no address.
            let started = unsafe { rank.context.start(&request, &call) };
            given.fetch_add(1, Ordering::Relaxed);
            // The other rank of this process needs the driver until then.
            while given.load(Ordering::Relaxed) < 3 {
                std::thread::yield_now();
            }
            scope.spawn(|| rank.double.launch_first(rank.device));
            // If it takes long the call is refused already.
            let Ok(work) = started else { return };
            // Not by a wait, which may ask the driver itself.
            while work.peek().is_none() {
                assert!(start.elapsed() < HELD / 2, "{:?}", start.elapsed());
                std::thread::sleep(Duration::from_millis(5));
            }
            work.peek().expect("it has ended").expect_err("rank 3 does not come");
        });
    });
}
