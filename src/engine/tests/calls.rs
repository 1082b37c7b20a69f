//! Calls that fail, do not end or differ from those of others, and what is told of them.

use super::*;

#[test]
fn a_wait_ends_at_its_deadline_though_there_is_always_something_to_do() {
    let [group, _other] = pair(true);
    let ended = Running::ended(group.clone(), turn(&group, BARRIER), Ok(Completion::default()));
    let answer = group.endpoint().wait(
        Deadline::after(Duration::from_millis(20)),
        Through::Messages,
        || -> Option<()> {
            // Moving it on counts as progress.
            group.endpoint().disown(&ended);
            group.endpoint().adopt(ended.clone());
            None
        },
    );
    assert_eq!(answer, None);
}

#[test]
fn an_operation_that_fails_lets_go_of_its_buffers() {
    let [group, _other] = pair(true);
    let abandoned = Arc::new(AtomicUsize::new(0));
    let failing = Scripted(Some(Err(Error::new(Status::System, "no"))), abandoned.clone());
    let running =
        group.start(calling(Class::PointToPoint, 0, BARRIER, None), |_| failing).expect("it starts");
    assert!(running.wait(Deadline::NEVER).expect("it ends").is_err());
    assert_eq!(abandoned.load(Ordering::Relaxed), 1);
}

/// The driver may keep a receive there until a stream goes on that waits for the others.
#[test]
fn a_call_that_is_held_up_as_it_is_made_keeps_no_other_from_its_end() {
    let [group, _other] = &pair(true);
    let good = || Scripted(Some(Ok(Completion::default())), Arc::default());
    let end = |running: Arc<Running>| {
        let ended = running.wait(Deadline::after(Duration::from_secs(20)));
        ended.expect("it ends").expect("a good call");
    };
    for (held, others) in [(Class::PointToPoint, Class::Ordered), (Class::Ordered, Class::Tagged)] {
        let ((tell, told), (release, released)) = (mpsc::channel(), mpsc::channel());
        let begin = move || {
            let mut answer = Ok(());
            let make = |_: &Turn| {
                tell.send(()).expect("the test waits");
                answer = released.recv_timeout(Duration::from_secs(20));
                good()
            };
            end(group.start(calling(held, 0, BARRIER, None), make).expect("it starts"));
            answer
        };
        std::thread::scope(|scope| {
            let thread = scope.spawn(begin);
            told.recv().expect("it is being made");
            for _ in 0..2 {
                end(group.start(calling(others, 0, BARRIER, None), |_| good()).expect("it starts"));
            }
            // Nobody listens where it has waited in vain.
            let _ = release.send(());
            assert_eq!(thread.join().expect("no panic"), Ok(()), "{others:?} ended behind {held:?}");
        });
    }
}

#[test]
fn a_call_whose_turn_does_not_come_says_on_which_rank() {
    let [group, other] = pair(true);
    let wait = Deadline::after(Duration::from_secs(20));
    group.endpoint().open_links(&[1], wait, || None).expect("a link");
    let start = |timeout| {
        let stuck = Scripted(None, Arc::default());
        group.start(calling(Class::Ordered, 0, BARRIER, timeout), |_| stuck).expect("it starts")
    };
    let [_ahead, behind] = [None, Some(Duration::from_millis(50))].map(start);
    behind.wait(wait).expect("in time").expect_err("its turn does not come");
    let told = other.endpoint().wait(wait, Through::Messages, || other.failure()).expect("in time");
    for part in ["rank 0 of 'pair'", "barrier #1 waited", "for the calls before it"] {
        assert!(told.text().contains(part), "{told}");
    }
}

/// A rank that is stopped around a deadline finds all its calls late at once.
#[test]
fn a_call_that_is_late_with_the_one_before_it_leaves_it_to_that_to_say_why() {
    let [group, _other] = pair(true);
    let wait = Deadline::after(Duration::from_secs(20));
    group.endpoint().open_links(&[1], wait, || None).expect("a link");
    let start = |_| {
        let (stuck, timeout) = (Scripted(None, Arc::default()), Some(Duration::from_millis(100)));
        group.start(calling(Class::Ordered, 0, BARRIER, timeout), |_| stuck).expect("it starts")
    };
    let [_ahead, _between, behind] = [(); 3].map(start);
    // Nobody looks meanwhile.
    let held = group.endpoint().messages();
    std::thread::sleep(Duration::from_millis(1100));
    drop(held);
    let error = behind.wait(wait).expect("in time").expect_err("its turn does not come");
    assert!(error.text().contains("nothing from rank 1"), "{error}");
    assert!(!error.text().contains("for the calls before it"), "{error}");
}

/// How a barrier fails that does nothing and that nobody waits for.
fn end_of_stuck(group: &Arc<Group>, timeout: Option<Duration>) -> Error {
    let stuck = Scripted(None, Arc::default());
    let running = group.start(calling(Class::Ordered, 0, BARRIER, timeout), |_| stuck).expect("it starts");
    let (tell, told) = mpsc::channel();
    running.on_complete(Box::new(move |result| tell.send(result).expect("the test waits")));
    told.recv_timeout(Duration::from_secs(20)).expect("it ends").expect_err("it does nothing")
}

#[test]
fn an_overdue_operation_that_nobody_waits_for_tells_what_the_others_do() {
    let [group, other] = pair(true);
    group.endpoint().open_links(&[1], Deadline::after(Duration::from_secs(20)), || None).expect("a link");
    for group in [&group, &other] {
        let _ = turn(group, Signature { kind: Kind::Allgather, count: 7, ..BARRIER });
    }
    let timeout = Some(Duration::from_millis(50));
    let error = end_of_stuck(&group, timeout);
    assert_eq!(error.status(), Status::Timeout);
    assert!(error.text().contains("its last call is allgather(7 × uint8) #0, done"), "{error}");
}

/// As of a call that is cancelled, or fails for another reason, while the others are asked.
#[test]
fn a_question_that_nobody_needs_an_answer_to_is_forgotten() {
    let [group, other] = linked_pair(true);
    let (late, _) = (turn(&group, BARRIER), turn(&other, BARRIER));
    let inquiry = group.ask(&late, vec![1], None);
    while !group.answered(&inquiry) {
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(group.endpoint().open_questions(), 1);
    drop(inquiry);
    assert_eq!(group.endpoint().open_questions(), 0);
}

#[test]
fn a_rank_whose_calls_in_a_group_are_long_ago_has_called_something() {
    let [group, other] = linked_pair(true);
    let (late, _) = (turn(&group, BARRIER), turn(&other, BARRIER));
    let asked = |group: &Group| {
        let inquiry = group.ask(&late, vec![1], None);
        while !group.answered(&inquiry) {
            std::thread::sleep(Duration::from_millis(2));
        }
        group.overdue(&late, &inquiry).text().to_owned()
    };
    assert!(asked(&group).contains("its last call is barrier() #0"));
    let key = Key { group: group.id() + 1, tag: 0, sequence: 0, slot: 0, class: Class::Ordered };
    for _ in 0..200 {
        other.endpoint().recorder().begin(key, BARRIER, late.called);
    }
    let text = asked(&group);
    assert!(text.contains("not known any more") && text.contains("128 in other groups"), "{text}");
}

#[test]
fn calls_that_nobody_waits_for_are_compared_though_nothing_is_sent() {
    let [group, other] = pair(true);
    group.endpoint().open_links(&[1], Deadline::after(Duration::from_secs(20)), || None).expect("a link");
    let _ = turn(&other, Signature { kind: Kind::Allgather, count: 7, ..BARRIER });
    let error = end_of_stuck(&group, None);
    assert_eq!(error.status(), Status::Mismatch);
    assert!(error.text().contains("rank 0 called barrier()"), "{error}");
    assert!(error.text().contains("rank 1 called allgather(7 × uint8)"), "{error}");
}
