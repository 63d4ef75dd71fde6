//! The model on the devices: whole on each of them, or in parts.

use std::ops::Range;

use candle_core::Tensor;
use candle_distributed::{
    mesh::{DeviceMesh, Replica, Uneven},
    plan::ParameterInfo,
    train::{
        AdamW, Checkpoint, DataParallel, Declared, FullyShard, GradientReport, Group, Loss,
        StateDict, Units,
    },
    types::{Seed, WorldSize},
};
use candle_nn::{Optimizer, ParamsAdamW, VarBuilder};

use crate::{
    error::Result,
    train::{
        data::INIT_STREAM,
        model::{self, Config},
        parameters,
        settings::Settings,
        sharding::{self, Sharding},
    },
};

/// The model of a run, on the devices of its mesh.
#[derive(Debug)]
pub(crate) enum Distributed {
    /// Every device has all of it.
    Whole(DataParallel<Units, AdamW>),
    /// Every device has its part.
    Sharded(FullyShard<AdamW>),
}

impl Distributed {
    /// The model of a run before its first step.
    pub(crate) fn new(
        mesh: &DeviceMesh,
        settings: &Settings,
        sharding: Option<&Sharding>,
    ) -> Result<Self> {
        match sharding {
            None => Self::whole(mesh, settings),
            Some(sharding) => Self::sharded(mesh, settings, sharding),
        }
    }

    fn whole(mesh: &DeviceMesh, settings: &Settings) -> Result<Self> {
        let parameters = sharding::parameters_of(settings.config())?;
        let build = build(settings.config());
        let mut builder = DataParallel::builder(mesh, Units::by(model::units(), build))
            .init_with(initial_values(settings, &parameters))
            .uneven(Uneven::Pad);
        if let Some(weights) = &settings.weights {
            builder = builder.weights(&weights.path);
        }
        if let Some(norm) = settings.recipe.max_grad_norm {
            builder = builder.clip_grad_norm(norm);
        }
        if settings.allow_non_finite {
            builder = builder.allow_non_finite();
        }
        Ok(Self::Whole(builder.build(adam)?))
    }

    fn sharded(mesh: &DeviceMesh, settings: &Settings, sharding: &Sharding) -> Result<Self> {
        let parameters = sharding::parameters_of(settings.config())?;
        let world_size = WorldSize::new(mesh.len() as u64)?;
        let mut builder = FullyShard::builder(mesh, build(settings.config()))
            .unit_rules(model::units())
            .plan(sharding.plan(&parameters, world_size)?)
            .keep(sharding.keep.into())
            .init_with(initial_values(settings, &parameters))
            .uneven(Uneven::Pad);
        if let Some(weights) = &settings.weights {
            builder = builder.weights(&weights.path);
        }
        if let Some(norm) = settings.recipe.max_grad_norm {
            builder = builder.clip_grad_norm(norm);
        }
        if sharding.optimizer_in_backward {
            builder = builder.optimizer_in_backward();
        }
        if settings.allow_non_finite {
            builder = builder.allow_non_finite();
        }
        Ok(Self::Sharded(builder.build(adam)?))
    }

    /// Trains on a batch, and returns its loss.
    pub(crate) fn step(&mut self, config: Config, batch: (Tensor, Tensor)) -> Result<f64> {
        let loss = |ctx: &Replica, model: &Units, batch| model::loss(config, ctx, model, batch);
        Ok(match self {
            Self::Whole(model) => model.step(batch, loss)?.loss,
            Self::Sharded(model) => model.step(batch, loss)?.loss,
        })
    }

    /// Compares the gradients of a batch with differences of its loss.
    pub(crate) fn check_gradients<F>(
        &mut self,
        batch: (Tensor, Tensor),
        loss: F,
    ) -> Result<GradientReport>
    where
        F: Fn(&Replica, &Units, (Tensor, Tensor)) -> candle_core::Result<Loss> + Send + Sync,
    {
        Ok(match self {
            Self::Whole(model) => model.check_gradients(batch, loss)?,
            Self::Sharded(model) => model.check_gradients(batch, loss)?,
        })
    }

    pub(crate) fn set_learning_rate(&mut self, learning_rate: f64) -> Result<()> {
        match self {
            Self::Whole(model) => model.set_learning_rate(learning_rate)?,
            Self::Sharded(model) => model.set_learning_rate(learning_rate)?,
        }
        Ok(())
    }

    /// Takes up what a checkpoint has, however its model was distributed.
    pub(crate) fn load(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        match self {
            Self::Whole(model) => model.load(checkpoint)?,
            Self::Sharded(model) => model.load(checkpoint)?,
        }
        Ok(())
    }

    pub(crate) fn state_dict(&self) -> Result<StateDict> {
        Ok(match self {
            Self::Whole(model) => model.state_dict()?,
            Self::Sharded(model) => model.state_dict()?,
        })
    }

    /// Hands each parameter to `f` whole, one after the other in the order of names. Every process
    /// calls it.
    pub(crate) fn for_each_whole(&self, mut f: impl FnMut(Tensor) -> Result<()>) -> Result<()> {
        match self {
            Self::Whole(model) => model.variables().into_values().try_for_each(f),
            Self::Sharded(model) => model.for_each_whole(|_, tensor| f(tensor)),
        }
    }
}

fn build(config: Config) -> impl Fn(VarBuilder<'_>) -> candle_core::Result<()> {
    move |vb| model::build(config, &vb)
}

fn initial_values(
    settings: &Settings,
    parameters: &[ParameterInfo],
) -> impl Fn(&Declared, Range<usize>) -> candle_core::Result<Tensor> + Send + Sync + use<> {
    let names = parameters.iter().map(|info| info.name().to_owned());
    parameters::initial_values(Seed::new(settings.seed).derive(INIT_STREAM), names.collect())
}

/// AdamW with PyTorch's defaults; the learning rate is set before each step.
fn adam(group: Group) -> candle_core::Result<AdamW> {
    AdamW::new(group.vars, ParamsAdamW::default())
}
