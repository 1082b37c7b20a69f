//! Plans are made once for each kind of call and kept.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::Call;
use crate::collective::checked::{Checked, digest};
use crate::collective::select;
use crate::engine::endpoint::lock;
use crate::engine::executor::Plan;
use crate::error::Result;
use crate::reduce::{DataType, Operator};
use crate::schedule::{Algorithm, Collective, Shape, plan};
use crate::signature::{COUNT_IS_DIGEST, Signature, about_list};

/// How many plans a context keeps. Programs repeat few kinds of call; one that does not pays for planning.
const KEPT: usize = 256;

/// The plans of one context.
#[derive(Default)]
pub struct Plans(Mutex<HashMap<PlanKey, Planned>>);

/// What a plan depends on: the call, with the algorithm if it names one, and whether it is in place; and what
/// it combines and how, which is not what the call says where inputs have been combined before.
type PlanKey = (Signature, Option<i64>, DataType, Option<u8>);

/// Bytes of a message of a long block that only its two ranks know the length of: few enough for pinned
/// memory of them to be had for every rank, more than come unasked
/// ([`EAGER_TCP_BYTES`](crate::engine::messages::EAGER_TCP_BYTES)).
pub const PORTION_BYTES: usize = 1024 * 1024;

/// A plan and the algorithm that it is of.
pub type Planned = (Arc<Plan>, Algorithm);

/// Where a rank sits among those that run a plan: the ranks of its group, or some of them.
#[derive(Clone, Copy, Debug)]
pub struct Seat {
    /// Its number among them.
    pub rank: u32,
    /// How many ranks.
    pub size: u32,
    /// How many of them share a host, if they are numbered host by host; else all.
    pub ranks_per_node: u32,
    /// The group's rank that is number 0, and how far on each next one is.
    pub numbering: (u32, u32),
    /// Bytes of the messages that a long block is sent in, where lists may differ from rank to rank.
    pub portion: usize,
    /// Whether each rank has several threads for long messages. The same on all ranks.
    pub hauled: bool,
}

impl Seat {
    /// A seat among all ranks of a group.
    pub fn new(rank: u32, size: u32, ranks_per_node: u32) -> Seat {
        Seat { rank, size, ranks_per_node, numbering: (0, 1), portion: PORTION_BYTES, hauled: false }
    }
}

impl Plans {
    /// The plan for a call; notes in its signature the algorithm that the caller named.
    pub fn plan(&self, checked: &mut Checked, call: &Call, seat: Seat) -> Result<Planned> {
        // Before the look for a kept plan: the signature has the last byte of the number only.
        checked.signature.algorithm = named(call)?.map_or(0, |algorithm| algorithm as u8);
        let operator = checked.operator.map(|operator| operator.number());
        let key = (checked.signature, checked.alias, checked.dtype, operator);
        // The caller's function is not part of the signature, nor are lists of counts.
        let kept = checked.signature.count & COUNT_IS_DIGEST == 0
            && !checked.listed
            && !matches!(checked.operator, Some(Operator::Custom(_)));
        if kept && let Some(planned) = lock(&self.0).get(&key) {
            return Ok(planned.clone());
        }
        let planned = planned(checked, call, seat)?;
        if kept {
            let mut plans = lock(&self.0);
            if plans.len() >= KEPT {
                plans.clear();
            }
            plans.insert(key, planned.clone());
        }
        Ok(planned)
    }
}

/// The algorithm that a call names, if it names one.
fn named(call: &Call) -> Result<Option<Algorithm>> {
    match call.algorithm.unwrap_or(0) {
        0 => Ok(None),
        number => Algorithm::from_number(number).map(Some),
    }
}

/// The plan for a call, made now.
pub fn planned(checked: &Checked, call: &Call, seat: Seat) -> Result<Planned> {
    let holds = select::caution(checked).holds_output;
    let (mut plan, algorithm) = plan_with(checked, call, seat, holds)?;
    if holds {
        plan = plan.hold_output(checked.output_len() as u64);
    }
    Ok((Arc::new(plan), algorithm))
}

/// The plan for a call whose output is apart from its input until what is written there has been sent,
/// whatever memory of the caller's they are.
pub fn planned_apart(checked: &Checked, call: &Call, seat: Seat) -> Result<Planned> {
    plan_with(checked, call, seat, true).map(|(plan, algorithm)| (Arc::new(plan), algorithm))
}

/// `apart`: the output is written elsewhere at first.
fn plan_with(checked: &Checked, call: &Call, seat: Seat, apart: bool) -> Result<(Plan, Algorithm)> {
    let Seat { rank, size, ranks_per_node, numbering: (first, step), portion, hauled } = seat;
    let element = checked.dtype.size() as u64;
    let mut shape = Shape {
        rank,
        size,
        alias: checked.alias,
        chunk: select::chunk(checked, hauled),
        ranks_per_node,
        agreement: select::caution(checked).agreement,
        portion: if checked.listed { portion as u64 / element } else { 0 },
    };
    checked.collective.check(&shape)?;
    if apart {
        shape.alias = None;
    }
    let algorithm = named(call)?.unwrap_or_else(|| select::automatic(checked, &shape));
    let schedule = plan(algorithm, &checked.collective, &shape)?;
    let direct = matches!(algorithm, Algorithm::Linear | Algorithm::Pairwise);
    let blocks = match &checked.collective {
        _ if !checked.listed => Vec::new(),
        collective if direct => schedule.blocks(collective, rank),
        // Other algorithms pass several blocks on together: all ranks have one list, and each message says
        // which.
        Collective::Gather { counts, .. } | Collective::Scatter { counts, .. } => {
            vec![about_list(digest(counts)); schedule.steps.len()]
        }
        _ => Vec::new(),
    };
    let schedule = schedule.renumbered(|rank| first + rank * step);
    let plan = Plan::new(schedule, checked.dtype, checked.operator, size)?.compare_blocks(blocks);
    Ok((plan, algorithm))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::request::{Counts, Kind, Request};

    #[test]
    fn an_unknown_algorithm_is_refused_whatever_was_planned_before() {
        static MEMORY: [u8; 64] = [0; 64];
        let input = MEMORY.as_ptr();
        let request = Request {
            kind: Kind::Allreduce,
            input,
            output: input.wrapping_add(32).cast_mut(),
            counts: Counts::Uniform(4),
            dtype: DataType::F32,
            operator: Operator::Sum,
            root: 0,
        };
        let plans = Plans::default();
        let plan = |number| {
            let mut checked = Checked::new(&request, 0, 2)?;
            let call = Call { algorithm: Some(number), ..Call::default() };
            plans.plan(&mut checked, &call, Seat::new(0, 2, 2))
        };
        let ring = Algorithm::Ring as i32;
        for known in [0, ring] {
            plan(known).expect("it is known");
        }
        for unknown in [256, ring + 256, ring - 256] {
            let error = plan(unknown).err().expect("it is unknown");
            assert!(error.text().contains(&format!("algorithm {unknown} is unknown")), "{error}");
        }
    }
}
