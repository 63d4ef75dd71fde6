//! Gradients of variables that bypass candle's sums.

use candle_core::{Device, Tensor, Var, backprop::GradStore};

use crate::{
    autograd::with_direct_grads,
    custom::with_backward,
    ops::{linear::linear, norm::add_rms_norm},
};

fn var(values: [f32; 4]) -> Var {
    Var::from_vec(values.to_vec(), (2, 2), &Device::Cpu).unwrap()
}

/// Uses the weight twice in this crate, and once in candle.
fn loss(x: &Tensor, w: &Tensor) -> Tensor {
    let y = linear(&linear(x, w, None, None).unwrap(), w, None, None).unwrap();
    (y * w).unwrap().sum_all().unwrap()
}

fn bits(grads: &GradStore, var: &Var) -> Vec<u32> {
    let values = grads.get(var).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert!(values.iter().all(|value| value.is_finite()), "{values:?}");
    values.into_iter().map(f32::to_bits).collect()
}

#[test]
fn direct_gradients_equal_candles() {
    let [x, w] = [var([1.0, 2.0, 3.0, -4.0]), var([0.5, -1.0, 0.25, 2.0])];
    let expected = loss(&x, &w).backward().unwrap();
    let found = with_direct_grads([w.as_tensor()], || loss(&x, &w).backward()).unwrap();
    for var in [&x, &w] {
        assert_eq!(bits(&found, var), bits(&expected, var));
    }
}

#[test]
fn inner_passes_keep_their_gradients() {
    let [x, w] = [var([1.0, 2.0, 3.0, 4.0]), var([0.5, 1.0, 0.25, 2.0])];
    let shared = w.clone();
    let expected = loss(&w, &w).backward().unwrap();
    let y = linear(&x, &w, None, None).unwrap();
    let y = with_backward(&[&y], &y.detach(), move |_, grad| {
        let plain = loss(&shared, &shared).backward()?;
        let inner = || loss(&shared, &shared).backward();
        let direct = with_direct_grads([shared.as_tensor()], inner)?;
        for found in [plain, direct] {
            assert_eq!(bits(&found, &shared), bits(&expected, &shared));
        }
        Ok(vec![Some(grad)])
    });
    let grads = with_direct_grads([w.as_tensor()], || y.unwrap().backward()).unwrap();
    assert_eq!(bits(&grads, &w), [4.0, 6.0, 4.0, 6.0_f32].map(f32::to_bits));
}

#[test]
fn failed_passes_leave_nothing() {
    let w = var([1.0, 2.0, 3.0, 4.0]);
    let failed = with_direct_grads([w.as_tensor()], || candle_core::bail!("no memory"));
    assert!(failed.is_err());
    assert!(loss(&w, &w).backward().unwrap().get(&w).is_some());
}

/// An optimizer may change a variable before another variable's gradient is read.
#[test]
fn gradients_do_not_share_variables() {
    let [x, w] = [var([1.0; 4]), var([2.0; 4])];
    let (value, ones) = (w.as_detached_tensor(), x.as_detached_tensor());
    let y =
        with_backward(&[&x, &w], &ones, move |_, grad| Ok(vec![Some(value.clone()), Some(grad)]));
    let variables = [x.as_tensor(), w.as_tensor()];
    let grads = with_direct_grads(variables, || y.unwrap().backward()).unwrap();
    w.set(&ones_like(&w)).unwrap();
    assert_eq!(bits(&grads, &x), [2.0_f32; 4].map(f32::to_bits));
}

/// Returns `y` from an operation of candle, so that candle adds all of its gradients.
fn without_link(y: &Tensor) -> Tensor {
    y.affine(1.0, 0.0).unwrap()
}

/// An output has two, three or five users, of which one is an operation of candle in the last case, and
/// both outputs of an operation are used.
#[test]
fn links_change_no_gradient() {
    let [x, w] = [var([1.0, 2.0, 3.0, -4.0]), var([0.5, -1.0, 0.25, 2.0])];
    let scale = Var::new(&[0.5_f32, 3.0], &Device::Cpu).unwrap();
    let layer = |x: &Tensor| linear(x, &w, None, None).unwrap();
    for n_users in 1..4 {
        let loss = |link: &dyn Fn(&Tensor) -> Tensor| {
            let y = link(&layer(&x));
            let mut sum = layer(&y);
            for _ in 1..n_users {
                sum = (sum + layer(&y)).unwrap();
            }
            if n_users == 3 {
                sum = (sum * y.sqr().unwrap()).unwrap();
            }
            let (sum, normed) = add_rms_norm(&sum, &y, &scale, 1e-5).unwrap();
            let (sum, normed) = (link(&sum), link(&normed));
            (layer(&sum) * layer(&normed)).unwrap().sum_all().unwrap()
        };
        let (linked, plain) = (loss(&Tensor::clone), loss(&without_link));
        for _ in 0..2 {
            let (found, expected) = (linked.backward().unwrap(), plain.backward().unwrap());
            for var in [&x, &w, &scale] {
                assert_eq!(bits(&found, var), bits(&expected, var), "{n_users} users");
            }
        }
    }
}

/// The sum of two variables passes its gradient on to both.
#[test]
fn gradients_of_links_do_not_share_variables() {
    let [x, residual, w] = [1.0, 3.0, 2.0].map(|value| var([value; 4]));
    let scale = Tensor::new(&[1.0_f32, 1.0], &Device::Cpu).unwrap();
    let (sum, _) = add_rms_norm(&x, &residual, &scale, 1e-5).unwrap();
    let value = w.as_detached_tensor();
    let y = with_backward(&[&sum], &sum.detach(), move |_, _| Ok(vec![Some(value.clone())]));
    let grads = with_direct_grads([x.as_tensor()], || y.unwrap().backward()).unwrap();
    w.set(&ones_like(&w)).unwrap();
    assert_eq!(bits(&grads, &x), [2.0_f32; 4].map(f32::to_bits));
}

fn ones_like(w: &Var) -> Tensor {
    w.as_detached_tensor().ones_like().unwrap()
}
