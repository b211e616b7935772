//! Launches that are recorded once and issued many times: a decode step on static buffers, as a CUDA graph.
//!
//! Each launch may start before the one ahead has ended (programmatic dependent launch, on GPUs that have it); kernels of a
//! chain wait for what they read themselves (`pdl.cuh`).

use std::ffi::c_void;
use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{CudaFunction, CudaGraph, CudaStream, result, sys};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{Result, Tensor, bail};

use crate::kernels::launch::cuda::{Arg, Module, USUAL_SHARED_BYTES, address, allow_shared_bytes, function};
use crate::kernels::quantized::cuda::RawParts;
use crate::kernels::quantized::{Matrix, QuantizedMatrix};

/// The arguments of one launch, and what must outlive it.
#[derive(Default)]
pub struct Arguments {
    args: Vec<Arg>,
    kept: Kept,
}

/// Memory whose addresses launches have.
#[derive(Clone, Default)]
struct Kept {
    tensors: Vec<Tensor>,
    mailboxes: Vec<Arc<Mailbox>>,
}

impl Arguments {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn tensor(mut self, tensor: &Tensor) -> Result<Self> {
        self.args.push(Arg::Address(address(tensor)?));
        self.kept.tensors.push(tensor.clone());
        Ok(self)
    }

    /// The tensor's address, or null.
    pub fn optional(mut self, tensor: Option<&Tensor>) -> Result<Self> {
        match tensor {
            Some(tensor) => self.tensor(tensor),
            None => {
                self.args.push(Arg::Address(0));
                Ok(self)
            }
        }
    }

    /// A weight: the address of floats, or what is quantized by value.
    pub fn matrix(self, matrix: &Matrix) -> Result<Self> {
        match matrix {
            Matrix::Dense(weight) => self.tensor(weight),
            Matrix::Quantized(parts) => self.parts(parts),
            Matrix::Mixed(_) => bail!("no kernel takes a weight of unlike parts"),
        }
    }

    /// Two weights of one kind: two addresses, or parts of one value.
    pub fn pair(self, first: &Matrix, second: &Matrix) -> Result<Self> {
        match (first, second) {
            (Matrix::Dense(first), Matrix::Dense(second)) => self.tensor(first)?.tensor(second),
            (Matrix::Quantized(first), Matrix::Quantized(second)) => self.parts(&[first.as_slice(), second].concat()),
            _ => bail!("no kernel takes two weights that are unlike"),
        }
    }

    /// How the input of a product with a quantized weight is rounded: what such kernels take last.
    pub fn rounding(self, matrix: &Matrix) -> Result<Self> {
        let Matrix::Quantized(parts) = matrix else { return Ok(self) };
        let rounding = parts[0].input_rounding;
        if parts.iter().any(|part| part.input_rounding != rounding) {
            bail!("one input is to be rounded in two ways");
        }
        let (how, by) = rounding.arguments();
        Ok(self.int(how).float(by))
    }

    /// Quantized matrices, by value.
    pub fn parts(mut self, parts: &[QuantizedMatrix]) -> Result<Self> {
        self.args.push(Arg::Parts(RawParts::new(parts)?));
        self.kept.tensors.extend(parts.iter().flat_map(QuantizedMatrix::tensors).cloned());
        Ok(self)
    }

    pub fn mailbox(mut self, mailbox: &Arc<Mailbox>) -> Self {
        self.args.push(Arg::Address(mailbox.slots as u64));
        self.kept.mailboxes.push(mailbox.clone());
        self
    }

    pub fn int(mut self, value: usize) -> Self {
        self.args.push(value.into());
        self
    }

    pub fn float(mut self, value: f32) -> Self {
        self.args.push(value.into());
        self
    }
}

/// The shape of one launch.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub grid: (usize, usize, usize),
    pub block: usize,
    /// Dynamic shared memory.
    pub shared_bytes: usize,
}

struct Launch {
    name: String,
    function: CudaFunction,
    shape: Shape,
    arguments: Arguments,
    /// Read and written in device memory, by its shapes.
    bytes: u64,
}

/// Whether the kernels have the waits of `pdl.cuh`: they are no-ops in code for older GPUs.
fn built_for_overlap() -> bool {
    env!("INFERNO_COMPUTE_CAP").parse::<u32>().is_ok_and(|capability| capability >= 90)
}

/// What a kernel of the chain took, alone.
pub struct Timed {
    pub name: String,
    pub seconds: f64,
    pub bytes: u64,
}

/// A list of launches on one device's stream.
pub struct Chain {
    device: CudaDevice,
    launches: Vec<Launch>,
    /// Whether launches may overlap: from compute capability 9.0 on, in code that was built for it and so waits.
    overlap: bool,
}

impl Chain {
    pub fn new(device: &CudaDevice) -> Result<Self> {
        let (major, _) = device.cuda_stream().context().compute_capability().w()?;
        Ok(Self { device: device.clone(), launches: Vec::new(), overlap: major >= 9 && built_for_overlap() })
    }

    pub fn len(&self) -> usize {
        self.launches.len()
    }

    pub fn is_empty(&self) -> bool {
        self.launches.is_empty()
    }

    /// Adds a launch. `bytes` is what it moves, for reports.
    ///
    /// # Safety
    /// The arguments must match the kernel's signature, and every address must be valid for what the kernel reads and
    /// writes. The chain keeps the tensors.
    pub unsafe fn push(
        &mut self,
        module: &Module,
        name: &str,
        shape: Shape,
        bytes: u64,
        arguments: Arguments,
    ) -> Result<()> {
        let function = function(&self.device, module, name)?;
        if shape.shared_bytes > USUAL_SHARED_BYTES {
            allow_shared_bytes(&function, shape.shared_bytes)?;
        }
        self.launches.push(Launch { name: name.to_string(), function, shape, arguments, bytes });
        Ok(())
    }

    /// Queues all launches on the device's stream.
    pub fn issue(&self) -> Result<()> {
        let stream = self.device.cuda_stream();
        stream.context().bind_to_thread().w()?;
        self.launches.iter().try_for_each(|launch| self.issue_one(launch, &stream, self.overlap))
    }

    fn issue_one(&self, launch: &Launch, stream: &CudaStream, overlap: bool) -> Result<()> {
        let mut overlapping = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let (grid, block) = (launch.shape.grid, launch.shape.block);
        let config = sys::CUlaunchConfig {
            gridDimX: grid.0 as u32,
            gridDimY: grid.1 as u32,
            gridDimZ: grid.2 as u32,
            blockDimX: block as u32,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shape.shared_bytes as u32,
            hStream: stream.cu_stream(),
            attrs: &mut overlapping,
            numAttrs: u32::from(overlap),
        };
        let pointer = |arg: &Arg| match arg {
            Arg::Address(value) => value as *const _ as *mut c_void,
            Arg::Int(value) => value as *const _ as *mut c_void,
            Arg::Float(value) => value as *const _ as *mut c_void,
            Arg::Parts(value) => value as *const _ as *mut c_void,
        };
        let mut parameters: Vec<*mut c_void> = launch.arguments.args.iter().map(pointer).collect();
        // SAFETY: `push`'s caller answers for arguments and addresses; the driver copies them before it returns.
        unsafe {
            sys::cuLaunchKernelEx(&config, launch.function.cu_function(), parameters.as_mut_ptr(), std::ptr::null_mut())
        }
        .result()
        .w()
    }

    /// The launches, and those of `tail` after them, as one graph.
    pub fn capture(&self, tail: &Chain) -> Result<Graph> {
        let stream = self.device.cuda_stream();
        stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).w()?;
        let issued = self.issue().and_then(|()| tail.issue());
        // A capture must be ended, whatever happened in it.
        let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0)).w();
        issued?;
        let Some(graph) = graph? else { bail!("the stream captured nothing") };
        graph.upload().w()?;
        let launches = self.launches.iter().chain(&tail.launches);
        let kept = launches.map(|launch| launch.arguments.kept.clone()).collect();
        Ok(Graph { graph, _kept: kept })
    }

    /// Issues the launches one by one, each timed by events on the device.
    pub fn times(&self) -> Result<Vec<Timed>> {
        let stream = self.device.cuda_stream();
        let event = || stream.record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)).w();
        let mut timed = Vec::with_capacity(self.launches.len());
        for launch in &self.launches {
            let before = event()?;
            self.issue_one(launch, &stream, false)?;
            timed.push((launch, before, event()?));
        }
        stream.synchronize().w()?;
        let read = |(launch, before, after): (&Launch, _, _)| {
            let ms = candle_core::cuda_backend::cudarc::driver::CudaEvent::elapsed_ms(&before, &after).w()?;
            Ok(Timed { name: launch.name.clone(), seconds: ms as f64 / 1e3, bytes: launch.bytes })
        };
        timed.into_iter().map(read).collect()
    }
}

/// Whether the device has done all that was queued; its error, if it failed.
pub fn is_idle(device: &CudaDevice) -> Result<bool> {
    let stream = device.cuda_stream();
    stream.context().bind_to_thread().w()?;
    // SAFETY: the stream is the device's own, and alive.
    match unsafe { sys::cuStreamQuery(stream.cu_stream()) } {
        sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        result => result.result().w().map(|()| true),
    }
}

/// A captured chain.
pub struct Graph {
    graph: CudaGraph,
    _kept: Vec<Kept>,
}

// SAFETY: the driver lets a graph be used from any thread, one at a time, and a `Graph` is not `Sync`.
unsafe impl Send for Graph {}

impl Graph {
    /// Queues all launches on the stream they were captured on.
    pub fn launch(&self) -> Result<()> {
        self.graph.launch().w()
    }
}

/// Words in host memory that a kernel writes and the host reads while the device goes on.
pub struct Mailbox {
    slots: *mut u32,
    count: usize,
    device: CudaDevice,
}

// SAFETY: the words are only read and written whole and volatile, and belong to this until `drop`.
unsafe impl Send for Mailbox {}
// SAFETY: as above.
unsafe impl Sync for Mailbox {}

impl Mailbox {
    /// `count` words, all zero.
    pub fn new(device: &CudaDevice, count: usize) -> Result<Arc<Self>> {
        device.cuda_stream().context().bind_to_thread().w()?;
        // Mapped into the device's address space, at the same address where addressing is unified, as it is on Linux.
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the memory is set to zero right away and freed in `drop`.
        let slots = unsafe { result::malloc_host(count * size_of::<u32>(), flags) }.w()?.cast::<u32>();
        // SAFETY: `count` words were allocated.
        unsafe { slots.write_bytes(0, count) };
        Ok(Arc::new(Self { slots, count, device: device.clone() }))
    }

    /// Takes what a slot holds, leaving zero; zero if nothing has come.
    pub fn take(&self, slot: usize) -> u32 {
        assert!(slot < self.count, "slot {slot} of {}", self.count);
        // SAFETY: within the allocation; the device writes a slot again only after it was taken (the caller's protocol).
        unsafe {
            let value = self.slots.add(slot).read_volatile();
            if value != 0 {
                self.slots.add(slot).write_volatile(0);
            }
            value
        }
    }

    pub fn slots(&self) -> usize {
        self.count
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        // No kernel that is still queued may write to freed memory. An error has nowhere to go from here.
        let _ = self.device.cuda_stream().synchronize();
        // SAFETY: allocated by `new`, freed once.
        let _ = unsafe { result::free_host(self.slots.cast()) };
    }
}
