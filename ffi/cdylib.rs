//! What the linker is told of each of the two libraries, for their build scripts.

use std::path::PathBuf;
use std::process::Command;
use std::{env, fs};

/// Has a library linked under the name that programs look for.
pub(crate) fn link(soname: &str) {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,{soname}");
    // It has threads, which must not lose their code to a dlclose.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // Functions that came out the same are there once, where the linker can: 25 KB of libnccl.so.2. Nothing
    // here compares the addresses of functions.
    if links_with(FOLDED) {
        println!("cargo::rustc-cdylib-link-arg={FOLDED}");
    }
}

const FOLDED: &str = "-Wl,--icf=all";

/// Whether what links this package's libraries takes an argument, by an empty library.
fn links_with(argument: &str) -> bool {
    let variable = |name| env::var(name).unwrap_or_default();
    let out = PathBuf::from(variable("OUT_DIR"));
    let source = out.join("empty.rs");
    if fs::write(&source, "").is_err() {
        return false;
    }
    let mut rustc = Command::new(variable("RUSTC"));
    rustc.args([
        "--crate-type=cdylib",
        "--target",
        &variable("TARGET"),
        "-C",
        &format!("link-arg={argument}"),
    ]);
    if let Ok(linker) = env::var("RUSTC_LINKER") {
        rustc.args(["-C", &format!("linker={linker}")]);
    }
    let flags = variable("CARGO_ENCODED_RUSTFLAGS");
    rustc.args(flags.split('\u{1f}').filter(|flag| !flag.is_empty()));
    let linked = rustc.arg("-o").arg(out.join("libempty.so")).arg(source).output();
    linked.is_ok_and(|linked| linked.status.success())
}
