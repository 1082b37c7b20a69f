//! Calls on a context: checked, sent one of the ways they can go, run or started.

use std::sync::Arc;

use super::alone::alone;
use super::batch::Pending;
use super::context::{Context, Membership};
use super::device::{OnDevices, check_stages};
use super::finishing::{Copied, Joined};
use super::staged::StagedCall;
use super::survey::Spans;
use super::wide::{self, Ends};
use super::work::Work;
use super::{Call, Completion};
use crate::collective::checked::Checked;
use crate::collective::request::{Kind, Request};
use crate::cuda::exchange::Stages;
use crate::deadline::Deadline;
use crate::engine::device::Way;
use crate::engine::direct::{Direct, DirectRun, Job, Path};
use crate::engine::executor::{Plan, Run};
use crate::engine::group::{Calling, Group, Turn};
use crate::engine::operation::Operation;
use crate::engine::point::{Message, Point};
use crate::engine::wire::Class;
use crate::error::{Result, fail};
use crate::reduce::{DataType, Operator, Reducer};
use crate::signature::Signature;

impl Context {
    /// Runs to completion in this thread.
    ///
    /// # Safety
    /// The request's pointers are NULL where nothing is accessed, else valid for what the operation accesses
    /// until it returns.
    pub unsafe fn run(&self, request: &Request, call: &Call) -> Result<Completion> {
        // SAFETY: the caller's promise.
        unsafe { self.run_buffers(request, call, &[]) }
    }

    /// Starts and returns; the library moves it when nobody waits. Where its stream may not wait for the host
    /// (see [`Call::stream`]), what the stream is given comes after it once the work has been waited for:
    /// what the operation needs may be the next thing that this thread calls.
    ///
    /// # Safety
    /// As [`Context::run`], until the work completes.
    pub unsafe fn start(&self, request: &Request, call: &Call) -> Result<Work> {
        // SAFETY: the caller's promise.
        unsafe { self.begin(request, call) }?.part()
    }

    /// The first half of [`Context::start`]: checks, has its turn, starts when the stream has come this far.
    /// The stream waits for it from [`Pending::close`] on. Operations that are to run beside each other on
    /// one stream are all begun before any is closed: see [`super::start_together`].
    ///
    /// # Safety
    /// As [`Context::start`].
    pub unsafe fn begin(&self, request: &Request, call: &Call) -> Result<Pending> {
        // SAFETY: the caller's promise.
        unsafe { self.begin_buffers(request, call, &[]) }
    }

    /// As [`Context::begin`], of one of several that [`begin_in_turns`](super::begin_in_turns) begins.
    ///
    /// # Safety
    /// As [`Context::start`].
    pub(super) unsafe fn begin_together(&self, request: &Request, call: &Call) -> Result<Pending> {
        // SAFETY: the caller's promise.
        unsafe { self.begin_by(request, call, &[], |call| call.begin(), std::convert::identity) }
    }

    /// [`Context::start`] for whoever does not follow the operation: what comes of it is known when its
    /// stream has done it, or from [`Context::failure`]. Where its stream may not wait for the host, this
    /// returns when it is complete.
    ///
    /// # Safety
    /// As [`Context::start`].
    pub unsafe fn launch(&self, request: &Request, call: &Call) -> Result<()> {
        // SAFETY: the caller's promise.
        let Some(hosted) = unsafe { self.begin_launch(request, call) }? else { return Ok(()) };
        self.keep_failure(request, &hosted.close()?);
        Ok(())
    }

    /// The failure of a message is its work's alone: where nobody has that, it is the context's.
    pub(super) fn keep_failure(&self, request: &Request, work: &Work) {
        if let (true, Membership::Group(group)) = (request.kind.point_to_point(), self.membership()) {
            let group = group.clone();
            // Before its stream goes on.
            if let Some(running) = work.host() {
                running.leave_to_group();
            }
            // Or it has failed already.
            work.on_complete(Box::new(move |ended| {
                if let Err(error) = ended {
                    group.fail(error);
                }
            }));
        }
    }

    /// The first half of [`Context::launch`], of what the host has a part in: that is to be closed. `None`
    /// where GPUs do it alone: it has been given to its stream, and is followed for the whole context, see
    /// [`Context::settle`].
    ///
    /// # Safety
    /// As [`Context::start`].
    pub unsafe fn begin_launch(&self, request: &Request, call: &Call) -> Result<Option<Pending>> {
        // SAFETY: the caller's promise.
        unsafe { self.begin_by(request, call, &[], |call| call.launch(), Some) }
    }

    /// As [`Context::begin_launch`], of one of several that [`begin_in_turns`](super::begin_in_turns) begins
    /// and that are closed together, as [`super::start_together`] does. What GPUs do alone takes less of the
    /// host's time by [`Context::launches`].
    ///
    /// # Safety
    /// As [`Context::start`].
    pub unsafe fn begin_launch_together(&self, request: &Request, call: &Call) -> Result<Option<Pending>> {
        // SAFETY: the caller's promise.
        unsafe { self.begin_by(request, call, &[], |call| call.begin_launch(), Some) }
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
        let plain = self.is_plain(call);
        if !plain && let Some(call) = self.on_devices(request, call, buffers)? {
            // The call's own deadline ends it.
            // SAFETY: the caller's promise.
            return unsafe { call.start() }?.wait(Deadline::NEVER);
        }
        // SAFETY: the caller's promise.
        let next = unsafe { self.step(request, call, buffers, plain) }?;
        let Step { group, calling, make } = match next {
            Next::Done => return Ok(Completion::default()),
            // SAFETY: the caller's promise.
            Next::Staged(staging) => return unsafe { self.run_staged(*staging, request, call) },
            Next::Step(step) => step,
        };
        match make {
            // The common case runs on this thread's stack.
            Make::Run(plan, input, output) => group.run(calling, |turn| {
                // SAFETY: the caller's promise.
                unsafe { Run::new(group, turn, plan, input, output) }
            }),
            Make::Direct(direct, job, path) => group.run(calling, |turn| {
                // SAFETY: the caller's promise.
                unsafe { DirectRun::new(group, turn, direct, job, path) }
            }),
            Make::Point(message, piece) => group.run(calling, |turn| {
                // SAFETY: the caller's promise.
                unsafe { Point::new(group, turn, message, piece) }
            }),
            Make::Boxed(make) => group.run(calling, |turn| make(group, turn)),
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
        // SAFETY: the caller's promise.
        unsafe { self.begin_by(request, call, buffers, |call| call.begin()?.given(), std::convert::identity) }
    }

    /// Begins a call where its memory has it: `on_devices` where GPUs exchange, else on the host, which
    /// `of_host` makes of the same kind.
    ///
    /// # Safety
    /// As [`Context::begin_buffers`].
    unsafe fn begin_by<T>(
        &self,
        request: &Request,
        call: &Call,
        buffers: &[*mut u8],
        on_devices: impl FnOnce(OnDevices) -> Result<T>,
        of_host: impl FnOnce(Pending) -> T,
    ) -> Result<T> {
        let plain = self.is_plain(call);
        if !plain && let Some(call) = self.on_devices(request, call, buffers)? {
            return on_devices(call);
        }
        // SAFETY: the caller's promise.
        unsafe { self.begin_on_host(request, call, buffers, plain) }.map(of_host)
    }

    /// [`Context::begin_buffers`] for a call that the group's devices do not exchange.
    ///
    /// # Safety
    /// As [`Context::begin_buffers`].
    unsafe fn begin_on_host(
        &self,
        request: &Request,
        call: &Call,
        buffers: &[*mut u8],
        plain: bool,
    ) -> Result<Pending> {
        // SAFETY: the caller's promise.
        let next = unsafe { self.step(request, call, buffers, plain) }?;
        let Step { group, calling, make } = match next {
            Next::Done => return Ok(Pending::from(Work::ended(Ok(Completion::default())))),
            Next::Staged(staging) => {
                // SAFETY: the caller's promise.
                return unsafe { self.begin_staged(*staging, request, call) }.map(Pending::from);
            }
            Next::Step(step) => step,
        };
        let running = group.start(calling, |turn| {
            // SAFETY: the caller's promise.
            unsafe { make.operation(group, turn) }
        })?;
        Ok(Pending::from(Work::running(running)))
    }

    /// The name of the algorithm that `request` would run, over several `buffers` of this rank if there are
    /// any; checks the request.
    pub(super) fn algorithm(
        &self,
        request: &Request,
        call: &Call,
        buffers: &[*mut u8],
    ) -> Result<&'static str> {
        let checked = Checked::new(request, self.rank(), self.size())?;
        let checked = match widen(&checked, request.operator, buffers, self.size())? {
            Some(ends) => ends.rest(&checked),
            None => checked,
        };
        self.algorithm_of(checked, call)
    }

    /// The same, of a scatter of this rank's `blocks`.
    pub(super) fn algorithm_of_blocks(
        &self,
        request: &Request,
        call: &Call,
        blocks: &[*mut u8],
    ) -> Result<&'static str> {
        self.algorithm_of(Checked::of_blocks(request, blocks, self.rank(), self.size())?, call)
    }

    fn algorithm_of(&self, mut checked: Checked, call: &Call) -> Result<&'static str> {
        if let Some(operator) = checked.operator {
            Reducer::new(checked.dtype, operator, 1)?;
        }
        if let Some(stages) = Stages::from_number(call.algorithm.unwrap_or(0)) {
            check_stages(stages, checked.signature.kind, call)?;
            return Ok(stages.name());
        }
        let (_, algorithm) = self.plans().plan(&mut checked, call, self.seat())?;
        Ok(algorithm.name())
    }

    /// Refuses what is wrong with the arguments of a call by themselves.
    pub fn check(&self, request: &Request, call: &Call) -> Result<()> {
        if request.kind.point_to_point() {
            return self.point(request, call).map(drop);
        }
        let checked = Checked::new(request, self.rank(), self.size())?;
        if let Some(operator) = checked.operator {
            Reducer::new(checked.dtype, operator, 1)?;
        }
        self.check_algorithm(request, call)
    }

    /// Refuses an algorithm that is named in a group of one and that larger groups refuse.
    pub(super) fn check_algorithm(&self, request: &Request, call: &Call) -> Result<()> {
        if call.algorithm.unwrap_or(0) == 0 { Ok(()) } else { self.algorithm(request, call, &[]).map(drop) }
    }

    /// Refuses what beginning a call would refuse for where its memory is, or its stream. Begins nothing, and
    /// waits for nobody.
    ///
    /// # Safety
    /// The call's stream lives.
    pub unsafe fn check_memory(&self, request: &Request, call: &Call) -> Result<()> {
        if self.is_plain(call) {
            return Ok(());
        }
        if let Membership::Group(group) = self.membership()
            && self.is_to_agree(request, call)
            && self.on_memory(group, request, call)?.is_some()
        {
            return Ok(());
        }
        if self.on_devices(request, call, &[])?.is_some() {
            return Ok(());
        }
        let (class, found) = if request.kind.point_to_point() {
            let (_, _, message) = self.point(request, call)?;
            (Class::PointToPoint, self.survey(Spans::of_message(&message), call))
        } else {
            let checked = Checked::new(request, self.rank(), self.size())?;
            (Class::Ordered, self.survey_collective(&checked, call))
        };
        self.or_fail_in(class, found).map(drop)
    }

    /// Whether a call is on host memory and asks nothing of devices, before anything is known of its
    /// pointers. Short calls take half a microsecond in all, so this is asked once for each.
    fn is_plain(&self, call: &Call) -> bool {
        self.cuda().has_no_part_in(call) && Stages::from_number(call.algorithm.unwrap_or(0)).is_none()
    }

    /// Checks a call that the group's devices do not exchange and finds out what is to be done for it. What
    /// needs nobody else is done here. `plain` is what [`Context::is_plain`] says.
    ///
    /// # Safety
    /// As [`Context::run_buffers`].
    unsafe fn step<'a>(
        &'a self,
        request: &Request,
        call: &Call,
        buffers: &[*mut u8],
        plain: bool,
    ) -> Result<Next<'a>> {
        if request.kind.point_to_point() {
            let (group, signature, message) = self.point(request, call)?;
            let spans = Spans::of_message(&message);
            if !plain && let Some(staging) = self.or_fail_in(Class::PointToPoint, self.survey(spans, call))? {
                return Ok(Next::Staged(Box::new(StagedCall::message(staging, signature, message))));
            }
            let make = Make::Point(message, self.cuda().piece_bytes());
            return Ok(Next::Step(Step { group, calling: calling_message(call, signature), make }));
        }
        if is_of_blocks(request.kind, buffers) {
            // SAFETY: the caller's promise.
            return unsafe { self.step_of_blocks(request, call, buffers) };
        }
        let mut checked = Checked::new(request, self.rank(), self.size())?;
        if !plain && let Some(staging) = self.or_fail(self.survey_collective(&checked, call))? {
            if buffers.len() > 1 {
                fail!(
                    Unsupported,
                    "several buffers of a rank are taken from host memory, and without a stream"
                );
            }
            return Ok(Next::Staged(Box::new(StagedCall::collective(staging, checked))));
        }
        let Membership::Group(group) = self.membership() else {
            if let Some(error) = self.failure() {
                return Err(error);
            }
            self.check_algorithm(request, call)?;
            // SAFETY: the caller's promise; a group of one has its result in its input.
            unsafe { alone(&checked, request.operator, buffers) }?;
            return Ok(Next::Done);
        };
        let by_messages = lists_by_messages(group);
        // SAFETY: the caller's promise.
        let make = unsafe { self.make(group, &mut checked, by_messages, request.operator, call, buffers) };
        let make = self.or_fail(make)?;
        let mut signature = call.compared(checked.signature);
        if sends_no_elements(checked.dtype, checked.operator, buffers) {
            signature = signature.over_several();
        }
        Ok(Next::Step(Step { group, calling: calling_collective(call, signature), make }))
    }

    /// [`Context::step`] for a scatter of this rank's `blocks`, which are in host memory.
    ///
    /// # Safety
    /// As [`Context::run_buffers`].
    unsafe fn step_of_blocks<'a>(
        &'a self,
        request: &Request,
        call: &Call,
        blocks: &[*mut u8],
    ) -> Result<Next<'a>> {
        let Membership::Group(group) = self.membership() else {
            fail!(Internal, "a group of one has one block, and takes it for its input");
        };
        let mut checked = Checked::of_blocks(request, blocks, self.rank(), self.size())?;
        let by_messages = lists_by_messages(group);
        // SAFETY: the caller's promise.
        let make = unsafe { self.make_of_blocks(group, &mut checked, by_messages, call, blocks) };
        let make = self.or_fail(make)?;
        let signature = call.compared(checked.signature);
        Ok(Next::Step(Step { group, calling: calling_collective(call, signature), make }))
    }

    /// How that is run. What reads several blocks in one, or as the others find them in this rank's memory,
    /// has them one behind the other in a workspace.
    ///
    /// # Safety
    /// As [`Context::run_buffers`].
    unsafe fn make_of_blocks(
        &self,
        group: &Group,
        checked: &mut Checked,
        by_messages: bool,
        call: &Call,
        blocks: &[*mut u8],
    ) -> Result<Make> {
        let (elements, output) = (checked.output_len() as u64, checked.output);
        let bytes = checked.output_len() * checked.dtype.size();
        if let Some((direct, job, path)) =
            exchange_directly(group, checked, by_messages, call, class_of(call))?
        {
            let joined = Joined::new(group, blocks, bytes)?;
            let job = Job { input: joined.address(), ..job };
            return Ok(Make::Boxed(Box::new(move |group: &Group, turn: &Turn| {
                // SAFETY: the caller's promise; the workspace lives beside the run, as long as it does.
                unsafe { Box::new(joined.before(DirectRun::new(group, turn, direct, job, path))) }
            })));
        }
        let (plan, _) = self.plans().plan(checked, call, self.seat())?;
        if plan.reads_blocks(elements) {
            let blocks: Box<[*mut u8]> = blocks.into();
            return Ok(Make::Boxed(Box::new(move |group: &Group, turn: &Turn| {
                // SAFETY: the caller's promise.
                unsafe {
                    let run = Run::new(group, turn, plan, std::ptr::null(), output);
                    Box::new(run.of_blocks(blocks, elements))
                }
            })));
        }
        let joined = Joined::new(group, blocks, bytes)?;
        let input = joined.address().cast_const();
        Ok(Make::Boxed(Box::new(move |group: &Group, turn: &Turn| {
            // SAFETY: the caller's promise; the workspace lives beside the run, as long as it does.
            unsafe { Box::new(joined.before(Run::new(group, turn, plan, input, output))) }
        })))
    }

    /// How a collective on host memory is run; notes in its signature the algorithm that the caller named.
    /// `by_messages`: see [`lists_by_messages`].
    ///
    /// # Safety
    /// As [`Context::run_buffers`].
    pub(super) unsafe fn make(
        &self,
        group: &Group,
        checked: &mut Checked,
        by_messages: bool,
        operator: Operator,
        call: &Call,
        buffers: &[*mut u8],
    ) -> Result<Make> {
        let class = class_of(call);
        let bytes = checked.output_len() * checked.dtype.size();
        if let Some(ends) = widen(checked, operator, buffers, group.size())? {
            let wide = ends.around(checked, |bytes| group.lend(bytes))?;
            let mut rest = wide.rest(checked);
            if let Some((direct, job, path)) = exchange_directly(group, &rest, by_messages, call, class)? {
                return Ok(Make::Boxed(Box::new(move |group: &Group, turn: &Turn| {
                    // SAFETY: the caller's promise; the workspace lives beside the run, as long as it does.
                    unsafe { Box::new(wide.around(DirectRun::new(group, turn, direct, job, path))) }
                })));
            }
            let (plan, _) = self.plans().plan(&mut rest, call, self.seat())?;
            checked.signature.algorithm = rest.signature.algorithm;
            return Ok(Make::Boxed(Box::new(move |group: &Group, turn: &Turn| {
                // SAFETY: the caller's promise.
                unsafe { Box::new(wide.run(group, turn, plan)) }
            })));
        }
        let copied = (buffers.len() > 1).then(|| Copied::new(checked.output, buffers, bytes));
        if let Some((direct, job, path)) = exchange_directly(group, checked, by_messages, call, class)? {
            let Some(copied) = copied else { return Ok(Make::Direct(direct, job, path)) };
            return Ok(Make::Boxed(Box::new(move |group: &Group, turn: &Turn| {
                // SAFETY: the caller's promise.
                unsafe { Box::new(copied.behind(DirectRun::new(group, turn, direct, job, path))) }
            })));
        }
        let (plan, _) = self.plans().plan(checked, call, self.seat())?;
        let (input, output) = (checked.input, checked.output);
        let Some(copied) = copied else { return Ok(Make::Run(plan, input, output)) };
        Ok(Make::Boxed(Box::new(move |group: &Group, turn: &Turn| {
            // SAFETY: the caller's promise.
            unsafe { Box::new(copied.behind(Run::new(group, turn, plan, input, output))) }
        })))
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
    calling: Calling,
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
pub(super) fn class_of(call: &Call) -> Class {
    if call.tag.is_some() { Class::Tagged } else { Class::Ordered }
}

/// What a collective is called with.
pub(super) fn calling_collective(call: &Call, signature: Signature) -> Calling {
    Calling { class: class_of(call), tag: call.tag.unwrap_or(0), signature, timeout: call.timeout }
}

/// What a message is called with.
pub(super) fn calling_message(call: &Call, signature: Signature) -> Calling {
    let (tag, timeout) = (call.tag.unwrap_or(0), call.timeout);
    Calling { class: Class::PointToPoint, tag, signature, timeout }
}

/// Whether these are the ranks' blocks of a scatter, on its root.
pub(super) fn is_of_blocks(kind: Kind, buffers: &[*mut u8]) -> bool {
    kind == Kind::Scatter && !buffers.is_empty()
}

/// What comes before and after the ordinary reduction of several buffers, or of scaled ones. Of an average,
/// all ranks have as many as this one ([`Call::averaged`]).
pub(super) fn widen(
    checked: &Checked,
    operator: Operator,
    buffers: &[*mut u8],
    size: u32,
) -> Result<Option<Ends>> {
    let bytes = checked.output_len() * checked.dtype.size();
    match checked.operator {
        Some(Operator::PreMulSum(_)) if buffers.len() <= 1 => {
            let operands = wide::operands(operator, &[checked.input]);
            Ends::new(checked.dtype, operator, operands, vec![checked.output], size).map(Some)
        }
        Some(operator) if buffers.len() > 1 => {
            let inputs: Vec<*const u8> = buffers.iter().map(|buffer| buffer.cast_const()).collect();
            let operands = wide::operands(operator, &inputs);
            let outputs = if bytes > 0 { buffers.to_vec() } else { Vec::new() };
            let contributions = size.saturating_mul(buffers.len() as u32);
            Ends::new(checked.dtype, operator, operands, outputs, contributions).map(Some)
        }
        _ => Ok(None),
    }
}

/// Whether messages have accumulators of another type where those of a rank with one buffer have elements:
/// both may be of the same bytes, so the ranks compare it. Averages compare how many buffers there are, and
/// what is scaled is accumulators with one buffer, too.
pub(super) fn sends_no_elements(dtype: DataType, operator: Option<Operator>, buffers: &[*mut u8]) -> bool {
    buffers.len() > 1
        && dtype.accumulator() != dtype
        && !matches!(operator, None | Some(Operator::Average | Operator::PreMulSum(_) | Operator::Custom(_)))
}

/// Whether calls whose lists may differ from rank to rank go by messages: once the ranks have agreed that
/// their GPUs do not exchange some may have device memory, and only messages let a rank go its own way. To be
/// asked when a call is made: while it runs its ranks may agree, not all at the same moment of it.
pub(super) fn lists_by_messages(group: &Group) -> bool {
    matches!(group.devices(), Some(Way::Staged(_)))
}

/// The direct exchange of a call, when its group has one and the call fits it: ordered, its algorithm left to
/// the library. How many buffers a rank has does not matter here: ranks may have different numbers, or what
/// they have called says how many, or that they are several, too. `by_messages`: see [`lists_by_messages`].
pub(super) fn exchange_directly(
    group: &Group,
    checked: &Checked,
    by_messages: bool,
    call: &Call,
    class: Class,
) -> Result<Option<(Arc<Direct>, Job, Path)>> {
    let Some(direct) = group.direct() else { return Ok(None) };
    if class != Class::Ordered || call.algorithm.unwrap_or(0) != 0 {
        return Ok(None);
    }
    if checked.listed && by_messages {
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
