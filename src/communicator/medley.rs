//! Random programs: calls of all kinds one behind the other, on random ranks, streams and memory, compared
//! with plain loops; the same with something that goes wrong, where every rank has to come back with what is
//! right or an error, streams have to come to an end, and nothing may use what its owner has back.
//!
//! A program follows from its seed alone; how its threads are interleaved does not. `cargo test --lib medley`
//! plays few. To hunt:
//! `UNISONO_MEDLEY_SEEDS=1000..1100 cargo test --lib medley -- --nocapture --test-threads 1`; a seed that
//! fails is printed with its program.

mod play;
mod program;
mod values;

use std::iter;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use play::{Left, Seat};
use program::{Gpus, Program};

use crate::cuda::context::Devices;
use crate::cuda::double::{Clock, Double};
use crate::cuda::slab::Arena;
use crate::deadline::Deadline;
use crate::rendezvous::hash::HashStore;

/// A program that takes longer hangs.
const BOUND: Duration = Duration::from_secs(60);

/// The ranks' drivers and streams.
fn seats(program: &Program) -> Vec<Option<Seat>> {
    let setting = program.setting;
    if setting.gpus == Gpus::None {
        return vec![None; setting.size()];
    }
    let mut seats = Vec::new();
    for _ in 0..setting.hosts {
        let make = |devices| {
            let double = Double::new(devices, setting.order);
            if let Some(queues) = setting.queues {
                double.share_queues(queues, 2);
            }
            let devices = Devices::over(double.clone()).expect("the double's devices");
            (double, devices)
        };
        let shared = setting.one_process.then(|| make(setting.inside as u32));
        for place in 0..setting.inside {
            let (double, devices) = shared.clone().unwrap_or_else(|| make(1));
            let device = if setting.one_process { place as u32 } else { 0 };
            let streams = (0..setting.streams).map(|_| double.stream(device)).collect();
            seats.push(Some(Seat { double, devices, device, streams }));
        }
    }
    seats
}

/// Plays a program. What was wrong.
fn play(program: Program) -> Vec<String> {
    let program = Arc::new(program);
    let size = program.setting.size();
    let seats = seats(&program);
    let mut doubles: Vec<Arc<Double>> = Vec::new();
    for seat in seats.iter().flatten() {
        if !doubles.iter().any(|double| Arc::ptr_eq(double, &seat.double)) {
            doubles.push(seat.double.clone());
        }
    }
    let clocks: Vec<_> = doubles.iter().map(Clock::start).collect();
    let store = Arc::new(HashStore::new());
    let places: Arc<Vec<AtomicUsize>> = Arc::new((0..size).map(|_| AtomicUsize::new(0)).collect());
    let (tell, told) = mpsc::channel();
    let start = Instant::now();
    for rank in 0..size {
        let (program, seat, store) = (program.clone(), seats[rank].clone(), store.clone());
        let (tell, places) = (tell.clone(), places.clone());
        let play = move || {
            let left = play::play(rank, &program, seat, &store, &places[rank]);
            let _ = tell.send((rank, left));
        };
        thread::Builder::new().name(format!("rank {rank}")).spawn(play).expect("a thread");
    }
    drop(tell);
    let standstills = || {
        let told = doubles.iter().enumerate();
        told.filter_map(|(number, double)| {
            Some(format!("driver {number} stood still: {}", double.standstill()?))
        })
    };
    let mut lefts: Vec<Option<Left>> = (0..size).map(|_| None).collect();
    while lefts.iter().any(Option::is_none) {
        match told.recv_timeout(BOUND.saturating_sub(start.elapsed())) {
            Ok((rank, left)) => lefts[rank] = Some(left),
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                let lost = lefts.iter().position(Option::is_none);
                return vec![format!("rank {lost:?} panicked")];
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {
                let places: Vec<_> = places.iter().map(|place| place.load(Ordering::SeqCst)).collect();
                let hangs = format!("hangs: the ranks are at steps {places:?}");
                return iter::once(hangs).chain(standstills()).collect();
            }
        }
    }
    let mut wrong = Vec::new();
    // What holds streams goes on by itself.
    let until = Instant::now() + BOUND;
    while doubles.iter().any(|double| !double.is_idle()) && Instant::now() < until {
        thread::sleep(Duration::from_micros(200));
    }
    drop(clocks);
    for double in &doubles {
        double.drain();
        let told = double.complaints().into_iter().filter(|text| match program.fault {
            None => true,
            Some(_) => text.contains("while a stream") || text.contains("for ever"),
        });
        wrong.extend(told);
    }
    for seat in seats.iter().flatten().filter(|_| program.setting.gpus == Gpus::Exchanging) {
        // What is left of exchanges is given back when memory is asked for.
        drop(Arena::new(&seat.devices, seat.device, 64, Deadline::after(Duration::from_secs(1))));
    }
    for (rank, left) in lefts.into_iter().enumerate() {
        let Some(mut left) = left else { continue };
        left.look(seats[rank].as_ref().map(|seat| &seat.double));
        if let (Some(error), true) = (left.error, program.fault.is_none()) {
            wrong.push(format!("rank {rank}: {error}"));
        }
        wrong.extend(left.wrong.into_iter().map(|text| format!("rank {rank}: {text}")));
    }
    if !wrong.is_empty() {
        wrong.extend(standstills());
    }
    wrong
}

/// Plays the programs of some seeds, unless others are asked for.
fn hunt(seeds: Range<u64>, suffers: bool) {
    let asked = std::env::var("UNISONO_MEDLEY_SEEDS").ok().map(|text| {
        let (from, to) = text.split_once("..").expect("FROM..TO");
        from.parse().expect("a number")..to.parse().expect("a number")
    });
    let mut failed = Vec::new();
    for seed in asked.unwrap_or(seeds) {
        let program = Program::new(seed, suffers);
        let text = format!("{program:?}");
        let wrong = play(program);
        if !wrong.is_empty() {
            eprintln!("seed {seed}: {text}\n  {}", wrong.join("\n  "));
            failed.push(seed);
        }
    }
    assert_eq!(failed, [0; 0], "these seeds, suffering: {suffers}");
}

#[test]
fn programs_do_what_plain_loops_do() {
    hunt(0..40, false);
}

#[test]
fn programs_that_fail_end() {
    hunt(0..25, true);
}
