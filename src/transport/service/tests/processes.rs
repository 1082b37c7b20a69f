//! An endpoint and other processes: that die, exit, fork, idle, or run out of descriptors or of room. The
//! test program runs itself again to play them.

use std::fs::File;
use std::io::Seek;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use super::*;
use crate::not_run::not_run;
use crate::sys::socket::{MAX_FDS, send};

/// Starts this test program as another process that plays `role` as rank 1 towards `address`.
fn spawn(role: &str, address: &PeerAddress) -> Child {
    let hex: String = address.encode().iter().map(|byte| format!("{byte:02x}")).collect();
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "transport::service::tests::processes::other_process", "--nocapture"])
        .env("UNISONO_TEST_ROLE", role)
        .env("UNISONO_TEST_ADDRESS", hex)
        .stdout(Stdio::null())
        .stdin(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Not a test by itself: what [`spawn`] runs. It opens a link to rank 0 and then does what its role says.
#[test]
fn other_process() {
    let Ok(role) = std::env::var("UNISONO_TEST_ROLE") else { return };
    let hex = std::env::var("UNISONO_TEST_ADDRESS").unwrap();
    let bytes: Vec<u8> =
        (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect();
    let address = PeerAddress::decode(&bytes).unwrap();
    let (how, end) = role.split_once(' ').unwrap();
    let node = Node::new(1, 2, 1, over(if how == "shm" { LinkKind::Shm } else { LinkKind::Tcp }));
    node.open(&address);
    let link = exchange(node.link(0), 1, 0);
    if let Some(memory) = &link.memory
        && memory.can_pull
    {
        // The parent sends an address of its memory and what is there.
        let Told::Control(0, message) = node.next() else { panic!("no address") };
        let (at, expected) = message.split_at(8);
        let mut seen = vec![0; expected.len()];
        let at = u64::from_le_bytes(at.try_into().unwrap());
        // SAFETY: another process: the kernel checks.
        unsafe { memory.pull(at, &mut seen) }.unwrap();
        assert_eq!(seen, expected);
    }
    node.registration.send_control(0, b"ready");
    match end {
        // Exits with everything alive: only atexit says goodbye.
        "exit" => {
            std::mem::forget((node, link));
            std::process::exit(0)
        }
        // The same, and its service thread is late with what it has to say before that.
        "late" => {
            let held = hold_service();
            thread::spawn(move || {
                thread::sleep(DROP_TIMEOUT + Duration::from_millis(200));
                drop(held);
            });
            node.registration.send_control(0, b"the cause");
            std::mem::forget((node, link));
            std::process::exit(0)
        }
        "wait" => wait_for_parent(),
        // A process of its own that outlives it, as a data loader would, and holds what it inherited.
        "fork" => {
            // SAFETY: the child does nothing but what may be done after a fork with threads: it reads and
            // leaves.
            if unsafe { libc::fork() } == 0 {
                let mut byte = 0u8;
                // SAFETY: `byte` is one byte long; _exit runs nothing of the parent's.
                unsafe {
                    libc::read(0, (&raw mut byte).cast(), 1);
                    libc::_exit(0)
                }
            }
            node.registration.send_control(0, b"forked");
            wait_for_parent();
        }
        "idle" => {
            // What was said last may still be under way in the first of these; a service that wakes by itself
            // at short intervals passes none.
            let mut status = service_thread_file("status");
            let mut is_quiet = || {
                let before = switches(&mut status);
                thread::sleep(Duration::from_millis(200));
                switches(&mut status) == before
            };
            assert!((0..20).any(|_| is_quiet()), "an idle service does not wake");
        }
        // Out of descriptors, a listener must neither spin nor give up for good.
        "descriptors" => {
            let mut stat = service_thread_file("stat");
            let limit = set_limit(libc::RLIMIT_NOFILE, None);
            let lowest_free = File::open("/dev/null").unwrap().as_raw_fd();
            set_limit(libc::RLIMIT_NOFILE, Some(lowest_free as u64));
            node.registration.send_control(0, &node.registration.address().encode());
            assert!(matches!(node.next(), Told::Control(0, _)), "the parent has connected meanwhile");
            let before = ticks(&mut stat);
            thread::sleep(Duration::from_millis(500));
            assert!(ticks(&mut stat) - before < 10, "the service spins");
            set_limit(libc::RLIMIT_NOFILE, Some(limit));
            node.registration.send_control(0, b"free");
            wait_for_parent();
        }
        _ => panic!("role {role}"),
    }
}

/// Not a test by itself: what [`a_service_whose_thread_cannot_start_leaves_nothing_behind`] runs.
#[test]
fn process_without_room_for_a_thread() {
    if std::env::var("UNISONO_TEST_ROLE").as_deref() != Ok("no thread") {
        return;
    }
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = descriptors();
    // No more than there is: the thread's stack has no place.
    let limit = set_limit(libc::RLIMIT_AS, Some(1 << 20));
    let outcomes = [(); 3].map(|()| Service::of_this_process().err());
    set_limit(libc::RLIMIT_AS, Some(limit));
    for outcome in outcomes {
        let why = outcome.expect("there is no room");
        assert!(why.text().contains("cannot start unisono's background thread"), "{why}");
    }
    assert_eq!(descriptors(), before);
}

#[test]
fn a_service_whose_thread_cannot_start_leaves_nothing_behind() {
    play("process_without_room_for_a_thread", "no thread");
}

/// What a test of this file, which plays `role` without a parent to talk to, writes until it ends well.
fn play(test: &str, role: &str) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("transport::service::tests::processes::{test}"), "--nocapture"])
        .env("UNISONO_TEST_ROLE", role)
        .output()
        .unwrap();
    let [written, told] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(output.status.success(), "{written}{told}");
    written.into_owned()
}

/// What [`process_of_a_crowded_user`] writes where it can do nothing.
const WITHOUT_LIMIT: &str = "skipped: as many descriptors";

/// Not a test by itself: what [`a_link_waits_while_too_many_descriptors_are_under_way`] runs.
#[test]
fn process_of_a_crowded_user() {
    if std::env::var("UNISONO_TEST_ROLE").as_deref() != Ok("crowded") {
        return;
    }
    // The limit is no limit to root. Where this is refused, what is seen below decides.
    // SAFETY: takes no pointers.
    let stays_root = unsafe { libc::geteuid() == 0 && libc::setuid(65534) != 0 };
    set_limit(libc::RLIMIT_NOFILE, Some(64));
    let (near, far) = UnixStream::pair().unwrap();
    let file = File::open("/dev/null").unwrap();
    let fds = [file.as_fd(); MAX_FDS];
    // Nobody takes them out, so the socket is full in the end if nothing else is.
    let full = (0..100_000).find_map(|_| send(near.as_fd(), b"x", &fds).err()).expect("an end");
    if full.raw_os_error() != Some(libc::ETOOMANYREFS) {
        let whose = if stays_root { "of root, who cannot be nobody, " } else { "" };
        println!("{WITHOUT_LIMIT} {whose}are under way here as one likes ({full})");
        return;
    }
    let [a, b] = pair(over(LinkKind::Shm));
    drop(hold_service());
    let mut stat = service_thread_file("stat");
    a.open(b.registration.address());
    let before = ticks(&mut stat);
    thread::sleep(Duration::from_millis(500));
    assert!(ticks(&mut stat) - before < 10, "the service spins");
    let deadline = Deadline::after(LONG);
    let told = loop {
        match a.registration.refusal(LONG) {
            Some(told) => break told,
            None => thread::sleep(Duration::from_millis(10)),
        }
        assert!(!deadline.expired(), "nothing is told");
    };
    assert!(told.contains("rank 1") && told.contains("ulimit -n"), "{told}");
    a.silence();
    b.silence();
    drop((near, far));
    let (to_b, to_a) = (a.link(1), b.link(0));
    assert_eq!((to_b.kind, to_a.kind), (LinkKind::Shm, LinkKind::Shm));
    thread::scope(|scope| {
        scope.spawn(|| exchange(to_b, 0, 1));
        exchange(to_a, 1, 0);
    });
    a.silence();
    b.silence();
}

#[test]
fn a_link_waits_while_too_many_descriptors_are_under_way() {
    let written = play("process_of_a_crowded_user", "crowded");
    if let Some(why) = written.lines().find(|line| line.contains(WITHOUT_LIMIT)) {
        not_run("a_link_waits_while_too_many_descriptors_are_under_way", why);
    }
}

#[test]
fn a_refusal_tells_why_there_is_no_tcp_to_another_host() {
    let there = Node::new(1, 2, 1, Options { host: Some("elsewhere".into()), ..small() });
    for (why, options) in [
        ("switched off", over(LinkKind::Shm)),
        (
            "no network interface is up",
            Options { no_tcp: "no network interface is up", ..over(LinkKind::Shm) },
        ),
    ] {
        let here = Node::new(0, 2, 1, options);
        here.open(there.registration.address());
        let refusal = here.refusal();
        let due = format!("shared memory: it is on another host; TCP: {why}");
        assert!(refusal.text().contains(&due), "{refusal}");
    }
}

#[test]
fn a_refusal_for_a_segment_says_that_room_or_memory_is_missing() {
    let there = Node::new(1, 2, 1, over(LinkKind::Shm));
    let here = Node::new(0, 2, 1, Options { segment_bytes: 0, ..over(LinkKind::Shm) });
    here.open(there.registration.address());
    let refusal = here.refusal();
    assert!(refusal.text().contains("shared memory: no room, or no memory, for a ring of"), "{refusal}");
}

/// Not a test by itself: what [`where_segments_have_no_place_links_are_over_tcp_on_both_sides`] runs.
#[test]
fn process_without_room_for_segments() {
    let role = std::env::var("UNISONO_TEST_ROLE").unwrap_or_default();
    let Some(halves) = role.strip_prefix("half segments of room: ") else { return };
    let halves: u64 = halves.parse().unwrap();
    // Long, so that what else the process maps meanwhile does not matter.
    const SEGMENT: u64 = 2 << 30;
    let [a, b] = pair(Options { segment_bytes: SEGMENT as usize, ..small() });
    // The thread has all that it needs by now.
    drop(hold_service());
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")).expect("a size");
    let kilobytes: u64 = size.trim().trim_end_matches(" kB").parse().unwrap();
    let limit = set_limit(libc::RLIMIT_AS, Some(kilobytes * 1024 + SEGMENT / 2 * halves));
    a.open(b.registration.address());
    let (to_b, to_a) = (a.link(1), b.link(0));
    // Each side maps the other's.
    let kind = if halves < 4 { LinkKind::Tcp } else { LinkKind::Shm };
    assert_eq!((to_b.kind, to_a.kind), (kind, kind));
    a.silence();
    b.silence();
    set_limit(libc::RLIMIT_AS, Some(limit));
}

#[test]
fn where_segments_have_no_place_links_are_over_tcp_on_both_sides() {
    // No place on the side that opens, none on the other, and one on both.
    for halves in [1, 3, 5] {
        play("process_without_room_for_segments", &format!("half segments of room: {halves}"));
    }
}

/// Until killed, or until the parent is gone.
fn wait_for_parent() {
    let _ = std::io::stdin().read(&mut [0; 1]);
}

/// What the kernel says about the service thread of this process.
fn service_thread_file(name: &str) -> File {
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let path = task.unwrap().path();
        if std::fs::read_to_string(path.join("comm")).unwrap().trim() == "unisono" {
            return File::open(path.join(name)).unwrap();
        }
    }
    panic!("there is no service thread")
}

/// How often the thread has gone to sleep or was put to sleep so far.
fn switches(status: &mut File) -> u64 {
    let mut text = String::new();
    status.rewind().unwrap();
    status.read_to_string(&mut text).unwrap();
    let counts = text.lines().filter(|line| line.contains("ctxt_switches"));
    counts.map(|line| line.split_whitespace().last().unwrap().parse::<u64>().unwrap()).sum()
}

/// Hundredths of a second of processor time that the thread has used so far.
fn ticks(stat: &mut File) -> u64 {
    let mut text = String::new();
    stat.rewind().unwrap();
    stat.read_to_string(&mut text).unwrap();
    // Fields 14 and 15; the second is the name, in parentheses.
    let fields = text.rsplit(')').next().unwrap().split_whitespace().skip(11).take(2);
    fields.map(|field| field.parse::<u64>().unwrap()).sum()
}

/// Sets a limit of this process, if one is given; returns what it was.
fn set_limit(resource: libc::__rlimit_resource_t, to: Option<u64>) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both calls only use `limit`, which outlives them.
    unsafe {
        assert_eq!(libc::getrlimit(resource, &mut limit), 0);
        let old = limit.rlim_cur;
        if let Some(to) = to {
            limit.rlim_cur = to;
            assert_eq!(libc::setrlimit(resource, &limit), 0);
        }
        old
    }
}

/// A child process with a link to `node` that has carried bytes and is ready for its end.
fn child(node: &Node, role: &str) -> (Child, Link) {
    let child = spawn(role, node.registration.address());
    let link = exchange(node.link(1), 0, 1);
    if link.memory.as_ref().is_some_and(|memory| memory.can_pull) {
        let secret: Vec<u8> = (0..5000u32).map(|place| (place * 7) as u8).collect();
        let at = (secret.as_ptr().expose_provenance() as u64).to_le_bytes();
        node.registration.send_control(1, &[&at, &secret[..]].concat());
        // `secret` must outlive the child's look.
        match node.next() {
            Told::Control(1, message) => assert_eq!(message, b"ready"),
            other => panic!("{}", name(&other)),
        }
    } else {
        assert!(matches!(node.next(), Told::Control(1, _)));
    }
    (child, link)
}

#[test]
fn a_killed_process_is_noticed_and_named() {
    for how in ["shm", "tcp"] {
        let node = Node::new(0, 2, 1, small());
        let (mut child, _link) = child(&node, &format!("{how} wait"));
        child.kill().unwrap();
        match node.next() {
            Told::Lost(1, why) => {
                assert_eq!(why.status(), Status::PeerFailed);
                assert!(why.text().contains(&format!("pid {}", child.id())), "{why}");
                assert_eq!(why.text().contains("its process has ended"), how == "shm", "{why}");
            }
            other => panic!("{}", name(&other)),
        }
        child.wait().unwrap();
        node.silence();
    }
}

#[test]
fn a_process_that_forked_is_noticed_when_it_dies() {
    for how in ["shm", "tcp"] {
        let node = Node::new(0, 2, 1, small());
        let (mut child, _link) = child(&node, &format!("{how} fork"));
        assert!(matches!(node.next(), Told::Control(1, message) if message == b"forked"));
        // Its own child lives on until this end of the pipe closes.
        let pipe = child.stdin.take();
        child.kill().unwrap();
        let told = node.next();
        assert!(matches!(told, Told::Lost(1, _)), "{}", name(&told));
        child.wait().unwrap();
        drop(pipe);
    }
}

#[test]
fn an_idle_service_sleeps() {
    for how in ["shm", "tcp"] {
        let node = Node::new(0, 2, 1, small());
        let (mut child, _link) = child(&node, &format!("{how} idle"));
        let told = node.next();
        assert!(matches!(told, Told::Left(1)), "{}", name(&told));
        assert!(child.wait().unwrap().success());
    }
}

#[test]
fn a_listener_without_descriptors_waits_and_recovers() {
    let node = Node::new(0, 3, 1, small());
    let (mut child, _link) = child(&node, "tcp descriptors");
    let Told::Control(1, address) = node.next() else { panic!("no address") };
    let address = PeerAddress::decode(&address).unwrap().addresses[0];
    // The kernel takes them; the child cannot.
    let mut waiting = [(); 3].map(|()| TcpStream::connect(address).unwrap());
    node.registration.send_control(1, b"go");
    assert!(matches!(node.next(), Told::Control(1, message) if message == b"free"));
    // Accepted now, and turned away for its garbage.
    waiting[2].set_read_timeout(Some(LONG)).unwrap();
    waiting[2].write_all(&[0x5a; 100]).unwrap();
    let answer = waiting[2].read(&mut [0; 100]);
    assert!(matches!(answer, Ok(0)) || answer.is_err_and(|cause| cause.kind() == ErrorKind::ConnectionReset));
    drop(child.stdin.take());
    let told = node.next();
    assert!(matches!(told, Told::Left(1)), "{}", name(&told));
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_normal_exit_is_a_goodbye() {
    for how in ["shm", "tcp"] {
        let node = Node::new(0, 2, 1, small());
        let (mut child, _link) = child(&node, &format!("{how} exit"));
        match node.next() {
            Told::Left(1) => {}
            other => panic!("{}", name(&other)),
        }
        assert!(child.wait().unwrap().success());
        node.silence();
    }
}

#[test]
fn a_process_does_not_exit_before_its_last_words_are_said() {
    for how in ["shm", "tcp"] {
        let node = Node::new(0, 2, 1, small());
        let (mut child, _link) = child(&node, &format!("{how} late"));
        match node.next() {
            Told::Control(1, message) => assert_eq!(message, b"the cause"),
            other => panic!("{}", name(&other)),
        }
        assert!(matches!(node.next(), Told::Left(1)));
        assert!(child.wait().unwrap().success());
    }
}

#[test]
fn a_forked_child_leaves_the_parents_endpoint_alone() {
    let [a, b] = pair(over(LinkKind::Shm));
    a.open(b.registration.address());
    let (_to_b, _to_a) = (a.link(1), b.link(0));
    // SAFETY: the child calls what returns at once in a child, without locks or memory of its own, and
    // leaves.
    let child = unsafe { libc::fork() };
    if child == 0 {
        a.registration.kick();
        a.registration.close(Deadline::after(LONG));
        // SAFETY: drops the child's copy as an unwinding program would; the test never sees it again.
        unsafe { std::ptr::drop_in_place(Arc::as_ptr(&a.registration).cast_mut()) };
        // SAFETY: ends the child without running anything of the parent's.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: `status` outlives the call; `child` is a child of ours that nobody else reaps.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0);
    a.silence();
    b.silence();
    a.registration.send_control(1, b"still here");
    assert!(matches!(b.next(), Told::Control(0, _)));
}
