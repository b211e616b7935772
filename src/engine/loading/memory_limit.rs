//! [`MemoryLimit`]: how much memory of each device the engine may use.

use std::str::FromStr;

/// How much memory of each device the engine may use for weights, KV cache and workspace together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MemoryLimit {
    Bytes(u64),
    /// A fraction of the device's total memory, greater than 0 and at most 1.
    Fraction(f64),
}

impl MemoryLimit {
    /// Returns the limit in bytes for a device with `total` bytes of memory.
    pub fn bytes(self, total: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Fraction(fraction) => (total as f64 * fraction) as u64,
        }
    }
}

impl FromStr for MemoryLimit {
    type Err = String;

    /// Parses a size in MB, MiB, GB or GiB, such as `20GB`, or a fraction, such as `0.9` or `90%`.
    fn from_str(text: &str) -> Result<Self, String> {
        const UNITS: [(&str, f64); 5] =
            [("GiB", (1u64 << 30) as f64), ("MiB", (1u64 << 20) as f64), ("GB", 1e9), ("MB", 1e6), ("%", 0.0)];
        let error = || "expected a size such as 20GB, or a fraction of the GPU's memory such as 0.9 or 90%".to_string();
        let unit = UNITS.iter().find(|(unit, _)| text.ends_with(unit));
        let number = unit.map_or(text, |(unit, _)| text.trim_end_matches(unit)).trim_end();
        let number: f64 = number.parse().map_err(|_| error())?;
        let limit = match unit {
            Some(("%", _)) => Self::Fraction(number / 100.0),
            Some((_, bytes)) => Self::Bytes((number * bytes) as u64),
            None => Self::Fraction(number),
        };
        match limit {
            Self::Fraction(fraction) if !(fraction > 0.0 && fraction <= 1.0) => Err(error()),
            Self::Bytes(0) => Err(error()),
            limit => Ok(limit),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_fractions_are_parsed() {
        let parse = |text: &str| text.parse::<MemoryLimit>();
        assert_eq!(parse("20GB"), Ok(MemoryLimit::Bytes(20_000_000_000)));
        assert_eq!(parse("1.5 GiB"), Ok(MemoryLimit::Bytes(3 << 29)));
        assert_eq!(parse("512MiB"), Ok(MemoryLimit::Bytes(512 << 20)));
        assert_eq!(parse("90%"), Ok(MemoryLimit::Fraction(0.9)));
        assert_eq!(parse("0.5").map(|limit| limit.bytes(100)), Ok(50));
        for text in ["", "0", "20", "101%", "-1", "NaN", "0GB", "-3GB", "GB", "1TBx", "inf"] {
            assert!(parse(text).unwrap_err().starts_with("expected a size"), "{text}");
        }
    }
}
