//! A collective call: what the ranks call, what they give, and what must come out. The plays and the tests on
//! real GPUs (`tests/gpu/exchange`) include this, and run calls each in their own world.

use unisono::cuda::exchange::{Exchange, Job, MAX_RANKS, Overlap, Pull, Seen, Stages};
use unisono::cuda::stream::Stream;
use unisono::error::Result;
use unisono::reduce::{DataType, Operand, Operator, Reducer, Representation};
use unisono::signature::Kind;

/// What every byte is that no call has written.
pub(super) const POISON: u8 = 0xa5;

/// A call of all ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) kind: Kind,
    pub(super) dtype: DataType,
    /// Of a pre-multiplied sum, each rank has a scalar of its own.
    pub(super) operator: Operator,
    pub(super) count: u64,
    pub(super) root: u32,
    pub(super) in_place: bool,
    /// Bytes before the first element.
    pub(super) skew: u64,
    /// As many more before that of the output, unless it is in place.
    pub(super) apart: u64,
    pub(super) max_blocks: u32,
    pub(super) way: Way,
}

/// Which kernels a call has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Staged,
    Windowed,
    /// `readable`: out of the root's input.
    Pulled {
        stages: Stages,
        readable: bool,
        overlap: Overlap,
    },
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
            apart: 0,
            max_blocks: 0,
            way: Way::Staged,
        }
    }

    /// Bytes of `count` elements.
    fn part(&self) -> usize {
        self.count as usize * self.dtype.size()
    }

    /// Bytes of the longer of input and output.
    pub(super) fn whole(&self, size: u32) -> usize {
        self.part() * parts(self.kind, size) as usize
    }

    /// Bytes of a rank's input.
    pub(super) fn given(&self, rank: u32, size: u32) -> usize {
        match self.kind {
            Kind::Broadcast | Kind::Scatter if rank != self.root => 0,
            Kind::Allgather | Kind::Gather => self.part(),
            _ => self.whole(size),
        }
    }

    /// What a rank calls that has these two buffers.
    pub(super) fn job(&self, rank: u32, [input, output]: [u64; 2]) -> Job {
        let own = u64::from(rank) * self.part() as u64;
        let (mut input, mut output) = (input + self.skew, output + self.skew + self.apart);
        if self.in_place {
            match self.kind {
                Kind::Allgather => input = output + own,
                Kind::Gather if rank == self.root => input = output + own,
                Kind::ReduceScatter => output = input + own,
                Kind::Scatter if rank == self.root => output = input + own,
                Kind::Allreduce | Kind::Reduce | Kind::Broadcast | Kind::Alltoall => output = input,
                _ => {}
            }
        }
        let operator = match self.operator {
            Operator::PreMulSum(_) => Operator::PreMulSum(scale(rank)),
            other => other,
        };
        let Case { kind, dtype, count, root, max_blocks, .. } = *self;
        Job { kind, input, output, count, dtype, operator, root, max_blocks }
    }

    /// Gives a rank's call to its stream. `multiprocessors` is how many of them each rank has to itself.
    ///
    /// # Safety
    /// As [`Exchange::enqueue`]; and every rank reaches the memory of all at the addresses that its owner
    /// uses.
    pub(super) unsafe fn enqueue(
        &self,
        exchange: &Exchange,
        job: &Job,
        multiprocessors: u32,
        stream: &Stream,
    ) -> Result<()> {
        match self.way {
            // SAFETY: the caller's promise.
            Way::Staged => unsafe { exchange.enqueue(job, stream) },
            Way::Windowed => {
                let seen = Seen { input: [job.input; MAX_RANKS], output: [job.output; MAX_RANKS] };
                // SAFETY: the caller's promise.
                unsafe { exchange.enqueue_windowed(job, &seen, stream) }
            }
            Way::Pulled { stages, readable, overlap } => {
                let pull = Pull {
                    stages,
                    input: job.input,
                    output: job.output,
                    bytes: self.part() as u64,
                    root: job.root,
                    seen: readable.then_some([job.input; MAX_RANKS]),
                    max_blocks: job.max_blocks,
                    multiprocessors,
                    overlap,
                };
                // SAFETY: the caller's promise.
                unsafe { exchange.enqueue_pull(&pull, stream) }
            }
        }
    }

    /// What a rank's output must hold afterwards; `None` where it has none. Inputs are as long as the longest
    /// buffer.
    pub(super) fn wanted(&self, rank: u32, inputs: &[Vec<u8>]) -> Option<Vec<u8>> {
        let (part, root) = (self.part(), &inputs[self.root as usize]);
        let own = rank as usize * part;
        let of_all = |from| inputs.iter().flat_map(|input| &input[from..from + part]).copied().collect();
        Some(match self.kind {
            Kind::Reduce | Kind::Gather if rank != self.root => return None,
            Kind::Allreduce | Kind::Reduce => self.fold(inputs, 0),
            Kind::ReduceScatter => self.fold(inputs, own),
            Kind::Broadcast => root[..part].to_vec(),
            Kind::Scatter => root[own..own + part].to_vec(),
            Kind::Allgather | Kind::Gather => of_all(0),
            Kind::Alltoall => of_all(own),
            other => panic!("{other:?} is no collective"),
        })
    }

    /// What host memory's reduction makes of a part of all inputs.
    fn fold(&self, inputs: &[Vec<u8>], from: usize) -> Vec<u8> {
        let reducer = Reducer::new(self.dtype, self.operator, inputs.len() as u32).expect("a reducer");
        let part = from..from + self.part();
        let operand = |(rank, input): (u32, &Vec<u8>)| Operand {
            address: input[part.clone()].as_ptr(),
            representation: Representation::Element,
            scale: scale(rank),
        };
        let operands: Vec<Operand> = (0..).zip(inputs).map(operand).collect();
        let mut out = vec![0; part.len()];
        // SAFETY: every operand and `out` have `count` elements.
        unsafe { reducer.fold(&operands, out.as_mut_ptr(), Representation::Element, self.count as usize) };
        out
    }
}

/// How many times `count` elements a call's longer buffer has.
pub(super) fn parts(kind: Kind, size: u32) -> u64 {
    match kind {
        Kind::Allreduce | Kind::Reduce | Kind::Broadcast => 1,
        _ => size.into(),
    }
}

fn scale(rank: u32) -> f64 {
    [1.5, -2.0, 3.0, 0.25, 1.0, 5.0, -1.0, 2.5][rank as usize]
}

/// Makes elements of any bits moderate numbers where they are floats; now and then one stays as it is.
pub(super) fn numbers(dtype: DataType, mut bits: Vec<u8>) -> Vec<u8> {
    let (kept, put) = match dtype {
        DataType::F32 | DataType::F64 => (0x80, 0x3f),
        DataType::F16 | DataType::Bf16 => (0x87, 0x38),
        _ => return bits,
    };
    let last = dtype.size() - 1;
    for element in bits.chunks_exact_mut(dtype.size()).filter(|element| element[0] != 7) {
        element[last] = element[last] & kept | put;
    }
    bits
}

/// Where two outputs differ, if they do.
pub(super) fn difference(got: &[u8], wanted: &[u8]) -> Option<String> {
    let mut differ = (0..wanted.len()).filter(|&at| got[at] != wanted[at]);
    let first = differ.next()?;
    let [got, wanted] = [got, wanted].map(|all| &all[first..all.len().min(first + 8)]);
    Some(format!("byte {first} and {} others differ: {got:x?}, not {wanted:x?}", differ.count()))
}
