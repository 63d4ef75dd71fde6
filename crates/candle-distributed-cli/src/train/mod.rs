//! The training job of the `train` command: a model that learns to continue text, a small one over
//! bytes or that of a Hugging Face folder.

pub(crate) mod agreement;
pub(crate) mod built_in;
pub(crate) mod curve;
pub(crate) mod data;
pub(crate) mod dataset;
pub(crate) mod distributed;
pub(crate) mod finetune;
pub(crate) mod journal;
pub(crate) mod limits;
pub(crate) mod measured;
pub(crate) mod memory;
pub(crate) mod model;
pub(crate) mod model_file;
pub(crate) mod precision;
pub(crate) mod products;
pub(crate) mod recipe;
pub(crate) mod resumed;
pub(crate) mod run_dir;
pub(crate) mod session;
pub(crate) mod settings;
pub(crate) mod sharding;
pub(crate) mod stop;
pub(crate) mod stories;
pub(crate) mod traffic;
pub(crate) mod trainer;
pub(crate) mod validation;
