//! Models of a user's own: those that cannot train are refused by name.

mod refused;
