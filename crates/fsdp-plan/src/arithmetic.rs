//! Integer arithmetic that the standard library lacks.

/// Returns the greatest common divisor.
pub(crate) fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Returns the least common multiple, or `None` if it overflows.
pub(crate) fn lcm(a: u64, b: u64) -> Option<u64> {
    (a / gcd(a, b).max(1)).checked_mul(b)
}

/// Returns `a * b / c`. At least one factor must be at most `c`, so that the quotient fits.
pub(crate) fn mul_div(a: u64, b: u64, c: u64) -> u64 {
    match a.checked_mul(b) {
        // Most world sizes are powers of two, and a shift is faster than a division.
        Some(product) if c.is_power_of_two() => product >> c.trailing_zeros(),
        Some(product) => product / c,
        None => {
            let quotient = u128::from(a) * u128::from(b) / u128::from(c);
            #[expect(clippy::expect_used, reason = "callers pass a factor of at most `c`")]
            u64::try_from(quotient).expect("a quotient of at most the other factor")
        }
    }
}

/// Converts a position in a vector with one entry per rank or run.
#[expect(
    clippy::cast_possible_truncation,
    reason = "there are at most 2^20 ranks, and as many runs as memory holds"
)]
pub(crate) fn index(position: u64) -> usize {
    position as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mul_div_survives_large_products() {
        assert_eq!(mul_div(u64::MAX, 3, 4), u64::MAX / 4 * 3 + 2);
        assert_eq!(mul_div(5, 7, 8), 4);
    }

    #[test]
    fn gcd_and_lcm_handle_zero_and_overflow() {
        assert_eq!((gcd(12, 18), lcm(12, 18), lcm(1, 7)), (6, Some(36), Some(7)));
        assert_eq!((gcd(0, 5), lcm(0, 0), lcm(u64::MAX, 2)), (5, Some(0), None));
    }
}
