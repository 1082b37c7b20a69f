//! Bad arguments, and calls that not all ranks make: a status with a reason, and contexts that are as good as
//! before. A bad address that reached a kernel or a copy would end all use of the GPU in its process.

use std::time::{Duration, Instant};

use cudarc::driver::sys;
use unisono::collective::request::{Counts, Kind, Request};
use unisono::communicator::{Call, Context};
use unisono::cuda::memory::{DeviceBuffer, PinnedBuffer};
use unisono::cuda::stream::Stream;
use unisono::error::{Error, Status};
use unisono::reduce::{DataType, Operator};

use super::cuda::{calls, devices, filled, ok, read, stream};
use super::support::processes::{Job, Seat, report};
use super::support::within;

/// Elements of a call, and its bytes.
const COUNT: u64 = 100_000;
const BYTES: usize = 400_000;

/// Device memory that is mapped in pieces, one after the other, as PyTorch's expandable segments are. Lives
/// as long as the process.
fn mapped(device: u32, pieces: usize) -> (u64, usize) {
    let devices = devices();
    let _entered = devices.enter(device).expect("a context");
    // SAFETY: plain data, for which zeros are valid.
    let mut properties: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = device as i32;
    let access = sys::CUmemAccessDesc {
        location: properties.location,
        flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    let (mut unit, mut address) = (0, 0);
    let call = calls();
    // SAFETY: each call fills what it is given.
    unsafe {
        let granularity = (call.cuMemGetAllocationGranularity)(&raw mut unit, &raw const properties, 0);
        ok("cuMemGetAllocationGranularity", granularity);
        // More addresses than memory.
        let reserved = (call.cuMemAddressReserve)(&raw mut address, 2 * pieces * unit, 0, 0, 0);
        ok("cuMemAddressReserve", reserved);
        for piece in 0..pieces {
            let (mut handle, at) = (0, address + (piece * unit) as u64);
            ok("cuMemCreate", (call.cuMemCreate)(&raw mut handle, unit, &raw const properties, 0));
            ok("cuMemMap", (call.cuMemMap)(at, unit, 0, handle, 0));
        }
        let set = (call.cuMemSetAccess)(address, pieces * unit, &raw const access, 1);
        ok("cuMemSetAccess", set);
    }
    (address, pieces * unit)
}

struct Rank {
    context: Context,
    device: u32,
    stream: Stream,
    way: &'static str,
}

impl Rank {
    fn new(seat: &Seat, way: &'static str) -> Rank {
        let context = Context::create(seat.options(way)).expect("the ranks meet");
        let device = seat.rank % devices().count();
        Rank { context, device, stream: stream(device), way }
    }

    fn on_stream(&self) -> Call {
        Call { stream: Some(self.stream.handle()), ..within(20_000) }
    }

    fn request(input: u64, output: u64, count: u64) -> Request {
        Request {
            kind: Kind::Allreduce,
            input: std::ptr::with_exposed_provenance(input as usize),
            output: std::ptr::with_exposed_provenance_mut(output as usize),
            counts: Counts::Uniform(count),
            dtype: DataType::F32,
            operator: Operator::Sum,
            root: 0,
        }
    }

    fn sum(&self, input: u64, output: u64, count: u64, call: &Call) -> Result<(), Error> {
        // SAFETY: what is not there is refused, which is what is tested; the rest outlives the call.
        unsafe { self.context.run(&Rank::request(input, output, count), call) }.map(drop)
    }

    fn ones(&self) -> DeviceBuffer {
        filled(self.device, &1.0f32.to_ne_bytes().repeat(COUNT as usize))
    }

    /// A call that is refused with this text, after which the GPU is well.
    fn refused(&self, what: &str, input: u64, output: u64, call: &Call, text: &str) {
        match self.sum(input, output, COUNT, call) {
            Ok(()) => panic!("{}: {what} is taken", self.way),
            Err(error) => {
                assert_eq!(error.status(), Status::InvalidArgument, "{}: {what}: {error}", self.way);
                assert!(error.text().contains(text), "{}: {what}: {error}", self.way);
            }
        }
    }

    /// A call of every rank, and copies of this one's own.
    fn goes_on(&self, what: &str) {
        let (input, output) = (self.ones(), self.ones());
        self.sum(input.address(), output.address(), COUNT, &self.on_stream())
            .unwrap_or_else(|error| panic!("{}: after {what}: {error}", self.way));
        let found = read(&self.stream, output.address(), BYTES);
        let due = self.context.size() as f32;
        assert!(found == due.to_ne_bytes().repeat(COUNT as usize), "{}: after {what}", self.way);
    }
}

fn bad_arguments(rank: &Rank) {
    let devices = devices();
    let (here, short, plain, on_stream) = (rank.ones(), rank.ones(), within(20_000), rank.on_stream());
    let here = here.address();
    let freed = {
        let large = DeviceBuffer::new(&devices, rank.device, 64 << 20).expect("device memory");
        large.address()
    };
    let exchanges = rank.way == "exchange";
    for call in [&plain, &on_stream] {
        rank.refused("a freed pointer", freed, here, call, "sendbuf (");
        rank.refused("a freed output", here, freed, call, "recvbuf (");
        rank.refused("no address", here, 16, call, "recvbuf (0x10) is neither memory that CUDA knows");
        let text = "sendbuf has 399992 bytes left in its allocation";
        rank.refused("a short allocation", short.address() + 8, here, call, text);
        if exchanges {
            let host = vec![0u8; BYTES];
            let host = host.as_ptr().expose_provenance() as u64;
            rank.refused("a host pointer", host, here, call, "is host memory that is not pinned");
            rank.refused("a host output", here, host, call, "is host memory that is not pinned");
        }
    }
    rank.goes_on("bad pointers");
    let (pieces, bytes) = mapped(rank.device, 3);
    let count = (bytes / 4) as u64;
    rank.sum(pieces, pieces, count, &plain).expect("memory that is mapped in pieces");
    rank.sum(pieces + 4, pieces + 4, count - 1, &on_stream).expect("memory that is mapped in pieces");
    let error = rank.sum(pieces + 4, pieces + 4, count, &plain).expect_err("beyond the last piece");
    assert_eq!(error.status(), Status::InvalidArgument, "{error}");
    rank.goes_on("mapped memory");
    let pinned = PinnedBuffer::new(&devices, rank.device, BYTES).expect("pinned memory");
    rank.sum(here, pinned.address().expose_provenance() as u64, COUNT, &on_stream).expect("pinned memory");
    rank.sum(pinned.address().expose_provenance() as u64, here, COUNT, &plain).expect("pinned memory");
    if devices.count() > 1 {
        let other = (rank.device + 1) % devices.count();
        let there = filled(other, &vec![0; BYTES]);
        let elsewhere = stream(other);
        let elsewhere = Call { stream: Some(elsewhere.handle()), ..plain.clone() };
        rank.refused(
            "another GPU's memory",
            here,
            there.address(),
            &plain,
            "buffers of a call share a device",
        );
        rank.refused("another GPU's stream", here, here, &elsewhere, "call->stream is a stream of GPU");
        if exchanges {
            let there = there.address();
            rank.refused("all on another GPU", there, there, &plain, "give each GPU a rank of its own");
        }
        rank.goes_on("another GPU's memory");
    }
}

pub(crate) fn scenario_arguments(seat: &Seat) {
    let staged = std::env::var("UNISONO_P2P").is_ok();
    let rank = Rank::new(seat, if staged { "staged" } else { "exchange" });
    // Before the ranks agree, and after.
    let (here, plain) = (rank.ones(), within(20_000));
    rank.refused(
        "no address",
        16,
        here.address(),
        &plain,
        "sendbuf (0x10) is neither memory that CUDA knows",
    );
    rank.goes_on("the first call");
    bad_arguments(&rank);
    report(format_args!("well, {:?}", rank.context.device_way()));
}

#[test]
fn trouble_with_arguments_leaves_the_gpus_well() {
    for more in [&[][..], &[("UNISONO_P2P", "0")]] {
        let mut job = Job::start_with("trouble arguments", 2, "shm", more);
        for well in job.await_all(&[0, 1], "well") {
            println!("rank {} {more:?}: {}", well.rank, well.line);
        }
        job.all_end_well(&[0, 1]);
    }
}

/// A first call on device memory that rank 1 does not make: it works on host memory, or waits.
fn first_call(seat: &Seat, calls: bool) {
    let rank = Rank::new(seat, "exchange");
    let memory = rank.ones();
    let start = Instant::now();
    let error = match seat.rank {
        0 => rank.sum(memory.address(), memory.address(), COUNT, &within(1500)).expect_err("rank 1 differs"),
        _ if calls => {
            let mut host = vec![1.0f32; COUNT as usize];
            let host = host.as_mut_ptr().expose_provenance() as u64;
            rank.sum(host, host, COUNT, &within(20_000)).expect_err("rank 0 differs")
        }
        _ => loop {
            assert!(start.elapsed() < Duration::from_secs(20), "the news does not come");
            match rank.context.failure() {
                Some(error) => break error,
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        },
    };
    report(format_args!("error {:?} after {:.1?}: {error}", error.status(), start.elapsed()));
    drop(rank);
    let rank = Rank::new(seat, "after");
    rank.goes_on("a failed group");
    report("well");
}

pub(crate) fn scenario_host(seat: &Seat) {
    first_call(seat, true);
}

pub(crate) fn scenario_absent(seat: &Seat) {
    first_call(seat, false);
}

#[test]
fn trouble_with_a_first_call_that_one_rank_makes_on_host_memory() {
    let mut job = Job::start("trouble host", 2, "shm");
    for error in job.await_all(&[0, 1], "error") {
        println!("{}", error.line);
        for part in ["Mismatch", "rank 0 called allreduce(", "on device memory", "rank 1 called allreduce("] {
            assert!(error.line.contains(part), "{}", error.line);
        }
    }
    job.await_all(&[0, 1], "well");
    job.all_end_well(&[0, 1]);
}

#[test]
fn trouble_with_a_first_call_that_one_rank_does_not_make() {
    let mut job = Job::start("trouble absent", 2, "shm");
    for error in job.await_all(&[0, 1], "error") {
        println!("{}", error.line);
        for part in ["Timeout", "nothing from rank 1 (", "it has called nothing yet"] {
            assert!(error.line.contains(part), "{}", error.line);
        }
    }
    job.await_all(&[0, 1], "well");
    job.all_end_well(&[0, 1]);
}
