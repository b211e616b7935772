//! Loads the kernels of matrix products before the first step (see [`Decoder::load_product_kernels`]).
//!
//! [`Decoder::load_product_kernels`]: super::decoder::Decoder::load_product_kernels

use anyhow::Result;
use candle_core::{DType, Tensor};

use super::layer::DecoderLayer;
use super::linear::Linear;
use super::mlp::Mlp;
use super::norm::Norm;
use super::residual::PartialForm;
use crate::kernels::SumOrder;
use crate::kernels::quantized::WeightFormat;
use crate::world::World;

/// The properties of a product that determine its kernels.
#[derive(PartialEq)]
struct ProductKind {
    /// The dimensions of the matrix, `(rows, columns)`.
    dims: (usize, usize),
    /// The quantized format of the matrix. `None` if it is dense or has several formats.
    format: Option<WeightFormat>,
    /// The form of the output. `None` for the first product of an MLP, which has no [`PartialForm`].
    form: Option<PartialForm>,
}

/// Loads the kernels of products with up to `tokens` tokens by running products on zeros.
/// Runs only the first product of each kind, because products of the same kind need the same kernels.
pub(super) struct ProductKernels<'w> {
    loaded: Vec<ProductKind>,
    tokens: usize,
    /// The compute dtype of the model.
    dtype: DType,
    /// The ranks that divide each layer.
    world: &'w World,
}

impl<'w> ProductKernels<'w> {
    pub fn new(tokens: usize, dtype: DType, world: &'w World) -> Self {
        Self { loaded: Vec::new(), tokens, dtype, world }
    }

    /// Loads the kernels of `qkv_proj`, `o_proj` and a dense MLP.
    pub fn load_layer(&mut self, layer: &DecoderLayer) -> Result<()> {
        let qkv_proj = &layer.self_attn.qkv_proj;
        self.load(qkv_proj, Some(PartialForm::ProductTerms), |x| run(qkv_proj, x, PartialForm::ProductTerms))?;
        self.load_partial(&layer.self_attn.o_proj, layer.attention_post_norm.as_ref())?;
        self.load_mlp(&layer.mlp, layer.mlp_post_norm.as_ref())
    }

    /// Loads the kernels of the output head for up to `rows` rows of logits.
    pub fn load_head(&self, lm_head: &Linear, rows: usize) -> Result<()> {
        lm_head.load_kernels(rows, self.dtype, |x| run(lm_head, x, PartialForm::F32))
    }

    fn load_mlp(&mut self, mlp: &Mlp, post_norm: Option<&Norm>) -> Result<()> {
        let Some((first, last)) = mlp.linears() else { return Ok(()) };
        self.load(first, None, |x| mlp.activated(x, SumOrder::Fastest).map(drop))?;
        self.load_partial(last, post_norm)
    }

    /// Loads the kernels of a layer that returns a partial result: `o_proj`, or the last linear layer of an MLP.
    fn load_partial(&mut self, linear: &Linear, post_norm: Option<&Norm>) -> Result<()> {
        let (world, (hidden, _)) = (self.world, linear.weight.dims());
        let form = |tokens| PartialForm::choose(world, linear.weight.device(), (tokens, hidden), post_norm);
        self.load(linear, Some(form(self.tokens)), |x| run(linear, x, form(x.dim(0)?)))
    }

    fn load(&mut self, linear: &Linear, form: Option<PartialForm>, run: impl Fn(&Tensor) -> Result<()>) -> Result<()> {
        let kind = ProductKind { dims: linear.weight.dims(), format: linear.weight.format(), form };
        if self.loaded.contains(&kind) {
            return Ok(());
        }
        self.loaded.push(kind);
        linear.load_kernels(self.tokens, self.dtype, run)
    }
}

fn run(linear: &Linear, x: &Tensor, form: PartialForm) -> Result<()> {
    linear.forward_partial(x, SumOrder::Fastest, form).map(drop)
}
