//! Makes an endpoint out of a store: publish, find a few neighbours, learn everybody's address over links.
//!
//! Each rank writes its own address to the store and reads those of at most log₂ n others; the whole table
//! then goes round by Bruck's allgather over authenticated links, in ⌈log₂ n⌉ rounds. Nobody opens a full
//! mesh. A rank that cannot join, or finds that another has died, leaves a notice in the store, for those who
//! wait.

mod arrival;
mod notice;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use self::arrival::Arrival;
use self::notice::{GRACE, Notice};
use super::endpoint::{Endpoint, Through};
use super::lane::{Destination, Source, Ticket};
use super::messages::Failure;
use super::wire::{Class, Key};
use crate::deadline::Deadline;
use crate::error::{Error, Result, Status, fail};
use crate::reduce::DataType;
use crate::rendezvous::secret::SecretKey;
use crate::rendezvous::store::Store;
use crate::signature::Kind;
use crate::signature::Signature;
use crate::sys::process;
use crate::transport::address::PeerAddress;
use crate::transport::service::{Identity, Options};

/// Bytes of one rank's record in the table: a length and an encoded address, with the longest name of a host
/// and one listener.
pub(super) const RECORD_BYTES: usize = 352;

/// The most ranks of a job.
pub const MAX_RANKS: u32 = 1 << 16;

/// How long a rank that has lost the store waits for what calls its meeting off: a death is seen by one
/// connection after the other.
const CAUSE: Duration = Duration::from_secs(1);

/// Who wants to meet.
pub struct Meeting<'a> {
    /// This rank.
    pub rank: u32,
    /// How many ranks.
    pub size: u32,
    /// The context's name: contexts of one store are told apart by it, and by how often it was used.
    pub name: &'a str,
    /// Where they meet.
    pub store: &'a dyn Store,
    /// The job's secret, if it is known without the store.
    pub secret: Option<SecretKey>,
    /// How to link; why this rank cannot, which the others are to hear.
    pub options: Result<Options>,
    /// When to give up.
    pub deadline: Deadline,
    /// Why the meeting was called off, where it can be: then also waits of a store without turns are cut into
    /// such.
    pub recalled: Option<&'a dyn Fn() -> Option<Error>>,
    /// Whether what calls it off may be known only after what follows from it, such as that the store is
    /// lost.
    pub tied: bool,
    /// Whether ranks meet by that name only once.
    pub once: bool,
}

/// Meets the other ranks. The endpoint knows everybody's address when this returns, and all ranks have
/// arrived. Gives the endpoint and the number that tells this job from every other.
pub fn meet(meeting: Meeting<'_>) -> Result<(Arc<Endpoint>, u64)> {
    let arrived = Arrival::new(&meeting);
    let Meeting { rank, size, name, store, secret, options, deadline, recalled, tied, .. } = meeting;
    let recalled = recalled.filter(|_| tied);
    let Arrival { prefix, notice, fits } = arrived.map_err(|error| cause(error, store, recalled))?;
    // Who has failed says so before its links tell that it has gone.
    let mut endpoint = None;
    let joined = (|| {
        // Who cannot join at all says why. Others may wait for the secret of rank 0 before they can hear
        // anything.
        let fits = if options.is_ok() { fits } else { Ok(()) };
        if rank > 0 {
            fits.clone()?;
        }
        let secret = match secret {
            Some(secret) => secret,
            None => share_secret(rank, &notice, &prefix, deadline).map_err(|error| {
                let does = if rank == 0 { "cannot" } else { "waits for rank 0 to" };
                error.context(format_args!("rank {rank} of {size} {does} join '{name}'"))
            })?,
        };
        fits?;
        let digest = secret.tag(&[b"unisono job", prefix.as_bytes()]);
        let job = u64::from_le_bytes(std::array::from_fn(|i| digest[i]));
        let made = options.and_then(|options| Endpoint::new(Identity { rank, size, secret, job }, options));
        let endpoint = endpoint.insert(made.map_err(|error| {
            let (host, pid) = (process::hostname(), std::process::id());
            // The others are told it as it is.
            error.context(format_args!("rank {rank} of {size} (host {host}, pid {pid}) cannot join '{name}'"))
        })?);
        join(endpoint, &prefix, name, &notice, deadline)?;
        Ok((endpoint.clone(), job))
    })();
    joined.map_err(|error| {
        let error = notice.leave(cause(error, store, recalled));
        match &endpoint {
            // Those that are linked may have no store any more.
            Some(endpoint) => endpoint.warn(endpoint.identity().0.job, &notice.cause(&error)),
            // Who waits for this rank's address, in whatever store, need not do so until its deadline.
            None => {
                let _ = store.set(&arrival::place(&prefix, rank), &[], Deadline::after(GRACE));
            }
        }
        error
    })
}

/// Why a rank has failed with `error`: if that is since the store is lost, it may follow from what calls the
/// meeting off.
fn cause(error: Error, store: &dyn Store, recalled: Option<&dyn Fn() -> Option<Error>>) -> Error {
    let Some(recalled) = recalled.filter(|_| error.status() == Status::PeerFailed) else { return error };
    let answer = store.try_get("", Deadline::after(GRACE));
    if !answer.is_err_and(|lost| lost.status() == Status::PeerFailed) {
        return error;
    }
    let until = Deadline::after(CAUSE);
    loop {
        if let Some(why) = recalled() {
            return why;
        }
        if until.expired() {
            return error;
        }
        thread::sleep(until.remaining_capped(Duration::from_millis(5)));
    }
}

/// Learns where everybody is, and waits until all know.
fn join(
    endpoint: &Endpoint,
    prefix: &str,
    name: &str,
    notice: &Notice<'_>,
    deadline: Deadline,
) -> Result<()> {
    let (began, store) = (Instant::now(), notice.store());
    let &Identity { rank, size, job, .. } = endpoint.identity().0;
    let own = endpoint.registration().address().clone();
    store.set(&arrival::place(prefix, rank), &own.encode(), deadline)?;
    let mut table = vec![0; RECORD_BYTES * size as usize];
    record(&own, &mut table[..RECORD_BYTES])?;
    endpoint.learn(own);

    let failed = |error: &Error, from: u32| {
        let text = match error.status() {
            Status::Timeout => format!(
                "rank {rank} of {size} waits for rank {from}, or for one behind it, to join '{name}' through the {}; it has not{}",
                store.describe(),
                notice.silence()
            ),
            _ => format!("rank {rank} of {size} joins '{name}': {}", error.text()),
        };
        Error::new(error.status(), endpoint.with_refusal(text, began.elapsed()))
    };
    // Blocks lie in the order rank, rank + 1, …: each round doubles how many of them are known here.
    let mut known = 1;
    while known < size {
        let count = known.min(size - known);
        let to = (rank + size - known) % size;
        let from = (rank + known) % size;
        find(endpoint, notice, prefix, to, deadline).map_err(|error| {
            error.context(format_args!("rank {rank} of {size} waits for rank {to} to join '{name}'"))
        })?;
        let (have, missing) = table.split_at_mut(known as usize * RECORD_BYTES);
        let bytes = count as usize * RECORD_BYTES;
        let key = Key { group: job, tag: 0, sequence: known, slot: 0, class: Class::Internal };
        let (have, missing) = (&have[..bytes], &mut missing[..bytes]);
        exchange(endpoint, key, (to, have), (from, missing), notice, deadline)
            .map_err(|error| failed(&error, from))?;
        known += count;
    }
    let mut distance = 1;
    while distance < size {
        let (to, from) = ((rank + size - distance) % size, (rank + distance) % size);
        let key = Key { group: job, tag: 1, sequence: distance, slot: 0, class: Class::Internal };
        exchange(endpoint, key, (to, &[0]), (from, &mut [0]), notice, deadline)
            .map_err(|error| failed(&error, from))?;
        distance *= 2;
    }
    for (index, bytes) in table.chunks_exact(RECORD_BYTES).enumerate() {
        let peer = (rank + index as u32) % size;
        let address = read_record(bytes)?;
        if address.rank != peer {
            fail!(Internal, "the table of addresses names rank {} where rank {peer} belongs", address.rank);
        }
        endpoint.learn(address);
    }
    endpoint.share_processors();
    Ok(())
}

fn share_secret(rank: u32, notice: &Notice<'_>, prefix: &str, deadline: Deadline) -> Result<SecretKey> {
    let (key, store) = (format!("{prefix}/secret"), notice.store());
    if rank == 0 {
        let secret = SecretKey::random()?;
        store.set(&key, secret.expose(), deadline)?;
        return Ok(secret);
    }
    let bytes = notice.get(&key, None, deadline)?;
    match <[u8; 32]>::try_from(bytes.as_slice()) {
        Ok(bytes) => Ok(SecretKey::new(bytes)),
        Err(_) => fail!(
            InvalidUsage,
            "the {} holds something else than a secret under '{key}': is it used by another program?",
            store.describe()
        ),
    }
}

/// Learns where `peer` is, unless it is known.
fn find(endpoint: &Endpoint, notice: &Notice<'_>, prefix: &str, peer: u32, deadline: Deadline) -> Result<()> {
    if endpoint.messages().linked(peer) {
        return Ok(());
    }
    let bytes = notice.get(&arrival::place(prefix, peer), Some(endpoint), deadline)?;
    if bytes.is_empty() {
        let unknown = || Error::new(Status::PeerFailed, format!("rank {peer} cannot join"));
        return Err(notice.told().unwrap_or_else(unknown));
    }
    let address = PeerAddress::decode(&bytes)?;
    if address.rank != peer {
        let store = notice.store().describe();
        fail!(InvalidUsage, "the {store} gives rank {} for rank {peer}", address.rank);
    }
    endpoint.learn(address);
    Ok(())
}

/// Sends to one rank and receives from one, waiting for both.
fn exchange(
    endpoint: &Endpoint,
    key: Key,
    (to, send): (u32, &[u8]),
    (from, receive): (u32, &mut [u8]),
    notice: &Notice<'_>,
    deadline: Deadline,
) -> Result<()> {
    let signature = Signature {
        kind: Kind::Allgather,
        dtype: DataType::U8,
        operator: 0,
        algorithm: 0,
        root: 0,
        count: send.len() as u64,
        device: false,
    };
    let mut messages = endpoint.messages();
    let mailbox = messages.mailbox();
    let into = Destination { address: receive.as_mut_ptr(), len: receive.len() };
    messages.receive(from, key, signature, into, Ticket { mailbox, step: 0 });
    let source = Source { address: send.as_ptr(), len: send.len() };
    messages.send(to, key, signature, source, Ticket { mailbox, step: 1 });
    messages.write_out();
    drop(messages);
    endpoint.settle();
    let look = || {
        let mut messages = endpoint.messages();
        let mail = messages.look(mailbox);
        match mail.failed.take() {
            Some(Failure::Error(error) | Failure::Lost(_, error)) => Some(Err(error)),
            Some(Failure::Peer { peer, status, what }) => {
                Some(Err(Error::new(status, format!("rank {peer} {what}"))))
            }
            Some(Failure::Mismatch(mismatch)) => {
                let what = "the ranks' calls differ: are two jobs of one name in one store?";
                Some(Err(Error::new(Status::Mismatch, format!("rank {}: {what}", mismatch.peer))))
            }
            None => (mail.done.len() == 2).then_some(Ok(())),
        }
    };
    let mut look = || match look() {
        None => notice.is_disturbed(endpoint).then_some(None),
        answer => Some(answer),
    };
    let answer = notice.watch(Some(endpoint), deadline, |until| {
        endpoint.wait(until, Through::Messages, &mut look).flatten()
    });
    let result = answer.unwrap_or_else(|| Err(Error::new(Status::Timeout, "")));
    let result = result.map_err(|error| notice.overtaken(Some(endpoint), error));
    let mut messages = endpoint.messages();
    match result {
        Ok(()) => messages.close_mailbox(mailbox),
        Err(_) => {
            messages.cancel(mailbox);
        }
    }
    result
}

pub(super) fn record(address: &PeerAddress, into: &mut [u8]) -> Result<()> {
    let mut address = address.clone();
    let mut bytes = address.encode();
    while bytes.len() > RECORD_BYTES - 2 && address.addresses.len() > 1 {
        address.addresses.pop();
        bytes = address.encode();
    }
    if bytes.len() > RECORD_BYTES - 2 {
        fail!(Internal, "an address of {} bytes does not fit its record", bytes.len());
    }
    into[..2].copy_from_slice(&(bytes.len() as u16).to_le_bytes());
    into[2..2 + bytes.len()].copy_from_slice(&bytes);
    Ok(())
}

pub(super) fn read_record(bytes: &[u8]) -> Result<PeerAddress> {
    let len = usize::from(u16::from_le_bytes([bytes[0], bytes[1]]));
    match bytes.get(2..2 + len) {
        Some(bytes) => PeerAddress::decode(bytes),
        None => fail!(Internal, "a record of the table of addresses is broken"),
    }
}

#[cfg(test)]
mod tests;
