use std::process::ExitCode;

fn main() -> ExitCode {
    // Before anything else, above all before a runtime: this may be the child that becomes Envoy.
    if let Some(status) = pilot_agent::envoy::launch::intercept(std::env::args_os()) {
        return ExitCode::from(status);
    }
    ExitCode::SUCCESS
}
