//! Linker arguments of `libunisono.so`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // The number follows the ABI: programs record it, and find a library that still understands them.
    //
    // Not as `rustc-cdylib-link-arg`: cargo hands those on to the cdylibs of dependents, after their own arguments, and
    // libnccl.so.2 would carry this name. So it is given to everything here that is linked, and taken back from
    // executables.
    println!("cargo::rustc-link-arg=-Wl,-soname,libunisono.so.0");
    println!("cargo::rustc-link-arg-bins=-Wl,--soname=");
    println!("cargo::rustc-link-arg-tests=-Wl,--soname=");
    // The library has threads, which must not lose their code to a dlclose. Dependents' libraries have them too.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
