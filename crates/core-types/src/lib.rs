//! [`Epoch`]: crate::Epoch
//! [`Fingerprint`]: crate::Fingerprint
//! [`LaunchEnv`]: crate::LaunchEnv
//! [`Launcher`]: crate::Launcher
//! [`Placement`]: crate::Placement
//! [`Rank`]: crate::Rank
//! [`Seed`]: crate::Seed
//! [`WorldSize`]: crate::WorldSize
// The README links to docs.rs. Of two definitions of a link the first wins, so on this page the definitions above
// replace the README's and point into this crate.
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

#[doc(hidden)]
pub mod balance;
#[cfg(feature = "files")]
pub mod files;
mod fingerprint;
#[doc(hidden)]
pub mod human;
mod launch;
mod rank;
mod seed;
mod shuffle;
pub mod split;

pub use crate::{
    fingerprint::Fingerprint,
    launch::{Error as LaunchError, LaunchEnv, Launcher},
    rank::{Error, Placement, Rank, Result, WorldSize},
    seed::{Epoch, Seed},
    shuffle::shuffle,
};
