//! The parts of `train` that print and draw (journal, curve, comparison), its stop signals, and the
//! agreement of its processes.

pub(crate) mod agreement;
pub(crate) mod comparison;
pub(crate) mod curve;
pub(crate) mod journal;
pub(crate) mod stop;
