//! Calls of a group, kept for its end: what GPUs do alone is gathered, checked, for each communicator; all else waits as it was
//! called.

use std::sync::Arc;

use unisono::collective::request::{Counts, Kind};
use unisono::communicator::{Added, Context, Launches};
use unisono::cuda::driver::StreamHandle;
use unisono::reduce::DataType;

use super::{Launch, read_factor};
use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::place::Place;

/// Calls of a group.
pub(crate) struct Calls {
    gathered: Vec<Gathered>,
    pub(super) others: Vec<Launch>,
    count: usize,
}

/// Calls of one communicator that its GPUs do alone.
struct Gathered {
    communicator: Arc<Communicator>,
    launches: Launches,
    factors: Vec<Factor>,
}

/// The factor of a PreMulSum that the device has.
struct Factor {
    /// Which of the calls it is for.
    number: usize,
    address: u64,
    dtype: DataType,
    stream: StreamHandle,
}

impl Calls {
    pub(crate) const NONE: Calls = Calls { gathered: Vec::new(), others: Vec::new(), count: 0 };

    /// Keeps a call. What is wrong with it is told here, where the caller can see which call it was.
    pub(crate) fn add(&mut self, launch: Launch) -> Result<()> {
        let context = launch.working_group()?;
        if self.gather(&launch, context)? == Added::Not {
            launch.check_in(context)?;
            self.others.push(launch);
        }
        self.count += 1;
        Ok(())
    }

    /// How many have been kept.
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// Whom each call is of, its kind, and the bytes of what it counts.
    pub(crate) fn sizes(&self) -> impl Iterator<Item = (&Communicator, Kind, u64)> {
        let gathered = self.gathered.iter().flat_map(|Gathered { communicator, launches, .. }| {
            launches.sizes().map(|(kind, bytes)| (&**communicator, kind, bytes))
        });
        let others = self.others.iter().map(|Launch { communicator, request, .. }| {
            let count = if let Counts::Uniform(count) = request.counts { count } else { 0 };
            (&**communicator, request.kind, count.saturating_mul(request.dtype.size() as u64))
        });
        gathered.chain(others)
    }

    fn gather(&mut self, launch: &Launch, context: &Context) -> Result<Added> {
        if matches!(launch.communicator.place, Place::Host(_)) || launch.is_to_itself(context) {
            return Ok(Added::Not);
        }
        let is_its = |gathered: &Gathered| Arc::ptr_eq(&gathered.communicator, &launch.communicator);
        let at = match self.gathered.iter().rposition(is_its) {
            Some(known) => known,
            None => {
                let Some(launches) = context.launches() else { return Ok(Added::Not) };
                let communicator = launch.communicator.clone();
                self.gathered.push(Gathered { communicator, launches, factors: Vec::new() });
                self.gathered.len() - 1
            }
        };
        let Gathered { launches, factors, .. } = &mut self.gathered[at];
        if launch.request.kind.point_to_point() {
            launch.check_in(context)?;
        }
        let added = launches.add(context, &launch.request, &launch.call())?;
        if let (Added::As(number), Some(address)) = (added, launch.factor) {
            let (dtype, stream) = (launch.request.dtype, StreamHandle(launch.stream));
            factors.push(Factor { number, address, dtype, stream });
        }
        Ok(added)
    }

    /// Reads the factors that devices have.
    pub(super) fn resolve(&mut self) -> Result<()> {
        for Gathered { communicator, launches, factors } in &mut self.gathered {
            for Factor { number, address, dtype, stream } in factors.drain(..) {
                let factor = read_factor(address, dtype, communicator.place, stream)?;
                launches.set_factor(number, factor)?;
            }
        }
        self.others.iter_mut().try_for_each(Launch::resolve)
    }

    /// Gives what was gathered to its streams, of all communicators the collectives first; `note` is told what fails.
    pub(super) fn give_gathered(&mut self, mut note: impl FnMut(Error)) {
        let mut gathered = std::mem::take(&mut self.gathered);
        gathered.retain(|Gathered { launches, .. }| !launches.is_empty());
        for Gathered { communicator, launches, .. } in &mut gathered {
            let context = communicator.open_group();
            // SAFETY: the client's promise: the buffers are valid until the calls are complete, and the streams live.
            let given = context.and_then(|context| unsafe { launches.give_collectives(context) });
            given.unwrap_or_else(&mut note);
        }
        for Gathered { communicator, launches, .. } in &mut gathered {
            let context = communicator.open_group();
            // SAFETY: as above.
            let given = context.and_then(|context| unsafe { launches.give_messages(context) });
            given.unwrap_or_else(&mut note);
        }
    }

    /// The call, if there is but one, and that is not gathered.
    pub(super) fn only_other(&mut self) -> Option<Launch> {
        let is_alone = self.count == 1 && self.others.len() == 1;
        if is_alone { self.others.pop() } else { None }
    }
}
