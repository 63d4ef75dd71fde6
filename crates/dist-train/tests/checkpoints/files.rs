//! Checkpoints are whole or not there, and training continues from them as if it had never stopped.

use std::{fs, path::Path};

use candle_core::{DType, Device, Tensor};
use candle_nn::{Optimizer, ParamsAdamW, linear};
use dist_train::{
    AdamW, Checkpoint, CheckpointError, Checkpoints, DataParallel, Error, FilePart, ParameterError,
    StatefulOptimizer,
};
use pmap_mesh::DeviceMesh;

use crate::run::{Run, saved};

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
    let other_number = text.replace("\"format_version\": 2", "\"format_version\": 3");
    for other in [r#"{"format_version": 3, "tensors": []}"#, &other_number] {
        fs::write(&index, other).unwrap();
        let error = refused(fourth.path());
        assert!(matches!(error, CheckpointError::FormatVersion { found: 3, supported: 2, .. }));
        let message = error.to_string();
        assert!(message.ends_with("format version 3 is not supported, 1 to 2 are"), "{message}");
    }
    // One that was edited, and one that hides its checksum.
    fs::write(&index, text.replace("\"step\": 4", "\"step\": 5")).unwrap();
    let edited = refused(fourth.path());
    assert!(matches!(&edited, CheckpointError::Checksum { part: FilePart::Index, .. }), "{edited}");
    fs::write(&index, format!("{text}\n")).unwrap();
    let edited = refused(fourth.path());
    assert!(matches!(edited, CheckpointError::NoChecksum { part: FilePart::Index, .. }));
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
    let steps = ["step-0000000030", "step-0000000040", "step-0000000050"];
    assert_eq!(names, [&["holder.json", "lock"][..], &steps].concat());
    drop(checkpoints);
    assert!(!folder.path().join("holder.json").exists(), "nobody holds the lock any more");
}

#[test]
fn a_damaged_checkpoint_is_written_again_and_counts_for_none() {
    let folder = tempfile::tempdir().unwrap();
    let run = Run::cpu(2);
    let steps = || {
        let names = fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name != "lock").collect::<std::collections::BTreeSet<_>>()
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

/// Changes the index of a checkpoint, and says its new checksum in it.
fn edit_index(checkpoint: &Checkpoint, edit: impl FnOnce(&mut serde_json::Value)) {
    let path = checkpoint.path().join("index.json");
    let mut index: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    index.as_object_mut().unwrap().remove("checksum");
    edit(&mut index);
    let text = format!("{index:#}");
    let text = text.strip_suffix("\n}").unwrap();
    let checksum = crc32fast::hash(text.as_bytes());
    fs::write(path, format!("{text},\n  \"checksum\": \"{checksum:08x}\"\n}}")).unwrap();
}

/// Replaces the file of a checkpoint of one slot, and says so in its index.
fn replace_shard(checkpoint: &Checkpoint, bytes: &[u8]) {
    let (len, _) = bytes.split_first_chunk::<8>().unwrap();
    let header = &bytes[..8 + usize::try_from(u64::from_le_bytes(*len)).unwrap()];
    edit_index(checkpoint, |index| {
        index["files"][0]["bytes"] = bytes.len().into();
        index["files"][0]["header"] = format!("{:08x}", crc32fast::hash(header)).into();
    });
    fs::write(checkpoint.path().join(SHARD), bytes).unwrap();
}

/// The file of a checkpoint of step 1 with these tensors, each of one block.
#[expect(clippy::disallowed_types, reason = "what the safetensors crate takes")]
fn shard<V: safetensors::View>(tensors: Vec<(&str, V)>) -> Vec<u8> {
    let checksum = |tensor: &V| format!("{:08x}", crc32fast::hash(&tensor.data()));
    let texts = tensors.iter().map(|(name, tensor)| ((*name).to_owned(), checksum(tensor)));
    let origin = [("step", "1"), ("file", SHARD)];
    let origin = origin.map(|(key, text)| (key.to_owned(), text.to_owned()));
    let texts: std::collections::HashMap<_, _> = texts.chain(origin).collect();
    safetensors::serialize(tensors, Some(texts)).unwrap()
}

const SHARD: &str = "shard-00001-of-00001.safetensors";

#[test]
fn hostile_indices_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = saved(folder.path(), &Run::cpu(1), 1);
    let index = checkpoint.path().join("index.json");
    fs::write(folder.path().join("shard-.safetensors"), b"outside").unwrap();
    for name in ["../shard-.safetensors", "/etc/hosts", "index.json"] {
        edit_index(&checkpoint, |index| index["files"][0]["name"] = name.into());
        assert!(
            matches!(refused(checkpoint.path()), CheckpointError::Listed { path, file } if path == index && file == name)
        );
    }
    edit_index(&checkpoint, |index| {
        index["files"][0]["name"] = SHARD.into();
        let first = index["files"][0].clone();
        index["files"].as_array_mut().unwrap().push(first);
    });
    assert!(
        matches!(refused(checkpoint.path()), CheckpointError::Listed { file, .. } if file == SHARD)
    );
    edit_index(&checkpoint, |index| {
        index["files"].as_array_mut().unwrap().truncate(1);
        index["files"][0].as_object_mut().unwrap().remove("header");
    });
    let error = refused(checkpoint.path());
    assert!(
        matches!(&error, CheckpointError::NoChecksum { part: FilePart::Header, .. }),
        "{error}"
    );

    // Version 1 had no checksums, so an index of it that has some is another one.
    let early = r#"{"format_version": 1, "step": 1, "parameters": {}, "state": null, "files":
        [{"name": "shard-00001-of-00001.safetensors", "bytes": 0, "header": "00000000"}]}"#;
    fs::write(&index, early).unwrap();
    let error = refused(checkpoint.path());
    assert!(
        matches!(&error, CheckpointError::NoChecksum { part: FilePart::Header, .. }),
        "{error}"
    );
}

#[test]
fn hostile_headers_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = saved(folder.path(), &Run::cpu(1), 1);
    let tensor = Tensor::zeros(6, DType::F32, &Device::Cpu).unwrap();
    let file = |key: &str| shard(vec![(key, &tensor)]);
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
    replace_shard(&checkpoint, &shard(vec![("model/weight@0", complex.unwrap())]));
    let error = Checkpoint::open(checkpoint.path()).unwrap_err();
    assert!(
        matches!(error, Error::Parameter(ParameterError::UnknownDtype { dtype, .. }) if dtype == "C64")
    );
    // A header that is whole and has no checksums.
    let without = safetensors::serialize([("model/weight@0", &tensor)], None).unwrap();
    replace_shard(&checkpoint, &without);
    let error = refused(checkpoint.path());
    let CheckpointError::NoChecksum { part: FilePart::Tensor(name), .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(name, "model/weight@0");
}

#[test]
fn checkpoints_with_too_little_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = Run::cpu(1);
    let checkpoint = saved(folder.path(), &run, 1);
    let floats = |len: usize| Tensor::zeros(len, DType::F32, &Device::Cpu).unwrap();
    let mut load = |tensors: &[(&str, Tensor)]| {
        let named = tensors.iter().map(|(name, tensor)| (*name, tensor));
        replace_shard(&checkpoint, &shard(named.collect()));
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

#[test]
fn a_state_that_would_not_be_read_as_it_is_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let run = Run::cpu(1);
    let checkpoints = Checkpoints::new(folder.path());
    let tensors = run.model.state_dict().unwrap();
    for best in [f64::INFINITY, f64::NAN] {
        let error = checkpoints.save(&run.mesh, 1, &tensors, &("best loss", best)).unwrap_err();
        assert!(matches!(&error, Error::Checkpoint(CheckpointError::Json { .. })), "{error}");
    }
    assert!(checkpoints.latest().unwrap().is_none());
    checkpoints.save(&run.mesh, 1, &tensors, &("best loss", f64::MAX)).unwrap();
    let state: (String, f64) = checkpoints.latest().unwrap().unwrap().state().unwrap();
    assert_eq!(state.1.to_bits(), f64::MAX.to_bits());
}
