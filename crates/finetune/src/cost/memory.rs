//! Prediction of the memory of a training process.

use core_types::{Rank, WorldSize};
use dyn_batch::Batch;
use fsdp_plan::{ParameterInfo, cost::RankCost};

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

/// The gaps that the allocator leaves between tensors take a fifth of the tensors' bytes.
const GAP_DIVISOR: u128 = 5;

/// The predicted peak of a process's memory, term by term.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryPrediction {
    /// Names and bytes.
    pub terms: Vec<(&'static str, u64)>,
}

impl MemoryPrediction {
    /// The error that limits allow for, in percent of the prediction. The constants of the prediction are
    /// fitted to 1,000 random dry runs of up to four layers (glibc, two cores of an AMD EPYC), whose peaks
    /// are 0.75 to 1.24 of it. `predicted_memory_bounds_the_peak` in the tests of the command line measures
    /// new ones.
    const LARGEST_ERROR_PERCENT: u64 = 25;

    /// Returns the sum of all terms.
    pub fn total(&self) -> u64 {
        self.terms.iter().fold(0, |total, (_, bytes)| total.saturating_add(*bytes))
    }

    /// Returns the most bytes that the process may take: the prediction and its largest known error.
    /// Limits are compared with it.
    pub fn upper_bound(&self) -> u64 {
        let total = self.total();
        total.saturating_add(total / 100 * Self::LARGEST_ERROR_PERCENT)
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
    /// Batches of the steps of an epoch and of a validation.
    pub(crate) steps: &'a [Vec<Batch>],
    /// Whether sequences share rows, so that attention needs masks.
    pub(crate) is_packed: bool,
    /// Whether a step has several micro-batches, so that gradients are kept between them.
    pub(crate) accumulates: bool,
    /// Whether gradients are checked before training, with all gradients in memory.
    pub(crate) check: bool,
    /// Number of devices of the run.
    pub(crate) world_size: u64,
    /// First rank of the process, and one past its last rank.
    pub(crate) ranks: (u64, u64),
    /// Bytes before training: the program, the text and its batches.
    pub(crate) base_bytes: u64,
}

impl Workload<'_> {
    /// Sets whether gradients are checked before training, which takes memory for all gradients.
    #[must_use]
    pub fn with_check(self, check: bool) -> Self {
        Self { check, ..self }
    }

    /// Sets the bytes before training.
    #[must_use]
    pub fn with_base_bytes(self, base_bytes: u64) -> Self {
        Self { base_bytes, ..self }
    }

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

    /// Predicts the memory of the process, with measured constants for activations.
    ///
    /// # Errors
    ///
    /// [`Error::Plan`](crate::Error::Plan) if the parameters cannot be sharded as requested.
    pub fn predict(&self) -> Result<MemoryPrediction> {
        let mut tensors = match self.sharding {
            None => self.whole_terms(),
            Some(sharding) => self.sharded_terms(sharding)?,
        };
        tensors.extend(self.is_packed.then(|| ("masks of packed rows", self.mask_bytes())));
        let bytes_of_tensors: u128 = tensors.iter().map(|(_, bytes)| bytes).sum();
        let mut terms = vec![("program, text and batches", u128::from(self.base_bytes))];
        terms.extend(tensors);
        terms.push(("kernels", KERNEL_BYTES));
        terms.push(("gaps between tensors", bytes_of_tensors / GAP_DIVISOR));
        let terms = terms
            .into_iter()
            .map(|(name, bytes)| (name, u64::try_from(bytes).unwrap_or(u64::MAX)))
            .collect();
        Ok(MemoryPrediction { terms })
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
    /// then update each unit in the backward pass. Returns `None` if that saves nothing: it does so already,
    /// accumulated gradients keep it from doing so, or activations outweigh gradients.
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

    /// Returns the terms of an unsharded model. The slots of a process share its variables, and divide
    /// the optimizer state among them.
    fn whole_terms(&self) -> Vec<(&'static str, u128)> {
        let all: u128 = self.parameters.iter().map(|parameter| self.stored_bytes(parameter)).sum();
        let devices = self.n_devices();
        let trained = self.parameters.iter().filter(|parameter| parameter.requires_grad());
        let trained: u128 = trained.map(|parameter| u128::from(parameter.numel())).sum();
        let single = Precision::F32.bytes();
        let gradients = devices * trained * self.precision.bytes();
        // The only device's gradients are their own sum.
        let sum = if devices > 1 { trained * single } else { 0 };
        let activations = devices * self.max_tokens() * self.computed_bytes(self.sizes.layers);
        let mut terms = vec![("parameters", all), ("optimizer state", trained * 2 * single)];
        terms.extend(self.accumulates.then_some(("gradients of earlier micro-batches", gradients)));
        let at_the_end = gradients + sum + self.embedding_bytes();
        terms.extend(self.passes(activations, at_the_end, 0));
        terms
    }

    /// Returns the terms of a sharded model, from the cost of its plan.
    fn sharded_terms(&self, sharding: &Sharding) -> Result<Vec<(&'static str, u128)>> {
        let plan = sharding.plan(self.parameters, WorldSize::new(self.world_size)?)?;
        let cost = plan.cost(&sharding::cost_model(Some(sharding), self.precision))?;
        let own_ranks = self.ranks.0..self.ranks.1;
        let own: Vec<&RankCost> =
            cost.ranks.iter().filter(|rank| own_ranks.contains(&rank.rank.as_u64())).collect();
        let sum =
            |bytes: fn(&RankCost) -> u64| own.iter().map(|rank| u128::from(bytes(rank))).sum();
        // The slots of a process share gathered parameters.
        let gathered = own.iter().map(|rank| rank.gathered_bytes).fold(0, u64::max);
        let token_bytes = match sharding.keep {
            Keep::Inputs => {
                let inputs = (self.sizes.layers + 1) * self.sizes.hidden;
                // Measured: a tenth is freed before the rest is computed.
                (inputs as u128 * self.precision.bytes() + self.computed_bytes(1)) * 9 / 10
            }
            Keep::Graph | Keep::Gathered => self.computed_bytes(self.sizes.layers),
        };
        let all_gradients: u128 = self.parameters.iter().map(f32_bytes).sum();
        let activations = self.n_devices() * self.max_tokens() * token_bytes;
        let mut terms = vec![
            ("parameters", sum(|rank| rank.storage_bytes)),
            ("optimizer state", sum(|rank| rank.optimizer_bytes)),
            ("gathered parameters", gathered.into()),
        ];
        let gradients = sum(|rank| rank.grad_bytes);
        let of_units = sum(|rank| rank.unreduced_bytes);
        let at_the_end = if self.accumulates {
            terms.push(("gradients of earlier micro-batches", gradients));
            of_units
        } else {
            gradients + of_units
        };
        terms.extend(self.passes(activations, at_the_end, gathered.into()));
        terms.extend(self.check.then_some(("checked gradients", all_gradients)));
        Ok(terms)
    }

    /// Returns the terms of the moment with the largest memory: the end of the forward pass, with all
    /// `activations`, the end of the backward pass, with `gradients`, or before training, while a
    /// parameter is loaded and nothing is `gathered`.
    fn passes(
        &self,
        activations: u128,
        gradients: u128,
        gathered: u128,
    ) -> Vec<(&'static str, u128)> {
        let head = self.head_bytes();
        let forward = activations + head;
        let training = forward.max(gradients);
        let largest_copy = self.parameters.iter().map(f32_bytes).fold(0, u128::max);
        let loading = largest_copy.saturating_sub(training + gathered);
        let mut terms =
            vec![("activations", activations), ("logits and gradients of the head", head)];
        terms
            .extend((gradients > forward).then(|| ("gradients beyond these", gradients - forward)));
        terms.extend((loading > 0).then_some(("a copy while loading", loading)));
        terms
    }

    /// Returns the bytes of a parameter of an unsharded model. One that is stored in single precision
    /// also has a copy in the half precision that the model computes in.
    fn stored_bytes(&self, parameter: &ParameterInfo) -> u128 {
        let bytes = u128::from(parameter.bytes());
        let computed = u128::from(parameter.numel()) * self.precision.bytes();
        if computed < bytes { bytes + computed } else { bytes }
    }

    /// Returns the bytes of a token in `layers` layers. The backward pass of a layer takes the place of its
    /// forward pass.
    fn computed_bytes(&self, layers: usize) -> u128 {
        let ModelSizes { layer_width, hidden, .. } = self.sizes;
        // The input of the head has a gradient in single precision.
        let head = 2 * hidden as u128 * Precision::F32.bytes();
        (layers * layer_width) as u128 * self.computed_bits() / 8 + head
    }

    /// Returns the bits of an item that a kernel computes.
    fn computed_bits(&self) -> u128 {
        match self.precision {
            Precision::F32 => 32,
            // Kernels compute half precision in single precision: measured.
            Precision::Bf16 => 52,
        }
    }

    /// Returns the bytes of the logits and of the head's gradient.
    ///
    /// Logits are computed by blocks of 8 MiB, or of 128 rows if these are more
    /// ([`linear_cross_entropy`](fused_ops::linear_cross_entropy)). The devices of a process are rarely
    /// all at their heads, so three fifths of the blocks count, and four fifths of a single one. The
    /// gradient is in single precision, and half of it exists a second time.
    fn head_bytes(&self) -> u128 {
        const FEWEST_ROWS: u128 = 128;
        const BLOCK_BYTES: u128 = 8 << 20;
        let row = self.sizes.vocabulary as u128 * Precision::F32.bytes();
        let block = (self.max_tokens() * row).min(BLOCK_BYTES.max(FEWEST_ROWS * row));
        let gradient = if self.trains_all() { self.sizes.hidden as u128 * row } else { 0 };
        let devices = self.n_devices();
        block * (3 * devices).max(4) / 5 + devices * gradient * 3 / 2
    }

    /// Returns the bytes that the gradient of the embedding takes while it is added up.
    fn embedding_bytes(&self) -> u128 {
        let numel = self.sizes.vocabulary as u128 * self.sizes.hidden as u128;
        if self.trains_all() { numel * self.precision.bytes() * 3 / 2 } else { 0 }
    }

    /// Returns true if no parameter is frozen.
    fn trains_all(&self) -> bool {
        self.parameters.iter().all(ParameterInfo::requires_grad)
    }

    /// Returns the bytes of masks, which have one value per pair of tokens in a row, and of the tensors
    /// that masks are computed from.
    fn mask_bytes(&self) -> u128 {
        let pair_bytes = 1 + 2 * self.precision.bytes() + Precision::F32.bytes();
        let mut max_pairs = 0_u128;
        for batches in self.steps {
            let (rows, length) = self.rows_and_length(batches);
            max_pairs = max_pairs.max(rows * length * length);
        }
        self.n_devices() * pair_bytes * max_pairs
    }

    /// Returns the number of devices of the process.
    fn n_devices(&self) -> u128 {
        let (start, end) = self.ranks;
        (end - start).into()
    }

    /// Returns the tokens of a device in the largest step, padding included.
    fn max_tokens(&self) -> u128 {
        let mut max_tokens = 0_u128;
        for batches in self.steps {
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
        models::{Llama, LlamaConfig},
    };

    /// Two blocks of width 128.
    const SMALL: (usize, usize) = (2, 128);

    fn model((layers, hidden): (usize, usize)) -> Model {
        let config = serde_json::json!({
            "architectures": ["LlamaForCausalLM"], "vocab_size": 260, "hidden_size": hidden,
            "intermediate_size": hidden * 11 / 4, "num_hidden_layers": layers,
            "num_attention_heads": 4, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
            "rope_theta": 1e4,
        });
        let config = LlamaConfig::from_json(&config.to_string()).unwrap();
        Model(Llama::from_config(config).unwrap())
    }

    /// Predicts the memory of a process of four devices, without batches.
    fn predicted(config: (usize, usize), sharding: Option<&Sharding>) -> MemoryPrediction {
        let parameters = &model(config).parameters().unwrap();
        let work = Workload {
            check: false,
            sizes: model(config).sizes(),
            precision: Precision::F32,
            parameters,
            sharding,
            steps: &[],
            is_packed: false,
            accumulates: false,
            world_size: 4,
            ranks: (0, 4),
            base_bytes: 1,
        };
        work.predict().unwrap()
    }

    #[test]
    fn devices_share_or_shard_the_model() {
        let all = model(SMALL).parameters().unwrap().iter().map(ParameterInfo::bytes).sum::<u64>();
        let head = 260 * 128 * 4;
        let with_gaps = |tensors: u64| 1 + (10 << 20) + tensors + tensors / 5;
        let whole = predicted(SMALL, None);
        assert_eq!(whole.total(), with_gaps(all + 2 * all + (4 + 1) * all + head * 3 / 2));

        let sharding = |keep| Sharding { keep, ..Sharding::default() };
        let parts = predicted(SMALL, Some(&sharding(Keep::Inputs)));
        let unit = (4 * 128 * 128 + 3 * 352 * 128 + 2 * 128) * 4;
        // Each of 21 parameters has a step count on each device.
        let state = 2 * all + 4 * 21 * 4;
        let tensors = all + state + unit + (all + 4 * unit);
        assert_eq!(parts.total(), with_gaps(tensors));
        assert_eq!(parts.terms[3], ("gathered parameters", unit));

        let gathered = predicted(SMALL, Some(&sharding(Keep::Gathered)));
        assert_eq!(gathered.terms[3], ("gathered parameters", all));
    }

    #[test]
    fn known_error_is_added_to_the_bound() {
        let predicted = |bytes| MemoryPrediction { terms: vec![("a", bytes), ("b", 100)] };
        assert_eq!(predicted(900).upper_bound(), 1250);
        assert_eq!(predicted(u64::MAX).upper_bound(), u64::MAX);
    }

    #[test]
    fn frozen_models_take_a_copy_while_loading() {
        let parameters = model(SMALL).parameters().unwrap();
        let frozen: Vec<ParameterInfo> =
            parameters.into_iter().map(|parameter| parameter.with_requires_grad(false)).collect();
        let terms = replicated(&frozen, &[]).predict().unwrap().terms;
        assert!(terms.contains(&("a copy while loading", 352 * 128 * 4)), "{terms:?}");
    }

    #[test]
    fn accumulated_gradients_are_kept() {
        let parameters = &model(SMALL).parameters().unwrap();
        let tensors = |accumulates| {
            let work = Workload { accumulates, ..replicated(parameters, &[]) };
            work.whole_terms().iter().map(|(_, bytes)| bytes).sum::<u128>()
        };
        let all = parameters.iter().map(f32_bytes).sum::<u128>();
        assert_eq!(tensors(true) - tensors(false), 2 * all);
        let sharding = Sharding::default();
        let sharded = Workload {
            accumulates: true,
            sharding: Some(&sharding),
            ..replicated(parameters, &[])
        };
        let terms = sharded.sharded_terms(&sharding).unwrap();
        assert!(terms.contains(&("gradients of earlier micro-batches", all)), "{terms:?}");
    }

    #[test]
    fn the_larger_pass_counts() {
        let work = replicated(&[], &[]);
        let head = work.head_bytes();
        let passes = |activations, gradients| {
            let terms = work.passes(activations, gradients, 7);
            terms.iter().map(|(_, bytes)| bytes).sum::<u128>()
        };
        assert_eq!(passes(100, 50), 100 + head);
        assert_eq!(passes(100, 101 + head), 101 + head);
        let largest = 352 * 128 * 4;
        let parameters = &model(SMALL).parameters().unwrap();
        let loaded = Workload {
            sizes: ModelSizes { vocabulary: 0, ..work.sizes },
            ..replicated(parameters, &[])
        };
        assert_eq!(
            loaded.passes(100, 50, 7).last(),
            Some(&("a copy while loading", largest - 107))
        );
    }

    #[test]
    fn clipping_takes_nothing_where_activations_outweigh_gradients() {
        let parameters = &model(SMALL).parameters().unwrap();
        let sharding = Sharding::default();
        let saved = |rows| {
            let steps = [vec![Batch::from_indices(0..rows, |_| 1000).unwrap()]];
            let work = Workload { sharding: Some(&sharding), ..replicated(parameters, &steps) };
            work.clipping_bytes().unwrap()
        };
        assert!(saved(0).is_some_and(|bytes| bytes > 1 << 20));
        assert_eq!(saved(100), None);
    }

    #[test]
    fn a_device_has_the_rows_of_the_fullest() {
        let steps = [vec![Batch::from_indices(0..3, |_| 10).unwrap()]];
        assert_eq!(replicated(&[], &steps).max_tokens(), 2 * 10);
    }

    #[test]
    fn logits_are_computed_by_blocks() {
        let steps = [vec![Batch::from_indices(0..2, |_| 1000).unwrap()]];
        let frozen = [model(SMALL).parameters().unwrap().remove(0).with_requires_grad(false)];
        let bytes = |vocabulary| {
            let work = replicated(&frozen, &steps);
            let sizes = ModelSizes { vocabulary, ..work.sizes };
            Workload { sizes, ..work }.head_bytes()
        };
        assert_eq!(bytes(1 << 14), (8 << 20) * 6 / 5);
        assert_eq!(bytes(1 << 8), 1000 * 1024 * 6 / 5);
        assert_eq!(bytes(1 << 15), (128 << 17) * 6 / 5);
        let steps = [vec![Batch::from_indices(0..1, |_| 1000).unwrap()]];
        let alone = Workload { world_size: 1, ranks: (0, 1), ..replicated(&frozen, &steps) };
        assert_eq!(alone.head_bytes(), 1000 * 260 * 4 * 4 / 5);
        // A trained head has a gradient, in single precision for both types.
        for precision in [Precision::F32, Precision::Bf16] {
            let work = Workload { precision, ..replicated(&[], &[]) };
            assert_eq!(work.head_bytes(), 2 * 128 * 260 * 4 * 3 / 2);
            assert_eq!(work.embedding_bytes(), 128 * 260 * precision.bytes() * 3 / 2);
        }
    }

    #[test]
    fn one_layer_is_recomputed() {
        let parameters = &model(SMALL).parameters().unwrap();
        let steps = [vec![Batch::from_indices(0..2, |_| 10).unwrap()]];
        let sharding = Sharding { keep: Keep::Inputs, ..Sharding::default() };
        for precision in [Precision::F32, Precision::Bf16] {
            let work = Workload { precision, ..replicated(parameters, &steps) };
            let of_token = (3 * 128 * precision.bytes() + work.computed_bytes(1)) * 9 / 10;
            let terms = work.sharded_terms(&sharding).unwrap();
            assert!(terms.contains(&("activations", 2 * 10 * of_token)), "{terms:?}");
        }
    }

    /// Returns the work of two devices with the whole model.
    fn replicated<'a>(parameters: &'a [ParameterInfo], steps: &'a [Vec<Batch>]) -> Workload<'a> {
        Workload {
            sizes: model(SMALL).sizes(),
            precision: Precision::F32,
            parameters,
            sharding: None,
            steps,
            is_packed: false,
            accumulates: false,
            check: false,
            world_size: 2,
            ranks: (0, 2),
            base_bytes: 0,
        }
    }

    #[test]
    fn largest_process_may_be_any() {
        let whole_tensors = Sharding { strategy: Strategy::WholeTensor, ..Sharding::default() };
        let parameters = &model(SMALL).parameters().unwrap();
        let process = |ranks| Workload {
            check: false,
            sizes: model(SMALL).sizes(),
            precision: Precision::F32,
            parameters,
            sharding: Some(&whole_tensors),
            steps: &[],
            is_packed: false,
            accumulates: false,
            world_size: 4,
            ranks,
            base_bytes: 1,
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
        let work = |sharding, ranks| Workload {
            check: false,
            sizes: model.sizes(),
            precision: Precision::F32,
            parameters,
            sharding,
            steps: &[],
            is_packed: false,
            accumulates: false,
            world_size: 8,
            ranks,
            base_bytes: 0,
        };
        let too_large = |work: Workload<'_>, limit| work.too_large_to_generate(limit).unwrap();
        assert_eq!(too_large(work(Some(&full), (3, 4)), None), Some(8 * all));
        let together = work(Some(&full), (0, 8));
        let whole = work(None, (0, 1));
        assert_eq!((too_large(together, None), too_large(whole, None)), (None, None));
        let less = MemoryLimit::for_process(8 * all - 1, "");
        let enough = MemoryLimit::for_process(8 * all, "");
        let shared = MemoryLimit { n_processes: 2, ..MemoryLimit::for_process(16 * all - 2, "") };
        assert_eq!(too_large(whole, Some(&less)), Some(8 * all));
        assert_eq!(too_large(whole, Some(&shared)), Some(8 * all));
        assert_eq!(too_large(whole, Some(&enough)), None);
    }

    #[test]
    fn token_memory_grows_with_layers() {
        let parameters = &[];
        let work = Workload {
            check: false,
            sizes: model(SMALL).sizes(),
            precision: Precision::F32,
            parameters,
            sharding: None,
            steps: &[],
            is_packed: false,
            accumulates: false,
            world_size: 1,
            ranks: (0, 1),
            base_bytes: 0,
        };
        let layers = |layers| work.computed_bytes(layers);
        assert_eq!((layers(1), layers(2)), (9_984, 18_944));
    }
}
