//! Integer arithmetic that the standard library lacks.

/// The greatest common divisor.
pub(crate) fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The least common multiple, if it fits.
pub(crate) fn lcm(a: u64, b: u64) -> Option<u64> {
    (a / gcd(a, b).max(1)).checked_mul(b)
}

/// `a * b / c` where `a` or `b` is at most `c`, so that it fits.
pub(crate) fn mul_div(a: u64, b: u64, c: u64) -> u64 {
    match a.checked_mul(b) {
        // Most worlds are powers of two, for which a shift does.
        Some(product) if c.is_power_of_two() => product >> c.trailing_zeros(),
        Some(product) => product / c,
        None => u64::try_from(u128::from(a) * u128::from(b) / u128::from(c)).unwrap_or(u64::MAX),
    }
}

/// A position in a vector that has one entry for each rank or run, so that it fits.
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
    fn products_may_leave_64_bits_on_the_way() {
        assert_eq!(mul_div(u64::MAX, 3, 4), u64::MAX / 4 * 3 + 2);
        assert_eq!(mul_div(5, 7, 8), 4);
    }

    #[test]
    fn divisors_and_multiples() {
        assert_eq!((gcd(12, 18), lcm(12, 18), lcm(1, 7)), (6, Some(36), Some(7)));
        assert_eq!((gcd(0, 5), lcm(0, 0), lcm(u64::MAX, 2)), (5, Some(0), None));
    }
}
