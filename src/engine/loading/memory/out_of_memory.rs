//! The error for a model that does not fit in memory, and what the error suggests.

use super::plan::MemoryPlan;
use crate::device::DeviceInfo;
use crate::error::Error;
use crate::text::counted;

impl MemoryPlan {
    /// Returns the error for a context that does not fit, or for an allocation that failed although `context` fits
    /// according to the plan.
    ///
    /// The error suggests the longest context that fits, if there is one, or half of `context` if `context` fits.
    /// If the plan is for one GPU, the error also suggests 2, 4 or 8 such GPUs: the smallest number on which `context`
    /// fits, if there is one.
    pub fn out_of_memory(&self, context: usize, device: &DeviceInfo) -> Error {
        let what = format!("this model with a context of {}", counted(context, "token"));
        let (needed_bytes, free_bytes) = (self.bytes(self.smallest(context)), device.free_bytes);
        let shorter = |largest: usize| if largest < context { largest } else { context / 2 };
        let fitting_context = self.largest_context(device).map(shorter).filter(|&context| context > 0);
        let fits_on = |gpus: &usize| self.clone().with_largest_share(*gpus).fit(context, device).is_some();
        let is_divisible = self.ranks == 1 && device.compute_capability.is_some();
        let fitting_gpus = [2, 4, 8].into_iter().find(|gpus| is_divisible && fits_on(gpus));
        Error::OutOfMemory {
            what,
            device: device.name.clone(),
            needed_bytes,
            free_bytes,
            limit_bytes: self.limit_bytes.filter(|&limit| limit < free_bytes && limit < needed_bytes),
            fitting_context,
            fitting_gpus,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::plan::Capacity;
    use super::super::test_plan::{device, plan};
    use super::*;

    #[test]
    fn out_of_memory_error_names_a_context_that_fits() {
        let plan = plan();
        let fits = plan.bytes(Capacity { context: 4096, chunk: 512 });
        let error = plan.choose(Some(16_384), &device(fits)).unwrap_err();
        assert!(error.to_string().contains("--context 4096"), "{error}");
        // The suggested context can be shorter than 2,048 tokens, the shortest default context.
        let fits = plan.bytes(plan.smallest(300));
        for requested in [Some(1000), Some(16_384), None] {
            let error = plan.choose(requested, &device(fits)).unwrap_err();
            assert!(error.to_string().contains("--context 300"), "{requested:?}: {error}");
        }
        // An allocation failed although the context fits according to the plan.
        for (context, suggested) in [(1000, Some(500)), (1, None)] {
            let error = plan.out_of_memory(context, &device(80 << 30));
            let Error::OutOfMemory { fitting_context, .. } = error else { panic!("{error}") };
            assert_eq!(fitting_context, suggested);
        }
        let error = plan.choose(None, &device(1 << 30)).unwrap_err();
        let Some(Error::OutOfMemory { fitting_context, .. }) = error.downcast_ref() else { panic!("{error}") };
        assert_eq!(*fitting_context, None);
        assert!(error.to_string().contains("no context fits: free memory on the device"), "{error}");
    }

    #[test]
    fn out_of_memory_error_names_gpu_memory_if_this_limit_is_too_small() {
        let error = |limit: u64, free| plan().with_limit(limit).choose(Some(16_384), &device(free)).unwrap_err();
        let limit = plan().with_limit(0).bytes(Capacity { context: 2048, chunk: 512 });
        let text = error(limit, 60 << 30).to_string();
        let allowed = format!("--gpu-memory allows only {:.1} GB of the 64.4 GB that is free", limit as f64 / 1e9);
        assert!(text.ends_with(&format!("but {allowed}\n  try --context 2048, or raise --gpu-memory")), "{text}");
        let text = error(1 << 30, 60 << 30).to_string();
        assert!(text.ends_with("fits: raise --gpu-memory, or choose a smaller model"), "{text}");
        let text = error(1 << 30, 2 << 30).to_string();
        assert!(text.contains("free memory on the device and raise --gpu-memory"), "{text}");
        // If the limit is not below the free memory, raising the limit alone does not help.
        for (limit, free) in [(40u64 << 30, 2 << 30), (2 << 30, 2 << 30)] {
            let text = error(limit, free).to_string();
            assert!(text.contains("only 2.1 GB is free") && !text.contains("--gpu-memory"), "{text}");
        }
        let gpu = DeviceInfo { compute_capability: Some((9, 0)), ..device(60 << 30) };
        let text = plan().with_limit(9 << 30).choose(Some(2048), &gpu).unwrap_err().to_string();
        assert!(text.ends_with("fits: raise --gpu-memory, or try --gpus 2 if you have 2 such GPUs"), "{text}");
    }

    #[test]
    fn out_of_memory_error_names_the_gpus_that_fit() {
        let gpu = |bytes| DeviceInfo { compute_capability: Some((9, 0)), ..device(bytes) };
        // Of the 10 GiB of weights, 1 GiB is not divided: every rank holds a copy.
        for (bytes, gpus) in [(9u64 << 30, Some(2)), (5 << 30, Some(4)), (1 << 30, None)] {
            let error = plan().choose(Some(2048), &gpu(bytes)).unwrap_err();
            let Some(Error::OutOfMemory { fitting_gpus, .. }) = error.downcast_ref() else { panic!("{error}") };
            assert_eq!(*fitting_gpus, gpus, "{error}");
            assert_eq!(error.to_string().contains("--gpus"), gpus.is_some(), "{error}");
        }
        let error = plan().choose(Some(2048), &device(9 << 30)).unwrap_err();
        assert!(!error.to_string().contains("--gpus"), "the error for a CPU suggests more GPUs: {error}");
    }
}
