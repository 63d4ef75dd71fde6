//! Laws that hold for every input: exhaustively on small grids, by random cases beyond.

mod batch;
mod plan;
mod sampler;
