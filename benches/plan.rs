//! Reading, planning and costing: regressions of our own, not comparisons.

#![allow(clippy::unwrap_used, reason = "a bench that cannot be set up must not run")]

use std::hint::black_box;

use candle_distributed::{
    plan::{CostModel, Full, Layout, ParameterInfo, PlanReport, ShardingStrategy, StrategyKind, source},
    types::{Placement, WorldSize},
};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

const LLAMA: &str = include_str!("../tests/plans/models/llama-3.1-8b.json");

/// The blocks of Llama 3.1 so often that there are as many tensors as in the largest open models.
fn large_model() -> Vec<ParameterInfo> {
    let llama = source::from_manifest(LLAMA).unwrap();
    let copy = |copy: usize, info: &ParameterInfo| {
        ParameterInfo::new(format!("part{copy}.{}", info.name()), info.shape(), info.dtype()).unwrap()
    };
    (0..156).flat_map(|part| llama.iter().map(move |info| copy(part, info))).collect()
}

fn world(size: u64) -> WorldSize {
    WorldSize::new(size).unwrap()
}

fn strategies() -> [(&'static str, Box<dyn ShardingStrategy>); 4] {
    [
        ("full", StrategyKind::Full.create()),
        ("full_flat", Box::new(Full::new(Layout::Flat))),
        ("layer_wise", StrategyKind::LayerWise.create()),
        ("hybrid", StrategyKind::Hybrid.create()),
    ]
}

fn read(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("plan/read");
    group.throughput(Throughput::Elements(291));
    group.bench_function("manifest_291", |bencher| {
        bencher.iter(|| {
            let parameters = source::from_manifest(black_box(LLAMA)).unwrap();
            assert_eq!(parameters.len(), 291);
            parameters
        });
    });
    group.finish();
}

fn make(criterion: &mut Criterion) {
    let parameters = large_model();
    let mut group = criterion.benchmark_group("plan/make");
    group.throughput(Throughput::Elements(parameters.len() as u64));
    for (name, strategy) in strategies() {
        group.bench_function(format!("{name}_45k_w16384"), |bencher| {
            bencher.iter(|| {
                let plan = strategy.plan(black_box(&parameters), world(16_384)).unwrap();
                assert_eq!(plan.parameters().len(), parameters.len());
                plan
            });
        });
    }
    group.finish();
}

fn cost(criterion: &mut Criterion) {
    let parameters = large_model();
    let total: u64 = parameters.iter().map(ParameterInfo::bytes).sum();
    let mut group = criterion.benchmark_group("plan/cost");
    group.throughput(Throughput::Elements(parameters.len() as u64));
    for (name, strategy) in strategies() {
        let plan = strategy.plan(&parameters, world(16_384)).unwrap();
        group.bench_function(format!("{name}_45k_w16384"), |bencher| {
            bencher.iter(|| {
                let cost = black_box(&plan).cost(&CostModel::default()).unwrap();
                assert_eq!(cost.ranks.iter().map(|rank| rank.param_bytes).sum::<u64>(), total);
                cost
            });
        });
    }
    group.finish();
}

fn shards(criterion: &mut Criterion) {
    let parameters = large_model();
    let plan = StrategyKind::Full.create().plan(&parameters, world(16_384)).unwrap();
    let first = Placement::new(0, 16_384).unwrap().rank();
    let mut group = criterion.benchmark_group("plan/shards");
    group.throughput(Throughput::Elements(parameters.len() as u64));
    group.bench_function("one_rank_45k_w16384", |bencher| {
        bencher.iter(|| {
            let shards: Vec<_> = black_box(&plan).shards_of_rank(first).unwrap().collect();
            assert_eq!(shards.len(), parameters.len());
            shards
        });
    });
    group.finish();
}

fn render(criterion: &mut Criterion) {
    let plan = StrategyKind::Full.create().plan(&large_model(), world(16_384)).unwrap();
    let mut group = criterion.benchmark_group("plan/render");
    group.throughput(Throughput::Elements(plan.parameters().len() as u64));
    group.bench_function("text_45k_w16384", |bencher| {
        bencher.iter(|| {
            let report = PlanReport::new(black_box(&plan), &CostModel::default(), None).unwrap();
            let text = report.to_string();
            assert!(text.starts_with("full over 16,384 ranks"));
            text
        });
    });
    group.finish();
}

criterion_group!(benches, read, make, cost, shards, render);
criterion_main!(benches);
