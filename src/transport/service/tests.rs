//! Endpoints of one process against each other and against strangers; other processes are in [`processes`].

use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::OnceLock;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use super::*;
use crate::error::Status;
use crate::sys::process;
use crate::transport::LinkKind;

mod by_hand;
mod processes;

const LONG: Duration = Duration::from_secs(30);

/// What a port was told.
enum Told {
    Opened(u32, Link),
    Refused(u32, Error),
    Left(u32),
    Lost(u32, Error),
    Control(u32, Vec<u8>),
    Attend,
}

struct Ear {
    tell: Mutex<Sender<Told>>,
    attendance: Mutex<Vec<Attendance>>,
    /// Has always something to move, and counts how often it was asked.
    busy: AtomicBool,
    asked: AtomicUsize,
    /// Sends a control message as soon as a link opens.
    greeter: OnceLock<Weak<Registration>>,
}

impl Ear {
    fn say(&self, told: Told) {
        // The test may be over.
        let _ = self.tell.lock().unwrap().send(told);
    }
}

impl Port for Ear {
    fn link_opened(&self, peer: u32, link: Link) {
        self.say(Told::Opened(peer, link));
        if let Some(registration) = self.greeter.get().and_then(Weak::upgrade) {
            registration.send_control(peer, b"at once");
        }
    }
    fn link_refused(&self, peer: u32, why: Error) {
        self.say(Told::Refused(peer, why));
    }
    fn peer_left(&self, peer: u32) {
        self.say(Told::Left(peer));
    }
    fn peer_lost(&self, peer: u32, why: Error) {
        self.say(Told::Lost(peer, why));
    }
    fn control(&self, peer: u32, message: &[u8]) {
        self.say(Told::Control(peer, message.to_vec()));
    }
    fn attend(&self) -> Attendance {
        self.asked.fetch_add(1, Ordering::Relaxed);
        if self.busy.load(Ordering::Relaxed) {
            return Attendance::Again(Instant::now());
        }
        self.say(Told::Attend);
        self.attendance.lock().unwrap().pop().unwrap_or(Attendance::Idle)
    }
}

/// An endpoint with what its port was told.
struct Node {
    registration: Arc<Registration>,
    told: Receiver<Told>,
    ear: Arc<Ear>,
}

impl Node {
    fn new(rank: u32, size: u32, secret: u8, options: Options) -> Node {
        let (tell, told) = channel();
        let ear = Arc::new(Ear {
            tell: Mutex::new(tell),
            attendance: Mutex::default(),
            busy: AtomicBool::new(false),
            asked: AtomicUsize::new(0),
            greeter: OnceLock::new(),
        });
        let identity = Identity { rank, size, secret: SecretKey::new([secret; 32]), job: 7 };
        let as_port: Arc<dyn Port> = ear.clone();
        let registration = Registration::new(identity, options, Arc::downgrade(&as_port)).unwrap();
        Node { registration: Arc::new(registration), told, ear }
    }

    fn rank(&self) -> u32 {
        self.registration.address().rank
    }

    fn open(&self, other: &PeerAddress) {
        self.registration.open(other.clone(), Deadline::after(LONG));
    }

    fn next(&self) -> Told {
        self.told.recv_timeout(LONG).expect("an answer")
    }

    fn link(&self, from: u32) -> Link {
        match self.next() {
            Told::Opened(peer, link) if peer == from => link,
            other => panic!("instead of a link to {from}: {}", name(&other)),
        }
    }

    fn refusal(&self) -> Error {
        match self.next() {
            Told::Refused(_, why) => why,
            other => panic!("instead of a refusal: {}", name(&other)),
        }
    }

    fn silence(&self) {
        match self.told.recv_timeout(Duration::from_millis(30)) {
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => panic!("the port is gone"),
            Ok(other) => panic!("told {}", name(&other)),
        }
    }
}

fn name(told: &Told) -> String {
    match told {
        Told::Opened(peer, link) => format!("link to {peer} over {:?}", link.kind),
        Told::Refused(peer, why) => format!("refused {peer}: {why}"),
        Told::Left(peer) => format!("{peer} left"),
        Told::Lost(peer, why) => format!("{peer} lost: {why}"),
        Told::Control(peer, message) => format!("{} bytes from {peer}", message.len()),
        Told::Attend => "attend".to_owned(),
    }
}

fn small() -> Options {
    Options { segment_bytes: 4 << 20, ring_bytes: 16 << 10, ..Options::default() }
}

fn over(kind: LinkKind) -> Options {
    Options { shm: kind == LinkKind::Shm, tcp: kind == LinkKind::Tcp, ..small() }
}

fn pair(options: Options) -> [Node; 2] {
    [0, 1].map(|rank| Node::new(rank, 2, 1, options.clone()))
}

/// Sends a pattern on every stream of `link` in both directions at once and checks what comes.
fn exchange(mut link: Link, own: u32, other: u32) -> Link {
    const TOTAL: usize = 300_000;
    let byte = |rank: u32, lane: usize, place: usize| {
        (place.wrapping_mul(31 + rank as usize) ^ (place >> 8) ^ lane) as u8
    };
    let deadline = Deadline::after(LONG);
    let mut buffer = [0; 9000];
    let mut progress = vec![(0, 0); link.streams.len()];
    while progress.iter().any(|&(sent, got)| sent < TOTAL || got < TOTAL) {
        assert!(!deadline.expired(), "the streams stand still at {progress:?}");
        for (lane, (stream, (sent, got))) in link.streams.iter_mut().zip(&mut progress).enumerate() {
            let end = TOTAL.min(*sent + 1 + (*sent * 7919 + *got) % 8000);
            let out: Vec<u8> = (*sent..end).map(|place| byte(own, lane, place)).collect();
            let (front, back) = out.split_at(out.len() / 3);
            match stream.write(&[IoSlice::new(front), IoSlice::new(back)]) {
                Ok(count) => *sent += count,
                Err(cause) => assert_eq!(cause.kind(), ErrorKind::WouldBlock),
            }
            // Not beyond the pattern: an empty buffer would look like the end.
            let most = (TOTAL - *got).min(buffer.len());
            match stream.read(&mut buffer[..most]) {
                Ok(count) => {
                    assert!(count > 0 || most == 0);
                    for (index, &seen) in buffer[..count].iter().enumerate() {
                        assert_eq!(seen, byte(other, lane, *got + index));
                    }
                    *got += count;
                }
                Err(cause) => {
                    assert_eq!(cause.kind(), ErrorKind::WouldBlock);
                    thread::yield_now();
                }
            }
        }
    }
    link
}

#[test]
fn two_ranks_talk_over_either_transport_and_part_in_peace() {
    for kind in [LinkKind::Shm, LinkKind::Tcp] {
        let [a, b] = pair(Options { tcp_streams: Some(3), ..over(kind) });
        a.open(b.registration.address());
        a.open(b.registration.address());
        let (to_b, to_a) = (a.link(1), b.link(0));
        assert_eq!((to_b.kind, to_a.kind), (kind, kind));
        assert_eq!(to_b.streams.len(), if kind == LinkKind::Shm { 1 } else { 3 });
        assert_eq!(to_b.memory.is_some(), kind == LinkKind::Shm);
        assert!(to_b.memory.iter().all(|memory| memory.can_pull));
        let (to_b, to_a) = thread::scope(|scope| {
            let left = scope.spawn(|| exchange(to_b, 0, 1));
            (exchange(to_a, 1, 0), left.join().unwrap())
        });
        for (from, to, number) in [(&a, &b, 0u32), (&b, &a, 1)] {
            for length in [0, 5, MAX_CONTROL] {
                from.registration.send_control(1 - number, &vec![9; length]);
                match to.next() {
                    Told::Control(peer, message) => assert_eq!((peer, message), (number, vec![9; length])),
                    other => panic!("{}", name(&other)),
                }
            }
        }
        a.silence();
        a.registration.close(Deadline::after(LONG));
        assert!(matches!(b.next(), Told::Left(0)));
        b.silence();
        drop((to_a, to_b));
    }
}

/// Holds its registration, as an engine's endpoint does, and holds the service thread up when it hears
/// something.
struct Owner {
    registration: OnceLock<Registration>,
    link: Mutex<Option<Link>>,
    held: Mutex<(Sender<()>, Receiver<()>)>,
}

impl Port for Owner {
    fn link_opened(&self, _peer: u32, link: Link) {
        *self.link.lock().unwrap() = Some(link);
    }
    fn link_refused(&self, _peer: u32, _why: Error) {}
    fn peer_left(&self, _peer: u32) {}
    fn peer_lost(&self, _peer: u32, _why: Error) {}
    fn control(&self, _peer: u32, _message: &[u8]) {
        let held = self.held.lock().unwrap();
        held.0.send(()).unwrap();
        let _ = held.1.recv();
    }
    fn attend(&self) -> Attendance {
        Attendance::Idle
    }
}

#[test]
fn the_goodbyes_are_said_though_the_service_thread_is_the_last_to_hold_an_endpoint() {
    // Also those whose last handle is dropped by a thread that stands in for one of the program.
    for (kind, stands_in) in [(LinkKind::Shm, false), (LinkKind::Tcp, false), (LinkKind::Shm, true)] {
        let ((here, is_here), (go_on, goes_on)) = (channel(), channel());
        let (registration, link) = (OnceLock::new(), Mutex::default());
        let owner = Arc::new(Owner { registration, link, held: Mutex::new((here, goes_on)) });
        let identity = Identity { rank: 0, size: 2, secret: SecretKey::new([1; 32]), job: 7 };
        let port = Arc::downgrade(&owner) as Weak<dyn Port>;
        let registration =
            owner.registration.get_or_init(|| Registration::new(identity, over(kind), port).unwrap());
        let shared = Arc::clone(&registration.shared);
        let [first, last] = [(); 2].map(|()| registration.parting());
        let other = Node::new(1, 2, 1, over(kind));
        other.open(registration.address());
        let _link = other.link(0);
        other.registration.send_control(0, b"hold");
        is_here.recv().unwrap();
        drop(owner);
        // Not the last handle: this does not wait.
        drop(first);
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(50));
                drop(go_on);
            });
            if stands_in {
                let drops = || {
                    process::stand_in();
                    drop(last);
                };
                process::spawn("stands in", drops).unwrap().join().unwrap();
            } else {
                drop(last);
            }
            assert!(*shared.said.set.lock().unwrap());
        });
        assert!(matches!(other.next(), Told::Left(0)));
    }
}

#[test]
fn what_the_control_connection_says_goes_before_a_doubt() {
    let [a, b] = pair(over(LinkKind::Tcp));
    a.open(b.registration.address());
    let (_to_b, _to_a) = (a.link(1), b.link(0));
    b.registration.send_control(0, b"the cause");
    a.registration.doubt(1, Error::new(Status::PeerFailed, "a stream was reset"));
    b.registration.close(Deadline::after(LONG));
    assert!(matches!(a.next(), Told::Control(1, message) if message == b"the cause"));
    match a.next() {
        Told::Left(1) => {}
        other => panic!("{}", name(&other)),
    }
    a.silence();
}

#[test]
fn a_doubt_that_nothing_answers_ends_the_link_on_both_sides() {
    for kind in [LinkKind::Shm, LinkKind::Tcp] {
        let [a, b] = pair(over(kind));
        a.open(b.registration.address());
        let (_to_b, _to_a) = (a.link(1), b.link(0));
        a.registration.doubt(1, Error::new(Status::PeerFailed, "a stream was reset"));
        for (node, other) in [(&a, 1), (&b, 0)] {
            match node.next() {
                Told::Lost(peer, why) if peer == other => {
                    assert!(why.text().contains("a stream was reset"), "{why}");
                }
                told => panic!("{}", name(&told)),
            }
            node.silence();
        }
        a.registration.doubt(1, Error::new(Status::PeerFailed, "there is none"));
        a.silence();
    }
}

#[test]
fn who_is_hung_up_on_learns_why() {
    for kind in [LinkKind::Shm, LinkKind::Tcp] {
        let [a, b] = pair(over(kind));
        a.open(b.registration.address());
        let (_to_b, _to_a) = (a.link(1), b.link(0));
        a.registration.hang_up(1, &Error::new(Status::PeerFailed, "it came too late"));
        match b.next() {
            Told::Lost(0, why) => assert!(why.text().contains("it came too late"), "{why}"),
            told => panic!("{}", name(&told)),
        }
        a.silence();
    }
}

#[test]
fn four_ranks_link_to_each_other_at_once() {
    for kind in [LinkKind::Shm, LinkKind::Tcp] {
        let nodes = [0, 1, 2, 3].map(|rank| Node::new(rank, 4, 1, over(kind)));
        for node in &nodes {
            for other in nodes.iter().filter(|other| !std::ptr::eq(*other, node)) {
                node.open(other.registration.address());
            }
        }
        for node in &nodes {
            let mut peers: Vec<u32> = (0..3)
                .map(|_| match node.next() {
                    Told::Opened(peer, link) if link.kind == kind => peer,
                    other => panic!("{}", name(&other)),
                })
                .collect();
            peers.push(node.registration.address().rank);
            peers.sort_unstable();
            assert_eq!(peers, [0, 1, 2, 3]);
        }
    }
}

#[test]
fn crossing_opens_end_in_one_link() {
    for kind in [LinkKind::Shm, LinkKind::Tcp] {
        for round in 0..100 {
            let [mut a, mut b] = pair(over(kind));
            if round % 2 == 1 {
                std::mem::swap(&mut a, &mut b);
            }
            let (left, right) = (a.rank(), b.rank());
            a.open(b.registration.address());
            // Every offset of the two, from together to one after the other.
            thread::sleep(Duration::from_micros(round % 10 * 60));
            b.open(a.registration.address());
            let (mut to_b, mut to_a) = (a.link(right), b.link(left));
            // The two ends belong to one link: what goes in here comes out there.
            for lane in 0..to_b.streams.len() {
                let text = format!("round {round} lane {lane}");
                to_b.streams[lane].write(&[IoSlice::new(text.as_bytes())]).unwrap();
                let (mut bytes, deadline) = ([0; 64], Deadline::after(LONG));
                let count = loop {
                    match to_a.streams[lane].read(&mut bytes) {
                        Ok(count) => break count,
                        Err(cause) => assert_eq!(cause.kind(), ErrorKind::WouldBlock),
                    }
                    assert!(!deadline.expired());
                    thread::yield_now();
                };
                assert_eq!(&bytes[..count], text.as_bytes());
            }
            // And nothing is said of a second one.
            a.registration.send_control(right, b"one");
            assert!(matches!(b.next(), Told::Control(peer, _) if peer == left));
            b.registration.send_control(left, b"two");
            assert!(matches!(a.next(), Told::Control(peer, _) if peer == right));
        }
    }
}

#[test]
fn a_message_right_behind_the_opening_arrives() {
    for kind in [LinkKind::Shm, LinkKind::Tcp] {
        let [a, b] = pair(over(kind));
        for node in [&a, &b] {
            node.ear.greeter.set(Arc::downgrade(&node.registration)).unwrap();
        }
        a.open(b.registration.address());
        let _links = (a.link(1), b.link(0));
        assert!(matches!(a.next(), Told::Control(1, message) if message == b"at once"));
        assert!(matches!(b.next(), Told::Control(0, message) if message == b"at once"));
    }
}

#[test]
fn shared_memory_falls_back_to_tcp() {
    // The other has none; the other's socket is not there; the segment has no room for a ring.
    let a = Node::new(0, 4, 1, small());
    let without = Node::new(1, 4, 1, Options { shm: false, ..small() });
    let cramped = Node::new(2, 4, 1, Options { segment_bytes: 0, ..small() });
    a.open(without.registration.address());
    assert_eq!(a.link(1).kind, LinkKind::Tcp);
    assert_eq!(without.link(0).kind, LinkKind::Tcp);
    a.open(cramped.registration.address());
    assert_eq!(a.link(2).kind, LinkKind::Tcp);
    let elsewhere = Node::new(3, 4, 1, Options { host: Some("elsewhere".into()), ..small() });
    elsewhere.open(cramped.registration.address());
    assert_eq!(elsewhere.link(2).kind, LinkKind::Tcp);
    cramped.open(without.registration.address());
    assert_eq!(without.link(2).kind, LinkKind::Tcp);
}

#[test]
fn a_refusal_names_the_peer_and_what_was_tried() {
    let a = Node::new(0, 3, 1, small());
    let gone = Node::new(1, 3, 1, small());
    let address = gone.registration.address().clone();
    drop(gone);
    a.open(&address);
    let why = a.refusal();
    assert_eq!(why.status(), Status::PeerFailed);
    for part in [address.describe(), "shared memory".into(), format!("TCP to {}", address.addresses[0])] {
        assert!(why.text().contains(&part), "{why} lacks {part}");
    }
    a.open(&PeerAddress { rank: 0, ..address.clone() });
    assert_eq!(a.refusal().status(), Status::InvalidArgument);
    // Again after a refusal is allowed.
    a.open(&address);
    assert_eq!(a.refusal().status(), Status::PeerFailed);
}

#[test]
fn a_peer_that_does_not_answer_is_a_timeout() {
    let a = Node::new(0, 2, 1, over(LinkKind::Tcp));
    // Listens and says nothing.
    let mute = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut address = a.registration.address().clone();
    (address.rank, address.addresses) = (1, vec![mute.local_addr().unwrap()]);
    // On a busy machine the first may end before it has begun.
    for milliseconds in [50, 500, 5000, 20_000] {
        a.registration.open(address.clone(), Deadline::after(Duration::from_millis(milliseconds)));
        let why = a.refusal();
        assert_eq!(why.status(), Status::Timeout);
        if why.text().contains("no answer yet") {
            return;
        }
    }
    panic!("it never says what it has tried");
}

#[test]
fn a_wrong_secret_opens_nothing() {
    for kind in [LinkKind::Shm, LinkKind::Tcp] {
        let a = Node::new(0, 2, 1, over(kind));
        let thief = Node::new(1, 2, 2, over(kind));
        thief.open(a.registration.address());
        assert!(thief.refusal().text().contains("of another job"));
        a.open(thief.registration.address());
        assert_eq!(a.refusal().status(), Status::PeerFailed);
        a.silence();
        thief.silence();
    }
}

fn tcp_address(node: &Node) -> SocketAddr {
    node.registration.address().addresses[0]
}

#[test]
fn strangers_reach_nothing_and_block_nobody() {
    let [a, b] = pair(over(LinkKind::Tcp));
    // Garbage is turned away.
    let mut garbage = TcpStream::connect(tcp_address(&a)).unwrap();
    garbage.set_read_timeout(Some(LONG)).unwrap();
    garbage.write_all(&[0x5a; 500]).unwrap();
    let answer = garbage.read(&mut [0; 100]);
    assert!(matches!(answer, Ok(0)) || answer.is_err_and(|cause| cause.kind() == ErrorKind::ConnectionReset));
    // More silent strangers than there is room for: the oldest go, the rank is reached all the same.
    let mut crowd: Vec<TcpStream> = Vec::new();
    for _ in 0..accepting::MIN_HALF_OPEN + 20 {
        crowd.push(TcpStream::connect(tcp_address(&a)).unwrap());
    }
    b.open(a.registration.address());
    b.link(0);
    a.link(1);
    crowd[0].set_read_timeout(Some(LONG)).unwrap();
    assert_eq!(crowd[0].read(&mut [0; 1]).unwrap(), 0, "the oldest was dropped");
    a.silence();
}

#[test]
fn kicks_and_bells_have_the_port_attend() {
    let [a, _b] = pair(over(LinkKind::Shm));
    a.silence();
    // Kicks add up: the second comes before the first is answered, or right after it.
    a.registration.kick();
    assert!(matches!(a.next(), Told::Attend));
    a.silence();
    let again = Attendance::Again(Instant::now());
    a.ear.attendance.lock().unwrap().push(again);
    a.registration.kick();
    assert!(matches!(a.next(), Told::Attend));
    assert!(matches!(a.next(), Told::Attend));
    a.silence();
    let watch = Attendance::Watch(Instant::now() + LONG);
    a.ear.attendance.lock().unwrap().push(watch);
    a.registration.kick();
    assert!(matches!(a.next(), Told::Attend));
    a.silence();
    a.registration.bell().ring();
    assert!(matches!(a.next(), Told::Attend));
    a.silence();
    // Kicks while it is left alone are heard at the end of that time, all at once.
    let left = Instant::now();
    let time = Duration::from_millis(300);
    a.ear.attendance.lock().unwrap().push(Attendance::Leave(left + time));
    a.registration.kick();
    assert!(matches!(a.next(), Told::Attend));
    // A kick before it has said that it is left alone would be one of before.
    while !a.registration.shared.kicked.load(Ordering::Acquire) {
        if left.elapsed() >= time {
            // The machine has so much else to do that the time is over.
            return;
        }
        thread::yield_now();
    }
    a.registration.kick();
    assert!(matches!(a.next(), Told::Attend));
    assert!(left.elapsed() >= time);
    a.silence();
}

#[test]
fn an_endpoint_that_always_has_something_to_move_holds_up_nothing() {
    let [a, b] = pair(over(LinkKind::Tcp));
    a.ear.busy.store(true, Ordering::Relaxed);
    a.registration.kick();
    while a.ear.asked.load(Ordering::Relaxed) == 0 {
        thread::yield_now();
    }
    // Commands and connections: its own and others'.
    b.open(a.registration.address());
    b.link(0);
    a.link(1);
    let before = a.ear.asked.load(Ordering::Relaxed);
    while a.ear.asked.load(Ordering::Relaxed) == before {
        thread::yield_now();
    }
}

#[test]
fn options_come_from_the_environment_and_bad_ones_are_named() {
    let parse = |name: &'static str, value: &'static str| {
        Options::from_environment(move |asked| (asked == name).then(|| value.to_owned()))
    };
    let options = parse("UNISONO_TRANSPORT", "tcp").unwrap();
    assert!(options.tcp && !options.shm);
    let options = parse("UNISONO_TRANSPORT", "shm, tcp").unwrap();
    assert!(options.tcp && options.shm);
    assert!(!parse("UNISONO_CMA", "0").unwrap().pull);
    assert_eq!(parse("UNISONO_TCP_STREAMS", "64").unwrap().tcp_streams, Some(64));
    assert_eq!(parse("UNISONO_TCP_THREADS", "3").unwrap().tcp_threads, Some(3));
    assert_eq!(parse("UNISONO_HOST", "a").unwrap().host.as_deref(), Some("a"));
    assert_eq!(["0", "1"].map(|value| parse("UNISONO_RELAY", value).unwrap().relays), [false, true]);
    for name in ["TRANSPORT", "CMA", "RELAY", "TCP_STREAMS", "TCP_THREADS", "HOST"] {
        let empty = Options::from_environment(|asked| {
            asked.strip_prefix("UNISONO_").filter(|&asked| asked == name).map(|_| String::new())
        });
        assert_eq!(format!("{:?}", empty.unwrap()), format!("{:?}", Options::default()), "{name}");
    }
    for (name, value) in [
        ("UNISONO_TRANSPORT", "shm,infiniband"),
        ("UNISONO_CMA", "yes"),
        ("UNISONO_RELAY", "off"),
        ("UNISONO_TCP_STREAMS", "0"),
        ("UNISONO_TCP_STREAMS", "65"),
        ("UNISONO_TCP_STREAMS", "many"),
        ("UNISONO_TCP_THREADS", "0"),
        ("UNISONO_TCP_THREADS", "65"),
    ] {
        let why = parse(name, value).unwrap_err();
        assert_eq!(why.status(), Status::InvalidArgument);
        assert!(why.text().contains(&format!("{name}={value}")), "{why}");
    }
    let nothing = Options { shm: false, tcp: false, ..Options::default() };
    let odd = Options { ring_bytes: 5000, ..Options::default() };
    for options in [nothing, odd] {
        let identity = Identity { rank: 0, size: 1, secret: SecretKey::new([0; 32]), job: 0 };
        let port: Weak<dyn Port> = Weak::<Ear>::new();
        assert!(Registration::new(identity, options, port).is_err());
    }
}

#[test]
fn a_silent_address_does_not_hide_the_next() {
    let [a, b] = pair(over(LinkKind::Tcp));
    let mute = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut address = b.registration.address().clone();
    address.addresses.insert(0, mute.local_addr().unwrap());
    a.open(&address);
    assert_eq!(a.link(1).kind, LinkKind::Tcp);
}

#[test]
fn an_address_that_is_out_of_use_does_not_keep_a_rank_from_its_others() {
    // Of no host (RFC 5737). An interface may have such: the kernel does not use an IPv6 address that another
    // host has, too.
    let foreign: SocketAddr = "192.0.2.1:0".parse().unwrap();
    let on = |addresses| Options { addresses, ..over(LinkKind::Tcp) };
    let node = Node::new(0, 2, 1, on(vec![foreign, "127.0.0.1:0".parse().unwrap()]));
    let published = &node.registration.address().addresses;
    assert!(published.iter().map(SocketAddr::ip).eq([Ipv4Addr::LOCALHOST]), "{published:?}");
    let identity = Identity { rank: 0, size: 2, secret: SecretKey::new([1; 32]), job: 7 };
    let port: Weak<dyn Port> = Weak::<Ear>::new();
    let error = Registration::new(identity, on(vec![foreign]), port).err().expect("it has no other");
    assert!(error.text().contains("cannot listen on 192.0.2.1"), "{error}");
}
