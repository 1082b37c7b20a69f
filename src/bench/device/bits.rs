//! `--bits`: whether the same elements give the same bits at every count, and on every rank.

use super::device_of;
use super::rank::Rank;
use crate::bench::case::Case;
use crate::bench::operation;
use crate::bench::options::{Options, Place};
use crate::bench::output::say;
use crate::bench::seat::{Seat, combine};
use crate::cuda::context::Devices;
use crate::error::{Result, fail};
use crate::reduce::{DataType, Operator};
use crate::signature::Kind;

/// Counts that other libraries have been seen to treat differently.
const COUNTS: [u64; 6] = [100, 4096, 20_000, 131_072, 1_048_576, 4_194_304];

/// Compares. Answers whether the first subject gives the same bits everywhere.
pub(in crate::bench) fn bits(options: &Options, seat: &Seat) -> Result<bool> {
    let devices = Devices::open()?;
    let device = device_of(&devices, seat)?;
    let _entered = devices.enter(device)?;
    let kinds: Vec<Kind> = options.operations();
    if let Some(other) = kinds.iter().find(|kind| !matches!(kind, Kind::Allreduce | Kind::Reduce)) {
        fail!(InvalidUsage, "--bits compares allreduce and reduce, not {}", operation::name(*other));
    }
    let mut counts: Vec<u64> = match options.listed_sizes() {
        Some(sizes) => sizes.iter().map(|bytes| bytes / 4).collect(),
        None => COUNTS.into(),
    };
    counts.sort_unstable();
    counts.dedup();
    let largest = counts.last().copied().unwrap_or(0);
    let mut rank = Rank::join(options, seat, &devices, device, (largest * 4) as usize)?;
    let libraries = options.libraries();
    for library in &libraries {
        rank.admit(library)?;
    }
    if rank.leads() {
        say!("# bits: float32, {} ranks; elements that differ from those at the largest count", seat.size);
        say!("{:<14} {:>10} {:>11} {:<12} differing", "operation", "count", "size", "library");
    }
    let mut same = true;
    for kind in kinds {
        for (subject, library) in libraries.iter().enumerate() {
            let case = |count: u64| sum(options, kind, seat.size, count);
            let expected = result(&mut rank, &case(largest), subject)?;
            for &count in &counts {
                let found = result(&mut rank, &case(count), subject)?;
                let differing =
                    found.iter().zip(&expected).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
                let unlike = unlike_ranks(&rank, kind, &found)?;
                let mut all = [differing as u64];
                combine(rank.control(), Operator::Max, &mut all)?;
                same &= subject > 0 || (all[0] == 0 && !unlike);
                if rank.leads() {
                    let ranks = if unlike { ", and ranks differ" } else { "" };
                    say!(
                        "{:<14} {count:>10} {:>11} {:<12} {}{ranks}",
                        operation::name(kind),
                        count * 4,
                        library.name(),
                        all[0]
                    );
                }
            }
        }
    }
    rank.finish()?;
    Ok(same)
}

/// A sum of so many elements, called as the first of the options says.
fn sum(options: &Options, kind: Kind, size: u32, count: u64) -> Case {
    let root = kind.rooted().then_some(0);
    let (algorithm, transport, call) = (options.algorithms[0], options.transports()[0], options.calls()[0]);
    let place = Place::Out;
    Case {
        kind,
        asked: count * 4,
        dtype: DataType::F32,
        operator: Some(Operator::Sum),
        root,
        algorithm,
        transport,
        call,
        place,
        size,
    }
}

/// Runs once over the same numbers as always; the result is empty where none is due.
fn result(rank: &mut Rank<'_>, case: &Case, subject: usize) -> Result<Vec<f32>> {
    let own = rank.rank();
    let (_, (_, received)) = case.extents(own);
    let (input, output) = rank.places(subject);
    let (buffers, stream, deadline) = rank.buffers();
    let write = |offset: usize, piece: &mut [u8]| {
        for (index, element) in (offset as u64 / 4..).zip(piece.chunks_exact_mut(4)) {
            element.copy_from_slice(&number(own, index).to_le_bytes());
        }
    };
    // SAFETY: the subject's buffers hold the largest case; nothing is under way between runs.
    unsafe { buffers.fill(stream, input, case.bytes() as usize, write, deadline) }?;
    rank.spoil(case, output)?;
    rank.run_once(case, subject)?;
    let (buffers, stream, deadline) = rank.buffers();
    let mut numbers = Vec::with_capacity(received / 4);
    for offset in (0..received).step_by(super::memory::PIECE) {
        let bytes = super::memory::PIECE.min(received - offset);
        // SAFETY: as above.
        let piece = unsafe { buffers.read(stream, output + offset as u64, bytes, deadline) }?;
        let elements =
            piece.chunks_exact(4).map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
        numbers.extend(elements);
    }
    Ok(numbers)
}

/// Whether ranks that all have a result have different ones.
fn unlike_ranks(rank: &Rank<'_>, kind: Kind, result: &[f32]) -> Result<bool> {
    if kind == Kind::Reduce {
        return Ok(false);
    }
    let hash = result.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, number| {
        (hash ^ u64::from(number.to_bits())).wrapping_mul(0x0100_0000_01b3)
    });
    let (mut least, mut most) = ([hash], [hash]);
    combine(rank.control(), Operator::Min, &mut least)?;
    combine(rank.control(), Operator::Max, &mut most)?;
    Ok(least != most)
}

/// Element `index` of a rank's input: of either sign, over some twenty powers of two, so that the order of a
/// sum shows.
fn number(rank: u32, index: u64) -> f32 {
    let mut bits = (u64::from(rank) << 40 ^ index).wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^= bits >> 31;
    let mantissa = (bits >> 40) as f32 / 8_388_608.0 - 1.0;
    mantissa * 2f32.powi((bits % 20) as i32 - 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_a_sum_shows() {
        let differ = (0..1000).filter(|&index| {
            let x: Vec<f32> = (0..4).map(|rank| number(rank, index)).collect();
            ((x[0] + x[1]) + x[2]) + x[3] != (x[0] + x[1]) + (x[2] + x[3])
        });
        assert!(differ.count() > 100);
    }
}
