//! Several device pointers of one rank: what is done among them before and after the call between the ranks,
//! all in the order of streams.
//!
//! A reduction combines this rank's pointers into accumulators, reduces those across the ranks, and rounds
//! once into the main pointer, from where the result goes to the others: the same bits as on host memory. A
//! broadcast's root sends and copies to its other pointers at once. In a group of one, what is left is local,
//! and can be captured.
//!
//! The ranks call with the GPU of the first pointer, whichever the others are on. So a root that broadcasts a
//! pointer of another GPU copies first, and then sends from its first pointer.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::collective::checked;
use crate::collective::request::{Counts, Kind, Request};
use crate::cuda::context::Devices;
use crate::cuda::driver::StreamHandle;
use crate::cuda::event::Event;
use crate::cuda::local::{
    BroadcastAlgorithm, Kernels, LocalBroadcast, LocalReduce, Pointers, ReduceAlgorithm, Rounding, Span,
};
use crate::cuda::stream::Stream;
use crate::deadline::Deadline;
use crate::engine::callbacks::hold_back;
use crate::engine::endpoint::lock;
use crate::error::{Error, Result};
use crate::reduce::{DataType, Operator};

/// How long dropping waits for what streams of ours were given.
const PATIENCE: Duration = Duration::from_secs(10);

/// What several device pointers are prepared from. The pointers are of the same size; a stream for each, or
/// none.
pub(super) struct Parts<'a> {
    pub(super) kind: Kind,
    pub(super) pointers: &'a [*mut u8],
    pub(super) streams: &'a [StreamHandle],
    pub(super) count: u64,
    pub(super) dtype: DataType,
    pub(super) operator: Operator,
    pub(super) root: u32,
    /// Which pointer the root of a broadcast sends.
    pub(super) root_pointer: usize,
    pub(super) rank: u32,
    pub(super) size: u32,
}

/// The local part of an algorithm object over device memory.
pub(super) struct Several {
    local: Mutex<Local>,
    /// The call between the ranks, on the main pointer or on what it was combined into.
    request: Request,
    place: Place,
    main: StreamHandle,
    /// Complete when everything of the last run is.
    done: Mutex<Arc<Event>>,
    joins: Stream,
    /// With streams of ours, where the caller gave none; what is local borrows them, and goes first.
    own: Option<Pointers>,
}

/// One run at a time.
struct Local {
    /// Goes first: it reads what the reduction owns.
    broadcast: Option<LocalBroadcast>,
    reduce: Option<LocalReduce>,
}

impl Local {
    /// Whether the streams are being captured.
    fn is_captured(&self) -> Result<bool> {
        match self {
            Local { broadcast: Some(broadcast), .. } => broadcast.is_captured(),
            Local { reduce: Some(reduce), .. } => reduce.is_captured(),
            Local { broadcast: None, reduce: None } => Ok(false),
        }
    }
}

/// Where the call between the ranks belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// There is none: a group of one.
    Nowhere,
    /// It runs while the local broadcast does.
    Beside,
    /// After the local broadcast.
    Behind,
    /// After the local reduction, before the local broadcast.
    Between,
}

impl Several {
    /// Prepares everything: nothing is allocated or created by runs.
    ///
    /// # Safety
    /// Pointers and streams stay valid until this is dropped and its runs are done.
    pub(super) unsafe fn new(
        devices: &Arc<Devices>,
        kernels: &Arc<dyn Kernels>,
        parts: &Parts<'_>,
    ) -> Result<Several> {
        let Parts { kind, count, dtype, operator, root, rank, size, .. } = *parts;
        let bytes = checked::bytes("options->pointers", count, dtype.size() as u64, dtype)?;
        let span = |pointer: &*mut u8| Span { address: pointer.addr() as u64, bytes };
        let spans: Vec<Span> = parts.pointers.iter().map(span).collect();
        // SAFETY: the caller's promise.
        let streams = |handles: &[StreamHandle]| unsafe {
            Pointers::new(devices, &spans, handles).map_err(|error| named(&error))
        };
        let own = if parts.streams.is_empty() { Some(streams(&[])?) } else { None };
        let handles = own.as_ref().map_or_else(|| parts.streams.to_vec(), Pointers::handles);
        let pointers = || streams(&handles);
        let all = pointers()?;
        // What a broadcast spreads among the pointers, and what the ranks call with.
        let source = if kind == Kind::Broadcast && rank == root { parts.root_pointer } else { 0 };
        let main = if size == 1 || all.device(source) == all.device(0) { source } else { 0 };
        let address = parts.pointers[main];
        let (main_device, spread) = (all.device(main), BroadcastAlgorithm::automatic(&all));
        let combine = ReduceAlgorithm::automatic(&all)?;
        let mut request = Request {
            kind,
            input: address.cast_const(),
            output: address,
            counts: Counts::Uniform(count),
            dtype,
            operator,
            root,
        };
        let mut local = Local { broadcast: None, reduce: None };
        let place = match kind {
            Kind::Broadcast => {
                local.broadcast = Some(LocalBroadcast::new(all, source, spread)?);
                match (size, rank == root) {
                    (1, _) => Place::Nowhere,
                    (_, true) if source == main => Place::Beside,
                    (_, true) => Place::Behind,
                    (_, false) => Place::Between,
                }
            }
            _ if size == 1 => {
                let kernels = kernels.clone();
                let all = all.chained();
                local.reduce = Some(LocalReduce::new(all, main, dtype, operator, combine, kernels)?);
                local.broadcast = Some(LocalBroadcast::new(pointers()?.chained(), main, spread)?);
                Place::Nowhere
            }
            _ => {
                let spreads = kind == Kind::Allreduce || rank == root;
                let all = if spreads { all.chained() } else { all };
                let (reduce, from) =
                    LocalReduce::partial(all, main, dtype, operator, combine, kernels.clone())?;
                local.reduce = Some(reduce);
                if spreads {
                    let contributions = size.saturating_mul(spans.len() as u32);
                    let rounding =
                        Rounding { from, dtype, operator, contributions, kernels: kernels.clone() };
                    let all = pointers()?.chained();
                    // SAFETY: the reduction owns the accumulators and is dropped after this; the call between
                    // the two is ordered on the main stream.
                    let broadcast = unsafe { LocalBroadcast::rounded(all, main, spread, rounding) };
                    local.broadcast = Some(broadcast?);
                }
                let accumulators = std::ptr::with_exposed_provenance_mut::<u8>(from as usize);
                request.input = accumulators.cast_const();
                request.output = accumulators;
                request.dtype = dtype.accumulator();
                // The others have been applied, or come last. The ranks compare type and operator as they were
                // ([`Call::combined`]), and of an average how many pointers they have: they all divide by their
                // own number.
                if matches!(operator, Operator::Average | Operator::PreMulSum(_)) {
                    request.operator = Operator::Sum;
                }
                Place::Between
            }
        };
        Ok(Several {
            local: Mutex::new(local),
            request,
            place,
            main: handles[main],
            done: Mutex::new(Arc::new(Event::new(devices, main_device)?)),
            joins: Stream::new(devices, main_device, false)?,
            own,
        })
    }

    /// The call between the ranks.
    pub(super) fn request(&self) -> &Request {
        &self.request
    }

    /// The stream that it is ordered on.
    pub(super) fn main(&self) -> StreamHandle {
        self.main
    }

    /// Whether the caller gave no streams, and so waits on the host.
    pub(super) fn synchronous(&self) -> bool {
        self.own.is_some()
    }

    /// Enqueues a run. `begin` starts the call between the ranks once the main stream has come this far, and
    /// `close` has the main stream wait for it; in a group of one neither is called.
    pub(super) fn enqueue<P, W>(
        &self,
        begin: impl FnOnce() -> Result<P>,
        close: impl FnOnce(P) -> Result<W>,
    ) -> Result<Option<W>> {
        // The object is locked, and a callback may want to run it.
        let _held_back = hold_back();
        let mut local = lock(&self.local);
        let Local { broadcast, reduce } = &mut *local;
        let mut spread = || broadcast.as_mut().map_or(Ok(()), LocalBroadcast::run);
        if self.place == Place::Beside {
            let begun = begin()?;
            let spread = spread();
            // What has begun reads the main pointer, also when the rest failed.
            let work = close(begun)?;
            return spread.map(|()| Some(work));
        }
        if self.place == Place::Behind {
            spread()?;
            return close(begin()?).map(Some);
        }
        reduce.as_mut().map_or(Ok(()), LocalReduce::run)?;
        let work = match self.place {
            Place::Between => Some(close(begin()?)?),
            Place::Nowhere | Place::Beside | Place::Behind => None,
        };
        spread()?;
        Ok(work)
    }

    /// An event that is complete when everything is that was enqueued so far. `None`: the streams are being
    /// captured, and an event of ours would mean nothing outside of the graph.
    pub(super) fn join(&self) -> Result<Option<Arc<Event>>> {
        let mut local = lock(&self.local);
        if local.is_captured()? {
            return Ok(None);
        }
        match &mut *local {
            Local { broadcast: Some(broadcast), .. } => broadcast.join(&self.joins)?,
            Local { reduce: Some(reduce), .. } => reduce.join(&self.joins)?,
            Local { broadcast: None, reduce: None } => {}
        }
        let mut done = lock(&self.done);
        if Arc::strong_count(&done) > 1 {
            // It stands for an earlier run, whose work somebody has.
            *done = Arc::new(Event::new(self.joins.devices(), self.joins.device())?);
        }
        done.record(&self.joins)?;
        Ok(Some(done.clone()))
    }

    /// Waits on the host until every stream has done what it was given.
    pub(super) fn wait(&self, deadline: Deadline) -> Result<()> {
        let mut local = lock(&self.local);
        match &mut *local {
            Local { broadcast: Some(broadcast), .. } => broadcast.wait(deadline),
            Local { reduce: Some(reduce), .. } => reduce.wait(deadline),
            Local { broadcast: None, reduce: None } => Ok(()),
        }
    }
}

impl Drop for Several {
    /// What streams of ours were given by a run whose work has failed may still touch the pointers, and
    /// nobody else could wait for it.
    fn drop(&mut self) {
        if self.own.is_some()
            && let Err(error) = lock(&self.done).synchronize(Deadline::after(PATIENCE))
        {
            log::warn!("what a run was given may still touch its pointers: {error}");
        }
    }
}

/// The error of a local operation, which names `pointers` and `streams`, with the names that the caller
/// knows.
fn named(error: &Error) -> Error {
    Error::new(error.status(), format!("options->{}", error.text()))
}

#[cfg(test)]
mod tests;
