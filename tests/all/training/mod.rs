//! Custom models: a model that cannot train is rejected by name.

mod rejected;
