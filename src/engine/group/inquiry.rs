//! Why a call does not end, or has failed: what the ranks ask each other, and the texts that come of it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::{Group, Turn};
use crate::deadline::Deadline;
use crate::engine::control::{Answer, Control};
use crate::engine::endpoint::{Asked, Look, RECENT};
use crate::engine::messages::{Failure, Mismatch};
use crate::engine::operation::Operation;
use crate::engine::recorder::{Awaited, Recorder};
use crate::engine::wire::{Class, Key, Tag};
use crate::error::{Error, Status};
use crate::signature::{Making, Signature};

/// A question to the ranks that an overdue call waits for.
#[derive(Debug)]
pub struct Inquiry {
    waits_for: Vec<u32>,
    /// What the call waits for on this rank, if it told.
    standing: Option<String>,
    /// One for each rank that was asked, from the first on.
    asked: Asked,
    until: Deadline,
    /// Set after that, when this rank's own background thread has caught up.
    heard: OnceLock<Arc<AtomicBool>>,
    /// Until when somebody else may tell what they all wait for.
    patience: Deadline,
}

/// How long they have to answer.
pub(super) const INQUIRY: Duration = Duration::from_millis(300);

/// How long after that this rank's own background thread has to catch up: on a busy machine it is as late as
/// others.
pub(in crate::engine) const CATCHING_UP: Duration = Duration::from_secs(2);

/// How often it is looked whether it has.
pub(in crate::engine) const INQUIRY_LOOK: Duration = Duration::from_millis(2);

/// How long a call that is late leaves it to others to say why, if it only knows that those which it waits
/// for wait, too.
pub(super) const HEARSAY: Duration = Duration::from_millis(700);

/// How many are asked.
const MAX_ASKED: usize = 8;

impl Inquiry {
    /// Nobody is asked.
    pub(super) fn none() -> Inquiry {
        Inquiry {
            waits_for: Vec::new(),
            standing: None,
            asked: Asked::default(),
            until: Deadline::NEVER,
            heard: OnceLock::new(),
            patience: Deadline::NEVER,
        }
    }

    /// When somebody has to look at it next.
    pub fn until(&self) -> Deadline {
        match self.heard.get() {
            _ if !self.until.expired() => self.until,
            Some(heard) if heard.load(Ordering::Acquire) => self.patience,
            _ => Deadline::after(INQUIRY_LOOK),
        }
    }

    /// Whether those asked have had their time to answer.
    fn is_over(&self, group: &Group) -> bool {
        self.until.expired()
            && (self.heard.get_or_init(|| group.endpoint.registration().caught_up()).load(Ordering::Acquire)
                || self.until.postponed(CATCHING_UP).expired())
    }
}

impl Group {
    /// A call with its group and place.
    pub(in crate::engine) fn describe(&self, turn: &Turn) -> String {
        let here = self.endpoint.hostname(self.endpoint.rank());
        let (name, number) = (turn.signature.kind.name(), turn.sequence);
        let place = format!("'{}' (rank {} of {} on {here})", self.name, self.rank, self.size());
        match turn.class {
            Class::Ordered => format!("{name} #{number} of {place}"),
            Class::Tagged => format!("{name} #{number} with tag {} of {place}", Tag(turn.tag)),
            Class::PointToPoint => format!("{name}{} in {place}", with_tag(turn.tag)),
            Class::Internal => match turn.signature.making() {
                Some(Making::Split) => format!("split of {place}"),
                Some(Making::Part) => format!("setting up {place} after a split"),
                Some(Making::Window) => format!("register_window of {place}"),
                Some(Making::Connect) | None => format!("setting up {place}"),
                Some(making) => format!("setting up {place} by {}", making.name()),
            },
            Class::Captured => format!("{name}, captured as #{number} of {place}"),
        }
    }

    /// Whether this rank has called anything. Never waits.
    pub(in crate::engine) fn has_called(&self) -> bool {
        // Where it is locked, a call is being made.
        self.orders.try_lock().is_none_or(|orders| orders.have_begun())
    }

    /// A rank of this group with its host and process.
    pub fn describe_rank(&self, rank: u32) -> String {
        let text = self.endpoint.describe(self.members[rank as usize]);
        // The endpoint speaks of its own numbering; say ours.
        match text.split_once(" (") {
            Some((_, place)) => format!("rank {rank} ({place}"),
            None => format!("rank {rank}"),
        }
    }

    /// The loss of a peer, as the endpoint tells it: in its own numbering, not ours.
    pub fn lost(&self, peer: u32, why: Error) -> Error {
        match self.rank_of(peer) {
            Some(rank) if rank != peer => {
                why.context(format!("rank {rank} of '{}' is rank {peer} of the job", self.name))
            }
            _ => why,
        }
    }

    /// Why a transfer failed.
    pub fn tell(&self, failure: Failure) -> Error {
        match failure {
            Failure::Error(error) => error,
            Failure::Lost(peer, why) => self.lost(peer, why),
            Failure::Peer { peer, status, what } => {
                let name = self.rank_of(peer).map(|rank| self.describe_rank(rank));
                let name = name.unwrap_or_else(|| self.endpoint.describe(peer));
                Error::new(status, self.endpoint.with_refusal(format!("{name} {what}"), RECENT))
            }
            Failure::Mismatch(mismatch) => self.explain(&mismatch, self.endpoint.recorder()),
        }
    }

    /// Tells the ranks that a call waits for what it is, and notes whom it waits for. One that has called
    /// something else fails the group.
    pub fn compare(&self, turn: &Turn, waits_for: &[u32]) {
        if turn.class == Class::PointToPoint {
            return;
        }
        self.note(turn, waits_for);
        let (tag, sequence, class) = (turn.tag, turn.sequence, turn.class);
        let key = Key { group: self.id, tag, sequence, slot: 0, class };
        let message = Control::Call { key, signature: turn.signature }.encode();
        for &rank in waits_for.iter().take(MAX_ASKED) {
            self.endpoint.registration().send_control(self.members[rank as usize], &message);
        }
    }

    /// Notes what a call waits for, should others ask.
    fn note(&self, turn: &Turn, waits_for: &[u32]) {
        let awaited = waits_for.first().map_or(Awaited::Unknown, |&rank| Awaited::Rank(rank));
        self.endpoint.recorder().note(turn.slot, awaited);
    }

    /// What a look at an operation has come to that has not ended; notes it of one that has stopped in the
    /// middle of long work, or follows one that had. `has_worked`: whether the last look had, and from here
    /// on whether this one has.
    pub(in crate::engine) fn looked<O: Operation, T>(
        &self,
        turn: &Turn,
        operation: &O,
        has_worked: &mut bool,
    ) -> Look<T> {
        let had_worked = std::mem::replace(has_worked, operation.is_at_work());
        if *has_worked {
            self.endpoint.recorder().note(turn.slot, Awaited::Nothing);
            return Look::AtWork;
        }
        if had_worked {
            self.note(turn, &operation.waits_for(self));
        }
        Look::Waits
    }

    /// A rank waits for this one in a call: fails the group if this rank's call of that number is another.
    pub fn hear(&self, peer: u32, key: Key, theirs: Signature) {
        if key.class == Class::PointToPoint || self.rank_of(peer).is_none() {
            return;
        }
        let recorder = self.endpoint.recorder();
        // Not called yet, or too long ago: what comes of it is found by messages, or when this rank waits.
        let Some(ours) = recorder.call(key).filter(|ours| *ours != theirs) else { return };
        self.fail(self.explain(&Mismatch { peer, key, theirs, ours: Some(ours), bytes: None }, recorder));
    }

    /// Asks the ranks that a call waits for what they are doing. They compare calls before they answer, so
    /// that a mismatch is known when the answers are. `standing`: what it waits for on this rank.
    pub fn ask(&self, turn: &Turn, waits_for: Vec<u32>, standing: Option<String>) -> Inquiry {
        self.compare(turn, &waits_for);
        let peers = waits_for.iter().take(MAX_ASKED).map(|&rank| self.members[rank as usize]);
        let asked = self.endpoint.ask(self, peers);
        let patience = if turn.class == Class::PointToPoint { Duration::ZERO } else { HEARSAY };
        let (until, patience) = (Deadline::after(INQUIRY), Deadline::after(patience));
        Inquiry { waits_for, standing, asked, until, heard: OnceLock::new(), patience }
    }

    /// As [`Group::ask`], of a call that is late, with its operation: it is not moved from here on, and
    /// abandoned when there are answers.
    pub fn ask_late<O: Operation>(&self, turn: &Turn, operation: &mut O) -> Inquiry {
        let (waits_for, standing) = (operation.waits_for(self), operation.standing());
        // Other threads move messages while the others are asked: what comes from here on is for the next
        // receive.
        if turn.class == Class::PointToPoint {
            operation.withdraw(self);
        }
        self.ask(turn, waits_for, standing)
    }

    /// As [`Group::ask`], of a call whose operation is not to be had: asks the rank that it was last seen to
    /// wait for. All, of a collective that was not seen to wait before it was held up.
    pub fn ask_about(&self, turn: &Turn, standing: &str) -> Inquiry {
        let waits_for = match self.endpoint.recorder().awaited(turn.slot).rank() {
            Some(rank) => vec![rank],
            None if turn.class == Class::PointToPoint => Vec::new(),
            None => (0..self.size()).filter(|rank| *rank != self.rank).collect(),
        };
        self.ask(turn, waits_for, Some(standing.into()))
    }

    /// Whether it can be told why the call is late: all have answered, or have had their time. If all of them
    /// wait themselves, others who know more come first.
    pub fn answered(&self, inquiry: &Inquiry) -> bool {
        match inquiry.asked.are_answered() {
            _ if self.failed.load(Ordering::Acquire) => true,
            None => inquiry.is_over(self),
            Some(all_wait) => !all_wait || inquiry.patience.expired(),
        }
    }

    /// Why a call has not ended in time.
    pub fn overdue(&self, turn: &Turn, inquiry: &Inquiry) -> Error {
        let waited = turn.called.elapsed().as_secs_f64();
        let waits_for = &inquiry.waits_for;
        let here =
            inquiry.standing.as_ref().map_or_else(String::new, |standing| format!("; here, {standing}"));
        let Some(&first) = waits_for.first() else {
            let text = format!("not done after {waited:.1} s{here}; raise {}", limit(turn));
            return Error::new(Status::Timeout, self.endpoint.with_refusal(text, turn.called.elapsed()));
        };
        let answers = inquiry.asked.take();
        // One of them, or else whom the first waits for.
        let idle = idle(&answers);
        let behind = answers.first().and_then(|answer| answer.as_ref()?.waits_for);
        let culprit = idle.map_or(behind.unwrap_or(first), |index| waits_for[index]);
        let told: Vec<String> = waits_for
            .iter()
            .zip(answers)
            .map(|(&rank, answer)| {
                let says = match answer {
                    Some(answer) => answer.text,
                    None if self.endpoint.messages().has_left(self.members[rank as usize]) => {
                        "it has left".into()
                    }
                    None => "it does not answer (stopped, or out of reach)".into(),
                };
                format!("nothing from {} for {waited:.1} s; {says}", self.describe_rank(rank))
            })
            .collect();
        let more = match waits_for.len() - inquiry.asked.count() {
            0 => String::new(),
            more => format!("; and {more} more"),
        };
        let look_at = match idle {
            // It would be told to look at itself, here or where this is told.
            None if culprit == self.rank => {
                format!("what ranks {} and {} have called", culprit.min(first), culprit.max(first))
            }
            _ => format!("rank {culprit}"),
        };
        let advice = format!("Look at {look_at}, or raise {}", limit(turn));
        let told =
            self.endpoint.with_refusal(format!("{}{more}{here}", told.join("; ")), turn.called.elapsed());
        Error::new(Status::Timeout, format!("{told}. {advice}"))
    }

    /// Whether the call that has the turn before this one is late, too, and may be about to say why: that one
    /// knows whom it waits for. Not for ever, also if nobody looks at it.
    pub fn may_yet_tell(&self, turn: &Turn) -> bool {
        self.orders.lock().may_yet_tell(turn.class, turn.tag, Instant::now())
    }

    /// Why a call whose turn has not come in time gives up.
    pub fn stuck(&self, turn: &Turn) -> Error {
        let waited = turn.called.elapsed().as_secs_f64();
        let (name, number) = (turn.signature.kind.name(), turn.sequence);
        let text = format!("{name} #{number} waited {waited:.1} s for the calls before it, which still run");
        Error::new(Status::Timeout, format!("{text}. Look at those, or raise {}", limit(turn)))
    }

    /// What the ranks' calls disagree about.
    pub fn explain(&self, mismatch: &Mismatch, recorder: &Recorder) -> Error {
        let peer = self.rank_of(mismatch.peer).unwrap_or(mismatch.peer);
        let number = mismatch.key.sequence;
        let theirs = mismatch.theirs;
        let ours = mismatch.ours.or_else(|| recorder.call(mismatch.key));
        let head = match mismatch.key.class {
            Class::PointToPoint => format!("send and receive{} differ", with_tag(mismatch.key.tag)),
            Class::Tagged => {
                format!("call #{number} with tag {} of '{}' differs", Tag(mismatch.key.tag), self.name)
            }
            _ => format!("call #{number} of '{}' differs", self.name),
        };
        let here = self.rank;
        let tail = match mismatch.bytes {
            Some((theirs, ours)) => {
                format!("; rank {here} counts {ours} bytes between the two, rank {peer} {theirs}")
            }
            None => ours.map_or("", |ours| ours.remark(&theirs)).to_string(),
        };
        let ours = ours.map_or_else(|| "something else".to_string(), |ours| ours.to_string());
        Error::new(
            Status::Mismatch,
            format!("{head}: rank {here} called {ours}, rank {peer} called {theirs}{tail}"),
        )
    }
}

/// The tag of a message, in a text: most have none, which is 0.
fn with_tag(tag: u64) -> String {
    if tag == 0 { String::new() } else { format!(" with tag {}", Tag(tag)) }
}

/// What says how long a call may take.
fn limit(turn: &Turn) -> &'static str {
    if turn.signature.making().is_some() { Making::LIMIT } else { "timeout_ms" }
}

/// Whom of those asked it is that keeps the others waiting: who does not answer, as a stopped rank, or else
/// who waits for nobody.
fn idle(answers: &[Option<Answer>]) -> Option<usize> {
    let silent = answers.iter().position(Option::is_none);
    silent.or_else(|| answers.iter().flatten().position(|answer| !answer.waits))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_does_not_answer_goes_before_who_waits_for_nobody() {
        let answer = |waits| Some(Answer { waits, waits_for: None, text: String::new() });
        let (waits, rests) = (answer(true), answer(false));
        for (answers, culprit) in [
            ([&rests, &None, &waits], Some(1)),
            ([&waits, &rests, &None], Some(2)),
            ([&waits, &rests, &rests], Some(1)),
            ([&waits, &waits, &waits], None),
        ] {
            assert_eq!(idle(&answers.map(Clone::clone)), culprit);
        }
    }
}
