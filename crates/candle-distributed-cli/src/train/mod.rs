//! The training job of the `train` command: a model that learns to continue text, a small one over
//! bytes or that of a Hugging Face folder.

pub(crate) mod agreement;
pub(crate) mod curve;
pub(crate) mod journal;
pub(crate) mod measured;
pub(crate) mod stop;
