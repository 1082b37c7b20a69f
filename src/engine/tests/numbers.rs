//! The numbers of calls, of each tag by itself.

use super::*;

/// Messages do not hear of calls on devices, nor of those on the host that end at their first look.
#[test]
fn a_rank_may_be_ahead_after_any_number_of_calls_that_messages_have_not_heard_of() {
    struct AtOnce;

    impl Operation for AtOnce {
        fn advance(&mut self, _group: &Group) -> Poll<Result<Completion>> {
            Poll::Ready(Ok(Completion::default()))
        }

        fn abandon(&mut self, _group: &Group) {}

        fn waits_for(&self, _group: &Group) -> Vec<u32> {
            Vec::new()
        }

        fn through(&self) -> Through {
            Through::Memory
        }
    }

    for on_devices in [true, false] {
        let groups = linked_pair(true);
        for group in &groups {
            assert_eq!(turn(group, BARRIER).sequence, 0);
            // A quarter and half of all numbers.
            for calls in [1 << 30, 1 << 31] {
                group.pretend_calls(calls - 1);
                let called = match on_devices {
                    true => group.number(Class::Ordered, &[BARRIER], None).map(drop),
                    false => group.run(calling(Class::Ordered, 0, BARRIER, None), |_| AtOnce).map(drop),
                };
                called.expect("a call");
            }
        }
        let here = groups[0].endpoint();
        let before = here.messages().entries();
        let next = Key { group: groups[1].id(), tag: 0, sequence: 1 << 31, slot: 0, class: Class::Ordered };
        groups[1].endpoint().messages().notify(0, next, BARRIER);
        let soon = Deadline::after(Duration::from_secs(20));
        while here.messages().entries() == before {
            assert!(!soon.expired(), "nothing comes");
            here.progress(0, Through::Messages);
        }
        here.settle();
        assert_eq!(groups[0].failure(), None);
        assert_eq!(turn(&groups[0], BARRIER).sequence, 1 << 31);
        here.settle();
        assert_eq!(groups[0].failure(), None);
        // What is over by now is told as it was.
        let over = Key { sequence: next.sequence - 1, ..next };
        groups[1].endpoint().messages().notify(0, over, BARRIER);
        while groups[0].failure().is_none() {
            assert!(!soon.expired(), "it is not told");
            here.progress(0, Through::Messages);
        }
    }
}

#[test]
fn tags_that_are_used_once_leave_nothing_behind() {
    let [group, other] = pair(true);
    group.endpoint().open_links(&[1], Deadline::after(Duration::from_secs(20)), || None).expect("a link");
    for tag in 1..1000 {
        let ending = || Scripted(Some(Ok(Completion::default())), Arc::default());
        let turn = group.start(calling(Class::Tagged, tag, BARRIER, None), |_| ending()).expect("it starts");
        assert!(turn.wait(Deadline::NEVER).expect("it ends").is_ok());
        group.run(calling(Class::PointToPoint, tag, BARRIER, None), |_| ending()).expect("it ends at once");
    }
    // Two stretches of them, of which neither is full.
    assert_eq!(group.kept_tags(), 2);
    // What is kept of messages, this rank's last call aside.
    assert!(group.endpoint().messages().entries() <= 3, "{}", group.endpoint().messages().entries());
    // A tag has its number all the same.
    let mut number = None;
    let again = |turn: &Turn| {
        number = Some(turn.sequence);
        Scripted(Some(Ok(Completion::default())), Arc::default())
    };
    group.run(calling(Class::Tagged, 500, BARRIER, None), again).expect("it ends at once");
    assert_eq!(number, Some(1));
    drop(other);
}

/// As PyTorch calls gloo: one counter for calls of all kinds, whose tags lie apart, and some of them are made
/// of two.
#[test]
fn tags_of_several_kinds_that_share_a_counter_leave_nothing_behind() {
    let [group, other] = pair(true);
    group.endpoint().open_links(&[1], Deadline::after(Duration::from_secs(20)), || None).expect("a link");
    for number in 0..5000u64 {
        let tag = (4 + number % 3) << 56 | number << 24;
        for sequence in 0..1 + number % 2 {
            let ending = |turn: &Turn| {
                assert_eq!(u64::from(turn.sequence), sequence);
                Scripted(Some(Ok(Completion::default())), Arc::default())
            };
            let turn = group.start(calling(Class::Tagged, tag, BARRIER, None), ending).expect("it starts");
            assert!(turn.wait(Deadline::NEVER).expect("it ends").is_ok());
        }
    }
    // The full stretches, and the last one.
    assert_eq!(group.kept_tags(), 2);
    assert!(group.endpoint().messages().entries() <= 3, "{}", group.endpoint().messages().entries());
    drop(other);
}
