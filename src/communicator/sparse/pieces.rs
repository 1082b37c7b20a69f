//! A rank's elements on their way to their place among those that travel, duplicates combined.

use std::ops::Range;
use std::sync::Arc;

use super::memory::{Pool, Words};
use super::order::{Group, Groups};
use super::pace::Pace;
use super::tensor::Shape;
use crate::engine::joint::Team;
use crate::error::Result;
use crate::reduce::{Operand, Reducer, Representation};

/// Neighbouring elements on their way to their place.
pub(super) struct Piece<'a> {
    /// By dim.
    pub(super) coordinates: Vec<&'a mut [u64]>,
    pub(super) values: &'a mut [u8],
    /// Where they are.
    pub(super) groups: Groups<'a>,
}

impl Piece<'_> {
    pub(super) fn put(self, shape: &Shape, (indices, values): (&[i64], &[u8]), reducer: &Reducer) {
        let given = indices.len() / shape.dims;
        for (list, from) in self.coordinates.into_iter().zip(indices.chunks_exact(given)) {
            let (mut to, mut groups) = (list, self.groups.clone());
            while let Some(group) = groups.next(to.len()) {
                let run = match group {
                    Group::Run(first, count) => &from[first..][..count],
                    Group::Same(places) => &from[Group::place(places[0])..][..1],
                };
                let (here, rest) = to.split_at_mut(run.len());
                here.iter_mut().zip(run).for_each(|(to, from)| *to = from.cast_unsigned());
                to = rest;
            }
        }
        let element_bytes = shape.block * shape.dtype.size();
        let operand = |place: usize, count: usize| Operand {
            address: values[place * element_bytes..][..count * element_bytes].as_ptr(),
            representation: Representation::Element,
            scale: 1.0,
        };
        let (mut groups, mut operands, mut out) = (self.groups, Vec::new(), self.values);
        while let Some(group) = groups.next(out.len() / shape.accumulator_bytes()) {
            operands.clear();
            match group {
                Group::Run(first, count) => operands.push(operand(first, count)),
                Group::Same(places) => {
                    operands.extend(places.iter().map(|&place| operand(Group::place(place), 1)));
                }
            }
            let count = group.different();
            let (here, rest) = out.split_at_mut(count * shape.accumulator_bytes());
            // SAFETY: the slices that the addresses come from hold `count` blocks, `here` holds as many
            // accumulators and overlaps none of them, and all are borrowed until here.
            unsafe {
                reducer.fold(&operands, here.as_mut_ptr(), Representation::Accumulator, count * shape.block);
            }
            out = rest;
        }
    }
}

/// Elements of one index on their way to their place, too many for one look.
pub(super) struct Long<'a> {
    /// By dim, room for one.
    pub(super) coordinates: Vec<&'a mut [u64]>,
    pub(super) values: &'a mut [u8],
    /// Where they are, masked by [`Group::place`].
    pub(super) places: &'a [u64],
}

impl Long<'_> {
    /// Combines portions of them, then what these come to, likewise. All of that are nodes of the canonical
    /// tree, so the bits are those of one fold.
    pub(super) async fn put(
        self,
        shape: &Shape,
        (indices, values): (&[i64], &[u8]),
        reducer: &Reducer,
        pool: &Arc<Pool>,
        team: &(dyn Team + Sync),
        pace: &Pace,
    ) -> Result<()> {
        let Long { coordinates, values: out, places } = self;
        let given = indices.len() / shape.dims;
        for (to, from) in coordinates.into_iter().zip(indices.chunks_exact(given)) {
            to[0] = from[Group::place(places[0])].cast_unsigned();
        }
        let mut count = places.len();
        let mut blocks =
            Blocks { bytes: values, representation: Representation::Element, places: Some(places) };
        let mut sums: Words;
        while count > shape.portion() {
            let next = blocks.portions(count, shape, reducer, pool, team, pace).await?;
            count = count.div_ceil(shape.portion());
            sums = next;
            blocks =
                Blocks { bytes: sums.bytes(), representation: Representation::Accumulator, places: None };
        }
        blocks.fold(0..count, shape, reducer, out);
        pace.spend(count.saturating_mul(shape.element_bytes())).await;
        Ok(())
    }
}

/// Blocks of values, of which some are combined into one.
#[derive(Clone, Copy)]
struct Blocks<'a> {
    bytes: &'a [u8],
    representation: Representation,
    /// Which ones, masked by [`Group::place`]. `None`: one after the other, from the first on.
    places: Option<&'a [u64]>,
}

impl Blocks<'_> {
    /// Combines some of them into the accumulators of one.
    fn fold(&self, range: Range<usize>, shape: &Shape, reducer: &Reducer, out: &mut [u8]) {
        let position = match self.representation {
            Representation::Element => shape.dtype,
            Representation::Accumulator => shape.dtype.accumulator(),
        };
        let bytes = shape.block * position.size();
        let operand = |at: usize| {
            let block = self.places.map_or(at, |places| Group::place(places[at]));
            let address = self.bytes[block * bytes..][..bytes].as_ptr();
            Operand { address, representation: self.representation, scale: 1.0 }
        };
        let operands: Vec<Operand> = range.map(operand).collect();
        let out = &mut out[..shape.accumulator_bytes()];
        // SAFETY: the slices that the addresses come from hold a block each, `out` holds the accumulators of
        // one and overlaps none of them, and all are borrowed until here.
        unsafe { reducer.fold(&operands, out.as_mut_ptr(), Representation::Accumulator, shape.block) };
    }

    /// What the first `count` of them come to, a portion at a time: the accumulators of each, one after the
    /// other.
    async fn portions(
        &self,
        count: usize,
        shape: &Shape,
        reducer: &Reducer,
        pool: &Arc<Pool>,
        team: &(dyn Team + Sync),
        pace: &Pace,
    ) -> Result<Words> {
        let (bytes, portion) = (shape.accumulator_bytes(), shape.portion());
        let all = count.div_ceil(portion).saturating_mul(bytes);
        let mut sums = pool.take(all.div_ceil(8))?;
        let mut tasks = Vec::with_capacity(count.div_ceil(portion));
        for (first, out) in (0..count).step_by(portion).zip(sums.bytes_mut()[..all].chunks_exact_mut(bytes)) {
            let range = first..count.min(first + portion);
            let goes_through = range.len().saturating_mul(shape.element_bytes());
            tasks.push(((range, out), goes_through));
        }
        let fold = |(range, out): (Range<usize>, &mut [u8])| {
            self.fold(range, shape, reducer, out);
            Ok(())
        };
        pace.share(team, tasks, fold).await?;
        Ok(sums)
    }
}
