//! Calls back when what streams were given is done. Driver threads must not run callbacks (they may make no CUDA calls),
//! so one thread of the process looks, from the first callback on, and sleeps without a timer when there is none.

use std::sync::{Arc, Condvar, Mutex, Once};
use std::time::Duration;

use super::work::Enqueued;
use crate::engine::endpoint::lock;
use crate::engine::operation::{self, Callback};
use crate::sys::process;

/// Between two looks at what is not done.
const NAP: Duration = Duration::from_micros(100);

static WATCHED: Mutex<Vec<(Arc<Enqueued>, Callback)>> = Mutex::new(Vec::new());
static ADDED: Condvar = Condvar::new();

/// Calls `then` with the result of `enqueued`, from the watching thread.
pub(super) fn add(enqueued: Arc<Enqueued>, then: Callback) {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        if let Err(error) = process::spawn("unisono-watch", watch) {
            log::error!("no thread can be started that calls back: {error}");
        }
    });
    lock(&WATCHED).push((enqueued, then));
    ADDED.notify_one();
}

fn watch() {
    loop {
        let mut watched = lock(&WATCHED);
        while watched.is_empty() {
            watched = ADDED.wait(watched).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        let mut done = Vec::new();
        let mut rest = Vec::with_capacity(watched.len());
        for (enqueued, then) in watched.drain(..) {
            match enqueued.look() {
                Some(result) => done.push((then, result)),
                None => rest.push((enqueued, then)),
            }
        }
        *watched = rest;
        drop(watched);
        if done.is_empty() {
            std::thread::sleep(NAP);
        }
        for (then, result) in done {
            operation::call_back(then, result);
        }
    }
}
