//! Sends and receives between GPUs, as kernels of the double give them.

use std::sync::Barrier;

use super::*;
use crate::cuda::double::Refusal;

/// A message between the ranks of two.
pub(super) fn point(
    context: &Context,
    address: u64,
    bytes: u64,
    direction: Direction,
    stream: Option<StreamHandle>,
) -> OnDevices {
    let (group, exchange) = exchange(context);
    let kind = if direction == Direction::Send { Kind::Send } else { Kind::Receive };
    let peer = 1 - context.rank();
    let dtype = DataType::U8;
    let signature =
        Signature { kind, dtype, operator: 0, algorithm: 0, root: peer, count: bytes, device: true };
    let what = What::Point(Point { direction, peer, address, bytes }, signature);
    let caller = Caller { stream, timeout: None, memory: "sendbuf" };
    OnDevices { group: group.clone(), exchange: exchange.clone(), caller, what }
}

/// Neither end waits for the other.
#[test]
fn a_message_of_nothing_goes_between_gpus_whichever_pointers_and_streams_its_ends_give() {
    ranks(&processes(2), words, |context, (double, devices, device)| {
        context.cuda().pretend(devices, 256);
        context.cuda().pretend_loads(only(words));
        let (kind, address, stream) = match context.rank() {
            0 => (Kind::Send, 0, Some(double.stream(*device))),
            _ => (Kind::Receive, double.memory(*device, 4), None),
        };
        let message = Request { kind, root: 1 - context.rank(), ..groups::request(0, address) };
        let call = Call { stream, timeout: Some(PATIENCE / 4), ..Call::default() };
        // SAFETY: there is no memory.
        unsafe { context.run(&message, &call) }.expect("it is done");
        assert_eq!(double.complaints(), Vec::<String>::new());
    });
}

#[test]
fn sends_and_receives_that_start_together_are_one_piece() {
    ranks(&processes(2), words, |context, (double, _, device)| {
        let memory = [(); 4].map(|()| double.memory(*device, 4));
        let [stream, other] = [(); 2].map(|()| double.stream(*device));
        let point = |address, direction, stream| point(context, address, 4, direction, stream);
        let all = [
            point(memory[0], Direction::Send, Some(stream)),
            point(memory[1], Direction::Receive, Some(other)),
            point(memory[2], Direction::Receive, Some(stream)),
            point(memory[3], Direction::Send, Some(stream)),
        ];
        // The launch is in the other stream's order, too.
        for value in 0..5 {
            double.fill(other, *device, memory[1], &[value; 4]);
        }
        // SAFETY: the double trusts no addresses.
        let works = Pending::close_all(all.map(|point| unsafe { point.begin() }.unwrap()).into());
        double.expect(other, *device, memory[1], &4u32.to_le_bytes(), "what the launch wrote");
        assert_eq!(works.len(), 4);
        for work in works {
            work.unwrap().wait(Deadline::after(PATIENCE)).unwrap();
        }
        assert_eq!(memory.map(|address| word(double, address)), [4; 4]);
        assert_eq!(double.complaints(), Vec::<String>::new());
    });
}

/// Messages are compared with their other ends: what they have, and where they come among collectives.
#[test]
fn messages_between_gpus_that_differ_are_told() {
    /// Gives what a rank calls; whether it was refused.
    type Calls = fn(&Context, u64) -> Result<()>;
    fn give(context: &Context, memory: u64, bytes: u64) -> Result<()> {
        let direction = if context.rank() == 0 { Direction::Send } else { Direction::Receive };
        // SAFETY: the double trusts no addresses.
        unsafe { point(context, memory, bytes, direction, None).enqueue() }.map(drop)
    }
    fn add(context: &Context, memory: u64) -> Result<()> {
        // SAFETY: as above.
        unsafe { sum(context, 1, memory, None, PATIENCE).enqueue() }.map(drop)
    }
    let bytes: Calls = |context, memory| {
        give(context, memory, 4)?;
        give(context, memory, if context.rank() == 0 { 4 } else { 8 })
    };
    let order: Calls = |context, memory| {
        if context.rank() == 0 {
            give(context, memory, 4)?;
            add(context, memory)
        } else {
            add(context, memory)?;
            give(context, memory, 4)
        }
    };
    // One is far ahead when the other begins; what it has noted first stands no more.
    let earlier: Calls = |context, memory| {
        give(context, memory, if context.rank() == 0 { 4 } else { 8 })?;
        if context.rank() == 1 {
            std::thread::sleep(Duration::from_millis(50));
        }
        (0..100).try_for_each(|_| give(context, memory, 4))
    };
    // The same of collectives.
    let far: Calls = |context, memory| {
        if context.rank() == 1 {
            std::thread::sleep(Duration::from_millis(150));
        }
        let count = 1 + u64::from(context.rank());
        // SAFETY: as above.
        unsafe { sum(context, count, memory, None, PATIENCE).enqueue() }?;
        (0..600).try_for_each(|_| add(context, memory))
    };
    for (calls, told) in [
        (far, "before #"),
        (bytes, "#1 has 4 bytes, but 8 are to be received"),
        (order, "#0 is sent after 0 collectives, and"),
        (earlier, "from rank 0 to rank 1"),
    ] {
        ranks(&processes(2), words, |context, (double, _, device)| {
            let memory = double.memory(*device, 8);
            // The other one may have found it first.
            let _ = calls(context, memory);
            until("the failure", || context.failure().is_some());
            let error = context.failure().expect("it has failed");
            assert_eq!(error.status(), Status::Mismatch, "{error}");
            // Whoever is told while the other is still near sees the call itself.
            let near = told == "before #" && error.text().contains("rank 0 called");
            assert!(error.text().contains(told) || near, "{error}");
        });
    }
}

/// Kernels take what is sent before a collective for what is sent in it: whoever comes last sees it, and
/// gives its stream nothing.
#[test]
fn a_message_that_one_rank_makes_before_a_collective_and_the_other_behind_it_is_told() {
    for (direction, first, told) in [
        (Direction::Send, Kind::Send, "#0 is sent after 1 collectives, and not received before the next"),
        (Direction::Receive, Kind::Send, "#0 is received after 1 collectives, and not sent before the next"),
        (
            Direction::Send,
            Kind::Allreduce,
            "#0 is sent after 1 collectives, and not received before the next",
        ),
        (
            Direction::Receive,
            Kind::Allreduce,
            "#0 is received after 1 collectives, and not sent before the next",
        ),
    ] {
        let (met, called) = (Barrier::new(2), Barrier::new(2));
        ranks(&processes(2), words, |context, (double, _, device)| {
            let (memory, is_first) = (double.memory(*device, 8), context.rank() == 0);
            run(&sum(context, 1, memory, None, PATIENCE)).expect("a sum");
            met.wait();
            // One of them makes a message, the other a collective; whoever is first has begun.
            let messages = is_first == (first == Kind::Send);
            let call = match messages {
                true => point(context, memory, 4, direction, None),
                false => sum(context, 1, memory, None, PATIENCE),
            };
            if !is_first {
                called.wait();
            }
            // SAFETY: the double trusts no addresses.
            let given = unsafe { call.enqueue() };
            if is_first {
                given.expect("it begins");
                called.wait();
            } else {
                let error = given.map(drop).expect_err("it is no call of the other's");
                assert_eq!(error.status(), Status::Mismatch, "{error}");
                assert!(error.text().contains(told), "{error}");
            }
            until("the failure", || context.failure().is_some());
        });
    }
}

/// What is refused before anything was launched has been told to nobody: the group goes on, and the next
/// message is the first.
#[test]
fn a_message_whose_stream_cannot_be_made_to_wait_concerns_no_other() {
    // For an earlier call on another stream, or for a stream of the same launch.
    for beside in [false, true] {
        ranks(&processes(2), words, |context, (double, _, device)| {
            let memory = double.memory(*device, 8);
            let streams = [(); 3].map(|()| Some(double.stream(*device)));
            run(&sum(context, 1, memory, streams[0], PATIENCE)).expect("a sum");
            let direction = if context.rank() == 0 { Direction::Send } else { Direction::Receive };
            if context.rank() == 0 {
                let after = usize::from(beside);
                let (call, status) = (Some("cuStreamWaitEvent"), Status::OutOfMemory);
                double.refuse(Refusal { after, call, status, ..Refusal::default() });
                let others = if beside { &streams[1..] } else { &streams[1..2] };
                let messages = others.iter().map(|&stream| point(context, memory, 8, direction, stream));
                // SAFETY: the double trusts no addresses.
                let begun = messages.map(|message| unsafe { message.begin() }.expect("it joins others"));
                for refused in Pending::close_all(begun.collect()) {
                    let error = refused.map(drop).expect_err("the driver has no memory");
                    assert_eq!(error.status(), Status::OutOfMemory, "{error}");
                }
                assert!(!double.is_to_fail());
                assert_eq!(context.failure(), None);
            }
            // SAFETY: as above.
            unsafe { point(context, memory, 4, direction, streams[1]).enqueue() }.expect("they agree");
            run(&sum(context, 1, memory, streams[0], PATIENCE)).expect("a sum");
            assert_eq!(context.failure(), None);
        });
    }
}

#[test]
fn messages_that_their_rank_refuses_concern_no_other() {
    ranks(&processes(2), words, |context, (double, _, device)| {
        let memory = double.memory(*device, 8);
        let (group, _) = exchange(context);
        let direction = if context.rank() == 0 { Direction::Send } else { Direction::Receive };
        if context.rank() == 0 {
            let mut own = point(context, memory, 4, Direction::Send, None);
            let What::Point(Point { peer, .. }, _) = &mut own.what else { panic!("a message") };
            *peer = group.rank();
            // SAFETY: the double trusts no addresses.
            let both = [own, point(context, memory, 8, direction, None)]
                .map(|message| unsafe { message.begin() }.expect("it joins others"));
            for refused in Pending::close_all(both.into()) {
                let error = refused.map(drop).expect_err("nothing receives what it sends itself");
                assert_eq!(error.status(), Status::InvalidUsage, "{error}");
            }
        }
        // The next message is the first.
        // SAFETY: as above.
        unsafe { point(context, memory, 4, direction, None).enqueue() }.expect("they agree");
        run(&sum(context, 1, memory, None, PATIENCE)).expect("a sum");
        assert_eq!(context.failure(), None);
    });
}

#[test]
fn messages_between_gpus_that_agree_are_given_however_far_a_rank_is_ahead() {
    ranks(&processes(2), words, |context, (double, _, device)| {
        let memory = double.memory(*device, 8);
        for round in 0..300u64 {
            for direction in [Direction::Send, Direction::Receive] {
                // What is empty on one side need not be called on the other.
                let bytes = if round % 7 == 0 && context.rank() == 0 { 0 } else { 4 + round % 5 };
                if round % 7 == 0 && context.rank() == 1 {
                    continue;
                }
                // SAFETY: the double trusts no addresses.
                unsafe { point(context, memory, bytes, direction, None).enqueue() }.expect("they agree");
            }
        }
        run(&sum(context, 1, memory, None, PATIENCE)).expect("a sum");
    });
}
