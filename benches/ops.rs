//! Forward and backward of operations: our fused form, and the same composed of candle's
//! operations.
//!
//! Both forms get the same inputs and must agree on the result before they are timed. Ours must
//! also be fused, not a fallback: its graph has one operation between inputs and result, or two for
//! `mlp`, which puts a token between them.
//!
//! `graph` only reshapes its input. Its time is candle's share of every other bench: zero-filling
//! the gradients of result and input, and adding to them.

use std::{hint::black_box, time::Duration};

use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_distributed::{
    mesh::keep_freed_memory,
    ops::{self, Activation, AttentionConfig, CrossEntropyConfig, DropoutKey},
};
use criterion::{Criterion, criterion_group, criterion_main};

/// One form of an operation, applied to its inputs.
type OperationForm<'a> = &'a dyn Fn(&[Tensor]) -> Result<Tensor>;

/// Times both forms of an operation on variables of these shapes.
fn compare(
    c: &mut Criterion,
    name: &str,
    shapes: &[&[usize]],
    fused: OperationForm<'_>,
    composed: OperationForm<'_>,
) -> Result<()> {
    let vars: Vec<_> = shapes.iter().map(|shape| variable(shape)).collect::<Result<_>>()?;
    let inputs: Vec<_> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    check(name, &fused(&inputs)?, &composed(&inputs)?)?;
    let mut group = c.benchmark_group(format!("ops/{name}"));
    group.sample_size(10).measurement_time(Duration::from_secs(1));
    group.warm_up_time(Duration::from_millis(200));
    for (form, f) in [("fused", fused), ("composed", composed)] {
        group.bench_function(form, |b| b.iter(|| f(&inputs).and_then(|y| y.sum_all()?.backward())));
    }
    group.finish();
    Ok(())
}

/// Returns a variable with numbers spread like activations.
fn variable(shape: &[usize]) -> Result<Var> {
    let n: usize = shape.iter().product();
    let numbers: Vec<_> =
        (0..n).map(|i| ((i * 7919 + i / 31) % 2003) as f32 / 1000.0 - 1.0).collect();
    Var::from_tensor(&Tensor::from_vec(numbers, shape, &Device::Cpu)?)
}

/// Checks that both forms agree, and that ours is a single operation: a token and its output.
fn check(name: &str, ours: &Tensor, theirs: &Tensor) -> Result<()> {
    let largest = |x: Tensor| x.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>();
    let error = largest((ours - theirs)?)?;
    let largest = largest(theirs.clone())?;
    assert!(error <= 1e-4 * largest, "{name}: error {error}, largest item {largest}");
    let nodes = |y: &Tensor| y.sorted_nodes().iter().filter(|node| !node.is_variable()).count();
    let ours = nodes(ours);
    let theirs = nodes(theirs);
    let expected = if name == "graph" { 1 } else { 2 };
    assert!(ours == expected && theirs >= 1, "{name}: {ours} operations, composed {theirs}");
    Ok(())
}

const ROWS: &[usize] = &[4096, 512];
const WIDTH: &[usize] = &[512];

fn graph(c: &mut Criterion) -> Result<()> {
    let view = |t: &[Tensor]| t[0].reshape((512, 4096));
    compare(c, "graph", &[ROWS], &view, &view)
}

fn rows(c: &mut Criterion) -> Result<()> {
    compare(c, "rms_norm", &[ROWS, WIDTH], &|t| Ok(ops::rms_norm(&t[0], &t[1], 1e-5)?), &|t| {
        candle_nn::ops::rms_norm_slow(&t[0], &t[1], 1e-5)
    })?;
    compare(
        c,
        "layer_norm",
        &[ROWS, WIDTH, WIDTH],
        &|t| Ok(ops::layer_norm(&t[0], &t[1], Some(&t[2]), 1e-5)?),
        &|t| candle_nn::ops::layer_norm_slow(&t[0], &t[1], &t[2], 1e-5),
    )?;
    compare(c, "softmax", &[ROWS], &|t| Ok(ops::softmax(&t[0], D::Minus1)?), &|t| {
        candle_nn::ops::softmax(&t[0], D::Minus1)
    })?;
    compare(c, "gelu", &[ROWS], &|t| Ok(ops::gelu(&t[0])?), &|t| t[0].gelu_erf())?;
    compare(c, "gelu_tanh", &[ROWS], &|t| Ok(ops::gelu_tanh(&t[0])?), &|t| t[0].gelu())?;
    compare(c, "silu", &[ROWS], &|t| Ok(ops::silu(&t[0])?), &|t| t[0].silu())?;
    compare(c, "swiglu", &[ROWS, ROWS], &|t| Ok(ops::swiglu(&t[0], &t[1])?), &|t| {
        t[0].silu()? * &t[1]
    })?;
    dropout(c)
}

fn dropout(c: &mut Criterion) -> Result<()> {
    let key = DropoutKey { seed: 1, call: 2, offset: 0 };
    // candle draws other numbers, so the composed form applies our mask. It still draws its own, to
    // count the time.
    let ones = Tensor::ones(ROWS, DType::F32, &Device::Cpu)?;
    let mask = ops::dropout(&ones, 0.1, key)?;
    compare(c, "dropout", &[ROWS], &|t| Ok(ops::dropout(&t[0], 0.1, key)?), &|t| {
        black_box(t[0].rand_like(0.0, 1.0)?.ge(0.1)?.to_dtype(DType::F32)?);
        &t[0] * &mask
    })
}

fn loss(c: &mut Criterion) -> Result<()> {
    let targets: Vec<_> = (0..4096_u32).map(|row| row * 31 % 512).collect();
    let targets = Tensor::new(targets, &Device::Cpu)?;
    compare(
        c,
        "cross_entropy",
        &[ROWS],
        &|t| Ok(ops::cross_entropy(&t[0], &targets, &CrossEntropyConfig::default())?.sum),
        &|t| candle_nn::loss::cross_entropy(&t[0], &targets)? * 4096.0,
    )
}

fn linear(c: &mut Criterion) -> Result<()> {
    for (name, form) in [
        ("linear", None),
        ("linear_relu", Some(Activation::Relu)),
        ("linear_gelu", Some(Activation::Gelu)),
    ] {
        compare(
            c,
            name,
            &[ROWS, &[512, 512], WIDTH],
            &|t| Ok(ops::linear(&t[0], &t[1], Some(&t[2]), form)?),
            &|t| {
                let y = t[0].matmul(&t[1].t()?)?.broadcast_add(&t[2])?;
                match form {
                    None => Ok(y),
                    Some(Activation::Relu) => y.relu(),
                    Some(_) => y.gelu_erf(),
                }
            },
        )?;
    }
    let up = &[2048, 512][..];
    let down = &[512, 2048][..];
    let relu = Activation::Relu;
    compare(
        c,
        "mlp",
        &[ROWS, up, down],
        &|t| Ok(ops::mlp(&t[0], &t[1], None, relu, &t[2], None)?),
        &|t| t[0].matmul(&t[1].t()?)?.relu()?.matmul(&t[2].t()?),
    )
}

fn rope(c: &mut Criterion) -> Result<()> {
    let angles = Tensor::arange(0.0_f32, 256.0 * 32.0, &Device::Cpu)
        .and_then(|angles| angles.affine(1e-3, 0.0)?.reshape((256, 32)));
    let angles = angles?;
    let cos = angles.cos()?;
    let sin = angles.sin()?;
    compare(c, "rope", &[&[4, 8, 256, 64]], &|t| Ok(ops::rope(&t[0], &cos, &sin)?), &|t| {
        candle_nn::rotary_emb::rope_slow(&t[0], &cos, &sin)
    })?;
    compare(c, "rope_i", &[&[4, 8, 256, 64]], &|t| Ok(ops::rope_i(&t[0], &cos, &sin)?), &|t| {
        candle_nn::rotary_emb::rope_i_slow(&t[0], &cos, &sin)
    })
}

/// Times causal attention over 4,096 positions, in sequences of 128, 256 and 1,024.
fn attention(c: &mut Criterion) -> Result<()> {
    for (length, heads, size) in [(128, 4, 32), (256, 8, 64), (1024, 4, 128)] {
        let shape = &[4096 / length, length, heads, size][..];
        let mut mask = vec![0_f32; length * length];
        for row in 0..length {
            mask[row * length + row + 1..(row + 1) * length].fill(f32::NEG_INFINITY);
        }
        let mask = Tensor::from_vec(mask, (length, length), &Device::Cpu)?;
        compare(
            c,
            &format!("attention_{length}x{heads}x{size}"),
            &[shape, shape, shape],
            &|t| Ok(ops::attention(&t[0], &t[1], &t[2], &AttentionConfig::causal())?),
            &|t| {
                let [query, key, value] = [0, 1, 2].map(|i| t[i].transpose(1, 2));
                let (query, key, value) =
                    (query?.contiguous()?, key?.contiguous()?, value?.contiguous()?);
                let scores = (query.matmul(&key.t()?)? / (size as f64).sqrt())?;
                let weights = candle_nn::ops::softmax(&scores.broadcast_add(&mask)?, D::Minus1)?;
                weights.matmul(&value)?.transpose(1, 2)
            },
        )?;
    }
    Ok(())
}

fn all(c: &mut Criterion) {
    keep_freed_memory();
    for bench in [graph, rows, loss, linear, rope, attention] {
        if let Err(error) = bench(c) {
            panic!("bench failed: {error}");
        }
    }
}

criterion_group!(benches, all);
criterion_main!(benches);
