//! Rotation of pairs of elements by angles that depend on the position.

use pulp::NullaryFnOnce;

use super::{
    float::Float,
    memory::{FillBlock, vec_of_blocks},
    parallel::{block_of, rows_per_block},
    vectorized,
};

/// The elements of a row that form a pair.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PairLayout {
    /// Elements `i` and `i + pairs` are a pair.
    Halves,
    /// Elements `2i` and `2i + 1` are a pair.
    Neighbors,
}

/// The direction of the rotation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RotationDirection {
    Forward,
    /// The transposed rotation, for gradients.
    Back,
}

/// The layout of the rows, and the angles for each position. Elements of a row beyond its pairs stay.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rotation<'a, T> {
    pub(crate) layout: PairLayout,
    /// The number of elements of a row.
    pub(crate) size: usize,
    /// The number of pairs of a row, at most half of its elements.
    pub(crate) pairs: usize,
    /// The number of consecutive rows with the same position.
    pub(crate) rows_per_position: usize,
    pub(crate) positions: usize,
    /// [positions, pairs].
    pub(crate) cos: &'a [T],
    pub(crate) sin: &'a [T],
}

/// Rotates all rows.
pub(crate) fn rotate<T: Float>(
    x: &[T],
    rotation: Rotation<'_, T>,
    direction: RotationDirection,
) -> Vec<T> {
    let rows = rows_per_block(rotation.size);
    let block_len = rows * rotation.size;
    vec_of_blocks(x.len(), block_len, |block, out: &mut FillBlock<'_, T>| {
        let x = block_of(x, block, block_len);
        vectorized(RotateRows { x, rotation, direction, first_row: block * rows, out });
    })
    .0
}

struct RotateRows<'a, 'b, T> {
    x: &'a [T],
    rotation: Rotation<'a, T>,
    direction: RotationDirection,
    first_row: usize,
    out: &'a mut FillBlock<'b, T>,
}

impl<T: Float> NullaryFnOnce for RotateRows<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Rotation { layout, size, pairs, rows_per_position, positions: n_positions, cos, sin } =
            self.rotation;
        let direction = match self.direction {
            RotationDirection::Forward => T::ONE,
            RotationDirection::Back => -T::ONE,
        };
        for (row, x) in self.x.chunks_exact(size).enumerate() {
            let position = (self.first_row + row) / rows_per_position % n_positions;
            let cos = &cos[position * pairs..][..pairs];
            let sin = &sin[position * pairs..][..pairs];
            let (x, rest) = x.split_at(2 * pairs);
            match layout {
                PairLayout::Halves => {
                    let (a, b) = x.split_at(pairs);
                    self.out
                        .push4(a, b, cos, sin, |a, b, cos, sin| a * cos - b * (direction * sin));
                    self.out
                        .push4(a, b, cos, sin, |a, b, cos, sin| b * cos + a * (direction * sin));
                }
                PairLayout::Neighbors => {
                    self.out.push_pairs(x, cos, sin, |a, b, cos, sin| {
                        (a * cos - b * (direction * sin), b * cos + a * (direction * sin))
                    });
                }
            }
            if !rest.is_empty() {
                self.out.push1(rest, |x| x);
            }
        }
    }
}
