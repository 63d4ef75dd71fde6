//! Readable forms of numbers and untrusted text.

use std::fmt::{self, Write};

/// A number of bytes in the largest unit that keeps a nonzero integer part: `474.70 MiB`.
///
/// Digits after the second are truncated, not rounded, so a displayed 24.00 GiB is never less. The
/// number has 128 bits because a sum over all ranks of sizes from a file may need them.
///
/// # Examples
///
/// ```
/// use core_types::human::HumanBytes;
///
/// assert_eq!(HumanBytes(497_759_232).to_string(), "474.70 MiB");
/// assert_eq!(HumanBytes(497_759_232).unit(), ("MiB", 1 << 20));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HumanBytes(pub u128);

impl HumanBytes {
    /// Returns the name and the bytes of the unit, to display several numbers in the same unit.
    pub fn unit(self) -> (&'static str, u64) {
        const NAMES: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        let level = (self.0.max(1).ilog2() / 10).min(6);
        (NAMES[level as usize], 1 << (10 * level))
    }
}

impl fmt::Display for HumanBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, bytes) = self.unit();
        let hundredths = self.0.saturating_mul(100) / u128::from(bytes);
        write!(f, "{}.{:02} {name}", hundredths / 100, hundredths % 100)
    }
}

/// A number with digits in groups of three: `16,060,522,496`.
///
/// # Examples
///
/// ```
/// use core_types::human::HumanCount;
///
/// assert_eq!(HumanCount(16_060_522_496).to_string(), "16,060,522,496");
/// assert_eq!(HumanCount(1).with_noun("rank"), "1 rank");
/// assert_eq!(HumanCount(8).with_noun("rank"), "8 ranks");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HumanCount(pub u128);

impl HumanCount {
    /// Formats the number with its noun, in the plural unless the number is 1.
    #[must_use]
    pub fn with_noun(self, noun: &str) -> String {
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

/// Untrusted text, such as a name from a file or a path, displayed with control characters escaped.
///
/// Control characters could move the cursor, hide part of a message or add a line. The characters that reverse the
/// direction of text or break a line are escaped, too (Boucher and Anderson, "Trojan Source", 2021). Everything else is
/// unchanged, so the output is for people, not for parsers: different texts may look equal.
///
/// # Examples
///
/// ```
/// use std::path::Path;
///
/// use core_types::human::Printable;
///
/// assert_eq!(Printable("h.0.größe").to_string(), "h.0.größe");
/// assert_eq!(Printable("\u{1b}[2Jgone\n").to_string(), "\\u{1b}[2Jgone\\n");
/// assert_eq!(Printable(Path::new("a\rb").display()).to_string(), "a\\rb");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Printable<T>(pub T);

impl<T: fmt::Display> fmt::Display for Printable<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(EscapeWriter(f), "{}", self.0)
    }
}

/// A writer that escapes the characters described at [`Printable`].
struct EscapeWriter<'a, 'b>(&'a mut fmt::Formatter<'b>);

impl Write for EscapeWriter<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut rest = text;
        while let Some((offset, found)) =
            rest.char_indices().find(|&(_, found)| is_terminal_unsafe(found))
        {
            self.0.write_str(&rest[..offset])?;
            write!(self.0, "{}", found.escape_default())?;
            rest = &rest[offset + found.len_utf8()..];
        }
        self.0.write_str(rest)
    }
}

/// Returns true if `found` is a control character, sets the direction of text, or breaks a line.
fn is_terminal_unsafe(found: char) -> bool {
    found.is_control()
        || matches!(
            found,
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_use_a_suitable_unit() {
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

    #[test]
    fn terminal_characters_are_escaped() {
        for harmful in (0..=0x1f).chain(0x7f..=0x9f).chain(0x202a..=0x202e).chain(0x2066..=0x2069) {
            let name = format!("a{}b", char::from_u32(harmful).unwrap());
            let printed = Printable(&name).to_string();
            assert!(printed.starts_with("a\\") && printed.ends_with('b'), "{printed}");
            assert!(printed.is_ascii(), "{printed}");
        }
        for plain in ["", "größe.weight", "a\\nb", "日本", "{\"quoted\"}", "👩\u{200d}🔬"] {
            assert_eq!(Printable(plain).to_string(), plain);
        }
    }
}
