//! Linker arguments of `libnccl.so.2`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // The name that programs built for NCCL look for.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnccl.so.2");
    // What this library calls of itself stays in it: a profiler's ncclAllReduce, which calls our
    // pncclAllReduce, must not be called again from there.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic-functions");
}
