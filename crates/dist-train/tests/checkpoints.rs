//! Checkpoints: whole or not there, and training continues from them as if it had never stopped.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{fs, path::Path};

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, Optimizer, ParamsAdamW, VarMap, linear, loss::mse};
use dist_train::{
    AdamW, Checkpoint, CheckpointError, Checkpoints, DataParallel, Error, ParameterError,
    StatefulOptimizer,
};
use pmap_mesh::{DeviceMesh, Uneven};

/// A model in training, and its variables.
struct Run {
    mesh: DeviceMesh,
    vars: VarMap,
    model: DataParallel<Linear, AdamW>,
}

impl Run {
    fn new(mesh: DeviceMesh, share: bool) -> Self {
        let vars = VarMap::new();
        let start = |shape: &[usize], offset: f64| {
            let len: usize = shape.iter().product();
            Tensor::arange(0_f32, len as f32, &Device::Cpu)
                .unwrap()
                .affine(0.1, offset)
                .unwrap()
                .reshape(shape)
                .unwrap()
        };
        for (name, tensor) in [("weight", start(&[2, 3], -0.2)), ("bias", start(&[2], 0.3))] {
            let var = candle_core::Var::from_tensor(&tensor).unwrap();
            vars.data().lock().unwrap().insert(name.to_owned(), var);
        }
        let build = |vb: candle_nn::VarBuilder<'_>| linear(3, 2, vb);
        let params = ParamsAdamW { lr: 0.05, ..ParamsAdamW::default() };
        let builder = DataParallel::builder(&mesh, build).variables(&vars).uneven(Uneven::Balanced);
        let builder = if share { builder } else { builder.replicated() };
        let model = builder.build(|group| AdamW::new(group.vars, params.clone())).unwrap();
        Self { mesh, vars, model }
    }

    fn cpu(slots: usize) -> Self {
        Self::new(DeviceMesh::cpu(slots).unwrap(), true)
    }

    fn steps(&mut self, steps: std::ops::Range<u64>) -> f64 {
        let mut loss = f64::NAN;
        for step in steps {
            let x = Tensor::arange(0_f32, 36., &Device::Cpu)
                .unwrap()
                .affine(0.05, -(step as f64) / 7.0)
                .unwrap();
            let x = x.reshape((12, 3)).unwrap();
            let y = x.narrow(1, 0, 2).unwrap().sqr().unwrap();
            let of = |_: &_, model: &Linear, (x, y): (Tensor, Tensor)| mse(&model.forward(&x)?, &y);
            loss = self.model.step((x, y), of).unwrap().loss;
        }
        loss
    }

    fn values(&self) -> Vec<f32> {
        let vars = self.vars.data().lock().unwrap();
        let all = ["weight", "bias"]
            .map(|name| vars[name].flatten_all().unwrap().to_vec1::<f32>().unwrap());
        all.concat()
    }
}

fn saved(folder: &Path, run: &Run, step: u64) -> Checkpoint {
    let checkpoints = Checkpoints::new(folder);
    checkpoints.save(&run.mesh, step, &run.model.state_dict().unwrap(), &("seed", step)).unwrap();
    checkpoints.latest().unwrap().unwrap()
}

/// Why a checkpoint cannot be opened.
fn refused(path: &Path) -> CheckpointError {
    match Checkpoint::open(path) {
        Err(Error::Checkpoint(error)) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn training_continues_as_if_it_had_never_stopped() {
    for share in [true, false] {
        for slots in [1, 2, 3] {
            let folder = tempfile::tempdir().unwrap();
            let start = || Run::new(DeviceMesh::cpu(slots).unwrap(), share);
            let mut whole = start();
            whole.steps(0..8);

            let mut first = start();
            first.steps(0..5);
            let checkpoint = saved(folder.path(), &first, 5);
            assert_eq!(
                (checkpoint.step(), checkpoint.state::<(String, u64)>().unwrap()),
                (5, ("seed".into(), 5))
            );
            let mut second = start();
            second.model.load(&checkpoint).unwrap();
            second.steps(5..8);
            assert_eq!(second.values(), whole.values(), "{slots} slots");
            second.model.check_in_sync().unwrap();
        }
    }
}

#[test]
fn another_number_of_slots_comes_to_the_same_result() {
    let folder = tempfile::tempdir().unwrap();
    let mut whole = Run::cpu(2);
    whole.steps(0..8);
    let mut first = Run::cpu(2);
    first.steps(0..5);
    let checkpoint = saved(folder.path(), &first, 5);
    for slots in [1, 3, 5] {
        let mut second = Run::cpu(slots);
        second.model.load(&checkpoint).unwrap();
        second.steps(5..8);
        for (left, right) in second.values().iter().zip(whole.values()) {
            assert!((left - right).abs() < 1e-5, "{left} for {right} on {slots} slots");
        }
    }
}

#[test]
fn every_tensor_is_written_once() {
    for (slots, share) in [(1, true), (2, true), (2, false), (3, false)] {
        let folder = tempfile::tempdir().unwrap();
        let run = Run::new(DeviceMesh::cpu(slots).unwrap(), share);
        let checkpoint = saved(folder.path(), &run, 0);
        let files = fs::read_dir(checkpoint.path()).unwrap().map(|entry| entry.unwrap().path());
        let files = files
            .filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
        let mut names: Vec<String> = files
            .flat_map(|path| {
                candle_core::safetensors::load(path, &Device::Cpu).unwrap().into_keys()
            })
            .collect();
        names.sort();
        let kinds = ["exp_avg", "exp_avg_sq", "model", "step"];
        let expected =
            kinds.iter().flat_map(|kind| ["bias", "weight"].map(|name| format!("{kind}/{name}@0")));
        assert_eq!(names, expected.collect::<Vec<_>>(), "{slots} slots");
    }
}

#[test]
fn what_is_not_whole_is_never_taken_for_a_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path());
    assert!(checkpoints.latest().unwrap().is_none());
    let run = Run::cpu(2);
    let newest = || checkpoints.latest().unwrap().map(|checkpoint| checkpoint.step());
    saved(folder.path(), &run, 1);
    let second = saved(folder.path(), &run, 2);
    assert_eq!(newest(), Some(2));

    // Stopped while a checkpoint was written: the folder has its first name.
    fs::rename(second.path(), folder.path().join("step-0000000003.partial")).unwrap();
    assert_eq!(newest(), Some(1));
    // The next one clears it away.
    let fourth = saved(folder.path(), &run, 4);
    assert!(!folder.path().join("step-0000000003.partial").exists());

    let shard = fourth.path().join("shard-00001-of-00002.safetensors");
    let bytes = fs::read(&shard).unwrap();
    for torn in [&bytes[..bytes.len() - 1], &bytes[..4], &[], &[&bytes[..], b"x"].concat()[..]] {
        fs::write(&shard, torn).unwrap();
        let CheckpointError::Length { path, found, expected } = refused(fourth.path()) else {
            panic!("a file of another length is refused by its length")
        };
        assert_eq!((&path, found), (&shard, torn.len() as u64));
        assert_eq!(expected, bytes.len() as u64);
        assert_eq!(newest(), Some(1));
    }
    let mut hostile = bytes.clone();
    hostile[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    fs::write(&shard, &hostile).unwrap();
    assert!(
        matches!(refused(fourth.path()), CheckpointError::Header { path, .. } if path == shard)
    );
    fs::remove_file(&shard).unwrap();
    assert!(matches!(refused(fourth.path()), CheckpointError::Io { path, .. } if path == shard));
    assert_eq!(newest(), Some(1));
    fs::write(&shard, &bytes).unwrap();
    assert_eq!(newest(), Some(4));

    let index = fourth.path().join("index.json");
    let text = fs::read_to_string(&index).unwrap();
    for other in [&text[..text.len() / 2], "{}"] {
        fs::write(&index, other).unwrap();
        assert!(
            matches!(refused(fourth.path()), CheckpointError::Json { path, .. } if path == index)
        );
    }
    let other_number = text.replace("\"format_version\": 1", "\"format_version\": 2");
    for other in [r#"{"format_version": 2, "tensors": []}"#, &other_number] {
        fs::write(&index, other).unwrap();
        let error = refused(fourth.path());
        assert!(matches!(error, CheckpointError::FormatVersion { found: 2, supported: 1, .. }));
        let message = error.to_string();
        assert!(message.ends_with("format version 2 is not supported, only 1 is"), "{message}");
    }
}

#[test]
fn the_newest_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let run = Run::cpu(1);
    let checkpoints = Checkpoints::new(folder.path()).keep(3);
    for step in [10, 20, 30, 40, 50] {
        checkpoints.save(&run.mesh, step, &run.model.state_dict().unwrap(), &()).unwrap();
    }
    let mut names: Vec<_> = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["step-0000000030", "step-0000000040", "step-0000000050"]);
}

#[test]
fn a_damaged_checkpoint_is_written_again_and_counts_for_none() {
    let folder = tempfile::tempdir().unwrap();
    let run = Run::cpu(2);
    let steps = || {
        let names = fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.collect::<std::collections::BTreeSet<_>>()
    };
    saved(folder.path(), &run, 10);
    let newest = saved(folder.path(), &run, 20);
    fs::remove_file(newest.path().join("shard-00002-of-00002.safetensors")).unwrap();
    assert_eq!(Checkpoints::new(folder.path()).latest().unwrap().unwrap().step(), 10);
    assert_eq!(Checkpoints::new(folder.path()).steps().unwrap(), [10]);
    // The run continues from there, and comes to the same step again.
    assert_eq!(saved(folder.path(), &run, 20).step(), 20);
    assert_eq!(steps().into_iter().collect::<Vec<_>>(), ["step-0000000010", "step-0000000020"]);

    // A damaged one takes no place of those that are kept; what is not ours, or later, stays.
    fs::create_dir(folder.path().join("step-0000000025")).unwrap();
    fs::create_dir(folder.path().join("notes.partial")).unwrap();
    fs::create_dir(folder.path().join("step-0000000099")).unwrap();
    Checkpoints::new(folder.path())
        .save(&run.mesh, 30, &run.model.state_dict().unwrap(), &())
        .unwrap();
    let expected = ["notes.partial", "step-0000000020", "step-0000000030", "step-0000000099"];
    assert_eq!(steps().into_iter().collect::<Vec<_>>(), expected);
}

/// Replaces the file of a checkpoint of one slot, and says so in its index.
fn replace_shard(checkpoint: &Checkpoint, bytes: &[u8]) {
    let index = checkpoint.path().join("index.json");
    let text = fs::read_to_string(&index).unwrap();
    let mut edited: serde_json::Value = serde_json::from_str(&text).unwrap();
    edited["files"][0]["bytes"] = bytes.len().into();
    fs::write(&index, edited.to_string()).unwrap();
    fs::write(checkpoint.path().join(SHARD), bytes).unwrap();
}

const SHARD: &str = "shard-00001-of-00001.safetensors";

#[test]
fn hostile_indices_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = saved(folder.path(), &Run::cpu(1), 1);
    let index = checkpoint.path().join("index.json");
    let text = fs::read_to_string(&index).unwrap();
    fs::write(folder.path().join("shard-.safetensors"), b"outside").unwrap();
    for name in ["../shard-.safetensors", "/etc/hosts", "index.json"] {
        fs::write(&index, text.replace(SHARD, name)).unwrap();
        assert!(
            matches!(refused(checkpoint.path()), CheckpointError::Listed { path, file } if path == index && file == name)
        );
    }
    let mut twice: serde_json::Value = serde_json::from_str(&text).unwrap();
    let first = twice["files"][0].clone();
    twice["files"].as_array_mut().unwrap().push(first);
    fs::write(&index, twice.to_string()).unwrap();
    assert!(
        matches!(refused(checkpoint.path()), CheckpointError::Listed { file, .. } if file == SHARD)
    );
}

#[test]
fn hostile_headers_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = saved(folder.path(), &Run::cpu(1), 1);
    let tensor = Tensor::zeros(6, DType::F32, &Device::Cpu).unwrap();
    let file = |key: &str| safetensors::serialize([(key, &tensor)], None).unwrap();
    // No name of a checkpoint, and items that would end beyond all numbers.
    for name in ["weight", "model/weight", &format!("model/weight@{}", usize::MAX)] {
        replace_shard(&checkpoint, &file(name));
        assert!(
            matches!(refused(checkpoint.path()), CheckpointError::Key { key, .. } if key == name)
        );
    }
    let whole = file("model/weight@0");
    replace_shard(&checkpoint, &whole[..whole.len() - 4]);
    let CheckpointError::Extent { described, found, .. } = refused(checkpoint.path()) else {
        panic!("a file that ends too early is refused")
    };
    assert_eq!((described, found), (whole.len() as u64, whole.len() as u64 - 4));
    // Numbers that candle does not have.
    let complex = safetensors::tensor::TensorView::new(safetensors::Dtype::C64, vec![2], &[0; 16]);
    let complex = [("model/weight@0", complex.unwrap())];
    replace_shard(&checkpoint, &safetensors::serialize(complex, None).unwrap());
    let error = Checkpoint::open(checkpoint.path()).unwrap_err();
    assert!(
        matches!(error, Error::Parameter(ParameterError::UnknownDtype { dtype, .. }) if dtype == "C64")
    );
}

#[test]
fn checkpoints_with_too_little_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = Run::cpu(1);
    let checkpoint = saved(folder.path(), &run, 1);
    let floats = |len: usize| Tensor::zeros(len, DType::F32, &Device::Cpu).unwrap();
    let mut load = |tensors: &[(&str, Tensor)]| {
        let named = tensors.iter().map(|(name, tensor)| (*name, tensor));
        replace_shard(&checkpoint, &safetensors::serialize(named, None).unwrap());
        run.model.load(&Checkpoint::open(checkpoint.path()).unwrap()).unwrap_err()
    };
    // The bias is loaded first, by its name.
    let short = [("model/weight@0", floats(6)), ("model/bias@0", floats(1))];
    let error = load(&short);
    assert!(
        matches!(&error, Error::Parameter(ParameterError::Incomplete { name, kind, item: 1 }) if name == "bias" && kind == "model"),
        "{error}"
    );
    let no_state = [("model/weight@0", floats(6)), ("model/bias@0", floats(2))];
    let error = load(&no_state);
    assert!(
        matches!(&error, Error::Parameter(ParameterError::Incomplete { kind, item: 0, .. }) if kind == "step"),
        "{error}"
    );
    // Two pieces that do not fit together.
    let double = Tensor::zeros(1, DType::F64, &Device::Cpu).unwrap();
    let mixed =
        [("model/weight@0", floats(6)), ("model/bias@0", floats(1)), ("model/bias@1", double)];
    let error = load(&mixed);
    assert!(matches!(&error, Error::Tensor { .. }), "{error}");
    assert!(error.to_string().starts_with("joining the pieces of a parameter failed: "), "{error}");
    // A state that its optimizer cannot have.
    let mut impossible = no_state.to_vec();
    let minus_one = Tensor::new(-1_i64, &Device::Cpu).unwrap();
    impossible.extend([("step/weight@0", minus_one.clone()), ("step/bias@0", minus_one)]);
    let error = load(&impossible);
    assert!(matches!(&error, Error::Optimizer { .. }), "{error}");
    assert!(
        error.to_string().contains("cannot be read or set: -1 steps cannot have been taken"),
        "{error}"
    );
    assert!(std::error::Error::source(&error).is_none(), "the cause is in the message already");
}

/// An optimizer that names its state as it should not, and does nothing else.
#[derive(Debug)]
struct Misnamed(&'static [&'static str]);

impl Optimizer for Misnamed {
    type Config = &'static [&'static str];

    fn new(_: Vec<candle_core::Var>, names: Self::Config) -> candle_core::Result<Self> {
        Ok(Self(names))
    }

    fn step(&mut self, _: &candle_core::backprop::GradStore) -> candle_core::Result<()> {
        Ok(())
    }

    fn learning_rate(&self) -> f64 {
        0.0
    }

    fn set_learning_rate(&mut self, _: f64) {}
}

impl StatefulOptimizer for Misnamed {
    fn state(&self, _: usize) -> candle_core::Result<Vec<(&'static str, Tensor)>> {
        let one = Tensor::new(1_f32, &Device::Cpu)?;
        Ok(self.0.iter().map(|&name| (name, one.clone())).collect())
    }

    fn load_state(&mut self, _: usize, _: &str, _: &Tensor) -> candle_core::Result<()> {
        Ok(())
    }
}

#[test]
fn states_that_could_not_be_told_apart_are_refused() {
    let mesh = DeviceMesh::cpu(1).unwrap();
    let state_of = |names| {
        let builder = DataParallel::builder(&mesh, |vb| linear(3, 2, vb));
        builder.build(|group| Misnamed::new(group.vars, names)).unwrap().state_dict()
    };
    assert!(state_of(&["mean", "square"]).is_ok());
    for names in [&["mean", "mean"][..], &["model"], &["running/mean"]] {
        let last = names[names.len() - 1];
        let error = state_of(names).unwrap_err();
        assert!(
            matches!(&error, Error::Checkpoint(CheckpointError::Kind { kind, .. }) if kind == last),
            "{error}"
        );
    }
}

#[test]
fn other_models_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = saved(folder.path(), &Run::cpu(2), 1);
    let mesh = DeviceMesh::cpu(2).unwrap();
    let other = |outputs: usize, name: &'static str| {
        let build = move |vb: candle_nn::VarBuilder<'_>| {
            linear(3, outputs, if name.is_empty() { vb } else { vb.pp(name) })
        };
        DataParallel::builder(&mesh, build)
            .build(|group| AdamW::new(group.vars, ParamsAdamW::default()))
    };
    assert!(
        matches!(other(2, "head").unwrap().load(&checkpoint), Err(Error::Parameter(ParameterError::Unknown { name })) if name == "bias")
    );
    for outputs in [1, 3] {
        let load = other(outputs, "").unwrap().load(&checkpoint);
        assert!(
            matches!(load, Err(Error::Parameter(ParameterError::Shape { found, expected, .. })) if found == [2] && expected == [outputs])
        );
    }
    let state = checkpoint.state::<u64>();
    assert!(matches!(state, Err(Error::Checkpoint(CheckpointError::Json { .. }))));

    let no_bias = DataParallel::builder(&mesh, |vb| candle_nn::linear_no_bias(3, 2, vb))
        .build(|group| AdamW::new(group.vars, ParamsAdamW::default()));
    let checkpoints = Checkpoints::new(folder.path());
    checkpoints.save(&mesh, 2, &no_bias.unwrap().state_dict().unwrap(), &()).unwrap();
    let load = Run::cpu(2).model.load(&checkpoints.latest().unwrap().unwrap());
    assert!(
        matches!(load, Err(Error::Parameter(ParameterError::Missing { name })) if name == "bias")
    );
}

#[test]
fn a_folder_that_cannot_be_written_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "no folder").unwrap();
    let run = Run::cpu(1);
    let save = Checkpoints::new(&file).save(&run.mesh, 1, &run.model.state_dict().unwrap(), &());
    assert!(
        matches!(save, Err(Error::Checkpoint(CheckpointError::Io { path, .. })) if path.starts_with(&file))
    );
    saved(folder.path(), &run, 1);
    let again =
        Checkpoints::new(folder.path()).save(&run.mesh, 1, &run.model.state_dict().unwrap(), &());
    assert!(
        matches!(again, Err(Error::Checkpoint(CheckpointError::Exists { step: 1, .. }))),
        "a checkpoint is never overwritten"
    );
    assert!(Checkpoints::new(folder.path()).latest().unwrap().is_some());

    let three = DeviceMesh::cpu(3).unwrap();
    let state = run.model.state_dict().unwrap();
    let other_mesh = Checkpoints::new(folder.path()).save(&three, 2, &state, &());
    assert!(matches!(
        other_mesh,
        Err(Error::Checkpoint(CheckpointError::Slots { found: 1, expected: 3 }))
    ));
}
