//! Launches that are recorded once and queued many times, such as a decode step on static buffers.
//!
//! On GPUs with programmatic dependent launch, [`LaunchList::enqueue`] lets each kernel start before the previous
//! kernel has ended. The kernels themselves wait before they use data of earlier kernels (`headers/pdl.cuh`).

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, sys};
use candle_core::cuda_backend::{CudaDevice, WrapErr};

use super::arguments::ArgumentMemory;
use super::kernel_launch::{Launch, Overlap, PreparedLaunch};

/// An ordered list of launches on the stream of one device.
pub struct LaunchList {
    device: CudaDevice,
    launches: Vec<PreparedLaunch>,
    overlap: Overlap,
}

/// The run time of one kernel of a list, measured without overlap.
pub struct TimedLaunch {
    pub name: String,
    pub seconds: f64,
    /// The approximate number of bytes that the kernel reads and writes in device memory.
    /// 0 if the launch does not state the number (see [`Launch::with_bytes_moved`]).
    pub bytes: u64,
}

impl LaunchList {
    /// Creates an empty list.
    pub fn new(device: &CudaDevice) -> Result<Self> {
        Ok(Self { device: device.clone(), launches: Vec::new(), overlap: Overlap::of_device(device)? })
    }

    /// Returns the number of launches.
    pub fn len(&self) -> usize {
        self.launches.len()
    }

    pub fn is_empty(&self) -> bool {
        self.launches.is_empty()
    }

    /// Appends a launch. The list keeps the tensors, mailboxes and host words in the launch's arguments alive.
    ///
    /// # Safety
    /// The arguments must match the kernel's parameters.
    /// Every address must be valid for all of the kernel's reads and writes, every time the list is queued.
    /// The kernel must meet the requirements of [`Launch::overlapping`], whether or not that function was called.
    pub unsafe fn add(&mut self, launch: Launch) -> Result<()> {
        self.launches.push(launch.prepare(&self.device)?);
        Ok(())
    }

    /// Queues all launches on the device's stream.
    pub fn enqueue(&self) -> Result<()> {
        let stream = self.device.cuda_stream();
        stream.context().bind_to_thread().w()?;
        // SAFETY: the caller of `add` guarantees valid arguments and addresses.
        self.launches.iter().try_for_each(|launch| unsafe { launch.enqueue(&stream, self.overlap) })
    }

    /// Runs the launches without overlap, times each launch with CUDA events, and waits for all launches.
    pub fn time_each(&self) -> Result<Vec<TimedLaunch>> {
        let stream = self.device.cuda_stream();
        stream.context().bind_to_thread().w()?;
        let record_event = || stream.record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)).w();
        let mut events = Vec::with_capacity(self.launches.len());
        for launch in &self.launches {
            let start = record_event()?;
            // SAFETY: the caller of `add` guarantees valid arguments and addresses.
            unsafe { launch.enqueue(&stream, Overlap::No)? };
            events.push((start, record_event()?));
        }
        stream.synchronize().w()?;
        let timed = |(launch, (start, end)): (&PreparedLaunch, &(CudaEvent, CudaEvent))| {
            let milliseconds = start.elapsed_ms(end).w()?;
            let seconds = f64::from(milliseconds) / 1e3;
            Ok(TimedLaunch { name: launch.kernel.clone(), seconds, bytes: launch.bytes_moved })
        };
        self.launches.iter().zip(&events).map(timed).collect()
    }

    pub(super) fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// Returns the memory that each launch keeps alive.
    pub(super) fn memory(&self) -> impl Iterator<Item = &ArgumentMemory> {
        self.launches.iter().map(|launch| launch.arguments.memory())
    }
}
