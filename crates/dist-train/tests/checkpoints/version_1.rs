//! Checkpoints of format version 1 are still read, though nobody can tell whether they are damaged.

use std::{fs, path::Path};

use dist_train::{Checkpoint, CheckpointError, Checkpoints, Error};

use crate::run::{Run, bits};

/// Written by this crate when it wrote that version, after 5 steps of [`Run`] on two slots.
const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/checkpoints/golden/version-1");

/// The variables after these steps, as they were printed then.
const VALUES: [f32; 8] = [
    0.012_723_565,
    0.111_779_034,
    0.210_873_34,
    0.211_207_7,
    0.302_763_58,
    0.394_711_32,
    0.488_305_8,
    0.311_882_8,
];

#[test]
fn they_are_loaded_and_trained_further() {
    let checkpoints = Checkpoints::new(GOLDEN);
    let checkpoint = checkpoints.latest().unwrap().unwrap();
    assert!(!checkpoint.has_checksums());
    assert_eq!((checkpoint.step(), checkpoint.run()), (5, None));
    assert_eq!(checkpoint.state::<(String, u64)>().unwrap(), ("seed".to_owned(), 5));
    for slots in [1, 2, 3] {
        let mut run = Run::cpu(slots);
        let load = |checkpoint: &Checkpoint| run.model.load(checkpoint);
        checkpoints.load_latest(&run.mesh, load).unwrap().unwrap();
        assert_eq!(bits(&run.values()), bits(&VALUES));
        let mut whole = Run::cpu(slots);
        whole.steps(0..8);
        run.steps(5..8);
        for (left, right) in run.values().iter().zip(whole.values()) {
            assert!((left - right).abs() < 1e-5, "{left} for {right} on {slots} slots");
        }
    }
}

#[test]
fn what_is_not_finite_is_refused_all_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let step = "step-0000000005";
    let copy = folder.path().join(step);
    fs::create_dir(&copy).unwrap();
    for entry in fs::read_dir(Path::new(GOLDEN).join(step)).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, copy.join(path.file_name().unwrap())).unwrap();
    }
    // The last number in the file is that of the weight.
    let shard = copy.join("shard-00001-of-00002.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    let last = bytes.len() - 4;
    bytes[last..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&shard, bytes).unwrap();

    let checkpoints = Checkpoints::new(folder.path());
    let error = checkpoints.latest().unwrap_err();
    let Error::Checkpoint(CheckpointError::NoneLeft { passed_over, .. }) = error else {
        panic!("{error}")
    };
    let Error::Checkpoint(CheckpointError::NotFinite { path, tensor, item }) =
        &passed_over[0].error
    else {
        panic!("{}", passed_over[0])
    };
    assert_eq!((path, tensor.as_str(), *item), (&shard, "model/weight@0", 5));
    assert!(checkpoints.allow_non_finite().latest().unwrap().is_some());
}
