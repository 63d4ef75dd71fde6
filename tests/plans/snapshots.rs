//! Plans as people and programs see them.

use candle_distributed::plan::{
    CostModel, Hybrid, ParameterInfo, PlanReport, ShardingPlan, ShardingStrategy, StrategyKind,
};

use crate::{
    inputs::{gpt2, llama, rank, world},
    json_lines::json_lines,
};

const WORLDS: [u64; 4] = [1, 2, 3, 8];

/// The strategies as they are pinned. The names that the default rules of `Hybrid` look for occur in neither model, so
/// here it keeps whole what stands outside the blocks.
fn strategies() -> [Box<dyn ShardingStrategy>; 3] {
    let hybrid = Hybrid::new(["h", "layers"], ["wte", "wpe", "ln_f", "embed_tokens", "norm", "lm_head"]).unwrap();
    [StrategyKind::Full.create(), StrategyKind::LayerWise.create(), Box::new(hybrid)]
}

/// Calls `check` with a name and a plan for each strategy and world.
fn for_each_plan(model: &str, parameters: &[ParameterInfo], check: impl Fn(&str, &ShardingPlan)) {
    for strategy in strategies() {
        for world_size in WORLDS {
            let plan = strategy.plan(parameters, world(world_size)).unwrap();
            check(&format!("{model}_{}_w{world_size}", strategy.name()), &plan);
        }
    }
}

#[test]
fn text_of_every_strategy_and_world() {
    for (model, parameters) in [("gpt2", gpt2()), ("llama-3.1-8b", llama())] {
        for_each_plan(model, &parameters, |name, plan| {
            let report = PlanReport::new(plan, &CostModel::default(), None).unwrap();
            insta::assert_snapshot!(format!("{name}.text"), report);
        });
    }
}

/// The whole report of the first strategy; of the others, whose parameters are the same but for their cut, the cost.
#[test]
fn json_of_every_strategy_and_world() {
    for (model, parameters) in [("gpt2", gpt2()), ("llama-3.1-8b", llama())] {
        for_each_plan(model, &parameters, |name, plan| {
            let report = PlanReport::new(plan, &CostModel::default(), None).unwrap();
            if plan.strategy() == "full" {
                insta::assert_snapshot!(format!("{name}.json"), json_lines(&report));
            } else {
                insta::assert_snapshot!(format!("{name}_cost.json"), json_lines(report.cost()));
            }
        });
    }
}

#[test]
fn json_of_the_whole_report_with_the_shards_of_one_rank() {
    for strategy in strategies() {
        let plan = strategy.plan(&gpt2(), world(3)).unwrap();
        let report = PlanReport::new(&plan, &CostModel::default(), Some(rank(1, 3))).unwrap();
        insta::assert_snapshot!(format!("gpt2_{}_w3_rank1.json", strategy.name()), json_lines(&report));
    }
}

#[test]
fn text_of_the_shards_of_one_rank() {
    let plan = strategies()[0].plan(&gpt2()[..8], world(3)).unwrap();
    let report = PlanReport::new(&plan, &CostModel::default(), Some(rank(2, 3))).unwrap();
    insta::assert_snapshot!(report);
}

#[test]
fn text_of_a_large_world_has_few_lines() {
    let plan = strategies()[0].plan(&llama(), world(16_384)).unwrap();
    let report = PlanReport::new(&plan, &CostModel::default(), None).unwrap();
    insta::assert_snapshot!(report);
}

#[test]
fn always_gathered_parameters_stay_in_every_plan() {
    let gathered = |info: ParameterInfo| match info.name() {
        "wte.weight" | "h.3.ln_1.bias" => info.with_always_gather(true),
        _ => info,
    };
    let parameters: Vec<_> = gpt2().into_iter().map(gathered).collect();
    for strategy in strategies() {
        let plan = strategy.plan(&parameters, world(3)).unwrap();
        let report = PlanReport::new(&plan, &CostModel::default(), None).unwrap();
        insta::assert_snapshot!(format!("always_gathered_{}.text", strategy.name()), report);
    }
}

#[test]
fn json_can_be_read_back() {
    for (model, parameters) in [("gpt2", gpt2()), ("llama-3.1-8b", llama())] {
        for_each_plan(model, &parameters, |name, plan| {
            let report = PlanReport::new(plan, &CostModel::default(), None).unwrap();
            for json in [serde_json::to_string(plan).unwrap(), serde_json::to_string(&report).unwrap()] {
                assert_eq!(&serde_json::from_str::<ShardingPlan>(&json).unwrap(), plan, "{name}");
            }
        });
    }
}
