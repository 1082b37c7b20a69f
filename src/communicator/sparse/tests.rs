//! Tensors in device memory, over the driver double, what is refused, and what takes long.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::pace::LOOK_BYTES;
use super::{Input, RawTensor, Sparse};
use crate::communicator::{Call, Context, Options, Rendezvous, Work};
use crate::cuda::context::Devices;
use crate::cuda::double::{Double, Order, Waiting};
use crate::cuda::driver::StreamHandle;
use crate::cuda::event::Event;
use crate::cuda::stream::Stream;
use crate::deadline::Deadline;
use crate::engine::endpoint::{Through, lock};
use crate::engine::joint::Team;
use crate::error::{Error, Result, Status};
use crate::reduce::{DataType, Operator};
use crate::rendezvous::hash::HashStore;
use crate::rendezvous::store::Store;

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// One rank: its context, its devices, a stream of its caller's.
struct Rank {
    context: Context,
    double: Arc<Double>,
    devices: Arc<Devices>,
    stream: StreamHandle,
}

/// Runs `body` on `size` ranks, each with a driver of its own that goes on when nobody asks it, as devices
/// do.
fn ranks(size: u32, transports: &str, order: Order, body: impl Fn(u32, &Rank) + Sync) {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    std::thread::scope(|scope| {
        for rank in 0..size {
            let (store, body) = (store.clone(), &body);
            scope.spawn(move || {
                let context = Context::create(Options {
                    rank,
                    size,
                    rendezvous: Rendezvous::Store(store),
                    name: String::new(),
                    timeout: PATIENCE,
                    interface: Some("127.0.0.1".into()),
                    transports: Some(transports.into()),
                    host: None,
                })
                .expect("the ranks meet");
                // Nobody fails while others still make their context.
                let (nnz, dims, block, dtype) = (0, 1, 1, DataType::F32);
                let nothing = Input { indices: &[], values: &[], nnz, dims, block, dtype };
                context.sparse_allreduce(&nothing, Operator::Sum, &Call::default()).expect("all are there");
                let double = Double::new(2, order);
                let devices = Devices::over(double.clone()).expect("a driver");
                context.cuda().pretend(&devices, 0);
                let stream = double.stream(0);
                let stop = AtomicBool::new(false);
                let clock = Event::new(&devices, 0).expect("an event");
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        while !stop.load(Ordering::Relaxed) {
                            // Time passes while the host asks.
                            let _ = clock.query();
                            std::thread::sleep(Duration::from_micros(50));
                        }
                    });
                    let stops = Stop(&stop);
                    body(rank, &Rank { context, double: double.clone(), devices: devices.clone(), stream });
                    drop(stops);
                });
                double.drain();
                assert_eq!(double.complaints(), Vec::<String>::new());
            });
        }
    });
}

/// Stops the clock, also when a test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Elements of one coordinate: index and value.
type List = Vec<(i64, f32)>;

fn bytes(list: &List) -> (Vec<u8>, Vec<u8>) {
    let indices = list.iter().flat_map(|(index, _)| index.to_ne_bytes()).collect();
    (indices, list.iter().flat_map(|(_, value)| value.to_ne_bytes()).collect())
}

fn tensor(indices: u64, values: u64, nnz: usize) -> RawTensor {
    let pointer = |address: u64| std::ptr::with_exposed_provenance::<u8>(address as usize);
    let (nnz, dims, block, dtype) = (nnz as u64, 1, 1, DataType::F32);
    RawTensor { indices: pointer(indices).cast(), values: pointer(values), nnz, dims, block, dtype }
}

impl Rank {
    fn call(&self) -> Call {
        Call { stream: Some(self.stream), ..Call::default() }
    }

    /// Room for a list on a device.
    fn room(&self, device: u32, list: &List) -> (u64, u64) {
        (self.double.memory(device, list.len() * 8), self.double.memory(device, list.len() * 4))
    }

    /// The stream writes the list there.
    fn fill(&self, (indices, values): (u64, u64), list: &List) {
        let (numbers, bytes) = bytes(list);
        self.double.fill(self.stream, 0, indices, &numbers);
        self.double.fill(self.stream, 0, values, &bytes);
    }

    fn start(&self, tensor: &RawTensor, call: &Call) -> Result<(Work, Sparse)> {
        // SAFETY: the double trusts no address, and keeps memory until it is dropped.
        unsafe { self.context.start_sparse(tensor, Operator::Sum, call) }
    }

    fn refusal(&self, tensor: &RawTensor, call: &Call) -> Error {
        self.start(tensor, call).err().expect("it is refused")
    }

    /// Copies the result to the device, by the stream, and has it compared there.
    fn expect(&self, result: &Sparse, list: &List) {
        let (numbers, bytes) = bytes(list);
        let (indices, values) = self.room(0, list);
        let pointer = |address: u64| std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
        // SAFETY: the double keeps its memory.
        unsafe { result.copy(pointer(indices).cast(), pointer(values), Some(self.stream)) }.expect("a copy");
        self.double.expect(self.stream, 0, indices, &numbers, "the indices of the result");
        self.double.expect(self.stream, 0, values, &bytes, "the values of the result");
    }
}

/// What a rank contributes: duplicates, and places that ranks share.
fn list(rank: u32) -> List {
    (0..20).map(|at| (at * (i64::from(rank) + 1) % 13, (at + 1) as f32)).collect()
}

/// What comes of it.
fn sum(size: u32) -> List {
    sum_of(size, list)
}

fn sum_of(size: u32, list: fn(u32) -> List) -> List {
    let mut places = std::collections::BTreeMap::new();
    for (index, value) in (0..size).flat_map(list) {
        *places.entry(index).or_insert(0.0) += value;
    }
    places.into_iter().collect()
}

/// What a rank contributes to a call that takes many looks: not in order, with duplicates. Three ranks merge
/// a part each.
fn long_list(rank: u32) -> List {
    let index = |at: i64| at * (7919 + i64::from(rank)) % 50_021 - 25_000;
    (0..60_000).map(|at| (index(at), (at % 64) as f32)).collect()
}

/// Calls with a list in host memory.
fn on_host<T>(list: &List, call: impl FnOnce(&Input<'_>) -> T) -> T {
    let (indices, values): (Vec<i64>, Vec<f32>) = list.iter().copied().unzip();
    let values: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
    let (nnz, dims, block, dtype) = (indices.len() as u64, 1, 1, DataType::F32);
    call(&Input { indices: &indices, values: &values, nnz, dims, block, dtype })
}

fn host(result: &Sparse) -> List {
    let values = result.values().as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes));
    result.indices().iter().copied().zip(values).collect()
}

#[test]
fn device_tensors_are_read_and_written_in_the_order_of_their_streams() {
    for transports in ["shm", "tcp"] {
        for order in Order::all(3) {
            ranks(2, transports, order, |rank, this| {
                let at = this.room(0, &list(rank));
                for blocking in [false, true] {
                    this.fill(at, &list(rank));
                    let input = tensor(at.0, at.1, 20);
                    let result = if blocking {
                        // SAFETY: as in `start`.
                        unsafe { this.context.run_sparse(&input, Operator::Sum, &this.call()) }
                            .expect("a sum")
                    } else {
                        let (work, result) = this.start(&input, &this.call()).expect("it starts");
                        // The next write of the stream comes after the tensor has been read.
                        this.fill(at, &vec![(99, 99.0); 20]);
                        work.wait(Deadline::after(PATIENCE)).expect("it ends well");
                        result
                    };
                    assert_eq!(host(&result), sum(2), "{transports}, {order:?}");
                    this.expect(&result, &sum(2));
                }
            });
        }
    }
}

#[test]
fn a_second_call_creates_nothing() {
    ranks(2, "tcp", Order::RoundRobin, |rank, this| {
        let at = this.room(0, &list(rank));
        let to = this.room(0, &sum(2));
        let pointer = |address: u64| std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
        // SAFETY: it is a stream of the double.
        let stream = unsafe { Stream::borrow(&this.devices, 0, this.stream) }.expect("a stream");
        let mut before = 0;
        // A device begins with some memory of this size.
        for round in 0..40 {
            this.fill(at, &list(rank));
            // SAFETY: as in `start`.
            let result =
                unsafe { this.context.run_sparse(&tensor(at.0, at.1, 20), Operator::Sum, &this.call()) };
            // SAFETY: the double keeps its memory.
            unsafe { result.expect("a sum").copy(pointer(to.0).cast(), pointer(to.1), Some(this.stream)) }
                .expect("a copy");
            while !stream.query().expect("it is well") {
                std::thread::yield_now();
            }
            if round == 0 {
                before = this.double.creations();
            }
        }
        assert_eq!(this.double.creations(), before);
    });
}

#[test]
fn ranks_differ_in_where_their_tensors_are() {
    ranks(3, "shm,tcp", Order::RoundRobin, |rank, this| {
        let mine = if rank == 2 { vec![] } else { list(rank) };
        let wanted = sum(2);
        let (numbers, values): (Vec<i64>, Vec<f32>) = mine.iter().copied().unzip();
        let room = this.room(1, &list(rank));
        let (work, result) = match rank {
            0 => {
                let values: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
                let (nnz, dims, block, dtype) = (20, 1, 1, DataType::F32);
                let input = Input { indices: &numbers, values: &values, nnz, dims, block, dtype };
                this.context.start_sparse_allreduce(&input, Operator::Sum, &Call::default())
            }
            // Without a stream: after what the default stream of the memory's device was given before.
            1 => {
                let (numbers, values) = bytes(&mine);
                this.double.fill(StreamHandle::LEGACY, 1, room.0, &numbers);
                this.double.fill(StreamHandle::LEGACY, 1, room.1, &values);
                this.start(&tensor(room.0, room.1, 20), &Call::default())
            }
            // Nothing, wherever it is, and with a stream.
            _ => this.start(&tensor(0, 0, 0), &this.call()),
        }
        .expect("it starts");
        work.wait(Deadline::after(PATIENCE)).expect("it ends well");
        assert_eq!(host(&result), wanted, "rank {rank}");
        if rank == 1 {
            // Without a stream the copies are there on return.
            let room = this.room(1, &wanted);
            let pointer = |address: u64| std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
            // SAFETY: the double keeps its memory.
            unsafe { result.copy(pointer(room.0).cast(), pointer(room.1), None) }.expect("a copy");
            let (numbers, values) = bytes(&wanted);
            assert_eq!(
                (this.double.peek(room.0, numbers.len()), this.double.peek(room.1, values.len())),
                (numbers, values)
            );
        }
    });
}

#[test]
fn streams_wait_for_the_work_instead_of_the_host() {
    ranks(2, "shm", Order::RoundRobin, |rank, this| {
        let at = this.room(0, &list(rank));
        this.fill(at, &list(rank));
        let (work, result) = this.start(&tensor(at.0, at.1, 20), &this.call()).expect("it starts");
        let other = this.double.stream(0);
        // SAFETY: it is a stream of the double.
        unsafe { work.block_stream(other) }.expect("it waits");
        work.wait(Deadline::after(PATIENCE)).expect("it ends well");
        assert_eq!(host(&result), sum(2));
    });
}

#[test]
fn a_group_of_one_has_its_result_at_once() {
    for order in Order::all(3) {
        ranks(1, "shm", order, |_, this| {
            let at = this.room(0, &list(0));
            this.fill(at, &list(0));
            let (work, result) = this.start(&tensor(at.0, at.1, 20), &this.call()).expect("it starts");
            assert!(work.test().is_some_and(|result| result.is_ok()));
            assert_eq!(host(&result), sum(1));
            this.expect(&result, &sum(1));
        });
    }
}

#[test]
fn what_is_wrong_with_memory_and_streams_is_named() {
    ranks(1, "shm", Order::Eager, |_, this| {
        let (indices, values) = this.room(0, &list(0));
        let (there, elsewhere) = (this.room(1, &list(0)), [0i64; 20]);
        let here = elsewhere.as_ptr().expose_provenance() as u64;
        let other = Call { stream: Some(this.double.stream(1)), ..Call::default() };
        let plain = Call::default();
        for (input, call, words) in [
            (tensor(indices, there.1, 20), &plain, "indices is memory of GPU 0, but values of GPU 1"),
            (tensor(here, values, 20), &plain, "one of indices and values is device memory"),
            (tensor(here, here, 20), &this.call(), "the tensor is in host memory"),
            (tensor(indices, values, 20), &other, "call->stream is a stream of GPU 1"),
            (tensor(indices, values + 40, 20), &plain, "values has 40 bytes left"),
            (tensor(indices + 4, values, 19), &plain, "indices is not aligned"),
            (tensor(0, values, 20), &plain, "indices is NULL, but nnz is 20"),
            (tensor(indices, 0, 20), &plain, "values is NULL, but nnz is 20"),
            (tensor(indices, values, usize::MAX / 8), &plain, "more than memory holds"),
        ] {
            let error = this.refusal(&input, call);
            assert_eq!(error.status(), Status::InvalidArgument, "{error}");
            assert!(error.text().contains(words), "{error} does not say {words}");
        }
        this.double.begin_capture(this.stream, 0);
        let error = this.refusal(&tensor(indices, values, 20), &this.call());
        assert_eq!(error.status(), Status::InvalidUsage, "{error}");
        assert!(error.text().contains("captured"), "{error}");
        this.double.end_capture(this.stream, 0).expect("the capture is whole");
        assert!(this.devices.count() == 2 && this.context.failure().is_none());
    });
}

#[test]
fn copies_of_a_result_are_checked() {
    ranks(1, "shm", Order::Eager, |_, this| {
        let at = this.room(0, &list(0));
        this.fill(at, &list(0));
        let (_, result) = this.start(&tensor(at.0, at.1, 20), &this.call()).expect("it starts");
        let pointer = |address: u64| std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
        let (near, far) = (this.room(0, &sum(1)), this.room(1, &sum(1)));
        let short = this.double.memory(0, 8);
        let mut numbers = vec![0i64; sum(1).len()];
        let own = numbers.as_mut_ptr().expose_provenance() as u64;
        let copy = |indices: u64, values: u64, stream| {
            // SAFETY: the double keeps its memory, and the lists live.
            unsafe { result.copy(pointer(indices).cast(), pointer(values), stream) }
        };
        for (indices, values, stream, words) in [
            (near.0, far.1, None, "not memory of one device"),
            (own, near.1, None, "not memory of one device"),
            (short, near.1, None, "indices has 8 bytes left"),
            (own, 0, Some(this.stream), "the destinations are host memory"),
            (far.0, far.1, Some(this.stream), "but its stream on device 0"),
        ] {
            let error = copy(indices, values, stream).expect_err("it is refused");
            assert_eq!(error.status(), Status::InvalidArgument, "{error}");
            assert!(error.text().contains(words), "{error} does not say {words}");
        }
        // Only one of them is wanted, on the host.
        copy(own, 0, None).expect("a copy");
        assert_eq!(numbers, sum(1).iter().map(|(index, _)| *index).collect::<Vec<_>>());

        let empty = Sparse { dims: 1, tensor: Arc::default(), devices: None, endpoint: Weak::new() };
        // SAFETY: it has nothing to copy.
        let error =
            unsafe { empty.copy(std::ptr::null_mut(), std::ptr::null_mut(), None) }.expect_err("not there");
        assert_eq!(error.status(), Status::InvalidUsage, "{error}");
    });
}

#[test]
fn a_call_that_fails_while_its_stream_is_far_behind_leaves_nothing_to_go_wrong() {
    ranks(2, "shm", Order::RoundRobin, |rank, this| {
        let at = this.room(0, &list(rank));
        if rank == 0 {
            let word = this.devices.word(0).expect("a word");
            // SAFETY: it is a stream of the double.
            let stream = unsafe { Stream::borrow(&this.devices, 0, this.stream) };
            stream.expect("a stream").wait_word(&word).expect("it waits");
            let (work, result) = this.start(&tensor(at.0, at.1, 20), &this.call()).expect("it starts");
            assert!(work.test().is_none(), "its stream has not come so far");
            this.context.abort();
            let error = work.wait(Deadline::after(PATIENCE)).expect_err("it was aborted");
            assert_eq!((error.status(), result.nnz()), (Status::Aborted, 0), "{error}");
            // The stream goes on when it can, over memory that is still there.
            word.release();
        } else {
            let (numbers, values) = ([0i64; 1], [0u8; 4]);
            let (nnz, dims, block, dtype) = (1, 1, 1, DataType::F32);
            let input = Input { indices: &numbers, values: &values, nnz, dims, block, dtype };
            let result = this.context.sparse_allreduce(&input, Operator::Sum, &Call::default());
            assert_eq!(result.expect_err("rank 0 aborts").status(), Status::Aborted);
        }
    });
}

#[test]
fn a_driver_that_fails_one_rank_fails_all() {
    ranks(2, "shm", Order::RoundRobin, |rank, this| {
        let at = this.room(0, &list(rank));
        if rank == 0 {
            // The refusal of a capture, then the load: somewhere in it.
            let mut error = None;
            for failing in 12..40 {
                this.double.fail_call(failing);
                if let Err(found) = this.start(&tensor(at.0, at.1, 20), &this.call()) {
                    error = Some(found);
                    break;
                }
            }
            let error = error.expect("the driver fails it");
            assert_eq!(error.status(), Status::Cuda, "{error}");
            assert!(this.context.failure().is_some(), "{error}");
        } else {
            let (numbers, values) = ([0i64; 1], [0u8; 4]);
            let (nnz, dims, block, dtype) = (1, 1, 1, DataType::F32);
            let input = Input { indices: &numbers, values: &values, nnz, dims, block, dtype };
            let error = loop {
                if let Err(error) = this.context.sparse_allreduce(&input, Operator::Sum, &Call::default()) {
                    break error;
                }
            };
            assert_eq!(error.status(), Status::Cuda, "{error}");
        }
    });
}

#[test]
fn a_copy_of_a_result_makes_no_stream_while_a_stream_waits() {
    ranks(1, "shm", Order::RoundRobin, |_, this| {
        let at = this.room(0, &list(0));
        this.fill(at, &list(0));
        // SAFETY: it is a stream of the double.
        let stream = unsafe { Stream::borrow(&this.devices, 0, this.stream) }.expect("a stream");
        // The call is in the order of no stream.
        stream.synchronize(Deadline::after(PATIENCE)).expect("the input is there");
        let (_, result) = this.start(&tensor(at.0, at.1, 20), &Call::default()).expect("it starts");
        let room = this.room(0, &sum(1));
        let gate = this.devices.word(0).expect("a word");
        stream.wait_word(&gate).expect("it waits");
        this.double.hold_lock(Waiting::Seen, Duration::from_secs(3));
        let pointer = |address: u64| std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
        // SAFETY: the double keeps its memory.
        unsafe { result.copy(pointer(room.0).cast(), pointer(room.1), None) }.expect("a copy");
        let (numbers, values) = bytes(&sum(1));
        assert_eq!(this.double.peek(room.0, numbers.len()), numbers);
        assert_eq!(this.double.peek(room.1, values.len()), values);
        assert_eq!(this.double.complaints(), Vec::<String>::new());
        gate.release();
    });
}

#[test]
fn a_rank_that_has_no_memory_for_its_copy_fails_all() {
    ranks(2, "shm", Order::RoundRobin, |rank, this| {
        let error = if rank == 0 {
            // So much is refused before anything of it is read.
            let here = 8;
            this.refusal(&tensor(here, here, 1 << 58), &Call::default())
        } else {
            let (numbers, values) = ([0i64; 1], [0u8; 4]);
            let (nnz, dims, block, dtype) = (1, 1, 1, DataType::F32);
            let input = Input { indices: &numbers, values: &values, nnz, dims, block, dtype };
            let result = this.context.sparse_allreduce(&input, Operator::Sum, &Call::default());
            result.expect_err("rank 0 cannot take part")
        };
        assert_eq!(error.status(), Status::OutOfMemory, "{error}");
        assert!(this.context.failure().is_some(), "{error}");
    });
}

#[test]
fn only_a_tensor_on_its_way_from_a_device_has_the_driver_asked() {
    ranks(2, "shm", Order::RoundRobin, |rank, this| {
        let start =
            |input: &Input<'_>| this.context.start_sparse_allreduce(input, Operator::Sum, &Call::default());
        let (work, result) = on_host(&list(rank), start).expect("it starts");
        let running = work.host().expect("the host moves it");
        assert_eq!((running.asks_driver(), running.through()), (false, Through::Messages));
        work.wait(Deadline::after(PATIENCE)).expect("it ends well");
        assert_eq!(host(&result), sum(2));

        let at = this.room(0, &list(rank));
        this.fill(at, &list(rank));
        let (work, result) = this.start(&tensor(at.0, at.1, 20), &this.call()).expect("it starts");
        let running = work.host().expect("the host moves it");
        assert_eq!((running.asks_driver(), running.through()), (true, Through::Device));
        work.wait(Deadline::after(PATIENCE)).expect("it ends well");
        assert_eq!(host(&result), sum(2));
    });
}

#[test]
fn a_call_that_its_own_work_makes_late_blames_neither_the_driver_nor_another_rank() {
    for blocking in [false, true] {
        ranks(2, "shm", Order::RoundRobin, |rank, this| {
            let mut call = Call::default();
            if rank == 0 {
                call.timeout = Some(Duration::from_millis(500));
                *lock(&this.context.sparse_memory().probe.stall) = Duration::from_secs(2);
            }
            let answer = on_host(&list(rank), |input| match blocking {
                true => this.context.sparse_allreduce(input, Operator::Sum, &call).map(drop),
                false => {
                    let started = this.context.start_sparse_allreduce(input, Operator::Sum, &call);
                    started.and_then(|(work, _)| work.wait(Deadline::after(PATIENCE)).map(drop))
                }
            });
            let error = answer.expect_err("rank 0 is late");
            assert_eq!(error.status(), Status::Timeout, "{error}");
            for words in ["rank 0", "here, its elements are still being sorted"] {
                assert!(error.text().contains(words), "{error} does not say {words}");
            }
            for words in ["driver", "nothing from", "Look at"] {
                assert!(!error.text().contains(words), "{error} says {words}");
            }
        });
    }
}

#[test]
fn a_call_in_a_forked_child_is_refused_at_once_whoever_has_locks() {
    ranks(2, "shm", Order::RoundRobin, |rank, this| {
        if rank != 0 {
            return;
        }
        let (numbers, values) = ([0i64; 1], [0u8; 4]);
        let (nnz, dims, block, dtype) = (1, 1, 1, DataType::F32);
        let input = Input { indices: &numbers, values: &values, nnz, dims, block, dtype };
        let call = Call::default();
        for blocking in [false, true] {
            let is_refused = || {
                let answer = match blocking {
                    true => this.context.sparse_allreduce(&input, Operator::Sum, &call).map(drop),
                    false => this.context.start_sparse_allreduce(&input, Operator::Sum, &call).map(drop),
                };
                answer.is_err_and(|error| error.status() == Status::InvalidUsage)
            };
            assert!(this.context.sparse_memory().goes_well_in_a_child(is_refused), "blocking: {blocking}");
        }
    });
}

#[test]
fn an_index_that_one_rank_has_often_takes_as_many_looks_as_its_bytes_ask_for() {
    const TIMES: usize = 8000;
    const BLOCK: usize = 1024;
    let value = |rank: u32, time: usize, position: usize| ((rank as usize + time + position) % 8) as f32;
    let due: Vec<f32> = (0..BLOCK)
        .map(|position| (0..2).flat_map(|rank| (0..TIMES).map(move |time| value(rank, time, position))).sum())
        .collect();
    ranks(2, "shm", Order::RoundRobin, |rank, this| {
        let positions = (0..TIMES).flat_map(|time| (0..BLOCK).map(move |position| (time, position)));
        let values: Vec<u8> =
            positions.flat_map(|(time, position)| value(rank, time, position).to_ne_bytes()).collect();
        let indices = [7_i64; TIMES];
        let (nnz, dims, block, dtype) = (TIMES as u64, 1, BLOCK as u64, DataType::F32);
        let input = Input { indices: &indices, values: &values, nnz, dims, block, dtype };
        let looks = || this.context.sparse_memory().probe.looks.load(Ordering::Relaxed);
        let before = looks();
        let result = this.context.sparse_allreduce(&input, Operator::Sum, &Call::default()).expect("a sum");
        assert_eq!(result.indices(), [7]);
        assert!(result.values() == due.iter().flat_map(|sum| sum.to_ne_bytes()).collect::<Vec<u8>>());
        let threads = this.context.endpoint().expect("a group").threads();
        let fewest = values.len() / (2 * LOOK_BYTES * threads);
        assert!(looks() - before >= fewest, "{} looks by {threads} threads", looks() - before);
    });
}

#[test]
fn long_calls_stop_in_the_middle_and_come_to_the_same() {
    for size in [2, 3] {
        let due = sum_of(size, long_list);
        for transports in ["shm", "tcp"] {
            ranks(size, transports, Order::RoundRobin, |rank, this| {
                let looks = || this.context.sparse_memory().probe.looks.load(Ordering::Relaxed);
                let call = Call::default();
                for blocking in [false, true] {
                    let before = looks();
                    let result = on_host(&long_list(rank), |input| {
                        if blocking {
                            return this
                                .context
                                .sparse_allreduce(input, Operator::Sum, &call)
                                .expect("a sum");
                        }
                        let started = this.context.start_sparse_allreduce(input, Operator::Sum, &call);
                        let (work, result) = started.expect("it starts");
                        // Nobody waits: a thread of the library moves it.
                        let ended = loop {
                            match work.peek() {
                                Some(ended) => break ended,
                                None => std::thread::sleep(Duration::from_millis(1)),
                            }
                        };
                        ended.expect("it ends well");
                        result
                    });
                    assert!(host(&result) == due, "{transports}, {size} ranks, blocking: {blocking}");
                    assert!(looks() - before > 20, "{} looks", looks() - before);
                }
            });
        }
    }
}
