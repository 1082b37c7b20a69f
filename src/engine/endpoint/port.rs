//! What the service tells an endpoint: links that open, peers that leave or die, and their words.

#![forbid(unsafe_code)]

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{Endpoint, RECENT, Visitor, lock};
use crate::deadline::Deadline;
use crate::engine::control::{Answer, Control};
use crate::engine::recorder::Awaited;
use crate::error::{Error, Status};
use crate::rendezvous::store::Store;
use crate::sys;
use crate::transport::Link;
use crate::transport::service::{Attendance, Port};

/// How long a launcher may take to say how a rank ended. The others wait for it to fail.
const EXIT_CAUSE: Duration = Duration::from_millis(500);

impl Port for Endpoint {
    fn link_opened(&self, peer: u32, link: Link) {
        let mut messages = self.messages();
        messages.link_opened(peer, link);
        let gone = messages.gone(peer);
        drop(messages);
        if gone {
            // Given up before the peer had opened its side: it must not wait.
            let why = self.messages().why_lost(peer);
            self.hang_up(peer, &why.unwrap_or_else(|| Error::new(Status::PeerFailed, "it was too late")));
            return;
        }
        self.settle();
        self.see_out();
        self.wake();
    }

    fn link_refused(&self, peer: u32, why: Error) {
        self.with_exit_cause(peer, why, Endpoint::unreachable);
    }

    fn peer_left(&self, peer: u32) {
        self.messages().peer_left(peer);
        self.departures.fetch_add(1, Ordering::Release);
        self.wake();
    }

    fn peer_lost(&self, peer: u32, why: Error) {
        self.with_exit_cause(peer, why, Endpoint::lost);
    }

    fn control(&self, peer: u32, message: &[u8]) {
        match Control::decode(message) {
            Some(Control::Failure { group, error }) => {
                let found = lock(&self.roster).find_failed(group, &error);
                match found {
                    Some(group) => group.fail(error),
                    None => {
                        self.warnings.fetch_add(1, Ordering::Release);
                        self.wake();
                    }
                }
            }
            Some(Control::Query { group, token }) => {
                let answer = self.report_call(group);
                self.registration().send_control(peer, &Control::Answer { token, answer }.encode());
            }
            Some(Control::Answer { token, answer }) => {
                self.questions.answer(token, answer);
                self.wake();
            }
            Some(Control::Call { key, signature }) => {
                let never = lock(&self.roster).why_never(key).cloned();
                if let Some(error) = never {
                    let told = Control::Failure { group: key.group, error };
                    self.registration().send_control(peer, &told.encode());
                } else if let Some(group) = self.group(key.group) {
                    group.hear(peer, key, signature);
                } else {
                    self.messages().tell_departed(peer, key.group);
                    self.see_out();
                }
            }
            None => log::warn!("{} sent a control message of another version", self.describe(peer)),
        }
    }

    fn attend(&self) -> Attendance {
        let look = self.oversee_devices();
        match (self.attend_running(), look) {
            (attendance, None) => attendance,
            (Attendance::Idle, Some(look)) => Attendance::Again(look),
            (Attendance::Again(at), Some(look)) => Attendance::Again(at.min(look)),
            (Attendance::Leave(at), Some(look)) => Attendance::Leave(at.min(look)),
            (Attendance::Watch(at), Some(look)) => Attendance::Watch(at.min(look)),
        }
    }

    fn has_last_words(&self) -> bool {
        // Whoever has them moves them.
        let Ok(mut messages) = self.messages.try_lock() else { return true };
        messages.flush_all();
        messages.owes()
    }

    fn end_streams(&self) {
        // What is under way has some time yet, to move what it had begun: then they end with the process.
        if !self.unattended.any()
            && let Ok(mut messages) = self.messages.try_lock()
        {
            messages.finish();
        }
    }
}

impl Endpoint {
    /// Calls `then` with why there is no link to a peer. Where a launcher may know how it ended, it is asked
    /// first, on a thread of its own: that takes a while, and this may be the service thread, or one that
    /// waits for something else. It does not hold the endpoint meanwhile, which may go.
    fn with_exit_cause(&self, peer: u32, why: Error, then: fn(&Endpoint, u32, Error)) {
        let asked = self.store.get().is_some_and(|store| {
            let (store, this, why) = (store.clone(), Visitor::of(&self.this), why.clone());
            let ask = move || {
                let told = exit_cause(&*store, peer);
                let Some(this) = this.enter() else { return };
                let text = told.map(|cause| format!("{} {cause}", this.describe(peer)));
                then(&this, peer, text.map_or(why, |text| Error::new(Status::PeerFailed, text)));
            };
            sys::process::spawn("unisono-exit", ask).is_ok()
        });
        if !asked {
            then(self, peer, why);
        }
    }

    /// Ends a link that is of no use here, so that the peer learns of it.
    fn hang_up(&self, peer: u32, why: &Error) {
        let text = format!("rank {} has given up this link: {}", self.rank(), why.text());
        self.registration().hang_up(peer, &Error::new(Status::PeerFailed, text));
    }

    /// There is no link to a peer, and there was none: it may have left in peace before. That concerns those
    /// who need something of it, and no group for having it as a member.
    fn unreachable(&self, peer: u32, why: Error) {
        self.messages().link_lost(peer, why.clone());
        self.departures.fetch_add(1, Ordering::Release);
        // The peer may have opened its side, or think it still has one.
        self.hang_up(peer, &why);
        self.wake();
    }

    /// A peer has ended without a goodbye, which is the end of its groups.
    fn lost(&self, peer: u32, why: Error) {
        // Into the roster first: who sees the departure asks it why.
        lock(&self.roster).lose(peer, why.clone());
        self.unreachable(peer, why.clone());
        let affected = lock(&self.roster).live();
        for group in affected {
            if group.rank_of(peer).is_some() {
                group.fail(group.lost(peer, why.clone()));
            }
        }
        self.wake();
    }

    /// What this rank is doing in a group.
    fn report_call(&self, group: u64) -> Answer {
        let (last, running) = (self.recorder().last(group), self.recorder().running(group));
        let is_gone = self.group(group).is_none() && self.messages().has_departed(group);
        let text = match (&last, &running) {
            _ if is_gone => "it has destroyed its context".to_string(),
            (Some(last), Some(running)) if last != running => {
                format!("its last call is {last}, behind {running}")
            }
            (Some(last), _) => format!("its last call is {last}"),
            (None, _) => match self.recorder().has_forgotten() {
                Some(later) if self.group(group).is_some_and(|group| group.has_called()) => {
                    format!(
                        "its last call is not known any more, since it has made {later} in other groups after it"
                    )
                }
                _ => "it has called nothing yet".to_string(),
            },
        };
        let text = match self.report_elsewhere(group).filter(|_| running.is_none()) {
            Some(elsewhere) => format!("{text}; {elsewhere}"),
            None => text,
        };
        let awaited = running.map(|running| running.awaited);
        let waits = awaited.is_some_and(|awaited| awaited != Awaited::Nothing);
        Answer { waits, waits_for: awaited.and_then(Awaited::rank), text: self.with_refusal(text, RECENT) }
    }

    /// What this rank is doing in another group, which may keep it from what it is to call in `group`.
    fn report_elsewhere(&self, group: u64) -> Option<String> {
        // Ranks that make groups in different orders, or by different calls, wait for each other in different
        // groups.
        let making = self.recorder().setting_up();
        if let Some((other, call)) = making.and_then(|call| Some((self.group(call.group)?, call))) {
            return Some(format!("in '{}' its last call is {call}", other.name()));
        }
        let call = self.recorder().running_beside(group)?;
        let other = self.group(call.group)?;
        let awaited = call.awaited.rank().and_then(|rank| other.members().get(rank as usize));
        let whom = awaited.map(|peer| format!(" there (rank {peer} of the job)")).unwrap_or_default();
        Some(format!("in '{}' it is in {call}{whom}", other.name()))
    }
}

/// How the launcher says that a rank ended, if it tells.
fn exit_cause(store: &dyn Store, peer: u32) -> Option<String> {
    let (key, deadline) = (format!("exit/{peer}"), Deadline::after(EXIT_CAUSE));
    // The launcher hears of the death a moment after the socket does.
    for _ in 0..10 {
        if let Some(cause) = store.try_get(&key, deadline).ok()? {
            return Some(String::from_utf8_lossy(&cause).into_owned());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    None
}
