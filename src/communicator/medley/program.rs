//! Programs: what ranks call, one step after the other, all made from a seed.

use super::values::Dice;
pub(super) use crate::collective::request::Kind;
use crate::cuda::double::Order;
use crate::reduce::{DataType, Operator};
use crate::schedule::Algorithm;

/// What the GPUs of the ranks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gpus {
    /// Nobody names device memory, nor is there a driver.
    None,
    /// All goes by way of the host.
    Apart,
    /// Those of a host exchange by kernels.
    Exchanging,
}

/// Who copies between devices and pinned memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Carriers {
    SideStreams,
    Couriers,
    /// Couriers, and what all ranks can is relayed.
    Relays,
}

/// Whom a program runs on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setting {
    pub(super) hosts: usize,
    /// Ranks of each host.
    pub(super) inside: usize,
    pub(super) transports: &'static str,
    pub(super) gpus: Gpus,
    pub(super) carriers: Carriers,
    pub(super) order: Order,
    /// Whether the ranks of a host are one process.
    pub(super) one_process: bool,
    /// Bytes of a piece.
    pub(super) piece: usize,
    /// Streams of each rank's program.
    pub(super) streams: usize,
    /// Of the hardware; `None`: as many as there are streams.
    pub(super) queues: Option<usize>,
    /// Whether driver calls may wait for the device.
    pub(super) locks: bool,
    /// Whether calls are relayed from the first on.
    pub(super) warm: bool,
}

impl Setting {
    pub(super) fn size(&self) -> usize {
        self.hosts * self.inside
    }

    fn random(dice: &mut Dice) -> Setting {
        let gpus = dice.pick(&[Gpus::None, Gpus::Apart, Gpus::Apart, Gpus::Apart, Gpus::Exchanging]);
        let (hosts, inside) = match gpus {
            Gpus::Exchanging => dice.pick(&[(2, 2), (2, 2), (3, 2), (2, 3)]),
            _ => dice.pick(&[(1, 1), (1, 2), (1, 2), (1, 3), (1, 4), (1, 5), (2, 1), (2, 2), (3, 1), (2, 2)]),
        };
        let carriers = match gpus {
            Gpus::None => Carriers::SideStreams,
            _ => dice.pick(&[Carriers::SideStreams, Carriers::Couriers, Carriers::Relays]),
        };
        let order = match dice.below(5) {
            0 => Order::Eager,
            1 => Order::RoundRobin,
            2 => Order::Backward,
            _ => Order::Random(dice.next()),
        };
        let one_process = gpus == Gpus::Exchanging || dice.once_in(3);
        let carries = carriers != Carriers::SideStreams && gpus == Gpus::Apart;
        // Without kernels, what a program copies behind a call holds up what the call copies.
        let queues = if carries { dice.pick(&[None, None, Some(8), Some(32)]) } else { None };
        Setting {
            queues,
            locks: carries && !one_process && dice.once_in(2),
            // Of more ranks the double's kernels do not combine what is relayed.
            warm: queues != Some(8) && hosts * inside <= 4 && dice.once_in(2),
            hosts,
            inside,
            transports: if hosts == 1 { dice.pick(&["shm", "tcp", "shm,tcp"]) } else { "shm,tcp" },
            gpus,
            // A group of one has no lanes.
            carriers: if hosts * inside == 1 { carriers.max_couriers() } else { carriers },
            order,
            one_process,
            piece: dice.pick(&[256, 256, 1024]),
            streams: 1 + dice.below(3),
        }
    }
}

impl Carriers {
    fn max_couriers(self) -> Carriers {
        if self == Carriers::Relays { Carriers::Couriers } else { self }
    }
}

/// How one rank makes a call.
#[derive(Clone, Copy, Debug)]
pub(super) enum Mode {
    /// It waits in the call.
    Run,
    /// It waits later.
    Keep,
    /// It forgets the handle.
    Drop,
    /// The thread waits for what side streams do.
    Complete,
    /// It follows nothing.
    Launch,
    /// Started without a stream, which is made to wait for it then.
    Block(usize),
}

/// One rank's part in a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    /// `None`: the call has no stream.
    pub(super) stream: Option<usize>,
    /// Whether what is read and what is written is on the host.
    pub(super) host: [bool; 2],
    pub(super) in_place: bool,
    pub(super) mode: Mode,
    /// Microseconds that the rank sleeps first.
    pub(super) nap: u64,
}

#[derive(Clone, Debug)]
pub(super) struct Collective {
    /// No other call's.
    pub(super) id: u64,
    /// The group: 0 is all of them, then children.
    pub(super) group: usize,
    pub(super) kind: Kind,
    /// Of each rank's block; the one count of operations without blocks first.
    pub(super) lens: Vec<usize>,
    /// Whether they are told as a list.
    pub(super) listed: bool,
    pub(super) dtype: DataType,
    pub(super) operator: Operator,
    pub(super) root: usize,
    pub(super) tag: Option<u64>,
    /// By its number; 0: none is named.
    pub(super) algorithm: i32,
    pub(super) parts: Vec<Part>,
}

impl Collective {
    /// How many elements one rank has for another.
    pub(super) fn len(&self, from: usize, to: usize) -> usize {
        match self.kind {
            Kind::Alltoall if self.listed => self.lens[(from * 3 + to * 2) % self.lens.len()],
            Kind::Scatter => self.lens[to],
            _ => self.lens[from],
        }
    }

    /// Whether input and output may be one, on this rank.
    fn may_be_in_place(&self, rank: usize) -> bool {
        let size = self.parts.len();
        match self.kind {
            Kind::Reduce | Kind::Gather | Kind::Scatter => rank == self.root,
            Kind::Alltoall => (0..size).all(|other| self.len(rank, other) == self.len(other, rank)),
            Kind::Broadcast | Kind::Barrier => false,
            _ => true,
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct Message {
    pub(super) id: u64,
    pub(super) group: usize,
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) tag: u64,
    pub(super) len: usize,
    /// Whether the receiver takes it from whoever sends.
    pub(super) any: bool,
    /// The sender's and the receiver's.
    pub(super) parts: [Part; 2],
}

#[derive(Clone, Debug)]
pub(super) enum Listed {
    Collective(Collective),
    Message(Message),
}

#[derive(Clone, Debug)]
pub(super) enum Step {
    Collective(Collective),
    Message(Message),
    /// Started together, each rank's messages in an order of its own, anywhere among its collectives, which
    /// are of one group.
    Together {
        calls: Vec<Listed>,
        /// The rank that makes its calls one by one.
        one_by_one: Option<usize>,
    },
    /// The stream of a rank waits so many microseconds.
    Gate {
        rank: usize,
        stream: usize,
        micros: u64,
    },
    /// A rank waits for something that it has kept.
    Wait {
        rank: usize,
        which: usize,
    },
    /// A rank's stream comes to an end, as far as it has been given anything.
    Synchronize {
        rank: usize,
    },
}

/// What goes wrong.
#[derive(Clone, Copy, Debug)]
pub(super) enum Trouble {
    /// A call of the driver is refused, so many from then on.
    Driver(usize),
    Abort,
    /// The context is dropped, with all that is under way.
    Leave,
    /// The rank has a short deadline, in milliseconds, from then on.
    Impatience(u64),
    /// The rank is late by so many milliseconds, and the others have short deadlines.
    Delay(u64),
    /// The next collective of the rank is another one.
    Mismatch,
    /// It cancels what it has kept.
    Cancel,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Fault {
    pub(super) rank: usize,
    /// Before which step.
    pub(super) at: usize,
    pub(super) trouble: Trouble,
    /// What ranks do when something has failed: abort, or else go without a word.
    pub(super) aborts: bool,
    /// Whether ranks have their streams come to an end before they give their contexts up.
    pub(super) drains: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Program {
    pub(super) seed: u64,
    pub(super) setting: Setting,
    /// Members of each group, in its order.
    pub(super) groups: Vec<Vec<usize>>,
    pub(super) fault: Option<Fault>,
    pub(super) steps: Vec<Step>,
}

const KINDS: [Kind; 9] = [
    Kind::Allreduce,
    Kind::Reduce,
    Kind::Broadcast,
    Kind::Allgather,
    Kind::Gather,
    Kind::Scatter,
    Kind::ReduceScatter,
    Kind::Alltoall,
    Kind::Barrier,
];

const TYPES: [DataType; 10] = [
    DataType::I8,
    DataType::U8,
    DataType::I32,
    DataType::U32,
    DataType::I64,
    DataType::U64,
    DataType::F16,
    DataType::F32,
    DataType::F64,
    DataType::Bf16,
];

impl Program {
    /// With one fault, if it `suffers`.
    pub(super) fn new(seed: u64, suffers: bool) -> Program {
        let mut dice = Dice::new(seed.wrapping_mul(2) + u64::from(suffers));
        let setting = Setting::random(&mut dice);
        let all: Vec<usize> = (0..setting.size()).collect();
        let mut groups = vec![all.clone()];
        match dice.below(4) {
            0 if all.len() > 1 => groups.push(all.clone()),
            1 if all.len() > 2 && setting.gpus != Gpus::Exchanging => {
                let cut = 1 + dice.below(all.len() - 1);
                groups.push(all[..cut].iter().rev().copied().collect());
                groups.push(all[cut..].iter().rev().copied().collect());
            }
            _ => {}
        }
        let count = 5 + dice.below(30);
        let mut maker = Maker { dice, setting, groups: &groups, id: seed << 20 };
        let mut steps = Vec::new();
        for _ in 0..count {
            steps.push(maker.step());
        }
        let fault = suffers.then(|| maker.fault(count));
        Program { seed, setting, groups, fault, steps }
    }
}

struct Maker<'a> {
    dice: Dice,
    setting: Setting,
    groups: &'a [Vec<usize>],
    id: u64,
}

impl Maker<'_> {
    fn step(&mut self) -> Step {
        let (rank, which) = (self.dice.below(self.setting.size()), self.dice.below(64));
        let on_devices = self.setting.gpus != Gpus::None;
        match self.dice.below(20) {
            0 | 1 if on_devices => {
                let (stream, micros) = (self.dice.below(self.setting.streams), self.dice.next() % 4000);
                Step::Gate { rank, stream, micros }
            }
            2 | 3 => Step::Wait { rank, which },
            4 if on_devices && self.dice.once_in(2) => Step::Synchronize { rank },
            5..8 => match self.message() {
                Some(message) => Step::Message(message),
                None => Step::Collective(self.collective_of_any()),
            },
            8..11 => self.list(),
            _ => Step::Collective(self.collective_of_any()),
        }
    }

    fn list(&mut self) -> Step {
        let (group, mixes) = (self.dice.below(self.groups.len()), !self.dice.once_in(3));
        let count = 1 + self.dice.below(6);
        let call = |_| match mixes && self.dice.once_in(2) {
            true => Some(Listed::Collective(self.collective(group))),
            false => self.message().map(Listed::Message),
        };
        let calls = (0..count).filter_map(call).collect();
        let one_by_one = self.dice.once_in(2).then(|| self.dice.below(self.setting.size()));
        Step::Together { calls, one_by_one }
    }

    fn next_id(&mut self) -> u64 {
        self.id += 1;
        self.id
    }

    fn len(&mut self, dtype: DataType) -> usize {
        let elements = self.setting.piece / dtype.size();
        match self.dice.below(12) {
            0 => 0,
            1 => 1,
            2 => self.dice.below(8),
            3 => elements - 1,
            4 => elements,
            5 => elements + 1,
            6 => 3 * elements + self.dice.below(3) - 1,
            7 | 8 => self.dice.below(elements * 2),
            9 if self.dice.once_in(4) => (16 << 10) / dtype.size(),
            _ => self.dice.below(elements * 8).min((8 << 10) / dtype.size()),
        }
    }

    fn part(&mut self, host: [bool; 2], streams: bool) -> Part {
        let on_devices = self.setting.gpus != Gpus::None;
        let stream =
            (on_devices && streams && !self.dice.once_in(4)).then(|| self.dice.below(self.setting.streams));
        let mode = match self.dice.below(10) {
            0 | 1 => Mode::Run,
            2 => Mode::Drop,
            3 => Mode::Complete,
            4 => Mode::Launch,
            5 if on_devices && stream.is_none() => Mode::Block(self.dice.below(self.setting.streams)),
            _ => Mode::Keep,
        };
        let nap = if self.dice.once_in(8) { self.dice.next() % 2000 } else { 0 };
        Part { stream, host, in_place: self.dice.once_in(3), mode, nap }
    }

    fn collective_of_any(&mut self) -> Collective {
        let group = self.dice.below(self.groups.len());
        self.collective(group)
    }

    fn collective(&mut self, group: usize) -> Collective {
        let size = self.groups[group].len();
        let kind = self.dice.pick(&KINDS);
        let dtype = self.dice.pick(&TYPES);
        let integer = !matches!(dtype, DataType::F16 | DataType::Bf16 | DataType::F32 | DataType::F64);
        use Operator::{Average, BitAnd, BitOr, BitXor, Max, Min, Product, Sum};
        let operators = [Sum, Sum, Product, Min, Max, Average, BitAnd, BitOr, BitXor];
        let operator = operators[self.dice.below(if integer { 9 } else { 6 })];
        let blocks = !matches!(kind, Kind::Allreduce | Kind::Reduce | Kind::Broadcast | Kind::Barrier);
        let listed = blocks && self.dice.once_in(2);
        let one = self.len(dtype);
        let lens = (0..size).map(|_| if listed { self.len(dtype) } else { one }).collect();
        let root = self.dice.below(size);
        let tag = self.dice.once_in(4).then(|| self.dice.next() % 3);
        let host = self.setting.gpus == Gpus::None || self.dice.once_in(4);
        // Where ranks may differ in their memory.
        let mixed = listed
            // The double copies no memory that is not pinned, as a group of one would.
            && size > 1
            && self.setting.gpus == Gpus::Apart
            && (self.setting.transports == "tcp" || tag.is_some())
            && matches!(kind, Kind::Gather | Kind::Scatter | Kind::Alltoall)
            && self.dice.once_in(2);
        let id = self.next_id();
        let names = !listed && size > 1 && self.dice.once_in(6);
        let algorithm = if names { self.algorithm(kind) } else { 0 };
        let parts = Vec::new();
        let mut call =
            Collective { id, group, kind, lens, listed, dtype, operator, root, tag, algorithm, parts };
        for _ in 0..size {
            let at = if mixed { [self.dice.once_in(2), self.dice.once_in(2)] } else { [host; 2] };
            let part = self.part(at, true);
            call.parts.push(part);
        }
        for rank in 0..size {
            call.parts[rank].in_place &=
                call.may_be_in_place(rank) && call.parts[rank].host[0] == call.parts[rank].host[1];
        }
        call
    }

    fn algorithm(&mut self, kind: Kind) -> i32 {
        let shaped = crate::schedule::Kind::ALL.into_iter().find(|shaped| shaped.name() == kind.name());
        let shaped = shaped.expect("every collective has schedules");
        let serves = |one: &Algorithm| one.serves(shaped) && *one != Algorithm::Local;
        let able: Vec<_> = Algorithm::ALL.into_iter().filter(serves).collect();
        self.dice.pick(&able) as i32
    }

    /// `None` in a group of one.
    fn message(&mut self) -> Option<Message> {
        let group = self.dice.below(self.groups.len());
        let members = &self.groups[group];
        let size = members.len();
        if size == 1 {
            return None;
        }
        let from = self.dice.below(size);
        let to = (from + 1 + self.dice.below(size - 1)) % size;
        // Of the double's kernels all ranks of a host take part in each message.
        let near = from / self.setting.inside == to / self.setting.inside;
        let by_kernels = self.setting.gpus == Gpus::Exchanging && near;
        if by_kernels && self.setting.inside > 2 {
            return None;
        }
        let id = self.next_id();
        let host = self.setting.gpus == Gpus::None;
        let same = host || self.dice.once_in(4);
        let on = |dice: &mut Dice| [if by_kernels || host { same } else { dice.once_in(3) }; 2];
        let [sends, receives] = [on(&mut self.dice), on(&mut self.dice)];
        let parts = [self.part(sends, true), self.part(receives, true)];
        let len = self.len(DataType::U8) * self.dice.pick(&[1, 1, 4]);
        let any = !by_kernels && self.dice.once_in(4);
        Some(Message { id, group, from, to, tag: id, len: len.min(16 << 10), any, parts })
    }

    fn fault(&mut self, steps: usize) -> Fault {
        let on_devices = self.setting.gpus != Gpus::None;
        let trouble = match self.dice.below(10) {
            0..4 if on_devices => Trouble::Driver(self.dice.below(200)),
            4 => Trouble::Abort,
            5 => Trouble::Leave,
            6 => Trouble::Impatience(1 + self.dice.next() % 30),
            7 => Trouble::Delay(50 + self.dice.next() % 300),
            8 => Trouble::Cancel,
            _ => Trouble::Mismatch,
        };
        Fault {
            rank: self.dice.below(self.setting.size()),
            at: self.dice.below(steps),
            trouble,
            aborts: self.dice.once_in(2),
            drains: self.dice.once_in(2),
        }
    }
}
