//! `unisono-run`: see `unisono::run`.

fn main() -> std::process::ExitCode {
    unisono::run::main()
}
