//! How a peer is lost: its data streams break, its control connection ends, its process ends, or it gives up the
//! link.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::connection::Kind;
use super::endpoint::{Endpoint, Open};
use super::reactor::{Alarm, Core};
use crate::error::{Error, Status};
use crate::transport::handshake::Hello;

/// How long after the end of a connection its process may still be seen to run: the kernel closes descriptors
/// first.
const VERDICT: Duration = Duration::from_millis(100);

/// How long after the end of a process, or of the control connection of one that cannot be watched, operations
/// may still take what it has sent.
const LEGACY: Duration = Duration::from_millis(50);

/// The end of a peer that has not said goodbye.
pub(super) struct Ended {
    /// When that is told.
    at: Instant,
    why: End,
}

enum End {
    /// Of the control connection: why. The process may show yet that it has ended, too.
    Connection(String),
    Process,
}

impl Endpoint {
    /// The data streams of a link are broken. A reset overtakes what the control connection still brings:
    /// that is the cause, and the reset is only its effect.
    pub(super) fn doubt(&mut self, core: &mut Core, peer: u32, why: Error) {
        // When it has ended while the command was on its way, the port has been told.
        let Some(open) = self.peers.get_mut(&peer).and_then(|peer| peer.open.as_mut()) else { return };
        let at = Instant::now() + VERDICT;
        open.doubt.get_or_insert((at, why));
        core.alarm(at, self.shared.id, Alarm::Peer { peer });
    }

    pub(super) fn end_doubt(&mut self, core: &mut Core, peer: u32) {
        let Some(open) = self.peers.get_mut(&peer).and_then(|peer| peer.open.as_mut()) else { return };
        // Where the control connection has ended too, its verdict comes.
        if open.ended.is_some() || open.doubt.as_ref().is_none_or(|(at, _)| *at > Instant::now()) {
            return;
        }
        let Some((_, why)) = open.doubt.take() else { return };
        self.hang_up(core, peer, why.text());
        self.tell(|port| port.peer_lost(peer, why));
    }

    /// Ends an open link with a last word, so that the peer does not wait for this rank.
    pub(super) fn hang_up(&mut self, core: &mut Core, peer: u32, why: &str) {
        let Some(open) = self.peers.get_mut(&peer).and_then(|peer| peer.open.take()) else { return };
        forget_process(core, &open);
        if open.ended.is_none() {
            self.say_last(core, open.control, Kind::Refuse, why, None);
        }
        self.unsettled.push(peer);
        self.settle(core);
    }

    /// A connection has ended or cannot go on.
    pub(super) fn conn_failed(
        &mut self,
        core: &mut Core,
        token: u64,
        outgoing: Option<Hello>,
        peer: Option<u32>,
        why: Error,
    ) {
        let rank = self.identity.rank;
        let id = self.shared.id;
        if let Some(peer) = peer
            && let Some(open) = self.open_on(peer, token)
        {
            // That it has ended itself is known already.
            if matches!(open.ended, Some(Ended { why: End::Process, .. })) {
                return;
            }
            // Whether the process is gone too shows in a moment, where there is a way to see it.
            let wait = if open.process.is_some() { VERDICT } else { LEGACY };
            let at = Instant::now() + wait;
            open.ended = Some(Ended { at, why: End::Connection(why.text().to_owned()) });
            core.alarm(at, id, Alarm::Peer { peer });
            return;
        }
        match outgoing.map(|hello| hello.target).or(peer) {
            Some(peer) => self.opening_failed(core, peer, token, &why),
            None => log::debug!("rank {rank}: a stranger was turned away: {why}"),
        }
    }

    /// The process of a peer has ended. What it said before still counts, and what it sent.
    pub(super) fn process_ended(&mut self, core: &mut Core, peer: u32) {
        let Some(open) = self.peers.get(&peer).and_then(|peer| peer.open.as_ref()) else { return };
        let token = open.control;
        self.look_at(core, token);
        let id = self.shared.id;
        let Some(open) = self.open_on(peer, token) else { return };
        // It would be told again and again.
        forget_process(core, open);
        open.process = None;
        let at = Instant::now() + LEGACY;
        open.ended = Some(Ended { at, why: End::Process });
        core.alarm(at, id, Alarm::Peer { peer });
    }

    /// Reports a peer that has ended a while ago.
    pub(super) fn verdict(&mut self, core: &mut Core, peer: u32) {
        let Some(open) = self.peers.get(&peer).and_then(|peer| peer.open.as_ref()) else { return };
        let Some(Ended { at, why }) = &open.ended else { return };
        if *at > Instant::now() {
            return;
        }
        let still = if open.process.is_some() { "; its process still runs" } else { "" };
        let why = match why {
            End::Process => "its process has ended".to_owned(),
            End::Connection(why) => format!("its control connection failed: {why}{still}"),
        };
        self.lost(core, peer, &why);
    }

    /// A peer has given up the open link, as it says: it is no use to this rank any more, though it may live.
    pub(super) fn given_up(&mut self, core: &mut Core, peer: u32, why: &str) {
        let Some(open) = self.peers.get_mut(&peer).and_then(|peer| peer.open.take()) else { return };
        forget_process(core, &open);
        let error = Error::new(Status::PeerFailed, format!("no link to {} any more: {why}", open.who));
        self.tell(|port| port.peer_lost(peer, error));
        self.unsettled.push(peer);
    }

    fn lost(&mut self, core: &mut Core, peer: u32, why: &str) {
        let Some(open) = self.peers.get_mut(&peer).and_then(|peer| peer.open.take()) else { return };
        forget_process(core, &open);
        self.drop_conn(core, open.control);
        let error = Error::new(Status::PeerFailed, format!("{} is gone without a goodbye: {why}", open.who));
        self.tell(|port| port.peer_lost(peer, error));
        self.unsettled.push(peer);
    }
}

pub(super) fn forget_process(core: &mut Core, open: &Open) {
    if let Some((token, fd)) = &open.process {
        core.forget(*token, fd.as_fd());
    }
}
