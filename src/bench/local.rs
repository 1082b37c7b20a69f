//! `local-broadcast` and `local-reduce`: across several device pointers of this process, beside what one link
//! does.

use std::sync::Arc;

use serde_json::json;

use super::copies::Course;
use super::measure::{Sample, bandwidth};
use super::options::{Options, Task};
use super::output::say;
use super::report;
use crate::cuda::context::Devices;
use crate::cuda::driver::StreamHandle;
use crate::cuda::fold::FoldKernels;
use crate::cuda::local::{BroadcastAlgorithm, LocalBroadcast, LocalReduce, Pointers, ReduceAlgorithm, Span};
use crate::cuda::memory::DeviceBuffer;
use crate::cuda::stream::Stream;
use crate::error::{Result, fail};

/// Bytes of a pointer unless told.
const SIZES: [u64; 4] = [64 << 10, 1 << 20, 16 << 20, 256 << 20];

/// Measures one of the two over the sizes, algorithms, types and operators of the options.
pub(super) fn measure(options: &Options, task: Task) -> Result<bool> {
    let devices = Devices::open()?;
    if devices.count() == 0 {
        fail!(Cuda, "the CUDA driver is there, but it has no device");
    }
    let pointers = options.pointers.map_or(devices.count(), |pointers| u32::from(pointers.get()));
    let gpus = devices.count().min(pointers);
    say!(
        "# {} across {pointers} pointers on {gpus} GPUs of one process; link: one peer copy of the same size",
        task.name(),
    );
    say!(
        "{:<16} {:>11} {:<8} {:<10} {:<9} {:<8} {:>10} {:>10} {:>8} {:>10} {:>9}",
        "operation",
        "size",
        "placed",
        "type",
        "operator",
        "algorithm",
        "p50",
        "p99",
        "GB/s",
        "link_GB/s",
        "of_link"
    );
    // Where pointers share GPUs it matters which: neighbours, or not.
    let in_turn = ("in turn", (0..pointers).map(|pointer| pointer % gpus).collect::<Vec<u32>>());
    let in_blocks = ("blocks", (0..pointers).map(|pointer| pointer * gpus / pointers).collect());
    let placements = if in_turn.1 == in_blocks.1 { vec![in_turn] } else { vec![in_turn, in_blocks] };
    let mut results = Vec::new();
    let sizes = options.listed_sizes().unwrap_or(&SIZES);
    for (bytes, (placed, on)) in sizes.iter().flat_map(|&bytes| placements.iter().map(move |p| (bytes, p))) {
        let scene = Scene::new(&devices, on, bytes as usize)?;
        let link = scene.link(options)?;
        for (names, mut run) in scene.runs(options, task)? {
            let sample = scene.course.time(options, &mut *run)?;
            let rate = |sample: &Sample| bandwidth(bytes, sample.p50);
            let (speed, of_link) = (rate(&sample), rate(&sample) / rate(&link));
            let [dtype, operator, algorithm] = names;
            say!(
                "{:<16} {bytes:>11} {placed:<8} {dtype:<10} {operator:<9} {algorithm:<8} {:>10.2} {:>10.2} {speed:>8.1} {:>10.1} {of_link:>8.0}%",
                task.name(),
                sample.p50,
                sample.p99,
                rate(&link),
                of_link = of_link * 100.0
            );
            results.push(json!({
                "bytes": bytes,
                "placed": placed,
                "type": dtype,
                "operator": operator,
                "algorithm": algorithm,
                "p50_us": sample.p50,
                "p99_us": sample.p99,
                "min_us": sample.min,
                "gb_s": speed,
                "link_gb_s": rate(&link),
                "of_link": of_link,
            }));
        }
    }
    let json = json!({ "task": task.name(), "pointers": pointers, "gpus": gpus, "results": results });
    report::write(options, &json)?;
    Ok(true)
}

/// What is called again and again, with the names of its type, operator and algorithm.
type Run<'a> = ([&'static str; 3], Box<dyn FnMut(&[Stream]) -> Result<()> + 'a>);

/// The pointers, each with a stream.
struct Scene {
    devices: Arc<Devices>,
    course: Course,
    memory: Vec<DeviceBuffer>,
    bytes: usize,
}

impl Scene {
    fn new(devices: &Arc<Devices>, on: &[u32], bytes: usize) -> Result<Scene> {
        let memory =
            on.iter().map(|&device| DeviceBuffer::new(devices, device, bytes)).collect::<Result<_>>()?;
        Ok(Scene { devices: devices.clone(), course: Course::new(devices, on)?, memory, bytes })
    }

    fn pointers(&self) -> Result<Pointers> {
        let spans: Vec<Span> =
            self.memory.iter().map(|buffer| Span { address: buffer.address(), bytes: self.bytes }).collect();
        let streams: Vec<StreamHandle> = self.course.streams.iter().map(Stream::handle).collect();
        // SAFETY: what is prepared from this is dropped before `self`, all streams being done.
        unsafe { Pointers::new(&self.devices, &spans, &streams) }
    }

    /// One copy from the first pointer's device to the last's; to another place of the same device if it has
    /// only one.
    fn link(&self, options: &Options) -> Result<Sample> {
        let (from, to) = (&self.memory[0], &self.memory[self.memory.len() - 1]);
        let target =
            if self.memory.len() > 1 { None } else { Some(DeviceBuffer::new(&self.devices, 0, self.bytes)?) };
        let to = target.as_ref().unwrap_or(to);
        self.devices.reaches(from.device(), to.device())?;
        // SAFETY: both have so many bytes; the course waits for what it has enqueued.
        let copy = |streams: &[Stream]| unsafe {
            streams[0].copy_to_peer(to.address(), to.device(), from.address(), self.bytes)
        };
        self.course.time(options, &mut { copy })
    }

    fn runs(&self, options: &Options, task: Task) -> Result<Vec<Run<'_>>> {
        let mut runs: Vec<Run<'_>> = Vec::new();
        if task == Task::LocalBroadcast {
            for (name, algorithm) in
                [("tree", BroadcastAlgorithm::Tree), ("chain", BroadcastAlgorithm::chain(&self.pointers()?))]
            {
                let mut broadcast = LocalBroadcast::new(self.pointers()?, 0, algorithm)?;
                runs.push((["-", "-", name], Box::new(move |_| broadcast.run())));
            }
            return Ok(runs);
        }
        for &dtype in &options.types {
            for &operator in &options.operators {
                for (name, algorithm) in
                    [("tree", ReduceAlgorithm::Tree), ("direct", ReduceAlgorithm::Direct)]
                {
                    let kernels = FoldKernels::open();
                    let reduce = LocalReduce::new(self.pointers()?, 0, dtype, operator, algorithm, kernels);
                    let mut reduce = match reduce {
                        Ok(reduce) => reduce,
                        Err(refusal) => {
                            say!("# {name}, {}: {refusal}", dtype.name());
                            continue;
                        }
                    };
                    let names = [dtype.name(), crate::reduce::Operator::name_of(operator.number()), name];
                    runs.push((names, Box::new(move |_| reduce.run())));
                }
            }
        }
        Ok(runs)
    }
}
