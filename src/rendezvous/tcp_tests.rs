//! The TCP store, client and server together, with friends and with strangers.

use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, TcpListener};

use super::*;
use crate::rendezvous::battery;
use crate::rendezvous::scratch::reserved;
use crate::rendezvous::tcp_server::{Limits, ServerHandle};

fn loopback() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

fn client(server: &ServerHandle, secret: Option<&SecretKey>) -> TcpStore {
    TcpStore::connect("127.0.0.1", server.port(), secret, soon()).unwrap()
}

#[test]
fn passes_the_battery_from_many_clients() {
    let key = SecretKey::random().unwrap();
    let server = ServerHandle::start(loopback(), Some(&key)).unwrap();
    battery::run(|| client(&server, Some(&key)));
}

#[test]
fn passes_the_battery_from_one_client_shared_by_threads() {
    let server = ServerHandle::start_everywhere(0, None).unwrap();
    let store = std::sync::Arc::new(client(&server, None));
    battery::run(|| store.clone());
}

#[test]
fn speaks_ipv6_and_host_names() {
    let server = ServerHandle::start_everywhere(0, None).unwrap();
    TcpStore::connect("localhost", server.port(), None, soon()).unwrap().set("k", b"v", soon()).unwrap();
    if TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_ok() {
        let store = TcpStore::connect("::1", server.port(), None, soon()).unwrap();
        assert_eq!(store.try_get("k", soon()).unwrap().as_deref(), Some(&b"v"[..]));
        assert_eq!(store.describe(), format!("tcp store [::1]:{}", server.port()));
    }
}

#[test]
fn waits_for_a_server_that_starts_later() {
    let (_place, address) = reserved();
    thread::scope(|scope| {
        let client = scope.spawn(|| TcpStore::connect("127.0.0.1", address.port(), None, soon()));
        thread::sleep(Duration::from_millis(50));
        let server = ServerHandle::start(address, None).unwrap();
        client.join().unwrap().unwrap().set("k", b"v", soon()).unwrap();
        drop(server);
    });
}

#[test]
fn nobody_there_names_host_port_cause_and_time() {
    let (_place, address) = reserved();
    let port = address.port();
    let deadline = Deadline::after(Duration::from_millis(100));
    let error = TcpStore::connect("127.0.0.1", port, None, deadline).unwrap_err();
    assert_eq!(error.status(), Status::Timeout);
    for part in [&format!("127.0.0.1:{port}"), "Connection refused", "within "] {
        assert!(error.text().contains(part), "{error}");
    }
    let error = TcpStore::connect("host.invalid", port, None, deadline).unwrap_err();
    assert!(error.text().contains("resolve") && error.text().contains("host.invalid"), "{error}");
}

#[test]
fn a_host_that_is_gone_is_noticed_while_a_request_is_on_its_way() {
    let server = ServerHandle::start(loopback(), None).unwrap();
    let store = client(&server, None);
    // Probes are for connections on which nothing is on its way. This can only be asked for: no host is lost
    // here.
    let limit = SockRef::from(&*store.shared().idle[0].stream).tcp_user_timeout().unwrap();
    assert!(limit.is_some_and(|limit| limit <= ANSWER), "{limit:?}");
}

#[test]
fn who_is_called_off_tries_no_further_address() {
    // They take connections and say nothing.
    let mute = [(); 2].map(|()| TcpListener::bind(loopback()).unwrap());
    let addresses = [0, 1].map(|place: usize| mute[place].local_addr().unwrap());
    let deadline = Deadline::after(Duration::from_millis(100));
    let key = SecretKey::new([1; 32]);
    let error = TcpStore::connect_any(&addresses, &key, [0; 16], None, &|| true, deadline).unwrap_err();
    assert_eq!(error.status(), Status::Aborted);
    mute[1].set_nonblocking(true).unwrap();
    assert_eq!(mute[1].accept().unwrap_err().kind(), ErrorKind::WouldBlock);
}

#[test]
fn a_server_that_is_silent_at_one_of_its_addresses_is_not_taken_for_gone() {
    let (_place, refuses) = reserved();
    let mute = TcpListener::bind(loopback()).unwrap();
    let addresses = [refuses, mute.local_addr().unwrap()];
    let key = SecretKey::new([1; 32]);
    let statuses = [&addresses[..], &addresses[..1]].map(|addresses| {
        let (patience, deadline) = (Some(Duration::ZERO), Deadline::after(Duration::from_millis(100)));
        TcpStore::connect_any(addresses, &key, [0; 16], patience, &|| false, deadline).unwrap_err().status()
    });
    assert_eq!(statuses, [Status::Timeout, Status::PeerFailed]);
}

/// As one whose process is stopped: the kernel accepts, nobody greets.
#[test]
fn a_server_that_has_greeted_and_answers_no_more_is_not_taken_for_another_program() {
    let server = ServerHandle::start(loopback(), None).expect("a server");
    let between = TcpListener::bind(loopback()).expect("a listener");
    let port = between.local_addr().expect("an address").port();
    let passes_one_on = thread::spawn(move || {
        let (client, _) = between.accept().expect("a client");
        let upstream = TcpStream::connect(server.local_address()).expect("the server");
        let ways = [(&client, &upstream), (&upstream, &client)];
        thread::scope(|scope| {
            for (mut from, mut to) in ways {
                scope.spawn(move || {
                    let _ = std::io::copy(&mut from, &mut to);
                    let _ = to.shutdown(Shutdown::Write);
                });
            }
        });
    });
    let store = TcpStore::connect("127.0.0.1", port, None, soon()).expect("it is greeted");
    thread::scope(|scope| {
        // Has the connection meanwhile.
        let waits = scope.spawn(|| store.get("later", Deadline::after(Duration::from_secs(2))));
        thread::sleep(Duration::from_millis(100));
        let error =
            store.try_get("key", Deadline::after(Duration::from_millis(100))).expect_err("nobody answers");
        assert_eq!(error.status(), Status::Timeout, "{error}");
        assert!(error.text().contains("rank 0 or the launcher): it may be stopped"), "{error}");
        assert_eq!(waits.join().expect("no panic").expect_err("nobody sets it").status(), Status::Timeout);
    });
    drop(store);
    passes_one_on.join().expect("it has passed all on");
}

#[test]
fn an_address_that_there_is_no_way_to_says_nothing_of_a_server() {
    let (_place, refuses) = reserved();
    // To all hosts there is no connection.
    let nowhere = SocketAddr::from((Ipv4Addr::BROADCAST, 1));
    let key = SecretKey::new([1; 32]);
    let error = |addresses: &[SocketAddr], deadline| {
        let patience = Some(Duration::ZERO);
        TcpStore::connect_any(addresses, &key, [0; 16], patience, &|| false, deadline).unwrap_err()
    };
    for addresses in [[refuses, nowhere], [nowhere, refuses]] {
        let error = error(&addresses, soon());
        assert_eq!(error.status(), Status::PeerFailed, "{error}");
        assert!(error.text().contains(&format!(": {refuses}: Connection refused")), "{error}");
        for cause in ["is gone or has given the meeting up", "or these are not its addresses"] {
            assert!(error.text().contains(cause), "{error}");
        }
    }
    let error = error(&[nowhere], Deadline::after(Duration::from_millis(100)));
    assert_eq!(error.status(), Status::Timeout, "{error}");
}

#[test]
fn what_comes_late_or_means_something_else_does_not_say_that_a_server_is_gone() {
    let sign = |code, after| Sign::of(&io::Error::from_raw_os_error(code), after);
    for code in [libc::ENETUNREACH, libc::EHOSTUNREACH, libc::EADDRNOTAVAIL] {
        assert_eq!(sign(code, Duration::ZERO), Sign::Nothing);
        assert_eq!(sign(code, Duration::from_secs(3)), Sign::Unclear);
    }
    assert_eq!(sign(libc::EAFNOSUPPORT, Duration::ZERO), Sign::Nothing);
    for code in [libc::ETIMEDOUT, libc::ECONNRESET, libc::EACCES] {
        assert_eq!(sign(code, Duration::ZERO), Sign::Unclear);
    }
    assert_eq!(sign(libc::EMFILE, Duration::ZERO), Sign::Lacking);
    assert_eq!(sign(libc::ECONNREFUSED, Duration::from_secs(3)), Sign::Gone);
}

#[test]
fn a_wrong_or_missing_secret_fails_at_once_on_both_sides() {
    let (right, wrong) = (SecretKey::new([1; 32]), SecretKey::new([2; 32]));
    let guarded = ServerHandle::start(loopback(), Some(&right)).unwrap();
    let open = ServerHandle::start(loopback(), None).unwrap();
    for (server, secret, text) in [
        (&guarded, Some(&wrong), "not the server's"),
        (&guarded, None, "asks for a secret"),
        (&open, Some(&right), "the server has none"),
    ] {
        // No deadline: only an immediate refusal returns.
        let error = TcpStore::connect("127.0.0.1", server.port(), secret, Deadline::NEVER).unwrap_err();
        assert!(error.text().contains(text), "{error}");
        assert_eq!(error.status(), Status::InvalidUsage);
    }
    client(&guarded, Some(&right)).set("k", b"v", soon()).unwrap();
}

#[test]
fn a_server_that_does_not_know_the_secret_is_not_believed() {
    let listener = TcpListener::bind(loopback()).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            let hello = ServerHello { flags: wire::WITH_SECRET, instance: [0; 16], nonce: [0; 32] };
            stream.write_all(&hello.bytes()).unwrap();
            stream.read_exact(&mut [0; wire::CLIENT_HELLO]).unwrap();
            stream.write_all(&[0; wire::VERDICT]).unwrap();
        });
        let error = TcpStore::connect("127.0.0.1", port, Some(&SecretKey::new([1; 32])), soon()).unwrap_err();
        assert!(error.text().contains("does not know the secret"), "{error}");
    });
}

#[test]
fn another_program_on_the_port_is_recognised() {
    let listener = TcpListener::bind(loopback()).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(&[b'H'; 100]).unwrap();
        });
        let error = TcpStore::connect("127.0.0.1", port, None, soon()).unwrap_err();
        assert!(error.text().contains("not a store"), "{error}");
    });
    // One that never speaks: the deadline ends the wait.
    let deadline = Deadline::after(Duration::from_millis(100));
    let error = TcpStore::connect("127.0.0.1", port, None, deadline).unwrap_err();
    assert_eq!(error.status(), Status::Timeout);
    assert!(error.text().contains("no greeting"), "{error}");
}

#[test]
fn a_store_of_another_version_is_told_from_another_program() {
    let listener = TcpListener::bind(loopback()).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            let mut hello = [0; wire::SERVER_HELLO];
            hello[..8].copy_from_slice(b"UNISTOR1");
            stream.write_all(&hello).unwrap();
        });
        // No deadline: only an immediate refusal returns.
        let error = TcpStore::connect("127.0.0.1", port, None, Deadline::NEVER).unwrap_err();
        assert_eq!(error.status(), Status::Mismatch, "{error}");
        for part in ["is of another version of unisono", "install one build", "unisono-run"] {
            assert!(error.text().contains(part), "{error}");
        }
    });
}

#[test]
fn a_server_that_ends_during_a_wait_fails_all_calls_with_one_cause() {
    let server = ServerHandle::start(loopback(), None).unwrap();
    let store = client(&server, None);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| store.get("never", Deadline::NEVER).unwrap_err());
        thread::sleep(Duration::from_millis(50));
        drop(server);
        let error = waiter.join().unwrap();
        assert_eq!(error.status(), Status::PeerFailed);
        assert!(error.text().contains("waiting for key 'never'"), "{error}");
        assert_eq!(store.set("k", b"v", soon()).unwrap_err(), error);
    });
}

#[test]
fn a_restarted_server_is_not_taken_for_the_lost_one() {
    let (_place, address) = reserved();
    let server = ServerHandle::start(address, None).unwrap();
    let store = client(&server, None);
    store.shared().idle.clear();
    drop(server);
    let _other = ServerHandle::start(address, None).unwrap();
    let error = store.get("k", soon()).unwrap_err();
    assert_eq!(error.status(), Status::PeerFailed);
    assert!(error.text().contains("another has its place"), "{error}");
    assert_eq!(store.try_get("k", soon()).unwrap_err(), error);
}

#[test]
fn garbage_and_oversize_frames_end_only_their_connection() {
    let server = ServerHandle::start(loopback(), None).unwrap();
    let store = client(&server, None);
    let closed_after = |bytes: &[u8], greet: bool| {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.read_exact(&mut [0; wire::SERVER_HELLO]).unwrap();
        if greet {
            let hello = ClientHello { flags: 0, nonce: [0; 32], tag: [0; 32] };
            stream.write_all(&hello.bytes()).unwrap();
            stream.read_exact(&mut [0; wire::VERDICT]).unwrap();
        }
        stream.write_all(bytes).unwrap();
        match stream.read(&mut [0; 1]) {
            Ok(count) => assert_eq!(count, 0, "the server answered garbage"),
            Err(cause) => assert_eq!(cause.kind(), ErrorKind::ConnectionReset),
        }
    };
    closed_after(&[b'G'; 200], false);
    let head =
        |operation, key: u32, body: u32| [&[operation][..], &key.to_le_bytes(), &body.to_le_bytes()].concat();
    for frame in [
        head(0, 0, 0),
        head(9, 1, 1),
        head(Operation::Set as u8, wire::MAX_KEY as u32 + 1, 0),
        head(Operation::Set as u8, 1, wire::MAX_VALUE as u32 + 1),
        head(Operation::Set as u8, u32::MAX, u32::MAX),
        head(Operation::Get as u8, 1, 7),
        head(Operation::Add as u8, 1, 9),
        head(Operation::TryGet as u8, 1, 1),
    ] {
        closed_after(&frame, true);
    }
    store.set("still", b"here", soon()).unwrap();
    assert_eq!(client(&server, None).get("still", soon()).unwrap(), b"here");
}

#[test]
fn strangers_are_few_and_are_sent_away() {
    let limits = Limits { strangers: 3, greeting: Duration::from_secs(2), ..Limits::default() };
    let key = SecretKey::new([1; 32]);
    let server = ServerHandle::start_with(loopback(), Some(&key), limits).unwrap();
    let store = client(&server, Some(&key));
    let mut streams: Vec<TcpStream> = (0..6)
        .map(|_| {
            let mut stream = TcpStream::connect(server.address()).unwrap();
            stream.read_exact(&mut [0; wire::SERVER_HELLO]).unwrap();
            stream
        })
        .collect();
    // Half open, dripping bytes: neither keeps its place.
    streams[5].write_all(&wire::MAGIC[..3]).unwrap();
    store.set("k", b"v", soon()).unwrap();
    client(&server, Some(&key)).get("k", soon()).unwrap();
    for stream in &mut streams {
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        // The server closes with unread bytes in its buffer, which a reset tells.
        let end = stream.read(&mut [0; 1]);
        assert!(matches!(end, Ok(0)) || end.is_err_and(|cause| cause.kind() == ErrorKind::ConnectionReset));
    }
}

#[test]
fn a_slow_reader_and_a_vanished_waiter_disturb_nobody() {
    let server = ServerHandle::start(loopback(), None).unwrap();
    let store = client(&server, None);
    store.set("large", &vec![1; wire::MAX_VALUE], soon()).unwrap();
    let slow = dial(server.address(), None, None, soon()).ok().unwrap().0;
    let head = RequestHead { operation: Operation::TryGet, key: 5, body: 0 };
    let request = [&head.bytes()[..], b"large"].concat();
    // Several requests at once, none of whose answers is read.
    (&*slow).write_all(&request.repeat(8)).unwrap();
    let waiter = dial(server.address(), None, None, soon()).ok().unwrap().0;
    let head = RequestHead { operation: Operation::Get, key: 5, body: 8 };
    (&*waiter).write_all(&[&head.bytes()[..], b"later", &u64::MAX.to_le_bytes()].concat()).unwrap();
    waiter.shutdown(Shutdown::Write).unwrap();
    assert_eq!((&*waiter).read(&mut [0; 1]).unwrap(), 0);
    store.set("later", b"x", soon()).unwrap();
    assert_eq!(store.get("later", soon()).unwrap(), b"x");
    drop(slow);
    assert_eq!(store.get("large", soon()).unwrap().len(), wire::MAX_VALUE);
}

#[test]
fn a_full_server_says_so_and_limits_what_it_keeps() {
    let limits = Limits { connections: 1, stored: 100, ..Limits::default() };
    let server = ServerHandle::start_with(loopback(), None, limits).unwrap();
    let store = client(&server, None);
    // On a busy machine the first tries may end before the server has answered.
    let refused = [500, 5000, 20_000].into_iter().any(|milliseconds| {
        let deadline = Deadline::after(Duration::from_millis(milliseconds));
        let error = TcpStore::connect("127.0.0.1", server.port(), None, deadline).unwrap_err();
        error.text().contains("no room")
    });
    assert!(refused);
    store.set("k", &[0; 90], soon()).unwrap();
    let error = store.set("l", &[0; 90], soon()).unwrap_err();
    assert!(error.text().contains("the store is full (91 of 100 bytes"), "{error}");
    store.set("k", &[0; 99], soon()).unwrap();
}

#[test]
fn long_values_that_come_at_once_wait_for_each_other() {
    let limits = Limits { incomplete: wire::MAX_VALUE + wire::MAX_VALUE / 4, ..Limits::default() };
    let server = ServerHandle::start_with(loopback(), None, limits).unwrap();
    let half = dial(server.address(), None, None, soon()).ok().unwrap().0;
    let head = RequestHead { operation: Operation::Set, key: 4, body: wire::MAX_VALUE };
    let request = [&head.bytes()[..], b"half", &vec![1; wire::MAX_VALUE]].concat();
    let (first, rest) = request.split_at(wire::MAX_VALUE / 2);
    (&*half).write_all(first).unwrap();
    std::thread::scope(|scope| {
        let others: Vec<_> = (0..3)
            .map(|number| {
                let store = client(&server, None);
                scope.spawn(move || store.set(&format!("k{number}"), &vec![2; wire::MAX_VALUE], soon()))
            })
            .collect();
        // What is short waits for nobody.
        let store = client(&server, None);
        for number in 0..100 {
            store.set("short", &vec![3; number], soon()).unwrap();
        }
        // One that waits and goes leaves its place to others.
        let gone = dial(server.address(), None, None, soon()).ok().unwrap().0;
        (&*gone).write_all(&request[..100_000]).unwrap();
        drop(gone);
        (&*half).write_all(rest).unwrap();
        for other in others {
            other.join().unwrap().unwrap();
        }
        assert_eq!(store.get("half", soon()).unwrap().len(), wire::MAX_VALUE);
        assert_eq!(store.get("k2", soon()).unwrap().len(), wire::MAX_VALUE);
    });
}

#[test]
fn keys_and_values_beyond_the_limits_are_refused_before_they_travel() {
    let server = ServerHandle::start(loopback(), None).unwrap();
    let store = client(&server, None);
    let error = store.set(&"k".repeat(wire::MAX_KEY + 1), b"", soon()).unwrap_err();
    assert_eq!(error.status(), Status::InvalidArgument);
    let error = store.set("k", &vec![0; wire::MAX_VALUE + 1], soon()).unwrap_err();
    assert_eq!(error.status(), Status::InvalidArgument);
    store.set(&"k".repeat(wire::MAX_KEY), b"", soon()).unwrap();
}

#[test]
fn a_port_in_use_is_named() {
    let server = ServerHandle::start(loopback(), None).unwrap();
    let error = ServerHandle::start(server.address(), None).err().expect("the port is taken");
    assert!(error.text().contains(&server.address().to_string()), "{error}");
    assert!(error.text().contains("in use"), "{error}");
}

/// Greets as a server does and reads one request, of which it takes `body` bytes after the key `k`.
fn greet_and_read(listener: &TcpListener, body: usize) -> TcpStream {
    let (mut stream, _) = listener.accept().unwrap();
    stream.write_all(&ServerHello { flags: 0, instance: [0; 16], nonce: [0; 32] }.bytes()).unwrap();
    stream.read_exact(&mut [0; wire::CLIENT_HELLO]).unwrap();
    let mut verdict = [0; wire::VERDICT];
    verdict[0] = Verdict::Welcome as u8;
    stream.write_all(&verdict).unwrap();
    let head = RequestHead { operation: Operation::Set, key: 1, body }.bytes().len();
    stream.read_exact(&mut vec![0; head + 1 + body]).unwrap();
    stream
}

#[test]
fn a_server_that_stands_still_costs_no_more_than_the_time_given_and_may_go_on() {
    let listener = TcpListener::bind(loopback()).unwrap();
    let port = listener.local_addr().unwrap().port();
    let soon_over = || Deadline::after(Duration::from_millis(50));
    thread::scope(|scope| {
        let server = scope.spawn(|| {
            // As many requests as the client makes without an answer; the next is answered.
            let _silent = [1, 0, 8, 8].map(|body| greet_and_read(&listener, body));
            let mut answering = greet_and_read(&listener, 1);
            answering.write_all(&[&[Answer::Done as u8][..], &[0; 4]].concat()).unwrap();
            answering
        });
        let store = TcpStore::connect("127.0.0.1", port, None, soon()).unwrap();
        let since = Instant::now();
        let errors = [
            store.set("k", b"v", soon_over()).unwrap_err(),
            store.try_get("k", soon_over()).unwrap_err(),
            store.add("k", 1, soon_over()).unwrap_err(),
            store.get("k", soon_over()).unwrap_err(),
        ];
        let elapsed = since.elapsed();
        // The server ends with this one, before anything is asserted.
        let answered = store.set("k", b"v", soon());
        server.join().unwrap();
        answered.unwrap();
        assert!(elapsed < Duration::from_secs(4), "{elapsed:?}");
        for error in errors {
            assert_eq!(error.status(), Status::Timeout);
            for part in [&format!("127.0.0.1:{port}"), "key 'k'", "no answer within "] {
                assert!(error.text().contains(part), "{error}");
            }
        }
    });
}

#[test]
fn what_a_rank_says_that_cannot_join_is_there_when_the_server_is_gone() {
    let server = ServerHandle::start(loopback(), None).unwrap();
    let [waits, idle, fails] = [(); 3].map(|()| client(&server, None));
    let key = format!("job/{REFUSAL}");
    thread::scope(|scope| {
        let waiting = scope.spawn(|| waits.get("job/rank/1", soon()).unwrap_err());
        // Once may be before it waits.
        while !waiting.is_finished() {
            fails.set(&key, b"no descriptors", soon()).unwrap();
            thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(waiting.join().unwrap().status(), Status::PeerFailed);
    });
    // The greeting is over when it is connected; what has been said follows at once.
    let late = client(&server, None);
    late.try_get("anything", soon()).unwrap();
    drop(server);
    for client in [waits, idle, late] {
        assert_eq!(client.try_get(&key, soon()).unwrap().as_deref(), Some(&b"no descriptors"[..]));
        assert!(client.try_get("job/rank/1", soon()).is_err());
        assert!(client.try_get(&format!("other/{REFUSAL}"), soon()).is_err());
    }
}

#[test]
fn who_goes_before_its_key_exists_leaves_what_it_wanted_to_be_said() {
    let server = ServerHandle::start(loopback(), None).unwrap();
    let refusal = format!("job/{REFUSAL}");
    let (waits, goes) = (client(&server, None), client(&server, None));
    goes.will("job/rank/1", &refusal, b"1 has gone", soon()).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| waits.get("job/rank/1", soon()));
        // Also before it waits.
        drop(goes);
        match waiting.join().unwrap() {
            Ok(value) => assert!(value.is_empty()),
            Err(error) => assert_eq!(error.status(), Status::PeerFailed, "{error}"),
        }
    });
    assert!(waits.get("job/rank/1", soon()).unwrap().is_empty());
    assert_eq!(waits.try_get(&refusal, soon()).unwrap().as_deref(), Some(&b"1 has gone"[..]));
    // Nothing takes the place of what has been said.
    let other = client(&server, None);
    other.will("job/rank/2", &refusal, b"2 has gone", soon()).unwrap();
    drop(other);
    assert!(waits.get("job/rank/2", soon()).unwrap().is_empty());
    assert_eq!(waits.try_get(&refusal, soon()).unwrap().as_deref(), Some(&b"1 has gone"[..]));
}

#[test]
fn a_will_is_void_once_its_key_exists() {
    let server = ServerHandle::start(loopback(), None).unwrap();
    let [stays, goes] = [(); 2].map(|()| client(&server, None));
    for key in ["job/rank/1", "another/rank/1"] {
        goes.will(key, &format!("{key}/{REFUSAL}"), b"gone", soon()).unwrap();
    }
    goes.set("job/rank/1", b"here", soon()).unwrap();
    drop(goes);
    assert!(stays.get("another/rank/1", soon()).unwrap().is_empty());
    assert_eq!(stays.get("job/rank/1", soon()).unwrap(), b"here");
    assert_eq!(stays.try_get(&format!("job/rank/1/{REFUSAL}"), soon()).unwrap(), None);
}

#[test]
fn a_client_that_gives_up_a_connection_has_not_gone() {
    let server = ServerHandle::start(loopback(), None).unwrap();
    let [looks, stays] = [(); 2].map(|()| client(&server, None));
    stays.will("key", REFUSAL, b"gone", soon()).unwrap();
    // An answer that comes late, as of a server that stood still.
    let now = Deadline::after(Duration::ZERO);
    let error = stays.call(Operation::Get, "never", &u64::MAX.to_le_bytes(), now).unwrap_err();
    assert_eq!(error.status(), Status::Timeout, "{error}");
    // More calls at a time than connections are kept when idle.
    thread::scope(|scope| {
        for _ in 0..2 * KEPT {
            scope.spawn(|| stays.will("key", REFUSAL, b"gone", soon()).unwrap());
        }
    });
    let soon_over = Deadline::after(Duration::from_millis(300));
    assert_eq!(looks.get("key", soon_over).unwrap_err().status(), Status::Timeout);
    drop(stays);
    assert!(looks.get("key", soon()).unwrap().is_empty());
}

#[test]
fn a_client_whose_process_ends_has_gone_though_a_child_of_it_lives() {
    let server = ServerHandle::start(loopback(), None).unwrap();
    let [looks, goes] = [(); 2].map(|()| client(&server, None));
    goes.will("key", REFUSAL, b"gone", soon()).unwrap();
    fork::tests::beside_a_child(|| {
        drop(goes);
        assert_eq!(looks.get(REFUSAL, soon()).unwrap(), b"gone");
    });
}
