//! Groups within groups: split, named, duplicated, nested, at the same time.

mod support;

use std::sync::Barrier;
use std::time::Duration;

use support::{TRANSPORTS, Verb, barrier, ranks, receive, receive_any, send, sum, tagged};
use unisono::collective::request::Kind;
use unisono::communicator::sparse::Input;
use unisono::communicator::{Call, Context};
use unisono::deadline::Deadline;
use unisono::error::{Result, Status};
use unisono::reduce::{DataType, Operator};

/// The ranks (as the outer group counts) that `context` joins, in its order, found out by communicating.
fn members(outer: &Context, context: &Context) -> Vec<u32> {
    let mut all = vec![u32::MAX; context.size() as usize];
    Verb::new(Kind::Allgather, 1)
        .dtype(DataType::U32)
        .run(context, &[outer.rank()], &mut all, &Call::default())
        .expect("an allgather");
    all
}

#[test]
fn split_groups_by_colour_and_orders_by_key() {
    for transports in TRANSPORTS {
        ranks(6, transports, |context| {
            let rank = context.rank();
            // Odd and even, in falling order of rank; rank 5 stays out.
            let color = (rank != 5).then_some(rank % 2);
            let child = context.split(color, -i64::from(rank)).expect("a split");
            assert_eq!(child.is_some(), rank != 5);
            if let Some(child) = child {
                let wanted: &[u32] = if rank % 2 == 0 { &[4, 2, 0] } else { &[3, 1] };
                assert_eq!(members(context, &child), wanted);
                assert_eq!(child.size() as usize, wanted.len());
                assert_eq!(wanted[child.rank() as usize], rank);
                // Roots count as the child does.
                let mut data = [rank as f32];
                Verb::new(Kind::Broadcast, 1)
                    .root(1)
                    .run_in(&child, &mut data, &Call::default())
                    .expect("ok");
                assert_eq!(data[0], wanted[1] as f32);
            }
            barrier(context);
        });
    }
}

#[test]
fn equal_keys_keep_the_order_of_the_ranks_and_colours_may_be_of_one() {
    ranks(4, "shm", |context| {
        let all = context.split(Some(u32::MAX), 7).expect("a split").expect("a member");
        assert_eq!(members(context, &all), [0, 1, 2, 3]);
        let alone = context.split(Some(context.rank()), 0).expect("a split").expect("a member");
        assert_eq!((alone.rank(), alone.size()), (0, 1));
        let mut data = [3.0];
        sum(&alone, &mut data);
        assert_eq!(data, [3.0]);
        assert!(context.split(None, 0).expect("a split").is_none());
        barrier(context);
    });
}

#[test]
fn named_groups_need_their_members_only() {
    for transports in TRANSPORTS {
        ranks(5, transports, |context| {
            let rank = context.rank();
            let made = context.group("evens", &[4, 0, 2]);
            if rank % 2 == 0 {
                let evens = made.expect("a member");
                assert_eq!(evens.name(), "evens");
                assert_eq!(members(context, &evens), [4, 0, 2]);
            } else {
                let error = made.err().expect("not a member");
                assert_eq!(error.status(), Status::NotMember);
                for words in [format!("rank {rank}"), "'evens'".into()] {
                    assert!(error.text().contains(&words), "{error} does not say {words}");
                }
            }
            barrier(context);
        });
    }
}

#[test]
fn impossible_groups_are_refused() {
    ranks(2, "shm", |context| {
        for (list, words) in [(&[][..], "no ranks"), (&[0, 2], "out of range"), (&[0, 1, 0], "twice")] {
            let error = context.group("odd", list).err().expect(words);
            assert_eq!(error.status(), Status::InvalidArgument);
            assert!(error.text().contains(words) && error.text().contains("'odd'"), "{error}");
        }
        barrier(context);
    });
}

#[test]
fn groups_nest_and_outlive_their_parents() {
    for transports in TRANSPORTS {
        ranks(8, transports, |context| {
            let rank = context.rank();
            let half = context.split(Some(rank / 4), 0).expect("a split").expect("a member");
            let quarter = half.split(Some(half.rank() / 2), 0).expect("a split").expect("a member");
            let again = quarter.duplicate().expect("a duplicate");
            drop((half, quarter));
            assert_eq!(members(context, &again), [rank & !1, rank | 1]);
            let mut data = [rank as f32; 1000];
            sum(&again, &mut data);
            assert_eq!(data[999], ((rank & !1) + (rank | 1)) as f32);
            barrier(context);
        });
    }
}

#[test]
fn a_name_may_be_used_twice_for_different_groups_and_again() {
    ranks(4, "shm", |context| {
        let pair = [context.rank() & !1, context.rank() | 1];
        for round in 0..3 {
            let first = context.group("pair", &pair).expect("a member");
            let second = context.group("pair", &pair).expect("a member");
            let mut data = [1.0f32; 4];
            // Opposite orders on the two ranks: it works if the two are told apart.
            let mut other = [10.0f32; 4];
            let verb = Verb::new(Kind::Allreduce, 4);
            if context.rank() % 2 == 0 {
                let work = verb.start_in(&first, &mut data, &Call::default()).expect("it starts");
                sum(&second, &mut other);
                work.wait(Deadline::after(support::PATIENCE)).expect("a sum");
            } else {
                let work = verb.start_in(&second, &mut other, &Call::default()).expect("it starts");
                sum(&first, &mut data);
                work.wait(Deadline::after(support::PATIENCE)).expect("a sum");
            }
            assert_eq!((data, other), ([2.0; 4], [20.0; 4]), "round {round}");
        }
        barrier(context);
    });
}

#[test]
fn groups_that_overlap_work_at_the_same_time() {
    for transports in TRANSPORTS {
        ranks(4, transports, |context| {
            let rank = context.rank();
            let groups: Vec<Context> = [&[0u32, 1, 2][..], &[1, 2, 3], &[3, 0], &[0, 1, 2, 3]]
                .into_iter()
                .enumerate()
                .filter(|(_, list)| list.contains(&rank))
                .map(|(index, list)| context.group(&format!("group {index}"), list).expect("a member"))
                .collect();
            for round in 0..20 {
                let mut buffers: Vec<_> = groups.iter().map(|_| vec![1.0f32; 10 + round * 2000]).collect();
                let mut works = Vec::new();
                for (group, buffer) in groups.iter().zip(&mut buffers) {
                    let verb = Verb::new(Kind::Allreduce, buffer.len() as u64);
                    works.push(verb.start_in(group, buffer, &Call::default()).expect("it starts"));
                }
                // Half of the ranks wait in the other order.
                if rank % 2 == 0 {
                    works.reverse();
                }
                for work in &works {
                    work.wait(Deadline::after(support::PATIENCE)).expect("a sum");
                }
                for (group, buffer) in groups.iter().zip(&buffers) {
                    assert!(buffer.iter().all(|&sum| sum == group.size() as f32), "{transports}");
                }
            }
            barrier(context);
        });
    }
}

#[test]
fn send_and_receive_count_as_their_group_does() {
    for transports in TRANSPORTS {
        ranks(3, transports, |context| {
            let turned = context.group("turned", &[2, 1, 0]).expect("a member");
            // The same pair and tag in both groups at once.
            if context.rank() == 0 {
                support::send(context, 1, b"outer", &Call::default()).expect("a send");
                support::send(&turned, 1, b"inner", &Call::default()).expect("a send");
            } else if context.rank() == 1 {
                let (mut inner, mut outer) = ([0; 5], [0; 5]);
                support::receive(&turned, 2, &mut inner, &Call::default()).expect("a receive");
                let from = support::receive_any(context, &mut outer, &Call::default()).expect("a receive");
                assert_eq!((&inner, &outer, from), (b"inner", b"outer", 0));
            }
            barrier(&turned);
        });
    }
}

/// Who is refused may not know of it: it has never heard of the child.
#[test]
fn a_child_that_is_being_made_fails_with_its_parent() {
    ranks(2, "shm", |context| {
        let parent = context.duplicate().expect("a second context");
        if context.rank() == 0 {
            let error = parent.duplicate().map(drop).expect_err("rank 1 makes none");
            assert_ne!(error.status(), Status::Timeout, "{error}");
            assert!(error.text().contains("rank 1"), "{error}");
        } else {
            std::thread::sleep(Duration::from_millis(100));
            parent.abort();
        }
        barrier(context);
    });
}

#[test]
fn a_child_fails_alone() {
    for transports in TRANSPORTS {
        ranks(3, transports, |context| {
            let child = context.duplicate().expect("a duplicate");
            barrier(context);
            if context.rank() == 1 {
                child.abort();
            }
            let error = loop {
                let mut data = [0.0f32; 4];
                match Verb::new(Kind::Allreduce, 4).run_in(&child, &mut data, &Call::default()) {
                    Ok(_) => continue,
                    Err(error) => break error,
                }
            };
            assert_eq!(error.status(), Status::Aborted, "{error}");
            assert!(error.text().contains("rank 1 aborted"), "{error}");
            let refused = child.duplicate().err().expect("it has failed");
            assert_eq!(refused.status(), Status::Aborted, "{refused}");
            let mut data = [1.0];
            sum(context, &mut data);
            assert_eq!(data, [3.0], "the parent goes on");
        });
    }
}

/// A call on a context.
type OnContext = fn(&Context) -> Result<()>;

/// What waits for rank 0 if that does not call it, by name.
fn calls_that_wait_for_rank_0() -> Vec<(&'static str, OnContext)> {
    fn allreduce(child: &Context, count: usize) -> Result<()> {
        let mut data = vec![0.0f32; count];
        Verb::new(Kind::Allreduce, count as u64).run_in(child, &mut data, &Call::default()).map(drop)
    }
    vec![
        ("a short allreduce", |child| allreduce(child, 4)),
        ("a long allreduce", |child| allreduce(child, 1 << 20)),
        ("a barrier with a tag", |child| {
            Verb::new(Kind::Barrier, 0).run_in::<u8>(child, &mut [], &tagged(7)).map(drop)
        }),
        ("a sparse allreduce", |child| {
            let (indices, dtype) = (&[3][..], DataType::F32);
            let input = Input { indices, values: &[0; 4], nnz: 1, dims: 1, block: 1, dtype };
            child.sparse_allreduce(&input, Operator::Sum, &Call::default()).map(drop)
        }),
        ("a short receive", |child| receive(child, 0, &mut [0; 8], &Call::default())),
        ("a long receive", |child| receive(child, 0, &mut vec![0; 10 << 20], &Call::default())),
        ("a receive from any", |child| receive_any(child, &mut [0; 8], &Call::default()).map(drop)),
        ("a long send", |child| send(child, 0, &vec![0; 4 << 20], &Call::default())),
        ("a longer send", |child| send(child, 0, &vec![0; 10 << 20], &Call::default())),
        ("a split", |child| child.split(Some(0), 0).map(drop)),
        ("a duplicate", |child| child.duplicate().map(drop)),
        ("a group", |child| child.group("again", &[1, 0]).map(drop)),
    ]
}

#[test]
fn who_waits_for_a_member_that_has_destroyed_the_child_is_told() {
    for transports in TRANSPORTS {
        // At the same time, most likely in the call, or before it: what comes behind is there.
        let both = Barrier::new(2);
        ranks(2, transports, |context| {
            for (name, call) in calls_that_wait_for_rank_0() {
                for [later, before] in [[false; 2], [true, false], [false, true]] {
                    let child = context.duplicate().expect("a duplicate");
                    let mut data = [1.0];
                    sum(&child, &mut data);
                    if context.rank() == 0 {
                        if later {
                            both.wait();
                            std::thread::sleep(Duration::from_millis(20));
                        }
                        drop(child);
                        if before {
                            send(context, 1, b"gone", &Call::default()).expect("a send");
                        }
                    } else {
                        if later {
                            both.wait();
                        }
                        if before {
                            receive(context, 0, &mut [0; 4], &Call::default()).expect("a receive");
                        }
                        let error = call(&child).expect_err("rank 0 takes no part");
                        assert_eq!(error.status(), Status::PeerFailed, "{transports}, {name}: {error}");
                        let says = |text| error.text().contains(text);
                        let told = says("rank 0") && says("destroyed its context");
                        assert!(told || says("every rank that could send has left"), "{name}: {error}");
                    }
                    let mut data = [1.0];
                    sum(context, &mut data);
                    assert_eq!(data, [2.0], "the parent goes on");
                }
            }
        });
    }
}

#[test]
fn what_a_member_did_before_it_destroyed_the_child_counts() {
    const LONG: usize = 10 << 20;
    for transports in TRANSPORTS {
        let gone = Barrier::new(2);
        ranks(2, transports, |context| {
            let child = context.duplicate().expect("a duplicate");
            let mut data = [1.0; 3];
            if context.rank() == 0 {
                send(&child, 1, b"short", &tagged(1)).expect("a send");
                send(&child, 1, &vec![7; LONG], &tagged(2)).expect("a send");
                sum(&child, &mut data);
                drop(child);
                gone.wait();
            } else {
                let (mut short, mut long) = ([0; 5], vec![0; LONG]);
                receive(&child, 0, &mut long, &tagged(2)).expect("a receive");
                sum(&child, &mut data);
                gone.wait();
                // Whatever it does meanwhile, it finds what had come.
                receive(&child, 0, &mut [0; 1], &tagged(3)).expect_err("nothing else comes");
                receive(&child, 0, &mut short, &tagged(1)).expect("it has come");
                assert!(&short == b"short" && long == vec![7; LONG]);
                receive(&child, 0, &mut short, &tagged(1)).expect_err("nothing else comes");
            }
            assert_eq!(data, [2.0; 3]);
            barrier(context);
        });
    }
}
