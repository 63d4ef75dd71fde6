//! The two programs that train one model, whole and sharded, are nearly the same, and so is what they
//! compute.

#![allow(dead_code, reason = "their `main` is for those who run them")]

#[path = "../../examples/train_data_parallel.rs"]
mod train_data_parallel;
#[path = "../../examples/train_fully_sharded.rs"]
mod train_fully_sharded;

use candle_distributed::{mesh::DeviceMesh, train::Metrics};

const WHOLE: &str = include_str!("../../examples/train_data_parallel.rs");
const SHARDED: &str = include_str!("../../examples/train_fully_sharded.rs");

/// The lines of `left` that are not among those of both, in the order of both.
fn lines_of_its_own(left: &str, right: &str) -> usize {
    let (left, right): (Vec<&str>, Vec<&str>) = (left.lines().collect(), right.lines().collect());
    // The longest common subsequence of the first lines of `left` and of each beginning of `right`.
    let mut common = vec![0; right.len() + 1];
    for line in &left {
        let before = common.clone();
        for (n, other) in right.iter().enumerate() {
            let joined = if line == other { before[n] + 1 } else { 0 };
            common[n + 1] = joined.max(before[n + 1]).max(common[n]);
        }
    }
    left.len() - common[right.len()]
}

#[test]
fn at_most_ten_lines_differ() {
    assert_eq!((lines_of_its_own("a\nb\nc", "b\nd\na\nc"), lines_of_its_own("a\na", "a")), (1, 1));
    let own = [lines_of_its_own(WHOLE, SHARDED), lines_of_its_own(SHARDED, WHOLE)];
    assert!(own.iter().all(|&lines| (1..=10).contains(&lines)), "{own:?}");
}

#[test]
fn both_learn_the_same_and_resume_within_an_epoch() {
    let [whole, sharded, resumed] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let mesh = DeviceMesh::cpu(2).unwrap();
    let mut model = train_data_parallel::model(&mesh).unwrap();
    let last = train_data_parallel::train(&mesh, &mut model, whole.path(), 60).unwrap().unwrap();
    assert!(last < 1.0, "{last}");
    let mut model = train_fully_sharded::model(&mesh).unwrap();
    let found = train_fully_sharded::train(&mesh, &mut model, sharded.path(), 60).unwrap().unwrap();
    assert_eq!(found.to_bits(), last.to_bits(), "{found} and {last}");

    // Stopped some steps after a checkpoint, and resumed by the other program.
    let mut model = train_fully_sharded::model(&mesh).unwrap();
    train_fully_sharded::train(&mesh, &mut model, resumed.path(), 47).unwrap();
    let mut model = train_data_parallel::model(&mesh).unwrap();
    let found = train_data_parallel::train(&mesh, &mut model, resumed.path(), 60).unwrap().unwrap();
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
fn a_run_that_has_ended_is_left_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let mesh = DeviceMesh::cpu(2).unwrap();
    let mut model = train_data_parallel::model(&mesh).unwrap();
    train_data_parallel::train(&mesh, &mut model, folder.path(), 20).unwrap().unwrap();
    let metrics = || std::fs::read(folder.path().join("metrics.jsonl")).unwrap();
    let written = metrics();
    // Of 20 steps and of fewer none is left.
    for last in [20, 3] {
        let mut model = train_data_parallel::model(&mesh).unwrap();
        let again = train_data_parallel::train(&mesh, &mut model, folder.path(), last).unwrap();
        assert_eq!((again, model.steps()), (None, 20));
        let mut model = train_fully_sharded::model(&mesh).unwrap();
        let again = train_fully_sharded::train(&mesh, &mut model, folder.path(), last).unwrap();
        assert_eq!((again, model.steps()), (None, 20));
        assert_eq!(metrics(), written);
    }
}
