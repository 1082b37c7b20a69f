//! Sends and receives as they were called: checked.

use std::sync::Arc;

use super::Call;
use super::context::{Context, Membership};
use crate::collective::checked;
use crate::collective::request::{Counts, Kind, Request};
use crate::engine::group::Group;
use crate::engine::lane::{Destination, Source};
use crate::engine::point::Message;
use crate::error::{Result, fail};
use crate::signature::Signature;

impl Context {
    /// What a send or a receive is, and the group that it is in.
    pub(super) fn point(&self, request: &Request, call: &Call) -> Result<(&Arc<Group>, Signature, Message)> {
        if call.algorithm.unwrap_or(0) != 0 {
            fail!(InvalidArgument, "{} has one algorithm only: leave it unset", request.kind.name());
        }
        let (rank, size) = (self.rank(), self.size());
        let (count, of) = match &request.counts {
            Counts::Uniform(count) => (*count, None),
            Counts::From { count, ranks } if request.kind == Kind::ReceiveAny => {
                if let Some(&outside) = ranks.iter().find(|&&rank| rank >= size) {
                    fail!(
                        InvalidArgument,
                        "rank {outside} to receive from is out of range: the group has {size} ranks, 0 to {}",
                        size - 1
                    );
                }
                // It sends itself nothing: in a list of all ranks it does no harm.
                let others: Arc<[u32]> = ranks.iter().copied().filter(|&other| other != rank).collect();
                if others.is_empty() {
                    fail!(InvalidArgument, "the ranks to receive from are none but this rank itself");
                }
                (*count, Some(others))
            }
            _ => fail!(InvalidArgument, "{} takes one count, not a list", request.kind.name()),
        };
        if request.kind != Kind::ReceiveAny {
            let peer = request.root;
            if peer >= size {
                fail!(
                    InvalidArgument,
                    "peer {peer} is out of range: the group has {size} ranks, 0 to {}",
                    size - 1
                );
            }
            if peer == rank {
                fail!(InvalidArgument, "peer {peer} is this rank itself; copy instead of sending");
            }
        }
        let Membership::Group(group) = self.membership() else {
            fail!(InvalidUsage, "a group of one has nobody to receive from");
        };
        let len = checked::bytes("buffer", count, request.dtype.size() as u64, request.dtype)?;
        let sends = request.kind == Kind::Send;
        let null = if sends { request.input.is_null() } else { request.output.is_null() };
        if null && len > 0 {
            fail!(InvalidArgument, "the buffer is NULL, but has {len} bytes to {}", request.kind.name());
        }
        let from = Source { address: request.input, len };
        let into = Destination { address: request.output, len };
        let message = match request.kind {
            Kind::Send => Message::Send { to: request.root, from },
            Kind::Receive => Message::Receive { from: request.root, into },
            _ => Message::ReceiveAny { of, into },
        };
        let signature = Signature {
            kind: request.kind,
            dtype: request.dtype,
            operator: 0,
            algorithm: 0,
            root: request.root,
            count,
            device: false,
        };
        Ok((group, signature, message))
    }
}
