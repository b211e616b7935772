fn main() -> std::process::ExitCode {
    inferno::cli::main()
}
