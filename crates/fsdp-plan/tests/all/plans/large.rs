//! DeepSeek-V3 on 16,384 ranks: limits on the size and balance of its plans.

use crate::plans::inputs::{deepseek, world};
use fsdp_plan::{
    cost::CostModel,
    reshard::{MoveVolume, Reshard},
    search::Search,
    source,
    strategy::{Full, Layout, ShardingStrategy, WholeTensor},
};

fn max_over_mean(strategy: &dyn ShardingStrategy) -> f64 {
    let plan = strategy.plan(&deepseek(), world(16_384)).unwrap();
    plan.cost(&CostModel::default()).unwrap().max_over_mean
}

#[test]
fn ragged_plans_balance_deepseek() {
    assert!(max_over_mean(&Full::new(Layout::ROWS)) <= 1.004);
    assert!(max_over_mean(&Full::new(Layout::BLOCKS)) <= 1.0005);
    assert!(max_over_mean(&WholeTensor) <= 1.000_001);
    // Dim-0 cuts cannot balance it.
    assert!(max_over_mean(&Full::default()) > 6.0);
}

#[test]
fn plan_size_is_near_header_size() {
    let file = fixtures::deepseek_v3();
    let parameters = source::from_safetensors(&file).unwrap();
    for layout in [Layout::Dim0, Layout::ROWS, Layout::BLOCKS] {
        let plan = Full::new(layout).plan(&parameters, world(16_384)).unwrap();
        let json = serde_json::to_string(&plan).unwrap();
        assert!(json.len() <= 3 * file.len(), "{layout:?}: {} of {}", json.len(), file.len());
    }
}

fn staying(volume: MoveVolume) -> f64 {
    let [stay, all] = [volume.stay_bytes, volume.stay_bytes + volume.move_bytes]
        .map(|bytes| f64::from(u32::try_from(bytes >> 20).unwrap()));
    stay / all
}

#[test]
fn renumbering_keeps_bytes_in_place() {
    let parameters = deepseek();
    for (from, to, at_least) in [(8, 16, 0.499), (64, 48, 0.66)] {
        let [from, to] =
            [from, to].map(|size| Full::default().plan(&parameters, world(size)).unwrap());
        let reshard = Reshard::new(&from, &to).unwrap();
        assert!(staying(reshard.volume()) < 0.1);
        assert!(staying(reshard.renumbered().volume()) >= at_least);
    }
}

#[test]
fn search_reports_missing_bytes() {
    let budget = 40 << 30;
    let search =
        Search { world_size: world(2048), budget_bytes: budget, model: CostModel::default() };
    let layers = search.run(&deepseek()).unwrap();
    assert!(layers.missing_bytes > 0, "layers of 22 GB fit");
    assert_eq!(layers.cost.peak_bytes(), u128::from(budget + layers.missing_bytes));
    // It fits if each expert is gathered separately.
    let experts = "model.layers.*.mlp.experts.*".parse().unwrap();
    let parameters: Vec<_> =
        deepseek().into_iter().map(|info| info.with_layer_pattern(&experts)).collect();
    let found = search.run(&parameters).unwrap();
    assert_eq!(found.missing_bytes, 0, "experts of 88 MB do not fit");
    assert!(found.cost.peak_bytes() <= u128::from(budget));
}
