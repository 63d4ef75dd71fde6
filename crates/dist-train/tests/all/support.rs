//! Shared helpers: stacks of small layers, batches, checkpoints and assertions.

use std::{fmt, ops::Deref};

use candle_core::{Device, Result, Tensor};
use candle_nn::{Linear, Module, VarBuilder, linear};
use dist_train::{
    Checkpoint, Checkpoints, DataParallel, DistributedModel, Error, ModelBuilder,
    StatefulOptimizer, TrainingError, UnitRules, Units,
};
use pmap_mesh::{DeviceMesh, Replica};
use tempfile::TempDir;

/// Builds layers of three features; each layer is a unit.
pub(crate) fn layers<const N: usize>(vb: VarBuilder<'_>) -> Result<Vec<Linear>> {
    (0..N).map(|layer| linear(3, 3, vb.pp(layer))).collect()
}

/// Returns the builder of a replicated model of three units.
pub(crate) fn replicated(mesh: &DeviceMesh) -> ModelBuilder<'_, Units> {
    DataParallel::builder(mesh, layers::<3>).by_units(UnitRules::new())
}

/// Both layouts of a model: replicated and sharded.
pub(crate) const LAYOUTS: [for<'a> fn(ModelBuilder<'a, Units>) -> ModelBuilder<'a, Units>; 2] =
    [replicated_layout, sharded_layout];

fn replicated_layout(builder: ModelBuilder<'_, Units>) -> ModelBuilder<'_, Units> {
    builder
}

fn sharded_layout(builder: ModelBuilder<'_, Units>) -> ModelBuilder<'_, Units> {
    builder.fully_shard()
}

/// Returns rows of three numbers.
pub(crate) fn input(rows: usize) -> Tensor {
    let items = Tensor::arange(0_f32, (rows * 3) as f32, &Device::Cpu).unwrap();
    items.sin().unwrap().reshape((rows, 3)).unwrap()
}

/// Runs a unit: a linear layer and tanh.
pub(crate) fn layer(vb: VarBuilder<'_>, x: &Tensor) -> Result<Tensor> {
    linear(3, 3, vb)?.forward(x)?.tanh()
}

/// Returns a loss that enters units in order.
pub(crate) fn through(
    units: &'static [&'static str],
) -> impl Fn(&Replica, &Units, Tensor) -> Result<Tensor> + Send + Sync {
    move |_, model, x| {
        units.iter().try_fold(x, |x, unit: &&str| model.unit(unit, &x, layer))?.sqr()?.mean_all()
    }
}

/// A checkpoint in a temporary folder.
pub(crate) struct SavedModel {
    checkpoint: Checkpoint,
    _folder: TempDir,
}

impl Deref for SavedModel {
    type Target = Checkpoint;

    fn deref(&self) -> &Checkpoint {
        &self.checkpoint
    }
}

/// Saves a model to a temporary folder.
pub(crate) fn saved<M, O: StatefulOptimizer>(
    mesh: &DeviceMesh,
    model: &DistributedModel<M, O>,
) -> SavedModel {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path());
    checkpoints.save(mesh, model.steps(), &model.state_dict().unwrap(), &()).unwrap();
    SavedModel { checkpoint: checkpoints.latest().unwrap().unwrap(), _folder: folder }
}

/// Returns the training error of a rejected call.
pub(crate) fn refused<T: fmt::Debug>(outcome: dist_train::Result<T>) -> TrainingError {
    match outcome {
        Err(Error::Training(error)) => error,
        other => panic!("{other:?}"),
    }
}

/// Returns the option and the message of a rejected option.
#[track_caller]
pub(crate) fn refused_option<T: fmt::Debug>(
    outcome: dist_train::Result<T>,
) -> (&'static str, String) {
    match refused(outcome) {
        TrainingError::Option { option, reason } => (option, reason),
        other => panic!("{other:?}"),
    }
}

pub(crate) fn bits(tensor: &Tensor) -> Vec<u32> {
    let items: Vec<f32> = tensor.flatten_all().unwrap().to_vec1().unwrap();
    items.into_iter().map(f32::to_bits).collect()
}

/// Asserts that two models have bitwise equal parameters.
#[track_caller]
pub(crate) fn assert_same<M, N, O, P>(
    found: &DistributedModel<M, O>,
    expected: &DistributedModel<N, P>,
) {
    for (name, expected) in expected.parameters().unwrap() {
        assert_eq!(bits(&found.parameter(&name).unwrap()), bits(&expected), "{name}");
    }
}
