//! How a new context finds the other ranks, and how it may be linked to them.

use std::sync::Arc;

use super::{Options, Rendezvous};
use crate::deadline::Deadline;
use crate::engine::bootstrap::MAX_RANKS;
use crate::error::{Result, fail};
use crate::rendezvous::environment::{How, Launch};
use crate::rendezvous::hash::HashStore;
use crate::rendezvous::id::UniqueId;
use crate::rendezvous::interface::Interface;
use crate::rendezvous::join;
use crate::rendezvous::secret::SecretKey;
use crate::rendezvous::store::Store;
use crate::transport::address::MAX_ADDRESSES;
use crate::transport::service::Options as LinkOptions;

/// Where the ranks meet.
pub(super) struct Found {
    pub(super) rank: u32,
    pub(super) size: u32,
    pub(super) store: Arc<dyn Store>,
    /// `None`: the store gives one.
    pub(super) secret: Option<SecretKey>,
    /// Where the launcher writes how ranks ended, if it does.
    pub(super) exits: Option<Arc<dyn Store>>,
}

/// Rank, size and store, from what the caller or its launcher gave.
pub(super) fn find(
    options: &Options,
    deadline: Deadline,
    recalled: Option<&dyn Fn() -> bool>,
) -> Result<Found> {
    let (rank, size) = (options.rank, options.size);
    match &options.rendezvous {
        Rendezvous::Store(store) => Ok(Found { rank, size, store: store.clone(), secret: None, exits: None }),
        Rendezvous::Id(bytes) => {
            let id = UniqueId::parse(bytes)?;
            if size == 1 {
                // Nobody else comes: the server need not be asked.
                return Ok(Found {
                    rank,
                    size,
                    store: Arc::new(HashStore::new()),
                    secret: None,
                    exits: None,
                });
            }
            let secret = Some(id.secret().clone());
            let store = id.connect_unless(recalled.unwrap_or(&|| false), deadline)?;
            Ok(Found { rank, size, store: Arc::new(store), secret, exits: None })
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
                exits,
            })
        }
    }
}

/// How this rank may be linked to others: what the caller said, else the environment.
pub(super) fn link_options(options: &Options) -> Result<LinkOptions> {
    LinkOptions::from_environment(|name| {
        let given = match name {
            "UNISONO_TRANSPORT" => &options.transports,
            "UNISONO_HOST" => &options.host,
            _ => &None,
        };
        given.clone().or_else(|| std::env::var(name).ok())
    })
}

/// With the addresses of the interface that `options` or the environment names. The host may not have it.
pub(super) fn on_interface(mut links: LinkOptions, options: &Options) -> Result<LinkOptions> {
    if links.tcp {
        let wanted = options.interface.clone().or_else(|| std::env::var("UNISONO_INTERFACE").ok());
        let interface = Interface::choose(wanted.as_deref())?;
        log::info!("links use {interface}");
        links.addresses = interface.listening(MAX_ADDRESSES);
    }
    Ok(links)
}
