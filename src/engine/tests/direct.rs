//! Calls that read the memory of other ranks.

use super::*;
use crate::engine::direct::BOARD_BYTES;

/// Sharing memory fails here when others know already where this rank's board is: what they write there
/// later, if they could agree, must not be in what is at that place then.
#[test]
fn a_board_that_others_know_is_not_handed_out_again() {
    for misplaced in [false, true] {
        let [group, other] = pair(true);
        let told = std::cell::Cell::new(None);
        let exchange = |mine: [u64; 2], _| match told.get() {
            None => {
                told.set(Some(mine[0]));
                Ok(vec![mine, [if misplaced { mine[0] + 8 } else { mine[0] }, 0]])
            }
            Some(_) if misplaced => Ok(vec![mine, [1, 1]]),
            Some(_) => Err(Error::new(Status::PeerFailed, "rank 1 is gone")),
        };
        let soon = Deadline::after(Duration::from_secs(20));
        let error = group.share_memory(soon, soon, exchange).expect_err("it cannot");
        assert_eq!(error.status(), if misplaced { Status::Internal } else { Status::PeerFailed }, "{error}");
        let next =
            group.endpoint().registration().segment().allocate(BOARD_BYTES, 4096).expect("there is room");
        assert_ne!(Some(next.offset() as u64), told.get());
        drop(other);
    }
}

#[test]
fn what_is_read_from_a_rank_that_gave_up_does_not_count() {
    let [group, other] = direct_pair();
    let (mut source, mut target) = (vec![7; LARGE], vec![0; LARGE]);
    let mut root = broadcast(&group, &mut source);
    assert!(root.advance(&group).is_pending(), "nobody has read yet");
    root.abandon(&group);
    source.fill(9);
    let mut leaf = broadcast(&other, &mut target);
    for _ in 0..3 {
        assert!(leaf.advance(&other).is_pending(), "a result that is not the broadcast's");
    }
    assert_eq!(leaf.waits_for(&other), [0]);
}

#[test]
fn nobody_lets_go_of_memory_while_a_rank_of_its_process_reads_it() {
    // Without care, the reader finds bytes that were written after the root had given up, or unmapped memory.
    for round in 0..40 {
        let [group, other] = direct_pair();
        let (mut source, mut target) = (vec![7; LARGE], vec![0; LARGE]);
        let mut root = broadcast(&group, &mut source);
        assert!(root.advance(&group).is_pending());
        let mut leaf = broadcast(&other, &mut target);
        let both = Barrier::new(2);
        let ended = std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                both.wait();
                let mut answer = leaf.advance(&other);
                while leaf.is_at_work() {
                    answer = leaf.advance(&other);
                }
                answer.is_ready()
            });
            both.wait();
            for _ in 0..round * 500 {
                std::hint::spin_loop();
            }
            root.abandon(&group);
            source.fill(9);
            reader.join().expect("no panic")
        });
        assert!(!ended || target.iter().all(|&byte| byte == 7), "bytes of another call");
    }
}
