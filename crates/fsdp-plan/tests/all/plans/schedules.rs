//! Snapshots of schedules as JSON, and of reports for the candle runtime.

use fsdp_plan::{
    ElemType, ParameterInfo,
    cost::{Activations, CostModel, Runtime},
    report::PlanReport,
    strategy::{Choice, Full, Hsdp, Hybrid, LayerWise, Layout, ShardingStrategy, WholeTensor},
};

use crate::plans::{
    inputs::{f32_parameter, gpt2, rank, world},
    json_lines::json_lines,
};

/// Returns an embedding, two blocks with a frozen bias, and a head.
fn parameters() -> Vec<ParameterInfo> {
    let block = |block: u64| {
        [
            f32_parameter(&format!("h.{block}.weight"), &[5, 4]),
            f32_parameter(&format!("h.{block}.bias"), &[5]).with_requires_grad(false),
            f32_parameter(&format!("h.{block}.norm"), &[4]),
        ]
    };
    let ends = [f32_parameter("embed.weight", &[7, 4]), f32_parameter("head.weight", &[7, 4])];
    let [embed, head] = ends.map(|info| {
        let unit = info.layer().to_owned();
        info.with_unit(unit)
    });
    [embed].into_iter().chain(block(0)).chain(block(1)).chain([head]).collect()
}

#[test]
fn json_of_every_schedule() {
    let hybrid = Hybrid::default()
        .with_rule("norm", Choice::Replicate)
        .unwrap()
        .with_rule("head", Choice::LayerWise)
        .unwrap();
    let strategies: [(&str, Box<dyn ShardingStrategy>); 6] = [
        ("dim0", Box::new(Full::default())),
        ("blocks", Box::new(Full::new(Layout::BlockRagged { block: 4 }))),
        ("layer-wise", Box::new(LayerWise::default())),
        ("whole-tensor", Box::new(WholeTensor)),
        ("hybrid", Box::new(hybrid.clone())),
        ("hybrid-replicas", Box::new(Hsdp::new(hybrid, 2))),
    ];
    for (name, strategy) in strategies {
        let plan = strategy.plan(&parameters(), world(4)).unwrap();
        let plan = plan.with_kept_units(["h.1"]).unwrap();
        let schedule = plan.schedule(&CostModel::default()).unwrap();
        insta::assert_snapshot!(format!("schedule_{name}.json"), json_lines(&schedule));
    }
}

#[test]
fn text_for_candle_runtime() {
    let plan = Full::new(Layout::ROWS).plan(&gpt2(), world(4)).unwrap();
    let activations =
        Activations::for_transformer(1024, 768, ElemType::F32, Runtime::Candle).unwrap();
    let model = CostModel {
        runtime: Runtime::Candle,
        activations: Some(activations),
        ..CostModel::default()
    };
    let report = PlanReport::new(&plan, &model, None).unwrap();
    let report = report.with_process(4.try_into().unwrap()).with_budget(1 << 30);
    let explained = plan.explain_rank(rank(3, 4), &model).unwrap();
    insta::assert_snapshot!("gpt2_on_candle", format!("{report}\n\n{explained}"));
}
