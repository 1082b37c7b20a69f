//! Driver errors and deaths in the midst of calls: all ranks hear of them within a second, nothing is touched
//! after that, and streams go on.

use std::process::{Command, Stdio};

use super::*;
use crate::communicator::staged::begun::{COPIES, Copies};
use crate::rendezvous::id::UniqueId;

/// How long it may take from the cause until a rank's call has failed.
const SOON: Duration = Duration::from_secs(1);

/// How many ranks; which of them is in trouble.
const SIZE: u32 = 3;
const CULPRIT: u32 = 1;

/// Elements of a call: more pieces than are under way.
const LEN: usize = 700;

/// How calls go.
#[derive(Clone, Copy, Debug)]
struct Way {
    transports: &'static str,
    relays: bool,
    /// Each rank knows its own counts alone.
    lists: bool,
}

const WAYS: [Way; 4] = [
    Way { transports: "shm", relays: false, lists: false },
    Way { transports: "tcp", relays: false, lists: false },
    Way { transports: "shm", relays: true, lists: false },
    Way { transports: "tcp", relays: true, lists: false },
];

/// Calls with lists go message by message.
const LISTS: Way = Way { transports: "tcp", relays: false, lists: true };

impl Way {
    /// The call in which a rank dies.
    fn deadly(self) -> Kind {
        if self.lists { Kind::Alltoall } else { Kind::Allreduce }
    }
}

/// How a rank's call has ended, and when.
struct Seen {
    result: Result<Completion>,
    at: Instant,
}

impl Rank {
    /// Goes a way, and makes a first call, after which everything is there that calls need.
    fn set_out(&self, way: Way) {
        if way.relays {
            self.relay();
            self.warm_up();
        } else {
            self.first_call();
        }
    }

    /// Makes a call that may not end well, in the order of the stream or without one. If it does not, the
    /// memory is the caller's again, and its stream goes on.
    fn suffer(&self, way: Way, kind: Kind, ordered: bool) -> Seen {
        let (reads, writes) = lengths(kind, LEN, SIZE, self.rank == 0);
        let (input, output) = (self.memory(&vec![0; reads]), self.memory(&vec![0; writes]));
        self.double.fill(self.stream, 0, input, &bytes(&given(self.rank, 0, reads)));
        let call = if ordered { self.call() } else { Call::default() };
        let [from, to] = [(reads, input), (writes, output)].map(|(len, at)| if len > 0 { at } else { 0 });
        let mut request = request(kind, from, to, LEN as u64, 0);
        if way.lists {
            let counts = vec![LEN as u64; SIZE as usize];
            request.counts = Counts::Exchange { send: counts.clone(), receive: counts };
        }
        let result = self.start(&request, &call).and_then(|work| work.wait(Deadline::after(PATIENCE)));
        let at = Instant::now();
        if let Err(error) = &result {
            let marked = vec![-7; writes];
            self.fill(output, &marked);
            assert_eq!(grave(self.drain()), Vec::<String>::new(), "{error}");
            assert!(self.double.peek(output, writes * 4) == bytes(&marked), "written after the end: {error}");
        }
        Seen { result, at }
    }

    /// Waits for the failure that another rank has had, and looks whether everything is refused that comes
    /// after it.
    fn is_told(&self) -> Instant {
        let until = Instant::now() + PATIENCE;
        let cause = loop {
            match self.context.failure() {
                Some(cause) => break cause,
                None => assert!(Instant::now() < until, "rank {} never hears of it", self.rank),
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        let at = Instant::now();
        let memory = self.memory(&[0; LEN]);
        let mut host = [0; LEN];
        let host = host.as_mut_ptr().expose_provenance() as u64;
        for (address, call) in [(memory, self.call()), (memory, Call::default()), (host, Call::default())] {
            let again = request(Kind::Allreduce, address, address, LEN as u64, 0);
            let error = self.run(&again, &call).expect_err("the group has failed");
            assert_eq!(error.status(), cause.status(), "{error}");
            assert!(error.text().contains("is refused, the group has failed before"), "{error}");
            assert!(self.rank == CULPRIT || names_the_culprit(&error), "{error}");
        }
        assert_eq!(grave(self.drain()), Vec::<String>::new());
        at
    }
}

fn names_the_culprit(error: &Error) -> bool {
    error.text().contains(&format!("rank {CULPRIT}"))
}

/// The call of the driver that an error names.
fn named(error: &Error) -> String {
    let (before, _) = error.text().split_once(" failed: CUDA_ERROR_INJECTED: ").unwrap_or_default();
    before.rsplit(' ').next().unwrap_or_default().to_owned()
}

/// What a rank does whose driver refuses something, or that of another.
type Deed<'a> = &'a (dyn Fn(&Rank) -> Seen + Sync);

/// What `attempt` answers if nothing in it came later than [`SOON`]. A busy processor may hold up any thread
/// for a second, but not every time.
fn in_time<T>(mut attempt: impl FnMut() -> std::result::Result<T, Late>) -> T {
    let mut late = None;
    for _ in 0..TRIES {
        match attempt() {
            Ok(answer) => return answer,
            Err(again) => late = Some(again),
        }
    }
    panic!("{late:?}, {TRIES} times");
}

/// What came too late.
#[derive(Debug)]
struct Late(#[expect(dead_code, reason = "for whoever reads the panic")] String);

/// Has one rank's driver refuse its `failing`-th call from the beginning of `deed`. `None`: it does not come
/// so far. What was refused, if it did harm.
fn refuse(way: Way, deed: Deed<'_>, failing: usize) -> std::result::Result<Option<Option<String>>, Late> {
    let (met, harmed) = (Barrier::new(SIZE as usize), AtomicBool::new(false));
    let outcomes = ranks(SIZE, way.transports, Order::RoundRobin, |rank| {
        rank.set_out(way);
        met.wait();
        if rank.rank == CULPRIT {
            rank.double.fail_call(failing);
        }
        let Seen { result, mut at } = deed(rank);
        let error = result.err();
        if rank.rank == CULPRIT {
            harmed.store(error.is_some(), Ordering::SeqCst);
        }
        met.wait();
        // Who needed nothing more of the culprit has its result, and hears of it all the same.
        if harmed.load(Ordering::SeqCst) {
            let told = rank.is_told();
            at = if error.is_some() { at } else { told };
        }
        met.wait();
        (error, at, rank.double.failed_at())
    });
    let Some(failed) = outcomes[CULPRIT as usize].2 else { return Ok(None) };
    let Some(root) = &outcomes[CULPRIT as usize].0 else {
        assert!(outcomes.iter().all(|(error, ..)| error.is_none()), "{failing}: only others failed");
        return Ok(Some(None));
    };
    let call = named(root);
    assert!(call.starts_with("cu"), "the culprit says: {root}");
    let mut late = None;
    for (who, (error, at, _)) in outcomes.iter().enumerate() {
        let after = at.saturating_duration_since(failed);
        if after >= SOON {
            late = Some(Late(format!("{way:?}: rank {who} heard of it after {after:?}: {error:?}")));
        }
        let Some(error) = error else { continue };
        assert_eq!(error.status(), Status::Cuda, "rank {who}: {error}");
        assert_eq!(named(error), call, "rank {who}: {error}");
        assert!(who == CULPRIT as usize || names_the_culprit(error), "rank {who}: {error}");
    }
    late.map_or(Ok(Some(Some(call))), Err)
}

/// Has calls of the driver fail all over a deed. Which of them did harm.
fn refuse_all_over(way: Way, step: usize, deed: Deed<'_>) -> Vec<String> {
    let mut told = Vec::new();
    for failing in (step / 2..).step_by(step) {
        match in_time(|| refuse(way, deed, failing)) {
            Some(call) => told.extend(call),
            None => break,
        }
    }
    told.sort_unstable();
    told.dedup();
    told
}

#[test]
fn a_driver_error_is_told_to_all_ranks_within_a_second() {
    for way in WAYS {
        // A courier's calls are few.
        let (step, least) = if way.relays { (2, 1) } else { (10, 3) };
        for kind in [Kind::Allreduce, Kind::Broadcast] {
            let told = refuse_all_over(way, step, &|rank| rank.suffer(way, kind, true));
            assert!(told.len() >= least, "{way:?}, {kind:?}: {told:?}");
        }
    }
}

#[test]
fn a_driver_error_of_a_call_with_lists_is_told_as_soon() {
    for ordered in [true, false] {
        let told = refuse_all_over(LISTS, 19, &|rank| rank.suffer(LISTS, Kind::Alltoall, ordered));
        assert!(told.len() > 2, "{told:?}");
    }
}

#[test]
fn a_driver_error_of_a_call_without_a_stream_is_told_as_soon() {
    for way in WAYS {
        for (kind, least) in [(Kind::Allgather, 1), (Kind::Allreduce, 2)] {
            let told = refuse_all_over(way, 37, &|rank| rank.suffer(way, kind, false));
            assert!(told.len() >= least, "{way:?}, {kind:?}: {told:?}");
        }
    }
}

#[test]
fn a_driver_error_of_a_message_is_told_to_all_ranks_too() {
    for way in &WAYS[..2] {
        for sends in [true, false] {
            let told = refuse_all_over(*way, 23, &|rank| {
                let memory = rank.memory(&[0; LEN]);
                let peer = if sends { 0 } else { 2 };
                let result = if rank.rank == CULPRIT || rank.rank == peer {
                    let (kind, other) = match (rank.rank == CULPRIT) == sends {
                        true => (Kind::Send, if sends { peer } else { CULPRIT }),
                        false => (Kind::Receive, if sends { CULPRIT } else { peer }),
                    };
                    let message = request(kind, memory, memory, LEN as u64, other);
                    rank.start(&message, &rank.call()).and_then(|work| work.wait(Deadline::after(PATIENCE)))
                } else {
                    Ok(Completion::default())
                };
                Seen { result, at: Instant::now() }
            });
            assert!(!told.is_empty(), "{way:?}");
        }
    }
}

/// The process of a rank dies in its `dying`-th call of the driver, in a call on a stream or without one.
fn die(way: Way, ordered: bool, dying: usize) -> std::result::Result<(), Late> {
    let (id, _server) = UniqueId::create(Some("127.0.0.1")).expect("a store");
    let mut culprit = Command::new(std::env::current_exe().expect("a test program"))
        .args(["--exact", "communicator::staged::tests::failure::culprit", "--nocapture"])
        .env("UNISONO_TEST_ID", id.to_hex())
        .env("UNISONO_TEST_WAY", format!("{} {} {} {ordered} {dying}", way.transports, way.relays, way.lists))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("another process");
    let (died, seen) = std::thread::scope(|scope| {
        let survivors: Vec<_> = (0..SIZE)
            .filter(|&rank| rank != CULPRIT)
            .map(|rank| {
                let id = id.to_bytes();
                scope.spawn(move || {
                    take_part(rank, id, way, |rank| {
                        let seen = rank.suffer(way, way.deadly(), ordered);
                        rank.is_told();
                        seen
                    })
                })
            })
            .collect();
        culprit.wait().expect("it dies");
        let died = Instant::now();
        let seen: Vec<Seen> =
            survivors.into_iter().map(|thread| thread.join().expect("it answers")).collect();
        (died, seen)
    });
    let mut late = None;
    for Seen { result, at } in seen {
        let error = result.expect_err("a rank has died");
        assert_eq!(error.status(), Status::PeerFailed, "{way:?}: {error}");
        assert!(names_the_culprit(&error), "{way:?}: {error}");
        let after = at.saturating_duration_since(died);
        if after >= SOON {
            late = Some(Late(format!("{way:?}: heard of it after {after:?}: {error}")));
        }
    }
    late.map_or(Ok(()), Err)
}

/// A rank that meets the others by an id.
fn take_part<T>(rank: u32, id: [u8; 128], way: Way, body: impl FnOnce(&Rank) -> T) -> T {
    let double = Double::new(2, Order::RoundRobin);
    let devices = Devices::over(double.clone()).expect("a driver");
    let stream = double.stream(0);
    let context = join(rank, SIZE, Rendezvous::Id(id), way.transports);
    context.cuda().pretend(&devices, PIECE);
    let _clock = Clock::start_slow(&double);
    let completes = AtomicBool::new(false);
    let rank = Rank { context, double, devices, stream, rank, completes };
    rank.set_out(way);
    // Nobody dies before all are there.
    let mut word = 0_i32;
    let at = (&raw mut word).expose_provenance() as u64;
    let pass = |kind, peer| rank.run(&request(kind, at, at, 1, peer), &Call::default()).expect("a word");
    match rank.rank {
        CULPRIT => (0..SIZE).filter(|&peer| peer != CULPRIT).for_each(|peer| _ = pass(Kind::Receive, peer)),
        _ => _ = pass(Kind::Send, CULPRIT),
    }
    body(&rank)
}

/// Not a test by itself: the process that [`die`] starts.
#[test]
fn culprit() {
    let (Ok(id), Ok(way)) = (std::env::var("UNISONO_TEST_ID"), std::env::var("UNISONO_TEST_WAY")) else {
        return;
    };
    let id: UniqueId = id.parse().expect("an id");
    let [transports, relays, lists, ordered, dying] = way.split(' ').collect::<Vec<_>>()[..] else {
        panic!("{way}")
    };
    let transports = if transports == "shm" { "shm" } else { "tcp" };
    let way = Way { transports, relays: relays == "true", lists: lists == "true" };
    take_part(CULPRIT, id.to_bytes(), way, |rank| {
        rank.double.die_in_call(dying.parse().expect("a number"));
        rank.suffer(way, way.deadly(), ordered == "true");
    });
}

#[test]
fn a_death_is_told_to_all_ranks_within_a_second() {
    for way in WAYS.into_iter().chain([LISTS]) {
        // A courier's calls are few.
        let ordered: &[usize] = if way.relays { &[5] } else { &[5, 60, 120] };
        let unordered: &[usize] = if way.relays { &[60, 120] } else { &[] };
        for (ordered, deaths) in [(true, ordered), (false, unordered)] {
            for dying in deaths {
                in_time(|| die(way, ordered, *dying));
            }
        }
    }
}

#[test]
fn calls_that_are_given_up_together_are_waited_for_together() {
    let double = Double::new(1, Order::Eager);
    let devices = Devices::over(double).expect("a driver");
    let (mut copies, started) = (Copies::default(), Instant::now());
    for _ in 0..20 {
        copies.add(devices.word(0).expect("a word").into());
    }
    copies.wait();
    assert!((COPIES..10 * COPIES).contains(&started.elapsed()), "{:?}", started.elapsed());
}
