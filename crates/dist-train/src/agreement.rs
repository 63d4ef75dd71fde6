//! Exchange of small data between the replicas of a step. All replicas get the same result, so they
//! take the same decisions.

use std::array;

use candle_core::{Result, Tensor};
use pmap_mesh::{ALL, Replica};

/// Gathers 32-bit words from every replica, by slot; all replicas pass the same number of words.
///
/// Every device and engine transfers 32-bit integers exactly.
pub(crate) fn gather_words(ctx: &Replica, here: &[u32]) -> Result<Vec<Vec<u32>>> {
    let row = Tensor::new(here, ctx.device())?.unsqueeze(0)?;
    ctx.all_gather(&row, 0, ALL)?.to_vec2()
}

/// Gathers numbers from every replica, by slot, exact to the bit.
pub(crate) fn gather_numbers<const N: usize>(
    ctx: &Replica,
    here: [f64; N],
) -> Result<Vec<[f64; N]>> {
    let rows = gather_words(ctx, &here.map(|number| halves(number.to_bits())).concat())?;
    let mut numbers = Vec::with_capacity(rows.len());
    for row in rows {
        numbers.push(array::from_fn(|n| f64::from_bits(join_halves([row[2 * n], row[2 * n + 1]]))));
    }
    Ok(numbers)
}

/// Splits a 64-bit number into its halves, the lower half first.
pub(crate) fn halves(number: u64) -> [u32; 2] {
    let [a, b, c, d, upper @ ..] = number.to_le_bytes();
    [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes(upper)]
}

/// Joins the [`halves`] of a number.
fn join_halves([lower, upper]: [u32; 2]) -> u64 {
    u64::from(upper) << 32 | u64::from(lower)
}

/// Gathers a list from every replica, by slot; lists may differ in length.
pub(crate) fn gather_lists(ctx: &Replica, here: &[u64]) -> Result<Vec<Vec<u64>>> {
    let lengths = gather_words(ctx, &halves(here.len() as u64))?;
    let sent: Vec<u32> = here.iter().copied().flat_map(halves).collect();
    let words = ctx.all_gather(&Tensor::new(sent, ctx.device())?, 0, ALL)?.to_vec1()?;
    let (pairs, _) = words.as_chunks();
    let mut numbers = pairs.iter().copied().map(join_halves);
    let mut lists = Vec::with_capacity(lengths.len());
    for length in lengths {
        let length = join_halves([length[0], length[1]]);
        lists.push((0..length).filter_map(|_| numbers.next()).collect());
    }
    Ok(lists)
}

/// Sums numbers over all replicas, exact to the bit. Each number is nonzero on one replica only.
pub(crate) fn sum_disjoint(ctx: &Replica, here: &[f64]) -> Result<Vec<f64>> {
    if here.is_empty() {
        return Ok(Vec::new());
    }
    // 0.0 has only zero bits, so an integer sum returns the bits of the only nonzero summand.
    let sent: Vec<u32> = here.iter().flat_map(|number| halves(number.to_bits())).collect();
    let sums = ctx.psum(&Tensor::new(sent, ctx.device())?, ALL)?.to_vec1()?;
    let (numbers, _) = sums.as_chunks();
    Ok(numbers.iter().map(|&halves| f64::from_bits(join_halves(halves))).collect())
}

/// Sums numbers over all replicas in rank order; all replicas pass the same number of numbers.
pub(crate) fn sum_in_rank_order(ctx: &Replica, here: &[f64]) -> Result<Vec<f64>> {
    if here.is_empty() {
        return Ok(Vec::new());
    }
    let sent: Vec<u32> = here.iter().flat_map(|number| halves(number.to_bits())).collect();
    let mut sums = vec![0.0; here.len()];
    for words in gather_words(ctx, &sent)? {
        let (numbers, _) = words.as_chunks();
        for (sum, &halves) in sums.iter_mut().zip(numbers) {
            *sum += f64::from_bits(join_halves(halves));
        }
    }
    Ok(sums)
}

/// Returns for each flag whether it is set on any replica; all replicas pass the same number of
/// flags.
pub(crate) fn any(ctx: &Replica, here: &[bool]) -> Result<Vec<bool>> {
    let mut words_here = vec![0_u32; here.len().div_ceil(32)];
    for (n, &flag) in here.iter().enumerate() {
        words_here[n / 32] |= u32::from(flag) << (n % 32);
    }
    if words_here.is_empty() {
        return Ok(Vec::new());
    }
    let all = gather_words(ctx, &words_here)?;
    let mut flags = Vec::with_capacity(here.len());
    for n in 0..here.len() {
        flags.push(all.iter().any(|words| words[n / 32] >> (n % 32) & 1 == 1));
    }
    Ok(flags)
}

#[cfg(test)]
mod tests {
    use pmap_mesh::DeviceMesh;

    use super::*;

    /// Runs `f` on three slots.
    fn on_slots(f: impl Fn(&Replica) -> Result<()> + Send + Sync + 'static) {
        DeviceMesh::cpu(3).unwrap().pmap(move |ctx, ()| f(ctx)).call(()).unwrap();
    }

    #[test]
    fn numbers_of_all_replicas_arrive_to_the_bit() {
        on_slots(|ctx| {
            let slot = ctx.slot() as f64;
            let all = gather_numbers(ctx, [slot + 0.1, -0.0 / slot, f64::MIN_POSITIVE * slot])?;
            for (slot, numbers) in all.iter().enumerate() {
                let slot = slot as f64;
                let expected = [slot + 0.1, -0.0 / slot, f64::MIN_POSITIVE * slot];
                assert_eq!(numbers.map(f64::to_bits), expected.map(f64::to_bits));
            }
            Ok(())
        });
    }

    #[test]
    fn lists_of_any_length_arrive_to_the_bit() {
        on_slots(|ctx| {
            let list = |slot: usize| vec![u64::MAX - slot as u64; slot];
            assert_eq!(gather_lists(ctx, &list(ctx.slot()))?, [list(0), list(1), list(2)]);
            Ok(())
        });
    }

    #[test]
    fn combined_numbers_arrive_to_the_bit() {
        on_slots(|ctx| {
            let all = [0.1, -1e300, f64::INFINITY, 0.0, f64::MIN_POSITIVE];
            let mut here = all;
            for (n, number) in here.iter_mut().enumerate() {
                if n % 3 != ctx.slot() {
                    *number = 0.0;
                }
            }
            assert_eq!(sum_disjoint(ctx, &here)?, all);
            assert!(sum_disjoint(ctx, &[])?.is_empty());
            Ok(())
        });
    }

    #[test]
    fn numbers_are_added_up_in_rank_order() {
        on_slots(|ctx| {
            let here = [[1e16, 0.1], [1.0, 0.2], [-1e16, 0.3]][ctx.slot()];
            assert_eq!(sum_in_rank_order(ctx, &here)?, [(1e16 + 1.0) - 1e16, (0.1 + 0.2) + 0.3]);
            assert!(sum_in_rank_order(ctx, &[])?.is_empty());
            Ok(())
        });
    }

    #[test]
    fn a_flag_of_one_replica_reaches_all() {
        on_slots(|ctx| {
            let here: Vec<bool> = (0..70).map(|flag| flag % 7 == ctx.slot()).collect();
            let expected: Vec<bool> = (0..70).map(|flag| flag % 7 < 3).collect();
            assert_eq!(any(ctx, &here)?, expected);
            assert!(any(ctx, &[])?.is_empty());
            Ok(())
        });
    }
}
