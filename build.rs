//! Linker arguments of `libunisono.so`, and what tells its sources from others.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=src");
    println!("cargo::rerun-if-changed=kernels");
    println!("cargo::rustc-env=UNISONO_SOURCES={:016x}", sources());
    // The number follows the ABI: programs record it, and find a library that still understands them.
    //
    // Not as `rustc-cdylib-link-arg`: cargo hands those on to the cdylibs of dependents, after their own
    // arguments, and libnccl.so.2 would carry this name. So it is given to everything here that is linked,
    // and taken back from executables.
    println!("cargo::rustc-link-arg=-Wl,-soname,libunisono.so.0");
    println!("cargo::rustc-link-arg-bins=-Wl,--soname=");
    println!("cargo::rustc-link-arg-tests=-Wl,--soname=");
    // The library has threads, which must not lose their code to a dlclose. Dependents' libraries have them
    // too.
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

/// A hash of this package, which decides all that ranks share: what they send each other, what lies in memory
/// that several of them use, what kernels expect of each other. The same wherever the same sources are built.
fn sources() -> u64 {
    let mut files = Vec::new();
    collect(Path::new("src"), "rs", &mut files);
    collect(Path::new("kernels"), "xz", &mut files);
    files.sort();
    let mut hash = Fnv::new();
    for file in files {
        hash.add(file.to_string_lossy().as_bytes());
        hash.add(&fs::read(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display())));
    }
    hash.0
}

/// The files below a folder whose names end so, without those that editors hide there.
fn collect(folder: &Path, ending: &str, files: &mut Vec<PathBuf>) {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    for entry in entries {
        let path = entry.unwrap_or_else(|error| panic!("{}: {error}", folder.display())).path();
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.')) {
            continue;
        }
        if path.is_dir() {
            collect(&path, ending, files);
        } else if path.extension().is_some_and(|found| found == ending) {
            files.push(path);
        }
    }
}

/// FNV-1a, of pieces with their lengths.
struct Fnv(u64);

impl Fnv {
    fn new() -> Fnv {
        Fnv(0xcbf2_9ce4_8422_2325)
    }

    fn add(&mut self, bytes: &[u8]) {
        for byte in bytes.iter().copied().chain((bytes.len() as u64).to_le_bytes()) {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
}
