//! Planning DeepSeek-V3 (45,395 tensors), and small models, for 16,384 ranks: reading, planning,
//! costing, resharding, searching.

#![allow(clippy::unwrap_used, reason = "a bench that cannot be set up must not run")]

use std::hint::black_box;

use candle_distributed::{
    plan::{
        ParameterInfo, ShardingPlan,
        cost::CostModel,
        report::PlanReport,
        reshard::Reshard,
        search::Search,
        source,
        strategy::{Full, Hybrid, LayerSharing, LayerWise, Layout, ShardingStrategy, WholeTensor},
    },
    types::{Placement, WorldSize},
};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

const N_RANKS: u64 = 16_384;

fn deepseek() -> Vec<ParameterInfo> {
    source::from_safetensors(&fixtures::deepseek_v3()).unwrap()
}

fn world(size: u64) -> WorldSize {
    WorldSize::new(size).unwrap()
}

fn strategies() -> [(&'static str, Box<dyn ShardingStrategy>); 7] {
    [
        ("full", Box::new(Full::default())),
        ("row_ragged", Box::new(Full::new(Layout::ROWS))),
        ("block_ragged", Box::new(Full::new(Layout::BLOCKS))),
        ("layer_wise", Box::new(LayerWise::default())),
        ("layer_wise_contiguous", Box::new(LayerWise { sharing: LayerSharing::Contiguous })),
        ("whole_tensor", Box::new(WholeTensor)),
        ("hybrid", Box::new(Hybrid::default())),
    ]
}

fn ragged(parameters: &[ParameterInfo], n_ranks: u64) -> ShardingPlan {
    Full::new(Layout::ROWS).plan(parameters, world(n_ranks)).unwrap()
}

fn read(criterion: &mut Criterion) {
    let file = fixtures::deepseek_v3();
    let mut group = criterion.benchmark_group("plan/read");
    group.throughput(Throughput::Bytes(file.len() as u64));
    group.bench_function("header_45k", |bencher| {
        bencher.iter(|| {
            let parameters = source::from_safetensors(black_box(&file)).unwrap();
            assert_eq!(parameters.len(), 45_395);
            parameters
        });
    });
    group.finish();
}

/// Times the whole way from the bytes of a header to the totals of all ranks.
fn header_to_totals(criterion: &mut Criterion) {
    let file = fixtures::deepseek_v3();
    let mut group = criterion.benchmark_group("plan/header_to_totals");
    group.throughput(Throughput::Elements(45_395));
    for (name, layout) in
        [("full", Layout::Dim0), ("row_ragged", Layout::ROWS), ("block_ragged", Layout::BLOCKS)]
    {
        group.bench_function(format!("{name}_45k_w16384"), |bencher| {
            bencher.iter(|| {
                let parameters = source::from_safetensors(black_box(&file)).unwrap();
                let plan = Full::new(layout).plan(&parameters, world(N_RANKS)).unwrap();
                let cost = plan.cost(&CostModel::default()).unwrap();
                assert_eq!(cost.ranks.len() as u64, N_RANKS);
                (plan, cost)
            });
        });
    }
    group.finish();
}

fn make(criterion: &mut Criterion) {
    let parameters = deepseek();
    let mut group = criterion.benchmark_group("plan/make");
    group.throughput(Throughput::Elements(parameters.len() as u64));
    for (name, strategy) in strategies() {
        group.bench_function(format!("{name}_45k_w16384"), |bencher| {
            bencher.iter(|| {
                let plan = strategy.plan(black_box(&parameters), world(N_RANKS)).unwrap();
                assert_eq!(plan.parameters().len(), parameters.len());
                plan
            });
        });
    }
    group.finish();
}

fn cost(criterion: &mut Criterion) {
    let parameters = deepseek();
    let total: u64 = parameters.iter().map(ParameterInfo::bytes).sum();
    let mut group = criterion.benchmark_group("plan/cost");
    group.throughput(Throughput::Elements(parameters.len() as u64));
    for (name, strategy) in strategies() {
        let plan = strategy.plan(&parameters, world(N_RANKS)).unwrap();
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

/// Times the costs of small models on many ranks. Most ranks own no part of a tensor.
fn small(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("plan/cost_small");
    for (model, manifest) in [("gpt2", fixtures::GPT2), ("llama_8b", fixtures::LLAMA)] {
        let parameters = source::from_manifest(manifest).unwrap();
        group.throughput(Throughput::Elements(parameters.len() as u64));
        for (name, layout) in
            [("full", Layout::Dim0), ("row_ragged", Layout::ROWS), ("block_ragged", Layout::BLOCKS)]
        {
            let plan = Full::new(layout).plan(&parameters, world(N_RANKS)).unwrap();
            group.bench_function(format!("{name}_{model}_w16384"), |bencher| {
                bencher.iter(|| black_box(&plan).cost(&CostModel::default()).unwrap());
            });
        }
    }
    group.finish();
}

fn shards(criterion: &mut Criterion) {
    let parameters = deepseek();
    let middle = Placement::new(N_RANKS / 2, N_RANKS).unwrap().rank();
    let mut group = criterion.benchmark_group("plan/shards");
    group.throughput(Throughput::Elements(parameters.len() as u64));
    for (name, strategy) in strategies() {
        let plan = strategy.plan(&parameters, world(N_RANKS)).unwrap();
        group.bench_function(format!("{name}_one_rank_45k_w16384"), |bencher| {
            bencher.iter(|| {
                let shards: Vec<_> = black_box(&plan).shards_of_rank(middle).unwrap().collect();
                assert!(shards.iter().all(|(_, shard)| shard.owner_rank == middle));
                shards
            });
        });
    }
    group.finish();
}

fn reshard(criterion: &mut Criterion) {
    let from = ragged(&deepseek(), N_RANKS);
    let to = ragged(&deepseek(), 12_288);
    let mut group = criterion.benchmark_group("plan/reshard");
    let reshard = Reshard::new(&from, &to).unwrap();
    let moves = reshard.volume().moves;
    group.throughput(Throughput::Elements(moves));
    group.bench_function("anew_all_moves_45k_w16384_w12288", |bencher| {
        bencher.iter(|| assert_eq!(black_box(&reshard).moves().count() as u64, moves));
    });
    group.bench_function("renumber_45k_w16384_w12288", |bencher| {
        bencher.iter(|| Reshard::new(black_box(&from), &to).unwrap().renumbered());
    });
    group.finish();
}

fn search(criterion: &mut Criterion) {
    let experts = "model.layers.*.mlp.experts.*".parse().unwrap();
    let parameters: Vec<_> =
        deepseek().into_iter().map(|info| info.with_layer_pattern(&experts)).collect();
    let mut group = criterion.benchmark_group("plan/search");
    group.sample_size(10);
    group.bench_function("experts_45k_w2048", |bencher| {
        bencher.iter(|| {
            let (world_size, budget_bytes) = (world(2048), 40 << 30);
            let search = Search { world_size, budget_bytes, model: CostModel::default() };
            let found = search.run(black_box(&parameters)).unwrap();
            assert!(found.cost.peak_bytes() <= 40 << 30);
            found
        });
    });
    group.finish();
}

fn render(criterion: &mut Criterion) {
    let plan = ragged(&deepseek(), N_RANKS);
    let mut group = criterion.benchmark_group("plan/render");
    group.throughput(Throughput::Elements(plan.parameters().len() as u64));
    group.bench_function("text_45k_w16384", |bencher| {
        bencher.iter(|| {
            let report = PlanReport::new(black_box(&plan), &CostModel::default(), None).unwrap();
            let text = report.to_string();
            assert!(text.starts_with("full-row-ragged over 16,384 ranks"));
            text
        });
    });
    group.finish();
}

criterion_group!(
    benches,
    read,
    header_to_totals,
    make,
    cost,
    small,
    shards,
    reshard,
    search,
    render
);
criterion_main!(benches);
