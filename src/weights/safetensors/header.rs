//! Reads the header of a local or remote safetensors file, to describe a model without loading the weights.
//! To load a model, inferno uses the `safetensors` crate instead, which performs more checks.

use std::borrow::Cow;
use std::fmt;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::files;
use crate::text::{counted, excerpt, library_error};

/// One tensor in a safetensors header.
pub struct HeaderTensor<'h> {
    pub name: Cow<'h, str>,
    /// The dtype, such as `BF16` or `F8_E4M3`. Unknown dtypes are allowed.
    pub dtype: Cow<'h, str>,
    pub shape: Vec<u64>,
    pub elements: u64,
    pub bytes: u64,
    /// Whether the file stores the tensor as an I32 tensor named `weight_packed` (compressed-tensors).
    /// For packed tensors, `name`, `dtype`, `shape` and `elements` describe the unpacked I8 `weight`.
    /// The header does not specify how many values an I32 holds. inferno assumes four, because it loads packed weights
    /// only if they have 8 bits.
    pub is_packed: bool,
}

/// The maximum total size of the safetensors headers of all shards, in bytes.
/// The `safetensors` crate has the same limit for the header of one file.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The maximum number of JSON values in a header. Allows about 350,000 matrices, with 12 values each (keys included).
pub(super) const MAX_HEADER_VALUES: usize = 1 << 22;

/// Calls `each` for every tensor in a header, in the order of the JSON.
/// Fails if the header is invalid, in which case `each` may already have been called for some tensors.
///
/// `header` is the JSON text without the length prefix.
/// `data_bytes` is the size of the data after the header, if known.
pub fn read<'h>(
    file: &str,
    header: &'h [u8],
    data_bytes: Option<u64>,
    mut each: impl FnMut(HeaderTensor<'h>),
) -> Result<()> {
    files::check_json_values(MAX_HEADER_VALUES, header).with_context(|| format!("the header of {file} is invalid"))?;
    let (mut end, mut total) = (0, 0u64);
    let mut invalid = None;
    let mut json = serde_json::Deserializer::from_slice(header);
    let tensors = TensorVisitor(|name: Cow<'h, str>, JsonTensor { dtype, mut shape, data_offsets: (first, last) }| {
        let elements = shape.iter().try_fold(1u64, |product, &size| product.checked_mul(size));
        let (Some(elements), Some(bytes)) = (elements, last.checked_sub(first)) else {
            let name = excerpt(&name);
            invalid = Some(format!(
                "tensor {name}: the shape has too many elements, or the byte range {first} to {last} is invalid"
            ));
            return;
        };
        if bits(&dtype).is_some_and(|bits| elements.checked_mul(bits) != bytes.checked_mul(8)) {
            let name = excerpt(&name);
            invalid = Some(format!(
                "tensor {name}: a size of {} does not match {} of {dtype}",
                counted(bytes, "byte"),
                counted(elements, "element")
            ));
            return;
        }
        end = end.max(last);
        total = total.saturating_add(bytes);
        each(match name.strip_suffix(".weight_packed") {
            Some(module) if dtype == "I32" => {
                let (name, elements) = (format!("{module}.weight").into(), elements.saturating_mul(4));
                if let Some(columns) = shape.last_mut() {
                    *columns = columns.saturating_mul(4);
                }
                HeaderTensor { name, dtype: "I8".into(), shape, elements, bytes, is_packed: true }
            }
            _ => HeaderTensor { name, dtype, shape, elements, bytes, is_packed: false },
        });
    });
    let read = tensors.deserialize(&mut json).and_then(|()| json.end());
    read.map_err(|error| anyhow!("{}", library_error(&error)))
        .with_context(|| format!("{file} does not have a valid safetensors header"))?;
    if let Some(invalid) = invalid {
        bail!("the header of {file} is invalid: {invalid}");
    }
    // Without gaps or overlaps, the last tensor ends at the total size of all tensors.
    ensure!(
        total == end,
        "the header of {file} is invalid: the tensors have {} but end at byte {end}",
        counted(total, "byte")
    );
    if let Some(data_bytes) = data_bytes.filter(|bytes| *bytes != end) {
        let (listed, found) = (counted(end, "byte"), counted(data_bytes, "byte"));
        bail!("the header of {file} lists {listed} of tensors, but the file has {found} of data");
    }
    Ok(())
}

/// Reads the header of a file. Returns the JSON text of the header and the size of the data after the header, in bytes.
pub fn read_file(path: &Path) -> Result<(Vec<u8>, u64)> {
    let context = || format!("cannot read {}", path.display());
    let mut file = files::open(path)?;
    let file_bytes = file.metadata().with_context(context)?.len();
    let mut length = [0; 8];
    file.read_exact(&mut length).with_context(context)?;
    let length = u64::from_le_bytes(length);
    let data_bytes = file_bytes.checked_sub(8).and_then(|bytes| bytes.checked_sub(length));
    let data_bytes = data_bytes.filter(|_| length <= MAX_HEADER_BYTES);
    ensure!(
        data_bytes.is_some(),
        "{} is not a safetensors file: the header length of {length} bytes exceeds the file ({file_bytes} bytes) \
         or the limit ({MAX_HEADER_BYTES} bytes)",
        path.display()
    );
    let mut header = vec![0; length as usize];
    file.read_exact(&mut header).with_context(context)?;
    Ok((header, data_bytes.unwrap_or_default()))
}

/// Returns the number of bits per element, or `None` for an unknown dtype.
fn bits(dtype: &str) -> Option<u64> {
    match dtype {
        "F64" | "I64" | "U64" | "C64" => Some(64),
        "F32" | "I32" | "U32" => Some(32),
        "F16" | "BF16" | "I16" | "U16" => Some(16),
        "F8_E4M3" | "F8_E5M2" | "F8_E8M0" | "I8" | "U8" | "BOOL" => Some(8),
        _ => None,
    }
}

#[derive(Deserialize)]
struct JsonTensor<'h> {
    #[serde(borrow)]
    dtype: Cow<'h, str>,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// A tensor name that is borrowed unless it contains escapes.
/// A type of its own, because serde borrows a `Cow` only in a field with `#[serde(borrow)]`.
#[derive(Deserialize)]
struct Name<'h>(#[serde(borrow)] Cow<'h, str>);

/// A visitor that calls a function for each tensor as the JSON object is parsed.
struct TensorVisitor<F>(F);

impl<'h, F: FnMut(Cow<'h, str>, JsonTensor<'h>)> DeserializeSeed<'h> for TensorVisitor<F> {
    type Value = ();

    fn deserialize<D: Deserializer<'h>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'h, F: FnMut(Cow<'h, str>, JsonTensor<'h>)> Visitor<'h> for TensorVisitor<F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'h>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some(Name(name)) = map.next_key()? {
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
            } else {
                (self.0)(name, map.next_value()?);
            }
        }
        Ok(())
    }
}
