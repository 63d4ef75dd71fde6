//! How much memory a run took, beside what its plan predicts.

use std::{collections::BTreeSet, fmt};

use candle_distributed::{
    batch::Batch,
    plan::{ParameterInfo, cost::RankCost},
    types::{WorldSize, human::HumanBytes},
};

use crate::{
    error::Result,
    train::{
        limits::Limit,
        model::Sizes,
        precision::Precision,
        session::Session,
        sharding::{self, Keep, Needs, Sharding},
    },
};

/// What a process will probably take at most, term by term.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Prediction {
    /// What each is, and how many bytes.
    pub(crate) terms: Vec<(&'static str, u64)>,
}

impl Prediction {
    /// All terms together.
    pub(crate) fn total(&self) -> u64 {
        self.terms.iter().fold(0, |total, (_, bytes)| total.saturating_add(*bytes))
    }
}

/// What decides how much memory a process takes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work<'a> {
    pub(crate) sizes: Sizes,
    pub(crate) precision: Precision,
    pub(crate) parameters: &'a [ParameterInfo],
    /// `None` if every device has the whole model.
    pub(crate) sharding: Option<&'a Sharding>,
    /// The batches of the steps of an epoch, and of a validation.
    pub(crate) steps: &'a [Vec<Batch>],
    /// Whether sequences share rows, and attention must be told which token sees which.
    pub(crate) is_packed: bool,
    /// Whether gradients are compared with differences of the loss first, for which a process has
    /// them whole.
    pub(crate) check: bool,
    pub(crate) world_size: u64,
    /// The ranks of the process.
    pub(crate) ranks: (u64, u64),
    /// What the process takes before training: the program, the text and its batches.
    pub(crate) base_bytes: u64,
}

impl Work<'_> {
    /// How much memory the process will probably take. What a device computes with follows from
    /// constants that were measured.
    pub(crate) fn predicted(&self) -> Result<Prediction> {
        let mut terms = vec![("program, text and batches", u128::from(self.base_bytes))];
        terms.extend(match self.sharding {
            None => self.of_whole(),
            Some(sharding) => self.of_parts(sharding)?,
        });
        terms.extend(self.adapted_bytes().map(|bytes| ("weights with adapters", bytes)));
        terms.extend(self.is_packed.then(|| ("masks of packed rows", self.mask_bytes())));
        terms.push(("kernels and allocator", kept_bytes(self.devices())));
        let bytes = |(name, bytes)| (name, u64::try_from(bytes).unwrap_or(u64::MAX));
        Ok(Prediction { terms: terms.into_iter().map(bytes).collect() })
    }

    /// How much memory the process will probably take that takes the most of all processes with as
    /// many ranks as this one.
    #[expect(clippy::expect_used, reason = "says why it cannot fail")]
    pub(crate) fn predicted_of_largest(&self) -> Result<Prediction> {
        let n_ranks = self.ranks.1 - self.ranks.0;
        let firsts = (0..self.world_size).filter(|first| first.is_multiple_of(n_ranks));
        let processes = firsts.map(|first| Self { ranks: (first, first + n_ranks), ..*self });
        let predictions: Vec<Prediction> =
            processes.map(|process| process.predicted()).collect::<Result<_>>()?;
        let largest = predictions.into_iter().max_by_key(Prediction::total);
        Ok(largest.expect("a world has ranks"))
    }

    /// How much memory the trained model takes that writes a text, as its files have it and in single
    /// precision, if that is more than the process takes to train it, or may take.
    pub(crate) fn too_large_to_write(&self, limit: Option<&Limit>) -> Result<Option<u64>> {
        let all: u64 = self.parameters.iter().map(ParameterInfo::numel).sum();
        let needed = all.saturating_mul(2 * size_of::<f32>() as u64);
        let trains_in = self.predicted()?.total();
        let most = limit.map_or(trains_in, |limit| trains_in.min(limit.share()));
        Ok((needed > most).then_some(needed))
    }

    /// The model whole: slots of a process share its variables, and divide the optimizer's state.
    fn of_whole(&self) -> Vec<(&'static str, u128)> {
        let numel = |parameter: &ParameterInfo| u128::from(parameter.numel());
        let all: u128 = self.parameters.iter().map(numel).sum();
        let trained = self.parameters.iter().filter(|parameter| parameter.requires_grad());
        let trained: u128 = trained.map(numel).sum();
        let devices = self.devices();
        // What backward has beside the gradients that it returns: zeros to which a gradient is
        // added, and the sum.
        let largest = self.parameters.iter().map(numel).fold(0, u128::max);
        let (single, item) = (Precision::F32.bytes(), self.precision.bytes());
        // Beside halves the optimizer has its own numbers in single precision.
        let masters = if item < single { single } else { 0 };
        vec![
            ("parameters", all * item),
            ("gradients of each device, and their sum", trained * (devices * item + single)),
            ("optimizer state", trained * (2 * single + masters)),
            ("gradients under way", devices * 2 * largest * item),
            ("activations", devices * self.tokens() * self.computed_bytes(self.sizes.layers)),
        ]
    }

    /// The model in parts, by the cost of its plan.
    fn of_parts(&self, sharding: &Sharding) -> Result<Vec<(&'static str, u128)>> {
        let plan = sharding.plan(self.parameters, WorldSize::new(self.world_size)?)?;
        let cost = plan.cost(&sharding::cost_model(Some(sharding), self.precision))?;
        let is_own = |rank: &&RankCost| {
            let rank = rank.rank.as_u64();
            self.ranks.0 <= rank && rank < self.ranks.1
        };
        let own: Vec<&RankCost> = cost.ranks.iter().filter(is_own).collect();
        let sum = |of: fn(&RankCost) -> u64| own.iter().map(|rank| u128::from(of(rank))).sum();
        // The slots of a process share what is gathered.
        let gathered = own.iter().map(|rank| rank.gathered_bytes).fold(0, u64::max);
        let of_token = match sharding.keep {
            Keep::Inputs => {
                let inputs = (self.sizes.layers + 1) * self.sizes.hidden;
                inputs as u128 * self.precision.bytes() + self.computed_bytes(1)
            }
            Keep::Graph | Keep::Gathered => self.computed_bytes(self.sizes.layers),
        };
        let whole: u128 = self.parameters.iter().map(bytes_of).sum();
        let mut terms = vec![
            ("parameters", sum(|rank| rank.storage_bytes)),
            ("gradients", sum(|rank| rank.grad_bytes)),
            ("optimizer state", sum(|rank| rank.optimizer_bytes)),
            ("gathered parameters", gathered.into()),
            ("gradients of a unit", sum(|rank| rank.unreduced_bytes)),
            ("gradients under way", sum(|rank| rank.backward_bytes)),
            ("activations", self.devices() * self.tokens() * of_token),
        ];
        terms.extend(self.check.then_some(("gradients that are checked", whole)));
        Ok(terms)
    }

    /// If there are adapters, what graphs of blocks have of each weight beside it: the product, that
    /// with its factor, the sum, and its gradient.
    fn adapted_bytes(&self) -> Option<u128> {
        let adapted: BTreeSet<&str> =
            self.parameters.iter().filter_map(|parameter| layer_of(parameter.name())).collect();
        let is_adapted = |parameter: &&ParameterInfo| {
            parameter.name().strip_suffix(".weight").is_some_and(|layer| adapted.contains(layer))
        };
        let all = self.parameters.iter().filter(is_adapted);
        let all: u128 = all.map(|parameter| u128::from(parameter.numel())).sum();
        let in_graphs = match self.sharding {
            Some(Sharding { keep: Keep::Inputs, .. }) => all / self.sizes.layers as u128,
            Some(Sharding { keep: Keep::Graph | Keep::Gathered, .. }) | None => all,
        };
        let bytes = self.devices() * 4 * in_graphs * self.precision.bytes();
        (!adapted.is_empty()).then_some(bytes)
    }

    /// What the forward and the backward pass of so many layers need at once for a token, in bytes.
    ///
    /// Measured: two cores, peaks in MiB, predicted and measured with everything else.
    ///
    /// | | 2 layers of 128, 4,096 tokens | 6 layers of 384, 2,700 tokens |
    /// |---|---|---|
    /// | whole, 1 device | 167, 159 | 601, 556 |
    /// | whole, 4 devices | 209, 204 | |
    /// | in parts, 1 device | 151, 144 | 367, 360 |
    /// | in parts, 4 devices | 191, 186 | |
    fn computed_bytes(&self, layers: usize) -> u128 {
        /// Numbers for each token that may follow: its logit, its probability, and a gradient.
        const LOGITS: usize = 3;
        let Sizes { of_layer, vocabulary, .. } = self.sizes;
        let (widths, logits) = (layers * of_layer, vocabulary * LOGITS);
        let single = Precision::F32.bytes();
        let of_width = match self.precision {
            Precision::F32 => single,
            // Kernels compute halves in single precision.
            Precision::Bf16 => single + self.precision.bytes(),
        };
        widths as u128 * of_width + logits as u128 * single
    }

    /// What says of each pair of tokens in a row whether one sees the other: the mask, and what it is
    /// made from.
    fn mask_bytes(&self) -> u128 {
        let of_pair = 1 + 2 * self.precision.bytes() + Precision::F32.bytes();
        let pairs = |batches: &Vec<Batch>| {
            let (rows, length) = self.rows_and_length(batches);
            rows * length * length
        };
        self.devices() * of_pair * self.steps.iter().map(pairs).fold(0, u128::max)
    }

    fn devices(&self) -> u128 {
        (self.ranks.1 - self.ranks.0).into()
    }

    /// The tokens of a device in the largest step, padding included.
    fn tokens(&self) -> u128 {
        let of_step = |batches: &Vec<Batch>| {
            let (rows, length) = self.rows_and_length(batches);
            rows * length
        };
        self.steps.iter().map(of_step).fold(0, u128::max)
    }

    /// The rows of a device in a step, and their length.
    fn rows_and_length(&self, batches: &[Batch]) -> (u128, u128) {
        let rows: u64 = batches.iter().map(|batch| batch.rows).sum();
        let length = batches.iter().map(|batch| batch.padded_length).fold(0, u64::max);
        (rows.div_ceil(self.world_size).into(), length.into())
    }
}

/// The layer whose adapter a parameter belongs to, if it does to one.
fn layer_of(name: &str) -> Option<&str> {
    name.strip_suffix(".lora_A.weight")
}

fn bytes_of(parameter: &ParameterInfo) -> u128 {
    u128::from(parameter.numel()) * size_of::<f32>() as u128
}

/// What kernels keep for their next call, and the allocator for the next tensor: some of it in each
/// process, and some for each device.
fn kept_bytes(devices: u128) -> u128 {
    const PER_PROCESS: u128 = 65 << 20;
    const PER_DEVICE: u128 = 12 << 20;
    PER_PROCESS + devices * PER_DEVICE
}

/// The memory that a process took for its devices, and how much of it the model needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory {
    pub(crate) peak_bytes: u64,
    /// The number of devices of the process.
    pub(crate) n_devices: u64,
    pub(crate) needs: Needs,
}

impl Memory {
    /// The memory of a session, if it is known.
    pub(crate) fn of(session: &Session, needs: Needs) -> Option<Self> {
        let peak_bytes = session.peak_bytes?;
        Some(Self { peak_bytes, n_devices: session.devices_here, needs })
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { peak_bytes, n_devices, needs } = *self;
        let Needs { whole_bytes, sharded_bytes, is_sharded } = needs;
        let (whole, sharded) = if is_sharded { ("", ", as here") } else { (", as here", "") };
        let each = u128::from(peak_bytes) / u128::from(n_devices.max(1));
        let devices = if n_devices == 1 {
            "its device".into()
        } else {
            format!("each of its {n_devices} devices")
        };
        write!(
            f,
            "peak memory of the process: {}, {} ",
            HumanBytes(peak_bytes.into()),
            HumanBytes(each)
        )?;
        write!(f, "for {devices}; parameters, gradients and optimizer state: ")?;
        write!(f, "{} per device whole{whole}, ", HumanBytes(whole_bytes))?;
        write!(f, "{} per rank sharded by the plan{sharded}; ", HumanBytes(sharded_bytes))?;
        write!(f, "activations are in neither")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::{
        built_in::Sizes as Asked,
        model::Model,
        settings::{
            Settings,
            tests::{finetune_of, settings},
        },
    };

    /// The model of this program.
    const OWN: Asked = Asked { n_layers: None, hidden: None, n_heads: None };

    #[test]
    fn a_line_says_what_is_whole_and_what_is_sharded() {
        let needs = Needs { whole_bytes: 2048, sharded_bytes: 1024, is_sharded: false };
        let memory = Memory { peak_bytes: 4096, n_devices: 2, needs };
        let words = "peak memory of the process: 4.00 KiB, 2.00 KiB for each of its 2 devices; \
                     parameters, gradients and optimizer state: 2.00 KiB per device whole, as \
                     here, 1.00 KiB per rank sharded by the plan; activations are in neither";
        assert_eq!(memory.to_string(), words);
        let sharded = Memory { needs: Needs { is_sharded: true, ..needs }, ..memory };
        let words = "2.00 KiB per device whole, 1.00 KiB per rank sharded by the plan, as here;";
        assert!(sharded.to_string().contains(words), "{sharded}");
    }

    fn model(sizes: Asked) -> Model {
        Settings { finetune: finetune_of(&sizes), ..settings() }.trained_model().unwrap()
    }

    /// What a model of this many parameters takes in a process of four devices, without batches.
    fn predicted(config: Asked, sharding: Option<&Sharding>) -> Prediction {
        let parameters = &model(config).parameters().unwrap();
        let work = Work {
            check: false,
            sizes: model(config).sizes(),
            precision: Precision::F32,
            parameters,
            sharding,
            steps: &[],
            is_packed: false,
            world_size: 4,
            ranks: (0, 4),
            base_bytes: 1,
        };
        work.predicted().unwrap()
    }

    #[test]
    fn devices_of_a_process_share_a_whole_model_and_divide_one_in_parts() {
        let all = model(OWN).parameters().unwrap().iter().map(ParameterInfo::bytes).sum::<u64>();
        let largest = 352 * 128 * 4;
        let whole = predicted(OWN, None);
        let kept = (65 + 4 * 12) << 20;
        assert_eq!(whole.total(), 1 + all * (1 + 5 + 2) + 4 * 2 * largest + kept);

        let sharding = |keep| Sharding { keep, ..Sharding::full() };
        let parts = predicted(OWN, Some(&sharding(Keep::Inputs)));
        let block = 4 * 128 * 128 + 3 * 352 * 128 + 2 * 128;
        let terms: Vec<u64> = parts.terms.iter().map(|(_, bytes)| *bytes).collect();
        // Each of 21 parameters has a count of steps on each device.
        let state = 2 * all + 4 * 21 * 4;
        let unit = block * 4;
        let expected = [1, all, all, state, unit, 4 * unit, 4 * 2 * largest, 0, kept];
        assert_eq!(terms, expected);

        let gathered = predicted(OWN, Some(&sharding(Keep::Gathered)));
        assert_eq!(gathered.terms[4], ("gathered parameters", all));
    }

    #[test]
    fn the_largest_process_need_not_be_the_first() {
        let whole_tensors =
            Sharding { strategy: crate::strategy::Strategy::WholeTensor, ..Sharding::full() };
        let parameters = &model(OWN).parameters().unwrap();
        let of_ranks = |ranks| Work {
            check: false,
            sizes: model(OWN).sizes(),
            precision: Precision::F32,
            parameters,
            sharding: Some(&whole_tensors),
            steps: &[],
            is_packed: false,
            world_size: 4,
            ranks,
            base_bytes: 1,
        };
        let predicted = |rank| of_ranks((rank, rank + 1)).predicted().unwrap();
        assert!(predicted(3).total() > predicted(0).total());
        for rank in 0..4 {
            let largest = of_ranks((rank, rank + 1)).predicted_of_largest().unwrap();
            assert_eq!(largest, predicted(3));
        }
        let all = of_ranks((0, 4));
        assert_eq!(all.predicted_of_largest().unwrap(), all.predicted().unwrap());
    }

    #[test]
    fn a_model_in_parts_may_be_too_large_to_write_in_one_process() {
        let model = model(Asked { hidden: Some(1024), n_layers: Some(12), ..OWN });
        let parameters = &model.parameters().unwrap();
        let all: u64 = parameters.iter().map(ParameterInfo::numel).sum();
        let full = Sharding::full();
        let work = |sharding, ranks| Work {
            check: false,
            sizes: model.sizes(),
            precision: Precision::F32,
            parameters,
            sharding,
            steps: &[],
            is_packed: false,
            world_size: 8,
            ranks,
            base_bytes: 0,
        };
        let too_large = |work: Work<'_>, limit| work.too_large_to_write(limit).unwrap();
        assert_eq!(too_large(work(Some(&full), (3, 4)), None), Some(8 * all));
        let (together, whole) = (work(Some(&full), (0, 8)), work(None, (0, 1)));
        assert_eq!((too_large(together, None), too_large(whole, None)), (None, None));
        let (less, enough) = (Limit::of_process(8 * all - 1, ""), Limit::of_process(8 * all, ""));
        assert_eq!(too_large(whole, Some(&less)), Some(8 * all));
        assert_eq!(too_large(whole, Some(&enough)), None);
    }

    #[test]
    fn what_a_token_takes_grows_with_layers() {
        let parameters = &[];
        let work = Work {
            check: false,
            sizes: model(OWN).sizes(),
            precision: Precision::F32,
            parameters,
            sharding: None,
            steps: &[],
            is_packed: false,
            world_size: 1,
            ranks: (0, 1),
            base_bytes: 0,
        };
        let layers = |layers| work.computed_bytes(layers);
        assert_eq!((layers(1), layers(2)), (12_080, 21_040));
    }
}
