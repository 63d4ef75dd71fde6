//! What many tests share: stacks of small layers, batches for them, and what is said of models.

use std::{fmt, ops::Deref};

use candle_core::{Device, Result, Tensor};
use candle_nn::{Linear, Module, VarBuilder, linear};
use dist_train::{
    Checkpoint, Checkpoints, DataParallel, DistributedModel, Error, ModelBuilder,
    StatefulOptimizer, TrainingError, UnitRules, Units,
};
use pmap_mesh::{DeviceMesh, Replica};
use tempfile::TempDir;

/// Layers of three features, each of which is a unit.
pub(crate) fn layers<const N: usize>(vb: VarBuilder<'_>) -> Result<Vec<Linear>> {
    (0..N).map(|layer| linear(3, 3, vb.pp(layer))).collect()
}

/// A replicated model of three such units.
pub(crate) fn replicated(mesh: &DeviceMesh) -> ModelBuilder<'_, Units> {
    DataParallel::builder(mesh, layers::<3>).by_units(UnitRules::new())
}

/// Both layouts of a model: replicated, and sharded.
pub(crate) const LAYOUTS: [for<'a> fn(ModelBuilder<'a, Units>) -> ModelBuilder<'a, Units>; 2] =
    [whole, cut];

fn whole(builder: ModelBuilder<'_, Units>) -> ModelBuilder<'_, Units> {
    builder
}

fn cut(builder: ModelBuilder<'_, Units>) -> ModelBuilder<'_, Units> {
    builder.fully_shard()
}

/// Rows of three numbers.
pub(crate) fn input(rows: usize) -> Tensor {
    let items = Tensor::arange(0_f32, (rows * 3) as f32, &Device::Cpu).unwrap();
    items.sin().unwrap().reshape((rows, 3)).unwrap()
}

/// What a unit does with its layer.
pub(crate) fn layer(vb: VarBuilder<'_>, x: &Tensor) -> Result<Tensor> {
    linear(3, 3, vb)?.forward(x)?.tanh()
}

/// A loss of units that are entered in turn.
pub(crate) fn through(
    units: &'static [&'static str],
) -> impl Fn(&Replica, &Units, Tensor) -> Result<Tensor> + Send + Sync {
    move |_, model, x| {
        let enter = |x, unit: &&str| model.unit(unit, &x, layer);
        units.iter().try_fold(x, enter)?.sqr()?.mean_all()
    }
}

/// A checkpoint in a folder of its own.
pub(crate) struct Saved {
    checkpoint: Checkpoint,
    _folder: TempDir,
}

impl Deref for Saved {
    type Target = Checkpoint;

    fn deref(&self) -> &Checkpoint {
        &self.checkpoint
    }
}

/// Saves a model.
pub(crate) fn saved<M, O: StatefulOptimizer>(
    mesh: &DeviceMesh,
    model: &DistributedModel<M, O>,
) -> Saved {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path());
    checkpoints.save(mesh, model.steps(), &model.state_dict().unwrap(), &()).unwrap();
    Saved { checkpoint: checkpoints.latest().unwrap().unwrap(), _folder: folder }
}

pub(crate) fn refused<T: fmt::Debug>(outcome: dist_train::Result<T>) -> TrainingError {
    match outcome {
        Err(Error::Training(error)) => error,
        other => panic!("{other:?}"),
    }
}

pub(crate) fn bits(tensor: &Tensor) -> Vec<u32> {
    let items: Vec<f32> = tensor.flatten_all().unwrap().to_vec1().unwrap();
    items.into_iter().map(f32::to_bits).collect()
}

/// Asserts that two models have the same parameters, to the bit.
#[track_caller]
pub(crate) fn assert_same<M, N, O, P>(
    found: &DistributedModel<M, O>,
    expected: &DistributedModel<N, P>,
) {
    for (name, expected) in expected.parameters().unwrap() {
        assert_eq!(bits(&found.parameter(&name).unwrap()), bits(&expected), "{name}");
    }
}
