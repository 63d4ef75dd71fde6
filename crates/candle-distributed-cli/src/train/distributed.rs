//! The model on the devices: whole on each of them, or in parts.

use std::{ops::Range, path::Path};

use candle_core::{DType, Tensor};
use candle_distributed::{
    mesh::{DeviceMesh, Replica, Uneven},
    train::{
        AdamW, Checkpoint, DataParallel, Declared, FullyShard, GradientReport, Group, Lora, Loss,
        PretrainedFiles, StateDict, Step, Units,
    },
    types::{Seed, WorldSize},
};
use candle_nn::{Optimizer, ParamsAdamW, VarBuilder};

use crate::{
    error::Result,
    train::{
        data::INIT_STREAM,
        model::{self, Transformer},
        parameters,
        settings::Settings,
        sharding::{self, Sharding},
    },
};

/// The model of a run, on the devices of its mesh.
#[derive(Debug)]
pub(crate) struct Distributed {
    transformer: Transformer,
    held: Held,
}

/// What the devices hold of it.
#[derive(Debug)]
pub(crate) enum Held {
    /// Every device has all of it.
    Whole(DataParallel<Units, AdamW>),
    /// Every device has its part.
    Sharded(FullyShard<AdamW>),
}

/// Tells a builder what a run has set. (Those of both kinds have the same methods, and no trait.)
macro_rules! with_settings {
    ($builder:expr, $settings:expr, $transformer:expr) => {{
        let mut builder = $builder.uneven(Uneven::Pad);
        builder = match &$transformer.lora {
            Some(_) => builder
                .init(init_seed($settings))
                .train_only(Lora::PATTERNS)
                .allow_missing(Lora::PATTERNS),
            None => builder.init_with(initial_values($settings, $transformer)?),
        };
        if let Some(weights) = &$settings.weights {
            builder = builder.weights(&weights.path);
        }
        if let Some(norm) = $settings.recipe.max_grad_norm {
            builder = builder.clip_grad_norm(norm);
        }
        if $settings.allow_non_finite {
            builder = builder.allow_non_finite();
        }
        builder
    }};
}

impl Distributed {
    /// The model of a run before its first step.
    pub(crate) fn new(
        mesh: &DeviceMesh,
        settings: &Settings,
        sharding: Option<&Sharding>,
    ) -> Result<Self> {
        let transformer = settings.transformer()?;
        let held = match sharding {
            None => Held::whole(mesh, settings, &transformer)?,
            Some(sharding) => Held::sharded(mesh, settings, &transformer, sharding)?,
        };
        Ok(Self { transformer, held })
    }

    /// Trains on a batch.
    pub(crate) fn step(&mut self, batch: (Tensor, Tensor)) -> Result<Step> {
        let Self { transformer, held } = self;
        let transformer = &*transformer;
        let loss =
            |ctx: &Replica, model: &Units, batch| model::loss(transformer, ctx, model, batch);
        Ok(match held {
            Held::Whole(model) => model.step(batch, loss)?,
            Held::Sharded(model) => model.step(batch, loss)?,
        })
    }

    /// Compares the gradients of a batch with differences of its loss.
    pub(crate) fn check(&mut self, batch: (Tensor, Tensor)) -> Result<GradientReport> {
        let transformer = self.transformer.clone();
        let loss =
            |ctx: &Replica, model: &Units, batch| model::loss(&transformer, ctx, model, batch);
        self.check_gradients(batch, loss)
    }

    /// Compares the gradients of a loss with differences of it.
    pub(crate) fn check_gradients<F>(
        &mut self,
        batch: (Tensor, Tensor),
        loss: F,
    ) -> Result<GradientReport>
    where
        F: Fn(&Replica, &Units, (Tensor, Tensor)) -> candle_core::Result<Loss> + Send + Sync,
    {
        Ok(match &mut self.held {
            Held::Whole(model) => model.check_gradients(batch, loss)?,
            Held::Sharded(model) => model.check_gradients(batch, loss)?,
        })
    }

    pub(crate) fn set_learning_rate(&mut self, learning_rate: f64) -> Result<()> {
        match &mut self.held {
            Held::Whole(model) => model.set_learning_rate(learning_rate)?,
            Held::Sharded(model) => model.set_learning_rate(learning_rate)?,
        }
        Ok(())
    }

    /// Takes up what a checkpoint has, however its model was distributed.
    pub(crate) fn load(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        match &mut self.held {
            Held::Whole(model) => model.load(checkpoint)?,
            Held::Sharded(model) => model.load(checkpoint)?,
        }
        Ok(())
    }

    pub(crate) fn state_dict(&self) -> Result<StateDict> {
        Ok(match &self.held {
            Held::Whole(model) => model.state_dict()?,
            Held::Sharded(model) => model.state_dict()?,
        })
    }

    /// Hands each parameter to `f` whole, one after the other in the order of names. Every process
    /// calls it.
    pub(crate) fn for_each_whole(&self, mut f: impl FnMut(Tensor) -> Result<()>) -> Result<()> {
        match &self.held {
            Held::Whole(model) => model.variables().into_values().try_for_each(f),
            Held::Sharded(model) => model.for_each_whole(|_, tensor| f(tensor)),
        }
    }

    /// Writes files into a folder. Every process calls it, and the first one writes.
    pub(crate) fn save_pretrained(&self, folder: &Path, files: PretrainedFiles) -> Result<()> {
        match &self.held {
            Held::Whole(model) => model.save_pretrained(folder, files)?,
            Held::Sharded(model) => model.save_pretrained(folder, files)?,
        }
        Ok(())
    }

    /// The adapters that are trained, if the model itself is not.
    pub(crate) fn adapters(&self) -> Option<&Lora> {
        self.transformer.lora.as_ref()
    }
}

impl Held {
    fn whole(mesh: &DeviceMesh, settings: &Settings, transformer: &Transformer) -> Result<Self> {
        let model = Units::by(model::units(), build(transformer));
        let builder = DataParallel::builder(mesh, model);
        let builder = with_settings!(builder, settings, transformer);
        Ok(Self::Whole(builder.dtype(transformer.precision.dtype()).build(adam)?))
    }

    fn sharded(
        mesh: &DeviceMesh,
        settings: &Settings,
        transformer: &Transformer,
        sharding: &Sharding,
    ) -> Result<Self> {
        let parameters = sharding::parameters_of(transformer)?;
        let world_size = WorldSize::new(mesh.len() as u64)?;
        let mut builder = FullyShard::builder(mesh, build(transformer))
            .unit_rules(model::units())
            .plan(sharding.plan(&parameters, world_size)?)
            .keep(sharding.keep.into())
            .prefetch(sharding.prefetch);
        if sharding.optimizer_in_backward {
            builder = builder.optimizer_in_backward();
        }
        let builder = with_settings!(builder, settings, transformer);
        let builder = builder.mixed_precision(transformer.precision.dtype(), DType::F32);
        Ok(Self::Sharded(builder.build(adam)?))
    }
}

fn build(transformer: &Transformer) -> impl Fn(VarBuilder<'_>) -> candle_core::Result<()> + use<> {
    let transformer = transformer.clone();
    move |vb| transformer.build(&vb)
}

fn init_seed(settings: &Settings) -> Seed {
    Seed::new(settings.seed).derive(INIT_STREAM)
}

fn initial_values(
    settings: &Settings,
    transformer: &Transformer,
) -> Result<impl Fn(&Declared, Range<usize>) -> candle_core::Result<Tensor> + Send + Sync + use<>> {
    let parameters = sharding::parameters_of(transformer)?;
    let names = parameters.iter().map(|info| info.name().to_owned());
    let dtype = transformer.precision.dtype();
    Ok(parameters::initial_values(init_seed(settings), names.collect(), dtype))
}

#[cfg(test)]
impl Distributed {
    /// A model that was made in another way.
    pub(crate) fn of(transformer: Transformer, held: Held) -> Self {
        Self { transformer, held }
    }
}

/// AdamW with PyTorch's defaults; the learning rate is set before each step.
fn adam(group: Group) -> candle_core::Result<AdamW> {
    AdamW::new(group.vars, ParamsAdamW::default())
}
