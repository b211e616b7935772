//! Tests of the check of kernel arguments, which only debug builds contain.

use candle_core::Device;
use inferno::kernels::launch::{Arguments, Launch, LaunchShape, Module};

use crate::support::gpu;

/// A kernel that does nothing, with an address and an i32 as parameters.
const KERNEL: Module = Module {
    name: "launches",
    fatbin: b".version 7.0
.target sm_80
.address_size 64
.visible .entry idle(.param .u64 address, .param .u32 size)
{
    ret;
}
\0",
};

/// With a driver older than CUDA 12.4, nothing is checked, and the test fails.
#[test(gpu)]
fn arguments_must_have_the_sizes_of_the_parameters() {
    let device = gpu();
    let Device::Cuda(cuda) = &device else { panic!("{device:?} is not a GPU") };
    let enqueue = |arguments: Arguments| {
        let launch = Launch::new(KERNEL, "idle", LaunchShape::linear(1, 32), arguments);
        // SAFETY: the kernel uses no arguments. If nothing is checked, the first case below ends the test, and its
        // additional argument has no effect.
        unsafe { launch.enqueue(cuda) }
    };
    enqueue(Arguments::new().address(0).int(1)).unwrap();
    for (what, arguments) in [
        ("an additional argument", Arguments::new().address(0).int(1).int(1)),
        ("a missing argument", Arguments::new().address(0)),
        ("a wrong order", Arguments::new().int(1).address(0)),
        ("a wrong size", Arguments::new().address(0).address(0)),
    ] {
        let error = enqueue(arguments).expect_err(what).to_string();
        assert!(error.contains("idle") && error.contains("[8, 4]"), "{what}: {error}");
    }
}
