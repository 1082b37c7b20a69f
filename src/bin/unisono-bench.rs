//! `unisono-bench`: see `unisono::bench`.

fn main() -> std::process::ExitCode {
    unisono::logging::install();
    unisono::bench::main()
}
