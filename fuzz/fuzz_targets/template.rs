#![no_main]

// The sandbox process is this program with a hidden argument. libFuzzer runs `init` before it reads the arguments.
libfuzzer_sys::fuzz_target!(init: inferno::sandbox::init(), |data: &[u8]| inferno_fuzz::language::template(data));
