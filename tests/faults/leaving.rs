//! Processes that exit while they still have something to send.

use crate::support::processes::{Job, Seat, report};
use crate::support::{PATIENCE, TRANSPORTS, Verb, pattern, receive, send, tagged};
use unisono::collective::request::{Counts, Kind};
use unisono::communicator::{Call, Context};
use unisono::deadline::Deadline;
use unisono::error::Status;
use unisono::reduce::DataType;

/// More than goes unasked.
const LONG: usize = 4 << 20;

/// Tags: of what rank 1 announces to rank 0, alone and beside rank 2; of what it never sends; of what the others send at the end.
const ALONE: u64 = 1;
const BESIDE: u64 = 2;
const NEVER: u64 = 3;
const LAST: u64 = 4;

/// More ranks than are looked at without being told of something.
const SIZE: u32 = 7;

pub(crate) fn announces_and_exits(seat: &Seat) {
    let context = Context::create(seat.options("")).expect("the ranks meet");
    crate::support::barrier(&context);
    match seat.rank {
        0 => waits_for_who_has_left(&context),
        1 => {
            let mut bytes = pattern(1, LONG);
            let verb = Verb::new(Kind::Send, LONG as u64).dtype(DataType::U8).root(0);
            let start = |tag| verb.start_in(&context, &mut bytes, &tagged(tag)).expect("a send is started");
            let works = [ALONE, BESIDE].map(start);
            // Until they are under way.
            std::thread::sleep(std::time::Duration::from_millis(100));
            assert!(works.iter().all(|work| work.test().is_none()), "nobody has asked for them");
        }
        2 => send(&context, 0, &pattern(2, LONG), &tagged(BESIDE)).expect("a send"),
        _ => {}
    }
    if seat.rank > 1 {
        send(&context, 0, &[seat.rank as u8], &tagged(LAST)).expect("a last send");
    }
    report("done");
    std::process::exit(0);
}

fn waits_for_who_has_left(context: &Context) {
    let mut last = [0u8; SIZE as usize];
    let one = |from| Verb::new(Kind::Receive, 1).dtype(DataType::U8).root(from);
    let posted: Vec<_> = (2..)
        .zip(&mut last[2..])
        .map(|(from, byte)| one(from).start_in(context, std::slice::from_mut(byte), &tagged(LAST)))
        .collect();
    // Until it has.
    for tag in [NEVER, ALONE] {
        let mut bytes = vec![0; LONG];
        let call = Call { timeout: Some(PATIENCE / 2), ..tagged(tag) };
        let error = receive(context, 1, &mut bytes, &call).expect_err("it has left");
        assert_eq!(error.status(), Status::PeerFailed, "tag {tag}: {error}");
        assert!(error.text().contains("rank 1") && error.text().contains("has left"), "tag {tag}: {error}");
    }
    let counts = Counts::From { count: LONG as u64, ranks: [1, 2].into() };
    let any = Verb { counts, ..Verb::new(Kind::ReceiveAny, LONG as u64).dtype(DataType::U8) };
    let mut bytes = vec![0; LONG];
    let completion = any.run_in(context, &mut bytes, &tagged(BESIDE)).expect("rank 2 sends");
    assert_eq!(completion.source, Some(2));
    assert!(bytes == pattern(2, LONG), "rank 2's bytes");
    for work in posted {
        work.and_then(|work| work.wait(Deadline::after(PATIENCE))).expect("a last message");
    }
    assert_eq!(last, [0, 0, 2, 3, 4, 5, 6]);
}

#[test]
fn what_a_rank_announced_before_it_exited_is_as_good_as_withdrawn() {
    for transports in TRANSPORTS {
        let mut job = Job::start("announce and exit", SIZE, transports);
        let ranks: Vec<u32> = (0..SIZE).collect();
        job.await_all(&ranks, "done");
        job.all_end_well(&ranks);
    }
}
