//! The model of a run on its devices.

use candle_core::DType;
use candle_nn::{Optimizer, ParamsAdamW, VarBuilder};
use core_types::WorldSize;
use dist_train::{
    AdamW, DataParallel, DistributedModel, Evaluation, GradientReport, Group, Lora, ModelBuilder,
    Step, Units,
};
use pmap_mesh::{DeviceMesh, Replica, Uneven};

use crate::{
    cost::sharding::Sharding,
    data::{dataset::BatchTensors, model::Model},
    error::Result,
    spec::Spec,
};

/// The model of a run, on the devices of its mesh.
#[derive(Debug)]
pub(super) struct TrainedModel {
    pub(super) model: Model,
    pub(super) trained: DistributedModel<Units, AdamW>,
}

impl TrainedModel {
    /// Builds the model of a run before its first step. Every device has the whole model, or one shard
    /// with `sharding`.
    pub(super) fn new(mesh: &DeviceMesh, spec: &Spec, sharding: Option<&Sharding>) -> Result<Self> {
        let model = spec.trained_model()?;
        let builder = DataParallel::builder(mesh, constructor(&model)).by_units(model.units());
        let precision = spec.recipe.precision().dtype();
        let builder = with_spec(builder, spec, &model).mixed_precision(precision, DType::F32);
        let builder = match sharding {
            None => builder,
            Some(sharding) => {
                let world_size = WorldSize::new(mesh.len() as u64)?;
                let builder = builder
                    .fully_shard()
                    .plan(sharding.plan(&model.parameters()?, world_size)?)
                    .keep(sharding.keep.into())
                    .prefetch(sharding.prefetch);
                if sharding.optimizer_in_backward {
                    builder.optimizer_in_backward()
                } else {
                    builder
                }
            }
        };
        Ok(Self { trained: builder.build(adamw(spec))?, model })
    }

    /// Trains on the micro-batches of a step, and returns the mean loss over all of them.
    ///
    /// The mesh gets whole batches and splits them. The order of sequences and the batches therefore do
    /// not depend on the number of devices, as they would with a sampler per replica.
    pub(super) fn step(
        &mut self,
        mut batches: Vec<BatchTensors>,
        learning_rate: f64,
    ) -> Result<Step> {
        let Self { model, trained } = self;
        trained.set_learning_rate(learning_rate)?;
        let loss = |_: &Replica, units: &Units, batch| model.loss(units, batch);
        #[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
        let last = batches.pop().expect("a step has at least one batch");
        for batch in batches {
            trained.accumulate(batch, loss)?;
        }
        Ok(trained.step(last, loss)?)
    }

    /// Returns the loss of a batch, without updating the model.
    pub(super) fn evaluate(&mut self, batch: BatchTensors) -> Result<Evaluation> {
        let Self { model, trained } = self;
        Ok(trained.evaluate(batch, |_: &Replica, units, batch| model.loss(units, batch))?)
    }

    /// Compares the gradients of a batch with finite differences of the loss.
    pub(super) fn check(&mut self, batch: BatchTensors) -> Result<GradientReport> {
        let Self { model, trained } = self;
        Ok(trained.check_gradients(batch, |_: &Replica, units, batch| model.loss(units, batch))?)
    }
}

/// Sets the options of the run that replicated and sharded models have in common.
fn with_spec<'a>(
    builder: ModelBuilder<'a, Units>,
    spec: &Spec,
    model: &Model,
) -> ModelBuilder<'a, Units> {
    let mut builder = builder
        .uneven(Uneven::Pad)
        .init(spec.init_seed())
        .allow_unexpected(model.unexpected_weights());
    if model.lora().is_some() {
        builder = builder.train_only(Lora::PATTERNS).allow_missing(Lora::PATTERNS);
    }
    if let Some(weights) = spec.pretrained() {
        builder = builder.weights(weights);
    }
    if !model.undecayed().is_empty() {
        builder = builder.group(UNDECAYED, model.undecayed());
    }
    if let Some(norm) = spec.recipe.max_grad_norm {
        builder = builder.clip_grad_norm(norm);
    }
    if spec.allow_non_finite { builder.allow_non_finite() } else { builder }
}

fn constructor(model: &Model) -> impl Fn(VarBuilder<'_>) -> candle_core::Result<()> + use<> {
    let model = model.clone();
    move |vb| model.declare(&vb)
}

/// The name of the group of parameters without weight decay.
const UNDECAYED: &str = "undecayed";

fn adamw(spec: &Spec) -> impl Fn(Group) -> candle_core::Result<AdamW> + Send + Sync + use<> {
    let defaults = spec.recipe.adamw();
    move |group| {
        let weight_decay = if group.name == UNDECAYED { 0. } else { defaults.weight_decay };
        AdamW::new(group.vars, ParamsAdamW { weight_decay, ..defaults.clone() })
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        data::dataset::Rows,
        golden,
        spec::{RunInputs, tests::spec},
        text::examples::Overlong,
    };

    #[test]
    fn fine_tuning_has_the_losses_of_transformers() {
        let sharding = Some(Sharding::default());
        // The head of qwen2 is tied, and its projections have biases. transformers trains phi3_longrope
        // with the frequencies of each batch's width, and a run has one context.
        let families = golden::FAMILIES.into_iter().filter(|model| *model != "phi3_longrope");
        for model in ["llama", "qwen2"].into_iter().chain(families) {
            let expected = &golden::json(model, "expected.json");
            let settings = fine_tuned(model, 50, &json!({}));
            for sharding in [None, sharding.as_ref()] {
                let steps = steps(&settings, sharding, expected);
                assert_near(&expected["finetune"], &steps, [1e-5, 5e-5], model);
            }
        }
    }

    #[test]
    fn micro_batches_have_the_losses_of_one_batch() {
        let expected = &golden::json("llama", "expected.json");
        let settings = fine_tuned("llama", 50, &json!({}));
        let steps = steps_in(&settings, Some(&Sharding::default()), expected, pairs_of_rows);
        assert_near(&expected["finetune"], &steps, [1e-5, 1e-5], "pairs");
    }

    /// Returns micro-batches with a row for each of the two devices.
    #[expect(clippy::needless_pass_by_value, reason = "a split of a batch replaces it")]
    fn pairs_of_rows(batch: BatchTensors) -> Vec<BatchTensors> {
        let pair = |n| BatchTensors {
            ids: batch.ids.narrow(0, n, 2).unwrap(),
            targets: batch.targets.narrow(0, n, 2).unwrap(),
            packing: None,
        };
        (0..batch.ids.dim(0).unwrap()).step_by(2).map(pair).collect()
    }

    #[test]
    fn halves_learn_as_in_transformers() {
        let families = golden::FAMILIES.into_iter().filter(|model| *model != "phi3_longrope");
        for model in ["llama"].into_iter().chain(families) {
            let expected = &golden::json(model, "expected.json");
            let settings = fine_tuned(model, 20, &json!({"dtype": "bf16"}));
            assert_near(&expected["bf16"], &steps(&settings, None, expected), [0.03, 0.2], model);
        }
    }

    /// Describes a run that fine-tunes a model.
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
            accumulate: None,
            max_tokens_per_batch: None,
            validation: None,
            merge: false,
            mixture: Vec::new(),
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

    /// Trains on the batches of `expected`, and returns the loss and the gradient norm of each step.
    fn steps(spec: &Spec, sharding: Option<&Sharding>, expected: &Value) -> Vec<(f64, f64)> {
        steps_in(spec, sharding, expected, |batch| vec![batch])
    }

    /// Like [`steps`], with the micro-batches that `split` makes of a batch.
    fn steps_in(
        spec: &Spec,
        sharding: Option<&Sharding>,
        expected: &Value,
        split: fn(BatchTensors) -> Vec<BatchTensors>,
    ) -> Vec<(f64, f64)> {
        let mesh = DeviceMesh::cpu(2).unwrap();
        let mut model = TrainedModel::new(&mesh, spec, sharding).unwrap();
        let batches = expected["batches"].as_array().unwrap();
        let steps = (0..spec.steps).zip(batches.iter().cycle());
        steps
            .map(|(step, batch)| {
                let rate = spec.recipe.learning_rate(step, spec.steps);
                let step = model.step(split(tensors(batch)), rate).unwrap();
                (step.loss, step.grad_norm)
            })
            .collect()
    }

    /// Makes a batch whose targets are all tokens but padding.
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
