//! What a rank that cannot join leaves in the store, for those who wait for it; and how ranks wait while they
//! meet.
#![forbid(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use crate::deadline::Deadline;
use crate::engine::control::Control;
use crate::engine::endpoint::Endpoint;
use crate::error::{Error, Result, Status};
use crate::rendezvous::store::{self, REFUSAL, Store};

/// How long a rank waits before it looks for a notice: at first, ranks one after the other, and at most. Each
/// time twice as long.
const FIRST: Duration = Duration::from_millis(1500);
const APART: Duration = Duration::from_millis(20);
const LAST: Duration = Duration::from_secs(16);

/// How often who waits looks whether a rank that it has linked with has died, and whether others get through
/// to this one: so often, and more seldom by a millisecond for each rank.
const TURN: Duration = Duration::from_millis(250);

/// How long after a store is seen to be lost the meeting has failed, if it has not come to its end: who
/// served it may have met in peace and gone while the last words are on their way.
const WITHOUT_STORE: Duration = Duration::from_secs(2);

/// How long a store may take beyond a rank's deadline.
pub(super) const GRACE: Duration = Duration::from_millis(500);

/// Where one job's ranks leave notices, and how often this one looks.
pub(super) struct Notice<'a> {
    store: &'a dyn Store,
    key: String,
    pause: Cell<Duration>,
    recalled: Option<&'a dyn Fn() -> Option<Error>>,
    /// How often the endpoint had been disturbed when this rank last looked.
    disturbances: Cell<u32>,
    /// What another rank has said that this one fails with.
    heard: RefCell<Option<Error>>,
    /// Since when the store is known to be lost.
    lost: Cell<Option<Instant>>,
}

impl<'a> Notice<'a> {
    pub(super) fn new(
        store: &'a dyn Store,
        prefix: &str,
        rank: u32,
        recalled: Option<&'a dyn Fn() -> Option<Error>>,
    ) -> Notice<'a> {
        let pause = Cell::new(FIRST + (rank % 64) * APART);
        let key = format!("{prefix}/{REFUSAL}");
        let (disturbances, heard, lost) = Default::default();
        Notice { store, key, pause, recalled, disturbances, heard, lost }
    }

    /// Where it is.
    pub(super) fn store(&self) -> &'a dyn Store {
        self.store
    }

    /// That the store does not answer, if so, behind what is told of a rank.
    pub(super) fn silence(&self) -> String {
        let silent = self.read().err().filter(|error| error.status() == Status::Timeout);
        silent.map_or_else(String::new, |error| format!(", and may be unable to: {error}"))
    }

    /// Why some rank cannot join, if one says so.
    pub(super) fn read(&self) -> Result<Option<Error>> {
        let bytes = self.store.try_get(&self.key, Deadline::after(GRACE))?;
        Ok(match bytes.as_deref().and_then(Control::decode) {
            Some(Control::Failure { error, .. }) => Some(error),
            _ => None,
        })
    }

    /// [`Notice::read`], as this rank fails with it.
    pub(super) fn told(&self) -> Option<Error> {
        self.read().ok().flatten().map(|error| self.hear(error))
    }

    /// What another rank has said, as this rank fails with it.
    pub(super) fn hear(&self, error: Error) -> Error {
        let error = of_another(error);
        self.heard.borrow_mut().get_or_insert(error).clone()
    }

    /// What to pass on when this rank has failed with `error`: what it has heard, if that is why.
    pub(super) fn cause(&self, error: &Error) -> Error {
        self.heard
            .borrow()
            .as_ref()
            .filter(|heard| error.text().contains(heard.text()))
            .unwrap_or(error)
            .clone()
    }

    /// Why this rank cannot join; the others are told, if nobody has told as much. That another rank has
    /// gone, or has not come in time, may follow from what somebody knows better. Who says just that knows no
    /// better than this rank, so both tell; for the others the first of them stands: what follows from it
    /// comes later.
    pub(super) fn leave(&self, error: Error) -> Error {
        match self.read().ok().flatten() {
            // It is that which this rank was told.
            Some(told) if error.text().contains(told.text()) => error,
            Some(told) if follows(&error) && follows(&told) => {
                Error::new(told.status(), format!("{error}; told before: {told}"))
            }
            Some(told) if follows(&error) => of_another(told),
            Some(told) if !follows(&told) => error,
            _ => {
                let _ = self.store.set(&self.key, &encode(error.clone()), Deadline::after(GRACE));
                error
            }
        }
    }

    /// Has the store say `error` if this process ends before `place` is set, which others wait for.
    pub(super) fn leave_if_gone(&self, place: &str, error: Error, deadline: Deadline) -> Result<()> {
        self.store.will(place, &self.key, &encode(error), deadline)
    }

    /// Waits for a key of the store, in turns if that can be: the meeting may be called off, another rank
    /// leave a notice, or one die that `endpoint` has linked with.
    pub(super) fn get(&self, key: &str, endpoint: Option<&Endpoint>, deadline: Deadline) -> Result<Vec<u8>> {
        // A store that ends a wait may have heard why.
        self.wait(key, endpoint, deadline).map_err(|error| match error.status() {
            Status::PeerFailed => self.told().unwrap_or_else(|| self.overtaken(endpoint, error)),
            _ => error,
        })
    }

    /// What a wait has failed with: what another rank has said before, if that it has gone may follow from it.
    pub(super) fn overtaken(&self, endpoint: Option<&Endpoint>, error: Error) -> Error {
        let said = endpoint.filter(|_| follows(&error));
        let said = said.and_then(|endpoint| endpoint.warning(endpoint.identity().0.job));
        said.map_or(error, |said| self.hear(said))
    }

    fn wait(&self, key: &str, endpoint: Option<&Endpoint>, deadline: Deadline) -> Result<Vec<u8>> {
        if self.recalled.is_none() && !self.store.has_turns() {
            return self.store.get(key, deadline);
        }
        let since = Instant::now();
        let found = self.watch(endpoint, deadline, |until| match self.store.get(key, until) {
            Err(error) if error.status() == Status::Timeout => None,
            found => Some(found),
        });
        found.unwrap_or_else(|| match self.store.try_get(key, Deadline::after(GRACE))? {
            Some(value) => Ok(value),
            // It has answered: who should set the key has not.
            None => Err(store::timed_out(self.store, key, since)),
        })
    }

    /// Whether a rank that this one has linked with has gone or failed since it last looked. Who waits in
    /// [`Notice::watch`] ends that then.
    pub(super) fn is_disturbed(&self, endpoint: &Endpoint) -> bool {
        endpoint.disturbances() != self.disturbances.get()
    }

    /// Waits by `wait`, which gives up at a deadline, or before, and looks now and then, and when a rank has
    /// gone or failed that `endpoint` has linked with; `None` at `deadline`. Not for waits of a store without
    /// turns.
    pub(super) fn watch<T>(
        &self,
        endpoint: Option<&Endpoint>,
        deadline: Deadline,
        mut wait: impl FnMut(Deadline) -> Option<Result<T>>,
    ) -> Option<Result<T>> {
        let mut look = Deadline::after(self.pause.get());
        let turn = endpoint.map(|endpoint| {
            let ranks = endpoint.identity().0.size;
            (TURN + Duration::from_millis(ranks.into())).min(LAST)
        });
        loop {
            let until = look.min(deadline);
            let until = turn.map_or(until, |turn| until.min(Deadline::after(turn)));
            if let Some(result) = wait(until) {
                return Some(result);
            }
            if let ControlFlow::Break(end) = self.look_up(endpoint, deadline, &mut look) {
                return end.map(Err);
            }
        }
    }

    /// Whether a wait goes on that gives up at `deadline`; else why not, if it is for more than that. Looks
    /// for a notice at `look`, or now if something has happened.
    fn look_up(
        &self,
        endpoint: Option<&Endpoint>,
        deadline: Deadline,
        look: &mut Deadline,
    ) -> ControlFlow<Option<Error>> {
        if let Some(error) = self.recalled.and_then(|recalled| recalled()) {
            return ControlFlow::Break(Some(error));
        }
        if deadline.expired() {
            return ControlFlow::Break(None);
        }
        if let Some(why) =
            endpoint.and_then(|endpoint| endpoint.registration().shut()).or_else(|| self.store.shut())
        {
            return ControlFlow::Break(Some(Error::new(Status::System, why)));
        }
        let disturbed = endpoint.filter(|endpoint| self.is_disturbed(endpoint));
        if let Some(error) = disturbed.and_then(|endpoint| self.disturb(endpoint)) {
            return ControlFlow::Break(Some(error));
        }
        if disturbed.is_none() && !look.expired() {
            return ControlFlow::Continue(());
        }
        match self.read() {
            Ok(Some(error)) => return ControlFlow::Break(Some(self.hear(error))),
            Err(error) if error.status() == Status::PeerFailed => {
                let since = self.lost.get().unwrap_or_else(Instant::now);
                if since.elapsed() >= WITHOUT_STORE {
                    return ControlFlow::Break(Some(error));
                }
                self.lost.set(Some(since));
                *look = Deadline::after(GRACE);
                return ControlFlow::Continue(());
            }
            _ => {}
        }
        if disturbed.is_none() {
            self.pause.set((2 * self.pause.get()).min(LAST));
        }
        *look = Deadline::after(self.pause.get());
        ControlFlow::Continue(())
    }

    /// What has happened to the ranks that are linked: a failure of one, or a death, of which another rank
    /// may know more.
    fn disturb(&self, endpoint: &Endpoint) -> Option<Error> {
        self.disturbances.set(endpoint.disturbances());
        if let Some(error) = endpoint.warning(endpoint.identity().0.job) {
            return Some(self.hear(error));
        }
        let death = endpoint.death()?;
        Some(self.told().unwrap_or(death))
    }
}

fn encode(error: Error) -> Vec<u8> {
    Control::Failure { group: 0, error }.encode()
}

/// Whether it may follow from another rank's failure.
fn follows(error: &Error) -> bool {
    matches!(error.status(), Status::PeerFailed | Status::Timeout)
}

/// What it is for who is told: a call that is wrong elsewhere may be right here.
fn of_another(error: Error) -> Error {
    match error.status() {
        Status::InvalidArgument | Status::InvalidUsage => Error::new(Status::PeerFailed, error.text()),
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::fail;
    use crate::rendezvous::hash::HashStore;
    use crate::rendezvous::secret::SecretKey;
    use crate::transport::service::{Identity, Options, Port};

    /// Has stopped, if it is so.
    struct Stopped(bool);

    impl Stopped {
        fn answer<T>(&self, answer: Result<T>, deadline: Deadline) -> Result<T> {
            std::thread::sleep(deadline.remaining_capped(Duration::from_secs(60)));
            if self.0 { fail!(Timeout, "no answer from the store") } else { answer }
        }
    }

    impl Store for Stopped {
        fn set(&self, _: &str, _: &[u8], deadline: Deadline) -> Result<()> {
            self.answer(Ok(()), deadline)
        }

        fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
            self.answer(Err(store::timed_out(self, key, Instant::now())), deadline)
        }

        fn try_get(&self, _: &str, deadline: Deadline) -> Result<Option<Vec<u8>>> {
            self.answer(Ok(None), deadline)
        }

        fn add(&self, _: &str, _: i64, deadline: Deadline) -> Result<i64> {
            self.answer(Ok(1), deadline)
        }

        fn describe(&self) -> String {
            "a store".into()
        }
    }

    #[test]
    fn a_rank_is_blamed_for_a_key_only_if_the_store_answers() {
        for (stopped, words) in [(true, "no answer from the store"), (false, "look at the rank that should")]
        {
            let store = Stopped(stopped);
            let notice = Notice::new(&store, "job/0", 0, None);
            let error = notice.get("job/0/rank/1", None, Deadline::after(Duration::from_millis(50)));
            let error = error.expect_err("nobody sets it");
            assert_eq!(error.status(), Status::Timeout, "{error}");
            assert!(error.text().contains(words), "{error}");
            assert_eq!(notice.silence().contains(words), stopped);
        }
    }

    /// What two ranks say that fail one after the other, as `first` and as `second`.
    fn left(first: (Status, &str), second: (Status, &str)) -> [Error; 2] {
        let store = HashStore::new();
        [(0, first), (1, second)].map(|(rank, (status, text))| {
            Notice::new(&store, "job/0", rank, None).leave(Error::new(status, text))
        })
    }

    #[test]
    fn who_knows_the_cause_tells_it_for_those_who_wait() {
        let cause = (Status::System, "no descriptors");
        for consequence in [(Status::Timeout, "rank 0 has not come"), (Status::PeerFailed, "rank 0 has left")]
        {
            let [first, second] = left(cause, consequence);
            assert_eq!((first.status(), first.text()), cause);
            assert_eq!(second, first);
            // Known too late for the other, and still this rank's own.
            let [_, second] = left(consequence, cause);
            assert_eq!((second.status(), second.text()), cause);
            // Who looks after both is told the cause.
            let store = HashStore::new();
            for (rank, (status, text)) in [(0, consequence), (1, cause)] {
                Notice::new(&store, "job/0", rank, None).leave(Error::new(status, text));
            }
            let told = Notice::new(&store, "job/0", 2, None).told().expect("a notice");
            assert_eq!((told.status(), told.text()), cause);
        }
    }

    #[test]
    fn who_has_waited_in_vain_does_not_hide_why_another_rank_cannot_join() {
        let waited = (Status::Timeout, "rank 1 has not come");
        for own in [(Status::Timeout, "too many open files"), (Status::PeerFailed, "too many open files")] {
            let [first, second] = left(waited, own);
            assert_eq!((first.status(), first.text()), waited);
            assert_eq!(second.status(), Status::Timeout);
            assert!(second.text().contains(own.1) && second.text().contains(waited.1), "{second}");
        }
    }

    #[test]
    fn a_rank_that_is_gone_is_told_of_and_named_by_who_finds_what_follows() {
        let gone = (Status::PeerFailed, "rank 1 is gone");
        for own in [(Status::PeerFailed, "cannot reach rank 0"), (Status::Timeout, "rank 0 has not come")] {
            let [first, second] = left(gone, own);
            assert_eq!((first.status(), first.text()), gone);
            assert_eq!(second.status(), Status::PeerFailed);
            assert!(second.text().contains(own.1) && second.text().contains(gone.1), "{second}");
        }
        // Who was told says it once.
        let [_, second] = left(gone, (Status::PeerFailed, "rank 2 joins: rank 1 is gone"));
        assert_eq!(second.text(), "rank 2 joins: rank 1 is gone");
    }

    #[test]
    fn what_a_rank_has_said_before_it_left_counts_more_than_that_it_has() {
        let identity = Identity { rank: 0, size: 2, secret: SecretKey::new([1; 32]), job: 7 };
        let endpoint = Endpoint::new(identity, Options::default()).expect("an endpoint");
        let (cause, store) = (Error::new(Status::System, "no descriptors"), HashStore::new());
        let (left, own) = (Error::new(Status::PeerFailed, "rank 1 has left"), Error::new(Status::Cuda, "no"));
        let notice = Notice::new(&store, "job/0", 0, None);
        assert_eq!(notice.overtaken(Some(&endpoint), left.clone()), left);
        endpoint.control(1, &Control::Failure { group: 7, error: cause.clone() }.encode());
        assert_eq!(notice.overtaken(Some(&endpoint), left), cause);
        assert_eq!(notice.cause(&cause), cause, "it is passed on as it was heard");
        assert_eq!(notice.overtaken(Some(&endpoint), own.clone()), own);
    }

    #[test]
    fn a_call_that_is_wrong_elsewhere_is_not_wrong_here() {
        for status in [Status::InvalidArgument, Status::InvalidUsage] {
            let [first, second] =
                left((status, "no such interface"), (Status::PeerFailed, "rank 0 has left"));
            assert_eq!(first.status(), status);
            assert_eq!((second.status(), second.text()), (Status::PeerFailed, "no such interface"));
        }
    }
}
