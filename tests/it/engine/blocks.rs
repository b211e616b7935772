//! Tests of the block manager. Random operations are checked against a model of what each block contains.

use std::collections::HashSet;

use inferno::engine::blocks::{BlockHashes, BlockManager, SCRATCH_BLOCK, SequenceBlocks};
use inferno::nn::kv_cache::BLOCK_TOKENS;

use super::digest;
use crate::support::Random;

/// A stand-in for the keys and values at one position: the index of the layer group, and a digest of the tokens up to
/// and including this position.
type Entry = (usize, u64);

/// A block manager, and the expected state of the KV cache that it manages.
struct Model {
    windows: Vec<Option<usize>>,
    manager: BlockManager,
    /// The entry that was last written at each position of every block.
    contents: Vec<[Option<Entry>; BLOCK_TOKENS]>,
    /// The last entry of every block that has become full since the last call to `forget_prefixes`.
    committed: HashSet<Entry>,
    sequences: Vec<Sequence>,
    /// The tokens and hashes of released sequences.
    released: Vec<(Vec<u32>, BlockHashes)>,
    /// The texts that supply the tokens of all sequences. There are only three, so many sequences share a prefix.
    texts: Vec<Vec<u32>>,
    random: Random,
    seen: Seen,
}

/// Counts of events that the random operations must reach.
#[derive(Debug, Default)]
struct Seen {
    hits: usize,
    copies: usize,
    /// Copies of blocks that no other sequence used. They were made only to keep a cached block unchanged.
    copies_of_cached: usize,
    refused: usize,
    evicted: u64,
}

struct Sequence {
    blocks: SequenceBlocks,
    tokens: Vec<u32>,
    /// The end of the range of positions that the sequence may write.
    granted: usize,
    /// The largest number of tokens that one call to `grow` has made room for.
    chunk: usize,
    /// The index of the text that the next tokens come from.
    text: usize,
}

const MAX_TOKENS: usize = 420;

/// Returns, for each position, a digest of the tokens up to and including that position.
fn digests(tokens: &[u32]) -> Vec<u64> {
    let next = |last: &mut u64, &token: &u32| {
        *last = digest(*last, token.into());
        Some(*last)
    };
    tokens.iter().scan(1, next).collect()
}

/// Returns the first position to which a token at `position` attends.
fn first_visible(window: Option<usize>, position: usize) -> usize {
    window.map_or(0, |window| position.saturating_sub(window - 1))
}

/// Returns the block table of each layer group as a list of block indices.
fn tables(blocks: &SequenceBlocks) -> Vec<Vec<u32>> {
    blocks.tables().iter().map(|table| table.to_vec()).collect()
}

impl Model {
    fn new(windows: &[Option<usize>], blocks: usize, seed: u64) -> Self {
        let mut random = Random(seed);
        let texts = (0..3).map(|_| (0..MAX_TOKENS).map(|_| random.below(3) as u32).collect()).collect();
        Self {
            windows: windows.to_vec(),
            manager: BlockManager::new(windows.to_vec(), blocks),
            contents: vec![[None; BLOCK_TOKENS]; blocks],
            committed: HashSet::new(),
            sequences: Vec::new(),
            released: Vec::new(),
            texts,
            random,
            seen: Seen::default(),
        }
    }

    /// Returns a random length up to `MAX_TOKENS`, often near a block boundary.
    fn length(&mut self) -> usize {
        let length = match self.random.below(2) {
            0 => self.random.below(MAX_TOKENS),
            _ => self.random.below(MAX_TOKENS / BLOCK_TOKENS) * BLOCK_TOKENS + self.random.below(3),
        };
        length.clamp(2, MAX_TOKENS + 1) - 1
    }

    /// Extends `tokens` to length `len` with the tokens of text number `text`. Sometimes switches to another text.
    fn extend(&mut self, tokens: &mut Vec<u32>, text: &mut usize, len: usize) {
        while tokens.len() < len {
            if self.random.below(300) == 0 {
                *text = self.random.below(self.texts.len());
            }
            tokens.push(self.texts[*text][tokens.len()]);
        }
    }

    fn start(&mut self) {
        let mut text = self.random.below(self.texts.len());
        let (mut tokens, mut hashes) = (Vec::new(), BlockHashes::default());
        if !self.released.is_empty() && self.random.below(3) == 0 {
            let index = self.random.below(self.released.len());
            (tokens, hashes) = self.released.swap_remove(index);
        }
        let len = self.length().max(tokens.len());
        self.extend(&mut tokens, &mut text, len);
        let longest = self.longest_hit(&tokens);
        let (before, free) = (self.manager.stats(), self.manager.free_blocks());
        // `find_prefix` must change nothing, and must predict the hit, the demand and the free blocks after `start`.
        let prefix = self.manager.find_prefix(&tokens, tokens.len(), hashes.clone(), usize::MAX);
        assert_eq!((self.manager.stats(), self.manager.free_blocks()), (before, free));
        let (end, chunk) = (tokens.len() + self.random.below(200), 1 + self.random.below(MAX_TOKENS));
        let predicted = (self.manager.demand_after(&prefix, end, chunk), self.manager.free_blocks_after(&prefix));
        let (prefix_tokens, prefix_tables) = (prefix.tokens(), prefix.tables().clone());
        let blocks = self.manager.start(&tokens, tokens.len(), hashes);
        let hit = blocks.computed();
        assert_eq!((prefix_tokens, &prefix_tables), (hit, blocks.tables()));
        assert_eq!(predicted, (self.manager.demand(&blocks, end, chunk), self.manager.free_blocks()));
        assert!(hit < tokens.len(), "a hit of {hit} tokens covers the whole prompt of {} tokens", tokens.len());
        match before.evicted {
            0 => assert_eq!(hit, longest, "wrong hit length for a prompt of {} tokens", tokens.len()),
            _ => assert!(hit <= longest),
        }
        self.seen.hits += usize::from(hit > 0);
        let after = self.manager.stats();
        assert_eq!(after.queried_tokens - before.queried_tokens, tokens.len() as u64);
        assert_eq!(after.hit_tokens - before.hit_tokens, hit as u64);
        assert_eq!((after.cached, after.evicted), (before.cached, before.evicted));
        if self.random.below(4) == 0 {
            let hashes = self.manager.abandon(blocks);
            assert_eq!((self.manager.stats(), self.manager.free_blocks()), (before, free));
            self.released.push((tokens, hashes));
        } else {
            self.sequences.push(Sequence { blocks, tokens, granted: hit, chunk: 0, text });
        }
    }

    /// Returns how many of `tokens` a new sequence finds in the cache if no block was evicted.
    fn longest_hit(&self, tokens: &[u32]) -> usize {
        let digests = digests(tokens);
        let has_block = |group, index| self.committed.contains(&(group, digests[(index + 1) * BLOCK_TOKENS - 1]));
        let is_hit = |&blocks: &usize| {
            self.windows.iter().enumerate().all(|(group, &window)| {
                let first = first_visible(window, blocks * BLOCK_TOKENS) / BLOCK_TOKENS;
                (first..blocks).all(|index| has_block(group, index))
            })
        };
        (0..=(tokens.len() - 1) / BLOCK_TOKENS).rev().find(is_hit).unwrap_or(0) * BLOCK_TOKENS
    }

    /// Tries to allocate the blocks for the next step of a random sequence.
    /// Checks that [`BlockManager::missing`] predicts the number of these blocks.
    fn grow(&mut self) {
        let Some(index) = self.pick() else { return };
        let computed = self.sequences[index].blocks.computed();
        let len = match self.random.below(3) {
            0 => computed + 1,
            1 => self.sequences[index].tokens.len(),
            _ => self.length(),
        };
        let end = len.clamp(computed, MAX_TOKENS);
        let missing = self.manager.missing(&self.sequences[index].blocks, end);
        let (before, stats) = (tables(&self.sequences[index].blocks), self.manager.stats());
        let grown = self.manager.grow(&mut self.sequences[index].blocks, end);
        let after = tables(&self.sequences[index].blocks);
        let Some(copies) = grown else {
            assert!(
                missing > stats.total - stats.used,
                "`grow` failed, although the {missing} missing blocks are free"
            );
            assert_eq!((before, stats), (after, self.manager.stats()), "a failed call to `grow` changed the blocks");
            self.seen.refused += 1;
            return;
        };
        let (total, used) = (stats.total, stats.used);
        assert!(missing <= total - used);
        let is_used = |block| self.sequences.iter().any(|other| tables(&other.blocks).concat().contains(&block));
        // A cached block becomes free when it is copied, unless another sequence uses the block.
        let freed = copies.iter().filter(|copy| !is_used(copy.from)).count();
        assert_eq!(
            self.manager.free_blocks() + missing,
            total - used + freed,
            "`missing` returned a wrong number of blocks"
        );
        self.seen.copies += copies.len();
        self.seen.copies_of_cached += freed;
        for copy in copies {
            self.contents[copy.to as usize] = self.contents[copy.from as usize];
        }
        let sequence = &mut self.sequences[index];
        sequence.granted = sequence.granted.max(end);
        sequence.chunk = sequence.chunk.max(end - computed);
        // Only one sequence may use a block that the step writes.
        let written = computed / BLOCK_TOKENS..if end > computed { end.div_ceil(BLOCK_TOKENS) } else { 0 };
        for &block in after.iter().flat_map(|table| table.get(written.clone()).unwrap_or_default()) {
            let uses = self.sequences.iter().flat_map(|other| tables(&other.blocks)).flatten();
            assert_eq!(uses.filter(|&other| other == block).count(), 1, "the written block {block} has another use");
        }
        assert_eq!(self.manager.missing(&self.sequences[index].blocks, end), 0);
    }

    /// Writes and commits some or all of the positions for which a random sequence has blocks.
    fn commit(&mut self) {
        let Some(index) = self.pick() else { return };
        let computed = self.sequences[index].blocks.computed();
        let ahead = self.sequences[index].granted - computed;
        let end = match self.random.below(3) {
            0 => computed + self.random.below(ahead + 1),
            _ => computed + ahead,
        };
        let (mut tokens, mut text) = (self.sequences[index].tokens.clone(), self.sequences[index].text);
        self.extend(&mut tokens, &mut text, end);
        let digests = digests(&tokens);
        for group in 0..self.windows.len() {
            for (position, &digest) in digests.iter().enumerate().take(end).skip(computed) {
                let block = self.sequences[index].blocks.tables().get(group, position / BLOCK_TOKENS);
                assert_ne!(block, SCRATCH_BLOCK);
                self.contents[block as usize][position % BLOCK_TOKENS] = Some((group, digest));
                if (position + 1).is_multiple_of(BLOCK_TOKENS) {
                    self.committed.insert((group, digest));
                }
            }
        }
        let sequence = &mut self.sequences[index];
        self.manager.commit(&mut sequence.blocks, &tokens[..end]);
        assert_eq!(sequence.blocks.computed(), end);
        (sequence.tokens, sequence.text) = (tokens, text);
    }

    fn fork(&mut self) {
        let Some(index) = self.pick() else { return };
        let free = self.manager.free_blocks();
        let sequence = &self.sequences[index];
        let blocks = self.manager.fork(&sequence.blocks);
        assert_eq!(self.manager.free_blocks(), free, "a fork must not take free blocks");
        let Sequence { ref tokens, chunk, text, .. } = *sequence;
        let granted = blocks.computed();
        self.sequences.push(Sequence { blocks, tokens: tokens.clone(), granted, chunk, text });
    }

    fn release(&mut self, index: usize) {
        let Sequence { blocks, tokens, .. } = self.sequences.swap_remove(index);
        let cached = self.manager.stats().cached;
        let hashes = self.manager.release(blocks);
        assert_eq!(self.manager.stats().cached, cached, "releasing blocks changed the number of cached blocks");
        self.released.push((tokens, hashes));
    }

    fn pick(&mut self) -> Option<usize> {
        (!self.sequences.is_empty()).then(|| self.random.below(self.sequences.len()))
    }

    fn step(&mut self) {
        match self.random.below(100) {
            0..20 if self.sequences.len() < 7 => self.start(),
            20..50 => self.grow(),
            50..80 => self.commit(),
            80..88 if self.sequences.len() < 7 => self.fork(),
            88..99 => {
                if let Some(index) = self.pick() {
                    self.release(index);
                }
            }
            99 => {
                self.manager.forget_prefixes();
                self.committed.clear();
                assert_eq!(self.manager.stats().cached, 0);
            }
            _ => {}
        }
        self.check();
    }

    /// Checks the block counts and block tables, and that every sequence reads the entries of its own tokens.
    fn check(&self) {
        let stats = self.manager.stats();
        assert_eq!(stats.total + 1, self.contents.len());
        assert_eq!(stats.used + self.manager.free_blocks(), stats.total);
        let used: HashSet<_> = self.sequences.iter().flat_map(|sequence| tables(&sequence.blocks)).flatten().collect();
        assert_eq!(stats.used, used.iter().filter(|&&block| block != SCRATCH_BLOCK).count());
        for sequence in &self.sequences {
            let (tables, computed) = (tables(&sequence.blocks), sequence.blocks.computed());
            let held = tables.iter().flatten().filter(|&&block| block != SCRATCH_BLOCK).count();
            assert_eq!(self.manager.held_blocks(&sequence.blocks), held);
            let longest =
                sequence.granted.max(tables.iter().map(|table| table.len() * BLOCK_TOKENS).max().unwrap_or(0));
            assert!(
                held <= self.manager.peak_blocks(longest, sequence.chunk),
                "the sequence holds {held} blocks, more than the predicted peak for {longest} tokens"
            );
            let digests = digests(&sequence.tokens[..computed]);
            for (group, &window) in self.windows.iter().enumerate() {
                let first = first_visible(window, computed);
                for (index, &block) in tables[group].iter().enumerate() {
                    assert_eq!(
                        block == SCRATCH_BLOCK,
                        index < first / BLOCK_TOKENS,
                        "block table entry {index} is wrong after {computed} computed tokens"
                    );
                }
                for position in first..computed {
                    let block = tables[group][position / BLOCK_TOKENS] as usize;
                    let read = self.contents[block][position % BLOCK_TOKENS];
                    let want = Some((group, digests[position]));
                    assert_eq!(read, want, "wrong cache entry at position {position} of {computed}");
                }
            }
        }
    }
}

#[test]
fn blocks_hold_what_was_computed_after_random_operations() {
    let windows: [&[Option<usize>]; 10] = [
        &[None],
        &[None, Some(128)],
        &[Some(128), None],
        &[Some(64)],
        &[Some(1), None],
        &[None, Some(63), Some(65)],
        &[Some(100), Some(129)],
        &[None, None, Some(192)],
        &[Some(1)],
        &[None, Some(1000)],
    ];
    let mut seen = Seen::default();
    for (seed, blocks) in [12, 25, 40, 80, 400, 1, 2, 5, 16].into_iter().cycle().take(360).enumerate() {
        let windows = windows[seed % windows.len()];
        // If an assertion fails, the last of these lines names the failed case.
        println!("seed {seed}: {blocks} blocks, windows {windows:?}");
        let mut model = Model::new(windows, blocks, seed as u64);
        for _ in 0..200 {
            model.step();
        }
        while !model.sequences.is_empty() {
            model.release(0);
            model.check();
        }
        assert_eq!(model.manager.stats().used, 0);
        seen.hits += model.seen.hits;
        seen.copies += model.seen.copies;
        seen.copies_of_cached += model.seen.copies_of_cached;
        seen.refused += model.seen.refused;
        seen.evicted += model.manager.stats().evicted;
    }
    let Seen { hits, copies, copies_of_cached, refused, evicted } = seen;
    assert!(hits > 1000 && copies > 1000 && copies_of_cached > 10 && refused > 1000 && evicted > 1000, "{seen:?}");
}

/// Returns the first `len` tokens of text number `text`. Different texts have different tokens.
fn tokens(text: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|position| position.wrapping_mul(7) + text * 1_000_003).collect()
}

/// Starts a sequence, and computes its uncached tokens in steps of at most `chunk` tokens.
fn compute(manager: &mut BlockManager, tokens: &[u32], chunk: usize) -> SequenceBlocks {
    let mut blocks = manager.start(tokens, tokens.len(), BlockHashes::default());
    continue_to(manager, &mut blocks, tokens, chunk);
    blocks
}

fn continue_to(manager: &mut BlockManager, blocks: &mut SequenceBlocks, tokens: &[u32], chunk: usize) {
    while blocks.computed() < tokens.len() {
        let end = tokens.len().min(blocks.computed() + chunk);
        assert_eq!(manager.grow(blocks, end), Some(vec![]));
        manager.commit(blocks, &tokens[..end]);
    }
}

/// Returns how many tokens of `prompt` a new sequence finds in the cache.
fn hit(manager: &mut BlockManager, prompt: &[u32]) -> usize {
    let blocks = manager.start(prompt, prompt.len(), BlockHashes::default());
    let computed = blocks.computed();
    manager.abandon(blocks);
    computed
}

#[test]
fn prefixes_are_found_up_to_the_last_full_block_before_the_last_token() {
    for windows in
        [vec![None], vec![None, Some(128)], vec![Some(100)], vec![Some(64), Some(65), None], vec![Some(1), None]]
    {
        let blocks_of = |tokens: usize| tokens / BLOCK_TOKENS * BLOCK_TOKENS;
        let lengths =
            (1..8).flat_map(|blocks| [-1, 0, 1].map(|offset| (blocks * BLOCK_TOKENS as i32 + offset) as usize));
        for len in lengths.chain([1, 2]) {
            let mut manager = BlockManager::new(windows.clone(), 200);
            let prompt = tokens(1, len);
            let blocks = compute(&mut manager, &prompt, 50);
            let check = |manager: &mut BlockManager, prompt: &[u32], expected: usize, what: &str| {
                let found = hit(manager, prompt);
                assert_eq!(found, expected, "{what}: wrong hit length: windows {windows:?}, {len} computed tokens");
            };
            check(&mut manager, &prompt, blocks_of(len - 1), "the same prompt, while its blocks are in use");
            manager.release(blocks);
            check(&mut manager, &prompt, blocks_of(len - 1), "the same prompt");
            let longer: Vec<_> = prompt.iter().copied().chain([7]).collect();
            check(&mut manager, &longer, blocks_of(len), "a longer prompt");
            for position in [0, 1, 62, 63, 64, 65, 127, 128, 129, 191, 192, 193].into_iter().filter(|&p| p < len) {
                let mut other = longer.clone();
                other[position] = 999_999;
                check(&mut manager, &other, blocks_of(position), &format!("a prompt that differs at {position}"));
            }
            for end in [1, 63, 64, 65, 66, 127, 128, 129].into_iter().filter(|&end| end <= len) {
                check(&mut manager, &prompt[..end], blocks_of(end - 1), &format!("a prompt of {end} tokens"));
            }
        }
    }
}

#[test]
fn blocks_without_content_are_taken_before_cached_ones() {
    let mut manager = BlockManager::new(vec![None, Some(128)], 1 + 100);
    let (first, second) = (tokens(1, 1000), tokens(2, 1000));
    for text in [&first, &second] {
        let blocks = compute(&mut manager, text, 64);
        manager.release(blocks);
    }
    assert_eq!(manager.stats().evicted, 0, "blocks were evicted, although only 60 of 100 blocks have content");
    assert_eq!(hit(&mut manager, &first[..500]), 448, "blocks that left the sliding window must stay cached");
    assert_eq!(hit(&mut manager, &second), 960);
}

#[test]
fn the_tail_of_the_sequence_that_was_released_first_is_evicted_first() {
    for windows in [vec![None], vec![None, Some(10_000)]] {
        let groups = windows.len();
        let mut manager = BlockManager::new(windows, 1 + 10 * groups);
        let (first, second) = (tokens(1, 5 * BLOCK_TOKENS + 1), tokens(2, 5 * BLOCK_TOKENS + 1));
        let full = |text: &[u32]| text[..5 * BLOCK_TOKENS].to_vec();
        for text in [&first, &second] {
            let blocks = compute(&mut manager, &full(text), 1000);
            manager.release(blocks);
        }
        let third = compute(&mut manager, &tokens(3, 2 * BLOCK_TOKENS), 1000);
        assert_eq!(manager.stats().evicted as usize, 2 * groups);
        assert_eq!(hit(&mut manager, &first), 3 * BLOCK_TOKENS, "{groups} layer groups");
        assert_eq!(hit(&mut manager, &second), 5 * BLOCK_TOKENS);
        // Release the third text before the first two texts are used again, so that it is evicted first.
        manager.release(third);
        hit(&mut manager, &first);
        hit(&mut manager, &second);
        let fourth = compute(&mut manager, &tokens(4, 2 * BLOCK_TOKENS), 1000);
        assert_eq!(hit(&mut manager, &first), 3 * BLOCK_TOKENS);
        assert_eq!(hit(&mut manager, &second), 5 * BLOCK_TOKENS);
        assert_eq!(hit(&mut manager, &tokens(3, 2 * BLOCK_TOKENS + 1)), 0);
        manager.release(fourth);
    }
}

#[test]
fn windows_at_the_ends_of_retained_prefixes_and_prompts_survive_longer() {
    for window in [2, 64, 65, 66, 100, 128, 129, 130, 200] {
        let mut manager = BlockManager::new(vec![Some(window)], 1 + 80);
        // The prompt has 1,500 tokens, and the answer has 2,500 tokens.
        let text = tokens(1, 4000);
        let mut blocks = compute(&mut manager, &text[..1500], 512);
        continue_to(&mut manager, &mut blocks, &text, 512);
        manager.release(blocks);
        // The blocks of five windows are evicted last: the windows that end at positions 1,024, 2,048 and 3,072,
        // at the end of the prompt, and at the end of the answer.
        let first = |position: usize| first_visible(Some(window), position) / BLOCK_TOKENS;
        let kept: usize = [(1024, 1024), (2048, 2048), (3072, 3072), (1472, 1500), (4000, 4000)]
            .map(|(position, end)| end / BLOCK_TOKENS - first(position))
            .iter()
            .sum();
        // Evict all blocks outside these windows.
        let mut running = Vec::new();
        while manager.stats().evicted < (4000 / BLOCK_TOKENS - kept) as u64 {
            running.push(compute(&mut manager, &tokens(2 + running.len() as u32, BLOCK_TOKENS), BLOCK_TOKENS));
        }
        for (len, want) in [(1025, 1024), (1300, 1024), (1500, 1472), (1501, 1472), (2049, 2048), (3800, 3072)] {
            assert_eq!(hit(&mut manager, &text[..len]), want, "wrong hit: prompt of {len} tokens, window {window}");
        }
        // The windows that end at positions 3,968 and 4,000 may start in the same block.
        // In that case, the cached blocks of the window that ends at position 4,000 also allow a hit of 3,968 tokens.
        let want = if first(3968) == first(4000) { 3968 } else { 3072 };
        let longer: Vec<_> = text.iter().copied().chain([7]).collect();
        assert_eq!(hit(&mut manager, &longer), want, "window {window}");
        running.into_iter().for_each(|blocks| drop(manager.release(blocks)));
        assert_eq!(manager.stats().used, 0);
    }
}

#[test]
fn forgotten_prefixes_are_not_found() {
    let mut manager = BlockManager::new(vec![None, Some(128)], 60);
    let text = tokens(1, 500);
    let mut running = compute(&mut manager, &text[..300], 100);
    manager.forget_prefixes();
    assert_eq!(hit(&mut manager, &text), 0);
    assert_eq!(manager.stats().cached, 0);
    // Blocks that become full later are cached, but no prompt can reuse them without the forgotten blocks before them.
    continue_to(&mut manager, &mut running, &text, 100);
    assert_eq!(hit(&mut manager, &text), 0);
    manager.release(running);
    assert_eq!(manager.stats().used, 0);
    // Compute the whole text again. The forgotten blocks are then cached again, and the prefix is complete.
    let blocks = compute(&mut manager, &text, 100);
    manager.release(blocks);
    assert_eq!(hit(&mut manager, &text), 448);
}

#[test]
fn demand_is_enough_to_reach_the_predicted_length() {
    let mut random = Random(1);
    for round in 0..300 {
        let windows = [vec![None], vec![None, Some(128)], vec![Some(100)], vec![Some(1), None, Some(300)]];
        let mut manager = BlockManager::new(windows[round % windows.len()].clone(), 400);
        let (len, chunk) = (1 + random.below(1000), 1 + random.below(400));
        let text = tokens(1, len);
        // Another sequence begins with the same tokens and keeps its blocks, so that the sequences may share blocks.
        let shared = random.below(len);
        let other = compute(&mut manager, &text[..shared], 100);
        let mut blocks = match random.below(2) {
            0 => manager.start(&text, text.len(), BlockHashes::default()),
            _ => manager.fork(&other),
        };
        let (demand, free) = (manager.demand(&blocks, len, chunk), manager.free_blocks());
        assert!(demand <= manager.peak_blocks(len, chunk));
        let mut taken = 0;
        while blocks.computed() < len {
            let left = len - blocks.computed();
            let end = blocks.computed() + 1 + random.below(left.min(chunk));
            let (before, grown) = (manager.demand(&blocks, len, chunk), manager.missing(&blocks, end));
            assert!(manager.grow(&mut blocks, end).is_some());
            taken = taken.max(free - manager.free_blocks());
            assert!(
                manager.demand(&blocks, len, chunk) + grown <= before,
                "the demand must drop by at least {grown} blocks"
            );
            let (before, free) = (manager.demand(&blocks, len, chunk), manager.free_blocks());
            manager.commit(&mut blocks, &text[..end]);
            assert!(manager.demand(&blocks, len, chunk) + free <= before + manager.free_blocks());
        }
        assert!(taken <= demand, "{taken} blocks were taken, but the predicted demand was {demand}");
        manager.release(blocks);
        manager.release(other);
        assert_eq!(manager.stats().used, 0);
    }
}
