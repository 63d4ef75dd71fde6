//! Numbers and names as people read them.

use std::fmt;

/// The width of the longest bar.
const BAR_WIDTH: u128 = 20;

/// A name that cannot move the cursor or break a line, whatever file it came from.
pub(super) struct Printable<'a>(pub(super) &'a str);

impl fmt::Display for Printable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.contains(char::is_control) {
            self.0.escape_debug().fmt(f)
        } else {
            f.write_str(self.0)
        }
    }
}

/// Digits in groups of three: `16,060,522,496`.
pub(super) fn grouped(number: u128) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (position, digit) in digits.chars().enumerate() {
        if position > 0 && (digits.len() - position).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A number with its noun: `1 rank`, `8 ranks`.
pub(super) fn counted(number: u128, noun: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{} {noun}{plural}", grouped(number))
}

/// Bytes in the largest binary unit that leaves something before the point: `474.70 MiB`.
pub(super) fn binary(bytes: u128) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let level = (bytes.max(1).ilog2() / 10).min(6);
    let hundredths = bytes.saturating_mul(100) >> (10 * level);
    format!("{}.{:02} {}", hundredths / 100, hundredths % 100, units[level as usize])
}

/// A bar as long as `part` is large beside `largest`, rounded.
pub(super) fn bar(part: u128, largest: u128) -> String {
    let width = (part * BAR_WIDTH + largest / 2).checked_div(largest).unwrap_or(0);
    (0..width).map(|_| '█').collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_grouped_from_the_right() {
        for (number, text) in
            [(0, "0"), (999, "999"), (1000, "1,000"), (16_060_522_496, "16,060,522,496")]
        {
            assert_eq!(grouped(number), text);
        }
    }

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
            assert_eq!(binary(bytes), text);
        }
    }

    #[test]
    fn bars_are_rounded() {
        let width = |part, largest| bar(part, largest).chars().count();
        assert_eq!([width(0, 0), width(1, 100), width(3, 100), width(100, 100)], [0, 0, 1, 20]);
    }

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(Printable("a\u{1b}[2Jb\n").to_string(), "a\\u{1b}[2Jb\\n");
        assert_eq!(Printable("größe.weight").to_string(), "größe.weight");
    }
}
