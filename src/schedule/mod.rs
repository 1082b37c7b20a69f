//! Algorithms as data. An algorithm is a pure function of (rank, size, counts, options) that returns a [`Schedule`]:
//! steps over spans of named buffers, with the order they must keep. Nothing here does I/O or knows how bytes move;
//! the engine runs any schedule over any link, the checker proves it symbolically, the cost model prices it.

#![forbid(unsafe_code)]

pub mod ir;
