//! How the ranks of a group come to exchange through their GPUs, or agree that they cannot.
//!
//! Three rounds, in each of which every rank hears a message from every other. First they tell where their
//! arenas lie; each maps those of the others on its host, and writes into them. Then they tell whether that
//! went well; each looks whether what the others wrote has arrived, reads from them, and loads its kernels.
//! Then they tell that. A rank that cannot go on says why and still takes part in the round, so that all come
//! to the same answer at the same point. If that is no, there is one round more, when each has freed what it
//! brought: see [`Stage::Refused`].
//!
//! The rounds themselves are the caller's, who may be setting up many groups at once: see [`Step`].

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, Weak};

use once_cell::sync::OnceCell;

use super::board::{self, BOARD_BYTES, Boards, MAX_MEMBERS};
use super::exchange::{DeviceExchange, OneSided, mixes_by_default};
use super::hosts::{Hosts, Layout, Means, WORKSPACE_BYTES};
use super::offer::{Message, Offer};
use super::probe::{PROBE_BYTES, Probe};
use super::retired::{Astray, Parts, Room};
use super::{Kernels, Loads, Way};
use crate::cuda::context::{Devices, apart_by};
use crate::cuda::driver::{Priority, least_limit};
use crate::cuda::event::Event;
use crate::cuda::exchange::{self, Chosen, Fault, Table};
use crate::cuda::slab::{self, Arena, Opened};
use crate::cuda::stream::Stream;
use crate::deadline::Deadline;
use crate::engine::group::{Group, Turn};
use crate::error::{Error, Result, Status, fail};
use crate::sys::fork;
use crate::transport::memory::PeerMemory;
use crate::transport::segment::Region;

pub use super::offer::MESSAGE_BYTES;

/// The parts of an arena begin at multiples of this many bytes.
const ALIGNMENT: usize = 4096;

/// What comes next.
#[allow(clippy::large_enum_variant)] // One of them, for a moment.
pub enum Step {
    /// Gather these bytes of every rank, in rank order, and give them to [`Setup::next`].
    Gather([u8; MESSAGE_BYTES]),
    /// It is over; the group knows it.
    Agreed(Way),
}

/// What a setup comes before.
#[derive(Clone, Copy)]
pub struct Occasion<'a> {
    /// The group's first call on device memory, announced; none: before all calls.
    pub first: Option<&'a Turn>,
    /// Whether sends and receives go this way in that case, the same on all ranks.
    pub points: bool,
}

/// One group's setup under way.
pub struct Setup {
    group: Arc<Group>,
    /// This rank exchanges with those of its host.
    layout: Layout,
    loads: Loads,
    deadline: Deadline,
    /// Whether sends and receives go this way, if it comes before all calls.
    points: bool,
    stage: Stage,
}

/// How far it is. What this rank has offered stays until all have heard that it is not used: also when this
/// rank itself has said that it cannot go on.
enum Stage {
    /// The offers are on their way; none: this rank makes none.
    Offered(Option<Own>),
    /// The others' arenas are mapped and written to, if they could be.
    Mapped(Own, Option<Mapped>),
    /// They were read; what the exchange consists of, if it could be made.
    Proved(Own, Mapped, Option<Box<Made>>),
    /// They will not exchange, for this reason, and this rank has freed what it brought. It makes no call
    /// before all have: a free may wait for this process's streams, and one of them for such a call, in which
    /// the rank that frees is needed.
    Refused(String),
    Over,
}

/// What this rank brings.
struct Own {
    devices: Arc<Devices>,
    device: u32,
    chosen: Chosen,
    arena: Arena,
    /// Where calls between hosts work in it, if there are several.
    workspace: u64,
    board: Region,
    fault: Arc<Fault>,
    /// Until the proof is done.
    probe: Option<Probe>,
}

/// The members' arenas.
struct Mapped {
    /// As this rank's GPU reaches them.
    arenas: Vec<u64>,
    /// Their areas for the proof, each with the device that it is reached as.
    areas: Vec<(u64, u32)>,
    opened: Vec<Arc<Opened>>,
    /// The others' memory, and where their boards lie in it.
    peers: Vec<Option<Arc<PeerMemory>>>,
    boards: Vec<u64>,
    /// Whether all set this up before their first call.
    before_calls: bool,
    room: Room,
    /// Whether wide lines arrive whole in all of them.
    whole_lines: bool,
}

/// What calls need.
struct Made {
    kernels: Box<dyn Kernels>,
    last: Event,
    mark: Event,
    within: Event,
    replayed: Event,
    astray: Astray,
    one_sided: OneSided,
    stream: Stream,
    /// Where there are several hosts.
    urgent: OnceCell<Stream>,
    means: Option<Means>,
}

impl Setup {
    /// Begins on this rank's GPU; `devices`: the driver, or why there is none; `choose`: the table for the
    /// device; `max_blocks`: what this rank's caller allows its kernels, 0 for as many as suit them.
    /// Allocates: may wait for the GPU.
    pub fn begin(
        group: &Arc<Group>,
        devices: Result<Arc<Devices>>,
        device: u32,
        choose: impl FnOnce(&Devices, u32) -> Result<Chosen>,
        loads: Loads,
        occasion: Occasion<'_>,
        max_blocks: u32,
    ) -> (Setup, Step) {
        let deadline = Deadline::after(group.timeout());
        let layout = group.layout();
        let stage = Stage::Over;
        let mut setup = Setup {
            group: group.clone(),
            layout: layout.unwrap_or_default(),
            loads,
            deadline,
            points: occasion.points,
            stage,
        };
        // What all ranks know without a word.
        let Some(layout) = layout else {
            let why =
                "the ranks share no memory on their host, or have no equal blocks of numbers on several";
            let step = setup.agree(Way::Staged(why.into()));
            return (setup, step);
        };
        let (size, most) = (layout.inside as usize, MAX_MEMBERS.min(exchange::MAX_RANKS));
        if size > most {
            let why = format!("{size} ranks on a host are more than the {most} whose GPUs exchange");
            let step = setup.agree(Way::Staged(why));
            return (setup, step);
        }
        let chosen = wanted().and(devices).and_then(|devices| Ok((choose(&devices, device)?, devices)));
        let offered =
            chosen.and_then(|(chosen, devices)| Own::new(group, layout, devices, device, chosen, deadline));
        let offered = offered.and_then(|own| own.offer(occasion.first, max_blocks).map(|offer| (own, offer)));
        let (own, message) = match offered {
            Ok((own, offer)) => (Some(own), Message::Offer(offer)),
            Err(error) if error.status() == Status::InvalidArgument => {
                (None, Message::Wrong(error.text().to_string()))
            }
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
        for (rank, message) in messages.iter().enumerate() {
            if let Message::Wrong(why) = message {
                // Only ever said before anybody has mapped anything.
                self.stage = Stage::Over;
                fail!(InvalidArgument, "{}: {why}", self.group.describe_rank(rank as u32));
            }
        }
        let stage = std::mem::replace(&mut self.stage, Stage::Over);
        if let Stage::Refused(why) = stage {
            return Ok(self.agree(Way::Staged(why)));
        }
        if let Some(why) = self.refused(&messages) {
            let stuck =
                messages.iter().any(|message| matches!(message, Message::Refusal { stuck: true, .. }));
            match stage {
                // Somebody's GPU may still write here, or this one there.
                Stage::Mapped(own, mapped) if stuck => std::mem::forget((own.arena, own.probe, mapped)),
                stage => drop(stage),
            }
            return Ok(self.refuse(why));
        }
        match stage {
            Stage::Offered(Some(own)) => self.offered(own, &messages),
            Stage::Mapped(own, Some(mapped)) => self.mapped(own, mapped, &messages),
            Stage::Proved(own, mapped, Some(made)) => {
                let way = self.way(own, mapped, *made)?;
                Ok(self.agree(way))
            }
            // A rank that lacks something has refused.
            _ => fail!(Internal, "this setup is over"),
        }
    }

    /// All have offered their arenas: maps those of the others, and writes into them.
    fn offered(&mut self, own: Own, messages: &[Message]) -> Result<Step> {
        let offers = messages.iter().map(|message| match message {
            Message::Offer(offer) => Ok(offer),
            _ => fail!(Internal, "a rank sent something else than an offer"),
        });
        let offers: Vec<&Offer> = offers.collect::<Result<_>>()?;
        self.compare_tables(&offers)?;
        if let Some(error) = self.differing(&offers) {
            self.group.fail(error.clone());
            return Err(error);
        }
        if let Some(why) = unfit(&offers, self.layout) {
            drop(own);
            return Ok(self.refuse(why));
        }
        let (mapped, message) = match own.map(&self.group, self.layout, &offers) {
            Ok(mapped) => {
                let written = own.probe()?.write(&mapped.areas, self.deadline);
                let message = match written {
                    Ok(()) => Message::Ready { whole_lines: mapped.whole_lines },
                    Err(error) => Message::Refusal { why: error.to_string(), stuck: true },
                };
                (Some(mapped), message)
            }
            Err(error) => (None, refusal(&error)),
        };
        self.stage = Stage::Mapped(own, mapped);
        Ok(Step::Gather(message.encode()))
    }

    /// All have written into the others' arenas: looks whether what they wrote has arrived here, and makes
    /// what calls need.
    fn mapped(&mut self, mut own: Own, mapped: Mapped, messages: &[Message]) -> Result<Step> {
        let read = own.probe()?.read(&mapped.areas, self.deadline);
        let whole_lines = messages.iter().all(|message| *message == Message::Ready { whole_lines: true });
        let (made, message) = match read.and_then(|()| self.make(&own, &mapped, whole_lines)) {
            Ok(made) => {
                // Now: freeing may wait for the GPUs of this process, and when all are ready their kernels
                // for this rank's.
                own.probe = None;
                (Some(Box::new(made)), Message::Ready { whole_lines })
            }
            Err(error) => (None, refusal(&error)),
        };
        self.stage = Stage::Proved(own, mapped, made);
        Ok(Step::Gather(message.encode()))
    }

    /// Makes what may fail. `whole_lines`: all GPUs store wide lines so.
    fn make(&self, own: &Own, mapped: &Mapped, whole_lines: bool) -> Result<Made> {
        let Own { devices, device, chosen, workspace, fault, .. } = own;
        let (rank, arenas) = (self.layout.place(), &mapped.arenas);
        let table = match whole_lines {
            true => chosen.table,
            false => {
                let name = self.group.name();
                log::info!(
                    "group '{name}': not all GPUs are linked by NVLink, so they exchange without wide lines"
                );
                chosen.table.without_wide_lines()
            }
        };
        let kernels = (self.loads.exchange)(devices, *device, rank, arenas, fault.clone(), table)?;
        let event = || Event::new(devices, *device);
        let across = self.layout.hosts > 1;
        let urgent = match across || mapped.room.one_process {
            true => OnceCell::with_value(Stream::with_priority(devices, *device, false, Priority::Highest)?),
            false => OnceCell::new(),
        };
        let means = across.then(|| Means::new(devices, *device, &(self.loads.fold)(devices), *workspace));
        let means = means.transpose()?;
        let stream = Stream::new(devices, *device, true)?;
        Ok(Made {
            kernels,
            last: event()?,
            mark: event()?,
            within: event()?,
            replayed: event()?,
            astray: Astray::new(devices, *device)?,
            one_sided: OneSided::new(devices, *device)?,
            stream,
            urgent,
            means,
        })
    }

    fn way(&self, own: Own, mapped: Mapped, made: Made) -> Result<Way> {
        let Made { kernels, last, mark, within, replayed, astray, one_sided, stream, urgent, means } = made;
        let rank = self.layout.place() as usize;
        let Some(boards) = Boards::new(rank, own.board, mapped.peers, &mapped.boards) else {
            fail!(Internal, "a member's board lies outside of its segment")
        };
        let layout = self.layout;
        let exchange = Arc::new(DeviceExchange::new(Parts {
            first: layout.first(),
            last,
            mark,
            within,
            replayed,
            astray,
            one_sided,
            stream,
            urgent,
            kernels,
            points: self.points && mapped.before_calls,
            room: mapped.room,
            windows: Mutex::default(),
            fault: own.fault,
            arena: own.arena,
            _opened: mapped.opened,
            boards,
            said_goodbye: AtomicBool::new(false),
            fork: fork::generation(),
            life: Arc::default(),
        }));
        let known: Weak<DeviceExchange> = Arc::downgrade(&exchange);
        exchange.devices().note_exchange(known);
        Ok(match means {
            None => Way::Exchange(exchange),
            Some(means) => Way::Hosts(Arc::new(Hosts::new(exchange, layout, means))),
        })
    }

    /// Refuses tables that somebody has chosen differently: kernels that go by different tables would wait
    /// for each other.
    fn compare_tables(&self, offers: &[&Offer]) -> Result<()> {
        if !offers.iter().any(|offer| offer.chosen) {
            return Ok(());
        }
        if let Some(other) = offers.iter().position(|offer| offer.table != offers[0].table) {
            let what = |offer: &Offer| if offer.chosen { "a file of its own" } else { "no file" };
            fail!(
                Mismatch,
                "the ranks of '{}' exchange by different tables: {} has {}, {} has {}; give all ranks one UNISONO_TUNING",
                self.group.name(),
                self.group.describe_rank(0),
                what(offers[0]),
                self.group.describe_rank(other as u32),
                what(offers[other])
            );
        }
        Ok(())
    }

    /// Why some rank cannot, if one cannot. The same on all ranks, which have heard the same.
    fn refused(&self, messages: &[Message]) -> Option<String> {
        messages.iter().enumerate().find_map(|(rank, message)| match message {
            Message::Refusal { why, .. } => Some(format!("{}: {why}", self.group.describe_rank(rank as u32))),
            _ => None,
        })
    }

    /// Ranks that set this up in calls of different numbers have made different calls before. The same on all
    /// ranks.
    fn differing(&self, offers: &[&Offer]) -> Option<Error> {
        let calls = || offers.iter().enumerate().filter_map(|(rank, offer)| Some((rank, offer.call?)));
        let (early, (number, call)) = calls().min_by_key(|(_, (number, _))| *number)?;
        let (late, (later, other)) = calls().find(|(_, (other, _))| *other != number)?;
        let name = self.group.name();
        Some(Error::new(
            Status::Mismatch,
            format!(
                "call #{number} of '{name}' differs: rank {early} called {call}, rank {late} something that is not on device memory, and {other} as its call #{later}"
            ),
        ))
    }

    /// What this rank brought has been freed: it says so, and hears it of the others.
    fn refuse(&mut self, why: String) -> Step {
        self.stage = Stage::Refused(why);
        Step::Gather(Message::Ready { whole_lines: false }.encode())
    }

    fn agree(&self, way: Way) -> Step {
        let name = self.group.name();
        match &way {
            Way::Exchange(_) => log::info!("group '{name}': the GPUs exchange directly"),
            Way::Hosts(hosts) => {
                let Layout { inside, hosts, .. } = hosts.layout();
                log::info!("group '{name}': {inside} GPUs exchange directly on each of {hosts} hosts");
            }
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
            Stage::Offered(Some(own)) | Stage::Mapped(own, _) => std::mem::forget(own.arena),
            // They may have heard that all are ready, and exchange.
            Stage::Proved(own, ..) => {
                std::mem::forget(own.arena);
                board::give_up(own.board, self.layout.place() as usize);
            }
            Stage::Offered(None) | Stage::Refused(_) | Stage::Over => {}
        }
    }
}

impl Room {
    fn of(offers: &[&Offer], table: &Table) -> Room {
        Room {
            max_blocks: least_limit(offers.iter().map(|offer| offer.max_blocks)),
            multiprocessors: offers.iter().map(|offer| offer.multiprocessors.max(1)).min().unwrap_or(1),
            table_blocks: table.blocks,
            one_process: offers.iter().all(|offer| offer.process == offers[0].process),
        }
    }
}

/// Whether the environment allows it, and can be understood.
fn wanted() -> Result<()> {
    mixes_by_default()?;
    match apart_by()? {
        None => Ok(()),
        Some(setting) => fail!(Unsupported, "{setting} switches it off"),
    }
}

fn refusal(error: &Error) -> Message {
    Message::Refusal { why: error.text().to_string(), stuck: false }
}

/// Why these offers do not fit each other, if they do not. The same on all ranks.
fn unfit(offers: &[&Offer], layout: Layout) -> Option<String> {
    for (rank, offer) in offers.iter().enumerate() {
        let first = rank - rank % layout.inside as usize;
        let same = |other: &&Offer| (other.process, other.device) == (offer.process, offer.device);
        if let Some(other) = offers[first..rank].iter().position(same).map(|other| first + other) {
            let device = offer.device;
            // Kernels that wait for each other must never queue behind each other.
            return Some(format!("ranks {other} and {rank} are one process on one GPU ({device})"));
        }
        if (offer.bytes, offer.table) != (offers[first].bytes, offers[first].table) {
            return Some(format!(
                "rank {rank} and rank {first} have different kinds of GPU or run different versions of unisono"
            ));
        }
    }
    None
}

impl Own {
    fn new(
        group: &Group,
        layout: Layout,
        devices: Arc<Devices>,
        device: u32,
        chosen: Chosen,
        deadline: Deadline,
    ) -> Result<Own> {
        devices.context(device)?;
        if layout.hosts > 1 {
            if !group.endpoint().shares_memory() {
                fail!(
                    Unsupported,
                    "UNISONO_TRANSPORT has no shm, by which the ranks of a host find each other"
                );
            }
            if !devices.driver().can_wait_value(device)? {
                fail!(Unsupported, "streams of GPU {device} cannot wait for the host");
            }
            group.open_links(&layout.others(group.members()), deadline)?;
        }
        let exchanged = chosen.table.arena_bytes(layout.inside).next_multiple_of(ALIGNMENT);
        let bytes = exchanged + if layout.hosts > 1 { WORKSPACE_BYTES } else { 0 };
        let arena = Arena::new(&devices, device, bytes + PROBE_BYTES, deadline)?;
        let Some(board) = group.endpoint().registration().segment().allocate(BOARD_BYTES, 64) else {
            fail!(OutOfMemory, "no room, or no memory, for {BOARD_BYTES} bytes in the shared segment")
        };
        let fault = Arc::new(Fault::new(&devices, device)?);
        let (workspace, area) = (arena.address() + exchanged as u64, arena.address() + bytes as u64);
        let probe = Probe::new(&devices, device, area, layout.place() as usize, group.id(), deadline)?;
        Ok(Own { devices, device, chosen, arena, workspace, board, fault, probe: Some(probe) })
    }

    fn probe(&self) -> Result<&Probe> {
        match &self.probe {
            Some(probe) => Ok(probe),
            None => fail!(Internal, "the proof is over"),
        }
    }

    fn offer(&self, call: Option<&Turn>, max_blocks: u32) -> Result<Offer> {
        let multiprocessors = self.devices.driver().multiprocessors(self.device)?;
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
            table: self.chosen.table.digest(),
            chosen: self.chosen.by_hand,
            board: self.board.offset() as u64,
            max_blocks,
            multiprocessors,
            call: call.map(|turn| (turn.sequence, turn.signature)),
            place: place.ok(),
        })
    }
}

impl Own {
    /// Maps the arenas of the others on this host.
    fn map(&self, group: &Group, layout: Layout, offers: &[&Offer]) -> Result<Mapped> {
        let Own { devices, device, arena, .. } = self;
        let device = *device;
        let before_area = (arena.bytes() - PROBE_BYTES) as u64;
        let (mut arenas, mut areas, mut opened) = (Vec::new(), Vec::new(), Vec::new());
        let (neighbours, mut whole_lines) = (layout.neighbours(), true);
        for (member, offer) in offers.iter().enumerate().take(neighbours.end).skip(neighbours.start) {
            let (address, owner) = if member == group.rank() as usize {
                (arena.address(), device)
            } else if offer.process == slab::identity(devices) {
                if !devices.reaches(device, offer.device)? {
                    fail!(Unsupported, "GPU {device} does not reach GPU {}, rank {member}'s", offer.device);
                }
                (offer.address, offer.device)
            } else {
                (map_slab(devices, device, member, offer, &mut opened)?, device)
            };
            whole_lines = whole_lines && stores_lines_whole(devices, device, offer);
            arenas.push(address);
            areas.push((address + before_area, owner));
        }
        let messages = group.endpoint().messages();
        let members = &group.members()[neighbours.clone()];
        let peers: Vec<_> = members.iter().map(|&peer| messages.memory(peer).cloned()).collect();
        drop(messages);
        if peers.iter().flatten().count() + 1 < peers.len() {
            fail!(Unsupported, "it cannot map the memory that ranks of its host share");
        }
        let boards = offers[neighbours].iter().map(|offer| offer.board).collect();
        let before_calls = offers.iter().all(|offer| offer.call.is_none());
        let room = Room::of(offers, &self.chosen.table);
        Ok(Mapped { arenas, areas, opened, peers, boards, before_calls, room, whole_lines })
    }
}

/// Whether a line that `device` stores to a member's GPU is known to arrive whole.
fn stores_lines_whole(devices: &Devices, device: u32, offer: &Offer) -> bool {
    devices.driver().stores_lines_whole(device, offer.uuid).unwrap_or_else(|error| {
        log::debug!("how GPU {device} is linked is not known: {error}");
        false
    })
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
