#![no_main]

// The worker is this program with a hidden argument. libFuzzer runs `init` before it reads the arguments.
libfuzzer_sys::fuzz_target!(init: inferno::worker::init(), |data: &[u8]| inferno_fuzz::language::template(data));
