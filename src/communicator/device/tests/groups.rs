//! Collectives that are one launch.

use super::*;

/// Gives sums to their streams together.
fn give(calls: Vec<OnDevices>) -> Vec<Result<Work>> {
    // SAFETY: the double trusts no addresses.
    let begun = calls.into_iter().map(|call| unsafe { call.begin_launch() });
    Pending::close_all(begun.map(|begun| begun.expect("it begins").expect("it waits for others")).collect())
}

/// The words that GPUs wrote, once they have.
fn settled(context: &Context, double: &Double, memory: &[u64]) -> Vec<u32> {
    context.settle(Deadline::after(PATIENCE)).expect("nothing fails");
    memory.iter().map(|&address| word(double, address)).collect()
}

#[test]
fn collectives_of_a_group_are_few_launches_in_their_order() {
    ranks(&processes(2), words, |context, (double, _, device)| {
        let memory = [(); 5].map(|()| double.memory(*device, 4));
        let [stream, other] = [(); 2].map(|()| double.stream(*device));
        // Two are one launch, one is alone, and two again.
        let called = [(1, stream), (1, other), (2, stream), (1, stream), (1, other)];
        let call = |((count, stream), address)| sum(context, count, address, Some(stream), PATIENCE);
        // The launch is in the other stream's order, too.
        for value in 0..5 {
            double.fill(other, *device, memory[1], &[value; 4]);
        }
        let works = give(called.into_iter().zip(memory).map(call).collect());
        double.expect(other, *device, memory[1], &101u32.to_le_bytes(), "what the launch wrote");
        assert!(works.into_iter().all(|work| work.expect("it is given").had_ended()));
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
    let errors = ranks(&processes(2), words, |context, (double, _, device)| {
        let memory = [(); 2].map(|()| double.memory(*device, 4));
        let call = |address| sum(context, 1, address, None, PATIENCE);
        let one_by_one = || {
            // SAFETY: the double trusts no addresses.
            memory.iter().find_map(|&address| unsafe { call(address).enqueue() }.err())
        };
        let together = || give(memory.map(call).into()).into_iter().find_map(Result::err);
        let error = if context.rank() == 0 { one_by_one() } else { together() };
        // Whoever comes first finds no difference, but then the group has failed.
        until("the failure", || context.failure().is_some());
        error.or(context.failure()).expect("a failure")
    });
    for error in errors {
        assert!(error.text().contains("as number 1 of 2 that are one group's"), "{error}");
    }
}

#[test]
fn calls_of_a_group_are_refused_after_an_abort() {
    ranks(&processes(2), words, |context, (double, _, device)| {
        let memory = [(); 3].map(|()| double.memory(*device, 4));
        let calls = [(1, memory[0]), (1, memory[1]), (2, memory[2])];
        context.abort();
        let works = give(calls.map(|(count, address)| sum(context, count, address, None, PATIENCE)).into());
        let refused = |work: Result<Work>| work.err().map(|error| error.status());
        assert_eq!(works.into_iter().map(refused).collect::<Vec<_>>(), [Some(Status::Aborted); 3]);
    });
}

#[test]
fn streams_of_a_group_are_in_one_capture_or_in_none() {
    ranks(&processes(2), words, |context, (double, _, device)| {
        let memory = [(); 2].map(|()| double.memory(*device, 4));
        let [stream, captured] = [(); 2].map(|()| double.stream(*device));
        for streams in [[stream, captured], [captured, stream]] {
            double.begin_capture(captured, *device);
            let call = |(stream, address)| sum(context, 1, address, Some(stream), PATIENCE);
            let works = give(streams.into_iter().zip(memory).map(call).collect());
            let refused = |work: Result<Work>| work.err().map(|error| error.status());
            assert_eq!(
                works.into_iter().map(refused).collect::<Vec<_>>(),
                [Some(Status::InvalidUsage); 2],
                "a launch that only a graph has is not given"
            );
            double.end_capture(captured, *device).expect("a graph without it");
        }
        // Nothing has come of it.
        run(&sum(context, 1, memory[0], Some(stream), PATIENCE)).expect("a sum");
        assert_eq!(word(double, memory[0]), 1);
        assert_eq!(double.complaints(), Vec::<String>::new());
    });
}
