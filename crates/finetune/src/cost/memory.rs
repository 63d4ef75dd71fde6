//! Prediction of the memory of a training process.
//!
//! Parameters, gradients and optimizer state come from the cost of a plan; the rest is what a batch adds at
//! the moments of a step when memory may peak. Devices reach each moment at about the same time, because
//! they agree on the loss between the passes, so each counts on all devices.

use core_types::{Rank, WorldSize};
use dyn_batch::Batch;
use fsdp_plan::{
    ParameterInfo, ShardingPlan,
    cost::{PlanCost, RankCost},
    strategy::{Full, ShardingStrategy},
};

use crate::{
    cost::{
        limits::MemoryLimit,
        sharding::{self, Keep, Sharding},
        traffic::StepTraffic,
    },
    data::model::ModelSizes,
    error::Result,
    models::Precision,
};

/// Buffers of kernels and bookkeeping.
const KERNEL_BYTES: u128 = 10 << 20;

/// The gaps that the allocator leaves between tensors take a tenth of the tensors' bytes.
const GAP_DIVISOR: u128 = 10;

/// Bytes of a number in single precision.
const SINGLE: u128 = size_of::<f32>() as u128;

/// A name and its bytes.
type Term = (&'static str, u128);

/// The predicted peak of a process's memory, term by term.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryPrediction {
    /// Names and bytes.
    pub terms: Vec<(&'static str, u64)>,
    /// Bytes of the devices' blocks of logits. A smaller tensor that outlives a step may lie where one of
    /// them was, and the next step then takes new memory for it.
    pub movable_bytes: u64,
}

impl MemoryPrediction {
    /// The error that limits allow for beside movable tensors, in percent of the prediction. The peaks of
    /// 292 random dry runs (glibc, two cores of an AMD EPYC; up to 16 layers, 8 devices and 152,000 tokens)
    /// were 0.49 to 1.11 of it, half of them above 0.9. `predicted_memory_bounds_the_peak` in the tests of
    /// the command line measures new ones.
    const LARGEST_ERROR_PERCENT: u64 = 15;

    /// Returns the sum of all terms.
    pub fn total(&self) -> u64 {
        self.terms.iter().fold(0, |total, (_, bytes)| total.saturating_add(*bytes))
    }

    /// Returns the most bytes that the process may take: the prediction, a second place for movable
    /// tensors, and the largest known error. Limits are compared with it.
    pub fn upper_bound(&self) -> u64 {
        let total = self.total();
        let error = total / 100 * Self::LARGEST_ERROR_PERCENT;
        total.saturating_add(error).saturating_add(self.movable_bytes)
    }
}

/// The work of a process, as input of predictions.
#[derive(Clone, Copy, Debug)]
pub struct Workload<'a> {
    /// Sizes of the model.
    pub(crate) sizes: ModelSizes,
    /// Compute type of the model.
    pub(crate) precision: Precision,
    /// Parameters of the model.
    pub(crate) parameters: &'a [ParameterInfo],
    /// The sharding, or `None` if every device has the whole model.
    pub(crate) sharding: Option<&'a Sharding>,
    /// Micro-batches of an epoch and of a validation, each with the batches of all ranks.
    pub(crate) micro_batches: &'a [Vec<Batch>],
    /// Whether sequences share rows, so that attention needs masks.
    pub(crate) is_packed: bool,
    /// Whether a step has several micro-batches, so that gradients are kept between them.
    pub(crate) accumulates: bool,
    /// Whether gradients are checked before training, with all gradients in memory.
    pub check: bool,
    /// Number of devices of the run.
    pub(crate) world_size: u64,
    /// First rank of the process, and one past its last rank.
    pub(crate) ranks: (u64, u64),
    /// Bytes before training: the program, the text and its batches.
    pub base_bytes: u64,
}

impl Workload<'_> {
    /// Returns the planned traffic of the first rank in a step, or `None` if the run is not sharded.
    ///
    /// # Errors
    ///
    /// [`Error::Plan`](crate::Error::Plan) if the parameters cannot be sharded as requested.
    pub fn planned_traffic(&self) -> Result<Option<StepTraffic>> {
        let Some(sharding) = self.sharding else { return Ok(None) };
        let plan = sharding.plan(self.parameters, WorldSize::new(self.world_size)?)?;
        let schedule = plan.schedule(&sharding::cost_model(Some(sharding), self.precision))?;
        Ok(Some(schedule.handed_over(Rank::ZERO)?.into()))
    }

    /// Predicts the memory of the process.
    ///
    /// # Errors
    ///
    /// [`Error::Plan`](crate::Error::Plan) if the parameters cannot be sharded as requested.
    pub fn predict(&self) -> Result<MemoryPrediction> {
        let state = match self.sharding {
            None => self.replicated_state()?,
            Some(sharding) => self.sharded_state(sharding)?,
        };
        let moments = self.moments(&state);
        let largest = moments.into_iter().max_by_key(|moment| sum(moment)).unwrap_or_default();
        let tensors: Vec<Term> =
            state.stored.into_iter().chain(largest).filter(|&(_, bytes)| bytes > 0).collect();
        let gaps = sum(&tensors) / GAP_DIVISOR;
        let mut terms = vec![("program, text and batches", u128::from(self.base_bytes))];
        terms.extend(tensors);
        terms.extend([("kernels", KERNEL_BYTES), ("gaps between tensors", gaps)]);
        let fit = |bytes| u64::try_from(bytes).unwrap_or(u64::MAX);
        Ok(MemoryPrediction {
            terms: terms.into_iter().map(|(name, bytes)| (name, fit(bytes))).collect(),
            movable_bytes: fit(self.n_devices() * self.block_bytes()),
        })
    }

    /// Predicts the memory of the largest process, if all processes have equal numbers of ranks.
    ///
    /// # Errors
    ///
    /// The errors of [`predict`](Self::predict).
    #[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
    pub fn predict_largest(&self) -> Result<MemoryPrediction> {
        let (start, end) = self.ranks;
        let n_ranks = end - start;
        let mut predictions = Vec::new();
        for first in (0..self.world_size).filter(|first| first.is_multiple_of(n_ranks)) {
            let process = Self { ranks: (first, first + n_ranks), ..*self };
            predictions.push(process.predict()?);
        }
        let largest = predictions.into_iter().max_by_key(MemoryPrediction::total);
        Ok(largest.expect("a world has ranks"))
    }

    /// Returns the bytes that the process would save without clipping, because a sharded model would
    /// then update each unit in the backward pass. Returns `None` if that saves nothing: it does so already, or
    /// accumulated gradients keep it from doing so.
    ///
    /// # Errors
    ///
    /// The errors of [`predict`](Self::predict).
    pub fn clipping_bytes(&self) -> Result<Option<u64>> {
        let clips = |sharding: &&Sharding| !sharding.optimizer_in_backward && !self.accumulates;
        let Some(sharding) = self.sharding.filter(clips) else { return Ok(None) };
        let unclipped = Sharding { optimizer_in_backward: true, ..sharding.clone() };
        let unclipped = Workload { sharding: Some(&unclipped), ..*self }.predict()?;
        let saved = self.predict()?.total().saturating_sub(unclipped.total());
        Ok((saved > 0).then_some(saved))
    }

    /// Returns the bytes to generate text with the trained model, if they exceed the memory of training
    /// or `limit`, and `None` otherwise. Generation needs the full model in single precision.
    ///
    /// # Errors
    ///
    /// The errors of [`predict`](Self::predict).
    pub fn too_large_to_generate(&self, limit: Option<&MemoryLimit>) -> Result<Option<u64>> {
        let numel: u64 = self.parameters.iter().map(ParameterInfo::numel).sum();
        let needed = numel.saturating_mul(2 * size_of::<f32>() as u64);
        let training_bytes = self.predict()?.total();
        let available = limit.map_or(training_bytes, |limit| training_bytes.min(limit.share()));
        Ok((needed > available).then_some(needed))
    }

    /// Returns the bytes of an unsharded model. The slots of a process share its variables, and divide the
    /// optimizer state and the sums of gradients among them.
    fn replicated_state(&self) -> Result<ModelState> {
        let cost = self.cost(&Full::default().plan(self.parameters, WorldSize::ONE)?, None)?;
        // A world has at least one rank.
        let only = &cost.ranks[0];
        let (devices, trained) = (self.n_devices(), self.trained_numel());
        let copies = self.parameters.iter().map(|parameter| self.half_copy_bytes(parameter)).sum();
        let singles = devices * trained * SINGLE;
        // The only device's gradients are their own sum.
        let sums = if devices > 1 { trained * SINGLE } else { 0 };
        // Gradients of earlier micro-batches are added before the sum over devices.
        let (earlier, sums) = if self.accumulates { (singles, 0) } else { (0, sums) };
        Ok(ModelState {
            stored: vec![
                ("parameters", u128::from(only.storage_bytes)),
                ("half-precision copies", copies),
                ("optimizer state", only.optimizer_bytes.into()),
                ("gradients of earlier micro-batches", earlier),
            ],
            gradients: devices * trained * self.precision.bytes(),
            embedding: 2 * devices * self.embedding_bytes(),
            reduced: singles + sums,
            keep: Keep::Graph,
        })
    }

    /// Returns the bytes of a sharded model.
    fn sharded_state(&self, sharding: &Sharding) -> Result<ModelState> {
        let plan = sharding.plan(self.parameters, WorldSize::new(self.world_size)?)?;
        let cost = self.cost(&plan, Some(sharding))?;
        let own_ranks = self.ranks.0..self.ranks.1;
        let own: Vec<&RankCost> =
            cost.ranks.iter().filter(|rank| own_ranks.contains(&rank.rank.as_u64())).collect();
        let total =
            |bytes: fn(&RankCost) -> u64| own.iter().map(|rank| u128::from(bytes(rank))).sum();
        // The slots of a process share gathered parameters.
        let gathered = own.iter().map(|rank| rank.gathered_bytes).fold(0, u64::max);
        let checked = if self.check { self.parameters.iter().map(f32_bytes).sum() } else { 0 };
        let gradients: u128 = total(|rank| rank.grad_bytes);
        // They are added to those of earlier micro-batches at the end of the backward pass.
        let earlier = if self.accumulates { gradients } else { 0 };
        let unreduced: u128 = total(|rank| rank.unreduced_bytes);
        Ok(ModelState {
            stored: vec![
                ("parameters", total(|rank| rank.storage_bytes)),
                ("optimizer state", total(|rank| rank.optimizer_bytes)),
                ("gathered parameters", gathered.into()),
                ("gradients of earlier micro-batches", earlier),
                ("checked gradients", checked),
            ],
            gradients: gradients + unreduced,
            embedding: self.n_devices() * self.embedding_bytes(),
            reduced: 0,
            keep: sharding.keep,
        })
    }

    /// Returns the cost of a plan for this run's runtime.
    fn cost(&self, plan: &ShardingPlan, sharding: Option<&Sharding>) -> Result<PlanCost> {
        Ok(plan.cost(&sharding::cost_model(sharding, self.precision))?)
    }

    /// Returns the terms of each moment of a step when memory may peak.
    fn moments(&self, state: &ModelState) -> [Vec<Term>; 5] {
        let devices = self.n_devices();
        let tokens = devices * self.max_tokens();
        let batch = self.batch(state.keep);
        let masks = ("masks of packed rows", self.mask_bytes(self.kept_mask_bytes()));
        let activations = ("activations", tokens * batch.kept);
        let head_gradients = devices * self.head_gradient_bytes();
        let copy = self.parameters.iter().map(f32_bytes).fold(0, u128::max);
        [
            vec![("a copy while loading", copy)],
            vec![("masks in the making", self.mask_bytes(self.made_mask_bytes()))],
            vec![
                activations,
                masks,
                ("logits", devices * self.block_bytes()),
                ("other values of the head", tokens * batch.head),
                ("gradient of the head", head_gradients),
            ],
            vec![
                activations,
                masks,
                ("backward pass of a unit", (tokens * batch.backward).max(state.embedding)),
                ("gradients", state.gradients),
            ],
            vec![("gradients and their sums", state.reduced)],
        ]
    }

    /// Returns the bytes per token of a device's batch.
    fn batch(&self, keep: Keep) -> BatchBytes {
        let ModelSizes { layers, hidden, .. } = self.sizes;
        let [layers, hidden] = [layers, hidden].map(|size| size as u128);
        let input = hidden * self.precision.bytes();
        let [layer, backward, head] =
            [self.layer_bytes(), self.layer_backward_bytes(), self.head_bytes()];
        match keep {
            // The last unit's graph is computed again, from a copy of its input.
            Keep::Inputs => BatchBytes {
                kept: (layers + 1) * input,
                head,
                backward: layer + 2 * input + backward,
            },
            Keep::Graph | Keep::Gathered => {
                let units = if self.sharding.is_some() { 2 * layers } else { 0 };
                BatchBytes { kept: layers * layer + (units + 1) * input + head, head: 0, backward }
            }
        }
    }

    /// Returns the bytes of a token that the graph of a layer keeps.
    ///
    /// Numbers of the hidden width: two norms, the sum after attention, and the result. Of the queries:
    /// rotated queries, and results of attention. Of the keys: rotated keys, and values. Of the feed-forward
    /// network: gate and up. Other families than Llama keep the results of operations that are not fused.
    /// In half precision every operation also keeps its inputs and results in single precision.
    fn layer_bytes(&self) -> u128 {
        let ModelSizes { hidden, queries, keys, feed_forward, unfused, .. } = self.sizes;
        let [hidden, queries, keys, feed_forward, unfused] =
            [hidden, queries, keys, feed_forward, unfused].map(|size| size as u128);
        let results = 4 * hidden + 2 * queries + 2 * keys + unfused;
        match self.precision {
            Precision::F32 => SINGLE * (results + 2 * feed_forward),
            Precision::Bf16 => {
                let singles = 11 * hidden + 4 * queries + 4 * keys + 2 * feed_forward + 2 * unfused;
                SINGLE * singles + self.precision.bytes() * results
            }
        }
    }

    /// Returns the bytes of a token that the backward pass of a layer takes for a moment: three gradients of
    /// the feed-forward network's width, or gradients of queries, keys and values, and four of the hidden
    /// width.
    fn layer_backward_bytes(&self) -> u128 {
        let ModelSizes { hidden, queries, keys, feed_forward, .. } = self.sizes;
        SINGLE * (4 * hidden + (3 * feed_forward).max(3 * queries + 2 * keys)) as u128
    }

    /// Returns the bytes of a token at the head: the norm's result and its gradient, and in half precision
    /// also the inputs of both operations in single precision.
    fn head_bytes(&self) -> u128 {
        let hidden = self.sizes.hidden as u128;
        match self.precision {
            Precision::F32 => 2 * SINGLE * hidden,
            Precision::Bf16 => (4 * SINGLE + self.precision.bytes()) * hidden,
        }
    }

    /// Returns the bytes of a device's block of logits: 8 MiB, or 128 rows if these are more
    /// ([`linear_cross_entropy`](fused_ops::linear_cross_entropy)).
    fn block_bytes(&self) -> u128 {
        const FEWEST_ROWS: u128 = 128;
        const BLOCK_BYTES: u128 = 8 << 20;
        let row = self.sizes.vocabulary as u128 * SINGLE;
        (self.max_tokens() * row).min(BLOCK_BYTES.max(FEWEST_ROWS * row))
    }

    /// Returns the bytes of the gradient of the head's weight, which the forward pass computes in single
    /// precision.
    fn head_gradient_bytes(&self) -> u128 {
        if self.trains_all() { self.embedding_numel() * SINGLE } else { 0 }
    }

    /// Returns the bytes of a copy of the embedding's gradient.
    fn embedding_bytes(&self) -> u128 {
        if self.trains_all() { self.embedding_numel() * self.precision.bytes() } else { 0 }
    }

    fn embedding_numel(&self) -> u128 {
        self.sizes.vocabulary as u128 * self.sizes.hidden as u128
    }

    /// Returns the bytes of masks of packed rows with `pair_bytes` for each pair of tokens in a row.
    fn mask_bytes(&self, pair_bytes: u128) -> u128 {
        if !self.is_packed {
            return 0;
        }
        let pairs = self.micro_batches.iter().map(|batches| {
            let (rows, length) = self.rows_and_length(batches);
            rows * length * length
        });
        self.n_devices() * pair_bytes * pairs.fold(0, u128::max)
    }

    /// Returns the bytes that a pair of tokens has in a mask, which all layers share. Attention widens a
    /// mask in half precision.
    fn kept_mask_bytes(&self) -> u128 {
        match self.precision {
            Precision::F32 => SINGLE,
            Precision::Bf16 => self.precision.bytes() + SINGLE,
        }
    }

    /// Returns the bytes that a pair of tokens has in a mask, and in the tensors that it is made of.
    fn made_mask_bytes(&self) -> u128 {
        1 + 2 * self.precision.bytes() + SINGLE
    }

    /// Returns the bytes of a parameter's copy in the half precision that an unsharded model computes in;
    /// 0 if the parameter itself is stored so.
    fn half_copy_bytes(&self, parameter: &ParameterInfo) -> u128 {
        let computed = u128::from(parameter.numel()) * self.precision.bytes();
        if computed < u128::from(parameter.bytes()) { computed } else { 0 }
    }

    /// Returns the number of trained numbers.
    fn trained_numel(&self) -> u128 {
        let trained = self.parameters.iter().filter(|parameter| parameter.requires_grad());
        trained.map(|parameter| u128::from(parameter.numel())).sum()
    }

    /// Returns true if no parameter is frozen.
    fn trains_all(&self) -> bool {
        self.parameters.iter().all(ParameterInfo::requires_grad)
    }

    /// Returns the number of devices of the process.
    fn n_devices(&self) -> u128 {
        let (start, end) = self.ranks;
        (end - start).into()
    }

    /// Returns the tokens of a device in the largest step, padding included.
    fn max_tokens(&self) -> u128 {
        let mut max_tokens = 0_u128;
        for batches in self.micro_batches {
            let (rows, length) = self.rows_and_length(batches);
            max_tokens = max_tokens.max(rows * length);
        }
        max_tokens
    }

    /// Returns the rows of a device in a step, and their length.
    fn rows_and_length(&self, batches: &[Batch]) -> (u128, u128) {
        let rows: u64 = batches.iter().map(|batch| batch.rows).sum();
        let length = batches.iter().map(|batch| batch.padded_length).fold(0, u64::max);
        (rows.div_ceil(self.world_size).into(), length.into())
    }
}

/// The bytes of a model on the devices of a process.
struct ModelState {
    /// Bytes that exist through the whole step.
    stored: Vec<Term>,
    /// Gradients at the end of the backward pass.
    gradients: u128,
    /// Copies of the embedding's gradient while it is added up.
    embedding: u128,
    /// Gradients and their sums, after the activations are freed.
    reduced: u128,
    /// Values that units keep for the backward pass.
    keep: Keep,
}

/// The bytes of a token of a device's batch.
struct BatchBytes {
    /// Values kept from the forward to the backward pass.
    kept: u128,
    /// Further values while the head computes its loss.
    head: u128,
    /// Further values while a layer is differentiated.
    backward: u128,
}

fn sum(terms: &[Term]) -> u128 {
    terms.iter().map(|(_, bytes)| bytes).sum()
}

/// Returns the bytes of a parameter in single precision.
fn f32_bytes(parameter: &ParameterInfo) -> u128 {
    u128::from(parameter.numel()) * size_of::<f32>() as u128
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cost::sharding::Strategy,
        data::model::Model,
        models::{Decoder, DecoderConfig},
    };

    /// Two blocks of width 128.
    const SMALL: (usize, usize) = (2, 128);
    /// The width of the feed-forward network of this model.
    const FEED_FORWARD: u128 = 352;

    fn model((layers, hidden): (usize, usize)) -> Model {
        let config = serde_json::json!({
            "architectures": ["LlamaForCausalLM"], "vocab_size": 260, "hidden_size": hidden,
            "intermediate_size": hidden * 11 / 4, "num_hidden_layers": layers,
            "num_attention_heads": 4, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
            "rope_theta": 1e4,
        });
        let config = DecoderConfig::from_json(&config.to_string()).unwrap();
        Model(Decoder::from_config(config).unwrap())
    }

    fn parameters() -> Vec<ParameterInfo> {
        model(SMALL).parameters().unwrap()
    }

    /// Returns the work of two devices with the whole model.
    fn work<'a>(parameters: &'a [ParameterInfo], steps: &'a [Vec<Batch>]) -> Workload<'a> {
        Workload {
            sizes: model(SMALL).sizes(),
            precision: Precision::F32,
            parameters,
            sharding: None,
            micro_batches: steps,
            is_packed: false,
            accumulates: false,
            check: false,
            world_size: 2,
            ranks: (0, 2),
            base_bytes: 0,
        }
    }

    /// Returns a step of rows of `length` tokens.
    fn step(rows: u64, length: u64) -> [Vec<Batch>; 1] {
        [vec![Batch::from_indices(0..rows, |_| length).unwrap()]]
    }

    /// Returns the bytes of a term; 0 without it.
    fn term(work: &Workload<'_>, name: &str) -> u128 {
        let terms = work.predict().unwrap().terms;
        terms.iter().find(|(found, _)| *found == name).map_or(0, |&(_, bytes)| bytes.into())
    }

    #[test]
    fn devices_share_or_shard_the_model() {
        let parameters = &parameters();
        let all: u128 = parameters.iter().map(|parameter| u128::from(parameter.bytes())).sum();
        let unit = (4 * 128 * 128 + 3 * FEED_FORWARD * 128 + 2 * 128) * 4;
        let four = Workload { world_size: 4, ranks: (0, 4), ..work(parameters, &[]) };
        // Each of 21 parameters has a step count.
        assert_eq!(term(&four, "parameters"), all);
        assert_eq!(term(&four, "optimizer state"), 2 * all + 21 * 4);
        assert_eq!(term(&four, "gradients and their sums"), (4 + 1) * all);
        let alone = Workload { world_size: 1, ranks: (0, 1), ..four };
        let embedding = 2 * 260 * 128 * 4;
        assert_eq!(
            term(&alone, "gradients") + term(&alone, "backward pass of a unit"),
            all + embedding
        );
        for (keep, gathered) in [(Keep::Inputs, unit), (Keep::Gathered, all)] {
            let sharding = Sharding { keep, ..Sharding::default() };
            let four = Workload { sharding: Some(&sharding), ..four };
            assert_eq!(term(&four, "parameters"), all);
            assert_eq!(term(&four, "optimizer state"), 2 * all + 4 * 21 * 4);
            assert_eq!(term(&four, "gathered parameters"), gathered);
            assert_eq!(term(&four, "gradients"), all + 4 * unit);
        }
    }

    #[test]
    fn known_errors_are_added_to_the_bound() {
        let bound = |bytes, movable_bytes| {
            MemoryPrediction { terms: vec![("a", bytes), ("b", 100)], movable_bytes }.upper_bound()
        };
        assert_eq!(bound(900, 7), 1000 + 10 * MemoryPrediction::LARGEST_ERROR_PERCENT + 7);
        assert_eq!(bound(u64::MAX, 1), u64::MAX);
    }

    #[test]
    fn frozen_models_take_a_copy_while_loading() {
        let frozen = parameters().into_iter().map(|parameter| parameter.with_requires_grad(false));
        let frozen: Vec<ParameterInfo> = frozen.collect();
        assert_eq!(term(&work(&frozen, &[]), "a copy while loading"), FEED_FORWARD * 128 * 4);
    }

    #[test]
    fn accumulated_gradients_are_kept() {
        let parameters = &parameters();
        let all: u128 = parameters.iter().map(f32_bytes).sum();
        let accumulated = Workload { accumulates: true, ..work(parameters, &[]) };
        assert_eq!(term(&accumulated, "gradients of earlier micro-batches"), 2 * all);
        let sharding = Sharding::default();
        let accumulated = Workload { sharding: Some(&sharding), ..accumulated };
        assert_eq!(term(&accumulated, "gradients of earlier micro-batches"), all);
        let unit = (4 * 128 * 128 + 3 * FEED_FORWARD * 128 + 2 * 128) * 4;
        assert_eq!(term(&accumulated, "gradients"), all + 2 * unit);
    }

    #[test]
    fn only_clipping_and_accumulating_keep_gradients() {
        let parameters = &parameters();
        let clipped = Sharding::default();
        let unclipped = Sharding { optimizer_in_backward: true, ..Sharding::default() };
        let saved = |sharding, accumulates| {
            let work = Workload { sharding, accumulates, ..work(parameters, &[]) };
            work.clipping_bytes().unwrap()
        };
        assert!(saved(Some(&clipped), false).is_some_and(|bytes| bytes > 1 << 20));
        for (sharding, accumulates) in
            [(Some(&clipped), true), (Some(&unclipped), false), (None, false)]
        {
            assert_eq!(saved(sharding, accumulates), None);
        }
    }

    #[test]
    fn a_device_has_the_rows_of_the_fullest() {
        assert_eq!(work(&[], &step(3, 10)).max_tokens(), 2 * 10);
    }

    #[test]
    fn devices_are_at_their_heads_together() {
        let frozen = [parameters().remove(0).with_requires_grad(false)];
        let steps = step(2, 1000);
        let bytes = |vocabulary| {
            let work = work(&frozen, &steps);
            let work = Workload { sizes: ModelSizes { vocabulary, ..work.sizes }, ..work };
            let predicted = work.predict().unwrap();
            assert_eq!(u128::from(predicted.movable_bytes), 2 * work.block_bytes());
            (work.block_bytes(), term(&work, "logits"))
        };
        for (vocabulary, block) in [(1 << 14, 8 << 20), (1 << 17, 128 << 19)] {
            assert_eq!(bytes(vocabulary), (block, 2 * block));
        }
        assert_eq!(bytes(1 << 8).0, 1000 << 10);
        // A trained head has a gradient, in single precision for both types.
        for precision in [Precision::F32, Precision::Bf16] {
            let work = Workload { precision, ..work(&[], &[]) };
            assert_eq!(work.head_gradient_bytes(), 128 * 260 * 4);
            assert_eq!(work.embedding_bytes(), 128 * 260 * precision.bytes());
        }
    }

    #[test]
    fn wide_feed_forward_networks_have_three_gradients_at_once() {
        let parameters = &parameters();
        let steps = step(2, 10_000);
        for (precision, layer) in [
            (Precision::F32, 4 * (8 * 128 + 2 * FEED_FORWARD)),
            (Precision::Bf16, 4 * (19 * 128 + 2 * FEED_FORWARD) + 2 * 8 * 128),
        ] {
            let whole = Workload { precision, ..work(parameters, &steps) };
            let backward = 4 * (4 * 128 + 3 * FEED_FORWARD);
            let input = 128 * precision.bytes();
            let tokens = 2 * 10_000;
            let kept = 2 * layer + input + whole.head_bytes();
            assert_eq!(term(&whole, "activations"), tokens * kept);
            assert_eq!(term(&whole, "backward pass of a unit"), tokens * backward);
            let sharding = Sharding { keep: Keep::Inputs, ..Sharding::default() };
            let sharded = Workload { sharding: Some(&sharding), ..whole };
            assert_eq!(term(&sharded, "activations"), tokens * 3 * input);
            let unit = layer + 2 * input + backward;
            assert_eq!(term(&sharded, "backward pass of a unit"), tokens * unit);
        }
    }

    #[test]
    fn largest_process_may_be_any() {
        let whole_tensors = Sharding { strategy: Strategy::WholeTensor, ..Sharding::default() };
        let parameters = &parameters();
        let process = |ranks| Workload {
            sharding: Some(&whole_tensors),
            world_size: 4,
            ranks,
            ..work(parameters, &[])
        };
        let predicted = |rank| process((rank, rank + 1)).predict().unwrap();
        assert!(predicted(3).total() > predicted(0).total());
        for rank in 0..4 {
            let largest = process((rank, rank + 1)).predict_largest().unwrap();
            assert_eq!(largest, predicted(3));
        }
        let all = process((0, 4));
        assert_eq!(all.predict_largest().unwrap(), all.predict().unwrap());
    }

    #[test]
    fn sharded_model_may_not_fit_whole() {
        let model = model((12, 1024));
        let parameters = &model.parameters().unwrap();
        let all: u64 = parameters.iter().map(ParameterInfo::numel).sum();
        let full = Sharding::default();
        let sized = Workload { sizes: model.sizes(), world_size: 8, ..work(parameters, &[]) };
        let too_large = |work: Workload<'_>, limit| work.too_large_to_generate(limit).unwrap();
        let alone = Workload { sharding: Some(&full), ranks: (3, 4), ..sized };
        assert_eq!(too_large(alone, None), Some(8 * all));
        let together = Workload { ranks: (0, 8), ..alone };
        let whole = Workload { ranks: (0, 1), ..sized };
        assert_eq!((too_large(together, None), too_large(whole, None)), (None, None));
        let less = MemoryLimit::for_process(8 * all - 1, "");
        let enough = MemoryLimit::for_process(8 * all, "");
        let shared = MemoryLimit { n_processes: 2, ..MemoryLimit::for_process(16 * all - 2, "") };
        assert_eq!(too_large(whole, Some(&less)), Some(8 * all));
        assert_eq!(too_large(whole, Some(&shared)), Some(8 * all));
        assert_eq!(too_large(whole, Some(&enough)), None);
    }
}
