//! `unisono-bench`: see `unisono::bench`.

fn main() -> std::process::ExitCode {
    unisono::bench::main()
}
