//! Contexts that take the place of others, whose memory goes back.

use super::*;

/// The context that takes this one's place.
fn successor(context: &Context, willing: bool) -> Option<Context> {
    let child = context.begin_successor(Ok(willing)).expect("all have come");
    child.map(|child| child.meet().expect("they meet"))
}

#[test]
fn memory_goes_back_when_another_context_takes_the_place_of_the_one_that_has_it() {
    let seats = processes(2);
    let store = Arc::new(HashStore::new());
    std::thread::scope(|scope| {
        for (rank, (double, devices, device)) in seats.iter().enumerate() {
            let store = store.clone();
            scope.spawn(move || {
                let meet = |context: &Context| {
                    meet(&[(context, *device)], || Ok(devices.clone()), choose, words).expect("an agreement");
                };
                let mut context = Context::create(options(rank as u32, 2, &store, "")).expect("ranks meet");
                meet(&context);
                let stream = Stream::new(devices, *device, true).expect("a stream");
                let output = double.memory(*device, 4);
                for _ in 0..3 {
                    // They count their calls, from the beginning.
                    for call in 1..=2 {
                        run(&sum(&context, 1, output, Some(stream.handle()), PATIENCE)).expect("a sum");
                        assert_eq!(word(double, output), call);
                    }
                    assert!(!context.is_referred_to());
                    let memory = context.held_memory().expect("an arena");
                    assert!(!memory.await_return(Deadline::after(Duration::from_millis(5))));
                    let next = successor(&context, true).expect("all are willing");
                    drop(std::mem::replace(&mut context, next));
                    assert!(memory.await_return(Deadline::after(PATIENCE)));
                    assert_eq!(double.allocated(*device), 4, "the slab is gone");
                    assert!(context.held_memory().is_none() && context.device_bytes() == 0);
                    meet(&context);
                    assert_eq!(context.device_way(), Some(Ok(())));
                }
            });
        }
    });
}

/// Who has sent none does not know of them, but hears that the other is not willing.
#[test]
fn memory_stays_where_signals_lie_that_may_not_have_been_waited_for() {
    ranks(&processes(2), words, |context, _| {
        assert!(!context.is_referred_to());
        let (first, call) = (context.rank() == 0, Call { timeout: Some(PATIENCE), ..Call::default() });
        if first {
            // SAFETY: the double trusts no addresses.
            unsafe { context.signal(1, &call) }.expect("a signal");
        }
        assert_eq!(context.is_referred_to(), first);
        assert!(successor(context, !context.is_referred_to()).is_none());
        if !first {
            // SAFETY: as above.
            unsafe { context.wait_signals(&[(0, 1)], &call) }.expect("a wait");
        }
        context.settle(Deadline::after(PATIENCE)).expect("it is still there");
    });
}

#[test]
fn memory_stays_that_a_graph_or_a_window_refers_to() {
    ranks(&processes(2), words, |context, (double, devices, device)| {
        let (_, exchange) = exchange(context);
        let stream = Stream::new(devices, *device, true).expect("a stream");
        let window = double.memory(*device, 4096);
        let window = context.register_at(&exchange, Ok((window, 4096))).expect("a window");
        assert!(context.is_referred_to());
        drop(window);
        assert!(!context.is_referred_to());
        // One has a graph, so all keep their memory.
        if context.rank() == 1 {
            let output = double.memory(*device, 4);
            double.begin_capture(stream.handle(), *device);
            // SAFETY: the double trusts no addresses.
            unsafe { sum(context, 1, output, Some(stream.handle()), PATIENCE).enqueue() }.expect("captured");
            double.end_capture(stream.handle(), *device).expect("a graph");
            assert!(context.is_referred_to());
        }
        assert!(successor(context, !context.is_referred_to()).is_none());
    });
}
