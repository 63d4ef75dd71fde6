#[path = "../../crates/dyn-batch/tests/lengths/mod.rs"]
mod lengths;
use candle_distributed::{batch::*, types::*};
fn stats(name: &str, steps: &[Vec<Vec<u64>>]) {
    let (mut wp, mut tp, mut wr, mut tr, mut real, mut pad) = (0f64, 0f64, 0f64, 0f64, 0f64, 0f64);
    for s in steps {
        let p: Vec<f64> = s.iter().map(|b| (b.len() as f64) * (*b.iter().max().unwrap() as f64).powi(2)).collect();
        let r: Vec<f64> = s.iter().map(|b| b.iter().map(|&x| (x as f64).powi(2)).sum()).collect();
        wp += 8.0 * p.iter().copied().fold(0.0, f64::max);
        tp += p.iter().sum::<f64>();
        wr += 8.0 * r.iter().copied().fold(0.0, f64::max);
        tr += r.iter().sum::<f64>();
        for b in s {
            real += b.iter().sum::<u64>() as f64;
            pad += (b.len() as u64 * b.iter().max().unwrap()) as f64;
        }
    }
    println!(
        "{name}: steps {} eff {:.4} wait padded {:.3} % real {:.3} % time padded {:.4e} real {:.4e}",
        steps.len(),
        real / pad,
        100.0 * (wp / tp - 1.0),
        100.0 * (wr / tr - 1.0),
        wp,
        wr
    );
}
fn main() {
    for (name, recipe, budget) in lengths::ALL {
        let l = recipe.draw(20_000);
        let sorted = DynamicBatchStrategy::Sorted { window: None, cut: Cut::Optimal };
        let b =
            DynamicBatchSampler::new(&l, BatchConfig::default().with_strategy(sorted.clone()).with_max_tokens(budget))
                .unwrap();
        let d = DistributedBatchSampler::new(
            b,
            Placement::new(0, 8).unwrap(),
            DistributedConfig::default().with_cost(Cost::ATTENTION),
        ).unwrap();
        let e = d.epoch(Epoch::new(1), 0..20_000).unwrap();
        let steps: Vec<Vec<Vec<u64>>> = (0..e.len())
            .map(|s| {
                e.step(s)
                    .unwrap()
                    .into_iter()
                    .map(|b| b.indices.iter().map(|&i| l[i as usize] as u64).collect())
                    .collect()
            })
            .collect();
        stats(&format!("{name} now"), &steps);
        let b = DynamicBatchSampler::new(
            &l,
            BatchConfig::default()
                .with_strategy(sorted)
                .with_max_tokens(8 * budget)
                .with_batch_size_multiple(8)
                .with_remainder(Remainder::Drop),
        )
        .unwrap();
        let steps: Vec<Vec<Vec<u64>>> = b
            .iter()
            .map(|b| {
                let b = b.unwrap();
                let v: Vec<u64> = b.indices.iter().map(|&i| l[i as usize] as u64).collect();
                let c: Vec<u64> = v.iter().map(|x| x * x).collect();
                balance(&c, WorldSize::new(8).unwrap())
                    .into_iter()
                    .map(|p| p.into_iter().map(|i| v[i]).collect())
                    .collect()
            })
            .collect();
        stats(&format!("{name} deal"), &steps);
        let steps: Vec<Vec<Vec<u64>>> = b
            .iter()
            .map(|b| {
                let b = b.unwrap();
                let v: Vec<u64> = b.indices.iter().map(|&i| l[i as usize] as u64).collect();
                v.chunks(v.len() / 8).map(<[u64]>::to_vec).collect()
            })
            .collect();
        stats(&format!("{name} chunks"), &steps);
    }
}
