//! Range checks for numbers from config.json or GGUF metadata. Both are untrusted, so a number may have any value.

use std::fmt::Debug;
use std::ops::RangeInclusive;

use anyhow::{Result, bail};

/// The upper limit of sizes in config.json, such as `hidden_size`. No known model has a larger size.
/// The product of two such sizes does not overflow a 64-bit `usize`.
pub const MAX_SIZE: usize = 1 << 24;

/// Fails unless `value` is in `range`. Always fails for NaN. `key` names the field in the error.
pub fn check_range<T: PartialOrd + Debug>(key: &str, value: T, range: RangeInclusive<T>) -> Result<()> {
    if !range.contains(&value) {
        bail!("{key} is {value:?}; it must be between {:?} and {:?}", range.start(), range.end());
    }
    Ok(())
}

/// Like [`check_range`], but accepts an absent value.
pub fn check_optional<T: PartialOrd + Debug>(key: &str, value: Option<T>, range: RangeInclusive<T>) -> Result<()> {
    value.map_or(Ok(()), |value| check_range(key, value, range))
}

/// Fails unless `value` is a size between 1 and [`MAX_SIZE`].
pub fn check_size(key: &str, value: usize) -> Result<()> {
    check_range(key, value, 1..=MAX_SIZE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_outside_of_the_range_are_errors() {
        assert!(check_range("eps", 1e-5, 1e-20..=1.0).is_ok());
        for value in [f64::NAN, f64::INFINITY, -1.0, 0.0, 1.5] {
            assert!(check_range("eps", value, 1e-20..=1.0).is_err(), "{value}");
        }
        let error = check_range("eps", f64::NAN, 1e-20..=1.0).unwrap_err().to_string();
        assert_eq!(error, "eps is NaN; it must be between 1e-20 and 1.0");
        assert_eq!(check_size("n", 0).unwrap_err().to_string(), "n is 0; it must be between 1 and 16777216");
        assert!(check_optional("n", None, 1..=2).is_ok());
        assert!(check_optional("n", Some(3), 1..=2).is_err());
    }
}
