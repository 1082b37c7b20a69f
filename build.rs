//! Linker arguments of `libunisono.so`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // The number follows the ABI: programs record it, and find a library that still understands them.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libunisono.so.0");
    // The library has threads, which must not lose their code to a dlclose.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
