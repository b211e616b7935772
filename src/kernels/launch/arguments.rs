//! The arguments of a kernel launch.

use std::ffi::c_void;
use std::sync::Arc;

use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::sys::CUdeviceptr;
use candle_core::cuda_backend::cudarc::driver::{DevicePtr, DeviceRepr};
use candle_core::{Result, Storage, Tensor, bail};

use super::host_mailbox::{HostMailbox, MailboxSlots};
use super::host_words::{HostWordRange, HostWords};

/// Returns the device address of a tensor's first element.
/// Fails if the tensor is not contiguous, is not on a GPU, or has a dtype that no kernel supports.
pub fn address(tensor: &Tensor) -> Result<CUdeviceptr> {
    if !tensor.is_contiguous() {
        let (shape, strides) = (tensor.shape(), tensor.stride());
        bail!("cannot pass a tensor to a kernel: shape {shape:?} with strides {strides:?} is not contiguous");
    }
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        bail!("cannot pass a tensor to a kernel: the tensor is on {:?}, not on a GPU", tensor.device())
    };
    let stream = storage.device.cuda_stream();
    let base = match &storage.slice {
        CudaStorageSlice::U8(slice) => slice.device_ptr(&stream).0,
        CudaStorageSlice::U32(slice) => slice.device_ptr(&stream).0,
        CudaStorageSlice::F32(slice) => slice.device_ptr(&stream).0,
        CudaStorageSlice::BF16(slice) => slice.device_ptr(&stream).0,
        CudaStorageSlice::F16(slice) => slice.device_ptr(&stream).0,
        _ => bail!("cannot pass a tensor to a kernel: no kernel supports the dtype {:?}", tensor.dtype()),
    };
    Ok(base + (layout.start_offset() * tensor.dtype().size_in_bytes()) as CUdeviceptr)
}

/// Returns the device address of a tensor's first element, or a null address for `None`.
/// Fails as [`address`] does.
pub fn optional_address(tensor: Option<&Tensor>) -> Result<CUdeviceptr> {
    tensor.map_or(Ok(0), address)
}

/// Converts a size to the type in which kernels take sizes. Fails if the size does not fit in an i32.
pub fn kernel_size(size: usize) -> Result<i32> {
    match i32::try_from(size) {
        Ok(size) => Ok(size),
        Err(_) => bail!("a tensor is too large: kernels cannot process a size of {size}; try a smaller --chunk"),
    }
}

/// One kernel argument.
enum Arg {
    Address(CUdeviceptr),
    Int(i32),
    Float(f32),
    /// A C struct that is passed by value.
    Struct(Box<dyn DeviceRepr + Send + Sync>),
}

impl Arg {
    /// Returns the size of the argument's value in bytes.
    fn size(&self) -> usize {
        match self {
            Arg::Address(value) => size_of_val(value),
            Arg::Int(value) => size_of_val(value),
            Arg::Float(value) => size_of_val(value),
            Arg::Struct(value) => size_of_val(&**value),
        }
    }

    /// Returns a pointer to the argument's value, as `cuLaunchKernelEx` expects it.
    fn pointer(&self) -> *mut c_void {
        match self {
            Arg::Address(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Arg::Int(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Arg::Float(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Arg::Struct(value) => std::ptr::from_ref(&**value).cast_mut().cast(),
        }
    }
}

/// The arguments of one launch, in the order of the kernel's parameters, and the memory that they keep alive.
#[derive(Default)]
pub struct Arguments {
    args: Vec<Arg>,
    /// A size that does not fit in an i32, if any. The launch then fails, because kernels take sizes as i32.
    too_large: Option<usize>,
    memory: ArgumentMemory,
}

/// Memory that the arguments of a launch point to. A recorded launch keeps this memory alive.
#[derive(Clone, Default)]
pub(super) struct ArgumentMemory {
    tensors: Vec<Tensor>,
    mailboxes: Vec<Arc<HostMailbox>>,
    host_words: Vec<Arc<HostWords>>,
}

impl Arguments {
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the address of a tensor. The arguments keep the tensor alive.
    pub fn tensor(mut self, tensor: &Tensor) -> Result<Self> {
        self.args.push(Arg::Address(address(tensor)?));
        self.memory.tensors.push(tensor.clone());
        Ok(self)
    }

    /// Adds the address of a tensor, or a null address for `None`.
    pub fn optional(mut self, tensor: Option<&Tensor>) -> Result<Self> {
        match tensor {
            Some(tensor) => self.tensor(tensor),
            None => {
                self.args.push(Arg::Address(0));
                Ok(self)
            }
        }
    }

    /// Adds a device address. The caller must keep the memory at this address alive.
    pub fn address(mut self, address: CUdeviceptr) -> Self {
        self.args.push(Arg::Address(address));
        self
    }

    /// Adds a C struct by value. The arguments keep `tensors` alive, the tensors whose addresses the struct contains.
    pub fn value<'t, T>(mut self, value: T, tensors: impl IntoIterator<Item = &'t Tensor>) -> Self
    where
        T: DeviceRepr + Send + Sync + 'static,
    {
        self.args.push(Arg::Struct(Box::new(value)));
        self.memory.tensors.extend(tensors.into_iter().cloned());
        self
    }

    /// Adds the address of a mailbox's first slot.
    pub fn mailbox(mut self, mailbox: &Arc<HostMailbox>) -> Self {
        self.args.push(Arg::Address(mailbox.address(0)));
        self.memory.mailboxes.push(mailbox.clone());
        self
    }

    /// Adds the address of the first of these mailbox slots, or a null address for `None`.
    pub fn mailbox_slots(mut self, slots: Option<MailboxSlots>) -> Self {
        self.args.push(Arg::Address(slots.map_or(0, |slots| slots.mailbox.address(slots.first))));
        self.memory.mailboxes.extend(slots.map(|slots| slots.mailbox.clone()));
        self
    }

    /// Adds the device address of the first word of `range`.
    pub fn host_words(mut self, range: &HostWordRange) -> Self {
        self.args.push(Arg::Address(range.address()));
        self.memory.host_words.push(range.words.clone());
        self
    }

    /// Adds a size as an i32. If the size does not fit in an i32, the launch fails.
    pub fn int(mut self, value: usize) -> Self {
        match i32::try_from(value) {
            Ok(value) => self.args.push(Arg::Int(value)),
            Err(_) => self.too_large = Some(value),
        }
        self
    }

    /// Adds an f32 argument.
    pub fn float(mut self, value: f32) -> Self {
        self.args.push(Arg::Float(value));
        self
    }

    /// Adds a boolean as an i32: 1 for true, 0 for false.
    pub fn flag(self, value: bool) -> Self {
        self.int(usize::from(value))
    }

    /// Returns the sizes of the arguments' values in bytes.
    pub(super) fn sizes(&self) -> Vec<usize> {
        self.args.iter().map(Arg::size).collect()
    }

    /// Returns pointers to the arguments' values. The pointers are valid until the arguments are changed or dropped.
    pub(super) fn pointers(&self) -> Vec<*mut c_void> {
        self.args.iter().map(Arg::pointer).collect()
    }

    /// Fails if [`int`](Self::int) has received a size that does not fit in an i32.
    pub(super) fn check(&self) -> Result<()> {
        self.too_large.map_or(Ok(()), |size| kernel_size(size).map(|_| ()))
    }

    pub(super) fn memory(&self) -> &ArgumentMemory {
        &self.memory
    }
}
