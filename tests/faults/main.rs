//! What happens when something goes wrong: processes that die, stop, exit or fork, calls that differ,
//! strangers, no descriptors, ranks that cannot meet, children that lose a member. And what waiting and being
//! there costs.

mod children;
mod costs;
mod deaths;
mod differences;
mod leaving;
mod meetings;
mod strangers;
#[path = "../support/mod.rs"]
mod support;
mod surroundings;

use support::processes::enter;
use support::tagged;
use unisono::communicator::Call;

#[test]
fn rank() {
    enter(&[
        ("small sums", |seat| deaths::until_it_fails(seat, 16)),
        ("large sums", |seat| deaths::until_it_fails(seat, 3_300_000)),
        ("sends", deaths::sends_until_it_fails),
        ("stop", deaths::stop),
        ("stop across hosts", deaths::stop_across_hosts),
        ("stop in order", |seat| deaths::stop_in_broadcasts(seat, &Call::default())),
        ("stop in a tag", |seat| deaths::stop_in_broadcasts(seat, &tagged(7))),
        ("exit early", deaths::exit_early),
        ("exit", deaths::exit_while_needed),
        ("announce and exit", leaving::announces_and_exits),
        ("abort and end", leaving::aborts_and_ends),
        ("end beside a callback", leaving::ends_beside_a_callback),
        ("exit in a callback", leaving::exits_in_a_callback),
        ("end together", leaving::end_together),
        ("exit slowly", leaving::exits_slowly),
        ("abort a child", children::abort_a_child),
        ("die in a child", children::die_in_a_child),
        ("die in the meeting", meetings::die),
        ("die before joining", meetings::die_before_joining),
        ("serve an id", meetings::serve_an_id),
        ("never come", meetings::never_come),
        ("come last and fail", meetings::come_last_and_fail),
        ("call wrongly", meetings::call_wrongly),
        ("environment differs", meetings::environment_differs),
        ("exit after the meeting", meetings::exit_at_once),
        ("fork and join", meetings::fork_and_join),
        ("descriptors", surroundings::descriptors),
        ("descriptors for links", surroundings::descriptors_for_links),
        ("descriptors in the meeting", surroundings::descriptors_in_the_meeting),
        ("descriptors for the own store", surroundings::descriptors_for_the_own_store),
        ("crowd at the store", surroundings::crowd_at_the_store),
        ("short files", surroundings::short_files),
        ("little address space", surroundings::little_address_space),
        ("memory for messages", surroundings::memory_for_messages),
        ("fork", surroundings::fork),
        ("alone", costs::alone),
        ("idle", costs::idle),
        ("memory", costs::memory),
        ("time", costs::time),
    ]);
}
