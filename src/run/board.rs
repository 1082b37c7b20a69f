//! The store in which the ranks find each other, and in which the launcher tells how ranks ended.
#![forbid(unsafe_code)]

use std::time::Duration;

use crate::deadline::Deadline;
use crate::error::Result;
use crate::rendezvous::id::UniqueId;
use crate::rendezvous::store::Store;
use crate::rendezvous::tcp::TcpStore;
use crate::rendezvous::tcp_server::ServerHandle;

/// All ranks are on this host.
const INTERFACE: &str = "127.0.0.1";
const PATIENCE: Duration = Duration::from_secs(5);

/// Serves the job's store as long as it lives.
pub(super) struct Board {
    id: UniqueId,
    store: TcpStore,
    _server: ServerHandle,
}

impl Board {
    /// Starts to serve.
    pub(super) fn open() -> Result<Board> {
        let (id, server) = UniqueId::create(Some(INTERFACE))?;
        let store = id.connect(Deadline::after(PATIENCE))?;
        Ok(Board { id, store, _server: server })
    }

    /// The unique id in hexadecimal.
    pub(super) fn id(&self) -> String {
        self.id.to_hex()
    }

    /// Tells the ranks how one of them ended, for their errors to name it.
    pub(super) fn publish(&self, rank: usize, cause: &str) {
        // Without it their errors say less; the launcher's own still says all.
        if let Err(error) =
            self.store.set(&format!("exit/{rank}"), cause.as_bytes(), Deadline::after(PATIENCE))
        {
            log::warn!("cannot publish the end of rank {rank}: {error}");
        }
    }
}
