//! Calls that go well: composed, by kernels alone, or staged.

use super::members::AHEAD;
use super::*;
use crate::communicator::start_together;
use crate::cuda::queues::MOST;
use crate::cuda::stream::Stream;
use crate::schedule::Algorithm;

#[test]
fn composed_calls_have_the_bits_of_host_memory() {
    let kinds = [Kind::Allreduce, Kind::Reduce, Kind::ReduceScatter, Kind::Broadcast, Kind::Allgather];
    use Carriers::{Couriers, Relays, SideStreams};
    for (hosts, inside, order, carriers) in [
        (2, 2, Order::RoundRobin, SideStreams),
        (2, 2, Order::Random(7), SideStreams),
        (3, 2, Order::Eager, SideStreams),
        (2, 2, Order::RoundRobin, Couriers),
        (2, 2, Order::Random(8), Couriers),
        (3, 2, Order::Backward, Couriers),
        (2, 2, Order::RoundRobin, Relays),
        (2, 2, Order::Random(9), Relays),
        (3, 2, Order::Backward, Relays),
    ] {
        ranks_by(hosts, inside, order, carriers, |rank| {
            let before = rank.hosts().relay().pieces();
            for (seed, kind) in (1..).zip(kinds) {
                for count in COUNTS {
                    let (dtype, operator) = (DataType::F32, Operator::Sum);
                    let root = (seed + count) as u32 % rank.context.size();
                    rank.exercise(What { kind, count, dtype, operator, root }, seed);
                }
            }
            let relayed = rank.hosts().relay().pieces() - before;
            // Four calls of each, the longest in 4 to 16 pieces.
            assert!(if carriers == Relays { relayed > 100 } else { relayed == 0 }, "{relayed} pieces");
        });
    }
}

/// An arena has a slab to itself, and so would what is allocated beside it.
#[test]
fn what_calls_between_hosts_work_in_lies_in_the_arena() {
    ranks(2, 2, Order::RoundRobin, |rank| {
        let (hosts, exchange) = (rank.hosts(), rank.hosts().exchange().clone());
        let (workspace, bytes) = hosts.workspace();
        let arena = exchange.latch_address()..exchange.latch_address() + exchange.arena_bytes();
        let used = arena.start + Table::default().arena_bytes(2) as u64;
        assert!(used <= workspace && workspace + bytes as u64 <= arena.end, "{workspace:#x}: {arena:#x?}");
        let slab = (exchange.arena_bytes() as usize).next_multiple_of(2 << 20);
        assert_eq!(rank.double.allocated(rank.device), slab);
    });
}

#[test]
fn short_calls_are_staged_by_the_bytes_of_their_kind() {
    let bounds = Bounds { allreduce: 8, reduce: 16, broadcast: 24, reduce_scatter: 32 };
    let is_short = |kind, counts| {
        let what = What { kind, count: 0, dtype: DataType::F16, operator: Operator::Sum, root: 0 };
        let request = what.request(std::ptr::null(), std::ptr::null_mut());
        is_short(&Request { counts, ..request }, 4, &bounds)
    };
    let limits = [(Kind::Allreduce, 4), (Kind::Reduce, 8), (Kind::Broadcast, 12), (Kind::ReduceScatter, 4)];
    for (kind, most) in limits {
        let is_short = |count| is_short(kind, Counts::Uniform(count));
        assert_eq!(
            [0, 1, most, most + 1, u64::MAX].map(is_short),
            [true, true, true, false, false],
            "{kind:?}"
        );
    }
    assert!(!is_short(Kind::Allgather, Counts::Uniform(1)));
    assert!(is_short(Kind::Allgather, Counts::Blocks(vec![1 << 20; 4])), "composed calls have one count");
}

/// It has no memory, whatever the pointers and streams are that it is called with.
#[test]
fn a_call_of_nothing_is_the_same_whichever_pointers_and_streams_ranks_give() {
    ranks(2, 2, Order::RoundRobin, |rank| {
        let first = rank.context.rank() == 0;
        let at = pointer(if first { rank.double.memory(rank.device, 4) } else { 0 });
        for kind in [Kind::Allgather, Kind::Allreduce] {
            let what = What { kind, count: 0, dtype: DataType::F32, operator: Operator::Sum, root: 0 };
            for on_stream in [true, false, first] {
                let call = if on_stream { rank.call() } else { Call::default() };
                let work = rank.start(&what.request(at.cast_const(), at), &call).expect("it starts");
                work.wait(Deadline::after(PATIENCE)).unwrap_or_else(|error| panic!("{kind:?}: {error}"));
            }
            // What is composed behind it has one number on all ranks.
            rank.exercise(What { count: 3, ..what }, 1);
        }
    });
}

/// The stream that the exchange has for such calls is idle, but waits for the default stream before anything
/// else.
#[test]
fn a_call_that_names_no_stream_comes_after_what_the_default_stream_has_yet_to_do() {
    for carriers in [Carriers::SideStreams, Carriers::Couriers] {
        ranks_by(2, 2, Order::RoundRobin, carriers, |rank| {
            let (size, own) = (u64::from(rank.context.size()), u64::from(rank.context.rank()));
            for count in COUNTS {
                let (dtype, operator) = (DataType::U64, Operator::Sum);
                let what = What { kind: Kind::Allgather, count, dtype, operator, root: 0 };
                let (reads, writes) = what.lengths(rank.context.size(), false);
                let [from, to] = [reads, writes].map(|bytes| rank.double.memory(rank.device, bytes.max(1)));
                // SAFETY: it lives for as long as the driver.
                let default = unsafe { Stream::borrow(&rank.devices, rank.device, StreamHandle::LEGACY) };
                let gate = rank.devices.word(rank.device).expect("a word");
                default.and_then(|stream| stream.wait_word(&gate)).expect("the default stream waits");
                let given = (own + 7).to_le_bytes().repeat(count as usize);
                rank.double.fill(StreamHandle::LEGACY, rank.device, from, &given);
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        std::thread::sleep(Duration::from_millis(5));
                        gate.release();
                    });
                    let request = what.request(pointer(from).cast_const(), pointer(to));
                    let work =
                        rank.start(&request, &Call { stream: None, ..rank.call() }).expect("it starts");
                    work.wait(Deadline::after(PATIENCE)).expect("it ends well");
                });
                let due: Vec<u8> =
                    (0..size).flat_map(|rank| (rank + 7).to_le_bytes().repeat(count as usize)).collect();
                assert!(rank.double.peek(to, writes.max(1))[..writes] == due, "{count} by {carriers:?}");
            }
        });
    }
}

#[test]
fn several_calls_under_way_are_relayed_in_their_order() {
    let kinds = [Kind::Allreduce, Kind::ReduceScatter, Kind::Broadcast, Kind::Allgather, Kind::Reduce];
    for order in [Order::Eager, Order::RoundRobin, Order::Random(3), Order::Backward] {
        ranks_by(2, 2, order, Carriers::Relays, |rank| {
            let (size, before) = (u64::from(rank.context.size()), rank.hosts().relay().pieces());
            let mut works = Vec::new();
            let mut due = Vec::new();
            for round in 0..20 {
                let kind = kinds[round % kinds.len()];
                // What each rank gives is its number and the round.
                let value = |from: u64| 100 * (from as u32 + 1) + round as u32;
                let count = COUNTS[round % COUNTS.len()];
                let root = round as u32 % rank.context.size();
                let what = What { kind, count, dtype: DataType::U32, operator: Operator::Sum, root };
                let (reads, writes) = what.lengths(rank.context.size(), rank.context.rank() == root);
                let [from, to] = [reads, writes].map(|bytes| rank.double.memory(rank.device, bytes.max(1)));
                let given: Vec<u8> = value(rank.context.rank().into()).to_le_bytes().repeat(reads / 4);
                rank.double.fill(rank.stream, rank.device, from, &given);
                let request = what.request(pointer(from).cast_const(), pointer(to));
                works.push(rank.start(&request, &rank.call()).expect("it starts"));
                let sum: u32 = (0..size).map(value).sum();
                let result: Vec<u8> = match kind {
                    Kind::Broadcast => value(root.into()).to_le_bytes().repeat(writes / 4),
                    Kind::Allgather => {
                        (0..size).flat_map(|from| value(from).to_le_bytes().repeat(count as usize)).collect()
                    }
                    _ => sum.to_le_bytes().repeat(writes / 4),
                };
                due.push((to, result, what));
            }
            for work in works {
                work.wait(Deadline::after(PATIENCE)).expect("it ends well");
            }
            let relayed = rank.hosts().relay().pieces() - before;
            assert!(relayed > 20, "{relayed} pieces");
            for (to, result, what) in due {
                assert!(result.is_empty() || rank.double.peek(to, result.len()) == result, "{what:?}");
            }
        });
    }
}

#[test]
fn every_type_and_operator_is_rounded_once() {
    let operators = [
        Operator::Sum,
        Operator::Product,
        Operator::Min,
        Operator::Max,
        Operator::Average,
        Operator::PreMulSum(0.7),
        Operator::BitXor,
    ];
    for carriers in [Carriers::SideStreams, Carriers::Relays] {
        ranks_by(2, 2, Order::RoundRobin, carriers, |rank| {
            for dtype in DataType::ALL {
                for operator in operators {
                    if operator == Operator::BitXor && dtype.is_float() {
                        continue;
                    }
                    for (kind, count) in
                        [(Kind::Allreduce, 301), (Kind::Reduce, 37), (Kind::ReduceScatter, 150)]
                    {
                        rank.exercise(What { kind, count, dtype, operator, root: 3 }, count);
                    }
                }
            }
        });
    }
}

/// Whether a call on a stream that comes late to it returns before that.
fn returns_ahead_of_its_stream(rank: &Rank) -> bool {
    let (memory, request) = rank.sum(4001);
    // SAFETY: the stream lives as long as the double.
    let stream = unsafe { Stream::borrow(&rank.devices, rank.device, rank.stream) }.expect("a stream");
    let gate = rank.devices.word(rank.device).expect("a word");
    stream.wait_word(&gate).expect("a wait");
    let [returned, ahead] = [false; 2].map(AtomicBool::new);
    let work = std::thread::scope(|scope| {
        scope.spawn(|| {
            let until = Instant::now() + PATIENCE;
            while !returned.load(Ordering::SeqCst) && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
            ahead.store(returned.load(Ordering::SeqCst), Ordering::SeqCst);
            gate.release();
        });
        // SAFETY: the double trusts no address.
        let work = unsafe { rank.context.start(&request, &rank.call()) }.expect("it starts");
        returned.store(true, Ordering::SeqCst);
        work
    });
    work.wait(Deadline::after(PATIENCE)).expect("a sum");
    assert_eq!(rank.double.peek(memory, 4), [4; 4]);
    ahead.into_inner()
}

/// The blocks of a chunk are packed so that one launch of the host's kernels combines them all.
#[test]
fn a_chunk_of_a_long_reduce_scatter_is_one_exchange_within_the_host() {
    // As many elements of each rank's block are 6 chunks.
    const COUNT: u64 = 1001;
    for dtype in [DataType::F32, DataType::Bf16] {
        ranks_by(3, 2, Order::RoundRobin, Carriers::Couriers, |rank| {
            let what =
                What { kind: Kind::ReduceScatter, count: COUNT, dtype, operator: Operator::Sum, root: 0 };
            rank.exercise(what, 1);
            let launches = std::rc::Rc::new(std::cell::Cell::new(0));
            let counted = launches.clone();
            AHEAD.set(Some(Box::new(move || {
                counted.set(counted.get() + 1);
                Ok(())
            })));
            let (reads, writes) = what.lengths(6, false);
            let [from, to] = [reads, writes].map(|bytes| rank.double.memory(rank.device, bytes));
            let request = what.request(pointer(from).cast_const(), pointer(to));
            let work = rank.start(&request, &rank.call()).expect("it starts");
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
            AHEAD.set(None);
            assert_eq!(launches.get(), 6, "{dtype:?}");
        });
    }
}

/// However many parts wait for their turn: what two run in serves them all.
#[test]
fn a_long_call_pins_no_more_memory_than_its_parts_under_way_need() {
    ranks_by(2, 2, Order::RoundRobin, Carriers::Couriers, |rank| {
        // SAFETY: the stream lives as long as the double.
        let stream = unsafe { Stream::borrow(&rank.devices, rank.device, rank.stream) }.expect("a stream");
        let gate = rank.devices.word(rank.device).expect("a word");
        stream.wait_word(&gate).expect("it waits");
        let before = rank.double.registered();
        // 22 chunks. A device has 16 lanes from the beginning.
        let count = 20 * 4001;
        let (memory, request) = rank.sum(count);
        let work = rank.start(&request, &rank.call()).expect("it starts");
        let begun = rank.double.registered();
        gate.release();
        work.wait(Deadline::after(PATIENCE)).expect("it ends well");
        assert_eq!([begun, rank.double.registered()], [before; 2]);
        let bytes = 4 * count as usize;
        assert!(rank.double.peek(memory, bytes) == vec![4; bytes]);
    });
}

#[test]
fn however_few_queues_there_are_no_thread_waits_for_the_hosts() {
    for queues in [2, 8, MOST] {
        let answers = ranks_by(2, 2, Order::RoundRobin, Carriers::Couriers, |rank| {
            rank.double.share_queues(queues, queues);
            returns_ahead_of_its_stream(rank)
        });
        assert_eq!(answers, [true; 4], "{queues} queues");
    }
}

#[test]
fn what_is_not_composed_goes_another_way() {
    // Three ranks are no inner node of the tree; alltoall is staged; lists and tags are.
    ranks(2, 3, Order::RoundRobin, |rank| {
        for kind in [Kind::Allreduce, Kind::Broadcast, Kind::Allgather, Kind::Alltoall, Kind::Reduce] {
            let (count, dtype, operator, root) = (100, DataType::Bf16, Operator::Sum, 4);
            rank.exercise(What { kind, count, dtype, operator, root }, 5);
        }
        let (memory, request) = rank.sum(64);
        rank.run(&request, &Call { tag: Some(3), ..rank.call() }).expect("a sum with a tag");
        assert_eq!(rank.double.peek(memory, 4), [6; 4]);
    });
}

#[test]
fn messages_go_by_kernels_within_a_host_and_staged_between_hosts() {
    ranks(2, 2, Order::RoundRobin, |rank| {
        let (me, call) = (rank.context.rank(), rank.call());
        for distance in [1, 2] {
            let peer = me ^ distance;
            let [out, into] = [0, 1].map(|_| rank.double.memory(rank.device, 300));
            rank.double.fill(rank.stream, rank.device, out, &[me as u8; 300]);
            let what =
                |kind| What { kind, count: 300, dtype: DataType::U8, operator: Operator::Sum, root: peer };
            let send = what(Kind::Send).request(pointer(out).cast_const(), std::ptr::null_mut());
            let receive = what(Kind::Receive).request(std::ptr::null(), pointer(into));
            let calls = [(&rank.context, &send, &call), (&rank.context, &receive, &call)];
            // SAFETY: the double trusts no address.
            for work in unsafe { start_together(&calls) }.expect("both start") {
                work.wait(Deadline::after(PATIENCE)).expect("both end");
            }
            assert_eq!(rank.double.peek(into, 300), vec![peer as u8; 300]);
        }
    });
}

#[test]
fn calls_of_a_group_go_either_way_on_one_stream() {
    for carriers in [Carriers::Couriers, Carriers::SideStreams] {
        go_either_way(carriers);
    }
}

fn go_either_way(carriers: Carriers) {
    ranks_by(2, 2, Order::RoundRobin, carriers, |rank| {
        let (me, call) = (rank.context.rank(), rank.call());
        let memory = |bytes: &[u8]| {
            let address = rank.double.memory(rank.device, bytes.len());
            rank.double.fill(rank.stream, rank.device, address, bytes);
            address
        };
        for round in 0..4u8 {
            // Staged, composed, staged, and both halves of an exchange between hosts, by no rank at the same
            // place.
            let mine: Vec<u8> = (0..4).map(|to| 16 * me as u8 + to + round).collect();
            let [given, again, out] = [memory(&mine), memory(&mine), memory(&[me as u8; 300])];
            let [all, more, into] = [memory(&[0; 4]), memory(&[0; 4]), memory(&[0; 300])];
            let (sum, composed) = rank.sum(64);
            let of =
                |kind, count, root| What { kind, count, dtype: DataType::U8, operator: Operator::Sum, root };
            let alltoall =
                |from, to| of(Kind::Alltoall, 1, 0).request(pointer(from).cast_const(), pointer(to));
            let send = of(Kind::Send, 300, me ^ 2).request(pointer(out).cast_const(), std::ptr::null_mut());
            let receive = of(Kind::Receive, 300, me ^ 2).request(std::ptr::null(), pointer(into));
            let (first, last) = (alltoall(given, all), alltoall(again, more));
            let mut requests = vec![&first, &composed, &last];
            requests.insert(me as usize, &receive);
            requests.insert((me as usize + usize::from(round)) % 5, &send);
            let calls: Vec<_> = requests.into_iter().map(|request| (&rank.context, request, &call)).collect();
            // SAFETY: the double trusts no address.
            for work in unsafe { start_together(&calls) }.expect("all start") {
                work.wait(Deadline::after(PATIENCE)).expect("all end");
            }
            let due: Vec<u8> = (0..4).map(|from| 16 * from + me as u8 + round).collect();
            for (address, due) in
                [(all, &due[..]), (more, &due), (into, &[me as u8 ^ 2; 300]), (sum, &[4; 4])]
            {
                rank.double.expect(rank.stream, rank.device, address, due, "a call of the group");
            }
        }
    });
}

#[test]
fn where_a_host_cannot_all_is_staged() {
    let store = Arc::new(HashStore::new());
    let ways: Vec<_> = std::thread::scope(|scope| {
        let doubles = [0, 1].map(|_| Double::new(2, Order::RoundRobin));
        doubles[1].separate(0, 1);
        let devices = doubles.clone().map(|double| Devices::over(double).unwrap());
        let threads: Vec<_> = (0..4)
            .map(|rank: u32| {
                let (store, host) = (store.clone(), rank / 2);
                let (double, devices) = (doubles[host as usize].clone(), devices[host as usize].clone());
                scope.spawn(move || {
                    DRIVER.set(Some(double));
                    let context = Context::create(Options {
                        rank,
                        size: 4,
                        rendezvous: Rendezvous::Store(store),
                        name: String::new(),
                        timeout: PATIENCE,
                        interface: Some("127.0.0.1".into()),
                        transports: None,
                        host: Some(format!("host {host}")),
                    })
                    .expect("the ranks meet");
                    agree(&context, rank % 2, &devices).expect("an agreement");
                    context.device_way()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank")).collect()
    });
    for way in ways {
        let why = way.expect("agreed").expect_err("staged");
        assert!(why.contains("rank 2 (") && why.contains("GPU 0 does not reach GPU 1"), "{why}");
    }
}

/// Nobody has a work that tells of it.
#[test]
fn what_is_launched_and_not_followed_is_settled_with_the_context_or_fails_it() {
    ranks_by(2, 2, Order::Random(5), Carriers::Couriers, |rank| {
        for count in COUNTS {
            let (memory, request) = rank.sum(count);
            // SAFETY: the double trusts no address.
            unsafe { rank.context.launch(&request, &rank.call()) }.expect("it is given to its stream");
            rank.context.settle(Deadline::after(PATIENCE)).expect("it ends well");
            let bytes = 4 * count as usize;
            assert_eq!(rank.double.peek(memory, bytes), vec![4; bytes], "{count}");
        }
        if rank.context.rank() == 0 {
            let (_, request) = rank.sum(1);
            let call = Call { timeout: Some(Duration::from_millis(200)), ..rank.call() };
            // SAFETY: as above.
            unsafe { rank.context.launch(&request, &call) }.expect("it is given to its stream");
        }
        let started = Instant::now();
        while rank.context.failure().is_none() {
            assert!(started.elapsed() < PATIENCE, "nobody hears of a call that others do not make");
            std::thread::yield_now();
        }
        let error = rank.context.failure().expect("as seen");
        assert!(error.text().contains("allreduce"), "{error}");
    });
}

/// What comes of calls of four ranks on two hosts. Rank 0 has its own in a list, the others make theirs one by
/// one.
fn lists_and_one_by_one(calls: &(dyn Fn(&Rank, u64) -> Vec<Request> + Sync)) {
    list_and_one_by_one(0, &|rank| {
        let calls = calls(rank, rank.double.memory(rank.device, 600));
        calls.into_iter().map(|one| (rank.context.clone(), one, rank.call())).collect()
    });
}

/// A call and its context.
type Listed = (Context, Request, Call);

/// As [`lists_and_one_by_one`], but rank `listed` has the list.
fn list_and_one_by_one(listed: u32, calls: &(dyn Fn(&Rank) -> Vec<Listed> + Sync)) {
    let answers = ranks_of(2, 2, Order::RoundRobin, 1, Carriers::Couriers, |rank| {
        let mut calls = calls(rank);
        calls.iter_mut().for_each(|(.., call)| call.timeout = Some(Duration::from_secs(20)));
        // SAFETY: the double trusts no address.
        let works = unsafe {
            if rank.context.rank() == listed {
                let list: Vec<_> = calls.iter().map(|(context, one, call)| (context, one, call)).collect();
                start_together(&list)
            } else {
                calls.iter().map(|(context, one, call)| context.start(one, call)).collect()
            }
        };
        works.and_then(|works| works.iter().try_for_each(|work| work.wait(Deadline::NEVER).map(drop)))
    });
    assert_eq!(answers.0, [const { Ok(()) }; 4]);
}

fn message_of(kind: Kind, peer: u32, address: u64) -> Request {
    let what = What { kind, count: 300, dtype: DataType::U8, operator: Operator::Sum, root: peer };
    match kind {
        Kind::Send => what.request(pointer(address).cast_const(), std::ptr::null_mut()),
        _ => what.request(std::ptr::null(), pointer(address)),
    }
}

/// Rank 0 receives from its host and sends to the other one, or the other way around.
#[test]
fn messages_of_a_list_are_beside_each_other_whichever_way_they_go() {
    for (up, down) in [(1, 3), (3, 1)] {
        lists_and_one_by_one(&|rank, memory| {
            let me = rank.context.rank();
            let (next, last) = ((me + up) % 4, (me + down) % 4);
            let receive = message_of(Kind::Receive, last, memory + 300);
            vec![receive, message_of(Kind::Send, next, memory)]
        });
    }
}

#[test]
fn a_message_between_hosts_is_beside_a_composed_call_of_its_list() {
    lists_and_one_by_one(&|rank, memory| {
        let (_, sum) = rank.sum(64);
        match rank.context.rank() {
            0 => vec![message_of(Kind::Send, 2, memory), sum],
            2 => vec![message_of(Kind::Receive, 0, memory), sum],
            _ => vec![sum],
        }
    });
}

/// No thread has a current device.
#[test]
fn a_default_stream_of_a_list_is_that_of_the_memorys_device() {
    list_and_one_by_one(1, &|rank| {
        let (memory, (_, sum)) = (rank.double.memory(rank.device, 300), rank.sum(64));
        let calls = match rank.context.rank() {
            1 => vec![message_of(Kind::Send, 3, memory), sum],
            3 => vec![message_of(Kind::Receive, 1, memory), sum],
            _ => vec![sum],
        };
        let call = Call { stream: Some(StreamHandle::LEGACY), ..Call::default() };
        calls.into_iter().map(|one| (rank.context.clone(), one, call.clone())).collect()
    });
}

/// Whichever way these go, of their context or another one, and wherever the list has them.
#[test]
fn messages_between_gpus_come_behind_the_collectives_of_their_list() {
    for case in 0..8 {
        let [of_another, by_host, is_behind] = [1, 2, 4].map(|bit| case & bit != 0);
        list_and_one_by_one(0, &|rank| {
            let (context, other) = (rank.context.clone(), rank.context.duplicate().expect("another"));
            other.cuda().pretend(&rank.devices, PIECE);
            other.cuda().pretend_loads(LOADS);
            other.cuda().pretend_kernels(Arc::new(DoubleKernels(rank.double.clone())));
            let of = if of_another { other } else { context.clone() };
            let algorithm = by_host.then_some(Algorithm::Ring as i32);
            if of_another && !by_host {
                agree(&of, rank.device, &rank.devices).expect("an agreement");
            }
            let (memory, (_, sum)) = (rank.double.memory(rank.device, 300), rank.sum(64));
            let mut calls = vec![(of, sum, Call { algorithm, ..rank.call() })];
            match context.rank() {
                0 => calls.push((context, message_of(Kind::Receive, 1, memory), rank.call())),
                1 => calls.push((context, message_of(Kind::Send, 0, memory), rank.call())),
                _ => {}
            }
            if is_behind && rank.context.rank() == 0 {
                calls.reverse();
            }
            calls
        });
    }
}
