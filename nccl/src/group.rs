//! Groups: between ncclGroupStart and the outermost ncclGroupEnd a thread's calls are kept, and then started together.

use std::cell::RefCell;
use std::mem::ManuallyDrop;

use crate::abi::{SIM_MAGIC, ncclResult_t, ncclSimInfo_t};
use crate::engine::{self, Launch};
use crate::error::{Error, Result, SUCCESS, fail, guard, guard_or, result};
use crate::estimate;
use crate::setup::{self, Joining, Sharing};

/// What a thread has called in its group so far.
struct Group {
    depth: u32,
    error: Option<Error>,
    joinings: Vec<Joining>,
    sharings: Vec<Sharing>,
    launches: Vec<Launch>,
}

impl Group {
    const NONE: Group =
        Group { depth: 0, error: None, joinings: Vec::new(), sharings: Vec::new(), launches: Vec::new() };
}

thread_local! {
    /// Not dropped with its thread: what runs at the end of a process, after that, makes calls, too.
    static GROUP: RefCell<ManuallyDrop<Group>> = const { RefCell::new(ManuallyDrop::new(Group::NONE)) };
}

/// Starts a group on this thread. Calls up to the outermost ncclGroupEnd are started together there.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> ncclResult_t {
    guard(|| {
        GROUP.with_borrow_mut(|group| group.depth += 1);
        Ok(SUCCESS)
    })
}

/// Ends a group. The outermost end starts everything that was called since. If one of these calls has failed, it starts
/// nothing and answers with the first one's error. What fails only as it is started does not keep the rest from starting;
/// the answer is then an error of communicators that were to be made, of windows or of other calls, in this order. It
/// returns once all is enqueued on the streams; communicators that are made in the group have met when it returns or, if
/// they do not block, answer ncclInProgress.
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
        let mut ended = end("ncclGroupSimulateEnd")?;
        // Whatever becomes of this call: nobody else will make them meet.
        if let Some(group) = &mut ended {
            group.joinings.drain(..).for_each(Joining::discard);
        }
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
        }
        Ok(SUCCESS)
    })
}

/// One step out. The group, if that was the outermost.
fn end(name: &str) -> Result<Option<Group>> {
    GROUP.with_borrow_mut(|group| match group.depth {
        0 => fail!(InvalidUsage, "{name} without ncclGroupStart on this thread"),
        1 => Ok(Some(std::mem::replace(&mut **group, Group::NONE))),
        _ => {
            group.depth -= 1;
            Ok(None)
        }
    })
}

/// Runs the body of a call that may be in a group: its failure is the group's, too.
pub(crate) fn in_group(body: impl FnOnce() -> Result<ncclResult_t>) -> ncclResult_t {
    let note = |error: &Error| {
        GROUP.with_borrow_mut(|group| {
            if group.depth > 0 && group.error.is_none() {
                group.error = Some(error.clone());
            }
        });
        result(error.status())
    };
    guard_or(note, body)
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
    sharing.map_or(Ok(()), |sharing| setup::share(vec![sharing]))
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
    setup::meet(joinings)
}

impl Group {
    fn run(self) -> Result<ncclResult_t> {
        if let Some(error) = self.error {
            self.joinings.into_iter().for_each(Joining::discard);
            return Err(error);
        }
        let met = setup::meet(self.joinings);
        let shared = setup::share(self.sharings);
        let launched = engine::launch_all(self.launches);
        let met = met?;
        shared?;
        launched?;
        Ok(met)
    }
}
