//! The largest open model over 16,384 ranks: what a plan of it may cost and must reach.

use candle_distributed::plan::{
    CostModel, ElemType, Full, Layout, Outcome, ParameterInfo, Reshard, Search, ShardingStrategy, Volume, WholeTensor,
    source,
};
use serde::Deserialize;
use serde_json::json;

use crate::inputs::world;

#[derive(Deserialize)]
struct Recipe {
    dtype_default: ElemType,
    before: Vec<Entry>,
    groups: Vec<Group>,
    after: Vec<Entry>,
    tensors: usize,
    params: u128,
}

#[derive(Deserialize)]
struct Group {
    layers: (u64, u64),
    experts: u64,
    tensors: Vec<Entry>,
}

/// A name with `{l}` for the layer and `{e}` for the expert, a shape, and a dtype where it is not the usual one.
#[derive(Deserialize)]
struct Entry(String, Vec<u64>, #[serde(default)] Option<ElemType>);

impl Recipe {
    fn parameter(&self, Entry(name, shape, dtype): &Entry, layer: u64, expert: u64) -> ParameterInfo {
        let name = name.replace("{l}", &layer.to_string()).replace("{e}", &expert.to_string());
        ParameterInfo::new(name, shape.as_slice(), dtype.unwrap_or(self.dtype_default)).unwrap()
    }

    /// Runs of entries with `{e}` are listed expert by expert.
    fn layer(&self, group: &Group, layer: u64) -> Vec<ParameterInfo> {
        let of_expert = |entry: &Entry| entry.0.contains("{e}");
        let runs = group.tensors.chunk_by(|left, right| of_expert(left) == of_expert(right));
        let listed = runs.flat_map(|run| {
            let experts = if of_expert(&run[0]) { group.experts } else { 1 };
            (0..experts).flat_map(move |expert| run.iter().map(move |entry| self.parameter(entry, layer, expert)))
        });
        listed.collect()
    }
}

/// DeepSeek-V3 with 671 billion parameters, most in `BF16`.
pub(crate) fn deepseek() -> Vec<ParameterInfo> {
    let recipe: Recipe = serde_json::from_str(include_str!("models/deepseek-v3.recipe.json")).unwrap();
    let once = |entries: &[Entry]| entries.iter().map(|entry| recipe.parameter(entry, 0, 0)).collect::<Vec<_>>();
    let layers =
        recipe.groups.iter().flat_map(|group| (group.layers.0..group.layers.1).map(move |layer| (group, layer)));
    let blocks = layers.flat_map(|(group, layer)| recipe.layer(group, layer));
    let parameters: Vec<_> = once(&recipe.before).into_iter().chain(blocks).chain(once(&recipe.after)).collect();
    assert_eq!(parameters.len(), recipe.tensors);
    assert_eq!(parameters.iter().map(|info| u128::from(info.numel())).sum::<u128>(), recipe.params);
    parameters
}

fn max_over_mean(strategy: &dyn ShardingStrategy) -> f64 {
    let plan = strategy.plan(&deepseek(), world(16_384)).unwrap();
    plan.cost(&CostModel::default()).unwrap().max_over_mean
}

#[test]
fn ragged_plans_balance_the_largest_model_over_16384_ranks() {
    assert!(max_over_mean(&Full::new(Layout::ROWS)) <= 1.004);
    assert!(max_over_mean(&Full::new(Layout::BLOCKS)) <= 1.0005);
    assert!(max_over_mean(&WholeTensor) <= 1.000_001);
    // Rows of each parameter by itself cannot.
    assert!(max_over_mean(&Full::default()) > 6.0);
}

#[test]
fn a_plan_is_not_much_larger_than_the_header_it_was_made_from() {
    let parameters = deepseek();
    let mut end = 0;
    let entries = parameters.iter().map(|info| {
        let begin = end;
        end += info.bytes();
        let entry = json!({"dtype": info.dtype(), "shape": info.shape(), "data_offsets": [begin, end]});
        (info.name().to_owned(), entry)
    });
    let header = serde_json::to_string(&entries.collect::<serde_json::Map<_, _>>()).unwrap();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    assert_eq!(source::from_safetensors(&file).unwrap().len(), parameters.len());
    for layout in [Layout::Dim0, Layout::ROWS, Layout::BLOCKS] {
        let plan = Full::new(layout).plan(&parameters, world(16_384)).unwrap();
        let json = serde_json::to_string(&plan).unwrap();
        assert!(json.len() <= 3 * header.len(), "{layout:?}: {} of {}", json.len(), header.len());
    }
}

fn staying(volume: Volume) -> f64 {
    let [stay, all] = [volume.stay_bytes, volume.stay_bytes + volume.move_bytes]
        .map(|bytes| f64::from(u32::try_from(bytes >> 20).unwrap()));
    stay / all
}

#[test]
fn resizing_moves_as_little_as_can_be() {
    let parameters = deepseek();
    for (from, to, optimum) in [(8, 16, 0.5), (64, 48, 0.75), (16_384, 12_288, 0.75)] {
        let plan = Full::new(Layout::ROWS).plan(&parameters, world(from)).unwrap();
        let resized = plan.resized(world(to)).unwrap();
        let volume = Reshard::new(&plan, &resized).unwrap().volume();
        assert!((staying(volume) - optimum).abs() < 0.0005, "{from} to {to}: {volume:?}");
        let cost = resized.cost(&CostModel::default()).unwrap();
        assert!(cost.max_over_mean < 1.004, "{}", cost.max_over_mean);
    }
}

#[test]
fn renumbering_finds_ranks_that_hold_what_is_needed() {
    let parameters = deepseek();
    for (from, to, at_least) in [(8, 16, 0.499), (64, 48, 0.66)] {
        let [from, to] = [from, to].map(|size| Full::default().plan(&parameters, world(size)).unwrap());
        let reshard = Reshard::new(&from, &to).unwrap();
        assert!(staying(reshard.volume()) < 0.1);
        assert!(staying(reshard.renumbered().volume()) >= at_least);
    }
}

#[test]
fn a_search_tells_what_is_missing() {
    let budget = 40 << 30;
    let search = Search::new(world(2048), budget);
    let Outcome::Missing { smallest, bytes } = search.run(&deepseek()).unwrap() else { panic!("layers of 22 GB fit") };
    assert_eq!(smallest.cost.peak_bytes(), u128::from(budget + bytes));
    // Gathered expert by expert it does fit.
    let experts = "model.layers.*.mlp.experts.*".parse().unwrap();
    let parameters: Vec<_> = deepseek().into_iter().map(|info| info.with_layer_pattern(&experts)).collect();
    let Outcome::Fits(found) = search.run(&parameters).unwrap() else { panic!("experts of 88 MB do not fit") };
    assert!(found.cost.peak_bytes() <= u128::from(budget));
}
