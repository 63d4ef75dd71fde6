//! Rotation of pairs of elements by angles that depend on the position.

use pulp::NullaryFnOnce;

use super::{
    float::Float,
    memory::{Fill, vec_of_blocks},
    parallel::{block_of, rows_per_block},
    vectorized,
};

/// Which elements of a row make a pair.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Pairs {
    /// One of the first half with one of the second.
    Halves,
    /// Neighbors.
    Neighbors,
}

/// Which way pairs are turned.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Turn {
    Forward,
    /// The transposed rotation, which is the way of gradients.
    Back,
}

/// Rows, the angles of a row, and how positions follow from row numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rotation<'a, T> {
    pub(crate) pairs: Pairs,
    /// Elements of a row.
    pub(crate) size: usize,
    /// How many rows one after another have one position.
    pub(crate) rows_per_position: usize,
    pub(crate) positions: usize,
    /// [positions, size / 2].
    pub(crate) cos: &'a [T],
    pub(crate) sin: &'a [T],
}

/// All rows, rotated.
pub(crate) fn rotate<T: Float>(x: &[T], rotation: Rotation<'_, T>, turn: Turn) -> Vec<T> {
    let rows = rows_per_block(rotation.size);
    let block_len = rows * rotation.size;
    let write = |block, out: &mut Fill<'_, T>| {
        let x = block_of(x, block, block_len);
        vectorized(Rotate { x, rotation, turn, first_row: block * rows, out });
    };
    vec_of_blocks(x.len(), block_len, write).0
}

struct Rotate<'a, 'b, T> {
    x: &'a [T],
    rotation: Rotation<'a, T>,
    turn: Turn,
    first_row: usize,
    out: &'a mut Fill<'b, T>,
}

impl<T: Float> NullaryFnOnce for Rotate<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Rotation { pairs, size, rows_per_position, positions, cos, sin } = self.rotation;
        let half = size / 2;
        let way = match self.turn {
            Turn::Forward => T::ONE,
            Turn::Back => -T::ONE,
        };
        for (row, x) in self.x.chunks_exact(size).enumerate() {
            let position = (self.first_row + row) / rows_per_position % positions;
            let cos = &cos[position * half..][..half];
            let sin = &sin[position * half..][..half];
            match pairs {
                Pairs::Halves => {
                    let (a, b) = x.split_at(half);
                    self.out.push4(a, b, cos, sin, |a, b, cos, sin| a * cos - b * (way * sin));
                    self.out.push4(a, b, cos, sin, |a, b, cos, sin| b * cos + a * (way * sin));
                }
                Pairs::Neighbors => {
                    self.out.push_pairs(x, cos, sin, |a, b, cos, sin| {
                        (a * cos - b * (way * sin), b * cos + a * (way * sin))
                    });
                }
            }
        }
    }
}
