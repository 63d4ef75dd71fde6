//! Optimizers and fused operations on every device, compared with the CPU.

use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_distributed::{
    mesh::DeviceMesh,
    ops::{self, Activation, AttentionConfig, CrossEntropyConfig, DropoutKey},
    train::{AdamW, DataParallel, ParamsSgd, Sgd},
};
use candle_nn::{Linear, Module, Optimizer, ParamsAdamW, linear};

use super::meshes;

/// Returns numbers without a pattern, between −2 and 2.
fn numbers(shape: &[usize], salt: usize) -> Tensor {
    let n_items = shape.iter().product::<usize>();
    let numbers: Vec<f32> =
        (0..n_items).map(|n| ((n * 7919 + salt * 104_729) % 2003) as f32 * 0.002 - 2.0).collect();
    Tensor::from_vec(numbers, shape, &Device::Cpu).unwrap()
}

/// Asserts that items agree within the precision of their dtype, relative to the largest item.
#[track_caller]
fn assert_close(found: &Tensor, expected: &Tensor) {
    assert_close_in(found.dtype(), found, expected);
}

/// Asserts that items agree within the precision of a dtype, relative to the largest item.
#[track_caller]
fn assert_close_in(dtype: DType, found: &Tensor, expected: &Tensor) {
    assert_eq!((found.dims(), found.dtype()), (expected.dims(), expected.dtype()));
    let tolerance = if dtype == DType::F32 { 1e-5 } else { 2e-2 };
    let host = |x: &Tensor| -> Vec<f32> {
        let host = x.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
        host.flatten_all().unwrap().to_vec1().unwrap()
    };
    let expected = host(expected);
    let largest = expected.iter().fold(0_f32, |largest, item| largest.max(item.abs()));
    for (found, expected) in host(found).iter().zip(expected) {
        assert!((found - expected).abs() <= tolerance * largest, "{found} for {expected}");
    }
}

/// Trains four steps with clipped gradients, and returns the weight.
fn train_weight<O: Optimizer + Send + 'static>(
    mesh: &DeviceMesh,
    dtype: DType,
    make: impl Fn(Vec<Var>) -> Result<O>,
) -> Tensor {
    let mut model = DataParallel::builder(mesh, |vb| linear(6, 5, vb))
        .dtype(dtype)
        .clip_grad_norm(0.5)
        .build(|group| make(group.vars))
        .unwrap();
    for step in 0..4 {
        let x = numbers(&[8, 6], step).to_dtype(dtype).unwrap();
        let step = model.step(x, |_, model: &Linear, x: Tensor| {
            model.forward(&x)?.to_dtype(DType::F32)?.sqr()?.mean_all()
        });
        let report = step.unwrap();
        assert!(report.grad_norm > 0.5, "nothing was clipped");
    }
    model.check_in_sync().unwrap();
    model.parameter("weight").unwrap()
}

#[test]
fn clipped_optimizers_match_the_cpu() {
    let cpu = DeviceMesh::cpu(2).unwrap();
    for mesh in meshes() {
        for dtype in [DType::F32, DType::BF16] {
            let params = ParamsAdamW { lr: 0.05, weight_decay: 0.1, ..ParamsAdamW::default() };
            let adam = |vars| AdamW::new(vars, params.clone());
            assert_close(&train_weight(&mesh, dtype, adam), &train_weight(&cpu, dtype, adam));
            let params = ParamsSgd { lr: 0.5, momentum: 0.9, ..ParamsSgd::default() };
            let sgd = |vars| Sgd::new(vars, params.clone());
            assert_close(&train_weight(&mesh, dtype, sgd), &train_weight(&cpu, dtype, sgd));
        }
    }
}

/// Returns the result of an operation on `x`, and the gradient of the sum of its squares.
fn result_and_gradient(
    x: &Tensor,
    device: &Device,
    dtype: DType,
    f: impl Fn(&Tensor) -> ops::Result<Tensor>,
) -> [Tensor; 2] {
    let x = Var::from_tensor(&x.to_dtype(dtype).unwrap().to_device(device).unwrap()).unwrap();
    let y = f(&x).unwrap();
    let loss = y.to_dtype(DType::F32).unwrap().sqr().unwrap().sum_all().unwrap();
    let gradient = loss.backward().unwrap().get(&x).unwrap().clone();
    [y.detach(), gradient]
}

type TensorOperation = Box<dyn Fn(&Tensor) -> ops::Result<Tensor>>;

/// Returns every operation on an argument [2, 5, 24], with its parameters on `device`.
fn operations(device: &Device, dtype: DType) -> Vec<(&'static str, TensorOperation)> {
    let on = |shape: &[usize], salt| {
        numbers(shape, salt).to_dtype(dtype).unwrap().to_device(device).unwrap()
    };
    let [weight, bias] = [on(&[24], 1), on(&[24], 2)];
    let layer_norm_weight = weight.clone();
    let square = on(&[24, 24], 3);
    let heads = on(&[24, 24], 8);
    // With larger weights, f16 would overflow.
    let small = |shape: &[usize], salt| on(shape, salt).affine(0.1, 0.).unwrap();
    let [mlp_up, mlp_down] = [small(&[40, 24], 9), small(&[24, 40], 10)];
    let [swiglu_up, swiglu_down] = [mlp_up.clone(), mlp_down.clone()];
    let swiglu_gate = small(&[40, 24], 11);
    let [projection, norm_weight] = [square.clone(), weight.clone()];
    let head = on(&[24, 24], 12);
    let [frozen, a, b] = [square.clone(), on(&[3, 24], 13), on(&[24, 3], 14)];
    let row = on(&[24], 4);
    let [cos, sin] = [on(&[5, 6], 5), on(&[5, 6], 6)];
    let [head_cos, head_sin] = [cos.clone(), sin.clone()];
    let targets = Tensor::new(&[3_u32, 0, 23, 7, 7, 1, 2, 9, 11, 5], device).unwrap();
    let head_targets = targets.reshape((2, 5)).unwrap();
    let config = CrossEntropyConfig::default()
        .with_ignore_index(9)
        .with_label_smoothing(0.1)
        .with_class_weights(numbers(&[24], 7).abs().unwrap().to_device(device).unwrap());
    let head_config = config.clone().with_logit_scale(0.5).with_softcap(4.0);
    let partial = [cos.clone(), sin.clone()].map(|angles| angles.narrow(1, 0, 4).unwrap());
    let experts = on(&[3, 24, 24], 16);
    let key = DropoutKey { seed: 1, call: 2, offset: 0 };
    let mut all: Vec<(_, TensorOperation)> = vec![
        ("rms_norm", Box::new(move |x| ops::rms_norm(x, &weight, 1e-5))),
        (
            "layer_norm",
            Box::new(move |x| ops::layer_norm(x, &layer_norm_weight, Some(&bias), 1e-5)),
        ),
        ("linear", Box::new(move |x| ops::linear(x, &square, Some(&row), Some(Activation::Gelu)))),
        ("lora_linear", Box::new(move |x| ops::lora_linear(x, &frozen, None, &a, &b, 0.5))),
        (
            "linear_rope",
            Box::new(move |x| ops::linear_rope(x, &heads, None, 12, &head_cos, &head_sin)),
        ),
        (
            "linear_add_rms_norm",
            Box::new(move |x| {
                let (sum, normalized) =
                    ops::linear_add_rms_norm(x, &projection, x, &norm_weight, 1e-5)?;
                Ok((sum + normalized)?)
            }),
        ),
        ("mlp", Box::new(move |x| ops::mlp(x, &mlp_up, None, Activation::Gelu, &mlp_down, None))),
        (
            "swiglu_mlp",
            Box::new(move |x| ops::swiglu_mlp(x, &swiglu_gate, &swiglu_up, &swiglu_down, Some(x))),
        ),
        ("silu", Box::new(ops::silu)),
        ("gelu_tanh", Box::new(ops::gelu_tanh)),
        ("swiglu", Box::new(|x| ops::swiglu(x, &x.affine(0.5, 0.1)?))),
        ("geglu", Box::new(|x| ops::geglu(x, &x.affine(0.5, 0.1)?))),
        (
            "grouped_linear",
            Box::new(move |x| {
                let experts = ops::ExpertWeights::Stacked(&experts);
                ops::grouped_linear(&x.reshape((10, 24))?, experts, &[3, 0, 7])
            }),
        ),
        ("softmax", Box::new(|x| ops::softmax(x, D::Minus1))),
        ("log_softmax", Box::new(|x| ops::log_softmax(x, 1))),
        ("rope", Box::new(move |x| ops::rope(&x.reshape((2, 2, 5, 12))?, &cos, &sin))),
        (
            "rope_i_thd",
            Box::new(move |x| {
                ops::rope_i_thd(&x.reshape((2, 5, 2, 12))?, &partial[0], &partial[1])
            }),
        ),
        ("dropout", Box::new(move |x| ops::dropout(x, 0.3, key))),
        (
            "cross_entropy",
            Box::new(move |x| ops::cross_entropy(&x.reshape((10, 24))?, &targets, &config)?.mean()),
        ),
        (
            "linear_cross_entropy",
            Box::new(move |x| {
                ops::linear_cross_entropy(x, &head, &head_targets, &head_config)?.mean()
            }),
        ),
        (
            "embedding",
            Box::new(|x| {
                let rows = Tensor::new(&[[4_u32, 0], [9, 4]], x.device())?;
                ops::embedding(&x.reshape((10, 24))?, &rows)
            }),
        ),
    ];
    all.extend(attention_operations(on(&[4], 15)));
    all
}

/// Returns attention with and without a window, on an argument [2, 5, 24].
fn attention_operations(sinks: Tensor) -> [(&'static str, TensorOperation); 2] {
    let causal = AttentionConfig::causal().with_key_lengths(vec![5, 3]);
    let window = causal.clone().with_window(2).with_softcap(2.0).with_sinks(sinks);
    let attend = |config: AttentionConfig| -> TensorOperation {
        Box::new(move |x| {
            let x = x.reshape((2, 5, 4, 6))?;
            ops::attention(&x, &x.affine(0.7, 0.0)?, &x, &config)
        })
    };
    [("attention", attend(causal)), ("attention with a window, a cap and sinks", attend(window))]
}

#[test]
fn fused_operations_match_the_cpu() {
    let x = numbers(&[2, 5, 24], 9);
    for mesh in meshes() {
        let device = &mesh.devices()[0];
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let on_device = operations(device, dtype);
            let on_cpu = operations(&Device::Cpu, dtype);
            for ((name, tested), (_, reference)) in on_device.iter().zip(on_cpu) {
                eprintln!("{name} in {dtype:?} on {:?}", device.location());
                let found = result_and_gradient(&x, device, dtype, tested);
                let expected = result_and_gradient(&x, &Device::Cpu, dtype, reference);
                // A loss in f32 has the digits of its arguments.
                assert_close_in(dtype, &found[0], &expected[0]);
                assert_close_in(dtype, &found[1], &expected[1]);
            }
        }
    }
}
