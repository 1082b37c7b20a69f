//! The C face's batches: messages between GPUs, with both halves of each exchange on one stream, and both ranks of
//! the group in one thread, which connects their devices in a batch, too.

use std::ffi::{CStr, c_void};
use std::ptr;
use std::thread;
use std::time::Instant;

use unisono::cuda::memory::DeviceBuffer;
use unisono::cuda::stream::Stream;
use unisono::ffi::{
    unisono_batch_begin, unisono_batch_end, unisono_call_t, unisono_context_connect_device,
    unisono_context_create, unisono_context_destroy, unisono_context_options_t, unisono_context_t,
    unisono_dtype, unisono_last_error, unisono_receive, unisono_send, unisono_unique_id_create,
    unisono_unique_id_t,
};

use super::cuda::{devices, raw, read, soon, write};

const FLOAT32: i32 = unisono_dtype::UNISONO_FLOAT32 as i32;
/// Elements of the longest message.
const MOST: usize = 16 << 20;
const RANKS: u32 = 2;

/// A rank of the thread.
struct Rank {
    ctx: *mut unisono_context_t,
    stream: Stream,
    input: DeviceBuffer,
    output: DeviceBuffer,
}

#[track_caller]
fn ok(status: i32) {
    // SAFETY: never NULL, and there until this thread's next failure.
    let text = unsafe { CStr::from_ptr(unisono_last_error()) };
    assert_eq!(status, 0, "{}", text.to_string_lossy());
}

/// The context of a rank, by its address.
fn create(id: &unisono_unique_id_t, rank: u32) -> usize {
    let options = unisono_context_options_t {
        size: size_of::<unisono_context_options_t>() as u64,
        rank,
        rank_count: RANKS,
        store: ptr::null(),
        id,
        name: ptr::null(),
        timeout_ms: 0,
        interface: ptr::null(),
        transports: ptr::null(),
        max_blocks: 0,
        reserved: 0,
    };
    let mut ctx = ptr::null_mut();
    // SAFETY: the options and the id are there during the call, which fills `ctx`.
    ok(unsafe { unisono_context_create(&raw const options, &raw mut ctx) });
    ctx.expose_provenance()
}

fn batch(calls: impl FnOnce()) {
    ok(unisono_batch_begin());
    calls();
    // SAFETY: contexts and buffers outlive the streams' work.
    ok(unsafe { unisono_batch_end() });
}

/// Each rank sends its input to the other one, and receives, on its own stream.
fn exchange(ranks: &[Rank], count: usize) {
    batch(|| {
        for (rank, me) in (0..).zip(ranks) {
            let stream = raw(me.stream.handle().0);
            let call = unisono_call_t { stream, ..Default::default() };
            let input: *const c_void = raw::<c_void>(me.input.address() as usize);
            let output: *mut c_void = raw(me.output.address() as usize);
            let peer = 1 - rank;
            // SAFETY: the buffers hold as much, and outlive the stream's work.
            unsafe {
                ok(unisono_send(
                    me.ctx,
                    input,
                    count as u64,
                    FLOAT32,
                    peer,
                    &raw const call,
                    ptr::null_mut(),
                ));
                ok(unisono_receive(
                    me.ctx,
                    output,
                    count as u64,
                    FLOAT32,
                    peer,
                    &raw const call,
                    ptr::null_mut(),
                ));
            }
        }
    });
}

#[test]
fn one_thread_exchanges_messages_between_its_gpus() {
    let devices = devices();
    let mut id = unisono_unique_id_t { bytes: [0; 128] };
    // SAFETY: filled by the call.
    ok(unsafe { unisono_unique_id_create(&raw mut id) });
    let contexts = thread::scope(|scope| {
        let other = scope.spawn(|| create(&id, 1));
        [create(&id, 0), other.join().expect("a context")]
    });
    let ranks: Vec<Rank> = (0..)
        .zip(contexts)
        .map(|(rank, ctx)| {
            let device = rank % devices.count();
            let buffer = || DeviceBuffer::new(&devices, device, 4 * MOST).expect("memory");
            let stream = Stream::new(&devices, device, false).expect("a stream");
            Rank { ctx: raw(ctx), stream, input: buffer(), output: buffer() }
        })
        .collect();
    batch(|| {
        for (rank, me) in (0..).zip(&ranks) {
            // SAFETY: a context of this test.
            ok(unsafe { unisono_context_connect_device(me.ctx, rank % devices.count()) });
        }
    });
    let mut best = f64::MAX;
    for (turn, count) in [1, 1000, 100_003, MOST, MOST, MOST].into_iter().enumerate() {
        for (rank, me) in ranks.iter().enumerate() {
            let value = (10 * turn + rank) as f32;
            write(me.input.device(), me.input.address(), &value.to_ne_bytes().repeat(count));
            write(me.output.device(), me.output.address(), &(-1f32).to_ne_bytes().repeat(count));
        }
        let start = Instant::now();
        exchange(&ranks, count);
        for me in &ranks {
            me.stream.synchronize(soon()).expect("the stream ends");
        }
        best = if count == MOST { best.min(start.elapsed().as_secs_f64()) } else { best };
        for (rank, me) in ranks.iter().enumerate() {
            let wanted = ((10 * turn + 1 - rank) as f32).to_ne_bytes();
            let found = read(&me.stream, me.output.address(), 4 * count);
            assert!(found.chunks_exact(4).all(|value| value == wanted), "rank {rank}, turn {turn}");
        }
    }
    println!("@ batches: {} MiB each way in {:.0} us", (4 * MOST) >> 20, best * 1e6);
    for me in ranks {
        // SAFETY: nobody uses it any more.
        unsafe { unisono_context_destroy(me.ctx) };
    }
}
