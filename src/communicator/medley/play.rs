//! One rank's part in a program.

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::program::{Carriers, Collective, Fault, Gpus, Kind, Message, Mode, Part, Program, Step, Trouble};
use super::values::{self, Dice};
use crate::collective::request::{Counts, Request};
use crate::communicator::context::Place;
use crate::communicator::hosts::tests::{agree, members};
use crate::communicator::{Call, Completion, Context, Options, Pending, Rendezvous, Work, start_together};
use crate::cuda::context::Devices;
use crate::cuda::double::{Double, DoubleKernels, Waiting};
use crate::cuda::driver::StreamHandle;
use crate::cuda::stream::Stream;
use crate::deadline::Deadline;
use crate::engine::device::Way;
use crate::engine::staged::relay::Limits;
use crate::error::{Error, Result};
use crate::reduce::{DataType, Operator};
use crate::rendezvous::hash::HashStore;

/// The deadline of every call: longer than any takes.
const PATIENCE: Duration = Duration::from_secs(15);
/// The same where something goes wrong.
const SHORT: Duration = Duration::from_secs(4);

/// What a rank runs on.
#[derive(Clone)]
pub(super) struct Seat {
    pub(super) double: Arc<Double>,
    pub(super) devices: Arc<Devices>,
    pub(super) device: u32,
    pub(super) streams: Vec<StreamHandle>,
}

/// Memory of the host that lasts as long as anybody may use it.
#[derive(Debug)]
pub(super) struct Host(*mut [u8]);

// SAFETY: it is plain memory, which its owner alone frees.
unsafe impl Send for Host {}

impl Host {
    fn new(len: usize) -> Host {
        Host(Box::into_raw(vec![0xaa; len].into_boxed_slice()))
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // SAFETY: it comes from a box.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

/// Memory of a call.
#[derive(Clone, Copy, Debug)]
struct At {
    on_host: bool,
    address: u64,
}

/// What some memory is to hold.
#[derive(Clone, Debug)]
struct Due {
    at: At,
    bytes: Vec<u8>,
    what: String,
}

/// A call that is to be made.
struct Ready {
    request: Request,
    call: Call,
    part: Part,
    /// What the program writes to behind it, and how many bytes.
    input: Option<(At, usize)>,
    due: Due,
    /// Whether it is another call than the others'.
    odd: bool,
}

struct Kept {
    work: Work,
    due: Due,
    stream: Option<StreamHandle>,
    odd: bool,
}

/// What a rank leaves behind.
#[derive(Default)]
pub(super) struct Left {
    /// What was wrong.
    pub(super) wrong: Vec<String>,
    /// How it has ended.
    pub(super) error: Option<String>,
    pub(super) host: Vec<Host>,
    /// What nobody may write any more.
    marks: Vec<Due>,
}

pub(super) struct Player<'a> {
    rank: usize,
    program: &'a Program,
    seat: Option<Seat>,
    /// By group; `None`: not a member.
    groups: Vec<Option<Context>>,
    kept: Vec<Kept>,
    dues: Vec<Due>,
    dice: Dice,
    timeout: Option<Duration>,
    mismatches: bool,
    left: Left,
}

/// How one rank plays `program`; tells `place` where it is.
pub(super) fn play(
    rank: usize,
    program: &Program,
    seat: Option<Seat>,
    store: &Arc<HashStore>,
    place: &AtomicUsize,
) -> Left {
    let dice = Dice::new(program.seed ^ ((rank as u64 + 1) << 32));
    let mut player = Player {
        rank,
        program,
        seat,
        groups: Vec::new(),
        kept: Vec::new(),
        dues: Vec::new(),
        dice,
        timeout: None,
        mismatches: false,
        left: Left::default(),
    };
    let result = player.meet(store).and_then(|()| player.run(place));
    let stopped = result.and_then(|()| player.end(place));
    if let Err(error) = stopped {
        player.left.error = Some(error.to_string());
        player.give_up(place);
    }
    place.store(usize::MAX, Ordering::SeqCst);
    player.left
}

fn pointer(address: u64) -> *mut u8 {
    ptr::with_exposed_provenance_mut(address as usize)
}

impl Player<'_> {
    fn fault(&self) -> Option<&Fault> {
        self.program.fault.as_ref()
    }

    fn own_fault(&self) -> Option<&Fault> {
        self.fault().filter(|fault| fault.rank == self.rank)
    }

    /// Makes the groups.
    fn meet(&mut self, store: &Arc<HashStore>) -> Result<()> {
        let setting = self.program.setting;
        members::DRIVER.set(self.seat.as_ref().map(|seat| seat.double.clone()));
        let context = Context::create(Options {
            rank: self.rank as u32,
            size: setting.size() as u32,
            rendezvous: Rendezvous::Store(store.clone()),
            name: String::new(),
            timeout: if self.program.fault.is_some() { SHORT } else { PATIENCE },
            interface: Some("127.0.0.1".into()),
            transports: Some(setting.transports.into()),
            host: Some(format!("host {}", self.rank / setting.inside)),
        })?;
        self.groups.push(Some(context.clone()));
        if self.program.groups.len() == 2 {
            self.groups.push(Some(context.duplicate()?));
        }
        if self.program.groups.len() == 3 {
            let own = self.program.groups[1..].iter().position(|group| group.contains(&self.rank));
            let color = own.map(|own| own as u32);
            let child = context.split(color, -(self.rank as i64))?;
            for group in 0..2 {
                self.groups.push(child.clone().filter(|_| own == Some(group)));
            }
        }
        if let Some(seat) = &self.seat {
            for context in self.groups.iter().flatten() {
                context.cuda().pretend(&seat.devices, setting.piece);
                if setting.carriers != Carriers::SideStreams {
                    context.cuda().pretend_kernels(Arc::new(DoubleKernels(seat.double.clone())));
                }
                if setting.gpus == Gpus::Exchanging {
                    context.cuda().pretend_loads(members::LOADS);
                    agree(context, seat.device, &seat.devices)?;
                }
                if setting.carriers == Carriers::Relays {
                    context.cuda().pretend_limits(Limits { piece: setting.piece, above: 0 });
                }
            }
        }
        if let Some(seat) = self.seat.as_ref().filter(|_| setting.locks) {
            let all = if setting.carriers == Carriers::Relays { Waiting::Seen } else { Waiting::All };
            seat.double.hold_lock(all, PATIENCE);
        }
        if setting.carriers == Carriers::Relays && setting.warm {
            self.warm_up()?;
        }
        self.barrier()
    }

    /// Calls until there are lanes.
    fn warm_up(&mut self) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        let Some(context) = self.groups[0].clone() else { return Ok(()) };
        let Place::Group(group) = context.place() else { return Ok(()) };
        let (sum, all) = (self.memory(false, 1200), self.memory(true, 1));
        let request = |at: At, count, operator| Request {
            kind: Kind::Allreduce,
            input: pointer(at.address).cast_const(),
            output: pointer(at.address),
            counts: Counts::Uniform(count),
            dtype: DataType::U8,
            operator,
            root: 0,
        };
        loop {
            let call = Call { stream: Some(self.handle(0)), ..Call::default() };
            // SAFETY: the memory outlives the groups.
            unsafe { context.run(&request(sum, 1200, Operator::Sum), &call) }?;
            let relays = match group.devices() {
                Some(Way::Hosts(hosts)) => hosts.relay().relays(),
                _ => group.relay().relays(),
            };
            self.fill(None, all, &[u8::from(relays.is_some())]);
            // SAFETY: as above.
            unsafe { context.run(&request(all, 1, Operator::Min), &Call::default()) }?;
            let due = Due { at: all, bytes: vec![1], what: String::new() };
            if self.holds(&due) {
                return Ok(());
            }
            if Instant::now() > until {
                crate::error::fail!(Timeout, "no lanes");
            }
        }
    }

    fn barrier(&self) -> Result<()> {
        let Some(context) = &self.groups[0] else { return Ok(()) };
        let request = Request { kind: Kind::Barrier, ..Request::gathering(ptr::null(), ptr::null_mut(), 0) };
        // SAFETY: it names no memory.
        unsafe { context.run(&request, &Call::default()) }.map(drop)
    }

    fn run(&mut self, place: &AtomicUsize) -> Result<()> {
        for (number, step) in self.program.steps.iter().enumerate() {
            place.store(number, Ordering::SeqCst);
            if let Some(&fault) = self.fault().filter(|fault| fault.at == number) {
                self.fail(&fault)?;
            }
            self.step(step)?;
        }
        Ok(())
    }

    fn fail(&mut self, fault: &Fault) -> Result<()> {
        let own = fault.rank == self.rank;
        match fault.trouble {
            Trouble::Driver(after) if own => {
                if let Some(seat) = &self.seat {
                    seat.double.fail_call(after);
                }
            }
            Trouble::Abort if own => self.groups.iter().flatten().for_each(Context::abort),
            Trouble::Leave if own => crate::error::fail!(Aborted, "leaves"),
            Trouble::Impatience(millis) if own => self.timeout = Some(Duration::from_millis(millis)),
            Trouble::Delay(millis) if own => thread::sleep(Duration::from_millis(millis)),
            Trouble::Delay(_) => self.timeout = Some(Duration::from_millis(30)),
            Trouble::Mismatch if own => self.mismatches = true,
            Trouble::Cancel if own => {
                for kept in &self.kept {
                    // Of a collective it is refused.
                    let _ = kept.work.cancel();
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn step(&mut self, step: &Step) -> Result<()> {
        match step {
            Step::Collective(call) => {
                let Some(context) = self.groups[call.group].clone() else { return Ok(()) };
                self.collective(&context, call)
            }
            Step::Message(message) => {
                let Some((context, sends)) = self.side(message) else { return Ok(()) };
                let ready = self.message(message, sends);
                self.make(&context, ready)
            }
            Step::Together(messages) => self.together(messages),
            &Step::Gate { rank, stream, micros } if rank == self.rank => self.gate(stream, micros),
            &Step::Wait { rank, which } if rank == self.rank && !self.kept.is_empty() => {
                let kept = self.kept.swap_remove(which % self.kept.len());
                self.conclude(kept)
            }
            &Step::Synchronize { rank } if rank == self.rank => self.synchronize(),
            _ => Ok(()),
        }
    }

    /// The group of a message that this rank sends or receives.
    fn side(&self, message: &Message) -> Option<(Context, bool)> {
        let context = self.groups[message.group].clone()?;
        let rank = context.rank() as usize;
        (rank == message.from || rank == message.to).then_some((context, rank == message.from))
    }

    fn gate(&mut self, stream: usize, micros: u64) -> Result<()> {
        let Some(seat) = &self.seat else { return Ok(()) };
        let word = seat.devices.word(seat.device)?;
        self.stream(stream)?.wait_word(&word)?;
        thread::spawn(move || {
            thread::sleep(Duration::from_micros(micros));
            word.release();
        });
        Ok(())
    }

    fn stream(&self, index: usize) -> Result<Stream> {
        let seat = self.seat.as_ref().expect("streams are a driver's");
        // SAFETY: it lives as long as the double.
        unsafe { Stream::borrow(&seat.devices, seat.device, seat.streams[index]) }
    }

    fn synchronize(&mut self) -> Result<()> {
        let until = Instant::now() + if self.fault().is_some() { SHORT } else { PATIENCE };
        for index in 0..self.program.setting.streams {
            let stream = self.stream(index)?;
            while !stream.query()? {
                if Instant::now() > until {
                    crate::error::fail!(Timeout, "stream {index} does not come to an end");
                }
                thread::sleep(Duration::from_micros(100));
            }
        }
        Ok(())
    }

    fn memory(&mut self, on_host: bool, bytes: usize) -> At {
        let address = match &self.seat {
            Some(seat) if !on_host => seat.double.memory(seat.device, bytes.max(1)),
            _ => {
                let host = Host::new(bytes.max(1));
                let address = host.0.cast::<u8>().expose_provenance() as u64;
                self.left.host.push(host);
                address
            }
        };
        At { on_host, address }
    }

    /// Writes in the order of the stream, on the host at once.
    fn fill(&self, stream: Option<StreamHandle>, at: At, bytes: &[u8]) {
        match &self.seat {
            Some(seat) if !at.on_host => {
                seat.double.fill(stream.unwrap_or(StreamHandle::NULL), seat.device, at.address, bytes);
            }
            // SAFETY: it is as long, and lives; the library has no call on it.
            _ => unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), pointer(at.address), bytes.len()) },
        }
    }

    fn holds(&self, due: &Due) -> bool {
        self.first_wrong(due).is_none()
    }

    /// The first byte that is not what is due, and what it is.
    fn first_wrong(&self, due: &Due) -> Option<(usize, u8)> {
        let found = match &self.seat {
            Some(seat) if !due.at.on_host => seat.double.peek(due.at.address, due.bytes.len().max(1)),
            _ => {
                // SAFETY: it is as long, and lives. The library may write it meanwhile.
                let byte = |at: usize| unsafe { pointer(due.at.address).add(at).read_volatile() };
                (0..due.bytes.len()).map(byte).collect()
            }
        };
        let at = due.bytes.iter().zip(&found).position(|(due, found)| due != found)?;
        Some((at, found[at]))
    }

    fn collective(&mut self, context: &Context, call: &Collective) -> Result<()> {
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
        self.make(context, Ready { request, call, part, input, due, odd })
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

    fn handle(&self, index: usize) -> StreamHandle {
        self.seat.as_ref().expect("streams are a driver's").streams[index]
    }

    fn message(&mut self, message: &Message, sends: bool) -> Ready {
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

    fn together(&mut self, messages: &[Message]) -> Result<()> {
        let mut own: Vec<_> =
            messages.iter().filter_map(|message| Some((message, self.side(message)?))).collect();
        // In any order.
        for last in (1..own.len()).rev() {
            own.swap(last, self.dice.below(last + 1));
        }
        let mut made = Vec::new();
        for (message, (context, sends)) in own {
            made.push((context, self.message(message, sends)));
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

    /// How a call is made.
    fn call(&self, tag: Option<u64>, part: Part) -> Call {
        let stream = part.stream.map(|index| self.handle(index));
        Call { tag, timeout: self.timeout, stream, ..Call::default() }
    }

    /// Makes a call.
    fn make(&mut self, context: &Context, ready: Ready) -> Result<()> {
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
                Mode::Complete => context.begin(request, call).and_then(|begun| {
                    Pending::complete_all(vec![begun]).pop().expect("one for one").map(Some)
                }),
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
        let Ready { part, input, due, odd, .. } = ready;
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
            self.kept.push(Kept { work, due, stream, odd });
        }
    }

    fn check(&mut self, due: &Due) {
        if let Some((at, found)) = self.first_wrong(due) {
            self.left.wrong.push(format!("wrong from byte {at}, which is {found:#x}: {}", due.what));
        }
    }

    /// Waits for a call.
    fn conclude(&mut self, kept: Kept) -> Result<()> {
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

    /// What a failed call may not write any more.
    fn mark(&mut self, stream: Option<StreamHandle>, due: Due) {
        if self.fault().is_none() {
            return;
        }
        let bytes = vec![0x77; due.bytes.len()];
        self.fill(stream, due.at, &bytes);
        self.left.marks.push(Due { bytes, what: format!("written after the end: {}", due.what), ..due });
    }

    /// Everything comes to its end.
    fn end(&mut self, place: &AtomicUsize) -> Result<()> {
        place.store(1000, Ordering::SeqCst);
        while !self.kept.is_empty() {
            let index = self.dice.below(self.kept.len());
            let kept = self.kept.swap_remove(index);
            self.conclude(kept)?;
        }
        if self.fault().is_some() {
            return self.barrier();
        }
        place.store(1001, Ordering::SeqCst);
        let until = Instant::now() + PATIENCE;
        for due in std::mem::take(&mut self.dues) {
            while !self.holds(&due) {
                if Instant::now() > until {
                    self.left.wrong.push(format!("never came: {}", due.what));
                    break;
                }
                thread::sleep(Duration::from_micros(200));
            }
        }
        place.store(1002, Ordering::SeqCst);
        self.barrier()
    }

    /// Something has failed.
    fn give_up(&mut self, place: &AtomicUsize) {
        place.store(2000, Ordering::SeqCst);
        let aborts = self.fault().is_none_or(|fault| fault.aborts);
        let leaves = self.own_fault().is_some_and(|fault| matches!(fault.trouble, Trouble::Leave));
        if aborts && !leaves {
            self.groups.iter().flatten().for_each(Context::abort);
        }
        if !leaves {
            for kept in std::mem::take(&mut self.kept) {
                let _ = self.conclude(kept);
            }
        }
        place.store(2001, Ordering::SeqCst);
        if self.fault().is_some_and(|fault| fault.drains)
            && self.program.setting.gpus != Gpus::None
            && !leaves
        {
            for index in 0..self.program.setting.streams {
                let until = Instant::now() + Duration::from_secs(10);
                while self.stream(index).is_ok_and(|stream| !stream.query().unwrap_or(true)) {
                    if Instant::now() > until {
                        self.left.wrong.push(format!("stream {index} does not come to an end"));
                        break;
                    }
                    thread::sleep(Duration::from_micros(100));
                }
            }
        }
        place.store(2002, Ordering::SeqCst);
    }
}

impl Left {
    /// What has been written after calls had failed; for when all is over.
    pub(super) fn look(&mut self, double: Option<&Arc<Double>>) {
        for mark in std::mem::take(&mut self.marks) {
            let held = match double {
                Some(double) if !mark.at.on_host => {
                    double.peek(mark.at.address, mark.bytes.len().max(1))[..mark.bytes.len()] == mark.bytes
                }
                // SAFETY: it is as long, and lives; nobody uses it any more.
                _ => unsafe {
                    std::slice::from_raw_parts(pointer(mark.at.address), mark.bytes.len()) == mark.bytes
                },
            };
            if !held {
                self.wrong.push(mark.what);
            }
        }
    }
}
