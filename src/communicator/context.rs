//! Contexts: creation, children, calls.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use super::batch::Pending;
use super::plans::{Plans, Seat};
use super::prepared::Copied;
use super::staged::{Cuda, StagedCall};
use super::survey::Spans;
use super::wide::Wide;
use super::work::Work;
use super::{Call, Completion, Options, Rendezvous};
use crate::collective::checked::{self, Checked};
use crate::collective::request::{Counts, Kind, Request};
use crate::cuda::exchange::Stages;
use crate::deadline::Deadline;
use crate::engine::bootstrap::{self, MAX_RANKS, Meeting};
use crate::engine::direct::{Direct, DirectRun, Job, Path};
use crate::engine::endpoint::lock;
use crate::engine::executor::{Plan, Run};
use crate::engine::group::{Group, Turn};
use crate::engine::lane::{Destination, Source};
use crate::engine::operation::Operation;
use crate::engine::point::{Message, Point};
use crate::engine::wire::Class;
use crate::error::{Error, Result, Status, fail};
use crate::reduce::{DataType, Operand, Operator, Reducer, Representation};
use crate::rendezvous::environment::{How, Launch};
use crate::rendezvous::hash::HashStore;
use crate::rendezvous::id::UniqueId;
use crate::rendezvous::interface::Interface;
use crate::rendezvous::join;
use crate::rendezvous::secret::SecretKey;
use crate::rendezvous::store::Store;
use crate::signature::Signature;
use crate::transport::service::Options as LinkOptions;

/// One rank's membership in a group: a communicator. Cheap to clone; all methods from any thread.
#[derive(Clone)]
pub struct Context(Arc<Inner>);

struct Inner {
    name: String,
    place: Place,
    plans: Plans,
    /// Of what hosts do among themselves: their ranks have other numbers there.
    plans_across: Plans,
    /// How often each named child was made: makes the next one different.
    children: Mutex<HashMap<(String, Vec<u32>), u32>>,
    failure: OnceLock<Error>,
    /// See [`Context::limit_blocks`]; 0: unset.
    max_blocks: AtomicU32,
    cuda: Cuda,
    /// Kept alive as long as the context: the embedded server of its store.
    _store: Option<Arc<dyn Store>>,
}

/// A group of one needs no endpoint, no memory and no thread.
pub(super) enum Place {
    Solo,
    Group(Arc<Group>),
}

impl Context {
    /// Meets the other ranks and returns when all have arrived.
    pub fn create(options: Options) -> Result<Context> {
        let deadline = Deadline::after(options.timeout);
        let name = if options.name.is_empty() { "default".to_string() } else { options.name.clone() };
        let Found { rank, size, store, secret, exits } = find(&options, deadline)?;
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
            return Ok(Context::new(name, Place::Solo, None));
        }
        let links = link_options(&options)?;
        let meeting = Meeting { rank, size, name: &name, store: &*store, secret, options: links, deadline };
        let (endpoint, job) = bootstrap::meet(meeting)?;
        if let Some(exits) = exits {
            endpoint.watch_exits(exits);
        }
        let members = (0..size).collect();
        let group = Group::new(endpoint, job, name.clone(), rank, members, options.timeout);
        Context::new(name, Place::Group(group), Some(store)).settled()
    }

    fn new(name: String, place: Place, store: Option<Arc<dyn Store>>) -> Context {
        Context(Arc::new(Inner {
            name,
            place,
            plans: Plans::default(),
            plans_across: Plans::default(),
            children: Mutex::default(),
            failure: OnceLock::new(),
            max_blocks: AtomicU32::new(0),
            cuda: Cuda::default(),
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

    pub(super) fn plans(&self) -> &Plans {
        &self.0.plans
    }

    pub(super) fn plans_across(&self) -> &Plans {
        &self.0.plans_across
    }

    pub(super) fn seat(&self) -> Seat {
        match &self.0.place {
            Place::Solo => Seat::new(0, 1, 1),
            Place::Group(group) => Seat::new(group.rank(), group.size(), group.ranks_per_node()),
        }
    }

    /// The group's name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Allows the kernels by which this group's GPUs exchange at most so many blocks each: they take so many multiprocessors at
    /// most. 0 is no limit. The ranks agree on the least that any of them allows, when their GPUs agree to exchange (at the
    /// first collective on device memory, or in [`Context::connect_device`]); said later, it changes nothing. Children
    /// begin with it.
    pub fn limit_blocks(&self, max_blocks: u32) {
        self.0.max_blocks.store(max_blocks, Ordering::Relaxed);
    }

    pub(super) fn max_blocks(&self) -> u32 {
        self.0.max_blocks.load(Ordering::Relaxed)
    }

    /// Collective over this group: a child group for each colour, ranks ordered by key, then by rank here.
    /// `None`: this rank takes part in no child.
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Context>> {
        let Place::Group(group) = &self.0.place else {
            return Ok(color.map(|color| self.solo_child(&format!("{}/{color}", self.0.name))));
        };
        // Colour (with one bit for "none") and key of each rank.
        let mine = [color.map_or(u64::MAX, u64::from), key as u64];
        let all = self.exchange(group, mine)?;
        let Some(color) = color else { return Ok(None) };
        let mut ranks: Vec<(i64, u32)> = all
            .iter()
            .enumerate()
            .filter(|(_, [other, _])| *other == u64::from(color))
            .map(|(rank, [_, key])| (*key as i64, rank as u32))
            .collect();
        ranks.sort_unstable();
        let ranks: Vec<u32> = ranks.into_iter().map(|(_, rank)| rank).collect();
        self.child(group, format!("{}/{color}", self.0.name), &ranks).map(Some)
    }

    /// A named child group of the listed ranks, in that order; called by its members only. Another rank's call is
    /// `NotMember` and names rank and group.
    pub fn group(&self, name: &str, ranks: &[u32]) -> Result<Context> {
        if let Some(error) = self.failure() {
            return Err(error.context(format!("group '{}' has failed before", self.name())));
        }
        self.regroup(name, ranks)
    }

    /// As [`Context::group`], also when this group has failed: the listed ranks, which are alive, go on without the
    /// others.
    pub fn regroup(&self, name: &str, ranks: &[u32]) -> Result<Context> {
        let size = self.size();
        if ranks.is_empty() {
            fail!(InvalidArgument, "group '{name}' has no ranks");
        }
        for (index, &rank) in ranks.iter().enumerate() {
            if rank >= size {
                fail!(
                    InvalidArgument,
                    "rank {rank} of group '{name}' is out of range: '{}' has {size}",
                    self.0.name
                );
            }
            if ranks[..index].contains(&rank) {
                fail!(InvalidArgument, "rank {rank} is twice in group '{name}'");
            }
        }
        if !ranks.contains(&self.rank()) {
            fail!(NotMember, "rank {} of '{}' is not a member of group '{name}'", self.rank(), self.0.name);
        }
        match &self.0.place {
            Place::Solo => Ok(self.solo_child(name)),
            Place::Group(group) => self.child(group, name.to_string(), ranks),
        }
    }

    /// Collective: the same ranks, independent operations.
    pub fn duplicate(&self) -> Result<Context> {
        let ranks: Vec<u32> = (0..self.size()).collect();
        self.group(&format!("{}+", self.0.name), &ranks)
    }

    fn solo_child(&self, name: &str) -> Context {
        Context::new(name.to_string(), Place::Solo, None)
    }

    fn child(&self, parent: &Arc<Group>, name: String, ranks: &[u32]) -> Result<Context> {
        let count = {
            let mut children = lock(&self.0.children);
            let count = children.entry((name.clone(), ranks.to_vec())).or_insert(0);
            *count += 1;
            *count
        };
        let members: Arc<[u32]> = ranks.iter().map(|&rank| parent.members()[rank as usize]).collect();
        if members.len() == 1 {
            return Ok(Context::new(name, Place::Solo, None));
        }
        // PROOF: both callers have checked that this rank is among them.
        let own = ranks.iter().position(|&rank| rank == parent.rank()).unwrap_or(0) as u32;
        let id = child_id(parent.id(), &name, &members, count);
        let endpoint = parent.endpoint().clone();
        let group = Group::new(endpoint, id, name.clone(), own, members, parent.timeout());
        let child = Context::new(name, Place::Group(group), self.0._store.clone());
        child.limit_blocks(self.max_blocks());
        child.settled()
    }

    /// Sets up what the members of a new group have to set up together.
    fn settled(self) -> Result<Context> {
        if let Place::Group(group) = &self.0.place {
            group.share_memory(|mine| self.exchange(group, mine))?;
        }
        Ok(self)
    }

    /// Fails everything that is running or to come on this context, on this rank and (within a second) on the others.
    /// Returns at once; from any thread.
    pub fn abort(&self) {
        self.fail(Error::new(Status::Aborted, format!("rank {} aborted '{}'", self.rank(), self.0.name)));
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
        match &self.0.place {
            Place::Solo => DEFAULT_TIMEOUT,
            Place::Group(group) => group.timeout(),
        }
    }

    /// The first failure of this context, if there was one.
    pub fn failure(&self) -> Option<Error> {
        match &self.0.place {
            Place::Solo => self.0.failure.get().cloned(),
            Place::Group(group) => group.failure(),
        }
    }

    // ---- calls

    /// Runs to completion in this thread.
    ///
    /// # Safety
    /// The request's pointers are NULL where nothing is accessed, else valid for what the operation accesses until
    /// it returns.
    pub unsafe fn run(&self, request: &Request, call: &Call) -> Result<Completion> {
        // SAFETY: the caller's promise.
        unsafe { self.run_buffers(request, call, &[]) }
    }

    /// Starts and returns; the library moves it when nobody waits.
    ///
    /// # Safety
    /// As [`Context::run`], until the work completes.
    pub unsafe fn start(&self, request: &Request, call: &Call) -> Result<Work> {
        // SAFETY: the caller's promise.
        unsafe { self.begin(request, call) }?.close()
    }

    /// The first half of [`Context::start`]: checks, has its turn, starts when the stream has come this far. The stream
    /// waits for it from [`Pending::close`] on. Operations that are to run beside each other on one stream are all
    /// begun before any is closed: see [`super::start_together`].
    ///
    /// # Safety
    /// As [`Context::start`].
    pub unsafe fn begin(&self, request: &Request, call: &Call) -> Result<Pending> {
        // SAFETY: the caller's promise.
        unsafe { self.begin_buffers(request, call, &[]) }
    }

    /// [`Context::start`] for whoever does not follow the operation: what comes of it is known when its stream has
    /// done it, or from [`Context::failure`].
    ///
    /// # Safety
    /// As [`Context::start`].
    pub unsafe fn launch(&self, request: &Request, call: &Call) -> Result<()> {
        match self.on_devices(request, call, &[])? {
            // SAFETY: the caller's promise.
            Some(call) => unsafe { call.launch() },
            // SAFETY: the caller's promise.
            None => unsafe { self.start(request, call) }.map(drop),
        }
    }

    /// [`Context::run`] for several buffers of this rank: see [`super::Prepared`].
    ///
    /// # Safety
    /// As [`Context::run`], for all buffers.
    pub(super) unsafe fn run_buffers(
        &self,
        request: &Request,
        call: &Call,
        buffers: &[*mut u8],
    ) -> Result<Completion> {
        if let Some(call) = self.on_devices(request, call, buffers)? {
            // The call's own deadline ends it.
            // SAFETY: the caller's promise.
            return unsafe { call.start() }?.wait(Deadline::NEVER);
        }
        // SAFETY: the caller's promise.
        let Step { group, class, tag, signature, make } = match unsafe { self.step(request, call, buffers) }?
        {
            Next::Done => return Ok(Completion::default()),
            // SAFETY: the caller's promise.
            Next::Staged(staging) => return unsafe { self.run_staged(*staging, request, call) },
            Next::Step(step) => step,
        };
        let timeout = call.timeout;
        match make {
            // The common case runs on this thread's stack.
            Make::Run(plan, input, output) => group.run(class, tag, signature, timeout, |turn| {
                // SAFETY: the caller's promise.
                unsafe { Run::new(group, turn, plan, input, output) }
            }),
            Make::Direct(direct, job, path) => group.run(class, tag, signature, timeout, |turn| {
                // SAFETY: the caller's promise.
                unsafe { DirectRun::new(group, turn, direct, job, path) }
            }),
            Make::Point(message, piece) => group.run(class, tag, signature, timeout, |turn| {
                // SAFETY: the caller's promise.
                unsafe { Point::new(group, turn, message, piece) }
            }),
            Make::Boxed(make) => group.run(class, tag, signature, timeout, |turn| make(group, turn)),
        }
    }

    /// [`Context::start`] for several buffers of this rank.
    ///
    /// # Safety
    /// As [`Context::start`], for all buffers.
    pub(super) unsafe fn start_buffers(
        &self,
        request: &Request,
        call: &Call,
        buffers: &[*mut u8],
    ) -> Result<Work> {
        // SAFETY: the caller's promise.
        unsafe { self.begin_buffers(request, call, buffers) }?.close()
    }

    /// [`Context::begin`] for several buffers of this rank.
    ///
    /// # Safety
    /// As [`Context::begin`], for all buffers.
    unsafe fn begin_buffers(&self, request: &Request, call: &Call, buffers: &[*mut u8]) -> Result<Pending> {
        if let Some(call) = self.on_devices(request, call, buffers)? {
            // SAFETY: the caller's promise.
            return unsafe { call.begin() };
        }
        // SAFETY: the caller's promise.
        let Step { group, class, tag, signature, make } = match unsafe { self.step(request, call, buffers) }?
        {
            Next::Done => return Ok(Pending::from(Work::ended(Ok(Completion::default())))),
            Next::Staged(staging) => {
                // SAFETY: the caller's promise.
                return unsafe { self.begin_staged(*staging, request, call) }.map(Pending::from);
            }
            Next::Step(step) => step,
        };
        let running = group.start(class, tag, signature, call.timeout, |turn| {
            // SAFETY: the caller's promise.
            unsafe { make.operation(group, turn) }
        })?;
        Ok(Pending::from(Work::running(running)))
    }

    /// The name of the algorithm that `request` would run; checks the request.
    pub(super) fn algorithm(&self, request: &Request, call: &Call) -> Result<&'static str> {
        let mut checked = Checked::new(request, self.rank(), self.size())?;
        if let Some(operator) = checked.operator {
            Reducer::new(checked.dtype, operator, 1)?;
        }
        if let Some(stages) = Stages::from_number(call.algorithm.unwrap_or(0)) {
            return Ok(stages.name());
        }
        let (_, algorithm) = self.0.plans.plan(&mut checked, call, self.seat())?;
        Ok(algorithm.name())
    }

    /// Checks a call and finds out what is to be done for it. What needs nobody else is done here.
    ///
    /// # Safety
    /// As [`Context::run_buffers`].
    unsafe fn step<'a>(&'a self, request: &Request, call: &Call, buffers: &[*mut u8]) -> Result<Next<'a>> {
        if request.kind.point_to_point() {
            let (group, signature, message) = self.point(request)?;
            let spans = Spans::of_message(&message);
            if let Some(staging) = self.or_fail_in(Class::PointToPoint, self.survey(spans, call))? {
                return Ok(Next::Staged(Box::new(StagedCall::message(staging, signature, message))));
            }
            let tag = call.tag.unwrap_or(0);
            let make = Make::Point(message, self.cuda().piece_bytes());
            return Ok(Next::Step(Step { group, class: Class::PointToPoint, tag, signature, make }));
        }
        let mut checked = Checked::new(request, self.rank(), self.size())?;
        if let Some(staging) = self.or_fail(self.survey(Spans::of_collective(&checked), call))? {
            if buffers.len() > 1 {
                fail!(
                    Unsupported,
                    "several buffers of a rank are taken from host memory, and without a stream"
                );
            }
            return Ok(Next::Staged(Box::new(StagedCall::collective(staging, checked))));
        }
        let Place::Group(group) = &self.0.place else {
            if let Some(error) = self.failure() {
                return Err(error);
            }
            // SAFETY: the caller's promise; a group of one has its result in its input.
            unsafe { alone(&checked, request.operator, buffers) }?;
            return Ok(Next::Done);
        };
        let (class, tag) = class_of(call);
        // SAFETY: the caller's promise.
        let make = unsafe { self.make(group, &mut checked, request.operator, call, buffers) }?;
        Ok(Next::Step(Step { group, class, tag, signature: checked.signature, make }))
    }

    /// How a collective on host memory is run; notes in its signature the algorithm that the caller named.
    ///
    /// # Safety
    /// As [`Context::run_buffers`].
    pub(super) unsafe fn make(
        &self,
        group: &Group,
        checked: &mut Checked,
        operator: Operator,
        call: &Call,
        buffers: &[*mut u8],
    ) -> Result<Make> {
        let class = class_of(call).0;
        let bytes = checked.output_len() * checked.dtype.size();
        // SAFETY: the caller's promise.
        if let Some(wide) = unsafe { widen(checked, operator, buffers, group.size()) }? {
            let mut rest = wide.rest(checked);
            if let Some((direct, job, path)) = exchange_directly(group, &rest, call, class)? {
                return Ok(Make::Boxed(Box::new(move |group: &Group, turn: &Turn| {
                    // SAFETY: the caller's promise; the workspaces live beside the run, as long as it does.
                    unsafe { Box::new(wide.around(DirectRun::new(group, turn, direct, job, path))) }
                })));
            }
            let (plan, _) = self.0.plans.plan(&mut rest, call, self.seat())?;
            checked.signature.algorithm = rest.signature.algorithm;
            return Ok(Make::Boxed(Box::new(move |group: &Group, turn: &Turn| {
                // SAFETY: the caller's promise.
                unsafe { Box::new(wide.run(group, turn, plan)) }
            })));
        }
        let copied = (buffers.len() > 1).then(|| (checked.output.cast_const(), buffers.to_vec()));
        if let Some((direct, job, path)) = exchange_directly(group, checked, call, class)? {
            let Some((from, to)) = copied else { return Ok(Make::Direct(direct, job, path)) };
            return Ok(Make::Boxed(Box::new(move |group: &Group, turn: &Turn| {
                // SAFETY: the caller's promise.
                let operation = unsafe { DirectRun::new(group, turn, direct, job, path) };
                Box::new(Copied { operation, from, to, bytes })
            })));
        }
        let (plan, _) = self.0.plans.plan(checked, call, self.seat())?;
        let (input, output) = (checked.input, checked.output);
        let Some((from, to)) = copied else { return Ok(Make::Run(plan, input, output)) };
        Ok(Make::Boxed(Box::new(move |group: &Group, turn: &Turn| {
            // SAFETY: the caller's promise.
            let operation = unsafe { Run::new(group, turn, plan, input, output) };
            Box::new(Copied { operation, from, to, bytes })
        })))
    }

    pub(super) fn point(&self, request: &Request) -> Result<(&Arc<Group>, Signature, Message)> {
        let (rank, size) = (self.rank(), self.size());
        let (count, of) = match &request.counts {
            Counts::Uniform(count) => (*count, None),
            Counts::From { count, ranks } if request.kind == Kind::ReceiveAny => {
                if let Some(&outside) = ranks.iter().find(|&&rank| rank >= size) {
                    fail!(
                        InvalidArgument,
                        "rank {outside} to receive from is out of range: the group has {size} ranks, 0 to {}",
                        size - 1
                    );
                }
                // It sends itself nothing: in a list of all ranks it does no harm.
                let others: Arc<[u32]> = ranks.iter().copied().filter(|&other| other != rank).collect();
                if others.is_empty() {
                    fail!(InvalidArgument, "the ranks to receive from are none but this rank itself");
                }
                (*count, Some(others))
            }
            _ => fail!(InvalidArgument, "{} takes one count, not a list", request.kind.name()),
        };
        if request.kind != Kind::ReceiveAny {
            let peer = request.root;
            if peer >= size {
                fail!(
                    InvalidArgument,
                    "peer {peer} is out of range: the group has {size} ranks, 0 to {}",
                    size - 1
                );
            }
            if peer == rank {
                fail!(InvalidArgument, "peer {peer} is this rank itself; copy instead of sending");
            }
        }
        let Place::Group(group) = &self.0.place else {
            fail!(InvalidUsage, "a group of one has nobody to receive from");
        };
        let len = checked::bytes("buffer", count, request.dtype.size() as u64, request.dtype)?;
        let sends = request.kind == Kind::Send;
        let null = if sends { request.input.is_null() } else { request.output.is_null() };
        if null && len > 0 {
            fail!(InvalidArgument, "the buffer is NULL, but has {len} bytes to {}", request.kind.name());
        }
        let from = Source { address: request.input, len };
        let into = Destination { address: request.output, len };
        let message = match request.kind {
            Kind::Send => Message::Send { to: request.root, from },
            Kind::Receive => Message::Receive { from: request.root, into },
            _ => Message::ReceiveAny { of, into },
        };
        let signature = Signature {
            kind: request.kind,
            dtype: request.dtype,
            operator: 0,
            algorithm: 0,
            root: request.root,
            count,
            device: false,
        };
        Ok((group, signature, message))
    }

    /// Two words from every rank, in rank order.
    fn exchange(&self, group: &Arc<Group>, mine: [u64; 2]) -> Result<Vec<[u64; 2]>> {
        let mut all = vec![[0u64; 2]; group.size() as usize];
        let request = Request {
            kind: Kind::Allgather,
            input: mine.as_ptr().cast(),
            output: all.as_mut_ptr().cast(),
            counts: Counts::Uniform(2),
            dtype: DataType::U64,
            operator: Operator::Sum,
            root: 0,
        };
        let (signature, plan) = self.internal_plan(group, &request)?;
        group.run(Class::Internal, 0, signature, None, |turn| {
            // SAFETY: `mine` and `all` outlive the run, and have the lengths that the request says.
            unsafe { Run::new(group, turn, plan, request.input, request.output) }
        })?;
        Ok(all)
    }

    /// How a request of our own is run.
    pub(super) fn internal_plan(&self, group: &Group, request: &Request) -> Result<(Signature, Arc<Plan>)> {
        let mut checked = Checked::new(request, group.rank(), group.size())?;
        let (plan, _) = self.0.plans.plan(&mut checked, &Call::default(), self.seat())?;
        Ok((checked.signature, plan))
    }
}

/// What is to be done for a call.
enum Next<'a> {
    /// It needed nobody else.
    Done,
    Step(Step<'a>),
    /// By way of pinned memory, or in the order of a stream.
    Staged(Box<StagedCall>),
}

struct Step<'a> {
    group: &'a Arc<Group>,
    class: Class,
    tag: u64,
    signature: Signature,
    make: Make,
}

/// Makes an operation that does not fit the common cases.
type Maker = Box<dyn FnOnce(&Group, &Turn) -> Box<dyn Operation>>;

/// How its operation is made once its number is known.
pub(super) enum Make {
    Run(Arc<Plan>, *const u8, *mut u8),
    Direct(Arc<Direct>, Job, Path),
    /// In pieces of so many bytes.
    Point(Message, usize),
    Boxed(Maker),
}

impl Make {
    /// The operation of `turn`.
    ///
    /// # Safety
    /// The memory that it was made for stays valid until the operation has ended or is abandoned.
    pub(super) unsafe fn operation(self, group: &Group, turn: &Turn) -> Box<dyn Operation> {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Make::Run(plan, input, output) => Box::new(Run::new(group, turn, plan, input, output)),
                Make::Direct(direct, job, path) => Box::new(DirectRun::new(group, turn, direct, job, path)),
                Make::Point(message, piece) => Box::new(Point::new(group, turn, message, piece)),
                Make::Boxed(make) => make(group, turn),
            }
        }
    }
}

/// Which numbers a collective takes.
pub(super) fn class_of(call: &Call) -> (Class, u64) {
    match call.tag {
        Some(tag) => (Class::Tagged, tag),
        None => (Class::Ordered, 0),
    }
}

/// What comes before and after the ordinary reduction of several buffers, or of scaled ones.
///
/// # Safety
/// The call's memory and the buffers are valid for what the call accesses.
unsafe fn widen(
    checked: &Checked,
    operator: Operator,
    buffers: &[*mut u8],
    size: u32,
) -> Result<Option<Wide>> {
    let bytes = checked.output_len() * checked.dtype.size();
    let scale = if let Operator::PreMulSum(scale) = operator { scale } else { 1.0 };
    let element = |address: *const u8| Operand { address, representation: Representation::Element, scale };
    match checked.operator {
        Some(Operator::PreMulSum(_)) if buffers.len() <= 1 => {
            let operands = [element(checked.input)];
            // SAFETY: the caller's promise.
            unsafe { Wide::new(checked, operator, &operands, vec![checked.output], size) }.map(Some)
        }
        Some(operator) if buffers.len() > 1 => {
            let operands: Vec<Operand> = buffers.iter().map(|buffer| element(buffer.cast_const())).collect();
            let outputs = if bytes > 0 { buffers.to_vec() } else { Vec::new() };
            let contributions = size.saturating_mul(buffers.len() as u32);
            // SAFETY: the caller's promise.
            unsafe { Wide::new(checked, operator, &operands, outputs, contributions) }.map(Some)
        }
        _ => Ok(None),
    }
}

/// The direct exchange of a call, when its group has one and the call fits it: ordered, its algorithm left to the
/// library. How many buffers a rank has does not matter: ranks may have different numbers.
pub(super) fn exchange_directly(
    group: &Group,
    checked: &Checked,
    call: &Call,
    class: Class,
) -> Result<Option<(Arc<Direct>, Job, Path)>> {
    let Some(direct) = group.direct() else { return Ok(None) };
    if class != Class::Ordered || call.algorithm.unwrap_or(0) != 0 {
        return Ok(None);
    }
    let reducer = match checked.operator {
        Some(operator) => Some(Reducer::new(checked.dtype, operator, group.size())?),
        None => None,
    };
    let job = Job {
        collective: checked.collective.clone(),
        listed: checked.listed,
        input: checked.input,
        output: checked.output,
        in_place: checked.alias.is_some(),
        dtype: checked.dtype,
        reducer,
    };
    Ok(direct.path(&job).map(|path| (direct.clone(), job, path)))
}

/// A group of one: the result is the input.
///
/// # Safety
/// The pointers of the call and `buffers` are valid for what the call accesses.
pub(super) unsafe fn alone(checked: &Checked, operator: Operator, buffers: &[*mut u8]) -> Result<()> {
    if let Some(operator) = checked.operator {
        // Refuses what larger groups refuse.
        Reducer::new(checked.dtype, operator, 1)?;
    }
    // SAFETY: the caller's promise; input and output have the same length in a group of one.
    unsafe {
        match widen(checked, operator, buffers, 1)? {
            Some(wide) => wide.alone(),
            None => {
                let bytes = checked.output_len() * checked.dtype.size();
                Copied::<Run>::spread(checked.input, &[checked.output], bytes);
                Copied::<Run>::spread(checked.output, buffers, bytes);
            }
        }
    }
    Ok(())
}

struct Found {
    rank: u32,
    size: u32,
    store: Arc<dyn Store>,
    secret: Option<SecretKey>,
    /// Where the launcher writes how ranks ended, if it does.
    exits: Option<Arc<dyn Store>>,
}

fn find(options: &Options, deadline: Deadline) -> Result<Found> {
    let (rank, size) = (options.rank, options.size);
    match &options.rendezvous {
        Rendezvous::Store(store) => Ok(Found { rank, size, store: store.clone(), secret: None, exits: None }),
        Rendezvous::Id(bytes) => {
            let id = UniqueId::parse(bytes)?;
            if size == 1 {
                // Nobody else comes: the server need not be asked.
                return Ok(Found {
                    rank,
                    size,
                    store: Arc::new(HashStore::new()),
                    secret: None,
                    exits: None,
                });
            }
            let secret = Some(id.secret().clone());
            Ok(Found { rank, size, store: Arc::new(id.connect(deadline)?), secret, exits: None })
        }
        Rendezvous::Environment => {
            let launch = Launch::from_env()?;
            let ranks = |number: usize, name: &str| match u32::try_from(number) {
                Ok(number) => Ok(number),
                Err(_) => {
                    fail!(InvalidUsage, "{name} {number} is out of range: a group has 1 to {MAX_RANKS} ranks")
                }
            };
            let exits: Option<Arc<dyn Store>> = match &launch.store {
                How::Id(id) if launch.size > 1 => Some(Arc::new(id.connect(deadline)?)),
                _ => None,
            };
            let joined = join::connect(&launch, deadline)?;
            Ok(Found {
                rank: ranks(launch.rank, "rank")?,
                size: ranks(launch.size, "size")?,
                store: joined.store,
                secret: Some(joined.secret),
                exits,
            })
        }
    }
}

fn link_options(options: &Options) -> Result<LinkOptions> {
    let mut links = LinkOptions::from_environment(|name| {
        let given = match name {
            "UNISONO_TRANSPORT" => &options.transports,
            "UNISONO_HOST" => &options.host,
            _ => &None,
        };
        given.clone().or_else(|| std::env::var(name).ok())
    })?;
    if links.tcp {
        let wanted = options.interface.clone().or_else(|| std::env::var("UNISONO_INTERFACE").ok());
        let interface = Interface::choose(wanted.as_deref())?;
        log::info!("links use {interface}");
        // An address that means nothing without the interface it belongs to is of use only when there is no other.
        let (near, far): (Vec<IpAddr>, Vec<IpAddr>) = interface
            .addresses
            .iter()
            .partition(|address| matches!(address, IpAddr::V6(address) if address.is_unicast_link_local()));
        links.addresses = if far.is_empty() { near } else { far };
    }
    Ok(links)
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
