//! Linker arguments of `libnccl.so.2`.

#[path = "../ffi/cdylib.rs"]
mod cdylib;

fn main() {
    println!("cargo::rerun-if-changed=../ffi/cdylib.rs");
    // The name that programs built for NCCL look for.
    cdylib::link("libnccl.so.2");
    // What this library calls of itself stays in it: a profiler's ncclAllReduce, which calls our
    // pncclAllReduce, must not be called again from there.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic-functions");
}
