//! Send, receive, receive from any: one message each.
//!
//! A message that is longer than a piece travels as several, which both sides know from its length. The first
//! is matched as any message is. It says which message of its sender's the receive has taken, and the others
//! are named by that and their number ([`Course`]). So each side needs no more memory than some pieces take,
//! and may load or store one while another travels. The sender sends the others when the first has been
//! taken.

use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::{Duration, Instant};

use super::endpoint::{Endpoint, lock};
use super::group::{Group, Turn};
use super::lane::{Destination, Source, Ticket};
use super::messages::{Failure, RECEIVER_GAVE_UP, Remains, SENDER_GAVE_UP};
use super::operation::{Completion, Operation};
use super::pairs::From;
use super::sends::SendTurn;
use super::staged::{Cut, Piece};
use super::wire::{Class, Key};
use crate::error::{Result, Status, fail};
use crate::signature::Signature;

/// What the one message is.
#[derive(Clone, Debug)]
pub enum Message {
    /// To a rank of the group.
    Send {
        /// The rank.
        to: u32,
        /// What.
        from: Source,
    },
    /// From a rank of the group.
    Receive {
        /// The rank.
        from: u32,
        /// Where to.
        into: Destination,
    },
    /// From whichever rank sends first: the message of theirs that comes first, or has come first of those
    /// that nobody has taken.
    ReceiveAny {
        /// Of these ranks; `None`: of the group.
        of: Option<Arc<[u32]>>,
        /// Where to.
        into: Destination,
    },
}

/// The pieces of a message of so many bytes, of at most `piece` bytes each: the same on both sides.
pub fn cut(bytes: usize, piece: usize) -> Cut {
    Cut::even(bytes as u64, 1, 1, piece)
}

/// Pieces of a message in the caller's memory that are under way at a time, behind the first.
const WINDOW: u32 = 16;

/// One message under way.
pub struct Point {
    message: Message,
    tag: u64,
    signature: Signature,
    cut: Cut,
    /// Pieces behind the first, whoever begins them.
    behind: u32,
    state: State,
}

enum State {
    /// Behind sends that have not been posted.
    Queued(SendTurn),
    /// The first piece, with its mailbox.
    Posted(u32),
    /// The other pieces.
    Following(Course, Box<Following>),
    Ended,
}

impl Point {
    /// Posts the message at once, so that messages of one pair and tag keep the order of the calls; a send
    /// behind others that have not been posted, as soon as they have. Pieces have `piece` bytes.
    ///
    /// # Safety
    /// The message's memory stays valid until the operation has ended or is abandoned.
    pub unsafe fn new(group: &Group, turn: &Turn, message: Message, piece: usize) -> Point {
        let behind = match message {
            Message::Send { to, .. } => group.sends().queue_behind(to, turn.tag),
            _ => None,
        };
        // SAFETY: the caller's promise.
        unsafe { Point::in_turn(group, turn, message, piece, behind) }
    }

    /// As [`Point::new`], for a send that has had its place in the order before its bytes were there.
    ///
    /// # Safety
    /// As [`Point::new`].
    pub unsafe fn in_turn(
        group: &Group,
        turn: &Turn,
        message: Message,
        piece: usize,
        place: Option<SendTurn>,
    ) -> Point {
        let cut = cut(message.memory().1, piece);
        // SAFETY: the caller's promise.
        unsafe { Point::of(group, turn, message, cut, cut.pieces() - 1, place) }
    }

    /// As [`Point::in_turn`], of a message that is cut so, and has so many pieces behind its first.
    ///
    /// # Safety
    /// As [`Point::new`].
    unsafe fn of(
        group: &Group,
        turn: &Turn,
        message: Message,
        cut: Cut,
        behind: u32,
        place: Option<SendTurn>,
    ) -> Point {
        let (tag, signature) = (turn.tag, turn.signature);
        let mut point = Point { message, tag, signature, cut, behind, state: State::Ended };
        match place {
            Some(place) => {
                point.state = State::Queued(place);
                point.post_in_turn(group);
            }
            None => point.post(group),
        }
        point
    }

    /// Posts the message if its turn has come.
    fn post_in_turn(&mut self, group: &Group) {
        if let State::Queued(place) = &self.state
            && place.has_come()
        {
            // The place is left when the message is posted, without the lock.
            let State::Queued(place) = std::mem::replace(&mut self.state, State::Ended) else { return };
            self.post(group);
            drop(place);
        }
    }

    fn post(&mut self, group: &Group) {
        let mut messages = group.endpoint().messages();
        let mailbox = messages.mailbox();
        let ticket = Ticket { mailbox, step: 0 };
        let signature = self.signature;
        let peer = |rank: u32| group.members()[rank as usize];
        let channel = (group.id(), self.tag);
        match self.message.piece(self.cut.piece(0)) {
            Message::Send { to, from } => {
                let sequence = messages.next_in_pair(peer(to), group.id());
                // Told to the mailbox as a receive's is, for the other pieces.
                messages.look(mailbox).source = Some((peer(to), sequence));
                messages.send(peer(to), first_key(channel, sequence), signature, from, ticket);
            }
            Message::Receive { from, into } => {
                messages.receive_next(channel, From::Rank(peer(from)), signature, into, ticket);
            }
            Message::ReceiveAny { of: None, into } => {
                let from = From::Any(group.members().clone());
                messages.receive_next(channel, from, signature, into, ticket);
            }
            Message::ReceiveAny { of: Some(ranks), into } => {
                let peers: Arc<[u32]> = ranks.iter().map(|&rank| peer(rank)).collect();
                // A rank that was named is watched, so that its end is noticed even if it never sends.
                for &peer in peers.iter().filter(|&&peer| peer != group.endpoint().rank()) {
                    messages.want(peer);
                }
                messages.receive_next(channel, From::Any(peers), signature, into, ticket);
            }
        }
        messages.write_out();
        drop(messages);
        group.endpoint().settle();
        self.state = State::Posted(mailbox);
    }

    /// Looks whether the first piece has been taken. What the other pieces have in common, once it has.
    fn look_at_first(&mut self, group: &Group, mailbox: u32) -> Poll<Result<Course>> {
        let mut messages = group.endpoint().messages();
        let mail = messages.look(mailbox);
        if let Some(failure) = mail.failed.take() {
            let error = group.tell(failure);
            log::debug!("{} with tag {} failed: {error}", self.signature, self.tag);
            return Poll::Ready(Err(error));
        }
        if mail.done.is_empty() {
            return Poll::Pending;
        }
        // PROOF: noted with the send, or when the message was found.
        let (peer, sequence) = mail.source.expect("a message that was taken");
        messages.close_mailbox(mailbox);
        drop(messages);
        self.state = State::Ended;
        Poll::Ready(Ok(self.course(group, peer, sequence)))
    }

    /// What the pieces behind the first have in common.
    fn course(&self, group: &Group, peer: u32, sequence: u32) -> Course {
        let (sends, source) = match self.message {
            Message::Send { .. } => (true, None),
            Message::Receive { from, .. } => (false, Some(from)),
            Message::ReceiveAny { .. } => (false, group.rank_of(peer)),
        };
        let key = first_key((group.id(), self.tag), sequence);
        let (signature, endpoint, behind) = (self.signature, group.endpoint().clone(), self.behind);
        Course {
            peer,
            key,
            signature,
            endpoint,
            sends,
            source,
            behind,
            left: behind,
            given_up: None,
            told: false,
        }
    }

    /// Gives up while the first piece is under way. Whether it is a send's, and all of the message.
    fn abandon_first(&self, group: &Group, mailbox: u32) -> bool {
        let mut messages = group.endpoint().messages();
        let mail = messages.look(mailbox);
        let (source, taken, failed) = (mail.source, !mail.done.is_empty(), mail.failed.is_some());
        let channel = (group.id(), self.tag);
        let first = source.map(|(peer, sequence)| (peer, first_key(channel, sequence)));
        let remains = messages.cancel_one(mailbox, channel, first);
        drop(messages);
        let Some((peer, sequence)) = source else { return false };
        if self.behind == 0 {
            let goes = !failed && (taken || remains == Remains::Whole);
            return goes && matches!(self.message, Message::Send { .. });
        }
        let mut course = self.course(group, peer, sequence);
        // A receive that has its message has let the sender know: what comes of the first piece is thrown
        // away here, and the sender takes it for taken. A send, if any of it has gone: the receiver may have
        // all of the first piece before it reads that it is withdrawn.
        course.told = course.sends && !taken && remains == Remains::Nothing;
        false
    }

    /// Ends the course of the pieces before `next`, and begins those behind them. Whether there are any.
    fn follow(&mut self, group: &Group, course: Course, next: u32) -> bool {
        let until = next.saturating_add(WINDOW).min(self.cut.pieces());
        if next == until {
            return false;
        }
        let pieces = (next..until).map(|index| (index, self.message.piece(self.cut.piece(index))));
        // SAFETY: pieces of the message, whose memory has been promised.
        let following = unsafe { Following::begin(group, &course, pieces) };
        self.state = State::Following(course, Box::new(following));
        true
    }

    /// Begins more pieces when half of those that may be under way have come to their end.
    fn refill(&mut self, group: &Group) {
        let State::Following(course, following) = &mut self.state else { return };
        let room = WINDOW - following.open.len() as u32;
        if room < WINDOW / 2 || following.failed.is_some() {
            return;
        }
        let until = following.end.saturating_add(room).min(self.cut.pieces());
        if following.end < until {
            let pieces = following.end..until;
            let pieces = pieces.map(|index| (index, self.message.piece(self.cut.piece(index))));
            // SAFETY: pieces of the message, whose memory has been promised.
            unsafe { following.add(group, course, pieces) };
        }
    }
}

impl Operation for Point {
    fn advance(&mut self, group: &Group) -> Poll<Result<Completion>> {
        self.post_in_turn(group);
        loop {
            match std::mem::replace(&mut self.state, State::Ended) {
                State::Posted(mailbox) => {
                    self.state = State::Posted(mailbox);
                    let course = match self.look_at_first(group, mailbox) {
                        Poll::Ready(course) => course?,
                        Poll::Pending => return Poll::Pending,
                    };
                    let source = course.source;
                    if !self.follow(group, course, 1) {
                        return Poll::Ready(Ok(Completion { source }));
                    }
                }
                State::Following(mut course, mut following) => {
                    match following.look(group, &mut course) {
                        Poll::Ready(Ok(())) => {}
                        answer => {
                            self.state = State::Following(course, following);
                            if answer.is_pending() {
                                self.refill(group);
                            }
                            return answer.map_ok(|()| Completion::default());
                        }
                    }
                    let source = course.source;
                    if !self.follow(group, course, following.end) {
                        return Poll::Ready(Ok(Completion { source }));
                    }
                }
                State::Queued(place) => {
                    self.state = State::Queued(place);
                    return Poll::Pending;
                }
                State::Ended => return Poll::Ready(Ok(Completion::default())),
            }
        }
    }

    fn abandon(&mut self, group: &Group) {
        let _ = self.cancel(group);
    }

    /// A send of which a part has gone and the rest goes from a copy is complete: its receiver gets it, and
    /// is not to get it twice.
    fn cancel(&mut self, group: &Group) -> Option<Completion> {
        let goes = match std::mem::replace(&mut self.state, State::Ended) {
            State::Posted(mailbox) => self.abandon_first(group, mailbox),
            State::Following(mut course, mut following) => {
                let goes = following.give_up(group, &course) && following.end == self.cut.pieces();
                // Then the other side is not told of any end but that.
                course.left = if goes { 0 } else { course.left };
                goes
            }
            State::Queued(_) | State::Ended => false,
        };
        goes.then(Completion::default)
    }

    fn mailbox(&self) -> Option<u32> {
        match &self.state {
            State::Posted(mailbox) => Some(*mailbox),
            // What has failed is looked at again after a while.
            State::Following(_, following) => following.failed.is_none().then_some(following.mailbox),
            State::Queued(_) | State::Ended => None,
        }
    }

    fn waits_for(&self, group: &Group) -> Vec<u32> {
        match &self.message {
            Message::Send { to: rank, .. } | Message::Receive { from: rank, .. } => vec![*rank],
            Message::ReceiveAny { of: Some(of), .. } => of.to_vec(),
            Message::ReceiveAny { of: None, .. } => {
                (0..group.size()).filter(|rank| *rank != group.rank()).collect()
            }
        }
    }
}

impl Message {
    /// Where its bytes are, or are to be, and how many.
    pub(super) fn memory(&self) -> (*mut u8, usize) {
        match self {
            Message::Send { from, .. } => (from.address.cast_mut(), from.len),
            Message::Receive { into, .. } | Message::ReceiveAny { into, .. } => (into.address, into.len),
        }
    }

    /// The same with other memory.
    fn at(mut self, address: *mut u8, len: usize) -> Message {
        match &mut self {
            Message::Send { from, .. } => *from = Source { address: address.cast_const(), len },
            Message::Receive { into, .. } | Message::ReceiveAny { into, .. } => {
                *into = Destination { address, len };
            }
        }
        self
    }

    /// A piece of it.
    fn piece(&self, piece: Piece) -> Message {
        let (address, bytes) = self.memory();
        let (start, len) = if piece.whole { (0, bytes) } else { (piece.start as usize, piece.len as usize) };
        self.clone().at(address.wrapping_add(start), len)
    }
}

/// The name of a message's first piece.
fn first_key((group, tag): (u64, u64), sequence: u32) -> Key {
    Key { group, tag, sequence, slot: 0, class: Class::PointToPoint }
}

/// How long after that word the failure of the group, which may be why, is the better cause.
pub(super) const DOUBT: Duration = Duration::from_millis(100);

/// A message of which both sides know that the other has it too: its first piece has been taken. If it is let
/// go of before all pieces have come to their end, the other side is told. What comes for it later is
/// dropped.
pub struct Course {
    /// As the endpoint counts.
    peer: u32,
    /// Of the first piece.
    key: Key,
    signature: Signature,
    endpoint: Arc<Endpoint>,
    /// Whether this is the sender's side.
    sends: bool,
    /// The rank that a receive's message came from.
    source: Option<u32>,
    /// Pieces behind the first,
    behind: u32,
    /// and those that have not come to their end.
    left: u32,
    /// When its word was read that the other side has given up: it is not said again.
    given_up: Option<Instant>,
    /// Whether the other side knows that this message has no end.
    told: bool,
}

impl Course {
    fn key(&self, slot: u32) -> Key {
        Key { slot: u64::from(slot), ..self.key }
    }

    /// The slots of the words that this side leaves, and that the other does.
    fn words(&self) -> [u32; 2] {
        let words = [RECEIVER_GAVE_UP, SENDER_GAVE_UP];
        [words[usize::from(self.sends)], words[usize::from(!self.sends)]]
    }
}

impl Drop for Course {
    fn drop(&mut self) {
        if self.behind == 0 || self.endpoint.check_fork().is_err() {
            return;
        }
        // A failure of the group is told to all its members: that is why, and it may take longer than this
        // word.
        let tells = self.left > 0 && !self.told && !self.endpoint.has_failed(self.key.group);
        let mut messages = self.endpoint.messages();
        messages.end_course(self.peer, self.key, self.sends, self.left == 0);
        if tells {
            let [word, _] = self.words();
            messages.notify(self.peer, self.key(word), self.signature);
        }
    }
}

/// Pieces of a course under way, and an ear for the word that the other side has given up.
struct Following {
    mailbox: u32,
    /// The numbers of those that have not come to their end,
    open: Vec<u32>,
    /// and that of the first that has not begun.
    end: u32,
    /// What went wrong, and when.
    failed: Option<(Instant, Failure)>,
}

impl Following {
    /// Begins these pieces, by number, one after the other.
    ///
    /// # Safety
    /// Their memory stays valid until they have ended or are abandoned.
    unsafe fn begin(
        group: &Group,
        course: &Course,
        pieces: impl Iterator<Item = (u32, Message)>,
    ) -> Following {
        let mut messages = group.endpoint().messages();
        let mailbox = messages.mailbox();
        let nothing = Destination { address: std::ptr::null_mut(), len: 0 };
        let (peer, signature, [_, word]) = (course.peer, course.signature, course.words());
        messages.receive(peer, course.key(word), signature, nothing, Ticket { mailbox, step: word });
        drop(messages);
        let mut following = Following { mailbox, open: Vec::new(), end: 0, failed: None };
        // SAFETY: the caller's promise.
        unsafe { following.add(group, course, pieces) };
        following
    }

    /// Begins more.
    ///
    /// # Safety
    /// As [`Following::begin`].
    unsafe fn add(&mut self, group: &Group, course: &Course, pieces: impl Iterator<Item = (u32, Message)>) {
        let mut messages = group.endpoint().messages();
        let (peer, signature) = (course.peer, course.signature);
        for (index, piece) in pieces {
            let (key, ticket) = (course.key(index), Ticket { mailbox: self.mailbox, step: index });
            match piece {
                Message::Send { from, .. } => messages.send(peer, key, signature, from, ticket),
                Message::Receive { into, .. } | Message::ReceiveAny { into, .. } => {
                    messages.receive(peer, key, signature, into, ticket);
                }
            }
            self.open.push(index);
            self.end = index + 1;
        }
        messages.write_out();
        drop(messages);
        group.endpoint().settle();
    }

    /// Looks whether all have come to their end.
    fn look(&mut self, group: &Group, course: &mut Course) -> Poll<Result<()>> {
        let mut messages = group.endpoint().messages();
        let mail = messages.look(self.mailbox);
        let done = std::mem::take(&mut mail.done);
        let [_, word] = course.words();
        let before = self.open.len();
        self.open.retain(|piece| !done.contains(piece));
        course.left -= (before - self.open.len()) as u32;
        if done.contains(&word) {
            course.given_up.get_or_insert_with(Instant::now);
        }
        if self.open.is_empty() {
            // Nothing is left but the ear, for which a peer that has left is one that says nothing more.
            messages.cancel(self.mailbox);
            return Poll::Ready(Ok(()));
        }
        if self.failed.is_none() {
            let failure = mail.failed.take().map(|failure| (Instant::now(), failure));
            self.failed = failure.or_else(|| Some((course.given_up?, gave_up(course.peer))));
        }
        drop(messages);
        let Some((at, _)) = &self.failed else { return Poll::Pending };
        if at.elapsed() < DOUBT {
            group.endpoint().look_again_at(*at + DOUBT);
            return Poll::Pending;
        }
        course.told = true;
        let failure = self.failed.take().map(|(_, failure)| failure);
        failure.map_or(Poll::Pending, |failure| Poll::Ready(Err(group.tell(failure))))
    }

    fn abandon(&mut self, group: &Group) {
        group.endpoint().messages().cancel(self.mailbox);
    }

    /// The same. Whether they are a send's that go all the same, if they have not gone.
    fn give_up(&mut self, group: &Group, course: &Course) -> bool {
        let mut messages = group.endpoint().messages();
        let mail = messages.look(self.mailbox);
        let [_, word] = course.words();
        let given_up = course.given_up.is_some() || mail.done.contains(&word);
        let fails = given_up || self.failed.is_some() || mail.failed.is_some();
        let ended = mail.done.len();
        let remains = messages.cancel(self.mailbox);
        drop(messages);
        course.sends && !fails && (ended == self.open.len() || remains == Remains::Whole)
    }
}

/// The other side of a message has given up after the first piece.
fn gave_up(peer: u32) -> Failure {
    let what = "gave up in the middle of a message: timed out, or cancelled".into();
    Failure::Peer { peer, status: Status::PeerFailed, what }
}

/// The pieces of one message that come and go one by one, each in memory of its own. Behind the first, several
/// may be under way.
pub struct Pieces {
    message: Message,
    piece: usize,
    /// A send's place in the order, until its first piece is there.
    place: Option<SendTurn>,
    rest: Arc<Mutex<Option<Rest>>>,
}

impl Pieces {
    /// Those of `message`, of `piece` bytes; where its memory is does not matter.
    pub fn new(message: Message, piece: usize, place: Option<SendTurn>) -> Pieces {
        Pieces { message, piece, place, rest: Arc::default() }
    }

    /// Begins the next piece, whose memory begins at `address`. A piece that is the whole message may be
    /// longer than others. The first has ended before the next begins.
    ///
    /// # Safety
    /// The memory stays valid until the operation has ended or is abandoned, or another of this message is.
    pub unsafe fn next(
        &mut self,
        group: &Group,
        turn: &Turn,
        piece: Piece,
        address: *mut u8,
    ) -> Result<Box<dyn Operation>> {
        let (_, bytes) = self.message.memory();
        if piece.whole {
            let message = self.message.clone().at(address, bytes);
            // SAFETY: the caller's promise.
            let point = unsafe { Point::in_turn(group, turn, message, self.piece, self.place.take()) };
            return Ok(Box::new(point));
        }
        let message = self.message.clone().at(address, piece.len as usize);
        if piece.index == 0 {
            let behind = cut(bytes, self.piece).pieces() - 1;
            // SAFETY: the caller's promise. A piece is not cut.
            let point = unsafe { Point::of(group, turn, message, Cut::whole(), behind, self.place.take()) };
            return Ok(Box::new(First { point, rest: self.rest.clone() }));
        }
        let Some(rest) = &mut *lock(&self.rest) else {
            fail!(Internal, "a piece comes before the first of its message")
        };
        let one = [(piece.index, message)].into_iter();
        // SAFETY: the caller's promise.
        unsafe {
            match &mut rest.following {
                Some(following) => following.add(group, &rest.course, one),
                None => rest.following = Some(Following::begin(group, &rest.course, one)),
            }
        }
        Ok(Box::new(Next { index: piece.index, rest: self.rest.clone() }))
    }
}

/// A message behind its first piece.
struct Rest {
    course: Course,
    /// What of it is under way.
    following: Option<Following>,
}

impl Rest {
    /// Looks whether this piece has come to its end.
    fn look(&mut self, group: &Group, index: u32) -> Poll<Result<()>> {
        let Some(following) = self.following.as_mut().filter(|following| following.open.contains(&index))
        else {
            return Poll::Ready(Ok(()));
        };
        match following.look(group, &mut self.course) {
            Poll::Ready(Ok(())) => {
                self.following = None;
                Poll::Ready(Ok(()))
            }
            // The end of the message, whether or not of this piece.
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending if following.open.contains(&index) => Poll::Pending,
            Poll::Pending => Poll::Ready(Ok(())),
        }
    }
}

/// The first piece of several.
struct First {
    point: Point,
    rest: Arc<Mutex<Option<Rest>>>,
}

impl Operation for First {
    fn advance(&mut self, group: &Group) -> Poll<Result<Completion>> {
        self.point.post_in_turn(group);
        let State::Posted(mailbox) = self.point.state else { return Poll::Pending };
        let course = match self.point.look_at_first(group, mailbox) {
            Poll::Ready(course) => course?,
            Poll::Pending => return Poll::Pending,
        };
        let source = course.source;
        *lock(&self.rest) = Some(Rest { course, following: None });
        Poll::Ready(Ok(Completion { source }))
    }

    fn abandon(&mut self, group: &Group) {
        self.point.abandon(group);
    }

    fn waits_for(&self, group: &Group) -> Vec<u32> {
        self.point.waits_for(group)
    }
}

/// A piece behind the first.
struct Next {
    index: u32,
    rest: Arc<Mutex<Option<Rest>>>,
}

impl Operation for Next {
    fn advance(&mut self, group: &Group) -> Poll<Result<Completion>> {
        let mut rest = lock(&self.rest);
        let Some(rest) = &mut *rest else { return Poll::Ready(Ok(Completion::default())) };
        let source = rest.course.source;
        rest.look(group, self.index).map_ok(|()| Completion { source })
    }

    /// All that are under way are.
    fn abandon(&mut self, group: &Group) {
        if let Some(mut following) = lock(&self.rest).as_mut().and_then(|rest| rest.following.take()) {
            following.abandon(group);
        }
    }

    /// As [`Point::cancel`], of all that are under way, the last piece among them.
    fn cancel(&mut self, group: &Group) -> Option<Completion> {
        let mut rest = lock(&self.rest);
        let rest = rest.as_mut()?;
        let goes = match rest.following.take() {
            Some(mut following) => following.give_up(group, &rest.course),
            // The last has ended.
            None => rest.course.sends && rest.course.left == 0,
        };
        goes.then(|| {
            rest.course.left = 0;
            Completion::default()
        })
    }

    fn waits_for(&self, group: &Group) -> Vec<u32> {
        let rest = lock(&self.rest);
        rest.as_ref().and_then(|rest| group.rank_of(rest.course.peer)).into_iter().collect()
    }
}
