//! What the replicas of a step tell each other beside gradients: a few words each, by which all
//! decide alike.

use candle_core::{Result, Tensor};
use pmap_mesh::{ALL, Replica};

/// The words of every replica, by slot; all bring as many.
///
/// They travel as 32-bit integers, which every device and engine carries to the bit.
pub(crate) fn words(ctx: &Replica, here: &[u32]) -> Result<Vec<Vec<u32>>> {
    let row = Tensor::new(here, ctx.device())?.unsqueeze(0)?;
    ctx.all_gather(&row, 0, ALL)?.to_vec2()
}

/// The numbers of every replica, by slot, to the bit.
pub(crate) fn numbers<const N: usize>(ctx: &Replica, here: [f64; N]) -> Result<Vec<[f64; N]>> {
    let halves = |number: f64| {
        let [a, b, c, d, rest @ ..] = number.to_le_bytes();
        [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes(rest)]
    };
    let rows = words(ctx, &here.map(halves).concat())?;
    let number = |row: &[u32], n: usize| {
        f64::from_bits(u64::from(row[2 * n + 1]) << 32 | u64::from(row[2 * n]))
    };
    Ok(rows.iter().map(|row| std::array::from_fn(|n| number(row, n))).collect())
}

/// For each flag, whether any replica has it set; all bring as many.
pub(crate) fn any(ctx: &Replica, here: &[bool]) -> Result<Vec<bool>> {
    let word = |flags: &[bool]| {
        flags.iter().enumerate().fold(0, |word, (bit, &flag)| word | u32::from(flag) << bit)
    };
    let words_here: Vec<u32> = here.chunks(32).map(word).collect();
    if words_here.is_empty() {
        return Ok(Vec::new());
    }
    let all = words(ctx, &words_here)?;
    let is_set = |flag: usize| all.iter().any(|words| words[flag / 32] >> (flag % 32) & 1 == 1);
    Ok((0..here.len()).map(is_set).collect())
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
            let all = numbers(ctx, [slot + 0.1, -0.0 / slot, f64::MIN_POSITIVE * slot])?;
            for (slot, numbers) in all.iter().enumerate() {
                let slot = slot as f64;
                let expected = [slot + 0.1, -0.0 / slot, f64::MIN_POSITIVE * slot];
                assert_eq!(numbers.map(f64::to_bits), expected.map(f64::to_bits));
            }
            Ok(())
        });
    }

    #[test]
    fn a_flag_of_any_replica_is_one_of_all() {
        on_slots(|ctx| {
            let here: Vec<bool> = (0..70).map(|flag| flag % 7 == ctx.slot()).collect();
            let expected: Vec<bool> = (0..70).map(|flag| flag % 7 < 3).collect();
            assert_eq!(any(ctx, &here)?, expected);
            assert_eq!(any(ctx, &[])?, [] as [bool; 0]);
            Ok(())
        });
    }
}
