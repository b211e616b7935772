//! The header of a safetensors file, told tensor by tensor: for what is to be known of a model without loading it, from
//! files of which nothing else may be here. What loads a model uses the safetensors crate, which checks more.

use std::borrow::Cow;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// One tensor as its header tells of it.
pub struct Tensor<'h> {
    pub name: Cow<'h, str>,
    /// `BF16`, `U8`, `F8_E4M3`. Any dtype will do.
    pub dtype: Cow<'h, str>,
    pub rank: usize,
    pub elements: u64,
    pub bytes: u64,
    /// Whether it was words of codes in the file, as compressed-tensors packs them: taken for four codes of I8 each, and named
    /// `weight`. How many there are is said in config.json alone, where any but four is refused.
    pub packed: bool,
}

/// A header may not be larger, as the safetensors crate has it.
const MOST_BYTES: u64 = 100_000_000;

/// Hands out the tensors of a header, its JSON without the length before it, in the order of the file. `data_bytes` is
/// what follows the header in the file, where that is known.
pub fn read<'h>(file: &str, header: &'h [u8], data_bytes: Option<u64>, mut each: impl FnMut(Tensor<'h>)) -> Result<()> {
    let (mut end, mut total) = (0, 0u64);
    let mut wrong = None;
    let mut json = serde_json::Deserializer::from_slice(header);
    let tensors = Tensors(|name: Cow<'h, str>, Entry { dtype, shape, data_offsets: (first, last) }| {
        let elements = shape.iter().try_fold(1u64, |product, &size| product.checked_mul(size));
        let (Some(elements), Some(bytes)) = (elements, last.checked_sub(first)) else {
            wrong = Some(format!("{name:?} the shape {shape:?} and the bytes {first} to {last}"));
            return;
        };
        if bits(&dtype).is_some_and(|bits| elements.checked_mul(bits) != bytes.checked_mul(8)) {
            wrong = Some(format!("{name:?} {elements} elements of {dtype} in {bytes} bytes"));
            return;
        }
        end = end.max(last);
        total = total.saturating_add(bytes);
        let rank = shape.len();
        each(match name.strip_suffix(".weight_packed") {
            Some(module) if dtype == "I32" => {
                let (name, elements) = (format!("{module}.weight").into(), elements.saturating_mul(4));
                Tensor { name, dtype: "I8".into(), rank, elements, bytes, packed: true }
            }
            _ => Tensor { name, dtype, rank, elements, bytes, packed: false },
        });
    });
    let read = tensors.deserialize(&mut json).and_then(|()| json.end());
    read.with_context(|| format!("the header of {file} is none of a safetensors file"))?;
    if let Some(wrong) = wrong {
        bail!("the header of {file} gives {wrong}");
    }
    // Holes, and what lies one over the other.
    ensure!(total == end, "the header of {file} has tensors of {total} bytes in {end}");
    if let Some(data_bytes) = data_bytes.filter(|bytes| *bytes != end) {
        bail!("the header of {file} tells of {end} bytes of tensors, the file has {data_bytes}");
    }
    Ok(())
}

/// The JSON of a file's header and the bytes that follow it.
pub fn of_file(path: &Path) -> Result<(Vec<u8>, u64)> {
    let cannot = || format!("cannot read {}", path.display());
    let mut file = File::open(path).with_context(cannot)?;
    let file_bytes = file.metadata().with_context(cannot)?.len();
    let mut length = [0; 8];
    file.read_exact(&mut length).with_context(cannot)?;
    let length = u64::from_le_bytes(length);
    let data_bytes = file_bytes.checked_sub(8).and_then(|bytes| bytes.checked_sub(length));
    let data_bytes = data_bytes.filter(|_| length <= MOST_BYTES);
    ensure!(data_bytes.is_some(), "{} is no safetensors file: a header of {length} bytes", path.display());
    let mut header = vec![0; length as usize];
    file.read_exact(&mut header).with_context(cannot)?;
    Ok((header, data_bytes.unwrap_or_default()))
}

/// Of one element; none for a dtype that is not known here.
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
struct Entry<'h> {
    #[serde(borrow)]
    dtype: Cow<'h, str>,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// Borrowed where nothing in it is escaped, which a plain `Cow` never is.
#[derive(Deserialize)]
struct Name<'h>(#[serde(borrow)] Cow<'h, str>);

/// Hands out every entry of a map as it is read.
struct Tensors<F>(F);

impl<'h, F: FnMut(Cow<'h, str>, Entry<'h>)> DeserializeSeed<'h> for Tensors<F> {
    type Value = ();

    fn deserialize<D: Deserializer<'h>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'h, F: FnMut(Cow<'h, str>, Entry<'h>)> Visitor<'h> for Tensors<F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("tensors by name")
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
