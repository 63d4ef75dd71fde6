//! Numbers as people read them.

use std::fmt;

/// Bytes in the largest binary unit that leaves something before the point: `474.70 MiB`.
///
/// Digits after the second are cut off, not rounded: what is shown as 24.00 GiB is never less. The
/// number has 128 bits, since a sum over all ranks of sizes that come from a file may need them.
///
/// # Examples
///
/// ```
/// use core_types::human::HumanBytes;
///
/// assert_eq!(HumanBytes(497_759_232).to_string(), "474.70 MiB");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HumanBytes(pub u128);

impl fmt::Display for HumanBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = BinaryUnit::of(self.0);
        write!(f, "{} {}", unit.count(self.0), unit.name())
    }
}

/// A binary unit of bytes, for numbers that must be shown in the same one.
///
/// # Examples
///
/// ```
/// use core_types::human::BinaryUnit;
///
/// let unit = BinaryUnit::of(3 << 30);
/// assert_eq!((unit.count(1 << 30), unit.name()), ("1.00".to_owned(), "GiB"));
/// assert_eq!((unit.count(3 << 30), unit.bytes()), ("3.00".to_owned(), 1 << 30));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BinaryUnit {
    level: u32,
}

impl BinaryUnit {
    const NAMES: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    const EIB: u32 = 6;

    /// The largest unit that leaves something of `bytes` before the point.
    pub fn of(bytes: u128) -> Self {
        Self { level: (bytes.max(1).ilog2() / 10).min(Self::EIB) }
    }

    /// `B`, `KiB`, `MiB` and so on.
    pub fn name(self) -> &'static str {
        Self::NAMES[self.level as usize]
    }

    /// The number of bytes in one of this unit.
    pub fn bytes(self) -> u64 {
        1 << (10 * self.level)
    }

    /// How many of this unit `bytes` are, with two digits after the point.
    pub fn count(self, bytes: u128) -> String {
        let hundredths = bytes.saturating_mul(100) >> (10 * self.level);
        format!("{}.{:02}", hundredths / 100, hundredths % 100)
    }
}

/// Digits in groups of three: `16,060,522,496`.
///
/// # Examples
///
/// ```
/// use core_types::human::HumanCount;
///
/// assert_eq!(HumanCount(16_060_522_496).to_string(), "16,060,522,496");
/// assert_eq!(HumanCount(1).of("rank"), "1 rank");
/// assert_eq!(HumanCount(8).of("rank"), "8 ranks");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HumanCount(pub u128);

impl HumanCount {
    /// The number with its noun, which gets an s unless there is exactly one.
    #[must_use]
    pub fn of(self, noun: &str) -> String {
        let plural = if self.0 == 1 { "" } else { "s" };
        format!("{self} {noun}{plural}")
    }
}

impl fmt::Display for HumanCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = self.0.to_string();
        let (first, rest) = digits.split_at((digits.len() - 1) % 3 + 1);
        f.write_str(first)?;
        for start in (0..rest.len()).step_by(3) {
            write!(f, ",{}", &rest[start..start + 3])?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_take_the_unit_that_fits() {
        for (bytes, text) in [
            (0, "0.00 B"),
            (1023, "1023.00 B"),
            (1024, "1.00 KiB"),
            (497_759_232, "474.70 MiB"),
            (1 << 60, "1.00 EiB"),
            (1 << 71, "2048.00 EiB"),
        ] {
            assert_eq!(HumanBytes(bytes).to_string(), text);
        }
        assert!(HumanBytes(u128::MAX).to_string().ends_with(" EiB"));
    }

    #[test]
    fn digits_are_grouped_from_the_right() {
        for (number, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")] {
            assert_eq!(HumanCount(number).to_string(), text);
        }
    }
}
