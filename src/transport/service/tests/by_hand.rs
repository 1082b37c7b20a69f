//! An endpoint and a peer that is played by hand, word by word: what happens between the first word and an
//! open link.

use std::os::fd::BorrowedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddress, UnixListener, UnixStream};

use socket2::SockRef;

use super::super::setup::{Data, Setup};
use super::*;
use crate::transport::handshake::{Handshake, Hello, Purpose};
use crate::transport::ring::RingMemory;

const SETUP: u8 = 1;
const REFUSE: u8 = 2;
const MESSAGE: u8 = 3;
const GOODBYE: u8 = 4;

trait Stream: Read + Write {}
impl<S: Read + Write> Stream for S {}

fn secret() -> SecretKey {
    SecretKey::new([1; 32])
}

fn read(stream: &mut impl Read, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

/// Proves itself as rank 1 that was connected to, up to the last word, which is returned.
fn respond(stream: &mut impl Stream) -> Vec<u8> {
    let mut handshake = Handshake::respond(&secret(), 1, 7, [3; 32]);
    loop {
        let step = handshake.advance(&read(stream, handshake.needs())).unwrap();
        if step.done.is_some() {
            return step.send;
        }
        stream.write_all(&step.send).unwrap();
    }
}

/// Connects to rank 0 as rank 1 and proves itself.
fn initiate(stream: &mut impl Stream) {
    initiate_as(1, Purpose::Control, stream);
}

/// The same as another rank, or for something else.
fn initiate_as(initiator: u32, purpose: Purpose, stream: &mut impl Stream) {
    let hello = Hello { purpose, initiator, target: 0, job: 7, attempt: 5 };
    let (mut handshake, first) = Handshake::initiate(&secret(), hello, [4; 32]);
    stream.write_all(&first).unwrap();
    loop {
        let step = handshake.advance(&read(stream, handshake.needs())).unwrap();
        stream.write_all(&step.send).unwrap();
        if step.done.is_some() {
            return;
        }
    }
}

fn say(stream: &mut impl Write, kind: u8, payload: &[u8]) {
    let bytes = [&[kind][..], &(payload.len() as u32).to_le_bytes(), payload].concat();
    stream.write_all(&bytes).unwrap();
}

fn hear(stream: &mut impl Read) -> (u8, Vec<u8>) {
    let head = read(stream, 5);
    let length = u32::from_le_bytes(head[1..].try_into().unwrap());
    (head[0], read(stream, length as usize))
}

fn setup(data: Data) -> Vec<u8> {
    Setup { hostname: "by hand".into(), pid: 1, data }.encode()
}

/// A setup in shared memory that lacks the descriptors which belong to it.
fn useless() -> Vec<u8> {
    setup(Data::Shm { ring_offset: 0, ring_bytes: 4096, cookie_address: 0, cookie: [0; 16] })
}

/// Waits until the node has read what it was sent.
fn catch_up(node: &Node) {
    let over = node.registration.caught_up();
    while !over.load(Ordering::Acquire) {
        thread::yield_now();
    }
}

/// Rank 0, asked to open its link to a rank 1 on this host; that end of the connection, after the greeting.
fn opening_local() -> (Node, UnixStream) {
    let (node, mut stream, last) = greeting_local(over(LinkKind::Shm));
    stream.write_all(&last).unwrap();
    (node, stream)
}

/// The same up to the last word of the greeting, which is still to be said.
fn greeting_local(options: Options) -> (Node, UnixStream, Vec<u8>) {
    let node = Node::new(0, 2, 1, options);
    let mut address = node.registration.address().clone();
    (address.rank, address.local, address.addresses) = (1, [0; 16], Vec::new());
    crate::sys::random::fill(&mut address.local).unwrap();
    let name = UnixAddress::from_abstract_name(&address.local_name()[1..]).unwrap();
    let listener = UnixListener::bind_addr(&name).unwrap();
    node.open(&address);
    let (mut stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    let last = respond(&mut stream);
    (node, stream, last)
}

#[test]
fn who_leaves_while_it_opens_a_link_says_so() {
    let (node, mut peer) = opening_local();
    assert_eq!(hear(&mut peer).0, SETUP);
    // From here on, the peer may count the link as open.
    node.registration.close(Deadline::after(LONG));
    assert_eq!(hear(&mut peer).0, GOODBYE);
}

#[test]
fn who_leaves_while_a_link_is_opened_to_it_says_so() {
    let node = Node::new(0, 2, 1, over(LinkKind::Tcp));
    let mut peer = TcpStream::connect(tcp_address(&node)).unwrap();
    peer.set_read_timeout(Some(LONG)).unwrap();
    initiate(&mut peer);
    node.registration.close(Deadline::after(LONG));
    assert_eq!(hear(&mut peer).0, GOODBYE);
}

/// What it leaves for: who only hears that it has left would look for the cause there.
#[test]
fn what_is_announced_goes_to_links_that_open_later_and_before_the_goodbye_where_they_do_not() {
    let concerns = |peers: &[u32]| Arc::<[u32]>::from(peers);
    let (node, mut peer) = opening_local();
    assert_eq!(hear(&mut peer).0, SETUP);
    for (peers, message) in [(concerns(&[0, 1]), "first"), (concerns(&[0]), "no"), (concerns(&[1]), "last")] {
        node.registration.announce(peers, message.into());
    }
    node.registration.close(Deadline::after(LONG));
    let heard = [(); 3].map(|()| hear(&mut peer));
    assert_eq!(heard, [(MESSAGE, b"first".into()), (MESSAGE, b"last".into()), (GOODBYE, b"".into())]);

    // Once, whether the link is open before or after; also by a peer to which the link is not open yet.
    let [a, b] = pair(over(LinkKind::Tcp));
    a.registration.announce(concerns(&[0, 1]), b"before".into());
    a.open(b.registration.address());
    let (_to_b, _to_a) = (a.link(1), b.link(0));
    a.registration.announce(concerns(&[0, 1]), b"after".into());
    for expected in ["before", "after"] {
        assert!(matches!(b.next(), Told::Control(0, message) if message == expected.as_bytes()));
    }
    a.registration.close(Deadline::after(LONG));
    assert!(matches!(b.next(), Told::Left(0)));
}

#[test]
fn a_peer_that_leaves_before_the_link_is_open_has_left_and_is_not_lost() {
    let (node, mut peer) = opening_local();
    say(&mut peer, MESSAGE, b"why");
    say(&mut peer, GOODBYE, b"");
    assert!(matches!(node.next(), Told::Control(1, message) if message == b"why"));
    match node.next() {
        Told::Left(1) => {}
        other => panic!("{}", name(&other)),
    }
    node.silence();
    // The same for a link that the peer began, and nobody here has asked for.
    let node = Node::new(0, 2, 1, over(LinkKind::Tcp));
    let mut peer = TcpStream::connect(tcp_address(&node)).unwrap();
    initiate(&mut peer);
    say(&mut peer, GOODBYE, b"");
    assert!(matches!(node.next(), Told::Left(1)));
}

/// The socket of this process that is the other end of `stream`.
fn other_end(stream: &TcpStream) -> socket2::Socket {
    let fds = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(Result::ok);
    let numbers = fds.filter_map(|fd| fd.file_name().to_str()?.parse().ok());
    let other = numbers.into_iter().find_map(|number| {
        // SAFETY: used for two calls that touch no memory of ours; of a descriptor that another test closes
        // meanwhile they give an error, or another address.
        let fd = unsafe { BorrowedFd::borrow_raw(number) };
        let address = SockRef::from(&fd).local_addr().ok()?.as_socket()?;
        (address == stream.peer_addr().unwrap()).then(|| fd.try_clone_to_owned().ok()).flatten()
    });
    other.expect("it is of this process").into()
}

#[test]
fn a_host_that_falls_silent_before_it_has_proved_itself_is_noticed() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let [node, _peer] = misled(vec![listener.local_addr().unwrap()]);
    let (mut mute, _) = listener.accept().unwrap();
    mute.set_read_timeout(Some(LONG)).unwrap();
    // Greeted, and all of that acknowledged: the kernel alone can find out that nobody is there any more.
    assert!(!read(&mut mute, 72).is_empty());
    let socket = other_end(&mute);
    assert!(socket.keepalive().unwrap());
    assert!(socket.tcp_user_timeout().unwrap().is_some());
    drop(node);
}

/// Connects to the Unix socket of rank 0 as rank 1.
fn initiate_local(node: &Node) -> UnixStream {
    let name = node.registration.address().local_name();
    let name = UnixAddress::from_abstract_name(&name[1..]).unwrap();
    let mut stream = UnixStream::connect_addr(&name).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    initiate(&mut stream);
    stream
}

#[test]
fn why_a_peer_that_left_may_have_done_so_is_told() {
    let node = Node::new(0, 2, 1, over(LinkKind::Shm));
    let mut peer = initiate_local(&node);
    say(&mut peer, SETUP, &useless());
    assert_eq!(hear(&mut peer).0, REFUSE);
    assert_eq!(node.registration.refusal(LONG), None, "it may try again");
    say(&mut initiate_local(&node), GOODBYE, b"");
    assert!(matches!(node.next(), Told::Left(1)));
    let told = node.registration.refusal(LONG).expect("what failed");
    assert!(told.contains("rank 1") && told.contains("descriptors"), "{told}");
}

/// A rank 0 that opens its link to a rank 1, which it believes to be at these addresses; and that rank 1.
fn misled(addresses: Vec<SocketAddr>) -> [Node; 2] {
    let [node, peer] = pair(over(LinkKind::Tcp));
    node.open(&PeerAddress { addresses, ..peer.registration.address().clone() });
    [node, peer]
}

#[test]
fn a_rank_that_cannot_reach_a_higher_one_is_reached_by_it() {
    // Listens and says nothing.
    let mute = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let [node, peer] = misled(vec![mute.local_addr().unwrap()]);
    let (_unanswered, _) = mute.accept().unwrap();
    peer.open(node.registration.address());
    let (to_peer, to_node) = (node.link(1), peer.link(0));
    thread::scope(|scope| {
        scope.spawn(|| exchange(to_peer, 0, 1));
        exchange(to_node, 1, 0);
    });
    node.silence();
    peer.silence();
}

#[test]
fn what_a_higher_rank_opens_is_answered_once_an_own_attempt_has_failed() {
    let [greeter, mute] = [(); 2].map(|()| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
    let [node, peer] = misled([&greeter, &mute].map(|listener| listener.local_addr().unwrap()).into());
    let (mut half, _) = greeter.accept().unwrap();
    half.set_read_timeout(Some(LONG)).unwrap();
    let last = respond(&mut half);
    half.write_all(&last).unwrap();
    // From here on, who is there may count the link as open.
    assert_eq!(hear(&mut half).0, SETUP);
    let began = Instant::now();
    peer.open(node.registration.address());
    peer.silence();
    let _links = (node.link(1), peer.link(0));
    // At once, and not only when the last address or the peer's attempt has been given up too.
    assert!(began.elapsed() < LONG * 2 / 3, "{:?}", began.elapsed());
}

#[test]
fn a_peer_that_has_proved_itself_and_is_late_is_not_given_up() {
    let [listener, mute] = [(); 2].map(|()| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
    let [node, _peer] = misled([&listener, &mute].map(|listener| listener.local_addr().unwrap()).into());
    let mut control = listener.accept().unwrap().0;
    control.set_read_timeout(Some(LONG)).unwrap();
    let last = respond(&mut control);
    control.write_all(&last).unwrap();
    let (kind, payload) = hear(&mut control);
    let Some(Setup { data: Data::Tcp { lanes: count }, .. }) = Setup::decode(&payload) else {
        panic!("a frame of kind {kind}")
    };
    let _lanes: Vec<TcpStream> = (0..count)
        .map(|_| {
            let mut lane = listener.accept().unwrap().0;
            let last = respond(&mut lane);
            lane.write_all(&last).unwrap();
            lane
        })
        .collect();
    // For the peer, the link is open from here on, whenever it comes to say so: that another address is there
    // to be tried is no reason to lose it.
    thread::sleep(Duration::from_millis(3500));
    say(&mut control, SETUP, &setup(Data::Tcp { lanes: count }));
    assert_eq!(node.link(1).streams.len(), usize::from(count));
    node.silence();
}

#[test]
fn a_peer_that_counts_a_link_as_open_is_told_that_it_is_given_up() {
    let [node, peer] = pair(over(LinkKind::Tcp));
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addresses = vec![listener.local_addr().unwrap()];
    let address = PeerAddress { addresses, ..peer.registration.address().clone() };
    node.registration.open(address, Deadline::after(Duration::from_secs(1)));
    let mut control = listener.accept().unwrap().0;
    control.set_read_timeout(Some(LONG)).unwrap();
    let last = respond(&mut control);
    control.write_all(&last).unwrap();
    assert_eq!(hear(&mut control).0, SETUP);
    let (kind, text) = hear(&mut control);
    let text = String::from_utf8(text).unwrap();
    assert_eq!(kind, REFUSE, "{text}");
    assert!(text.contains("rank 0 has given up this link") && text.contains("took too long"), "{text}");
}

#[test]
fn a_peer_that_gives_up_an_open_link_is_not_told_as_one_that_is_gone() {
    let (node, mut control, mut lanes) = opening_tcp(2, 1);
    let [(lane, last)] = &mut lanes[..] else { panic!("one lane") };
    lane.write_all(last).unwrap();
    say(&mut control, SETUP, &setup(Data::Tcp { lanes: 1 }));
    let _link = node.link(1);
    say(&mut control, REFUSE, b"rank 1 has given up this link: no answer");
    match node.next() {
        Told::Lost(1, why) => {
            assert!(why.text().starts_with("no link to rank 1"), "{why}");
            assert!(why.text().ends_with("any more: rank 1 has given up this link: no answer"), "{why}");
        }
        other => panic!("{}", name(&other)),
    }
}

/// Rank 0 of so many has begun to open a link of so many data connections to a rank 1, which has still to say
/// something on each of them: that end of the control connection, whose proof is said, and of the others with
/// what each has to say.
fn opening_tcp(size: u32, streams: usize) -> (Node, TcpStream, Vec<(TcpStream, Vec<u8>)>) {
    opening_tcp_or(size, streams, Vec::new())
}

/// The same where rank 1 may be at other addresses, too.
fn opening_tcp_or(
    size: u32,
    streams: usize,
    others: Vec<SocketAddr>,
) -> (Node, TcpStream, Vec<(TcpStream, Vec<u8>)>) {
    let node = Node::new(0, size, 1, Options { tcp_streams: Some(streams), ..over(LinkKind::Tcp) });
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut address = node.registration.address().clone();
    (address.rank, address.addresses) = (1, [vec![listener.local_addr().unwrap()], others].concat());
    node.open(&address);
    let mut control = listener.accept().unwrap().0;
    control.set_nodelay(true).unwrap();
    control.set_read_timeout(Some(LONG)).unwrap();
    let last = respond(&mut control);
    control.write_all(&last).unwrap();
    assert_eq!(hear(&mut control).0, SETUP);
    let lane = |_| {
        let mut lane = listener.accept().unwrap().0;
        let last = respond(&mut lane);
        (lane, last)
    };
    (node, control, (0..streams).map(lane).collect())
}

#[test]
fn what_a_peer_says_before_all_connections_are_ready_waits_for_them() {
    let (node, mut control, mut lanes) = opening_tcp(2, 2);
    let [(first, first_last), (second, second_last)] = &mut lanes[..] else { panic!("two lanes") };
    first.write_all(first_last).unwrap();
    // For the peer, the link is open: it has the proofs of all connections. Its own is still on its way on
    // one of them.
    say(&mut control, SETUP, &setup(Data::Tcp { lanes: 2 }));
    say(&mut control, MESSAGE, b"at once");
    say(&mut control, GOODBYE, b"");
    node.silence();
    second.write_all(second_last).unwrap();
    assert_eq!(node.link(1).streams.len(), 2);
    assert!(matches!(node.next(), Told::Control(1, message) if message == b"at once"));
    assert!(matches!(node.next(), Told::Left(1)));
}

#[test]
fn who_leaves_says_so_before_its_data_connections_end() {
    // One is ready, the other has not proved itself.
    let (node, mut control, mut lanes) = opening_tcp(2, 2);
    let (ready, last) = &mut lanes[0];
    ready.write_all(last).unwrap();
    catch_up(&node);
    for (lane, _) in &lanes {
        let socket = other_end(lane);
        // Closing it takes until all of this is read, or its other end closed.
        socket.set_linger(Some(2 * LONG)).unwrap();
        while socket.send(&[0; 64 << 10]).is_ok() {}
    }
    thread::scope(|scope| {
        scope.spawn(|| node.registration.close(Deadline::after(LONG)));
        assert_eq!(hear(&mut control).0, GOODBYE);
        drop(lanes);
    });
}

#[test]
fn what_a_peer_has_said_goes_before_the_end_of_a_data_connection() {
    // Also where the peer counts the link as open.
    for counts_as_open in [false, true] {
        let (node, mut control, lanes) = opening_tcp(2, 1);
        let held = hold_service();
        drop(lanes);
        if counts_as_open {
            say(&mut control, SETUP, &setup(Data::Tcp { lanes: 1 }));
        }
        say(&mut control, MESSAGE, b"why");
        say(&mut control, GOODBYE, b"");
        drop(held);
        assert!(matches!(node.next(), Told::Control(1, message) if message == b"why"));
        let told = node.next();
        assert!(matches!(told, Told::Left(1)), "{}", name(&told));
        node.silence();
    }
    let (node, mut control, lanes) = opening_tcp(2, 1);
    let held = hold_service();
    drop(lanes);
    say(&mut control, REFUSE, b"the cause");
    drop(held);
    let why = node.refusal();
    assert!(why.text().ends_with(": the cause"), "{why}");
}

#[test]
fn a_peer_that_leaves_has_left_also_where_this_rank_lacks_something_for_the_link() {
    let (node, mut peer, last) = greeting_local(Options { segment_bytes: 0, ..over(LinkKind::Shm) });
    let held = hold_service();
    peer.write_all(&last).unwrap();
    say(&mut peer, MESSAGE, b"why");
    say(&mut peer, GOODBYE, b"");
    drop(held);
    assert!(matches!(node.next(), Told::Control(1, message) if message == b"why"));
    let told = node.next();
    assert!(matches!(told, Told::Left(1)), "{}", name(&told));
    node.silence();
}

/// Rank 0 that lacks what its own attempt takes, while the only data connection of the peer's is missing: when
/// that failed, and the peer's control connection.
fn lacking_while_the_peer_opens() -> (Node, Instant, TcpStream) {
    // As it does without descriptors, but for the room for a ring alone.
    let (node, mut local, last) = greeting_local(Options { segment_bytes: 0, ..small() });
    let mut control = TcpStream::connect(tcp_address(&node)).unwrap();
    control.set_read_timeout(Some(LONG)).unwrap();
    initiate(&mut control);
    say(&mut control, SETUP, &setup(Data::Tcp { lanes: 1 }));
    catch_up(&node);
    let failed = Instant::now();
    local.write_all(&last).unwrap();
    assert_eq!(hear(&mut local).0, REFUSE);
    (node, failed, control)
}

#[test]
fn a_rank_that_lacks_descriptors_does_not_wait_for_connections_that_it_cannot_take() {
    let (node, failed, mut control) = lacking_while_the_peer_opens();
    let why = node.refusal();
    let waited = failed.elapsed();
    assert_eq!(why.status(), Status::System);
    assert!(why.text().contains("rank 0 lacks what a link to rank 1"), "{why}");
    assert!(waited < LONG / 4, "{waited:?}");
    let hears_why = |control: &mut TcpStream| {
        let (kind, text) = hear(control);
        let text = String::from_utf8(text).unwrap();
        assert_eq!(kind, REFUSE, "{text}");
        assert!(text.contains("rank 0 lacks what a link to rank 1"), "{text}");
    };
    hears_why(&mut control);
    // At another address.
    let mut control = TcpStream::connect(tcp_address(&node)).unwrap();
    control.set_read_timeout(Some(LONG)).unwrap();
    initiate(&mut control);
    say(&mut control, SETUP, &setup(Data::Tcp { lanes: 1 }));
    hears_why(&mut control);
}

#[test]
fn a_rank_that_lacks_descriptors_waits_a_moment_for_some_to_come_back() {
    for _ in 0..20 {
        let (node, failed, _control) = lacking_while_the_peer_opens();
        let mut lane = TcpStream::connect(tcp_address(&node)).unwrap();
        lane.set_read_timeout(Some(LONG)).unwrap();
        initiate_as(1, Purpose::Data(0), &mut lane);
        match node.next() {
            Told::Opened(1, _) => return,
            // On a busy machine the moment may be over before.
            told => assert!(failed.elapsed() >= Duration::from_secs(1), "{}", name(&told)),
        }
    }
    panic!("it never waits");
}

#[test]
fn who_is_refused_hears_first_what_is_announced() {
    let (opening, mut asked) = opening_local();
    assert_eq!(hear(&mut asked).0, SETUP);
    let opened = Node::new(0, 2, 1, over(LinkKind::Shm));
    let asking = initiate_local(&opened);
    for (node, mut peer) in [(opening, asked), (opened, asking)] {
        node.registration.announce(Arc::from([1]), b"news".to_vec());
        catch_up(&node);
        say(&mut peer, SETUP, &useless());
        assert_eq!(hear(&mut peer), (MESSAGE, b"news".into()));
        assert_eq!(hear(&mut peer).0, REFUSE);
    }
}

/// Rank 0 that has given up what it tried to open to a rank 1 first, and tries an address where nobody
/// answers; the control connection of what is given up.
fn given_up_for_another_address() -> (Node, TcpStream, std::net::TcpListener) {
    let mute = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (node, mut control, lanes) = opening_tcp_or(2, 1, vec![mute.local_addr().unwrap()]);
    node.registration.announce(Arc::from([1]), b"news".to_vec());
    catch_up(&node);
    drop(lanes);
    assert_eq!(hear(&mut control), (MESSAGE, b"news".into()));
    assert_eq!(hear(&mut control).0, REFUSE);
    (node, control, mute)
}

#[test]
fn a_peer_that_leaves_is_heard_once_also_on_what_is_given_up() {
    let (node, mut control, _mute) = given_up_for_another_address();
    say(&mut control, MESSAGE, b"why");
    assert!(matches!(node.next(), Told::Control(1, message) if message == b"why"));
    let mut second = TcpStream::connect(tcp_address(&node)).unwrap();
    initiate(&mut second);
    catch_up(&node);
    let held = hold_service();
    say(&mut second, GOODBYE, b"");
    say(&mut control, GOODBYE, b"");
    drop(held);
    let told = node.next();
    assert!(matches!(told, Told::Left(1)), "{}", name(&told));
    node.silence();
}

#[test]
fn where_another_link_is_open_nothing_counts_that_comes_on_what_is_given_up() {
    let (node, mut control, _mute) = given_up_for_another_address();
    let [mut second, mut lane] = [(); 2].map(|()| TcpStream::connect(tcp_address(&node)).unwrap());
    initiate(&mut second);
    say(&mut second, SETUP, &setup(Data::Tcp { lanes: 1 }));
    initiate_as(1, Purpose::Data(0), &mut lane);
    let _link = node.link(1);
    say(&mut control, MESSAGE, b"why");
    say(&mut control, GOODBYE, b"");
    node.silence();
    say(&mut second, GOODBYE, b"");
    assert!(matches!(node.next(), Told::Left(1)));
}

#[test]
fn what_a_peer_has_said_goes_before_a_doubt_however_many_others_have_said_something() {
    const OTHERS: u32 = 200;
    let (node, mut control, mut lanes) = opening_tcp(2 + OTHERS, 1);
    let [(lane, last)] = &mut lanes[..] else { panic!("one lane") };
    lane.write_all(last).unwrap();
    say(&mut control, SETUP, &setup(Data::Tcp { lanes: 1 }));
    let _link = node.link(1);
    let mut others: Vec<TcpStream> =
        (0..=OTHERS).map(|_| TcpStream::connect(tcp_address(&node)).unwrap()).collect();
    // All have been accepted when the last is answered.
    let last = others.last_mut().unwrap();
    last.set_read_timeout(Some(LONG)).unwrap();
    initiate_as(2, Purpose::Control, last);
    node.registration.doubt(1, Error::new(Status::PeerFailed, "a stream was reset"));
    let held = hold_service();
    for other in &mut others {
        other.write_all(&[0]).unwrap();
    }
    say(&mut control, MESSAGE, b"the cause");
    // The doubt's time is over before anybody has looked.
    thread::sleep(Duration::from_millis(150));
    drop(held);
    match node.next() {
        Told::Control(1, message) => assert_eq!(message, b"the cause"),
        other => panic!("{}", name(&other)),
    }
}

#[test]
fn a_ring_that_a_peer_was_told_of_is_not_used_again_when_its_answer_is_of_no_use() {
    let (node, mut peer) = opening_local();
    let (kind, payload) = hear(&mut peer);
    let Some(Setup { data: Data::Shm { ring_offset, ring_bytes, .. }, .. }) = Setup::decode(&payload) else {
        panic!("a frame of kind {kind}")
    };
    say(&mut peer, SETUP, &useless());
    assert!(node.refusal().text().contains("descriptors"));
    let segment = node.registration.segment();
    let rings: Vec<RingMemory> =
        std::iter::from_fn(|| RingMemory::allocate(segment, ring_bytes as usize)).collect();
    assert!(!rings.is_empty());
    assert!(rings.iter().all(|ring| ring.offset() as u64 != ring_offset), "the peer may still write there");
}

#[test]
fn all_ranks_of_a_large_job_may_connect_at_once() {
    const RANKS: u32 = 200;
    let node = Node::new(0, RANKS, 1, Options { tcp_streams: Some(1), ..over(LinkKind::Tcp) });
    let mut crowd: Vec<TcpStream> =
        (1..RANKS + 100).map(|_| TcpStream::connect(tcp_address(&node)).unwrap()).collect();
    // All have been accepted when the last is answered. The first has its place still.
    let last = crowd.len() - 1;
    for place in [last, 0] {
        crowd[place].set_read_timeout(Some(LONG)).unwrap();
        initiate(&mut crowd[place]);
    }
}

#[test]
fn a_link_that_does_not_open_is_told_of_as_long_as_it_is_waited_for() {
    // Of two that open at once, the higher rank answers the lower.
    let [b, a] = pair(over(LinkKind::Tcp));
    let mute = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut address = b.registration.address().clone();
    address.addresses = vec![mute.local_addr().unwrap()];
    a.registration.open(address, Deadline::NEVER);
    let deadline = Deadline::after(LONG);
    let told = loop {
        match a.registration.refusal(LONG) {
            Some(told) => break told,
            None => thread::sleep(Duration::from_millis(10)),
        }
        assert!(!deadline.expired(), "nothing is told");
    };
    assert!(told.contains("rank 0") && told.contains("no answer yet"), "{told}");
    b.open(a.registration.address());
    let _links = (a.link(0), b.link(1));
    assert_eq!(a.registration.refusal(LONG), None);
}
