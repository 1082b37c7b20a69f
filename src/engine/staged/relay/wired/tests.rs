//! The movers of one rank of two. The test has the other ends of their connections.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::thread::JoinHandle;

use socket2::Socket;

use super::super::lanes::{Lanes, Seat};
use super::super::making::{Making, NEVER, READY};
use super::*;
use crate::cuda::double::{Double, Order};
use crate::engine::endpoint::Endpoint;
use crate::rendezvous::secret::SecretKey;
use crate::sys::epoll::{Epoll, Interest};
use crate::sys::fork::Unshared;
use crate::transport::service::hold_service;

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(20);

/// The rank at the other ends.
const OTHER: usize = 1;

/// A hub without a group, and the connections to the other rank.
fn hub() -> (Arc<Hub>, Vec<Socket>, Vec<TcpStream>) {
    hub_of(Weak::new())
}

fn hub_of(endpoint: Weak<Endpoint>) -> (Arc<Hub>, Vec<Socket>, Vec<TcpStream>) {
    let hub = Hub::new(Crew::all(0, 2), Visitor::of(&endpoint), false).expect("descriptors");
    let devices = Devices::over(Double::new(1, Order::Eager)).expect("a driver");
    let memory = RegisteredBuffer::new(&devices, 0, 2 * BYTES).expect("memory");
    let memory = Quietly::new(&devices, memory);
    let _ = hub.memory.set(Arc::new(Aside::new(memory, "the test's memory")));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let pair = |_| {
        let there = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
        let (here, _) = listener.accept().expect("a connection");
        here.set_nonblocking(true).expect("a socket");
        (Socket::from(here), there)
    };
    let (here, there) = (0..CONNECTIONS).map(pair).unzip();
    (Arc::new(hub), here, there)
}

fn identity() -> Identity {
    Identity { rank: 0, size: 2, secret: SecretKey::new([1; 32]), job: 9 }
}

fn endpoint() -> Arc<Endpoint> {
    Endpoint::new(identity(), Options::default()).expect("an endpoint")
}

/// A mover's only connection.
fn to_other(socket: Socket) -> Sockets {
    vec![None, Some(Arc::new(Unshared::new(socket)))]
}

/// Starts one mover for each connection.
fn begin(hub: &Arc<Hub>, here: Vec<Socket>) -> Movers {
    let movers = here.into_iter().enumerate().map(|(number, socket)| {
        let mover = Mover::new(hub, number, to_other(socket)).expect("descriptors");
        let hub = hub.clone();
        std::thread::spawn(move || serve(&hub, mover))
    });
    Movers(hub.clone(), movers.collect())
}

/// They end with the test, however it ends.
struct Movers(Arc<Hub>, Vec<JoinHandle<()>>);

impl Drop for Movers {
    fn drop(&mut self) {
        self.0.close();
        self.1.drain(..).for_each(|mover| mover.join().expect("a mover ends well"));
    }
}

/// The first or the second half of a piece, which the other rank has given.
fn half(piece: u64, second: bool) -> Vec<u8> {
    let offset = if second { 8 } else { 0 };
    let frame = Frame { mark: Mark::Given, piece, offset, length: 8, whole: 16 };
    [&frame.encode()[..], &[piece as u8; 8]].concat()
}

/// What says that a rank is done with a piece.
fn done(piece: u64) -> Frame {
    Frame { mark: Mark::Done, piece, offset: 0, length: 0, whole: 0 }
}

/// The other rank is to be told that this one is done with a piece.
fn tell_done(hub: &Hub, piece: u64) {
    let account = Account::Told(hub.told.clone(), piece + 1);
    // SAFETY: it has no bytes.
    let parcel = unsafe { Parcel::new(done(piece), hub.lane(0, 0), OTHER, account) };
    hub.post(DONE, OTHER, std::iter::once(parcel));
    hub.ring(Mark::Done);
}

fn is_told(hub: &Hub, piece: u64) -> bool {
    hub.told[OTHER].load(Ordering::Acquire) > piece
}

fn has_come(hub: &Hub, mark: Mark, piece: u64) -> bool {
    hub.coming(OTHER, mark, piece).seen.load(Ordering::Acquire) > piece
}

fn wait_until(what: &str, mut there: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !there() {
        assert!(Instant::now() < until, "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn a_rank_that_leaves_may_have_bytes_on_their_way_for_as_long_as_they_take() {
    use std::io::Write;
    let (hub, here, mut there) = hub();
    let _movers = begin(&hub, here);
    there[0].write_all(&half(0, false)).expect("it is written");
    // The one that carries little ends first, and one more.
    there.pop();
    there.pop();
    wait_until("two ends", || hub.ends[OTHER].open.load(Ordering::Acquire) == CONNECTIONS - 2);
    std::thread::sleep(2 * DOUBT);
    assert_eq!(hub.end(OTHER, None), None);
    there[1].write_all(&half(0, true)).expect("it is written");
    wait_until("the piece", || has_come(&hub, Mark::Given, 0));
    assert_eq!(hub.end(OTHER, None), None);
    drop(there);
    wait_until("the end", || hub.end(OTHER, None).is_some());
}

#[test]
fn what_others_have_said_goes_before_the_end_of_connections_however_late_it_is_read() {
    let endpoint = endpoint();
    let (hub, _here, _there) = hub_of(Arc::downgrade(&endpoint));
    let held = hold_service();
    let long_ago = Instant::now().checked_sub(2 * DOUBT).expect("the machine has run for longer");
    let _ = hub.ends[OTHER].cut.set(Cut::new(long_ago, &ErrorKind::ConnectionReset.into()));
    assert_eq!(hub.end(OTHER, None), None);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(hub.end(OTHER, None), None);
    drop(held);
    wait_until("the end", || hub.end(OTHER, None).is_some());
}

#[test]
fn no_mover_has_the_endpoint_any_more_when_the_program_has_let_go_of_it() {
    for _ in 0..100 {
        let endpoint = endpoint();
        let (this, parting) = (Arc::downgrade(&endpoint), endpoint.registration().parting());
        let hub = Hub::new(Crew::all(0, 2), Visitor::of(&this), false).expect("descriptors");
        let (begun, over) = (AtomicBool::new(false), AtomicBool::new(false));
        let mover = || {
            while !over.load(Ordering::Relaxed) {
                hub.rouse();
                begun.store(true, Ordering::Relaxed);
            }
        };
        let held = std::thread::scope(|scope| {
            scope.spawn(mover);
            wait_until("a beginning", || begun.load(Ordering::Relaxed));
            drop(endpoint);
            drop(parting);
            let held = this.strong_count() > 0;
            over.store(true, Ordering::Relaxed);
            held
        });
        assert!(!held);
    }
}

#[test]
fn a_connection_that_breaks_takes_the_others_with_it() {
    use std::io::{Read, Write};
    let (hub, here, mut there) = hub();
    let _movers = begin(&hub, here);
    // No frame has so many bytes.
    let wrong = Frame { length: u32::MAX, ..done(0) };
    there[3].write_all(&wrong.encode()).expect("it is written");
    for connection in &mut there {
        connection.set_read_timeout(Some(PATIENCE)).expect("a socket");
        assert_eq!(connection.read(&mut [0]).expect("its end"), 0);
    }
    wait_until("the end", || hub.end(OTHER, None).is_some());
}

#[test]
fn what_a_rank_has_told_before_it_left_counts_whatever_is_written_to_it_then() {
    use std::io::Write;
    let (hub, mut here, mut there) = hub();
    let mut other = there.pop().expect("a connection");
    for piece in 0..3 {
        other.write_all(&done(piece).encode()).expect("it is written");
    }
    // It ends without having read what has been told to it: its system says so at once.
    here[DONE].write_all(&done(0).encode()).expect("it is written");
    let refused = Epoll::new().expect("a descriptor");
    let nothing = Interest { read: false, write: false, close: false, once: false };
    refused.watch(here[DONE].as_fd(), 0, nothing).expect("it is watched");
    drop(other);
    let mut told = false;
    refused.wait(Some(PATIENCE), |event| told = event.closed).expect("an answer");
    assert!(told, "it is not told");
    tell_done(&hub, 1);
    let _movers = begin(&hub, here);
    wait_until("the last mark", || has_come(&hub, Mark::Done, 2));
    wait_until("nobody waits for what was to go there", || is_told(&hub, 1));
    // The others are as they were.
    wait_until("an end", || hub.ends[OTHER].open.load(Ordering::Acquire) == CONNECTIONS - 1);
    assert!(!hub.is_cut(OTHER));
}

#[test]
fn whoever_waits_for_a_lane_learns_of_the_end_of_what_would_tell_it_alone() {
    use std::io::Write;
    let (hub, here, mut there) = hub();
    let _movers = begin(&hub, here);
    // It is reset, not closed.
    let other = Socket::from(there.pop().expect("a connection"));
    other.set_linger(Some(Duration::ZERO)).expect("a socket");
    drop(other);
    let check = |mark| hub.check(OTHER, mark, |rank| format!("rank {rank}"));
    wait_until("the end", || check(Some(Mark::Done)).is_err());
    let error = check(Some(Mark::Done)).expect_err("it stays so");
    assert_eq!(error.status(), Status::PeerFailed);
    assert!(error.text().starts_with("rank 1 has left, or a connection to it broke: "), "{error}");
    // Data comes as before.
    assert!(!hub.is_cut(OTHER));
    there[0].write_all(&half(0, false)).expect("it is written");
    there[1].write_all(&half(0, true)).expect("it is written");
    wait_until("the piece", || has_come(&hub, Mark::Given, 0));
    assert_eq!((check(Some(Mark::Given)), check(None)), (Ok(()), Ok(())));
}

#[test]
fn movers_that_lack_something_do_not_begin() {
    let (hub, mut here, there) = hub();
    // The kernel watches no files.
    let file = std::fs::File::open("/proc/self/exe").expect("a file");
    here[DONE] = Socket::from(std::os::fd::OwnedFd::from(file));
    let refused = hub.begin(here.into_iter().map(to_other).collect()).expect_err("one cannot watch");
    assert_eq!(refused.status(), Status::System);
    assert!(refused.text().starts_with("no descriptors for a group's movers: "), "{refused}");
    assert_eq!(Arc::strong_count(&hub), 1, "none has begun");
    drop(there);
}

#[test]
fn what_a_mover_leaves_behind_keeps_no_call_waiting() {
    let (hub, mut here, there) = hub();
    here.pop();
    tell_done(&hub, 0);
    assert!(!is_told(&hub, 0));
    let _movers = begin(&hub, here);
    hub.gave_up(DONE, &ErrorKind::OutOfMemory.into());
    wait_until("what was posted before", || is_told(&hub, 0));
    tell_done(&hub, 1);
    wait_until("what is posted behind that", || is_told(&hub, 1));
    // The other rank has no part in it.
    let error = hub.check(OTHER, None, |_| unreachable!()).expect_err("nothing moves");
    assert_eq!(error.status(), Status::System);
    assert_eq!(error.text(), "a thread that moves pieces for rank 0 has ended: out of memory");
    wait_until("the end", || hub.end(OTHER, None).is_some());
    drop(there);
}

#[test]
fn lanes_that_nothing_comes_to_any_more_are_said_to_be_none() {
    let (hub, ..) = hub();
    let port = Arc::downgrade(&hub) as Weak<dyn Port>;
    let registration = Registration::new(identity(), Options::default(), port).expect("a registration");
    let wire = Wire { hub: hub.clone(), registration: Aside::new(registration, "the test's connections") };
    let seat = Seat::new(Crew::all(0, 2));
    *seat.making() = Making::Underway(Arc::new(Some(Arc::new(Lanes::Wired(wire))).into()));
    assert_eq!(seat.says(), READY);
    hub.gave_up(0, &ErrorKind::OutOfMemory.into());
    assert_eq!(seat.says(), NEVER);
}

fn asleep(hub: &Hub) -> usize {
    hub.bells[..CARRIERS].iter().filter(|bell| bell.is_parked()).count()
}

#[test]
fn movers_that_sleep_wake_each_other() {
    let (hub, here, _there) = hub();
    let _movers = begin(&hub, here);
    wait_until("sleep", || asleep(&hub) == CARRIERS);
    // Those who wake stay so.
    hub.held.store(Held::All as u8, Ordering::Relaxed);
    hub.ring(Mark::Given);
    wait_until("all of them", || asleep(&hub) == 0);
}

#[test]
fn movers_that_find_nothing_to_do_leave_each_other_asleep() {
    let (mut hub, here, _there) = hub();
    // They sleep again at once.
    Arc::get_mut(&mut hub).expect("nobody else has it").crowded = true;
    let _movers = begin(&hub, here);
    wait_until("sleep", || asleep(&hub) == CARRIERS);
    let woken = |carrier: &Bell| carrier.woken();
    for _ in 0..10 {
        let before: Vec<usize> = hub.bells[..CARRIERS].iter().map(woken).collect();
        hub.ring(Mark::Given);
        // All of them have looked, though the first sleep before the last wake.
        let times = || hub.bells[..CARRIERS].iter().map(woken).zip(&before).map(|(now, before)| now - before);
        wait_until("all of them", || times().all(|times| times > 0));
        std::thread::sleep(Duration::from_millis(20));
        wait_until("sleep", || asleep(&hub) == CARRIERS);
        assert!(times().sum::<usize>() <= WOKEN * (CARRIERS + 1), "{:?}", times().collect::<Vec<_>>());
    }
}
