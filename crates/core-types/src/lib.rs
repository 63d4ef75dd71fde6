//! [`Epoch`]: crate::Epoch
//! [`Fingerprint`]: crate::Fingerprint
//! [`Launched`]: crate::Launched
//! [`Launcher`]: crate::Launcher
//! [`Placement`]: crate::Placement
//! [`Rank`]: crate::Rank
//! [`Seed`]: crate::Seed
//! [`WorldSize`]: crate::WorldSize
// The README's links go to the registry. The first of two definitions counts: on this page, where
// those above come first, they go to the crate itself.
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
