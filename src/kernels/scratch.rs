//! Memory for the intermediate results of a forward pass.
//!
//! CUDA operations allocate the outputs of their kernels with [`empty`], by default from candle's memory pool.
//! While a CUDA graph is captured, each allocation from candle's pool becomes a graph node.
//! An allocation node between two kernels prevents these kernels from overlapping.
//! Batch graphs are therefore captured with an [`Arena`], memory that was allocated before the capture,
//! unless this arena would exceed [`MAX_ARENA_BYTES`], or all arenas together would exceed [`MAX_ARENAS_BYTES`].
//!
//! An arena has two halves, and consecutive layers use different halves. A layer's memory is reused two layers later.
//! At that point, nothing needs the layer's results: a layer reads only its own and the previous layer's results.
//!
//! A batch graph (`runner/gpu/batch_graph.rs`) uses this module in three steps:
//! 1. [`LayerSizes::measure`] runs a pass and measures how much memory the largest layer needs.
//! 2. [`Arena::new`] allocates two halves of at least this size, unless an earlier graph has an arena that
//!    [fits](Arena::fits). The batch graph keeps its arena alive, because the captured kernels use its addresses.
//! 3. [`Arena::use_for`] runs the pass again, and the batch graph captures it. The layers take memory from the arena.
//!
//! During `measure` and `use_for`, a thread-local variable tells [`empty`] how to allocate. Otherwise, every layer and
//! every operation would need a parameter for the arena. One thread runs a whole pass, so passes of other ranks do not
//! see the variable. It is cleared at the end of the pass, even if the pass panics.

use std::cell::RefCell;

use candle_core::{DType, Device, Result, Shape, Tensor};

/// The maximum size of an arena in bytes.
/// A batch that needs a larger arena runs without one: its kernels take so long that overlapping them saves little.
pub const MAX_ARENA_BYTES: usize = 128 << 20;

/// The maximum size of all arenas of a rank together, in bytes.
pub const MAX_ARENAS_BYTES: usize = 2 * MAX_ARENA_BYTES;

/// Tensors in an arena start at multiples of this many elements, so that vector loads are aligned.
const ALIGNMENT: usize = 256;

/// For each dtype, a number of elements.
type Counts = Vec<(DType, usize)>;

/// Memory for the intermediate results of two layers.
#[derive(Clone)]
pub struct Arena {
    /// For each dtype, two flat tensors: the two halves of the arena.
    halves: Vec<(DType, [Tensor; 2])>,
}

/// How the layers of a pass allocate.
enum AllocationMode {
    /// Allocates from candle's pool, and counts the elements that an arena would need per dtype, including padding:
    /// `layer` is the count of the current layer, and `largest` is the maximum over all finished layers.
    Measure { layer: Counts, largest: Counts },
    /// Takes memory from an arena. `used` counts the elements taken from the current half.
    Take { arena: Arena, half: usize, used: Counts },
}

/// A forward pass that is measured or uses an arena.
struct RunningPass {
    mode: AllocationMode,
    /// Whether the last layer has ended. If so, [`empty`] allocates from candle's pool, and measures nothing.
    has_ended: bool,
}

thread_local! {
    /// The pass that this thread runs. `None` if no pass is running, or if the pass always allocates from candle's pool.
    static PASS: RefCell<Option<RunningPass>> = const { RefCell::new(None) };
}

/// Returns the count of a dtype in `counts`. If `counts` lacks the dtype, first adds the dtype with count 0.
fn count(counts: &mut Counts, dtype: DType) -> &mut usize {
    let index = counts.iter().position(|(known, _)| *known == dtype).unwrap_or_else(|| {
        counts.push((dtype, 0));
        counts.len() - 1
    });
    &mut counts[index].1
}

/// Allocates an uninitialized tensor.
///
/// # Safety
/// The caller must write every element before it is read.
/// A tensor that is allocated within [`Arena::use_for`] must not be used after two more layers or another pass with the
/// arena have begun.
pub unsafe fn empty(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    let shape = shape.into();
    let taken = PASS.with_borrow_mut(|pass| pass.as_mut()?.take(&shape, dtype));
    match taken {
        Some(tensor) => tensor,
        // SAFETY: the caller writes every element before it is read.
        None => unsafe { Tensor::empty(shape, dtype, device) },
    }
}

/// Begins the next layer of a forward pass.
/// The embedding, each exchange between stages, and the final norm count as layers, too.
pub fn begin_layer() {
    PASS.with_borrow_mut(|pass| {
        if let Some(pass) = pass {
            pass.begin_layer();
        }
    });
}

/// Marks the end of the last layer of a forward pass. Later results, such as logits, are allocated outside the arena.
pub fn end_layers() {
    PASS.with_borrow_mut(|pass| {
        if let Some(pass) = pass {
            pass.end_layers();
        }
    });
}

impl RunningPass {
    fn new(mode: AllocationMode) -> Self {
        Self { mode, has_ended: false }
    }

    /// Takes a tensor from the arena, or counts its elements. Returns `None` if candle's pool must allocate the tensor.
    fn take(&mut self, shape: &Shape, dtype: DType) -> Option<Result<Tensor>> {
        if self.has_ended {
            return None;
        }
        let elements = shape.elem_count();
        match &mut self.mode {
            AllocationMode::Measure { layer, .. } => {
                *count(layer, dtype) += elements.next_multiple_of(ALIGNMENT);
                None
            }
            AllocationMode::Take { arena, half, used } => {
                let (_, halves) = arena.halves.iter().find(|(known, _)| *known == dtype)?;
                let start = count(used, dtype);
                let end = *start + elements;
                if elements == 0 || end > halves[*half].elem_count() {
                    return None;
                }
                let tensor = halves[*half].narrow(0, *start, elements).and_then(|memory| memory.reshape(shape));
                *start = end.next_multiple_of(ALIGNMENT);
                Some(tensor)
            }
        }
    }

    fn begin_layer(&mut self) {
        match &mut self.mode {
            AllocationMode::Measure { layer, largest } => {
                for (dtype, elements) in layer.drain(..) {
                    let max_elements = count(largest, dtype);
                    *max_elements = elements.max(*max_elements);
                }
            }
            AllocationMode::Take { half, used, .. } => {
                *half = 1 - *half;
                used.clear();
            }
        }
    }

    fn end_layers(&mut self) {
        self.begin_layer();
        self.has_ended = true;
    }
}

/// Clears `PASS` when dropped, so that a forward pass does not affect later ones, even if it panics.
struct PassGuard;

impl Drop for PassGuard {
    fn drop(&mut self) {
        PASS.set(None);
    }
}

/// Runs a forward pass in `mode`. Returns the result of the pass and the final state of the mode.
fn run<R>(mode: AllocationMode, pass: impl FnOnce() -> R) -> (R, Option<AllocationMode>) {
    PASS.set(Some(RunningPass::new(mode)));
    let _guard = PassGuard;
    let result = pass();
    begin_layer();
    (result, PASS.take().map(|pass| pass.mode))
}

/// For each dtype, the largest number of elements that any layer of a forward pass needs, including padding.
pub struct LayerSizes(Counts);

impl LayerSizes {
    /// Runs a forward pass and measures how much memory its layers allocate.
    pub fn measure<R>(pass: impl FnOnce() -> R) -> (R, Self) {
        let mode = AllocationMode::Measure { layer: Counts::new(), largest: Counts::new() };
        match run(mode, pass) {
            (result, Some(AllocationMode::Measure { largest, .. })) => (result, Self(largest)),
            (result, _) => (result, Self(Counts::new())),
        }
    }

    /// Returns the size in bytes of an arena for `factor` times as many tokens as the measured pass.
    pub fn arena_bytes(&self, factor: usize) -> usize {
        self.0.iter().map(|(dtype, elements)| 2 * factor * elements * dtype.size_in_bytes()).sum()
    }
}

impl Arena {
    /// Allocates an arena for forward passes with `factor` times as many tokens as the measured pass.
    pub fn new(sizes: &LayerSizes, factor: usize, device: &Device) -> Result<Self> {
        let half = |dtype, elements| Tensor::zeros(factor * elements, dtype, device);
        let halves =
            |&(dtype, elements): &(DType, usize)| Ok((dtype, [half(dtype, elements)?, half(dtype, elements)?]));
        Ok(Self { halves: sizes.0.iter().map(halves).collect::<Result<_>>()? })
    }

    /// Returns whether the arena has room for the intermediate results of the pass that `sizes` was measured on.
    pub fn fits(&self, sizes: &LayerSizes) -> bool {
        let room = |dtype: DType| self.halves.iter().find(|(known, _)| *known == dtype).map(|(_, [half, _])| half);
        sizes.0.iter().all(|&(dtype, elements)| room(dtype).is_some_and(|half| half.elem_count() >= elements))
    }

    /// Runs a forward pass that allocates its intermediate results in the arena.
    /// Results that do not fit in their layer's half of the arena are allocated outside it.
    pub fn use_for<R>(&self, pass: impl FnOnce() -> R) -> R {
        run(AllocationMode::Take { arena: self.clone(), half: 0, used: Counts::new() }, pass).0
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    /// Allocates the tensors of three layers.
    /// For each tensor, returns whether the tensor starts at a nonzero offset of its storage.
    fn pass(tokens: usize) -> Vec<bool> {
        let mut are_views = Vec::new();
        for layer in 0..3 {
            begin_layer();
            for (elements, dtype) in [(tokens * 300, DType::F32), (tokens * (layer + 1), DType::U32), (7, DType::F32)] {
                // SAFETY: the tensor is never read.
                let tensor = unsafe { empty(elements, dtype, &Device::Cpu) }.unwrap();
                assert_eq!((tensor.elem_count(), tensor.dtype()), (elements, dtype));
                are_views.push(tensor.storage_and_layout().1.start_offset() > 0);
            }
        }
        are_views
    }

    #[test]
    fn arena_holds_the_results_of_two_layers() {
        let (_, sizes) = LayerSizes::measure(|| pass(2));
        // Tensor sizes are rounded up to multiples of 256 elements.
        // In the largest layer, 600 and 7 f32 values take 768 and 256 elements, and 6 u32 values take 256.
        assert_eq!(sizes.arena_bytes(1), 2 * 4 * (768 + 256 + 256));
        let arena = Arena::new(&sizes, 2, &Device::Cpu).unwrap();
        assert!(arena.fits(&sizes) && !arena.fits(&LayerSizes::measure(|| pass(8)).1));
        let first = [false, false, true];
        assert_eq!(arena.use_for(|| pass(2)), first.repeat(3));
        // 2,400 f32 values do not fit in a half of the arena, so they are allocated outside it.
        // The 7 f32 values of each layer therefore start at the beginning of a half.
        assert_eq!(arena.use_for(|| pass(8)), [false; 9]);
        assert_eq!(pass(2), [false; 9]);
    }

    #[test]
    fn a_panic_in_a_pass_does_not_change_later_passes() {
        let (_, sizes) = LayerSizes::measure(|| pass(2));
        let arena = Arena::new(&sizes, 1, &Device::Cpu).unwrap();
        let results = arena.use_for(|| pass(2));
        let panic_in_arena = |pass: fn()| catch_unwind(AssertUnwindSafe(|| arena.use_for(pass))).unwrap_err();
        panic_in_arena(|| panic!("in a layer"));
        assert_eq!(pass(2), [false; 9], "a later pass without an arena used the arena");
        panic_in_arena(|| {
            end_layers();
            panic!("after the last layer");
        });
        assert_eq!(arena.use_for(|| pass(2)), results, "a later pass with the arena did not use it");
    }

    #[test]
    fn tensors_of_two_layers_do_not_share_memory() {
        let (_, sizes) = LayerSizes::measure(|| pass(1));
        let arena = Arena::new(&sizes, 1, &Device::Cpu).unwrap();
        let mut tensors: Vec<Tensor> = Vec::new();
        arena.use_for(|| {
            for layer in 0..4 {
                begin_layer();
                // SAFETY: the tensor is written below.
                let tensor = unsafe { empty(300, DType::F32, &Device::Cpu) }.unwrap();
                tensor.slice_set(&Tensor::full(layer as f32, 300, &Device::Cpu).unwrap(), 0, 0).unwrap();
                tensors.push(tensor);
                let value = |tensor: &Tensor| tensor.to_vec1::<f32>().unwrap()[299];
                let last: Vec<f32> = tensors.iter().rev().take(2).map(value).collect();
                assert_eq!(last, [layer as f32, layer as f32 - 1.0][..last.len()]);
            }
        });
    }
}
