//! Checks gradients against differences of the loss.
//!
//! A model with a wrong backward pass trains without any error: next to a residual, an operation
//! without a backward pass still gives every earlier parameter a gradient, but a wrong one. The
//! loss itself is the reference. It is evaluated at points along a direction through the variables,
//! and its differences must match the gradients between these points. PyTorch's `gradcheck` does
//! this for every input of one operation in f64. This module does it for a whole model during
//! training, with two directions for each part of the model.

mod derivative;
mod direction;

use candle_core::{DType, Device, Tensor};
use fsdp_plan::{ElemType, ParameterInfo};

use self::derivative::Derivative;
use crate::{
    error::{Doing, Result, gradient::GradientError},
    gradient_report::{GradientReport, PrefixCheck, Verdict},
};

/// A model in training that allows a check of its gradients.
pub(crate) trait Checked {
    /// Returns the loss of the batch for the current variables, always with the same random
    /// numbers.
    #[track_caller]
    fn loss(&mut self) -> Result<f64>;

    /// Returns the gradients of all variables.
    #[track_caller]
    fn gradients(&mut self) -> Result<Vec<Option<Tensor>>>;

    /// Returns the value of a variable.
    fn value(&self, var: usize) -> Result<Tensor>;

    /// Returns the compute dtype of a variable stored as `stored`.
    fn compute_dtype(&self, stored: DType) -> DType;

    /// Sets the value of a variable.
    fn set(&mut self, var: usize, value: &Tensor) -> Result<()>;
}

/// Compares the gradients of named variables with differences of the loss.
///
/// Restores the values of the variables afterwards, even on error.
///
/// # Errors
///
/// Returns [`GradientError::Wrong`] with all prefixes that have wrong gradients,
/// [`GradientError::NotRepeatable`] if the loss of one batch varies, and the errors of `model`.
#[track_caller]
pub(crate) fn check_gradients(
    model: &mut impl Checked,
    names: &[&str],
    gradients: &[Option<Tensor>],
) -> Result<GradientReport> {
    let [loss, second] = [model.loss()?, model.loss()?];
    if loss.to_bits() != second.to_bits() {
        return Err(GradientError::NotRepeatable { first: loss, second }.into());
    }
    let mut prefixes = Vec::new();
    for (prefix, vars) in by_prefix(names)? {
        prefixes.push(check_prefix(model, prefix, &vars, names, gradients)?);
    }
    let wrong = prefixes.iter().filter(|check| check.verdict == Verdict::Wrong);
    let wrong: Vec<PrefixCheck> = wrong.cloned().collect();
    if wrong.is_empty() {
        return Ok(GradientReport { loss, prefixes });
    }
    Err(GradientError::Wrong { wrong, prefixes: prefixes.len() }.into())
}

/// Groups the indices of variables by name prefix, in order of first appearance. A prefix is a
/// block, or a layer outside all blocks.
fn by_prefix(names: &[&str]) -> Result<Vec<(String, Vec<usize>)>> {
    let mut prefixes: Vec<(String, Vec<usize>)> = Vec::new();
    for (var, &name) in names.iter().enumerate() {
        let info = ParameterInfo::new(name, [], ElemType::F32)?;
        let candidates = [info.unit(), info.layer()];
        let prefix = candidates.into_iter().find(|prefix| !prefix.is_empty()).unwrap_or(name);
        match prefixes.iter_mut().find(|(other, _)| other == prefix) {
            Some((_, vars)) => vars.push(var),
            None => prefixes.push((prefix.to_owned(), vec![var])),
        }
    }
    Ok(prefixes)
}

/// Checks the variables of a prefix along two directions and returns the worse result.
#[track_caller]
fn check_prefix(
    model: &mut impl Checked,
    prefix: String,
    vars: &[usize],
    names: &[&str],
    gradients: &[Option<Tensor>],
) -> Result<PrefixCheck> {
    let part = CheckedPart::new(model, vars, names, gradients)?;
    let mut worst = Derivative::default();
    for direction in [direction::steepest(&part)?, direction::random(&part)?] {
        let derivative = part.derivative(model, &direction);
        // Before `?`, because the values must be restored even if the derivative is an error.
        part.restore(model)?;
        worst = worst.or_worse(derivative?);
    }
    Ok(PrefixCheck {
        prefix,
        parameters: vars.len(),
        expected: worst.expected,
        found: worst.found,
        uncertainty: worst.uncertainty(),
        verdict: worst.verdict(),
    })
}

/// Variables that are checked together, with their values and gradients.
struct CheckedPart<'a> {
    vars: &'a [usize],
    names: Vec<&'a str>,
    /// The variables' own values, on the host.
    values: Vec<Tensor>,
    /// The compute dtypes of the variables.
    dtypes: Vec<DType>,
    /// Gradients at these values, on the host and in double precision.
    gradients: Vec<Tensor>,
}

impl<'a> CheckedPart<'a> {
    fn new(
        model: &impl Checked,
        vars: &'a [usize],
        names: &[&'a str],
        gradients: &[Option<Tensor>],
    ) -> Result<Self> {
        let mut values = Vec::new();
        for &var in vars {
            // A copy, because the variable is about to change.
            let value = model.value(var)?.to_device(&Device::Cpu).and_then(|value| value.copy());
            values.push(value.doing(CHECKING)?);
        }
        let names = vars.iter().map(|&var| names[var]).collect();
        let dtypes = values.iter().map(|value| model.compute_dtype(value.dtype())).collect();
        let mut part = Self { vars, names, values, dtypes, gradients: Vec::new() };
        part.gradients = part.on_host(gradients)?;
        Ok(part)
    }

    /// Picks the gradients of these variables from the gradients of all variables, on the host and
    /// in double precision; zeros for a missing gradient.
    fn on_host(&self, gradients: &[Option<Tensor>]) -> Result<Vec<Tensor>> {
        self.vars
            .iter()
            .zip(&self.values)
            .map(|(&var, value)| match &gradients[var] {
                Some(gradient) => gradient.to_device(&Device::Cpu)?.to_dtype(DType::F64),
                None => Tensor::zeros(value.shape(), DType::F64, &Device::Cpu),
            })
            .collect::<candle_core::Result<_>>()
            .doing(CHECKING)
    }

    fn set(&self, model: &mut impl Checked, values: &[Tensor]) -> Result<()> {
        self.vars.iter().zip(values).try_for_each(|(&var, value)| model.set(var, value))
    }

    fn restore(&self, model: &mut impl Checked) -> Result<()> {
        self.set(model, &self.values)
    }
}

const CHECKING: &str = "checking gradients";

#[cfg(test)]
#[expect(clippy::needless_pass_by_value, reason = "constructors take builders by value")]
#[expect(clippy::unnecessary_wraps, reason = "other norms of the network may fail")]
mod tests {
    use candle_core::{CustomOp1, Shape, Var};
    use candle_nn::{Linear, Module, VarBuilder, VarMap, linear};
    use core_types::Seed;

    use super::*;
    use crate::{
        error::Error,
        parameters::{InitialValues, Initializer, declare::declare},
    };

    /// Named variables and their loss.
    struct PlainModel<F> {
        vars: Vec<(String, Var)>,
        loss: F,
    }

    impl<F: FnMut() -> candle_core::Result<Tensor>> Checked for PlainModel<F> {
        fn loss(&mut self) -> Result<f64> {
            (self.loss)().and_then(|loss| loss.to_dtype(DType::F64)?.to_scalar()).doing("a loss")
        }

        fn gradients(&mut self) -> Result<Vec<Option<Tensor>>> {
            let store = (self.loss)().and_then(|loss| loss.backward()).doing("gradients")?;
            Ok(self.vars.iter().map(|(_, var)| store.get(var).cloned()).collect())
        }

        fn value(&self, var: usize) -> Result<Tensor> {
            Ok(self.vars[var].1.as_detached_tensor())
        }

        fn compute_dtype(&self, stored: DType) -> DType {
            stored
        }

        fn set(&mut self, var: usize, value: &Tensor) -> Result<()> {
            self.vars[var].1.set(value).doing("setting a variable")
        }
    }

    /// Checks the gradients of a loss, and that all variables are restored.
    fn check(
        vars: &[(String, Var)],
        loss: impl FnMut() -> candle_core::Result<Tensor>,
    ) -> Result<GradientReport> {
        let before: Vec<_> = vars.iter().map(|(_, var)| var.copy().unwrap()).collect();
        let mut model = PlainModel { vars: vars.to_vec(), loss };
        let gradients = model.gradients()?;
        let names: Vec<&str> = vars.iter().map(|(name, _)| name.as_str()).collect();
        let outcome = check_gradients(&mut model, &names, &gradients);
        for ((name, var), before) in vars.iter().zip(before) {
            let off = (var.as_tensor() - before).unwrap().to_dtype(DType::F64).unwrap();
            let off = off.sqr().unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap();
            assert!(off == 0.0, "{name} is off by {off}");
        }
        outcome
    }

    /// Returns the prefixes with wrong gradients.
    fn wrong(outcome: Result<GradientReport>) -> Vec<String> {
        match outcome {
            Ok(_) => Vec::new(),
            Err(Error::Gradient(GradientError::Wrong { wrong, .. })) => {
                wrong.into_iter().map(|check| check.prefix).collect()
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn verdicts(report: &GradientReport) -> Vec<Verdict> {
        report.prefixes.iter().map(|check| check.verdict).collect()
    }

    /// A residual network: `embed`, `blocks.0` to `blocks.2`, `head`.
    struct ResidualNet {
        embed: Linear,
        blocks: Vec<(Linear, Linear)>,
        head: Linear,
    }

    const WIDTH: usize = 24;

    impl ResidualNet {
        fn new(vb: VarBuilder<'_>) -> candle_core::Result<Self> {
            let block = |k: usize| {
                let vb = vb.pp("blocks").pp(k);
                Ok((linear(WIDTH, 48, vb.pp("up"))?, linear(48, WIDTH, vb.pp("down"))?))
            };
            Ok(Self {
                embed: linear(8, WIDTH, vb.pp("embed"))?,
                blocks: (0..3).map(block).collect::<candle_core::Result<_>>()?,
                head: linear(WIDTH, 1, vb.pp("head"))?,
            })
        }

        /// Returns the loss with `norm` before the layers of block 1.
        fn loss(
            &self,
            x: &Tensor,
            norm: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
        ) -> candle_core::Result<Tensor> {
            let mut x = self.embed.forward(x)?;
            for (k, (up, down)) in self.blocks.iter().enumerate() {
                let input = if k == 1 { norm(&x)? } else { x.clone() };
                x = (x + down.forward(&up.forward(&input)?.relu()?)?)?;
            }
            self.head.forward(&x)?.tanh()?.sqr()?.mean_all()
        }
    }

    /// Returns a network with seeded weights, its variables, and a batch.
    fn net(dtype: DType) -> (ResidualNet, Vec<(String, Var)>, Tensor) {
        let values = InitialValues { init: Initializer::Seeded(Seed::new(3)), weights: None };
        let map = VarMap::new();
        for declared in declare(ResidualNet::new, dtype, &Device::Cpu).unwrap() {
            let value = values.tensor(&declared, &Device::Cpu).unwrap();
            map.data().lock().unwrap().insert(declared.name, Var::from_tensor(&value).unwrap());
        }
        let net = ResidualNet::new(VarBuilder::from_varmap(&map, dtype, &Device::Cpu)).unwrap();
        let mut vars: Vec<_> = map.data().lock().unwrap().clone().into_iter().collect();
        vars.sort_by(|(left, _), (right, _)| left.cmp(right));
        let x: Vec<f32> = (0..16 * 8).map(|item| (item as f32 * 1.7).sin()).collect();
        let x = Tensor::from_vec(x, (16, 8), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        (net, vars, x)
    }

    fn same(x: &Tensor) -> candle_core::Result<Tensor> {
        Ok(x.clone())
    }

    #[test]
    fn right_gradients_are_right() {
        for dtype in [DType::F64, DType::F32] {
            let (net, vars, x) = net(dtype);
            let report = check(&vars, || net.loss(&x, same)).unwrap();
            let prefixes: Vec<_> = report.prefixes.iter().map(|check| &check.prefix[..]).collect();
            assert_eq!(prefixes, ["blocks.0", "blocks.1", "blocks.2", "embed", "head"]);
            assert_eq!(verdicts(&report), [Verdict::Right; 5], "{dtype:?}\n{report}");
        }
    }

    #[test]
    fn half_precision_is_not_called_wrong() {
        for dtype in [DType::BF16, DType::F16] {
            let (net, vars, x) = net(dtype);
            assert_eq!(wrong(check(&vars, || net.loss(&x, same))), [""; 0]);
        }
    }

    #[test]
    fn missing_backward_at_a_residual_is_found() {
        let (net, vars, x) = net(DType::F32);
        let scale = Tensor::ones(WIDTH, DType::F32, &Device::Cpu).unwrap();
        let outcome = check(&vars, || {
            net.loss(&x, |x| candle_nn::ops::rms_norm(&x.contiguous()?, &scale, 1e-5))
        });
        let text = outcome.as_ref().unwrap_err().to_string();
        assert!(text.contains("2 of 5 parts") && text.contains("embed ("), "{text}");
        assert_eq!(wrong(outcome), ["blocks.0", "embed"]);
        let outcome =
            check(&vars, || net.loss(&x, |x| candle_nn::ops::rms_norm_slow(x, &scale, 1e-5)));
        assert_eq!(wrong(outcome), [""; 0]);
    }

    /// The identity, with a backward pass that is wrong by a factor.
    struct ScaledBackward(f64);

    impl CustomOp1 for ScaledBackward {
        fn name(&self) -> &'static str {
            "off"
        }

        fn cpu_fwd(
            &self,
            storage: &candle_core::CpuStorage,
            layout: &candle_core::Layout,
        ) -> candle_core::Result<(candle_core::CpuStorage, Shape)> {
            assert!(layout.is_contiguous() && layout.start_offset() == 0);
            Ok((storage.clone(), layout.shape().clone()))
        }

        fn bwd(
            &self,
            _: &Tensor,
            _: &Tensor,
            grad: &Tensor,
        ) -> candle_core::Result<Option<Tensor>> {
            Ok(Some((grad * self.0)?))
        }
    }

    #[test]
    fn small_factors_are_found() {
        for factor in [0.95, 1.05, -1.0] {
            let (net, vars, x) = net(DType::F32);
            let report = check(&vars, || net.loss(&x, same)?.apply_op1(ScaledBackward(factor)));
            assert_eq!(wrong(report).len(), 5, "{factor}");
        }
        // The error must be larger if it passes through only one branch of a residual.
        for factor in [0.5, 1.5, -1.0, f64::NAN, f64::INFINITY] {
            let (net, vars, x) = net(DType::F32);
            let outcome = check(&vars, || {
                net.loss(&x, |x| x.contiguous()?.apply_op1(ScaledBackward(factor)))
            });
            assert_eq!(wrong(outcome), ["blocks.0", "embed"], "{factor}");
        }
    }

    /// The loss is smooth, so only the tolerance decides.
    #[test]
    fn errors_above_the_tolerance_are_wrong() {
        for (factor, verdict) in [(0.985, Verdict::Right), (0.975, Verdict::Wrong)] {
            for dtype in [DType::F64, DType::F32] {
                let at = Var::new(&[0.5, -1.0, 2.0], &Device::Cpu).unwrap();
                let at = Var::from_tensor(&at.to_dtype(dtype).unwrap()).unwrap();
                let report = check(&[("at".to_owned(), at.clone())], || {
                    at.sin()?.exp()?.sum_all()?.apply_op1(ScaledBackward(factor))
                });
                let is_right = match report {
                    Ok(report) => verdicts(&report) == [Verdict::Right],
                    Err(_) => false,
                };
                assert_eq!(is_right, verdict == Verdict::Right, "{factor} {dtype:?}");
            }
        }
    }

    /// Any step size large enough for rounding contains some kinks.
    #[test]
    fn many_kinks_do_not_change_the_verdict() {
        const UNITS: usize = 2048;
        for dtype in [DType::F64, DType::F32] {
            let numbers = |stream: f64| {
                let items = (0..UNITS * 4).map(|n| ((n as f64 + 0.5) * stream).sin() * 1.5);
                Tensor::from_iter(items, &Device::Cpu).unwrap().reshape((4, UNITS)).unwrap()
            };
            let (up, down) = (numbers(7919.13), numbers(104_729.7));
            let up = up.to_dtype(dtype).unwrap();
            let down = down.abs().unwrap().to_dtype(dtype).unwrap();
            let at = Tensor::new(&[[0.3, -0.2, 0.4, 0.1]], &Device::Cpu).unwrap();
            let at = Var::from_tensor(&at.to_dtype(dtype).unwrap()).unwrap();
            let vars = [("at".to_owned(), at.clone())];
            let loss = || (at.matmul(&up)?.relu()? * down.narrow(0, 0, 1)?)?.sum_all()? + 100.0;
            let report = check(&vars, loss).unwrap();
            assert_eq!(verdicts(&report), [Verdict::Right], "{dtype:?}\n{report}");
            assert_eq!(wrong(check(&vars, || loss()?.apply_op1(ScaledBackward(0.5)))), ["at"]);
        }
    }

    #[test]
    fn straight_through_gradients_are_not_wrong() {
        let at = Var::new(&[0.31, -0.72, 1.13, 0.44], &Device::Cpu).unwrap();
        let outcome = check(&[("at".to_owned(), at.clone())], || {
            let rounded = ((at.as_tensor() * 500.0)?.round()? / 500.0)?;
            let straight = (at.as_tensor() + (rounded - at.as_tensor())?.detach())?;
            straight.sqr()?.sum_all()
        });
        assert_eq!(wrong(outcome), [""; 0]);
    }

    #[test]
    fn non_finite_gradients_are_wrong() {
        // One item of the root's gradient is undefined; the others are right.
        let var = Var::new(&[0_f64, 4.0], &Device::Cpu).unwrap();
        let report = check(&[("root".to_owned(), var.clone())], || var.sqr()?.sqrt()?.sum_all());
        assert_eq!(wrong(report), ["root"]);
    }

    #[test]
    fn parameters_without_a_gradient_must_be_unused() {
        let var = |value: f32| Var::new(&[value, 1.0], &Device::Cpu).unwrap();
        let (used, unused, cut) = (var(1.0), var(2.0), var(3.0));
        let named = |name: &str, var: &Var| (name.to_owned(), var.clone());
        let vars = vec![named("used", &used), named("unused", &unused)];
        let report = check(&vars, || used.sqr()?.sum_all()).unwrap();
        assert_eq!(verdicts(&report), [Verdict::Right; 2]);
        let vars = [vars, vec![named("cut", &cut)]].concat();
        let report = check(&vars, || (used.sqr()? + cut.as_detached_tensor().sqr()?)?.sum_all());
        assert_eq!(wrong(report), ["cut"]);
    }

    #[test]
    fn values_are_restored_if_the_loss_fails() {
        let (net, vars, x) = net(DType::F32);
        let mut calls = 0;
        let outcome = check(&vars, || {
            calls += 1;
            if calls > 5 {
                candle_core::bail!("the data set has ended")
            }
            net.loss(&x, same)
        });
        assert!(outcome.unwrap_err().to_string().contains("has ended"));
    }
}
