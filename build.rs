//! What tells this package's sources from others.

use std::fs;
use std::path::{Path, PathBuf};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=src");
    println!("cargo::rerun-if-changed=kernels");
    println!("cargo::rustc-env=UNISONO_SOURCES={:016x}", sources());
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
