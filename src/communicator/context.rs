//! Contexts: creation, children, failure.

mod successor;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use super::cuda::Cuda;
use super::limits::Limits;
use super::meeting::{self, Found};
use super::plans::{Plans, Seat};
use super::{Call, Options, Recall, Rendezvous, sparse};
use crate::collective::checked::Checked;
use crate::collective::request::{Counts, Kind, Request};
use crate::deadline::Deadline;
use crate::engine::bootstrap::{self, MAX_RANKS, Meeting};
use crate::engine::endpoint::lock;
use crate::engine::executor::{Plan, Run};
use crate::engine::group::Group;
use crate::engine::wire::Class;
use crate::error::{Error, Result, Status, fail};
use crate::reduce::{DataType, Operator};
use crate::rendezvous::join;
use crate::rendezvous::secret::SecretKey;
use crate::rendezvous::store::Store;
use crate::signature::{Making, Signature};
use crate::transport::service::Parting;

/// One rank's membership in a group: a communicator. Cheap to clone; all methods from any thread.
#[derive(Clone)]
pub struct Context(Arc<Inner>);

struct Inner {
    /// In errors and logs: the other ranks may have another.
    name: String,
    /// See [`Options::timeout`].
    timeout: Duration,
    place: Place,
    plans: Plans,
    sparse_memory: Arc<sparse::Pool>,
    /// Of what hosts do among themselves: their ranks have other numbers there.
    plans_across: Plans,
    line: Arc<Line>,
    failure: OnceLock<Error>,
    /// See [`Context::limit_blocks`]; 0: unset.
    max_blocks: AtomicU32,
    cuda: Cuda,
    /// Behind all that holds the group's endpoint.
    _parting: Option<Parting>,
    /// Kept alive as long as the context: the embedded server of its store. Nobody needs a directory once the ranks have met.
    _store: Option<Arc<dyn Store>>,
}

/// What tells a group's children from those of others. Contexts that take each other's place have one, so that ranks make the same children
/// though some of them have the one and some the other.
struct Line {
    id: u64,
    /// How often each named child was made: makes the next one different.
    children: Mutex<HashMap<(String, Vec<u32>), u32>>,
}

impl Line {
    fn of(place: &Place) -> Arc<Line> {
        let id = match place {
            Place::Solo => 0,
            Place::Group(group) => group.id(),
        };
        Arc::new(Line { id, children: Mutex::default() })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Place::Group(group) = &self.place {
            group.see_off();
        }
    }
}

/// A group of one needs no endpoint, no memory and no thread.
pub(super) enum Place {
    Solo,
    Group(Arc<Group>),
}

impl Context {
    /// Meets the other ranks and returns when all have arrived.
    pub fn create(options: Options) -> Result<Context> {
        Context::meet(options, None, None)
    }

    /// [`Context::create`] with a name for errors and logs that need not be the other ranks', unless `recall` calls it off. The store
    /// is asked in turns for what other ranks write there: it is one whose waits time out.
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
        let Found { rank, size, store, secret, exits } = meeting::find(&options, deadline, recalled)?;
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
            return Ok(Context::new(label, timeout, Place::Solo, None));
        }
        let by_id = matches!(options.rendezvous, Rendezvous::Id(_));
        // Waits of our own stores time out: they are cut into turns, so that ranks hear of each other meanwhile.
        let is_ours = !matches!(options.rendezvous, Rendezvous::Store(_));
        let recalled = recalled.or(is_ours.then_some(&|| None));
        let leads = rank == 0 && matches!(options.rendezvous, Rendezvous::Environment);
        // What is no option is the caller's, who may try again; that the host lacks something the others are to hear.
        let links = meeting::on_interface(meeting::link_options(&options)?, &options);
        let (name, options) = (name.as_str(), links);
        let meeting = Meeting { rank, size, name, store: &*store, secret, options, deadline, recalled };
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
        // Once the ranks have met nobody asks it again. An id's server its maker keeps elsewhere; a directory rank 0 removes when all have
        // settled, since a process that exits does not destroy its contexts.
        let kept = (!by_id && store.file_of("").is_none()).then(|| store.clone());
        let context = Context::new(label, timeout, Place::Group(group), kept);
        if let Some(recall) = recall {
            recall.enter(&context);
        }
        context.settled(limits.have_come(), Making::Create)
    }

    fn new(name: String, timeout: Duration, place: Place, store: Option<Arc<dyn Store>>) -> Context {
        let line = Line::of(&place);
        Context::of_line(name, timeout, place, store, line)
    }

    fn of_line(
        name: String,
        timeout: Duration,
        place: Place,
        store: Option<Arc<dyn Store>>,
        line: Arc<Line>,
    ) -> Context {
        let parting = match &place {
            Place::Solo => None,
            Place::Group(group) => Some(group.endpoint().registration().parting()),
        };
        Context(Arc::new(Inner {
            name,
            timeout,
            place,
            plans: Plans::default(),
            sparse_memory: Arc::default(),
            plans_across: Plans::default(),
            line,
            failure: OnceLock::new(),
            max_blocks: AtomicU32::new(0),
            cuda: Cuda::default(),
            _parting: parting,
            _store: store,
        }))
    }

    /// This rank within the group.
    pub fn rank(&self) -> u32 {
        match &self.0.place {
            Place::Solo => 0,
            Place::Group(group) => group.rank(),
        }
    }

    /// The same on all ranks of the group, and no other group's; 0 for a group of one.
    pub fn id(&self) -> u64 {
        match &self.0.place {
            Place::Solo => 0,
            Place::Group(group) => group.id(),
        }
    }

    /// How many ranks the group has.
    pub fn size(&self) -> u32 {
        match &self.0.place {
            Place::Solo => 1,
            Place::Group(group) => group.size(),
        }
    }

    pub(super) fn place(&self) -> &Place {
        &self.0.place
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
        match &self.0.place {
            Place::Solo => Seat::new(0, 1, 1),
            Place::Group(group) => {
                let seat = Seat::new(group.rank(), group.size(), group.ranks_per_node());
                Seat { portion: self.cuda().portion_bytes(), hauled: group.endpoint().all_haul(), ..seat }
            }
        }
    }

    /// The group's name in errors and logs.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Allows the kernels by which this group's GPUs exchange at most so many blocks each: they take so many multiprocessors at
    /// most. 0 is no limit. The ranks agree on the least that any of them allows, when their GPUs agree to exchange (at the
    /// first collective on device memory, or in [`Context::connect_device`]); said later, it changes nothing. Of kernels that carry by
    /// way of the host each rank obeys its own, from then on; they have two at least, or three where they combine. Children begin
    /// with it.
    pub fn limit_blocks(&self, max_blocks: u32) {
        self.0.max_blocks.store(max_blocks, Ordering::Relaxed);
    }

    pub(super) fn max_blocks(&self) -> u32 {
        self.0.max_blocks.load(Ordering::Relaxed)
    }

    /// Collective over this group: a child group for each colour, ranks ordered by key, then by rank here.
    /// `None`: this rank takes part in no child.
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Context>> {
        self.begin_split(color, key)?.map(Child::meet).transpose()
    }

    /// The first half of [`Context::split`]: what all ranks of this group do, in the same order if they split it several
    /// times. The members of the child have yet to meet.
    pub fn begin_split(&self, color: Option<u32>, key: i64) -> Result<Option<Child>> {
        self.begin_split_within(Limits::begin(self.timeout()), color, key)
    }

    fn begin_split_within(&self, limits: Limits, color: Option<u32>, key: i64) -> Result<Option<Child>> {
        let child = |color: u32, ranks| {
            self.child(Making::Part, &format!("/{color}"), format!("{}/{color}", self.name()), ranks)
        };
        let Place::Group(group) = &self.0.place else {
            return self.failure().map_or(Ok(color.map(|color| child(color, vec![0]))), Err);
        };
        // Colour (with one bit for "none") and key of each rank.
        let mine = [color.map_or(u64::MAX, u64::from), key as u64];
        let all = self.exchange(group, mine, limits.come, Making::Split)?;
        let Some(color) = color else { return Ok(None) };
        let mut ranks: Vec<[u64; 2]> = all
            .iter()
            .zip(0..)
            .filter(|([other, _], _)| *other == u64::from(color))
            // Keys less than 0 come first.
            .map(|([_, key], rank)| [key ^ 1 << 63, rank])
            .collect();
        ranks.sort_unstable();
        let ranks = ranks.into_iter().map(|[_, rank]| rank as u32).collect();
        Ok(Some(Child { doubted: true, limits: limits.have_come(), ..child(color, ranks) }))
    }

    /// A named child group of the listed ranks, in that order; called by its members only. Another rank's call is
    /// `NotMember` and names rank and group. If this group has failed it is refused, and members that do not know of that yet are told.
    pub fn group(&self, name: &str, ranks: &[u32]) -> Result<Context> {
        Child { tied: true, ..self.begin_regroup(name, ranks)? }.meet_if_sound()
    }

    /// As [`Context::group`], also when this group has failed: the listed ranks, which are alive, go on without the
    /// others.
    pub fn regroup(&self, name: &str, ranks: &[u32]) -> Result<Context> {
        self.begin_regroup(name, ranks)?.meet()
    }

    /// The first half of [`Context::regroup`], in the same order on all members, as [`Context::begin_split`]. Waits for nobody.
    pub fn begin_regroup(&self, name: &str, ranks: &[u32]) -> Result<Child> {
        let size = self.size();
        if ranks.is_empty() {
            fail!(InvalidArgument, "group '{name}' has no ranks");
        }
        for (index, &rank) in ranks.iter().enumerate() {
            if rank >= size {
                fail!(
                    InvalidArgument,
                    "rank {rank} of group '{name}' is out of range: '{}' has {size}",
                    self.name()
                );
            }
            if ranks[..index].contains(&rank) {
                fail!(InvalidArgument, "rank {rank} is twice in group '{name}'");
            }
        }
        if !ranks.contains(&self.rank()) {
            fail!(NotMember, "rank {} of '{}' is not a member of group '{name}'", self.rank(), self.name());
        }
        Ok(Child { tied: false, ..self.child(Making::Group, name, name.to_string(), ranks.to_vec()) })
    }

    /// Collective: the same ranks, independent operations.
    pub fn duplicate(&self) -> Result<Context> {
        let ranks = (0..self.size()).collect();
        self.child(Making::Duplicate, "+", format!("{}+", self.name()), ranks).meet_if_sound()
    }

    /// What tells it from the other children of this group: `name`, the members, and how many there have been of these.
    fn child(&self, making: Making, name: &str, label: String, ranks: Vec<u32>) -> Child {
        let mut children = lock(&self.0.line.children);
        let count = children.entry((name.to_string(), ranks.clone())).or_insert(0);
        *count += 1;
        Child {
            parent: self.clone(),
            making,
            name: name.to_string(),
            label,
            ranks,
            count: *count,
            limits: Limits::begin(self.timeout()),
            tied: true,
            doubted: false,
            succeeds: false,
        }
    }

    /// Sets up what the members of a new group have to set up together.
    fn settled(self, limits: Limits, making: Making) -> Result<Context> {
        if let Place::Group(group) = &self.0.place {
            let exchange = |mine, until| self.exchange(group, mine, until, making);
            let shared = group.share_memory(limits.come, limits.settled, exchange);
            shared.map_err(|error| limits.tell(self.name(), error))?;
        }
        Ok(self)
    }

    /// Has whoever waits for messages here look again.
    pub(super) fn wake(&self) {
        if let Place::Group(group) = self.place() {
            group.endpoint().wake();
        }
    }

    /// Fails everything that is running or to come on this context, on this rank and (within a second) on the others.
    /// Returns at once; from any thread.
    pub fn abort(&self) {
        self.abort_because(None);
    }

    /// As [`Context::abort`], with a cause of the program's, which the failure tells on every rank.
    pub fn abort_because(&self, cause: Option<&str>) {
        let mut text = format!("rank {} aborted '{}'", self.rank(), self.name());
        if let Some(cause) = cause {
            text = format!("{text}: {}", cause.replace(char::is_control, " "));
        }
        self.fail(Error::new(Status::Aborted, text));
    }

    /// Fails everything that is running or to come on this context for a cause of this rank's, as [`Context::abort`].
    pub(super) fn fail(&self, error: Error) {
        match &self.0.place {
            Place::Solo => drop(self.0.failure.set(error)),
            Place::Group(group) => group.fail(error),
        }
    }

    /// The deadline of operations that name none.
    pub(super) fn timeout(&self) -> Duration {
        self.0.timeout
    }

    /// The first failure of this context, if there was one.
    pub fn failure(&self) -> Option<Error> {
        match &self.0.place {
            Place::Solo => self.0.failure.get().cloned(),
            Place::Group(group) => group.failure(),
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
        group.run(Class::Internal, 0, signature, Some(left), |turn| {
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

/// A child group that is agreed on: this rank is a member.
pub struct Child {
    parent: Context,
    /// By what call.
    making: Making,
    name: String,
    label: String,
    /// Of the parent, in the child's order.
    ranks: Vec<u32>,
    /// How many of the same name and members there have been, with this one.
    count: u32,
    /// Since it was begun.
    limits: Limits,
    /// Whether it is not made if the parent fails.
    tied: bool,
    /// Whether others may not know that they are members: the parent may have failed before they were told.
    doubted: bool,
    /// Whether it takes the parent's place.
    succeeds: bool,
}

impl Child {
    /// With a name for errors and logs that need not be the other ranks'.
    pub fn labelled(self, label: String) -> Child {
        Child { label, ..self }
    }

    /// Meets the other members; the second half of [`Context::split`] and [`Context::regroup`], which has what the first has left of the
    /// deadline.
    pub fn meet(self) -> Result<Context> {
        self.meet_unless(&Recall::default())
    }

    /// [`Child::meet`], unless `recall` calls it off.
    pub fn meet_unless(self, recall: &Recall) -> Result<Context> {
        let group = self.group();
        let Child { parent, label, tied, doubted, succeeds, limits, making, .. } = self;
        let timeout = parent.timeout();
        let (Place::Group(over), Some(group)) = (&parent.0.place, group) else {
            return Ok(Context::new(label, timeout, Place::Solo, None));
        };
        let _making = tied.then(|| over.make(&group));
        let (place, store) = (Place::Group(group), parent.0._store.clone());
        let line = if succeeds { parent.0.line.clone() } else { Line::of(&place) };
        let child = Context::of_line(label, timeout, place, store, line);
        child.limit_blocks(parent.max_blocks());
        recall.enter(&child);
        let child = child.settled(limits, making)?;
        if let (true, Place::Group(group)) = (doubted, child.place())
            && group.direct().is_none()
        {
            let met = child.exchange(group, [0, 0], limits.settled, making);
            met.inspect_err(|error| group.fail_here(error))
                .map_err(|error| limits.tell(child.name(), error))?;
        }
        Ok(child)
    }

    /// [`Child::meet_unless`], and then [`Context::begin_split`] of that group, which is for nothing else: both have one deadline.
    pub fn meet_and_split_unless(
        self,
        recall: &Recall,
        color: Option<u32>,
        key: i64,
    ) -> Result<Option<Child>> {
        let limits = self.limits.have_come();
        let all = self.meet_unless(recall)?;
        let name = color.map_or(all.name().to_owned(), |color| format!("{}/{color}", all.name()));
        all.begin_split_within(limits, color, key).map_err(|error| limits.tell(&name, error))
    }

    /// As [`Child::meet`], unless the parent has failed. The others may not have heard of that yet, and wait for this rank: they hear of
    /// it as the child's failure.
    fn meet_if_sound(self) -> Result<Context> {
        let Some(error) = self.parent.failure() else { return self.meet() };
        let error = error.context(format!("group '{}' has failed before", self.parent.name()));
        if let Some(group) = self.group() {
            group.fail_here(&error);
        }
        Err(error)
    }

    /// This rank's end of the group, unless it is alone in it.
    fn group(&self) -> Option<Arc<Group>> {
        let Child { parent, name, label, ranks, count, .. } = self;
        let Place::Group(parent) = &parent.0.place else { return None };
        if ranks.len() == 1 {
            return None;
        }
        let members: Arc<[u32]> = ranks.iter().map(|&rank| parent.members()[rank as usize]).collect();
        // PROOF: whoever makes a child has checked that this rank is among them.
        let own = ranks.iter().position(|&rank| rank == parent.rank()).unwrap_or(0) as u32;
        let id = child_id(self.parent.0.line.id, name, &members, *count);
        Some(Group::new(parent.endpoint().clone(), id, label.clone(), own, members, parent.timeout()))
    }
}

/// The same number on all members, and (with the certainty of a 64-bit digest) on no other group.
fn child_id(parent: u64, name: &str, members: &[u32], count: u32) -> u64 {
    let members: Vec<u8> = members.iter().flat_map(|member| member.to_le_bytes()).collect();
    let key = SecretKey::from_text("unisono group");
    let digest = key.tag(&[&parent.to_le_bytes(), name.as_bytes(), &members, &count.to_le_bytes()]);
    u64::from_le_bytes(std::array::from_fn(|i| digest[i]))
}

/// The default deadline of a context.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);

#[cfg(test)]
pub(super) mod tests {
    use std::time::Instant;

    use super::*;
    use crate::rendezvous::hash::HashStore;

    const PATIENCE: Duration = Duration::from_secs(20);

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

    const TIMEOUT: Duration = Duration::from_secs(4);
    const LATE: Duration = Duration::from_millis(3500);

    /// Rank 0 makes a group with rank 1, which comes late and does not go on: that has the timeout together.
    fn times_out(name: &str, make: impl FnOnce() -> Result<Context> + Send, come: impl FnOnce() -> Held) {
        let began = Instant::now();
        std::thread::scope(|scope| {
            let makes = scope.spawn(make);
            std::thread::sleep(LATE);
            let _stays = come();
            let error = makes.join().expect("no panic").err().expect("rank 1 does not go on");
            let after = began.elapsed();
            assert_eq!(error.status(), Status::Timeout, "{error}");
            for part in
                [&format!("'{name}' is not there "), "from rank 1 (host ", "rank 1, or raise timeout_ms"]
            {
                assert!(error.text().contains(part), "no '{part}' in: {error}");
            }
            assert!((TIMEOUT..LATE + TIMEOUT - TIMEOUT / 8).contains(&after), "{after:?}: {error}");
        });
    }

    /// Holds what rank 1 has come with.
    struct Held(#[expect(dead_code, reason = "held")] Box<dyn std::any::Any>);

    #[test]
    fn all_steps_of_a_creation_have_one_timeout() {
        let store: Arc<dyn Store> = Arc::new(HashStore::new());
        times_out(
            "default",
            || Context::create(options(0, &store, TIMEOUT)),
            || {
                let own = options(1, &store, TIMEOUT);
                let (size, name, secret, recalled) = (2, "default", None, None);
                let options = meeting::on_interface(meeting::link_options(&own).expect("options"), &own);
                let deadline = Deadline::after(PATIENCE);
                let store = &*store;
                let meeting = Meeting { rank: 1, size, name, store, secret, options, deadline, recalled };
                Held(Box::new(bootstrap::meet(meeting).expect("the ranks meet")))
            },
        );
    }

    #[test]
    fn all_steps_of_a_split_have_one_timeout() {
        let [first, second] = pair([TIMEOUT; 2]);
        times_out(
            "default/0",
            || first.split(Some(0), 0).map(|child| child.expect("a colour")),
            || Held(Box::new(second.begin_split(Some(0), 0).expect("the ranks split"))),
        );
    }

    #[test]
    fn a_group_that_meets_to_be_split_has_one_timeout_for_both() {
        let [first, second] = pair([TIMEOUT; 2]);
        times_out(
            "all/0",
            || {
                let all = first.begin_regroup("all", &[0, 1])?;
                let child = all.meet_and_split_unless(&Recall::default(), Some(0), 0)?;
                child.expect("a colour").meet()
            },
            || Held(Box::new(second.regroup("all", &[0, 1]).expect("the ranks meet"))),
        );
    }

    #[test]
    fn all_steps_of_a_duplicate_have_one_timeout() {
        let [first, second] = pair([TIMEOUT; 2]);
        times_out(
            "default+",
            || first.duplicate(),
            || {
                let child = second.child(Making::Duplicate, "+", "default+".into(), vec![0, 1]);
                let group = child.group().expect("two ranks");
                let context = Context::new(child.label, PATIENCE, Place::Group(group.clone()), None);
                // As if this rank had a board, and its turn in the next step.
                let soon = Deadline::after(PATIENCE);
                context.exchange(&group, [0, 0], soon, Making::Duplicate).expect("the other has come");
                Held(Box::new((context, group)))
            },
        );
    }

    /// Rank 0 splits while rank 1 duplicates: who gives up first is told what the other does.
    #[test]
    fn who_makes_another_group_is_told_by_what_call_and_which() {
        let texts = [
            [
                "split of 'default' (rank 0 of 2",
                "in 'default+' its last call is duplicate(), still running, waiting for rank 0",
                "Look at rank 1",
            ],
            [
                "setting up 'default+' (rank 1 of 2",
                "in 'default' its last call is split(), still running, waiting for rank 1",
                "Look at rank 0",
            ],
        ];
        for (hasty, parts) in texts.into_iter().enumerate() {
            let mut timeouts = [PATIENCE; 2];
            timeouts[hasty] = Duration::from_secs(1);
            let [first, second] = pair(timeouts);
            let errors = std::thread::scope(|scope| {
                let split = scope.spawn(|| first.split(Some(0), 0).map(drop).expect_err("rank 1 does not"));
                let duplicate = scope.spawn(|| second.duplicate().map(drop).expect_err("rank 0 does not"));
                if hasty == 1 {
                    let told = duplicate.join().expect("no panic");
                    first.abort();
                    return [split.join().expect("no panic"), told];
                }
                [split, duplicate].map(|rank| rank.join().expect("no panic"))
            });
            assert_eq!(errors[hasty].status(), Status::Timeout, "{}", errors[hasty]);
            for part in parts {
                assert!(errors[hasty].text().contains(part), "no '{part}' in: {}", errors[hasty]);
            }
        }
    }

    #[test]
    fn ranks_that_make_one_group_by_different_calls_are_told_which() {
        let [first, second] = pair([PATIENCE; 2]);
        let errors = std::thread::scope(|scope| {
            let duplicate = scope.spawn(|| first.duplicate().map(drop));
            let group = scope.spawn(|| second.group("+", &[0, 1]).map(drop));
            [duplicate, group].map(|rank| rank.join().expect("no panic").expect_err("they differ"))
        });
        for error in errors {
            assert_eq!(error.status(), Status::Mismatch, "{error}");
            assert!(["duplicate()", "group()"].iter().all(|call| error.text().contains(call)), "{error}");
        }
    }

    /// One has come to make a child when the other aborts, and is refused its own part in that.
    #[test]
    fn who_is_refused_a_child_of_a_group_that_has_failed_keeps_nobody_waiting_for_it() {
        type Deed = fn(&Context) -> Result<Context>;
        let deeds: [(&str, Deed); 2] =
            [("pair", |context| context.group("pair", &[0, 1])), ("+", Context::duplicate)];
        for (name, deed) in deeds {
            let [first, second] = pair([PATIENCE; 2]);
            std::thread::scope(|scope| {
                let waits = scope.spawn(|| deed(&second));
                while lock(&second.0.line.children).is_empty() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                // By then it waits for the other; if not, the test finds less.
                std::thread::sleep(Duration::from_millis(50));
                let since = Instant::now();
                first.abort();
                let refused = deed(&first).err().expect("its group has failed");
                assert!(refused.text().contains("has failed before"), "{refused}");
                let told = waits.join().expect("no panic").err().expect("the other does not come");
                assert_eq!(told.status(), Status::Aborted, "{told}");
                assert!(since.elapsed() < PATIENCE / 2, "{told}");
            });
            // Both have called it as often as each other: they find each other again.
            std::thread::scope(|scope| {
                let ranks = [&first, &second].map(|context| scope.spawn(|| context.regroup(name, &[0, 1])));
                for rank in ranks {
                    rank.join().expect("no panic").expect("a group that goes on");
                }
            });
        }
    }
}
