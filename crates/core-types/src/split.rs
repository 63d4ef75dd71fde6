//! Splits of `len` items over the ranks of a world.
//!
//! All crates split with these functions, so the sampler and the planner never disagree. Every item
//! has exactly one owner, and each rank computes its part independently.
//!
//! | function | parts | used by |
//! |---|---|---|
//! | [`chunk`] | ⌈len / world⌉ each; the last ones may be short or empty | `torch.chunk`, FSDP2 |
//! | [`balanced`] | sizes differ by at most one, first ranks get more | NumPy's `array_split` |

use std::ops::Range;

use crate::rank::Placement;

/// Returns the ⌈`len` / world⌉ items of `place`; the last ranks may have fewer or none.
///
/// `torch.chunk` splits like this, and so FSDP2 splits the rows of a parameter.
///
/// # Examples
///
/// ```
/// # use core_types::{Placement, split};
/// // Seven rows on four ranks: 2, 2, 2, 1. Five rows: 2, 2, 1, 0.
/// assert_eq!(split::chunk(7, Placement::new(3, 4)?), 6..7);
/// assert_eq!(split::chunk(5, Placement::new(3, 4)?), 5..5);
/// # Ok::<(), core_types::Error>(())
/// ```
pub fn chunk(len: u64, place: Placement) -> Range<u64> {
    let size = len.div_ceil(place.world_size().as_u64());
    // An overflowing product is beyond `len`, and so is the saturated one.
    let rank = place.rank().as_u64();
    rank.saturating_mul(size).min(len)..(rank + 1).saturating_mul(size).min(len)
}

/// Returns the items of `place` if all parts differ by at most one.
///
/// The first `len % world` ranks own one item more than the others.
///
/// # Examples
///
/// ```
/// # use core_types::{Placement, split};
/// assert_eq!(split::balanced(10, Placement::new(0, 4)?), 0..3);
/// assert_eq!(split::balanced(10, Placement::new(3, 4)?), 8..10);
/// # Ok::<(), core_types::Error>(())
/// ```
pub fn balanced(len: u64, place: Placement) -> Range<u64> {
    let world = place.world_size().as_u64();
    let size = len / world;
    let extra = len % world;
    let rank = place.rank().as_u64();
    let start = rank * size + rank.min(extra);
    start..start + size + u64::from(rank < extra)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::rank::WorldSize;

    type Cut = fn(u64, Placement) -> Range<u64>;
    const CUTS: [Cut; 2] = [chunk, balanced];

    #[test]
    fn parts_cover_all_items_by_each_rule() {
        let worlds = (1..=17).map(|world| WorldSize::new(world).unwrap());
        for (len, world) in (0..=100).flat_map(|len| worlds.clone().map(move |world| (len, world)))
        {
            let w = world.as_u64();
            for cut in CUTS {
                let mut end = 0;
                for place in world.placements() {
                    let part = cut(len, place);
                    assert_eq!(part.start, end, "{len} over {world}");
                    assert!(part.start <= part.end);
                    end = part.end;
                }
                assert_eq!(end, len);
            }
            for (r, place) in (0..).zip(world.placements()) {
                let size = |range: Range<u64>| range.end - range.start;
                let ceil = len.div_ceil(w);
                assert_eq!(size(chunk(len, place)), ceil.min(len.saturating_sub(r * ceil)));
                assert_eq!(size(balanced(len, place)), len / w + u64::from(r < len % w));
            }
        }
    }

    proptest! {
        #[test]
        fn huge_parts_do_not_overflow(
            len in any::<u64>(),
            world in 2..=WorldSize::MAX.as_u64(),
            rank in any::<u64>(),
        ) {
            let rank = rank % (world - 1);
            let place = Placement::new(rank, world).unwrap();
            let next = Placement::new(rank + 1, world).unwrap();
            for cut in CUTS {
                let part = cut(len, place);
                prop_assert!(part.start <= part.end && part.end <= len);
                prop_assert_eq!(part.end, cut(len, next).start);
            }
        }
    }
}
