//! Cuts a product into blocks that fit the caches, and the blocks into tiles.
//!
//! A block of `b` is copied into *panels* of a tile's columns, so that tiles read it from the start to
//! the end. Rows of `a` whose elements are adjacent are read where they lie; others are copied in the
//! same way. (Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", 2008.)
//!
//! Sums are cut by the depth of the product alone: the blocks of rows and columns, which depend on the
//! number of threads, change no bit. Each row and each column has the same bits as in a larger product.

#![allow(unsafe_code, reason = "blocks are parts of matrices at addresses that the callers check")]

use std::{cell::Cell, mem, thread::LocalKey};

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::{
    ProductThreads,
    tile::{Factor, TILE_ROWS, TileOutput, multiply_tile, tile_columns},
};
use crate::kernels::float::Float;

/// The most products in a sum before it is added to the result. A panel of this depth is as large as a
/// first-level cache of 32 KiB.
const MAX_DEPTH: usize = 512;

/// Columns of a block of `b`; a multiple of the columns of every tile.
const BLOCK_COLUMNS: usize = 1024;

/// Columns of `b` that one thread packs; a multiple of the columns of every tile.
const PACKED_COLUMNS: usize = 64;

/// Rows of a block of `a`, which fits into a core's second-level cache.
const BLOCK_ROWS: usize = 8 * TILE_ROWS;

/// The result of a product: rows of adjacent elements.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product<T> {
    pub(super) start: *mut T,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) row_stride: usize,
    /// The number that the product is multiplied by.
    pub(super) scale: T,
    /// Whether the product is added to the elements.
    pub(super) adds: bool,
}

/// Addresses that threads share. Each thread writes separate elements.
#[derive(Clone, Copy)]
struct Shared<T>(T);

// SAFETY: the threads write disjoint elements, and read only what none writes meanwhile.
unsafe impl<T> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Shared<T> {}

/// Writes or adds `a` · `b`, with sums of `depth` products.
///
/// # Safety
///
/// All elements of the result must be writable, and readable if it `adds`; no two may share an address,
/// and no other thread may access them meanwhile. The factors must be readable: `a` has the rows of the
/// result and `depth` columns, `b` `depth` rows and the columns of the result.
pub(super) unsafe fn multiply<T: Float>(
    out: Product<T>,
    a: Factor<T>,
    b: Factor<T>,
    depth: usize,
    threads: ProductThreads,
    arch: Arch,
) {
    let block_depth = depth.div_ceil(depth.div_ceil(MAX_DEPTH).max(1)).max(1);
    let most_columns = out.columns.min(BLOCK_COLUMNS).next_multiple_of(PACKED_COLUMNS);
    let mut memory = Scratch::take::<T>(&PANELS, most_columns * block_depth);
    let panels = memory.start();
    for column in (0..out.columns).step_by(BLOCK_COLUMNS) {
        let columns = BLOCK_COLUMNS.min(out.columns - column);
        // A product without a sum has one block too, which writes zeros.
        for k in (0..depth.max(1)).step_by(block_depth) {
            let block = Block {
                out: Product {
                    start: out.start.wrapping_add(column),
                    columns,
                    adds: out.adds || k > 0,
                    ..out
                },
                a: a.from(0, k),
                b: b.from(k, column),
                panels,
                depth: block_depth.min(depth - k),
            };
            // SAFETY: the block is a part of the product, and the panels have room for its columns,
            // rounded up, at its depth.
            unsafe { block.multiply(threads, arch) };
        }
    }
}

/// Memory of a thread that its products share, at most 4 MiB and 200 KiB. Separate memory would be
/// scattered among the tensors of a step.
struct Scratch {
    memory: Vec<u64>,
    owner: &'static LocalKey<Cell<Vec<u64>>>,
}

thread_local! {
    static PANELS: Cell<Vec<u64>> = const { Cell::new(Vec::new()) };
    static ROWS: Cell<Vec<u64>> = const { Cell::new(Vec::new()) };
}

impl Scratch {
    /// Takes memory of this thread, with room for `len` numbers. It is new if an outer product has taken
    /// the thread's.
    fn take<T>(owner: &'static LocalKey<Cell<Vec<u64>>>, len: usize) -> Self {
        let mut memory = owner.take();
        memory.reserve_exact((len * size_of::<T>()).div_ceil(size_of::<u64>()));
        Self { memory, owner }
    }

    fn start<T>(&mut self) -> *mut T {
        self.memory.as_mut_ptr().cast()
    }
}

impl Drop for Scratch {
    /// Gives the memory back to its thread.
    fn drop(&mut self) {
        self.owner.set(mem::take(&mut self.memory));
    }
}

/// A part of a product: all rows, and some columns and products of each sum.
#[derive(Clone, Copy)]
struct Block<T> {
    out: Product<T>,
    a: Factor<T>,
    b: Factor<T>,
    /// Memory for the panels of `b`.
    panels: *mut T,
    depth: usize,
}

impl<T: Float> Block<T> {
    /// Packs `b`, and then multiplies the rows of `a` by it.
    ///
    /// # Safety
    ///
    /// As for [`multiply`], and the panels must have room for the columns, rounded up to a multiple of
    /// [`PACKED_COLUMNS`].
    unsafe fn multiply(self, threads: ProductThreads, arch: Arch) {
        let Self { out, depth, .. } = self;
        let shared = Shared(self);
        threads.for_each(out.columns.div_ceil(PACKED_COLUMNS), |part| {
            let Shared(block) = { shared };
            let first = part * PACKED_COLUMNS;
            arch.dispatch(PackColumns {
                panels: block.panels.wrapping_add(first * depth),
                b: block.b.from(0, first),
                columns: PACKED_COLUMNS.min(out.columns - first),
                depth,
            });
        });
        let rows = threads.rows_per_task(out.rows);
        threads.for_each(out.rows.div_ceil(rows), |part| {
            let Shared(block) = { shared };
            let (first, out) = (part * rows, block.out);
            let start = out.start.wrapping_add(first * out.row_stride);
            let out = Product { start, rows: rows.min(out.rows - first), ..out };
            arch.dispatch(MultiplyRows(Block { out, a: block.a.from(first, 0), ..block }));
        });
    }

    /// Returns the place of the tile that begins at this row and column.
    fn tile_at(&self, row: usize, column: usize, tile_columns: usize) -> TileOutput<T> {
        let Product { start, rows, columns, row_stride, .. } = self.out;
        TileOutput {
            start: start.wrapping_add(row * row_stride + column),
            row_stride,
            rows: TILE_ROWS.min(rows - row),
            columns: tile_columns.min(columns - column),
        }
    }
}

impl ProductThreads {
    /// Calls `f` for each task.
    fn for_each(self, n_tasks: usize, f: impl Fn(usize) + Send + Sync) {
        match self {
            Self::Pool if n_tasks > 1 && rayon::current_num_threads() > 1 => {
                (0..n_tasks).into_par_iter().for_each(f);
            }
            Self::Pool | Self::One => (0..n_tasks).for_each(f),
        }
    }

    /// Returns the number of rows of a task, so that all threads have some.
    fn rows_per_task(self, rows: usize) -> usize {
        let n_threads = match self {
            Self::Pool => rayon::current_num_threads(),
            Self::One => 1,
        };
        rows.div_ceil(n_threads).next_multiple_of(TILE_ROWS).clamp(TILE_ROWS, BLOCK_ROWS)
    }
}

/// Copies columns of `b` into panels.
struct PackColumns<T> {
    panels: *mut T,
    b: Factor<T>,
    columns: usize,
    depth: usize,
}

impl<T: Float> WithSimd for PackColumns<T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let Self { panels, b, columns, depth } = self;
        let width = tile_columns::<T, S>();
        let b = Factor { start: b.start, row_stride: b.column_stride, column_stride: b.row_stride };
        // SAFETY: `Block::multiply` gives each part separate columns and panels.
        unsafe { pack(panels, width, b, columns, depth) };
    }
}

/// Copies rows, `width` to a panel; element k of all rows of a panel is together. Rows of zeros fill the
/// last panel.
///
/// # Safety
///
/// The rows must be readable and have `depth` elements; the panels must be writable.
#[inline(always)]
unsafe fn pack<T: Float>(panels: *mut T, width: usize, a: Factor<T>, rows: usize, depth: usize) {
    for first in (0..rows).step_by(width) {
        let n_rows = width.min(rows - first);
        for k in 0..depth {
            let from = a.from(first, k);
            let to = panels.wrapping_add(first * depth + k * width);
            // SAFETY: the elements are inside, as the caller promises.
            unsafe {
                if n_rows == width && a.row_stride == 1 {
                    to.copy_from_nonoverlapping(from.start, width);
                } else if n_rows == width {
                    for row in 0..width {
                        to.add(row).write(*from.start.add(row * a.row_stride));
                    }
                } else {
                    for row in 0..width {
                        let is_inside = row < n_rows;
                        let x = is_inside.then(|| *from.start.add(row * a.row_stride));
                        to.add(row).write(x.unwrap_or(T::ZERO));
                    }
                }
            }
        }
    }
}

/// Multiplies the rows of a block by its panels.
struct MultiplyRows<T>(Block<T>);

impl<T: Float> WithSimd for MultiplyRows<T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self(block) = self;
        let Block { out, a, panels, depth, .. } = block;
        let width = tile_columns::<T, S>();
        // A tile of fewer rows reads zeros in place of the others.
        let n_in_place = if a.column_stride == 1 { out.rows / TILE_ROWS * TILE_ROWS } else { 0 };
        let n_packed = out.rows - n_in_place;
        let packed_len = n_packed.next_multiple_of(TILE_ROWS) * depth;
        let mut memory = Scratch::take::<T>(&ROWS, packed_len);
        let packed: *mut T = memory.start();
        // SAFETY: `packed` has room for these rows, rounded up to whole tiles.
        unsafe { pack(packed, TILE_ROWS, a.from(n_in_place, 0), n_packed, depth) };
        for column in (0..out.columns).step_by(width) {
            let panel = panels.wrapping_add(column * depth).cast_const();
            for row in (0..out.rows).step_by(TILE_ROWS) {
                let place = block.tile_at(row, column, width);
                // SAFETY: the tile and its factors are inside the block, as its maker promises. The
                // strides are known in each branch, which makes the loops shorter.
                unsafe {
                    if row < n_in_place {
                        let rows = Factor { column_stride: 1, ..a.from(row, 0) };
                        multiply_tile(simd, place, rows, panel, depth, (out.scale, out.adds));
                    } else {
                        let start = packed.cast_const().add((row - n_in_place) * depth);
                        let rows = Factor { start, row_stride: 1, column_stride: TILE_ROWS };
                        multiply_tile(simd, place, rows, panel, depth, (out.scale, out.adds));
                    }
                }
            }
        }
    }
}
