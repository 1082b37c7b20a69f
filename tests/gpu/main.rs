//! What only real GPUs can show. `cargo test` does not run this; `scripts/gpu-test` builds it, and runs it
//! where GPUs are, one test after the other: a test that makes a stream wait must not be waited for by
//! another's free. A test that needs more GPUs than there are says so on a line of its own and counts as not
//! run.

mod algorithms;
mod batches;
mod calls;
mod cuda;
mod device;
mod driver;
mod exchange;
mod held;
mod hosts;
mod local;
mod queues;
mod relay;
mod sparse;
mod staged;
mod stages;
#[path = "../support/mod.rs"]
mod support;
mod trouble;
mod windows;

#[test]
fn rank() {
    support::processes::enter(&[
        ("algorithms", algorithms::algorithms),
        ("device calls", device::scenario_calls),
        ("device death", device::scenario_death),
        ("device stop", device::scenario_stop),
        ("device mismatch", device::scenario_mismatch),
        ("device abort", device::scenario_abort),
        ("held absent", held::scenario_absent),
        ("held killed", held::scenario_killed),
        ("held first", held::scenario_first),
        ("hosts", hosts::calls),
        ("hosts death", hosts::death),
        ("hosts mismatch", hosts::mismatch),
        ("hosts stopped", hosts::stopped),
        ("relay", relay::calls),
        ("stages", stages::scenario),
        ("windows", windows::scenario),
        ("staged", staged::collectives),
        ("staged death", staged::death),
        ("staged speed", staged::speed),
        ("trouble arguments", trouble::scenario_arguments),
        ("trouble host", trouble::scenario_host),
        ("trouble absent", trouble::scenario_absent),
    ]);
}
