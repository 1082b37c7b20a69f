//! What every store must do, run against each of them.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use super::store::Store;
use crate::deadline::Deadline;
use crate::error::Status;

/// Runs all of it. `open` gives a handle on the one store under test, as another rank would have it.
pub(super) fn run<S: Store>(open: impl Fn() -> S + Sync) {
    reads_what_another_wrote(&open);
    keeps_any_bytes(&open);
    keeps_apart_odd_keys(&open);
    wakes_a_waiter(&open);
    times_out_with_names(&open);
    adds_atomically(&open);
    refuses_to_add_to_text(&open);
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

fn reads_what_another_wrote<S: Store>(open: &impl Fn() -> S) {
    let (a, b) = (open(), open());
    assert_eq!(b.try_get("plain", soon()).unwrap(), None);
    a.set("plain", b"one", soon()).unwrap();
    assert_eq!(b.try_get("plain", soon()).unwrap().as_deref(), Some(&b"one"[..]));
    assert_eq!(b.get("plain", soon()).unwrap(), b"one");
    b.set("plain", b"two", soon()).unwrap();
    assert_eq!(a.get("plain", soon()).unwrap(), b"two");
    // A value that is there is given even when the deadline has passed.
    assert_eq!(a.get("plain", Deadline::after(Duration::ZERO)).unwrap(), b"two");
}

fn keeps_any_bytes<S: Store>(open: &impl Fn() -> S) {
    let (a, b) = (open(), open());
    let every: Vec<u8> = (0..=255).collect();
    let large: Vec<u8> = (0..1 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for (key, value) in [("empty", &[][..]), ("every byte", &every), ("1 MiB", &large)] {
        a.set(key, value, soon()).unwrap();
        assert!(b.get(key, soon()).unwrap() == value, "value '{key}' came back changed");
    }
}

fn keeps_apart_odd_keys<S: Store>(open: &impl Fn() -> S) {
    let (a, b) = (open(), open());
    let long = "long/".repeat(100);
    let longer = format!("{long}x");
    let keys = [
        "",
        ".",
        "..",
        "../up",
        "/",
        "a/b",
        "a%2Fb",
        "a b",
        "A",
        "%",
        "%2E",
        "~",
        "-",
        "tab\t",
        "line\n",
        "nul\0",
        "schlüssel",
        "鍵",
        ".lock",
        &long,
        &longer,
    ];
    for (index, key) in keys.iter().enumerate() {
        a.set(key, &index.to_le_bytes(), soon()).unwrap();
    }
    for (index, key) in keys.iter().enumerate() {
        assert_eq!(b.get(key, soon()).unwrap(), index.to_le_bytes(), "key {key:?}");
    }
}

fn wakes_a_waiter<S: Store>(open: &(impl Fn() -> S + Sync)) {
    thread::scope(|scope| {
        let waiters: Vec<_> = (0..3).map(|_| scope.spawn(|| open().get("later", soon()).unwrap())).collect();
        let other = scope.spawn(|| open().get("later still", soon()).unwrap());
        thread::sleep(Duration::from_millis(30));
        let store = open();
        store.set("later", b"now", soon()).unwrap();
        store.add("later still", 5, soon()).unwrap();
        for waiter in waiters {
            assert_eq!(waiter.join().unwrap(), b"now");
        }
        assert_eq!(other.join().unwrap(), b"5");
    });
}

fn times_out_with_names<S: Store>(open: &impl Fn() -> S) {
    let store = open();
    let since = Instant::now();
    let error = store.get("never set", Deadline::after(Duration::from_millis(50))).unwrap_err();
    assert!(since.elapsed() >= Duration::from_millis(50), "gave up early");
    assert_eq!(error.status(), Status::Timeout);
    assert!(error.text().contains("never set"), "{error}");
    // The store is usable after a timeout.
    store.set("after a timeout", b"x", soon()).unwrap();
    assert_eq!(store.get("after a timeout", soon()).unwrap(), b"x");
}

fn adds_atomically<S: Store>(open: &(impl Fn() -> S + Sync)) {
    const THREADS: usize = 8;
    const ROUNDS: usize = 20;
    let start = Barrier::new(THREADS);
    let mut sums: Vec<i64> = thread::scope(|scope| {
        let adders: Vec<_> = (0..THREADS)
            .map(|_| {
                scope.spawn(|| {
                    let store = open();
                    start.wait();
                    (0..ROUNDS).map(|_| store.add("count", 1, soon()).unwrap()).collect::<Vec<_>>()
                })
            })
            .collect();
        adders.into_iter().flat_map(|adder| adder.join().unwrap()).collect()
    });
    sums.sort_unstable();
    let expected: Vec<i64> = (1..=(THREADS * ROUNDS) as i64).collect();
    assert_eq!(sums, expected, "each sum is given exactly once");
    let store = open();
    assert_eq!(store.add("count", -200, soon()).unwrap(), 160 - 200);
    assert_eq!(store.get("count", soon()).unwrap(), b"-40");
    store.set("preset", b"41", soon()).unwrap();
    assert_eq!(store.add("preset", 1, soon()).unwrap(), 42);
}

fn refuses_to_add_to_text<S: Store>(open: &impl Fn() -> S) {
    let store = open();
    store.set("text", b"twelve", soon()).unwrap();
    let error = store.add("text", 1, soon()).unwrap_err();
    assert_eq!(error.status(), Status::InvalidUsage);
    assert!(error.text().contains("text'"), "{error}");
    assert_eq!(store.get("text", soon()).unwrap(), b"twelve");
    store.set("large", i64::MAX.to_string().as_bytes(), soon()).unwrap();
    assert_eq!(store.add("large", 1, soon()).unwrap_err().status(), Status::InvalidUsage);
}
