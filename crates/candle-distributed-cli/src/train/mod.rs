//! The parts of `train` that people see: journal, curve, measurements, signals; and the agreement of
//! its processes.

pub(crate) mod agreement;
pub(crate) mod curve;
pub(crate) mod journal;
pub(crate) mod measured;
pub(crate) mod stop;
