#[path = "../../crates/dyn-batch/tests/lengths/mod.rs"]
mod lengths;
use candle_distributed::batch::*;
use candle_distributed::types::Seed;
use std::time::Instant;
fn main() {
    let sorted = |window, cut| DynamicBatchStrategy::Sorted { window, cut };
    {
        use candle_distributed::types::*;
        for (name, recipe, budget) in lengths::ALL {
            for n in [20_000, 100_000] {
                for (sname, strat) in [("whole", sorted(None, Cut::Optimal)), ("w128", sorted(Some(128), Cut::Greedy))]
                {
                    for cost in [Cost::ATTENTION, Cost::TOKENS] {
                        let l = recipe.draw(n);
                        let b = DynamicBatchSampler::new(
                            &l,
                            BatchConfig::default().with_strategy(strat.clone()).with_max_tokens(budget),
                        )
                        .unwrap();
                        let d = DistributedBatchSampler::new(
                            b,
                            Placement::new(0, 8).unwrap(),
                            DistributedConfig::default().with_cost(cost),
                        );
                        let t = Instant::now();
                        let e = d.epoch(Epoch::new(1), 0..n).unwrap();
                        let ms = t.elapsed().as_millis();
                        let mut w = [0f64; 2];
                        let mut tot = [0f64; 2];
                        for s in 0..e.len() {
                            let costs: Vec<[f64; 2]> = e
                                .step(s)
                                .unwrap()
                                .map(|b| {
                                    [
                                        Cost::ATTENTION.of(b.padded_length) as f64 * b.rows as f64,
                                        b.padded_tokens() as f64,
                                    ]
                                })
                                .collect();
                            for k in 0..2 {
                                w[k] += 8.0 * costs.iter().map(|c| c[k]).fold(0.0, f64::max);
                                tot[k] += costs.iter().map(|c| c[k]).sum::<f64>();
                            }
                        }
                        println!(
                            "waste {name} {n} {sname} {} attention {:.3} % tokens {:.3} % steps {} ({ms} ms)",
                            if cost == Cost::TOKENS { "by tokens" } else { "by attention" },
                            100.0 * (w[0] / tot[0] - 1.0),
                            100.0 * (w[1] / tot[1] - 1.0),
                            e.len()
                        );
                    }
                }
            }
            let l = recipe.draw(20_000);
            let mut worst = 0f64;
            let mut worst2 = 0f64;
            let t = Instant::now();
            for g in l.chunks_exact(512) {
                for (p, worst) in [(1, &mut worst), (2, &mut worst2)] {
                    let c: Vec<u64> = g.iter().map(|&x| u64::from(x).pow(p)).collect();
                    let parts = balance(&c, WorldSize::new(8).unwrap());
                    let max = parts.iter().map(|p| p.iter().map(|&i| c[i]).sum::<u64>()).max().unwrap();
                    *worst = worst.max(max as f64 / (c.iter().sum::<u64>() as f64 / 8.0) - 1.0);
                }
            }
            println!(
                "balance {name} worst {:.4} % squares {:.4} % {} us each",
                worst * 100.0,
                worst2 * 100.0,
                t.elapsed().as_micros() / 78
            );
        }
    }
    if std::env::args().count() > 1 {
        return;
    }
    for (name, recipe, budget) in lengths::ALL {
        let l = recipe.draw(20_000);
        let run = |strategy| {
            let s =
                DynamicBatchSampler::new(&l, BatchConfig::default().with_strategy(strategy).with_max_tokens(budget))
                    .unwrap();
            let r = s.plan().unwrap().report();
            (r.efficiency(), r.batches)
        };
        println!("{name} greedy {:?} optimal {:?}", run(sorted(None, Cut::Greedy)), run(sorted(None, Cut::Optimal)));
    }
    for (name, recipe, budget) in lengths::ALL {
        let l = recipe.draw(1_000_000);
        let run = |strategy| {
            let s =
                DynamicBatchSampler::new(&l, BatchConfig::default().with_strategy(strategy).with_max_tokens(budget))
                    .unwrap();
            let t = Instant::now();
            let mut b = s.iter();
            b.by_ref().for_each(|b| {
                b.unwrap();
            });
            let r = b.report();
            (r.efficiency(), r.batches, t.elapsed().as_millis())
        };
        let whole = run(sorted(None, Cut::Optimal));
        for w in [128, 256] {
            for cut in [Cut::Greedy, Cut::Optimal] {
                let r = run(sorted(Some(w), cut));
                println!(
                    "{name} window {w} {cut:?}: {:.4} extra {:.2} % ({} ms; whole {:.4} {})",
                    r.0,
                    100.0 * (r.1 as f64 / whole.1 as f64 - 1.0),
                    r.2,
                    whole.0,
                    whole.1
                );
            }
        }
    }
    for (name, recipe, caps) in [
        ("web", &lengths::WEB, vec![8192u64, 32769]),
        ("squad", &lengths::SQUAD, vec![512, 608, 1024, 4097]),
        ("imdb", &lengths::IMDB, vec![2560, 4096, 16385]),
        ("speech", &lengths::SPEECH, vec![2449, 4096, 16385]),
        ("sft32k", &lengths::SFT32K, vec![32768, 131073]),
        ("uniform2k", &lengths::UNIFORM2K, vec![2048, 8193]),
        ("const512", &lengths::CONST512, vec![512, 2049]),
        ("spike512", &lengths::SPIKE512, vec![512, 2049]),
    ] {
        let l = recipe.draw(20_000);
        for cap in caps {
            let lb = l2(&l, cap);
            let run = |p| {
                let s = DynamicBatchSampler::new(
                    &l,
                    BatchConfig::default()
                        .with_strategy(DynamicBatchStrategy::Pack(p))
                        .with_max_tokens(cap)
                        .with_max_sequence_length(cap)
                        .with_overlong(Overlong::Truncate),
                )
                .unwrap();
                let t = Instant::now();
                let n = s.plan().unwrap().len();
                (n as i64 - lb as i64, n as f64 / lb as f64, t.elapsed().as_millis())
            };
            println!(
                "{name} {cap} bound {lb} best fit {:?} slack {:?}",
                run(Packing::BestFit),
                run(Packing::MinimumSlack)
            );
        }
    }
    let l = lengths::WEB.draw(20_000);
    for (k, f) in [("optimal", Buckets::optimal(&l, 32).unwrap()), ("quantiles", Buckets::quantiles(&l, 32).unwrap())] {
        let Buckets::Boundaries(b) = &f else { panic!() };
        let padded: u64 = l.iter().map(|&x| b[b.partition_point(|&y| y < x as u64)]).sum();
        println!("{k} {:.4}", l.iter().map(|&x| x as u64).sum::<u64>() as f64 / padded as f64);
    }
    for n in [1_000_000, 10_000_000] {
        let l = lengths::WEB.draw(n);
        for (name, s, t) in [
            ("greedy", sorted(None, Cut::Greedy), 16384),
            ("optimal", sorted(None, Cut::Optimal), 16384),
            ("bf", DynamicBatchStrategy::Pack(Packing::BestFit), 8192),
            ("mbs", DynamicBatchStrategy::Pack(Packing::MinimumSlack), 8192),
        ] {
            let s = DynamicBatchSampler::new(&l, BatchConfig::default().with_strategy(s).with_max_tokens(t)).unwrap();
            let mut best = f64::MAX;
            for _ in 0..3 {
                let t = Instant::now();
                std::hint::black_box(s.plan().unwrap().len());
                best = best.min(t.elapsed().as_secs_f64() * 1e3);
            }
            println!("{n} {name} {best:.1} ms");
        }
    }
    let _ = Seed::new(0);
}
/// Martello and Toth's L2.
fn l2(l: &[u32], cap: u64) -> u64 {
    let l: Vec<u64> = l.iter().map(|&x| u64::from(x).min(cap)).collect();
    let mut best = l.iter().sum::<u64>().div_ceil(cap);
    let mut ks: Vec<u64> = l.iter().copied().filter(|&x| x <= cap / 2).collect();
    ks.sort();
    ks.dedup();
    for k in ks {
        let n1 = l.iter().filter(|&&x| x > cap - k).count() as u64;
        let n2: Vec<u64> = l.iter().copied().filter(|&x| x <= cap - k && 2 * x > cap).collect();
        let s3: u64 = l.iter().filter(|&&x| 2 * x <= cap && x >= k).sum();
        let free = n2.len() as u64 * cap - n2.iter().sum::<u64>();
        best = best.max(n1 + n2.len() as u64 + s3.saturating_sub(free).div_ceil(cap));
    }
    best
}
