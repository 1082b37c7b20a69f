//! How the ranks of a group come to agree on the way of calls on device memory: setup rounds, in which every
//! rank takes part.

use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use crate::collective::request::Request;
use crate::communicator::Completion;
use crate::communicator::context::{Context, Membership};
use crate::cuda::context::Devices;
use crate::cuda::exchange::Chosen;
use crate::deadline::Deadline;
use crate::engine::callbacks::hold_back;
use crate::engine::device::{Loads, MESSAGE_BYTES, Occasion, Setup, Step};
use crate::engine::endpoint::{Through, lock};
use crate::engine::executor::Run;
use crate::engine::group::{Calling, Group, Turn};
use crate::engine::operation::{Operation, Running};
use crate::engine::wire::Class;
use crate::error::{Error, Result};
use crate::signature::{Making, Signature};

/// How long a thread that connects many groups stays with one of them before it looks at the others.
const SLICE: Duration = Duration::from_millis(1);

/// [`Context::connect_device`] for several contexts of this process at once, each with its device: what a
/// thread needs that has several ranks of one group. Contexts that have agreed already are left alone.
pub fn connect_devices(contexts: &[(&Context, u32)]) -> Result<()> {
    let candidates: Vec<Candidate<'_>> = contexts
        .iter()
        .map(|&(context, device)| Candidate { context, device, first: None, points: true })
        .collect();
    connect(&candidates, Devices::open, choose, Loads::OWN)
}

/// The table that this process goes by on a device.
pub(in crate::communicator) fn choose(devices: &Devices, device: u32) -> Result<Chosen> {
    Chosen::of_device(devices.driver(), device)
}

/// A context whose devices are to agree.
#[derive(Clone, Copy)]
pub(in crate::communicator) struct Candidate<'a> {
    pub(in crate::communicator) context: &'a Context,
    /// This rank's.
    pub(in crate::communicator) device: u32,
    /// The call that needs it; `None`: it comes before all calls.
    pub(in crate::communicator) first: Option<First>,
    /// Whether messages go the same way if it comes before all calls: of programs that name the ranks that
    /// they receive from, and have messages in device memory alone. The same on all ranks.
    pub(in crate::communicator) points: bool,
}

/// A group's first call on device memory.
#[derive(Clone, Copy)]
pub(in crate::communicator) struct First {
    pub(in crate::communicator) signature: Signature,
    pub(in crate::communicator) timeout: Option<Duration>,
}

/// Has the devices agree, by the driver that `devices` opens, the table that is chosen for a device, and the
/// kernels that `loads` load.
pub(in crate::communicator) fn connect(
    candidates: &[Candidate<'_>],
    devices: impl Fn() -> Result<Arc<Devices>> + Copy,
    choose: impl Fn(&Devices, u32) -> Result<Chosen> + Copy,
    loads: Loads,
) -> Result<()> {
    // Groups are locked until they have agreed, and a callback may want to make a call of one.
    let _held_back = hold_back();
    let mut turns = Vec::new();
    let mut connecting = Vec::new();
    let mut others = Vec::new();
    // Of the first that fails; it keeps no other group from agreeing, whose ranks need this one in each of
    // their rounds.
    let mut answer = Ok(());
    for &candidate in candidates {
        let Membership::Group(group) = candidate.context.membership() else { continue };
        if group.devices().is_some() {
            continue;
        }
        // Another thread may be at it, or the list may have it twice.
        match group.connecting().try_lock() {
            Ok(turn) if group.devices().is_none() => {
                turns.push(turn);
                match Connecting::begin(group, &candidate, devices(), choose, loads) {
                    Ok(one) => connecting.push(one),
                    Err(error) => answer = answer.and(Err(error)),
                }
            }
            Ok(_) => {}
            Err(_) => others.push((group, candidate)),
        }
    }
    while !connecting.is_empty() {
        let mut moved = false;
        let mut index = 0;
        while let Some(one) = connecting.get_mut(index) {
            match one.advance() {
                Ok(Poll::Pending) => index += 1,
                ended => {
                    answer = answer.and(ended.map(drop));
                    connecting.swap_remove(index);
                    moved = true;
                }
            }
        }
        if let (false, Some(first)) = (moved, connecting.first()) {
            first.wait(Deadline::after(SLICE));
        }
    }
    drop(turns);
    for (group, candidate) in others {
        drop(lock(group.connecting()));
        if group.devices().is_none() {
            answer = answer.and(connect(&[candidate], devices, choose, loads));
        }
    }
    answer
}

/// One group's setup under way.
struct Connecting<'a> {
    context: &'a Context,
    group: &'a Arc<Group>,
    setup: Setup,
    /// The call that needs it, announced.
    first: Option<Turn>,
    /// When the other ranks are told of that call: one that has called something else does not come.
    compare_at: Deadline,
    round: Option<Gathering>,
}

/// A gathering under way, and where its messages will be, in rank order.
type Gathering = (Arc<Running>, Arc<Mutex<Vec<u8>>>);

impl<'a> Connecting<'a> {
    /// Begins on this rank, with its first round.
    fn begin(
        group: &'a Arc<Group>,
        candidate: &Candidate<'a>,
        devices: Result<Arc<Devices>>,
        choose: impl FnOnce(&Devices, u32) -> Result<Chosen>,
        loads: Loads,
    ) -> Result<Connecting<'a>> {
        let Candidate { context, device, first, points } = *candidate;
        let first = first.map(|first| group.announce(first.signature, first.timeout)).transpose()?;
        let blocks = context.max_blocks();
        let occasion = Occasion { first: first.as_ref(), points };
        let (setup, step) = Setup::begin(group, devices, device, choose, loads, occasion, blocks);
        let compare_at = first.map_or(Deadline::NEVER, |first| first.compare_at(first.called));
        let mut one = Connecting { context, group, setup, first, compare_at, round: None };
        one.step(step)?;
        Ok(one)
    }

    fn step(&mut self, step: Step) -> Result<()> {
        self.round = match step {
            Step::Gather(message) => {
                // All rounds have the time of the call.
                let timeout = self.first.map(|first| first.deadline.remaining().unwrap_or(Duration::MAX));
                let gathering = self.context.gather(self.group, &message, timeout, Making::Connect);
                Some(gathering.map_err(|error| self.told(error))?)
            }
            Step::Agreed(_) => {
                if let Some(first) = self.first.take() {
                    self.group.retract(&first);
                }
                None
            }
        };
        Ok(())
    }

    fn advance(&mut self) -> Result<Poll<()>> {
        while let Some((running, gathered)) = &self.round {
            let Some(result) = running.result() else {
                self.compare();
                return Ok(Poll::Pending);
            };
            let gathered = std::mem::take(&mut *lock(gathered));
            let step = result.and_then(|_| self.setup.next(&gathered)).map_err(|error| self.told(error))?;
            self.step(step)?;
        }
        Ok(Poll::Ready(()))
    }

    /// Tells the others of the call that needs it, when that is due.
    fn compare(&mut self) {
        if let Some(first) = self.first.as_ref().filter(|_| self.compare_at.expired()) {
            self.compare_at = Deadline::NEVER;
            let own = self.group.rank();
            let others: Vec<u32> = (0..self.group.size()).filter(|&rank| rank != own).collect();
            self.group.compare(first, &others);
        }
    }

    /// An error of the setup, told with the call that needs it.
    fn told(&self, error: Error) -> Error {
        match &self.first {
            Some(first) => self.group.miscarry(first, &error),
            None => error,
        }
    }

    fn wait(&self, deadline: Deadline) {
        if let Some((running, _)) = &self.round {
            // Its result is looked at by `advance`.
            let _ = running.wait(deadline);
        }
    }
}

impl Context {
    /// Gathers a message of every rank, in rank order.
    pub(in crate::communicator) fn gather_all(
        &self,
        group: &Arc<Group>,
        message: &[u8; MESSAGE_BYTES],
        making: Making,
    ) -> Result<Vec<u8>> {
        let (running, gathered) = self.gather(group, message, None, making)?;
        // Its own deadline ends it.
        if let Some(result) = running.wait(Deadline::NEVER) {
            result?;
        }
        Ok(std::mem::take(&mut *lock(&gathered)))
    }

    /// Starts to gather a message of every rank, in rank order.
    fn gather(
        &self,
        group: &Arc<Group>,
        message: &[u8; MESSAGE_BYTES],
        timeout: Option<Duration>,
        making: Making,
    ) -> Result<Gathering> {
        let mine: Box<[u8]> = message.to_vec().into();
        let mut all = vec![0; MESSAGE_BYTES * group.size() as usize];
        let request = Request::gathering(mine.as_ptr(), all.as_mut_ptr(), MESSAGE_BYTES);
        let (signature, plan) = self.internal_plan(group, &request)?;
        let into = Arc::new(Mutex::new(Vec::new()));
        let gathered = into.clone();
        let signature = signature.of_making(making);
        let calling = Calling { class: Class::Internal, tag: 0, signature, timeout };
        let running = group.start(calling, |turn| {
            // SAFETY: the operation keeps the buffers, which have the lengths that the request says, for as
            // long as it lives.
            let run = unsafe { Run::new(group, turn, plan, request.input, request.output) };
            Gather { run, _mine: mine, all, into }
        })?;
        Ok((running, gathered))
    }
}

/// A round of messages, with its memory.
struct Gather {
    run: Run,
    _mine: Box<[u8]>,
    all: Vec<u8>,
    into: Arc<Mutex<Vec<u8>>>,
}

impl Operation for Gather {
    fn advance(&mut self, group: &Group) -> Poll<Result<Completion>> {
        let answer = self.run.advance(group);
        if let Poll::Ready(Ok(_)) = &answer {
            *lock(&self.into) = std::mem::take(&mut self.all);
        }
        answer
    }

    fn abandon(&mut self, group: &Group) {
        self.run.abandon(group);
    }

    fn waits_for(&self, group: &Group) -> Vec<u32> {
        self.run.waits_for(group)
    }

    fn is_at_work(&self) -> bool {
        self.run.is_at_work()
    }

    fn standing(&self) -> Option<String> {
        self.run.standing()
    }

    fn through(&self) -> Through {
        self.run.through()
    }
}
