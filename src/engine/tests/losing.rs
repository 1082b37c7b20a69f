//! Peers that are lost, that have left before there was a link, or that do not let one open.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use super::*;
use crate::engine::control::Control;
use crate::engine::endpoint::Endpoint;
use crate::engine::recorder::Progress;
use crate::engine::wire::{Frame, FrameKind};
use crate::error::fail;
use crate::rendezvous::secret::SecretKey;
use crate::rendezvous::store::Store;
use crate::transport::Link;
use crate::transport::service::{Attendance, Identity, Port, Registration, hold_service};

/// A launcher's store that has stopped. It may tell when it is asked, and stand still until nobody holds it
/// up.
#[derive(Default)]
struct Stopped(Option<Mutex<(mpsc::Sender<()>, mpsc::Receiver<()>)>>);

fn no_answer<T>(deadline: Deadline) -> Result<T> {
    std::thread::sleep(deadline.remaining_capped(Duration::from_secs(60)));
    fail!(Timeout, "no answer")
}

impl Store for Stopped {
    fn set(&self, _key: &str, _value: &[u8], deadline: Deadline) -> Result<()> {
        no_answer(deadline)
    }

    fn get(&self, _key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        no_answer(deadline)
    }

    fn try_get(&self, _key: &str, deadline: Deadline) -> Result<Option<Vec<u8>>> {
        if let Some(held) = &self.0 {
            let held = held.lock().expect("no panic");
            held.0.send(()).expect("the test waits");
            let _ = held.1.recv();
        }
        no_answer(deadline)
    }

    fn add(&self, _key: &str, _amount: i64, deadline: Deadline) -> Result<i64> {
        no_answer(deadline)
    }

    fn describe(&self) -> String {
        "a store that has stopped".into()
    }
}

/// A store that counts, and keeps nothing.
struct Full(HashStore);

impl Store for Full {
    fn set(&self, _key: &str, _value: &[u8], _deadline: Deadline) -> Result<()> {
        fail!(System, "no room")
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        self.0.get(key, deadline)
    }

    fn try_get(&self, key: &str, deadline: Deadline) -> Result<Option<Vec<u8>>> {
        self.0.try_get(key, deadline)
    }

    fn add(&self, key: &str, amount: i64, deadline: Deadline) -> Result<i64> {
        self.0.add(key, amount, deadline)
    }

    fn describe(&self) -> String {
        "a full store".into()
    }
}

#[test]
fn a_rank_0_that_cannot_tell_the_secret_does_not_wait_for_itself() {
    let (store, deadline) = (Full(HashStore::new()), Deadline::after(Duration::from_secs(20)));
    let (name, options) = ("full", Ok(Options::default()));
    let meeting = Meeting {
        rank: 0,
        size: 2,
        name,
        store: &store,
        secret: None,
        options,
        deadline,
        recalled: None,
        tied: false,
        once: false,
    };
    let error = meet(meeting).err().expect("the store takes nothing");
    assert_eq!(error.text(), "rank 0 of 2 cannot join 'full': no room");
}

#[test]
fn a_lost_peer_is_reported_though_the_launcher_says_nothing() {
    let [group, _other] = pair(true);
    let endpoint = group.endpoint();
    endpoint.watch_exits(Arc::<Stopped>::default());
    endpoint.peer_lost(1, Error::new(Status::PeerFailed, "it is gone"));
    let wait = Deadline::after(Duration::from_secs(15));
    let failure = endpoint.wait(wait, Through::Messages, || group.failure()).expect("in time");
    assert!(failure.text().contains("it is gone"), "{failure}");
}

#[test]
fn an_endpoint_may_go_while_the_launcher_is_asked() {
    let [group, _other] = pair(true);
    let ((tell, asked), (hold, held)) = (mpsc::channel(), mpsc::channel());
    let endpoint = Arc::downgrade(group.endpoint());
    group.endpoint().watch_exits(Arc::new(Stopped(Some(Mutex::new((tell, held))))));
    group.endpoint().peer_lost(1, Error::new(Status::PeerFailed, "it is gone"));
    asked.recv_timeout(Duration::from_secs(20)).expect("it is asked");
    drop(group);
    // Other threads hold it for a moment.
    let soon = Deadline::after(Duration::from_secs(10));
    while endpoint.strong_count() > 0 {
        assert!(!soon.expired(), "whoever asks holds it");
        std::thread::yield_now();
    }
    drop(hold);
}

/// So many ranks in one group that know where the others are, and have no links.
pub(super) fn unlinked(size: u32, options: &Options) -> Vec<Arc<Group>> {
    unlinked_of(&vec![options.clone(); size as usize])
}

/// The same, each with its own options.
pub(super) fn unlinked_of(all: &[Options]) -> Vec<Arc<Group>> {
    let (secret, job, size) = (SecretKey::new([1; 32]), 7, all.len() as u32);
    let endpoint = |(rank, options): (u32, &Options)| {
        let identity = Identity { rank, size, secret: secret.clone(), job };
        Endpoint::new(identity, options.clone()).expect("an endpoint")
    };
    let endpoints: Vec<_> = (0..size).zip(all).map(endpoint).collect();
    for (endpoint, other) in endpoints.iter().flat_map(|one| endpoints.iter().map(move |other| (one, other)))
    {
        endpoint.learn(other.registration().address().clone());
    }
    let group = |(rank, endpoint): (u32, Arc<Endpoint>)| {
        Group::new(endpoint, job, "unlinked".into(), rank, (0..size).collect(), Duration::from_secs(20))
    };
    (0..size).zip(endpoints).map(group).collect()
}

/// Two of them, the first of which takes a place for the second's that listens and says nothing.
fn unlinked_beside_a_mute() -> (Vec<Arc<Group>>, std::net::TcpListener) {
    let groups = unlinked(2, &Options { shm: false, ..Options::default() });
    let mute = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut address = groups[1].endpoint().registration().address().clone();
    address.addresses = vec![mute.local_addr().expect("bound")];
    groups[0].endpoint().learn(address);
    (groups, mute)
}

/// Starts a receive of `bytes` with tag 1 from whichever of `ranks` sends first.
pub(super) fn receive_any(group: &Arc<Group>, ranks: &[u32], bytes: &mut [u8]) -> Arc<Running> {
    let into = Destination { address: bytes.as_mut_ptr(), len: bytes.len() };
    post(group, 1, bytes.len(), Message::ReceiveAny { of: Some(ranks.into()), into })
}

#[test]
fn a_source_that_left_before_there_was_a_link_is_out_of_the_question_and_no_more() {
    for shm in [true, false] {
        let mut groups = unlinked(3, &Options { shm, tcp: !shm, ..Options::default() });
        drop(groups.pop());
        let (mut came, mut never) = ([0; 3], [0; 3]);
        let any = receive_any(&groups[0], &[1, 2], &mut came);
        let in_vain = receive_any(&groups[0], &[2], &mut never);
        let error =
            in_vain.wait(Deadline::after(Duration::from_secs(20))).expect("in time").expect_err("it is gone");
        assert_eq!(error.status(), Status::PeerFailed);
        // By whichever way it is known first.
        let told = ["rank 2", "every rank that could send has left"];
        assert!(told.iter().any(|part| error.text().contains(part)), "{error}");
        let from = Source { address: b"yes".as_ptr(), len: 3 };
        done(&post(&groups[1], 1, 3, Message::Send { to: 0, from }));
        done(&any);
        assert_eq!(&came, b"yes");
        assert_eq!(groups[0].failure(), None);
        // Once it is known.
        let in_vain = receive_any(&groups[0], &[2], &mut never);
        in_vain.wait(Deadline::after(Duration::from_secs(20))).expect("in time").expect_err("it is gone");
    }
}

#[test]
fn a_call_that_needs_a_link_has_its_own_time_and_says_that_the_link_does_not_open() {
    let (groups, _mute) = unlinked_beside_a_mute();
    let mut bytes = [0; 3];
    let message =
        Message::Receive { from: 1, into: Destination { address: bytes.as_mut_ptr(), len: bytes.len() } };
    let signature = Signature { kind: Kind::Receive, count: 3, ..BARRIER };
    let timeout = Some(Duration::from_millis(1300));
    // SAFETY: the memory outlives the wait for the end.
    let make = |turn: &Turn| unsafe { Point::new(&groups[0], turn, message, usize::MAX) };
    let receive =
        groups[0].start(calling(Class::PointToPoint, 1, signature, timeout), make).expect("it starts");
    let error =
        receive.wait(Deadline::after(Duration::from_secs(20))).expect("in time").expect_err("nothing came");
    assert_eq!(error.status(), Status::Timeout);
    assert!(error.text().contains("no answer yet"), "{error}");
}

/// The announcement of a message with tag 4, as a member of `group` makes it that has these bytes to send.
fn announcement(group: &Group, bytes: &[u8]) -> Frame {
    let key = Key { group: group.id(), tag: 4, sequence: 0, slot: 0, class: Class::PointToPoint };
    let total = bytes.len() as u64;
    let signature = Signature { kind: Kind::Send, count: total, ..BARRIER };
    Frame { kind: FrameKind::Request, key, signature, total, offset: 0, length: 0, announced: 0 }
}

/// The first `len` of them.
fn first(bytes: &[u8], len: usize) -> Source {
    Source { address: bytes.as_ptr(), len }
}

/// A member whose messages are not as they should be cannot have more written to memory than was asked for,
/// nor after it was told to be there.
#[test]
fn more_bytes_than_were_announced_break_the_link() {
    let groups = linked_pair(false);
    let bytes = vec![1; 64 << 10];
    let mut into = vec![0; bytes.len()];
    let message =
        Message::Receive { from: 0, into: Destination { address: into.as_mut_ptr(), len: into.len() } };
    let receive = post(&groups[1], 4, bytes.len(), message);
    let (request, length) = (announcement(&groups[0], &bytes), bytes.len() as u32 / 4 * 3);
    let data = Frame { kind: FrameKind::Data, length, ..request };
    {
        let mut messages = groups[0].endpoint().messages();
        messages.forge(1, 0, &request, first(&bytes, 0));
        messages.forge(1, 0, &data, first(&bytes, length as usize));
        messages.forge(1, 0, &data, first(&bytes, length as usize));
    }
    let result = receive.wait(Deadline::after(Duration::from_secs(20))).expect("in time");
    let error = result.expect_err("it is refused");
    assert!(error.text().contains("98304 bytes came of a message that has 65536"), "{error}");
}

/// Two ranks with two data connections that no other threads move.
fn over_two_streams() -> [Arc<Group>; 2] {
    let options = Options { shm: false, tcp_streams: Some(2), tcp_threads: Some(1), ..Options::default() };
    linked(pair_with(&options))
}

#[test]
fn a_second_announcement_of_what_is_coming_in_breaks_the_link() {
    let groups = over_two_streams();
    // More than the kernel keeps for who does not read.
    let bytes = vec![1; 64 << 20];
    let mut into = vec![0u8; bytes.len()];
    let receive = receive(&groups[1], 4, &mut into);
    let request = announcement(&groups[0], &bytes);
    let data = Frame { kind: FrameKind::Data, length: bytes.len() as u32, ..request };
    let deadline = Deadline::after(Duration::from_secs(20));
    {
        // Nothing more is written there meanwhile.
        let mut messages = groups[0].endpoint().messages();
        messages.forge(1, 0, &request, first(&bytes, 0));
        messages.forge(1, 1, &data, first(&bytes, bytes.len()));
        let begins = into.as_ptr();
        // SAFETY: the memory is there; who writes to it is the engine, and any value will do.
        while unsafe { begins.read_volatile() } == 0 {
            groups[1].endpoint().messages().serve(0, 1);
            assert!(!deadline.expired(), "nothing comes");
        }
        messages.forge(1, 0, &Frame { total: request.total - 1, ..request }, first(&bytes, 0));
        for _ in 0..100 {
            groups[1].endpoint().messages().serve(0, 0);
        }
    }
    let error = receive.wait(deadline).expect("in time").expect_err("it is refused");
    into.fill(7);
    for _ in 0..500 {
        for group in &groups {
            group.endpoint().messages().serve(1 - group.rank(), 1);
        }
    }
    let written = std::hint::black_box(&into).iter().filter(|&&byte| byte != 7).count();
    assert_eq!(written, 0, "bytes that came after the end");
    assert!(error.text().contains("a message came twice"), "{error}");
}

#[test]
fn an_answer_to_what_is_being_streamed_breaks_the_link() {
    for kind in [FrameKind::Done, FrameKind::Refuse, FrameKind::Decline, FrameKind::Ready] {
        let groups = over_two_streams();
        // More than the kernel keeps for who does not read.
        let bytes = vec![1; 64 << 20];
        let sent = send(&groups[0], 4, &bytes);
        let ready = Frame { kind: FrameKind::Ready, ..announcement(&groups[0], &bytes) };
        let nothing = first(&bytes, 0);
        {
            // Nothing is read there meanwhile.
            let mut messages = groups[1].endpoint().messages();
            messages.forge(0, 0, &ready, nothing);
            messages.forge(0, 0, &Frame { kind, ..ready }, nothing);
            let deadline = Deadline::after(Duration::from_secs(20));
            while groups[0].endpoint().messages().backlog(1) == 0 {
                groups[0].endpoint().messages().serve(1, 0);
                assert!(!deadline.expired(), "it is not streamed");
            }
            groups[0].endpoint().messages().serve(1, 0);
        }
        let result = sent.wait(Deadline::after(Duration::from_secs(20))).expect("in time");
        let error = result.expect_err("it is refused");
        assert!(error.text().contains("answered again"), "{kind:?}: {error}");
    }
}

#[test]
fn a_second_message_for_one_that_is_being_read_breaks_the_link() {
    let groups = linked(pair_with(&Options::default()));
    let bytes = vec![1; 64 << 20];
    let mut into = vec![0u8; bytes.len()];
    let mut other = [0u8; 16];
    let [receive, waits] = [receive(&groups[1], 4, &mut into), receive(&groups[1], 5, &mut other)];
    let offset = bytes.as_ptr().expose_provenance() as u64;
    let request = Frame { offset, ..announcement(&groups[0], &bytes) };
    let deadline = Deadline::after(Duration::from_secs(20));
    {
        // Nobody else reads meanwhile.
        let mut reader = groups[1].endpoint().messages();
        groups[0].endpoint().messages().forge(1, 0, &request, first(&bytes, 0));
        let begins = into.as_ptr();
        // SAFETY: the memory is there; who writes to it is the engine, and any value will do.
        while unsafe { begins.read_volatile() } == 0 {
            reader.serve(0, 0);
            assert!(!deadline.expired(), "nothing is read");
        }
        let again = Frame { kind: FrameKind::Eager, total: 16, offset: 0, length: 16, ..request };
        groups[0].endpoint().messages().forge(1, 0, &again, first(&bytes, 16));
        reader.serve(0, 0);
    }
    // What is read by then may well come to its end.
    let _ = receive.wait(deadline).expect("in time");
    let error = waits.wait(deadline).expect("in time").expect_err("the link is broken");
    assert!(error.text().contains("a message came that is being read already"), "{error}");
}

#[test]
fn a_failure_is_seen_where_it_happens_once_the_others_are_told() {
    let [group, other] = linked_pair(false);
    let turn = group.announce(BARRIER, None).expect("a call");
    let cause = Error::new(Status::System, "no");
    let progress = || group.endpoint().recorder().last(group.id()).map(|call| call.progress);
    let held = hold_service();
    std::thread::scope(|scope| {
        scope.spawn(|| group.end_turn_record(&turn, Err(cause.clone())).expect_err("it has failed"));
        while group.latched().is_none() {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(group.failure(), None, "who sees it may end the process");
        // Nor by those that ask this rank, which would take it for the cause.
        assert_eq!(progress(), Some(Progress::Running));
        drop(held);
    });
    assert_eq!((group.failure(), progress()), (Some(cause), Some(Progress::Failed)));
    let wait = Deadline::after(Duration::from_secs(20));
    other.endpoint().wait(wait, Through::Messages, || other.failure()).expect("in time");
}

#[test]
fn who_waits_for_links_hears_that_its_group_has_failed() {
    let (groups, _mute) = unlinked_beside_a_mute();
    let (cause, begun) = (Error::new(Status::System, "no"), Instant::now());
    let error = std::thread::scope(|scope| {
        let waits = scope.spawn(|| groups[0].open_links(&[1], Deadline::after(Duration::from_secs(60))));
        std::thread::sleep(Duration::from_millis(20));
        groups[0].fail(cause.clone());
        waits.join().expect("no panic").expect_err("it has failed")
    });
    assert_eq!(error, cause);
    assert!(begun.elapsed() < Duration::from_secs(20), "it has not waited for the link");
}

#[test]
fn a_rank_that_does_not_reach_another_while_memory_is_shared_tells_all() {
    let mut groups = unlinked(3, &Options::default());
    drop(groups.remove(1));
    let wait = Deadline::after(Duration::from_secs(20));
    groups[1].endpoint().open_links(&[0], wait, || None).expect("a link");
    let error = groups[0].share_memory(wait, wait, |mine, _| Ok(vec![mine; 3])).expect_err("rank 1 has gone");
    for group in &groups {
        let told = group.endpoint().wait(wait, Through::Messages, || group.failure()).expect("in time");
        assert!(told.text().contains(error.text()), "{told}");
    }
}

/// As where one has returned from making a group and aborts its parent, while another still waits for the
/// last word of that.
#[test]
fn a_rank_that_fails_late_while_memory_is_shared_leaves_nothing_of_it_behind() {
    let parents = linked_pair(true);
    let wait = Deadline::after(Duration::from_secs(20));
    let words = std::sync::Mutex::new([[0; 2]; 2]);
    let both = Barrier::new(2);
    // Ranks that fail when all have said that they reach all.
    let make = |id: u64, failing: &[u32]| {
        let make = |parent: &Arc<Group>| {
            let rank = parent.rank();
            let members = parent.members().clone();
            let group = Group::new(
                parent.endpoint().clone(),
                id,
                "child".into(),
                rank,
                members,
                Duration::from_secs(20),
            );
            let exchanges = AtomicUsize::new(0);
            let exchange = |mine, _| {
                words.lock().expect("no panic")[rank as usize] = mine;
                both.wait();
                let all = words.lock().expect("no panic").to_vec();
                both.wait();
                let is_last = exchanges.fetch_add(1, Ordering::Relaxed) == 1;
                if is_last && failing.contains(&rank) {
                    Err(Error::new(Status::Aborted, "no"))
                } else {
                    Ok(all)
                }
            };
            let made = group.share_memory(wait, wait, exchange);
            assert_eq!(made.is_err(), failing.contains(&rank), "{made:?}");
            both.wait();
        };
        std::thread::scope(|scope| {
            parents
                .each_ref()
                .map(|parent| scope.spawn(move || make(parent)))
                .map(|rank| rank.join().expect("no panic"))
        });
    };
    let free = || {
        parents.each_ref().map(|parent| {
            // As whoever makes the next.
            parent.endpoint().retired().sweep();
            parent.endpoint().registration().segment().free_bytes()
        })
    };
    make(100, &[]);
    let before = free();
    for (id, failing) in (101..).zip([&[1][..], &[0], &[0, 1]].repeat(10)) {
        make(id, failing);
        // The thread that hears of a failure may hold its group a little longer.
        let end = Deadline::after(Duration::from_secs(20));
        while free() != before {
            assert!(!end.expired(), "{failing:?} failed: {:?} instead of {before:?}", free());
            std::thread::yield_now();
        }
    }
}

/// The news of a failure, and the group that it is of, whichever comes first.
#[test]
fn a_failure_that_comes_while_its_group_is_made_is_its_failure() {
    const GROUPS: u64 = 4_000;
    let [group, _other] = pair(true);
    let endpoint = group.endpoint();
    let (begun, told) = (AtomicU64::new(0), AtomicU64::new(0));
    let lost = std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 1..=GROUPS {
                let error = Error::new(Status::Aborted, "no");
                let news = Control::Failure { group: group.id() + number, error }.encode();
                while begun.load(Ordering::SeqCst) < number {
                    std::thread::yield_now();
                }
                endpoint.control(1, &news);
                told.store(number, Ordering::SeqCst);
            }
        });
        let is_lost = |number: &u64| {
            begun.store(*number, Ordering::SeqCst);
            let (id, members) = (group.id() + number, [0, 1].into());
            let made = Group::new(endpoint.clone(), id, "new".into(), 0, members, Duration::from_secs(20));
            while told.load(Ordering::SeqCst) < *number {
                std::thread::yield_now();
            }
            made.failure().is_none()
        };
        (1..=GROUPS).filter(is_lost).count()
    });
    assert_eq!(lost, 0, "of {GROUPS} failures");
}

#[test]
fn a_rank_that_left_without_reading_all_is_not_waited_for() {
    let [last, other] = linked_pair(false);
    let mut never = [0; 3];
    let in_vain = receive_any(&other, &[0], &mut never);
    // The kernel says that the stream is reset.
    done(&send(&other, 1, &[1; 8]));
    drop(last);
    let error =
        in_vain.wait(Deadline::after(Duration::from_secs(20))).expect("in time").expect_err("it is gone");
    assert!(error.text().contains("has left") || error.text().contains("have left"), "{error}");
    assert_eq!(other.failure(), None);
}

/// What rank 0 has sent over the second of two streams is read although the first takes, or gives, nothing
/// any more: rank 0 may have ended in order, with something unread, of which the kernel makes a reset.
#[test]
fn what_has_come_over_one_stream_is_read_though_another_has_broken() {
    for writes in [true, false] {
        let groups = over_two_streams();
        let bytes: Vec<u8> = (0..300 << 10).map(|at| (at % 251) as u8).collect();
        let mut into = vec![0u8; bytes.len()];
        let receive = receive(&groups[1], 4, &mut into);
        let request = announcement(&groups[0], &bytes);
        let deadline = Deadline::after(Duration::from_secs(20));
        let mut messages = groups[1].endpoint().messages();
        {
            let mut other = groups[0].endpoint().messages();
            other.forge(1, 0, &request, first(&bytes, 0));
            messages.serve(0, 0);
            // Before it has read that.
            messages.forge(0, 0, &request, first(&bytes, 0));
            let mut lanes = other.take_lanes();
            let data = Frame { kind: FrameKind::Data, length: bytes.len() as u32, ..request };
            let second = lanes.pop().expect("two streams");
            second.lock().push(&data, first(&bytes, bytes.len()), None);
            // The first is reset.
            drop(lanes);
            if writes {
                while messages.troubles.is_empty() {
                    messages.forge(0, 0, &request, first(&bytes, 0));
                    assert!(!deadline.expired(), "nothing is refused");
                }
            }
            while messages.expected(0) > 0 {
                second.lock().flush(|_, _| {}).expect("it is whole");
                messages.serve(0, 1);
                assert!(!deadline.expired(), "what has come is not read (writes: {writes})");
            }
        }
        assert_eq!(into, bytes);
        drop(messages);
        // The link is lost in a moment.
        let _ = receive.wait(deadline).expect("in time");
    }
}

/// What the last that holds a rank does on the service thread.
struct Last {
    group: std::sync::Mutex<Option<Arc<Group>>>,
    /// Whether the other has seen the end of a stream by then.
    tell: std::sync::Mutex<mpsc::Sender<bool>>,
    other: Arc<Group>,
}

impl Port for Last {
    fn link_opened(&self, _: u32, _: Link) {}
    fn link_refused(&self, _: u32, _: Error) {}
    fn peer_left(&self, _: u32) {}
    fn peer_lost(&self, _: u32, _: Error) {}
    fn control(&self, _: u32, _: &[u8]) {}
    fn attend(&self) -> Attendance {
        drop(self.group.lock().expect("nobody panics").take());
        let mut messages = self.other.endpoint().messages();
        messages.serve(0, 0);
        let _ = self.tell.lock().expect("nobody panics").send(messages.has_ended(0));
        Attendance::Idle
    }
}

#[test]
fn data_streams_do_not_end_before_the_last_word_has_been_said() {
    for shm in [true, false] {
        let [last, other] = linked_pair(shm);
        // What it has not read has the kernel say that the stream is reset.
        let bytes = [1; 8];
        done(&send(&other, 1, &bytes));
        let identity = Identity { rank: 0, size: 2, secret: SecretKey::new([1; 32]), job: 8 };
        let (tell, told) = mpsc::channel();
        let port = Arc::new(Last { group: Some(last).into(), tell: tell.into(), other: other.clone() });
        let as_port: Arc<dyn Port> = port.clone();
        let registration =
            Registration::new(identity, Options::default(), Arc::downgrade(&as_port)).expect("it listens");
        registration.kick();
        let wait = Duration::from_secs(20);
        assert!(!told.recv_timeout(wait).expect("it is dropped"), "shm: {shm}");
        let gone = || other.endpoint().messages().gone(0).then_some(());
        other.endpoint().wait(Deadline::after(wait), Through::Messages, gone).expect("it has left");
        assert_eq!(other.endpoint().messages().why_lost(0).map(|why| why.to_string()), None);
    }
}

#[test]
fn a_message_whose_peer_has_failed_the_group_and_left_tells_of_the_failure() {
    for shm in [true, false] {
        let [first, second] = linked_pair(shm);
        let mut bytes = [0; 8];
        let into = Destination { address: bytes.as_mut_ptr(), len: bytes.len() };
        let waiting = post(&first, 1, bytes.len(), Message::Receive { from: 1, into });
        second.fail(Error::new(Status::Timeout, "rank 1 has waited long enough"));
        drop(second);
        let error =
            waiting.wait(Deadline::after(Duration::from_secs(20))).expect("in time").expect_err("it failed");
        assert!(error.text().contains("long enough"), "shm {shm}: {error}");
        assert_eq!(error.status(), Status::Timeout);
    }
}
