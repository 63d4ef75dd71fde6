//! Hostile sizes: plans, costs and reports are results or errors, never panics.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    num::NonZeroUsize,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::Instant,
};

use core_types::{Seed, WorldSize};
use fsdp_plan::{
    ElemType, ParameterInfo, ShardingPlan,
    cost::{Activations, CostModel, Link, Links, Optimizer, Runtime},
    report::{PlanDiff, PlanReport},
    reshard::Reshard,
    search::Search,
    strategy::{
        Choice, Full, Hsdp, Hybrid, LayerSharing, LayerWise, Layout, ShardingStrategy, WholeTensor,
    },
};

/// A sequence of random numbers, small, large or extreme.
struct Draws(Seed, u64);

impl Draws {
    fn below(&mut self, n: u64) -> u64 {
        self.1 += 1;
        self.0.derive(self.1).as_u64() % n
    }

    fn size(&mut self) -> u64 {
        let bits = self.below(64);
        match self.below(8) {
            0 => 0,
            1 => u64::MAX,
            2 => 1 << bits,
            3 => (1 << bits) - 1,
            _ => self.below(1 << (bits / 4)),
        }
    }

    fn choose<T: Clone>(&mut self, values: &[T]) -> T {
        values[usize::try_from(self.below(values.len() as u64)).unwrap()].clone()
    }

    /// Returns a number of ranks. The largest take a second a case, so few cases have them.
    fn world(&mut self) -> WorldSize {
        let large = [1 << 20, (1 << 20) - 1];
        let is_large = self.below(30) == 0;
        let small = [1, 2, 3, 5, 7, 64, 1000, 1024];
        WorldSize::new(if is_large { self.choose(&large) } else { self.choose(&small) }).unwrap()
    }

    fn parameter(&mut self, number: u64) -> Option<ParameterInfo> {
        let n_dims = self.below(4);
        let shape: Vec<u64> = (0..n_dims).map(|_| self.size()).collect();
        let dtypes = [
            ElemType::F32,
            ElemType::Bf16,
            ElemType::F64,
            ElemType::I64,
            ElemType::U8,
            ElemType::from_name("F4").unwrap(),
            ElemType::from_name("F8_E4M3").unwrap(),
        ];
        let name = self.choose(&["h.1.w", "h.2.w", "w", "", "h.3.mlp.w", "."]);
        let info =
            ParameterInfo::new(format!("{name}{number}"), shape, self.choose(&dtypes)).ok()?;
        let info =
            if self.below(4) == 0 { info.with_unit(self.choose(&["", "a", "h.1"])) } else { info };
        Some(info.with_always_gather(self.below(4) == 0).with_requires_grad(self.below(4) > 0))
    }

    fn layout(&mut self) -> Layout {
        let (rows, block) = (self.size(), self.size());
        self.choose(&[
            Layout::Dim0,
            Layout::Flat,
            Layout::FlatAligned,
            Layout::ROWS,
            Layout::BLOCKS,
            Layout::RowRagged { rows },
            Layout::BlockRagged { block },
        ])
    }

    fn strategy(&mut self) -> Box<dyn ShardingStrategy> {
        let layout = self.layout();
        match self.below(6) {
            0 => Box::new(Full::new(layout)),
            1 => Box::new(Hsdp::new(Full::new(layout), self.size())),
            2 => Box::new(LayerWise::default()),
            3 => Box::new(LayerWise { sharing: LayerSharing::Contiguous }),
            4 => Box::new(WholeTensor),
            _ => {
                let choice =
                    self.choose(&[Choice::Full(layout), Choice::LayerWise, Choice::Replicate]);
                Box::new(Hybrid::new(["out"], ["h"]).unwrap().with_rule("h", choice).unwrap())
            }
        }
    }

    fn model(&mut self) -> CostModel {
        let (latency_ns, bytes_per_s) = (self.size(), self.size());
        let link = Link { latency_ns, bytes_per_s };
        let optimizers = [
            Optimizer::Adam,
            Optimizer::AdamMixed,
            Optimizer::Adam8bit,
            Optimizer::Sgd,
            Optimizer::None,
        ];
        let activations = Activations { input_bytes: self.size(), unit_bytes: self.size() };
        CostModel {
            optimizer: self.choose(&optimizers),
            optimizer_in_backward: self.below(2) == 0,
            runtime: self.choose(&[Runtime::Torch, Runtime::Candle]),
            kept_graphs: self.size(),
            prefetch: Some(self.size()),
            activations: Some(activations).filter(|_| self.below(2) == 0),
            links: Links::new(self.size(), link, link).ok(),
            param_dtype: Some(ElemType::F64).filter(|_| self.below(3) == 0),
            mixed_precision: Some((ElemType::Bf16, ElemType::F64)).filter(|_| self.below(3) == 0),
        }
    }
}

fn use_plan(plan: &ShardingPlan, draw: &mut Draws) {
    let model = draw.model();
    let rank = plan.world_size().placements().last().unwrap().rank();
    if let Ok(cost) = plan.cost(&model) {
        let slots = usize::try_from(draw.size()).ok().and_then(NonZeroUsize::new);
        let _ = (cost.peak_bytes(), slots.map(|slots| cost.process_peak_bytes(slots)));
    }
    drop(
        PlanReport::new(plan, &model, Some(rank))
            .map(|report| format!("{} {}", report.with_budget(draw.size()), plan.summary())),
    );
    drop(plan.explain_rank(rank, &model));
    for parameter in plan.parameters() {
        drop(plan.explain_parameter(parameter.info().name()));
    }
    drop(plan.schedule(&model).map(|schedule| schedule.collectives().map(drop)));
    let _ = plan.shards_of_rank(rank).unwrap().count();
    let text = serde_json::to_string(plan).unwrap();
    let read: ShardingPlan = serde_json::from_str(&text).unwrap();
    assert_eq!(&read, plan);
}

/// Uses the plan of a case, compares it with that of another world, and searches for others. Returns true if there is a plan.
fn try_case(seed: Seed, case: u64) -> bool {
    let mut draw = Draws(seed.derive(case), 0);
    let n_parameters = draw.below(6);
    let parameters: Vec<_> = (0..n_parameters).filter_map(|n| draw.parameter(n)).collect();
    let world = draw.world();
    let strategy = draw.strategy();
    let Ok(plan) = strategy.plan(&parameters, world) else { return false };
    use_plan(&plan, &mut draw);
    let other = draw.world();
    if let Ok(other_plan) = strategy.plan(&parameters, other) {
        if world.as_u64().min(other.as_u64()) <= 1024 {
            let reshard = Reshard::new(&plan, &other_plan).unwrap();
            let _ = reshard.volume();
            let _ = reshard.moves().count();
            let _ = reshard.renumbered().volume();
        }
        let _ = PlanDiff::new(&plan, &other_plan).to_string();
    }
    if world.as_u64() <= 1024 {
        let search = Search { world_size: world, budget_bytes: draw.size(), model: draw.model() };
        drop(search.run(&parameters));
    }
    true
}

/// Cases are independent, and some take a second, so all processors try them.
#[test]
fn hostile_sizes_never_panic() {
    let seed = std::env::var("HUNT").ok().and_then(|seed| seed.parse().ok());
    let seed = Seed::new(seed.unwrap_or(0));
    let n_cases: u64 = std::env::var("CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(300);
    let (next, n_plans) = (AtomicU64::new(0), AtomicU64::new(0));
    let try_cases = || {
        loop {
            let case = next.fetch_add(1, Ordering::Relaxed);
            if case >= n_cases {
                return;
            }
            let started = Instant::now();
            let found = std::panic::catch_unwind(|| try_case(seed, case));
            let seconds = started.elapsed().as_secs_f64();
            if found.is_err() || seconds > 2. {
                let end = if found.is_ok() { "ends" } else { "panics" };
                println!("case {case} of {seed:?} {end} after {seconds:.1} s");
            }
            n_plans.fetch_add(found.unwrap().into(), Ordering::Relaxed);
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, NonZeroUsize::get) {
            scope.spawn(try_cases);
        }
    });
    println!("{} plans", n_plans.into_inner());
}
