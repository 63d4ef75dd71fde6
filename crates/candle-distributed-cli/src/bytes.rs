//! Parsing sizes in bytes, such as `24GiB`.

/// Parses a size in bytes, with or without a unit.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let digits = text.find(|character: char| !character.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 =
        text[..digits].parse().map_err(|_| "expected a whole number of bytes, such as 24GiB")?;
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
    number.checked_mul(unit).ok_or_else(|| format!("above the limit of {} bytes", u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

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
