//! Messages from and to device memory.

use super::*;
use crate::engine::staged::Hoard;
use crate::engine::staged::relay::Limits;

/// Bytes of a piece that the receiver has to take before the send of it ends.
const LONG_PIECE: usize = 320 * 1024;

#[test]
fn messages_of_one_group_do_not_wait_for_each_other() {
    for transports in ["shm", "tcp"] {
        for order in Order::all(3) {
            const LEN: usize = 100_000;
            let complaints = ranks(2, transports, order, |rank| {
                rank.context.cuda().pretend(&rank.devices, LONG_PIECE);
                let peer = 1 - rank.rank;
                let values = given(rank.rank, 0, LEN);
                let (out, into) = (rank.memory(&values), rank.memory(&values));
                rank.fill(into, &vec![-1; LEN]);
                rank.fill(out, &values);
                let send = request(Kind::Send, out, 0, LEN as u64, peer);
                let receive = request(Kind::Receive, 0, into, LEN as u64, peer);
                let call = rank.call();
                let both = [(&rank.context, &send, &call), (&rank.context, &receive, &call)];
                // SAFETY: the double trusts no address, and keeps memory until it is dropped.
                let works = unsafe { start_together(&both) }.expect("they start");
                rank.expect(into, &given(peer, 0, LEN), "received");
                rank.fill(out, &vec![-2; LEN]);
                for work in works {
                    work.wait(Deadline::after(PATIENCE)).expect("it ends well");
                }
                rank.drain()
            });
            assert_eq!(complaints.concat(), Vec::<String>::new(), "{transports}, {order:?}");
        }
    }
}

#[test]
fn messages_keep_their_order_whatever_memory_they_are_of() {
    for order in [Order::Eager, Order::RoundRobin, Order::Backward] {
        let complaints = ranks(2, "shm", order, |rank| {
            const ROUNDS: u32 = 12;
            if rank.rank == 0 {
                let mut works = Vec::new();
                let mut kept = Vec::new();
                for round in 0..ROUNDS {
                    let values = given(0, round, 40);
                    let device = round % 3 != 1;
                    let address = if device {
                        let address = rank.memory(&values);
                        rank.fill(address, &values);
                        address
                    } else {
                        kept.push(values);
                        kept[kept.len() - 1].as_ptr().expose_provenance() as u64
                    };
                    let call = if device { rank.call() } else { Call::default() };
                    works
                        .push(rank.start(&request(Kind::Send, address, 0, 40, 1), &call).expect("it starts"));
                }
                for work in works {
                    work.wait(Deadline::after(PATIENCE)).expect("it ends well");
                }
            } else {
                for round in 0..ROUNDS {
                    let due = given(0, round, 40);
                    if round % 2 == 0 {
                        let into = rank.memory(&due);
                        let receive = request(Kind::ReceiveAny, 0, into, 40, 0);
                        let work = rank.start(&receive, &rank.call()).expect("it starts");
                        rank.expect(into, &due, "received out of order");
                        let source = work.wait(Deadline::after(PATIENCE)).expect("it ends well").source;
                        assert_eq!(source, Some(0));
                    } else {
                        let mut into = vec![0; 40];
                        let address = into.as_mut_ptr().expose_provenance() as u64;
                        rank.run(&request(Kind::Receive, 0, address, 40, 0), &Call::default())
                            .expect("it ends well");
                        assert_eq!(into, due);
                    }
                }
            }
            rank.drain()
        });
        assert_eq!(complaints.concat(), Vec::<String>::new(), "{order:?}");
    }
}

#[test]
fn empty_messages_keep_their_order_too() {
    let complaints = ranks(2, "shm", Order::RoundRobin, |rank| {
        let gate = rank.gate();
        let memory = rank.memory(&[0; 40]);
        let mut works = Vec::new();
        for round in 0..4 {
            let count = if round % 2 == 0 { 0 } else { 40 };
            let message = match rank.rank {
                0 => request(Kind::Send, memory, 0, count, 1),
                _ => request(Kind::Receive, 0, memory, count, 0),
            };
            works.push(rank.start(&message, &rank.call()).expect("it starts"));
        }
        gate.release();
        for work in works {
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
        }
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}

/// Where one side of a message is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Memory {
    /// On the device, in the order of a stream or without one.
    Device { ordered: bool },
    /// On the host, as above.
    Host { ordered: bool },
}

const MEMORIES: [Memory; 4] = [
    Memory::Device { ordered: true },
    Memory::Device { ordered: false },
    Memory::Host { ordered: true },
    Memory::Host { ordered: false },
];

#[test]
fn long_messages_are_the_same_whatever_memory_they_are_of() {
    // One piece, barely two, and more than are under way.
    const LENGTHS: [usize; 4] = [64, 65, 201, 700];
    for transports in ["shm", "tcp"] {
        for order in [Order::Eager, Order::RoundRobin, Order::Backward] {
            let complaints = ranks(2, transports, order, |rank| {
                let mut round = 0;
                for (from, into) in MEMORIES.into_iter().flat_map(|from| MEMORIES.map(|into| (from, into))) {
                    for len in LENGTHS {
                        round += 1;
                        let values = given(0, round, len);
                        let (mut host, memory) =
                            if rank.rank == 0 { (values.clone(), from) } else { (vec![0; len], into) };
                        let on_device = matches!(memory, Memory::Device { .. });
                        let address = match on_device {
                            true => rank.memory(&host),
                            false => host.as_mut_ptr().expose_provenance() as u64,
                        };
                        let (Memory::Device { ordered } | Memory::Host { ordered }) = memory;
                        let call = if ordered { rank.call() } else { Call::default() };
                        let kind = match rank.rank {
                            0 => Kind::Send,
                            _ if round % 2 == 0 => Kind::Receive,
                            _ => Kind::ReceiveAny,
                        };
                        if on_device && rank.rank == 0 {
                            // In the order of the call: without a stream, the default one's.
                            let stream = if ordered { rank.stream } else { StreamHandle::NULL };
                            rank.double.fill(stream, 0, address, &bytes(&values));
                        }
                        let ends = [(Kind::Send, address, 0), (kind, 0, address)];
                        let (kind, input, output) = ends[rank.rank as usize];
                        let message = request(kind, input, output, len as u64, 1 - rank.rank);
                        let source = rank.run(&message, &call).expect("it ends well").source;
                        if rank.rank == 1 {
                            let what = format!("{len} from {from:?} to {into:?}");
                            assert_eq!(source, Some(0), "{what}");
                            match on_device {
                                true => {
                                    assert_eq!(rank.double.peek(address, len * 4), bytes(&values), "{what}")
                                }
                                false => assert_eq!(host, values, "{what}"),
                            }
                        }
                    }
                }
                rank.drain()
            });
            assert_eq!(complaints.concat(), Vec::<String>::new(), "over {transports}, {order:?}");
        }
    }
}

#[test]
fn messages_in_pieces_are_right_in_every_order_of_the_streams() {
    for transports in ["shm", "tcp"] {
        for order in Order::all(3) {
            let complaints = ranks(2, transports, order, |rank| {
                let gate = rank.gate();
                let peer = 1 - rank.rank;
                let mut works = Vec::new();
                for round in 0..3 {
                    let values = given(rank.rank, round, 700);
                    let (out, into) = (rank.memory(&values), rank.memory(&values));
                    rank.fill(into, &[-1; 700]);
                    rank.expect(into, &[-1; 700], "received before its time");
                    rank.fill(out, &values);
                    let send = request(Kind::Send, out, 0, 700, peer);
                    let receive = request(Kind::Receive, 0, into, 700, peer);
                    let call = rank.call();
                    let both = [(&rank.context, &send, &call), (&rank.context, &receive, &call)];
                    // SAFETY: the double trusts no address, and keeps memory until it is dropped.
                    works.extend(unsafe { start_together(&both) }.expect("they start"));
                    rank.expect(into, &given(peer, round, 700), "received");
                    rank.fill(out, &[-2; 700]);
                    rank.fill(into, &[-3; 700]);
                }
                // Time for what comes too early.
                std::thread::sleep(Duration::from_millis(1));
                gate.release();
                for work in works {
                    work.wait(Deadline::after(PATIENCE)).expect("it ends well");
                }
                rank.drain()
            });
            assert_eq!(complaints.concat(), Vec::<String>::new(), "{transports}, {order:?}");
        }
    }
}

#[test]
fn a_message_comes_before_its_stream_though_the_sender_waits_for_that() {
    // On either rank, the receive's turn on the stream comes when the send has ended, which the other has to
    // take: all of it, of more pieces than are under way otherwise.
    const LEN: usize = 5 * LONG_PIECE / 4;
    for transports in ["shm", "tcp"] {
        let complaints = ranks(2, transports, Order::RoundRobin, |rank| {
            rank.context.cuda().pretend(&rank.devices, LONG_PIECE);
            let peer = 1 - rank.rank;
            let values = given(rank.rank, 0, LEN);
            let (out, into) = (rank.memory(&values), rank.memory(&values));
            rank.fill(out, &values);
            let works = [
                request(Kind::Send, out, 0, LEN as u64, peer),
                request(Kind::Receive, 0, into, LEN as u64, peer),
            ]
            .map(|message| rank.start(&message, &rank.call()).expect("it starts"));
            rank.expect(into, &given(peer, 0, LEN), "received");
            for work in works {
                work.wait(Deadline::after(PATIENCE)).expect("it ends well");
            }
            rank.drain()
        });
        assert_eq!(complaints.concat(), Vec::<String>::new(), "{transports}");
    }
}

#[test]
fn a_second_long_message_creates_nothing() {
    for transports in ["shm", "tcp"] {
        ranks(2, transports, Order::RoundRobin, |rank| {
            let memory = rank.memory(&[0; 700]);
            let mut before = 0;
            for round in 0..6 {
                // The longest are of more pieces than are under way.
                let len = if round % 2 == 0 { 700 } else { 100 };
                if round == 2 {
                    before = rank.double.creations();
                }
                let message = match rank.rank {
                    0 => request(Kind::Send, memory, 0, len, 1),
                    _ => request(Kind::Receive, 0, memory, len, 0),
                };
                rank.run(&message, &rank.call()).expect("it ends well");
            }
            assert_eq!(rank.double.creations(), before);
            rank.drain()
        });
    }
}

#[test]
fn a_message_that_comes_before_its_stream_is_kept_without_the_driver() {
    for transports in ["shm", "tcp"] {
        let sent = Barrier::new(2);
        let complaints = ranks(2, transports, Order::RoundRobin, |rank| {
            rank.copy_by_kernels();
            let values = given(0, 1, 700);
            let memory = rank.memory(&values);
            if rank.rank == 0 {
                rank.fill(memory, &values);
                rank.run(&request(Kind::Send, memory, 0, 700, 1), &rank.call()).expect("it ends well");
                sent.wait();
            } else {
                let gate = rank.gate();
                let receive = request(Kind::Receive, 0, memory, 700, 0);
                let work = rank.start(&receive, &rank.call()).expect("it starts");
                let made = rank.double.creations();
                // All of it has come, in eleven pieces.
                sent.wait();
                assert_eq!(rank.double.peek(memory, 4), [0xdb; 4], "written");
                gate.release();
                work.wait(Deadline::after(PATIENCE)).expect("it ends well");
                assert_eq!(rank.double.creations(), made);
                rank.expect(memory, &values, "received");
            }
            rank.drain()
        });
        assert_eq!(complaints.concat(), Vec::<String>::new(), "{transports}");
    }
}

#[test]
fn a_receive_that_is_cancelled_before_its_stream_comes_is_not_written() {
    let sent = Barrier::new(2);
    let complaints = ranks(2, "shm", Order::RoundRobin, |rank| {
        rank.copy_by_kernels();
        let values = given(0, 1, 10);
        let memory = rank.memory(&values);
        if rank.rank == 0 {
            rank.fill(memory, &values);
            rank.run(&request(Kind::Send, memory, 0, 10, 1), &rank.call()).expect("it ends well");
            sent.wait();
        } else {
            let gate = rank.gate();
            let before = rank.double.peek(memory, 40);
            let work =
                rank.start(&request(Kind::Receive, 0, memory, 10, 0), &rank.call()).expect("it starts");
            sent.wait();
            // The message is there: it is taken as far as it can be.
            for _ in 0..20 {
                assert!(work.test().is_none());
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            work.cancel().expect("a receive");
            work.wait(Deadline::after(PATIENCE)).expect_err("cancelled");
            gate.release();
            let complaints = rank.drain();
            assert_eq!(rank.double.peek(memory, 40), before, "its buffer is the caller's again");
            return complaints;
        }
        rank.drain()
    });
    assert_eq!(grave(complaints.concat()), Vec::<String>::new());
}

#[test]
fn a_message_that_fails_before_its_list_is_closed_takes_no_courier_from_another() {
    let begun = Barrier::new(2);
    let complaints = ranks(2, "shm", Order::RoundRobin, |rank| {
        rank.copy_by_kernels();
        let values = given(rank.rank, 1, 16);
        let [out, into] = [(); 2].map(|()| rank.memory(&values));
        rank.fill(out, &values);
        let peer = 1 - rank.rank;
        let receive = request(Kind::Receive, 0, into, 16, peer);
        if rank.rank == 0 {
            let send = request(Kind::Send, out, 0, 16, peer);
            let both = [&receive, &send].map(|request| {
                // SAFETY: the double trusts no address, and keeps memory until it is dropped.
                unsafe { rank.context.begin_together(request, &rank.call()) }.expect("it begins")
            });
            begun.wait();
            // One has what it is given loaded and the other fails meanwhile.
            std::thread::sleep(Duration::from_millis(100));
            let works = Pending::close_all(both.into()).into_iter();
            let ended = works.map(|work| work.and_then(|work| work.wait(Deadline::after(PATIENCE))).err());
            let ended: Vec<_> = ended.map(|error| error.map(|error| error.status())).collect();
            assert_eq!(ended, [Some(Status::Mismatch), None], "one is of another length");
        } else {
            begun.wait();
            // Both may be told that they differ.
            let _ = rank.run(&request(Kind::Send, out, 0, 12, peer), &rank.call());
            rank.run(&receive, &rank.call()).expect("it ends well");
            rank.expect(into, &given(peer, 1, 16), "received");
        }
        rank.drain()
    });
    assert_eq!(grave(complaints.concat()), Vec::<String>::new());
}

/// A list of calls of which each can use several lanes: how many are made when calls have none, all that they
/// may have but a first lane each, or all that they may have. They end well all the same.
#[test]
fn of_pinned_memory_calls_that_start_together_have_so_much_between_them() {
    const CALLS: usize = 20;
    // Of 64 KiB, as of all pieces that are shorter.
    const LANE: usize = 1 << 16;
    let kinds = [Kind::Allreduce, Kind::Send];
    for (hoard, kind) in
        [None, Some(false), Some(true)].into_iter().flat_map(|hoard| kinds.map(|k| (hoard, k)))
    {
        let complaints = ranks(2, "tcp", Order::RoundRobin, |rank| {
            rank.copy_by_kernels();
            rank.context.cuda().pretend_limits(Limits { above: Some(usize::MAX), ..Limits::default() });
            let (len, peer) = (6 * PIECE / 4, 1 - rank.rank);
            let first = rank.run(&request(Kind::Barrier, 0, 0, 0, 0), &rank.call());
            first.expect("a barrier");
            let _others = hoard.map(|first| Hoard::of_all(&rank.devices, 0, first));
            let _shortest = Hoard::of(&rank.devices, 0);
            let pinned = rank.double.registered();
            let requests: Vec<(Request, u64, Vec<i32>)> = (0..CALLS as u32)
                .map(|round| {
                    let values = given(rank.rank, round, len);
                    let memory = rank.memory(&values);
                    rank.fill(memory, &values);
                    match (kind, rank.rank) {
                        (Kind::Send, 0) => (request(Kind::Send, memory, 0, len as u64, peer), memory, values),
                        (Kind::Send, _) => {
                            let due = given(peer, round, len);
                            (request(Kind::Receive, 0, memory, len as u64, peer), memory, due)
                        }
                        _ => {
                            let due = expected(kind, len, 2, rank.rank, 0, round);
                            (request(kind, memory, memory, len as u64, 0), memory, due)
                        }
                    }
                })
                .collect();
            let call = rank.call();
            let all: Vec<_> = requests.iter().map(|(request, ..)| (&rank.context, request, &call)).collect();
            // SAFETY: the double trusts no address, and keeps memory until it is dropped.
            let works = unsafe { start_together(&all) }.expect("they start");
            for work in works {
                work.wait(Deadline::after(PATIENCE)).expect("it ends well");
            }
            for (_, memory, due) in &requests {
                rank.expect(*memory, due, "what it obtains");
            }
            let made = (rank.double.registered() - pinned) / LANE;
            match hoard {
                None => assert!(made > CALLS, "{kind:?}: {made}"),
                Some(false) => assert_eq!(made, CALLS, "{kind:?}"),
                Some(true) => assert_eq!(made, 0, "{kind:?}"),
            }
            rank.drain()
        });
        assert_eq!(complaints.concat(), Vec::<String>::new(), "{hoard:?}, {kind:?}");
    }
}
