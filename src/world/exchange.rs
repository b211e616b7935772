//! The interface of the connections that exchange tensors between the devices of all ranks.

use std::any::Any;
use std::fmt;

use candle_core::{DType, Result, Tensor};

/// Exchanges tensors between the devices of all ranks.
///
/// The methods that return tensors queue an operation on the device, and do not wait for its result.
/// All ranks must queue the same operations in the same order.
pub trait Exchange: Any + fmt::Debug + Send + Sync {
    /// Returns whether operations can be queued now. The value is the same on all ranks, because all ranks capture the
    /// same CUDA graphs in the same order.
    ///
    /// Ranks that share a GPU, as in tests, can queue operations only as part of a CUDA graph.
    /// The first launch of a kernel loads the kernel, and loading waits for all running kernels of the GPU.
    /// A running kernel of another rank may be waiting for the rank that loads a kernel, which would be a deadlock.
    fn can_queue(&self) -> bool;

    /// Calls `launch` at the same time as the other ranks.
    /// `launch` launches a CUDA graph that contains operations of this trait.
    ///
    /// Waits until every rank is ready to launch, calls `launch`, and waits until every rank has launched.
    /// Outside a CUDA graph, operations such as [`sum`](Self::sum) wait for the other ranks in the same way.
    ///
    /// Without these waits, a rank could load a kernel or allocate memory while its GPU waits for another rank.
    /// Such a driver call can wait for the GPU, and meanwhile holds a lock that the other rank needs for its launch.
    fn launch_together(&self, launch: &mut dyn FnMut() -> Result<()>) -> Result<()>;

    /// Returns the sum of x over all ranks, for [`World::sum`](super::World::sum).
    fn sum(&self, x: &Tensor) -> Result<Tensor>;

    /// Like [`sum`](Self::sum), but may round each rank's `x` and the sum to bf16, to send half as many bytes.
    fn sum_rounded(&self, x: &Tensor) -> Result<Tensor>;

    /// Computes a [`ResidualUpdate`], for [`World::add_partials`](super::World::add_partials).
    /// Returns `None` if the update is not supported.
    /// If `rounds` is true, rounds y to bf16, and may round the normalized x' to bf16.
    fn add_partials(&self, update: &ResidualUpdate, rounds: bool) -> Result<Option<UpdatedResidual>>;

    /// Returns x with the rows of all ranks, for [`World::gather_rows`](super::World::gather_rows).
    fn gather_rows(&self, x: &Tensor) -> Result<Tensor>;

    /// Returns the columns of all ranks side by side, for [`World::concat_columns`](super::World::concat_columns).
    /// If there is an `out`, f32 `[rows, columns]`, writes the columns to `out` and returns it.
    fn concat_columns(&self, x: &Tensor, columns: usize, out: Option<&Tensor>) -> Result<Tensor>;

    /// Returns a rank that did not answer in time, or `None` if no rank has failed to answer.
    ///
    /// After a rank has failed to answer, operations stop waiting for other ranks, and their results are wrong.
    fn missing_rank(&self) -> Option<usize>;

    /// Makes all current and future operations stop waiting for other ranks. Their results are then wrong.
    fn end(&self);
}

/// One rank's partial result y, `[rows, hidden]`. The sum of y over all ranks is the output of attention or of an MLP.
#[derive(Clone, Copy, Debug)]
pub enum PartialResult<'t> {
    /// y itself, f32 or bf16.
    Rows(&'t Tensor),
    /// y is the sum of these parts of a matrix product, f32 `[parts, rows, hidden]`.
    ProductParts(&'t Tensor),
    /// y is the sum of each row's expert outputs, weighted with `weights`.
    Experts {
        /// The outputs, `[rows, chosen, hidden]`, with the columns in the order of the expert kernels
        /// (`kernels/moe/mxfp4_tiles.cuh`).
        outputs: &'t Tensor,
        /// The routing weights, f32 `[rows, chosen]`.
        weights: &'t Tensor,
    },
}

/// An update of the residual stream, x' = x + bias + Σ y over all ranks, followed by the RMSNorm of x'.
/// All tensors except y and the normalized x' are f32.
#[derive(Clone, Copy, Debug)]
pub struct ResidualUpdate<'t> {
    /// x, `[rows, hidden]`.
    pub x: &'t Tensor,
    /// Whether x is valid only in the rows that this rank computed (see [`UpdatedResidual`]).
    pub is_divided: bool,
    /// This rank's partial result. Its form and its dtype may differ between ranks.
    pub y: PartialResult<'t>,
    /// A bias to add to every row: `[hidden]`.
    pub bias: Option<&'t Tensor>,
    /// The weight of the RMSNorm, `[hidden]`.
    pub weight: &'t Tensor,
    pub eps: f32,
    /// The dtype of the normalized x': bf16 or f32.
    pub dtype: DType,
}

/// The result of a [`ResidualUpdate`].
pub struct UpdatedResidual {
    /// x', f32 `[rows, hidden]`.
    pub x: Tensor,
    /// Whether x' is valid only in the rows that this rank computed.
    /// If so, [`World::gather_rows`](super::World::gather_rows) returns all rows.
    pub is_divided: bool,
    /// The normalized x', `[rows, hidden]`, the same on all ranks.
    pub normed: Tensor,
}
