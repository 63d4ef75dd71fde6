//! A kill between any two system calls leaves either the old or the new state.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    rc::Rc,
};

use candle_core::{Device, Tensor};
use pmap_mesh::DeviceMesh;

use crate::{
    Checkpoints, Error, StateDict, StoredWeights, TensorInfo, TensorKey,
    folder::writer::ModelFolder,
};

type Observer = Box<dyn FnMut()>;

thread_local! {
    static OBSERVER: RefCell<Option<Observer>> = const { RefCell::new(None) };
}

/// Calls the observer of this thread, which may access files itself.
pub(crate) fn observe() {
    let Some(mut observer) = OBSERVER.take() else { return };
    observer();
    OBSERVER.set(Some(observer));
}

/// Runs `f`, and copies `folder` between any two system calls of `f`. Each copy is the state that a
/// kill at this moment would leave.
fn snapshots(folder: &Path, f: impl FnOnce()) -> Vec<tempfile::TempDir> {
    let copies = Rc::new(RefCell::new(Vec::new()));
    let observed = Rc::clone(&copies);
    let folder = folder.to_owned();
    OBSERVER.set(Some(Box::new(move || {
        let copy = tempfile::tempdir().unwrap();
        copy_all(&folder, copy.path());
        observed.borrow_mut().push(copy);
    })));
    f();
    OBSERVER.set(None);
    copies.take()
}

fn copy_all(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let copy = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy_all(&path, &copy);
        } else {
            fs::copy(&path, &copy).unwrap();
        }
    }
}

const KEY: TensorKey<'_> = TensorKey { kind: "model", parameter: "a", start: 0 };

/// Returns a state of two slots with two items each, all equal to `step`.
fn state(mesh: &DeviceMesh, step: u64) -> StateDict {
    let mut state = StateDict::new(mesh, BTreeMap::from([("a".to_owned(), vec![4])]));
    for slot in 0..2 {
        let items = Tensor::full(step as f32, 2, &Device::Cpu).unwrap();
        state.add(slot, TensorKey { start: 2 * slot, ..KEY }, items).unwrap();
    }
    state
}

/// Returns the step of the newest checkpoint, which must be whole and the only one of `steps`.
fn newest(checkpoints: &Checkpoints, steps: &[u64]) -> Option<u64> {
    let checkpoint = checkpoints.latest().unwrap()?;
    assert!(checkpoint.skipped().is_empty(), "{:?}", checkpoint.skipped());
    let items = checkpoint.items(KEY, 4).unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(items, [checkpoint.step() as f32; 4]);
    assert!(steps.contains(&checkpoint.step()));
    Some(checkpoint.step())
}

#[test]
fn kill_leaves_a_complete_checkpoint() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoints");
    for (step, before) in [(4, None), (8, Some(4))] {
        let checkpoints = Checkpoints::new(&path).keep(1);
        let copies = snapshots(folder.path(), || {
            checkpoints.save(&mesh, step, &state(&mesh, step), &step).unwrap();
        });
        assert!(copies.len() >= 20, "{} system calls", copies.len());
        let mut newest_step = before;
        for copy in copies {
            let resumed = Checkpoints::new(copy.path().join("checkpoints")).keep(1);
            let steps = [before.unwrap_or(step), step];
            let found = newest(&resumed, &steps);
            assert!(found >= newest_step, "{found:?} after {newest_step:?}");
            newest_step = found;
            // The next process saves the next step there, and removes the rest.
            resumed.save(&mesh, 12, &state(&mesh, 12), &()).unwrap();
            assert_eq!(newest(&resumed, &[12]), Some(12));
            drop(resumed);
            let remaining = names(&copy.path().join("checkpoints"));
            assert_eq!(remaining, ["lock", "step-0000000012"]);
        }
        assert_eq!(newest(&checkpoints, &[step]), Some(step));
    }
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Writes a model of two tensors that are filled with `value`, one or two in a file.
fn write_model(folder: &Path, value: u32, max_bytes: u64) {
    let mesh = DeviceMesh::cpu(1).unwrap();
    let tensor = Tensor::full(value, 3, &Device::Cpu).unwrap();
    let infos = ["a", "b"].map(|name| TensorInfo::new(name, &tensor)).to_vec();
    let written =
        ModelFolder::new(&mesh, folder).write(infos, max_bytes, |_| Ok::<_, Error>(tensor.clone()));
    written.unwrap();
}

/// Returns the values of a model, or `None` if it does not exist.
fn read_model(folder: PathBuf) -> Option<[u32; 2]> {
    let weights = StoredWeights::open(folder).ok()?;
    let info = TensorInfo::new("", &Tensor::full(0_u32, 3, &Device::Cpu).unwrap());
    Some(["a", "b"].map(|name| {
        let info = TensorInfo { name: name.to_owned(), ..info.clone() };
        let items = weights.items(&info, 0..1, &Device::Cpu).unwrap().unwrap();
        items.to_vec1().unwrap()[0]
    }))
}

#[test]
fn kill_never_mixes_two_models() {
    for (old_bytes, new_bytes) in [(100, 100), (100, 1), (1, 100), (1, 1)] {
        let folder = tempfile::tempdir().unwrap();
        write_model(folder.path(), 1, old_bytes);
        let copies = snapshots(folder.path(), || write_model(folder.path(), 2, new_bytes));
        let is_replaced = Cell::new(false);
        for copy in copies {
            match read_model(copy.path().to_owned()) {
                Some(values) if is_replaced.get() => assert_eq!(values, [2; 2]),
                Some(values) => is_replaced.set(values == [2; 2]),
                // Several files have no index while they are replaced.
                None => assert_eq!(new_bytes, 1),
            }
        }
        assert_eq!(read_model(folder.path().to_owned()), Some([2; 2]));
    }
}
