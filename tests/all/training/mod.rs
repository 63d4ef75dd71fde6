//! Models of a user's own: they train on any number of devices as on one, or are refused by name.

mod refused;
mod same_losses;
