//! One rank's part in a program: its groups, its steps, and how it ends.

mod calls;
mod memory;

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use calls::Kept;
use memory::{At, Due, Host, pointer};

use super::program::{Carriers, Fault, Gpus, Kind, Message, Program, Step, Trouble};
use super::values::Dice;
use crate::collective::request::{Counts, Request};
use crate::communicator::context::Membership;
use crate::communicator::hosts::tests::{agree, members};
use crate::communicator::{Call, Context, Options, Rendezvous};
use crate::cuda::context::Devices;
use crate::cuda::courier::{Duty, Errand};
use crate::cuda::double::{Double, DoubleKernels, Waiting};
use crate::cuda::driver::StreamHandle;
use crate::cuda::stream::Stream;
use crate::engine::device::Way;
use crate::engine::staged::relay::Limits;
use crate::error::Result;
use crate::reduce::{DataType, Operator};
use crate::rendezvous::hash::HashStore;

/// The deadline of every call: longer than any takes.
const PATIENCE: Duration = Duration::from_secs(15);
/// The same where something goes wrong.
const SHORT: Duration = Duration::from_secs(4);

/// More than a rank has on their way at a time.
const COURIERS: usize = 256;

/// What a rank runs on.
#[derive(Clone)]
pub(super) struct Seat {
    pub(super) double: Arc<Double>,
    pub(super) devices: Arc<Devices>,
    pub(super) device: u32,
    pub(super) streams: Vec<StreamHandle>,
}

/// What a rank leaves behind.
#[derive(Default)]
pub(super) struct Left {
    /// What was wrong.
    pub(super) wrong: Vec<String>,
    /// How it has ended.
    pub(super) error: Option<String>,
    host: Vec<Host>,
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
                    context.cuda().pretend_limits(Limits { piece: setting.piece, above: Some(0) });
                }
            }
        }
        if let Some(seat) = self.seat.as_ref().filter(|_| setting.locks) {
            // Beyond those for which there are desks, couriers ask the driver while streams wait.
            let errands = (0..COURIERS).map(|_| Errand::new(&seat.devices, seat.device, Duty::default()));
            drop(errands.collect::<Result<Vec<_>>>()?);
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
        let Membership::Group(group) = context.membership() else { return Ok(()) };
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
                let ready = self.collective(&context, call);
                self.make(&context, ready)
            }
            Step::Message(message) => {
                let Some((context, sends)) = self.side(message) else { return Ok(()) };
                let ready = self.message(message, sends);
                self.make(&context, ready)
            }
            Step::Together { calls, one_by_one } => self.together(calls, *one_by_one == Some(self.rank)),
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

    fn handle(&self, index: usize) -> StreamHandle {
        self.seat.as_ref().expect("streams are a driver's").streams[index]
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
