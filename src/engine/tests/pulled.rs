//! Long messages that their receiver reads from the memory of their sender.

use super::unasked::FLOOD;
use super::*;
use crate::engine::pairs;

#[test]
fn a_message_whose_sender_of_the_same_process_unmapped_it_is_skipped() {
    let groups = linked_pair(true);
    let len = LARGE;
    let memory = mapped(len);
    let source = Source { address: memory.cast_const(), len };
    let given_up = post(&groups[1], 1, len, Message::Send { to: 0, from: source });
    assert!(given_up.cancel());
    unmap(memory, len);
    let mut came = vec![0; len];
    let receive = receive(&groups[0], 1, &mut came);
    let bytes = vec![9; len];
    done(&send(&groups[1], 1, &bytes));
    done(&receive);
    assert!(came == bytes);
}

#[test]
fn a_message_that_the_kernel_does_not_let_the_receiver_read_fails_on_both_sides_at_once() {
    let groups = linked_pair(true);
    let memory = mapped(LARGE);
    let sent = post(
        &groups[1],
        1,
        LARGE,
        Message::Send { to: 0, from: Source { address: memory.cast_const(), len: LARGE } },
    );
    // The caller breaks its promise, which is the simplest way to have the kernel refuse.
    unmap(memory, LARGE);
    let mut came = vec![0; LARGE];
    let took = receive(&groups[0], 1, &mut came);
    for (running, words) in [(took, "rank 1 ("), (sent, "from this rank's memory")] {
        let soon = Deadline::after(Duration::from_secs(10));
        let error = running.wait(soon).expect("before its own deadline").expect_err("it cannot be read");
        assert_eq!(error.status(), Status::System);
        assert!(error.text().contains(words), "{error} does not say {words}");
    }
}

#[test]
fn a_message_withdrawn_behind_a_full_ring_does_not_count() {
    let groups = linked_pair(true);
    let (mut source, flood) = (vec![7; LARGE], vec![1; 64 * 1024]);
    // By hand, so that nobody moves rank 1 in the background.
    let mut messages = groups[1].endpoint().messages();
    let (given_up, stuck) = (messages.mailbox(), messages.mailbox());
    let mut send_by_hand = |mailbox, tag, bytes: &[u8]| {
        let sequence = messages.next_in_pair(0, groups[1].id());
        let key = Key { group: groups[1].id(), tag, sequence, slot: 0, class: Class::PointToPoint };
        let signature = Signature { kind: Kind::Send, count: bytes.len() as u64, ..BARRIER };
        let from = Source { address: bytes.as_ptr(), len: bytes.len() };
        messages.send(0, key, signature, from, Ticket { mailbox, step: 0 });
    };
    send_by_hand(given_up, 1, &source);
    for _ in 0..FLOOD {
        send_by_hand(stuck, 2, &flood);
    }
    messages.write_out();
    assert!(messages.look(stuck).done.len() < FLOOD, "the ring is full");
    messages.cancel(given_up);
    drop(messages);
    source.fill(9);
    let mut came = vec![0; LARGE];
    let took = receive(&groups[0], 1, &mut came);
    let early = took.wait(Deadline::after(Duration::from_millis(100)));
    assert!(early.is_none(), "it took bytes that were no longer the message's: {early:?}");
    // Rank 1 moves again: the withdrawal comes through, and the next message is taken.
    let next = vec![5; LARGE];
    let sent = send(&groups[1], 1, &next);
    done(&took);
    done(&sent);
    assert!(came == next);
    let mut messages = groups[1].endpoint().messages();
    assert_eq!(messages.look(stuck).done.len(), FLOOD);
    messages.close_mailbox(stuck);
}

#[test]
fn a_receive_that_is_given_up_while_it_is_pulled_leaves_its_buffer_alone() {
    let groups = linked_pair(true);
    let (bytes, mut came) = (vec![7; LARGE], vec![0u8; LARGE]);
    let sent = send(&groups[1], 1, &bytes);
    // By hand, piece by piece.
    let mut messages = groups[0].endpoint().messages();
    let mailbox = messages.mailbox();
    let (address, len) = (came.as_mut_ptr(), LARGE);
    let signature = Signature { kind: Kind::Receive, count: LARGE as u64, ..BARRIER };
    let (into, ticket) = (Destination { address, len }, Ticket { mailbox, step: 0 });
    messages.receive_next((groups[0].id(), 1), pairs::From::Rank(1), signature, into, ticket);
    let soon = Deadline::after(Duration::from_secs(10));
    // SAFETY: it lies in `came`, which nobody but this thread writes.
    while unsafe { address.read_volatile() } == 0 {
        assert!(!soon.expired(), "nothing comes");
        messages.progress(1);
    }
    assert!(messages.progress(1), "there is more");
    messages.cancel(mailbox);
    drop(messages);
    // It is told that its bytes are free.
    done(&sent);
    let begun = came.iter().position(|&byte| byte == 0).expect("not all of it");
    assert!(begun > 0 && came[begun..].iter().all(|&byte| byte == 0), "{begun}");
}
