#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod error;
mod index;
mod launch;
mod rank;
pub mod split;

pub use crate::{
    error::{Error, Result},
    index::{Epoch, Seed},
    launch::{Launched, Launcher},
    rank::{Placement, Rank, WorldSize},
};
