//! The folder of a run: metrics, validations, checkpoints and models.

mod damage;
pub(crate) mod folder;
pub(crate) mod model;
mod model_files;
pub(crate) mod resumed;
pub(crate) mod validation_set;
pub(crate) mod validations;

pub use self::{
    folder::{
        RunFolder, RunSnapshot, adapter_in, best_in, check_empty, checkpoints, claim_number,
        contents, folder_beside, is_complete, metrics, numbered, product_of, sample_in,
    },
    model::{model_folder, open_generator},
    resumed::ResumePoint,
    validation_set::ValidationSet,
    validations::{ValidationPoint, best_validation, validations},
};
