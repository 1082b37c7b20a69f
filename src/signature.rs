//! What a call is, as far as the ranks must agree on it. Below the engine, which compares signatures, and
//! above which `collective` gives them their meaning.

#![forbid(unsafe_code)]

use crate::error::{Result, fail};
use crate::reduce::{DataType, Operator};

/// The operations. The numbers are part of the wire protocol and of the ABI (algorithm objects name them).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum Kind {
    Allreduce = 0,
    Reduce = 1,
    Broadcast = 2,
    Allgather = 3,
    Gather = 4,
    Scatter = 5,
    ReduceScatter = 6,
    Alltoall = 7,
    Barrier = 8,
    Send = 9,
    Receive = 10,
    ReceiveAny = 11,
    SparseAllreduce = 12,
}

impl Kind {
    /// Every operation, in the order of the numbers.
    pub const ALL: [Kind; 13] = [
        Kind::Allreduce,
        Kind::Reduce,
        Kind::Broadcast,
        Kind::Allgather,
        Kind::Gather,
        Kind::Scatter,
        Kind::ReduceScatter,
        Kind::Alltoall,
        Kind::Barrier,
        Kind::Send,
        Kind::Receive,
        Kind::ReceiveAny,
        Kind::SparseAllreduce,
    ];

    /// The operation behind a number.
    pub fn from_number(number: i32) -> Result<Kind> {
        match usize::try_from(number).ok().and_then(|n| Kind::ALL.get(n)) {
            Some(&kind) => Ok(kind),
            None => fail!(
                InvalidArgument,
                "operation {number} is unknown; the operations are 0 (allreduce) to 12"
            ),
        }
    }

    /// The name that errors and tables use.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Allreduce => "allreduce",
            Kind::Reduce => "reduce",
            Kind::Broadcast => "broadcast",
            Kind::Allgather => "allgather",
            Kind::Gather => "gather",
            Kind::Scatter => "scatter",
            Kind::ReduceScatter => "reduce_scatter",
            Kind::Alltoall => "alltoall",
            Kind::Barrier => "barrier",
            Kind::Send => "send",
            Kind::Receive => "receive",
            Kind::ReceiveAny => "receive_any",
            Kind::SparseAllreduce => "sparse_allreduce",
        }
    }

    /// Whether arrays of one length are combined.
    pub const fn reduces(self) -> bool {
        matches!(self, Kind::Allreduce | Kind::Reduce | Kind::ReduceScatter)
    }

    /// Whether a root applies.
    pub const fn rooted(self) -> bool {
        matches!(self, Kind::Reduce | Kind::Broadcast | Kind::Gather | Kind::Scatter)
    }

    /// Whether it is between two ranks only.
    pub const fn point_to_point(self) -> bool {
        matches!(self, Kind::Send | Kind::Receive | Kind::ReceiveAny)
    }
}

/// What a call is, as far as the ranks must agree on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Signature {
    /// The operation.
    pub kind: Kind,
    /// The type; meaningless for barriers.
    pub dtype: DataType,
    /// [`Operator::number`]; 0 where nothing is combined.
    pub operator: u8,
    /// The number of the algorithm when the caller named one, else 0; or a [`Making`], of which none is the
    /// number.
    pub algorithm: u8,
    /// The root; the coordinates of an index of a sparse tensor; 0 where there is neither. Of an average over
    /// several buffers of each rank, how many, too: see [`Signature::averaging`]. Of some other reductions,
    /// whether this rank has several: see [`Signature::over_several`].
    pub root: u32,
    /// Elements, or a digest of the list of counts. Where the ranks' lists may differ, [`COUNT_IS_DIGEST`]
    /// alone; in what two ranks tell each other in such a call, with the elements of their block, or a digest
    /// of the list: see [`Signature::about_block`]. Of a sparse tensor, the values of one of its elements.
    pub count: u64,
    /// Whether the ranks' memory is devices' memory, where that changes how the call is exchanged.
    pub device: bool,
}

/// By what call ranks make a new group, or what the GPUs of one share, in what they exchange for that: see
/// [`Signature::making`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Making {
    /// A context is created.
    Create = 0xf0,
    /// A group is split: who has which colour,
    Split = 0xf1,
    /// and one of the groups that come of it.
    Part = 0xf2,
    /// The same ranks once more.
    Duplicate = 0xf3,
    /// Of listed ranks.
    Group = 0xf4,
    /// The same ranks, in the place of their group.
    Suspend = 0xf5,
    /// Of all ranks of a group and others that join them: those of the group tell each other by what.
    Grow = 0xf6,
    /// GPUs come to exchange, at the latest by the first call on device memory.
    Connect = 0xf7,
    /// Device memory that all ranks reach.
    Window = 0xf8,
}

impl Making {
    /// What says how long ranks wait for each other in these, as errors name it. A call may have a limit of its
    /// own.
    pub const LIMIT: &str = "the context's timeout_ms";

    const ALL: [Making; 9] = [
        Making::Create,
        Making::Split,
        Making::Part,
        Making::Duplicate,
        Making::Group,
        Making::Suspend,
        Making::Grow,
        Making::Connect,
        Making::Window,
    ];

    /// The call.
    pub const fn name(self) -> &'static str {
        match self {
            Making::Create => "create",
            Making::Split | Making::Part => "split",
            Making::Duplicate => "duplicate",
            Making::Group => "group",
            Making::Suspend => "suspend",
            Making::Grow => "grow",
            Making::Connect => "connect_device",
            Making::Window => "register_window",
        }
    }
}

/// Beside a [`Kind`], in its byte of a code: the call is on device memory.
const ON_DEVICE: u8 = 0x80;

/// Bits of the root of a reduction: no group has more ranks. Above them, of an average over several buffers
/// of each rank, how many they are besides the first; and [`SEVERAL`].
const ROOT_BITS: u32 = 16;

/// Set in the root of a reduction when this rank has several buffers, and a rank with one would send
/// something else, or what it sends has been combined as the call between the ranks does not say.
const SEVERAL: u32 = 1 << 31;

/// The most buffers besides the first that there is room for.
const MOST_MORE: u32 = (SEVERAL >> ROOT_BITS) - 1;

impl Signature {
    /// All but root and count as a number, for posts, records and messages.
    pub fn code(&self) -> u32 {
        let head = self.kind as u8 | if self.device { ON_DEVICE } else { 0 };
        u32::from_le_bytes([head, self.dtype as u8, self.operator, self.algorithm])
    }

    /// The signature with this code. What is no code is an error.
    pub fn decode(code: u32, root: u32, count: u64) -> Result<Signature> {
        let [head, dtype, operator, algorithm] = code.to_le_bytes();
        let kind = Kind::from_number((head & !ON_DEVICE).into())?;
        let (dtype, device) = (DataType::from_number(dtype.into())?, head & ON_DEVICE != 0);
        Ok(Signature { kind, dtype, operator, algorithm, root, count, device })
    }

    /// The signature of what is exchanged to make something: ranks that make it by different calls differ, and
    /// are told so.
    pub fn of_making(self, making: Making) -> Signature {
        Signature { algorithm: making as u8, ..self }
    }

    /// By what call something is made, if it is about that.
    pub fn making(&self) -> Option<Making> {
        Making::ALL.into_iter().find(|&making| making as u8 == self.algorithm)
    }

    /// The signature of an average over so many buffers of each rank, which all ranks have to have: it
    /// divides by how many there are together. One is as in any call.
    pub fn averaging(self, buffers: u32) -> Signature {
        let more = buffers.saturating_sub(1).min(MOST_MORE);
        Signature { root: self.root | more << ROOT_BITS, ..self }
    }

    /// The signature of a reduction over several buffers of this rank, of which it sends no elements but what
    /// they come to, in another type. So all ranks have several, in whatever numbers, or none has.
    pub fn over_several(self) -> Signature {
        Signature { root: self.root | SEVERAL, ..self }
    }

    /// As [`Signature::over_several`], where they have been combined already, from elements of this type and
    /// by the operator of this number: what is left may be the same for ranks that differ in those.
    pub fn over_combined(self, dtype: DataType, operator: u8) -> Signature {
        Signature { dtype, operator, ..self }.over_several()
    }

    /// Whether it is a reduction over several buffers of this rank, as far as that counts.
    fn is_over_several(&self) -> bool {
        self.kind.reduces() && self.root & SEVERAL != 0
    }

    /// How many buffers of each rank a reduction is an average over, as far as that counts.
    fn buffers(&self) -> u32 {
        if self.kind.reduces() { ((self.root & !SEVERAL) >> ROOT_BITS) + 1 } else { 1 }
    }

    /// The root, of a call that has one.
    fn root(&self) -> u32 {
        if self.kind.reduces() { self.root & ((1 << ROOT_BITS) - 1) } else { self.root }
    }

    /// What is to be said of two calls that differ where their texts alone leave a reader to guess.
    pub fn remark(&self, other: &Signature) -> &'static str {
        if self.is_about_list() && other.is_about_list() && self.call() == other.call() {
            return "; their lists of counts differ, and this algorithm needs the same list on all ranks";
        }
        if self.kind == other.kind && self.buffers() != other.buffers() {
            return "; the numbers of their buffers differ, and an average needs the same number on all ranks";
        }
        if self.kind.reduces() && *self == (Signature { root: other.root ^ SEVERAL, ..*other }) {
            return match self.dtype == self.dtype.accumulator() {
                true => {
                    "; one rank has one buffer, another several, whose partial results are scaled already"
                }
                false => {
                    "; one rank has one buffer, another several: their partial results are of different types"
                }
            };
        }
        ""
    }

    /// What a message says of a call whose lists may differ from rank to rank, when its receiver obtains
    /// `elements` from its sender, in this message or in others: both know that from their lists. Where
    /// blocks of one list are passed on together, it says [`about_list`] instead. Any other call is told as
    /// it is.
    pub fn about_block(self, elements: u64) -> Signature {
        match self.is_listed() {
            true => Signature { count: COUNT_IS_DIGEST | elements, ..self },
            false => self,
        }
    }

    /// The call that a message is of: what all ranks must agree on, without what concerns two of them.
    pub fn call(self) -> Signature {
        match self.is_listed() {
            true => Signature { count: COUNT_IS_DIGEST, ..self },
            false => self,
        }
    }

    /// Bytes of the block that a message is about, if it says so.
    pub fn block_bytes(&self) -> Option<u64> {
        let elements = self.count & !COUNT_IS_DIGEST;
        let says = self.is_listed() && !self.is_about_list();
        says.then(|| elements.saturating_mul(self.dtype.size() as u64))
    }

    /// Whether a message says what list its sender has.
    pub fn is_about_list(&self) -> bool {
        self.is_listed() && self.count & BLOCK_IS_LIST != 0
    }

    /// Whether the ranks' lists of counts may differ.
    fn is_listed(&self) -> bool {
        matches!(self.kind, Kind::Gather | Kind::Scatter | Kind::Alltoall)
            && self.count & COUNT_IS_DIGEST != 0
    }
}

impl std::fmt::Display for Signature {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(making) = self.making() {
            return write!(f, "{}()", making.name());
        }
        let name = self.kind.name();
        let (count, dtype) = (self.count, self.dtype.name());
        match self.kind {
            Kind::Barrier => return write!(f, "barrier()"),
            Kind::SparseAllreduce => {
                let operator = Operator::name_of(self.operator);
                return write!(f, "{name}({} dims, blocks of {count} × {dtype}, {operator})", self.root);
            }
            // The lists differ from rank to rank.
            _ if self.count == COUNT_IS_DIGEST => write!(f, "{name}v({dtype}")?,
            _ if self.count & COUNT_IS_DIGEST != 0 => {
                write!(f, "{name}v({dtype}, counts {:08x}", self.count as u32)?
            }
            _ => write!(f, "{name}({count} × {dtype}")?,
        }
        if self.kind.reduces() {
            match self.buffers() {
                1 => {
                    let several = if self.is_over_several() { " over several buffers" } else { "" };
                    write!(f, ", {}{several}", Operator::name_of(self.operator))?;
                }
                buffers => write!(f, ", average over {buffers} buffers of each rank")?,
            }
        }
        if self.kind.rooted() {
            write!(f, ", root {}", self.root())?;
        }
        if self.algorithm != 0 {
            write!(f, ", algorithm {}", self.algorithm)?;
        }
        write!(f, ")")?;
        if self.device { write!(f, " on device memory") } else { Ok(()) }
    }
}

/// Set in [`Signature::count`] when it is a digest of a list. Real counts of elements never have this bit:
/// memory does not reach so far.
pub const COUNT_IS_DIGEST: u64 = 1 << 63;

/// Set beside it in what a message is about, when that is a list and no block. Nor does a count have this
/// bit.
const BLOCK_IS_LIST: u64 = 1 << 62;

/// What stands for the elements of a block, see [`Signature::about_block`], where the two ranks of a message
/// have to have the same list, of this digest.
pub const fn about_list(digest: u64) -> u64 {
    BLOCK_IS_LIST | digest & (BLOCK_IS_LIST - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_reads_as_a_call() {
        let signature = Signature {
            kind: Kind::Allreduce,
            dtype: DataType::F32,
            operator: 0,
            algorithm: 0,
            root: 0,
            count: 1024,
            device: false,
        };
        assert_eq!(signature.to_string(), "allreduce(1024 × float32, sum)");
        let broadcast = Signature { kind: Kind::Broadcast, root: 2, ..signature };
        assert_eq!(broadcast.to_string(), "broadcast(1024 × float32, root 2)");
        let sparse = Signature { kind: Kind::SparseAllreduce, root: 3, count: 8, ..signature };
        assert_eq!(sparse.to_string(), "sparse_allreduce(3 dims, blocks of 8 × float32, sum)");
        let device = Signature { device: true, ..broadcast };
        assert_eq!(device.to_string(), "broadcast(1024 × float32, root 2) on device memory");
        for signature in [device, broadcast] {
            let Signature { root, count, .. } = signature;
            assert_eq!(Signature::decode(signature.code(), root, count).unwrap(), signature);
        }
        assert!(Signature::decode(0x7f, 0, 0).is_err());
    }

    #[test]
    fn what_two_ranks_say_of_their_block_changes_nothing_of_the_call() {
        let call = Signature {
            kind: Kind::Gather,
            dtype: DataType::F32,
            operator: 0,
            algorithm: 0,
            root: 1,
            count: COUNT_IS_DIGEST,
            device: false,
        };
        let [short, long] = [0, 1 << 40].map(|elements| call.about_block(elements));
        assert_ne!(short, long);
        assert_eq!([short.call(), long.call()], [call, call]);
        assert_eq!([short.block_bytes(), long.block_bytes()], [Some(0), Some(4 << 40)]);
        // Of a list, its digest is told, which is no number of bytes.
        let lists = [3, 1 << 63 | 5].map(|digest| call.about_block(about_list(digest)));
        assert_eq!(lists.map(Signature::call), [call, call]);
        assert_eq!(lists.map(|list| (list.is_about_list(), list.block_bytes())), [(true, None); 2]);
        assert_eq!(lists[1].to_string(), "gatherv(float32, counts 00000005, root 1)");
        assert!(lists[0].remark(&lists[1]).contains("lists of counts differ"));
        assert_eq!(lists[0].remark(&short), "");
        // Where all ranks know the list, or there is none, the count is part of the call.
        let known = Signature { kind: Kind::Allgather, count: COUNT_IS_DIGEST | 77, ..call };
        for signature in [known, Signature { count: 8, ..call }] {
            assert_eq!([signature.about_block(5), signature.call()], [signature, signature]);
            assert_eq!(signature.block_bytes(), None);
        }
    }

    #[test]
    fn an_average_over_several_buffers_says_over_how_many() {
        let one = Signature {
            kind: Kind::Reduce,
            dtype: DataType::F32,
            operator: Operator::Average.number(),
            algorithm: 0,
            root: 2,
            count: 8,
            device: false,
        };
        assert_eq!([one.averaging(0), one.averaging(1)], [one; 2]);
        let [two, many] = [2, 70_000].map(|buffers| one.averaging(buffers));
        assert_eq!(two.to_string(), "reduce(8 × float32, average over 2 buffers of each rank, root 2)");
        assert_eq!(many.to_string(), "reduce(8 × float32, average over 32768 buffers of each rank, root 2)");
        for (one, other) in [(one, two), (two, many)] {
            assert_ne!(one, other);
            assert!(one.remark(&other).contains("numbers of their buffers differ"));
        }
        assert_eq!(two.remark(&two), "");
        assert_eq!(one.remark(&Signature { count: 9, ..one }), "");
        let Signature { root, count, .. } = two;
        assert_eq!(Signature::decode(two.code(), root, count).unwrap(), two);
        // Others have whole roots.
        let broadcast = Signature { kind: Kind::Broadcast, root: 1 << 20, ..one };
        assert_eq!(broadcast.to_string(), "broadcast(8 × float32, root 1048576)");
    }

    #[test]
    fn a_sum_over_several_buffers_that_sends_no_elements_says_so() {
        let one = Signature {
            kind: Kind::Reduce,
            dtype: DataType::Bf16,
            operator: Operator::Sum.number(),
            algorithm: 0,
            root: 2,
            count: 8,
            device: false,
        };
        let several = one.over_several();
        assert_eq!(several.to_string(), "reduce(8 × bfloat16, sum over several buffers, root 2)");
        assert_eq!(one.to_string(), "reduce(8 × bfloat16, sum, root 2)");
        for (one, other) in [(one, several), (several, one)] {
            assert_ne!(one, other);
            assert!(one.remark(&other).contains("one rank has one buffer, another several"));
        }
        // Nothing is said of it where they differ in something else, or in nothing.
        for other in [Signature { count: 9, ..one }, Signature { root: 3, ..one }, several] {
            assert_eq!(several.remark(&other), "");
        }
        let Signature { root, count, .. } = several;
        assert_eq!(Signature::decode(several.code(), root, count).unwrap(), several);
    }

    /// GPUs that have combined them are left with a sum of accumulators.
    #[test]
    fn a_sum_of_what_was_combined_says_from_what_and_how() {
        let sum = Signature {
            kind: Kind::Allreduce,
            dtype: DataType::F32,
            operator: Operator::Sum.number(),
            algorithm: 0,
            root: 0,
            count: 8,
            device: true,
        };
        let rounded = sum.over_combined(DataType::F16, Operator::Sum.number());
        assert_eq!(rounded.to_string(), "allreduce(8 × float16, sum over several buffers) on device memory");
        let scaled = sum.over_combined(DataType::F32, Operator::PreMulSum(2.0).number());
        assert_eq!(
            scaled.to_string(),
            "allreduce(8 × float32, premulsum over several buffers) on device memory"
        );
        let one = Signature { operator: scaled.operator, ..sum };
        assert!(one.remark(&scaled).contains("scaled already"));
        let average = sum.averaging(2).over_combined(DataType::F16, Operator::Average.number());
        assert_eq!(
            average.to_string(),
            "allreduce(8 × float16, average over 2 buffers of each rank) on device memory"
        );
        let one = Signature { dtype: DataType::F16, operator: average.operator, ..sum };
        assert!(one.remark(&average).contains("numbers of their buffers differ"));
        for (place, one) in [sum, rounded, scaled, average].into_iter().enumerate() {
            let Signature { root, count, .. } = one;
            assert_eq!(Signature::decode(one.code(), root, count).unwrap(), one);
            assert!([sum, rounded, scaled, average][..place].iter().all(|other| *other != one));
        }
    }
}
