//! `unisono-bench`: see `unisono::bench`.

fn main() -> std::process::ExitCode {
    unisono::ffi::install_logger();
    unisono::bench::main()
}
