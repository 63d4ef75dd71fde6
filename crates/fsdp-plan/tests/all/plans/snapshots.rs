//! Snapshots of plans as text and JSON.

use std::fmt::Write;

use fsdp_plan::{
    ShardingPlan,
    cost::{CostModel, Links},
    report::PlanReport,
    strategy::{
        Full, Hsdp, Hybrid, LayerSharing, LayerWise, Layout, ShardingStrategy, WholeTensor,
    },
};

use crate::{
    laws::plan::replicated,
    plans::{
        inputs::{deepseek, gpt2, llama, mixtral, qwen, rank, vit, world},
        json_lines::json_lines,
    },
};

type Strategies = Vec<(&'static str, Box<dyn ShardingStrategy>)>;

/// Returns the strategies of the snapshots. Few models contain the names in the default rules of
/// `Hybrid`, so its rules keep everything outside the blocks whole.
fn strategies() -> Strategies {
    let whole = [
        "wte",
        "wpe",
        "ln_f",
        "embed_tokens",
        "embeddings",
        "norm",
        "layernorm",
        "lm_head",
        "classifier",
    ];
    let hybrid = Hybrid::new(["h", "layers", "layer"], whole).unwrap();
    vec![
        ("full", Box::new(Full::default())),
        ("full-flat", Box::new(Full::new(Layout::Flat))),
        ("full-flat-aligned", Box::new(Full::new(Layout::FlatAligned))),
        ("full-row-ragged", Box::new(Full::new(Layout::ROWS))),
        ("full-block-ragged", Box::new(Full::new(Layout::BLOCKS))),
        ("layer-wise", Box::new(LayerWise::default())),
        ("layer-wise-contiguous", Box::new(LayerWise { sharing: LayerSharing::Contiguous })),
        ("whole-tensor", Box::new(WholeTensor)),
        ("hybrid", Box::new(hybrid)),
    ]
}

fn report(plan: &ShardingPlan) -> PlanReport<'_> {
    PlanReport::new(plan, &CostModel::default(), None).unwrap()
}

#[test]
fn text_of_every_strategy() {
    let models = [
        ("gpt2", gpt2()),
        ("qwen2.5-0.5b", qwen()),
        ("llama-3.1-8b", llama()),
        ("mixtral", mixtral()),
        ("vit-l", vit()),
    ];
    for (model, parameters) in models {
        for (name, strategy) in strategies() {
            let mut text = String::new();
            for world_size in [1, 3, 8, 64] {
                let plan = strategy.plan(&parameters, world(world_size)).unwrap();
                writeln!(text, "{}\n", report(&plan)).unwrap();
            }
            insta::assert_snapshot!(format!("{model}_{name}"), text);
        }
    }
}

#[test]
fn text_of_replicas() {
    let plan = Hsdp::new(Full::default(), 2).plan(&llama(), world(16)).unwrap();
    let model = CostModel { links: Some(Links::H100), ..CostModel::default() };
    insta::assert_snapshot!(PlanReport::new(&plan, &model, None).unwrap());
}

#[test]
fn json_of_one_rank() {
    for (name, strategy) in strategies() {
        let plan = strategy.plan(&gpt2(), world(3)).unwrap();
        let report = PlanReport::new(&plan, &CostModel::default(), Some(rank(1, 3))).unwrap();
        insta::assert_snapshot!(format!("gpt2_{name}_w3_rank1.json"), json_lines(&report));
    }
}

#[test]
fn text_of_one_rank() {
    let plan = Full::default().plan(&gpt2()[..8], world(3)).unwrap();
    let report = PlanReport::new(&plan, &CostModel::default(), Some(rank(2, 3))).unwrap();
    insta::assert_snapshot!(report);
}

#[test]
fn text_of_a_large_world() {
    for (name, strategy) in strategies() {
        if name == "full-flat" || name == "full-flat-aligned" {
            continue; // the model mixes dtypes within its layers, which flat buffers reject
        }
        let plan = strategy.plan(&deepseek(), world(16_384)).unwrap();
        insta::assert_snapshot!(format!("deepseek-v3_{name}_w16384"), report(&plan));
    }
}

#[test]
fn explanations_of_parameter_and_rank() {
    for (name, strategy) in strategies() {
        let plan = strategy.plan(&gpt2(), world(8)).unwrap();
        let parameter = plan.explain_parameter("h.3.attn.c_attn.weight").unwrap();
        let rank = plan.explain_rank(rank(7, 8), &CostModel::default()).unwrap();
        insta::assert_snapshot!(format!("gpt2_{name}_explained"), format!("{parameter}\n\n{rank}"));
    }
}

#[test]
fn text_with_always_gathered_parameters() {
    let mut parameters = gpt2();
    for info in &mut parameters {
        if matches!(info.name(), "wte.weight" | "h.3.ln_1.bias") {
            *info = info.clone().with_always_gather(true);
        }
    }
    for (name, strategy) in strategies() {
        let plan = strategy.plan(&parameters, world(3)).unwrap();
        insta::assert_snapshot!(format!("always_gathered_{name}"), report(&plan));
    }
}

#[test]
fn json_round_trips() {
    for (name, strategy) in strategies() {
        let plan = strategy.plan(&qwen(), world(8)).unwrap();
        let kept = replicated(&plan, 2).with_kept_units(["model.layers.23"]).unwrap();
        for plan in [plan, kept] {
            for json in [
                serde_json::to_string(&plan).unwrap(),
                serde_json::to_string(&report(&plan)).unwrap(),
            ] {
                assert_eq!(serde_json::from_str::<ShardingPlan>(&json).unwrap(), plan, "{name}");
            }
        }
    }
}
