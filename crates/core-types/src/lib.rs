#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod balance;
mod fingerprint;
pub mod human;
mod index;
mod launch;
mod rank;
mod shuffle;
pub mod split;

pub use crate::{
    fingerprint::Fingerprint,
    index::{Epoch, Seed},
    launch::{Error as LaunchError, Launched, Launcher},
    rank::{Error, Placement, Rank, Result, WorldSize},
    shuffle::shuffle,
};
