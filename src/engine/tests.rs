//! What happens when things end early: two ranks of one process, driven by hand.

mod boxed;
mod calls;
mod crowds;
mod direct;
mod given_up;
mod groups;
mod hauling;
mod leaving;
mod long_calls;
mod long_steps;
mod losing;
mod midway;
mod numbers;
mod pieces;
mod pulled;
mod unasked;
mod waiting;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::task::Poll;
use std::time::Duration;

use super::bootstrap::{Meeting, meet};
use super::direct::{DirectRun, Job, Path};
use super::endpoint::Through;
use super::group::{Calling, Group, Turn};
use super::lane::{Destination, Source, Ticket};
use super::operation::{Completion, Operation, Running};
use super::point::{Message, Point};
use super::wire::{Class, Key};
use crate::deadline::Deadline;
use crate::error::{Error, Result, Status};
use crate::reduce::DataType;
use crate::rendezvous::hash::HashStore;
use crate::schedule::Collective;
use crate::signature::{Kind, Signature};
use crate::transport::service::Options;

/// Two ranks in one group, not linked yet.
fn pair(shm: bool) -> [Arc<Group>; 2] {
    pair_with(&Options { shm, tcp: !shm, ..Options::default() })
}

fn pair_with(options: &Options) -> [Arc<Group>; 2] {
    pair_of([options, options])
}

/// Each rank with its own.
fn pair_of(options: [&Options; 2]) -> [Arc<Group>; 2] {
    let store = HashStore::new();
    let join = |rank: u32| {
        let options = Ok(options[rank as usize].clone());
        let (size, secret) = (2, None);
        let deadline = Deadline::after(Duration::from_secs(20));
        let meeting = Meeting {
            rank,
            size,
            name: "pair",
            store: &store,
            secret,
            options,
            deadline,
            recalled: None,
            tied: false,
            once: false,
        };
        let (endpoint, job) = meet(meeting).expect("the ranks meet");
        Group::new(endpoint, job, "pair".into(), rank, [0, 1].into(), Duration::from_secs(20))
    };
    std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| scope.spawn(move || join(rank)));
        ranks.map(|rank| rank.join().expect("no rank panics"))
    })
}

#[test]
fn calls_are_relayed_where_all_ranks_say_that_they_may_be() {
    let [on, off] = [true, false].map(|relays| Options { relays, ..Options::default() });
    for (options, due) in [([&on, &on], true), ([&on, &off], false), ([&off, &off], false)] {
        let relay = pair_of(options).map(|group| group.endpoint().all_relay());
        assert_eq!(relay, [due; 2], "{options:?}");
    }
}

pub(super) const BARRIER: Signature = Signature {
    kind: Kind::Barrier,
    dtype: DataType::U8,
    operator: 0,
    algorithm: 0,
    root: 0,
    count: 0,
    device: false,
};

/// An operation that answers what it is told to, and counts how often it was abandoned.
struct Scripted(Option<Result<Completion>>, Arc<AtomicUsize>);

impl Operation for Scripted {
    fn advance(&mut self, _group: &Group) -> Poll<Result<Completion>> {
        self.0.clone().map_or(Poll::Pending, Poll::Ready)
    }

    fn abandon(&mut self, _group: &Group) {
        self.1.fetch_add(1, Ordering::Relaxed);
    }

    fn waits_for(&self, _group: &Group) -> Vec<u32> {
        vec![1]
    }
}

/// Counts the looks at an operation; in the one of this number its group fails.
fn counting(
    looks: &Arc<AtomicUsize>,
    fails_in: usize,
) -> impl FnMut(&Group, &Poll<Result<Completion>>) -> bool + Send + use<> {
    let looks = looks.clone();
    move |group, _| {
        if looks.fetch_add(1, Ordering::Relaxed) + 1 == fails_in {
            group.fail(Error::new(Status::Aborted, "enough"));
        }
        true
    }
}

/// What a call is made with.
fn calling(class: Class, tag: u64, signature: Signature, timeout: Option<Duration>) -> Calling {
    Calling { class, tag, signature, timeout }
}

/// The turn of a call that has ended.
fn turn(group: &Arc<Group>, signature: Signature) -> Turn {
    let mut turn = None;
    let end = |given: &Turn| {
        turn = Some(*given);
        Scripted(Some(Ok(Completion::default())), Arc::default())
    };
    group.run(calling(Class::Ordered, 0, signature, None), end).expect("it ends at once");
    turn.expect("its turn came")
}

/// As [`pair`], exchanging directly.
fn direct_pair() -> [Arc<Group>; 2] {
    let groups = pair(true);
    // Stands for the exchange by messages.
    let (both, words) = (Barrier::new(2), std::sync::Mutex::new([[0; 2]; 2]));
    std::thread::scope(|scope| {
        for group in &groups {
            let (both, words) = (&both, &words);
            scope.spawn(move || {
                let exchange = |mine, _| {
                    both.wait();
                    words.lock().expect("no panic")[group.rank() as usize] = mine;
                    both.wait();
                    Ok(words.lock().expect("no panic").to_vec())
                };
                let soon = Deadline::after(Duration::from_secs(20));
                group.share_memory(soon, soon, exchange).expect("the ranks share memory");
            });
        }
    });
    groups
}

const LARGE: usize = 1 << 20;

/// A broadcast from rank 0 out of and into `memory`, through private memory.
fn broadcast(group: &Arc<Group>, memory: &mut [u8]) -> DirectRun {
    let count = memory.len() as u64;
    let signature = Signature { kind: Kind::Broadcast, count, ..BARRIER };
    let turn = turn(group, signature);
    let job = Job {
        collective: Collective::Broadcast { count, root: 0 },
        listed: false,
        input: memory.as_ptr(),
        output: memory.as_mut_ptr(),
        in_place: true,
        dtype: DataType::U8,
        reducer: None,
    };
    let direct = group.direct().expect("shared memory").clone();
    // SAFETY: the tests keep the memory until the run has ended or is abandoned.
    unsafe { DirectRun::new(group, &turn, direct, job, Path::Long) }
}

/// Ranks with an open link.
fn linked_pair(shm: bool) -> [Arc<Group>; 2] {
    linked(pair(shm))
}

fn linked(groups: [Arc<Group>; 2]) -> [Arc<Group>; 2] {
    groups[0].endpoint().open_links(&[1], Deadline::after(Duration::from_secs(20)), || None).expect("a link");
    groups[1].endpoint().open_links(&[0], Deadline::after(Duration::from_secs(20)), || None).expect("a link");
    groups
}

/// Starts a message with `tag` of `len` bytes.
fn post(group: &Arc<Group>, tag: u64, len: usize, message: Message) -> Arc<Running> {
    // SAFETY: the tests keep the memory until the message has ended or is cancelled.
    begin(group, tag, len, &message.clone(), |turn| unsafe { Point::new(group, turn, message, usize::MAX) })
}

/// Starts the operation of a message with `tag` of `len` bytes.
fn begin<O: Operation + 'static>(
    group: &Arc<Group>,
    tag: u64,
    len: usize,
    message: &Message,
    make: impl FnOnce(&Turn) -> O,
) -> Arc<Running> {
    let kind = if matches!(message, Message::Send { .. }) { Kind::Send } else { Kind::Receive };
    let signature = Signature { kind, count: len as u64, ..BARRIER };
    group.start(calling(Class::PointToPoint, tag, signature, None), make).expect("it starts")
}

/// Starts a send to the other rank of a pair.
fn send(group: &Arc<Group>, tag: u64, bytes: &[u8]) -> Arc<Running> {
    let from = Source { address: bytes.as_ptr(), len: bytes.len() };
    post(group, tag, bytes.len(), Message::Send { to: 1 - group.rank(), from })
}

/// Starts a receive from the other rank of a pair.
fn receive(group: &Arc<Group>, tag: u64, bytes: &mut [u8]) -> Arc<Running> {
    let into = Destination { address: bytes.as_mut_ptr(), len: bytes.len() };
    post(group, tag, bytes.len(), Message::Receive { from: 1 - group.rank(), into })
}

fn done(running: &Running) {
    running.wait(Deadline::after(Duration::from_secs(20))).expect("in time").expect("it succeeds");
}
/// Memory that only the tests' pages lie in, so that it can go away.
fn mapped(len: usize) -> *mut u8 {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping, of nothing that is there.
    let mapped = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
    assert_ne!(mapped, libc::MAP_FAILED);
    mapped.cast()
}

/// As if it were unmapped, but no other test's memory comes there.
fn unmap(memory: *mut u8, len: usize) {
    // SAFETY: mapped by the test, which uses it no more.
    assert_eq!(unsafe { libc::mprotect(memory.cast(), len, libc::PROT_NONE) }, 0);
}
