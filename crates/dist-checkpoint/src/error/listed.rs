//! Lists in error messages, which may be long.

use std::fmt;

use core_types::human::Printable;

/// The largest number of list items to show.
const MAX_SHOWN: usize = 8;

/// Displays the first items of a list, and the number of the remaining items. Names may come from a
/// file, so control characters are escaped.
#[derive(Debug)]
pub struct Listed<'a, T>(pub &'a [T]);

impl<T: fmt::Display> fmt::Display for Listed<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, item) in self.0.iter().take(MAX_SHOWN).enumerate() {
            write!(f, "{}{}", if position == 0 { "" } else { ", " }, Printable(item))?;
        }
        match self.0.len().saturating_sub(MAX_SHOWN) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

/// Displays a list in brackets, or nothing if the list is empty.
pub(crate) struct Bracketed<'a, T>(pub(crate) &'a [T]);

impl<T: fmt::Display> fmt::Display for Bracketed<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, " ({})", Listed(self.0)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_end_with_a_number() {
        let numbers: Vec<usize> = (0..11).collect();
        assert_eq!(Listed(&numbers[..2]).to_string(), "0, 1");
        assert_eq!(Listed(&numbers[..8]).to_string(), "0, 1, 2, 3, 4, 5, 6, 7");
        assert_eq!(Bracketed(&numbers).to_string(), " (0, 1, 2, 3, 4, 5, 6, 7 and 3 more)");
        assert_eq!(Bracketed(&numbers[..0]).to_string(), "");
    }
}
