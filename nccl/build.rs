//! Linker arguments of `libnccl.so.2`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // The name that programs built for NCCL look for.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnccl.so.2");
}
