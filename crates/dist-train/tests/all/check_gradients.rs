//! Gradients on a mesh, compared with finite differences of the loss.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{
    BatchNorm, Linear, Module, ModuleT, Optimizer, ParamsAdamW, VarBuilder, batch_norm, linear,
    ops::dropout,
};
use core_types::Seed;
use dist_train::{
    AdamW, DataParallel, DistributedModel, Error, GradientError, Loss, TrainingError, Verdict,
};
use pmap_mesh::{DeviceMesh, Replica, Uneven};

#[derive(Debug)]
struct Net {
    up: Linear,
    norm: BatchNorm,
    down: Linear,
}

impl Net {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self {
            up: linear(6, 16, vb.pp("up"))?,
            norm: batch_norm(16, 1e-5, vb.pp("norm"))?,
            down: linear(16, 1, vb.pp("down"))?,
        })
    }

    fn loss(&self, x: &Tensor, drop: impl Fn(Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let hidden = self.norm.forward_t(&self.up.forward(x)?, true)?.tanh()?;
        self.down.forward(&drop(hidden)?)?.sqr()?.mean_all()
    }
}

fn model(slots: usize) -> DistributedModel<Net, AdamW> {
    DataParallel::builder(&DeviceMesh::cpu(slots).unwrap(), Net::new)
        .init(Seed::new(3))
        .uneven(Uneven::Balanced)
        .build(|group| AdamW::new(group.vars, ParamsAdamW::default()))
        .unwrap()
}

fn batch(rows: usize) -> Tensor {
    let x = Tensor::arange(0_f32, rows as f32 * 6., &Device::Cpu).unwrap();
    (x * 1.7).unwrap().sin().unwrap().reshape((rows, 6)).unwrap()
}

fn loss(_: &Replica, net: &Net, x: Tensor) -> Result<Tensor> {
    net.loss(&x, Ok)
}

#[test]
fn right_model_passes_unchanged() {
    for slots in [1, 3] {
        let [mut checked, mut plain] = [model(slots), model(slots)];
        for _ in 0..2 {
            let report = checked.check_gradients(batch(10), loss).unwrap();
            let table = report.to_string();
            for (line, check) in table.lines().zip(&report.prefixes) {
                assert!(line.starts_with(&check.prefix), "{table}");
                assert!(line.ends_with(&format!("  {}", check.verdict)), "{table}");
                // All lines share one column.
                assert_eq!(line.find("expected"), table.find("expected"), "{table}");
            }
            assert_eq!(table.lines().count(), 3);
            let verdicts: Vec<_> =
                report.prefixes.iter().map(|check| (&check.prefix[..], check.verdict)).collect();
            for (prefix, verdict) in verdicts {
                // The norm cancels the bias of `up`, so its derivative may be unclear.
                assert_ne!(verdict, Verdict::Wrong, "{prefix}\n{report}");
                assert!(prefix == "up" || verdict == Verdict::Right, "{prefix}\n{report}");
            }
            let losses =
                [&mut checked, &mut plain].map(|model| model.step(batch(10), loss).unwrap().loss);
            assert_eq!(losses[0].to_bits(), losses[1].to_bits());
        }
        for (name, var) in checked.parameters().unwrap() {
            let bits = |var: &Tensor| {
                let items = var.flatten_all().unwrap().to_dtype(DType::F32).unwrap();
                items.to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            assert_eq!(bits(&var), bits(&plain.parameters().unwrap()[&name]), "{name}");
        }
    }
}

#[test]
fn dropout_must_use_replica_numbers() {
    let drawn = model(2).check_gradients(batch(8), |ctx: &Replica, net: &Net, x| {
        net.loss(&x, |x| {
            let kept = ctx.rng().uniform(x.shape())?.lt(0.5)?.to_dtype(x.dtype())?;
            x * kept
        })
    });
    drawn.unwrap();
    let candle_dropout = model(2)
        .check_gradients(batch(8), |_: &Replica, net: &Net, x| net.loss(&x, |x| dropout(&x, 0.5)));
    let error = candle_dropout.unwrap_err();
    assert!(matches!(error, Error::Gradient(GradientError::NotRepeatable { .. })), "{error}");
}

#[test]
fn nan_loss_ends_the_check() {
    let broken = |ctx: &Replica, net: &Net, x: Tensor| {
        let scale = if ctx.slot() == 1 { f64::NAN } else { 1.0 };
        net.loss(&x, Ok)? * scale
    };
    let error = model(2).check_gradients(batch(8), broken).unwrap_err();
    let slot = matches!(error, Error::Training(TrainingError::NonFiniteLoss { slot: 1, .. }));
    assert!(slot, "{error}");
    // If NaN is allowed, the check is inconclusive.
    let mesh = DeviceMesh::cpu(2).unwrap();
    let builder = DataParallel::builder(&mesh, Net::new).allow_non_finite();
    let mut model = builder.build(|group| AdamW::new(group.vars, ParamsAdamW::default())).unwrap();
    let report = model.check_gradients(batch(8), broken).unwrap();
    assert!(report.prefixes.iter().all(|check| check.verdict == Verdict::Unclear), "{report}");
}

#[test]
fn missing_backward_is_found() {
    for slots in [1, 3] {
        let cut = model(slots).check_gradients(batch(10), |_: &Replica, net: &Net, x| {
            net.loss(&x, |x| &x + x.detach().sqr()?)
        });
        let error = cut.unwrap_err();
        let Error::Gradient(GradientError::Wrong { wrong, prefixes: 3 }) = error else {
            panic!("{error}")
        };
        let wrong: Vec<_> = wrong.into_iter().map(|check| check.prefix).collect();
        assert_eq!(wrong, ["norm", "up"]);
    }
}

#[test]
fn attached_tensors_are_ignored() {
    let with_rows = model(2).check_gradients(batch(8), |_: &Replica, net: &Net, x| {
        let rows = Tensor::new(x.dim(0)? as f32, x.device())?;
        Ok(Loss::mean(net.loss(&x, Ok)?).with_sums(rows))
    });
    with_rows.unwrap();
}
