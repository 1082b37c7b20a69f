//! Groups: between ncclGroupStart and the outermost ncclGroupEnd a thread's calls are kept, and then started together.

use std::cell::RefCell;
use std::sync::Arc;

use unisono::communicator::Context;

use crate::abi::{SIM_MAGIC, ncclComm_t, ncclResult_t, ncclSimInfo_t};
use crate::communicator::{COMMUNICATORS, Communicator};
use crate::engine::{self, Launch};
use crate::error::{Error, IN_PROGRESS, Result, SUCCESS, Status, caught, fail, guard};
use crate::estimate;

/// A communicator that is to meet the other ranks.
pub(crate) struct Joining {
    pub(crate) communicator: Arc<Communicator>,
    pub(crate) handle: ncclComm_t,
    /// Where the client keeps the handle, writable until the group ends: NULL is written if the ranks do not meet.
    pub(crate) place: *mut ncclComm_t,
    /// Meets them.
    pub(crate) meet: Box<dyn FnOnce() -> Result<Option<Context>> + Send>,
}

impl Joining {
    /// The client gets none: this rank will not be a member.
    pub(crate) fn give_up_handle(&mut self) {
        COMMUNICATORS.take(self.handle);
        self.handle = std::ptr::null_mut();
        // SAFETY: as the field says.
        unsafe { self.place.write(self.handle) };
    }
}

/// A window that the ranks of a communicator share: all of them do, and wait for each other.
pub(crate) struct Sharing {
    /// The communicator's handle.
    pub(crate) communicator: usize,
    pub(crate) share: Box<dyn FnOnce() -> Result<()> + Send>,
}

/// What a thread has called in its group so far.
#[derive(Default)]
struct Group {
    depth: u32,
    error: Option<Error>,
    joinings: Vec<Joining>,
    sharings: Vec<Sharing>,
    launches: Vec<Launch>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

/// Starts a group on this thread. Calls up to the outermost ncclGroupEnd are started together there.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> ncclResult_t {
    guard(|| {
        GROUP.with_borrow_mut(|group| group.depth += 1);
        Ok(SUCCESS)
    })
}

/// Ends a group. The outermost end starts everything that was called since, and answers with the first error of these
/// calls, if there was one: then nothing is started. It returns once all is enqueued on the streams; communicators that
/// are made in the group have met when it returns or, if they do not block, answer ncclInProgress.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> ncclResult_t {
    guard(|| match end("ncclGroupEnd")? {
        None => Ok(SUCCESS),
        Some(group) => group.run(),
    })
}

/// Ends a group as ncclGroupEnd does, but starts nothing: `*simInfo` tells how many microseconds it would take, roughly.
///
/// The estimate is for ranks that share NVLink, by the latency and the bytes of each call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGroupSimulateEnd(simInfo: *mut ncclSimInfo_t) -> ncclResult_t {
    guard(|| {
        let ended = end("ncclGroupSimulateEnd")?;
        if simInfo.is_null() {
            fail!(InvalidArgument, "simInfo is NULL");
        }
        // SAFETY: the contract of the header: an initialised struct.
        let info = unsafe { &mut *simInfo };
        if info.magic != SIM_MAGIC || info.size < size_of::<ncclSimInfo_t>() {
            fail!(InvalidArgument, "simInfo is not initialised: use NCCL_SIM_INFO_INITIALIZER");
        }
        if let Some(group) = ended {
            if let Some(error) = group.error {
                return Err(error);
            }
            info.estimatedTime = group.launches.iter().map(estimate::microseconds).sum();
            discard(group.joinings);
        }
        Ok(SUCCESS)
    })
}

/// One step out. The group, if that was the outermost.
fn end(name: &str) -> Result<Option<Group>> {
    GROUP.with_borrow_mut(|group| match group.depth {
        0 => fail!(InvalidUsage, "{name} without ncclGroupStart on this thread"),
        1 => Ok(Some(std::mem::take(group))),
        _ => {
            group.depth -= 1;
            Ok(None)
        }
    })
}

/// Runs the body of a call that may be in a group: its failure is the group's, too.
pub(crate) fn in_group(body: impl FnOnce() -> Result<ncclResult_t>) -> ncclResult_t {
    guard(|| {
        let result = caught(body);
        if let Err(error) = &result {
            GROUP.with_borrow_mut(|group| {
                if group.depth > 0 && group.error.is_none() {
                    group.error = Some(error.clone());
                }
            });
        }
        result
    })
}

/// Starts a call, now or at the end of the group.
pub(crate) fn launch(launch: Launch) -> Result<ncclResult_t> {
    let mut launch = Some(launch);
    GROUP.with_borrow_mut(|group| -> Result<()> {
        if group.depth > 0
            && let Some(launch) = launch.take()
        {
            // What is wrong with it is told here, where the caller can see which call it was.
            launch.check()?;
            group.launches.push(launch);
        }
        Ok(())
    })?;
    match launch {
        Some(launch) => engine::launch_one(launch).map(|()| SUCCESS),
        None => Ok(SUCCESS),
    }
}

/// Shares a window, now or at the end of the group.
pub(crate) fn share(sharing: Sharing) -> Result<()> {
    let mut sharing = Some(sharing);
    GROUP.with_borrow_mut(|group| {
        if group.depth > 0 {
            group.sharings.extend(sharing.take());
        }
    });
    sharing.map_or(Ok(()), |sharing| (sharing.share)())
}

/// Shares windows of different communicators at the same time: the ranks of one may all be here, and wait for each other. Those of
/// one communicator are shared in the order of the calls, which is the same on all ranks.
fn share_all(sharings: Vec<Sharing>) -> Result<()> {
    let mut communicators: Vec<(usize, Vec<Sharing>)> = Vec::new();
    for sharing in sharings {
        match communicators.iter_mut().find(|(communicator, _)| *communicator == sharing.communicator) {
            Some((_, its)) => its.push(sharing),
            None => communicators.push((sharing.communicator, vec![sharing])),
        }
    }
    std::thread::scope(|scope| {
        let share = |all: Vec<Sharing>| {
            all.into_iter().map(|sharing| caught(sharing.share)).fold(Ok(()), Result::and)
        };
        let spawn = |(_, its)| scope.spawn(move || share(its));
        let threads: Vec<_> = communicators.into_iter().map(spawn).collect();
        let end = |thread: std::thread::ScopedJoinHandle<'_, Result<()>>| {
            let panicked =
                || Err(Error::new(Status::Internal, "a thread ended before it had shared a window"));
            thread.join().unwrap_or_else(|_| panicked())
        };
        threads.into_iter().map(end).fold(Ok(()), Result::and)
    })
}

/// Makes a communicator meet, now or at the end of the group.
pub(crate) fn join(joining: Joining) -> Result<ncclResult_t> {
    join_all(vec![joining])
}

/// Makes communicators meet, which may wait for each other, now or at the end of the group.
pub(crate) fn join_all(mut joinings: Vec<Joining>) -> Result<ncclResult_t> {
    GROUP.with_borrow_mut(|group| {
        if group.depth > 0 {
            group.joinings.append(&mut joinings);
        }
    });
    if joinings.is_empty() { Ok(SUCCESS) } else { meet(joinings) }
}

impl Group {
    fn run(self) -> Result<ncclResult_t> {
        if let Some(error) = self.error {
            discard(self.joinings);
            return Err(error);
        }
        let met = if self.joinings.is_empty() { Ok(SUCCESS) } else { meet(self.joinings) };
        let shared = if self.sharings.is_empty() { Ok(()) } else { share_all(self.sharings) };
        let launched = if self.launches.is_empty() { Ok(()) } else { engine::launch_all(self.launches) };
        let met = met?;
        shared?;
        launched?;
        Ok(met)
    }
}

/// Has communicators meet, at the same time: the ranks of one may all be here, and wait for each other.
fn meet(joinings: Vec<Joining>) -> Result<ncclResult_t> {
    let mut result = Ok(SUCCESS);
    // One that may take its time can do so on this thread.
    if joinings.len() == 1 && joinings[0].communicator.config.blocking {
        for joining in joinings {
            let (communicator, ended) = (joining.communicator, caught(joining.meet));
            result = settle(&communicator, ended, joining.handle, joining.place);
        }
        return result;
    }
    let mut threads = Vec::new();
    for Joining { communicator, handle, place, meet } in joinings {
        let blocking = communicator.config.blocking;
        let (inner, number) = (communicator.clone(), handle.addr());
        let spawned = std::thread::Builder::new().name("unisono-meet".into()).spawn(move || {
            let ended = caught(meet);
            match blocking {
                true => Some(ended),
                false => {
                    finish(&inner, ended, std::ptr::without_provenance_mut(number));
                    None
                }
            }
        });
        match spawned {
            Ok(thread) if blocking => threads.push((communicator, handle, place, thread)),
            Ok(_) => result = result.map(|_| IN_PROGRESS),
            Err(cause) => {
                let error = Error::system("a thread to meet the other ranks cannot be started", cause);
                result = result.and(settle(&communicator, Err(error), handle, place));
            }
        }
    }
    for (communicator, handle, place, thread) in threads {
        // Panics are caught within.
        let ended = thread.join().ok().flatten();
        let ended = ended
            .unwrap_or_else(|| Err(Error::new(Status::Internal, "a thread ended before it had met anybody")));
        result = result.and_then(|before| settle(&communicator, ended, handle, place).map(|_| before));
    }
    result
}

/// Tells a communicator what came of meeting; its client has no handle if that is nothing.
fn settle(
    communicator: &Arc<Communicator>,
    ended: Result<Option<Context>>,
    handle: ncclComm_t,
    place: *mut ncclComm_t,
) -> Result<ncclResult_t> {
    let failed = ended.as_ref().err().cloned();
    finish(communicator, ended, handle);
    match failed {
        None => Ok(SUCCESS),
        Some(error) => {
            COMMUNICATORS.take(handle);
            // SAFETY: as `Joining` says.
            unsafe { place.write(std::ptr::null_mut()) };
            Err(error)
        }
    }
}

/// Tells a communicator what came of meeting. One that turned out to have no part in the child is no more.
fn finish(communicator: &Communicator, ended: Result<Option<Context>>, handle: ncclComm_t) {
    match ended {
        Ok(Some(context)) => communicator.meet(Ok(context)),
        Ok(None) => drop(COMMUNICATORS.take(handle)),
        Err(error) => {
            log::warn!("{error}");
            communicator.meet(Err(error));
        }
    }
}

/// Ends what has not met anybody.
fn discard(joinings: Vec<Joining>) {
    for Joining { handle, place, .. } in joinings {
        COMMUNICATORS.take(handle);
        // SAFETY: as `Joining` says.
        unsafe { place.write(std::ptr::null_mut()) };
    }
}
