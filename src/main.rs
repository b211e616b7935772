fn main() -> std::process::ExitCode {
    inferno::init();
    inferno::cli::main()
}
