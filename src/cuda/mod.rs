//! CUDA: the only part of the library that knows it.
//!
//! libcuda is opened at run time and never linked. [`driver::Driver`] is the narrow face of it that
//! everything else is written against; [`libcuda`] implements it, and so does the tests' driver double, which
//! runs streams in adversarial orders over host memory. [`context::Devices`] is what users start from.
//!
//! Two rules hold everywhere. The calling thread's current context is the same after a call as before it,
//! also when the call fails. And what a stream capture forbids is either not done or done under the relaxed
//! capture mode.

pub(crate) mod by_device;
pub mod context;
pub mod courier;
pub mod driver;
pub mod event;
pub mod exchange;
pub mod fold;
pub mod image;
pub mod joined;
pub mod kernels;
pub mod libcuda;
pub mod local;
pub mod memory;
mod names;
pub mod polling;
pub mod queues;
pub mod quiet;
pub mod scalar;
pub mod slab;
pub mod stream;
pub mod word;

#[cfg(test)]
pub(crate) mod double;
#[cfg(test)]
mod tests;
