//! The NCCL face: `libnccl.so.2`, the names of NCCL 2.28.9 and later over unisono's engine.
//!
//! An export parses its arguments, makes a [`group::Launch`] or a [`setup::Joining`] of them and hands it to
//! the thread's group; outside of a group that ends at once. [`engine`] is the only module that starts
//! anything.
//!
//! Handles are numbers, never addresses ([`handle`]): a stale one is found out instead of followed. Whatever
//! fails leaves its text in the thread's last error ([`error`]), and no panic crosses the boundary.
#![allow(
    non_camel_case_types,
    non_snake_case,
    reason = "the names are NCCL's, and the header generator takes them as they are"
)]
#![allow(
    clippy::missing_safety_doc,
    clippy::too_many_arguments,
    reason = "the header is the contract: pointers are as its texts and types say, and the signatures are NCCL's"
)]

pub mod abi;
pub mod collective;
pub mod collective_config;
pub mod communicator;
pub mod config;
pub mod create;
pub mod debug;
pub mod device_api;
pub mod end;
pub mod engine;
pub mod error;
pub mod estimate;
pub mod group;
pub mod grow;
pub mod handle;
pub mod memory;
pub mod one_sided;
pub mod operator;
pub mod order;
pub mod place;
pub mod point_to_point;
pub mod query;
pub mod second_names;
mod settings;
pub mod setup;
pub mod suspend;
pub mod unique_id;
pub mod version;
