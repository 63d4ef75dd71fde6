//! The folder of a run: metrics, validations, checkpoints and models.

mod damage;
pub(crate) mod folder;
pub(crate) mod model;
mod model_files;
pub(crate) mod resumed;
pub(crate) mod validation_set;
pub(crate) mod validations;

pub use self::{
    folder::{checkpoints, is_complete, metrics, sample_in},
    model::{model_folder, open_generator},
    validations::{ValidationPoint, best_validation, validations},
};
