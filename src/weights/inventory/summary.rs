//! A summary of a model's weights: the number of parameters and the main dtype.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Result, ensure};

use crate::snapshot::safetensors::{self, ShardIndex};
use crate::weights::gguf::GgufCheckpoint;
use crate::weights::safetensors::header::{self, MAX_HEADER_BYTES};
use crate::weights::tensor_info::StoredDtype;
use crate::weights::tensor_kind::TensorKind;

/// The information about a model's weights that `inferno list` needs.
pub struct WeightsSummary {
    pub parameters: u64,
    /// The dtype with the most bytes, in lower case. For a GGUF file, the quantization of the file, such as `Q4_K_M`.
    pub main_dtype: Option<String>,
    /// Whether `parameters` counts four parameters per packed I32 word, which is correct only for 8-bit quantization.
    pub is_packed: bool,
}

impl WeightsSummary {
    /// Summarizes the weights in a GGUF file.
    pub fn from_gguf(file: &GgufCheckpoint) -> Self {
        Self { parameters: file.parameters(), main_dtype: file.quantization(), is_packed: false }
    }

    /// Summarizes the weights in the safetensors files of a directory. Reads and validates only the headers.
    pub fn from_safetensors(dir: &Path) -> Result<Self> {
        let mut parameters = 0u64;
        let mut bytes = BytesByDtype::default();
        let mut is_packed = false;
        let mut header_bytes = 0;
        for file in safetensors::files(dir, ShardIndex::read(dir)?.as_ref())? {
            let (json, data_bytes) = header::read_file(&file)?;
            header_bytes += json.len() as u64;
            ensure!(
                header_bytes <= MAX_HEADER_BYTES,
                "cannot read the model: the headers of its shards have more than {MAX_HEADER_BYTES} bytes in total"
            );
            header::read(&file.display().to_string(), &json, Some(data_bytes), |tensor| {
                let kind = TensorKind::new(&tensor.name, &StoredDtype::from_header(&tensor.dtype));
                parameters = parameters.saturating_add(kind.parameters(tensor.elements));
                bytes.add(&tensor.dtype, tensor.bytes);
                is_packed |= tensor.is_packed;
            })?;
        }
        Ok(Self { parameters, main_dtype: bytes.main(), is_packed })
    }
}

/// The total size of the tensors of each dtype, in bytes.
#[derive(Default)]
pub struct BytesByDtype(BTreeMap<String, u64>);

impl BytesByDtype {
    pub fn add(&mut self, dtype: &str, bytes: u64) {
        match self.0.get_mut(dtype) {
            Some(sum) => *sum = sum.saturating_add(bytes),
            None => drop(self.0.insert(dtype.to_string(), bytes)),
        }
    }

    /// Returns the dtype with the most bytes, in lower case.
    pub fn main(self) -> Option<String> {
        self.0.into_iter().max_by_key(|(_, bytes)| *bytes).map(|(dtype, _)| dtype.to_lowercase())
    }
}
