//! The kernel itself, compiled for processors and played in adversarial orders over memory that is as weak as
//! a GPU's, beside a host that is a kernel, too (`kernels/double`).

use std::ffi::c_void;
use std::sync::atomic::AtomicU32;

use super::super::desk::{BACK_WORDS, FIELDS, ON_FRONT, Room, STANDS};
use super::*;
use crate::cuda::double::Code;
use crate::cuda::driver::Grid;
use crate::cuda::exchange::tests::play::{Chances, Ending, Recorder, Weakness, play};

/// Turns of a thread that no play needs.
const PATIENCE: u64 = 20_000_000;

const ADVERSE: [Chances; 3] = [
    Chances { switch: 16, stale: 0, commit: 256, freeze: 2, without: 0 },
    Chances { switch: 64, stale: 64, commit: 24, freeze: 0, without: 0 },
    Chances { switch: 8, stale: 128, commit: 2, freeze: 4, without: 0 },
];

/// An order of a desk.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Numbered {
    desk: u32,
    /// 0: none.
    number: u32,
}

/// What the host does about an order: `Deed` of `kernels/double/kernels.cpp`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Deed {
    behind: [Numbered; 2],
    copy: [u64; 3],
    order: Numbered,
    fields: [u32; FIELDS],
    back: [u32; BACK_WORDS],
}

/// The parameter of the host.
#[repr(C)]
struct Host {
    stand: u64,
    deeds: u64,
    count: u64,
    blocks: [u32; DESKS],
}

/// What the couriers of a stream and the host are told, in the order in which the host gets to it.
struct Script {
    stand: Box<Room>,
    near: u32,
    first: u32,
    next: [u32; DESKS],
    blocks: [u32; DESKS],
    deeds: Vec<Deed>,
    couriers: Vec<Call>,
}

impl Script {
    fn new(blocks: [u32; DESKS]) -> Script {
        // The desks in the device's memory outlive a play, so numbers go on.
        static PLAYS: AtomicU32 = AtomicU32::new(0);
        let plays = PLAYS.fetch_add(1, Ordering::Relaxed);
        let (near, first) = (plays % STANDS as u32, 1 + 1000 * (plays / STANDS as u32));
        // SAFETY: whole numbers, for which zeros are values.
        let stand: Box<Room> = Box::new(unsafe { std::mem::zeroed() });
        Script { stand, near, first, next: [first; DESKS], blocks, deeds: Vec::new(), couriers: Vec::new() }
    }

    fn address(&self) -> u64 {
        std::ptr::from_ref(&*self.stand).expose_provenance() as u64
    }

    /// The next courier, for what is ordered from now on.
    fn courier(&mut self) {
        let Script { near, next, blocks, .. } = *self;
        self.couriers.push(Call { stand: self.address(), near, next, blocks, threads: 256 });
    }

    /// Writes an order when its slip is free and what is `behind` has been carried out, and copies something
    /// before.
    fn order(&mut self, desk: Desk, order: Order, behind: Numbered, copy: [u64; 3]) -> Numbered {
        self.order_with(desk, (order, Annex::Nothing), behind, copy)
    }

    /// The same, with what stands on the slip's back.
    fn order_with(
        &mut self,
        desk: Desk,
        (order, annex): (Order, Annex),
        behind: Numbered,
        copy: [u64; 3],
    ) -> Numbered {
        let next = &mut self.next[desk as usize];
        let numbered = Numbered { desk: desk as u32, number: *next };
        // One slip is kept for the last.
        let most = if order.action == Action::Leave { SLIPS } else { SLIPS - 1 };
        let is_used = *next - self.first >= most;
        let free = if is_used { Numbered { number: *next - most, ..numbered } } else { Numbered::default() };
        *next += 1;
        let back = if let Annex::Back(back) = &annex { back.words() } else { [0; BACK_WORDS] };
        let fields = order.fields(&annex);
        self.deeds.push(Deed { behind: [free, behind], copy, order: numbered, fields, back });
        numbered
    }

    fn leave(&mut self) {
        for desk in Desk::ALL {
            self.order(desk, Order::LEAVE, Numbered::default(), [0; 3]);
        }
    }

    fn play(&self, threads: u32, seed: u64, chances: &Chances, results: &mut [(u64, Vec<u8>)]) -> Ending {
        let [stream, host] = [(); 2].map(|()| Recorder::default());
        let grid = |blocks, threads| Grid { blocks, threads, shared: 0, overlaps: true };
        for call in &self.couriers {
            let parameter = std::ptr::from_ref(call).cast::<c_void>();
            stream.launch(
                stream.function(c"unisono_courier"),
                grid(self.blocks.iter().sum(), threads),
                parameter,
            );
        }
        for (from, to) in results {
            stream.copy_result(*from, to);
        }
        let parameter = Host {
            stand: self.address(),
            deeds: self.deeds.as_ptr().expose_provenance() as u64,
            count: self.deeds.len() as u64,
            blocks: self.blocks,
        };
        let parameter = std::ptr::from_ref(&parameter).cast::<c_void>();
        host.launch(host.function(c"unisono_double_host"), grid(1, 1), parameter);
        let mut aborts = [0u64; 2];
        let [first, second] = &mut aborts;
        let ranks = [(&stream, std::ptr::from_mut(first).cast()), (&host, std::ptr::from_mut(second).cast())];
        // SAFETY: all memory that is named outlives the play.
        unsafe { play(&ranks, seed, chances, PATIENCE.into()) }.0
    }
}

fn address(memory: &[u8]) -> u64 {
    memory.as_ptr().expose_provenance() as u64
}

/// Two couriers of a stream carry pieces to the host, which copies each, and from there. At a third desk with
/// blocks enough that most look at the device's memory each order carries what the one before it has written,
/// other blocks' shares. The second courier, which may be launched before the first has ended, begins with
/// what that one stores last. What is wrong, if anything.
fn carries(seed: u64, chances: &Chances) -> Option<String> {
    const PIECE: usize = 200;
    const PIECES: usize = 40;
    const STEPS: usize = 6;
    let given: Vec<u8> = (0..2 * PIECES * PIECE).map(|at| (at * 7 + seed as usize) as u8).collect();
    let [loaded, sent, stored] = [(); 3].map(|()| vec![0xeeu8; given.len()]);
    // Each step is 16 bytes shorter than the one before it.
    let steps: Vec<_> = (0..=2 * STEPS).map(|_| vec![0xeeu8; given.len()]).collect();
    let passed_on = vec![0xeeu8; PIECE];
    // All but one of the bytes that there is room for on a slip, or on its front.
    const SPARED: [usize; 2] = [PLACED - 1, ON_FRONT - 1];
    let placed = vec![0xeeu8; 2 * PIECES * PLACED];
    let wanted_of = |at: usize| (at * 5 + 1) as u8;
    // Whole words and a part of one, from any address.
    const TELLS: usize = 13;
    let told = vec![0xeeu8; 2 * PIECES * 2 * TELLS.next_multiple_of(4)];
    let mut tells = Vec::new();
    let nothing = Numbered::default();
    let mut last_store = 0;
    // Beyond four, most blocks are told by the first, also of those that carry.
    let blocks = if seed % 8 == 5 { [5, 6, 5] } else { [1 + (seed % 3) as u32, 2, 6] };
    let mut script = Script::new(blocks);
    let carry = |to, from, bytes: usize, action| Order { to, from, bytes: bytes as u64, action };
    for courier in 0..2 {
        script.courier();
        if courier == 1 {
            let last = address(&stored) + ((PIECES - 1) * PIECE) as u64;
            script.order(Desk::Load, carry(address(&passed_on), last, PIECE, Action::Carry), nothing, [0; 3]);
            // It is on its slip before that is ordered.
            let deed = script.deeds.pop().expect("it has been ordered");
            script.deeds.insert(last_store, deed);
        }
        // What is carried behind this desk's first order finds that it has been: a stand's numbers go on,
        // these begin somewhere.
        script.order(Desk::Work, Order::NOTHING, nothing, [0; 3]);
        for step in courier * STEPS..(courier + 1) * STEPS {
            let from = if step == 0 { address(&given) } else { address(&steps[step]) };
            let (bytes, to) = (given.len() - 16 * (step + 1), address(&steps[step + 1]));
            script.order(Desk::Work, carry(to, from + 16, bytes, Action::CarryBehind), nothing, [0; 3]);
            // So many that slips are used again.
            for _ in 0..8 {
                script.order(Desk::Work, Order::NOTHING, nothing, [0; 3]);
            }
        }
        for piece in 0..PIECES {
            let at = ((courier * PIECES + piece) * PIECE) as u64;
            let [given, loaded, sent, stored] =
                [&given, &loaded, &sent, &stored].map(|memory| address(memory) + at);
            let order = carry(loaded, given, PIECE, Action::Carry);
            let load = script.order(Desk::Load, order, nothing, [0; 3]);
            let order = carry(stored, sent, PIECE, Action::Carry);
            let place = (courier * PIECES + piece) * PLACED;
            let bytes: Vec<u8> = (0..SPARED[piece % 2]).map(|at| wanted_of(place + at)).collect();
            let to = address(&placed) + place as u64;
            script.order_with(Desk::Store, Order::place(to, &bytes), nothing, [0; 3]);
            let (to, from) = (
                address(&told) + (told.len() / PIECES / 2 * (courier * PIECES + piece)) as u64,
                given + piece as u64,
            );
            let tell = Order { to, from, bytes: TELLS as u64, action: Action::Tell };
            tells.push((at as usize + piece, script.order(Desk::Load, tell, nothing, [0; 3]).number));
            if (courier, piece) == (0, PIECES - 1) {
                last_store = script.deeds.len();
            }
            script.order(Desk::Store, order, load, [sent, loaded, PIECE as u64]);
        }
        script.leave();
        if courier == 0 {
            // The courier learns at once that it is to leave behind it.
            let deed = script.deeds.remove(last_store);
            script.deeds.push(deed);
        }
    }
    let [wanted, shifted] = [&given[..], &given[2 * STEPS * 16..]];
    let mut results = [
        (address(&stored), vec![0; wanted.len()]),
        (address(&steps[2 * STEPS]), vec![0; shifted.len()]),
        (address(&passed_on), vec![0; PIECE]),
        (address(&placed), vec![0; placed.len()]),
        (address(&told), vec![0; told.len()]),
    ];
    let ending = script.play(64, seed, chances, &mut results);
    // Where the play has not ended others still use it.
    if ending != Ending::Well {
        std::mem::forget((script, given, loaded, sent, stored, steps, passed_on, placed, told));
        return Some(format!("{ending:?}"));
    }
    let wrong =
        |(got, wanted): (&Vec<u8>, &[u8])| got.iter().zip(wanted).position(|(got, wanted)| got != wanted);
    let last = &given[(PIECES - 1) * PIECE..][..PIECE];
    let is_placed = |at: usize| at % PLACED < SPARED[at / PLACED % 2];
    let slips: Vec<u8> =
        (0..placed.len()).map(|at| if is_placed(at) { wanted_of(at) } else { 0xee }).collect();
    let words: Vec<u8> =
        tells.iter().flat_map(|&(at, number)| reader::told(&given[at..][..TELLS], number)).collect();
    let [carried, stepped, passed, written, said] = results.each_ref().map(|(_, got)| got);
    let wrong =
        [(carried, wanted), (stepped, shifted), (passed, last), (written, &slips), (said, &words)].map(wrong);
    (wrong != [None; 5])
        .then(|| format!("carried by the host, step by step and on to the next: wrong at {wrong:?}"))
}

#[test]
fn kernels_carry_what_the_host_orders() {
    let often = std::env::var("UNISONO_PLAYS").map_or(1, |often| often.parse().expect("a number"));
    for seed in 0..12 * often {
        assert_eq!(carries(seed, &ADVERSE[(seed % 3) as usize]), None, "seed {seed}");
    }
}

#[test]
fn what_kernels_leave_out_is_missed() {
    for without in [Weakness::Release, Weakness::Acquire, Weakness::BlockBarrier, Weakness::Stream] {
        let missed = (0..24).any(|seed| {
            let chances = Chances { without: without as u32, ..ADVERSE[1 + (seed % 2) as usize] };
            carries(seed, &chances).is_some_and(|what| what.contains("wrong at"))
        });
        assert!(missed, "{without:?}");
    }
}
