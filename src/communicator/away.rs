//! A thread in the program's function that combines keeps nothing else of its endpoint from moving.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, ThreadId};
use std::time::Duration;

use super::context::Membership;
use super::context::tests::pair;
use super::{Call, Context};
use crate::collective::request::{Counts, Kind, Request};
use crate::deadline::Deadline;
use crate::engine::endpoint::Endpoint;
use crate::reduce::{Custom, DataType, Operator};
use crate::schedule::Algorithm;

/// Much longer than anything here takes, and shorter than who sleeps does at most.
const LOST: Duration = Duration::from_secs(10);

/// Of the calls that wait beside each other.
const PATIENCE: Duration = Duration::from_secs(60);

const COUNT: usize = 16;

/// The message's.
const TAG: u64 = 7;

/// Whether this is so in time.
fn comes_true(is_so: impl Fn() -> bool) -> bool {
    let end = Deadline::after(LOST);
    while !is_so() && !end.expired() {
        thread::sleep(Duration::from_micros(100));
    }
    is_so()
}

/// A function that takes as long as it likes when it is first called, if that is in one thread.
#[derive(Default)]
struct Slow {
    thread: OnceLock<ThreadId>,
    /// Where that was.
    called: OnceLock<ThreadId>,
    ends: AtomicBool,
}

impl Slow {
    fn has_begun(&self) -> bool {
        self.called.get().is_some_and(|called| Some(called) == self.thread.get())
    }
}

/// Adds, once a [`Slow`], if any, may end.
unsafe extern "C" fn add(to: *mut c_void, other: *const c_void, count: u64, _: i32, slow: *mut c_void) {
    // SAFETY: the tests keep it until all calls have ended.
    if let Some(slow) = unsafe { slow.cast::<Slow>().as_ref() }
        && slow.called.set(thread::current().id()).is_ok()
        && slow.has_begun()
    {
        // Longer than the test waits.
        for _ in 0..2 {
            comes_true(|| slow.ends.load(Ordering::SeqCst));
        }
    }
    for at in 0..count as usize {
        // SAFETY: both have this many elements.
        unsafe { *to.cast::<u32>().add(at) += *other.cast::<u32>().add(at) };
    }
}

/// How the call is done whose function is slow on rank 1.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Directly,
    BySchedule,
    /// Of several buffers, behind a barrier of another thread: they are combined in the first look at the call.
    Widely,
}

impl Way {
    /// On rank 1 with what is slow.
    fn run(self, context: &Context, slow: Option<&Slow>) {
        let user = slow.map_or(std::ptr::null_mut(), |slow| std::ptr::from_ref(slow).cast_mut().cast());
        let mut buffers = [[1u32; COUNT]; 2];
        let pointers = buffers.each_mut().map(|buffer| buffer.as_mut_ptr().cast::<u8>());
        let request = Request {
            kind: Kind::Allreduce,
            input: pointers[0].cast_const(),
            output: pointers[0],
            counts: Counts::Uniform(COUNT as u64),
            dtype: DataType::U32,
            operator: Operator::Custom(Custom { function: add, user }),
            root: 0,
        };
        let algorithm = (self == Way::BySchedule).then_some(Algorithm::RecursiveDoubling as i32);
        let call = Call { algorithm, timeout: Some(PATIENCE), ..Call::default() };
        let (pointers, sum) = match self {
            Way::Widely => (&pointers[..], 4),
            Way::Directly | Way::BySchedule => (&[][..], 2),
        };
        // SAFETY: the buffers live until the call has ended.
        unsafe { context.run_buffers(&request, &call, pointers) }.expect("it ends well");
        assert_eq!(buffers[0], [sum; COUNT]);
    }
}

/// A barrier.
fn meet(context: &Context) {
    let (input, output, counts) = (std::ptr::null(), std::ptr::null_mut(), Counts::Uniform(0));
    let (kind, dtype, operator) = (Kind::Barrier, DataType::U8, Operator::Sum);
    let request = Request { kind, input, output, counts, dtype, operator, root: 0 };
    // SAFETY: what has no elements has no memory.
    unsafe { context.run(&request, &Call::default()) }.expect("it ends well");
}

/// A message of `bytes` to or from the other rank.
fn message(kind: Kind, bytes: &mut [u8; 4], root: u32) -> (Request, Call) {
    let (input, output) = (bytes.as_ptr(), bytes.as_mut_ptr());
    let (counts, dtype, operator) = (Counts::Uniform(4), DataType::U8, Operator::Sum);
    let request = Request { kind, input, output, counts, dtype, operator, root };
    (request, Call { tag: Some(TAG), timeout: Some(PATIENCE), ..Call::default() })
}

fn endpoint(context: &Context) -> &Endpoint {
    let Membership::Group(group) = context.membership() else { panic!("two ranks") };
    group.endpoint()
}

/// Rank 1 has a call under way, whose thread sleeps, and receives a message: in a thread that
/// sleeps beside that, or it has only begun to. Then rank 0 comes to the call, and sends when the function is
/// called. Whether the message comes while the function takes its time; `None` if another thread has called it.
fn comes_beside(way: Way, waits: bool) -> Option<bool> {
    let contexts = pair([PATIENCE; 2]);
    let [zero, one] = &contexts;
    let slow = Slow::default();
    let has_come = Arc::new(AtomicBool::new(false));
    let comes = has_come.clone();
    let (mut given, mut taken) = ([7; 4], [0; 4]);
    let into = &mut taken;
    let (in_time, works) = thread::scope(|scope| {
        let slow = &slow;
        let sleep =
            |threads| comes_true(|| endpoint(one).asleep() == threads && endpoint(one).bell_is_taken());
        let before = usize::from(way == Way::Widely);
        if before == 1 {
            scope.spawn(|| meet(one));
            assert!(sleep(1));
        }
        scope.spawn(move || {
            slow.thread.set(thread::current().id()).expect("it is set once");
            way.run(one, Some(slow));
        });
        assert!(sleep(before + 1));
        let received = if waits {
            scope.spawn(move || {
                let (receive, call) = message(Kind::Receive, into, 0);
                // SAFETY: the memory lives until the call has ended.
                unsafe { one.run(&receive, &call) }.expect("it comes");
                comes.store(true, Ordering::SeqCst);
            });
            assert!(sleep(before + 2));
            None
        } else {
            let (receive, call) = message(Kind::Receive, into, 0);
            // SAFETY: the memory lives until the work has ended.
            let work = unsafe { one.start(&receive, &call) }.expect("it starts");
            work.on_complete(Box::new(move |_| comes.store(true, Ordering::SeqCst)));
            Some(work)
        };
        // By then the library leaves to those threads what is under way; if not, the test finds less.
        thread::sleep(Duration::from_millis(20));
        scope.spawn(move || {
            if before == 1 {
                meet(zero);
            }
            way.run(zero, None);
        });
        assert!(comes_true(|| slow.called.get().is_some()));
        let (send, call) = message(Kind::Send, &mut given, 1);
        // SAFETY: the memory lives until the work has ended.
        let sent = unsafe { zero.start(&send, &call) }.expect("it starts");
        let has_come = || has_come.load(Ordering::SeqCst);
        let in_time = slow.has_begun().then(|| comes_true(has_come));
        slow.ends.store(true, Ordering::SeqCst);
        (in_time, received.into_iter().chain([sent]).collect::<Vec<_>>())
    });
    for work in works {
        work.wait(Deadline::after(PATIENCE)).expect("it ends well");
    }
    assert_eq!(taken, given);
    in_time
}

#[test]
fn a_function_of_the_program_keeps_no_work_from_ending() {
    for way in [Way::Directly, Way::BySchedule] {
        assert_eq!(comes_beside(way, false), Some(true), "{way:?}");
    }
}

#[test]
fn a_function_of_the_program_keeps_no_thread_from_its_message() {
    for way in [Way::Directly, Way::BySchedule] {
        assert_eq!(comes_beside(way, true), Some(true), "{way:?}");
    }
    let widely: Vec<bool> = (0..10).filter_map(|_| comes_beside(Way::Widely, true)).collect();
    assert!(widely.iter().all(|in_time| *in_time), "{widely:?}");
}
