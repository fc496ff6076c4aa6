//! The program that `cargo xtask fuzz` builds and starts.

fn main() -> std::process::ExitCode {
    attn_fuzz::driver::main()
}
