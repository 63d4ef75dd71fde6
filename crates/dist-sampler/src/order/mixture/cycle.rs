//! The cycle of a mixture: which part has each turn.
//!
//! The next turn goes to the part that is furthest behind its share, the smooth weighted
//! round-robin of load balancers. So every prefix contains each part in proportion to its weight,
//! within less than one sample.

use crate::error::{Error, Result};

/// Limit on the length of the cycle.
const MAX_CYCLE: u64 = 1 << 20;

/// The turns of one cycle, 12 bytes each.
#[derive(Clone, Debug)]
pub(super) struct TurnCycle {
    /// Weights over their greatest common divisor.
    weights: Vec<u64>,
    turns: Vec<Turn>,
    /// Turns of each part, ascending.
    turns_of_parts: Vec<Vec<u32>>,
}

/// A turn of the cycle: its part, and the number of earlier turns of this part in the cycle.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turn {
    pub(super) part: u32,
    n_earlier: u32,
}

impl TurnCycle {
    /// Creates the cycle for one weight per part; a part of weight 0 has no turn.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidWeights`] if all weights are 0, and above 2^20 turns.
    pub(super) fn new(weights: &[u64]) -> Result<Self> {
        let divisor = weights.iter().copied().fold(0, greatest_common_divisor);
        if divisor == 0 {
            return Err(Error::no_weight(weights.len()));
        }
        let weights: Vec<u64> = weights.iter().map(|weight| weight / divisor).collect();
        let n_turns = weights.iter().fold(0_u64, |sum, &weight| sum.saturating_add(weight));
        if n_turns > MAX_CYCLE {
            return Err(Error::weights(format!(
                "the mixture has a cycle of {n_turns} entries, the limit is {MAX_CYCLE}; round its weights"
            )));
        }
        let mut cycle =
            Self { turns: Vec::new(), turns_of_parts: vec![Vec::new(); weights.len()], weights };
        for turn in 1..=n_turns {
            cycle.push(turn, n_turns);
        }
        Ok(cycle)
    }

    /// Gives `turn`, counted from 1, to the part that is furthest behind its share, or to the first
    /// such part.
    #[expect(clippy::expect_used, reason = "a weight is above 0, so there is a part")]
    #[expect(clippy::cast_possible_truncation, reason = "a part has at most 2^20 turns")]
    #[expect(clippy::cast_possible_wrap, reason = "weights and turns are at most 2^20")]
    fn push(&mut self, turn: u64, n_turns: u64) {
        let parts = self.weights.iter().zip(&self.turns_of_parts).enumerate().rev();
        let most_due = parts.max_by_key(|(_, (weight, turns))| {
            (**weight * turn) as i64 - (turns.len() as u64 * n_turns) as i64
        });
        let part = most_due.expect("a part").0;
        let turns = &mut self.turns_of_parts[part];
        self.turns.push(Turn { part: part as u32, n_earlier: turns.len() as u32 });
        turns.push(turn as u32 - 1);
    }

    pub(super) fn weights(&self) -> &[u64] {
        &self.weights
    }

    /// Returns the part of the `n`-th turn and the number of its earlier turns, over all rounds.
    #[expect(clippy::cast_possible_truncation, reason = "a turn of the cycle")]
    pub(super) fn turn(&self, n: u64) -> (usize, u64) {
        let turn = self.turns[(n % self.len()) as usize];
        let part = turn.part as usize;
        (part, n / self.len() * self.weights[part] + u64::from(turn.n_earlier))
    }

    /// Returns the number of turns of `part` among the first `n`.
    pub(super) fn count(&self, part: usize, n: u64) -> u64 {
        let rest = n % self.len();
        let in_round = self.turns_of_parts[part].partition_point(|&turn| u64::from(turn) < rest);
        n / self.len() * self.weights[part] + in_round as u64
    }

    /// Returns the `n`-th turn of `part`, or `None` if it has no turns or the number overflows.
    #[expect(clippy::cast_possible_truncation, reason = "a turn of the cycle")]
    pub(super) fn nth_turn(&self, part: usize, n: u64) -> Option<u64> {
        let round = n.checked_div(self.weights[part])?;
        let in_round = self.turns_of_parts[part][(n % self.weights[part]) as usize];
        round.checked_mul(self.len())?.checked_add(u64::from(in_round))
    }

    fn len(&self) -> u64 {
        self.turns.len() as u64
    }
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_keep_the_proportions() {
        for weights in [&[1, 1][..], &[3, 1, 2], &[10, 1], &[7], &[4, 0, 6], &[1, 2, 3, 4, 5]] {
            let cycle = TurnCycle::new(weights).unwrap();
            let total: u64 = weights.iter().sum();
            let mut read = vec![0; weights.len()];
            for n in 0..100 {
                for part in 0..weights.len() {
                    assert_eq!(cycle.count(part, n), read[part]);
                    let excess = (read[part] * total).abs_diff(n * weights[part]);
                    assert!(excess < total, "{weights:?} after {n}: {read:?}");
                }
                let (part, n_earlier) = cycle.turn(n);
                assert_eq!(n_earlier, read[part]);
                assert_eq!(cycle.nth_turn(part, n_earlier), Some(n));
                read[part] += 1;
            }
        }
    }

    #[test]
    fn ties_go_to_the_first_part() {
        let cycle = TurnCycle::new(&[2, 2]).unwrap();
        assert_eq!([0, 1, 2].map(|n| cycle.turn(n)), [(0, 0), (1, 0), (0, 1)]);
    }

    #[test]
    fn invalid_weights_are_rejected() {
        let error = |weights: &[u64]| TurnCycle::new(weights).unwrap_err();
        assert_eq!(error(&[0, 0]), Error::no_weight(2));
        assert_eq!(error(&[]), Error::no_weight(0));
        let max = MAX_CYCLE;
        let too_long = |error: Error, turns: u64| {
            assert!(error.to_string().contains(&format!("{turns} entries, the limit is {max};")));
        };
        too_long(error(&[max, 1]), max + 1);
        assert!(TurnCycle::new(&[max - 1, 1]).is_ok(), "the longest cycle");
        assert!(TurnCycle::new(&[u64::MAX, u64::MAX]).is_ok(), "equal weights are 1 and 1");
        too_long(error(&[u64::MAX, 1]), u64::MAX);
    }
}
