//! The header of a GGUF file: magic bytes, version, counts, metadata and tensor table.
//! Every count, length and offset is checked against a limit or the file size before it is used.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::{Context, Result, bail};

use super::cursor::{Cursor, NeedsMoreBytes};
use super::metadata::{GgufMetadata, Value, ValueLocation};
use crate::text::excerpt;
use crate::weights::ggml::GgmlType;
use crate::weights::gguf::limits::{MAX_DIMENSIONS, MAX_KEY_BYTES, MAX_KEYS, MAX_NAME_BYTES, MAX_TENSORS};

const MAGIC: [u8; 4] = *b"GGUF";
const DEFAULT_ALIGNMENT: u32 = 32;

/// The parsed header of one GGUF file.
pub struct GgufHeader {
    pub version: u32,
    values: BTreeMap<String, ValueLocation>,
    pub tensors: BTreeMap<String, GgufTensorInfo>,
}

/// One entry of the tensor table.
#[derive(Clone, Debug)]
pub struct GgufTensorInfo {
    pub ggml_type: GgmlType,
    /// The shape with the outermost dimension first, as in safetensors. GGUF files store the innermost dimension first.
    pub shape: Vec<usize>,
    pub bytes: usize,
    /// The index of the shard that contains the tensor.
    pub(super) shard: usize,
    /// The byte offset of the tensor in this shard.
    pub(super) start: usize,
}

impl GgufTensorInfo {
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the byte range of the tensor in its file.
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.bytes
    }
}

impl GgufHeader {
    /// Parses the header of a file without reading tensor data. `bytes` is the whole file.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        Self::parse_head(bytes, bytes.len() as u64)
    }

    /// Parses the header from `bytes`, the beginning of a file with `file_bytes` bytes.
    /// Fails with [`NeedsMoreBytes`] if the header is longer than `bytes`.
    pub(super) fn parse_head(bytes: &[u8], file_bytes: u64) -> Result<Self> {
        let mut cursor = Cursor::from_head(bytes, file_bytes);
        let magic =
            cursor.array().or_else(|error| if error.is::<NeedsMoreBytes>() { Err(error) } else { Ok([0; 4]) })?;
        if magic != MAGIC {
            bail!("the file does not begin with the letters GGUF, so it is not a GGUF file");
        }
        let version = cursor.u32().context("the version is missing")?;
        match version {
            2 | 3 => {}
            1 => bail!("GGUF version 1 is not supported: convert the model again"),
            swapped if swapped & 0xffff == 0 && swapped != 0 => bail!("big-endian GGUF files are not supported"),
            other => bail!("GGUF version {other} is not supported; supported: 2 and 3"),
        }
        let tensors = count(&mut cursor, "tensors", MAX_TENSORS)?;
        let keys = count(&mut cursor, "metadata keys", MAX_KEYS)?;
        let values = read_metadata(&mut cursor, keys)?;
        let alignment = alignment(&GgufMetadata::new(bytes, &values))?;
        let tensors = read_tensors(&mut cursor, tensors, alignment, file_bytes)?;
        Ok(Self { version, values, tensors })
    }

    /// Returns the metadata in the header. `bytes` must be the beginning of the file and contain the whole header.
    pub fn metadata<'c>(&'c self, bytes: &'c [u8]) -> GgufMetadata<'c> {
        GgufMetadata::new(bytes, &self.values)
    }
}

/// Reads a count. Fails if it exceeds `limit`. `things` names the counted items in error messages.
fn count(cursor: &mut Cursor, things: &str, limit: u64) -> Result<u64> {
    let count = cursor.u64().with_context(|| format!("the number of {things} is missing"))?;
    if count > limit {
        bail!("{count} {things} exceed the limit of {limit}");
    }
    Ok(count)
}

/// Reads a UTF-8 name of 1 to `limit` bytes.
fn name<'b>(cursor: &mut Cursor<'b>, limit: usize) -> Result<&'b str> {
    let bytes = cursor.string().context("cannot read the name")?;
    if bytes.is_empty() || bytes.len() > limit {
        bail!("the name has {} bytes; 1 to {limit} are allowed", bytes.len());
    }
    std::str::from_utf8(bytes).context("the name is not UTF-8")
}

fn read_metadata(cursor: &mut Cursor, count: u64) -> Result<BTreeMap<String, ValueLocation>> {
    let mut values = BTreeMap::new();
    for number in 1..=count {
        let key = name(cursor, MAX_KEY_BYTES).with_context(|| format!("metadata key {number} of {count}"))?;
        let value = ValueLocation::read(cursor).with_context(|| format!("metadata key {}", excerpt(key)))?;
        if values.insert(key.to_string(), value).is_some() {
            bail!("metadata key {} occurs twice", excerpt(key));
        }
    }
    Ok(values)
}

fn alignment(metadata: &GgufMetadata) -> Result<u64> {
    let alignment = match metadata.get("general.alignment")? {
        None => DEFAULT_ALIGNMENT,
        Some(Value::U32(alignment)) => alignment,
        Some(other) => bail!("metadata key general.alignment: expected U32, found {:?}", other.kind()),
    };
    if !alignment.is_power_of_two() {
        bail!("metadata key general.alignment: {alignment} is not a power of two");
    }
    Ok(alignment.into())
}

/// An entry of the tensor table before its offset is checked.
struct UncheckedTensor {
    info: GgufTensorInfo,
    /// The offset from the start of the data section.
    offset: u64,
}

fn read_tensors(
    cursor: &mut Cursor,
    count: u64,
    alignment: u64,
    file_bytes: u64,
) -> Result<BTreeMap<String, GgufTensorInfo>> {
    let mut rows = BTreeMap::new();
    for number in 1..=count {
        let name = name(cursor, MAX_NAME_BYTES).with_context(|| format!("tensor {number} of {count}"))?;
        let row = read_row(cursor).with_context(|| format!("tensor {}", excerpt(name)))?;
        if rows.insert(name.to_string(), row).is_some() {
            bail!("tensor {} occurs twice", excerpt(name));
        }
    }
    let data = (cursor.position() as u64).next_multiple_of(alignment);
    let check = |(name, row): (String, _)| {
        let info =
            check_offset(row, alignment, data, file_bytes).with_context(|| format!("tensor {}", excerpt(&name)))?;
        Ok((name, info))
    };
    let tensors: BTreeMap<String, GgufTensorInfo> = rows.into_iter().map(check).collect::<Result<_>>()?;
    check_overlaps(&tensors)?;
    Ok(tensors)
}

fn read_row(cursor: &mut Cursor) -> Result<UncheckedTensor> {
    let dimensions = cursor.u32()?;
    if dimensions > MAX_DIMENSIONS {
        bail!("{dimensions} dimensions exceed the limit of {MAX_DIMENSIONS}");
    }
    let mut shape = (0..dimensions).map(|_| cursor.u64()).collect::<Result<Vec<_>>>()?;
    let ggml_type = GgmlType::from_id(cursor.u32()?)?;
    let offset = cursor.u64()?;
    let columns = shape.first().copied().unwrap_or(1);
    if !columns.is_multiple_of(ggml_type.block_length() as u64) {
        bail!("row length {columns} is not a multiple of the {ggml_type} block length {}", ggml_type.block_length());
    }
    // Count a dimension of 0 as 1. Otherwise, the zero would hide an overflow in the product of the other dimensions.
    let elements = shape.iter().try_fold(1u64, |product, &length| product.checked_mul(length.max(1)));
    if elements.is_none_or(|elements| elements > i64::MAX as u64) {
        bail!("shape {shape:?} has too many elements");
    }
    // The size in bytes may overflow even if the number of elements does not.
    // As above, count a dimension of 0 as 1, except the row length.
    let bytes = |rows| ggml_type.bytes(columns, rows).and_then(|bytes| usize::try_from(bytes).ok());
    let all_rows = bytes(shape.iter().skip(1).map(|&length| length.max(1)).product());
    let (Some(_), Some(bytes)) = (all_rows, bytes(shape.iter().skip(1).product())) else {
        bail!("shape {shape:?} has too many bytes")
    };
    shape.reverse();
    let shape = shape.into_iter().map(usize::try_from).collect::<Result<_, _>>().context("the shape is too large")?;
    Ok(UncheckedTensor { info: GgufTensorInfo { ggml_type, shape, bytes, shard: 0, start: 0 }, offset })
}

/// Checks that a tensor is aligned and lies within the file, and computes its offset in the file.
/// `data` is the offset of the data section in the file.
fn check_offset(row: UncheckedTensor, alignment: u64, data: u64, file_bytes: u64) -> Result<GgufTensorInfo> {
    let UncheckedTensor { mut info, offset } = row;
    if !offset.is_multiple_of(alignment) {
        bail!("offset {offset} is not a multiple of the alignment {alignment}");
    }
    let start = data.checked_add(offset);
    let end = start.and_then(|start| start.checked_add(info.bytes as u64));
    let (Some(start), Some(end)) = (start, end) else { bail!("offset {offset} is too large") };
    if end > file_bytes {
        bail!("the data ends at byte {end}, but the file has {file_bytes} bytes (is the download complete?)");
    }
    info.start = usize::try_from(start).context("the offset is too large")?;
    Ok(info)
}

fn check_overlaps(tensors: &BTreeMap<String, GgufTensorInfo>) -> Result<()> {
    let mut by_offset: Vec<_> = tensors.iter().filter(|(_, info)| info.bytes > 0).collect();
    by_offset.sort_by_key(|(_, info)| info.start);
    for pair in by_offset.windows(2) {
        let ((name, info), (next_name, next)) = (pair[0], pair[1]);
        if info.start + info.bytes > next.start {
            bail!("tensors {} and {} overlap at byte {}", excerpt(name), excerpt(next_name), next.start);
        }
    }
    Ok(())
}
