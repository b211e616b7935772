//! The head of one file: magic, version, counts, metadata, tensor table. Everything is checked against the file's size
//! before it is believed.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry as Slot;
use std::ops::Range;

use anyhow::{Context, Result, bail};

use super::bytes::{Cursor, Short};
use super::metadata::{Entry, Metadata, Value};
use super::{MAX_DIMENSIONS, MAX_KEY_BYTES, MAX_KEYS, MAX_NAME_BYTES, MAX_TENSORS};
use crate::weights::ggml::GgmlType;

const MAGIC: [u8; 4] = *b"GGUF";
const DEFAULT_ALIGNMENT: u32 = 32;

/// What one file's head says.
pub struct Header {
    pub version: u32,
    pub(super) entries: BTreeMap<String, Entry>,
    pub tensors: BTreeMap<String, TensorInfo>,
}

/// What the table says of one tensor.
#[derive(Clone, Debug)]
pub struct TensorInfo {
    pub ggml_type: GgmlType,
    /// The slowest dimension first, as everywhere but in the file.
    pub shape: Vec<usize>,
    pub bytes: usize,
    pub(super) part: usize,
    /// In the file.
    pub(super) start: usize,
}

impl TensorInfo {
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Its bytes in its file.
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.bytes
    }
}

impl Header {
    /// Parses the head of a file that is `bytes` as a whole. No tensor is touched.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        Self::parse_beginning(bytes, bytes.len() as u64)
    }

    /// As [`parse`](Self::parse), of a file of `file` bytes that begins with `bytes`. [`Short`] if the
    /// head is longer than those.
    pub(super) fn parse_beginning(bytes: &[u8], file: u64) -> Result<Self> {
        let mut cursor = Cursor::of_head(bytes, file);
        let magic = cursor.array().or_else(|error| if error.is::<Short>() { Err(error) } else { Ok([0; 4]) })?;
        if magic != MAGIC {
            bail!("this is no GGUF file: it does not begin with the letters GGUF");
        }
        let version = cursor.u32().context("the version is missing")?;
        match version {
            2 | 3 => {}
            1 => bail!("GGUF version 1 is not supported: its lengths have 32 bits; make the file again"),
            swapped if swapped & 0xffff == 0 && swapped != 0 => bail!("a big-endian GGUF file is not supported"),
            other => bail!("GGUF version {other} is unknown; supported: 2 and 3"),
        }
        let tensors = count(&mut cursor, "tensors", MAX_TENSORS)?;
        let keys = count(&mut cursor, "metadata keys", MAX_KEYS)?;
        let entries = read_metadata(&mut cursor, keys)?;
        let alignment = alignment(&Metadata::new(bytes, &entries))?;
        let tensors = read_tensors(&mut cursor, tensors, alignment, file)?;
        Ok(Self { version, entries, tensors })
    }

    /// `bytes` are those that were parsed.
    pub fn metadata<'c>(&'c self, bytes: &'c [u8]) -> Metadata<'c> {
        Metadata::new(bytes, &self.entries)
    }
}

fn count(cursor: &mut Cursor, what: &str, limit: u64) -> Result<u64> {
    let count = cursor.u64().with_context(|| format!("the number of {what} is missing"))?;
    if count > limit {
        bail!("{count} {what} are more than the {limit} that are read");
    }
    Ok(count)
}

/// A name of at most so many bytes, in UTF-8.
fn name<'b>(cursor: &mut Cursor<'b>, limit: usize) -> Result<&'b str> {
    let bytes = cursor.string().context("its name")?;
    if bytes.is_empty() || bytes.len() > limit {
        bail!("its name has {} bytes; 1 to {limit} are allowed", bytes.len());
    }
    std::str::from_utf8(bytes).context("its name is not UTF-8")
}

fn read_metadata(cursor: &mut Cursor, count: u64) -> Result<BTreeMap<String, Entry>> {
    let mut entries = BTreeMap::new();
    for number in 1..=count {
        let key = name(cursor, MAX_KEY_BYTES).with_context(|| format!("metadata key {number} of {count}"))?;
        let entry = Entry::read(cursor).with_context(|| format!("metadata key {key}"))?;
        if entries.insert(key.to_string(), entry).is_some() {
            bail!("metadata key {key} is there twice");
        }
    }
    Ok(entries)
}

fn alignment(metadata: &Metadata) -> Result<u64> {
    let alignment = match metadata.get("general.alignment")? {
        None => DEFAULT_ALIGNMENT,
        Some(Value::U32(alignment)) => alignment,
        Some(other) => bail!("metadata key general.alignment: expected U32, found {:?}", other.kind()),
    };
    if !alignment.is_power_of_two() {
        bail!("metadata key general.alignment: {alignment} is no power of two");
    }
    Ok(alignment.into())
}

/// A line of the table, its place yet to be checked.
struct Line {
    info: TensorInfo,
    offset: u64,
}

fn read_tensors(cursor: &mut Cursor, count: u64, alignment: u64, file: u64) -> Result<BTreeMap<String, TensorInfo>> {
    let mut lines = BTreeMap::new();
    for number in 1..=count {
        let name = name(cursor, MAX_NAME_BYTES).with_context(|| format!("tensor {number} of {count}"))?;
        let line = read_line(cursor).with_context(|| format!("tensor {name}"))?;
        match lines.entry(name.to_string()) {
            Slot::Vacant(slot) => drop(slot.insert(line)),
            Slot::Occupied(_) => bail!("tensor {name} is there twice"),
        }
    }
    let data = (cursor.position() as u64).next_multiple_of(alignment);
    let place = |(name, line)| {
        let info = place(line, alignment, data, file).with_context(|| format!("tensor {name}"))?;
        Ok((name, info))
    };
    let tensors: BTreeMap<String, TensorInfo> = lines.into_iter().map(place).collect::<Result<_>>()?;
    check_overlaps(&tensors)?;
    Ok(tensors)
}

fn read_line(cursor: &mut Cursor) -> Result<Line> {
    let dimensions = cursor.u32()?;
    if dimensions > MAX_DIMENSIONS {
        bail!("{dimensions} dimensions; at most {MAX_DIMENSIONS} are allowed");
    }
    let mut shape = (0..dimensions).map(|_| cursor.u64()).collect::<Result<Vec<_>>>()?;
    let ggml_type = GgmlType::from_id(cursor.u32()?)?;
    let offset = cursor.u64()?;
    let columns = shape.first().copied().unwrap_or(1);
    if !columns.is_multiple_of(ggml_type.block_length() as u64) {
        bail!("rows of {columns} elements are no whole blocks of {} ({ggml_type})", ggml_type.block_length());
    }
    // Whatever is empty counts as one: a dimension after it must not overflow either.
    let elements = shape.iter().try_fold(1u64, |product, &length| product.checked_mul(length.max(1)));
    if elements.is_none_or(|elements| elements > i64::MAX as u64) {
        bail!("shape {shape:?} has too many elements");
    }
    let rows = shape.iter().skip(1).product();
    let bytes = ggml_type.bytes(columns, rows).and_then(|bytes| usize::try_from(bytes).ok());
    let Some(bytes) = bytes else { bail!("shape {shape:?} has too many bytes") };
    shape.reverse();
    let shape = shape.into_iter().map(usize::try_from).collect::<Result<_, _>>().context("its shape")?;
    Ok(Line { info: TensorInfo { ggml_type, shape, bytes, part: 0, start: 0 }, offset })
}

/// Where the tensor lies in a file of so many bytes whose data begin at `data`.
fn place(line: Line, alignment: u64, data: u64, file: u64) -> Result<TensorInfo> {
    let Line { mut info, offset } = line;
    if !offset.is_multiple_of(alignment) {
        bail!("offset {offset} is no multiple of the alignment {alignment}");
    }
    let start = data.checked_add(offset);
    let end = start.and_then(|start| start.checked_add(info.bytes as u64));
    let (Some(start), Some(end)) = (start, end) else { bail!("offset {offset} is too large") };
    if end > file {
        let bytes = info.bytes;
        bail!("{bytes} bytes from {start} on end behind the file, which has {file} (is the download complete?)");
    }
    info.start = usize::try_from(start).context("its place")?;
    Ok(info)
}

fn check_overlaps(tensors: &BTreeMap<String, TensorInfo>) -> Result<()> {
    let mut by_place: Vec<_> = tensors.iter().filter(|(_, info)| info.bytes > 0).collect();
    by_place.sort_by_key(|(_, info)| info.start);
    for pair in by_place.windows(2) {
        let ((name, info), (next_name, next)) = (pair[0], pair[1]);
        if info.start + info.bytes > next.start {
            bail!("tensors {name} and {next_name} overlap at byte {}", next.start);
        }
    }
    Ok(())
}
