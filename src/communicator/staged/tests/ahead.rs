//! Threads that run ahead of streams for whose tasks the driver has no room without end.

use super::*;

/// For how many tasks of a stream the driver has room. A call and what [`exercise`] gives the stream besides
/// are eight, and a stream may wait for 64 calls when the machine is so busy that waits for room are in vain.
const ROOM: usize = 600;

/// Far more than that.
const CALLS: u32 = 100;

/// What goes wrong when two ranks of one process, on one device, start many calls.
fn run_ahead(order: Order, body: impl Fn(&Rank) -> Vec<Work> + Sync) -> Vec<String> {
    let double = Double::new(2, order);
    double.limit_queues(ROOM);
    let met = Barrier::new(2);
    let complaints = ranks_on(&[double.clone(), double], "shm", |rank| {
        let works = body(rank);
        for work in works {
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
        }
        met.wait();
        rank.drain()
    });
    complaints.concat()
}

#[test]
fn a_thread_far_ahead_of_its_stream_waits_outside_of_the_driver() {
    for order in [Order::RoundRobin, Order::Random(5)] {
        let complaints = run_ahead(order, |rank| {
            let call = |round| exercise(rank, Kind::Allreduce, 37, false, round).expect("it starts");
            (0..CALLS).map(call).collect()
        });
        assert_eq!(complaints, Vec::<String>::new(), "{order:?}");
    }
}

#[test]
fn messages_far_ahead_of_their_stream_wait_too() {
    let complaints = run_ahead(Order::RoundRobin, |rank| {
        (0..CALLS).flat_map(|round| exchange(rank, &rank.context, round)).collect()
    });
    assert_eq!(complaints, Vec::<String>::new());
}

#[test]
fn calls_of_several_contexts_on_one_stream_count_together() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let complaints = run_ahead(Order::RoundRobin, |rank| {
        // One with links of its own, and one without.
        let second = Context::create(Options {
            rank: rank.rank,
            size: 2,
            rendezvous: Rendezvous::Store(store.clone()),
            name: "second".into(),
            timeout: PATIENCE,
            interface: Some("127.0.0.1".into()),
            transports: Some("tcp".into()),
            host: None,
        })
        .expect("the ranks meet");
        let third = rank.context.duplicate().expect("a third");
        let all = [rank.context.clone(), second, third];
        all.iter().for_each(|context| context.cuda().pretend(&rank.devices, PIECE));
        let mut works = Vec::new();
        for round in 0..CALLS {
            works.extend(exchange(rank, &all[round as usize % 3], round));
        }
        works
    });
    assert_eq!(complaints, Vec::<String>::new());
}

#[test]
fn works_that_a_stream_is_blocked_by_count_too() {
    let complaints = run_ahead(Order::RoundRobin, |rank| {
        let values = given(rank.rank, 0, 37);
        let (input, output) = (rank.memory(&values), rank.memory(&values));
        let mut works = Vec::new();
        for _ in 0..3 * CALLS {
            let sum = request(Kind::Allreduce, input, output, 37, 0);
            let work = rank.start(&sum, &Call::default()).expect("it starts");
            // SAFETY: the double trusts no handle.
            unsafe { work.block_stream(rank.stream) }.expect("it waits");
            works.push(work);
        }
        works
    });
    assert_eq!(complaints, Vec::<String>::new());
}

/// Receives on a stream that only end when this thread has sent something after them.
fn receives(rank: &Rank, count: u32, call: &Call) -> Vec<Result<Work>> {
    let receive = |round| {
        let into = rank.memory(&[0; 40]);
        rank.start(&request(Kind::Receive, 0, into, 40, 1 - rank.rank), call).inspect(|_| {
            rank.expect(into, &given(1 - rank.rank, round, 40), "received");
        })
    };
    (0..count).map(receive).collect()
}

#[test]
fn a_thread_goes_on_that_is_to_make_its_calls_end() {
    const MESSAGES: u32 = 40;
    let complaints = run_ahead(Order::RoundRobin, |rank| {
        let peer = 1 - rank.rank;
        if rank.rank == 0 {
            let mut works = receives(rank, MESSAGES, &rank.call());
            // The answer is to this, on another stream.
            let other = rank.double.stream(0);
            let values = given(0, 0, 40);
            let from = rank.memory(&values);
            rank.double.fill(other, 0, from, &bytes(&values));
            let call = Call { stream: Some(other), ..Call::default() };
            works.push(rank.start(&request(Kind::Send, from, 0, 40, peer), &call));
            works.into_iter().map(|work| work.expect("it starts")).collect()
        } else {
            let into = rank.memory(&[0; 40]);
            rank.run(&request(Kind::Receive, 0, into, 40, peer), &Call::default()).expect("it ends well");
            let send = |round| {
                let values = given(1, round, 40);
                let from = rank.memory(&values);
                rank.fill(from, &values);
                rank.start(&request(Kind::Send, from, 0, 40, peer), &rank.call()).expect("it starts")
            };
            (0..MESSAGES).map(send).collect()
        }
    });
    assert_eq!(complaints, Vec::<String>::new());
}

#[test]
fn calls_that_never_end_are_refused_in_time() {
    let met = Barrier::new(2);
    let errors = ranks(2, "shm", Order::RoundRobin, |rank| {
        if rank.rank == 1 {
            met.wait();
            return None;
        }
        let hasty = Call { timeout: Some(Duration::from_millis(10)), ..rank.call() };
        let mut refused = None;
        // On a busy machine the first may have ended before the last has begun.
        for seconds in [2, 10, 40] {
            let patient = Call { timeout: Some(Duration::from_secs(seconds)), ..rank.call() };
            let works = receives(rank, 64, &patient);
            assert!(works.iter().all(Result::is_ok), "the first are taken");
            refused = receives(rank, 1, &hasty).remove(0).err();
            for work in works {
                let error =
                    work.expect("it has started").wait(Deadline::after(PATIENCE)).expect_err("nobody sends");
                assert_eq!(error.status(), Status::Timeout);
            }
            // Nothing is left of them.
            assert!(receives(rank, 1, &hasty).remove(0).is_ok());
            if refused.is_some() {
                break;
            }
        }
        met.wait();
        refused
    });
    let error = errors[0].as_ref().expect("one too many");
    assert_eq!(error.status(), Status::Timeout);
    assert!(error.text().starts_with("call->stream waits for 64 earlier calls"), "{error}");
}
