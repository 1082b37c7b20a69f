//! Linker arguments of `libunisono.so`.

mod cdylib;

fn main() {
    println!("cargo::rerun-if-changed=cdylib.rs");
    // The number follows the ABI: programs record it, and find a library that still understands them.
    cdylib::link("libunisono.so.0");
}
