//! `pilot-agent`: parses arguments, calls a command, gives an exit code.

fn main() -> std::process::ExitCode {
    pilot_agent::main()
}
