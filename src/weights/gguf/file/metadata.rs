//! GGUF metadata: keys with typed values. Strings and arrays are borrowed from the bytes of the header.

use std::collections::BTreeMap;

use anyhow::{Context, Result, anyhow, bail};

use super::cursor::Cursor;
use crate::text::{counted, excerpt};
use crate::weights::gguf::limits::MAX_ARRAY_VALUES;

/// The type of a metadata value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    fn from_id(id: u32) -> Result<Self> {
        use ValueType::*;
        const ALL: [ValueType; 13] = [U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64];
        ALL.get(id as usize).copied().ok_or_else(|| anyhow!("unknown value type {id}"))
    }

    /// Returns the minimum size of a value of this type in a file, in bytes.
    fn min_bytes(self) -> u64 {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::String => 8,
            Self::Array => 12,
        }
    }
}

/// A metadata value. Strings are unchecked bytes: [`GgufMetadata::string`] and [`GgufMetadata::strings`] require UTF-8.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value<'c> {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(&'c [u8]),
    Array(Array<'c>),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// An array of values of one type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Array<'c> {
    pub element: ValueType,
    pub len: usize,
    bytes: &'c [u8],
}

impl<'c> Value<'c> {
    fn read(cursor: &mut Cursor<'c>, kind: ValueType) -> Result<Self> {
        Ok(match kind {
            ValueType::U8 => Self::U8(u8::from_le_bytes(cursor.array()?)),
            ValueType::I8 => Self::I8(i8::from_le_bytes(cursor.array()?)),
            ValueType::U16 => Self::U16(u16::from_le_bytes(cursor.array()?)),
            ValueType::I16 => Self::I16(i16::from_le_bytes(cursor.array()?)),
            ValueType::U32 => Self::U32(cursor.u32()?),
            ValueType::I32 => Self::I32(i32::from_le_bytes(cursor.array()?)),
            ValueType::F32 => Self::F32(f32::from_le_bytes(cursor.array()?)),
            ValueType::Bool => match cursor.array()? {
                [0] => Self::Bool(false),
                [1] => Self::Bool(true),
                [other] => bail!("expected a boolean (0 or 1), found {other}"),
            },
            ValueType::String => Self::String(cursor.string()?),
            ValueType::Array => Self::Array(Array::read(cursor)?),
            ValueType::U64 => Self::U64(cursor.u64()?),
            ValueType::I64 => Self::I64(i64::from_le_bytes(cursor.array()?)),
            ValueType::F64 => Self::F64(f64::from_le_bytes(cursor.array()?)),
        })
    }

    pub fn kind(&self) -> ValueType {
        match self {
            Self::U8(_) => ValueType::U8,
            Self::I8(_) => ValueType::I8,
            Self::U16(_) => ValueType::U16,
            Self::I16(_) => ValueType::I16,
            Self::U32(_) => ValueType::U32,
            Self::I32(_) => ValueType::I32,
            Self::F32(_) => ValueType::F32,
            Self::Bool(_) => ValueType::Bool,
            Self::String(_) => ValueType::String,
            Self::Array(_) => ValueType::Array,
            Self::U64(_) => ValueType::U64,
            Self::I64(_) => ValueType::I64,
            Self::F64(_) => ValueType::F64,
        }
    }

    /// Returns the value if it is an integer of any width.
    fn integer(&self) -> Option<i128> {
        match *self {
            Self::U8(value) => Some(value.into()),
            Self::I8(value) => Some(value.into()),
            Self::U16(value) => Some(value.into()),
            Self::I16(value) => Some(value.into()),
            Self::U32(value) => Some(value.into()),
            Self::I32(value) => Some(value.into()),
            Self::U64(value) => Some(value.into()),
            Self::I64(value) => Some(value.into()),
            _ => None,
        }
    }

    /// Returns the value if it is an integer from 0 to 2^32 - 1.
    pub fn u32(self) -> Option<u32> {
        self.integer()?.try_into().ok()
    }

    fn i32(self) -> Option<i32> {
        self.integer()?.try_into().ok()
    }

    fn f32(self) -> Option<f32> {
        match self {
            Self::F32(value) => Some(value),
            Self::F64(value) => Some(value as f32),
            _ => None,
        }
    }

    fn bool(self) -> Option<bool> {
        if let Self::Bool(value) = self { Some(value) } else { None }
    }

    fn str(self) -> Option<&'c str> {
        if let Self::String(bytes) = self { std::str::from_utf8(bytes).ok() } else { None }
    }

    /// Describes the value for an error message.
    fn describe(&self) -> String {
        match self {
            Self::String(bytes) if std::str::from_utf8(bytes).is_err() => "a string that is not UTF-8".into(),
            Self::String(_) => "a string".into(),
            Self::Array(array) => {
                format!("an array of {}", counted(array.len, &format!("{:?} value", array.element)))
            }
            number => format!("{number:?}"),
        }
    }
}

impl<'c> Array<'c> {
    fn read(cursor: &mut Cursor<'c>) -> Result<Self> {
        let element = ValueType::from_id(cursor.u32()?)?;
        if element == ValueType::Array {
            bail!("arrays of arrays are not supported");
        }
        let len = cursor.u64()?;
        let min_bytes = len.checked_mul(element.min_bytes());
        if min_bytes.is_none_or(|bytes| bytes > cursor.remaining()) {
            bail!(
                "an array of {} does not fit in the remaining {}",
                counted(len, &format!("{element:?} value")),
                counted(cursor.remaining(), "byte")
            );
        }
        if len > MAX_ARRAY_VALUES {
            bail!("an array of {len} {element:?} values exceeds the limit of {MAX_ARRAY_VALUES}");
        }
        let mut end = *cursor;
        match element {
            ValueType::String => (0..len).try_for_each(|_| end.string().map(drop))?,
            ValueType::Bool => (0..len).try_for_each(|_| Value::read(&mut end, element).map(drop))?,
            _ => drop(end.take(len * element.min_bytes())?),
        }
        let bytes = cursor.take((end.position() - cursor.position()) as u64)?;
        // The length fits in a usize, because it is at most `MAX_ARRAY_VALUES`.
        Ok(Self { element, len: len as usize, bytes })
    }

    pub fn values(self) -> impl Iterator<Item = Result<Value<'c>>> {
        let mut cursor = Cursor::at(self.bytes, 0);
        (0..self.len).map(move |_| Value::read(&mut cursor, self.element))
    }
}

/// The type of a value and its offset in the file.
#[derive(Clone, Copy, Debug)]
pub struct ValueLocation {
    kind: ValueType,
    start: usize,
}

impl ValueLocation {
    /// Reads the type at the cursor, checks and skips the value that follows, and returns the location of the value.
    pub fn read(cursor: &mut Cursor) -> Result<Self> {
        let kind = ValueType::from_id(cursor.u32()?)?;
        let location = Self { kind, start: cursor.position() };
        Value::read(cursor, kind)?;
        Ok(location)
    }
}

/// The metadata of a file. Getters return `None` for a missing key.
/// Typed getters fail if the value cannot be converted to their type.
#[derive(Clone, Copy)]
pub struct GgufMetadata<'c> {
    bytes: &'c [u8],
    locations: &'c BTreeMap<String, ValueLocation>,
}

impl<'c> GgufMetadata<'c> {
    pub(super) fn new(bytes: &'c [u8], locations: &'c BTreeMap<String, ValueLocation>) -> Self {
        Self { bytes, locations }
    }

    pub fn keys(&self) -> impl Iterator<Item = &'c str> {
        self.locations.keys().map(String::as_str)
    }

    pub fn get(&self, key: &str) -> Result<Option<Value<'c>>> {
        let Some(location) = self.locations.get(key) else { return Ok(None) };
        let value = Value::read(&mut Cursor::at(self.bytes, location.start), location.kind);
        value.map(Some).with_context(|| format!("metadata key {}", excerpt(key)))
    }

    /// Returns the value that `get` finds, or an error if the key is missing.
    /// Example: `metadata.required(key, GgufMetadata::string)`.
    pub fn required<T>(&self, key: &str, get: impl Fn(&Self, &str) -> Result<Option<T>>) -> Result<T> {
        get(self, key)?.with_context(|| format!("metadata key {} is missing", excerpt(key)))
    }

    pub fn string(&self, key: &str) -> Result<Option<&'c str>> {
        self.scalar(key, "a string", Value::str)
    }

    pub fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.scalar(key, "a boolean", Value::bool)
    }

    /// Returns an F32 value, or an F64 value rounded to f32.
    /// Fails for infinity and NaN, which are invalid for every scalar key that inferno reads.
    pub fn f32(&self, key: &str) -> Result<Option<f32>> {
        self.scalar(key, "a finite float", |value| value.f32().filter(|value| value.is_finite()))
    }

    /// Returns an unsigned 32-bit value. The file may store the value as any integer type.
    pub fn u32(&self, key: &str) -> Result<Option<u32>> {
        self.scalar(key, "an integer from 0 to 2^32 - 1", Value::u32)
    }

    pub fn strings(&self, key: &str) -> Result<Option<Vec<&'c str>>> {
        self.array(key, "strings", Value::str)
    }

    pub fn bools(&self, key: &str) -> Result<Option<Vec<bool>>> {
        self.array(key, "booleans", Value::bool)
    }

    pub fn f32s(&self, key: &str) -> Result<Option<Vec<f32>>> {
        self.array(key, "floats", Value::f32)
    }

    pub fn u32s(&self, key: &str) -> Result<Option<Vec<u32>>> {
        self.array(key, "integers from 0 to 2^32 - 1", Value::u32)
    }

    pub fn i32s(&self, key: &str) -> Result<Option<Vec<i32>>> {
        self.array(key, "32-bit signed integers", Value::i32)
    }

    fn scalar<T>(&self, key: &str, expected: &str, convert: impl Fn(Value<'c>) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.get(key)? else { return Ok(None) };
        let type_error = || anyhow!("metadata key {}: expected {expected}, found {}", excerpt(key), value.describe());
        convert(value).map(Some).ok_or_else(type_error)
    }

    fn array<T>(&self, key: &str, expected: &str, convert: impl Fn(Value<'c>) -> Option<T>) -> Result<Option<Vec<T>>> {
        let array = match self.get(key)? {
            None => return Ok(None),
            Some(Value::Array(array)) => array,
            Some(other) => {
                bail!("metadata key {}: expected an array of {expected}, found {}", excerpt(key), other.describe())
            }
        };
        let element = |(index, value): (usize, Result<Value<'c>>)| {
            let value = value.with_context(|| format!("metadata key {key}"))?;
            let type_error = || anyhow!("metadata key {key}[{index}]: expected {expected}, found {}", value.describe());
            convert(value).ok_or_else(type_error)
        };
        array.values().enumerate().map(element).collect::<Result<_>>().map(Some)
    }
}
