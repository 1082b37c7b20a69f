//! How fast the operations among the pointers of one process are, beside what the links do. Measurements, not tests: they
//! run when asked for by name, as `scripts/gpu-test` does.

use cudarc::driver::sys;
use unisono::cuda::driver::StreamHandle;
use unisono::cuda::event::Event;
use unisono::cuda::fold::FoldKernels;
use unisono::cuda::local::{
    BroadcastAlgorithm, LocalBroadcast, LocalReduce, Pointers, ReduceAlgorithm, Span,
};
use unisono::cuda::memory::DeviceBuffer;
use unisono::cuda::stream::Stream;
use unisono::reduce::{DataType, Operator};

use super::cuda::{calls, devices, ok, raw, soon, stream};

/// An event that knows when it happened.
struct Moment(sys::CUevent);

impl Moment {
    fn record(&self, stream: &Stream) {
        let devices = devices();
        let _entered = devices.enter(stream.device()).expect("a context");
        // SAFETY: both live.
        ok("cuEventRecord", unsafe { (calls().cuEventRecord)(self.0, raw(stream.handle().0)) });
    }

    fn new(device: u32) -> Moment {
        let devices = devices();
        let _entered = devices.enter(device).expect("a context");
        let mut event = std::ptr::null_mut();
        // SAFETY: fills `event`.
        ok("cuEventCreate", unsafe { (calls().cuEventCreate)(&raw mut event, 0) });
        Moment(event)
    }

    fn seconds_since(&self, start: &Moment) -> f64 {
        let mut milliseconds = 0f32;
        // SAFETY: both live and recorded.
        unsafe {
            ok("cuEventSynchronize", (calls().cuEventSynchronize)(self.0));
            ok("cuEventElapsedTime", (calls().cuEventElapsedTime)(&raw mut milliseconds, start.0, self.0));
        }
        f64::from(milliseconds) / 1e3
    }
}

impl Drop for Moment {
    fn drop(&mut self) {
        // SAFETY: ours.
        unsafe { (calls().cuEventDestroy_v2)(self.0) };
    }
}

/// The median of several times that `rounds` runs take, for one run. All `streams` begin after the first and are waited
/// for by it.
fn seconds(streams: &[Stream], rounds: u32, mut run: impl FnMut()) -> f64 {
    let first = &streams[0];
    let (start, end) = (Moment::new(first.device()), Moment::new(first.device()));
    let fork = Event::new(&devices(), first.device()).expect("an event");
    let joins: Vec<Event> =
        streams.iter().map(|stream| Event::new(&devices(), stream.device()).expect("an event")).collect();
    let mut times: Vec<f64> = (0..7)
        .map(|_| {
            start.record(first);
            fork.record(first).expect("a record");
            streams.iter().for_each(|stream| stream.wait(&fork).expect("a wait"));
            (0..rounds).for_each(|_| run());
            for (stream, join) in streams.iter().zip(&joins) {
                join.record(stream).expect("a record");
                first.wait(join).expect("a wait");
            }
            end.record(first);
            first.synchronize(soon()).expect("it ends");
            end.seconds_since(&start) / f64::from(rounds)
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

struct Scene {
    memory: Vec<DeviceBuffer>,
    streams: Vec<Stream>,
    bytes: usize,
}

impl Scene {
    fn new(n: usize, bytes: usize) -> Scene {
        let count = devices().count() as usize;
        let device = |index: usize| (index % count) as u32;
        let memory = |index| DeviceBuffer::new(&devices(), device(index), bytes).expect("memory");
        let memory: Vec<DeviceBuffer> = (0..n).map(memory).collect();
        // Not zeros: those are faster than real data.
        let noise = super::cuda::Noise(3).bytes(bytes);
        memory.iter().for_each(|buffer| super::cuda::write(buffer.device(), buffer.address(), &noise));
        Scene { memory, streams: (0..n).map(|index| stream(device(index))).collect(), bytes }
    }

    fn pointers(&self) -> Pointers {
        let span = |buffer: &DeviceBuffer| Span { address: buffer.address(), bytes: self.bytes };
        let spans: Vec<Span> = self.memory.iter().map(span).collect();
        let streams: Vec<StreamHandle> = self.streams.iter().map(Stream::handle).collect();
        // SAFETY: the scene outlives what is prepared from it.
        unsafe { Pointers::new(&devices(), &spans, &streams) }.expect("good pointers")
    }
}

#[test]
#[ignore = "measures and asserts nothing: scripts/gpu/run.sh runs it by name"]
fn local_operations() {
    let count = devices().count() as usize;
    let mut pointer_counts = vec![2, 4, 8];
    pointer_counts.retain(|&n| n >= count);
    for bytes in [64 << 10, 1 << 20, 16 << 20, 256 << 20] {
        let rounds = if bytes < 1 << 24 { 50 } else { 10 };
        // What one link does: the copy engine, one way, from the first GPU to the last.
        let pair = Scene::new(count.max(2), bytes);
        devices().reaches(0, count as u32 - 1).expect("an answer");
        let (from, to) = (&pair.memory[0], &pair.memory[count.max(2) - 1]);
        let link = seconds(&pair.streams[..1], rounds, || {
            let (source, target) = (from.address(), to.address());
            // SAFETY: both have so many bytes and outlive the stream's work.
            unsafe { pair.streams[0].copy_to_peer(target, to.device(), source, bytes) }.expect("a copy");
        });
        let rate = |time: f64| bytes as f64 / time / 1e9;
        let link_rate = rate(link);
        let kind = if count > 1 { "link" } else { "on one device" };
        println!("@ {bytes} bytes, {count} GPUs: copy, {kind}: {:.1} us, {link_rate:.1} GB/s", link * 1e6);
        drop(pair);
        let report = |what: String, time: f64| {
            let share = 100.0 * rate(time) / link_rate;
            println!(
                "@ {bytes} bytes, {what}: {:.1} us, {:.1} GB/s, {share:.0} % of the copy",
                time * 1e6,
                rate(time)
            );
        };
        for &n in &pointer_counts {
            let scene = Scene::new(n, bytes);
            for algorithm in [BroadcastAlgorithm::Tree, BroadcastAlgorithm::chain(&scene.pointers())] {
                let mut broadcast = LocalBroadcast::new(scene.pointers(), 0, algorithm).expect("a broadcast");
                let time = seconds(&scene.streams, rounds, || broadcast.run().expect("a run"));
                report(format!("broadcast over {n}, {algorithm:?}"), time);
            }
            if bytes == 256 << 20 {
                for chunk in [8 << 20, 16 << 20] {
                    let algorithm = BroadcastAlgorithm::Chain { chunk };
                    let mut broadcast =
                        LocalBroadcast::new(scene.pointers(), 0, algorithm).expect("a broadcast");
                    let time = seconds(&scene.streams, rounds, || broadcast.run().expect("a run"));
                    report(format!("broadcast over {n}, {algorithm:?}"), time);
                }
            }
            if bytes >= 16 << 20 {
                for blocks in [24, 48, 96, 132, 396] {
                    let (sum, kernels) = (Operator::Sum, FoldKernels::with_blocks(blocks));
                    let direct = ReduceAlgorithm::Direct;
                    let mut reduce =
                        LocalReduce::new(scene.pointers(), 0, DataType::F32, sum, direct, kernels)
                            .expect("a reduction");
                    let time = seconds(&scene.streams, rounds, || reduce.run().expect("a run"));
                    report(format!("reduce of float32 over {n}, Direct, {blocks} blocks"), time);
                }
            }
            for algorithm in [ReduceAlgorithm::Tree, ReduceAlgorithm::Direct] {
                for dtype in [DataType::F32, DataType::Bf16] {
                    let sum = Operator::Sum;
                    let kernels = FoldKernels::open();
                    let mut reduce = LocalReduce::new(scene.pointers(), 0, dtype, sum, algorithm, kernels)
                        .expect("a reduction");
                    let time = seconds(&scene.streams, rounds, || reduce.run().expect("a run"));
                    report(format!("reduce of {} over {n}, {algorithm:?}", dtype.name()), time);
                }
            }
        }
    }
}
