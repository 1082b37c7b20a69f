//! A rank's calls: how they are made, what is done behind them, and how they are waited for.

use std::ptr;
use std::thread;
use std::time::Duration;

use super::super::program::{Collective, Kind, Listed, Message, Mode, Part};
use super::super::values;
use super::memory::{At, Due, pointer};
use super::{PATIENCE, Player};
use crate::collective::request::{Counts, Request};
use crate::communicator::{Call, Completion, Context, Work, start_together};
use crate::cuda::driver::StreamHandle;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::reduce::{DataType, Operator};

/// A call that is to be made.
pub(super) struct Ready {
    request: Request,
    call: Call,
    part: Part,
    /// What the program writes to behind it, and how many bytes.
    input: Option<(At, usize)>,
    due: Due,
    /// Whether it is another call than the others'.
    odd: bool,
}

/// A call that is to be waited for.
pub(super) struct Kept {
    pub(super) work: Work,
    due: Due,
    /// What its input was filled on, which may still do so when it has failed.
    stream: Option<StreamHandle>,
    odd: bool,
}

impl Player<'_> {
    pub(super) fn collective(&mut self, context: &Context, call: &Collective) -> Ready {
        let rank = context.rank() as usize;
        let part = call.parts[rank];
        let (given, due) = (values::input(call, rank), values::output(call, rank));
        let before = call.lens[..rank].iter().sum::<usize>() as u64 * call.dtype.size() as u64;
        let (from, to) = if part.in_place && !given.is_empty() && !due.is_empty() {
            let base = self.memory(part.host[0], given.len().max(due.len()));
            let behind = At { address: base.address + before, ..base };
            match call.kind {
                Kind::Allgather | Kind::Gather => (behind, base),
                Kind::Scatter | Kind::ReduceScatter => (base, behind),
                _ => (base, base),
            }
        } else {
            (self.memory(part.host[0], given.len()), self.memory(part.host[1], due.len()))
        };
        let (sends, receives): (Vec<u64>, Vec<u64>) = (0..call.parts.len())
            .map(|other| (call.len(rank, other) as u64, call.len(other, rank) as u64))
            .unzip();
        let counts = match call.kind {
            Kind::Alltoall if call.listed => Counts::Exchange { send: sends, receive: receives },
            _ if call.listed => Counts::Blocks(call.lens.iter().map(|&len| len as u64).collect()),
            _ => Counts::Uniform(call.lens[0] as u64),
        };
        let null = |at: At, len: usize| if len > 0 { pointer(at.address) } else { ptr::null_mut() };
        let mut request = Request {
            kind: call.kind,
            input: null(from, given.len()).cast_const(),
            output: null(to, due.len()),
            counts,
            dtype: call.dtype,
            operator: call.operator,
            root: call.root as u32,
        };
        let odd = std::mem::take(&mut self.mismatches);
        if odd {
            request.dtype = match call.dtype {
                DataType::I8 => DataType::U8,
                DataType::U8 => DataType::I8,
                DataType::F16 => DataType::Bf16,
                DataType::Bf16 => DataType::F16,
                DataType::I32 => DataType::U32,
                DataType::U32 => DataType::F32,
                DataType::F32 => DataType::I32,
                DataType::I64 => DataType::U64,
                DataType::U64 => DataType::F64,
                _ => DataType::I64,
            };
        }
        let what = format!(
            "call {:x}, {:?} of {:?} {:?} on rank {rank} of {}",
            call.id,
            call.kind,
            call.lens,
            call.dtype,
            context.name()
        );
        let input = (!part.in_place || due.is_empty()).then_some((from, given.len()));
        self.prepare(part, (from, &given), input.map(|_| (to, due.len())));
        let due = Due { at: to, bytes: due, what };
        let algorithm = Some(call.algorithm);
        let call = Call { algorithm, ..self.call(call.tag, part) };
        Ready { request, call, part, input, due, odd }
    }

    pub(super) fn message(&mut self, message: &Message, sends: bool) -> Ready {
        let part = message.parts[usize::from(!sends)];
        let bytes = values::bytes(message.id, message.len);
        let at = self.memory(part.host[0], message.len);
        let (given, peer) = if sends { (&bytes[..], message.to) } else { (&[][..], message.from) };
        self.prepare(part, (at, given), (!sends).then_some((at, message.len)));
        let (kind, counts) = match (sends, message.any) {
            (true, _) => (Kind::Send, Counts::Uniform(message.len as u64)),
            (false, false) => (Kind::Receive, Counts::Uniform(message.len as u64)),
            (false, true) => (Kind::ReceiveAny, Counts::Uniform(message.len as u64)),
        };
        let request = Request {
            kind,
            input: pointer(at.address).cast_const(),
            output: pointer(at.address),
            counts,
            dtype: DataType::U8,
            operator: Operator::Sum,
            root: peer as u32,
        };
        let what = format!("message {:x}, {kind:?} of {}", message.id, message.len);
        let bytes = if sends { Vec::new() } else { bytes };
        let input = sends.then_some((at, message.len));
        let call = self.call(Some(message.tag), part);
        Ready { request, call, part, input, due: Due { at, bytes, what }, odd: false }
    }

    /// Makes calls together, or one by one.
    pub(super) fn together(&mut self, calls: &[Listed], one_by_one: bool) -> Result<()> {
        let is_message = |call: &&Listed| matches!(call, Listed::Message(_));
        let (messages, mut own): (Vec<_>, Vec<_>) = calls.iter().partition(is_message);
        for message in messages {
            own.insert(self.dice.below(own.len() + 1), message);
        }
        let mut made = Vec::new();
        for call in own {
            made.extend(match call {
                Listed::Collective(call) => self.groups[call.group].clone().map(|context| {
                    let ready = self.collective(&context, call);
                    (context, ready)
                }),
                Listed::Message(message) => self.side(message).map(|(context, sends)| {
                    let ready = self.message(message, sends);
                    (context, ready)
                }),
            });
        }
        if one_by_one {
            return made.into_iter().try_for_each(|(context, ready)| self.make(&context, ready));
        }
        let list: Vec<_> =
            made.iter().map(|(context, ready)| (context, &ready.request, &ready.call)).collect();
        // SAFETY: memory and streams outlive the groups.
        let works = unsafe { start_together(&list) };
        let works = match works {
            Ok(works) => works.into_iter().map(Some).collect(),
            Err(error) if self.fault().is_none() => return Err(error),
            Err(error) => {
                self.left.error.get_or_insert(error.to_string());
                vec![None; made.len()]
            }
        };
        let failed = works.iter().any(Option::is_none);
        for (work, (_, ready)) in works.into_iter().zip(made) {
            if work.is_some() {
                let stream = ready.call.stream;
                self.follow(ready, stream, work);
            }
        }
        if failed {
            crate::error::fail!(Aborted, "not all could be started");
        }
        Ok(())
    }

    /// Gives the call's stream what it finds.
    fn prepare(&self, part: Part, (from, given): (At, &[u8]), output: Option<(At, usize)>) {
        let stream = part.stream.map(|index| self.handle(index));
        if let Some((to, len)) = output {
            self.fill(stream, to, &vec![0x5a; len]);
        }
        self.fill(stream, from, &vec![0xee; given.len()]);
        self.fill(stream, from, given);
    }

    /// How a call is made.
    fn call(&self, tag: Option<u64>, part: Part) -> Call {
        let stream = part.stream.map(|index| self.handle(index));
        Call { tag, timeout: self.timeout, stream, ..Call::default() }
    }

    /// Makes a call.
    pub(super) fn make(&mut self, context: &Context, ready: Ready) -> Result<()> {
        let Ready { request, call, part, input, due, .. } = &ready;
        let stream = call.stream;
        if part.nap > 0 {
            thread::sleep(Duration::from_micros(part.nap));
        }
        let what = due.what.clone();
        // Works on host memory ask the machine's own driver about streams.
        let on_device =
            input.is_some_and(|(at, len)| !at.on_host && len > 0) || !due.at.on_host && !due.bytes.is_empty();
        // SAFETY: memory and streams outlive the groups.
        let started: Result<Option<Work>> = unsafe {
            match part.mode {
                Mode::Run => context.run(request, call).map(|_| None),
                Mode::Launch => context.launch(request, call).map(|()| None),
                Mode::Complete => context.begin(request, call).and_then(|begun| begun.complete().map(Some)),
                Mode::Block(_) => context.start(request, call).map(Some),
                Mode::Keep | Mode::Drop => context.begin(request, call)?.close().map(Some),
            }
        };
        let work = match started {
            Ok(work) => work,
            Err(error) => {
                self.mark(stream, ready.due);
                return Err(error.context(what));
            }
        };
        let mut blocked = Ok(None);
        if let (Some(work), Mode::Block(index), true) = (&work, part.mode, on_device) {
            // SAFETY: it lives.
            blocked = unsafe { work.block_stream(self.handle(index)) }.map(|()| Some(self.handle(index)));
        }
        let behind = blocked.as_ref().ok().copied().flatten().or(stream);
        self.follow(ready, behind, work);
        blocked.map(drop).map_err(|error| error.context(what))
    }

    /// Goes on behind a call that has begun.
    fn follow(&mut self, ready: Ready, stream: Option<StreamHandle>, work: Option<Work>) {
        let Ready { call, part, input, due, odd, .. } = ready;
        let ran = matches!(part.mode, Mode::Run) && work.is_none();
        if self.fault().is_none() {
            if let (Some(seat), Some(stream), false) = (&self.seat, stream, due.at.on_host) {
                seat.double.expect(stream, seat.device, due.at.address, &due.bytes, &due.what);
            }
            self.dues.push(due.clone());
        }
        if let (Some((from, len)), true) =
            (input, ran || (stream.is_some() && !matches!(part.mode, Mode::Block(_))))
            && (!from.on_host || ran)
        {
            self.fill(stream, from, &vec![0x11; len]);
        }
        if ran && !odd {
            self.check(&due);
        }
        let drops = matches!(part.mode, Mode::Drop | Mode::Launch);
        if let (Some(work), false) = (work, drops) {
            self.kept.push(Kept { work, due, stream: call.stream, odd });
        }
    }

    /// Waits for a call.
    pub(super) fn conclude(&mut self, kept: Kept) -> Result<()> {
        let Kept { work, due, stream, odd } = kept;
        let result: Result<Completion> = work.wait(Deadline::after(2 * PATIENCE));
        match result {
            Ok(_) if odd => Ok(()),
            Ok(_) => {
                self.check(&due);
                Ok(())
            }
            Err(error) => {
                let error: Error = error.context(due.what.clone());
                self.mark(stream, due);
                Err(error)
            }
        }
    }
}
