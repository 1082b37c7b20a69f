//! Ranks whose GPUs are played, and calls whose results are known.

use std::ffi::c_void;
use std::sync::Arc;

use super::super::*;
use super::play::{Chances, Ending, Recorder, play};
use crate::cuda::double::{Double, Order};
use crate::reduce::{Operand, Reducer, Representation};

/// Numbers that are the same in every run.
pub(super) struct Dice(pub(super) u64);

impl Dice {
    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub(super) fn below(&mut self, sides: u64) -> u64 {
        (self.next() >> 11) % sides
    }

    pub(super) fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }
}

/// A call of all ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) kind: Kind,
    pub(super) dtype: DataType,
    pub(super) operator: Operator,
    pub(super) count: u64,
    pub(super) root: u32,
    pub(super) in_place: bool,
    /// Bytes before the first element.
    pub(super) skew: u64,
    pub(super) max_blocks: u32,
    pub(super) way: Way,
}

/// Which kernels a call has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Staged,
    Windowed,
    Pulled { stages: Stages, in_place: bool },
}

impl Case {
    pub(super) fn new(kind: Kind, count: u64) -> Case {
        Case {
            kind,
            dtype: DataType::F32,
            operator: Operator::Sum,
            count,
            root: 0,
            in_place: false,
            skew: 0,
            max_blocks: 0,
            way: Way::Staged,
        }
    }

    fn part(&self) -> usize {
        self.count as usize * self.dtype.size()
    }

    /// The longer of input and output.
    fn whole(&self, size: usize) -> usize {
        match self.kind {
            Kind::Allreduce | Kind::Reduce | Kind::Broadcast => self.part(),
            _ => self.part() * size,
        }
    }
}

/// Memory of a GPU, aligned as its allocations are.
struct Memory(Vec<[u128; 16]>);

impl Memory {
    fn new(bytes: usize, byte: u8) -> Memory {
        Memory(vec![[u128::from_ne_bytes([byte; 16]); 16]; bytes.div_ceil(256) + 1])
    }

    fn address(&self) -> u64 {
        (self.0.as_ptr().expose_provenance() as u64).next_multiple_of(256)
    }

    fn bytes(&self, address: u64, bytes: usize) -> Vec<u8> {
        assert!(address >= self.address() && address + bytes as u64 <= self.address() + self.room() as u64);
        let from = std::ptr::with_exposed_provenance::<u8>(address as usize);
        // SAFETY: within this memory, which nobody writes now.
        unsafe { std::slice::from_raw_parts(from, bytes) }.to_vec()
    }

    fn put(&mut self, address: u64, bytes: &[u8]) {
        assert!(
            address >= self.address() && address + bytes.len() as u64 <= self.address() + self.room() as u64
        );
        let to = std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
        // SAFETY: within this memory, which nobody reads now.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    fn room(&self) -> usize {
        (self.0.len() - 1) * 256
    }
}

/// What lies behind every buffer.
const POISON: u8 = 0xa5;

struct Rank {
    exchange: Exchange,
    stream: Stream,
    fault: Arc<Fault>,
    recorder: Arc<Recorder>,
    _arena: Memory,
}

/// A call that was enqueued: each rank's memory, and what its output is to hold.
struct Called {
    case: Case,
    memory: Vec<[Memory; 2]>,
    jobs: Vec<Job>,
    wanted: Vec<Option<Vec<u8>>>,
    /// What the output held when the call had ended on its rank.
    got: Vec<Vec<u8>>,
}

/// A group of ranks.
pub(super) struct World {
    ranks: Vec<Rank>,
    calls: Vec<Called>,
}

impl World {
    pub(super) fn new(size: u32, table: Table) -> World {
        // Zeroed, as its owner does.
        let arenas: Vec<Memory> = (0..size).map(|_| Memory::new(table.arena_bytes(size), 0)).collect();
        let addresses: Vec<u64> = arenas.iter().map(Memory::address).collect();
        let rank = |(rank, arena): (u32, Memory)| {
            let (double, recorder) = (Double::new(1, Order::Eager), Arc::new(Recorder::default()));
            double.run_code(recorder.clone());
            let devices = Devices::over(double).expect("a device");
            let fault = Arc::new(Fault::new(&devices, 0).expect("a page"));
            // SAFETY: the arenas live as long as the world.
            let exchange = unsafe { Exchange::new(&devices, 0, rank, &addresses, fault.clone(), table) };
            let stream = Stream::new(&devices, 0, false).expect("a stream");
            Rank { exchange: exchange.expect("an exchange"), stream, fault, recorder, _arena: arena }
        };
        World { ranks: (0..size).zip(arenas).map(rank).collect(), calls: Vec::new() }
    }

    pub(super) fn size(&self) -> u32 {
        self.ranks.len() as u32
    }

    /// Has all ranks call, but those of a mask.
    pub(super) fn call_without(&mut self, case: Case, absent: u32, dice: &mut Dice) {
        let size = self.ranks.len();
        let (whole, part) = (case.whole(size), case.part());
        let inputs: Vec<Vec<u8>> = (0..size).map(|_| numbers(case.dtype, dice, whole)).collect();
        let mut memory: Vec<[Memory; 2]> =
            inputs.iter().map(|_| [0, 1].map(|_| Memory::new(whole + 64, POISON))).collect();
        let jobs: Vec<Job> = (0..size).map(|rank| job(&case, rank, size, &memory[rank])).collect();
        for (rank, input) in inputs.iter().enumerate() {
            let gives = if matches!(case.kind, Kind::Allgather | Kind::Gather) { part } else { whole };
            // A rank that gives nothing has poison there.
            if !matches!(case.kind, Kind::Broadcast | Kind::Scatter) || rank as u32 == case.root {
                let at =
                    usize::from(case.in_place && jobs[rank].input != memory[rank][0].address() + case.skew);
                memory[rank][at].put(jobs[rank].input, &input[..gives]);
            }
        }
        let mut seen = Seen::default();
        for (rank, job) in jobs.iter().enumerate() {
            (seen.input[rank], seen.output[rank]) = (job.input, job.output);
        }
        let wanted: Vec<_> = (0..size).map(|rank| wanted(&case, rank, &inputs)).collect();
        let mut got: Vec<Vec<u8>> =
            wanted.iter().map(|wanted| vec![0; wanted.as_ref().map_or(0, Vec::len)]).collect();
        for (own, rank) in self.ranks.iter().enumerate() {
            if absent >> own & 1 != 0 {
                continue;
            }
            // SAFETY: the memory lives as long as the call is known.
            unsafe { rank.enqueue(&case, &jobs[own]) }.expect("a launch");
            rank.recorder.copy_result(jobs[own].output, &mut got[own]);
        }
        self.calls.push(Called { case, memory, jobs, wanted, got });
    }

    pub(super) fn call(&mut self, case: Case, dice: &mut Dice) {
        self.call_without(case, 0, dice);
    }

    /// Plays all calls.
    pub(super) fn play(&mut self, seed: u64, chances: &Chances, patience: u64) -> Ending {
        let ranks: Vec<(&Recorder, *mut c_void)> = self
            .ranks
            .iter()
            .map(|rank| {
                let page = std::ptr::with_exposed_provenance_mut(rank.fault.device_address() as usize);
                (&*rank.recorder, page)
            })
            .collect();
        // SAFETY: all memory lives, and is not touched meanwhile.
        unsafe { play(&ranks, seed, chances, patience) }
    }

    /// What differs from what the calls should have done; forgets them.
    pub(super) fn differences(&mut self) -> Vec<String> {
        let mut found = Vec::new();
        for (number, called) in self.calls.drain(..).enumerate() {
            for (rank, wanted) in called.wanted.iter().enumerate() {
                let Some(wanted) = wanted else { continue };
                let (output, case) = (called.jobs[rank].output, called.case);
                let of = |memory: &&Memory| {
                    (memory.address()..memory.address() + memory.room() as u64).contains(&output)
                };
                let memory = called.memory[rank].iter().find(of).expect("an output");
                let got = &called.got[rank];
                if let Some(at) = got.iter().zip(wanted).position(|(a, b)| a != b) {
                    let count = got.iter().zip(wanted).filter(|(a, b)| a != b).count();
                    let [got, wanted] = [got, wanted].map(|all| &all[at..all.len().min(at + 8)]);
                    found.push(format!(
                        "call {number}, {case:?}: rank {rank}, byte {at}, {count} differ: {got:x?}, not {wanted:x?}"
                    ));
                }
                let end = memory.address() + memory.room() as u64;
                let behind = output + wanted.len() as u64;
                if !case.in_place
                    && memory.bytes(behind, (end - behind) as usize).iter().any(|&byte| byte != POISON)
                {
                    found.push(format!("call {number}, {case:?}: rank {rank} wrote past the end"));
                }
            }
        }
        found
    }

    /// What the ranks' kernels waited for when they were aborted.
    pub(super) fn records(&self) -> Vec<Option<FaultRecord>> {
        self.ranks.iter().map(|rank| rank.fault.record()).collect()
    }

    /// Sends and receives that start together: (from, to, bytes) in the order of the call.
    pub(super) fn exchange(&mut self, transfers: &[(u32, u32, usize)], dice: &mut Dice) {
        let size = self.ranks.len();
        let case = Case { dtype: DataType::U8, ..Case::new(Kind::Send, 0) };
        for &(from, to, bytes) in transfers {
            let data = numbers(DataType::U8, dice, bytes);
            let mut memory: Vec<[Memory; 2]> =
                (0..size).map(|_| [0, 1].map(|_| Memory::new(bytes + 64, POISON))).collect();
            let input = memory[from as usize][0].address();
            memory[from as usize][0].put(input, &data);
            let jobs =
                (0..size).map(|rank| Job { root: to, ..job(&case, rank, size, &memory[rank]) }).collect();
            let wanted = (0..size).map(|rank| (rank as u32 == to).then(|| data.clone())).collect();
            let got = vec![vec![0; bytes]; size];
            self.calls.push(Called { case: Case { root: from, ..case }, memory, jobs, wanted, got });
        }
        let first = self.calls.len() - transfers.len();
        let made = &mut self.calls[first..];
        for (own, rank) in (0..).zip(&self.ranks) {
            let mut points = Vec::new();
            for (called, &(from, to, bytes)) in made.iter_mut().zip(transfers) {
                let (job, bytes) = (&called.jobs[own as usize], bytes as u64);
                if from == own {
                    points.push(Point { direction: Direction::Send, peer: to, address: job.input, bytes });
                }
                if to == own {
                    points.push(Point {
                        direction: Direction::Receive,
                        peer: from,
                        address: job.output,
                        bytes,
                    });
                }
            }
            // SAFETY: as for calls.
            unsafe { rank.exchange.enqueue_points(&points, 0, &rank.stream) }.expect("a launch");
            for (called, &(_, to, _)) in made.iter_mut().zip(transfers) {
                if to != own {
                    continue;
                }
                rank.recorder.copy_result(called.jobs[own as usize].output, &mut called.got[own as usize]);
            }
        }
    }
}

impl Rank {
    unsafe fn enqueue(&self, case: &Case, job: &Job) -> Result<()> {
        match case.way {
            // SAFETY: the caller's promise.
            Way::Staged => unsafe { self.exchange.enqueue(job, &self.stream) },
            // SAFETY: the caller's promise; processors reach all memory.
            Way::Windowed => unsafe {
                let seen = Seen { input: [job.input; MAX_RANKS], output: [job.output; MAX_RANKS] };
                self.exchange.enqueue_windowed(job, &seen, &self.stream)
            },
            // SAFETY: as above.
            Way::Pulled { stages, in_place } => unsafe {
                let pull = Pull {
                    stages,
                    input: job.input,
                    output: job.output,
                    bytes: case.part() as u64,
                    root: case.root,
                    seen: in_place.then_some([job.input; MAX_RANKS]),
                    max_blocks: 2,
                    multiprocessors: 1,
                    overlap: Overlap::Off,
                };
                self.exchange.enqueue_pull(&pull, &self.stream)
            },
        }
    }
}

fn job(case: &Case, rank: usize, size: usize, memory: &[Memory; 2]) -> Job {
    let own = (rank * case.part()) as u64;
    let [mut input, mut output] = [0, 1].map(|i: usize| memory[i].address() + case.skew);
    if case.in_place {
        match case.kind {
            Kind::Allgather => input = output + own,
            Kind::Gather if rank as u32 == case.root => input = output + own,
            Kind::ReduceScatter => output = input + own,
            Kind::Scatter if rank as u32 == case.root => output = input + own,
            Kind::Allreduce | Kind::Reduce | Kind::Broadcast | Kind::Alltoall => output = input,
            _ => {}
        }
    }
    assert!(rank < size);
    let operator = match case.operator {
        Operator::PreMulSum(_) => Operator::PreMulSum(scale(rank)),
        other => other,
    };
    Job {
        kind: case.kind,
        input,
        output,
        count: case.count,
        dtype: case.dtype,
        operator,
        root: case.root,
        max_blocks: case.max_blocks,
    }
}

fn scale(rank: usize) -> f64 {
    [1.5, -2.0, 3.0, 0.25, 1.0, 5.0, -1.0, 2.5][rank]
}

/// What a rank's output holds afterwards; `None` where it has none.
fn wanted(case: &Case, rank: usize, inputs: &[Vec<u8>]) -> Option<Vec<u8>> {
    let (part, root) = (case.part(), case.root as usize);
    let own = rank * part;
    let fold = |from: usize| {
        let reducer = Reducer::new(case.dtype, case.operator, inputs.len() as u32).expect("a reducer");
        let operand = |(rank, input): (usize, &Vec<u8>)| Operand {
            address: input[from..].as_ptr(),
            representation: Representation::Element,
            scale: scale(rank),
        };
        let operands: Vec<Operand> = inputs.iter().enumerate().map(operand).collect();
        let mut out = vec![0; part];
        // SAFETY: every operand and `out` have `count` elements.
        unsafe { reducer.fold(&operands, out.as_mut_ptr(), Representation::Element, case.count as usize) };
        out
    };
    Some(match case.kind {
        Kind::Reduce | Kind::Gather if rank != root => return None,
        Kind::Allreduce | Kind::Reduce => fold(0),
        Kind::ReduceScatter => fold(own),
        Kind::Broadcast => inputs[root][..part].to_vec(),
        Kind::Allgather | Kind::Gather => inputs.iter().flat_map(|input| &input[..part]).copied().collect(),
        Kind::Scatter => inputs[root][own..own + part].to_vec(),
        Kind::Alltoall => inputs.iter().flat_map(|input| &input[own..own + part]).copied().collect(),
        other => panic!("{other:?} is no collective"),
    })
}

/// Elements of any bits for integers, moderate numbers for floats.
fn numbers(dtype: DataType, dice: &mut Dice, bytes: usize) -> Vec<u8> {
    let mut all: Vec<u8> =
        (0..bytes.div_ceil(8)).flat_map(|_| dice.next().to_le_bytes()).take(bytes).collect();
    match dtype {
        DataType::F32 => all.chunks_exact_mut(4).for_each(|c| c[3] = c[3] & 0x80 | 0x3f),
        DataType::Bf16 => all.chunks_exact_mut(2).for_each(|c| c[1] = c[1] & 0x87 | 0x38),
        _ => {}
    }
    all
}
