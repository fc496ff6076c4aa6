//! The program `attn`.

fn main() -> std::process::ExitCode {
    attn_cli::main()
}
