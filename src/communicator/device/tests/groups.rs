//! Collectives that are one launch.

use super::*;
use crate::communicator::{start_parts, start_together};
use crate::cuda::double::{Clock, DoubleKernels, Waiting};
use crate::schedule::Algorithm;

/// A sum of so many words on a stream, in place.
pub(super) fn request(count: u64, address: u64) -> Request {
    let memory = std::ptr::with_exposed_provenance_mut(address as usize);
    Request {
        kind: Kind::Allreduce,
        input: memory,
        output: memory,
        counts: Counts::Uniform(count),
        dtype: DataType::U32,
        operator: Operator::Sum,
        root: 0,
    }
}

fn on(stream: Option<StreamHandle>) -> Call {
    Call { stream, on_device: true, timeout: Some(PATIENCE), ..Call::default() }
}

/// Gathers sums, of words at addresses.
fn gather(context: &Context, (_, devices, _): &Seat, calls: &[(u64, u64, Option<StreamHandle>)]) -> Launches {
    context.cuda().pretend(devices, 0);
    let mut launches = context.launches().expect("GPUs that exchange");
    for (number, &(count, address, stream)) in calls.iter().enumerate() {
        assert_eq!(launches.add(context, &request(count, address), &on(stream)), Ok(Added::As(number)));
    }
    launches
}

/// Gives sums to their streams together.
pub(super) fn give(context: &Context, seat: &Seat, calls: &[(u64, u64, Option<StreamHandle>)]) -> Result<()> {
    give_all(context, gather(context, seat, calls))
}

/// Gives what was gathered to its streams.
fn give_all(context: &Context, launches: Launches) -> Result<()> {
    // SAFETY: the double trusts no addresses.
    unsafe {
        let mut ready = launches.located(context)?;
        ready.give_collectives()?;
        ready.give_messages()
    }
}

/// The words that GPUs wrote, once they have.
fn settled(context: &Context, double: &Double, memory: &[u64]) -> Vec<u32> {
    context.settle(Deadline::after(PATIENCE)).expect("nothing fails");
    memory.iter().map(|&address| word(double, address)).collect()
}

#[test]
fn collectives_of_a_group_are_few_launches_in_their_order() {
    ranks(&processes(2), words, |context, seat| {
        let (double, _, device) = seat;
        let memory = [(); 5].map(|()| double.memory(*device, 8));
        let [stream, other] = [(); 2].map(|()| double.stream(*device));
        // Two are one launch, one is alone, and two again.
        let called = [(1, stream), (1, other), (2, stream), (1, stream), (1, other)];
        let call = |((count, stream), address)| (count, address, Some(stream));
        // The launch is in the other stream's order, too.
        for value in 0..5 {
            double.fill(other, *device, memory[1], &[value; 4]);
        }
        let calls: Vec<_> = called.into_iter().zip(memory).map(call).collect();
        give(context, seat, &calls).expect("all are given");
        double.expect(other, *device, memory[1], &101u32.to_le_bytes(), "what the launch wrote");
        assert_eq!(settled(context, double, &memory), [100, 101, 2, 300, 301]);
        // What follows has the next numbers.
        let after = double.memory(*device, 4);
        run(&sum(context, 1, after, None, PATIENCE)).expect("a sum");
        assert_eq!(word(double, after), 4);
        assert_eq!(double.complaints(), Vec::<String>::new());
    });
}

#[test]
fn ranks_that_group_their_calls_differently_are_told() {
    let errors = ranks(&processes(2), words, |context, seat| {
        let (double, _, device) = seat;
        let calls = [(); 2].map(|()| (1, double.memory(*device, 4), None));
        let given = match context.rank() {
            0 => calls.iter().try_for_each(|call| give(context, seat, &[*call])),
            _ => give(context, seat, &calls),
        };
        // Whoever comes first finds no difference, but then the group has failed.
        until("the failure", || context.failure().is_some());
        given.err().or(context.failure()).expect("a failure")
    });
    for error in errors {
        // Rank 1 may come when rank 0 has made its first call, which found no difference then, and be met by
        // its second.
        let told = |number| error.text().contains(&format!("as number {number} of 2 that are one group's"));
        assert!(told(1) || told(2), "{error}");
    }
}

#[test]
fn which_call_of_a_launch_differs_is_told() {
    let errors = ranks(&processes(2), words, |context, seat| {
        let (double, _, device) = seat;
        let mut launches = gather(context, seat, &[(1, double.memory(*device, 4), None)]);
        for number in 1..5 {
            let mut call = request(1, double.memory(*device, 4));
            if (number, context.rank()) == (3, 1) {
                call.operator = Operator::Max;
            }
            assert_eq!(launches.add(context, &call, &on(None)), Ok(Added::As(number)));
        }
        let given = give_all(context, launches);
        until("the failure", || context.failure().is_some());
        given.err().or(context.failure()).expect("a failure")
    });
    for error in errors {
        assert_eq!(error.status(), Status::Mismatch);
        let text = error.text();
        assert!(text.contains("call #3 ") && text.contains("sum") && text.contains("max"), "{error}");
    }
}

#[test]
fn calls_of_a_group_are_refused_after_an_abort() {
    let ready = std::sync::Barrier::new(2);
    ranks(&processes(2), words, |context, seat| {
        let (double, _, device) = seat;
        let calls = [1, 1, 2].map(|count| (count, double.memory(*device, 8), None));
        // Else the abort may end the other's setup.
        ready.wait();
        context.abort();
        let refused = give(context, seat, &calls).expect_err("nothing is given");
        assert_eq!(refused.status(), Status::Aborted);
    });
}

#[test]
fn streams_of_a_group_are_in_one_capture_or_in_none() {
    ranks(&processes(2), words, |context, seat| {
        let (double, _, device) = seat;
        let memory = [(); 2].map(|()| double.memory(*device, 4));
        let [stream, captured] = [(); 2].map(|()| double.stream(*device));
        for streams in [[stream, captured], [captured, stream]] {
            double.begin_capture(captured, *device);
            let call = |(stream, address)| (1, address, Some(stream));
            let calls: Vec<_> = streams.into_iter().zip(memory).map(call).collect();
            let refused =
                give(context, seat, &calls).expect_err("a launch that only a graph has is not given");
            assert_eq!(refused.status(), Status::InvalidUsage);
            double.end_capture(captured, *device).expect("a graph without it");
        }
        // Nothing has come of it.
        run(&sum(context, 1, memory[0], Some(stream), PATIENCE)).expect("a sum");
        assert_eq!(word(double, memory[0]), 1);
        assert_eq!(double.complaints(), Vec::<String>::new());
    });
}

/// A message with the other of two ranks.
fn message(context: &Context, kind: Kind, bytes: u64, address: u64) -> Request {
    Request { kind, dtype: DataType::U8, root: 1 - context.rank(), ..request(bytes, address) }
}

#[test]
fn what_is_wrong_with_a_call_of_a_group_is_told_as_it_is_added_and_concerns_no_other() {
    ranks(&processes(2), words, |context, seat| {
        let (double, _, device) = seat;
        let memory = [(); 2].map(|()| double.memory(*device, 4));
        let mut launches = gather(context, seat, &[(1, memory[0], None)]);
        // What is no call of GPUs is not added; what is no call at all is told.
        let first = request(1, memory[0]);
        let lists = Request { counts: Counts::Blocks(vec![1; 2]), kind: Kind::Allgather, ..first.clone() };
        assert_eq!(launches.add(context, &lists, &on(None)), Ok(Added::Not));
        assert_eq!(launches.add(context, &request(0, 0), &on(None)), Ok(Added::Empty));
        let null = launches.add(context, &request(1, 0), &on(None)).expect_err("nothing is there");
        assert!(null.text().contains("is NULL"), "{null}");
        let itself = Request { root: context.rank(), ..message(context, Kind::Send, 4, memory[0]) };
        launches.add(context, &itself, &on(None)).expect_err("nobody sends to itself here");
        assert_eq!(launches.add(context, &request(1, memory[1]), &on(None)), Ok(Added::As(1)));
        give_all(context, launches).expect("both are given");
        assert_eq!(settled(context, double, &memory), [100, 101]);
    });
}

/// Else what stands behind the one would take its place on the other rank, which compares it with that. Who
/// gathers them all again calls what the other rank has called.
#[test]
fn of_calls_of_which_one_has_its_memory_refused_none_is_given() {
    ranks(&processes(2), words, |context, seat| {
        let (double, _, device) = seat;
        let memory = [(); 4].map(|()| double.memory(*device, 8));
        let kind = if context.rank() == 0 { Kind::Send } else { Kind::Receive };
        let gather = |spoilt: Option<usize>| {
            let [first, second, third, fourth] =
                std::array::from_fn(|place| memory[place] + if spoilt == Some(place) { 5 } else { 0 });
            // Each sum is a launch.
            let mut launches = gather(context, seat, &[(1, first, None), (2, second, None)]);
            for (number, address) in [third, fourth].into_iter().enumerate() {
                let message = message(context, kind, 4, address);
                assert_eq!(launches.add(context, &message, &on(None)), Ok(Added::As(number)));
            }
            launches
        };
        for round in 0..4 {
            if context.rank() == 0 {
                let error = give_all(context, gather(Some(round))).expect_err("it is too long");
                assert!(error.text().contains("has 3 bytes left in its allocation"), "{error}");
                assert_eq!(context.failure(), None);
            }
            give_all(context, gather(None)).expect("all are given");
            let sums = 2 * round as u32;
            assert_eq!(settled(context, double, &memory), [sums + 1, sums + 2, 2, 2]);
        }
        assert_eq!(double.complaints(), Vec::<String>::new());
    });
}

#[test]
fn messages_of_a_group_are_one_launch_behind_its_collectives() {
    ranks(&processes(2), words, |context, seat| {
        let (double, _, device) = seat;
        let memory = [(); 3].map(|()| double.memory(*device, 4));
        let [stream, other] = [(); 2].map(|()| double.stream(*device));
        let mut launches = gather(context, seat, &[]);
        let mut add = |request: &Request, stream| launches.add(context, request, &on(Some(stream)));
        assert_eq!(add(&message(context, Kind::Send, 4, memory[0]), stream), Ok(Added::As(0)));
        assert_eq!(add(&request(1, memory[1]), stream), Ok(Added::As(0)));
        assert_eq!(add(&message(context, Kind::Receive, 4, memory[2]), other), Ok(Added::As(1)));
        // The launch is in the other stream's order, too.
        for value in 0..5 {
            double.fill(other, *device, memory[2], &[value; 4]);
        }
        give_all(context, launches).expect("all are given");
        double.expect(other, *device, memory[2], &2u32.to_le_bytes(), "what the launch wrote");
        // The sum is the exchange's first call.
        assert_eq!(settled(context, double, &memory), [2, 1, 2]);
        assert_eq!(double.complaints(), Vec::<String>::new());
    });
}

#[test]
fn calls_are_given_to_the_context_that_they_were_gathered_of() {
    ranks(&processes(2), words, |context, seat| {
        let launches = gather(context, seat, &[(1, seat.0.memory(seat.2, 4), None)]);
        let other = Context::create(options(0, 1, &Arc::new(HashStore::new()), "other")).expect("one rank");
        assert!(other.launches().is_none(), "there are no others");
        let error = give_all(&other, launches).expect_err("another context");
        assert_eq!(error.status(), Status::Internal);
    });
}

/// Bytes of a piece that waits for its receiver.
const PIECE: u64 = 1 << 18;

/// Of a message and a collective, what a rank calls before the other.
#[derive(Clone, Copy, PartialEq, Eq)]
enum First {
    /// The message, which it waits for.
    Message,
    Collective,
}

/// Of two ranks the first has a message and a collective in a list, the other one after the other. GPUs
/// exchange collectives; messages, as of `call`, go by way of the host, of the parent's in host memory.
/// `kind`: what the first rank does with the message. `bytes`: how long it is.
fn list_and_one_by_one(kind: Kind, of_parent: bool, bytes: u64, first: First, has_agreed: bool) {
    let found = ranks(&processes(2), words, |parent, seat| {
        let (double, devices, device) = seat;
        let context = &parent.duplicate().expect("a child");
        context.cuda().pretend(devices, PIECE as usize);
        context.cuda().pretend_loads(only(words));
        context.cuda().pretend_kernels(Arc::new(DoubleKernels(double.clone())));
        let _clock = Clock::start_slow(double);
        let memory = [(); 2].map(|()| double.memory(*device, bytes as usize));
        let timeout = Some(Duration::from_secs(20));
        let call = Call { stream: Some(double.stream(*device)), timeout, ..Call::default() };
        let sum = request(1, memory[1]);
        if has_agreed {
            // SAFETY: the double trusts no addresses.
            unsafe { context.start(&sum, &call) }.expect("it starts").wait(Deadline::NEVER).expect("a sum");
        }
        let other = if kind == Kind::Send { Kind::Receive } else { Kind::Send };
        let kind = if context.rank() == 0 { kind } else { other };
        let mut on_host = vec![0u8; bytes as usize];
        let (messenger, address, message_call) = match of_parent {
            true => (
                parent,
                on_host.as_mut_ptr().expose_provenance() as u64,
                &Call { timeout, ..Call::default() },
            ),
            false => (context, memory[0], &call),
        };
        let message = message(context, kind, bytes, address);
        double.hold_lock(Waiting::All, Duration::from_secs(20));
        // SAFETY: the double trusts no addresses; those of the host are there until all has ended.
        let works = unsafe {
            match (context.rank(), first) {
                (0, _) => start_together(&[(messenger, &message, message_call), (context, &sum, &call)]),
                (_, First::Message) => messenger.start(&message, message_call).and_then(|message| {
                    message.wait(Deadline::NEVER)?;
                    Ok(vec![context.start(&sum, &call)?])
                }),
                (_, First::Collective) => context
                    .start(&sum, &call)
                    .and_then(|sum| Ok(vec![sum, messenger.start(&message, message_call)?])),
            }
        };
        let ended =
            works.and_then(|works| works.iter().try_for_each(|work| work.wait(Deadline::NEVER).map(drop)));
        (ended, double.complaints())
    });
    for (ended, complaints) in found {
        assert_eq!((ended, complaints), (Ok(()), Vec::new()));
    }
}

#[test]
fn a_message_by_way_of_the_host_is_beside_a_collective_of_its_list_that_gpus_exchange() {
    list_and_one_by_one(Kind::Send, false, 8, First::Message, true);
}

#[test]
fn a_message_is_beside_the_agreement_of_the_devices_for_a_collective_of_its_list() {
    for kind in [Kind::Send, Kind::Receive] {
        for first in [First::Message, First::Collective] {
            for (bytes, of_parent) in [(8, false), (8, true), (4 * PIECE, false)] {
                list_and_one_by_one(kind, of_parent, bytes, first, false);
            }
            // More than is loaded ahead is sent from the device while the devices agree: so a rank that
            // receives it behind that connects before.
            if (kind, first) != (Kind::Send, First::Collective) {
                list_and_one_by_one(kind, false, 16 * PIECE, first, false);
            }
        }
    }
}

/// Whether the devices have agreed or do so for the list, and whichever way what is refused would go.
#[test]
fn messages_of_a_list_behind_a_refused_call_are_not_started() {
    for (has_agreed, by_host) in [(true, false), (true, true), (false, false), (false, true)] {
        let found = ranks(&processes(2), words, |parent, (double, devices, device)| {
            let context = &parent.duplicate().expect("a child");
            context.cuda().pretend(devices, 256);
            context.cuda().pretend_loads(only(words));
            context.cuda().pretend_kernels(Arc::new(DoubleKernels(double.clone())));
            let _clock = Clock::start_slow(double);
            let [memory, short, output] = [(); 3].map(|()| double.memory(*device, 8));
            let timeout = Some(Duration::from_secs(20));
            let call = Call { stream: Some(double.stream(*device)), timeout, ..Call::default() };
            let sum = request(1, output);
            if has_agreed {
                // SAFETY: the double trusts no addresses.
                unsafe { context.start(&sum, &call) }
                    .expect("it starts")
                    .wait(Deadline::NEVER)
                    .expect("a sum");
            }
            let refused = request(1000, short);
            let named = Call { algorithm: by_host.then_some(Algorithm::Ring as i32), ..call.clone() };
            let message = message(context, Kind::Send, 8, memory);
            let list = [(&sum, &call), (&refused, &named), (&message, &call)];
            let list = list.map(|(request, call)| Part { context, request, call, awaited: true });
            let list = if context.rank() == 0 { &list[..] } else { &list[..1] };
            // SAFETY: the double trusts no addresses.
            let works = unsafe { start_parts(list) };
            works.into_iter().map(|work| work.and_then(|work| work.wait(Deadline::NEVER)).is_ok()).collect()
        });
        let found: [Vec<bool>; 2] = found.try_into().expect("two ranks");
        assert_eq!(found, [vec![true, false, false], vec![true]], "agreed: {has_agreed}, by host: {by_host}");
    }
}

/// Else the devices of the other one would wait for those of this one until their deadline.
#[test]
fn no_devices_agree_for_ranks_of_one_thread_of_which_one_has_its_memory_refused() {
    let (double, devices) = process(2);
    let store = Arc::new(HashStore::new());
    let contexts: Vec<Context> = std::thread::scope(|scope| {
        let create = |rank| Context::create(options(rank, 2, &store, "")).expect("ranks meet");
        let threads: Vec<_> = (0..2).map(|rank| scope.spawn(move || create(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank")).collect()
    });
    let sums = |spoilt: Option<u32>| {
        let sum = |(context, device): (&Context, u32)| {
            context.cuda().pretend(&devices, 256);
            context.cuda().pretend_loads(only(words));
            let memory = double.memory(device, 8) + if spoilt == Some(device) { 5 } else { 0 };
            let timeout = Some(Duration::from_secs(20));
            let stream = Some(double.stream(device));
            (request(1, memory), Call { stream, timeout, ..Call::default() })
        };
        let calls: Vec<(Request, Call)> = contexts.iter().zip(0..).map(sum).collect();
        let list: Vec<_> =
            contexts.iter().zip(&calls).map(|(context, (sum, call))| (context, sum, call)).collect();
        // SAFETY: the double trusts no addresses.
        let works = unsafe { start_together(&list) };
        works.and_then(|works| works.iter().try_for_each(|work| work.wait(Deadline::NEVER).map(drop)))
    };
    for spoilt in 0..2 {
        let error = sums(Some(spoilt)).expect_err("it is too long");
        assert!(error.text().contains("has 3 bytes left in its allocation"), "{error}");
        for context in &contexts {
            assert_eq!((context.failure(), context.device_way()), (None, None), "rank {spoilt}'s memory");
        }
    }
    assert_eq!(sums(None), Ok(()));
}
