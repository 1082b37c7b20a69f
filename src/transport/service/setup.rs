//! What the two ends of a new link tell each other once they have proved themselves.

#![forbid(unsafe_code)]

use crate::transport::wire::{Reader, put_text};

/// The first frame in each direction of a control connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Setup {
    /// The sender's host, for errors.
    pub(super) hostname: String,
    /// The sender's process, for errors.
    pub(super) pid: u32,
    pub(super) data: Data,
}

/// How the link's bytes are to travel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Data {
    /// Through rings. The sender's segment and eventfd are attached to the frame.
    Shm {
        /// The ring in the sender's segment that the receiver writes to.
        ring_offset: u64,
        ring_bytes: u64,
        /// Where in the sender's private memory the cookie is, for a proof that it can be read.
        cookie_address: u64,
        cookie: [u8; 16],
    },
    /// Over this many data connections, opened by the side that opened the control connection.
    Tcp { lanes: u8 },
}

impl Setup {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(128);
        put_text(&mut bytes, &self.hostname);
        bytes.extend_from_slice(&self.pid.to_le_bytes());
        match &self.data {
            Data::Shm { ring_offset, ring_bytes, cookie_address, cookie } => {
                bytes.push(1);
                for number in [ring_offset, ring_bytes, cookie_address] {
                    bytes.extend_from_slice(&number.to_le_bytes());
                }
                bytes.extend_from_slice(cookie);
            }
            Data::Tcp { lanes } => bytes.extend_from_slice(&[2, *lanes]),
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Setup> {
        let mut reader = Reader::new(bytes);
        let (hostname, pid) = (reader.text()?, reader.u32()?);
        let data = match reader.u8()? {
            1 => Data::Shm {
                ring_offset: reader.u64()?,
                ring_bytes: reader.u64()?,
                cookie_address: reader.u64()?,
                cookie: reader.array()?,
            },
            2 => Data::Tcp { lanes: reader.u8()? },
            _ => return None,
        };
        reader.is_done().then_some(Setup { hostname, pid, data })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn survives_the_trip() {
        let shm =
            Data::Shm { ring_offset: 1 << 40, ring_bytes: 4096, cookie_address: u64::MAX, cookie: [5; 16] };
        for data in [shm, Data::Tcp { lanes: 4 }] {
            let setup = Setup { hostname: "node7".into(), pid: 4711, data };
            let bytes = setup.encode();
            assert_eq!(Setup::decode(&bytes), Some(setup));
            assert!((0..bytes.len()).all(|len| Setup::decode(&bytes[..len]).is_none()));
        }
    }

    proptest! {
        #[test]
        fn no_bytes_cause_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            if let Some(setup) = Setup::decode(&bytes) {
                prop_assert_eq!(setup.encode(), bytes);
            }
        }
    }
}
