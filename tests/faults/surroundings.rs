//! Processes without descriptors or memory, and forks.

use std::net::TcpStream;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use crate::support::processes::{Job, Report, Seat, report};
use crate::support::{PATIENCE, TRANSPORTS, Verb, barrier, receive, send, sum, tagged, within};
use unisono::collective::request::Kind;
use unisono::communicator::{Call, Context, Options, Rendezvous};
use unisono::deadline::Deadline;
use unisono::error::Status;
use unisono::rendezvous::id::UniqueId;
use unisono::rendezvous::store::Store;

// ---- no descriptors left

pub(crate) fn descriptors(seat: &Seat) {
    for spare in [0, 3, 6, 9] {
        if seat.rank == 1 {
            limit_descriptors(Some(limit_for(spare)));
        }
        // Rank 1 fails at once and is ahead; rank 0 comes when it has waited in vain.
        let timeout = Duration::from_secs(if seat.rank == 0 { 2 } else { 5 });
        let options = Options { timeout, ..seat.options(&format!("with {spare}")) };
        let result = Context::create(options).and_then(|context| {
            let verb = Verb::new(Kind::Allreduce, 10);
            verb.run_in(&context, &mut [1.0f32; 10], &within(2000))
        });
        limit_descriptors(None);
        report(match result {
            Ok(_) => format!("spare {spare} ok"),
            Err(error) => format!("spare {spare} {:?} {error}", error.status()),
        });
    }
    let context = Context::create(seat.options("enough again")).expect("the ranks meet");
    sum(&context, &mut [1.0; 10]);
    report("done");
}

/// The limit that leaves `spare` numbers free.
fn limit_for(spare: usize) -> u64 {
    let open: Vec<u64> = std::fs::read_dir("/proc/self/fd")
        .expect("the descriptors")
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    let free = |number: &u64| !open.contains(number);
    // The listing's own descriptor is among them and free again.
    (0..).filter(free).nth(spare).expect("numbers do not end").saturating_sub(1)
}

fn limit_descriptors(limit: Option<u64>) {
    set_limit(libc::RLIMIT_NOFILE, limit);
}

/// `None`: as much as the process may have.
fn set_limit(of: libc::__rlimit_resource_t, limit: Option<u64>) {
    let mut limits = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both take a pointer to a whole structure.
    let answer = unsafe {
        libc::getrlimit(of, &mut limits);
        limits.rlim_cur = limit.unwrap_or(limits.rlim_max);
        libc::setrlimit(of, &limits)
    };
    assert_eq!(answer, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn a_rank_without_descriptors_says_so_and_recovers() {
    for transports in TRANSPORTS {
        let mut job = Job::start("descriptors", 2, transports);
        for spare in ["spare 0 ", "spare 3 ", "spare 6 ", "spare 9 "] {
            let lines = job.await_all(&[0, 1], spare);
            let text = &lines[1].line;
            // Further on they may suffice.
            let clear = text.contains("oo many open files");
            let enough = text.ends_with("ok") && matches!(spare, "spare 6 " | "spare 9 ");
            assert!(clear || enough, "{transports}, {spare}: {text}; rank 0: {}", lines[0].line);
        }
        job.await_all(&[0, 1], "done");
        job.all_end_well(&[0, 1]);
    }
}

pub(crate) fn descriptors_for_links(seat: &Seat) {
    let host = Some(format!("host {}", seat.rank));
    let options = Options { host, ..seat.options("") };
    let context = Context::create(options).expect("the ranks meet");
    barrier(&context);
    if seat.rank == 0 {
        limit_descriptors(Some(limit_for(0)));
    }
    // None opens a link to rank 0 before that. A late rank may hear in it that rank 0 has failed.
    let all_here = Verb::new(Kind::Barrier, 0).run_in::<u8>(&context, &mut [], &within(20_000));
    // Too long to go by way of others.
    let (input, mut output) = (vec![1.0f32; 800_000], vec![0.0f32; 800_000]);
    let verb = Verb::new(Kind::Alltoall, 100_000);
    let result = all_here.and_then(|_| verb.run(&context, &input, &mut output, &within(20_000)));
    let error = result.expect_err("rank 0 opens no links");
    limit_descriptors(None);
    report(format_args!("told {:?} {error}", error.status()));
}

#[test]
fn a_rank_without_descriptors_for_a_link_says_that_they_are_its_own() {
    let ranks: Vec<u32> = (0..8).collect();
    let mut job = Job::start("descriptors for links", 8, "tcp");
    for told in job.await_all(&ranks, "told") {
        let text = &told.line;
        assert!(text.contains("rank 0 lacks what a link to rank "), "rank {}: {text}", told.rank);
        assert!(text.contains("oo many open files"), "rank {}: {text}", told.rank);
        assert!(told.rank != 0 || text.starts_with("System "), "{text}");
    }
    job.all_end_well(&ranks);
}

/// How many descriptors a rank has for a meeting of three: with the fewest it cannot listen, with the most it
/// lacks none.
const FOR_THREE: RangeInclusive<usize> = 4..=20;

/// Rank 0 serves ids. The last rank lacks descriptors, and then all do.
pub(crate) fn descriptors_in_the_meeting(seat: &Seat) {
    let Rendezvous::Store(store) = seat.options("").rendezvous else { unreachable!("a seat has a store") };
    for (all_lack, spare) in
        [false, true].into_iter().flat_map(|all| FOR_THREE.map(move |spare| (all, spare)))
    {
        let (soon, case) = (Deadline::after(2 * PATIENCE), format!("{all_lack} {spare}"));
        let mut served = None;
        if seat.rank == 0 {
            let (id, server) = UniqueId::create(Some("127.0.0.1")).expect("an id");
            served = Some(server);
            store.set(&format!("id {case}"), &id.to_bytes(), soon).expect("the others read it");
        }
        let id = store.get(&format!("id {case}"), soon).expect("rank 0 has made one");
        let rendezvous = Rendezvous::Id(id.try_into().expect("an id"));
        let options = Options { rendezvous, timeout: PATIENCE, ..seat.options("") };
        if all_lack || seat.rank == 2 {
            limit_descriptors(Some(limit_for(spare)));
        }
        let began = Instant::now();
        let met = Context::create(options);
        let took = began.elapsed().as_millis();
        limit_descriptors(None);
        report(match &met {
            Ok(_) => format!("{case} ok"),
            Err(error) => format!("{case} failed after {took} ms: {error}"),
        });
        store.set(&format!("{} has tried {case}", seat.rank), &[], soon).expect("the others wait");
        for rank in 0..seat.size {
            store.get(&format!("{rank} has tried {case}"), soon).expect("all end");
        }
        drop(served);
    }
}

#[test]
fn ranks_without_descriptors_for_a_meeting_end_it_for_all() {
    for transports in TRANSPORTS {
        let mut job = Job::start("descriptors in the meeting", 3, transports);
        for all_lack in [false, true] {
            for spare in FOR_THREE {
                let lines = job.await_all(&[0, 1, 2], &format!("{all_lack} {spare} "));
                let failed: Vec<_> = lines.iter().filter(|line| line.line != "ok").collect();
                for Report { rank, line, .. } in &failed {
                    let case = format!("{transports}, all: {all_lack}, with {spare}, rank {rank}: {line}");
                    assert_eq!(failed.len(), 3, "{case}");
                    assert!(line.contains("oo many open files"), "{case}");
                    let took = line.split(' ').nth(2).and_then(|took| took.parse::<u64>().ok());
                    assert!(took.is_some_and(|took| took < 20_000), "{case}");
                }
            }
        }
        job.all_end_well(&[0, 1, 2]);
    }
}

/// Rank 0 of two lacks them for its own way to the store that it serves: for its end of the connection, or for
/// the server's.
pub(crate) fn descriptors_for_the_own_store(seat: &Seat) {
    for spare in [0, 1] {
        let (id, _server) = UniqueId::create(Some("127.0.0.1")).expect("an id");
        let rendezvous = Rendezvous::Id(id.to_bytes());
        let options = Options { rendezvous, size: 2, timeout: PATIENCE, ..seat.options("") };
        limit_descriptors(Some(limit_for(spare)));
        let met = Context::create(options);
        limit_descriptors(None);
        let error = met.err().expect("it has no way to the store");
        report(format_args!("with {spare}: {:?} {error}", error.status()));
    }
}

#[test]
fn rank_0_without_descriptors_for_its_own_store_says_so_before_the_deadline() {
    let mut job = Job::start("descriptors for the own store", 1, "shm");
    for told in [0, 1].map(|spare| job.await_all(&[0], &format!("with {spare}: ")).remove(0).line) {
        assert!(told.starts_with("System ") && told.contains("oo many open files"), "{told}");
    }
    job.all_end_well(&[0]);
}

/// How many files rank 0 may have open beside a crowd.
const FEW: u64 = 256;

/// Rank 0 serves an id. Rank 1 brings a crowd that connects there and says nothing.
pub(crate) fn crowd_at_the_store(seat: &Seat) {
    let Rendezvous::Store(store) = seat.options("").rendezvous else { unreachable!("a seat has a store") };
    let soon = Deadline::after(2 * PATIENCE);
    let (mut served, mut crowd) = (None, Vec::new());
    if seat.rank == 0 {
        limit_descriptors(Some(FEW));
        let (id, server) = UniqueId::create(Some("127.0.0.1")).expect("an id");
        let own = id.connect(soon).expect("it serves");
        let address = server.local_address().to_string();
        served = Some(server);
        store.set("address", address.as_bytes(), soon).expect("rank 1 reads it");
        store.set("id", &id.to_bytes(), soon).expect("rank 1 reads it");
        store.get("crowd", soon).expect("there is one");
        report(format_args!("has {}", std::fs::read_dir("/proc/self/fd").expect("the descriptors").count()));
        limit_descriptors(Some(limit_for(0)));
        own.set("none left", &[], soon).expect("its connection is there");
        own.get("through", soon).expect("rank 1 gets through");
        let shut = own.shut();
        limit_descriptors(Some(FEW));
        report(format_args!("is shut: {shut:?}"));
    } else {
        limit_descriptors(None);
        let address = store.get("address", soon).expect("rank 0 serves");
        let address = String::from_utf8(address).expect("an address");
        let mut connect = |count| {
            crowd.extend((0..count).map(|_| TcpStream::connect(&address).expect("the kernel accepts")));
        };
        let id = store.get("id", soon).expect("rank 0 has made one");
        let id = UniqueId::parse(&id.try_into().expect("an id")).expect("an id");
        let client = id.connect(soon).expect("rank 0 serves");
        connect(300);
        // The last: no later stranger takes its place.
        id.connect(soon).expect("it gets through").set("among them", &[], soon).expect("it is there");
        store.set("crowd", &[], soon).expect("rank 0 waits");
        client.get("none left", soon).expect("rank 0 says so");
        connect(500);
        let through = id.connect(soon).and_then(|store| store.set("through", &[], soon));
        through.expect("rank 0 gives strangers' descriptors to those who come");
    }
    let id = store.get("id", soon).expect("rank 0 has made one");
    let rendezvous = Rendezvous::Id(id.try_into().expect("an id"));
    let context = Context::create(Options { rendezvous, ..seat.options("") }).expect("the ranks meet");
    sum(&context, &mut [1.0; 10]);
    barrier(&context);
    drop((served, crowd));
    report("done");
}

#[test]
fn strangers_do_not_take_the_descriptors_of_who_serves_a_store() {
    let mut job = Job::start("crowd at the store", 2, "shm");
    let has: u64 = job.await_all(&[0], "has")[0].line.parse().expect("a number");
    assert!(has < FEW / 2, "{has} of {FEW}");
    assert_eq!(job.await_all(&[0], "is shut: ")[0].line, "None");
    job.await_all(&[0, 1], "done");
    job.all_end_well(&[0, 1]);
}

// ---- no room for shared memory

pub(crate) fn short_files(seat: &Seat) {
    set_limit(libc::RLIMIT_FSIZE, Some(100 << 10));
    let context = Context::create(seat.options("")).expect("the ranks meet");
    sum(&context, &mut [1.0; 10]);
    barrier(&context);
    report("done");
}

#[test]
fn ranks_without_shared_memory_need_no_room_for_it() {
    let mut job = Job::start("short files", 2, "tcp");
    job.await_all(&[0, 1], "done");
    job.all_end_well(&[0, 1]);
}

pub(crate) fn little_address_space(seat: &Seat) {
    limit_memory(64 << 20);
    let error = Context::create(seat.options("")).err().expect("there is no room for a segment");
    report(format_args!("told {error}"));
}

#[test]
fn a_rank_without_address_space_for_its_memory_is_told_what_limits_it() {
    let mut job = Job::start("little address space", 2, "shm");
    for told in job.await_all(&[0, 1], "told") {
        assert!(told.line.contains("(ulimit -v)"), "rank {}: {}", told.rank, told.line);
    }
    job.all_end_well(&[0, 1]);
}

// ---- no memory left

/// Short enough to be sent unasked.
const SHORT: usize = 60_000;

pub(crate) fn memory_for_messages(seat: &Seat) {
    let context = Context::create(seat.options("")).expect("the ranks meet");
    let mut came = vec![0; SHORT];
    sum(&context, &mut [1.0; 10]);
    if seat.rank == 0 {
        barrier(&context);
        let call = Call { tag: Some(1), ..within(1000) };
        let mut sent = 0u8;
        let error = loop {
            match send(&context, 1, &vec![sent; SHORT], &call) {
                Ok(()) => sent = sent.checked_add(1).expect("room ends"),
                Err(error) => break error,
            }
        };
        report(format_args!("told {error}"));
        send(&context, 1, &[sent], &tagged(3)).expect("it is read again");
    } else {
        let full = fill_memory();
        barrier(&context);
        let error = receive(&context, 0, &mut [0], &within(2000)).expect_err("nobody sends it");
        // What it has memory of its own for comes all the same.
        receive(&context, 0, &mut came, &tagged(1)).expect("the first");
        let first = came.iter().all(|byte| *byte == 0);
        drop(full);
        set_limit(libc::RLIMIT_AS, None);
        report(format_args!("told {error}"));
        assert!(first, "another message");
        let mut sent = [0];
        receive(&context, 0, &mut sent, &tagged(3)).expect("behind all of them");
        for number in 1..sent[0] {
            receive(&context, 0, &mut came, &tagged(1)).expect("a message");
            assert!(came.iter().all(|byte| *byte == number), "another message");
        }
    }
    barrier(&context);
    report("done");
}

/// No more than there is, and `more` bytes.
fn limit_memory(more: u64) {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("the sizes of this process");
    let pages: u64 = statm.split(' ').next().and_then(|pages| pages.parse().ok()).expect("its pages");
    set_limit(libc::RLIMIT_AS, Some(pages * 4096 + more));
}

/// Leaves no room for a message, but for small things. What it returns takes the room.
fn fill_memory() -> Vec<Vec<u8>> {
    let mut full = Vec::with_capacity(100_000);
    let small: Vec<_> = (0..1000).map(|_| (Vec::<u8>::with_capacity(2000), vec![0u8; 40])).collect();
    limit_memory(0);
    loop {
        let mut room = Vec::new();
        if room.try_reserve_exact(SHORT).is_err() {
            break;
        }
        full.push(room);
    }
    full.extend(small.into_iter().map(|(_, between)| between));
    full
}

#[test]
fn a_rank_without_memory_for_messages_lives_and_takes_them_later() {
    for transports in TRANSPORTS {
        // Other threads' share of the heap would count, too.
        let one_heap = [("MALLOC_ARENA_MAX", "1")];
        let mut job = Job::start_with("memory for messages", 2, transports, &one_heap);
        for told in job.await_all(&[0, 1], "told") {
            let text = &told.line;
            assert!(
                text.contains("rank 1 has no memory for the 60000 bytes of a message that rank 0"),
                "{transports}, rank {}: {text}",
                told.rank
            );
        }
        job.await_all(&[0, 1], "done");
        job.all_end_well(&[0, 1]);
    }
}

// ---- forks

pub(crate) fn fork(seat: &Seat) {
    let context = Context::create(seat.options("")).expect("the ranks meet");
    sum(&context, &mut [1.0; 10]);
    // SAFETY: the child calls what unisono promises to refuse, writes, and ends without running anything
    // else.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let error = Verb::new(Kind::Allreduce, 10)
            .run_in(&context, &mut [1.0f32; 10], &Call::default())
            .expect_err("it has no links");
        let clear = error.status() == Status::InvalidUsage && error.text().contains("fork");
        drop(context);
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(if clear { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child's call fails clearly");
    for _ in 0..10 {
        let mut data = vec![1.0; 50_000];
        sum(&context, &mut data);
        assert_eq!(data[49_999], 2.0);
    }
    report("done");
}

#[test]
fn a_forked_child_is_refused_and_the_parent_goes_on() {
    for transports in TRANSPORTS {
        let mut job = Job::start("fork", 2, transports);
        job.await_all(&[0, 1], "done");
        job.all_end_well(&[0, 1]);
    }
}
