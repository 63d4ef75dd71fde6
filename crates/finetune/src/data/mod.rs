//! Batches of examples, and the trained model.

pub(crate) mod dataset;
pub(crate) mod model;
pub(crate) mod schedule;

pub use self::{
    dataset::{BatchTensors, DataSet, RowPacking, Rows},
    model::{Model, ModelSizes},
    schedule::{BUCKET_WIDTH, BatchSchedule, Batching, ScheduledStep, default_max_tokens},
};
