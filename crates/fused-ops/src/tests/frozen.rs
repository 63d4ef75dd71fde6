//! Frozen weights in half precision are widened by blocks, with the results of a widened weight.

use candle_core::{DType, Device, Result, Tensor, Var};

use super::support::{numbers, relative_error, values};
use crate::affine::AffineLayer;

const SCALE: f64 = 0.5;

/// Returns a weight of three blocks, and the matrices of its adapter.
fn layer(dtype: DType) -> Result<(Tensor, [Var; 2])> {
    let weight = numbers(&[600, 33], 2).to_dtype(DType::BF16)?;
    let [a, b] = [[4, 33], [600, 4]].map(|shape| numbers(&shape, 3).to_dtype(dtype));
    Ok((weight, [Var::from_tensor(&a?)?, Var::from_tensor(&b?)?]))
}

/// Returns the result and the gradients of x, A and B.
fn outcome(
    x: &Var,
    (weight, [a, b]): &(Tensor, [Var; 2]),
    apply: impl Fn(&Tensor, &AffineLayer) -> crate::Result<Tensor>,
) -> Result<Vec<Tensor>> {
    let y = apply(x, &AffineLayer::new(weight, None).with_adapter(a, b, SCALE))?;
    let store = (&y * numbers(y.dims(), 9).to_dtype(y.dtype())?)?.sum_all()?.backward()?;
    assert!(store.get(weight).is_none());
    let grads = [x, a, b].map(|var| store.get(var).unwrap().clone());
    Ok([y].into_iter().chain(grads).collect())
}

fn fused(x: &Tensor, layer: &AffineLayer) -> crate::Result<Tensor> {
    crate::ops::linear::apply(x, layer, None)
}

#[test]
fn blocks_match_the_widened_weight() -> Result<()> {
    for (dtype, limit) in [(DType::F32, 2e-6), (DType::F64, 1e-13)] {
        let (half, adapter) = layer(dtype)?;
        let wide = half.to_dtype(dtype)?;
        for rows in [1, 70, 300] {
            let x = Var::from_tensor(&numbers(&[rows, 33], 1).to_dtype(dtype)?)?;
            let expected = outcome(&x, &(wide.clone(), adapter.clone()), fused)?;
            let found = outcome(&x, &(half.clone(), adapter.clone()), fused)?;
            let composed =
                outcome(&x, &(half.clone(), adapter.clone()), |x, layer| Ok(layer.composed(x)?))?;
            for ((found, composed), expected) in found.iter().zip(&composed).zip(&expected) {
                assert_eq!((found.dtype(), composed.dtype()), (dtype, dtype));
                for tensor in [found, composed] {
                    let error = relative_error(tensor, expected);
                    assert!(error < limit, "{rows} rows: {error}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn rows_alone_have_the_same_bits() -> Result<()> {
    let (half, [a, b]) = layer(DType::F32)?;
    let x = numbers(&[300, 33], 1).to_dtype(DType::F32)?;
    for weight in [half.clone(), half.to_dtype(DType::F32)?] {
        let forward = |x: &Tensor| crate::lora_linear(x, &weight, None, &a, &b, SCALE);
        let all = forward(&x)?;
        for (start, len) in [(0, 1), (7, 3), (100, 200)] {
            let some = forward(&x.narrow(0, start, len)?)?;
            assert_eq!(values(&some), values(&all.narrow(0, start, len)?));
        }
    }
    Ok(())
}

#[test]
fn half_precision_input_is_rounded_once() -> Result<()> {
    let (weight, [a, b]) = layer(DType::F32)?;
    let x = numbers(&[5, 33], 1).to_dtype(DType::BF16)?;
    let found = crate::lora_linear(&x, &weight, None, &a, &b, SCALE)?;
    let wide = crate::lora_linear(&x.to_dtype(DType::F32)?, &weight, None, &a, &b, SCALE)?;
    assert_eq!(values(&found), values(&wide.to_dtype(DType::BF16)?));
    Ok(())
}

#[test]
fn unfit_adapters_are_rejected() -> Result<()> {
    let tensor = |shape: [usize; 2], dtype| Tensor::zeros(&shape[..], dtype, &Device::Cpu);
    let x = tensor([2, 3], DType::F32)?;
    let weight = tensor([5, 3], DType::BF16)?;
    let error = |a: [usize; 2], b: [usize; 2], dtype| -> Result<crate::Error> {
        let (a, b) = (tensor(a, dtype)?, tensor(b, dtype)?);
        Ok(crate::lora_linear(&x, &weight, None, &a, &b, 1.0).unwrap_err())
    };
    for (a, b) in [([2, 4], [5, 2]), ([2, 3], [4, 2]), ([2, 3], [5, 3])] {
        assert!(matches!(error(a, b, DType::F32)?, crate::Error::Shape { .. }));
    }
    assert!(matches!(error([2, 3], [5, 2], DType::F64)?, crate::Error::DType { .. }));
    Ok(())
}

#[test]
fn half_precision_head_is_the_widened_head() -> Result<()> {
    let targets = Tensor::from_iter((0..70_u32).map(|n| n * 37 % 600), &Device::Cpu)?;
    let config = crate::CrossEntropyConfig::default();
    let outcome = |x: &Tensor, weight: &Tensor| -> crate::Result<_> {
        let sum = crate::linear_cross_entropy(x, weight, &targets, &config)?.sum;
        let grads = sum.backward()?;
        Ok([sum, grads.get(x).unwrap().clone(), grads.get(weight).unwrap().clone()])
    };
    for half in [DType::F16, DType::BF16] {
        let [x, weight] = [numbers(&[70, 33], 1), numbers(&[600, 33], 2)]
            .map(|tensor| Var::from_tensor(&tensor.to_dtype(half).unwrap()).unwrap());
        let [wide_x, wide_weight] =
            [&x, &weight].map(|var| Var::from_tensor(&var.to_dtype(DType::F32).unwrap()).unwrap());
        let found = outcome(&x, &weight)?;
        let [sum, x, weight] = outcome(&wide_x, &wide_weight)?;
        assert_eq!(values(&found[0]), values(&sum));
        // Sums over 600 classes are cut into blocks.
        assert!(relative_error(&found[1], &x) < 1e-2);
        assert_eq!(values(&found[2]), values(&weight.to_dtype(half)?));
    }
    Ok(())
}
