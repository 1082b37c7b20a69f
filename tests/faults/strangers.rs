//! Connections of whoever is no rank of the job.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::support::{PATIENCE, TRANSPORTS, sum};
use unisono::communicator::Context;
use unisono::deadline::Deadline;
use unisono::error::{Result, Status};
use unisono::rendezvous::hash::HashStore;
use unisono::rendezvous::secret::SecretKey;
use unisono::rendezvous::store::Store;
use unisono::transport::address::PeerAddress;
use unisono::transport::handshake::{Handshake, Hello, Purpose};

#[test]
fn strangers_are_turned_away_and_do_no_harm() {
    for transports in TRANSPORTS {
        let store: Arc<dyn Store> = Arc::new(HashStore::new());
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for rank in 0..2 {
                let (store, over) = (store.clone(), &over);
                scope.spawn(move || {
                    let context = Context::create(crate::support::options(rank, 2, store, transports));
                    let context = context.expect("the ranks meet");
                    // Rank 0 decides when it is over; all the while sums are right.
                    loop {
                        let mut data =
                            vec![f32::from(u8::from(over.load(Ordering::SeqCst) && rank == 0)); 5000];
                        sum(&context, &mut data);
                        if data[4999] == 1.0 {
                            return;
                        }
                        assert_eq!(data[4999], 0.0);
                    }
                });
            }
            let key = "default/0/rank/0";
            let bytes = store.get(key, Deadline::after(PATIENCE)).expect("the address of rank 0");
            let address = PeerAddress::decode(&bytes).expect("an address");
            // The connections stay open while others come: nobody waits for them.
            let visits: Vec<_> = (0..5).flat_map(|_| (0..5).map(|kind| visit(&address, kind))).collect();
            for mut visitor in visits {
                let mut said = Vec::new();
                // A challenge at most, then the end. A stranger that says nothing is shown out after a while.
                let end = visitor.read_to_end(&mut said);
                let reset = end.as_ref().is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionReset);
                assert!(end.is_ok() || reset, "{transports}: {end:?}");
                assert!(said.len() <= 42, "{transports}: {} bytes for a stranger", said.len());
            }
            over.store(true, Ordering::SeqCst);
        });
    }
}

/// Hands on what rank 1 publishes as a library of other sources would publish it.
struct OtherBuild(HashStore);

impl Store for OtherBuild {
    fn set(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()> {
        let mut value = value.to_vec();
        if key.ends_with("/rank/1") {
            // Behind the version and the length: the first letter of the hash.
            value[2] = if value[2] == b'0' { b'1' } else { b'0' };
        }
        self.0.set(key, &value, deadline)
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        self.0.get(key, deadline)
    }

    fn try_get(&self, key: &str, deadline: Deadline) -> Result<Option<Vec<u8>>> {
        self.0.try_get(key, deadline)
    }

    fn add(&self, key: &str, amount: i64, deadline: Deadline) -> Result<i64> {
        self.0.add(key, amount, deadline)
    }

    fn describe(&self) -> String {
        self.0.describe()
    }
}

#[test]
fn ranks_of_another_build_are_told_long_before_the_deadline() {
    for transports in TRANSPORTS {
        let store: Arc<dyn Store> = Arc::new(OtherBuild(HashStore::new()));
        let began = Instant::now();
        let errors: Vec<_> = std::thread::scope(|scope| {
            let rank = |rank| {
                let options = crate::support::options(rank, 3, store.clone(), transports);
                scope.spawn(move || Context::create(options).map(drop).expect_err("the builds differ"))
            };
            [0, 1, 2].map(rank).into_iter().map(|rank| rank.join().expect("an error")).collect()
        });
        let told: Vec<_> = errors.iter().filter(|error| error.status() == Status::Mismatch).collect();
        assert!(!told.is_empty(), "{transports}: {errors:?}");
        for error in told {
            assert!(error.text().contains("rank 1 ("), "{transports}: {error}");
            assert!(error.text().contains("another build of unisono"), "{transports}: {error}");
        }
        assert!(began.elapsed() < PATIENCE / 2, "{transports}: {:?} {errors:?}", began.elapsed());
    }
}

trait Visitor: Read + Write + Send {}
impl<T: Read + Write + Send> Visitor for T {}

fn visit(address: &PeerAddress, kind: u32) -> Box<dyn Visitor> {
    let mut visitor: Box<dyn Visitor> = match address.addresses.first() {
        Some(address) => {
            let stream = TcpStream::connect(address).expect("it listens");
            stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
            Box::new(stream)
        }
        None => {
            let hex: String = address.local.iter().map(|byte| format!("{byte:02x}")).collect();
            let name = SocketAddr::from_abstract_name(format!("unisono-{hex}")).expect("a name");
            let stream = UnixStream::connect_addr(&name).expect("it listens");
            stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
            Box::new(stream)
        }
    };
    let secret = SecretKey::from_text("a guess");
    let hello = Hello { purpose: Purpose::Control, initiator: 1, target: 0, job: 7, attempt: 1 };
    let (_, hello) = Handshake::initiate(&secret, hello, [3; 32]);
    let words = match kind {
        0 => b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n".repeat(100),
        // Half a hello, then silence.
        1 => hello[..hello.len() / 2].to_vec(),
        // A hello, and a proof made of nothing.
        2 => [&hello[..], &[0; 32]].concat(),
        3 => crate::support::pattern(1, 100_000),
        _ => Vec::new(),
    };
    // It may hang up in the middle.
    let _ = visitor.write_all(&words);
    visitor
}
