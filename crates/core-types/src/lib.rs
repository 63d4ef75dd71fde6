//! [`Epoch`]: crate::Epoch
//! [`Fingerprint`]: crate::Fingerprint
//! [`LaunchEnv`]: crate::LaunchEnv
//! [`Launcher`]: crate::Launcher
//! [`Placement`]: crate::Placement
//! [`Rank`]: crate::Rank
//! [`Seed`]: crate::Seed
//! [`WorldSize`]: crate::WorldSize
// The README's links go to the registry. The first of two definitions counts: on this page, where
// those above come first, they go to the crate itself.
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

#[doc(hidden)]
pub mod balance;
#[cfg(feature = "files")]
pub mod files;
mod fingerprint;
#[doc(hidden)]
pub mod human;
mod index;
mod launch;
mod rank;
mod shuffle;
pub mod split;

pub use crate::{
    fingerprint::Fingerprint,
    index::{Epoch, Seed},
    launch::{Error as LaunchError, LaunchEnv, Launcher},
    rank::{Error, Placement, Rank, Result, WorldSize},
    shuffle::shuffle,
};
