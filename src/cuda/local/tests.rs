use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::cuda::double::{Double, DoubleKernels, Order};
use crate::deadline::Deadline;
use crate::reduce::{self, Reducer};

/// Long enough for every device to have a share of a direct reduction.
const BYTES: usize = 1280;

/// Pointers of a test: the device of each, and the number of its stream.
struct Scene {
    double: Arc<Double>,
    devices: Arc<Devices>,
    layout: Vec<(u32, usize)>,
    spans: Vec<Span>,
    streams: Vec<StreamHandle>,
    /// Whether streams meet in pairs, as they do for long vectors.
    pairs: bool,
}

impl Scene {
    fn new(layout: &[(u32, usize)], order: Order) -> Scene {
        let device_count = layout.iter().map(|(device, _)| device + 1).max().unwrap();
        let double = Double::new(device_count, order);
        let devices = Devices::over(double.clone()).unwrap();
        let stream_count = layout.iter().map(|(_, stream)| stream + 1).max().unwrap();
        let of_stream = |stream| layout.iter().find(|(_, s)| *s == stream).unwrap().0;
        let created: Vec<_> = (0..stream_count).map(|stream| double.stream(of_stream(stream))).collect();
        let span = |&(device, _): &(u32, usize)| Span { address: double.memory(device, BYTES), bytes: BYTES };
        let spans = layout.iter().map(span).collect();
        let streams = layout.iter().map(|(_, stream)| created[*stream]).collect();
        Scene { double, devices, layout: layout.into(), spans, streams, pairs: false }
    }

    /// One device and one stream for each of `n` pointers.
    fn spread(n: usize, order: Order) -> Scene {
        Scene::new(&spread(n), order)
    }

    /// Devices whose numbers differ in the lowest bit do not reach each other.
    fn separated(self) -> Scene {
        for (a, b) in (0..self.devices.count()).flat_map(|a| (0..a).map(move |b| (a, b))) {
            if (a ^ b) & 1 == 1 {
                self.double.separate(a, b);
            }
        }
        self
    }

    /// Devices that reach each other, but not the memory, which others have to be let into.
    fn closed(n: usize, order: Order) -> Scene {
        let mut scene = Scene::spread(n, order);
        for (device, span) in (0..).zip(&mut scene.spans) {
            span.address = scene.double.mapped(device, BYTES, 1);
        }
        scene
    }

    fn pointers(&self) -> Pointers {
        // SAFETY: the double trusts nothing, and keeps memory until it is dropped.
        let pointers = unsafe { Pointers::new(&self.devices, &self.spans, &self.streams) }.unwrap();
        let pairs_from = if self.pairs { 0 } else { usize::MAX };
        Pointers { piece: BYTES / 8, pairs_from, first_chunk: BYTES / 8, ..pointers }
    }

    fn fill(&self, index: usize, bytes: &[u8]) {
        let device = self.layout[index].0;
        self.double.fill(self.streams[index], device, self.spans[index].address, bytes);
    }

    fn expect(&self, index: usize, bytes: &[u8], what: &str) {
        let device = self.layout[index].0;
        let what = format!("pointer {index}: {what}");
        self.double.expect(self.streams[index], device, self.spans[index].address, bytes, &what);
    }
}

fn spread(n: usize) -> Vec<(u32, usize)> {
    (0..n).map(|index| (index as u32, index)).collect()
}

fn pattern(seed: usize) -> Vec<u8> {
    (0..BYTES).map(|index| (index * 7 + seed * 31 + 1) as u8).collect()
}

/// Two broadcasts, one after the other, with work before and after each on every stream. Without the
/// `missing`-th wait, if one is missing. Answers what went wrong, and how many waits a run has.
fn broadcast(
    scene: &Scene,
    root: usize,
    algorithm: BroadcastAlgorithm,
    missing: Option<usize>,
) -> (Vec<String>, usize) {
    let mut broadcast = LocalBroadcast::new(scene.pointers(), root, algorithm).unwrap();
    let mut waits = 0;
    for round in 0..2 {
        let payload = pattern(100 + round);
        for index in 0..scene.spans.len() {
            let old = pattern(index + 10 * round);
            scene.fill(index, &old);
            scene.expect(index, &old, "overwritten before its user was done");
        }
        scene.fill(root, &payload);
        if let Some(missing) = missing {
            scene.double.ignore_wait(missing);
        }
        let before = scene.double.waits();
        broadcast.run().unwrap();
        waits = scene.double.waits() - before;
        for index in 0..scene.spans.len() {
            scene.expect(index, &payload, "not there after the broadcast");
        }
    }
    assert_eq!(scene.double.synchronizations(), 0, "the host waited");
    scene.double.drain();
    (scene.double.complaints(), waits)
}

const CHAIN: BroadcastAlgorithm = BroadcastAlgorithm::Chain { chunk: BYTES / 4 };

#[test]
fn broadcasts_are_right_in_every_order() {
    for n in 1..=9 {
        for order in Order::all(n) {
            for algorithm in [BroadcastAlgorithm::Tree, CHAIN] {
                let root = (n * 2) / 3 % n;
                let (complaints, _) = broadcast(&Scene::spread(n, order), root, algorithm, None);
                assert!(complaints.is_empty(), "{n} pointers, {order:?}, {algorithm:?}: {complaints:?}");
                let scene = Scene::spread(n, order).separated();
                let (complaints, _) = broadcast(&scene, root, algorithm, None);
                assert!(complaints.is_empty(), "{n} separated, {order:?}, {algorithm:?}: {complaints:?}");
            }
        }
    }
}

#[test]
fn a_tree_is_as_deep_as_the_logarithm_and_has_two_waits_for_each_copy() {
    for n in 1..=9 {
        let (_, waits) = broadcast(&Scene::spread(n, Order::Eager), 0, BroadcastAlgorithm::Tree, None);
        assert_eq!(waits, 2 * (n - 1));
    }
}

/// Each wait of the program is shown to be needed: without it some order ends in a complaint.
fn every_wait_is_needed(
    streams: usize,
    what: &str,
    run: impl Fn(Order, Option<usize>) -> (Vec<String>, usize),
) {
    let (_, waits) = run(Order::Eager, None);
    for missing in 0..waits {
        let found = Order::all(streams).into_iter().any(|order| !run(order, Some(missing)).0.is_empty());
        assert!(found, "{what}: nothing goes wrong without wait {missing} of {waits}");
    }
}

#[test]
fn every_wait_of_the_tree_broadcast_is_needed() {
    for n in 2..=9 {
        for root in [0, n - 1] {
            every_wait_is_needed(n, &format!("{n} pointers from {root}"), |order, missing| {
                broadcast(&Scene::spread(n, order), root, BroadcastAlgorithm::Tree, missing)
            });
        }
    }
}

#[test]
fn every_wait_of_the_chain_is_needed() {
    for n in 2..=4 {
        every_wait_is_needed(n, &format!("{n} pointers"), |order, missing| {
            broadcast(&Scene::spread(n, order), 0, CHAIN, missing)
        });
    }
}

#[test]
fn every_wait_of_a_broadcast_through_the_host_is_needed() {
    every_wait_is_needed(2, "two devices", |order, missing| {
        broadcast(&Scene::spread(2, order).separated(), 0, BroadcastAlgorithm::Tree, missing)
    });
}

#[test]
fn pointers_may_share_devices_and_streams() {
    let layouts: [&[(u32, usize)]; 7] = [
        &[(0, 0), (0, 0), (0, 0)],
        &[(0, 0), (0, 1), (0, 2), (0, 1)],
        &[(0, 0), (1, 1), (0, 0), (1, 2), (1, 1)],
        &[(1, 0), (0, 1), (0, 1), (1, 0), (2, 2), (0, 3)],
        &[(0, 0), (0, 0), (1, 1), (1, 1)],
        &[(0, 0), (0, 1), (1, 2), (1, 2), (2, 3), (2, 3), (1, 2), (1, 2), (0, 1)],
        &[(1, 0), (1, 1), (1, 0), (1, 0), (0, 2), (0, 2), (0, 3), (0, 2), (0, 3), (0, 2)],
    ];
    for layout in layouts {
        for order in Order::all(4) {
            for algorithm in [BroadcastAlgorithm::Tree, CHAIN] {
                for separated in [false, true] {
                    let scene = Scene::new(layout, order);
                    let scene = if separated { scene.separated() } else { scene };
                    let (complaints, _) = broadcast(&scene, 1, algorithm, None);
                    assert!(complaints.is_empty(), "{layout:?}, {order:?}, {algorithm:?}: {complaints:?}");
                }
            }
            for (algorithm, pairs) in REDUCTIONS {
                let scene = Scene { pairs, ..Scene::new(layout, order) };
                let (complaints, _) = reduce(&scene, 2, DataType::F32, Operator::Sum, algorithm, None);
                assert!(complaints.is_empty(), "{layout:?}, {order:?}, {algorithm:?}: {complaints:?}");
            }
        }
    }
}

/// Bytes that are ordinary numbers of every type, and whose sums are rounded.
fn numbers(dtype: DataType, seed: usize) -> Vec<u8> {
    let value = |index: usize| ((index * 37 + seed * 101) % 97) as f32 / 7.0 + 0.1;
    (0..BYTES / dtype.size())
        .flat_map(|index| match dtype {
            DataType::F32 => value(index).to_ne_bytes().to_vec(),
            DataType::F16 => half::f16::from_f32(value(index)).to_ne_bytes().to_vec(),
            _ => vec![(value(index) * 5.0) as u8; dtype.size()],
        })
        .collect()
}

/// As [`broadcast`], for a reduction.
fn reduce(
    scene: &Scene,
    root: usize,
    dtype: DataType,
    operator: Operator,
    algorithm: ReduceAlgorithm,
    missing: Option<usize>,
) -> (Vec<String>, usize) {
    let n = scene.spans.len();
    let kernels = Arc::new(DoubleKernels(scene.double.clone()));
    let mut reduce = LocalReduce::new(scene.pointers(), root, dtype, operator, algorithm, kernels).unwrap();
    let mut waits = 0;
    for round in 0..2 {
        let inputs: Vec<Vec<u8>> = (0..n).map(|index| numbers(dtype, index + round * 50)).collect();
        for (index, input) in inputs.iter().enumerate() {
            scene.fill(index, &pattern(index));
            scene.fill(index, input);
        }
        if let Some(missing) = missing {
            scene.double.ignore_wait(missing);
        }
        let before = scene.double.waits();
        reduce.run().unwrap();
        waits = scene.double.waits() - before;
        let result = reference(dtype, operator, &inputs);
        for (index, input) in inputs.iter().enumerate() {
            let due = if index == root { &result } else { input };
            scene.expect(index, due, "wrong after the reduction");
        }
    }
    assert_eq!(scene.double.synchronizations(), 0, "the host waited");
    scene.double.drain();
    (scene.double.complaints(), waits)
}

/// As [`reduce`], followed by a broadcast of the result, which relies on the reduction before it.
fn allreduce(
    scene: &Scene,
    root: usize,
    algorithm: ReduceAlgorithm,
    missing: Option<usize>,
) -> (Vec<String>, usize) {
    let (n, dtype, sum) = (scene.spans.len(), DataType::F32, Operator::Sum);
    let kernels = Arc::new(DoubleKernels(scene.double.clone()));
    let pointers = || scene.pointers().chained();
    let mut reduce = LocalReduce::new(pointers(), root, dtype, sum, algorithm, kernels).unwrap();
    let mut broadcast = LocalBroadcast::new(pointers(), root, BroadcastAlgorithm::Tree).unwrap();
    let mut waits = 0;
    for round in 0..2 {
        let inputs: Vec<Vec<u8>> = (0..n).map(|index| numbers(dtype, index + round * 50)).collect();
        for (index, input) in inputs.iter().enumerate() {
            scene.fill(index, &pattern(index));
            scene.fill(index, input);
        }
        if let Some(missing) = missing {
            scene.double.ignore_wait(missing);
        }
        let before = scene.double.waits();
        reduce.run().unwrap();
        broadcast.run().unwrap();
        waits = scene.double.waits() - before;
        let result = reference(dtype, sum, &inputs);
        for index in 0..n {
            scene.expect(index, &result, "wrong after the allreduce");
        }
    }
    scene.double.drain();
    (scene.double.complaints(), waits)
}

/// Algorithms, and whether streams meet in pairs.
const REDUCTIONS: [(ReduceAlgorithm, bool); 3] =
    [(ReduceAlgorithm::Tree, false), (ReduceAlgorithm::Direct, false), (ReduceAlgorithm::Direct, true)];

fn reference(dtype: DataType, operator: Operator, inputs: &[Vec<u8>]) -> Vec<u8> {
    let scale = if let Operator::PreMulSum(scale) = operator { scale } else { 1.0 };
    let operand = |input: &Vec<u8>| reduce::Operand {
        address: input.as_ptr(),
        representation: Representation::Element,
        scale,
    };
    let operands: Vec<_> = inputs.iter().map(operand).collect();
    let mut out = vec![0; BYTES];
    let reducer = Reducer::new(dtype, operator, inputs.len() as u32).unwrap();
    let count = BYTES / dtype.size();
    // SAFETY: inputs and output have this many elements.
    unsafe { reducer.fold(&operands, out.as_mut_ptr(), Representation::Element, count) };
    out
}

#[test]
fn reductions_are_right_in_every_order() {
    for n in 1..=9 {
        for order in Order::all(n) {
            for root in [0, n - 1, n / 2] {
                for (algorithm, pairs) in REDUCTIONS {
                    let scene = Scene { pairs, ..Scene::spread(n, order) };
                    let (complaints, _) = reduce(&scene, root, DataType::F32, Operator::Sum, algorithm, None);
                    assert!(complaints.is_empty(), "{n} to {root}, {order:?}, {algorithm:?}: {complaints:?}");
                    if n <= 5 {
                        let complaints = allreduce(&scene, root, algorithm, None).0;
                        assert!(
                            complaints.is_empty(),
                            "{n} from {root}, {order:?}, {algorithm:?}: {complaints:?}"
                        );
                    }
                }
                let (scene, tree) = (Scene::spread(n, order).separated(), ReduceAlgorithm::Tree);
                let (complaints, _) = reduce(&scene, root, DataType::F16, Operator::Sum, tree, None);
                assert!(complaints.is_empty(), "{n} separated to {root}, {order:?}: {complaints:?}");
            }
        }
    }
}

#[test]
fn reductions_have_the_bits_of_the_host() {
    let operators = [Operator::Sum, Operator::Average, Operator::Max, Operator::PreMulSum(0.3)];
    for dtype in [DataType::F16, DataType::F32, DataType::I32, DataType::U8] {
        for operator in operators {
            for n in [1, 2, 3, 5, 8] {
                for algorithm in [ReduceAlgorithm::Tree, ReduceAlgorithm::Direct] {
                    let scene = Scene::spread(n, Order::Random(n as u64));
                    let (complaints, _) = reduce(&scene, 0, dtype, operator, algorithm, None);
                    assert!(complaints.is_empty(), "{dtype:?} {operator:?} over {n}: {complaints:?}");
                }
            }
        }
    }
}

/// Devices of pointers among which there are subtrees of one device.
const BLOCKS: [&[u32]; 5] =
    [&[0, 0, 1, 1], &[1, 1, 0, 0], &[0, 0, 1, 1, 2, 2], &[0, 0, 0, 0, 1, 1, 1], &[1, 0, 2, 2, 0, 0, 1, 1, 2]];

/// Each pointer with a stream of its own, streams meeting in pairs.
fn blocks(devices: &[u32], order: Order) -> Scene {
    let layout: Vec<(u32, usize)> = devices.iter().copied().zip(0..).collect();
    Scene { pairs: true, ..Scene::new(&layout, order) }
}

#[test]
fn devices_that_fold_for_each_other_are_right_in_every_order() {
    for devices in BLOCKS {
        let n = devices.len();
        for order in Order::all(n) {
            for (dtype, root) in
                [DataType::F32, DataType::F16, DataType::I32].into_iter().flat_map(|t| [(t, 0), (t, n - 1)])
            {
                let scene = blocks(devices, order);
                let (complaints, _) =
                    reduce(&scene, root, dtype, Operator::Sum, ReduceAlgorithm::Direct, None);
                assert!(complaints.is_empty(), "{devices:?} to {root}, {dtype:?}, {order:?}: {complaints:?}");
            }
            let complaints = allreduce(&blocks(devices, order), n / 2, ReduceAlgorithm::Direct, None).0;
            assert!(complaints.is_empty(), "{devices:?} and back, {order:?}: {complaints:?}");
        }
    }
}

#[test]
fn every_wait_of_devices_that_fold_for_each_other_is_needed() {
    for devices in BLOCKS {
        let (n, direct) = (devices.len(), ReduceAlgorithm::Direct);
        for (dtype, root) in [(DataType::F32, 0), (DataType::F32, n - 1), (DataType::F16, 0)] {
            every_wait_is_needed(n, &format!("{devices:?} to {root}, {dtype:?}"), |order, missing| {
                reduce(&blocks(devices, order), root, dtype, Operator::Sum, direct, missing)
            });
        }
        every_wait_is_needed(n, &format!("{devices:?} and back"), |order, missing| {
            allreduce(&blocks(devices, order), 0, direct, missing)
        });
    }
}

#[test]
fn every_wait_of_a_reduction_is_needed() {
    for n in 2..=6 {
        for (algorithm, pairs) in REDUCTIONS {
            let scene = |order| Scene { pairs, ..Scene::spread(n, order) };
            every_wait_is_needed(n, &format!("{algorithm:?} over {n}, {pairs}"), |order, missing| {
                reduce(&scene(order), 0, DataType::F32, Operator::Sum, algorithm, missing)
            });
            every_wait_is_needed(
                n,
                &format!("{algorithm:?} and back over {n}, {pairs}"),
                |order, missing| allreduce(&scene(order), 0, algorithm, missing),
            );
        }
    }
    every_wait_is_needed(2, "through the host", |order, missing| {
        let (scene, tree) = (Scene::spread(2, order).separated(), ReduceAlgorithm::Tree);
        reduce(&scene, 0, DataType::F32, Operator::Sum, tree, missing)
    });
}

#[test]
fn a_second_run_creates_nothing() {
    let scene = Scene::spread(5, Order::RoundRobin).separated();
    let mut broadcast = LocalBroadcast::new(scene.pointers(), 0, CHAIN).unwrap();
    let before = scene.double.creations();
    broadcast.run().unwrap();
    broadcast.run().unwrap();
    assert_eq!(scene.double.creations(), before);
}

#[test]
fn without_streams_the_caller_waits_for_the_result() {
    for order in [Order::Eager, Order::RoundRobin, Order::Backward, Order::Random(3)] {
        let mut scene = Scene::spread(4, order);
        // What the caller gave the default stream comes first, as in any program with streams of its own.
        let payload = pattern(3);
        scene.double.fill(StreamHandle::NULL, 2, scene.spans[2].address, &payload);
        scene.streams.clear();
        let mut broadcast = LocalBroadcast::new(scene.pointers(), 2, BroadcastAlgorithm::Tree).unwrap();
        broadcast.run().unwrap();
        broadcast.wait(Deadline::after(Duration::from_secs(20))).unwrap();
        for span in &scene.spans {
            assert_eq!(scene.double.peek(span.address, BYTES), payload);
        }
        assert_eq!(scene.double.complaints(), Vec::<String>::new());
    }
}

/// Lets all streams join the capture of the first, or brings them together at its end.
fn fork_or_join(scene: &Scene, fork: bool) {
    use crate::cuda::{event::Event, stream::Stream};
    // SAFETY: the double trusts no handles.
    let borrow = |index: usize| unsafe {
        Stream::borrow(&scene.devices, scene.layout[index].0, scene.streams[index]).unwrap()
    };
    for index in 1..scene.streams.len() {
        let (from, to) = if fork { (0, index) } else { (index, 0) };
        let event = Event::new(&scene.devices, scene.layout[from].0).unwrap();
        event.record(&borrow(from)).unwrap();
        borrow(to).wait(&event).unwrap();
    }
}

#[test]
fn a_captured_broadcast_replays() {
    for (n, separated) in [(1, false), (5, false), (4, true)] {
        for order in Order::all(n) {
            let scene = Scene::spread(n, order);
            let scene = if separated { scene.separated() } else { scene };
            let mut broadcast = LocalBroadcast::new(scene.pointers(), 0, BroadcastAlgorithm::Tree).unwrap();
            scene.double.begin_capture(scene.streams[0], 0);
            fork_or_join(&scene, true);
            broadcast.run().unwrap();
            assert_eq!(
                broadcast.wait(Deadline::NEVER).unwrap_err().text(),
                "the streams are being captured: nothing runs that could be waited for"
            );
            fork_or_join(&scene, false);
            let graph = scene.double.end_capture(scene.streams[0], 0).unwrap();
            for round in 0..3 {
                let payload = pattern(round);
                scene.fill(0, &payload);
                scene.double.launch_graph(&graph, scene.streams[0], 0);
                for index in 0..n {
                    let span = scene.spans[index];
                    scene.double.expect(scene.streams[0], 0, span.address, &payload, "replay");
                }
            }
            scene.double.drain();
            assert_eq!(scene.double.complaints(), Vec::<String>::new());
        }
    }
}

#[test]
fn a_captured_reduction_replays() {
    for (algorithm, pairs) in REDUCTIONS {
        for order in Order::all(4) {
            let scene = Scene { pairs, ..Scene::spread(4, order) };
            let (dtype, sum) = (DataType::F32, Operator::Sum);
            let kernels = Arc::new(DoubleKernels(scene.double.clone()));
            let mut reduce = LocalReduce::new(scene.pointers(), 1, dtype, sum, algorithm, kernels).unwrap();
            scene.double.begin_capture(scene.streams[0], 0);
            fork_or_join(&scene, true);
            reduce.run().unwrap();
            fork_or_join(&scene, false);
            let graph = scene.double.end_capture(scene.streams[0], 0).unwrap();
            for round in 0..3 {
                let inputs: Vec<Vec<u8>> = (0..4).map(|index| numbers(dtype, index + round * 50)).collect();
                for (index, input) in inputs.iter().enumerate() {
                    scene.double.fill(scene.streams[0], 0, scene.spans[index].address, input);
                }
                scene.double.launch_graph(&graph, scene.streams[0], 0);
                let result = reference(dtype, sum, &inputs);
                scene.double.expect(scene.streams[0], 0, scene.spans[1].address, &result, "replay");
            }
            scene.double.drain();
            assert_eq!(scene.double.complaints(), Vec::<String>::new(), "{algorithm:?}, {pairs}");
        }
    }
}

#[test]
fn streams_outside_the_capture_are_refused() {
    let scene = Scene::spread(3, Order::Eager);
    let mut broadcast = LocalBroadcast::new(scene.pointers(), 0, BroadcastAlgorithm::Tree).unwrap();
    scene.double.begin_capture(scene.streams[0], 0);
    let error = broadcast.run().unwrap_err();
    assert_eq!(error.status(), Status::InvalidUsage);
    assert!(error.text().starts_with("streams[0] and streams[1] are not in the same capture"), "{error}");
    // The capture is still good.
    assert!(scene.double.end_capture(scene.streams[0], 0).is_ok());
}

#[test]
fn wrong_pointers_are_named() {
    let scene = Scene::spread(3, Order::Eager);
    let refused = |spans: &[Span], streams: &[StreamHandle]| {
        // SAFETY: the double trusts nothing.
        let error = unsafe { Pointers::new(&scene.devices, spans, streams) }.unwrap_err();
        assert_eq!(error.status(), Status::InvalidArgument);
        error.text().to_owned()
    };
    let with = |index: usize, span: Span| {
        let mut spans = scene.spans.clone();
        spans[index] = span;
        spans
    };
    assert_eq!(refused(&[], &[]), "no device pointers were given");
    let short = Span { bytes: 8, ..scene.spans[1] };
    assert_eq!(refused(&with(1, short), &[]), "pointers[1] has 8 bytes, but pointers[0] has 1280");
    let beyond = Span { address: scene.spans[2].address + 256, bytes: BYTES };
    assert!(
        refused(&with(2, beyond), &[])
            .ends_with("has 1024 bytes left in its allocation, but 1280 are needed")
    );
    let host = [0u8; BYTES];
    let span = Span { address: host.as_ptr().addr() as u64, bytes: BYTES };
    let text = refused(&with(2, span), &scene.streams);
    assert!(text.starts_with("pointers[2]: 0x") && text.contains("a host pointer"), "{text}");
    let pinned = crate::cuda::memory::PinnedBuffer::new(&scene.devices, 0, BYTES).unwrap();
    let span = Span { address: pinned.address().addr() as u64, bytes: BYTES };
    assert!(refused(&with(0, span), &[]).contains("is pinned host memory"));
    assert_eq!(
        refused(&scene.spans, &scene.streams[..2]),
        "2 streams were given for 3 device pointers; give one for each, or none"
    );
    let crossed = [scene.streams[0], scene.streams[2], scene.streams[1]];
    assert_eq!(
        refused(&scene.spans, &crossed),
        "streams[1]: the memory is on device 1, but its stream on device 2"
    );
}

#[test]
fn wrong_operations_are_refused() {
    let scene = Scene::spread(2, Order::Eager);
    let kernels = || Arc::new(DoubleKernels(scene.double.clone()));
    let error = LocalBroadcast::new(scene.pointers(), 2, BroadcastAlgorithm::Tree).unwrap_err();
    assert_eq!(error.text(), "root pointer 2 does not exist; there are 2");
    let (sum, tree) = (Operator::Sum, ReduceAlgorithm::Tree);
    let mut odd = scene.pointers();
    odd.bytes = BYTES - 1;
    let error = LocalReduce::new(odd, 0, DataType::F32, sum, tree, kernels()).unwrap_err();
    assert_eq!(error.text(), "1279 bytes are no whole number of float32 elements");
    let scene = scene.separated();
    let kernels = Arc::new(DoubleKernels(scene.double.clone()));
    let direct = ReduceAlgorithm::Direct;
    let error = LocalReduce::new(scene.pointers(), 0, DataType::F32, sum, direct, kernels).unwrap_err();
    assert!(error.text().starts_with("devices 1 and 0 do not reach each other, or not what"), "{error}");
    assert!(error.text().ends_with("; use the tree"), "{error}");
}

/// Kernels and copies of one device leave memory alone that only its owner's device may touch.
#[test]
fn memory_that_other_devices_are_not_let_into_goes_through_the_host() {
    for order in Order::all(3) {
        let scene = Scene::closed(3, order);
        assert_eq!(ReduceAlgorithm::automatic(&scene.pointers()).unwrap(), ReduceAlgorithm::Tree);
        let (complaints, _) = reduce(&scene, 1, DataType::F32, Operator::Sum, ReduceAlgorithm::Tree, None);
        assert!(complaints.is_empty(), "{order:?}: {complaints:?}");
        for algorithm in [BroadcastAlgorithm::Tree, CHAIN] {
            let (complaints, _) = broadcast(&Scene::closed(3, order), 1, algorithm, None);
            assert!(complaints.is_empty(), "{order:?}, {algorithm:?}: {complaints:?}");
        }
    }
    // On one device there is nobody to be let in.
    let mut scene = Scene::new(&[(0, 0), (0, 1)], Order::RoundRobin);
    scene.spans.iter_mut().for_each(|span| span.address = scene.double.mapped(0, BYTES, 1));
    assert_eq!(ReduceAlgorithm::automatic(&scene.pointers()).unwrap(), ReduceAlgorithm::Direct);
}

#[test]
fn a_failing_call_leaves_the_callers_thread_as_it_was() {
    for separated in [false, true] {
        for failing in 0.. {
            let scene = Scene::spread(3, Order::RoundRobin);
            let scene = if separated { scene.separated() } else { scene };
            // The caller has a context of its own current, that of device 1.
            let _callers = scene.devices.enter(1).unwrap();
            let before = scene.double.thread();
            scene.double.fail_call(failing);
            // SAFETY: the double trusts nothing.
            let done = unsafe { Pointers::new(&scene.devices, &scene.spans, &scene.streams) }
                .and_then(|pointers| LocalBroadcast::new(pointers, 0, BroadcastAlgorithm::Tree))
                .and_then(|mut broadcast| broadcast.run());
            assert_eq!(scene.double.thread(), before);
            match done {
                Ok(()) => break,
                Err(error) => {
                    assert_eq!(error.status(), Status::Cuda);
                    assert!(error.text().contains(" failed: CUDA_ERROR_INJECTED: "), "{error}");
                }
            }
            assert!(failing < 1000, "some call fails for ever");
        }
    }
}
