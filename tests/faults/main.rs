//! What happens when something goes wrong: processes that die, deaths::stop, exit or surroundings::fork, calls that differ, strangers, no
//! descriptors. And what waiting and being there costs.

mod costs;
mod deaths;
mod differences;
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
        ("descriptors", surroundings::descriptors),
        ("fork", surroundings::fork),
        ("alone", costs::alone),
        ("idle", costs::idle),
        ("memory", costs::memory),
        ("time", costs::time),
    ]);
}
