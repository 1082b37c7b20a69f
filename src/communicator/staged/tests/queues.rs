//! Fewer queues than streams.

use super::*;
use crate::cuda::event::Event;

#[test]
fn copy_engines_may_be_held_up_by_what_is_behind_a_call() {
    let doubles = [with_queues(1, Order::Eager), with_queues(1, Order::Eager)];
    let errors = ranks_on(&doubles, "shm", |rank| {
        let gate = rank.gate();
        let values = given(rank.rank, 0, 70);
        let memory = rank.memory(&values);
        rank.fill(memory, &values);
        let call = Call { timeout: Some(Duration::from_millis(200)), ..rank.call() };
        // It may have ended on the other rank before it begins here.
        let work = rank.start(&request(Kind::Allreduce, memory, memory, 70, 0), &call);
        rank.fill(memory, &values);
        gate.release();
        let result = work.and_then(|work| work.wait(Deadline::after(PATIENCE)));
        let error = result.expect_err("its copies do not run");
        // Nor will they.
        rank.double.drain();
        error
    });
    assert!(errors.iter().all(|error| error.status() == Status::Timeout), "{errors:?}");
}

#[test]
fn calls_ahead_of_their_stream_need_one_queue() {
    for order in [Order::Eager, Order::RoundRobin, Order::Backward, Order::Random(3)] {
        let complaints = on_few_queues(&[with_queues(1, order), with_queues(1, order)], "shm", many);
        assert_eq!(complaints, Vec::<String>::new(), "{order:?}");
    }
}

#[test]
fn ranks_of_one_process_need_one_queue_each() {
    for order in [Order::Eager, Order::RoundRobin, Order::Backward, Order::Random(3)] {
        let double = with_queues(2, order);
        let complaints = on_few_queues(&[double.clone(), double], "shm", many);
        assert_eq!(complaints, Vec::<String>::new(), "{order:?}");
    }
}

#[test]
fn streams_of_two_contexts_may_wait_for_each_other() {
    for order in [Order::RoundRobin, Order::Backward, Order::Random(3)] {
        let double = with_queues(4, order);
        let others = [double.stream(0), double.stream(0)];
        let complaints = on_few_queues(&[double.clone(), double.clone()], "shm", |rank| {
            let second = rank.context.duplicate().expect("a second context");
            second.cuda().pretend(&rank.devices, PIECE);
            let other = Rank {
                context: second,
                double: rank.double.clone(),
                devices: rank.devices.clone(),
                stream: others[rank.rank as usize],
                rank: rank.rank,
                thread_waits: AtomicBool::new(false),
            };
            other.copy_by_kernels();
            let mut works = Vec::new();
            let follow = |one: &Rank, before: &Rank| {
                let event = Event::new(&rank.devices, 0).unwrap();
                event.record(&before.stream()).unwrap();
                one.stream().wait(&event).unwrap();
            };
            for round in 0..6 {
                works.push(exercise(rank, Kind::Allreduce, 70, false, round).expect("it starts"));
                follow(&other, rank);
                works.push(exercise(&other, Kind::Allgather, 70, false, round).expect("it starts"));
                works.extend(exchange(&other, &other.context, round));
                follow(rank, &other);
            }
            works
        });
        assert_eq!(complaints, Vec::<String>::new(), "{order:?}");
    }
}
