//! Ranges of items, read from pieces that several slots wrote.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use dist_checkpoint::{Checkpoint, Checkpoints, Error, ParameterError, StateDict, TensorKey};
use pmap_mesh::DeviceMesh;

use crate::run::zeros;

/// Saves pieces of parameter `a` of `len` items, each on a separate slot. A piece has the index of
/// its first item, and its items.
fn save(folder: &std::path::Path, len: usize, pieces: &[(usize, Tensor)]) -> Checkpoint {
    let mesh = DeviceMesh::cpu(pieces.len().max(1)).unwrap();
    let shapes = BTreeMap::from([("a".to_owned(), vec![len])]);
    let mut state = StateDict::new(&mesh, shapes);
    for (slot, (start, items)) in pieces.iter().enumerate() {
        state.add(slot, TensorKey::model("a", *start), items.clone()).unwrap();
    }
    let checkpoints = Checkpoints::new(folder);
    checkpoints.save(&mesh, 1, &state, &()).unwrap();
    checkpoints.latest().unwrap().unwrap()
}

fn floats(range: std::ops::Range<usize>) -> Tensor {
    Tensor::arange(range.start as f32, range.end as f32, &Device::Cpu).unwrap()
}

#[test]
fn ranges_are_read_from_any_pieces() {
    for ends in [&[7][..], &[3, 7], &[1, 2, 6, 7], &[2, 2, 5, 7]] {
        let folder = tempfile::tempdir().unwrap();
        let mut start = 0;
        let pieces: Vec<_> = ends
            .iter()
            .map(|&end| (start, floats(std::mem::replace(&mut start, end)..end)))
            .collect();
        let checkpoint = save(folder.path(), 7, &pieces);
        for start in 0..=7 {
            for len in 0..=7 - start {
                let items = checkpoint.items(TensorKey::model("a", start), len).unwrap();
                let expected = floats(start..start + len).to_vec1::<f32>().unwrap();
                assert_eq!(items.to_vec1::<f32>().unwrap(), expected, "{ends:?}: {start}, {len}");
            }
        }
    }
}

#[test]
fn overlapping_pieces_are_read_once() {
    let folder = tempfile::tempdir().unwrap();
    let pieces = [(0, floats(0..4)), (2, floats(2..5)), (3, floats(3..7))];
    let items = save(folder.path(), 7, &pieces).items(TensorKey::model("a", 1), 5).unwrap();
    assert_eq!(items.to_vec1::<f32>().unwrap(), [1., 2., 3., 4., 5.]);
}

#[test]
fn gap_names_its_first_item() {
    for (pieces, expected) in [
        (vec![(0, floats(0..2)), (4, floats(4..7))], 2),
        (vec![(1, floats(1..7))], 0),
        (vec![(0, floats(0..6))], 6),
        (vec![(0, floats(0..3)), (1, floats(1..2)), (5, floats(5..7))], 3),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = save(folder.path(), 7, &pieces);
        let error = checkpoint.items(TensorKey::model("a", 0), 7).unwrap_err();
        assert!(
            matches!(&error, Error::Parameter(ParameterError::Incomplete { item, .. }) if *item == expected),
            "{error}"
        );
    }
}

#[test]
fn impossible_ranges_are_incomplete() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = save(folder.path(), 7, &[(0, floats(0..7))]);
    for (start, len) in [(usize::MAX, 2), (1, usize::MAX), (7, 1), (9, 9)] {
        let error = checkpoint.items(TensorKey::model("a", start), len).unwrap_err();
        let is_found = matches!(&error, Error::Parameter(ParameterError::Incomplete { .. }));
        assert!(is_found, "{start}, {len}: {error}");
    }
}

#[test]
fn mixed_dtypes_are_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let pieces = [(0, zeros(3, DType::F32)), (3, zeros(4, DType::F64))];
    let error = save(folder.path(), 7, &pieces).items(TensorKey::model("a", 0), 7).unwrap_err();
    assert!(matches!(error, Error::Tensor { .. }), "{error}");
}

#[test]
fn empty_parameter_has_zero_state() {
    let folder = tempfile::tempdir().unwrap();
    // No slot has an item of the parameter, so no slot has written its step count.
    let checkpoint = save(folder.path(), 0, &[]);
    let key = TensorKey { kind: "step", parameter: "a", start: 0 };
    let step = checkpoint.like(key, &Tensor::new(5_i64, &Device::Cpu).unwrap()).unwrap();
    assert_eq!(step.to_scalar::<i64>().unwrap(), 0);
    assert_eq!(checkpoint.like(key, &zeros(0, DType::F32)).unwrap().dims(), [0]);
    let other = checkpoint.like(TensorKey { parameter: "b", ..key }, &step).unwrap_err();
    assert!(matches!(other, Error::Parameter(ParameterError::Incomplete { .. })), "{other}");
}

#[test]
fn parameters_must_match() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = save(folder.path(), 7, &[(0, floats(0..7))]);
    let mesh = DeviceMesh::cpu(3).unwrap();
    let mismatch = |shapes: &[(&str, &[usize])]| {
        let shapes = shapes.iter().map(|(name, shape)| ((*name).to_owned(), shape.to_vec()));
        match checkpoint.check_fits(&mesh, &shapes.collect()) {
            Ok(()) => None,
            Err(Error::Parameter(error)) => Some(error),
            Err(error) => panic!("{error}"),
        }
    };
    assert!(mismatch(&[("a", &[7])]).is_none());
    assert!(matches!(mismatch(&[]), Some(ParameterError::Unknown { name }) if name == "a"));
    let more = mismatch(&[("a", &[7]), ("b", &[1])]);
    assert!(matches!(more, Some(ParameterError::Missing { name }) if name == "b"));
    for shape in [&[6][..], &[7, 1], &[]] {
        let other = mismatch(&[("a", shape)]);
        assert!(matches!(other, Some(ParameterError::Shape { found, .. }) if found == [7]));
    }
}

#[test]
fn ambiguous_keys_are_rejected() {
    let mesh = DeviceMesh::cpu(1).unwrap();
    let mut state = StateDict::new(&mesh, BTreeMap::new());
    let key = TensorKey { kind: "mean", parameter: "a", start: 0 };
    state.add(0, key, floats(0..1)).unwrap();
    for kind in ["mean", "running/mean"] {
        let error = state.add(0, TensorKey { kind, ..key }, floats(0..1)).unwrap_err();
        assert!(matches!(&error, Error::Kind { kind: found, .. } if found == kind), "{error}");
    }
}

#[test]
fn trainer_state_round_trips() {
    let folder = tempfile::tempdir().unwrap();
    let mesh = DeviceMesh::cpu(1).unwrap();
    let checkpoints = Checkpoints::new(folder.path());
    let state = StateDict::new(&mesh, BTreeMap::new());
    assert!(state.clone().with_trainer(&f64::NAN).is_err());
    checkpoints.save(&mesh, 1, &state, &()).unwrap();
    assert!(checkpoints.latest().unwrap().unwrap().trainer::<u8>().unwrap().is_none());
    // The order of fields and all digits are kept.
    let trainer = BTreeMap::from([("rate", vec![0.1, 1e-7])]);
    let nested = (trainer, "two\nlines");
    checkpoints.save(&mesh, 2, &state.with_trainer(&nested).unwrap(), &()).unwrap();
    let newest = checkpoints.latest().unwrap().unwrap();
    let read: (BTreeMap<String, Vec<f64>>, String) = newest.trainer().unwrap().unwrap();
    assert_eq!((&read.0["rate"][..], read.1.as_str()), (&[0.1, 1e-7][..], "two\nlines"));
    assert!(matches!(newest.trainer::<u8>(), Err(Error::Json { .. })));
    let text = std::fs::read_to_string(newest.path().join("index.json")).unwrap();
    assert!(text.contains("\n  \"trainer\": [\n    {\n      \"rate\": ["), "{text}");
}

#[test]
fn pieces_join_in_any_order_of_slots() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = save(folder.path(), 5, &[(3, floats(3..5)), (0, floats(0..3))]);
    let found = checkpoint.items(TensorKey::model("a", 0), 5).unwrap();
    assert_eq!(found.to_vec1::<f32>().unwrap(), [0., 1., 2., 3., 4.]);
}
