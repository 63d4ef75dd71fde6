#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod balance;
mod error;
mod fingerprint;
pub mod human;
mod index;
mod launch;
mod rank;
mod shuffle;
pub mod split;

pub use crate::{
    error::{Error, Result},
    fingerprint::Fingerprint,
    index::{Epoch, Seed},
    launch::{Launched, Launcher},
    rank::{Placement, Rank, WorldSize},
    shuffle::shuffle,
};
