//! The model of a run on the devices.

use candle_core::DType;
use candle_distributed::{
    finetune::{
        cost::Sharding,
        data::{BatchTensors, Model},
        spec::Spec,
    },
    mesh::{DeviceMesh, Replica, Uneven},
    train::{
        AdamW, DataParallel, DistributedModel, Evaluation, GradientReport, Group, Lora,
        ModelBuilder, Step, Units,
    },
    types::WorldSize,
};
use candle_nn::{Optimizer, ParamsAdamW, VarBuilder};

use crate::error::Result;

/// The model of a run, on the devices of its mesh.
#[derive(Debug)]
pub(crate) struct Distributed {
    pub(crate) model: Model,
    pub(crate) trained: DistributedModel<Units, AdamW>,
}

impl Distributed {
    /// Returns the model of a run before its first step: every device has all of it, or its part.
    pub(crate) fn new(
        mesh: &DeviceMesh,
        settings: &Spec,
        sharding: Option<&Sharding>,
    ) -> Result<Self> {
        let model = settings.trained_model()?;
        let builder = DataParallel::builder(mesh, build(&model)).by_units(model.units());
        let precision = settings.recipe.precision().dtype();
        let builder =
            with_settings(builder, settings, &model).mixed_precision(precision, DType::F32);
        let builder = match sharding {
            None => builder,
            Some(sharding) => {
                let world_size = WorldSize::new(mesh.len() as u64)?;
                let plan = sharding.plan(&model.parameters()?, world_size)?;
                let builder = builder
                    .fully_shard()
                    .plan(plan)
                    .keep(sharding.keep.into())
                    .prefetch(sharding.prefetch);
                if sharding.optimizer_in_backward {
                    builder.optimizer_in_backward()
                } else {
                    builder
                }
            }
        };
        Ok(Self { trained: builder.build(adamw(settings))?, model })
    }

    /// Trains on a batch.
    pub(crate) fn step(&mut self, batch: BatchTensors) -> Result<Step> {
        let Self { model, trained } = self;
        Ok(trained.step(batch, |_: &Replica, units, batch| model.loss(units, batch))?)
    }

    /// Returns the loss of a batch, of which nothing is learnt.
    pub(crate) fn evaluate(&mut self, batch: BatchTensors) -> Result<Evaluation> {
        let Self { model, trained } = self;
        Ok(trained.evaluate(batch, |_: &Replica, units, batch| model.loss(units, batch))?)
    }

    /// Compares the gradients of a batch with differences of its loss.
    pub(crate) fn check(&mut self, batch: BatchTensors) -> Result<GradientReport> {
        let Self { model, trained } = self;
        Ok(trained.check_gradients(batch, |_: &Replica, units, batch| model.loss(units, batch))?)
    }
}

/// Sets what a run says of a model, whether it is sharded or not.
fn with_settings<'a>(
    builder: ModelBuilder<'a, Units>,
    settings: &Spec,
    model: &Model,
) -> ModelBuilder<'a, Units> {
    let mut builder = builder
        .uneven(Uneven::Pad)
        .init(settings.init_seed())
        .allow_unexpected(model.passed_over());
    if model.lora().is_some() {
        builder = builder.train_only(Lora::PATTERNS).allow_missing(Lora::PATTERNS);
    }
    if let Some(weights) = settings.pretrained() {
        builder = builder.weights(weights);
    }
    if !model.undecayed().is_empty() {
        builder = builder.group(UNDECAYED, model.undecayed());
    }
    if let Some(norm) = settings.recipe.max_grad_norm {
        builder = builder.clip_grad_norm(norm);
    }
    if settings.allow_non_finite { builder.allow_non_finite() } else { builder }
}

fn build(model: &Model) -> impl Fn(VarBuilder<'_>) -> candle_core::Result<()> + use<> {
    let model = model.clone();
    move |vb| model.declare(&vb)
}

/// The group of parameters that are not decayed.
const UNDECAYED: &str = "undecayed";

fn adamw(settings: &Spec) -> impl Fn(Group) -> candle_core::Result<AdamW> + Send + Sync + use<> {
    let usual = settings.recipe.adamw();
    move |group| {
        let weight_decay = if group.name == UNDECAYED { 0. } else { usual.weight_decay };
        AdamW::new(group.vars, ParamsAdamW { weight_decay, ..usual.clone() })
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};
    use candle_distributed::finetune::{Overlong, data::Rows, spec::RunInputs};
    use serde_json::{Value, json};

    use super::*;
    use crate::train::built_in::tests::spec;

    mod golden {
        //! Folders with the losses of transformers.

        use std::{fs, path::PathBuf};

        use candle_distributed::finetune::Folder;
        use serde_json::Value;

        pub(super) const MODELS: [&str; 4] = ["llama", "llama3", "qwen2", "mistral"];

        fn path(model: &str) -> PathBuf {
            let package = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
            package.join("../finetune/tests/golden").join(model)
        }

        pub(super) fn folder(model: &str) -> Folder {
            Folder::open(&path(model)).unwrap()
        }

        /// Returns a JSON file of the folder.
        pub(super) fn json(model: &str, name: &str) -> Value {
            serde_json::from_str(&fs::read_to_string(path(model).join(name)).unwrap()).unwrap()
        }
    }

    #[test]
    fn fine_tuning_has_the_losses_of_transformers() {
        let full = Sharding::default();
        for model in golden::MODELS {
            let expected = &golden::json(model, "expected.json");
            for sharding in [None, Some(&full)] {
                let steps = steps(&fine_tuned(model, 50, &json!({})), sharding, expected);
                assert_near(&expected["finetune"], &steps, [1e-5, 1e-5], model);
            }
        }
    }

    #[test]
    fn halves_learn_as_in_transformers() {
        let expected = &golden::json("llama", "expected.json");
        let settings = fine_tuned("llama", 20, &json!({"dtype": "bf16"}));
        assert_near(&expected["bf16"], &steps(&settings, None, expected), [0.02, 0.05], "halves");
    }

    /// The settings of a run that fine-tunes a model in so many steps.
    fn fine_tuned(model: &str, steps: u64, more: &Value) -> Spec {
        let folder = golden::folder(model);
        let finetune = RunInputs {
            folder: Some(folder.path().to_owned()),
            config: folder.config().unwrap(),
            weights: None,
            init: None,
            tokenizer: String::new(),
            context: 128,
            rows: Rows::Padded,
            overlong: Overlong::Error,
            batch_size: None,
            validation: None,
            merge: false,
        };
        let mut recipe = json!({
            "lr": 1e-3, "lr_schedule": "cosine", "warmup_steps": 5, "min_lr_rate": 0.1,
            "max_grad_norm": 1.0, "weight_decay": 0.01,
        });
        for (option, value) in more.as_object().unwrap() {
            recipe[option] = value.clone();
        }
        let recipe = serde_json::from_value(recipe).unwrap();
        Spec { steps, finetune, recipe, ..spec() }
    }

    /// The loss and the norm of the gradients of each step on the batches that `expected` has.
    fn steps(settings: &Spec, sharding: Option<&Sharding>, expected: &Value) -> Vec<(f64, f64)> {
        let mesh = DeviceMesh::cpu(2).unwrap();
        let mut model = Distributed::new(&mesh, settings, sharding).unwrap();
        let batches = expected["batches"].as_array().unwrap();
        let steps = (0..settings.steps).zip(batches.iter().cycle());
        steps
            .map(|(step, batch)| {
                let rate = settings.recipe.learning_rate(step, settings.steps);
                model.trained.set_learning_rate(rate).unwrap();
                let step = model.step(tensors(batch)).unwrap();
                (step.loss, step.grad_norm)
            })
            .collect()
    }

    /// A batch, of which all tokens but padding are predicted.
    fn tensors(batch: &Value) -> BatchTensors {
        let ids: Vec<Vec<u32>> = serde_json::from_value(batch["input_ids"].clone()).unwrap();
        let lengths: Vec<usize> = serde_json::from_value(batch["lengths"].clone()).unwrap();
        let labels = |(ids, length): (&Vec<u32>, usize)| -> Vec<i64> {
            let real = |(n, &id)| if n < length { i64::from(id) } else { -100 };
            ids.iter().enumerate().map(real).collect()
        };
        let targets: Vec<Vec<i64>> = ids.iter().zip(lengths).map(labels).collect();
        BatchTensors {
            ids: Tensor::new(ids, &Device::Cpu).unwrap(),
            targets: Tensor::new(targets, &Device::Cpu).unwrap(),
            packing: None,
        }
    }

    /// Checks losses and norms of steps, which differ at most by so much.
    fn assert_near(expected: &Value, steps: &[(f64, f64)], most: [f64; 2], what: &str) {
        let numbers =
            |name: &str| -> Vec<f64> { serde_json::from_value(expected[name].clone()).unwrap() };
        let (losses, norms) = (numbers("loss"), numbers("grad_norm"));
        assert_eq!(losses.len(), steps.len(), "{what}");
        for (step, (&(loss, norm), (expected, expected_norm))) in
            steps.iter().zip(losses.iter().zip(norms)).enumerate()
        {
            assert!((loss - expected).abs() < most[0], "{what}, step {step}: {loss}, {expected}");
            let is_near = (norm - expected_norm).abs() < most[1];
            assert!(is_near, "{what}, step {step}: norm {norm}, {expected_norm}");
        }
    }
}
