//! The usual tensor names of Hugging Face checkpoints.
//!
//! `inferno show` uses this table for checkpoints of unsupported or unknown architectures. No family uses it.

use crate::weights::TensorTable;
use crate::weights::tensor_table::{
    Dimension::{Heads, Intermediate},
    Division::{Columns, Rows, Whole},
    Form::{F32, Matrix, Transposed, Unloaded},
    Group, TensorRow, tensor,
};

pub(super) const TENSORS: TensorTable = TensorTable(&[OTHERS, ATTENTION, EXPERTS, MLP]);

const OTHERS: &[TensorRow] = &[
    TensorRow::UnloadedModule("vision_tower"),
    TensorRow::UnloadedModule("multi_modal_projector"),
    TensorRow::UnloadedModule("rotary_emb"),
    tensor("attn.bias", Group::Attention, Unloaded, Whole),
    tensor("attn.masked_bias", Group::Attention, Unloaded, Whole),
    tensor("block_sparse_moe.gate", Group::Mlp, F32, Whole),
    tensor("mlp.gate", Group::Mlp, F32, Whole),
    tensor("mlp.router", Group::Mlp, F32, Whole),
];

const ATTENTION: &[TensorRow] = &[
    tensor("q_proj", Group::Attention, Matrix, Rows(Heads)),
    tensor("k_proj", Group::Attention, Matrix, Rows(Heads)),
    tensor("v_proj", Group::Attention, Matrix, Rows(Heads)),
    tensor("qkv_proj", Group::Attention, Matrix, Rows(Heads)),
    tensor("o_proj", Group::Attention, Matrix, Columns(Heads)),
    tensor("attn.c_attn", Group::Attention, Transposed, Rows(Heads)),
    tensor("attn.c_proj", Group::Attention, Transposed, Columns(Heads)),
    tensor("self_attn.sinks", Group::Attention, F32, Rows(Heads)),
];

/// Separate experts with the names of Qwen and of Mixtral, then stacked experts.
const EXPERTS: &[TensorRow] = &[
    tensor("experts.*.gate_proj", Group::Experts, Matrix, Rows(Intermediate)),
    tensor("experts.*.up_proj", Group::Experts, Matrix, Rows(Intermediate)),
    tensor("experts.*.down_proj", Group::Experts, Matrix, Columns(Intermediate)),
    tensor("experts.*.w1", Group::Experts, Matrix, Rows(Intermediate)),
    tensor("experts.*.w3", Group::Experts, Matrix, Rows(Intermediate)),
    tensor("experts.*.w2", Group::Experts, Matrix, Columns(Intermediate)),
    tensor("experts.gate_up_proj", Group::Experts, Matrix, Rows(Intermediate)),
    tensor("experts.down_proj", Group::Experts, Matrix, Columns(Intermediate)),
];

const MLP: &[TensorRow] = &[
    tensor("gate_proj", Group::Mlp, Matrix, Rows(Intermediate)),
    tensor("up_proj", Group::Mlp, Matrix, Rows(Intermediate)),
    tensor("gate_up_proj", Group::Mlp, Matrix, Rows(Intermediate)),
    tensor("down_proj", Group::Mlp, Matrix, Columns(Intermediate)),
    tensor("feed_forward.w1", Group::Mlp, Matrix, Rows(Intermediate)),
    tensor("feed_forward.w3", Group::Mlp, Matrix, Rows(Intermediate)),
    tensor("feed_forward.w2", Group::Mlp, Matrix, Columns(Intermediate)),
    tensor("mlp.c_fc", Group::Mlp, Transposed, Rows(Intermediate)),
    tensor("mlp.c_proj", Group::Mlp, Transposed, Columns(Intermediate)),
];
