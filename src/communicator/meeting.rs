//! How a new context finds the other ranks, and how it may be linked to them.

use std::sync::Arc;

use super::{Options, Rendezvous};
use crate::deadline::Deadline;
use crate::engine::bootstrap::MAX_RANKS;
use crate::error::{Error, Result, fail};
use crate::rendezvous::environment::{How, Launch};
use crate::rendezvous::hash::HashStore;
use crate::rendezvous::id::UniqueId;
use crate::rendezvous::interface::Interface;
use crate::rendezvous::join;
use crate::rendezvous::secret::SecretKey;
use crate::rendezvous::store::Store;
use crate::settings;
use crate::transport::address::MAX_ADDRESSES;
use crate::transport::service::Options as LinkOptions;

/// Where the ranks meet.
pub(super) struct Found {
    pub(super) rank: u32,
    pub(super) size: u32,
    pub(super) store: Arc<dyn Store>,
    /// `None`: the store gives one.
    pub(super) secret: Option<SecretKey>,
    /// Why this rank is none of them, if so: they are to hear it.
    pub(super) fits: Result<()>,
    /// Where the launcher writes how ranks ended, if it does.
    pub(super) exits: Option<Arc<dyn Store>>,
}

/// Rank, size and store, from what the caller or its launcher gave.
pub(super) fn find(
    options: &Options,
    deadline: Deadline,
    recalled: Option<&dyn Fn() -> Option<Error>>,
) -> Result<Found> {
    let (rank, size) = (options.rank, options.size);
    let found = |store, secret| Found { rank, size, store, secret, fits: Ok(()), exits: None };
    match &options.rendezvous {
        Rendezvous::Store(store) => Ok(found(store.clone(), None)),
        Rendezvous::Id(bytes) | Rendezvous::Invitation(bytes) => {
            let id = UniqueId::parse(bytes)?;
            if size == 1 {
                // Nobody else comes: the server need not be asked.
                return Ok(found(Arc::new(HashStore::new()), None));
            }
            let secret = Some(id.secret().clone());
            let recalled = recalled.unwrap_or(&|| None);
            let connected = id.connect_unless(&|| recalled().is_some(), deadline);
            let store = connected.map_err(|error| match recalled() {
                Some(why) => why.context(error),
                None => error,
            })?;
            Ok(found(Arc::new(store), secret))
        }
        Rendezvous::Environment => {
            let launch = Launch::from_env()?;
            let ranks = |number: usize, name: &str| match u32::try_from(number) {
                Ok(number) => Ok(number),
                Err(_) => {
                    fail!(InvalidUsage, "{name} {number} is out of range: a group has 1 to {MAX_RANKS} ranks")
                }
            };
            let exits: Option<Arc<dyn Store>> = match &launch.store {
                How::Id(id) if launch.size > 1 => Some(Arc::new(id.connect(deadline)?)),
                _ => None,
            };
            let joined = join::connect(&launch, deadline)?;
            Ok(Found {
                rank: ranks(launch.rank, "rank")?,
                size: ranks(launch.size, "size")?,
                store: joined.store,
                secret: Some(joined.secret),
                fits: joined.fits,
                exits,
            })
        }
    }
}

/// Refuses what the caller has said of links, if that is wrong, whatever the environment says.
pub(super) fn check(options: &Options) -> Result<()> {
    link_options_by(options, &|_| None).map(drop)
}

/// How this rank may be linked to others: what the caller said, else the environment.
pub(super) fn link_options(options: &Options) -> Result<LinkOptions> {
    link_options_by(options, &settings::read)
}

fn link_options_by(options: &Options, environment: &dyn Fn(&str) -> Option<String>) -> Result<LinkOptions> {
    let host = match &options.host {
        None => settings::anything("UNISONO_HOST", environment("UNISONO_HOST"))?,
        given => given.clone(),
    };
    let mut links = LinkOptions::from_environment(|name| match name {
        "UNISONO_HOST" => host.clone(),
        "UNISONO_TRANSPORT" if options.transports.is_some() => None,
        _ => environment(name),
    })?;
    if let Some(transports) = settings::said(options.transports.clone()) {
        links.link_by("options->transports", &transports)?;
    }
    Ok(links)
}

/// With the addresses of the interface that `options` or the environment names. The host may not have it.
pub(super) fn on_interface(links: LinkOptions, options: &Options) -> Result<LinkOptions> {
    if !links.tcp {
        return Ok(links);
    }
    let wanted = options.interface.clone().or_else(|| settings::read("UNISONO_INTERFACE"));
    let interface = match Interface::find(wanted.as_deref())? {
        None if !links.shm => Some(Interface::choose(None)?),
        found => found,
    };
    Ok(over(links, interface))
}

/// Over TCP at the addresses of this interface. If none is up, without TCP: ranks of one host need none.
fn over(mut links: LinkOptions, interface: Option<Interface>) -> LinkOptions {
    match interface {
        Some(interface) => {
            log::info!("links use {interface}");
            links.addresses = interface.listening(MAX_ADDRESSES);
        }
        None => {
            log::warn!(
                "TCP is switched off, since no network interface is up: only ranks of this host are reached"
            );
            (links.tcp, links.no_tcp) = (false, "no network interface is up");
        }
    }
    links
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, SocketAddr};
    use std::time::Duration;

    use super::*;

    #[test]
    fn without_an_interface_links_are_through_shared_memory_alone() {
        let links = over(LinkOptions::default(), None);
        assert!(links.shm && !links.tcp && links.addresses.is_empty());
        assert_eq!(links.no_tcp, "no network interface is up");
        let address = IpAddr::from([10, 0, 0, 5]);
        let interface =
            Interface { name: "eth0".into(), index: 2, addresses: vec![address], reason: "a test".into() };
        let links = over(LinkOptions::default(), Some(interface));
        assert!(links.shm && links.tcp);
        assert_eq!(links.addresses, [SocketAddr::new(address, 0)]);
    }

    #[test]
    fn who_has_said_which_transports_is_told_where_that_is_wrong() {
        let environment = |name: &str| (name == "UNISONO_TRANSPORT").then(|| "shm,pigeon".to_owned());
        let given = |transports: Option<&str>| Options {
            rank: 0,
            size: 1,
            rendezvous: Rendezvous::Store(Arc::new(HashStore::new())),
            name: "default".to_owned(),
            timeout: Duration::from_secs(1),
            interface: None,
            transports: transports.map(str::to_owned),
            host: None,
        };
        for (transports, says) in
            [(Some("tcp,kite"), "options->transports=tcp,kite: "), (None, "UNISONO_TRANSPORT=shm,pigeon: ")]
        {
            let error =
                link_options_by(&given(transports), &environment).map(drop).expect_err("there is none");
            assert!(error.text().starts_with(says), "{error}");
        }
        // The caller's count, also where they are none: any.
        for (transports, only_tcp) in [("tcp", true), (" ", false)] {
            let links = link_options_by(&given(Some(transports)), &environment).expect("transports");
            assert_eq!((links.shm, links.tcp), (!only_tcp, true));
        }
    }
}
