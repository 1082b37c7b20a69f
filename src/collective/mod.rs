//! What each operation means: a request is a description of one call on one rank, checked once. Picks a plan
//! for it.

pub mod checked;
pub mod request;
pub mod select;
