//! What TCP carries from each rank to the next, all at the same time, without the library.
//!
//! A rank has as many threads for it as its host has processors for each of its ranks. Each moves its own
//! connections, both ways, and looks again and again while there is nothing to move: what is timed is neither
//! how threads begin nor how they wake. What they write and read stays in the cache, so that the connections
//! are measured by themselves, or is as much memory as messages have.

#![forbid(unsafe_code)]

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

use super::seat::{Seat, combine, gather};
use crate::communicator::Context;
use crate::deadline::Deadline;
use crate::error::{Error, Result, fail};
use crate::reduce::Operator;
use crate::rendezvous::interface::Interface;
use crate::settings;
use crate::sys::child::{self, Readiness};

/// Connections of each thread.
const CONNECTIONS: usize = 2;
/// The most threads of a rank, as many as the library's.
const MOST_THREADS: usize = 8;
/// What is written or read at once.
const PIECE: usize = 128 << 10;
/// A thread that has had nothing to move for so long sleeps until there is.
const PATIENCE: Duration = Duration::from_micros(100);

/// Where what is written comes from, and what is read goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Memory {
    /// The same piece again and again, which stays in the cache.
    Cached,
    /// A message of so many bytes, and another, which are moved whole before they are moved again.
    Messages(usize),
}

/// A rank's threads for it: the one that calls, and others that wait for what it tells them.
pub(super) struct Ring {
    own: Mover,
    others: Vec<Sender<usize>>,
    done: Receiver<io::Result<()>>,
}

impl Ring {
    /// Connects all ranks. `hosts` has a number for the host of each. The threads end with the ring.
    pub(super) fn open<'scope>(
        scope: &'scope Scope<'scope, '_>,
        context: &Context,
        seat: &Seat,
        hosts: &[u64],
        memory: Memory,
        timeout: Duration,
    ) -> Result<Ring> {
        let local = hosts.iter().filter(|&&host| host == hosts[seat.rank as usize]).count();
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let mut threads = [(processors / local).clamp(1, MOST_THREADS) as u64];
        // As many connections on both sides.
        combine(context, Operator::Min, &mut threads)?;
        let (to, from) = connect(context, seat, hosts, CONNECTIONS * threads[0] as usize, timeout)?;
        let (finished, done) = channel();
        let (mut to, mut from) = (to.into_iter(), from.into_iter());
        let mut movers = (0..threads[0]).map(|_| {
            let (to, from) = (to.by_ref().take(CONNECTIONS), from.by_ref().take(CONNECTIONS));
            let room = match memory {
                Memory::Cached => None,
                Memory::Messages(bytes) => Some(bytes.div_ceil(CONNECTIONS * threads[0] as usize)),
            };
            Mover::new(to.collect(), from.collect(), room, timeout)
        });
        let Some(own) = movers.next() else { fail!(Internal, "a ring without a thread") };
        let others = movers.map(|mover| {
            let (teller, told) = channel();
            let finished = finished.clone();
            scope.spawn(move || mover.serve(&told, &finished));
            teller
        });
        Ok(Ring { own, others: others.collect(), done })
    }

    /// Sends and receives about `bytes` bytes, a share over each connection.
    pub(super) fn pass(&mut self, bytes: usize) -> Result<()> {
        let share = bytes.div_ceil(CONNECTIONS * (1 + self.others.len()));
        let broke = |cause| Error::system("links: a connection broke", cause);
        for other in &self.others {
            // One that has ended says so below.
            let _ = other.send(share);
        }
        let mut outcome = self.own.pass(share);
        for _ in &self.others {
            outcome = outcome.and(self.done.recv().unwrap_or_else(|_| Err(ErrorKind::Other.into())));
        }
        outcome.map_err(broke)
    }
}

/// Connections of one thread.
struct Mover {
    to: Vec<TcpStream>,
    from: Vec<TcpStream>,
    /// What is written and what is read: of each connection so many bytes, or one piece for all.
    written: Vec<u8>,
    read: Vec<u8>,
    room: Option<usize>,
    timeout: Duration,
}

impl Mover {
    fn new(to: Vec<TcpStream>, from: Vec<TcpStream>, room: Option<usize>, timeout: Duration) -> Mover {
        let bytes = room.map_or(PIECE, |room| room * CONNECTIONS);
        Mover { to, from, written: vec![1; bytes], read: vec![1; bytes], room, timeout }
    }

    /// Passes what it is told to, until nobody tells it more. It does not sleep in between.
    fn serve(mut self, told: &Receiver<usize>, finished: &Sender<io::Result<()>>) {
        loop {
            match told.try_recv() {
                Ok(share) => {
                    // Whoever listens has gone only if the ring has failed.
                    let _ = finished.send(self.pass(share));
                }
                Err(TryRecvError::Empty) => thread::yield_now(),
                Err(TryRecvError::Disconnected) => return,
            }
        }
    }

    /// Sends and receives `share` bytes over each connection.
    fn pass(&mut self, share: usize) -> io::Result<()> {
        let Mover { to, from, written, read, room, timeout } = self;
        let (mut unsent, mut missing) = ([share; CONNECTIONS], [share; CONNECTIONS]);
        let mut moved = Instant::now();
        loop {
            let mut any = false;
            // First all that has come: of what is under way little is then out of the cache.
            for (connection, (stream, left)) in from.iter_mut().zip(&mut missing).enumerate() {
                while advance(left, share, *room, connection, |piece| stream.read(&mut read[piece]))? {
                    any = true;
                }
            }
            for (connection, (stream, left)) in to.iter_mut().zip(&mut unsent).enumerate() {
                any |= advance(left, share, *room, connection, |piece| stream.write(&written[piece]))?;
            }
            if unsent.iter().chain(&missing).all(|&left| left == 0) {
                return Ok(());
            }
            if any {
                moved = Instant::now();
            } else if moved.elapsed() < PATIENCE {
                thread::yield_now();
            } else {
                let to = to.iter().zip(&unsent).map(|waits| (waits, Readiness::Write));
                let from = from.iter().zip(&missing).map(|waits| (waits, Readiness::Read));
                let waits = to.chain(from).filter(|((_, left), _)| **left > 0);
                let waits: Vec<_> = waits.map(|((stream, _), what)| (stream.as_fd(), what)).collect();
                let deadline = Deadline::since(moved, *timeout);
                if !child::poll(&waits, deadline)?.contains(&true) && deadline.expired() {
                    return Err(ErrorKind::TimedOut.into());
                }
            }
        }
    }
}

/// Has up to a piece of what is `left` of a connection's share moved by `call`, which is told where the piece
/// lies. Answers whether something was.
fn advance(
    left: &mut usize,
    share: usize,
    room: Option<usize>,
    connection: usize,
    call: impl FnOnce(Range<usize>) -> io::Result<usize>,
) -> io::Result<bool> {
    if *left == 0 {
        return Ok(false);
    }
    let piece = match room {
        None => 0..PIECE.min(*left),
        Some(room) => {
            let at = (share - *left) % room;
            let start = connection * room + at;
            start..start + PIECE.min(*left).min(room - at)
        }
    };
    match call(piece) {
        Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
        Ok(moved) => {
            *left -= moved;
            Ok(true)
        }
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(false),
        Err(error) => Err(error),
    }
}

/// So many connections to the next rank, and as many from the one before.
fn connect(
    context: &Context,
    seat: &Seat,
    hosts: &[u64],
    count: usize,
    timeout: Duration,
) -> Result<(Vec<TcpStream>, Vec<TcpStream>)> {
    let interface = Interface::choose(settings::get("UNISONO_INTERFACE").as_deref())?;
    let address = interface.addresses.iter().find_map(|address| match address {
        IpAddr::V4(address) => Some(*address),
        IpAddr::V6(_) => None,
    });
    // Good for ranks of this host.
    let address = address.unwrap_or(Ipv4Addr::LOCALHOST);
    let listener = TcpListener::bind((address, 0)).map_err(failed("cannot listen"))?;
    let port = listener.local_addr().map_err(failed("cannot listen"))?.port();
    let places = gather(context, seat, u64::from(u32::from(address)) << 16 | u64::from(port))?;
    let place = |rank: u32| {
        let place = places[rank as usize];
        SocketAddr::from((Ipv4Addr::from((place >> 16) as u32), place as u16))
    };
    let far = hosts.iter().any(|host| *host != hosts[0]);
    if far && let Some(rank) = (0..seat.size).find(|&rank| place(rank).ip().is_loopback()) {
        fail!(
            Unsupported,
            "links: the interface of rank {rank} has no IPv4 address that other hosts reach; name one by \
             UNISONO_INTERFACE"
        );
    }
    let (next, previous) = ((seat.rank + 1) % seat.size, (seat.rank + seat.size - 1) % seat.size);
    // The other's backlog takes them: it need not have come to its accept.
    let dial = |_| TcpStream::connect_timeout(&place(next), timeout).map_err(failed("cannot connect"));
    let to = (0..count).map(dial).collect::<Result<Vec<_>>>()?;
    let from = accept(&listener, previous, count, timeout)?;
    for stream in to.iter().chain(&from) {
        let set = stream.set_nodelay(true).and_then(|()| stream.set_nonblocking(true));
        set.map_err(failed("cannot set up a connection"))?;
    }
    Ok((to, from))
}

/// Accepts so many connections, which are `rank`'s.
fn accept(listener: &TcpListener, rank: u32, count: usize, timeout: Duration) -> Result<Vec<TcpStream>> {
    // One that is gone again before it is accepted holds up nobody.
    listener.set_nonblocking(true).map_err(failed("cannot listen"))?;
    let deadline = Deadline::after(timeout);
    let mut accepted = Vec::new();
    while accepted.len() < count {
        match listener.accept() {
            Ok((stream, _)) => accepted.push(stream),
            Err(cause) if cause.kind() != ErrorKind::WouldBlock => {
                return Err(failed("cannot accept")(cause));
            }
            Err(_) if deadline.expired() => {
                fail!(Timeout, "links: rank {rank} has not connected within {timeout:?}")
            }
            Err(_) => {
                child::poll(&[(listener.as_fd(), Readiness::Read)], deadline)
                    .map_err(failed("cannot accept"))?;
            }
        }
    }
    Ok(accepted)
}

fn failed(what: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |cause| Error::system(format!("links: {what}"), cause)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_does_not_connect_is_not_waited_for_longer_than_the_timeout() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("loopback is up");
        // One of two.
        let _one = TcpStream::connect(listener.local_addr().expect("it listens")).expect("it listens");
        let error = accept(&listener, 3, 2, Duration::from_millis(50)).expect_err("there is no second");
        assert!(error.text().contains("rank 3 has not connected within 50ms"), "{error}");
    }

    #[test]
    fn what_is_passed_arrives_and_what_does_not_come_is_told() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("loopback is up");
        let place = listener.local_addr().expect("it listens");
        let connect = |_| TcpStream::connect(place).expect("it listens");
        let minute = Duration::from_secs(60);
        let to: Vec<_> = (0..CONNECTIONS).map(connect).collect();
        let from = accept(&listener, 0, CONNECTIONS, minute).expect("they connected");
        for stream in to.iter().chain(&from) {
            stream.set_nonblocking(true).expect("it is a socket");
        }
        // More than the kernel keeps.
        let mut mover = Mover::new(to, from, Some(3 << 20), minute);
        mover.pass(16 << 20).expect("it receives what it sends");
        let to = std::mem::take(&mut mover.to);
        mover.timeout = Duration::from_millis(50);
        assert_eq!(mover.pass(1).expect_err("nobody sends").kind(), ErrorKind::TimedOut);
        drop(to);
        assert_eq!(mover.pass(1).expect_err("nobody can").kind(), ErrorKind::UnexpectedEof);
    }
}
