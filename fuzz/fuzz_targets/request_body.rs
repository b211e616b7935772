#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| inferno_fuzz::server::request_body(data));
