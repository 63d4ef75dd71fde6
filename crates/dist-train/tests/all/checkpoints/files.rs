//! Checkpoints: their tensors, bitwise resumption, and rejected files.

use std::{collections::BTreeMap, fs, path::Path};

use candle_core::{DType, Device, Tensor};
use candle_nn::{Optimizer, ParamsAdamW, VarBuilder, linear};
use dist_checkpoint::TensorKey;
use dist_train::{
    AdamW, Checkpoint, Checkpoints, DataParallel, Error, FullyShard, ParameterError, StateDict,
};
use fsdp_plan::strategy::{Full, Hsdp};
use pmap_mesh::DeviceMesh;

use crate::{checkpoints::run::Run, support::saved};

#[test]
fn resumed_training_has_the_same_bits() {
    for share in [true, false] {
        for slots in [1, 2, 3] {
            let start = || Run::new(DeviceMesh::cpu(slots).unwrap(), share);
            let mut whole = start();
            whole.steps(0..8);

            let mut first = start();
            first.steps(0..5);
            let checkpoint = saved(&first.mesh, &first.model);
            assert_eq!(checkpoint.step(), 5);
            let mut second = start();
            second.model.load(&checkpoint).unwrap();
            second.steps(5..8);
            assert_eq!(second.values(), whole.values(), "{slots} slots");
            second.model.check_in_sync().unwrap();
        }
    }
}

#[test]
fn other_slot_counts_agree_to_rounding() {
    let mut whole = Run::cpu(2);
    whole.steps(0..8);
    let mut first = Run::cpu(2);
    first.steps(0..5);
    let checkpoint = saved(&first.mesh, &first.model);
    for slots in [1, 3, 5] {
        let mut second = Run::cpu(slots);
        second.model.load(&checkpoint).unwrap();
        second.steps(5..8);
        for (left, right) in second.values().iter().zip(whole.values()) {
            assert!((left - right).abs() < 1e-5, "{left} for {right} on {slots} slots");
        }
    }
}

/// Returns the sorted names of all tensors of a checkpoint.
fn tensor_names(folder: &Path) -> Vec<String> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            names.extend(candle_core::safetensors::load(path, &Device::Cpu).unwrap().into_keys());
        }
    }
    names.sort();
    names
}

#[test]
fn every_tensor_is_written_once() {
    for (slots, share) in [(1, true), (2, true), (2, false), (3, false)] {
        let run = Run::new(DeviceMesh::cpu(slots).unwrap(), share);
        let names = tensor_names(saved(&run.mesh, &run.model).path());
        let kinds = ["exp_avg", "exp_avg_sq", "model", "step"];
        let expected =
            kinds.iter().flat_map(|kind| ["bias", "weight"].map(|name| format!("{kind}/{name}@0")));
        assert_eq!(names, expected.collect::<Vec<_>>(), "{slots} slots");
    }
}

/// Several groups store the same shards; only one writes them.
#[test]
fn replicated_shards_are_written_once() {
    let mesh = DeviceMesh::builder().axis("replicas", 2).axis("shards", 2).cpu().unwrap();
    let model = FullyShard::builder(&mesh, |vb| linear(3, 2, vb))
        .unit("all", ["weight", "bias"])
        .strategy(Hsdp::new(Full::default(), 2))
        .build(|group| AdamW::new(group.vars, ParamsAdamW::default()))
        .unwrap();
    let names = tensor_names(saved(&mesh, &model).path());
    let mut unique = names.clone();
    unique.dedup();
    assert_eq!(names, unique);
    let kinds = ["exp_avg/", "exp_avg_sq/", "model/", "step/"];
    assert!(kinds.iter().all(|kind| names.iter().any(|name| name.starts_with(kind))), "{names:?}");
}

#[test]
fn incomplete_checkpoints_are_rejected() {
    let mut run = Run::cpu(1);
    let floats = |len: usize| Tensor::zeros(len, DType::F32, &Device::Cpu).unwrap();
    let mut load = |tensors: &[(&str, &str, Tensor)]| {
        let shapes = [("weight", vec![2, 3]), ("bias", vec![2])];
        let shapes: BTreeMap<_, _> =
            shapes.into_iter().map(|(name, shape)| (name.to_owned(), shape)).collect();
        let mut state = StateDict::new(&run.mesh, shapes);
        for (kind, parameter, tensor) in tensors {
            state.add(0, TensorKey { kind, parameter, start: 0 }, tensor.clone()).unwrap();
        }
        let folder = tempfile::tempdir().unwrap();
        Checkpoints::new(folder.path()).save(&run.mesh, 1, &state, &()).unwrap();
        let checkpoint = Checkpoint::open(folder.path().join("step-0000000001")).unwrap();
        run.model.load(&checkpoint).unwrap_err()
    };
    let no_state = [("model", "weight", floats(6)), ("model", "bias", floats(2))];
    let error = load(&no_state);
    assert!(
        matches!(&error, Error::Parameter(ParameterError::Incomplete { kind, item: 0, .. }) if kind == "step"),
        "{error}"
    );
    // An impossible optimizer state.
    let mut impossible = no_state.to_vec();
    let minus_one = Tensor::new(-1_i64, &Device::Cpu).unwrap();
    impossible.extend([("step", "weight", minus_one.clone()), ("step", "bias", minus_one)]);
    let error = load(&impossible);
    assert!(matches!(&error, Error::Optimizer { .. }), "{error}");
    assert!(
        error.to_string().contains("cannot be read or set: -1 steps cannot have been taken"),
        "{error}"
    );
    assert!(std::error::Error::source(&error).is_none(), "the message already contains the cause");
}

/// No slot stores items of an empty parameter, but both layouts load it.
#[test]
fn empty_parameters_load_in_both_layouts() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let build = |vb: VarBuilder<'_>| {
        vb.get((0, 3), "empty")?;
        linear(3, 2, vb)
    };
    let optimizer = |group: dist_train::Group| AdamW::new(group.vars, ParamsAdamW::default());
    let sharded = FullyShard::builder(&mesh, build).unit("all", ["empty", "weight", "bias"]);
    let mut sharded = sharded.build(optimizer).unwrap();
    let mut whole = DataParallel::builder(&mesh, build).build(optimizer).unwrap();
    whole.load(&saved(&mesh, &sharded)).unwrap();
    sharded.load(&saved(&mesh, &whole)).unwrap();
}

#[test]
fn another_optimizer_is_rejected_unchanged() {
    let mut run = Run::cpu(2);
    run.steps(0..2);
    let checkpoint = saved(&run.mesh, &run.model);
    let builder = DataParallel::builder(&run.mesh, |vb| linear(3, 2, vb));
    let mut other = builder.build(|group| candle_nn::SGD::new(group.vars, 0.1)).unwrap();
    let values = |name| other.parameter(name).unwrap().flatten_all().unwrap().to_vec1::<f32>();
    let before = ["weight", "bias"].map(|name| values(name).unwrap());
    let error = other.load(&checkpoint).unwrap_err();
    assert!(matches!(error, Error::Optimizer { .. }), "{error}");
    assert!(error.to_string().contains("exp_avg"), "{error}");
    let values = |name| other.parameter(name).unwrap().flatten_all().unwrap().to_vec1::<f32>();
    assert_eq!(["weight", "bias"].map(|name| values(name).unwrap()), before);
}

#[test]
fn integers_are_rejected_unchanged() {
    let mut run = Run::cpu(2);
    let mut state = StateDict::new(
        &run.mesh,
        BTreeMap::from([("weight".to_owned(), vec![2, 3]), ("bias".to_owned(), vec![2])]),
    );
    let integers = |len| Tensor::arange(0_i64, len, &Device::Cpu).unwrap();
    state.add(0, TensorKey::model("bias", 0), integers(2).to_dtype(DType::F32).unwrap()).unwrap();
    state.add(0, TensorKey::model("weight", 0), integers(6)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path());
    checkpoints.save(&run.mesh, 1, &state, &()).unwrap();
    let before = run.values();
    let error = run.model.load(&checkpoints.latest().unwrap().unwrap()).unwrap_err();
    assert!(
        matches!(&error, Error::Parameter(ParameterError::Conversion { name, .. }) if name == "weight"),
        "{error}"
    );
    assert_eq!(run.values(), before);
    run.steps(0..1);
}
