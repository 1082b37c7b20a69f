//! Runs a schedule over messages, as data flow: what can run, runs.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};
use std::task::Poll;

use super::allowance::Allowance;
use super::endpoint::Endpoint;
use super::group::{Group, Turn};
use super::joint::{Shared, Team, copy};
use super::lane::{Destination, Source, Ticket};
use super::operation::{Completion, Operation};
use super::wire::Key;
use crate::error::{Error, Result, Status, fail};
use crate::reduce::{DataType, Operand, Operator, Reducer, Representation};
use crate::schedule::ir::{Action, Buffer, Schedule, Span, Step};
use crate::signature::Signature;

/// A schedule made ready to run with one element type: sizes in bytes, places for what is received to be
/// combined.
pub struct Plan {
    schedule: Schedule,
    element: usize,
    accumulator: usize,
    reducer: Option<Reducer>,
    /// Where, in the workspace, each buffer of the schedule lies.
    scratch: usize,
    partial: usize,
    /// For each step that receives and combines, where in the workspace it receives to.
    staging: Vec<usize>,
    /// For each step, the elements of the block that its message is of, where the two ranks compare that;
    /// else none.
    blocks: Vec<u64>,
    /// Where in the workspace the output is held back until all steps have ended, and its elements.
    held: Option<(usize, u64)>,
    workspace: usize,
    initial: Vec<u32>,
    widest: usize,
    /// See [`Plan::received`].
    received: OnceLock<Option<Arc<Plan>>>,
}

impl Plan {
    /// `operator` is given when the schedule reduces; `ranks` are what an average divides by.
    pub fn new(schedule: Schedule, dtype: DataType, operator: Option<Operator>, ranks: u32) -> Result<Plan> {
        let reducer = operator.map(|operator| Reducer::new(dtype, operator, ranks)).transpose()?;
        let element = dtype.size();
        let accumulator = reducer.map_or(element, |reducer| reducer.accumulator_size());
        let size = |representation| match representation {
            Representation::Element => element,
            Representation::Accumulator => accumulator,
        };
        let too_large =
            || Error::new(Status::OutOfMemory, "the workspace of this call exceeds the address space");
        let mut workspace = 0usize;
        let mut place = |positions: u64, size: usize| {
            let at = workspace;
            let bytes = usize::try_from(positions).ok()?.checked_mul(size)?;
            workspace = workspace.checked_add(bytes)?.checked_next_multiple_of(ALIGNMENT)?;
            Some(at)
        };
        let scratch = place(schedule.scratch, element).ok_or_else(too_large)?;
        let partial = place(schedule.partial, accumulator).ok_or_else(too_large)?;
        let mut staging = Vec::new();
        for (index, step) in schedule.steps.iter().enumerate() {
            if let Action::ReceiveReduce { wire, local, .. } = step.action {
                staging.resize(index + 1, 0);
                staging[index] = place(local.len, size(wire)).ok_or_else(too_large)?;
            }
        }
        let initial =
            (0..schedule.steps.len() as u32).filter(|&i| schedule.steps[i as usize].waits_for == 0).collect();
        let widest = schedule
            .steps
            .iter()
            .map(|step| if let Action::Fold { count, .. } = step.action { count as usize } else { 2 })
            .max()
            .unwrap_or(0);
        Ok(Plan {
            schedule,
            element,
            accumulator,
            reducer,
            scratch,
            partial,
            staging,
            blocks: Vec::new(),
            held: None,
            workspace,
            initial,
            widest,
            received: OnceLock::new(),
        })
    }

    /// The two ranks of each message compare what they count of the block that it is of: `blocks`, for each
    /// step.
    pub fn compare_blocks(mut self, blocks: Vec<u64>) -> Plan {
        self.blocks = blocks;
        self
    }

    /// The steps that it runs.
    pub fn steps(&self) -> &[Step] {
        &self.schedule.steps
    }

    /// Bytes of an element.
    pub fn element(&self) -> usize {
        self.element
    }

    /// What the message of a step says of the call.
    pub fn signature(&self, call: Signature, step: u32) -> Signature {
        self.blocks.get(step as usize).map_or(call, |&elements| call.about_block(elements))
    }

    /// Holds the output of `elements` elements back: it is written at once when all steps have ended, so that
    /// a call that fails leaves it as it was. The schedule must be one for an output apart from the input,
    /// and write all of it.
    pub fn hold_output(mut self, elements: u64) -> Plan {
        self.held = Some((self.workspace, elements));
        self.workspace += elements as usize * self.element;
        self
    }

    /// The same messages, received where they would have been combined with this rank's input. `None` where
    /// it does anything else.
    pub fn received(&self) -> Option<Arc<Plan>> {
        self.received.get_or_init(|| self.receiving().map(Arc::new)).clone()
    }

    fn receiving(&self) -> Option<Plan> {
        let receive = |step: &Step| match step.action {
            Action::ReceiveReduce { from, wire: Representation::Element, local, into, slot, .. }
                if local == Span { buffer: Buffer::Input, ..into } && into.buffer == Buffer::Output =>
            {
                Some(Step { action: Action::Receive { from, into, slot }, ..step.clone() })
            }
            _ => None,
        };
        let steps: Option<Vec<Step>> = self.schedule.steps.iter().map(receive).collect();
        let steps = steps.filter(|_| self.blocks.is_empty() && self.held.is_none())?;
        let schedule = Schedule { steps, scratch: 0, partial: 0, ..self.schedule.clone() };
        let plan = Plan {
            schedule,
            reducer: None,
            scratch: 0,
            partial: 0,
            staging: Vec::new(),
            blocks: Vec::new(),
            held: None,
            workspace: 0,
            initial: self.initial.clone(),
            received: OnceLock::new(),
            ..*self
        };
        Some(plan)
    }

    /// Whether each step that reads the input reads it within one of its blocks of `elements` elements: then
    /// they may lie anywhere ([`Run::of_blocks`]).
    pub fn reads_blocks(&self, elements: u64) -> bool {
        let within = |span: Span| {
            span.buffer != Buffer::Input
                || span.len == 0
                || span.start / elements == (span.end() - 1) / elements
        };
        elements > 0
            && self.schedule.operands.iter().all(|&span| within(span))
            && self.schedule.steps.iter().all(|step| match step.action {
                Action::Send { from, .. } | Action::Copy { from, .. } => within(from),
                Action::ReceiveReduce { local, .. } => within(local),
                Action::Receive { .. } | Action::Fold { .. } => true,
            })
    }

    fn size(&self, representation: Representation) -> usize {
        match representation {
            Representation::Element => self.element,
            Representation::Accumulator => self.accumulator,
        }
    }
}

/// Stands in [`Progress::waits`] for a step that has ended.
const ENDED: u32 = u32::MAX;

/// Parts of a workspace begin at multiples of this many bytes.
const ALIGNMENT: usize = 64;

/// Memory that an operation works in. Uninitialised until written.
pub struct Workspace {
    address: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a workspace is plain memory that its holder alone uses.
unsafe impl Send for Workspace {}

impl Workspace {
    /// `bytes` bytes, aligned to a cache line.
    pub fn new(bytes: usize) -> Result<Workspace> {
        if bytes == 0 {
            return Ok(Workspace { address: NonNull::dangling(), bytes });
        }
        // SAFETY: the layout is not empty.
        let allocate = |layout| NonNull::new(unsafe { alloc(layout) });
        match Workspace::layout(bytes).and_then(allocate) {
            Some(address) => Ok(Workspace { address, bytes }),
            None => fail!(OutOfMemory, "no memory for the {bytes} bytes that the call works in"),
        }
    }

    /// Its length.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its start.
    pub fn address(&self) -> *mut u8 {
        self.address.as_ptr()
    }

    /// `None` where no address space holds so much.
    fn layout(bytes: usize) -> Option<Layout> {
        Layout::from_size_align(bytes, ALIGNMENT).ok()
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        if let (true, Some(layout)) = (self.bytes > 0, Workspace::layout(self.bytes)) {
            // SAFETY: allocated in `new` with this layout.
            unsafe { dealloc(self.address.as_ptr(), layout) };
        }
    }
}

/// What one run needs beside the plan. Kept by the group between runs, so that nothing is allocated after the
/// first.
#[derive(Default)]
pub struct Progress {
    waits: Vec<u32>,
    ready: Vec<u32>,
    /// Steps that are to be done on this rank, whose turn it is.
    local: VecDeque<u32>,
    finished: Vec<u32>,
    operands: Vec<Operand>,
}

// SAFETY: the operands are rebuilt for each use; between uses the list is empty.
unsafe impl Send for Progress {}

/// One run of a plan: the data flow of one call.
pub struct Run {
    plan: Arc<Plan>,
    input: *const u8,
    /// Where the blocks of the input are that do not adjoin, and the elements of each.
    blocks: Option<(Box<[*mut u8]>, u64)>,
    output: *mut u8,
    workspace: Option<Workspace>,
    progress: Progress,
    mailbox: Option<u32>,
    key: Key,
    signature: Signature,
    left: usize,
    /// Bytes of what the first local step writes that it has written.
    done: usize,
    started: bool,
}

// SAFETY: the caller of the operation promised that input and output may be used from the library's threads.
unsafe impl Send for Run {}

impl Run {
    /// A run for `turn`.
    ///
    /// # Safety
    /// `input` and `output` are valid for what the schedule reads and writes until the run has ended or is
    /// abandoned.
    pub unsafe fn new(group: &Group, turn: &Turn, plan: Arc<Plan>, input: *const u8, output: *mut u8) -> Run {
        let left = plan.schedule.steps.len();
        let mut progress = group.progress();
        progress.waits.clear();
        progress.waits.extend(plan.schedule.steps.iter().map(|step| step.waits_for));
        progress.ready.clear();
        progress.ready.extend(&plan.initial);
        progress.local.clear();
        progress.finished.clear();
        progress.operands.clear();
        progress.operands.reserve(plan.widest);
        Run {
            plan,
            input,
            blocks: None,
            output,
            workspace: None,
            progress,
            mailbox: None,
            key: turn.key(group),
            signature: turn.signature,
            left,
            done: 0,
            started: false,
        }
    }

    /// The same, of an input that consists of blocks of `elements` elements, each at an address of its own.
    /// The plan reads them so ([`Plan::reads_blocks`]).
    ///
    /// # Safety
    /// As [`Run::new`], of each block instead of the input.
    pub unsafe fn of_blocks(mut self, blocks: Box<[*mut u8]>, elements: u64) -> Run {
        self.blocks = Some((blocks, elements));
        self
    }

    /// Where a span lies.
    fn address(&self, span: Span) -> *mut u8 {
        let workspace = self.workspace.as_ref().map_or(std::ptr::null_mut(), Workspace::address);
        let offset = span.start as usize * self.plan.size(span.representation());
        let base = match span.buffer {
            Buffer::Input => match &self.blocks {
                Some((blocks, elements)) => {
                    let (block, start) = (span.start / elements, span.start % elements);
                    return blocks[block as usize].wrapping_add(start as usize * self.plan.element);
                }
                None => self.input.cast_mut(),
            },
            Buffer::Output => match self.plan.held {
                Some((held, _)) => workspace.wrapping_add(held),
                None => self.output,
            },
            Buffer::Scratch => workspace.wrapping_add(self.plan.scratch),
            Buffer::Partial => workspace.wrapping_add(self.plan.partial),
        };
        base.wrapping_add(offset)
    }

    /// Names the message of a slot of the schedule.
    fn key(&self, slot: u32) -> Key {
        Key { slot: self.key.slot + u64::from(slot), ..self.key }
    }

    fn bytes(&self, span: Span) -> usize {
        span.len as usize * self.plan.size(span.representation())
    }

    fn staging(&self, step: u32) -> *mut u8 {
        let workspace = self.workspace.as_ref().map_or(std::ptr::null_mut(), Workspace::address);
        workspace.wrapping_add(self.plan.staging[step as usize])
    }

    /// Runs what is ready: transfers, and local work as far as `allowance` goes. Whether all of that is done.
    fn run_ready(&mut self, group: &Group, plan: &Plan, mailbox: u32, allowance: &mut Allowance) -> bool {
        loop {
            self.post_ready(group, plan, mailbox);
            if self.progress.local.is_empty() {
                return true;
            }
            while let Some(&index) = self.progress.local.front() {
                if !self.work(group.endpoint(), plan, index, allowance) {
                    self.post_ready(group, plan, mailbox);
                    return false;
                }
                self.progress.local.pop_front();
                self.done = 0;
                self.complete(plan, index);
            }
        }
    }

    /// Posts the transfers that are ready, together under one lock; local steps come behind those that are
    /// to be done already.
    fn post_ready(&mut self, group: &Group, plan: &Plan, mailbox: u32) {
        let mut ready = std::mem::take(&mut self.progress.ready);
        let mut messages = None;
        for &index in &ready {
            let ticket = Ticket { mailbox, step: index };
            let peer = |rank: u32| group.members()[rank as usize];
            let signature = plan.signature(self.signature, index);
            match plan.schedule.steps[index as usize].action {
                Action::Send { to, from, slot } => {
                    let source = Source { address: self.address(from), len: self.bytes(from) };
                    let key = self.key(slot);
                    let messages = messages.get_or_insert_with(|| group.endpoint().messages());
                    messages.send(peer(to), key, signature, source, ticket);
                }
                Action::Receive { from, into, slot } => {
                    let destination = Destination { address: self.address(into), len: self.bytes(into) };
                    let key = self.key(slot);
                    let messages = messages.get_or_insert_with(|| group.endpoint().messages());
                    messages.receive(peer(from), key, signature, destination, ticket);
                }
                Action::ReceiveReduce { from, wire, local, slot, .. } => {
                    let len = local.len as usize * plan.size(wire);
                    let destination = Destination { address: self.staging(index), len };
                    let key = self.key(slot);
                    let messages = messages.get_or_insert_with(|| group.endpoint().messages());
                    messages.receive(peer(from), key, signature, destination, ticket);
                }
                Action::Fold { .. } | Action::Copy { .. } => self.progress.local.push_back(index),
            }
        }
        if let Some(mut messages) = messages {
            messages.write_out();
        }
        // Its memory is kept.
        ready.clear();
        self.progress.ready = ready;
    }

    /// Does a local step, or what is left of it, as far as `allowance` goes. Whether that was all.
    fn work(&mut self, endpoint: &Endpoint, plan: &Plan, index: u32, allowance: &mut Allowance) -> bool {
        self.progress.operands.clear();
        match plan.schedule.steps[index as usize].action {
            Action::Copy { from, into } => {
                let (source, target) = (self.address(from).cast_const(), self.address(into));
                let left = self.bytes(from) - self.done;
                if left == 0 || std::ptr::eq(source, target) {
                    return true;
                }
                let count = allowance.grant(left, endpoint);
                let (source, target) = (source.wrapping_add(self.done), target.wrapping_add(self.done));
                // SAFETY: the checker proves that spans stay inside their buffers and that copies do not
                // overlap; the buffers are as long as the plan says (the caller's promise, and `Plan::new`
                // for the workspace). This is a part of them.
                unsafe { copy(endpoint, source, target, count, PART) };
                self.done += count;
                count == left
            }
            Action::Fold { first, count, into } => {
                for &span in &plan.schedule.operands[first as usize..(first + count) as usize] {
                    let operand = self.operand(self.address(span), span.representation());
                    self.progress.operands.push(operand);
                }
                self.fold(endpoint, into, allowance)
            }
            // It has come.
            Action::ReceiveReduce { wire, local, received_left, into, .. } => {
                let came = self.operand(self.staging(index), wire);
                let here = self.operand(self.address(local), local.representation());
                let operands = if received_left { [came, here] } else { [here, came] };
                self.progress.operands.extend(operands);
                self.fold(endpoint, into, allowance)
            }
            Action::Send { .. } | Action::Receive { .. } => true,
        }
    }

    fn operand(&self, address: *mut u8, representation: Representation) -> Operand {
        Operand { address: address.cast_const(), representation, scale: 1.0 }
    }

    /// Combines the operands, or what is left of them, as far as `allowance` goes. Whether that was all.
    fn fold(&mut self, endpoint: &Endpoint, into: Span, allowance: &mut Allowance) -> bool {
        let Some(reducer) = &self.plan.reducer else { return true };
        let width = self.plan.size(into.representation());
        let (done, left) = (self.done / width, self.bytes(into) - self.done);
        if left == 0 {
            return true;
        }
        let others = self.progress.operands.len().saturating_sub(1).max(1);
        let bytes = allowance.grant_each(left, others, endpoint);
        if bytes == 0 {
            return false;
        }
        for operand in &mut self.progress.operands {
            let before = done * self.plan.size(operand.representation);
            operand.address = operand.address.wrapping_add(before);
        }
        let (operands, out) = (&self.progress.operands, self.address(into).wrapping_add(self.done));
        let _away = reducer.calls_program().then(|| endpoint.go_away());
        if bytes > PART {
            // It may take long.
            endpoint.leave_bell();
        }
        // SAFETY: as for copies: spans are inside their buffers, and the steps that touch them are ordered.
        unsafe {
            let out = (out, into.representation());
            fold(endpoint, &self.plan, reducer, operands, out, bytes / width);
        }
        self.done += bytes;
        bytes == left
    }

    fn complete(&mut self, plan: &Plan, index: u32) {
        self.left -= 1;
        self.progress.waits[index as usize] = ENDED;
        let successors = plan.schedule.steps[index as usize].successors.clone();
        for &next in &plan.schedule.successors[successors.start as usize..successors.end as usize] {
            let waits = &mut self.progress.waits[next as usize];
            *waits -= 1;
            if *waits == 0 {
                self.progress.ready.push(next);
            }
        }
    }

    /// All steps have ended: what was held back goes to the caller.
    fn hand_over(&self) {
        let (Some((held, elements)), Some(workspace)) = (self.plan.held, &self.workspace) else { return };
        let from = workspace.address().wrapping_add(held);
        // SAFETY: the workspace holds that many elements from there on (`Plan::hold_output`), the caller's
        // output too.
        unsafe { std::ptr::copy_nonoverlapping(from, self.output, elements as usize * self.plan.element) };
    }

    fn release(&mut self, group: &Group) {
        group.keep_progress(std::mem::take(&mut self.progress));
        if let Some(workspace) = self.workspace.take() {
            group.keep_workspace(workspace);
        }
    }
}

/// Its messages would still be read from memory and written to it that is its caller's again, or nobody's:
/// whoever drops one that has neither ended nor been abandoned is wrong.
#[cfg(debug_assertions)]
impl Drop for Run {
    fn drop(&mut self) {
        assert!(self.mailbox.is_none() || std::thread::panicking(), "a run is dropped that is under way");
    }
}

/// Bytes of a part of local work, of which several threads do several.
const PART: usize = 256 * 1024;

/// Operands of a fold that is dealt out, at most: their places lie on the stack.
const OPERANDS: usize = 8;

/// Folds, by several threads if it is long: each position is combined as in one go.
///
/// # Safety
/// As [`Reducer::fold`].
unsafe fn fold(
    endpoint: &Endpoint,
    plan: &Plan,
    reducer: &Reducer,
    operands: &[Operand],
    (out, representation): (*mut u8, Representation),
    count: usize,
) {
    let width = plan.size(representation);
    let each = PART / width;
    if count <= 2 * each || operands.len() > OPERANDS {
        // SAFETY: the caller's promise.
        return unsafe { reducer.fold(operands, out, representation, count) };
    }
    let memory = Shared((operands, out));
    endpoint.together(count.div_ceil(each), &|part| {
        let ((operands, out), start) = (memory.get(), part * each);
        let mut places = [operands[0]; OPERANDS];
        for (place, operand) in places.iter_mut().zip(operands) {
            let address = operand.address.wrapping_add(start * plan.size(operand.representation));
            *place = Operand { address, ..*operand };
        }
        let (places, left) = (&places[..operands.len()], each.min(count - start));
        // SAFETY: the caller's promise, for a part of the positions. Where `out` is an operand, a part of it
        // is that operand's same part.
        unsafe { reducer.fold(places, out.wrapping_add(start * width), representation, left) };
    });
}

impl Operation for Run {
    fn advance(&mut self, group: &Group) -> Poll<Result<Completion>> {
        let mailbox = match self.mailbox {
            Some(mailbox) => mailbox,
            None => *self.mailbox.insert(group.endpoint().messages().mailbox()),
        };
        let (plan, mut allowance) = (self.plan.clone(), Allowance::of_a_look());
        if !self.started {
            self.started = true;
            match group.workspace(plan.workspace) {
                Ok(workspace) => self.workspace = Some(workspace),
                Err(error) => return Poll::Ready(Err(error)),
            }
            self.run_ready(group, &plan, mailbox, &mut allowance);
            group.endpoint().settle();
        }
        loop {
            let mut messages = group.endpoint().messages();
            let mail = messages.look(mailbox);
            if let Some(failure) = mail.failed.take() {
                return Poll::Ready(Err(group.tell(failure)));
            }
            if mail.done.is_empty() && self.progress.local.is_empty() {
                if self.left > 0 {
                    return Poll::Pending;
                }
                messages.close_mailbox(mailbox);
                drop(messages);
                self.mailbox = None;
                self.hand_over();
                self.release(group);
                return Poll::Ready(Ok(Completion::default()));
            }
            std::mem::swap(&mut mail.done, &mut self.progress.finished);
            drop(messages);
            let finished = std::mem::take(&mut self.progress.finished);
            for &index in &finished {
                match plan.schedule.steps[index as usize].action {
                    // What has come is to be combined.
                    Action::ReceiveReduce { .. } => self.progress.local.push_back(index),
                    _ => self.complete(&plan, index),
                }
            }
            self.progress.finished = finished;
            self.progress.finished.clear();
            if !self.run_ready(group, &plan, mailbox, &mut allowance) {
                return Poll::Pending;
            }
        }
    }

    fn abandon(&mut self, group: &Group) {
        if let Some(mailbox) = self.mailbox.take() {
            group.endpoint().messages().cancel(mailbox);
        }
        if self.workspace.is_some() {
            self.release(group);
        }
    }

    fn mailbox(&self) -> Option<u32> {
        self.mailbox
    }

    fn is_at_work(&self) -> bool {
        !self.progress.local.is_empty()
    }

    fn standing(&self) -> Option<String> {
        self.is_at_work().then(|| "its bytes are still being moved".into())
    }

    fn waits_for(&self, _group: &Group) -> Vec<u32> {
        if self.is_at_work() {
            return Vec::new();
        }
        let under_way = |peer: fn(&Action) -> Option<u32>| {
            let steps = self.plan.schedule.steps.iter().zip(&self.progress.waits);
            let steps = steps.filter(|(_, waits)| **waits == 0);
            let mut ranks: Vec<u32> = steps.filter_map(|(step, _)| peer(&step.action)).collect();
            ranks.sort_unstable();
            ranks.dedup();
            ranks
        };
        let mut ranks = under_way(|action| match action {
            Action::Receive { from, .. } | Action::ReceiveReduce { from, .. } => Some(*from),
            _ => None,
        });
        // Who sends waits for those that are to take it.
        let mut takers = under_way(|action| match action {
            Action::Send { to, .. } => Some(*to),
            _ => None,
        });
        takers.retain(|to| ranks.binary_search(to).is_err());
        ranks.append(&mut takers);
        ranks
    }
}
