//! How the opening of a link ends: with a link, or without one.

#![forbid(unsafe_code)]

use std::os::fd::{AsFd, OwnedFd};

use super::{Incoming, Trial};
use crate::error::{Error, fail};
use crate::sys::epoll::{Event, Interest};
use crate::transport::Link;
use crate::transport::service::connection::Kind;
use crate::transport::service::endpoint::{Endpoint, Open};
use crate::transport::service::linking::{describe, shm_link, tcp_link};
use crate::transport::service::reactor::{Core, Source};
use crate::transport::service::setup::{Data, Setup};

impl Endpoint {
    /// All of this side's attempt is there.
    pub(super) fn finish_outgoing(&mut self, core: &mut Core, peer: u32) {
        let Some(trial) = self.outgoing(peer).and_then(|outgoing| outgoing.trial.take()) else { return };
        let Some(theirs) = trial.theirs else { return };
        let who = describe(peer, &theirs.setup);
        let link = match trial.ring {
            Some(mut ring) => {
                // At the last moment: other threads map things, too.
                drop(trial.reserved);
                match self.peer_ring(theirs) {
                    Ok(theirs) => Ok(shm_link(ring, theirs)),
                    Err(why) => {
                        // The peer writes to the ring until it hears that this side gave up.
                        ring.retire();
                        Err(why)
                    }
                }
            }
            None => Ok(tcp_link(trial.lanes)),
        };
        match link {
            Ok(link) => self.established(core, peer, trial.control, who, link, None),
            Err(why) => {
                // The peer counts the link as open: it must hear that it is not.
                self.turn_down(core, peer, trial.control, why.text());
                self.refuse(core, peer, why.context(format_args!("cannot open the link to {who}")));
            }
        }
    }

    /// All of the peer's attempt is there.
    pub(super) fn finish_incoming(&mut self, core: &mut Core, peer: u32) {
        let Some(opening) = self.peers.get_mut(&peer).map(|peer| &mut peer.opening) else { return };
        let given_up = opening.given_up.clone();
        let Some(Incoming { control, lanes, theirs: Some(theirs), .. }) = opening.incoming.take() else {
            return;
        };
        let who = describe(peer, &theirs.setup);
        let answer = || {
            if let Some(why) = given_up {
                fail!(PeerFailed, "it had given up: {why}");
            }
            Ok(match theirs.setup.data {
                Data::Shm { .. } => {
                    let ring = self.allocate_ring()?;
                    let answer = self.shm_setup(&ring)?;
                    (shm_link(ring, self.peer_ring(theirs)?), answer)
                }
                Data::Tcp { lanes: count } => {
                    (tcp_link(lanes), (self.setup(Data::Tcp { lanes: count }), Vec::new()))
                }
            })
        };
        match answer() {
            Ok((link, answer)) => self.established(core, peer, control, who, link, Some(answer)),
            Err(why) => {
                log::debug!("rank {}: refuses the link of {who}: {why}", self.identity.rank);
                self.peers.entry(peer).or_default().opening.theirs_failed = Some(why.text().to_owned());
                self.unsettled.push(peer);
                self.turn_down(core, peer, control, Error::text(&why));
            }
        }
    }

    /// The link is open: says so to the peer if it waits for that, and to the engine.
    fn established(
        &mut self,
        core: &mut Core,
        peer: u32,
        control: u64,
        who: String,
        link: Link,
        answer: Option<(Setup, Vec<OwnedFd>)>,
    ) {
        log::debug!("rank {}: link to {who} over {:?}", self.identity.rank, link.kind);
        let process = link.memory.as_ref().and_then(|memory| {
            let fd = memory.process.clone()?;
            let token = core.token(self.shared.id, Source::Process { peer });
            core.watch(token, fd.as_fd(), Interest { read: true, ..Interest::default() }).ok()?;
            Some((token, fd))
        });
        let state = self.peers.entry(peer).or_default();
        state.open = Some(Open { control, who, process, ended: None, doubt: None });
        state.opening.theirs_failed = None;
        self.want_no_more(peer);
        self.abandon(core, peer);
        if let (Some((setup, fds)), Some(conn)) = (answer, self.conns.get_mut(&control)) {
            conn.wire.queue_frame(Kind::Setup, &setup.encode(), fds);
        }
        self.catch_up(peer, control);
        self.tell(|port| port.link_opened(peer, link));
        self.conn_ready(core, control, Event { token: control, writable: true, ..Event::default() });
    }

    /// Opening has failed for good.
    pub(super) fn refuse(&mut self, core: &mut Core, peer: u32, why: Error) {
        self.want_no_more(peer);
        let outgoing = self.peers.get_mut(&peer).and_then(|peer| peer.opening.outgoing.take());
        if let Some(trial) = outgoing.and_then(|outgoing| outgoing.trial) {
            self.end_trial(core, peer, trial, why.text());
        }
        // When it turned out to have left while it was turned down, the port has been told.
        let Some(state) = self.peers.get_mut(&peer) else { return };
        state.opening.given_up = Some(why.text().to_owned());
        self.unsettled.push(peer);
        self.tell(|port| port.link_refused(peer, why));
    }

    /// A peer says goodbye. Before its link is open it may leave for what failed here, and that it has left
    /// is all that the port is told: what failed is kept for those who wait in vain.
    pub(in crate::transport::service) fn note_failures(&self, peer: u32) {
        let failures = self.peers.get(&peer).map(|peer| peer.opening.failures()).unwrap_or_default();
        if !failures.is_empty() {
            let text = format!("rank {} has no link to rank {peer}{failures}", self.identity.rank);
            self.shared.obstacle.note(text);
        }
    }

    /// Nobody waits for the link any more.
    pub(in crate::transport::service) fn want_no_more(&mut self, peer: u32) {
        if let Some(state) = self.peers.get_mut(&peer) {
            state.opening.wanted = None;
        }
        self.shared.slow().remove(&peer);
    }

    /// Ends what is under way towards a peer.
    pub(in crate::transport::service) fn abandon(&mut self, core: &mut Core, peer: u32) {
        self.abandon_outgoing(core, peer);
        self.abandon_incoming(core, peer);
    }

    pub(super) fn abandon_outgoing(&mut self, core: &mut Core, peer: u32) {
        let outgoing = self.peers.get_mut(&peer).and_then(|peer| peer.opening.outgoing.take());
        if let Some(trial) = outgoing.and_then(|outgoing| outgoing.trial) {
            self.drop_trial(core, trial);
        }
    }

    pub(super) fn abandon_incoming(&mut self, core: &mut Core, peer: u32) {
        let incoming = self.peers.get_mut(&peer).and_then(|peer| peer.opening.incoming.take());
        if let Some(incoming) = incoming {
            self.drop_conn(core, incoming.control);
        }
    }

    /// A trial is given up. The peer may count the link as open by then: it must hear that it is not, or it
    /// takes this rank for dead.
    pub(super) fn end_trial(&mut self, core: &mut Core, peer: u32, mut trial: Trial, why: &str) {
        if !trial.said {
            return self.drop_trial(core, trial);
        }
        let text = format!("rank {} has given up this link: {why}", self.identity.rank);
        self.turn_down(core, peer, trial.control, &text);
        trial.lane_tokens.drain(..).for_each(|token| self.drop_conn(core, token));
    }

    /// Tells a peer that the link that it has proved itself for will not be, behind what is announced for it.
    /// It may be about to leave itself: its own news and its goodbye count on this connection, too.
    fn turn_down(&mut self, core: &mut Core, peer: u32, control: u64, why: &str) {
        self.catch_up(peer, control);
        self.say_last(core, control, Kind::Refuse, why, Some(peer));
    }

    fn drop_trial(&mut self, core: &mut Core, trial: Trial) {
        for token in trial.lane_tokens.into_iter().chain([trial.control]) {
            self.drop_conn(core, token);
        }
    }
}
