//! What each operation means: a request is a validated description of one call, on one rank. Picks a plan for it.

pub mod request;
