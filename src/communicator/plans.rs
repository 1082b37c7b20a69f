//! Plans are made once for each kind of call and kept.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::Call;
use crate::collective::checked::Checked;
use crate::collective::select;
use crate::engine::endpoint::lock;
use crate::engine::executor::Plan;
use crate::error::Result;
use crate::reduce::Operator;
use crate::schedule::{Algorithm, Shape, plan};
use crate::signature::{COUNT_IS_DIGEST, Kind, Signature};

/// How many plans a context keeps. Programs repeat few kinds of call; one that does not pays for planning.
const KEPT: usize = 256;

/// The plans of one context.
#[derive(Default)]
pub struct Plans(Mutex<HashMap<PlanKey, Arc<Plan>>>);

/// What a plan depends on: the call, whether it is in place, and the algorithm.
type PlanKey = (Signature, Option<i64>, Algorithm);

impl Plans {
    /// The plan for a call; notes in its signature the algorithm that the caller named.
    pub fn plan(&self, checked: &mut Checked, call: &Call, rank: u32, size: u32) -> Result<Arc<Plan>> {
        let element = checked.dtype.size() as u64;
        let algorithm = choose(checked, call, size)?;
        checked.signature.algorithm = call.algorithm.unwrap_or(0) as u8;
        let key = (checked.signature, checked.alias, algorithm);
        let lists = checked.signature.count & COUNT_IS_DIGEST != 0;
        let rooted_lists = matches!(checked.signature.kind, Kind::Gather | Kind::Scatter | Kind::Alltoall)
            && checked.signature.count == 0;
        // The caller's function is not part of the signature, nor are lists of counts.
        let kept = !lists && !rooted_lists && !matches!(checked.operator, Some(Operator::Custom(_)));
        if kept && let Some(plan) = lock(&self.0).get(&key) {
            return Ok(plan.clone());
        }
        let shape =
            Shape { rank, size, alias: checked.alias, chunk: select::chunk(element), ranks_per_node: size };
        let schedule = plan(algorithm, &checked.collective, &shape)?;
        let plan = Arc::new(Plan::new(schedule, checked.dtype, checked.operator, size)?);
        if kept {
            let mut plans = lock(&self.0);
            if plans.len() >= KEPT {
                plans.clear();
            }
            plans.insert(key, plan.clone());
        }
        Ok(plan)
    }
}

/// The algorithm that a call gets.
pub fn choose(checked: &Checked, call: &Call, size: u32) -> Result<Algorithm> {
    match call.algorithm {
        None | Some(0) => Ok(select::automatic(&checked.collective, checked.dtype.size() as u64, size)),
        Some(number) => Algorithm::from_number(number),
    }
}
