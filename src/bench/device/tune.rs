//! `--tune`: measures the choices of the exchange between GPUs for the ranks that there are, and writes them
//! down for `UNISONO_TUNING`.
//!
//! Choice after choice is varied while the others stay, and kept if it makes its calls 2 % faster; then every
//! protocol is measured alone over the sizes, which tells where one is to end and the next to begin. There
//! are at most 700 measurements, and each takes its budget and two fifths of it to warm up.

use std::ops::RangeInclusive;
use std::path::Path;

use super::crossing::{self, Point, WAYS};
use super::device_of;
use super::rank::{Outcome, Rank};
use crate::bench::case::Case;
use crate::bench::file;
use crate::bench::operation;
use crate::bench::options::{CallStyle, Choice, Options, Place};
use crate::bench::output::say;
use crate::bench::seat::Seat;
use crate::cuda::context::Devices;
use crate::cuda::exchange::{Bounds, Chosen, DealtBounds, Table, Tuning, UNBOUNDED};
use crate::error::{Error, Result, fail};
use crate::reduce::{DataType, Operator};
use crate::signature::Kind;

/// The largest call.
const LARGEST: u64 = 64 << 20;
/// What is as good as the best so far stays.
const WORTH: f64 = 0.98;
/// A protocol that takes so much longer than a later one is not looked at for larger calls.
const BEATEN: f64 = 1.5;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// A choice that is varied: its values, and the calls that show what it does.
struct Step {
    name: &'static str,
    set: fn(&mut Tuning, u64),
    values: &'static [u64],
    kinds: &'static [Kind],
    sizes: &'static [u64],
    /// By tiles alone, whatever the bounds are.
    tiles: bool,
    /// For how many ranks it makes a difference.
    ranks: RangeInclusive<u32>,
}

const STEPS: [Step; 14] = [
    Step {
        name: "slot",
        set: |tuning, value| tuning.slot = value as u32,
        // Not only powers of two: between four GPUs they were the slower ones.
        values: &[8 * KIB, 12 * KIB, 16 * KIB, 24 * KIB, 32 * KIB, 64 * KIB],
        kinds: &[Kind::Allreduce, Kind::Broadcast, Kind::ReduceScatter],
        sizes: &[16 * MIB, 64 * MIB],
        tiles: true,
        ranks: 2..=8,
    },
    Step {
        name: "tile_blocks",
        set: |tuning, value| tuning.tile_blocks = value as u32,
        values: &[8, 16, 24, 32, 48, 64, 96, 128],
        kinds: &[Kind::Allreduce, Kind::Broadcast, Kind::ReduceScatter],
        sizes: &[4 * MIB, 16 * MIB, 64 * MIB],
        tiles: true,
        ranks: 2..=8,
    },
    Step {
        name: "line_share",
        set: |tuning, value| tuning.line_share = value,
        values: &[KIB, 2 * KIB, 4 * KIB],
        kinds: &[Kind::Allreduce, Kind::Broadcast],
        sizes: &[8 * KIB, 64 * KIB, 256 * KIB],
        tiles: false,
        ranks: 2..=8,
    },
    Step {
        name: "line_blocks",
        set: |tuning, value| tuning.line_blocks = value as u32,
        values: &[16, 32, 48, 64],
        kinds: &[Kind::Allreduce, Kind::Broadcast],
        sizes: &[64 * KIB, 256 * KIB],
        tiles: false,
        ranks: 2..=8,
    },
    Step {
        name: "parts",
        set: |tuning, value| tuning.parts = value as u32,
        values: &[8, 16, 32, 64, 128],
        kinds: &[Kind::Alltoall, Kind::Allgather],
        sizes: &[4 * MIB, 16 * MIB, 64 * MIB],
        tiles: true,
        ranks: 2..=8,
    },
    Step {
        name: "line_part",
        set: |tuning, value| tuning.line_part = value,
        values: &[KIB, 2 * KIB, 4 * KIB, 8 * KIB],
        kinds: &[Kind::Alltoall],
        sizes: &[16 * KIB, 128 * KIB, 512 * KIB],
        tiles: false,
        ranks: 2..=8,
    },
    Step {
        name: "tile_part",
        set: |tuning, value| tuning.tile_part = value,
        values: &[16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB],
        kinds: &[Kind::Alltoall],
        sizes: &[4 * MIB, 16 * MIB],
        tiles: true,
        ranks: 2..=8,
    },
    Step {
        name: "move_slot",
        set: |tuning, value| tuning.move_slot = value as u32,
        values: &[16 * KIB, 24 * KIB, 32 * KIB, 64 * KIB],
        kinds: &[Kind::Alltoall, Kind::Allgather],
        sizes: &[4 * MIB, 64 * MIB],
        tiles: true,
        ranks: 2..=8,
    },
    Step {
        name: "broadcast_sends",
        set: |tuning, value| tuning.broadcast_sends = value,
        values: &[8 * MIB, 16 * MIB, 32 * MIB, UNBOUNDED],
        kinds: &[Kind::Broadcast],
        sizes: &[8 * MIB, 16 * MIB, 64 * MIB],
        tiles: false,
        ranks: 2..=2,
    },
    Step {
        name: "reduce_spares",
        set: |tuning, value| tuning.reduce_spares = value,
        values: &[MIB, 8 * MIB, 32 * MIB, UNBOUNDED],
        kinds: &[Kind::Reduce],
        sizes: &[2 * MIB, 16 * MIB, 64 * MIB],
        tiles: false,
        ranks: 3..=8,
    },
    Step {
        name: "dealt_from allreduce",
        set: |tuning, value| tuning.dealt_from.allreduce = value,
        values: &[MIB, 3 * MIB / 2, 3 * MIB],
        kinds: &[Kind::Allreduce],
        sizes: &[3 * MIB / 2, 2 * MIB],
        tiles: false,
        ranks: 3..=4,
    },
    Step {
        name: "dealt_from reduce",
        set: |tuning, value| tuning.dealt_from.reduce = value,
        values: &[MIB, 3 * MIB / 2, 3 * MIB],
        kinds: &[Kind::Reduce],
        sizes: &[3 * MIB / 2, 2 * MIB],
        tiles: false,
        ranks: 3..=4,
    },
    Step {
        name: "dealt_to allreduce",
        set: |tuning, value| tuning.dealt_to.allreduce = value,
        values: &[4 * MIB, 48 * MIB, 0],
        kinds: &[Kind::Allreduce],
        sizes: &[4 * MIB, 16 * MIB, 32 * MIB],
        tiles: false,
        ranks: 3..=4,
    },
    Step {
        name: "dealt_to reduce",
        set: |tuning, value| tuning.dealt_to.reduce = value,
        values: &[8 * MIB, 48 * MIB, 0],
        kinds: &[Kind::Reduce],
        sizes: &[4 * MIB, 16 * MIB, 64 * MIB],
        tiles: false,
        ranks: 3..=4,
    },
];

/// Bounds, the operations that they are measured by, and where they are.
type Measured = (&'static [Kind], fn(&mut Tuning) -> &mut Bounds);

const BOUNDS: [Measured; 6] = [
    (&[Kind::Allreduce], |tuning| &mut tuning.allreduce),
    (&[Kind::Reduce], |tuning| &mut tuning.reduce),
    (&[Kind::ReduceScatter], |tuning| &mut tuning.reduce_scatter),
    (&[Kind::Broadcast], |tuning| &mut tuning.broadcast),
    (&[Kind::Alltoall, Kind::Allgather], |tuning| &mut tuning.swaps),
    (&[Kind::Scatter], |tuning| &mut tuning.moves),
];

/// The names of the protocols, and from which to which size each is worth a look.
const PROTOCOLS: [(&str, u64, u64); WAYS] = [
    ("narrow", 8, 256 * KIB),
    ("wide", 512, 8 * MIB),
    ("sharded", 8 * KIB, 32 * MIB),
    ("tiles", 32 * KIB, LARGEST),
];

/// Measures on all ranks, writes the file on rank 0. What the file says already of other numbers of ranks
/// stays.
pub(in crate::bench) fn tune(options: &Options, seat: &Seat, path: &Path) -> Result<bool> {
    let devices = Devices::open()?;
    let device = device_of(&devices, seat)?;
    let _entered = devices.enter(device)?;
    if seat.size < 2 || seat.size > devices.count() {
        fail!(
            InvalidUsage,
            "--tune measures ranks that have a GPU each: 2 to {} here, not {}",
            devices.count(),
            seat.size
        );
    }
    let table = match std::fs::read_to_string(path) {
        Ok(text) => text.parse().map_err(|error: Error| error.context(format_args!("{}", path.display())))?,
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => {
            Chosen::of_device(devices.driver(), device)?.table
        }
        Err(cause) => return Err(Error::system(format!("cannot read {}", path.display()), cause)),
    };
    let rank = Rank::join(options, seat, &devices, device, LARGEST as usize)?;
    let mut search = Search { rank, options, device, size: seat.size, table };
    for step in STEPS.iter().filter(|step| step.ranks.contains(&seat.size)) {
        search.vary(step)?;
    }
    for (kinds, place) in BOUNDS {
        search.find_bounds(kinds, place)?;
    }
    let Search { rank, table, .. } = search;
    table.check()?;
    if rank.leads() {
        let (major, minor) = devices.driver().capability(device)?;
        let text = format!(
            "# Measured by unisono-bench {} --tune with {} ranks, GPUs of compute capability {major}.{minor} with {} \
             multiprocessors.\n{table}",
            env!("CARGO_PKG_VERSION"),
            seat.size,
            devices.driver().multiprocessors(device)?
        );
        file::replace(path, &text)?;
        say!("# {} is written: UNISONO_TUNING={} on all ranks", path.display(), path.display());
    }
    rank.finish()?;
    Ok(true)
}

struct Search<'a> {
    rank: Rank<'a>,
    options: &'a Options,
    device: u32,
    size: u32,
    /// The best so far.
    table: Table,
}

impl Search<'_> {
    fn tuning_of(table: &mut Table, size: u32) -> &mut Tuning {
        &mut table.tunings[Table::group_of(size)]
    }

    /// Tries the values of one choice.
    fn vary(&mut self, step: &Step) -> Result<()> {
        let mut cases = Vec::new();
        for &kind in step.kinds {
            cases.extend(step.sizes.iter().map(|&bytes| self.case(kind, bytes)));
        }
        let before = self.mean(self.table, step, &cases)?;
        let (mut best, mut least) = (self.table, before * WORTH);
        for &value in step.values {
            let mut table = self.table;
            (step.set)(Search::tuning_of(&mut table, self.size), value);
            if table == self.table || table.check().is_err() {
                continue;
            }
            let mean = self.mean(table, step, &cases)?;
            if self.rank.leads() {
                say!("{:<20} {value:>8}: {:.3} of the time", step.name, mean / before);
            }
            if mean < least {
                (best, least) = (table, mean);
            }
        }
        self.table = best;
        Ok(())
    }

    /// The geometric mean of the times by a table.
    fn mean(&mut self, table: Table, step: &Step, cases: &[Case]) -> Result<f64> {
        let table = if step.tiles { only(table, self.size, WAYS - 1) } else { table };
        self.rank.admit_by(table, self.device)?;
        let mut sum = 0.0;
        for case in cases {
            sum += self.time(case, 0)?.ln();
        }
        self.rank.dismiss()?;
        Ok((sum / cases.len() as f64).exp())
    }

    /// Measures each protocol alone.
    fn find_bounds(&mut self, kinds: &[Kind], place: fn(&mut Tuning) -> &mut Bounds) -> Result<()> {
        let name = operation::name(kinds[0]);
        let room = self.table.line_room(kinds[0], self.size);
        for way in 0..WAYS {
            self.rank.admit_by(only(self.table, self.size, way), self.device)?;
        }
        if self.rank.leads() {
            let names = PROTOCOLS.map(|(name, ..)| format!("{name:>9}")).join(" ");
            say!("{:<14} {:>10} {names}  µs", "operation", "bytes");
        }
        let (mut points, mut beaten) = (Vec::new(), [false; WAYS]);
        for bytes in (3..).map(|log| 1 << log).take_while(|&bytes| bytes <= LARGEST) {
            // As the table counts.
            let own = if operation::in_blocks(kinds[0]) { bytes / u64::from(self.size) } else { bytes };
            let mut times = [f64::INFINITY; WAYS];
            for (way, time) in times.iter_mut().enumerate() {
                let (_, least, most) = PROTOCOLS[way];
                let fits = room.get(way).is_none_or(|&room| own <= room);
                if beaten[way] || !fits || !(least..=most).contains(&bytes) {
                    continue;
                }
                *time = 1.0;
                for &kind in kinds {
                    *time *= self.time(&self.case(kind, bytes), way)?;
                }
                *time = time.powf(1.0 / kinds.len() as f64);
            }
            for way in 0..WAYS {
                beaten[way] |= times[way + 1..].iter().any(|&later| later * BEATEN < times[way]);
            }
            if self.rank.leads() {
                let times = times.map(|time| match time.is_finite() {
                    true => format!("{time:>9.2}"),
                    false => format!("{:>9}", "-"),
                });
                say!("{name:<14} {bytes:>10} {}", times.join(" "));
            }
            points.push(Point { bytes: own, times });
        }
        self.rank.dismiss()?;
        let [narrow, wide, sharded] = crossing::bounds(&points);
        let [room_narrow, room_wide, room_sharded] = room;
        *place(Search::tuning_of(&mut self.table, self.size)) = Bounds {
            narrow: narrow.min(room_narrow),
            wide: wide.min(room_wide),
            sharded: sharded.min(room_sharded),
        };
        Ok(())
    }

    fn time(&mut self, case: &Case, subject: usize) -> Result<f64> {
        match self.rank.measure(case, subject, false)? {
            Outcome::Measured(sample) => Ok(sample.p50),
            Outcome::Refused(why) => {
                fail!(Unsupported, "{} cannot be measured: {why}", operation::name(case.kind))
            }
        }
    }

    fn case(&self, kind: Kind, asked: u64) -> Case {
        Case {
            kind,
            asked,
            dtype: DataType::F32,
            operator: kind.reduces().then_some(Operator::Sum),
            root: kind.rooted().then_some(0),
            algorithm: Choice::Automatic,
            transport: self.options.transports()[0],
            call: CallStyle::Graph,
            place: Place::Out,
            size: self.size,
        }
    }
}

/// The table with one protocol for every size that it can do.
fn only(mut table: Table, size: u32, way: usize) -> Table {
    let bound = |of: usize| if of == way { UNBOUNDED } else { 0 };
    let tuning = Search::tuning_of(&mut table, size);
    (tuning.broadcast_sends, tuning.dealt_to) = (UNBOUNDED, DealtBounds::NONE);
    for (_, place) in BOUNDS {
        *place(Search::tuning_of(&mut table, size)) =
            Bounds { narrow: bound(0), wide: bound(1), sharded: bound(2) };
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_search_is_bounded() {
        let measurements = |step: &Step| (1 + step.values.len()) * step.kinds.len() * step.sizes.len();
        let sizes = |&(_, least, most): &(&str, u64, u64)| (most / least).ilog2() as usize + 1;
        let of_protocols: usize = PROTOCOLS.iter().map(sizes).sum();
        let kinds: usize = BOUNDS.iter().map(|(kinds, _)| kinds.len()).sum();
        for size in 2..=8 {
            let varied = STEPS.iter().filter(|step| step.ranks.contains(&size)).map(measurements);
            let all = varied.sum::<usize>() + of_protocols * kinds;
            // As --help and docs/performance.md say.
            assert!(all <= 700, "{all} for {size} ranks");
        }
    }

    #[test]
    fn every_value_gives_a_table_that_can_be_written() {
        let sound = |table: Table| table.check().is_ok() && table.to_string().parse::<Table>() == Ok(table);
        for size in 2..=8 {
            for step in &STEPS {
                for &value in step.values {
                    let mut table = Table::default();
                    (step.set)(Search::tuning_of(&mut table, size), value);
                    assert!(table.check().is_err() || sound(table), "{} {value}", step.name);
                }
            }
            for way in 0..WAYS {
                assert!(sound(only(Table::default(), size, way)));
            }
        }
    }
}
