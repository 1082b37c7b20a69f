//! Times of calls, as a table: each size captured many times over in a graph of every rank, and the graphs
//! replayed.
//!
//! `UNISONO_EXCHANGE_TIMES` names what to measure: `KIND[:FIRST[:LAST]]` in bytes, with commas between, or
//! nothing for allreduce and broadcast. `UNISONO_EXCHANGE_TABLE` overrides choices, `KEY=VALUE` with commas
//! between, several sets with semicolons between, each measured in turn. Bytes are the whole's, of all parts
//! together.

use std::time::{Duration, Instant};

use cudarc::driver::sys;
use unisono::cuda::exchange::{Bounds, Table, Tuning};
use unisono::signature::Kind;

use super::case::{Case, parts};
use super::world::{Graph, World, gpus};

pub(super) fn print() {
    let what = std::env::var("UNISONO_EXCHANGE_TIMES").unwrap_or_default();
    let what = if what.len() < 2 { "allreduce,broadcast" } else { &what };
    let sets = std::env::var("UNISONO_EXCHANGE_TABLE").unwrap_or_default();
    for size in [2, 4, 8] {
        if size > gpus() {
            continue;
        }
        for kind in what.split(',') {
            let mut fields = kind.split(':');
            let name = fields.next().unwrap_or_default();
            let kind = Kind::ALL.into_iter().find(|k| k.name() == name).expect("a kind");
            let mut bound = |otherwise| fields.next().map_or(otherwise, |f| f.parse().expect("bytes"));
            let (first, last): (u64, u64) = (bound(8), bound(1 << 30));
            let sizes: Vec<u64> =
                (3..=30).map(|log| 1 << log).filter(|b| (first..=last).contains(b)).collect();
            println!("{name}, {size} GPUs, µs: bytes | {}", sets.replace(';', " | "));
            let columns: Vec<Vec<f64>> =
                sets.split(';').map(|set| measure(kind, size, set, &sizes)).collect();
            for (i, bytes) in sizes.iter().enumerate() {
                let row: Vec<String> = columns.iter().map(|column| format!("{:9.2}", column[i])).collect();
                println!("{bytes:>11} {}", row.join(" "));
            }
        }
    }
}

fn measure(kind: Kind, size: u32, set: &str, sizes: &[u64]) -> Vec<f64> {
    let mut table = Table::default();
    for pair in set.split(',').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').expect("KEY=VALUE");
        adjust(&mut table, key, value.parse().expect("a number"));
    }
    let longest = *sizes.last().expect("a size");
    let world = World::with_table(size, longest as usize, table);
    sizes.iter().map(|&bytes| time(&world, kind, size, bytes)).collect()
}

fn time(world: &World, kind: Kind, size: u32, bytes: u64) -> f64 {
    let case = Case::new(kind, (bytes / 4 / parts(kind, size)).max(1));
    let calls = match bytes {
        0..=0xf_ffff => 200,
        0x10_0000..=0xff_ffff => 50,
        _ => 6,
    };
    let graphs: Vec<Graph> = (0..size)
        .map(|rank| {
            Graph::capture(world.devices(), world.stream(rank), || {
                (0..calls).for_each(|_| world.enqueue(rank, &case));
            })
        })
        .collect();
    let mut best = f64::MAX;
    for round in 0..6 {
        let timers: Vec<Timer> = (0..size).map(|rank| Timer::new(world, rank)).collect();
        for (graph, timer) in graphs.iter().zip(&timers) {
            timer.start();
            graph.launch();
            timer.stop();
        }
        world.wait();
        let longest = timers.iter().map(Timer::microseconds).fold(0.0, f64::max);
        // The first round warms up.
        if round > 0 {
            best = best.min(longest / f64::from(calls));
        }
    }
    best
}

/// Two events around what a stream is given.
struct Timer<'a> {
    world: &'a World,
    rank: u32,
    events: [sys::CUevent; 2],
}

impl Timer<'_> {
    fn new(world: &World, rank: u32) -> Timer<'_> {
        let _entered = world.devices().enter(world.stream(rank).device()).expect("a context");
        let event = || {
            let mut event = std::ptr::null_mut();
            // SAFETY: writes the event.
            unsafe { sys::cuEventCreate(&raw mut event, 0).result().expect("an event") };
            event
        };
        Timer { world, rank, events: [event(), event()] }
    }

    fn record(&self, event: usize) {
        let stream = self.world.stream(self.rank);
        let _entered = self.world.devices().enter(stream.device()).expect("a context");
        // SAFETY: both live.
        unsafe {
            sys::cuEventRecord(self.events[event], stream.handle().0 as sys::CUstream)
                .result()
                .expect("a record")
        };
    }

    fn start(&self) {
        self.record(0);
    }

    fn stop(&self) {
        self.record(1);
    }

    fn microseconds(&self) -> f64 {
        let mut milliseconds = 0.0;
        let began = Instant::now();
        // SAFETY: recorded above, and waited for.
        while unsafe { sys::cuEventElapsedTime_v2(&raw mut milliseconds, self.events[0], self.events[1]) }
            .result()
            .is_err()
        {
            assert!(began.elapsed() < Duration::from_secs(5), "an event comes");
        }
        f64::from(milliseconds) * 1000.0
    }
}

impl Drop for Timer<'_> {
    fn drop(&mut self) {
        for event in self.events {
            // SAFETY: ours.
            let _ = unsafe { sys::cuEventDestroy_v2(event) };
        }
    }
}

fn adjust(table: &mut Table, key: &str, value: u64) {
    match key {
        "blocks" => return table.blocks = value as u32,
        "depth" => return table.depth = value as u32,
        _ => {}
    }
    for tuning in &mut table.tunings {
        let Tuning { allreduce, reduce, reduce_scatter, broadcast, moves, .. } = tuning;
        match key {
            "slot" => tuning.slot = value as u32,
            "tile_blocks" => tuning.tile_blocks = value as u32,
            "line_blocks" => tuning.line_blocks = value as u32,
            "move_slot" => tuning.move_slot = value as u32,
            "line_share" => tuning.line_share = value,
            "parts" => tuning.parts = value as u32,
            "line_part" => tuning.line_part = value,
            "tile_part" => tuning.tile_part = value,
            _ => {
                let all = [allreduce, reduce, reduce_scatter, broadcast, moves];
                all.into_iter().for_each(|bounds: &mut Bounds| match key {
                    "narrow" => bounds.narrow = value,
                    "wide" => bounds.wide = value,
                    "sharded" => bounds.sharded = value,
                    other => panic!("no choice is called {other}"),
                });
            }
        }
    }
}
