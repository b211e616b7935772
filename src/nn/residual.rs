//! The residual stream of a forward pass.

use anyhow::Result;
use candle_core::{DType, Device, Tensor};

use super::norm::Norm;
use super::pass::{Pass, RowSelection};
use crate::kernels::matmul::has_several_terms;
#[cfg(feature = "cuda")]
use crate::kernels::moe::mxfp4_tiles::expert_mlp::ExpertOutputs;
use crate::kernels::norm::Addend;
use crate::kernels::rows::add_bias;
use crate::world::{PartialResult, ResidualUpdate, World};

/// This rank's partial result of attention or of an MLP.
/// The output is the sum of all ranks' partial results, plus the bias.
pub(crate) struct PartialOutput<'l> {
    /// The partial result, without the bias.
    pub rows: PartialRows,
    /// The bias, f32 `[hidden]`.
    pub bias: Option<&'l Tensor>,
}

/// The rows of a [`PartialOutput`], possibly as terms that are not yet added up.
/// The kernel that adds the rows to the residual stream can also add up the terms.
pub(crate) enum PartialRows {
    /// The rows in one tensor, `[tokens, hidden]`: f32, or possibly the compute dtype with [`PartialForm::Rounded`].
    Summed(Tensor),
    /// The terms of a matrix product, f32 `[terms, tokens, hidden]` (see `kernels::matmul::matmul_terms`).
    /// The rows are the sum of the terms.
    ProductTerms(Tensor),
    /// The outputs of each token's experts. A token's row is the weighted sum of these outputs.
    #[cfg(feature = "cuda")]
    PerExpert(ExpertOutputs),
}

impl PartialRows {
    /// Returns the rows as one tensor. The sum of expert outputs has the dtype of the outputs if `form` is `Rounded`,
    /// otherwise f32.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "only builds with CUDA use `form`"))]
    fn summed(self, form: PartialForm) -> Result<Tensor> {
        match self {
            Self::Summed(rows) => Ok(rows),
            Self::ProductTerms(terms) => sum_terms(&terms),
            #[cfg(feature = "cuda")]
            Self::PerExpert(outputs) => Ok(match form {
                PartialForm::F32 | PartialForm::ProductTerms => outputs.sum(DType::F32)?,
                PartialForm::Rounded => outputs.sum(outputs.dtype())?,
            }),
        }
    }
}

/// The form in which a linear layer returns a [`PartialOutput`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PartialForm {
    /// The whole product, in f32.
    F32,
    /// The product may be split into several terms, which the kernel that updates the residual stream adds up.
    ProductTerms,
    /// For large products, which the ranks round to bf16 anyway when they add their partial results.
    /// The product may already be in the compute dtype, which takes less time to write and read than f32.
    Rounded,
}

impl PartialForm {
    /// Returns the form for a rank's partial result, `[rows, hidden]`.
    /// `post_norm` is the norm that will be applied to the output, if any.
    pub fn choose(world: &World, device: &Device, (rows, hidden): (usize, usize), post_norm: Option<&Norm>) -> Self {
        match post_norm {
            None if world.size() == 1 => Self::ProductTerms,
            // If the product can only have one term, `Rounded` takes less time than `ProductTerms`.
            None if world.can_add_product_terms() && has_several_terms(device, rows) => Self::ProductTerms,
            _ if world.can_round(rows * hidden) => Self::Rounded,
            _ => Self::F32,
        }
    }
}

/// Returns the sum of the terms of a product, f32 `[tokens, hidden]`.
/// Does not call candle's `sum`, which a CUDA graph cannot capture, because it copies the shape of its input from the
/// host to the GPU.
fn sum_terms(terms: &Tensor) -> Result<Tensor> {
    let first = terms.get(0)?;
    (1..terms.dim(0)?).try_fold(first, |sum, term| Ok((sum + terms.get(term)?)?))
}

/// The output that is to be added to the residual stream next.
enum Pending<'l> {
    /// This rank's partial result, which is not yet added to the partial results of the other ranks.
    Partial(PartialOutput<'l>),
    /// A complete output or the position embeddings, f32 `[tokens, hidden]`, which are the same on all ranks.
    Whole(Tensor),
}

/// The residual stream: the sum of the embeddings and of all attention and MLP outputs so far.
///
/// The residual stream is f32 in every compute dtype, because rounding errors in a narrower dtype would accumulate.
/// The last output stays in `pending`, because the kernel of the next norm can add it to `x` and normalize the sum.
pub(super) struct Residual<'l> {
    /// The ranks that divide each layer.
    world: &'l World,
    /// The residual stream without the pending output, f32 `[tokens, hidden]`.
    x: Tensor,
    /// Whether x is valid only in this rank's own rows (see [`UpdatedResidual`](crate::world::UpdatedResidual)).
    is_divided: bool,
    pending: Option<Pending<'l>>,
}

impl<'l> Residual<'l> {
    /// Creates a residual stream that starts with x: token embeddings, or the output of the previous stage.
    /// Position embeddings, if any, are added to x. Both are f32 `[tokens, hidden]`, and the same on all ranks.
    pub fn new(x: Tensor, position_embeddings: Option<Tensor>, world: &'l World) -> Self {
        Self { world, x, is_divided: false, pending: position_embeddings.map(Pending::Whole) }
    }

    /// Returns the form for this rank's partial result with `rows` rows.
    /// `post_norm` is the norm that will be applied to the output, if any.
    pub fn partial_form(&self, rows: usize, post_norm: Option<&Norm>) -> Result<PartialForm> {
        Ok(PartialForm::choose(self.world, self.x.device(), (rows, self.x.dim(1)?), post_norm))
    }

    /// Adds the pending output, if any, to x. Returns the normalized residual stream, in `dtype`.
    pub fn norm(&mut self, norm: &Norm, dtype: DType) -> Result<Tensor> {
        match self.pending.take() {
            None => self.add_norm(None, norm, dtype),
            Some(Pending::Whole(rows)) => {
                let terms = &rows.unsqueeze(0)?;
                self.add_norm(Some(Addend { terms, bias: None }), norm, dtype)
            }
            Some(Pending::Partial(output)) => self.add_norm_partial(output, norm, dtype),
        }
    }

    /// Adds y, if any, to x. Returns the normalized sum, in `dtype`.
    fn add_norm(&mut self, y: Option<Addend>, norm: &Norm, dtype: DType) -> Result<Tensor> {
        let (x, normed) = norm.add_norm(self.whole()?, y, dtype)?;
        self.x = x;
        Ok(normed)
    }

    /// Adds the partial results of all ranks and the bias to x. Returns the normalized sum, in `dtype`.
    /// `output` is this rank's partial result.
    fn add_norm_partial(&mut self, output: PartialOutput, norm: &Norm, dtype: DType) -> Result<Tensor> {
        let PartialOutput { rows, bias } = output;
        if let Some(normed) = self.add_norm_fused(&rows, bias, norm, dtype)? {
            return Ok(normed);
        }
        if self.world.size() == 1 || matches!(rows, PartialRows::Summed(_)) {
            return self.add_norm_unfused(PartialOutput { rows, bias }, norm, dtype);
        }
        // Other ranks may already wait in the update, because a kernel supports the form of their partial results.
        // Try again with rows: in this form, either all ranks run the update or none does (`World::update_residual`).
        let form = self.partial_form(self.x.dim(0)?, None)?;
        let rows = PartialRows::Summed(rows.summed(form)?);
        self.add_norm_partial(PartialOutput { rows, bias }, norm, dtype)
    }

    /// Does the work of [`add_norm_partial`](Self::add_norm_partial) in several kernels. Supports every norm.
    fn add_norm_unfused(&mut self, output: PartialOutput, norm: &Norm, dtype: DType) -> Result<Tensor> {
        let PartialOutput { rows, bias } = output;
        let terms = &match rows {
            // Only a single rank still has terms here. `Norm::add_norm` adds them up.
            PartialRows::ProductTerms(terms) => terms,
            rows => self.sum_rows(&rows.summed(PartialForm::F32)?)?.unsqueeze(0)?,
        };
        self.add_norm(Some(Addend { terms, bias }), norm, dtype)
    }

    /// Does the work of [`add_norm_partial`](Self::add_norm_partial) in one kernel.
    /// `rows` is this rank's partial result. Returns `None` and leaves x as it is if no kernel supports this, for
    /// example for a LayerNorm.
    fn add_norm_fused(
        &mut self,
        rows: &PartialRows,
        bias: Option<&Tensor>,
        norm: &Norm,
        dtype: DType,
    ) -> Result<Option<Tensor>> {
        if norm.bias.is_some() {
            return Ok(None);
        }
        let (weight, eps) = (&norm.weight, norm.eps);
        let partial = match rows {
            PartialRows::Summed(rows) => PartialResult::Rows(rows),
            PartialRows::ProductTerms(terms) => PartialResult::ProductTerms(terms),
            #[cfg(feature = "cuda")]
            PartialRows::PerExpert(outputs) if self.world.size() == 1 && bias.is_none() => {
                return Ok(outputs.add_norm(self.whole()?, weight, eps, dtype)?.map(|(x, normed)| {
                    self.x = x;
                    normed
                }));
            }
            #[cfg(feature = "cuda")]
            PartialRows::PerExpert(outputs) => {
                let (outputs, weights) = outputs.outputs_and_weights();
                PartialResult::Experts { outputs, weights }
            }
        };
        let update = ResidualUpdate { x: &self.x, is_divided: self.is_divided, partial, bias, weight, eps, dtype };
        Ok(self.world.update_residual(&update)?.map(|updated| {
            (self.x, self.is_divided) = (updated.x, updated.is_divided);
            updated.normed
        }))
    }

    /// Makes the output of attention or of an MLP the pending output.
    /// If there is a `post_norm` (Gemma), first adds up the partial results of all ranks and normalizes the sum.
    pub fn add(&mut self, output: PartialOutput<'l>, post_norm: Option<&Norm>) -> Result<()> {
        debug_assert!(self.pending.is_none(), "the previous output is not yet added to the residual stream");
        self.pending = Some(match post_norm {
            None => Pending::Partial(output),
            Some(post_norm) => {
                let rows = output.rows.summed(self.partial_form(self.x.dim(0)?, Some(post_norm))?)?;
                Pending::Whole(post_norm.forward(&self.sum(&rows, output.bias)?)?)
            }
        });
        Ok(())
    }

    /// Adds the pending output, if any, to x. Returns the residual stream, f32 `[tokens, hidden]`.
    pub fn settle(&mut self) -> Result<&Tensor> {
        let output = match self.pending.take() {
            None => return self.whole(),
            Some(Pending::Whole(rows)) => rows,
            Some(Pending::Partial(PartialOutput { rows, bias })) => self.sum(&rows.summed(PartialForm::F32)?, bias)?,
        };
        self.x = (self.whole()? + output)?;
        Ok(&self.x)
    }

    /// Keeps only the rows of x that `rows` selects. No output may be pending.
    pub fn select(&mut self, pass: &Pass, rows: RowSelection) -> Result<()> {
        if pass.row_count(rows) != self.x.dim(0)? {
            self.x = pass.select(rows, self.whole()?)?;
        }
        Ok(())
    }

    /// Returns the sum of all ranks' partial results plus the bias, as f32. `rows` is this rank's partial result.
    fn sum(&self, rows: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let rows = self.sum_rows(rows)?;
        Ok(match bias {
            Some(bias) => add_bias(&rows, bias)?,
            None => rows,
        })
    }

    /// Returns the sum of all ranks' partial results, as f32. `rows` is this rank's partial result.
    fn sum_rows(&self, rows: &Tensor) -> Result<Tensor> {
        Ok(self.world.all_reduce_partials(&rows.to_dtype(DType::F32)?)?)
    }

    /// Returns x with the rows of all ranks.
    fn whole(&mut self) -> Result<&Tensor> {
        if self.is_divided {
            (self.x, self.is_divided) = (self.world.all_gather_rows(&self.x)?, false);
        }
        Ok(&self.x)
    }
}
