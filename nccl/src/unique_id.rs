//! Unique ids, and the servers behind them.

use std::collections::BTreeSet;
use std::ffi::c_char;
use std::time::Duration;

use unisono::deadline::Deadline;
use unisono::rendezvous::id::{ID_BYTES, UniqueId, served};
use unisono::rendezvous::interface::Interface;
use unisono::rendezvous::tcp_server::ServerHandle;
use unisono::sys::child::OpenFiles;
use unisono::sys::fork;
use unisono::sys::global::Global;
use unisono::sys::interfaces::{self, InterfaceAddress};

use crate::abi::{ncclResult_t, ncclUniqueId};
use crate::error::{Result, SUCCESS, fail, guard, out};
use crate::settings;

/// Makes a unique id and writes it to `*uniqueId`. One rank calls it and gives the 128 bytes to the others.
///
/// This process serves the meeting until its communicator of that id is destroyed, or it ends; if it is no
/// rank of it, until it makes an id a minute or more after the last rank has gone from there. Meetings that
/// have failed it serves for a minute or more, so that ranks that come late are told why, but no more than
/// the last eight. It listens on the interface that UNISONO_INTERFACE or NCCL_SOCKET_IFNAME names, or on one
/// that the library chooses. With NCCL_COMM_ID set to a place of rank 0's host (10.0.0.1:5000) every rank
/// makes the same id, and rank 0 serves the meeting there as it joins, until its process ends, unless another
/// process that was rank 0 before still does; then the ranks of one communicator at a time can meet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(uniqueId: *mut ncclUniqueId) -> ncclResult_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or writable.
        let place = unsafe { out(uniqueId, "uniqueId") }?;
        let bytes = match of_place()? {
            Some(id) => id.to_bytes(),
            None => serve()?,
        };
        place.write(from_bytes(bytes));
        Ok(SUCCESS)
    })
}

/// Makes an id, and serves it.
pub(crate) fn serve() -> Result<[u8; ID_BYTES]> {
    // Its server has a connection with each rank while they meet. NCCL raises it, too.
    if let Err(error) = OpenFiles::most() {
        log::debug!("the limit of open files stays as it is: {error}");
    }
    served::create(interface()?.as_deref())
}

/// The id of the place that NCCL_COMM_ID names.
fn of_place() -> Result<Option<UniqueId>> {
    let place = settings::get("NCCL_COMM_ID").filter(|place| !place.is_empty());
    place
        .map(|place| UniqueId::of_place(place.trim()).map_err(|error| error.context("NCCL_COMM_ID")))
        .transpose()
}

/// Sees to it that an id of the place that NCCL_COMM_ID names is served, for rank 0; other ids have a server.
pub(crate) fn serve_place(bytes: &[u8; ID_BYTES]) -> Result<()> {
    if !is_of_place(bytes)? {
        return Ok(());
    }
    let id = UniqueId::parse(bytes)?;
    if serve_here(bytes, &id).is_ok() {
        return Ok(());
    }
    // Who was rank 0 before may do so still, in another process.
    let Err(not_served) = id.connect(Deadline::after(LOOK)) else { return Ok(()) };
    // It may have ended since.
    serve_here(bytes, &id).map_err(|error| not_served.context(error.text()))
}

/// How long a rank 0 that cannot serve a place looks for who does.
const LOOK: Duration = Duration::from_secs(2);

/// Serves a place in this process, unless it does so already.
fn serve_here(bytes: &[u8; ID_BYTES], id: &UniqueId) -> Result<()> {
    let mut places = PLACES.write();
    // A child that was forked has none of its parent's servers.
    if !places.iter().any(|place| (place.bytes, place.fork) == (*bytes, fork::generation())) {
        places.push(ServedPlace { bytes: *bytes, fork: fork::generation(), _server: id.serve()? });
    }
    Ok(())
}

/// Whether an id is one of the place that NCCL_COMM_ID names, wherever its name was looked up.
pub(crate) fn is_of_place(bytes: &[u8; ID_BYTES]) -> Result<bool> {
    let Some(place) = of_place()? else { return Ok(false) };
    Ok(UniqueId::parse(bytes)?.secret() == place.secret())
}

/// The places that this process serves: others may already be meeting there for the next communicator when
/// one is destroyed.
static PLACES: Global<Vec<ServedPlace>> = Global::new(Vec::new());

struct ServedPlace {
    bytes: [u8; ID_BYTES],
    fork: u32,
    _server: ServerHandle,
}

/// The interface that the environment names: UNISONO_INTERFACE or, as NCCL's users do it, NCCL_SOCKET_IFNAME.
/// `None`: the library chooses.
pub(crate) fn interface() -> Result<Option<String>> {
    if let Some(wanted) = unisono::settings::get("UNISONO_INTERFACE") {
        return Ok(Some(wanted));
    }
    let Some(named) = settings::get("NCCL_SOCKET_IFNAME") else { return Ok(None) };
    let up: Vec<InterfaceAddress> =
        interfaces::list().unwrap_or_default().into_iter().filter(|interface| interface.up).collect();
    let default = Interface::choose(None).map(|interface| interface.name).unwrap_or_default();
    named_by(&named, &up, &default)
}

/// What NCCL_SOCKET_IFNAME means: beginnings of names, whole ones after "=", none of them after "^". The
/// library's `default` goes before others, and loopback comes last. `None` where it names nothing; refused
/// where no interface is as it says.
fn named_by(list: &str, up: &[InterfaceAddress], default: &str) -> Result<Option<String>> {
    let list = list.trim();
    let (excludes, rest) = list.strip_prefix('^').map_or((false, list), |rest| (true, rest));
    let (exact, rest) = rest.strip_prefix('=').map_or((false, rest), |rest| (true, rest));
    // A port behind a name is for devices that have several.
    let names = || rest.split(',').filter_map(|name| name.split(':').next()).filter(|name| !name.is_empty());
    if names().next().is_none() {
        return Ok(None);
    }
    let fits = |interface: &&InterfaceAddress| {
        let named =
            |name: &str| if exact { interface.name == name } else { interface.name.starts_with(name) };
        names().any(named) != excludes
    };
    let best = up.iter().filter(fits).min_by_key(|interface| (interface.name != default, interface.loopback));
    let Some(interface) = best else {
        let there: BTreeSet<&str> = up.iter().map(|interface| interface.name.as_str()).collect();
        let there: Vec<&str> = there.into_iter().collect();
        let there = if there.is_empty() { "none".into() } else { there.join(", ") };
        fail!(InvalidArgument, "NCCL_SOCKET_IFNAME={list} fits no interface that is up; there are {there}");
    };
    Ok(Some(interface.name.clone()))
}

/// The id of these bytes, as clients have it.
pub(crate) fn from_bytes(bytes: [u8; ID_BYTES]) -> ncclUniqueId {
    ncclUniqueId { internal: bytes.map(|byte| byte as c_char) }
}

/// The bytes of an id, refused if they are none.
pub(crate) fn bytes(id: &ncclUniqueId) -> Result<[u8; ID_BYTES]> {
    let bytes = id.internal.map(|byte| byte as u8);
    UniqueId::parse(&bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;
    use std::net::{Ipv4Addr, SocketAddr, TcpListener};
    use std::process::{Command, Output};
    use std::thread;

    use unisono::communicator::{Context, Options, Rendezvous};

    use super::*;
    use crate::create::{bare, ncclCommInitRank};
    use crate::error::ncclGetLastError;

    const IS_FIRST: &str = "UNISONO_TEST_IS_FIRST";

    /// What comes of rank 0 of two at the place, in a process of its own that does the test of this name.
    fn first_at(place: SocketAddr, name: &str) -> Output {
        Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", &format!("unique_id::tests::{name}"), "--nocapture"])
            .env(IS_FIRST, "1")
            .env("NCCL_COMM_ID", place.to_string())
            .env("UNISONO_NCCL_HOST", "1")
            .env("UNISONO_INTERFACE", "127.0.0.1")
            .output()
            .expect("it runs")
    }

    /// The same, in that process.
    fn comes_first() {
        let (mut id, mut comm) = (ncclUniqueId { internal: [0; ID_BYTES] }, std::ptr::null_mut());
        // SAFETY: it is writable.
        assert_eq!(unsafe { ncclGetUniqueId(&raw mut id) }, SUCCESS);
        // SAFETY: as above.
        let answer = unsafe { ncclCommInitRank(&raw mut comm, 2, id, 0) };
        // SAFETY: a C string, until the next call of this thread fails.
        let text = unsafe { CStr::from_ptr(ncclGetLastError(comm)) }.to_string_lossy();
        assert_eq!(answer, SUCCESS, "{text}");
        assert_eq!(crate::end::ncclCommDestroy(comm), SUCCESS);
    }

    fn free_place() -> SocketAddr {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        listener.local_addr().expect("its address")
    }

    #[test]
    fn rank_0_of_the_next_communicator_of_a_place_may_be_another_process() {
        if std::env::var_os(IS_FIRST).is_some() {
            return comes_first();
        }
        let (place, id, _served) = std::iter::repeat_with(free_place)
            .find_map(|place| {
                let id = UniqueId::of_place(&place.to_string()).expect("a place");
                // Another test may have taken the port.
                id.serve().ok().map(|served| (place, id, served))
            })
            .expect("a port");
        let options = Options {
            timeout: Duration::from_secs(60),
            interface: Some("127.0.0.1".into()),
            ..bare(1, 2, Rendezvous::Id(id.to_bytes()), "world of 2")
        };
        let other = thread::spawn(|| Context::create(options).map(drop));
        let first = first_at(place, "rank_0_of_the_next_communicator_of_a_place_may_be_another_process");
        assert!(first.status.success(), "{first:?}");
        assert_eq!(other.join().expect("no panic"), Ok(()));
    }

    #[test]
    fn a_place_that_a_stranger_has_is_told() {
        if std::env::var_os(IS_FIRST).is_some() {
            return comes_first();
        }
        let stranger = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let place = stranger.local_addr().expect("its address");
        let first = first_at(place, "a_place_that_a_stranger_has_is_told");
        let said = String::from_utf8_lossy(&first.stdout) + String::from_utf8_lossy(&first.stderr);
        let parts = [format!("cannot serve a tcp store on {place}"), "in use".into(), "no greeting".into()];
        assert!(!first.status.success() && parts.iter().all(|part| said.contains(part)), "{said}");
    }

    #[test]
    fn an_id_is_served_by_the_process_that_makes_it() {
        let mut id = ncclUniqueId { internal: [0; ID_BYTES] };
        // SAFETY: it is writable.
        assert_eq!(unsafe { ncclGetUniqueId(&raw mut id) }, SUCCESS);
        let bytes = bytes(&id).unwrap();
        assert!(served::server(&bytes).is_some());
        served::release(&bytes);
    }

    #[test]
    fn interfaces_are_named_as_for_nccl() {
        let up: Vec<InterfaceAddress> =
            [("lo", true), ("docker0", false), ("eth0", false), ("eth10", false), ("ib0", false)]
                .into_iter()
                .map(|(name, loopback)| InterfaceAddress {
                    name: name.into(),
                    label: name.into(),
                    index: 1,
                    address: [127, 0, 0, 1].into(),
                    up: true,
                    loopback,
                })
                .collect();
        let named = |list| named_by(list, &up, "eth0");
        for (list, name) in [
            ("eth", "eth0"),
            ("eth1", "eth10"),
            ("=eth10", "eth10"),
            ("ib,eth10", "eth10"),
            ("=ib0,lo", "ib0"),
            ("lo", "lo"),
            ("^docker", "eth0"),
            ("^eth,docker", "ib0"),
            ("^=eth0", "docker0"),
            ("^docker,eth,ib", "lo"),
        ] {
            assert_eq!(named(list).unwrap().as_deref(), Some(name), "{list}");
        }
        assert_eq!(named("").unwrap(), None);
        for list in ["wlan", "=eth", "^lo,docker,eth,ib"] {
            let error = named(list).expect_err("it fits none");
            assert_eq!(
                error.text(),
                format!(
                    "NCCL_SOCKET_IFNAME={list} fits no interface that is up; there are docker0, eth0, eth10, ib0, lo"
                )
            );
        }
    }
}
