//! Contexts: creation, failure, and what ranks exchange to make others.

mod child;
mod successor;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::cuda::Cuda;
use super::limits::Limits;
use super::meeting::{self, Found};
use super::plans::{Plans, Seat};
use super::{Call, Options, Recall, Rendezvous, sparse};
use crate::collective::checked::Checked;
use crate::collective::request::{Counts, Kind, Request};
use crate::deadline::{Deadline, Timeout};
use crate::engine::bootstrap::{self, MAX_RANKS, Meeting};
use crate::engine::executor::{Plan, Run};
use crate::engine::group::{Calling, Group, Rest};
use crate::engine::wire::Class;
use crate::error::{Error, Result, Status, fail};
use crate::reduce::{DataType, Operator};
use crate::rendezvous::join;
use crate::rendezvous::store::Store;
use crate::signature::{Making, Signature};
use crate::transport::service::Parting;

pub use child::Child;

/// One rank's membership in a group: a communicator. Cheap to clone; all methods from any thread.
#[derive(Clone)]
pub struct Context(Arc<Inner>);

struct Inner {
    /// In errors and logs: the other ranks may have another.
    name: String,
    /// See [`Options::timeout`]. A group has the same.
    timeout: Timeout,
    membership: Membership,
    plans: Plans,
    sparse_memory: Arc<sparse::Pool>,
    /// Of what hosts do among themselves: their ranks have other numbers there.
    plans_across: Plans,
    failure: OnceLock<Error>,
    /// See [`Context::limit_blocks`]; 0: unset.
    max_blocks: AtomicU32,
    cuda: Cuda,
    /// Behind all that holds the group's endpoint.
    _parting: Option<Parting>,
    /// Kept alive as long as the context: the embedded server of its store. Nobody needs a directory once the
    /// ranks have met.
    _store: Option<Arc<dyn Store>>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Membership::Group(group) = &self.membership {
            group.see_off();
        }
    }
}

/// A group of one needs no endpoint, no memory and no thread.
pub(super) enum Membership {
    Solo,
    Group(Arc<Group>),
}

impl Context {
    /// Tells it from every other that lives; its clones have the same.
    pub(super) fn key(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    /// Meets the other ranks and returns when all have arrived.
    pub fn create(options: Options) -> Result<Context> {
        Context::meet(options, None, None)
    }

    /// [`Context::create`] with a name for errors and logs that need not be the other ranks', unless `recall`
    /// calls it off. The store is asked in turns for what other ranks write there: it is one whose waits time
    /// out.
    pub fn create_unless(recall: &Recall, options: Options, label: Option<String>) -> Result<Context> {
        Context::meet(options, label, Some(recall))
    }

    fn meet(options: Options, label: Option<String>, recall: Option<&Recall>) -> Result<Context> {
        let timeout = options.timeout;
        let limits = Limits::begin(timeout);
        let deadline = limits.come;
        let name = if options.name.is_empty() { "default".to_string() } else { options.name.clone() };
        let label = label.unwrap_or_else(|| name.clone());
        let own = options.rank;
        let recalled = recall.map(|recall| move || recall.reason(own));
        let recalled = recalled.as_ref().map(|recalled| recalled as &dyn Fn() -> Option<Error>);
        // What the caller says wrong is its own, and it may try again: it has come nowhere yet.
        meeting::check(&options)?;
        let Found { rank, size, store, secret, fits, exits } = meeting::find(&options, deadline, recalled)?;
        if size == 0 || size > MAX_RANKS {
            fail!(InvalidArgument, "size {size} is out of range: a group has 1 to {MAX_RANKS} ranks");
        }
        if rank >= size {
            fail!(
                InvalidArgument,
                "rank {rank} is out of range: the group has {size} ranks, 0 to {}",
                size - 1
            );
        }
        if size == 1 {
            return Ok(Context::new(label, timeout, Membership::Solo, None));
        }
        let once = matches!(options.rendezvous, Rendezvous::Invitation(_));
        let by_id = once || matches!(options.rendezvous, Rendezvous::Id(_));
        // Waits of our own stores time out: they are cut into turns, so that ranks hear of each other
        // meanwhile.
        let is_ours = !matches!(options.rendezvous, Rendezvous::Store(_));
        let recalled = recalled.or(is_ours.then_some(&|| None));
        let leads = rank == 0 && matches!(options.rendezvous, Rendezvous::Environment);
        // What else is wrong, with the environment or the host, no other try mends: the others are to hear it.
        // Not in a program's store, where this rank would have to wait for rank 0's secret first.
        let links = fits.and_then(|()| meeting::link_options(&options));
        let links = if is_ours { links } else { Ok(links?) };
        let links = links.and_then(|links| meeting::on_interface(links, &options));
        let (name, options, tied) = (name.as_str(), links, recall.is_some_and(Recall::is_tied));
        let meeting =
            Meeting { rank, size, name, store: &*store, secret, options, deadline, recalled, tied, once };
        let met = bootstrap::meet(meeting);
        if leads {
            join::is_over(met.is_err().then(|| store.clone()));
        }
        let (endpoint, job) = met?;
        if let Some(exits) = exits {
            endpoint.watch_exits(exits);
        }
        let members = (0..size).collect();
        let group = Group::new(endpoint, job, label.clone(), rank, members, timeout);
        // Once the ranks have met nobody asks it again. An id's server its maker keeps elsewhere; a directory
        // rank 0 removes when all have settled, since a process that exits does not destroy its contexts.
        let kept = (!by_id && store.file_of("").is_none()).then(|| store.clone());
        let context = Context::new(label, timeout, Membership::Group(group), kept);
        if let Some(recall) = recall {
            recall.enter(&context);
        }
        context.settled(limits.have_come(), Making::Create)
    }

    fn new(
        name: String,
        timeout: Duration,
        membership: Membership,
        store: Option<Arc<dyn Store>>,
    ) -> Context {
        let parting = match &membership {
            Membership::Solo => None,
            Membership::Group(group) => Some(group.endpoint().registration().parting()),
        };
        Context(Arc::new(Inner {
            name,
            timeout: Timeout::new(timeout),
            membership,
            plans: Plans::default(),
            sparse_memory: Arc::default(),
            plans_across: Plans::default(),
            failure: OnceLock::new(),
            max_blocks: AtomicU32::new(0),
            cuda: Cuda::default(),
            _parting: parting,
            _store: store,
        }))
    }

    /// This rank within the group.
    pub fn rank(&self) -> u32 {
        match &self.0.membership {
            Membership::Solo => 0,
            Membership::Group(group) => group.rank(),
        }
    }

    /// The same on all ranks of the group, and no other group's; 0 for a group of one.
    pub fn id(&self) -> u64 {
        match &self.0.membership {
            Membership::Solo => 0,
            Membership::Group(group) => group.id(),
        }
    }

    /// How many ranks the group has.
    pub fn size(&self) -> u32 {
        match &self.0.membership {
            Membership::Solo => 1,
            Membership::Group(group) => group.size(),
        }
    }

    pub(super) fn membership(&self) -> &Membership {
        &self.0.membership
    }

    pub(super) fn cuda(&self) -> &Cuda {
        &self.0.cuda
    }

    /// What sparse calls work in.
    pub(super) fn sparse_memory(&self) -> &Arc<sparse::Pool> {
        &self.0.sparse_memory
    }

    pub(super) fn plans(&self) -> &Plans {
        &self.0.plans
    }

    pub(super) fn plans_across(&self) -> &Plans {
        &self.0.plans_across
    }

    pub(super) fn seat(&self) -> Seat {
        match &self.0.membership {
            Membership::Solo => Seat::new(0, 1, 1),
            Membership::Group(group) => {
                let seat = Seat::new(group.rank(), group.size(), group.ranks_per_node());
                Seat { portion: self.cuda().portion_bytes(), hauled: group.endpoint().all_haul(), ..seat }
            }
        }
    }

    /// The group's name in errors and logs.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Allows the kernels by which this group's GPUs exchange at most so many blocks each: they take so many
    /// multiprocessors at most. 0 is no limit. The ranks agree on the least that any of them allows, when
    /// their GPUs agree to exchange (at the first collective on device memory, or in
    /// [`Context::connect_device`]); said later, it changes nothing. Of kernels that carry by way of the host
    /// each rank obeys its own, from then on; they have two at least, or three where they combine. Children
    /// begin with it.
    pub fn limit_blocks(&self, max_blocks: u32) {
        self.0.max_blocks.store(max_blocks, Ordering::Relaxed);
    }

    pub(super) fn max_blocks(&self) -> u32 {
        self.0.max_blocks.load(Ordering::Relaxed)
    }

    /// Has whoever waits for messages here look again.
    pub(super) fn wake(&self) {
        if let Membership::Group(group) = self.membership() {
            group.endpoint().wake();
        }
    }

    /// Fails everything that is running or to come on this context, on this rank and (within a second) on the
    /// others. Returns at once; from any thread. What works were given of host memory is the caller's again
    /// then.
    pub fn abort(&self) {
        self.abort_because(None);
    }

    /// Ends this rank's part for good. If nothing of it is under way, as far as the context or `elsewhere`
    /// knows, what runs or is to come fails here alone: the others are told as little as where a context is
    /// dropped, since what they have called may be complete by what this rank has sent. Who waits for this
    /// rank fails within a second, also while the context is held here. Else this is [`Context::abort`]; so it
    /// is where a graph of any rank has calls of the context, whose replays nothing else would end, and where
    /// the driver does not say in a moment that its GPU is done. Waits for nobody.
    pub fn leave(&self, elsewhere: impl FnOnce() -> Rest) {
        let has_left = match &self.0.membership {
            Membership::Solo => false,
            Membership::Group(group) => group.leave(&self.aborted(None), elsewhere),
        };
        if !has_left {
            self.abort();
        }
    }

    fn aborted(&self, cause: Option<&str>) -> Error {
        let mut text = format!("rank {} aborted '{}'", self.rank(), self.name());
        if let Some(cause) = cause {
            text = format!("{text}: {cause}");
        }
        Error::new(Status::Aborted, text)
    }

    /// As [`Context::abort`], with a cause of the program's, which the failure tells on every rank.
    pub fn abort_because(&self, cause: Option<&str>) {
        self.fail(self.aborted(cause));
        if let Membership::Group(group) = &self.0.membership {
            group.end_all();
        }
    }

    /// Fails everything that is running or to come on this context for a cause of this rank's, as
    /// [`Context::abort`].
    pub(super) fn fail(&self, error: Error) {
        match &self.0.membership {
            Membership::Solo => drop(self.0.failure.set(error)),
            Membership::Group(group) => group.fail(error),
        }
    }

    /// The deadline of operations that name none.
    pub(super) fn timeout(&self) -> Duration {
        self.0.timeout.get()
    }

    /// From now on [`Options::timeout`] is this, for what this rank calls and for the children that it makes.
    pub fn set_timeout(&self, timeout: Duration) {
        self.0.timeout.set(timeout);
        if let Membership::Group(group) = &self.0.membership {
            group.set_timeout(timeout);
        }
    }

    /// The first failure of this context, if there was one.
    pub fn failure(&self) -> Option<Error> {
        match &self.0.membership {
            Membership::Solo => self.0.failure.get().cloned(),
            Membership::Group(group) => group.failure(),
        }
    }

    /// A few words from every rank, in rank order.
    pub(super) fn exchange<const WORDS: usize>(
        &self,
        group: &Arc<Group>,
        mine: [u64; WORDS],
        until: Deadline,
        making: Making,
    ) -> Result<Vec<[u64; WORDS]>> {
        let mut all = vec![[0; WORDS]; group.size() as usize];
        self.exchange_into(group, &mine, all.as_flattened_mut(), until, making)?;
        Ok(all)
    }

    /// `all` has room for as many words of each rank.
    fn exchange_into(
        &self,
        group: &Arc<Group>,
        mine: &[u64],
        all: &mut [u64],
        until: Deadline,
        making: Making,
    ) -> Result<()> {
        debug_assert_eq!(all.len(), mine.len() * group.size() as usize);
        let request = Request {
            kind: Kind::Allgather,
            input: mine.as_ptr().cast(),
            output: all.as_mut_ptr().cast(),
            counts: Counts::Uniform(mine.len() as u64),
            dtype: DataType::U64,
            operator: Operator::Sum,
            root: 0,
        };
        let (signature, plan) = self.internal_plan(group, &request)?;
        let signature = signature.of_making(making);
        let left = until.remaining().unwrap_or(Duration::MAX);
        group.run(Calling { class: Class::Internal, tag: 0, signature, timeout: Some(left) }, |turn| {
            // SAFETY: `mine` and `all` outlive the run, and have the lengths that the request says.
            unsafe { Run::new(group, turn, plan, request.input, request.output) }
        })?;
        Ok(())
    }

    /// How a request of our own is run.
    pub(super) fn internal_plan(&self, group: &Group, request: &Request) -> Result<(Signature, Arc<Plan>)> {
        let mut checked = Checked::new(request, group.rank(), group.size())?;
        let (plan, _) = self.0.plans.plan(&mut checked, &Call::default(), self.seat())?;
        Ok((checked.signature, plan))
    }
}

/// The default deadline of a context.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);

#[cfg(test)]
pub(super) mod tests {
    use std::time::Instant;

    use super::*;
    use crate::communicator::Work;
    use crate::rendezvous::hash::HashStore;

    pub(super) const PATIENCE: Duration = Duration::from_secs(20);

    fn options(rank: u32, store: &Arc<dyn Store>, timeout: Duration) -> Options {
        Options {
            rank,
            size: 2,
            rendezvous: Rendezvous::Store(store.clone()),
            name: String::new(),
            timeout,
            interface: Some("127.0.0.1".into()),
            transports: Some("shm".into()),
            host: None,
        }
    }

    /// Two ranks of one group.
    pub(in crate::communicator) fn pair(timeouts: [Duration; 2]) -> [Context; 2] {
        let store: Arc<dyn Store> = Arc::new(HashStore::new());
        let join = |rank: u32| {
            Context::create(options(rank, &store, timeouts[rank as usize])).expect("the ranks meet")
        };
        std::thread::scope(|scope| {
            let ranks = [0, 1].map(|rank| scope.spawn(move || join(rank)));
            ranks.map(|rank| rank.join().expect("a rank"))
        })
    }

    /// Has a message go from rank 0 to rank 1.
    fn send([from, to]: &[Context; 2]) {
        let (given, mut taken) = ([7u8; 4], [0u8; 4]);
        let output = taken.as_mut_ptr();
        let request = |kind, root| Request {
            kind,
            input: given.as_ptr(),
            output,
            counts: Counts::Uniform(4),
            dtype: DataType::U8,
            operator: Operator::Sum,
            root,
        };
        let requests = [(from, request(Kind::Send, 1)), (to, request(Kind::Receive, 0))];
        // SAFETY: the memory lives until the message has come.
        let works = requests.map(|(context, request)| unsafe { context.start(&request, &Call::default()) });
        for work in works {
            work.expect("it is started").wait(Deadline::after(PATIENCE)).expect("it comes");
        }
        assert_eq!(taken, given);
    }

    /// No goodbye tells of it, nor the end of its group.
    #[test]
    fn who_waits_for_a_rank_that_has_left_hears_though_it_holds_its_contexts() {
        for has_another in [false, true] {
            let both = pair([PATIENCE; 2]);
            let others = has_another.then(|| {
                std::thread::scope(|scope| {
                    let others = both.each_ref().map(|context| scope.spawn(|| context.duplicate()));
                    others.map(|other| other.join().expect("no panic").expect("another"))
                })
            });
            send(&both);
            let [leaves, stays] = both;
            let mut taken = [0u8; 4];
            let output = taken.as_mut_ptr();
            let begin = |kind| {
                let request = Request {
                    kind,
                    input: output,
                    output,
                    counts: Counts::Uniform(4),
                    dtype: DataType::U8,
                    operator: Operator::Sum,
                    root: 0,
                };
                // SAFETY: the memory lives until the call has ended.
                unsafe { stays.start(&request, &Call::default()) }.expect("it is started")
            };
            let before = begin(Kind::Receive);
            leaves.leave(|| Rest::Known(true));
            assert_eq!(leaves.failure().map(|error| error.status()), Some(Status::Aborted));
            let hears = |work: Work| work.wait(Deadline::after(PATIENCE)).expect_err("it never comes");
            for error in [before, begin(Kind::Receive)].map(hears) {
                assert_eq!(error.status(), Status::PeerFailed, "{error}");
                assert!(error.text().contains("rank 0") && error.text().contains("has left"), "{error}");
            }
            assert_eq!(stays.failure(), None, "messages alone have failed");
            // Of a collective it may be told why, too.
            let error = hears(begin(Kind::Allreduce));
            assert!([Status::PeerFailed, Status::Aborted].contains(&error.status()), "{error}");
            drop((leaves, others));
        }
    }

    #[test]
    fn a_rank_that_has_no_such_interface_keeps_nobody_waiting() {
        let store: Arc<dyn Store> = Arc::new(HashStore::new());
        let join = &|rank, interface: &str| {
            let options = options(rank, &store, 2 * PATIENCE);
            let options = Options { interface: Some(interface.into()), transports: None, ..options };
            Context::create_unless(&Recall::default(), options, None).map(drop).expect_err("they cannot meet")
        };
        let start = Instant::now();
        let errors = std::thread::scope(|scope| {
            let ranks =
                [(0, "127.0.0.1"), (1, "nosuch0")].map(|(rank, name)| scope.spawn(move || join(rank, name)));
            ranks.map(|rank| rank.join().expect("a rank"))
        });
        assert!(start.elapsed() < PATIENCE);
        for error in errors {
            assert!(error.text().contains("nosuch0"), "{error}");
        }
    }

    pub(super) const TIMEOUT: Duration = Duration::from_secs(4);
    const LATE: Duration = Duration::from_millis(3500);

    /// Rank 0 makes a group with rank 1, which comes late and does not go on: that has the timeout together.
    pub(super) fn times_out(
        name: &str,
        make: impl FnOnce() -> Result<Context> + Send,
        come: impl FnOnce() -> Held,
    ) {
        let began = Instant::now();
        std::thread::scope(|scope| {
            let makes = scope.spawn(make);
            std::thread::sleep(LATE);
            let _stays = come();
            let error = makes.join().expect("no panic").err().expect("rank 1 does not go on");
            let after = began.elapsed();
            assert_eq!(error.status(), Status::Timeout, "{error}");
            for part in [
                &format!("'{name}' is not there "),
                "from rank 1 (host ",
                "rank 1, or raise the context's timeout_ms",
            ] {
                assert!(error.text().contains(part), "no '{part}' in: {error}");
            }
            assert!((TIMEOUT..LATE + TIMEOUT - TIMEOUT / 8).contains(&after), "{after:?}: {error}");
        });
    }

    /// Holds what rank 1 has come with.
    pub(super) struct Held(#[expect(dead_code, reason = "held")] pub Box<dyn std::any::Any>);

    #[test]
    fn all_steps_of_a_creation_have_one_timeout() {
        let store: Arc<dyn Store> = Arc::new(HashStore::new());
        times_out(
            "default",
            || Context::create(options(0, &store, TIMEOUT)),
            || {
                let own = options(1, &store, TIMEOUT);
                let (size, name, secret, recalled) = (2, "default", None, None);
                let (tied, once) = (false, false);
                let options = meeting::on_interface(meeting::link_options(&own).expect("options"), &own);
                let deadline = Deadline::after(PATIENCE);
                let store = &*store;
                let meeting =
                    Meeting { rank: 1, size, name, store, secret, options, deadline, recalled, tied, once };
                Held(Box::new(bootstrap::meet(meeting).expect("the ranks meet")))
            },
        );
    }
}
