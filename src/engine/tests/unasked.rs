//! What comes before anybody asks for it: kept up to a limit.

use super::*;
use crate::engine::messages::Messages;

pub(super) const FLOOD: usize = 128;
const LIMIT: usize = 1 << 20;

/// Rank 1 sends rank 0 more than it has room for, with tag 1: the messages and the sends.
fn flood(groups: &[Arc<Group>; 2]) -> (Vec<Vec<u8>>, Vec<Arc<Running>>) {
    groups[0].endpoint().messages().limit_unexpected(LIMIT);
    let messages: Vec<Vec<u8>> = (0..FLOOD).map(|i| vec![i as u8; 64 * 1024]).collect();
    let sends = messages.iter().map(|message| send(&groups[1], 1, message)).collect();
    let full = || (groups[0].endpoint().messages().unexpected_bytes() > LIMIT).then_some(());
    let wait = Deadline::after(Duration::from_secs(20));
    groups[0].endpoint().wait(wait, Through::Messages, full).expect("it fills up");
    (messages, sends)
}

/// Rank 0 takes them.
fn drain(groups: &[Arc<Group>; 2], messages: &[Vec<u8>], sends: &[Arc<Running>]) {
    for message in messages {
        let mut came = vec![0; message.len()];
        done(&receive(&groups[0], 1, &mut came));
        assert!(came == *message, "another message");
    }
    sends.iter().for_each(|send| done(send));
    assert_eq!(groups[0].endpoint().messages().unexpected_bytes(), 0);
}

#[test]
fn what_nobody_asked_for_stays_outside_and_wakes_nobody() {
    for shm in [true, false] {
        let groups = linked_pair(shm);
        let endpoint = groups[0].endpoint();
        let (messages, sends) = flood(&groups);
        while endpoint.progress(0, Through::Messages) {}
        let kept = endpoint.messages().unexpected_bytes();
        assert!(kept <= LIMIT + Messages::kept(messages[0].len()), "{kept} bytes are kept");
        let mut events = Vec::new();
        endpoint.registration().bell().poll(&mut events).expect("the bell works");
        assert!(events.is_empty(), "a sleeper is woken for what it does not read: {events:?}");
        drain(&groups, &messages, &sends);
    }
}

#[test]
fn what_a_call_waits_for_is_read_though_it_comes_behind_what_nobody_asked_for() {
    for shm in [true, false] {
        let groups = linked_pair(shm);
        let (messages, sends) = flood(&groups);
        // Rank 1's answer that it has the large message, or wants it, comes behind the flood.
        let (mut small, mut large) = ([0; 8], vec![0; LARGE]);
        let (word, source) = ([3; 8], vec![5; LARGE]);
        let sent = [send(&groups[1], 2, &word), send(&groups[0], 3, &source)];
        let took = [receive(&groups[1], 3, &mut large), receive(&groups[0], 2, &mut small)];
        sent.iter().chain(&took).for_each(|running| done(running));
        assert!(small == word && large == source);
        drain(&groups, &messages, &sends);
    }
}
