//! What only real GPUs can show. `cargo test` does not run this; `scripts/gpu-test` builds it, and runs it where GPUs are.
//! A test that needs more GPUs than there are says so on a line of its own and counts as not run.

mod driver;
mod exchange;
