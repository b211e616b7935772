//! The interface for exchanging tensors between the devices of all ranks.

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
    /// If ranks share a GPU, as in tests, returns true only during the capture of a CUDA graph.
    /// Outside a graph, the first launch of a kernel loads the kernel, and loading waits for all running kernels of the
    /// GPU. If one of them waits for the rank that loads the kernel, both ranks are deadlocked.
    fn can_queue(&self) -> bool;

    /// Calls `launch` at the same time as the other ranks.
    /// `launch` launches a CUDA graph that contains operations of this trait.
    ///
    /// Waits until every rank is ready to launch, calls `launch`, and waits until every rank has launched.
    /// Ends the exchange if a wait takes too long.
    /// Outside a CUDA graph, operations such as [`all_reduce`](Self::all_reduce) wait for the other ranks in the same
    /// way.
    ///
    /// Without these waits, a rank could load a kernel or allocate memory while its GPU waits for another rank.
    /// Such a driver call can wait for the GPU, and meanwhile holds a lock that the other rank needs for its launch.
    fn launch_together(&self, launch: &mut dyn FnMut() -> Result<()>) -> Result<()>;

    /// Returns the sum of x over all ranks, for [`World::all_reduce`](super::World::all_reduce).
    fn all_reduce(&self, x: &Tensor) -> Result<Tensor>;

    /// Like [`all_reduce`](Self::all_reduce), but may round each rank's `x` and the sum to bf16, to send half as many
    /// bytes.
    fn all_reduce_rounded(&self, x: &Tensor) -> Result<Tensor>;

    /// Computes a [`ResidualUpdate`], for [`World::update_residual`](super::World::update_residual).
    /// Returns `None` if the update is not supported.
    /// If `rounds_to_bf16` is true, rounds the partial results to bf16, and may round the normalized x' to bf16.
    fn update_residual(&self, update: &ResidualUpdate, rounds_to_bf16: bool) -> Result<Option<UpdatedResidual>>;

    /// Collects each row of x from the rank that computed it, for
    /// [`World::all_gather_rows`](super::World::all_gather_rows).
    fn all_gather_rows(&self, x: &Tensor) -> Result<Tensor>;

    /// Returns the columns of all ranks side by side, for
    /// [`World::all_gather_columns`](super::World::all_gather_columns).
    /// If `out`, f32 `[rows, columns]`, is given, writes the columns to `out` and returns it.
    fn all_gather_columns(&self, x: &Tensor, columns: usize, out: Option<&Tensor>) -> Result<Tensor>;

    /// Returns the rank that did not answer in time and so ended the exchange, if any.
    ///
    /// Once the exchange has ended, operations no longer wait for other ranks, so their results can be wrong.
    fn missing_rank(&self) -> Option<usize>;

    /// Ends the exchange: on all ranks, current and future operations stop waiting, so their results can be wrong.
    fn end(&self);
}

/// One rank's partial result, `[rows, hidden]`.
/// The sum of the partial results of all ranks is the output of attention or of an MLP, without its bias.
#[derive(Clone, Copy, Debug)]
pub enum PartialResult<'t> {
    /// The partial result itself, f32 or bf16.
    Rows(&'t Tensor),
    /// The partial result is the sum of these terms of a matrix product, f32 `[terms, rows, hidden]`.
    ProductTerms(&'t Tensor),
    /// Each row of the partial result is the sum of the outputs of the row's experts, weighted with `weights`.
    Experts {
        /// The outputs, `[rows, chosen, hidden]`.
        /// `chosen` is the number of experts per row. Only bf16 is supported.
        outputs: &'t Tensor,
        /// The routing weights, f32 `[rows, chosen]`.
        weights: &'t Tensor,
    },
}

/// An update of the residual stream, x' = x + bias + Σ partial over all ranks, followed by the RMSNorm of x'.
/// All tensors except the partial result and the normalized x' are f32.
#[derive(Clone, Copy, Debug)]
pub struct ResidualUpdate<'t> {
    /// x, `[rows, hidden]`.
    pub x: &'t Tensor,
    /// Whether x is valid only in the rows that this rank computed (see [`UpdatedResidual`]).
    pub is_divided: bool,
    /// This rank's partial result. Its form and its dtype may differ between ranks.
    pub partial: PartialResult<'t>,
    /// A bias to add to every row: `[hidden]`.
    pub bias: Option<&'t Tensor>,
    /// The weight of the RMSNorm, `[hidden]`.
    pub weight: &'t Tensor,
    pub eps: f32,
    /// The dtype of the normalized x'. Only bf16 and f32 are supported.
    pub dtype: DType,
}

/// The result of a [`ResidualUpdate`].
pub struct UpdatedResidual {
    /// x', f32 `[rows, hidden]`.
    pub x: Tensor,
    /// Whether x' is valid only in the rows that this rank computed.
    /// If so, [`World::all_gather_rows`](super::World::all_gather_rows) returns all rows.
    pub is_divided: bool,
    /// The normalized x', `[rows, hidden]`, the same on all ranks.
    pub normed: Tensor,
}
