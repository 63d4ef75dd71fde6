//! Each backward pass gets its own gradients, independent of other passes through the graph.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use candle_core::{Device, Error, Tensor, Var};
use fused_ops::{
    Activation, Result, add_rms_norm, checkpoint, linear_add_rms_norm, mlp, swiglu_mlp,
    with_backward, with_backward_many,
};

use crate::support::{numbers, values};

/// An operation on x [3, 8], a square weight and a row.
type Operation = fn(&Var, &Var, &Tensor) -> Result<Vec<Tensor>>;

fn pair(both: Result<(Tensor, Tensor)>) -> Result<Vec<Tensor>> {
    both.map(|(sum, norm)| vec![sum, norm])
}

const WITH_TWO_OUTPUTS: [(&str, Operation); 3] = [
    ("add_rms_norm", |x, _, row| pair(add_rms_norm(x, &numbers(&[3, 8], 4), row, 1e-5))),
    ("linear_add_rms_norm", |x, weight, row| {
        pair(linear_add_rms_norm(x, weight, &numbers(&[3, 8], 4), row, 1e-5))
    }),
    ("with_backward_many", |x, _, _| {
        let outputs = [x.as_detached_tensor(), (x.as_detached_tensor() * 3.0)?];
        with_backward_many(&[x], &outputs, |outputs, grads| {
            let used = grads.into_iter().zip([1.0, 3.0]).filter_map(|(grad, x)| Some((grad?, x)));
            let zeros = outputs[0].zeros_like()?;
            Ok(vec![Some(
                used.map(|(grad, slope)| grad * slope).try_fold(zeros, |sum, x| sum + x)?,
            )])
        })
    }),
];

const WITH_ONE_OUTPUT: [(&str, Operation); 3] = [
    ("mlp", |x, weight, _| Ok(vec![mlp(x, weight, None, Activation::Silu, weight, None)?])),
    ("swiglu_mlp", |x, weight, _| Ok(vec![swiglu_mlp(x, weight, weight, weight, Some(x))?])),
    ("checkpoint", |x, weight, _| {
        let (vars, inside) = ([weight.clone()], weight.clone());
        Ok(vec![checkpoint(&vars, x, move |x| x.matmul(&inside)?.sqr())?])
    }),
];

/// An operation that has been applied once.
struct Graph {
    x: Var,
    outputs: Vec<Tensor>,
}

impl Graph {
    fn new(operation: Operation) -> Self {
        let [x, weight] =
            [[3, 8], [8, 8]].map(|shape| Var::from_tensor(&numbers(&shape, 1)).unwrap());
        let outputs = operation(&x, &weight, &numbers(&[8], 2)).unwrap();
        Self { x, outputs }
    }

    /// Returns the gradient of x in a pass from some of the outputs, each times `scale`.
    fn gradient(&self, used: &[usize], scale: f64) -> Result<Vec<f64>> {
        let mut loss = Tensor::new(0_f64, &Device::Cpu)?;
        for &output in used {
            loss = (loss + (&self.outputs[output] * scale)?.sum_all()?)?;
        }
        Ok(values(loss.backward()?.get(&self.x).unwrap()))
    }
}

#[test]
fn threads_share_a_graph() {
    for (name, operation) in WITH_TWO_OUTPUTS.into_iter().chain(WITH_ONE_OUTPUT) {
        let graph = Graph::new(operation);
        let all: Vec<usize> = (0..graph.outputs.len()).collect();
        let expected = graph.gradient(&all, 1.0).unwrap();
        let n_wrong = AtomicUsize::new(0);
        let differentiate = |scale: f64| {
            for _ in 0..300 {
                let grad = graph.gradient(&all, scale).unwrap_or_default();
                // By powers of two, so that nothing is rounded.
                let grad: Vec<_> = grad.into_iter().map(|x| x / scale).collect();
                n_wrong.fetch_add(usize::from(grad != expected), Ordering::Relaxed);
            }
        };
        thread::scope(|scope| {
            for scale in [1.0, 2.0, 4.0, 8.0] {
                scope.spawn(move || differentiate(scale));
            }
        });
        assert_eq!(n_wrong.into_inner(), 0, "{name}");
    }
}

#[test]
fn second_pass_starts_fresh() {
    for (name, operation) in WITH_TWO_OUTPUTS {
        let graph = Graph::new(operation);
        for output in [0, 1] {
            let expected = Graph::new(operation).gradient(&[output], 1.0).unwrap();
            graph.gradient(&[0, 1], 1.0).unwrap();
            assert_eq!(graph.gradient(&[output], 1.0).unwrap(), expected, "{name} {output}");
        }
    }
}

#[test]
fn failed_pass_leaves_no_gradient() {
    for (name, operation) in WITH_TWO_OUTPUTS {
        let graph = Graph::new(operation);
        for failing in [0, 1] {
            let expected = Graph::new(operation).gradient(&[failing], 1.0).unwrap();
            let output = &graph.outputs[failing];
            let fails =
                with_backward(&[output], output, |_, _| Err(Error::msg("it fails"))).unwrap();
            // candle begins with the other output in one of the two orders.
            let other = &graph.outputs[1 - failing];
            for loss in [&fails + other, other + &fails] {
                assert!(loss.unwrap().backward().is_err());
                assert_eq!(graph.gradient(&[failing], 1.0).unwrap(), expected, "{name}");
            }
        }
    }
}
