//! The language model example trains equally with and without sharding.

#![allow(dead_code, reason = "the example's `main` is not called")]

#[path = "../../examples/train_language_model.rs"]
mod train_language_model;

use candle_distributed::{mesh::DeviceMesh, train::Metrics};

use self::train_language_model::{model, train};

#[test]
fn layouts_train_equally_and_resume_each_other() {
    let [whole, sharded, resumed] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let mesh = DeviceMesh::cpu(2).unwrap();
    let mut trained = model(&mesh, false).unwrap();
    let last = train(&mesh, &mut trained, whole.path(), 60).unwrap().unwrap();
    assert!(last < 1.0, "{last}");
    let mut trained = model(&mesh, true).unwrap();
    let found = train(&mesh, &mut trained, sharded.path(), 60).unwrap().unwrap();
    assert_eq!(found.to_bits(), last.to_bits(), "{found} and {last}");

    // Stopped some steps after a checkpoint, and resumed in the other layout.
    let mut trained = model(&mesh, true).unwrap();
    train(&mesh, &mut trained, resumed.path(), 47).unwrap();
    let mut trained = model(&mesh, false).unwrap();
    let found = train(&mesh, &mut trained, resumed.path(), 60).unwrap().unwrap();
    assert_eq!(found.to_bits(), last.to_bits(), "{found} and {last}");

    let losses = |folder: &tempfile::TempDir| -> Vec<u32> {
        let metrics = Metrics::read(folder.path().join("metrics.jsonl")).unwrap();
        assert_eq!((metrics.done(), metrics.damaged(), metrics.missing(60)), (60, &[][..], vec![]));
        metrics.steps().iter().map(|step| step.loss.to_bits()).collect()
    };
    assert_eq!(losses(&sharded), losses(&whole));
    assert_eq!(losses(&resumed), losses(&whole));
}

#[test]
fn finished_run_stays_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    let mesh = DeviceMesh::cpu(2).unwrap();
    let mut trained = model(&mesh, false).unwrap();
    train(&mesh, &mut trained, folder.path(), 20).unwrap().unwrap();
    let metrics = || std::fs::read(folder.path().join("metrics.jsonl")).unwrap();
    let written = metrics();
    // No step is left up to step 20, or up to an earlier one.
    for last in [20, 3] {
        for is_sharded in [false, true] {
            let mut trained = model(&mesh, is_sharded).unwrap();
            let second = train(&mesh, &mut trained, folder.path(), last).unwrap();
            assert_eq!((second, trained.steps()), (None, 20));
            assert_eq!(metrics(), written);
        }
    }
}
