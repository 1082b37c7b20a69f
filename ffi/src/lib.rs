//! The native face: what `include/unisono.h` declares, one file a noun. Checks and conversions, nothing else.
//!
//! Every export is a literal `extern "C"` function, so that the header generator needs no expansion, with its
//! body in one closure given to [`status::guard`]: no panic crosses the boundary, and every failure leaves
//! its text for `unisono_last_error`. Enums arrive as integers and are checked; out-parameters are written on
//! success only.
//!
//! The doc comments here become the header, so they speak to C programmers and each states its function's
//! contract.

// The names are C's, written in full.
#![allow(non_camel_case_types)]
// The header states each function's contract as a whole; a Rust-only `# Safety` section would be carried into
// it.
#![allow(clippy::missing_safety_doc)]

mod algorithm;
mod argument;
mod batch;
mod buffer;
mod call;
mod callback_store;
mod collective;
mod context;
mod datatype;
mod handle;
mod log;
mod point_to_point;
mod sparse;
mod status;
mod store;
mod unique_id;
mod version;
mod window;
mod work;

pub use algorithm::*;
pub use batch::*;
pub use buffer::*;
pub use call::*;
pub use callback_store::*;
pub use collective::*;
pub use context::*;
pub use datatype::*;
pub use log::*;
pub use point_to_point::*;
pub use sparse::*;
pub use status::*;
pub use store::*;
pub use unique_id::*;
pub use version::*;
pub use window::*;
pub use work::*;
