use std::time::Duration;

use super::*;
use crate::cuda::double::{Double, DoubleKernels, Order};
use crate::reduce::{Operand, Reducer, Representation};

const COUNT: usize = 320;

/// A rank with pointers on as many devices, and what stands for the other ranks.
struct Scene {
    double: Arc<Double>,
    devices: Arc<Devices>,
    memory: Vec<u64>,
    streams: Vec<StreamHandle>,
    dtype: DataType,
    operator: Operator,
    kind: Kind,
    rank: u32,
    size: u32,
    /// The pointer that the root broadcasts.
    root_pointer: usize,
}

/// The root of what has one.
const ROOT: u32 = 1;

impl Scene {
    fn new(kind: Kind, n: usize, order: Order) -> Scene {
        let double = Double::new(n as u32 + 1, order);
        let devices = Devices::over(double.clone()).unwrap();
        let memory = (0..n as u32).map(|device| double.memory(device, 8 * COUNT)).collect();
        let streams = (0..n as u32).map(|device| double.stream(device)).collect();
        let (dtype, operator) = (DataType::F16, Operator::Average);
        let (rank, size, root_pointer) = (0, 3, 0);
        Scene { double, devices, memory, streams, dtype, operator, kind, rank, size, root_pointer }
    }

    fn bytes(&self) -> usize {
        COUNT * self.dtype.size()
    }

    fn several(&self, streams: &[StreamHandle]) -> Result<Several> {
        let pointer = |&address: &u64| std::ptr::with_exposed_provenance_mut(address as usize);
        let pointers: Vec<*mut u8> = self.memory.iter().map(pointer).collect();
        let kernels: Arc<dyn Kernels> = Arc::new(DoubleKernels(self.double.clone()));
        let parts = Parts {
            kind: self.kind,
            pointers: &pointers,
            streams,
            count: COUNT as u64,
            dtype: self.dtype,
            operator: self.operator,
            root: ROOT,
            root_pointer: self.root_pointer,
            rank: self.rank,
            size: self.size,
        };
        // SAFETY: the double trusts nothing, and keeps memory until it is dropped.
        unsafe { Several::new(&self.devices, &kernels, &parts) }
    }

    fn numbers(&self, seed: usize) -> Vec<u8> {
        let value = |index: usize| ((index * 37 + seed * 101) % 97) as f32 / 7.0 + 0.1;
        (0..COUNT)
            .flat_map(|index| match self.dtype {
                DataType::F32 => value(index).to_ne_bytes().to_vec(),
                DataType::F16 => half::f16::from_f32(value(index)).to_ne_bytes().to_vec(),
                _ => vec![value(index) as u8; self.dtype.size()],
            })
            .collect()
    }

    fn contributions(&self) -> u32 {
        self.size * self.memory.len() as u32
    }

    fn fold(&self, inputs: &[Vec<u8>], from: Representation, to: Representation, scale: f64) -> Vec<u8> {
        let reducer = Reducer::new(self.dtype, self.operator, self.contributions()).unwrap();
        let operand = |input: &Vec<u8>| Operand { address: input.as_ptr(), representation: from, scale };
        let operands: Vec<_> = inputs.iter().map(operand).collect();
        let size = match to {
            Representation::Element => reducer.element_size(),
            Representation::Accumulator => reducer.accumulator_size(),
        };
        let mut out = vec![0; COUNT * size];
        // SAFETY: inputs and output have this many positions.
        unsafe { reducer.fold(&operands, out.as_mut_ptr(), to, COUNT) };
        out
    }

    /// What all pointers of this rank combine to.
    fn partial(&self, inputs: &[Vec<u8>]) -> Vec<u8> {
        let scale = if let Operator::PreMulSum(scale) = self.operator { scale } else { 1.0 };
        self.fold(inputs, Representation::Element, Representation::Accumulator, scale)
    }
}

/// What a run does, twice, with work before and after it on every stream. Without the `missing`-th wait, if
/// one is missing. Answers what went wrong, and how many waits a run has.
fn run(scene: &Scene, missing: Option<usize>) -> (Vec<String>, usize) {
    let several = scene.several(&scene.streams).unwrap();
    let Scene { double, memory, streams, devices, .. } = scene;
    let n = memory.len();
    let request = several.request().clone();
    let between = request.input.addr() as u64;
    let main = streams.iter().position(|&stream| stream == several.main()).unwrap();
    let device = main as u32;
    // Of the main pointer's device, where a staged call would copy.
    // SAFETY: the double trusts no handles.
    let side = unsafe { Stream::borrow(devices, device, double.stream(device)) }.unwrap();
    // SAFETY: as above.
    let main_stream = unsafe { Stream::borrow(devices, device, several.main()) }.unwrap();
    let (ready, over) = (Event::new(devices, device).unwrap(), Event::new(devices, device).unwrap());
    let mut waits = 0;
    let mut created = 0;
    for round in 0..2 {
        let inputs: Vec<Vec<u8>> = (0..n).map(|index| scene.numbers(index + 100 * round)).collect();
        let theirs: Vec<Vec<u8>> = (0..n).map(|index| scene.numbers(50 + index + 100 * round)).collect();
        for (index, input) in inputs.iter().enumerate() {
            double.fill(streams[index], index as u32, memory[index], &scene.numbers(index + 1000));
            double.expect(
                streams[index],
                index as u32,
                memory[index],
                &scene.numbers(index + 1000),
                "before",
            );
            double.fill(streams[index], index as u32, memory[index], input);
        }
        // What the call between the ranks finds, and leaves.
        let (found, left, result) = match scene.kind {
            Kind::Broadcast if scene.rank == ROOT => {
                let root = inputs[scene.root_pointer].clone();
                (Some(root.clone()), None, Some(root))
            }
            Kind::Broadcast => (None, Some(theirs[0].clone()), Some(theirs[0].clone())),
            _ => {
                let (ours, theirs) = (scene.partial(&inputs), scene.partial(&theirs));
                let (wide, element) = (Representation::Accumulator, Representation::Element);
                let operands = [ours.clone(), theirs];
                let total = scene.fold(&operands, wide, wide, 1.0);
                let rounded = scene.fold(std::slice::from_ref(&total), wide, element, 1.0);
                let obtains = scene.kind == Kind::Allreduce || scene.rank == ROOT;
                (Some(ours), obtains.then_some(total), obtains.then_some(rounded))
            }
        };
        if let Some(missing) = missing {
            double.ignore_wait(missing);
        }
        let (before, creations) = (double.waits(), double.creations());
        let begin = || {
            ready.record(&main_stream)?;
            side.wait(&ready)?;
            if let Some(found) = &found {
                double.expect(side.handle(), device, between, found, "what the ranks exchange");
            }
            if let Some(left) = &left {
                double.fill(side.handle(), device, between, left);
            }
            over.record(&side)
        };
        let close = |()| main_stream.wait(&over);
        let work = several.enqueue(begin, close).unwrap();
        assert_eq!(work.is_some(), scene.size > 1);
        waits = double.waits() - before;
        created += double.creations() - creations;
        for (index, input) in inputs.iter().enumerate() {
            let due = result.as_ref().unwrap_or(input);
            double.expect(
                streams[index],
                index as u32,
                memory[index],
                due,
                &format!("pointer {index} after"),
            );
        }
    }
    assert_eq!(created, 0, "a run creates something");
    assert_eq!(double.synchronizations(), 0, "the host waited");
    double.drain();
    (double.complaints(), waits)
}

/// Every place that a rank can have: kind, rank, and the pointer that the root broadcasts.
const PLACES: [(Kind, u32, usize); 6] = [
    (Kind::Allreduce, 0, 0),
    (Kind::Reduce, 0, 0),
    (Kind::Reduce, ROOT, 0),
    (Kind::Broadcast, 0, 0),
    (Kind::Broadcast, ROOT, 0),
    // On another device than the first.
    (Kind::Broadcast, ROOT, 1),
];

#[test]
fn runs_are_right_in_every_order() {
    for (kind, rank, root_pointer) in PLACES {
        for n in 2..=5 {
            for order in Order::all(n + 1) {
                let scene = Scene { rank, root_pointer, ..Scene::new(kind, n, order) };
                let (complaints, _) = run(&scene, None);
                assert!(complaints.is_empty(), "{kind:?} of {rank} over {n}, {order:?}: {complaints:?}");
            }
        }
    }
}

#[test]
fn all_operators_are_rounded_once() {
    for dtype in [DataType::F16, DataType::F32, DataType::I32] {
        for operator in [Operator::Sum, Operator::Average, Operator::PreMulSum(0.3), Operator::Max] {
            let scene = Scene::new(Kind::Allreduce, 3, Order::Random(7));
            let scene = Scene { dtype, operator, ..scene };
            let (complaints, _) = run(&scene, None);
            assert!(complaints.is_empty(), "{operator:?} of {dtype:?}: {complaints:?}");
        }
    }
}

#[test]
fn devices_that_do_not_reach_each_other_go_through_the_host() {
    for (kind, rank, root_pointer) in PLACES {
        for order in Order::all(5) {
            let part: [fn(&Double); 3] = [
                |double| {
                    (0..4).flat_map(|a| (0..a).map(move |b| (a, b))).for_each(|(a, b)| double.separate(a, b))
                },
                // So the driver says when it is to let one reach another.
                |double| double.limit_peers(0),
                |double| double.limit_peers(1),
            ];
            for part in part {
                let scene = Scene { rank, root_pointer, ..Scene::new(kind, 4, order) };
                part(&scene.double);
                let (complaints, _) = run(&scene, None);
                assert!(complaints.is_empty(), "{kind:?} of {rank}, {order:?}: {complaints:?}");
            }
        }
    }
}

#[test]
fn every_wait_is_needed() {
    for (kind, rank, root_pointer) in PLACES {
        for n in 2..=5 {
            let scene = |order| Scene { rank, root_pointer, ..Scene::new(kind, n, order) };
            let (complaints, waits) = run(&scene(Order::Eager), None);
            assert!(complaints.is_empty(), "{complaints:?}");
            for missing in 0..waits {
                let orders = Order::all(n + 1);
                let found = orders.into_iter().any(|order| !run(&scene(order), Some(missing)).0.is_empty());
                assert!(
                    found,
                    "{kind:?} of {rank} over {n}: nothing goes wrong without wait {missing} of {waits}"
                );
            }
        }
    }
}

#[test]
fn the_root_of_a_broadcast_sends_while_it_copies_and_the_others_copy_what_has_come() {
    for (rank, beside) in [(ROOT, true), (0, false)] {
        let scene = Scene { rank, ..Scene::new(Kind::Broadcast, 3, Order::RoundRobin) };
        let several = scene.several(&scene.streams).unwrap();
        let double = &scene.double;
        let begin = || Ok(double.waits());
        let close = |begun| Ok((begun, double.waits()));
        let (begun, closed) = several.enqueue(begin, close).unwrap().unwrap();
        assert_eq!(closed > begun, beside, "what the streams are given during the call between the ranks");
        assert_eq!(double.waits() > closed, !beside, "what they are given behind it");
        double.drain();
    }
}

#[test]
fn a_group_of_one_is_local_and_can_be_captured() {
    for kind in [Kind::Allreduce, Kind::Reduce, Kind::Broadcast] {
        for order in Order::all(4) {
            let operator = Operator::Average;
            let scene = Scene { size: 1, rank: 0, operator, ..Scene::new(kind, 3, order) };
            let several = scene.several(&scene.streams).unwrap();
            let Scene { double, streams, memory, devices, .. } = &scene;
            // SAFETY: the double trusts no handles.
            let stream =
                |index: usize| unsafe { Stream::borrow(devices, index as u32, streams[index]).unwrap() };
            let link = |from: usize, to: usize| {
                let event = Event::new(devices, from as u32).unwrap();
                event.record(&stream(from)).unwrap();
                stream(to).wait(&event).unwrap();
            };
            double.begin_capture(streams[0], 0);
            (1..3).for_each(|index| link(0, index));
            let begin = || -> Result<()> { unreachable!("there is nobody else") };
            assert!(several.enqueue(begin, Ok).unwrap().is_none());
            // Nobody can ask an event of a capture whether it is complete.
            assert!(several.join().unwrap().is_none());
            (1..3).for_each(|index| link(index, 0));
            let graph = double.end_capture(streams[0], 0).unwrap();
            for round in 0..3 {
                let inputs: Vec<Vec<u8>> = (0..3).map(|index| scene.numbers(index + round)).collect();
                for (index, input) in inputs.iter().enumerate() {
                    double.fill(streams[0], 0, memory[index], input);
                }
                double.launch_graph(&graph, streams[0], 0);
                let (wide, element) = (Representation::Accumulator, Representation::Element);
                let due = match kind {
                    // The root is rank 1, so that rank 0 has it in its first pointer.
                    Kind::Broadcast => inputs[0].clone(),
                    _ => scene.fold(&[scene.partial(&inputs)], wide, element, 1.0),
                };
                for &address in memory {
                    double.expect(streams[0], 0, address, &due, "replay");
                }
            }
            double.drain();
            assert_eq!(double.complaints(), Vec::<String>::new(), "{kind:?}, {order:?}");
        }
    }
}

#[test]
fn without_streams_the_result_is_waited_for() {
    for order in [Order::Eager, Order::RoundRobin, Order::Backward, Order::Random(3)] {
        let scene = Scene { size: 1, ..Scene::new(Kind::Allreduce, 3, order) };
        let inputs: Vec<Vec<u8>> = (0..3).map(|index| scene.numbers(index)).collect();
        for (index, input) in inputs.iter().enumerate() {
            // What the caller gave the default stream comes first.
            scene.double.fill(StreamHandle::NULL, index as u32, scene.memory[index], input);
        }
        let several = scene.several(&[]).unwrap();
        assert!(several.synchronous());
        several.enqueue(|| Ok(()), Ok).unwrap();
        several.wait(Deadline::after(Duration::from_secs(20))).unwrap();
        let (wide, element) = (Representation::Accumulator, Representation::Element);
        let due = scene.fold(&[scene.partial(&inputs)], wide, element, 1.0);
        for &address in &scene.memory {
            assert_eq!(scene.double.peek(address, scene.bytes()), due);
        }
        assert_eq!(scene.double.complaints(), Vec::<String>::new());
    }
}

#[test]
fn the_joined_event_means_everything() {
    for order in Order::all(4) {
        let scene = Scene { size: 1, ..Scene::new(Kind::Broadcast, 3, order) };
        let several = scene.several(&scene.streams).unwrap();
        let payload = scene.numbers(9);
        scene.double.fill(scene.streams[0], 0, scene.memory[0], &payload);
        several.enqueue(|| Ok(()), Ok).unwrap();
        several.join().unwrap().expect("no capture").synchronize(Deadline::NEVER).unwrap();
        for &address in &scene.memory {
            assert_eq!(scene.double.peek(address, scene.bytes()), payload, "{order:?}");
        }
        scene.double.drain();
        assert_eq!(scene.double.complaints(), Vec::<String>::new());
    }
}

#[test]
fn wrong_streams_are_named() {
    let scene = Scene::new(Kind::Allreduce, 3, Order::Eager);
    let crossed = [scene.streams[0], scene.streams[2], scene.streams[1]];
    let error = scene.several(&crossed).map(|_| ()).unwrap_err();
    assert_eq!(error.text(), "options->streams[1]: the memory is on device 1, but its stream on device 2");
}

#[test]
fn a_failure_before_the_call_leaves_it_unmade() {
    let scene = Scene::new(Kind::Allreduce, 3, Order::Eager);
    let several = scene.several(&scene.streams).unwrap();
    scene.double.fail_call(4);
    let mut begun = false;
    let begin = || {
        begun = true;
        Ok(())
    };
    let error = several.enqueue(begin, Ok).unwrap_err();
    assert_eq!(error.status(), crate::error::Status::Cuda);
    assert!(!begun);
}

#[test]
fn a_run_that_is_done_stays_so_while_the_next_one_is_not() {
    let scene = Scene { size: 1, ..Scene::new(Kind::Allreduce, 2, Order::RoundRobin) };
    let several = scene.several(&scene.streams).expect("an object");
    let run = || {
        several.enqueue(|| Ok(()), |()| Ok(())).expect("a run");
        several.join().expect("it is followed").expect("no capture")
    };
    let first = run();
    scene.double.drain();
    assert!(first.query().expect("an answer"));
    let gate = scene.devices.word(0).expect("a word");
    // SAFETY: it lives as long as the double.
    let stream = unsafe { Stream::borrow(&scene.devices, 0, scene.streams[0]) }.expect("a stream");
    stream.wait_word(&gate).expect("it waits");
    let second = run();
    assert!(first.query().expect("an answer") && !second.query().expect("an answer"));
    gate.release();
    scene.double.drain();
    assert!(second.query().expect("an answer"));
    assert_eq!(scene.double.complaints(), Vec::<String>::new());
}
