//! Ranks whose GPUs are played, and calls whose results are known.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

use super::super::*;
use super::case::{Case, POISON, difference, numbers};
use super::play::{Chances, Ending, Patience, Recorder, play};
use crate::cuda::double::{Double, Order};

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

    fn bytes(&mut self, bytes: usize) -> Vec<u8> {
        (0..bytes.div_ceil(8)).flat_map(|_| self.next().to_le_bytes()).take(bytes).collect()
    }

    pub(super) fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
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

    fn contains(&self, address: u64) -> bool {
        (self.address()..self.address() + self.room() as u64).contains(&address)
    }
}

fn addresses(memory: &[Memory; 2]) -> [u64; 2] {
    memory.each_ref().map(Memory::address)
}

struct Rank {
    exchange: Exchange,
    stream: Stream,
    fault: Arc<Fault>,
    recorder: Arc<Recorder>,
}

impl Rank {
    /// One that has `addresses` for the arenas, with a stream of its own.
    fn new(rank: u32, addresses: &[u64], table: Table) -> Rank {
        let (double, recorder) = (Double::new(1, Order::Eager), Arc::new(Recorder::default()));
        double.run_code(recorder.clone());
        let devices = Devices::over(double).expect("a device");
        let fault = Arc::new(Fault::new(&devices, 0).expect("a page"));
        // SAFETY: the arenas live as long as the world.
        let exchange = unsafe { Exchange::new(&devices, 0, rank, addresses, fault.clone(), table) };
        let stream = Stream::new(&devices, 0, false).expect("a stream");
        Rank { exchange: exchange.expect("an exchange"), stream, fault, recorder }
    }
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
    /// Further streams of ranks, which graphs are launched in.
    beside: Vec<Rank>,
    table: Table,
    arenas: Vec<Memory>,
    calls: Vec<Called>,
    asked: u64,
}

impl World {
    pub(super) fn new(size: u32, table: Table) -> World {
        // Zeroed, as its owner does.
        let arenas: Vec<Memory> = (0..size).map(|_| Memory::new(table.arena_bytes(size), 0)).collect();
        let addresses: Vec<u64> = arenas.iter().map(Memory::address).collect();
        let ranks = (0..size).map(|rank| Rank::new(rank, &addresses, table)).collect();
        World { ranks, beside: Vec::new(), table, arenas, calls: Vec::new(), asked: 0 }
    }

    /// Has another stream of a rank, in no order with its others, send so many signals to each.
    pub(super) fn signal_beside(&mut self, rank: u32, counts: &Counts) {
        let addresses: Vec<u64> = self.arenas.iter().map(Memory::address).collect();
        let beside = Rank::new(rank, &addresses, self.table);
        beside.exchange.enqueue_signals(counts, &beside.stream).expect("a launch");
        self.beside.push(beside);
    }

    pub(super) fn size(&self) -> u32 {
        self.ranks.len() as u32
    }

    /// Which of these are a launch each.
    pub(super) fn bundles(&self, jobs: &[Job], windows: bool) -> Vec<Range<usize>> {
        self.ranks[0].exchange.bundles(jobs, windows).expect("launches")
    }

    /// Has all ranks call, but those of a mask.
    pub(super) fn call_without(&mut self, case: Case, absent: u32, dice: &mut Dice) {
        let size = self.size();
        let whole = case.whole(size);
        let inputs: Vec<Vec<u8>> = (0..size).map(|_| numbers(case.dtype, dice.bytes(whole))).collect();
        let mut memory: Vec<[Memory; 2]> =
            inputs.iter().map(|_| [0, 1].map(|_| Memory::new(whole + 64, POISON))).collect();
        let jobs: Vec<Job> =
            (0..).zip(&memory).map(|(rank, memory)| case.job(rank, addresses(memory))).collect();
        for (rank, input) in inputs.iter().enumerate() {
            // A rank that gives nothing has poison there.
            let given = case.given(rank as u32, size);
            let lies = memory[rank].iter_mut().find(|memory| memory.contains(jobs[rank].input));
            lies.expect("an input").put(jobs[rank].input, &input[..given]);
        }
        let wanted: Vec<_> = (0..size).map(|rank| case.wanted(rank, &inputs)).collect();
        let mut got: Vec<Vec<u8>> =
            wanted.iter().map(|wanted| vec![0; wanted.as_ref().map_or(0, Vec::len)]).collect();
        for (own, rank) in self.ranks.iter().enumerate() {
            if absent >> own & 1 != 0 {
                continue;
            }
            // SAFETY: the memory lives as long as the call is known, and processors reach all memory.
            unsafe { case.enqueue(&rank.exchange, &jobs[own], 1, &rank.stream) }.expect("a launch");
            rank.recorder.copy_result(jobs[own].output, &mut got[own]);
        }
        self.calls.push(Called { case, memory, jobs, wanted, got });
    }

    pub(super) fn call(&mut self, case: Case, dice: &mut Dice) {
        self.call_without(case, 0, dice);
    }

    /// Has all ranks call these as one group; which of them are a launch each.
    pub(super) fn group(&mut self, cases: &[Case], dice: &mut Dice) -> Vec<Range<usize>> {
        let begin = self.calls.len();
        for &case in cases {
            self.call_without(case, u32::MAX, dice);
        }
        let made = &mut self.calls[begin..];
        let mut bundles = Vec::new();
        for (own, rank) in self.ranks.iter().enumerate() {
            let jobs: Vec<Job> = made.iter().map(|called| called.jobs[own]).collect();
            bundles = rank.exchange.bundles(&jobs, false).expect("launches");
            for bundle in &bundles {
                match &jobs[bundle.clone()] {
                    // SAFETY: as for calls.
                    [job] => unsafe { rank.exchange.enqueue(job, &rank.stream) },
                    // SAFETY: as for calls.
                    jobs => unsafe { rank.exchange.enqueue_several(jobs, &rank.stream) },
                }
                .expect("a launch");
                for called in &mut made[bundle.clone()] {
                    rank.recorder.copy_result(called.jobs[own].output, &mut called.got[own]);
                }
            }
        }
        bundles
    }

    /// Has a rank send so many signals to each.
    pub(super) fn signal(&self, rank: u32, counts: &Counts) {
        let Rank { exchange, stream, .. } = &self.ranks[rank as usize];
        exchange.enqueue_signals(counts, stream).expect("a launch");
    }

    /// Has a rank wait for so many signals of each. `come`: how many of each have come when it has waited.
    pub(super) fn await_signals(&self, rank: u32, counts: &Counts, come: &mut [u8; 8 * MAX_RANKS]) {
        let Rank { exchange, stream, recorder, .. } = &self.ranks[rank as usize];
        exchange.enqueue_wait(counts, stream).expect("a launch");
        recorder.copy_result(exchange.tally(), come);
    }

    /// How often kernels have asked the host whether to go on.
    pub(super) fn asked(&self) -> u64 {
        self.asked
    }

    /// Plays all calls.
    pub(super) fn play(&mut self, seed: u64, chances: &Chances, patience: impl Into<Patience>) -> Ending {
        let ranks: Vec<(&Recorder, *mut c_void)> = self
            .ranks
            .iter()
            .chain(&self.beside)
            .map(|rank| {
                let page = std::ptr::with_exposed_provenance_mut(rank.fault.device_address() as usize);
                (&*rank.recorder, page)
            })
            .collect();
        // SAFETY: all memory lives, and is not touched meanwhile.
        let (ending, asked) = unsafe { play(&ranks, seed, chances, patience.into()) };
        self.asked += asked;
        ending
    }

    /// What differs from what the calls should have done; forgets them.
    pub(super) fn differences(&mut self) -> Vec<String> {
        let mut found = Vec::new();
        for (number, called) in self.calls.drain(..).enumerate() {
            for (rank, wanted) in called.wanted.iter().enumerate() {
                let Some(wanted) = wanted else { continue };
                let (output, case) = (called.jobs[rank].output, called.case);
                let memory =
                    called.memory[rank].iter().find(|memory| memory.contains(output)).expect("an output");
                if let Some(difference) = difference(&called.got[rank], wanted) {
                    found.push(format!("call {number}, {case:?}: rank {rank}, {difference}"));
                }
                let (begin, end) = (memory.address(), memory.address() + memory.room() as u64);
                let behind = output + wanted.len() as u64;
                let is_touched =
                    |from, to| memory.bytes(from, (to - from) as usize).iter().any(|&byte| byte != POISON);
                if !case.in_place && (is_touched(begin, output) || is_touched(behind, end)) {
                    found.push(format!("call {number}, {case:?}: rank {rank} wrote beside its output"));
                }
            }
        }
        found
    }

    /// What the ranks' kernels waited for when they were aborted.
    pub(super) fn records(&self) -> Vec<Option<FaultRecord>> {
        self.ranks.iter().map(|rank| rank.fault.record()).collect()
    }

    /// Sends and receives that start together, but on a rank that starts them `alone`, one after the other:
    /// (from, to, bytes) in the order of the call.
    pub(super) fn exchange(&mut self, transfers: &[(u32, u32, usize)], alone: Option<u32>, dice: &mut Dice) {
        let together = |own| if alone == Some(own) { 1 } else { usize::MAX };
        self.exchange_by(transfers, 0, together, dice);
    }

    /// The same with at most so many blocks, and each rank starting so many of its own `together`.
    pub(super) fn exchange_by(
        &mut self,
        transfers: &[(u32, u32, usize)],
        max_blocks: u32,
        together: impl Fn(u32) -> usize,
        dice: &mut Dice,
    ) {
        let size = self.ranks.len();
        let case = Case { dtype: DataType::U8, ..Case::new(Kind::Send, 0) };
        for &(from, to, bytes) in transfers {
            let data = dice.bytes(bytes);
            let mut memory: Vec<[Memory; 2]> =
                (0..size).map(|_| [0, 1].map(|_| Memory::new(bytes + 64, POISON))).collect();
            let input = memory[from as usize][0].address();
            memory[from as usize][0].put(input, &data);
            let job = |(rank, memory)| Job { root: to, ..case.job(rank, addresses(memory)) };
            let jobs = (0..).zip(&memory).map(job).collect();
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
            for points in points.chunks(together(own)) {
                // SAFETY: as for calls.
                unsafe { rank.exchange.enqueue_points(points, max_blocks, &rank.stream) }.expect("a launch");
            }
            for (called, &(_, to, _)) in made.iter_mut().zip(transfers) {
                if to != own {
                    continue;
                }
                rank.recorder.copy_result(called.jobs[own as usize].output, &mut called.got[own as usize]);
            }
        }
    }
}
