//! How communicators come to be: from unique ids, all at once in one process, or out of others.

use std::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;

use unisono::communicator::{Context, Options, Rendezvous};
use unisono::engine::bootstrap::MAX_RANKS;
use unisono::rendezvous::hash::HashStore;
use unisono::rendezvous::id::served;
use unisono::rendezvous::store::Store;

use crate::abi::{ncclComm_t, ncclConfig_t, ncclResult_t, ncclUniqueId};
use crate::communicator::{self, Communicator, Phase, meeting_timeout};
use crate::config::Config;
use crate::error::{Result, fail, out};
use crate::group::{self, in_group};
use crate::place::{Place, device_count};
use crate::setup::{self, Joining, Ranks};
use crate::{settings, unique_id};

/// The colour of a rank that joins no child in ncclCommSplit.
#[allow(unreachable_pub, reason = "for the header")]
pub const NCCL_SPLIT_NOCOLOR: c_int = -1;

/// ncclCommShrink: the parent goes on.
#[allow(unreachable_pub, reason = "for the header")]
pub const NCCL_SHRINK_DEFAULT: c_int = 0;

/// ncclCommShrink: what runs on the parent is ended first. The parent can only be destroyed or aborted then.
#[allow(unreachable_pub, reason = "for the header")]
pub const NCCL_SHRINK_ABORT: c_int = 1;

/// Makes this rank's communicator of `nranks` and writes it to `*comm`. Its device is the one that is current
/// on this thread.
///
/// All ranks call it with the same id, from processes or threads of their own, or in one group. It returns
/// when all have come.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRank(
    comm: *mut ncclComm_t,
    nranks: c_int,
    commId: ncclUniqueId,
    rank: c_int,
) -> ncclResult_t {
    // SAFETY: the contract of the header.
    in_group(|| unsafe { from_ids(comm, nranks, &[commId], rank, std::ptr::null()) })
}

/// As ncclCommInitRank, with a config; NULL is the default one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    comm: *mut ncclComm_t,
    nranks: c_int,
    commId: ncclUniqueId,
    rank: c_int,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    // SAFETY: the contract of the header.
    in_group(|| unsafe { from_ids(comm, nranks, &[commId], rank, config) })
}

/// As ncclCommInitRankConfig, for programs that have made up to one unique id for each rank: the same ids in
/// the same order on every rank. The ranks meet by the first.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankScalable(
    newcomm: *mut ncclComm_t,
    nranks: c_int,
    myrank: c_int,
    nId: c_int,
    commIds: *mut ncclUniqueId,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    in_group(|| {
        // SAFETY: the contract of the header: NULL or writable.
        unsafe { none(newcomm, "newcomm") }?;
        let count = match usize::try_from(nId) {
            Ok(count) if (1..=nranks).contains(&nId) => count,
            _ => fail!(InvalidArgument, "nId is {nId}; there are 1 to nranks ({nranks}) ids"),
        };
        if commIds.is_null() {
            fail!(InvalidArgument, "commIds is NULL");
        }
        // SAFETY: the contract of the header: as many ids.
        let ids = unsafe { std::slice::from_raw_parts(commIds, count) };
        // SAFETY: the contract of the header.
        unsafe { from_ids(newcomm, nranks, ids, myrank, config) }
    })
}

/// Makes the communicators of all ranks of a group in this process, one for each device of `devlist` (NULL:
/// the first `ndev`), and writes them to `comm[0]` to `comm[ndev - 1]`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitAll(
    comm: *mut ncclComm_t,
    ndev: c_int,
    devlist: *const c_int,
) -> ncclResult_t {
    in_group(|| {
        if comm.is_null() {
            fail!(InvalidArgument, "comm is NULL");
        }
        let size = size("ndev", ndev)?;
        if let Some(count) = device_count()?
            && size > count
        {
            fail!(InvalidArgument, "ndev is {ndev}, but there are {count} devices");
        }
        let mut numbers = Vec::with_capacity(size as usize);
        for rank in 0..size {
            let number = match devlist.is_null() {
                true => rank as c_int,
                // SAFETY: the contract of the header: not NULL, so `ndev` devices.
                false => unsafe { *devlist.add(rank as usize) },
            };
            if numbers.contains(&number) {
                fail!(InvalidUsage, "device {number} is twice in devlist: each rank has a device of its own");
            }
            numbers.push(number);
        }
        let store: Arc<dyn Store> = Arc::new(HashStore::new());
        let mut joinings = Vec::with_capacity(numbers.len());
        for (rank, number) in numbers.into_iter().enumerate() {
            let number = match u32::try_from(number) {
                Ok(number) => number,
                Err(_) => fail!(InvalidArgument, "device {number} does not exist"),
            };
            let communicator = Communicator::new(Place::of_device(number)?, Config::unset(), Vec::new());
            let rendezvous = Rendezvous::Store(store.clone());
            let options = options(rank as u32, size, rendezvous, "world")?;
            // SAFETY: the contract of the header: room for `ndev` communicators.
            let place = unsafe { comm.add(rank) };
            joinings.push((communicator, place, options));
        }
        // Nothing can be refused any more.
        let joinings = joinings.into_iter().map(|(communicator, place, options)| {
            // SAFETY: as above.
            unsafe { Joining::new(communicator, place, Ranks::Of(Box::new(options))) }
        });
        group::join_all(joinings.collect())
    })
}

/// Makes children of a communicator: ranks that give the same `color` form one, ordered by `key`, then by
/// their rank here. All ranks of `comm` call it. With NCCL_SPLIT_NOCOLOR a rank joins none, and `*newcomm` is
/// NULL. A NULL `config` is the parent's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommSplit(
    comm: ncclComm_t,
    color: c_int,
    key: c_int,
    newcomm: *mut ncclComm_t,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    in_group(|| {
        let parent = communicator::find(comm)?;
        let phase = *parent.phase();
        phase.check_unfinished(parent.group()?)?;
        let revoked = phase == Phase::Revoked;
        // SAFETY: the contract of the header: NULL or writable.
        unsafe { none(newcomm, "newcomm") }?;
        // Any number but that one is a colour.
        let color = (color != NCCL_SPLIT_NOCOLOR).then_some(color as u32);
        // SAFETY: the contract of the header: NULL or a config.
        let config = unsafe { Config::parse(config, &parent.config) }?;
        let child = Communicator::new(parent.place, config, parent.servers());
        let ranks = match revoked {
            true => Ranks::AlikeAnew(parent, color, key.into()),
            false => Ranks::Alike(parent, color, key.into()),
        };
        // SAFETY: checked above.
        group::join(unsafe { Joining::new(child, newcomm, ranks) })
    })
}

/// Makes a child of a communicator without the `excludeRanksCount` ranks of `excludeRanksList`, which do not
/// call it: the others all do. Their order is kept. `shrinkFlags` is NCCL_SHRINK_DEFAULT or, when a rank has
/// failed, NCCL_SHRINK_ABORT, which ends what runs on the parent first; that it ended so is no failure of it.
/// Without that a parent that has failed is refused, also on ranks that have begun before they knew of it;
/// all may try again then. A NULL `config` is the parent's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommShrink(
    comm: ncclComm_t,
    excludeRanksList: *mut c_int,
    excludeRanksCount: c_int,
    newcomm: *mut ncclComm_t,
    config: *mut ncclConfig_t,
    shrinkFlags: c_int,
) -> ncclResult_t {
    in_group(|| {
        let parent = communicator::find(comm)?;
        let context = parent.group()?;
        // SAFETY: the contract of the header: NULL or writable.
        unsafe { none(newcomm, "newcomm") }?;
        let size = context.size();
        let count = match usize::try_from(excludeRanksCount) {
            // This rank is none of them.
            Ok(count) if count > 0 && count < size as usize => count,
            _ => fail!(
                InvalidArgument,
                "excludeRanksCount is {excludeRanksCount}; of {size} ranks one or more are left out, but not all"
            ),
        };
        if excludeRanksList.is_null() {
            fail!(InvalidArgument, "excludeRanksList is NULL");
        }
        // SAFETY: the contract of the header: as many ranks.
        let excluded = unsafe { std::slice::from_raw_parts(excludeRanksList, count) };
        let ranks = remaining(excluded, context.rank(), size)?;
        // SAFETY: the contract of the header: NULL or a config.
        let config = unsafe { Config::parse(config, &parent.config) }?;
        if ![NCCL_SHRINK_DEFAULT, NCCL_SHRINK_ABORT].contains(&shrinkFlags) {
            fail!(
                InvalidArgument,
                "shrinkFlags is {shrinkFlags}; it is NCCL_SHRINK_DEFAULT (0) or NCCL_SHRINK_ABORT (1)"
            );
        }
        let phase = *parent.phase();
        phase.check_ends(context)?;
        if shrinkFlags == NCCL_SHRINK_ABORT {
            // Also while it is suspended: a rank may be gone by then.
            parent.stop();
        } else {
            phase.check_unfinished(context)?;
            if let (Phase::Open, Some(error)) = (phase, context.failure()) {
                let error = error.context(format!(
                    "'{}' has failed, and shrinks with NCCL_SHRINK_ABORT only",
                    context.name()
                ));
                // Others may not have heard of that yet, and have begun.
                return Err(setup::refuse_shrink(&parent, &ranks, error));
            }
        }
        let child = Communicator::new(parent.place, config, parent.servers());
        let ranks = Ranks::Remaining(parent, ranks);
        // SAFETY: checked above.
        group::join(unsafe { Joining::new(child, newcomm, ranks) })
    })
}

/// A communicator of ranks that meet by unique ids.
///
/// # Safety
/// `place` is NULL or writable until the thread's group ends; `config` is NULL or a config.
unsafe fn from_ids(
    place: *mut ncclComm_t,
    nranks: c_int,
    ids: &[ncclUniqueId],
    rank: c_int,
    config: *const ncclConfig_t,
) -> Result<ncclResult_t> {
    // SAFETY: this function's contract.
    unsafe { none(place, "comm") }?;
    let size = size("nranks", nranks)?;
    let rank = match u32::try_from(rank) {
        Ok(rank) if rank < size => rank,
        _ => fail!(InvalidArgument, "rank is {rank}; a group of {nranks} has ranks 0 to {}", nranks - 1),
    };
    // SAFETY: this function's contract.
    let config = unsafe { Config::parse(config, &Config::unset()) }?;
    let ids = ids.iter().map(unique_id::bytes).collect::<Result<Vec<_>>>()?;
    let [meeting, ..] = ids[..] else { fail!(InvalidArgument, "there is no unique id") };
    let of_place = unique_id::is_of_place(&meeting);
    let name = match of_place {
        // Other communicators meet there, too.
        Ok(true) => format!("world of {size}"),
        _ => "world".into(),
    };
    // Also where something else is wrong: the others are to hear it there.
    let served = if rank == 0 { unique_id::serve_place(&meeting) } else { of_place.map(drop) };
    let here = served.and_then(|()| Place::here());
    let (options, here) = set_out(bare(rank, size, Rendezvous::Id(meeting), &name), here)?;
    let servers = ids.iter().filter_map(served::server).collect();
    let communicator = Communicator::new(here, config, servers);
    // SAFETY: this function's contract; not NULL.
    group::join(unsafe { Joining::new(communicator, place, Ranks::Of(Box::new(options))) })
}

/// There is no communicator until it is made, nor if it cannot be: programs look at what they were given, not
/// only at the result.
///
/// # Safety
/// `place` is NULL or writable.
pub(crate) unsafe fn none(place: *mut ncclComm_t, name: &str) -> Result<()> {
    // SAFETY: this function's contract.
    unsafe { out(place, name) }?.write(std::ptr::null_mut());
    Ok(())
}

/// How many ranks a group is to have.
pub(crate) fn size(name: &str, given: c_int) -> Result<u32> {
    match u32::try_from(given) {
        Ok(size) if (1..=MAX_RANKS).contains(&size) => Ok(size),
        _ => fail!(InvalidArgument, "{name} is {given}; a group has 1 to {MAX_RANKS} ranks"),
    }
}

/// How a rank of a new group meets the others, by that name.
fn options(rank: u32, size: u32, rendezvous: Rendezvous, name: &str) -> Result<Options> {
    let (timeout, interface, host) = environment()?;
    Ok(Options { timeout, interface, host, ..bare(rank, size, rendezvous, name) })
}

/// The same, whatever the environment says.
pub(crate) fn bare(rank: u32, size: u32, rendezvous: Rendezvous, name: &str) -> Options {
    Options {
        rank,
        size,
        rendezvous,
        name: name.into(),
        timeout: Duration::MAX,
        interface: None,
        transports: None,
        host: None,
    }
}

/// How long to wait, the interface and the host.
fn environment() -> Result<(Duration, Option<String>, Option<String>)> {
    Ok((meeting_timeout()?, unique_id::interface()?, host()?))
}

/// How this rank meets others by an id, as the environment says, and `rest`, what else it needs for that. What
/// is wrong there no other try mends: those who wait for it are to hear it.
pub(crate) fn set_out<T>(bare: Options, rest: Result<T>) -> Result<(Options, T)> {
    match rest.and_then(|rest| Ok((environment()?, rest))) {
        Ok(((timeout, interface, host), rest)) => Ok((Options { timeout, interface, host, ..bare }, rest)),
        Err(why) => {
            Context::decline(&bare, why.clone());
            Err(why)
        }
    }
}

/// What tells this host from others, as NCCL's settings have it: `None` leaves it to the library, which has
/// its own variable.
fn host() -> Result<Option<String>> {
    let ours = unisono::settings::get("UNISONO_HOST").is_some();
    let theirs = settings::get("NCCL_HOSTID").filter(|name| !ours && !name.is_empty());
    unisono::settings::anything("NCCL_HOSTID", theirs)
}

/// The ranks that are left, of which this is one.
fn remaining(excluded: &[c_int], own: u32, size: u32) -> Result<Vec<u32>> {
    let mut left = vec![true; size as usize];
    for &rank in excluded {
        let place = usize::try_from(rank).ok().and_then(|rank| left.get_mut(rank));
        match place {
            Some(_) if rank.unsigned_abs() == own => fail!(
                InvalidArgument,
                "excludeRanksList has rank {rank}, which is this one: ranks that are left out do not call ncclCommShrink"
            ),
            Some(place) if *place => *place = false,
            Some(_) => fail!(InvalidArgument, "rank {rank} is twice in excludeRanksList"),
            None => {
                fail!(InvalidArgument, "excludeRanksList has rank {rank}, but the group has {size} ranks")
            }
        }
    }
    Ok((0..size).filter(|&rank| left[rank as usize]).collect())
}

#[cfg(test)]
mod tests {
    use std::ffi::{CStr, OsStr};
    use std::os::unix::ffi::OsStrExt;
    use std::process::Command;
    use std::thread;
    use std::time::Instant;

    use unisono::rendezvous::id::UniqueId;

    use super::*;
    use crate::communicator::COMMUNICATORS;
    use crate::end::ncclCommDestroy;
    use crate::error::{SUCCESS, ncclGetLastError};
    use crate::grow::ncclCommGrow;

    /// In a process of its own, which has such a name.
    #[test]
    fn a_name_for_the_host_that_is_no_text_is_refused() {
        const IS_THERE: &str = "UNISONO_TEST_HOSTID";
        if std::env::var_os(IS_THERE).is_some() {
            let error = host().expect_err("it is not UTF-8");
            assert!(error.text().contains("NCCL_HOSTID is not UTF-8"), "{error}");
            return;
        }
        let ended = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "create::tests::a_name_for_the_host_that_is_no_text_is_refused"])
            .env(IS_THERE, "1")
            .env("NCCL_HOSTID", OsStr::from_bytes(b"\xff1"))
            .env_remove("UNISONO_HOST")
            .output()
            .expect("it runs");
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stdout));
    }

    /// Joins as rank 1, in a process of its own, by the id that the environment has.
    fn joins_in_vain(grows: bool) {
        let id: UniqueId = std::env::var(ID).expect("an id").parse().expect("it is one");
        let (id, mut comm) = (unique_id::from_bytes(id.to_bytes()), std::ptr::null_mut());
        // SAFETY: live memory.
        let answer = unsafe {
            match grows {
                false => ncclCommInitRank(&raw mut comm, 2, id, 1),
                true => ncclCommGrow(comm, 2, &raw const id, 1, &raw mut comm, std::ptr::null_mut()),
            }
        };
        assert!(answer != SUCCESS && comm.is_null());
    }

    const ID: &str = "UNISONO_TEST_ID";

    /// What is wrong with the environment or the host of a rank keeps the others from going on, too.
    #[test]
    fn who_waits_for_a_rank_whose_environment_is_wrong_hears_that() {
        const GROWS: &str = "UNISONO_TEST_GROWS";
        const PATIENCE: Duration = Duration::from_secs(60);
        if std::env::var_os(ID).is_some() {
            return joins_in_vain(std::env::var_os(GROWS).is_some());
        }
        let wrong = [
            ("NCCL_SOCKET_IFNAME", "nosuch", "NCCL_SOCKET_IFNAME=nosuch fits no interface"),
            ("UNISONO_NCCL_MEETING_TIMEOUT", "soon", "UNISONO_NCCL_MEETING_TIMEOUT"),
            // Without a driver, or without a device that it could use.
            ("CUDA_VISIBLE_DEVICES", "", "no GPU can be used"),
        ];
        for (grows, (name, value, part)) in
            [false, true].into_iter().flat_map(|grows| wrong.map(|one| (grows, one)))
        {
            let id = served::create(Some("127.0.0.1")).expect("an id");
            let rendezvous = if grows { Rendezvous::Invitation(id) } else { Rendezvous::Id(id) };
            let options = Options {
                timeout: PATIENCE,
                interface: Some("127.0.0.1".into()),
                transports: Some("shm".into()),
                ..bare(0, 2, rendezvous, if grows { "grown" } else { "world" })
            };
            let since = Instant::now();
            let waits = thread::spawn(|| Context::create(options).map(drop));
            let mut joins = Command::new(std::env::current_exe().expect("this program"));
            joins.args([
                "--exact",
                "create::tests::who_waits_for_a_rank_whose_environment_is_wrong_hears_that",
            ]);
            joins.env(ID, UniqueId::parse(&id).expect("an id").to_hex());
            for unset in ["UNISONO_INTERFACE", "UNISONO_NCCL_HOST", "NCCL_COMM_ID"] {
                joins.env_remove(unset);
            }
            if name != "CUDA_VISIBLE_DEVICES" {
                joins.env("UNISONO_NCCL_HOST", "1");
            }
            if grows {
                joins.env(GROWS, "1");
            }
            let ended = joins.env(name, value).output().expect("it runs");
            assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stdout));
            let error = waits.join().expect("no panic").expect_err("rank 1 does not come");
            assert!(error.text().contains("rank 1 of 2") && error.text().contains(part), "{error}");
            assert!(since.elapsed() < PATIENCE / 2, "{error}");
            served::release(&id);
        }
    }

    /// Leaves rank 2 of `parent` out. What comes of it, with the text.
    fn shrink(parent: &Arc<Communicator>, flags: c_int) -> (ncclResult_t, String) {
        let (mut excluded, mut child) = (2, std::ptr::null_mut());
        let comm: ncclComm_t = COMMUNICATORS.insert(parent.clone());
        let config = std::ptr::null_mut();
        // SAFETY: live memory.
        let answer = unsafe { ncclCommShrink(comm, &mut excluded, 1, &mut child, config, flags) };
        // SAFETY: a C string, until the next call of this thread fails.
        let text = unsafe { CStr::from_ptr(ncclGetLastError(comm)) }.to_string_lossy().into_owned();
        assert_eq!(ncclCommDestroy(child), SUCCESS);
        COMMUNICATORS.take(comm);
        (answer, text)
    }

    /// One rank has begun to shrink what has failed for another: it is not kept waiting, and both can try
    /// again.
    #[test]
    fn who_shrinks_hears_that_another_rank_has_been_refused() {
        const PATIENCE: Duration = Duration::from_secs(60);
        let store = Arc::new(HashStore::new());
        let ranks = [0, 1, 2].map(|rank| {
            let options = Options {
                rank,
                size: 3,
                rendezvous: Rendezvous::Store(store.clone()),
                name: "world".into(),
                timeout: PATIENCE,
                interface: Some("127.0.0.1".into()),
                transports: Some("shm".into()),
                host: None,
            };
            thread::spawn(|| {
                let communicator = Communicator::new(Place::Host(0), Config::unset(), Vec::new());
                communicator.meet(|_| Context::create(options).map(Some));
                communicator
            })
        });
        let [refused, begins, _left_out] = ranks.map(|meets| meets.join().expect("no panic"));
        let since = Instant::now();
        thread::scope(|scope| {
            let begun = scope.spawn(|| shrink(&begins, NCCL_SHRINK_DEFAULT));
            while !begins.is_setting_up() {
                thread::sleep(Duration::from_millis(1));
            }
            refused.group().expect("they have met").abort();
            for (answer, text) in [shrink(&refused, NCCL_SHRINK_DEFAULT), begun.join().expect("no panic")] {
                assert_ne!(answer, SUCCESS);
                assert!(
                    text.contains("'world' has failed, and shrinks with NCCL_SHRINK_ABORT only"),
                    "{text}"
                );
            }
        });
        assert!(since.elapsed() < PATIENCE / 2);
        thread::scope(|scope| {
            let both = [&refused, &begins].map(|rank| scope.spawn(|| shrink(rank, NCCL_SHRINK_ABORT)));
            for rank in both {
                let (answer, text) = rank.join().expect("no panic");
                assert_eq!(answer, SUCCESS, "{text}");
            }
        });
    }

    #[test]
    fn the_ranks_that_remain_keep_their_order() {
        assert_eq!(remaining(&[3, 0], 1, 5), Ok(vec![1, 2, 4]));
        for (excluded, part) in
            [(&[1][..], "which is this one"), (&[0, 0], "twice"), (&[5], "5 ranks"), (&[-1], "-1")]
        {
            let error = remaining(excluded, 1, 5).unwrap_err();
            assert!(error.text().contains(part), "{error}");
        }
    }
}
