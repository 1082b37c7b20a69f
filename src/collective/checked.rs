//! A request that has been checked: nothing behind this point asks again whether counts overflow or pointers
//! are NULL.

use super::request::{Counts, Kind, Request};
use crate::error::{Result, fail};
use crate::reduce::{DataType, Operator};
use crate::schedule::Collective;
use crate::signature::{COUNT_IS_DIGEST, Signature};

/// A collective call of one rank, checked.
#[derive(Clone, Debug)]
pub struct Checked {
    /// What the ranks must agree on.
    pub signature: Signature,
    /// What is asked for, as the schedules see it.
    pub collective: Collective,
    /// What this rank contributes.
    pub input: *const u8,
    /// Where its result goes.
    pub output: *mut u8,
    /// Set when the call is in place: elements from the start of the input to the start of the output.
    pub alias: Option<i64>,
    /// Type of the elements.
    pub dtype: DataType,
    /// Set when the operation reduces.
    pub operator: Option<Operator>,
    /// This rank.
    pub rank: u32,
    /// Whether counts may differ between ranks in a way that not every rank knows.
    pub listed: bool,
}

impl Checked {
    /// Checks `request` for rank `rank` of `size`. Errors name the argument.
    pub fn new(request: &Request, rank: u32, size: u32) -> Result<Checked> {
        Checked::with(request, rank, size, |collective| {
            let lens = [collective.input_len(rank), collective.output_len(rank)];
            Buffers::new(request, lens, collective.in_place_alias(rank))
        })
    }

    /// Checks the scatter `request` on its root, which has the ranks' blocks at `blocks`, one for each of
    /// `size` ranks: its input stands for none of them, and is NULL in what is checked. In place: the root's
    /// own block is the output.
    pub fn of_blocks(request: &Request, blocks: &[*mut u8], rank: u32, size: u32) -> Result<Checked> {
        let request = Request { input: std::ptr::null(), ..request.clone() };
        Checked::with(&request, rank, size, |collective| {
            let (buffers, _) = Buffers::new(&request, [0, collective.output_len(rank)], 0)?;
            let (output, bytes) = (buffers.output, buffers.output_bytes);
            for (index, &block) in blocks.iter().enumerate() {
                let name = || format!("the block of rank {index}");
                check_end(&name(), block, bytes)?;
                let overlaps = bytes > 0 && block.addr().abs_diff(output.addr()) < bytes;
                if overlaps && !(index == rank as usize && block == output) {
                    fail!(
                        InvalidArgument,
                        "{} and the output overlap: they are apart, but for the root's own, which may be the same",
                        name()
                    );
                }
            }
            Ok((buffers, None))
        })
    }

    fn with(
        request: &Request,
        rank: u32,
        size: u32,
        buffers: impl FnOnce(&Collective) -> Result<(Buffers, Option<i64>)>,
    ) -> Result<Checked> {
        let kind = request.kind;
        check_root(request, size)?;
        let (collective, count) = collective(request, rank, size)?;
        if let Counts::Uniform(count) = request.counts {
            check_blocks(request, count, size)?;
        }
        let (Buffers { input, output, .. }, alias) = buffers(&collective)?;
        if let Collective::Alltoall { send_counts, recv_counts } = &collective
            && alias.is_some()
            && send_counts != recv_counts
        {
            fail!(
                InvalidArgument,
                "alltoallv in place needs as many elements from each rank as are sent to it: {send_counts:?} are sent, \
                 {recv_counts:?} received"
            );
        }
        Ok(Checked {
            signature: signature(request, count),
            collective,
            input,
            output,
            alias,
            dtype: request.dtype,
            operator: kind.reduces().then_some(request.operator),
            rank,
            listed: !matches!(request.counts, Counts::Uniform(_))
                && matches!(kind, Kind::Gather | Kind::Scatter | Kind::Alltoall),
        })
    }

    /// Elements of the input.
    pub fn input_len(&self) -> usize {
        self.collective.input_len(self.rank) as usize
    }

    /// Elements of the output.
    pub fn output_len(&self) -> usize {
        self.collective.output_len(self.rank) as usize
    }
}

/// A collective of one count, the same on all ranks, checked: as [`Checked`] has it, without what a schedule
/// needs.
#[derive(Clone, Copy, Debug)]
pub struct Uniform {
    /// What the ranks must agree on.
    pub signature: Signature,
    /// The memory that it names.
    pub buffers: Buffers,
}

impl Uniform {
    /// Checks `request` for rank `rank` of `size`, as [`Checked::new`] does; `None` of a request that names
    /// lists, or is no collective that moves elements (a barrier, say).
    pub fn new(request: &Request, rank: u32, size: u32) -> Result<Option<Uniform>> {
        let Counts::Uniform(count) = request.counts else { return Ok(None) };
        check_root(request, size)?;
        check_blocks(request, count, size)?;
        let is_root = rank == request.root;
        let of_root = |elements: u64| if is_root { elements } else { 0 };
        // For the kinds that ask for these, `check_blocks` has refused what does not fit; for others the
        // product means nothing.
        let all = count.wrapping_mul(size.into());
        let before = count.wrapping_mul(rank.into()) as i64;
        // Elements of the input and the output, and from the one to the other in place.
        let (input, output, in_place) = match request.kind {
            Kind::Allreduce => (count, count, 0),
            Kind::Reduce => (count, of_root(count), 0),
            Kind::Broadcast => (of_root(count), count, 0),
            Kind::Allgather => (count, all, -before),
            Kind::ReduceScatter => (all, count, before),
            Kind::Gather => (count, of_root(all), if is_root { -before } else { 0 }),
            Kind::Scatter => (of_root(all), count, if is_root { before } else { 0 }),
            Kind::Alltoall => (all, all, 0),
            _ => return Ok(None),
        };
        let (buffers, _) = Buffers::new(request, [input, output], in_place)?;
        Ok(Some(Uniform { signature: signature(request, count), buffers }))
    }
}

/// The memory that a collective names on this rank, checked.
#[derive(Clone, Copy, Debug)]
pub struct Buffers {
    /// What this rank contributes,
    pub input: *const u8,
    /// and how many bytes of it are read.
    pub input_bytes: usize,
    /// Where its result goes,
    pub output: *mut u8,
    /// and how many bytes of that are written.
    pub output_bytes: usize,
}

impl Buffers {
    /// Of so many elements, input and output, and the alias of a call in place, which would be `in_place`.
    fn new(request: &Request, lens: [u64; 2], in_place: i64) -> Result<(Buffers, Option<i64>)> {
        let element = request.dtype.size() as u64;
        let input_bytes = bytes("sendbuf", lens[0], element, request.dtype)?;
        let output_bytes = bytes("recvbuf", lens[1], element, request.dtype)?;
        // Broadcast works on one buffer; elsewhere the root's input and output are told apart.
        let input = if request.kind == Kind::Broadcast && request.input.is_null() {
            request.output.cast_const()
        } else {
            request.input
        };
        if input.is_null() && input_bytes > 0 {
            fail!(InvalidArgument, "sendbuf is NULL, but {input_bytes} bytes are read from it");
        }
        if request.output.is_null() && output_bytes > 0 {
            fail!(InvalidArgument, "recvbuf is NULL, but {output_bytes} bytes are written to it");
        }
        check_end("sendbuf", input, input_bytes)?;
        check_end("recvbuf", request.output, output_bytes)?;
        let alias = alias(input, input_bytes, request.output, output_bytes, element, in_place)?;
        Ok((Buffers { input, input_bytes, output: request.output, output_bytes }, alias))
    }
}

/// Refuses a buffer that goes past the end of the address space.
fn check_end(name: &str, start: *const u8, bytes: usize) -> Result<()> {
    if start.addr().checked_add(bytes).is_none() {
        fail!(InvalidArgument, "{bytes} bytes of {name}, from {start:p} on, end past the address space");
    }
    Ok(())
}

/// Refuses a root that is no rank.
fn check_root(request: &Request, size: u32) -> Result<()> {
    if request.kind.rooted() && request.root >= size {
        fail!(
            InvalidArgument,
            "root {} is out of range: the group has {size} ranks, 0 to {}",
            request.root,
            size - 1
        );
    }
    Ok(())
}

/// Refuses blocks of `count` elements for each rank that together exceed the address space.
fn check_blocks(request: &Request, count: u64, size: u32) -> Result<()> {
    let (kind, element) = (request.kind, request.dtype.size() as u64);
    if !matches!(kind, Kind::Barrier | Kind::Allreduce | Kind::Reduce | Kind::Broadcast)
        && count.checked_mul(size.into()).is_none_or(|all| all > isize::MAX as u64 / element)
    {
        fail!(
            InvalidArgument,
            "count {count} of {} for each of {size} ranks exceeds the address space",
            request.dtype.name()
        );
    }
    Ok(())
}

/// What the ranks must agree on.
fn signature(request: &Request, count: u64) -> Signature {
    let kind = request.kind;
    Signature {
        kind,
        dtype: if kind == Kind::Barrier { DataType::U8 } else { request.dtype },
        operator: if kind.reduces() { request.operator.number() } else { 0 },
        algorithm: 0,
        root: if kind.rooted() { request.root } else { 0 },
        count,
        device: false,
    }
}

/// The collective, and the count of its signature.
fn collective(request: &Request, rank: u32, size: u32) -> Result<(Collective, u64)> {
    let root = request.root;
    let ranks = size as usize;
    let uniform = || match &request.counts {
        Counts::Uniform(count) => Ok(*count),
        _ => fail!(InvalidArgument, "{} takes one count, not a list", request.kind.name()),
    };
    let blocks = || -> Result<(Vec<u64>, u64)> {
        match &request.counts {
            Counts::Uniform(count) => Ok((vec![*count; ranks], *count)),
            Counts::Blocks(counts) if counts.len() == ranks => Ok((counts.clone(), digest(counts))),
            Counts::Blocks(counts) => {
                fail!(InvalidArgument, "{} counts were given for {size} ranks", counts.len())
            }
            Counts::Exchange { .. } => {
                fail!(InvalidArgument, "{} takes one list of counts, not two", request.kind.name())
            }
            Counts::From { .. } => fail!(InvalidArgument, "{} takes no list of ranks", request.kind.name()),
        }
    };
    // Not every rank knows all counts: a list has no part in the signature. Two ranks compare what they have
    // for each other.
    let unshared = |(counts, count): (Vec<u64>, u64)| {
        let count = if matches!(request.counts, Counts::Uniform(_)) { count } else { COUNT_IS_DIGEST };
        (counts, count)
    };
    Ok(match request.kind {
        Kind::Allreduce => {
            let count = uniform()?;
            (Collective::Allreduce { count }, count)
        }
        Kind::Reduce => {
            let count = uniform()?;
            (Collective::Reduce { count, root }, count)
        }
        Kind::Broadcast => {
            let count = uniform()?;
            (Collective::Broadcast { count, root }, count)
        }
        Kind::Allgather => {
            let (counts, count) = blocks()?;
            (Collective::Allgather { counts }, count)
        }
        Kind::Gather => {
            let (counts, count) = unshared(blocks()?);
            (Collective::Gather { counts, root }, count)
        }
        Kind::Scatter => {
            let (counts, count) = unshared(blocks()?);
            (Collective::Scatter { counts, root }, count)
        }
        Kind::ReduceScatter => {
            let (counts, count) = blocks()?;
            (Collective::ReduceScatter { counts }, count)
        }
        Kind::Alltoall => match &request.counts {
            Counts::Exchange { send, receive } => {
                if send.len() != ranks || receive.len() != ranks {
                    fail!(
                        InvalidArgument,
                        "{} send counts and {} receive counts were given for {size} ranks",
                        send.len(),
                        receive.len()
                    );
                }
                let own = rank as usize;
                if send[own] != receive[own] {
                    fail!(
                        InvalidArgument,
                        "rank {rank} sends {} elements to itself but receives {}",
                        send[own],
                        receive[own]
                    );
                }
                (
                    Collective::Alltoall { send_counts: send.clone(), recv_counts: receive.clone() },
                    COUNT_IS_DIGEST,
                )
            }
            _ => {
                let (counts, count) = unshared(blocks()?);
                (Collective::Alltoall { send_counts: counts.clone(), recv_counts: counts }, count)
            }
        },
        Kind::Barrier => (Collective::Barrier, 0),
        Kind::Send | Kind::Receive | Kind::ReceiveAny | Kind::SparseAllreduce => {
            fail!(Internal, "{} has no schedule", request.kind.name())
        }
    })
}

/// Bytes of `count` elements, if an address space can hold them.
pub fn bytes(name: &str, count: u64, element: u64, dtype: DataType) -> Result<usize> {
    match count.checked_mul(element).and_then(|bytes| isize::try_from(bytes).ok()) {
        Some(bytes) => Ok(bytes as usize),
        None => fail!(
            InvalidArgument,
            "{name}: count {count} of {} ({element} bytes each) exceeds the address space",
            dtype.name()
        ),
    }
}

/// A digest of a list of counts, told apart from a count by one bit.
pub fn digest(counts: &[u64]) -> u64 {
    let mixed = counts.iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, &count| {
        (hash ^ count).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23)
    });
    mixed | COUNT_IS_DIGEST
}

/// Whether the call is in place. Buffers that overlap in any other way are refused. Both end inside the
/// address space.
fn alias(
    input: *const u8,
    input_bytes: usize,
    output: *mut u8,
    output_bytes: usize,
    element: u64,
    legal: i64,
) -> Result<Option<i64>> {
    if input_bytes == 0 || output_bytes == 0 {
        return Ok(None);
    }
    let (from, to) = (input as usize, output as usize);
    let disjoint = from + input_bytes <= to || to + output_bytes <= from;
    if disjoint {
        return Ok(None);
    }
    let distance = (to as i128) - (from as i128);
    if distance == i128::from(legal) * i128::from(element) {
        return Ok(Some(legal));
    }
    fail!(
        InvalidArgument,
        "sendbuf and recvbuf overlap: recvbuf starts {distance} bytes after sendbuf; in place it would be {}",
        i128::from(legal) * i128::from(element)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(kind: Kind, counts: Counts) -> Request {
        static MEMORY: [u8; 4096] = [0; 4096];
        let input = MEMORY.as_ptr();
        Request {
            kind,
            input,
            output: input.wrapping_add(2048).cast_mut(),
            counts,
            dtype: DataType::F32,
            operator: Operator::Sum,
            root: 0,
        }
    }

    fn refusal(request: &Request) -> String {
        Checked::new(request, 1, 4).err().map(|error| error.text().to_string()).unwrap_or_default()
    }

    #[test]
    fn what_is_wrong_is_named() {
        let mut call = request(Kind::Broadcast, Counts::Uniform(4));
        call.root = 4;
        assert!(refusal(&call).contains("root 4 is out of range"));
        call = request(Kind::Allreduce, Counts::Uniform(1 << 62));
        assert!(refusal(&call).contains("count 4611686018427387904 of float32"));
        call = request(Kind::Allgather, Counts::Blocks(vec![1, 2, 3]));
        assert!(refusal(&call).contains("3 counts were given for 4 ranks"));
        call = request(Kind::Alltoall, Counts::Exchange { send: vec![1; 4], receive: vec![1, 2, 1, 1] });
        assert!(refusal(&call).contains("sends 1 elements to itself but receives 2"));
        call = request(Kind::Allreduce, Counts::Uniform(4));
        call.output = std::ptr::null_mut();
        assert!(refusal(&call).contains("recvbuf is NULL, but 16 bytes"));
        call = request(Kind::Allreduce, Counts::Uniform(4));
        call.output = call.input.wrapping_add(8).cast_mut();
        assert!(refusal(&call).contains("overlap"));
    }

    #[test]
    fn what_ends_past_the_address_space_is_refused() {
        let end = std::ptr::without_provenance_mut::<u8>(usize::MAX - 7);
        let mut call = request(Kind::Allreduce, Counts::Uniform(4));
        call.output = end;
        assert!(refusal(&call).contains("16 bytes of recvbuf"), "{}", refusal(&call));
        call = request(Kind::Allreduce, Counts::Uniform(4));
        call.input = end;
        assert!(refusal(&call).contains("16 bytes of sendbuf"), "{}", refusal(&call));
        call = request(Kind::Allreduce, Counts::Uniform(1));
        call.output = end;
        assert_eq!(refusal(&call), "");
    }

    #[test]
    fn one_count_is_checked_as_lists_are() {
        let kinds = [
            Kind::Allreduce,
            Kind::Reduce,
            Kind::Broadcast,
            Kind::Allgather,
            Kind::ReduceScatter,
            Kind::Gather,
            Kind::Scatter,
            Kind::Alltoall,
        ];
        let mut refused = 0;
        for (kind, count, rank) in kinds.into_iter().flat_map(|kind| {
            [0, 1, 3, 1 << 59, 1 << 62, u64::MAX]
                .into_iter()
                .flat_map(move |count| (0..4).map(move |rank| (kind, count, rank)))
        }) {
            let apart = request(kind, Counts::Uniform(count));
            let block = i64::from(rank) * count.min(100) as i64 * 4;
            for (input, output, root) in [
                (apart.input, apart.output, 0),
                (apart.input, apart.output, 4),
                (std::ptr::null(), apart.output, 2),
                (apart.input, std::ptr::null_mut(), 2),
                (apart.input, apart.input.cast_mut(), 2),
                (apart.input, apart.input.wrapping_offset(block as isize).cast_mut(), 2),
                (apart.input, apart.input.wrapping_offset(-block as isize).cast_mut(), 2),
            ] {
                let call = Request { input, output, root, ..apart.clone() };
                let listed = Checked::new(&call, rank, 4);
                match (Uniform::new(&call, rank, 4), &listed) {
                    (Ok(Some(Uniform { signature, buffers })), Ok(checked)) => {
                        assert_eq!(signature, checked.signature);
                        assert_eq!((buffers.input, buffers.output), (checked.input, checked.output));
                        let bytes = [checked.input_len() * 4, checked.output_len() * 4];
                        assert_eq!([buffers.input_bytes, buffers.output_bytes], bytes, "{call:?}");
                    }
                    (Err(error), Err(other)) => {
                        assert_eq!(error.text(), other.text());
                        refused += 1;
                    }
                    (uniform, _) => panic!("{call:?} on rank {rank}: {uniform:?}, {listed:?}"),
                }
            }
        }
        assert!(refused > 100, "{refused}");
        let lists = request(Kind::Allgather, Counts::Blocks(vec![1; 4]));
        assert!(matches!(Uniform::new(&lists, 0, 4), Ok(None)));
    }

    #[test]
    fn a_list_is_not_a_count_even_of_nothing() {
        for (kind, lists) in [
            (Kind::Alltoall, Counts::Exchange { send: vec![0; 4], receive: vec![0; 4] }),
            (Kind::Gather, Counts::Blocks(vec![0; 4])),
            (Kind::Scatter, Counts::Blocks(vec![0; 4])),
        ] {
            let [listed, uniform] = [lists, Counts::Uniform(0)]
                .map(|counts| Checked::new(&request(kind, counts), 1, 4).expect("nothing is read").signature);
            assert_ne!(listed, uniform);
            let names = [listed.to_string(), uniform.to_string()];
            assert!(names[0].starts_with(&format!("{}v(float32", kind.name())), "{names:?}");
            assert!(names[1].starts_with(&format!("{}(0 × float32", kind.name())), "{names:?}");
        }
    }

    #[test]
    fn in_place_calls_are_recognised() {
        let mut call = request(Kind::Allgather, Counts::Uniform(4));
        call.output = call.input.cast_mut().wrapping_sub(16);
        let checked = Checked::new(&call, 1, 4).expect("rank 1's block starts after 4 floats");
        assert_eq!(checked.alias, Some(-4));
        call = request(Kind::Allreduce, Counts::Uniform(4));
        assert_eq!(Checked::new(&call, 1, 4).expect("disjoint").alias, None);
    }

    #[test]
    fn null_is_fine_where_nothing_is_touched() {
        let mut call = request(Kind::Reduce, Counts::Uniform(4));
        call.output = std::ptr::null_mut();
        assert!(Checked::new(&call, 1, 4).is_ok(), "rank 1 is not the root");
        call = request(Kind::Allreduce, Counts::Uniform(0));
        (call.input, call.output) = (std::ptr::null(), std::ptr::null_mut());
        assert!(Checked::new(&call, 1, 4).is_ok());
    }
}
