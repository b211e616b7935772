//! Size classes: ranges of token counts whose matrix products share a cuBLASLt algorithm.

/// Rounds a number of tokens up to a size class.
/// All products of one matrix in one size class use the same cuBLASLt algorithm, if they also have the same alignment,
/// output dtype and output stride.
///
/// Up to 8 tokens, each number is a class. From 9 to 64 tokens, the classes are multiples of 8.
/// Above 64 tokens, there are four classes per doubling, so the rounded number is less than 25% larger.
pub fn size_class(tokens: usize) -> usize {
    match tokens {
        0..=8 => tokens,
        _ => tokens.next_multiple_of((tokens.next_power_of_two() / 8).max(8)),
    }
}

/// Returns all size classes from the class of one token to the class of `tokens` tokens.
pub fn size_classes(tokens: usize) -> impl Iterator<Item = usize> {
    let next = |&class: &usize| Some(size_class(class + 1));
    std::iter::successors(Some(1), next).take_while(move |&class| class <= size_class(tokens))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_classes_are_close_to_all_numbers_of_tokens() {
        for tokens in 1..20_000 {
            let class = size_class(tokens);
            assert!(class >= tokens && 4 * class <= 5 * tokens.max(32), "{tokens} tokens are in class {class}");
            assert_eq!(size_class(class), class);
        }
        let classes: Vec<usize> = size_classes(160).collect();
        assert_eq!(classes, [1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160]);
        assert_eq!((size_classes(8192).count(), size_classes(8192).last()), (43, Some(8192)));
    }
}
