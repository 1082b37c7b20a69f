//! How the ranks of a group come to exchange through their GPUs, or agree that they cannot.
//!
//! Three rounds, in each of which every rank hears a message from every other. First they tell where their arenas lie;
//! each maps those of the others, and writes into them. Then they tell whether that went well; each looks whether what
//! the others wrote has arrived, reads from them, and loads its kernels. Then they tell that. A rank that cannot go on
//! says why and still takes part in the round, so that all come to the same answer at the same point.
//!
//! The rounds themselves are the caller's, who may be setting up many groups at once: see [`Step`].

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::{Way, Load};
use super::board::{BOARD_BYTES, Boards, MAX_MEMBERS};
use super::exchange::DeviceExchange;
use super::retired::Parts;
use super::offer::{Message, Offer};
use super::probe::{PROBE_BYTES, Probe};
use crate::cuda::context::Devices;
use crate::cuda::event::Event;
use crate::cuda::exchange::{self, Fault};
use crate::cuda::slab::{self, Arena, Opened};
use crate::cuda::stream::Stream;
use crate::deadline::Deadline;
use crate::engine::group::Group;
use crate::error::{Error, Result, fail};
use crate::sys::fork;
use crate::transport::memory::PeerMemory;
use crate::transport::segment::Region;

pub use super::offer::MESSAGE_BYTES;

/// What comes next.
pub enum Step {
    /// Gather these bytes of every rank, in rank order, and give them to [`Setup::next`].
    Gather([u8; MESSAGE_BYTES]),
    /// It is over; the group knows it.
    Agreed(Way),
}

/// One group's setup under way.
pub struct Setup {
    group: Arc<Group>,
    load: Load,
    deadline: Deadline,
    stage: Stage,
}

/// What this rank has. `None`: it has said that it cannot.
enum Stage {
    /// The offers are on their way.
    Offered(Option<Own>),
    /// The others' arenas are mapped and written to.
    Mapped(Option<(Rest, Mapped)>),
    /// They were read; the exchange is built.
    Proved(Option<DeviceExchange>),
    Over,
}

/// What this rank brings.
struct Own {
    devices: Arc<Devices>,
    device: u32,
    arena: Arena,
    board: Region,
    fault: Arc<Fault>,
    probe: Probe,
}

/// What is left to do when the arenas are mapped.
struct Rest {
    devices: Arc<Devices>,
    device: u32,
    arena: Arena,
    fault: Arc<Fault>,
    probe: Probe,
}

/// The members' arenas.
struct Mapped {
    /// As this rank's GPU reaches them.
    arenas: Vec<u64>,
    /// Their areas for the proof, each with the device that it is reached as.
    areas: Vec<(u64, u32)>,
    opened: Vec<Arc<Opened>>,
    boards: Boards,
}

impl Setup {
    /// Begins on this rank's GPU; `devices`: the driver, or why there is none. Allocates: may wait for the GPU.
    pub fn begin(
        group: &Arc<Group>,
        devices: Result<Arc<Devices>>,
        device: u32,
        load: Load,
    ) -> (Setup, Step) {
        let deadline = Deadline::after(group.timeout());
        let mut setup = Setup { group: group.clone(), load, deadline, stage: Stage::Over };
        // What all ranks know without a word.
        if group.direct().is_none() {
            let why = "the ranks are not all on one host, or share no memory there";
            let step = setup.agree(Way::Staged(why.into()));
            return (setup, step);
        }
        let (size, most) = (group.size() as usize, MAX_MEMBERS.min(exchange::MAX_RANKS));
        if size > most {
            let why = format!("{size} ranks are more than the {most} whose GPUs exchange");
            let step = setup.agree(Way::Staged(why));
            return (setup, step);
        }
        let offered = wanted().and(devices).and_then(|devices| Own::new(group, devices, device, deadline));
        let offered = offered.and_then(|own| own.offer().map(|offer| (own, offer)));
        let (own, message) = match offered {
            Ok((own, offer)) => (Some(own), Message::Offer(offer)),
            Err(error) => (None, refusal(&error)),
        };
        setup.stage = Stage::Offered(own);
        (setup, Step::Gather(message.encode()))
    }

    /// Goes on with what the round has gathered. May wait for the GPU.
    pub fn next(&mut self, gathered: &[u8]) -> Result<Step> {
        let messages: Vec<Message> =
            gathered.chunks_exact(MESSAGE_BYTES).map(Message::decode).collect::<Result<_>>()?;
        if messages.len() != self.group.size() as usize {
            fail!(Internal, "{} messages came from {} ranks", messages.len(), self.group.size());
        }
        let stage = std::mem::replace(&mut self.stage, Stage::Over);
        if let Some(why) = self.refused(&messages) {
            if messages.iter().any(|message| matches!(message, Message::Refusal { stuck: true, .. }))
                && let Stage::Mapped(Some((rest, _))) = stage
            {
                // Somebody's GPU may still write here.
                std::mem::forget(rest.arena);
            }
            return Ok(self.agree(Way::Staged(why)));
        }
        let message = match stage {
            Stage::Offered(own) => {
                let offers = messages.iter().map(|message| match message {
                    Message::Offer(offer) => Ok(offer),
                    _ => fail!(Internal, "a rank sent something else than an offer"),
                });
                let offers: Vec<&Offer> = offers.collect::<Result<_>>()?;
                if let Some(why) = unfit(&offers) {
                    return Ok(self.agree(Way::Staged(why)));
                }
                // PROOF: a rank without has refused.
                let Some(own) = own else { fail!(Internal, "this rank has made no offer") };
                let (mapped, message) = match own.map(&self.group, &offers) {
                    Ok((rest, mapped)) => match rest.probe.write(&mapped.areas, self.deadline) {
                        Ok(()) => (Some((rest, mapped)), Message::Ready),
                        Err(error) => {
                            // The stream may still be at it.
                            std::mem::forget((rest, mapped));
                            (None, Message::Refusal { why: error.to_string(), stuck: true })
                        }
                    },
                    Err(error) => (None, refusal(&error)),
                };
                self.stage = Stage::Mapped(mapped);
                message
            }
            Stage::Mapped(mapped) => {
                let Some((rest, mapped)) = mapped else { fail!(Internal, "this rank has mapped nothing") };
                let (exchange, message) = match rest.probe.read(&mapped.areas, self.deadline) {
                    Ok(()) => match self.build(rest, mapped) {
                        Ok(exchange) => (Some(exchange), Message::Ready),
                        Err(error) => (None, refusal(&error)),
                    },
                    Err(error) => {
                        std::mem::forget((rest, mapped));
                        (None, refusal(&error))
                    }
                };
                self.stage = Stage::Proved(exchange);
                message
            }
            Stage::Proved(Some(exchange)) => return Ok(self.agree(Way::Exchange(Arc::new(exchange)))),
            Stage::Proved(None) | Stage::Over => fail!(Internal, "this setup is over"),
        };
        Ok(Step::Gather(message.encode()))
    }

    fn build(&self, rest: Rest, mapped: Mapped) -> Result<DeviceExchange> {
        let Rest { devices, device, arena, fault, .. } = rest;
        let Mapped { arenas, opened, boards, .. } = mapped;
        let kernels = (self.load)(&devices, device, self.group.rank(), &arenas, fault.clone())?;
        let event = || Event::new(&devices, device);
        Ok(DeviceExchange::new(Parts {
            last: event()?,
            within: event()?,
            stream: Stream::new(&devices, device, true)?,
            kernels,
            fault,
            arena,
            opened,
            boards,
            said_goodbye: AtomicBool::new(false),
            fork: fork::generation(),
        }))
    }

    /// Why some rank cannot, if one cannot. The same on all ranks, which have heard the same.
    fn refused(&self, messages: &[Message]) -> Option<String> {
        messages.iter().enumerate().find_map(|(rank, message)| match message {
            Message::Refusal { why, .. } => Some(format!("{}: {why}", self.group.describe_rank(rank as u32))),
            _ => None,
        })
    }

    fn agree(&self, way: Way) -> Step {
        let name = self.group.name();
        match &way {
            Way::Exchange(_) => log::info!("group '{name}': the GPUs exchange directly"),
            Way::Staged(why) => {
                log::info!("group '{name}': device memory goes through the host, because of {why}");
            }
        }
        self.group.link_devices(way.clone());
        Step::Agreed(way)
    }
}

impl Drop for Setup {
    fn drop(&mut self) {
        // Given up in between: the others may still write to what they were offered.
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Offered(Some(own)) => std::mem::forget(own.arena),
            Stage::Mapped(Some((rest, _))) => std::mem::forget(rest.arena),
            Stage::Offered(None) | Stage::Mapped(None) | Stage::Proved(_) | Stage::Over => {}
        }
    }
}

/// Whether the environment allows it.
fn wanted() -> Result<()> {
    match std::env::var("UNISONO_P2P").as_deref() {
        Err(_) | Ok("1" | "") => Ok(()),
        Ok("0") => fail!(Unsupported, "UNISONO_P2P=0 switches it off"),
        Ok(text) => fail!(InvalidArgument, "UNISONO_P2P={text}: use 0 or 1"),
    }
}

fn refusal(error: &Error) -> Message {
    Message::Refusal { why: error.text().to_string(), stuck: false }
}

/// Why these offers do not fit each other, if they do not.
fn unfit(offers: &[&Offer]) -> Option<String> {
    for (rank, offer) in offers.iter().enumerate() {
        let same = |other: &&Offer| (other.process, other.device) == (offer.process, offer.device);
        if let Some(other) = offers[..rank].iter().position(same) {
            let device = offer.device;
            // Kernels that wait for each other must never queue behind each other.
            return Some(format!("ranks {other} and {rank} are one process on one GPU ({device})"));
        }
        if offer.bytes != offers[0].bytes {
            return Some(format!("rank {rank} and rank 0 run different versions of unisono"));
        }
    }
    None
}

impl Own {
    fn new(group: &Group, devices: Arc<Devices>, device: u32, deadline: Deadline) -> Result<Own> {
        devices.context(device)?;
        let bytes = exchange::arena_bytes(group.size()).next_multiple_of(64);
        let arena = Arena::new(&devices, device, bytes + PROBE_BYTES, deadline)?;
        let Some(board) = group.endpoint().registration().segment().allocate(BOARD_BYTES, 64) else {
            fail!(OutOfMemory, "no room for {BOARD_BYTES} bytes in the shared segment")
        };
        let fault = Arc::new(Fault::new(&devices, device)?);
        let area = arena.address() + bytes as u64;
        let probe = Probe::new(&devices, device, area, group.rank() as usize, group.id(), deadline)?;
        Ok(Own { devices, device, arena, board, fault, probe })
    }

    fn offer(&self) -> Result<Offer> {
        let place = self.arena.place(&self.devices);
        if let Err(error) = &place {
            log::debug!("GPU {} shares no memory with other processes: {error}", self.device);
        }
        Ok(Offer {
            uuid: self.devices.driver().device_uuid(self.device)?,
            device: self.device,
            process: slab::identity(&self.devices),
            address: self.arena.address(),
            bytes: self.arena.bytes() as u64,
            board: self.board.offset() as u64,
            place: place.ok(),
        })
    }
}

impl Own {
    /// Maps the others' arenas.
    fn map(self, group: &Group, offers: &[&Offer]) -> Result<(Rest, Mapped)> {
        let Own { devices, device, arena, board, fault, probe } = self;
        let rank = group.rank() as usize;
        let before_area = (arena.bytes() - PROBE_BYTES) as u64;
        let (mut arenas, mut areas, mut opened) = (Vec::new(), Vec::new(), Vec::new());
        for (member, offer) in offers.iter().enumerate() {
            let (address, owner) = if member == rank {
                (arena.address(), device)
            } else if offer.process == slab::identity(&devices) {
                if !devices.reaches(device, offer.device)? {
                    fail!(Unsupported, "GPU {device} does not reach GPU {}, rank {member}'s", offer.device);
                }
                (offer.address, offer.device)
            } else {
                (map_slab(&devices, device, member, offer, &mut opened)?, device)
            };
            arenas.push(address);
            areas.push((address + before_area, owner));
        }
        let peers: Vec<Option<Arc<PeerMemory>>> = {
            let messages = group.endpoint().messages();
            group.members().iter().map(|&peer| messages.memory(peer).cloned()).collect()
        };
        let offsets: Vec<u64> = offers.iter().map(|offer| offer.board).collect();
        let Some(boards) = Boards::new(rank, board, peers, &offsets) else {
            fail!(Internal, "a member's board lies outside of its segment")
        };
        let rest = Rest { devices, device, arena, fault, probe };
        Ok((rest, Mapped { arenas, areas, opened, boards }))
    }
}

/// Where the arena of a rank in another process is mapped for `device`.
fn map_slab(
    devices: &Arc<Devices>,
    device: u32,
    member: usize,
    offer: &Offer,
    opened: &mut Vec<Arc<Opened>>,
) -> Result<u64> {
    let Some(place) = &offer.place else {
        fail!(Unsupported, "rank {member}'s GPU shares no memory with other processes")
    };
    // A GPU that this process sees can be asked about; another one may still be reached.
    for ordinal in 0..devices.count() {
        let theirs = devices.driver().device_uuid(ordinal)? == offer.uuid;
        if theirs && ordinal != device && !devices.driver().can_access_peer(device, ordinal)? {
            fail!(Unsupported, "GPU {device} does not reach GPU {ordinal}, rank {member}'s");
        }
    }
    let slab = Opened::new(devices, device, place)
        .map_err(|error| error.context(format_args!("rank {member}'s memory")))?;
    let address = slab.address(place);
    opened.push(slab);
    Ok(address)
}
