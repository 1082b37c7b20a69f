//! Communicators that grow: ranks join those of a parent, by an id that one of these has made.

use std::ffi::c_int;

use unisono::communicator::{Context, Options, Rendezvous};
use unisono::rendezvous::id::{ID_BYTES, served};

use crate::abi::{ncclComm_t, ncclConfig_t, ncclResult_t, ncclUniqueId};
use crate::communicator::{self, Communicator};
use crate::config::Config;
use crate::create::{bare, none, set_out, size};
use crate::error::{Result, SUCCESS, fail, guard, out};
use crate::group::{self, in_group};
use crate::place::Place;
use crate::setup::{Joining, Ranks};
use crate::unique_id;

/// Makes the id by which ranks join in the next ncclCommGrow of the communicator, and writes it to
/// `*uniqueId`. One of its ranks calls it, whichever, and the program gives the 128 bytes to the ranks that
/// join.
///
/// An id serves one growing: another one is ncclInvalidUsage until this rank has called ncclCommGrow. This
/// process serves it as ncclGetUniqueId says, at a place of its own also where NCCL_COMM_ID is set, and no
/// more once the communicator is destroyed without having grown.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetUniqueId(comm: ncclComm_t, uniqueId: *mut ncclUniqueId) -> ncclResult_t {
    guard(|| {
        let communicator = communicator::find(comm)?;
        let context = communicator.open_group()?;
        // SAFETY: the contract of the header: NULL or writable.
        let place = unsafe { out(uniqueId, "uniqueId") }?;
        if let Some(error) = context.failure() {
            return Err(error.context(format_args!("'{}' has failed, and cannot grow", context.name())));
        }
        let mut invitation = communicator.invitation();
        if invitation.is_some() {
            fail!(
                InvalidUsage,
                "an id of '{}' has been made and not used yet: call ncclCommGrow on all ranks before another one is made",
                context.name()
            );
        }
        let id = unique_id::serve()?;
        *invitation = Some(Invitation { id });
        place.write(unique_id::from_bytes(id));
        Ok(SUCCESS)
    })
}

/// Makes a communicator of the ranks of another one, the parent, and of others that join them: `nRanks` in
/// all, more than the parent has. It returns when all have come.
///
/// All ranks of the parent call it with `comm` and a `rank` of -1, and keep their ranks. One of them has
/// called ncclCommGetUniqueId before; each may pass that id or NULL. Ranks that join pass NULL for `comm`,
/// the id, and a rank from the parent's size to `nRanks` - 1; their device is the one that is current on this
/// thread. A NULL `config` is the parent's, and for a rank that joins the default one.
///
/// The parent goes on, and is destroyed by the program. If it does not block, or the new one does not, the
/// call answers ncclInProgress, and ncclCommGetAsyncError of `*newcomm` tells when that is made. If ranks of
/// the parent differ in the id or in `nRanks`, if none has made an id, or if one is gone, it fails on all
/// ranks, also on those that join.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGrow(
    comm: ncclComm_t,
    nRanks: c_int,
    uniqueId: *const ncclUniqueId,
    rank: c_int,
    newcomm: *mut ncclComm_t,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    in_group(|| {
        // SAFETY: the contract of the header: NULL or writable.
        unsafe { none(newcomm, "newcomm") }?;
        // SAFETY: the contract of the header: NULL or an id.
        let id = unsafe { given(uniqueId) }?;
        let joining = if comm.is_null() {
            // SAFETY: the contract of the header; `newcomm` is not NULL.
            unsafe { joining(nRanks, id, rank, newcomm, config) }
        } else {
            // SAFETY: as above.
            unsafe { growing(comm, nRanks, id, rank, newcomm, config) }
        }?;
        group::join(joining)
    })
}

/// A rank of the parent.
///
/// # Safety
/// `place` is writable until the thread's group ends; `config` is NULL or a config.
unsafe fn growing(
    comm: ncclComm_t,
    nranks: c_int,
    id: Option<[u8; ID_BYTES]>,
    rank: c_int,
    place: *mut ncclComm_t,
    config: *const ncclConfig_t,
) -> Result<Joining> {
    let parent = communicator::find(comm)?;
    let context = parent.open_group()?;
    if rank != -1 {
        fail!(
            InvalidArgument,
            "rank is {rank}; where comm is a communicator it is -1, since its ranks keep their numbers, and ranks that join pass NULL for comm"
        );
    }
    let size = size("nRanks", nranks)?;
    if size <= context.size() {
        fail!(
            InvalidArgument,
            "nRanks is {nranks}; '{}' has {} ranks, and grows to more than that",
            context.name(),
            context.size()
        );
    }
    // SAFETY: this function's contract.
    let config = unsafe { Config::parse(config, &parent.config) }?;
    // In the call, not when its turn comes: another id may be made from now on.
    let own = parent.invitation().take();
    let server = own.as_ref().and_then(|own| served::server(&own.id));
    let grown = Communicator::new(parent.place, config, server.into_iter().collect());
    // SAFETY: this function's contract.
    Ok(unsafe { Joining::new(grown, place, Ranks::Grown(parent, Box::new(Growth { size, id, own }))) })
}

/// A rank that joins.
///
/// # Safety
/// As for [`growing`].
unsafe fn joining(
    nranks: c_int,
    id: Option<[u8; ID_BYTES]>,
    rank: c_int,
    place: *mut ncclComm_t,
    config: *const ncclConfig_t,
) -> Result<Joining> {
    let size = size("nRanks", nranks)?;
    let Some(id) = id else {
        fail!(
            InvalidArgument,
            "comm and uniqueId are NULL: a rank of the communicator passes that, a rank that joins the id that one of these has made by \
             ncclCommGetUniqueId"
        );
    };
    let rank = match u32::try_from(rank) {
        Ok(rank) if rank > 0 && rank < size => rank,
        _ => fail!(
            InvalidArgument,
            "rank is {rank}; a rank that joins (comm is NULL) has one from the size of the communicator that grows to nRanks - 1 ({})",
            nranks - 1
        ),
    };
    // SAFETY: this function's contract.
    let config = unsafe { Config::parse(config, &Config::unset()) }?;
    let (options, here) = set_out(bare(rank, size, Rendezvous::Invitation(id), MEETING), Place::here())?;
    let communicator = Communicator::new(here, config, served::server(&id).into_iter().collect());
    // SAFETY: this function's contract.
    Ok(unsafe { Joining::new(communicator, place, Ranks::Of(Box::new(options))) })
}

/// The id that a client passes, if it does.
///
/// # Safety
/// `id` is NULL or an id.
unsafe fn given(id: *const ncclUniqueId) -> Result<Option<[u8; ID_BYTES]>> {
    // SAFETY: this function's contract.
    let Some(id) = (unsafe { id.as_ref() }) else { return Ok(None) };
    let id = unique_id::bytes(id)?;
    if unique_id::is_of_place(&id)? {
        fail!(
            InvalidArgument,
            "uniqueId is that of the place that NCCL_COMM_ID names: pass the one that ncclCommGetUniqueId has made"
        );
    }
    Ok(Some(id))
}

/// By what name all ranks meet: those that join do not know the parent's.
const MEETING: &str = "grown";

/// An id by which ranks are to join a communicator. If they do not, it is served no more when this is
/// dropped.
pub(crate) struct Invitation {
    id: [u8; ID_BYTES],
}

impl Drop for Invitation {
    fn drop(&mut self) {
        served::release(&self.id);
    }
}

/// How this rank of a parent wants it to grow.
pub(crate) struct Growth {
    /// To how many ranks.
    size: u32,
    /// The id that its client has passed.
    id: Option<[u8; ID_BYTES]>,
    /// The one that it has made. Where nothing comes of the growing it goes, too.
    own: Option<Invitation>,
}

impl Growth {
    /// How this rank meets all others, as the ranks of the parent agree, and the id by which they do if this
    /// rank has made it, to be kept meanwhile. If they do not agree, those that join are told so by the ranks
    /// whose processes serve an id that they may have.
    pub(crate) fn agree(self, parent: &Communicator) -> Result<(Options, Option<Invitation>)> {
        let context = parent.group()?;
        let own = self.own;
        let made = own.as_ref().map(|own| own.id);
        let is_other = made.is_some() && self.id.is_some_and(|id| made != Some(id));
        let told = Told { id: made.or(self.id), is_own: own.is_some(), is_other, size: self.size };
        let agreed = context.begin_growth(told.to_words()).and_then(|all| {
            let all: Vec<Told> = all.iter().map(Told::from_words).collect();
            agreed(context.name(), &all)
        });
        let meeting = |id| bare(context.rank(), self.size, Rendezvous::Invitation(id), MEETING);
        match agreed {
            // An id is served until those who join have been told.
            Ok(id) => set_out(meeting(id), Ok(())).map(|(options, ())| (options, own)),
            Err(error) => {
                // Those that join may have either, also one that serves no more for growing, or never has.
                // This process keeps it meanwhile.
                let other = self.id.filter(|_| made != self.id);
                for (id, _server) in
                    made.into_iter().chain(other).filter_map(|id| Some((id, served::server(&id)?)))
                {
                    Context::decline(&meeting(id), error.clone());
                }
                Err(error)
            }
        }
    }
}

/// What a rank of the parent tells the others.
#[derive(Clone, Copy)]
struct Told {
    id: Option<[u8; ID_BYTES]>,
    /// Whether it has made the id,
    is_own: bool,
    /// and its client has passed another one.
    is_other: bool,
    size: u32,
}

const ID_WORDS: usize = ID_BYTES / 8;

impl Told {
    fn to_words(self) -> [u64; ID_WORDS + 3] {
        let mut words = [0; ID_WORDS + 3];
        let (bytes, _) = self.id.as_ref().map_or(&[][..], |id| id).as_chunks::<8>();
        for (word, bytes) in words.iter_mut().zip(bytes) {
            *word = u64::from_le_bytes(*bytes);
        }
        words[ID_WORDS] = self.is_own.into();
        words[ID_WORDS + 1] = self.is_other.into();
        words[ID_WORDS + 2] = self.size.into();
        words
    }

    fn from_words(words: &[u64; ID_WORDS + 3]) -> Told {
        let mut id = [0; ID_BYTES];
        let (bytes, _) = id.as_chunks_mut::<8>();
        for (bytes, word) in bytes.iter_mut().zip(words) {
            *bytes = word.to_le_bytes();
        }
        // No id is all zeros.
        let id = (id != [0; ID_BYTES]).then_some(id);
        let [is_own, is_other] = [words[ID_WORDS], words[ID_WORDS + 1]].map(|word| word != 0);
        Told { id, is_own, is_other, size: words[ID_WORDS + 2] as u32 }
    }
}

/// The id by which all meet, from what each rank of the parent has told: there is one, if all tell alike.
fn agreed(parent: &str, all: &[Told]) -> Result<[u8; ID_BYTES]> {
    if let Some(rank) = all.iter().position(|told| told.size != all[0].size) {
        fail!(
            InvalidUsage,
            "'{parent}' is to grow to {} ranks as rank 0 has it, to {} as rank {rank}: all ranks give the same nRanks",
            all[0].size,
            all[rank].size
        );
    }
    let given = |told: &Told| told.id.filter(|_| !told.is_own);
    let own = all.iter().enumerate().find_map(|(rank, told)| Some((rank, told.id.filter(|_| told.is_own)?)));
    let Some((maker, id)) = own else {
        if let Some(rank) = all.iter().position(|told| given(told).is_some()) {
            fail!(
                InvalidUsage,
                "rank {rank} of '{parent}' passes a uniqueId that none of its ranks has made by ncclCommGetUniqueId since it grew last: \
                 an id serves one growing"
            );
        }
        fail!(
            InvalidUsage,
            "no rank of '{parent}' has called ncclCommGetUniqueId: one of them does before ncclCommGrow, and the id goes to the ranks that join"
        );
    };
    match all.iter().position(|told| told.is_other || told.id.is_some_and(|other| other != id)) {
        None => Ok(id),
        Some(rank) if all[rank].is_other => fail!(
            InvalidUsage,
            "rank {rank} of '{parent}' passes another uniqueId than it has made by ncclCommGetUniqueId, which serves no more: make one anew"
        ),
        Some(rank) if all[rank].is_own => fail!(
            InvalidUsage,
            "ranks {maker} and {rank} of '{parent}' have each called ncclCommGetUniqueId: one rank does before ncclCommGrow"
        ),
        Some(rank) => fail!(
            InvalidUsage,
            "rank {rank} of '{parent}' passes another uniqueId than rank {maker} has made by ncclCommGetUniqueId: pass that one, or NULL"
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::error::IN_PROGRESS;

    /// It may have to wait for its turn for long.
    #[test]
    fn another_id_may_be_made_once_a_growing_that_does_not_block_was_called() {
        let config = Config { blocking: false, ..Config::unset() };
        let parent = Communicator::new(Place::Host(0), config, Vec::new());
        parent.meet(|_| Communicator::alone(&parent).cloned().map(Some));
        let comm = parent.give_handle();
        let turn = parent.order().take();
        let mut grown = std::ptr::null_mut();
        let mut call = || {
            let id = served::create(Some("127.0.0.1")).expect("an id");
            *parent.invitation() = Some(Invitation { id });
            // SAFETY: live memory.
            let answer =
                unsafe { ncclCommGrow(comm, 2, std::ptr::null(), -1, &raw mut grown, std::ptr::null_mut()) };
            assert!(parent.invitation().is_none());
            (answer, id, grown)
        };
        for _ in 0..2 {
            let (answer, id, grown) = call();
            assert!(served::server(&id).is_some());
            assert_eq!([answer, crate::end::ncclCommAbort(grown)], [IN_PROGRESS, SUCCESS]);
        }
        // An id of a growing that is never begun goes with it.
        assert_eq!(group::ncclGroupStart(), SUCCESS);
        let (_, id, _) = call();
        // SAFETY: NULL is an error.
        let refused = unsafe { group::ncclGroupSimulateEnd(std::ptr::null_mut()) };
        assert_ne!(refused, SUCCESS);
        assert!(served::server(&id).is_none());
        drop(turn);
        assert_eq!(crate::end::ncclCommAbort(comm), SUCCESS);
    }

    /// In a process of its own, which has it in its environment.
    #[test]
    fn who_joins_hears_that_the_environment_of_a_rank_that_grows_is_wrong() {
        const IS_THERE: &str = "UNISONO_TEST_GROWS_IN_VAIN";
        const PATIENCE: Duration = Duration::from_secs(60);
        const PART: &str = "NCCL_SOCKET_IFNAME=nosuch fits no interface";
        if std::env::var_os(IS_THERE).is_none() {
            let ended = Command::new(std::env::current_exe().expect("this program"))
                .args([
                    "--exact",
                    "grow::tests::who_joins_hears_that_the_environment_of_a_rank_that_grows_is_wrong",
                ])
                .env(IS_THERE, "1")
                .env("NCCL_SOCKET_IFNAME", "nosuch")
                .env_remove("UNISONO_INTERFACE")
                .output()
                .expect("it runs");
            assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stdout));
            return;
        }
        let parent = Communicator::new(Place::Host(0), Config::unset(), Vec::new());
        parent.meet(|_| Communicator::alone(&parent).cloned().map(Some));
        let id = served::create(Some("127.0.0.1")).expect("an id");
        // As the communicator that is to be made has it.
        let _server = served::server(&id);
        let options = Options {
            timeout: PATIENCE,
            interface: Some("127.0.0.1".into()),
            transports: Some("shm".into()),
            ..bare(1, 2, Rendezvous::Invitation(id), MEETING)
        };
        let since = Instant::now();
        let joins = std::thread::spawn(|| Context::create(options).map(drop));
        let growth = Growth { size: 2, id: None, own: Some(Invitation { id }) };
        let grows = growth.agree(&parent).map(drop);
        for error in [grows, joins.join().expect("no panic")].map(|ended| ended.expect_err("it is wrong")) {
            assert!(error.text().contains(PART), "{error}");
        }
        assert!(since.elapsed() < PATIENCE / 2);
    }

    fn told(id: u8, is_own: bool) -> Told {
        Told { id: (id != 0).then_some([id; ID_BYTES]), is_own, is_other: false, size: 4 }
    }

    #[test]
    fn what_is_told_comes_as_it_was() {
        let id = std::array::from_fn(|index| index as u8);
        for told in [
            Told { id: Some(id), is_own: true, is_other: true, size: 65536 },
            Told { id: Some(id), is_own: false, is_other: false, size: 2 },
            Told { id: None, is_own: false, is_other: false, size: 3 },
        ] {
            let came = Told::from_words(&told.to_words());
            assert_eq!(
                (came.id, came.is_own, came.is_other, came.size),
                (told.id, told.is_own, told.is_other, told.size)
            );
        }
    }

    #[test]
    fn the_id_is_that_of_the_rank_that_made_it_whoever_passes_it() {
        for [first, others] in [[told(0, false); 2], [told(7, false), told(0, false)], [told(7, false); 2]] {
            let all = [first, told(7, true), others];
            assert_eq!(agreed("world", &all), Ok([7; ID_BYTES]));
        }
    }

    #[test]
    fn ranks_that_do_not_agree_are_told_what_to_do() {
        let larger = Told { size: 5, ..told(7, false) };
        let other = Told { is_other: true, ..told(7, true) };
        for (all, part) in [
            (vec![told(0, false), told(0, false)], "no rank of 'world' has called ncclCommGetUniqueId"),
            (vec![told(0, false), told(7, false)], "rank 1 of 'world' passes a uniqueId that none"),
            (vec![told(0, false), told(7, true), told(8, true)], "ranks 1 and 2 of 'world' have each called"),
            (vec![told(0, false), other], "rank 1 of 'world' passes another uniqueId than it has made"),
            (vec![told(8, false), told(7, true)], "rank 0 of 'world' passes another uniqueId than rank 1"),
            (vec![told(7, true), told(0, false), larger], "4 ranks as rank 0 has it, to 5 as rank 2"),
        ] {
            let error = agreed("world", &all).expect_err(part);
            assert!(error.text().contains(part), "{error}");
        }
    }
}
