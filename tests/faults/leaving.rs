//! Processes that leave: while they still have something to send, without handlers, or with long ones.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::support::processes::{Job, Seat, report};
use crate::support::{PATIENCE, TRANSPORTS, Verb, barrier, pattern, receive, send, sum, tagged};
use unisono::collective::request::{Counts, Kind};
use unisono::communicator::{Call, Context, Work};
use unisono::deadline::Deadline;
use unisono::error::Status;
use unisono::reduce::DataType;

/// More than goes unasked.
const LONG: usize = 4 << 20;

/// Tags: of what rank 1 announces to rank 0, alone and beside rank 2; of what it never sends; of what the
/// others send at the end.
const ALONE: u64 = 1;
const BESIDE: u64 = 2;
const NEVER: u64 = 3;
const LAST: u64 = 4;

/// More ranks than are looked at without being told of something.
const SIZE: u32 = 7;

pub(crate) fn announces_and_exits(seat: &Seat) {
    let context = Context::create(seat.options("")).expect("the ranks meet");
    barrier(&context);
    match seat.rank {
        0 => waits_for_who_has_left(&context),
        1 => {
            let mut bytes = pattern(1, LONG);
            let verb = Verb::new(Kind::Send, LONG as u64).dtype(DataType::U8).root(0);
            let start = |tag| verb.start_in(&context, &mut bytes, &tagged(tag)).expect("a send is started");
            let works = [ALONE, BESIDE].map(start);
            // Until they are under way.
            std::thread::sleep(Duration::from_millis(100));
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

/// Ends this process without a handler, as children that Python's multiprocessing has forked do.
fn end_at_once() -> ! {
    // SAFETY: takes no pointers. What it leaves undone is the point.
    unsafe { libc::_exit(0) }
}

pub(crate) fn aborts_and_ends(seat: &Seat) {
    let context = Context::create(seat.options("")).expect("the ranks meet");
    let barrier = || Verb::new(Kind::Barrier, 0).run_in::<u8>(&context, &mut [], &Call::default());
    if seat.rank == 1 {
        barrier().expect("rank 0 comes");
        context.abort_because(Some("the data are bad"));
        end_at_once();
    }
    // Rank 1 may be through the first before this rank is.
    let error = barrier().and_then(|_| barrier()).expect_err("rank 1 aborts");
    report(format_args!("told {error}"));
}

/// As by an exception that nobody catches, or a watchdog.
#[test]
fn what_a_rank_fails_for_is_told_though_its_process_ends_at_once() {
    for transports in TRANSPORTS {
        for _ in 0..8 {
            let mut job = Job::start("abort and end", 2, transports);
            let told = job.await_all(&[0], "told").remove(0).line;
            assert!(told.contains("the data are bad"), "{told}");
            job.all_end_well(&[0, 1]);
        }
    }
}

/// The other rank waits for this one in vain, and hears that it has left in peace.
fn hears_that_it_has_left(context: &Context, rank: u32) {
    let error = receive(context, rank, &mut [0], &tagged(NEVER)).expect_err("it has left");
    assert!(error.text().contains("has left"), "{error}");
}

/// Rank 0 sends what rank 1 has `callback` for, told whether it has come: late, so that a thread of the
/// library calls it. Rank 1 leaves for that, at the latest in `leave`.
fn is_called_back(
    seat: &Seat,
    callback: impl FnOnce(bool) + Send + 'static,
    leave: impl FnOnce(Context, Work),
) {
    let context = Context::create(seat.options("")).expect("the ranks meet");
    barrier(&context);
    if seat.rank == 0 {
        std::thread::sleep(Duration::from_millis(100));
        send(&context, 1, &[1], &tagged(LAST)).expect("a send");
        hears_that_it_has_left(&context, 1);
        assert!(context.failure().is_none(), "{:?}", context.failure());
        return report("done");
    }
    let mut byte = [0];
    let verb = Verb::new(Kind::Receive, 1).dtype(DataType::U8).root(0);
    let work = verb.start_in(&context, &mut byte, &tagged(LAST)).expect("a receive is started");
    work.on_complete(Box::new(move |result| callback(result.is_ok())));
    leave(context, work);
}

/// Rank 1 destroys its context when it is called back: threads of the library may still be at what they tell
/// it of.
pub(crate) fn ends_beside_a_callback(seat: &Seat) {
    let (tell, told) = mpsc::channel();
    let callback = move |came| {
        tell.send(came).expect("the rank waits");
        std::thread::sleep(Duration::from_millis(100));
    };
    is_called_back(seat, callback, |context, work| {
        assert!(told.recv_timeout(PATIENCE).expect("it is called back"));
        drop((work, context));
        end_at_once();
    });
}

#[test]
fn a_rank_that_has_destroyed_its_context_has_left_however_its_process_ends() {
    for transports in TRANSPORTS {
        let mut job = Job::start("end beside a callback", 2, transports);
        job.await_all(&[0], "done");
        job.all_end_well(&[0, 1]);
    }
}

/// Rank 1 exits within a callback.
pub(crate) fn exits_in_a_callback(seat: &Seat) {
    is_called_back(
        seat,
        |_| std::process::exit(0),
        |_context, _work| {
            std::thread::sleep(PATIENCE);
            report("panic: it is not called back");
        },
    );
}

#[test]
fn a_rank_that_exits_in_a_callback_has_left() {
    for transports in TRANSPORTS {
        let mut job = Job::start("exit in a callback", 2, transports);
        job.await_all(&[0], "done");
        job.all_end_well(&[0, 1]);
    }
}

/// All are done at about the same time: each hears of others that leave while it leaves itself.
pub(crate) fn end_together(seat: &Seat) {
    let context = Context::create(seat.options("")).expect("the ranks meet");
    sum(&context, &mut vec![1.0; 1000]);
    barrier(&context);
    report("done");
    drop(context);
    end_at_once();
}

#[test]
fn ranks_that_leave_at_the_same_time_leave_in_peace() {
    for transports in TRANSPORTS {
        for _ in 0..5 {
            let mut job = Job::start("end together", 3, transports);
            job.await_all(&[0, 1, 2], "done");
            job.all_end_well(&[0, 1, 2]);
        }
    }
}

/// How long a handler of rank 1's takes that runs behind the goodbye.
const HANDLER: Duration = Duration::from_secs(5);

extern "C" fn takes_long() {
    std::thread::sleep(HANDLER);
}

pub(crate) fn exits_slowly(seat: &Seat) {
    if seat.rank == 1 {
        // SAFETY: a plain function. Given before the first context is made, it runs after the library's.
        assert_eq!(unsafe { libc::atexit(takes_long) }, 0);
    }
    let context = Context::create(seat.options("")).expect("the ranks meet");
    sum(&context, &mut vec![1.0; 1000]);
    barrier(&context);
    if seat.rank == 1 {
        std::process::exit(0);
    }
    let begun = Instant::now();
    hears_that_it_has_left(&context, 1);
    assert!(begun.elapsed() < HANDLER / 2, "heard after {:?}", begun.elapsed());
    report("done");
}

#[test]
fn a_rank_that_exits_is_not_waited_for_until_its_process_has_ended() {
    for transports in TRANSPORTS {
        let mut job = Job::start("exit slowly", 2, transports);
        job.await_all(&[0], "done");
        job.all_end_well(&[0, 1]);
    }
}
