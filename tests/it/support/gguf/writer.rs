//! Writes valid and invalid GGUF files for tests.

// The ids of the GGUF metadata value types that the tests use.
pub const U32: u32 = 4;
pub const I32: u32 = 5;
pub const F32: u32 = 6;
pub const BOOL: u32 = 7;
pub const STRING: u32 = 8;
pub const ARRAY: u32 = 9;

/// Builds a GGUF file. Tests can make any part of the file invalid.
#[derive(Clone)]
pub struct Writer {
    pub magic: [u8; 4],
    pub version: u32,
    /// If set, replaces the true tensor count in the header.
    pub tensor_count: Option<u64>,
    pub key_count: Option<u64>,
    pub alignment: usize,
    pub keys: (u64, Vec<u8>),
    pub tensors: (u64, Vec<u8>),
    pub data: Vec<u8>,
}

impl Writer {
    pub fn new() -> Self {
        Self {
            magic: *b"GGUF",
            version: 3,
            tensor_count: None,
            key_count: None,
            alignment: 32,
            keys: (0, Vec::new()),
            tensors: (0, Vec::new()),
            data: Vec::new(),
        }
    }

    /// Adds a metadata key with a value of any type, given as raw bytes.
    pub fn raw(mut self, key: impl AsRef<[u8]>, kind: u32, value: impl AsRef<[u8]>) -> Self {
        self.keys.0 += 1;
        self.keys.1.extend(string(key));
        self.keys.1.extend(kind.to_le_bytes());
        self.keys.1.extend(value.as_ref());
        self
    }

    pub fn u32(self, key: &str, value: u32) -> Self {
        self.raw(key, U32, value.to_le_bytes())
    }

    pub fn bool(self, key: &str, value: bool) -> Self {
        self.raw(key, BOOL, [u8::from(value)])
    }

    pub fn string(self, key: &str, value: &str) -> Self {
        self.raw(key, STRING, string(value))
    }

    pub fn strings(self, key: &str, values: &[impl AsRef<str>]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|value| string(value.as_ref())).collect();
        self.array(key, STRING, values.len() as u64, bytes)
    }

    pub fn i32s(self, key: &str, values: &[i32]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.array(key, I32, values.len() as u64, bytes)
    }

    pub fn f32s(self, key: &str, values: &[f32]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.array(key, F32, values.len() as u64, bytes)
    }

    pub fn array(self, key: &str, kind: u32, count: u64, values: Vec<u8>) -> Self {
        self.raw(key, ARRAY, [&kind.to_le_bytes()[..], &count.to_le_bytes(), &values].concat())
    }

    /// Adds an entry to the tensor table. `shape` starts with the fastest-varying dimension.
    pub fn row(mut self, name: impl AsRef<[u8]>, shape: &[u64], kind: u32, offset: u64) -> Self {
        self.tensors.0 += 1;
        let table = &mut self.tensors.1;
        table.extend(string(name));
        table.extend((shape.len() as u32).to_le_bytes());
        shape.iter().for_each(|length| table.extend(length.to_le_bytes()));
        table.extend(kind.to_le_bytes());
        table.extend(offset.to_le_bytes());
        self
    }

    /// Adds a tensor and appends its bytes to the data section.
    pub fn tensor(mut self, name: &str, shape: &[u64], kind: u32, bytes: &[u8]) -> Self {
        let offset = self.data.len().next_multiple_of(self.alignment);
        self.data.resize(offset, 0);
        self.data.extend(bytes);
        self.row(name, shape, kind, offset as u64)
    }

    /// Appends `bytes` zero bytes to the data section without adding a tensor.
    pub fn data(mut self, bytes: usize) -> Self {
        self.data.resize(self.data.len() + bytes, 0);
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut file = self.magic.to_vec();
        file.extend(self.version.to_le_bytes());
        file.extend(self.tensor_count.unwrap_or(self.tensors.0).to_le_bytes());
        file.extend(self.key_count.unwrap_or(self.keys.0).to_le_bytes());
        file.extend(&self.keys.1);
        file.extend(&self.tensors.1);
        file.resize(file.len().next_multiple_of(self.alignment), 0);
        file.extend(&self.data);
        file
    }
}

/// Encodes a string as GGUF does: the length as a u64, then the bytes.
pub fn string(text: impl AsRef<[u8]>) -> Vec<u8> {
    let text = text.as_ref();
    [&(text.len() as u64).to_le_bytes()[..], text].concat()
}
