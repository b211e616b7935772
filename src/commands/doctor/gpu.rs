//! Checks the GPUs and the driver, and runs the kernel self-test on each GPU.

use candle_core::Device;
use serde::Serialize;

use super::finding::{Finding, FindingStatus};
use crate::device::{self, DeviceChoice, DeviceInfo, GpuFacts, NvidiaSmiList};
use crate::error::Error;
use crate::kernels::selftest::{self, Check};
use crate::text::one_line;

/// The lowest compute capability that the kernels support.
const MIN_CAPABILITY: (u32, u32) = (8, 0);

/// The result of one self-test check, for one dtype and one GPU.
#[derive(Serialize)]
pub struct SelfTest {
    gpu: usize,
    name: String,
    dtype: &'static str,
    passed: bool,
    /// The relative error (see [`Check::error`]). `None` if it is not finite or if the checked operation failed.
    error: Option<f32>,
    tolerance: f32,
    seconds: f64,
    problem: Option<String>,
}

pub fn check(findings: &mut Vec<Finding>, self_test: &mut Vec<SelfTest>) {
    let smi = NvidiaSmiList::read();
    let mut driver = smi.as_ref().map(|smi| format!("driver {}", smi.driver_version));
    for ordinal in 0..device::gpu_count().max(1) {
        let device = match device::open(DeviceChoice::Cuda(ordinal)) {
            Ok(device) => device,
            Err(error) => {
                let seen = smi.as_ref().map(|smi| smi.gpu_names.join(", "));
                findings.push(no_gpu(&error, seen));
                continue;
            }
        };
        if ordinal == 0
            && let Ok(Some(facts)) = GpuFacts::for_device(&device)
        {
            let name = driver.take().unwrap_or("unknown driver version".into());
            driver = Some(format!("{name}, CUDA up to {}", facts.cuda_version));
        }
        let finding = match device::info(&device) {
            Ok(info) => {
                let is_native = info.compute_capability.is_some_and(device::has_machine_code);
                gpu(ordinal, &info, device::built_compute_capability(), is_native)
            }
            Err(error) => Finding::fail("GPU", one_line(&error), "nvidia-smi"),
        };
        let usable = finding.status != FindingStatus::Fail;
        findings.push(finding);
        if usable {
            kernels(ordinal, &device, findings, self_test);
        }
    }
    let driver = driver.map_or_else(
        || Finding::warn("driver", "nvidia-smi is missing, fails or lists no GPU", "nvidia-smi"),
        |driver| Finding::pass("driver", driver),
    );
    // List the driver before the GPUs, although its CUDA version is known only once a GPU is open.
    findings.insert(1, driver);
}

/// Returns the finding for a GPU that cannot be opened. `seen` names the GPUs that nvidia-smi lists.
fn no_gpu(error: &anyhow::Error, seen: Option<String>) -> Finding {
    let (reason, next) = match error.downcast_ref::<Error>() {
        Some(Error::NoGpu { reason, hint }) => (reason.clone(), hint.lines().next().unwrap_or_default()),
        _ => (one_line(error), "nvidia-smi"),
    };
    let seen = seen.map(|names| format!(", although nvidia-smi lists {names}")).unwrap_or_default();
    let what = format!("{reason}{seen}; the demo runs without a GPU: inferno play demo --device cpu");
    let has_cuda = device::built_compute_capability().is_some();
    Finding::fail("GPU", what, if has_cuda { next } else { "cargo install --locked --path . --features cuda" })
}

/// Checks that this build's kernels can run on the GPU at full speed, and that at least half of its memory is free.
///
/// `built` is the lowest compute capability that the kernels run on. `None` in a build without GPU support.
/// `is_native` is true if the build contains machine code for exactly this GPU's compute capability.
fn gpu(ordinal: usize, info: &DeviceInfo, built: Option<(u32, u32)>, is_native: bool) -> Finding {
    let what = format!("{ordinal}: {info}");
    let (Some(built), Some(found)) = (built, info.compute_capability) else { return Finding::pass("GPU", what) };
    let rebuild = format!("CUDA_COMPUTE_CAP={}{} cargo install --locked --path . --features cuda", found.0, found.1);
    let number = |(major, minor): (u32, u32)| format!("{major}.{minor}");
    if found < MIN_CAPABILITY {
        let what = format!("{what}: too old; the kernels need compute capability {} or later", number(MIN_CAPABILITY));
        return Finding::fail("GPU", what, "inferno play demo --device cpu");
    }
    if found < built {
        return Finding::fail(
            "GPU",
            format!("{what}: this build needs compute capability {} or later", number(built)),
            rebuild,
        );
    }
    if found.0 > built.0 && !is_native {
        // The build has no machine code for this GPU, so the driver compiles the kernels from PTX when it loads them.
        let what = format!(
            "{what}: this build, for compute capability {} or later, has no machine code for this GPU, \
             so models start and run more slowly",
            number(built)
        );
        return Finding::warn("GPU", what, rebuild);
    }
    if info.free_bytes < info.total_bytes / 2 {
        return Finding::warn("GPU", format!("{what}: more than half of its memory is in use"), "nvidia-smi");
    }
    Finding::pass("GPU", what)
}

fn kernels(ordinal: usize, device: &Device, findings: &mut Vec<Finding>, self_test: &mut Vec<SelfTest>) {
    #[cfg_attr(not(feature = "cuda"), allow(unused_mut))]
    let mut checks = selftest::run(device);
    #[cfg(feature = "cuda")]
    if device.is_cuda() {
        checks.extend(super::decode_graph::run(device));
    }
    findings.extend(self_test_findings(ordinal, &checks));
    self_test.extend(checks.into_iter().map(|check| SelfTest {
        gpu: ordinal,
        passed: check.passed(),
        dtype: check.dtype.as_str(),
        error: check.error.as_ref().ok().copied().filter(|error| error.is_finite()),
        tolerance: check.tolerance,
        seconds: check.seconds,
        problem: check.error.err(),
        name: check.name,
    }));
}

/// Returns one finding if all checks pass, otherwise a finding for each of the first `MAX_SHOWN` failed checks.
/// If more checks failed, adds a finding with the total number of failed checks.
fn self_test_findings(ordinal: usize, checks: &[Check]) -> Vec<Finding> {
    const MAX_SHOWN: usize = 6;
    let next = "inferno doctor --json > doctor.json, then attach the file to a bug report";
    let failed: Vec<&Check> = checks.iter().filter(|check| !check.passed()).collect();
    let finding = |check: &&Check| {
        let problem = match &check.error {
            Ok(error) => format!("error {error:.1e}, tolerance {:.1e}", check.tolerance),
            Err(problem) => problem.lines().next().unwrap_or_default().to_string(),
        };
        let what = format!("{} in {} on GPU {ordinal}: {problem}", check.name, check.dtype.as_str());
        Finding::fail("kernels", what, next)
    };
    let mut findings: Vec<Finding> = failed.iter().take(MAX_SHOWN).map(finding).collect();
    if failed.len() > MAX_SHOWN {
        let what = format!("{} of {} checks on GPU {ordinal} failed in total", failed.len(), checks.len());
        findings.push(Finding::fail("kernels", what, next));
    }
    if failed.is_empty() {
        let seconds: f64 = checks.iter().map(|check| check.seconds).sum();
        let what = format!("{} checks on GPU {ordinal} match the CPU ({seconds:.2} s)", checks.len());
        findings.push(Finding::pass("kernels", what));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpu_is_checked_against_the_builds_compute_capability() {
        // The build has machine code for the compute capability `built` and for the later ones in `natives`.
        let check_with = |found, built, natives: &[(u32, u32)], free_bytes| {
            let info = DeviceInfo { name: "X".into(), compute_capability: Some(found), free_bytes, total_bytes: 100 };
            let finding = gpu(0, &info, Some(built), found == built || natives.contains(&found));
            assert_eq!(finding.next.is_none(), finding.status == FindingStatus::Pass);
            (finding.status, finding.next.unwrap_or_default())
        };
        let check = |found, built, free_bytes| check_with(found, built, &[], free_bytes);
        assert_eq!(check_with((9, 0), (8, 0), &[(8, 6), (9, 0)], 90).0, FindingStatus::Pass);
        assert_eq!(check_with((12, 0), (8, 0), &[(8, 6), (9, 0)], 90).0, FindingStatus::Warn);
        assert_eq!(check((9, 0), (9, 0), 90).0, FindingStatus::Pass);
        assert_eq!(check((8, 9), (8, 0), 90).0, FindingStatus::Pass);
        assert_eq!(check((9, 0), (9, 0), 10).0, FindingStatus::Warn);
        assert_eq!(check((7, 5), (8, 0), 90).0, FindingStatus::Fail);
        let (status, next) = check((8, 6), (9, 0), 90);
        assert!(status == FindingStatus::Fail && next.starts_with("CUDA_COMPUTE_CAP=86 "), "{next}");
        let (status, next) = check((12, 0), (9, 0), 90);
        assert!(status == FindingStatus::Warn && next.starts_with("CUDA_COMPUTE_CAP=120 "), "{next}");
    }

    #[test]
    fn failed_kernels_are_named() {
        let mut checks = selftest::run(&Device::Cpu);
        let findings = self_test_findings(0, &checks);
        assert!(findings.len() == 1 && findings[0].status == FindingStatus::Pass, "{findings:?}");
        checks[3].error = Ok(f32::NAN);
        checks[7].error = Err("no such kernel\nbacktrace".into());
        let findings = self_test_findings(0, &checks);
        assert_eq!(findings.len(), 2);
        assert!(findings.iter().all(|finding| finding.status == FindingStatus::Fail));
        assert!(findings[0].what.contains("error NaN") && findings[1].what.ends_with("no such kernel"));
        checks.iter_mut().for_each(|check| check.error = Err("nothing works".into()));
        let findings = self_test_findings(0, &checks);
        assert!(findings.len() == 7 && findings[6].what.contains(&format!("{0} of {0} checks", checks.len())));
    }
}
