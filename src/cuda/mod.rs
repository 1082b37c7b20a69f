//! CUDA: device memory, streams, and the kernels that combine operands on a device.

pub mod kernels;
