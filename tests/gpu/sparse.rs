//! Sparse allreduce of tensors in real device memory.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use unisono::communicator::sparse::{RawTensor, Sparse};
use unisono::communicator::{Call, Context};
use unisono::cuda::context::Devices;
use unisono::cuda::memory::{DeviceBuffer, PinnedBuffer};
use unisono::cuda::stream::Stream;
use unisono::deadline::Deadline;
use unisono::error::Status;
use unisono::reduce::{DataType, Operator};

use super::support::ranks;

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Values of an element.
const BLOCK: usize = 8;

type Places = BTreeMap<i64, Vec<f32>>;

/// A device, a stream on it, and memory for a tensor: elements of one coordinate.
struct Scene {
    devices: Arc<Devices>,
    device: u32,
    stream: Stream,
    nnz: usize,
    pinned: PinnedBuffer,
    indices: DeviceBuffer,
    values: DeviceBuffer,
}

impl Scene {
    fn new(rank: u32, nnz: usize) -> Scene {
        let devices = Devices::open().expect("a CUDA driver");
        let device = rank % devices.count();
        let stream = Stream::new(&devices, device, false).expect("a stream");
        let pinned = PinnedBuffer::new(&devices, device, nnz * (8 + BLOCK * 4)).expect("pinned memory");
        let indices = DeviceBuffer::new(&devices, device, nnz * 8).expect("device memory");
        let values = DeviceBuffer::new(&devices, device, nnz * BLOCK * 4).expect("device memory");
        Scene { devices, device, stream, nnz, pinned, indices, values }
    }

    /// The stream writes the tensor of `rank`; the pinned memory is the stream's until it has.
    fn write(&self, rank: u32, salt: i64) {
        let (numbers, values) = self.pinned_parts();
        for (element, (index, block)) in elements(rank, salt, self.nnz).into_iter().enumerate() {
            // SAFETY: the pinned memory holds `nnz` numbers and `nnz` blocks, and no stream uses it.
            unsafe {
                numbers.add(element).write(index);
                values.add(element * BLOCK).copy_from_nonoverlapping(block.as_ptr(), BLOCK);
            }
        }
        // SAFETY: the buffers are as long, and live until the stream has been waited for.
        unsafe {
            self.stream.copy_to_device(self.indices.address(), numbers.cast(), self.nnz * 8).and_then(|()| {
                self.stream.copy_to_device(self.values.address(), values.cast(), self.nnz * BLOCK * 4)
            })
        }
        .expect("copies to the device");
    }

    fn pinned_parts(&self) -> (*mut i64, *mut f32) {
        let start = self.pinned.address();
        (start.cast(), start.wrapping_add(self.nnz * 8).cast())
    }

    fn tensor(&self) -> RawTensor {
        let pointer =
            |buffer: &DeviceBuffer| std::ptr::with_exposed_provenance::<u8>(buffer.address() as usize);
        RawTensor {
            indices: pointer(&self.indices).cast(),
            values: pointer(&self.values),
            nnz: self.nnz as u64,
            dims: 1,
            block: BLOCK as u64,
            dtype: DataType::F32,
        }
    }

    fn call(&self) -> Call {
        Call { stream: Some(self.stream.handle()), ..Call::default() }
    }

    /// Brings a result to the device and back, by the stream.
    fn by_way_of_the_device(&self, result: &Sparse) -> Places {
        let nnz = result.nnz() as usize;
        let (numbers, bytes) = (nnz * 8, nnz * BLOCK * 4);
        let indices = DeviceBuffer::new(&self.devices, self.device, numbers).expect("device memory");
        let values = DeviceBuffer::new(&self.devices, self.device, bytes).expect("device memory");
        let back = PinnedBuffer::new(&self.devices, self.device, numbers + bytes).expect("pinned memory");
        let pointer =
            |buffer: &DeviceBuffer| std::ptr::with_exposed_provenance_mut::<u8>(buffer.address() as usize);
        // SAFETY: the buffers are as long, and live until the stream has been waited for.
        unsafe {
            result
                .copy(pointer(&indices).cast(), pointer(&values), Some(self.stream.handle()))
                .and_then(|()| self.stream.copy_to_host(back.address(), indices.address(), numbers))
                .and_then(|()| self.stream.copy_to_host(back.address().add(numbers), values.address(), bytes))
                .expect("copies");
        }
        self.stream.synchronize(Deadline::after(PATIENCE)).expect("the stream ends");
        // SAFETY: the copies have filled it, and numbers have any bits.
        let (numbers, values) = unsafe {
            (
                std::slice::from_raw_parts(back.address().cast::<i64>(), nnz),
                std::slice::from_raw_parts(back.address().add(numbers).cast::<f32>(), nnz * BLOCK),
            )
        };
        assert!(numbers.is_sorted_by(|a, b| a < b));
        numbers.iter().copied().zip(values.chunks(BLOCK).map(<[f32]>::to_vec)).collect()
    }
}

/// A rank's elements, with duplicates, and places that ranks share. Whole numbers, so that sums are exact.
fn elements(rank: u32, salt: i64, nnz: usize) -> Vec<(i64, Vec<f32>)> {
    (0..nnz as i64)
        .map(|at| {
            let index = (at * (i64::from(rank) + 3) + salt) % (nnz as i64 + 7);
            (index, (0..BLOCK as i64).map(|value| ((at + value + salt) % 50) as f32).collect())
        })
        .collect()
}

fn sum(size: u32, salt: i64, nnz: impl Fn(u32) -> usize) -> Places {
    let mut places = Places::new();
    for (index, block) in (0..size).flat_map(|rank| elements(rank, salt, nnz(rank))) {
        let place = places.entry(index).or_insert_with(|| vec![0.0; BLOCK]);
        place.iter_mut().zip(block).for_each(|(sum, value)| *sum += value);
    }
    places
}

fn wait(context: &Context, scene: &Scene, salt: i64) -> Sparse {
    scene.write(context.rank(), salt);
    // SAFETY: the scene lives until the work has ended.
    let started = unsafe { context.start_sparse(&scene.tensor(), Operator::Sum, &scene.call()) };
    let (work, result) = started.expect("it starts");
    work.wait(Deadline::after(PATIENCE)).expect("it ends well");
    result
}

#[test]
fn tensors_come_from_devices_and_go_back_in_the_order_of_streams() {
    for transports in ["shm", "tcp"] {
        for most in [1, 1000, 60_000] {
            ranks(3, transports, |context| {
                let nnz = |rank: u32| most - rank as usize * most / 4;
                let scene = Scene::new(context.rank(), nnz(context.rank()));
                for salt in 0..3 {
                    let result = wait(context, &scene, salt);
                    let found = scene.by_way_of_the_device(&result);
                    assert!(found == sum(3, salt, nnz), "{transports}, {most} elements, round {salt}");
                }
                // Without a stream, and blocking.
                scene.write(context.rank(), 9);
                scene.stream.synchronize(Deadline::after(PATIENCE)).expect("the stream ends");
                // SAFETY: the scene lives until the call has ended.
                let result = unsafe { context.run_sparse(&scene.tensor(), Operator::Sum, &Call::default()) };
                let found = scene.by_way_of_the_device(&result.expect("a sum"));
                assert!(found == sum(3, 9, nnz), "{transports}, {most} elements, without a stream");
            });
        }
    }
}

#[test]
fn a_call_starts_when_its_stream_comes_to_it_and_other_streams_wait_for_the_work() {
    ranks(2, "shm", |context| {
        let nnz = |_| 500;
        let scene = Scene::new(context.rank(), 500);
        // What calls run in is there from the first on: nothing is allocated while a stream is held up.
        (0..3).for_each(|salt| drop(wait(context, &scene, salt)));
        let other = Stream::new(&scene.devices, scene.device, false).expect("a stream");
        let word = scene.devices.word(scene.device).expect("a word");
        scene.stream.wait_word(&word).expect("it waits");
        scene.write(context.rank(), 5);
        // SAFETY: the scene lives until the work has ended.
        let started = unsafe { context.start_sparse(&scene.tensor(), Operator::Sum, &scene.call()) };
        let (work, result) = started.expect("it starts");
        // SAFETY: the stream lives until the end.
        unsafe { work.block_stream(other.handle()) }.expect("it waits");
        std::thread::sleep(Duration::from_millis(50));
        assert!(work.test().is_none(), "its stream has not come to the call");
        word.release();
        other.synchronize(Deadline::after(PATIENCE)).expect("the other stream ends");
        assert!(work.test().is_some_and(|result| result.is_ok()), "the other stream waited for the work");
        assert!(scene.by_way_of_the_device(&result) == sum(2, 5, nnz));
    });
}

#[test]
fn what_is_wrong_is_named_and_breaks_nothing() {
    ranks(2, "shm", |context| {
        let scene = Scene::new(context.rank(), 100);
        let good = scene.tensor();
        let host = [0i64; 100];
        for (tensor, words) in [
            (RawTensor { indices: host.as_ptr(), ..good }, "one of indices and values is device memory"),
            (RawTensor { nnz: 101, ..good }, "bytes left in its allocation"),
            (RawTensor { values: std::ptr::null(), ..good }, "values is NULL"),
        ] {
            // SAFETY: it is refused before anything is read.
            let refused = unsafe { context.run_sparse(&tensor, Operator::Sum, &scene.call()) };
            let error = refused.expect_err("it is refused");
            assert_eq!(error.status(), Status::InvalidArgument, "{error}");
            assert!(error.text().contains(words), "{error} does not say {words}");
        }
        let result = wait(context, &scene, 1);
        assert!(scene.by_way_of_the_device(&result) == sum(2, 1, |_| 100));
    });
}
