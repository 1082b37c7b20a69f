//! Algorithm objects: prepared once, run many times.

use std::ffi::{CString, c_char, c_void};
use std::marker::{PhantomData, PhantomPinned};

use unisono::collective::request::Kind;
use unisono::communicator::{AlgorithmOptions, Call, Prepared, ignores};
use unisono::cuda::driver::StreamHandle;
use unisono::error::{Result, fail};
use unisono::reduce::DataType;

use super::argument::{Extent, Options, list, out, required_options};
use super::call::{CUstream_st, call_options, unisono_call_t};
use super::context::unisono_context_t;
use super::datatype::{operator, unisono_dtype_t, unisono_op_t};
use super::handle::{Handle, handle};
use super::status::{c_text, guard, guard_or, unisono_status_t};
use super::work::{WorkHandle, check_rank, unisono_work_t};

/// A collective operation: one of enum unisono_collective.
pub type unisono_collective_t = i32;

/// The values of unisono_collective_t. The numbers never change.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum unisono_collective {
    /// unisono_allreduce.
    UNISONO_ALLREDUCE = 0,
    /// unisono_reduce.
    UNISONO_REDUCE = 1,
    /// unisono_broadcast.
    UNISONO_BROADCAST = 2,
    /// unisono_allgather.
    UNISONO_ALLGATHER = 3,
    /// unisono_gather.
    UNISONO_GATHER = 4,
    /// unisono_scatter.
    UNISONO_SCATTER = 5,
    /// unisono_reduce_scatter.
    UNISONO_REDUCE_SCATTER = 6,
    /// unisono_alltoall.
    UNISONO_ALLTOALL = 7,
    /// unisono_barrier.
    UNISONO_BARRIER = 8,
}

/// How a collective is carried out: one of enum unisono_algorithm_kind.
pub type unisono_algorithm_kind_t = i32;

/// The values of unisono_algorithm_kind_t. The numbers never change. An algorithm that does not serve an
/// operation is UNISONO_INVALID_ARGUMENT, and the text names those that do.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum unisono_algorithm_kind {
    /// The library chooses: always one of those that keep the canonical order.
    UNISONO_ALGORITHM_AUTOMATIC = 0,
    /// No message: the group of one.
    UNISONO_ALGORITHM_LOCAL = 1,
    /// Everybody sends everything to everybody: the least latency.
    UNISONO_ALGORITHM_ONE_SHOT = 2,
    /// Everybody reduces its part, then all gather: the fewest bytes in two rounds.
    UNISONO_ALGORITHM_TWO_SHOT = 3,
    /// Round the ring. Reductions are in the order of the ring, not the canonical one: their bits differ from
    /// those of the other algorithms, and from one number of elements to another.
    UNISONO_ALGORITHM_RING = 4,
    /// Round the ring, in pieces. The order of reductions is that of the ring.
    UNISONO_ALGORITHM_RING_CHUNKED = 5,
    /// Halves of the vector over doubling distances, and back.
    UNISONO_ALGORITHM_HALVING_DOUBLING = 6,
    /// The same, in pieces.
    UNISONO_ALGORITHM_HALVING_DOUBLING_PIPELINED = 7,
    /// Four ranks along each edge of a cube.
    UNISONO_ALGORITHM_BCUBE = 8,
    /// The whole vector over doubling distances.
    UNISONO_ALGORITHM_RECURSIVE_DOUBLING = 9,
    /// A binomial tree.
    UNISONO_ALGORITHM_BINOMIAL = 10,
    /// A tree with at most two children, in pieces.
    UNISONO_ALGORITHM_PIPELINED_TREE = 11,
    /// Everything directly, at once.
    UNISONO_ALGORITHM_LINEAR = 12,
    /// From rank to rank, in pieces.
    UNISONO_ALGORITHM_CHAIN = 13,
    /// A part to each, then all gather.
    UNISONO_ALGORITHM_SCATTER_ALLGATHER = 14,
    /// Many small blocks in few messages.
    UNISONO_ALGORITHM_BRUCK = 15,
    /// One partner at a time.
    UNISONO_ALGORITHM_PAIRWISE = 16,
    /// News over doubling distances.
    UNISONO_ALGORITHM_DISSEMINATION = 17,
    /// To rank 0 and back.
    UNISONO_ALGORITHM_ALL_TO_ONE = 18,
    /// Inside the hosts, across them, inside again. Reductions have the order of the others if there is one
    /// host, or each but the last has a power of two of ranks.
    UNISONO_ALGORITHM_HIERARCHICAL = 19,
    /// Broadcast: the root sends to everybody at once, each as soon as it is ready to receive, while it
    /// copies to its other pointers.
    UNISONO_ALGORITHM_ONE_TO_ALL = 20,
    /// Broadcast on device memory, by GPUs that reach each other: all read the root's input, at once.
    UNISONO_ALGORITHM_BROADCAST_ONE_STAGE = 21,
    /// The same: each reads a part of the root's input, and then the others' parts from the others. Between
    /// two ranks: one stage.
    UNISONO_ALGORITHM_BROADCAST_TWO_STAGE = 22,
    /// The same, in two stages from 3 ranks and 6 MiB up, or from 5 ranks and 2 MiB; else in one.
    UNISONO_ALGORITHM_BROADCAST_STAGES = 23,
}

/// An algorithm object: one collective over fixed buffers, checked and prepared once, run many times. Ended
/// by unisono_algorithm_destroy.
pub struct unisono_algorithm_t {
    _private: [u8; 0],
    _marker: PhantomData<(*mut u8, PhantomPinned)>,
}

handle!(unisono_algorithm_t, AlgorithmHandle);

/// A prepared algorithm and its name as C reads it.
pub(super) struct AlgorithmHandle {
    prepared: Prepared,
    name: CString,
}

/// What an algorithm object is made from. Start from UNISONO_ALGORITHM_OPTIONS_INIT; what is zero or NULL is
/// unset. The struct and its lists are read during the creation only; the buffers are in use by every run.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct unisono_algorithm_options_t {
    /// sizeof(unisono_algorithm_options_t), as UNISONO_ALGORITHM_OPTIONS_INIT sets it.
    pub size: u64,
    /// The operation, enum unisono_collective; unset: allreduce.
    pub collective: i32,
    /// How, enum unisono_algorithm_kind; unset: the library chooses.
    pub algorithm: i32,
    /// This rank's buffers, `pointer_count` of them, all in host memory or all in device memory (of any
    /// GPUs). Allreduce, reduce and broadcast: each of `count` elements; they are combined here first, and
    /// each receives the result. Any two are apart or the same: others are UNISONO_INVALID_ARGUMENT. Others:
    /// the first is sent and the second received, with the sizes of the function of that name; what that
    /// ignores may be NULL here, too. Scatter also takes, in host memory, the block of each rank, `count`
    /// elements anywhere, and behind those what receives, which is apart from the blocks, or the root's own.
    /// So the root may have it with ranks that scatter in another way. Barrier: none.
    pub pointers: *const *mut c_void,
    /// How many buffers. Where UNISONO_AVG combines them, which divides by how many there are on all ranks
    /// together, every rank has the same number: others are UNISONO_MISMATCH. So are, where floats shorter
    /// than 4 bytes are combined, ranks with one buffer beside ranks with several: every rank has one, or
    /// every rank has several, in whatever numbers; and so with UNISONO_PREMULSUM in device memory, of any
    /// type.
    pub pointer_count: u64,
    /// For buffers in device memory: a CUDA stream for each, of its device, or NULL. With streams, a run
    /// starts when they have come to it, and what they are given afterwards finds the result; errors after
    /// that are the context's. Without, a run comes after what the devices' default streams were given, and
    /// is complete on return.
    pub streams: *const *mut CUstream_st,
    /// Elements, as in the function of that name.
    pub count: u64,
    /// Their type, enum unisono_dtype.
    pub dtype: unisono_dtype_t,
    /// How they are combined, enum unisono_op.
    pub op: unisono_op_t,
    /// The root.
    pub root_rank: u32,
    /// 0.
    pub reserved: u32,
    /// Which of the root's buffers a broadcast copies.
    pub root_pointer: u64,
    /// Tag, deadline, scale and function of every run; NULL: the defaults. Its `algorithm` is unset, or that
    /// of the options: another is UNISONO_INVALID_ARGUMENT.
    pub call: *const unisono_call_t,
}

// SAFETY: repr(C) from `size: u64` on, eight bytes a field (pairs of four), and integers and pointers are
// valid as zeros.
unsafe impl Options for unisono_algorithm_options_t {
    const INIT: &'static str = "UNISONO_ALGORITHM_OPTIONS_INIT";
    const FIRST_SIZE: u64 = 80;
}

/// Checks and prepares a collective over fixed buffers. Every rank makes the same one. Nothing is
/// communicated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_algorithm_create(
    ctx: *const unisono_context_t,
    options: *const unisono_algorithm_options_t,
    algorithm: *mut *mut unisono_algorithm_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or a context that nobody destroys meanwhile.
        let context = unsafe { Handle::borrow(ctx, "ctx") }?.inner();
        // SAFETY: the contract of the header: NULL or an options struct.
        let options = unsafe { required_options(options, "options") }?;
        // SAFETY: the contract of the header: NULL or writable.
        let place = unsafe { out(algorithm, "algorithm") }?;
        // SAFETY: the contract of the header: NULL or so many pointers.
        let pointers = unsafe { list(options.pointers, options.pointer_count, "options->pointers") }?;
        // SAFETY: the contract of the header: NULL or an options struct.
        let call = unsafe { call_options(options.call, "options->call") }?;
        if !call.stream.is_null() {
            fail!(
                InvalidArgument,
                "options->call->stream is set: give options->streams, one for each pointer"
            );
        }
        let streams: &[*mut CUstream_st] = if options.streams.is_null() {
            &[]
        } else {
            // SAFETY: the contract of the header: so many streams.
            unsafe { list(options.streams, options.pointer_count, "options->streams") }?
        };
        if options.reserved != 0 {
            fail!(
                InvalidArgument,
                "options->reserved is {}; initialise the struct with UNISONO_ALGORITHM_OPTIONS_INIT",
                options.reserved
            );
        }
        let (kind, dtype) = (collective(options.collective)?, DataType::from_number(options.dtype)?);
        check_rank(context, options.root_rank, "options->root_rank")?;
        let is_root = context.rank() == options.root_rank;
        let given = |(index, _): &(usize, _)| !ignores(kind, is_root, *index, pointers.len());
        for (index, &pointer) in pointers.iter().enumerate().filter(given) {
            Extent::Whole(options.count).buffer(pointer, dtype, &format!("options->pointers[{index}]"))?;
        }
        let prepared = AlgorithmOptions {
            kind,
            algorithm: options.algorithm,
            buffers: pointers.iter().map(|pointer| pointer.cast()).collect(),
            streams: streams.iter().map(|stream| StreamHandle(stream.expose_provenance())).collect(),
            count: options.count,
            dtype,
            operator: operator(options.op, dtype, &call)?,
            root: options.root_rank,
            // An index into a list that is in memory; too large a number is out of its range either way.
            root_buffer: usize::try_from(options.root_pointer).unwrap_or(usize::MAX),
            call: Call::from(&call),
        };
        // SAFETY: the contract of the header: the buffers stay valid until the object is destroyed.
        let prepared = unsafe { Prepared::new(context, prepared) }?;
        let name = c_text(prepared.algorithm());
        place.write(Handle::into_handle(AlgorithmHandle { prepared, name }));
        Ok(())
    })
}

/// Runs the algorithm once, on every rank, and returns when it is complete here; with streams, when it has
/// been given to them. One run at a time.
///
/// In a group of one, a run on device memory with streams may be captured into a CUDA graph: let every stream
/// wait for an event of the capturing one first, and the capturing one for an event of each afterwards. The
/// object outlives the graph.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_algorithm_run(algorithm: *const unisono_algorithm_t) -> unisono_status_t {
    // SAFETY: the contract of the header: NULL or an object that nobody destroys meanwhile.
    guard(|| unsafe { Handle::borrow(algorithm, "algorithm") }?.prepared.run())
}

/// Starts a run and returns; `*work` is ended by unisono_work_destroy. The next run comes after this one is
/// complete. In a capture, as unisono_algorithm_run; the work is complete then, whatever the graph does.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_algorithm_start(
    algorithm: *const unisono_algorithm_t,
    work: *mut *mut unisono_work_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or an object that nobody destroys meanwhile.
        let algorithm = unsafe { Handle::borrow(algorithm, "algorithm") }?;
        // SAFETY: the contract of the header: NULL or writable.
        let place = unsafe { out(work, "work") }?;
        place.write(Handle::into_handle(WorkHandle::new(algorithm.prepared.start()?)));
        Ok(())
    })
}

/// The name of the algorithm, also of one that the library chose, such as "two-shot"; empty for NULL. Valid
/// until unisono_algorithm_destroy.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_algorithm_name(algorithm: *const unisono_algorithm_t) -> *const c_char {
    // SAFETY: the contract of the header: NULL or an object that nobody destroys meanwhile.
    guard_or(|_| c"".as_ptr(), || Ok(unsafe { Handle::borrow(algorithm, "algorithm") }?.name.as_ptr()))
}

/// Ends the object. A run that has been started goes on: the memory is in use until its work is complete.
/// NULL is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_algorithm_destroy(algorithm: *mut unisono_algorithm_t) {
    guard(|| {
        // SAFETY: the contract of the header: NULL, or an object that nobody uses any more.
        drop(unsafe { Handle::take(algorithm, "algorithm") }?);
        Ok(())
    });
}

/// The operation behind a number.
fn collective(number: unisono_collective_t) -> Result<Kind> {
    Ok(match number {
        0 => Kind::Allreduce,
        1 => Kind::Reduce,
        2 => Kind::Broadcast,
        3 => Kind::Allgather,
        4 => Kind::Gather,
        5 => Kind::Scatter,
        6 => Kind::ReduceScatter,
        7 => Kind::Alltoall,
        8 => Kind::Barrier,
        _ => fail!(
            InvalidArgument,
            "options->collective {number} is unknown; the collectives are 0 (allreduce) to 8 (barrier)"
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use unisono::schedule::Algorithm;

    #[test]
    fn algorithm_numbers_never_change() {
        use unisono_algorithm_kind::*;
        let pinned = [
            (UNISONO_ALGORITHM_LOCAL, Algorithm::Local, 1),
            (UNISONO_ALGORITHM_ONE_SHOT, Algorithm::OneShot, 2),
            (UNISONO_ALGORITHM_TWO_SHOT, Algorithm::TwoShot, 3),
            (UNISONO_ALGORITHM_RING, Algorithm::Ring, 4),
            (UNISONO_ALGORITHM_RING_CHUNKED, Algorithm::RingChunked, 5),
            (UNISONO_ALGORITHM_HALVING_DOUBLING, Algorithm::HalvingDoubling, 6),
            (UNISONO_ALGORITHM_HALVING_DOUBLING_PIPELINED, Algorithm::HalvingDoublingPipelined, 7),
            (UNISONO_ALGORITHM_BCUBE, Algorithm::Bcube, 8),
            (UNISONO_ALGORITHM_RECURSIVE_DOUBLING, Algorithm::RecursiveDoubling, 9),
            (UNISONO_ALGORITHM_BINOMIAL, Algorithm::Binomial, 10),
            (UNISONO_ALGORITHM_PIPELINED_TREE, Algorithm::PipelinedTree, 11),
            (UNISONO_ALGORITHM_LINEAR, Algorithm::Linear, 12),
            (UNISONO_ALGORITHM_CHAIN, Algorithm::Chain, 13),
            (UNISONO_ALGORITHM_SCATTER_ALLGATHER, Algorithm::ScatterAllgather, 14),
            (UNISONO_ALGORITHM_BRUCK, Algorithm::Bruck, 15),
            (UNISONO_ALGORITHM_PAIRWISE, Algorithm::Pairwise, 16),
            (UNISONO_ALGORITHM_DISSEMINATION, Algorithm::Dissemination, 17),
            (UNISONO_ALGORITHM_ALL_TO_ONE, Algorithm::AllToOne, 18),
            (UNISONO_ALGORITHM_HIERARCHICAL, Algorithm::Hierarchical, 19),
            (UNISONO_ALGORITHM_ONE_TO_ALL, Algorithm::OneToAll, 20),
        ];
        assert_eq!(UNISONO_ALGORITHM_AUTOMATIC as i32, 0);
        assert_eq!(pinned.len(), Algorithm::ALL.len());
        for (ours, inner, number) in pinned {
            assert_eq!((ours as i32, inner as i32), (number, number));
        }
    }

    #[test]
    fn collective_numbers_never_change() {
        use unisono_collective::*;
        let pinned = [
            (UNISONO_ALLREDUCE, Kind::Allreduce, 0),
            (UNISONO_REDUCE, Kind::Reduce, 1),
            (UNISONO_BROADCAST, Kind::Broadcast, 2),
            (UNISONO_ALLGATHER, Kind::Allgather, 3),
            (UNISONO_GATHER, Kind::Gather, 4),
            (UNISONO_SCATTER, Kind::Scatter, 5),
            (UNISONO_REDUCE_SCATTER, Kind::ReduceScatter, 6),
            (UNISONO_ALLTOALL, Kind::Alltoall, 7),
            (UNISONO_BARRIER, Kind::Barrier, 8),
        ];
        for (ours, inner, number) in pinned {
            assert_eq!((ours as i32, inner as i32), (number, number));
            assert_eq!(collective(number).unwrap(), inner);
        }
        assert!(collective(9).is_err() && collective(-1).is_err());
    }
}
