//! Operations among the pointers of one process, on real memory.

use unisono::cuda::driver::StreamHandle;
use unisono::cuda::event::Event;
use unisono::cuda::fold::FoldKernels;
use unisono::cuda::local::{
    BroadcastAlgorithm, LocalBroadcast, LocalReduce, Pointers, ReduceAlgorithm, Rounding, Span,
};
use unisono::cuda::memory::DeviceBuffer;
use unisono::cuda::stream::Stream;
use unisono::error::Status;
use unisono::reduce::{DataType, Operand, Operator, Reducer, Representation};

use super::cuda::{
    Graph, Noise, Upload, begin_capture, devices, fewer_than, filled, read, soon, stream, write,
};

const BROADCASTS: [BroadcastAlgorithm; 2] =
    [BroadcastAlgorithm::Tree, BroadcastAlgorithm::Chain { chunk: 4096 }];

/// Those that these GPUs can do.
fn reductions() -> Vec<ReduceAlgorithm> {
    let devices = devices();
    let pairs = (0..devices.count()).flat_map(|a| (0..devices.count()).map(move |b| (a, b)));
    let mut algorithms = vec![ReduceAlgorithm::Tree];
    if pairs.into_iter().all(|(a, b)| devices.reaches(a, b).expect("an answer")) {
        algorithms.push(ReduceAlgorithm::Direct);
    }
    algorithms
}

/// The bytes on both sides of a pointer, which nobody may touch.
const MARGIN: usize = 256;

/// Pointers of a test, dealt out to the GPUs that there are, with the caller's streams.
pub(crate) struct Scene {
    pub(crate) memory: Vec<DeviceBuffer>,
    pub(crate) streams: Vec<Stream>,
    pub(crate) bytes: usize,
}

impl Scene {
    fn new(n: usize, bytes: usize) -> Scene {
        Scene::from(0, n, bytes)
    }

    /// The first pointer is on GPU `first`, or where that wraps to.
    pub(crate) fn from(first: u32, n: usize, bytes: usize) -> Scene {
        Scene::on(&(first..first + n as u32).collect::<Vec<u32>>(), bytes)
    }

    /// Each pointer on this GPU, or where that wraps to.
    fn on(gpus: &[u32], bytes: usize) -> Scene {
        let count = devices().count();
        let rubbish = vec![0xa5; bytes + 2 * MARGIN];
        Scene {
            memory: gpus.iter().map(|gpu| filled(gpu % count, &rubbish)).collect(),
            streams: gpus.iter().map(|gpu| stream(gpu % count)).collect(),
            bytes,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.memory.len()
    }

    pub(crate) fn address(&self, index: usize) -> u64 {
        self.memory[index].address() + MARGIN as u64
    }

    fn pointers(&self, with_streams: bool) -> Pointers {
        let span = |index| Span { address: self.address(index), bytes: self.bytes };
        let spans: Vec<Span> = (0..self.len()).map(span).collect();
        let streams: Vec<StreamHandle> = self.streams.iter().map(Stream::handle).collect();
        let streams = if with_streams { &streams[..] } else { &[] };
        // SAFETY: the scene outlives what the tests prepare from it, and they wait for the streams.
        unsafe { Pointers::new(&devices(), &spans, streams) }.expect("good pointers")
    }

    /// Sets a pointer's contents in the order of its stream.
    pub(crate) fn fill(&self, index: usize, bytes: &[u8]) -> Upload {
        Upload::new(&self.streams[index], self.address(index), bytes)
    }

    #[track_caller]
    pub(crate) fn expect(&self, index: usize, bytes: &[u8], what: &str) {
        let found = read(&self.streams[index], self.memory[index].address(), self.bytes + 2 * MARGIN);
        let (before, rest) = found.split_at(MARGIN);
        let (inside, after) = rest.split_at(self.bytes);
        assert!(
            before.iter().chain(after).all(|&byte| byte == 0xa5),
            "{what}: written beyond pointer {index}"
        );
        if inside != bytes {
            let first = inside.iter().zip(bytes).position(|(found, due)| found != due);
            panic!("{what}: pointer {index} differs from byte {first:?} of {}", self.bytes);
        }
    }
}

fn kernels() -> std::sync::Arc<FoldKernels> {
    FoldKernels::open()
}

#[test]
fn broadcasts_reach_every_pointer() {
    let mut noise = Noise(11);
    for n in 1..=8 {
        for bytes in [1, 4099, (1 << 20) + 5] {
            for (algorithm, with_streams) in BROADCASTS.into_iter().flat_map(|a| [(a, true), (a, false)]) {
                let scene = Scene::new(n, bytes);
                let root = n / 2;
                let mut broadcast =
                    LocalBroadcast::new(scene.pointers(with_streams), root, algorithm).expect("a broadcast");
                for round in 0..3 {
                    let payload = noise.bytes(bytes);
                    if with_streams {
                        // Nothing but the streams orders this.
                        let _uploads: Vec<Upload> = (0..n)
                            .map(|index| {
                                scene.fill(index, if index == root { &payload } else { &payload[..1] })
                            })
                            .collect();
                        broadcast.run().expect("a run");
                        for index in 0..n {
                            scene.expect(index, &payload, &format!("{algorithm:?} over {n}, round {round}"));
                        }
                    } else {
                        write(scene.memory[root].device(), scene.address(root), &payload);
                        broadcast.run().expect("a run");
                        broadcast.wait(soon()).expect("it ends");
                        for index in 0..n {
                            scene.expect(index, &payload, &format!("{algorithm:?} over {n}, no streams"));
                        }
                    }
                }
            }
        }
    }
}

/// Any bits, ordinary numbers in between.
pub(crate) fn elements(dtype: DataType, count: usize, noise: &mut Noise) -> Vec<u8> {
    let mut bytes = noise.bytes(count * dtype.size());
    for index in (0..count).filter(|index| index % 3 != 0) {
        let value = (noise.next() % 4096) as f64 / 511.0 - 2.5;
        let at = index * dtype.size()..(index + 1) * dtype.size();
        match dtype {
            DataType::F16 => {
                bytes[at].copy_from_slice(&half::f16::from_f64(value).to_ne_bytes());
            }
            DataType::Bf16 => {
                bytes[at].copy_from_slice(&half::bf16::from_f64(value).to_ne_bytes());
            }
            DataType::F32 => bytes[at].copy_from_slice(&(value as f32).to_ne_bytes()),
            DataType::F64 => bytes[at].copy_from_slice(&value.to_ne_bytes()),
            _ => {}
        }
    }
    bytes
}

/// What the host makes of it.
fn reference(dtype: DataType, operator: Operator, inputs: &[Vec<u8>], contributions: u32) -> Vec<u8> {
    let scale = if let Operator::PreMulSum(scale) = operator { scale } else { 1.0 };
    let operand =
        |input: &Vec<u8>| Operand { address: input.as_ptr(), representation: Representation::Element, scale };
    let operands: Vec<Operand> = inputs.iter().map(operand).collect();
    let mut out = vec![0; inputs[0].len()];
    let reducer = Reducer::new(dtype, operator, contributions).expect("a reduction");
    // SAFETY: inputs and output have this many elements.
    unsafe {
        reducer.fold(&operands, out.as_mut_ptr(), Representation::Element, out.len() / dtype.size());
    }
    out
}

const OPERATORS: [Operator; 9] = [
    Operator::Sum,
    Operator::Product,
    Operator::Min,
    Operator::Max,
    Operator::Average,
    Operator::PreMulSum(0.37),
    Operator::BitAnd,
    Operator::BitOr,
    Operator::BitXor,
];

#[test]
fn reductions_have_the_bits_of_the_host() {
    let mut noise = Noise(23);
    let mut cases = 0;
    for (dtype, operator) in DataType::ALL.into_iter().flat_map(|t| OPERATORS.map(|o| (t, o))) {
        if Reducer::new(dtype, operator, 1).is_err() {
            let scene = Scene::new(2, 64);
            let (pointers, tree) = (scene.pointers(true), ReduceAlgorithm::Tree);
            let error = LocalReduce::new(pointers, 0, dtype, operator, tree, kernels()).unwrap_err();
            assert_eq!(error.status(), Status::InvalidArgument, "{error}");
            continue;
        }
        for n in [1usize, 2, 3, 5, 8] {
            let count = [5003, 1, 260][cases % 3];
            let root = cases % n;
            let inputs: Vec<Vec<u8>> = (0..n).map(|_| elements(dtype, count, &mut noise)).collect();
            let due = reference(dtype, operator, &inputs, n as u32);
            for algorithm in reductions() {
                let what = format!("{operator:?} of {count} {} over {n}, {algorithm:?}", dtype.name());
                let scene = Scene::new(n, count * dtype.size());
                let with_streams = cases % 4 != 3;
                let pointers = scene.pointers(with_streams);
                let mut reduce =
                    LocalReduce::new(pointers, root, dtype, operator, algorithm, kernels()).expect(&what);
                let _uploads: Vec<Upload> =
                    inputs.iter().enumerate().map(|(index, input)| scene.fill(index, input)).collect();
                if !with_streams {
                    scene.streams.iter().for_each(|stream| stream.synchronize(soon()).expect("a copy"));
                }
                reduce.run().expect(&what);
                if !with_streams {
                    reduce.wait(soon()).expect(&what);
                }
                for (index, input) in inputs.iter().enumerate() {
                    scene.expect(index, if index == root { &due } else { input }, &what);
                }
                cases += 1;
            }
        }
    }
    println!("{cases} reductions");
}

#[test]
fn more_pointers_than_a_kernel_takes() {
    let mut noise = Noise(31);
    let (count, dtype) = (3001, DataType::Bf16);
    for (n, algorithm) in
        [9, 23, 32, 71].into_iter().flat_map(|n| reductions().into_iter().map(move |a| (n, a)))
    {
        let inputs: Vec<Vec<u8>> = (0..n).map(|_| elements(dtype, count, &mut noise)).collect();
        let due = reference(dtype, Operator::Average, &inputs, n as u32);
        let scene = Scene::new(n, count * dtype.size());
        let pointers = scene.pointers(true);
        let mut reduce = LocalReduce::new(pointers, 0, dtype, Operator::Average, algorithm, kernels())
            .expect("a reduction");
        let _uploads: Vec<Upload> =
            inputs.iter().enumerate().map(|(index, input)| scene.fill(index, input)).collect();
        reduce.run().expect("a run");
        scene.expect(0, &due, &format!("{algorithm:?} over {n}"));
    }
}

#[test]
fn gpus_fold_for_each_other() {
    if fewer_than(2) || reductions().len() < 2 {
        return;
    }
    let mut noise = Noise(37);
    let (sum, direct) = (Operator::Sum, ReduceAlgorithm::Direct);
    let layouts: [&[u32]; 5] = [
        &[0, 0, 1, 1],
        &[1, 1, 0, 0, 1],
        &[0, 0, 0, 0, 1, 1, 1, 1],
        &[0, 1, 0, 1],
        &[0, 0, 1, 1, 2, 2, 3, 3, 3],
    ];
    for (layout, dtype) in layouts.into_iter().flat_map(|layout| {
        [DataType::F32, DataType::F16, DataType::F8E5M2, DataType::I32].map(|dtype| (layout, dtype))
    }) {
        let (n, what) = (layout.len(), format!("{layout:?}, {}", dtype.name()));
        // Long enough for it.
        let count = n * n * (256 << 10) / dtype.size() + 77;
        let scene = Scene::on(layout, count * dtype.size());
        let root = n / 3;
        let mut reduce =
            LocalReduce::new(scene.pointers(true), root, dtype, sum, direct, kernels()).expect(&what);
        let part = elements(dtype, 70_001, &mut noise);
        for round in 0..2 {
            // The same numbers again and again, from another one on for each pointer.
            let inputs: Vec<Vec<u8>> = (0..n)
                .map(|index| {
                    let (begin, end) = part.split_at((index * 13 + round) * dtype.size());
                    let mut input = [end, begin].concat().repeat(scene.bytes / part.len() + 1);
                    input.truncate(scene.bytes);
                    input
                })
                .collect();
            let _uploads: Vec<Upload> =
                inputs.iter().enumerate().map(|(index, input)| scene.fill(index, input)).collect();
            reduce.run().expect(&what);
            let due = reference(dtype, sum, &inputs, n as u32);
            for (index, input) in inputs.iter().enumerate() {
                scene.expect(index, if index == root { &due } else { input }, &what);
            }
        }
    }
}

#[test]
fn a_result_in_accumulators_is_rounded_once() {
    let mut noise = Noise(41);
    for dtype in [DataType::F16, DataType::F8E5M2, DataType::F32, DataType::I64] {
        for operator in [Operator::Sum, Operator::Average, Operator::PreMulSum(-1.5)] {
            for algorithm in reductions() {
                let (n, count, root) = (5, 4099, 3);
                let inputs: Vec<Vec<u8>> = (0..n).map(|_| elements(dtype, count, &mut noise)).collect();
                let scene = Scene::new(n, count * dtype.size());
                let (reducing, pointers) = (scene.pointers(true), scene.pointers(true));
                let (mut reduce, from) =
                    LocalReduce::partial(reducing, root, dtype, operator, algorithm, kernels())
                        .expect("a reduction");
                let rounding =
                    Rounding { from, dtype, operator, contributions: n as u32, kernels: kernels() };
                let tree = BroadcastAlgorithm::Tree;
                // SAFETY: the reduction outlives it.
                let broadcast = unsafe { LocalBroadcast::rounded(pointers, root, tree, rounding) };
                let mut broadcast = broadcast.expect("a broadcast");
                let _uploads: Vec<Upload> =
                    inputs.iter().enumerate().map(|(index, input)| scene.fill(index, input)).collect();
                reduce.run().expect("a run");
                broadcast.run().expect("a run");
                let due = reference(dtype, operator, &inputs, n as u32);
                for index in 0..n {
                    scene.expect(index, &due, &format!("{operator:?} of {}, {algorithm:?}", dtype.name()));
                }
            }
        }
    }
}

/// Lets all streams join the capture of the first, or brings them together at its end.
fn fork_or_join(scene: &Scene, fork: bool) {
    for index in 1..scene.len() {
        let (from, to) = if fork { (0, index) } else { (index, 0) };
        let event = Event::new(&devices(), scene.memory[from].device()).expect("an event");
        event.record(&scene.streams[from]).expect("a record");
        scene.streams[to].wait(&event).expect("a wait");
    }
}

#[test]
fn captured_operations_replay() {
    let mut noise = Noise(53);
    let dtype = DataType::F16;
    let short = [1, 2, 4, 7].map(|n| ((0..n).collect::<Vec<u32>>(), 100_003));
    // So long that the GPUs fold for each other.
    let long = (vec![0, 0, 0, 0, 1, 1, 1, 1], 9 << 20);
    for (layout, count, broadcast, reduce) in short.into_iter().chain([long]).flat_map(|(layout, count)| {
        let reductions = reductions();
        BROADCASTS.map(|broadcast| {
            let direct = matches!(broadcast, BroadcastAlgorithm::Chain { .. });
            (layout.clone(), count, broadcast, reductions[usize::from(direct) % reductions.len()])
        })
    }) {
        let (n, scene) = (layout.len(), Scene::on(&layout, count * dtype.size()));
        let (sum, first) = (Operator::Sum, stream(scene.memory[0].device()));
        let mut reduce =
            LocalReduce::new(scene.pointers(true), 0, dtype, sum, reduce, kernels()).expect("a reduction");
        let mut broadcast = LocalBroadcast::new(scene.pointers(true), 0, broadcast).expect("a broadcast");
        begin_capture(&scene.streams[0]);
        fork_or_join(&scene, true);
        reduce.run().expect("a captured reduction");
        broadcast.run().expect("a captured broadcast");
        let error = broadcast.wait(soon()).unwrap_err();
        assert_eq!(error.status(), Status::InvalidUsage, "{error}");
        fork_or_join(&scene, false);
        let graph = Graph::end_capture(&scene.streams[0]);
        for round in 0..4 {
            let inputs: Vec<Vec<u8>> = (0..n).map(|_| elements(dtype, count, &mut noise)).collect();
            for (index, input) in inputs.iter().enumerate() {
                write(scene.memory[index].device(), scene.address(index), input);
            }
            graph.launch(first.handle());
            first.synchronize(soon()).expect("the graph ends");
            let due = reference(dtype, sum, &inputs, n as u32);
            for index in 0..n {
                scene.expect(index, &due, &format!("replay {round} over {n}"));
            }
        }
    }
}

#[test]
fn large_operations_are_whole() {
    let mut noise = Noise(61);
    let count = (24 << 20) + 77;
    for n in [3, 4] {
        let scene = Scene::new(n, count * 4);
        let inputs: Vec<Vec<u8>> = (0..n).map(|_| noise.bytes(count * 4)).collect();
        let due = reference(DataType::I32, Operator::Sum, &inputs, n as u32);
        for (reduce, broadcast) in reductions()
            .into_iter()
            .zip([BroadcastAlgorithm::Tree, BroadcastAlgorithm::chain(&scene.pointers(true))])
        {
            for (index, input) in inputs.iter().enumerate() {
                write(scene.memory[index].device(), scene.address(index), input);
            }
            let (dtype, sum) = (DataType::I32, Operator::Sum);
            let mut reduction = LocalReduce::new(scene.pointers(true), 1, dtype, sum, reduce, kernels())
                .expect("a reduction");
            let mut spread = LocalBroadcast::new(scene.pointers(true), 1, broadcast).expect("a broadcast");
            reduction.run().expect("a run");
            spread.run().expect("a run");
            for index in 0..n {
                scene.expect(index, &due, &format!("{reduce:?} and {broadcast:?} over {n}"));
            }
        }
    }
}
