//! Divides GPU memory among allocations, and reuses freed memory without calling the driver.
//!
//! Like PyTorch's caching allocator, this allocator gets segments from the driver and splits segments into blocks.
//! An allocation takes the smallest free block that is large enough. Neighboring free blocks of a segment are merged.
//! Small and large blocks are in separate segments, so that a long-lived small block does not divide a large segment.

use std::collections::{BTreeMap, BTreeSet};

/// Block sizes are multiples of this many bytes, so the blocks of a segment stay aligned.
/// This constant and the next two have the values of PyTorch's allocator.
const ALIGNMENT: usize = 512;
/// Allocations of at most this many bytes get small blocks, and all others get large blocks.
const MAX_SMALL_BYTES: usize = 1 << 20;
/// The size in bytes of a segment for small blocks. A segment for large blocks is as large as its first block.
const SMALL_SEGMENT_BYTES: usize = 2 << 20;

/// The driver that provides segments of GPU memory.
pub trait Driver {
    type Error;
    /// Allocates `bytes` bytes of GPU memory and returns their address.
    fn allocate(&mut self, bytes: usize) -> Result<u64, Self::Error>;
    fn free(&mut self, address: u64) -> Result<(), Self::Error>;
}

/// A block: a part of a segment that is either free or in use.
#[derive(Clone, Copy, Debug)]
struct MemoryBlock {
    bytes: usize,
    is_small: bool,
    is_free: bool,
}

/// The segments and blocks of GPU memory that belong to one CUDA stream.
///
/// Work on a stream runs in order. Later work on the stream can therefore use memory as soon as the host has freed it.
#[derive(Default)]
pub struct ReusedMemory {
    /// All blocks, by address.
    blocks: BTreeMap<u64, MemoryBlock>,
    /// The free blocks: `is_small`, size in bytes, address.
    free: BTreeSet<(bool, usize, u64)>,
    /// The size in bytes of each segment, by address.
    segments: BTreeMap<u64, usize>,
    /// The total size in bytes of the segments without blocks in use.
    unused_bytes: usize,
}

impl ReusedMemory {
    /// Allocates `bytes` bytes and returns their address. Calls the driver only if no free block of the same kind,
    /// small or large, is large enough.
    /// If the driver cannot allocate a segment, gives all unused segments back to the driver and tries once more.
    pub fn allocate<D: Driver>(&mut self, bytes: usize, driver: &mut D) -> Result<u64, D::Error> {
        let bytes = bytes.next_multiple_of(ALIGNMENT);
        let is_small = bytes <= MAX_SMALL_BYTES;
        let fitting = (is_small, bytes, 0)..=(is_small, usize::MAX, u64::MAX);
        if let Some(&(.., address)) = self.free.range(fitting).next() {
            self.take(address, bytes);
            return Ok(address);
        }
        let segment = if is_small { SMALL_SEGMENT_BYTES } else { bytes };
        let address = match driver.allocate(segment) {
            Err(error) if self.unused_bytes > 0 => match self.release(0, driver) {
                Ok(()) => driver.allocate(segment)?,
                Err(_) => return Err(error),
            },
            result => result?,
        };
        self.segments.insert(address, segment);
        self.insert_free(address, MemoryBlock { bytes: segment, is_small, is_free: true });
        self.take(address, bytes);
        Ok(address)
    }

    /// Frees the block that starts at `address`. Returns false if no block starts there.
    pub fn free(&mut self, address: u64) -> bool {
        let Some(mut block) = self.blocks.remove(&address) else { return false };
        debug_assert!(!block.is_free, "a block was freed twice");
        let mut start = address;
        if !self.segments.contains_key(&address)
            && let Some((&before, &left)) = self.blocks.range(..address).next_back()
            && left.is_free
        {
            self.remove_free(before, left);
            (start, block.bytes) = (before, block.bytes + left.bytes);
        }
        let after = start + block.bytes as u64;
        if !self.segments.contains_key(&after)
            && let Some(&right) = self.blocks.get(&after)
            && right.is_free
        {
            self.remove_free(after, right);
            block.bytes += right.bytes;
        }
        self.insert_free(start, block);
        true
    }

    /// Returns the total size in bytes of the segments without blocks in use.
    pub fn unused_bytes(&self) -> usize {
        self.unused_bytes
    }

    /// Returns unused segments to the driver, the largest first, until at most `kept` unused bytes are left.
    pub fn release<D: Driver>(&mut self, kept: usize, driver: &mut D) -> Result<(), D::Error> {
        let is_unused = |&(&address, &bytes): &(&u64, &usize)| self.is_unused(address, bytes);
        let mut unused: Vec<_> = self.segments.iter().filter(is_unused).map(|(&at, &bytes)| (bytes, at)).collect();
        unused.sort_unstable();
        while self.unused_bytes > kept
            && let Some((_, address)) = unused.pop()
        {
            driver.free(address)?;
            if let Some(block) = self.blocks.get(&address).copied() {
                self.remove_free(address, block);
            }
            self.segments.remove(&address);
        }
        Ok(())
    }

    /// Returns whether a segment of `bytes` bytes starts at `address` and has no block in use.
    fn is_unused(&self, address: u64, bytes: usize) -> bool {
        let is_free = self.blocks.get(&address).is_some_and(|block| block.is_free && block.bytes == bytes);
        is_free && self.segments.get(&address) == Some(&bytes)
    }

    /// Takes the first `bytes` bytes of the free block at `address`. The remainder of the block stays free.
    fn take(&mut self, address: u64, bytes: usize) {
        let Some(block) = self.blocks.get(&address).copied() else { return };
        self.remove_free(address, block);
        self.blocks.insert(address, MemoryBlock { bytes, is_free: false, ..block });
        if block.bytes > bytes {
            self.insert_free(address + bytes as u64, MemoryBlock { bytes: block.bytes - bytes, ..block });
        }
    }

    fn insert_free(&mut self, address: u64, block: MemoryBlock) {
        self.free.insert((block.is_small, block.bytes, address));
        self.blocks.insert(address, MemoryBlock { is_free: true, ..block });
        if self.is_unused(address, block.bytes) {
            self.unused_bytes += block.bytes;
        }
    }

    fn remove_free(&mut self, address: u64, block: MemoryBlock) {
        if self.is_unused(address, block.bytes) {
            self.unused_bytes -= block.bytes;
        }
        self.free.remove(&(block.is_small, block.bytes, address));
        self.blocks.remove(&address);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A mock driver with `limit` bytes of memory. Records its segments and counts calls.
    struct MockDriver {
        limit: usize,
        segments: BTreeMap<u64, usize>,
        calls: usize,
        next: u64,
    }

    impl MockDriver {
        fn new(limit: usize) -> Self {
            Self { limit, segments: BTreeMap::new(), calls: 0, next: 1 << 30 }
        }

        fn used(&self) -> usize {
            self.segments.values().sum()
        }
    }

    impl Driver for MockDriver {
        type Error = &'static str;

        fn allocate(&mut self, bytes: usize) -> Result<u64, &'static str> {
            self.calls += 1;
            if self.used() + bytes > self.limit {
                return Err("out of memory");
            }
            let address = self.next;
            self.segments.insert(address, bytes);
            // Leave no gap between segments, so that the tests notice blocks that were merged across segments.
            self.next += bytes as u64;
            Ok(address)
        }

        fn free(&mut self, address: u64) -> Result<(), &'static str> {
            self.calls += 1;
            self.segments.remove(&address).map(|_| ()).ok_or("not a segment")
        }
    }

    const MB: usize = 1 << 20;

    #[test]
    fn blocks_in_use_never_overlap_and_all_memory_is_returned() {
        let mut random = 7u64;
        let mut draw = |below: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as usize % below
        };
        let mut memory = ReusedMemory::default();
        let mut driver = MockDriver::new(usize::MAX);
        let mut in_use: BTreeMap<u64, usize> = BTreeMap::new();
        for _ in 0..20_000 {
            if draw(2) == 0 && !in_use.is_empty() {
                let address = *in_use.keys().nth(draw(in_use.len())).unwrap();
                in_use.remove(&address);
                assert!(memory.free(address));
                let is_free = |&(&at, &bytes): &(&u64, &usize)| in_use.range(at..at + bytes as u64).next().is_none();
                let unused: usize = driver.segments.iter().filter(is_free).map(|(_, bytes)| bytes).sum();
                assert_eq!(unused, memory.unused_bytes());
                memory.release(100 * MB, &mut driver).unwrap();
                assert!(memory.unused_bytes() <= 100 * MB);
            } else {
                let limit = [2_000, 300_000, 30 * MB][draw(3)];
                let bytes = 1 + draw(limit);
                let address = memory.allocate(bytes, &mut driver).unwrap();
                assert!(address.is_multiple_of(ALIGNMENT as u64));
                let segment = driver.segments.range(..=address).next_back().unwrap();
                assert!(address + bytes as u64 <= segment.0 + *segment.1 as u64, "the block exceeds its segment");
                let left = in_use.range(..=address).next_back();
                assert!(left.is_none_or(|(&start, &bytes)| start + bytes as u64 <= address));
                let right = in_use.range(address..).next();
                assert!(right.is_none_or(|(&start, _)| address + bytes as u64 <= start));
                in_use.insert(address, bytes);
            }
        }
        in_use.into_keys().for_each(|address| assert!(memory.free(address)));
        memory.release(0, &mut driver).unwrap();
        assert!(
            driver.segments.is_empty()
                && memory.unused_bytes == 0
                && memory.blocks.is_empty()
                && memory.free.is_empty()
        );
    }

    /// Allocates and frees memory like two layers of a forward pass over `tokens` tokens.
    fn pass(memory: &mut ReusedMemory, driver: &mut MockDriver, tokens: usize) {
        for _ in 0..2 {
            let sizes = [5_760, 11_520, 8, 10_240];
            let blocks = sizes.map(|bytes| memory.allocate(tokens * bytes, driver).unwrap());
            for address in blocks {
                assert!(memory.free(address));
                memory.release(128 * MB, driver).unwrap();
            }
        }
    }

    #[test]
    fn repeated_passes_do_not_call_the_driver() {
        let mut memory = ReusedMemory::default();
        let mut driver = MockDriver::new(usize::MAX);
        [2048, 7].into_iter().for_each(|tokens| pass(&mut memory, &mut driver, tokens));
        let (calls, used) = (driver.calls, driver.used());
        // The first two passes have allocated enough memory for all later passes.
        for tokens in [2048, 1500, 7, 2048, 333] {
            pass(&mut memory, &mut driver, tokens);
        }
        assert_eq!((driver.calls, driver.used()), (calls, used));
    }

    #[test]
    fn unused_segments_are_returned_if_memory_is_short() {
        let mut memory = ReusedMemory::default();
        let mut driver = MockDriver::new(200 * MB);
        for address in [20, 30, 40, 50].map(|size| memory.allocate(size * MB, &mut driver).unwrap()) {
            assert!(memory.free(address));
        }
        memory.release(100 * MB, &mut driver).unwrap();
        assert_eq!(driver.used(), 90 * MB, "exactly 50 MB must be returned to the driver");
        let in_use = memory.allocate(25 * MB, &mut driver).unwrap();
        assert_eq!(memory.unused_bytes(), 60 * MB, "the smallest segment with enough room was not used");
        // The driver has room for 110 MB, and for 60 MB more after the two unused segments are returned.
        let large = memory.allocate(120 * MB, &mut driver).unwrap();
        assert_eq!((driver.used(), memory.unused_bytes()), (150 * MB, 0));
        assert_eq!(memory.allocate(60 * MB, &mut driver), Err("out of memory"));
        assert!(!memory.free(in_use + 512), "an address inside a block must not be freed");
        assert!(memory.free(in_use) && memory.free(large));
    }
}
