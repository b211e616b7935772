//! Reads the rows of a model tensor from the GGUF tensors that it is built from.

use anyhow::{Context, Result};

use super::model_tensor::{ModelTensor, RowMapping, Transform};
use crate::weights::ggml::GgmlType;
use crate::weights::gguf::file::{GgufCheckpoint, GgufTensorView};
use crate::weights::reading::{RowBuffer, RowSource, StoredRows};

/// The rows of a model tensor, read from its source tensors.
pub struct SourceRows<'c> {
    sources: Vec<SourceTensor<'c>>,
    /// The number of elements in each row.
    pub columns: usize,
    mapping: RowMapping,
}

/// The rows of one GGUF tensor.
struct SourceTensor<'c> {
    ggml_type: GgmlType,
    rows: StoredRows<'c>,
}

/// A row of a GGUF tensor.
pub struct SourceRow<'b> {
    pub ggml_type: GgmlType,
    pub bytes: &'b [u8],
}

impl<'c> SourceRows<'c> {
    /// Finds the rows of `tensor` in `file`. Reads no rows yet.
    /// Fails if a row of a source tensor does not consist of whole blocks of its type.
    pub fn new(file: &'c GgufCheckpoint, tensor: &ModelTensor) -> Result<Self> {
        let views = tensor.sources.iter().map(|name| file.view(name)).collect::<Result<Vec<_>>>()?;
        let columns = match tensor.transform {
            Transform::Vector => 1,
            _ => views[0].info.shape.last().copied().unwrap_or(1),
        };
        let source = |view: GgufTensorView<'c>| {
            let ggml_type = view.info.ggml_type;
            let row_bytes = ggml_type.bytes(columns as u64, 1).with_context(|| {
                format!("row length {columns} is not a multiple of the block length of {ggml_type}")
            })?;
            Ok(SourceTensor { ggml_type, rows: StoredRows { bytes: view.bytes, row_bytes: row_bytes as usize } })
        };
        let sources = views.into_iter().map(source).collect::<Result<_>>()?;
        Ok(Self { sources, columns, mapping: tensor.rows })
    }

    /// Returns the ggml type of the first source tensor.
    pub fn first_type(&self) -> GgmlType {
        self.sources[0].ggml_type
    }

    /// Returns the row with index `row`. Its bytes may be stored in `buffer`.
    pub fn get<'b>(&'b self, row: usize, buffer: &'b mut RowBuffer) -> Result<SourceRow<'b>> {
        let (source, row) = match self.mapping {
            RowMapping::Identity => (0, row),
            RowMapping::InterleavedHalves(head) => {
                let (start, within) = (row - row % head, row % head);
                (0, start + within % (head / 2) * 2 + within / (head / 2))
            }
            RowMapping::RoundRobin(rows) => {
                let (turn, within) = (row / rows, row % rows);
                (turn % self.sources.len(), turn / self.sources.len() * rows + within)
            }
        };
        let SourceTensor { ggml_type, rows } = &self.sources[source];
        // This row exists, because `map_tensors` computed the tensor's shape from the shapes of its sources.
        Ok(SourceRow { ggml_type: *ggml_type, bytes: rows.row(row, buffer)? })
    }
}

impl RowSource for SourceRows<'_> {
    fn row<'b>(&'b self, row: usize, buffer: &'b mut RowBuffer) -> Result<&'b [u8]> {
        Ok(self.get(row, buffer)?.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::reading::StoredBytes;

    #[test]
    fn interleaved_halves_are_separated() {
        let bytes: Vec<u8> = (0..12).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let rows = StoredRows { bytes: StoredBytes::Memory(&bytes), row_bytes: 4 };
        let rows = SourceRows {
            sources: vec![SourceTensor { ggml_type: GgmlType::F32, rows }],
            columns: 1,
            mapping: RowMapping::InterleavedHalves(6),
        };
        let mut buffer = RowBuffer::default();
        let mut read = |row| f32::from_le_bytes(rows.row(row, &mut buffer).unwrap().try_into().unwrap());
        let read: Vec<f32> = (0..12).map(&mut read).collect();
        assert_eq!(read, [0., 2., 4., 1., 3., 5., 6., 8., 10., 7., 9., 11.]);
    }
}
