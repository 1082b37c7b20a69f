//! Algorithm objects over device pointers, on real memory: the bits are those of host memory.

use unisono::collective::request::Kind;
use unisono::communicator::{AlgorithmOptions, Call, Context, Prepared};
use unisono::cuda::driver::StreamHandle;
use unisono::cuda::event::Event;
use unisono::cuda::stream::Stream;
use unisono::error::Status;
use unisono::reduce::{DataType, Operator};
use unisono::schedule::Algorithm;

use super::cuda::{
    Graph, Noise, Upload, begin_capture, devices, fewer_than, filled, read, soon, stream, write,
};
use super::local::{Scene, elements};
use super::support::processes::{Job, Seat, report};
use super::support::ranks;

/// One algorithm object of one rank.
#[derive(Clone, Copy, Debug)]
struct Case {
    kind: Kind,
    algorithm: Option<Algorithm>,
    dtype: DataType,
    operator: Operator,
    pointers: usize,
    count: usize,
    with_streams: bool,
}

const ROOT: u32 = 1;
const ROOT_POINTER: usize = 1;

impl Case {
    fn options(&self, buffers: Vec<*mut u8>, streams: Vec<StreamHandle>, size: u32) -> AlgorithmOptions {
        AlgorithmOptions {
            kind: self.kind,
            algorithm: self.algorithm.map_or(0, |algorithm| algorithm as i32),
            buffers,
            streams,
            count: self.count as u64,
            dtype: self.dtype,
            operator: self.operator,
            root: ROOT % size,
            root_buffer: ROOT_POINTER % self.pointers,
            call: Call::default(),
        }
    }
}

/// Runs a case on host memory and on device memory, several times with other numbers, and compares every
/// pointer.
fn check(context: &Context, case: &Case, noise: &mut Noise) {
    let what = format!("{case:?}, rank {} of {}", context.rank(), context.size());
    let bytes = case.count * case.dtype.size();
    let scene = Scene::from(context.rank(), case.pointers, bytes);
    let mut host = vec![vec![0u8; bytes]; case.pointers];
    let of_host = host.iter_mut().map(|buffer| buffer.as_mut_ptr()).collect();
    let of_device = (0..case.pointers)
        .map(|index| std::ptr::with_exposed_provenance_mut(scene.address(index) as usize))
        .collect();
    let streams =
        if case.with_streams { scene.streams.iter().map(Stream::handle).collect() } else { Vec::new() };
    // SAFETY: the buffers outlive the objects, and the tests wait for the streams.
    let (on_host, on_device) = unsafe {
        (
            Prepared::new(context, case.options(of_host, Vec::new(), context.size())).expect(&what),
            Prepared::new(context, case.options(of_device, streams, context.size())).expect(&what),
        )
    };
    assert_eq!(on_host.algorithm(), on_device.algorithm());
    for round in 0..3 {
        let inputs: Vec<Vec<u8>> =
            (0..case.pointers).map(|_| elements(case.dtype, case.count, noise)).collect();
        for (buffer, input) in host.iter_mut().zip(&inputs) {
            buffer.copy_from_slice(input);
        }
        on_host.run().expect(&what);
        let uploads: Vec<Upload> =
            inputs.iter().enumerate().map(|(index, input)| scene.fill(index, input)).collect();
        if !case.with_streams {
            scene.streams.iter().for_each(|stream| stream.synchronize(soon()).expect("a copy"));
        }
        if round == 1 {
            on_device.start().expect(&what).wait(soon()).expect(&what);
        } else {
            on_device.run().expect(&what);
        }
        for (index, due) in host.iter().enumerate() {
            scene.expect(index, due, &format!("{what}, round {round}"));
        }
        drop(uploads);
    }
}

/// All kinds that take several pointers.
fn cases() -> Vec<Case> {
    let base = Case {
        kind: Kind::Allreduce,
        algorithm: None,
        dtype: DataType::F16,
        operator: Operator::Sum,
        pointers: 3,
        count: 70_003,
        with_streams: true,
    };
    let mut cases = Vec::new();
    for with_streams in [true, false] {
        for pointers in [1, 2, 5] {
            for kind in [Kind::Allreduce, Kind::Reduce, Kind::Broadcast] {
                cases.push(Case { kind, pointers, with_streams, ..base });
            }
        }
        for dtype in DataType::ALL {
            cases.push(Case { dtype, with_streams, ..base });
        }
        for operator in [Operator::Average, Operator::PreMulSum(0.37), Operator::Max, Operator::Product] {
            for dtype in [DataType::Bf16, DataType::F32, DataType::I32] {
                cases.push(Case { operator, dtype, with_streams, ..base });
            }
        }
        for count in [1, 257, 3 << 20] {
            cases.push(Case { count, with_streams, ..base });
        }
    }
    cases
}

/// Those by name, for groups of several.
fn named() -> Vec<Case> {
    let mut cases = Vec::new();
    for algorithm in Algorithm::ALL {
        for kind in [Kind::Allreduce, Kind::Reduce, Kind::Broadcast] {
            let serves = match kind {
                Kind::Allreduce => algorithm.serves(unisono::schedule::Kind::Allreduce),
                Kind::Reduce => algorithm.serves(unisono::schedule::Kind::Reduce),
                _ => algorithm.serves(unisono::schedule::Kind::Broadcast),
            };
            // A ring's order depends on how the call is cut into pieces.
            let other_order = matches!(algorithm, Algorithm::Ring | Algorithm::RingChunked);
            if !serves || algorithm == Algorithm::Local || other_order && kind != Kind::Broadcast {
                continue;
            }
            cases.push(Case {
                kind,
                algorithm: Some(algorithm),
                dtype: DataType::Bf16,
                operator: Operator::Sum,
                pointers: 2,
                count: 300_007,
                with_streams: true,
            });
        }
    }
    cases
}

#[test]
fn a_group_of_one() {
    let mut noise = Noise(71);
    ranks(1, "shm", |context| {
        let mut noise = Noise(noise.0);
        cases().iter().filter(|case| case.pointers > 1).for_each(|case| check(context, case, &mut noise));
    });
    noise.next();
}

/// A rank of [`between_processes`].
pub(crate) fn algorithms(seat: &Seat) {
    let context = Context::create(seat.options("algorithms")).expect("the ranks meet");
    let mut noise = Noise(1000 + u64::from(seat.rank));
    let cases: Vec<Case> = cases().into_iter().chain(named()).collect();
    for case in &cases {
        check(&context, case, &mut noise);
    }
    report(format_args!("passed {}", cases.len()));
}

#[test]
fn between_processes() {
    for transports in ["shm", "tcp"] {
        let mut job = Job::start("algorithms", 2, transports);
        job.await_all(&[0, 1], "passed");
        job.all_end_well(&[0, 1]);
    }
}

#[test]
fn a_captured_local_algorithm_replays() {
    let mut noise = Noise(83);
    for kind in [Kind::Allreduce, Kind::Broadcast] {
        let seed = noise.next();
        ranks(1, "shm", |context| {
            let mut noise = Noise(seed);
            let (n, count, dtype) = (4, 50_001, DataType::Bf16);
            let scene = Scene::from(0, n, count * dtype.size());
            let case = Case {
                kind,
                algorithm: None,
                dtype,
                operator: Operator::Average,
                pointers: n,
                count,
                with_streams: true,
            };
            let pointers = (0..n)
                .map(|index| std::ptr::with_exposed_provenance_mut(scene.address(index) as usize))
                .collect();
            let streams = scene.streams.iter().map(Stream::handle).collect();
            // SAFETY: the scene outlives the object, and the graph's end is waited for.
            let captured =
                unsafe { Prepared::new(context, case.options(pointers, streams, 1)) }.expect("an object");
            assert_eq!(captured.algorithm(), "local");
            let link = |from: usize, to: usize| {
                let event = Event::new(&devices(), scene.memory[from].device()).expect("an event");
                event.record(&scene.streams[from]).expect("a record");
                scene.streams[to].wait(&event).expect("a wait");
            };
            begin_capture(&scene.streams[0]);
            (1..n).for_each(|index| link(0, index));
            captured.run().expect("a captured run");
            (1..n).for_each(|index| link(index, 0));
            let graph = Graph::end_capture(&scene.streams[0]);
            let launcher = stream(scene.memory[0].device());
            for _ in 0..3 {
                let inputs: Vec<Vec<u8>> = (0..n).map(|_| elements(dtype, count, &mut noise)).collect();
                let mut host = inputs.clone();
                let buffers = host.iter_mut().map(|buffer| buffer.as_mut_ptr()).collect();
                // SAFETY: the buffers outlive the object.
                let on_host = unsafe { Prepared::new(context, case.options(buffers, Vec::new(), 1)) };
                on_host.expect("an object").run().expect("a run");
                for (index, input) in inputs.iter().enumerate() {
                    write(scene.memory[index].device(), scene.address(index), input);
                }
                graph.launch(launcher.handle());
                launcher.synchronize(soon()).expect("the graph ends");
                (0..n).for_each(|index| scene.expect(index, &host[index], "a replay"));
            }
        });
    }
}

#[test]
fn wrong_arguments_are_named() {
    ranks(1, "shm", |context| {
        let device = filled(0, &[0; 64]);
        let other = filled(0, &[0; 64]);
        let mut host = [0u8; 64];
        let pointer = |address: u64| std::ptr::with_exposed_provenance_mut(address as usize);
        let case = Case {
            kind: Kind::Allreduce,
            algorithm: None,
            dtype: DataType::F32,
            operator: Operator::Sum,
            pointers: 2,
            count: 16,
            with_streams: false,
        };
        let refused = |buffers: Vec<*mut u8>, streams: Vec<StreamHandle>| {
            // SAFETY: the buffers outlive the object, which is not made.
            let made = unsafe { Prepared::new(context, case.options(buffers, streams, 1)) };
            let error = made.map(|_| ()).unwrap_err();
            assert_eq!(error.status(), Status::InvalidArgument, "{error}");
            error.text().to_owned()
        };
        let (a, b) = (pointer(device.address()), pointer(other.address()));
        let text = refused(vec![a, host.as_mut_ptr()], Vec::new());
        assert!(text.starts_with("options->pointers[1] is host memory"), "{text}");
        let text = refused(vec![a, pointer(other.address() + 4)], Vec::new());
        assert!(
            text.starts_with("options->pointers[1]: ") && text.contains("left in its allocation"),
            "{text}"
        );
        if !fewer_than(2) {
            let foreign = stream(1);
            let text = refused(vec![a, b], vec![StreamHandle::PER_THREAD, foreign.handle()]);
            assert_eq!(text, "options->streams[1]: the memory is on device 0, but its stream on device 1");
        }
        let address = other.address();
        drop(other);
        let text = refused(vec![a, pointer(address)], Vec::new());
        assert!(text.starts_with("options->pointers[1] is host memory (or freed)"), "{text}");
        // The device is as good as before.
        let own = stream(0);
        assert_eq!(read(&own, device.address(), 64), [0; 64]);
    });
}
