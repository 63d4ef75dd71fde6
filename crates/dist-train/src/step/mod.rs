//! What a step of a model goes by, however its variables are kept.

pub(crate) mod batch;
pub(crate) mod inventory;
pub(crate) mod options;
pub(crate) mod rates;
pub(crate) mod roles;
pub(crate) mod rules;
pub(crate) mod update;
