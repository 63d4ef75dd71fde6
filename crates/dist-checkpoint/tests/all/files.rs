//! Checkpoints are complete or absent, and hostile files are rejected.

use std::{collections::BTreeMap, fs, path::Path};

use candle_core::{DType, Device, Tensor};
use dist_checkpoint::{Checkpoint, Checkpoints, Error, ParameterError};
use pmap_mesh::DeviceMesh;

use crate::run::{Run, saved};

/// Returns the error of opening a checkpoint.
fn open_error(path: &Path) -> Error {
    match Checkpoint::open(path) {
        Err(error) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn incomplete_folders_are_not_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path());
    assert!(checkpoints.latest().unwrap().is_none());
    let run = Run::cpu(2);
    let newest = || checkpoints.latest().unwrap().map(|checkpoint| checkpoint.step());
    saved(folder.path(), &run, 1);
    let second = saved(folder.path(), &run, 2);
    assert_eq!(newest(), Some(2));

    // Imitate a crash during a save: the folder still has its temporary name.
    fs::rename(second.path(), folder.path().join("step-0000000003.partial")).unwrap();
    assert_eq!(newest(), Some(1));
    // The next save removes it.
    let fourth = saved(folder.path(), &run, 4);
    assert!(!folder.path().join("step-0000000003.partial").exists());

    let shard = fourth.path().join("shard-00001-of-00002.safetensors");
    let bytes = fs::read(&shard).unwrap();
    for torn in [&bytes[..bytes.len() - 1], &bytes[..4], &[], &[&bytes[..], b"x"].concat()[..]] {
        fs::write(&shard, torn).unwrap();
        let error = open_error(fourth.path());
        let expected = format!("the file has {} bytes, expected {}", torn.len(), bytes.len());
        assert!(
            matches!(&error, Error::Damaged { path, reason } if *path == shard && *reason == expected),
            "{error}"
        );
        assert_eq!(newest(), Some(1));
    }
    let mut hostile = bytes.clone();
    hostile[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    fs::write(&shard, &hostile).unwrap();
    assert!(matches!(open_error(fourth.path()), Error::Header { path, .. } if path == shard));
    fs::remove_file(&shard).unwrap();
    assert!(matches!(open_error(fourth.path()), Error::Io { path, .. } if path == shard));
    assert_eq!(newest(), Some(1));
    fs::write(&shard, &bytes).unwrap();
    assert_eq!(newest(), Some(4));

    let index = fourth.path().join("index.json");
    let text = fs::read_to_string(&index).unwrap();
    for other in [&text[..text.len() / 2], "{}"] {
        fs::write(&index, other).unwrap();
        assert!(matches!(open_error(fourth.path()), Error::Json { path, .. } if path == index));
    }
    let other_number = text.replace("\"format_version\": 1", "\"format_version\": 2");
    for other in [r#"{"format_version": 2, "tensors": []}"#, &other_number] {
        fs::write(&index, other).unwrap();
        let error = open_error(fourth.path());
        assert!(matches!(error, Error::Unsuitable { .. }));
        let message = error.to_string();
        assert!(message.ends_with("format version 2 is not supported, only 1"), "{message}");
    }
    // Edit the index, then remove its checksum.
    fs::write(&index, text.replace("\"step\": 4", "\"step\": 5")).unwrap();
    let edited = open_error(fourth.path());
    assert!(edited.to_string().contains("the index is damaged"), "{edited}");
    fs::write(&index, format!("{text}\n")).unwrap();
    let edited = open_error(fourth.path());
    assert!(
        edited.to_string().ends_with("the index has missing, extra or malformed checksums"),
        "{edited}"
    );
}

#[test]
fn newest_checkpoints_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let run = Run::cpu(1);
    let checkpoints = Checkpoints::new(folder.path()).keep(3);
    for step in [10, 20, 30, 40, 50] {
        checkpoints.save(&run.mesh, step, &run.state_dict(), &()).unwrap();
    }
    let mut names: Vec<_> = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let steps = ["step-0000000030", "step-0000000040", "step-0000000050"];
    assert_eq!(names, [&["holder.json", "lock"][..], &steps].concat());
    drop(checkpoints);
    assert!(!folder.path().join("holder.json").exists(), "the lock is free again");
}

#[test]
fn damaged_checkpoint_is_rewritten() {
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
    // The run continues from step 10, and reaches step 20 again.
    assert_eq!(saved(folder.path(), &run, 20).step(), 20);
    assert_eq!(steps().into_iter().collect::<Vec<_>>(), ["step-0000000010", "step-0000000020"]);

    // A damaged checkpoint does not count as kept; foreign and later folders stay.
    fs::create_dir(folder.path().join("step-0000000025")).unwrap();
    fs::create_dir(folder.path().join("notes.partial")).unwrap();
    fs::create_dir(folder.path().join("step-0000000099")).unwrap();
    Checkpoints::new(folder.path()).save(&run.mesh, 30, &run.state_dict(), &()).unwrap();
    let expected = ["notes.partial", "step-0000000020", "step-0000000030", "step-0000000099"];
    assert_eq!(steps().into_iter().collect::<Vec<_>>(), expected);
}

/// Changes the index of a checkpoint, and updates its checksum.
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

/// Replaces the file of a single-slot checkpoint, and updates its index.
fn replace_shard(checkpoint: &Checkpoint, bytes: &[u8]) {
    let (len, _) = bytes.split_first_chunk::<8>().unwrap();
    let header = &bytes[..8 + usize::try_from(u64::from_le_bytes(*len)).unwrap()];
    edit_index(checkpoint, |index| {
        index["files"][0]["bytes"] = bytes.len().into();
        index["files"][0]["header"] = format!("{:08x}", crc32fast::hash(header)).into();
    });
    fs::write(checkpoint.path().join(SHARD), bytes).unwrap();
}

/// Returns the file of a checkpoint of step 1 with these tensors, each of one block.
#[expect(clippy::disallowed_types, reason = "the safetensors crate requires a hash map")]
fn shard<V: safetensors::View>(tensors: Vec<(&str, V)>) -> Vec<u8> {
    let checksum = |tensor: &V| format!("{:08x}", crc32fast::hash(&tensor.data()));
    let texts = tensors.iter().map(|(name, tensor)| (format!("crc32:{name}"), checksum(tensor)));
    let origin = [("step", "1"), ("file", SHARD)];
    let origin = origin.map(|(key, text)| (key.to_owned(), text.to_owned()));
    let texts: std::collections::HashMap<_, _> = texts.chain(origin).collect();
    safetensors::serialize(tensors, Some(texts)).unwrap()
}

const SHARD: &str = "shard-00001-of-00001.safetensors";

#[test]
fn hostile_indexes_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = saved(folder.path(), &Run::cpu(1), 1);
    let index = checkpoint.path().join("index.json");
    fs::write(folder.path().join("shard-.safetensors"), b"outside").unwrap();
    for name in ["../shard-.safetensors", "/etc/hosts", "index.json"] {
        edit_index(&checkpoint, |index| index["files"][0]["name"] = name.into());
        let error = open_error(checkpoint.path());
        assert!(matches!(&error, Error::Unsuitable { path, .. } if *path == index), "{error}");
        assert!(error.to_string().contains(&format!("{name:?} is listed twice, or")), "{error}");
    }
    edit_index(&checkpoint, |index| {
        index["files"][0]["name"] = SHARD.into();
        let first = index["files"][0].clone();
        index["files"].as_array_mut().unwrap().push(first);
    });
    let error = open_error(checkpoint.path()).to_string();
    assert!(error.contains(&format!("{SHARD:?} is listed twice, or")), "{error}");
    edit_index(&checkpoint, |index| {
        index["files"].as_array_mut().unwrap().truncate(1);
        index["files"][0].as_object_mut().unwrap().remove("header");
    });
    let error = open_error(checkpoint.path());
    assert!(matches!(&error, Error::Json { path, .. } if *path == index), "{error}");
}

#[test]
fn hostile_headers_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = saved(folder.path(), &Run::cpu(1), 1);
    let tensor = Tensor::zeros(6, DType::F32, &Device::Cpu).unwrap();
    let file = |key: &str| shard(vec![(key, &tensor)]);
    // An invalid name, and items that overflow.
    for name in ["weight", "model/weight", &format!("model/weight@{}", usize::MAX)] {
        replace_shard(&checkpoint, &file(name));
        let error = open_error(checkpoint.path()).to_string();
        assert!(error.contains(&format!("{name:?} is not {{kind}}")), "{error}");
    }
    let whole = file("model/weight@0");
    replace_shard(&checkpoint, &whole[..whole.len() - 4]);
    let error = open_error(checkpoint.path());
    let expected = format!("describes {} bytes, but the file has {}", whole.len(), whole.len() - 4);
    assert!(error.to_string().ends_with(&expected), "{error}");
    // A dtype that candle does not have.
    let complex = safetensors::tensor::TensorView::new(safetensors::Dtype::C64, vec![2], &[0; 16]);
    replace_shard(&checkpoint, &shard(vec![("model/weight@0", complex.unwrap())]));
    let error = Checkpoint::open(checkpoint.path()).unwrap_err();
    assert!(
        matches!(error, Error::Parameter(ParameterError::UnknownDtype { dtype, .. }) if dtype == "C64")
    );
    // An intact header without checksums.
    let without = safetensors::serialize([("model/weight@0", &tensor)], None).unwrap();
    replace_shard(&checkpoint, &without);
    let error = open_error(checkpoint.path());
    let expected = "tensor model/weight@0 has missing, extra or malformed checksums";
    assert!(error.to_string().ends_with(expected), "{error}");
}

#[test]
fn unwritable_folder_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "no folder").unwrap();
    let run = Run::cpu(1);
    let save = Checkpoints::new(&file).save(&run.mesh, 1, &run.state_dict(), &());
    assert!(matches!(save, Err(Error::Io { path, .. }) if path.starts_with(&file)));
    saved(folder.path(), &run, 1);
    let again = Checkpoints::new(folder.path()).save(&run.mesh, 1, &run.state_dict(), &());
    assert!(
        matches!(again, Err(Error::Exists { step: 1, .. })),
        "a checkpoint is never overwritten"
    );
    assert!(Checkpoints::new(folder.path()).latest().unwrap().is_some());

    let three = DeviceMesh::cpu(3).unwrap();
    let state = run.state_dict();
    let other_mesh = Checkpoints::new(folder.path()).save(&three, 2, &state, &());
    assert!(matches!(other_mesh, Err(Error::Slots { found: 1, expected: 3 })));
}

#[test]
fn non_json_state_is_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let run = Run::cpu(1);
    let checkpoints = Checkpoints::new(folder.path());
    let tensors = run.state_dict();
    for best in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
        let nested = BTreeMap::from([("best loss", vec![None, Some((1, best))])]);
        let error = checkpoints.save(&run.mesh, 1, &tensors, &nested).unwrap_err();
        assert!(matches!(&error, Error::Json { .. }), "{error}");
        assert!(error.to_string().ends_with("which JSON does not have"), "{error}");
    }
    assert!(checkpoints.latest().unwrap().is_none());
    checkpoints.save(&run.mesh, 1, &tensors, &("best loss", f64::MAX)).unwrap();
    let state: (String, f64) = checkpoints.latest().unwrap().unwrap().state().unwrap();
    assert_eq!(state.1.to_bits(), f64::MAX.to_bits());
}
