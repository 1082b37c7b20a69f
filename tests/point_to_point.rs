//! Send, receive, receive from any: order, tags, sizes on both sides of the eager limit, refusals, timeouts,
//! cancels.

mod support;

use std::time::{Duration, Instant};

use support::{
    PATIENCE, TRANSPORTS, Verb, barrier, pattern, ranks, receive, receive_any, send, sum, tagged, within,
};
use unisono::collective::request::{Counts, Kind};
use unisono::communicator::buffer::Buffer;
use unisono::communicator::{Call, Context};
use unisono::deadline::Deadline;
use unisono::engine::messages::{EAGER_SHM_BYTES, EAGER_TCP_BYTES};
use unisono::error::{Result, Status};
use unisono::reduce::DataType;

const SIZES: [usize; 11] = [
    0,
    1,
    63,
    4096,
    EAGER_SHM_BYTES - 1,
    EAGER_SHM_BYTES,
    EAGER_SHM_BYTES + 1,
    EAGER_TCP_BYTES,
    EAGER_TCP_BYTES + 1,
    1 << 20,
    (5 << 20) + 3,
];

fn bytes(kind: Kind, count: usize, peer: u32) -> Verb {
    Verb::new(kind, count as u64).dtype(DataType::U8).root(peer)
}

#[test]
fn every_size_goes_both_ways() {
    for transports in TRANSPORTS {
        ranks(2, transports, |context| {
            let (own, other) = (context.rank(), 1 - context.rank());
            for len in SIZES {
                for first in [0, 1] {
                    let (mine, theirs) = (pattern(u64::from(own), len), pattern(u64::from(other), len));
                    let mut got = vec![0; len];
                    if own == first {
                        send(context, other, &mine, &Call::default()).expect("a send");
                        receive(context, other, &mut got, &Call::default()).expect("a receive");
                    } else {
                        receive(context, other, &mut got, &Call::default()).expect("a receive");
                        send(context, other, &mine, &Call::default()).expect("a send");
                    }
                    assert!(got == theirs, "{len} bytes over {transports} differ");
                }
            }
        });
    }
}

#[test]
fn both_send_before_either_receives() {
    for transports in TRANSPORTS {
        ranks(2, transports, |context| {
            let (own, other) = (context.rank(), 1 - context.rank());
            for len in SIZES {
                let mut mine = pattern(u64::from(own), len);
                let work = bytes(Kind::Send, len, other)
                    .start_in(context, &mut mine, &Call::default())
                    .expect("it starts");
                let mut got = vec![0; len];
                receive(context, other, &mut got, &Call::default()).expect("a receive");
                work.wait(Deadline::after(PATIENCE)).expect("a send");
                assert!(got == pattern(u64::from(other), len), "{len} bytes over {transports} differ");
            }
        });
    }
}

#[test]
fn messages_of_one_tag_keep_their_order_and_tags_do_not_mix() {
    const LENGTHS: [usize; 3] = [10, 100_000, 3];
    for transports in TRANSPORTS {
        ranks(2, transports, |context| {
            if context.rank() == 0 {
                let mut works = Vec::new();
                let mut kept = Vec::new();
                for turn in 0..30u64 {
                    for tag in 0..3 {
                        let len = LENGTHS[(turn % 3) as usize];
                        let mut data = pattern(turn << 8 | tag, len);
                        let work = bytes(Kind::Send, len, 1).start_in(context, &mut data, &tagged(tag));
                        works.push(work.expect("it starts"));
                        kept.push(data);
                    }
                }
                for work in &works {
                    work.wait(Deadline::after(PATIENCE)).expect("a send");
                }
            } else {
                for tag in [2, 0, 1] {
                    for turn in 0..30u64 {
                        let mut got = vec![0; LENGTHS[(turn % 3) as usize]];
                        receive(context, 0, &mut got, &tagged(tag)).expect("a receive");
                        assert!(got == pattern(turn << 8 | tag, got.len()), "turn {turn}, tag {tag}");
                    }
                }
            }
        });
    }
}

#[test]
fn ten_thousand_small_messages_wait_for_their_receiver() {
    for transports in TRANSPORTS {
        ranks(2, transports, |context| {
            if context.rank() == 0 {
                for turn in 0..10_000u32 {
                    send(context, 1, &turn.to_le_bytes(), &Call::default()).expect("a send");
                }
                barrier(context);
            } else {
                // The barrier's message comes behind all of them: none is waited for when it is there.
                barrier(context);
                for turn in 0..10_000u32 {
                    let mut got = [0; 4];
                    receive(context, 0, &mut got, &Call::default()).expect("a receive");
                    assert_eq!(u32::from_le_bytes(got), turn);
                }
            }
            barrier(context);
        });
    }
}

/// What a link has read ahead lies in memory of its own: the kernel does not tell of it again.
#[test]
fn short_messages_that_have_come_together_are_all_taken() {
    // From any, and by name, while more others are awaited than are looked at unasked.
    for (size, any) in [(2, true), (7, false)] {
        for transports in TRANSPORTS {
            let all = std::sync::Barrier::new(size as usize);
            ranks(size, transports, |context| {
                let call = Call { timeout: Some(PATIENCE / 2), ..tagged(1) };
                let mut last = vec![0u8; size as usize];
                let mut posted = Vec::new();
                match context.rank() {
                    0 => posted.extend((2..).zip(&mut last[2..]).map(|(from, byte)| {
                        let receive = bytes(Kind::Receive, 1, from);
                        receive.start_in(context, std::slice::from_mut(byte), &tagged(2)).expect("a receive")
                    })),
                    1 => (0..200).for_each(|number| send(context, 0, &[number], &call).expect("a send")),
                    _ => {}
                }
                all.wait();
                if context.rank() == 0 {
                    for number in 0..200 {
                        let mut byte = [0];
                        let result = match any {
                            true => receive_any(context, &mut byte, &call),
                            false => receive(context, 1, &mut byte, &call).map(|()| 1),
                        };
                        assert_eq!((result, byte), (Ok(1), [number]), "{transports}, {size} ranks");
                    }
                }
                all.wait();
                if context.rank() > 1 {
                    send(context, 0, &[context.rank() as u8], &tagged(2)).expect("a last send");
                }
                for work in posted {
                    work.wait(Deadline::after(PATIENCE)).expect("a last message");
                }
                if context.rank() == 0 {
                    assert!((2..).zip(&last[2..]).all(|(rank, byte)| rank == *byte), "{last:?}");
                }
            });
        }
    }
}

#[test]
fn receive_from_any_takes_every_message_once_and_says_from_whom() {
    for transports in TRANSPORTS {
        for len in [8, EAGER_TCP_BYTES + 8] {
            ranks(4, transports, |context| {
                if context.rank() == 0 {
                    let mut turns = [0u32; 4];
                    for _ in 0..60 {
                        let mut got = vec![0; len];
                        let from = receive_any(context, &mut got, &Call::default()).expect("a receive");
                        let turn = &mut turns[from as usize];
                        assert_eq!(got[..4], from.to_le_bytes(), "the sender");
                        assert_eq!(got[4..8], turn.to_le_bytes(), "its turn");
                        *turn += 1;
                    }
                    assert_eq!(turns, [0, 20, 20, 20]);
                } else {
                    for turn in 0..20u32 {
                        let mut data = vec![0; len];
                        data[..4].copy_from_slice(&context.rank().to_le_bytes());
                        data[4..8].copy_from_slice(&turn.to_le_bytes());
                        send(context, 0, &data, &Call::default()).expect("a send");
                    }
                }
                barrier(context);
            });
        }
    }
}

#[test]
fn receives_from_one_and_from_any_share_the_messages_in_order() {
    for transports in TRANSPORTS {
        ranks(2, transports, |context| {
            if context.rank() == 0 {
                for turn in 0..100u8 {
                    send(context, 1, &[turn], &Call::default()).expect("a send");
                }
            } else {
                for turn in 0..100 {
                    let mut got = [255];
                    if turn % 3 == 0 {
                        receive(context, 0, &mut got, &Call::default()).expect("a receive");
                    } else {
                        let from = receive_any(context, &mut got, &Call::default()).expect("a receive");
                        assert_eq!(from, 0);
                    }
                    assert_eq!(got, [turn], "{transports}");
                }
            }
        });
    }
}

#[test]
fn receives_posted_ahead_take_messages_in_the_order_of_posting() {
    for transports in TRANSPORTS {
        ranks(2, transports, |context| {
            if context.rank() == 0 {
                barrier(context);
                for turn in 0..20u8 {
                    send(context, 1, &[turn], &Call::default()).expect("a send");
                }
            } else {
                let mut buffers = [[255u8]; 20];
                let works: Vec<_> = buffers
                    .iter_mut()
                    .enumerate()
                    .map(|(turn, buffer)| {
                        let kind = if turn % 2 == 0 { Kind::Receive } else { Kind::ReceiveAny };
                        bytes(kind, 1, 0).start_in(context, buffer, &Call::default()).expect("it starts")
                    })
                    .collect();
                barrier(context);
                for work in &works {
                    work.wait(Deadline::after(PATIENCE)).expect("a receive");
                }
                let got: Vec<u8> = buffers.iter().map(|buffer| buffer[0]).collect();
                assert_eq!(got, (0..20).collect::<Vec<u8>>(), "{transports}");
            }
            barrier(context);
        });
    }
}

#[test]
fn a_wrong_length_is_a_mismatch_that_names_both_calls() {
    for transports in TRANSPORTS {
        for (sent, wanted) in [(8, 4), (4, 8), (600_000, 300_000), (300_000, 8), (8, 300_000)] {
            for receiver_first in [false, true] {
                ranks(2, transports, |context| {
                    if context.rank() == 0 {
                        if receiver_first {
                            std::thread::sleep(Duration::from_millis(30));
                        }
                        let data = vec![7; sent];
                        let began = Instant::now();
                        let result = send(context, 1, &data, &within(20_000));
                        // A short message is gone before anybody can refuse it.
                        if sent > EAGER_TCP_BYTES {
                            let error = result.expect_err("nobody takes it");
                            assert_eq!(error.status(), Status::Mismatch, "{error}");
                            assert!(error.text().contains(&format!("{wanted} × uint8")), "{error}");
                            assert!(began.elapsed() < Duration::from_secs(10), "it was told at once");
                        }
                    } else {
                        if !receiver_first {
                            std::thread::sleep(Duration::from_millis(30));
                        }
                        let mut got = vec![1; wanted];
                        let error =
                            receive(context, 0, &mut got, &within(20_000)).expect_err("it does not fit");
                        assert_eq!(error.status(), Status::Mismatch, "{error}");
                        for words in [format!("{sent} × uint8"), format!("{wanted} × uint8"), "rank 0".into()]
                        {
                            assert!(error.text().contains(&words), "{error} does not say {words}");
                        }
                        assert!(got.iter().all(|&byte| byte == 1), "the buffer is untouched");
                    }
                    // The message is gone, the pair goes on, and so does the group.
                    if context.rank() == 0 {
                        send(context, 1, b"next", &Call::default()).expect("a send");
                    } else {
                        let mut got = [0; 4];
                        receive(context, 0, &mut got, &Call::default()).expect("a receive");
                        assert_eq!(&got, b"next");
                    }
                    sum(context, &mut [1.0; 4]);
                });
            }
        }
    }
}

#[test]
fn a_wrong_type_is_a_mismatch_that_names_both_types() {
    for transports in TRANSPORTS {
        for count in [4u64, 100_000] {
            ranks(2, transports, |context| {
                let mut data = vec![0u32; count as usize];
                let (kind, dtype, peer) = match context.rank() {
                    0 => (Kind::Send, DataType::I32, 1),
                    _ => (Kind::Receive, DataType::F32, 0),
                };
                let verb = Verb::new(kind, count).dtype(dtype).root(peer);
                let result = verb.run_in(context, &mut data, &within(20_000));
                if context.rank() == 1 || count > 10_000 {
                    let error = result.expect_err("the types differ");
                    assert_eq!(error.status(), Status::Mismatch, "{error}");
                    assert!(error.text().contains("int32") && error.text().contains("float32"), "{error}");
                }
                sum(context, &mut [1.0; 4]);
            });
        }
    }
}

#[test]
fn a_receive_that_gave_up_does_not_eat_the_next_message() {
    for transports in TRANSPORTS {
        for len in [5, 150_000] {
            ranks(2, transports, |context| {
                if context.rank() == 0 {
                    barrier(context);
                    send(context, 1, &pattern(1, len), &Call::default()).expect("a send");
                } else {
                    let mut got = vec![0; len];
                    let error = receive(context, 0, &mut got, &within(50)).expect_err("nobody sends");
                    assert_eq!(error.status(), Status::Timeout, "{error}");
                    assert!(error.text().contains("rank 0"), "{error}");
                    let error = receive_any(context, &mut got, &within(50)).expect_err("nobody sends");
                    assert_eq!(error.status(), Status::Timeout, "{error}");
                    assert!(error.text().contains("nothing from rank 0"), "{error}");
                    barrier(context);
                    receive(context, 0, &mut got, &within(20_000)).expect("the message that was sent");
                    assert!(got == pattern(1, len));
                }
                sum(context, &mut [1.0; 4]);
            });
        }
    }
}

#[test]
fn a_send_that_gave_up_is_not_received_later() {
    for transports in TRANSPORTS {
        ranks(2, transports, |context| {
            const LEN: usize = 1 << 20;
            if context.rank() == 0 {
                // Announced, then withdrawn; its bytes are no longer the message's.
                let mut data = pattern(1, LEN);
                let error = send(context, 1, &data, &within(50)).expect_err("nobody receives");
                assert_eq!(error.status(), Status::Timeout, "{error}");
                data.fill(0xee);
                barrier(context);
                send(context, 1, &pattern(2, LEN), &Call::default()).expect("a send");
            } else {
                barrier(context);
                let mut got = vec![0; LEN];
                receive(context, 0, &mut got, &within(20_000)).expect("the second message");
                assert!(got == pattern(2, LEN), "{transports}: starts with {:x?}", &got[..8]);
            }
            sum(context, &mut [1.0; 4]);
        });
    }
}

#[test]
fn a_cancelled_receive_leaves_its_buffer_alone() {
    for transports in TRANSPORTS {
        ranks(2, transports, |context| {
            if context.rank() == 0 {
                barrier(context);
                send(context, 1, &[9; 64], &Call::default()).expect("a send");
                barrier(context);
            } else {
                let mut data = [1u8; 64];
                let work = bytes(Kind::Receive, 64, 0)
                    .start_in(context, &mut data, &Call::default())
                    .expect("it starts");
                assert!(work.test().is_none(), "nobody has sent");
                work.cancel().expect("a receive can be cancelled");
                let error = work.wait(Deadline::after(PATIENCE)).expect_err("it was cancelled");
                assert_eq!(error.status(), Status::Aborted, "{error}");
                work.cancel().expect("a second time does nothing");
                barrier(context);
                let mut other = [0u8; 64];
                receive(context, 0, &mut other, &within(20_000)).expect("the message is still there");
                assert_eq!((data, other), ([1; 64], [9; 64]));
                barrier(context);
            }
        });
    }
}

#[test]
fn a_peer_that_leaves_ends_the_wait_for_it() {
    for transports in TRANSPORTS {
        ranks(3, transports, |context| {
            barrier(context);
            if context.rank() == 0 {
                // What was said before leaving still counts.
                send(context, 1, b"last", &Call::default()).expect("a send");
            } else if context.rank() == 1 {
                let mut got = [0; 4];
                receive(context, 0, &mut got, &Call::default()).expect("the last word");
                assert_eq!(&got, b"last");
                let began = Instant::now();
                let error = receive(context, 0, &mut got, &within(30_000)).expect_err("it has left");
                assert_eq!(error.status(), Status::PeerFailed, "{error}");
                assert!(error.text().contains("rank 0"), "{error}");
                assert!(began.elapsed() < Duration::from_secs(10), "it was told at once");
                // Rank 2 is still there.
                receive(context, 2, &mut got, &Call::default()).expect("from the other");
            } else {
                std::thread::sleep(Duration::from_millis(300));
                send(context, 1, b"here", &Call::default()).expect("a send");
            }
        });
    }
}

/// A long message is only announced until somebody receives it; its receiver leaves the group before, or
/// after, but not the job.
#[test]
fn a_long_message_to_a_rank_that_has_left_its_group_fails_at_once() {
    for transports in TRANSPORTS {
        for announced in [true, false] {
            ranks(2, transports, |context| {
                let group = context.duplicate().expect("a group");
                let message = vec![1u8; 8 << 20];
                if context.rank() == 1 {
                    if announced {
                        // Comes after the announcement.
                        receive(context, 0, &mut [0], &Call::default()).expect("a word");
                    }
                    drop(group);
                    barrier(context);
                    barrier(context);
                    return;
                }
                let sending = std::thread::scope(|scope| {
                    let sending = scope.spawn(|| {
                        if !announced {
                            barrier(context);
                        }
                        let began = Instant::now();
                        (send(&group, 1, &message, &within(30_000)), began.elapsed())
                    });
                    if announced {
                        std::thread::sleep(Duration::from_millis(200));
                        send(context, 1, &[1], &Call::default()).expect("a word");
                        barrier(context);
                    }
                    sending.join().expect("it ends")
                });
                let (result, took) = sending;
                let error = result.expect_err("nobody takes it");
                assert_eq!(error.status(), Status::PeerFailed, "{error}");
                // Whichever it hears first: that the receiver lets go of the group, or what becomes of the message.
                let says = ["has left: it destroyed its context", "takes no more messages"];
                assert!(says.iter().any(|says| error.text().contains(says)), "{error}");
                assert!(took < Duration::from_secs(10), "{took:?}");
                barrier(context);
            });
        }
    }
}

/// Receives bytes from whichever of `from` sends first. The rank that did.
fn receive_any_of(context: &Context, from: &[u32], bytes: &mut [u8], call: &Call) -> Result<u32> {
    let counts = Counts::From { count: bytes.len() as u64, ranks: from.into() };
    let verb = Verb { counts, ..Verb::new(Kind::ReceiveAny, 0).dtype(DataType::U8) };
    verb.run_in(context, bytes, call).map(|completion| completion.source.expect("a source"))
}

#[test]
fn receive_from_some_takes_their_messages_in_order_and_leaves_the_others() {
    for transports in TRANSPORTS {
        for len in [8, EAGER_TCP_BYTES + 8] {
            ranks(4, transports, |context| {
                if context.rank() > 0 {
                    for turn in 0..20u32 {
                        let mut data = vec![0; len];
                        data[..4].copy_from_slice(&context.rank().to_le_bytes());
                        data[4..8].copy_from_slice(&turn.to_le_bytes());
                        send(context, 0, &data, &Call::default()).expect("a send");
                    }
                } else {
                    let mut turns = [0u32; 4];
                    let mut take = |from: &[u32]| {
                        let mut got = vec![0; len];
                        let source = receive_any_of(context, from, &mut got, &Call::default());
                        let source = source.expect("a receive");
                        let turn = &mut turns[source as usize];
                        assert!(from.contains(&source), "{transports}: {source} is none of {from:?}");
                        assert_eq!(got[..4], source.to_le_bytes(), "the sender");
                        assert_eq!(got[4..8], turn.to_le_bytes(), "its turn");
                        *turn += 1;
                    };
                    // Rank 2 sends all along, and is left alone; this rank itself in the list does no harm.
                    (0..10).for_each(|_| take(&[3, 0, 1]));
                    (0..20).for_each(|_| take(&[1, 3]));
                    (0..5).for_each(|_| take(&[2]));
                    (0..25).for_each(|_| take(&[3, 2, 1, 1]));
                    assert_eq!(turns, [0, 20, 20, 20]);
                }
                barrier(context);
            });
        }
    }
}

#[test]
fn receives_from_some_that_are_posted_ahead_take_messages_in_the_order_of_posting() {
    for transports in TRANSPORTS {
        ranks(3, transports, |context| {
            if context.rank() == 0 {
                let mut got = [[255u8]; 4];
                let lists: [&[u32]; 4] = [&[2], &[1, 2], &[1], &[2, 1]];
                let works: Vec<_> = got
                    .iter_mut()
                    .zip(lists)
                    .map(|(buffer, from)| {
                        let counts = Counts::From { count: 1, ranks: from.into() };
                        let verb = Verb { counts, ..bytes(Kind::ReceiveAny, 1, 0) };
                        verb.start_in(context, buffer, &Call::default()).expect("it starts")
                    })
                    .collect();
                barrier(context);
                let source =
                    |work: usize| works[work].wait(Deadline::after(PATIENCE)).expect("a receive").source;
                assert_eq!([source(1), source(2)], [Some(1); 2], "{transports}");
                // Both messages of rank 1 are there: now rank 2 sends.
                send(context, 2, &[0], &tagged(5)).expect("a send");
                assert_eq!([source(0), source(3)], [Some(2); 2], "{transports}");
                assert_eq!(got, [[20], [10], [11], [21]]);
            } else {
                barrier(context);
                if context.rank() == 2 {
                    receive(context, 0, &mut [0], &tagged(5)).expect("its turn");
                }
                for turn in 0..2 {
                    send(context, 0, &[context.rank() as u8 * 10 + turn], &Call::default()).expect("a send");
                }
            }
            barrier(context);
        });
    }
}

#[test]
fn a_receive_from_some_that_gives_up_says_from_whom_and_eats_nothing() {
    for transports in TRANSPORTS {
        ranks(4, transports, |context| {
            if context.rank() == 0 {
                let mut got = [1u8; 4];
                let error =
                    receive_any_of(context, &[1, 3], &mut got, &within(100)).expect_err("nobody sends");
                assert_eq!(error.status(), Status::Timeout, "{error}");
                assert!(error.text().contains("rank 1") && error.text().contains("rank 3"), "{error}");
                assert!(!error.text().contains("from rank 2"), "{error}");
                let counts = Counts::From { count: 4, ranks: [1, 3].into() };
                let verb = Verb { counts, ..bytes(Kind::ReceiveAny, 4, 0) };
                let work = verb.start_in(context, &mut got, &Call::default()).expect("it starts");
                work.cancel().expect("a receive can be cancelled");
                let error = work.wait(Deadline::after(PATIENCE)).expect_err("it was cancelled");
                assert_eq!(error.status(), Status::Aborted, "{error}");
                assert_eq!(got, [1; 4]);
                barrier(context);
                assert_eq!(receive_any_of(context, &[1, 3], &mut got, &within(20_000)), Ok(3));
                assert_eq!(&got, b"here");
                for (ranks, words) in [(&[4, 1][..], "rank 4"), (&[0, 0], "this rank itself")] {
                    let error = receive_any_of(context, ranks, &mut got, &within(100)).expect_err("no such");
                    assert_eq!(error.status(), Status::InvalidArgument, "{error}");
                    assert!(error.text().contains(words), "{error} does not say {words}");
                }
            } else {
                barrier(context);
                if context.rank() == 3 {
                    send(context, 0, b"here", &Call::default()).expect("a send");
                }
            }
            barrier(context);
        });
    }
}

#[test]
fn a_receive_from_some_waits_as_long_as_one_of_them_may_send() {
    for transports in TRANSPORTS {
        ranks(4, transports, |context| {
            barrier(context);
            match context.rank() {
                0 => {
                    let mut got = [0; 4];
                    // Rank 1 leaves first, rank 2 sends and leaves, rank 3 stays to the end, silent.
                    let from = receive_any_of(context, &[1, 2], &mut got, &within(30_000));
                    assert_eq!((from, &got), (Ok(2), b"last"));
                    let began = Instant::now();
                    let error = receive_any_of(context, &[2, 1], &mut got, &within(30_000))
                        .expect_err("both have left");
                    assert_eq!(error.status(), Status::PeerFailed, "{error}");
                    assert!(began.elapsed() < Duration::from_secs(10), "it was told at once");
                    let error = receive_any_of(context, &[2, 1, 3], &mut got, &within(100))
                        .expect_err("rank 3 could send, but does not");
                    assert_eq!(error.status(), Status::Timeout, "{error}");
                    send(context, 3, b"done", &Call::default()).expect("a send");
                }
                1 => {}
                2 => {
                    std::thread::sleep(Duration::from_millis(300));
                    send(context, 0, b"last", &Call::default()).expect("a send");
                }
                _ => receive(context, 0, &mut [0; 4], &Call::default()).expect("the end"),
            }
        });
    }
}

#[test]
fn a_buffer_receives_from_some() {
    for transports in TRANSPORTS {
        ranks(4, transports, |context| {
            let mut memory = [0u8; 8];
            // SAFETY: the memory outlives the buffer.
            let buffer = unsafe { Buffer::new(context, memory.as_mut_ptr(), 8) };
            let call = Call::default();
            if context.rank() == 0 {
                buffer.receive(0, 4, DataType::U8, &[1, 3], &call).expect("it starts");
                let error = buffer.wait_receive(Deadline::after(Duration::from_millis(20)));
                let error = error.expect_err("rank 3 has not sent");
                assert!(error.text().contains("any of the ranks [1, 3]"), "{error}");
                barrier(context);
                assert_eq!(buffer.wait_receive(Deadline::after(PATIENCE)), Ok(3));
                buffer.receive(4, 4, DataType::U8, &[], &call).expect("it starts");
                assert_eq!(buffer.wait_receive(Deadline::after(PATIENCE)), Ok(2));
                drop(buffer);
                assert_eq!(&memory, b"\x03\x03\x03\x03\x02\x02\x02\x02");
            } else {
                let rank = [context.rank() as u8; 4];
                if context.rank() == 2 {
                    send(context, 0, &rank, &call).expect("a send");
                }
                barrier(context);
                if context.rank() == 3 {
                    send(context, 0, &rank, &call).expect("a send");
                }
            }
            barrier(context);
        });
    }
}
