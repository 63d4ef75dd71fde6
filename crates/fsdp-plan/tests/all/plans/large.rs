//! The largest open model over 16,384 ranks: what a plan of it may cost and must reach.

use crate::plans::inputs::{deepseek, world};
use fsdp_plan::{
    cost::CostModel,
    reshard::{Reshard, Volume},
    search::{Outcome, Search},
    source,
    strategy::{Full, Layout, ShardingStrategy, WholeTensor},
};

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
    let file = fixtures::deepseek_v3();
    let parameters = source::from_safetensors(&file).unwrap();
    for layout in [Layout::Dim0, Layout::ROWS, Layout::BLOCKS] {
        let plan = Full::new(layout).plan(&parameters, world(16_384)).unwrap();
        let json = serde_json::to_string(&plan).unwrap();
        assert!(json.len() <= 3 * file.len(), "{layout:?}: {} of {}", json.len(), file.len());
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
        let [from, to] =
            [from, to].map(|size| Full::default().plan(&parameters, world(size)).unwrap());
        let reshard = Reshard::new(&from, &to).unwrap();
        assert!(staying(reshard.volume()) < 0.1);
        assert!(staying(reshard.renumbered().volume()) >= at_least);
    }
}

#[test]
fn a_search_tells_what_is_missing() {
    let budget = 40 << 30;
    let search = Search::new(world(2048), budget);
    let Outcome::Missing { smallest, bytes } = search.run(&deepseek()).unwrap() else {
        panic!("layers of 22 GB fit")
    };
    assert_eq!(smallest.cost.peak_bytes(), u128::from(budget + bytes));
    // Gathered expert by expert it does fit.
    let experts = "model.layers.*.mlp.experts.*".parse().unwrap();
    let parameters: Vec<_> =
        deepseek().into_iter().map(|info| info.with_layer_pattern(&experts)).collect();
    let Outcome::Fits(found) = search.run(&parameters).unwrap() else {
        panic!("experts of 88 MB do not fit")
    };
    assert!(found.cost.peak_bytes() <= u128::from(budget));
}
