#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod error;
mod index;
mod rank;
pub mod split;

pub use crate::{
    error::{Error, Result},
    index::{Epoch, Seed},
    rank::{Placement, Rank, WorldSize},
};
