//! Where the table of choices comes from: a file that `unisono-bench --tune` has measured, or what suits the
//! device.
//!
//! The file is text. Its first line names the format; then come the table's own choices, and for each size of
//! group a line that names it and the choices below it. What it leaves out is as in the default table. `#`
//! begins a remark.
//!
//! ```text
//! unisono-tuning 1
//! blocks 128
//! ranks 3-4
//!   slot 16384
//!   allreduce narrow 4096 wide 131072 sharded 3145728
//! ```
#![forbid(unsafe_code)]

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use once_cell::sync::OnceCell;
use sha2::{Digest, Sha256};

use super::arena::MAX_RANKS;
use super::points::MOVE_WARPS;
use super::table::{Bounds, DealtBounds, Table, Tuning, UNBOUNDED, WindowBounds};
use crate::cuda::driver::Driver;
use crate::error::{Error, Result, Status, fail};

/// Names the file.
const SETTING: &str = "UNISONO_TUNING";
const TITLE: &str = "unisono-tuning 1";
/// The groups of [`Table::tunings`], and a size of each.
const GROUPS: [(&str, u32); 3] = [("2", 2), ("3-4", 4), ("5-8", 8)];

/// The multiprocessors and the compute capability of the device that the default table is measured on.
const MEASURED: (u32, (i32, i32)) = (132, (9, 0));
/// Bytes of an arena, at most.
const MOST_BYTES: usize = 256 << 20;

/// The table that a rank exchanges by. All ranks of a group have the same, or do not exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// The choices.
    pub table: Table,
    /// Whether somebody has chosen it, by a file or by a call. If not, it is this library's for the device.
    pub by_hand: bool,
}

impl Chosen {
    /// That of the file that `UNISONO_TUNING` names, read once in a process; else the one for this device.
    pub fn of_device(driver: &dyn Driver, device: u32) -> Result<Chosen> {
        static FILE: OnceCell<Option<Table>> = OnceCell::new();
        let read = || match std::env::var_os(SETTING) {
            None => Ok(None),
            Some(path) if path.is_empty() => Ok(None),
            Some(path) => read(Path::new(&path)).map(Some),
        };
        let multiprocessors = driver.multiprocessors(device)?;
        match FILE.get_or_try_init(read)? {
            Some(table) if table.blocks > multiprocessors => fail!(
                InvalidArgument,
                "{SETTING}: {} blocks are more than the {multiprocessors} multiprocessors of GPU {device}, and wait for \
                 each other: measure on this machine, by unisono-bench --tune",
                table.blocks
            ),
            Some(table) => Ok(Chosen { table: *table, by_hand: true }),
            None => {
                let table = Table::of_device(multiprocessors, driver.capability(device)?);
                Ok(Chosen { table, by_hand: false })
            }
        }
    }
}

fn read(path: &Path) -> Result<Table> {
    let text = std::fs::read_to_string(path).map_err(|cause| {
        Error::new(Status::InvalidArgument, format!("{SETTING}={} cannot be read: {cause}", path.display()))
    })?;
    text.parse().map_err(|error: Error| error.context(format_args!("{SETTING}={}", path.display())))
}

impl Table {
    /// The table for a device. Elsewhere than where it was measured, calls leave half of the multiprocessors
    /// to others.
    fn of_device(multiprocessors: u32, capability: (i32, i32)) -> Table {
        let measured = Table::default();
        if (multiprocessors, capability) == MEASURED {
            return measured;
        }
        let blocks = measured.blocks.min(multiprocessors / 2).max(1);
        Table { blocks, ..measured }
    }

    /// Tells tables apart.
    pub fn digest(&self) -> u64 {
        let hash = Sha256::digest(self.to_string());
        // PROOF: a SHA-256 has 32 bytes.
        u64::from_le_bytes(hash[..8].try_into().expect("eight bytes of a hash"))
    }

    /// Refuses choices that make no sense, or arenas of more than 256 MiB.
    pub fn check(&self) -> Result<()> {
        self.sound().map_err(|why| Error::new(Status::InvalidArgument, why))
    }

    fn sound(&self) -> Result<(), String> {
        let numbers = numbers_of_table(&mut self.clone()).map(|number| number.check());
        numbers.into_iter().collect::<Result<(), String>>()?;
        for ((name, size), mut tuning) in GROUPS.into_iter().zip(self.tunings) {
            let numbers = numbers_of(&mut tuning).map(|number| number.check());
            numbers
                .into_iter()
                .collect::<Result<(), String>>()
                .map_err(|why| format!("ranks {name}: {why}"))?;
            let bytes = self.arena_bytes(size);
            if bytes > MOST_BYTES {
                let (mebibytes, most) = (bytes >> 20, MOST_BYTES >> 20);
                return Err(format!(
                    "ranks {name}: {mebibytes} MiB of device memory, at most {most} are allowed"
                ));
            }
        }
        Ok(())
    }
}

/// A choice that is one number: where it is, and which numbers make sense.
struct Number<'a> {
    name: &'static str,
    place: Place<'a>,
    least: u64,
    most: u64,
    rule: Rule,
}

enum Place<'a> {
    Short(&'a mut u32),
    Long(&'a mut u64),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Rule {
    Any,
    Pages,
    PowerOfTwo,
}

impl Number<'_> {
    fn value(&self) -> u64 {
        match &self.place {
            Place::Short(value) => u64::from(**value),
            Place::Long(value) => **value,
        }
    }

    fn set(&mut self, text: &str) -> Result<(), String> {
        let name = self.name;
        let number: u64 = text.parse().map_err(|_| format!("{name} {text}: a number is wanted"))?;
        match &mut self.place {
            Place::Short(value) => {
                **value = number.try_into().map_err(|_| format!("{name} {number} is too large"))?;
            }
            Place::Long(value) => **value = number,
        }
        self.check()
    }

    fn check(&self) -> Result<(), String> {
        let (name, value, Number { least, most, .. }) = (self.name, self.value(), self);
        if !(*least..=*most).contains(&value) {
            return Err(format!("{name} {value}: from {least} to {most}"));
        }
        match self.rule {
            Rule::Pages if !value.is_multiple_of(4096) => Err(format!("{name} {value}: a multiple of 4096")),
            Rule::PowerOfTwo if !value.is_power_of_two() => Err(format!("{name} {value}: a power of two")),
            _ => Ok(()),
        }
    }
}

fn numbers_of_table(table: &mut Table) -> [Number<'_>; 2] {
    let Table { blocks, depth, tunings: _ } = table;
    let short = |name, place, rule| Number { name, place: Place::Short(place), least: 1, most: 1024, rule };
    [short("blocks", blocks, Rule::Any), short("depth", depth, Rule::PowerOfTwo)]
}

fn numbers_of(tuning: &mut Tuning) -> [Number<'_>; 13] {
    // No `..`: what is added there has to come here.
    let Tuning {
        slot,
        wide,
        tile_blocks,
        line_blocks,
        line_share,
        parts,
        move_warps,
        line_part,
        tile_part,
        move_slot,
        broadcast_sends,
        gather_moves,
        reduce_spares,
        allreduce: _,
        reduce: _,
        reduce_scatter: _,
        broadcast: _,
        swaps: _,
        moves: _,
        dealt_from: _,
        dealt_to: _,
        windows_from: _,
        windows_to: _,
    } = tuning;
    let pages = |name, place| Number {
        name,
        place: Place::Short(place),
        least: 4096,
        most: 1 << 20,
        rule: Rule::Pages,
    };
    let blocks =
        |name, place| Number { name, place: Place::Short(place), least: 1, most: 1024, rule: Rule::Any };
    // Pieces begin at multiples of what accesses are wide.
    let bytes =
        |name, place| Number { name, place: Place::Long(place), least: 128, most: 1 << 30, rule: Rule::Any };
    [
        pages("slot", slot),
        pages("wide", wide),
        blocks("tile_blocks", tile_blocks),
        blocks("line_blocks", line_blocks),
        bytes("line_share", line_share),
        blocks("parts", parts),
        Number {
            name: "move_warps",
            place: Place::Short(move_warps),
            least: 1,
            most: MOVE_WARPS.into(),
            rule: Rule::Any,
        },
        bytes("line_part", line_part),
        bytes("tile_part", tile_part),
        pages("move_slot", move_slot),
        bound("broadcast_sends", broadcast_sends),
        bound("gather_moves", gather_moves),
        bound("reduce_spares", reduce_spares),
    ]
}

/// The choices that have several numbers on a line.
fn bounds_of(tuning: &mut Tuning) -> [(&'static str, Vec<Number<'_>>); 10] {
    let Tuning {
        allreduce,
        reduce,
        reduce_scatter,
        broadcast,
        swaps,
        moves,
        dealt_from,
        dealt_to,
        windows_from,
        windows_to,
        ..
    } = tuning;
    [
        ("allreduce", numbers_of_bounds(allreduce)),
        ("reduce", numbers_of_bounds(reduce)),
        ("reduce_scatter", numbers_of_bounds(reduce_scatter)),
        ("broadcast", numbers_of_bounds(broadcast)),
        ("swaps", numbers_of_bounds(swaps)),
        ("moves", numbers_of_bounds(moves)),
        ("dealt_from", numbers_of_dealt(dealt_from)),
        ("dealt_to", numbers_of_dealt(dealt_to)),
        ("windows_from", numbers_of_windows(windows_from)),
        ("windows_to", numbers_of_windows(windows_to)),
    ]
}

fn numbers_of_bounds(bounds: &mut Bounds) -> Vec<Number<'_>> {
    let Bounds { narrow, wide, sharded } = bounds;
    vec![bound("narrow", narrow), bound("wide", wide), bound("sharded", sharded)]
}

fn numbers_of_dealt(bounds: &mut DealtBounds) -> Vec<Number<'_>> {
    let DealtBounds { allreduce, reduce } = bounds;
    vec![bound("allreduce", allreduce), bound("reduce", reduce)]
}

fn numbers_of_windows(bounds: &mut WindowBounds) -> Vec<Number<'_>> {
    let WindowBounds { moves, broadcast, allreduce, reduce_scatter } = bounds;
    vec![
        bound("moves", moves),
        bound("broadcast", broadcast),
        bound("allreduce", allreduce),
        bound("reduce_scatter", reduce_scatter),
    ]
}

fn bound<'a>(name: &'static str, place: &'a mut u64) -> Number<'a> {
    Number { name, place: Place::Long(place), least: 0, most: UNBOUNDED, rule: Rule::Any }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = *self;
        writeln!(f, "{TITLE}")?;
        for number in numbers_of_table(&mut table) {
            writeln!(f, "{} {}", number.name, number.value())?;
        }
        for ((name, _), tuning) in GROUPS.iter().zip(&mut table.tunings) {
            writeln!(f, "ranks {name}")?;
            for number in numbers_of(tuning) {
                writeln!(f, "  {} {}", number.name, number.value())?;
            }
            for (name, numbers) in bounds_of(tuning) {
                write!(f, "  {name}")?;
                for number in numbers {
                    write!(f, " {} {}", number.name, number.value())?;
                }
                writeln!(f)?;
            }
        }
        Ok(())
    }
}

impl FromStr for Table {
    type Err = Error;

    /// Parses a file. Everything in it must make sense; an error names the line.
    fn from_str(text: &str) -> Result<Table> {
        let mut table = Table::default();
        let mut group = None;
        let mut seen: Vec<String> = Vec::new();
        let mut lines = (1..).zip(text.lines().map(|line| line.split('#').next().unwrap_or("")));
        let title = lines.find(|(_, line)| !line.trim().is_empty());
        if title.is_none_or(|(_, line)| line.split_whitespace().ne(TITLE.split(' '))) {
            fail!(InvalidArgument, "it does not begin with '{TITLE}': write it by unisono-bench --tune");
        }
        for (number, line) in lines {
            let words: Vec<&str> = line.split_whitespace().collect();
            let Some((&name, values)) = words.split_first() else { continue };
            let wrong = |why: String| Error::new(Status::InvalidArgument, format!("line {number}: {why}"));
            let what = match name {
                "ranks" => line.trim().to_owned(),
                _ => format!("{group:?} {name}"),
            };
            if seen.contains(&what) {
                return Err(wrong(format!("{name} comes twice")));
            }
            seen.push(what);
            if name == "ranks" {
                let found = GROUPS.iter().position(|(ranks, _)| values == [*ranks]);
                let known = GROUPS.map(|(ranks, _)| ranks).join(", ");
                group = Some(found.ok_or_else(|| wrong(format!("ranks are one of {known}")))?);
            } else {
                let set = match group {
                    None => set(&mut numbers_of_table(&mut table), &words),
                    Some(group) => set_of_tuning(&mut table.tunings[group], name, values, &words),
                };
                set.map_err(wrong)?;
            }
        }
        // What was written before there was a choice.
        for (number, tuning) in table.tunings.iter_mut().enumerate() {
            let has = |name: &str| seen.contains(&format!("{:?} {name}", Some(number)));
            if has("parts") && !has("move_warps") {
                tuning.move_warps = MOVE_WARPS;
            }
        }
        table.check()?;
        Ok(table)
    }
}

fn set_of_tuning(tuning: &mut Tuning, name: &str, values: &[&str], words: &[&str]) -> Result<(), String> {
    let found = bounds_of(tuning).into_iter().find(|(known, _)| *known == name);
    if let Some((_, mut numbers)) = found {
        let given: Vec<&str> = values.iter().copied().step_by(2).collect();
        let is_repeated = |at: usize| given[..at].contains(&given[at]);
        if values.is_empty() || given.len() * 2 != values.len() || (0..given.len()).any(is_repeated) {
            let known: Vec<&str> = numbers.iter().map(|number| number.name).collect();
            return Err(format!("{name} has some of {}, each once with its number", known.join(", ")));
        }
        return values.chunks(2).try_for_each(|pair| set(&mut numbers, pair));
    }
    set(&mut numbers_of(tuning), words)
}

/// Sets the number that the first word names to the second.
fn set(numbers: &mut [Number<'_>], words: &[&str]) -> Result<(), String> {
    let &[name, value] = words else {
        return Err(format!("{}: a name and a number are wanted", words.join(" ")));
    };
    match numbers.iter_mut().find(|number| number.name == name) {
        Some(number) => number.set(value),
        None => Err(format!("nothing is called {name} here")),
    }
}

const _: () = assert!(GROUPS[2].1 as usize == MAX_RANKS);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn wrong(text: &str) -> String {
        text.parse::<Table>().expect_err(text).text().to_owned()
    }

    #[test]
    fn what_is_written_is_read() {
        let mut table = Table::default();
        assert_eq!(table.to_string().parse::<Table>().unwrap(), table);
        table.blocks = 48;
        table.tunings[1].slot = 8192;
        table.tunings[2].allreduce.sharded = 1;
        assert_eq!(table.to_string().parse::<Table>().unwrap(), table);
        assert_ne!(table.digest(), Table::default().digest());
    }

    #[test]
    fn what_is_left_out_is_as_usual() {
        let text = "# by hand\nunisono-tuning 1\n\nranks 3-4 # four\n  broadcast wide 65536\n parts 8\n";
        let table: Table = text.parse().unwrap();
        let mut expected = Table::default();
        expected.tunings[1].broadcast.wide = 65536;
        // Files from before there was a choice have parts alone.
        (expected.tunings[1].parts, expected.tunings[1].move_warps) = (8, 4);
        assert_eq!(table, expected);
        let table: Table = text.replace("parts 8", "parts 8\n move_warps 2").parse().unwrap();
        expected.tunings[1].move_warps = 2;
        assert_eq!(table, expected);
        assert_eq!(TITLE.parse::<Table>().unwrap(), Table::default());
    }

    #[test]
    fn mistakes_are_named_with_their_line() {
        assert!(wrong("").contains("does not begin with 'unisono-tuning 1'"));
        assert!(wrong("unisono-tuning 2\n").contains("does not begin"));
        for (line, why) in [
            ("blocks", "a name and a number"),
            ("blocks 0", "from 1 to 1024"),
            ("blocks 4096", "from 1 to 1024"),
            ("blocks many", "a number is wanted"),
            ("blocks -1", "a number is wanted"),
            ("blocks 64 64", "a name and a number"),
            ("depth 3", "a power of two"),
            ("slot 4096", "nothing is called slot here"),
            ("ranks 9", "ranks are one of 2, 3-4, 5-8"),
            ("ranks", "ranks are one of"),
        ] {
            let text = wrong(&format!("unisono-tuning 1\n{line}\n"));
            assert!(text.starts_with("line 2: ") && text.contains(why), "{line}: {text}");
        }
        for (line, why) in [
            ("slot 4095", "from 4096"),
            ("wide 5000", "a multiple of 4096"),
            ("line_share 0", "from 128"),
            ("blocks 8", "nothing is called blocks here"),
            ("allreduce", "each once"),
            ("allreduce narrow", "each once"),
            ("allreduce narrow 1 narrow 2", "each once"),
            ("allreduce huge 1", "nothing is called huge here"),
            ("ranks 2", "ranks comes twice"),
            ("parts 4\n parts 4", "parts comes twice"),
        ] {
            let text = wrong(&format!("unisono-tuning 1\nranks 2\n{line}\n"));
            assert!(text.starts_with("line ") && text.contains(why), "{line}: {text}");
        }
        let large = wrong("unisono-tuning 1\nblocks 1024\nranks 2\nslot 1048576\n");
        assert!(large.starts_with("ranks 2: ") && large.contains("MiB of device memory"), "{large}");
    }

    #[test]
    fn a_file_that_is_wrong_is_named() {
        let path = std::env::temp_dir().join(format!("unisono-tuning-{}", std::process::id()));
        let name = path.display().to_string();
        let missing = read(&path).expect_err("nobody has written it");
        assert!(missing.text().starts_with(&format!("UNISONO_TUNING={name} cannot be read: ")), "{missing}");
        std::fs::write(&path, "unisono-tuning 1\ndepth 5\n").expect("a file can be written");
        let wrong = read(&path).expect_err("no power of two");
        assert!(wrong.text().starts_with(&format!("UNISONO_TUNING={name}: line 2: depth 5")), "{wrong}");
        std::fs::write(&path, Table::default().to_string()).expect("a file can be written");
        assert_eq!(read(&path), Ok(Table::default()));
        std::fs::remove_file(&path).expect("it is there");
    }

    #[test]
    fn other_devices_keep_half_of_their_multiprocessors() {
        assert_eq!(Table::of_device(132, (9, 0)), Table::default());
        assert_eq!(Table::of_device(16, (9, 0)).blocks, 8);
        assert_eq!(Table::of_device(1, (8, 0)).blocks, 1);
        for multiprocessors in [1, 46, 108, 148] {
            let table = Table::of_device(multiprocessors, (8, 0));
            assert!(table.blocks <= multiprocessors && table.check().is_ok());
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_table_or_an_error(text in "(unisono-tuning 1\n)?([a-z_ ]{0,12}( [0-9-]{1,20})?\n){0,6}") {
            if let Ok(table) = text.parse::<Table>() {
                prop_assert!(table.check().is_ok());
            }
        }
    }
}
