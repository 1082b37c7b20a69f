//! `links`: what copies and the network allow, measured without the library: what its operations are held
//! against.
//!
//! Rank 0 measures the copies of all GPUs, the others waiting; then all ranks measure what is between them,
//! each sending to the next at the same time: over TCP, and reading the next one's memory by the kernel.

use std::sync::Arc;
use std::thread;
use std::time::Instant;

use serde_json::{Value, json};

use super::copies::Course;
use super::measure::{Sample, bandwidth};
use super::options::{Options, Transport};
use super::output::say;
use super::report;
use super::ring::{Memory, Ring};
use super::seat::{Seat, barrier, combine, gather};
use crate::communicator::Context;
use crate::cuda::context::Devices;
use crate::cuda::event::Event;
use crate::cuda::memory::{DeviceBuffer, PinnedBuffer};
use crate::cuda::stream::Stream;
use crate::error::{Error, Result};
use crate::reduce::Operator;
use crate::sys::memory::read_process;

/// Bytes of a copy unless told.
const SIZES: [u64; 3] = [1 << 20, 16 << 20, 64 << 20];
/// Messages that are timed together.
const MESSAGES: u64 = 8;

/// Measures everything that there is: without a driver or a device only what is between ranks.
pub(super) fn measure(options: &Options, seat: Option<&Seat>) -> Result<bool> {
    let control = seat.map(|seat| seat.meet(options, Transport::Automatic, "links")).transpose()?;
    let leads = seat.is_none_or(|seat| seat.rank == 0);
    let mut table = Table { printed: leads, results: Vec::new() };
    let sizes = options.listed_sizes().unwrap_or(&SIZES);
    // Only ranks have something to measure without devices.
    let devices = Devices::open();
    if let (Err(error), None) = (&devices, &control) {
        return Err(error.clone());
    }
    if leads {
        say!("# GB/s in one direction of each GPU or rank, all of the line working at once");
        say!("{:<18} {:>6} {:>11} {:>10} {:>10} {:>8}", "what", "of", "size", "p50", "min", "GB/s");
        match devices {
            Ok(devices) if devices.count() > 0 => copies(options, &devices, sizes, &mut table)?,
            Ok(_) => say!("# no copies: the CUDA driver is there, but it has no device"),
            Err(error) => say!("# no copies: {error}"),
        }
    }
    if let Some((context, seat)) = control.as_ref().zip(seat) {
        barrier(context, Some(options.timeout.saturating_mul(2)))?;
        for &bytes in sizes {
            between_ranks(options, context, seat, bytes as usize, &mut table)?;
        }
    }
    if leads {
        report::write(options, &json!({ "task": "links", "results": table.results }))?;
    }
    Ok(true)
}

struct Table {
    printed: bool,
    results: Vec<Value>,
}

impl Table {
    /// A line: `count` GPUs or ranks did `what`, each with `bytes` one way.
    fn add(&mut self, what: &str, count: usize, bytes: u64, sample: &Sample) {
        let speed = bandwidth(bytes, sample.p50);
        if self.printed {
            say!("{what:<18} {count:>6} {bytes:>11} {:>10.2} {:>10.2} {speed:>8.2}", sample.p50, sample.min);
        }
        self.results.push(json!({
            "what": what,
            "of": count,
            "bytes": bytes,
            "p50_us": sample.p50,
            "min_us": sample.min,
            "gb_s": speed,
        }));
    }
}

/// A GPU with what is copied from and to.
struct Gpu {
    device: u32,
    memory: DeviceBuffer,
    other: DeviceBuffer,
    pinned: PinnedBuffer,
    other_pinned: PinnedBuffer,
}

fn copies(options: &Options, devices: &Arc<Devices>, sizes: &[u64], table: &mut Table) -> Result<()> {
    let most = options.pointers.map_or(u32::MAX, |pointers| u32::from(pointers.get()));
    let count = devices.count().min(most);
    for &bytes in sizes {
        let len = bytes as usize;
        let gpu = |device| -> Result<Gpu> {
            Ok(Gpu {
                device,
                memory: DeviceBuffer::new(devices, device, len)?,
                other: DeviceBuffer::new(devices, device, len)?,
                pinned: PinnedBuffer::new(devices, device, len)?,
                other_pinned: PinnedBuffer::new(devices, device, len)?,
            })
        };
        let gpus: Vec<Gpu> = (0..count).map(gpu).collect::<Result<_>>()?;
        // SAFETY: the buffers have `len` bytes and outlive the course, which waits for what it has
        // enqueued; nobody looks at what they hold.
        let out = |stream: &Stream, gpu: &Gpu| unsafe {
            stream.copy_to_host(gpu.pinned.address(), gpu.memory.address(), len)
        };
        // SAFETY: as above.
        let back = |stream: &Stream, gpu: &Gpu| unsafe {
            stream.copy_to_device(gpu.other.address(), gpu.other_pinned.address(), len)
        };
        // SAFETY: as above.
        let within = |stream: &Stream, gpu: &Gpu| unsafe {
            stream.copy_to_peer(gpu.other.address(), gpu.device, gpu.memory.address(), len)
        };
        let groups = if count > 1 { vec![1, count as usize] } else { vec![1] };
        for &n in &groups {
            let some = &gpus[..n];
            let on: Vec<u32> = some.iter().map(|gpu| gpu.device).collect();
            let (single, double) =
                (Course::new(devices, &on)?, Course::new(devices, &[&on[..], &on[..]].concat())?);
            let each = |copy: &dyn Fn(&Stream, &Gpu) -> Result<()>, streams: &[Stream]| {
                streams.iter().zip(some).try_for_each(|(stream, gpu)| copy(stream, gpu))
            };
            let sample = single.time(options, &mut |streams| each(&out, streams))?;
            table.add("device-to-pinned", n, bytes, &sample);
            let sample = single.time(options, &mut |streams| each(&back, streams))?;
            table.add("pinned-to-device", n, bytes, &sample);
            let sample = double.time(options, &mut |streams| {
                each(&out, &streams[..n])?;
                each(&back, &streams[n..])
            })?;
            table.add("both-at-once", n, bytes, &sample);
            let sample = single.time(options, &mut |streams| each(&within, streams))?;
            table.add("within-a-device", n, bytes, &sample);
        }
        through_pinned(options, devices, &gpus, bytes, table)?;
        peers(options, devices, &gpus, bytes, table)?;
    }
    Ok(())
}

/// How many pieces of pinned memory are in turn, and how long they are at most and at least.
const PLACES: usize = 4;
const MOST: usize = 4 << 20;
const LEAST: usize = 512 << 10;

/// Copies from one device to another by way of pinned memory, piece by piece: what a broadcast through the
/// host comes down to.
fn through_pinned(
    options: &Options,
    devices: &Arc<Devices>,
    gpus: &[Gpu],
    bytes: u64,
    table: &mut Table,
) -> Result<()> {
    let [from, to, ..] = gpus else { return Ok(()) };
    let course = Course::new(devices, &[from.device, to.device])?;
    let events = |device| (0..PLACES).map(|_| Event::new(devices, device)).collect::<Result<Vec<_>>>();
    let (filled, emptied) = (events(from.device)?, events(to.device)?);
    let len = bytes as usize;
    let piece = (len / PLACES).clamp(LEAST, MOST);
    let sample = course.time(options, &mut |streams| {
        for (index, offset) in (0..len).step_by(piece).enumerate() {
            let (place, part) = (index % PLACES, piece.min(len - offset));
            let pinned = from.pinned.address().wrapping_add(place * piece);
            streams[0].wait(&emptied[place])?;
            // SAFETY: as in `copies`; a piece lies within them all.
            unsafe { streams[0].copy_to_host(pinned, from.memory.address() + offset as u64, part) }?;
            filled[place].record(&streams[0])?;
            streams[1].wait(&filled[place])?;
            // SAFETY: as above.
            unsafe { streams[1].copy_to_device(to.other.address() + offset as u64, pinned, part) }?;
            emptied[place].record(&streams[1])?;
        }
        Ok(())
    })?;
    table.add("through-pinned", 1, bytes, &sample);
    Ok(())
}

/// Copies between devices.
fn peers(
    options: &Options,
    devices: &Arc<Devices>,
    gpus: &[Gpu],
    bytes: u64,
    table: &mut Table,
) -> Result<()> {
    let n = gpus.len();
    let mut reached = n > 1;
    for gpu in gpus {
        for peer in gpus {
            reached &= devices.reaches(gpu.device, peer.device)?;
        }
    }
    if !reached {
        return Ok(());
    }
    let on: Vec<u32> = gpus.iter().map(|gpu| gpu.device).collect();
    let course = Course::new(devices, &on)?;
    // SAFETY: as in `copies`.
    let push = |stream: &Stream, from: usize, to: usize, part: (usize, usize)| unsafe {
        let (from, to) = (&gpus[from], &gpus[to]);
        let (offset, len) = part;
        stream.copy_to_peer(
            to.other.address() + offset as u64,
            to.device,
            from.memory.address() + offset as u64,
            len,
        )
    };
    let whole = (0, bytes as usize);
    let sample = course.time(options, &mut |streams| push(&streams[0], 0, 1, whole))?;
    table.add("peer-one-pair", 1, bytes, &sample);
    let sample = course.time(options, &mut |streams| {
        push(&streams[0], 0, 1, whole)?;
        push(&streams[1], 1, 0, whole)
    })?;
    table.add("peer-both-ways", 2, bytes, &sample);
    let sample = course.time(options, &mut |streams| {
        (0..n).try_for_each(|gpu| push(&streams[gpu], gpu, (gpu + 1) % n, whole))
    })?;
    table.add("peer-ring", n, bytes, &sample);
    if n > 2 {
        // Each sends a share to each of the others, in turn.
        let share = bytes as usize / (n - 1);
        let sample = course.time(options, &mut |streams| {
            (1..n).try_for_each(|step| {
                (0..n).try_for_each(|gpu| {
                    push(&streams[gpu], gpu, (gpu + step) % n, ((step - 1) * share, share))
                })
            })
        })?;
        table.add("peer-all-to-all", n, (share * (n - 1)) as u64, &sample);
    }
    Ok(())
}

/// What is between the ranks: each sends to the next, and receives from the one before.
fn between_ranks(
    options: &Options,
    context: &Context,
    seat: &Seat,
    bytes: usize,
    table: &mut Table,
) -> Result<()> {
    if seat.size < 2 {
        return Ok(());
    }
    let next = (seat.rank + 1) % seat.size;
    let hosts = gather(context, seat, host_number())?;
    for (what, memory) in [("ranks-tcp-ring", Memory::Cached), ("ranks-tcp-memory", Memory::Messages(bytes))]
    {
        let sample = thread::scope(|scope| {
            let mut ring = Ring::open(scope, context, seat, &hosts, memory, options.timeout)?;
            timed(options, context, |messages| ring.pass(bytes * messages as usize))
        })?;
        table.add(what, seat.size as usize, bytes as u64, &sample);
    }

    let source = vec![1u8; bytes];
    let mut target = vec![0u8; bytes];
    let addresses = gather(context, seat, source.as_ptr().addr() as u64)?;
    let pids = gather(context, seat, u64::from(std::process::id()))?;
    let (pid, address) = (pids[next as usize] as u32, addresses[next as usize]);
    // Ranks on several hosts find a stranger or nobody under that number, and the kernel refuses.
    let mut refused = [u64::from(
        hosts[next as usize] != host_number() || read_process(pid, address, &mut target).is_err(),
    )];
    combine(context, Operator::Max, &mut refused)?;
    if refused[0] == 0 {
        let sample = timed(options, context, |messages| {
            (0..messages)
                .try_for_each(|_| read_process(pid, address, &mut target))
                .map_err(|cause| Error::system("cannot read the next rank's memory", cause))
        })?;
        table.add("ranks-read-next", seat.size as usize, bytes as u64, &sample);
    }
    let sample = timed(options, context, |messages| {
        for _ in 0..messages {
            target.copy_from_slice(&source);
            std::hint::black_box(&mut target);
        }
        Ok(())
    })?;
    table.add("ranks-copy-own", seat.size as usize, bytes as u64, &sample);
    // Others may still be reading from here.
    barrier(context, None)
}

/// Times `run` with [`MESSAGES`] messages, on all ranks together, again and again.
fn timed(options: &Options, context: &Context, mut run: impl FnMut(u64) -> Result<()>) -> Result<Sample> {
    run(1)?;
    let (mut times, mut spent) = (Vec::new(), 0);
    while times.len() < 3 || (u128::from(spent) < options.budget.as_nanos() && times.len() < 200) {
        barrier(context, None)?;
        let start = Instant::now();
        run(MESSAGES)?;
        let mut time = [start.elapsed().as_nanos() as u64];
        combine(context, Operator::Max, &mut time)?;
        spent += time[0];
        times.push(time[0]);
    }
    Ok(Sample::of(times, MESSAGES))
}

/// Tells hosts apart.
fn host_number() -> u64 {
    let id = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}
