//! The ids that this process has made, and how long it serves them.
//!
//! The server of an id lives until the first meeting by it is over, and then as long as what was made there.
//! Where that is nothing it goes on for a while: its store says why, for ranks that come late, or have yet to
//! look. A process that makes ids for others, and is no rank of theirs, hears of no meeting: it serves an id
//! for a while after the last rank has gone from there.

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::{ID_BYTES, UniqueId};
use crate::error::Result;
use crate::rendezvous::tcp_server::ServerHandle;
use crate::sys::global::Global;

/// How many meetings that have failed are served at most: those of a process that tries again and again would
/// be without number.
const MOST_FAILED: usize = 8;
/// How long a meeting that has failed is served at least, unless so many have failed since, and one of others
/// after they have gone. Ranks that wait look every 16 s or more often for why another cannot join.
const AFTERWARDS: Duration = Duration::from_secs(60);

static IDS: Global<Ids> = Global::new(Ids { served: Vec::new(), failed: VecDeque::new() });

/// Makes an id, of `interface` as in [`UniqueId::create`], and serves it.
pub fn create(interface: Option<&str>) -> Result<[u8; ID_BYTES]> {
    let (id, server) = UniqueId::create(interface)?;
    let bytes = id.to_bytes();
    let ended = IDS.write().add(bytes, Arc::new(server), Instant::now());
    // Not under the lock: whoever drops the last of a server waits for its thread.
    drop(ended);
    Ok(bytes)
}

/// The server of an id, if this process serves it.
pub fn server(bytes: &[u8; ID_BYTES]) -> Option<Arc<ServerHandle>> {
    IDS.read().server(bytes)
}

/// A meeting by the ids of these servers is over; the ranks met by the first. If it has ended well, they live
/// as long as somebody keeps them from now on, else for a while in any case.
pub fn is_over(servers: &[Arc<ServerHandle>], well: bool) {
    let ended = IDS.write().is_over(servers, well, Instant::now());
    // As above.
    drop(ended);
}

/// Nobody will meet by an id: it is served no more, unless a meeting by it has begun.
pub fn release(bytes: &[u8; ID_BYTES]) {
    let ended = IDS.write().release(bytes);
    // As above.
    drop(ended);
}

#[derive(Default)]
struct Ids {
    served: Vec<Served>,
    /// Meetings that have failed, the last one last. Each server is here once.
    failed: VecDeque<Failed>,
}

struct Served {
    bytes: [u8; ID_BYTES],
    server: Weak<ServerHandle>,
    /// Keeps the server until the first meeting is over.
    unmet: Option<Arc<ServerHandle>>,
}

struct Failed {
    server: Arc<ServerHandle>,
    at: Instant,
}

/// What is given back is to be dropped where nothing is locked.
impl Ids {
    fn add(
        &mut self,
        bytes: [u8; ID_BYTES],
        server: Arc<ServerHandle>,
        now: Instant,
    ) -> Vec<Arc<ServerHandle>> {
        self.served.push(Served { bytes, server: Arc::downgrade(&server), unmet: Some(server) });
        self.let_go(now)
    }

    fn server(&self, bytes: &[u8; ID_BYTES]) -> Option<Arc<ServerHandle>> {
        self.served.iter().find(|served| served.bytes == *bytes)?.server.upgrade()
    }

    fn release(&mut self, bytes: &[u8; ID_BYTES]) -> Option<Arc<ServerHandle>> {
        self.served.iter_mut().find(|served| served.bytes == *bytes)?.unmet.take()
    }

    fn is_over(&mut self, servers: &[Arc<ServerHandle>], well: bool, now: Instant) -> Vec<Arc<ServerHandle>> {
        let is_of_these = |one: &mut Arc<ServerHandle>| servers.iter().any(|other| Arc::ptr_eq(one, other));
        let mut ended: Vec<_> =
            self.served.iter_mut().filter_map(|served| served.unmet.take_if(is_of_these)).collect();
        if !well {
            // The ranks meet by the first: it is kept the longest.
            for server in servers.iter().rev() {
                self.failed.retain(|failed| !Arc::ptr_eq(&failed.server, server));
                self.failed.push_back(Failed { server: server.clone(), at: now });
            }
        }
        ended.extend(self.let_go(now));
        ended
    }

    /// Forgets what nobody needs any more.
    fn let_go(&mut self, now: Instant) -> Vec<Arc<ServerHandle>> {
        let is_long_ago = |since: Instant| now.saturating_duration_since(since) >= AFTERWARDS;
        let is_left = |server: &mut Arc<ServerHandle>| server.deserted_since().is_some_and(is_long_ago);
        let left: Vec<_> =
            self.served.iter_mut().filter_map(|served| served.unmet.take_if(is_left)).collect();
        self.served.retain(|served| served.server.strong_count() > 0);
        let is_old = |failed: &&Failed| is_long_ago(failed.at);
        let old = self.failed.iter().take_while(is_old).count();
        let too_many = self.failed.len().saturating_sub(MOST_FAILED);
        let failed = self.failed.drain(..old.max(too_many)).map(|failed| failed.server);
        left.into_iter().chain(failed).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::slice::from_ref;

    use super::*;
    use crate::deadline::Deadline;
    use crate::rendezvous::tcp::TcpStore;

    const SECOND: Duration = Duration::from_secs(1);

    /// Ids that differ from each other, which is all that matters here.
    fn id(number: u8) -> [u8; ID_BYTES] {
        [number; ID_BYTES]
    }

    fn another() -> Arc<ServerHandle> {
        Arc::new(ServerHandle::start((Ipv4Addr::LOCALHOST, 0).into(), None).expect("a server"))
    }

    /// Serves an id, and gives what whoever meets by it keeps.
    fn serve(ids: &mut Ids, number: u8, now: Instant) -> Arc<ServerHandle> {
        ids.add(id(number), another(), now);
        ids.server(&id(number)).expect("it is served")
    }

    fn is_served(ids: &Ids, number: u8) -> bool {
        ids.server(&id(number)).is_some()
    }

    #[test]
    fn an_id_is_served_until_its_meeting_is_over_and_the_last_that_was_made_there_is_gone() {
        let (mut ids, now) = (Ids::default(), Instant::now());
        // Of a meeting that does not begin.
        drop(serve(&mut ids, 1, now));
        assert!(is_served(&ids, 1));
        let server = ids.server(&id(1)).expect("a server still");
        ids.is_over(from_ref(&server), true, now);
        let child = ids.server(&id(1)).expect("it lives on its parent's");
        drop(server);
        assert!(is_served(&ids, 1));
        drop(child);
        assert!(!is_served(&ids, 1));
    }

    /// Who makes ids and takes part in nothing.
    #[test]
    fn an_id_of_others_is_served_until_a_while_after_they_have_gone() {
        let (mut ids, now) = (Ids::default(), Instant::now());
        let server = serve(&mut ids, 1, now);
        let connect = || {
            let address = server.local_address();
            TcpStore::connect(&address.ip().to_string(), address.port(), None, Deadline::after(30 * SECOND))
                .expect("a client")
        };
        let none_have_come = now + 2 * AFTERWARDS;
        drop(serve(&mut ids, 2, none_have_come));
        assert!(is_served(&ids, 1));
        let (first, second) = (connect(), connect());
        drop(first);
        drop(serve(&mut ids, 3, none_have_come));
        assert!(is_served(&ids, 1) && server.deserted_since().is_none());
        drop(second);
        while server.deserted_since().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let gone = Instant::now();
        drop(serve(&mut ids, 4, gone));
        drop(server);
        assert!(is_served(&ids, 1));
        drop(ids.add(id(5), another(), gone + AFTERWARDS));
        assert!(!is_served(&ids, 1) && is_served(&ids, 2), "nobody has come to the second yet");
    }

    #[test]
    fn an_id_that_is_let_go_is_served_no_more_unless_its_meeting_has_begun() {
        let (mut ids, now) = (Ids::default(), Instant::now());
        drop(serve(&mut ids, 1, now));
        ids.release(&id(1));
        assert!(!is_served(&ids, 1));
        let begun = serve(&mut ids, 2, now);
        ids.release(&id(2));
        assert!(is_served(&ids, 2));
        ids.is_over(from_ref(&begun), false, now);
        drop(begun);
        ids.release(&id(2));
        assert!(is_served(&ids, 2), "others are to be told that it has failed");
    }

    #[test]
    fn a_meeting_that_has_failed_is_served_for_those_who_come_later() {
        let (mut ids, now) = (Ids::default(), Instant::now());
        let server = serve(&mut ids, 1, now);
        ids.is_over(from_ref(&server), false, now);
        drop(server);
        // Of each of its ranks that is here the process hears that it has failed.
        let sibling = ids.server(&id(1)).expect("a server for a sibling that has not met yet");
        ids.is_over(from_ref(&sibling), false, now + 30 * SECOND);
        drop(sibling);
        // Looked at as other ids are made and other meetings end.
        drop(serve(&mut ids, 2, now + AFTERWARDS));
        assert!(is_served(&ids, 1));
        let other = ids.server(&id(2)).expect("a server");
        ids.is_over(from_ref(&other), true, now + AFTERWARDS + 29 * SECOND);
        assert!(is_served(&ids, 1));
        ids.is_over(from_ref(&other), true, now + AFTERWARDS + 30 * SECOND);
        assert!(!is_served(&ids, 1) && is_served(&ids, 2));
    }

    #[test]
    fn a_process_that_tries_again_and_again_serves_few_meetings_that_have_failed() {
        let (mut ids, now) = (Ids::default(), Instant::now());
        for number in 0..20 {
            let server = serve(&mut ids, number, now);
            // Several of its ranks are here.
            for _ in 0..3 {
                ids.is_over(from_ref(&server), false, now);
            }
        }
        let left: Vec<usize> = (0..20).filter(|&number| is_served(&ids, number)).map(usize::from).collect();
        assert_eq!(left, (20 - MOST_FAILED..20).collect::<Vec<_>>());
        assert_eq!((ids.served.len(), ids.failed.len()), (MOST_FAILED, MOST_FAILED));
    }

    #[test]
    fn of_many_ids_that_make_one_communicator_the_first_is_served_the_longest() {
        let (mut ids, now) = (Ids::default(), Instant::now());
        let servers: Vec<_> = (0..20).map(|number| serve(&mut ids, number, now)).collect();
        ids.is_over(&servers, false, now);
        drop(servers);
        assert!((0..20).all(|number| is_served(&ids, number) == (usize::from(number) < MOST_FAILED)));
    }
}
