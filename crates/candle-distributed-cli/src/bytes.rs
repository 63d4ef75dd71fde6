//! Numbers, above all of bytes, as people write and read them.

use std::iter;

/// Bytes as a number with or without a unit.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let digits = text.find(|character: char| !character.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 =
        text[..digits].parse().map_err(|_| "a whole number of bytes is needed, such as 24GiB")?;
    let unit = match text[digits..].trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        "tib" => 1 << 40,
        _ => {
            return Err(String::from("the unit must be one of KB, MB, GB, TB, KiB, MiB, GiB, TiB"));
        }
    };
    number.checked_mul(unit).ok_or_else(|| format!("more than {} bytes", u64::MAX))
}

/// Bytes in the largest binary unit that leaves something before the point.
pub(crate) fn binary(bytes: u128) -> String {
    let scale = Scale::of(bytes);
    format!("{} {}", scale.number(bytes, 2), scale.unit)
}

/// Digits in groups of three.
pub(crate) fn grouped(number: u128) -> String {
    let digits = number.to_string();
    let (first, rest) = digits.split_at((digits.len() - 1) % 3 + 1);
    let groups = (0..rest.len()).step_by(3).map(|start| &rest[start..start + 3]);
    iter::once(first).chain(groups).collect::<Vec<_>>().join(",")
}

/// A binary unit.
#[derive(Clone, Copy)]
pub(crate) struct Scale {
    pub(crate) unit: &'static str,
    level: u32,
}

impl Scale {
    /// The largest that leaves something of `bytes` before the point.
    pub(crate) fn of(bytes: u128) -> Self {
        const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

        let level = (bytes.max(1).ilog2() / 10).min(6);
        Self { unit: UNITS[level as usize], level }
    }

    /// How many of this unit, cut off after one or two digits behind the point.
    pub(crate) fn number(self, bytes: u128, n_digits: usize) -> String {
        let hundredths = bytes.saturating_mul(100) >> (10 * self.level);
        format!("{}.{:.n_digits$}", hundredths / 100, format!("{:02}", hundredths % 100))
    }

    /// The bytes of one.
    pub(crate) fn bytes(self) -> f64 {
        (1_u64 << (10 * self.level)) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_as_in_the_report_of_a_plan() {
        for (bytes, text) in [
            (0, "0.00 B"),
            (1023, "1023.00 B"),
            (497_759_232, "474.70 MiB"),
            (1 << 71, "2048.00 EiB"),
        ] {
            assert_eq!(binary(bytes), text);
        }
    }

    #[test]
    fn digits_stand_in_groups() {
        for (number, text) in
            [(0, "0"), (999, "999"), (1000, "1,000"), (16_060_522_496, "16,060,522,496")]
        {
            assert_eq!(grouped(number), text);
        }
    }

    #[test]
    fn units_are_decimal_or_binary() {
        for (text, bytes) in [("7", 7), ("4 kb", 4000), ("4KiB", 4096), ("24GiB", 24 << 30)] {
            assert_eq!(parse(text), Ok(bytes));
        }
        for text in ["", "KiB", "-1", "1 apple", "99999999999TiB"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
