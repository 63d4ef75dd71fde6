//! Rules, options and roles of a step, for both layouts.

pub(crate) mod batch;
pub(crate) mod inventory;
pub(crate) mod options;
pub(crate) mod rates;
pub(crate) mod roles;
pub(crate) mod rules;
pub(crate) mod update;
