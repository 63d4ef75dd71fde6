//! Damage of any byte of a checkpoint is detected, and the earlier checkpoint is loaded.

use std::{
    collections::BTreeMap,
    fs,
    ops::Range,
    path::{Path, PathBuf},
};

use candle_core::{Device, Tensor};
use core_types::Seed;
use dist_checkpoint::{Checkpoint, Checkpoints, Error, StateDict, TensorKey};
use pmap_mesh::DeviceMesh;
use tempfile::TempDir;

use super::run::{Run, bits, saved};

const N_CASES: u64 = 140;
const OLDER: u64 = 4;
const NEWER: u64 = 8;

/// A change of a checkpoint's folder.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Damage {
    TensorBit,
    HeaderBit,
    PaddingBit,
    IndexBit,
    Truncated,
    Extended,
    Zeroed,
    NotANumber,
    Removed,
    ShardOfOtherStep,
    ShardOfOtherRun,
    ShardOfOtherSlot,
    FolderOfOtherStep,
    FolderOfOtherRun,
}

const ALL: [Damage; 14] = [
    Damage::TensorBit,
    Damage::HeaderBit,
    Damage::PaddingBit,
    Damage::IndexBit,
    Damage::Truncated,
    Damage::Extended,
    Damage::Zeroed,
    Damage::NotANumber,
    Damage::Removed,
    Damage::ShardOfOtherStep,
    Damage::ShardOfOtherRun,
    Damage::ShardOfOtherSlot,
    Damage::FolderOfOtherStep,
    Damage::FolderOfOtherRun,
];

/// Two runs with the same parameters and steps.
struct TwoRuns {
    folder: TempDir,
    run: Run,
    /// The variables of the first run after [`OLDER`] steps.
    older: Vec<f32>,
}

impl TwoRuns {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut other = Run::cpu(2);
        other.steps(20..21);
        // The name has the same length as the name of the first run.
        save(&mut other, &folder.path().join("other"), "that");
        let mut run = Run::cpu(2);
        let older = save(&mut run, &folder.path().join("this"), "this");
        Self { folder, run, older }
    }

    /// Returns the folder of a checkpoint.
    fn step(&self, run: &str, step: u64) -> PathBuf {
        self.folder.path().join(run).join(name(step))
    }
}

/// Saves a run after [`OLDER`] and [`NEWER`] steps; returns its variables after [`OLDER`] steps.
fn save(run: &mut Run, folder: &Path, name: &str) -> Vec<f32> {
    let checkpoints = Checkpoints::new(folder).run(name);
    run.steps(0..OLDER);
    let older = run.values();
    checkpoints.save(&run.mesh, OLDER, &run.state_dict(), &OLDER).unwrap();
    run.steps(OLDER..NEWER);
    checkpoints.save(&run.mesh, NEWER, &run.state_dict(), &NEWER).unwrap();
    older
}

fn name(step: u64) -> String {
    format!("step-{step:010}")
}

fn shard(slot: u64) -> String {
    format!("shard-{:05}-of-00002.safetensors", slot + 1)
}

/// A stream of random numbers that depends only on the case.
struct RandomDraws(Seed, u64);

impl RandomDraws {
    fn below(&mut self, end: usize) -> usize {
        self.1 += 1;
        usize::try_from(self.0.derive(self.1).as_u64() % end as u64).unwrap()
    }
}

/// Changes a checkpoint of `this` run in `folder`.
fn damage(runs: &TwoRuns, folder: &Path, step: u64, damage: Damage, draw: &mut RandomDraws) {
    let whole = folder.join(name(step));
    let slot = draw.below(2) as u64;
    let path = whole.join(shard(slot));
    let index = whole.join("index.json");
    let any = if draw.below(3) == 0 { &index } else { &path };
    let other_step = OLDER + NEWER - step;
    match damage {
        Damage::TensorBit => flip(&path, draw, |bytes| header_len(bytes)..bytes.len()),
        Damage::HeaderBit => flip(&path, draw, |bytes| 0..header_len(bytes)),
        Damage::PaddingBit => flip(&path, draw, padding),
        Damage::IndexBit => flip(&index, draw, |bytes| 0..bytes.len()),
        Damage::Truncated => edit(any, |bytes| bytes.truncate(draw.below(bytes.len()))),
        Damage::Extended => edit(any, |bytes| bytes.push(u8::try_from(draw.below(256)).unwrap())),
        Damage::Zeroed => edit(&path, |bytes| {
            let start = header_len(bytes);
            bytes[start..].fill(0);
        }),
        Damage::NotANumber => edit(&path, |bytes| {
            let start = header_len(bytes);
            let at = start + draw.below((bytes.len() - start) / 4) * 4;
            bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
        }),
        Damage::Removed => fs::remove_file(any).unwrap(),
        Damage::ShardOfOtherStep => copy(&runs.step("this", other_step).join(shard(slot)), &path),
        Damage::ShardOfOtherRun => copy(&runs.step("other", step).join(shard(slot)), &path),
        Damage::ShardOfOtherSlot => copy(&runs.step("this", step).join(shard(1 - slot)), &path),
        Damage::FolderOfOtherStep => copy_all(&runs.step("this", other_step), &whole),
        Damage::FolderOfOtherRun => copy_all(&runs.step("other", step), &whole),
    }
}

fn edit(path: &Path, edit: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    edit(&mut bytes);
    fs::write(path, bytes).unwrap();
}

/// Flips a bit in this range of a file.
fn flip(path: &Path, draw: &mut RandomDraws, range: impl FnOnce(&[u8]) -> Range<usize>) {
    edit(path, |bytes| {
        let range = range(bytes);
        let bit = range.start * 8 + draw.below(range.len() * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
    });
}

/// Returns the length of the header, including the number before it.
fn header_len(bytes: &[u8]) -> usize {
    8 + usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap()
}

/// Returns the range of the blanks at the end of the header, or of its length if there are none.
fn padding(bytes: &[u8]) -> Range<usize> {
    let end = header_len(bytes);
    let blanks = bytes[..end].iter().rev().take_while(|&&byte| byte == b' ').count();
    if blanks == 0 { 0..8 } else { end - blanks..end }
}

fn copy(from: &Path, to: &Path) {
    fs::write(to, fs::read(from).unwrap()).unwrap();
}

fn copy_all(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        copy(&path, &to.join(path.file_name().unwrap()));
    }
}

#[test]
fn damage_falls_back_to_earlier_checkpoint() {
    let mut runs = TwoRuns::new();
    for case in 0..N_CASES {
        let mut draw = RandomDraws(Seed::new(7).derive(case), 0);
        let kind = ALL[usize::try_from(case).unwrap() % ALL.len()];
        let case = format!("case {case}: {kind:?}");
        let both = draw.below(5) == 0;
        let folder = tempfile::tempdir().unwrap();
        for step in [OLDER, NEWER] {
            copy_all(&runs.step("this", step), &folder.path().join(name(step)));
        }
        damage(&runs, folder.path(), NEWER, kind, &mut draw);
        if both {
            damage(&runs, folder.path(), OLDER, kind, &mut draw);
        }
        let checkpoints = Checkpoints::new(folder.path()).run("this");
        let mesh = runs.run.mesh.clone();
        runs.run.steps(30..31);
        let loaded =
            checkpoints.load_latest(&mesh, |checkpoint: &Checkpoint| runs.run.load(checkpoint));
        let latest = checkpoints.latest();
        if both {
            for error in [loaded.err(), latest.err()] {
                check_none_left(error.unwrap(), folder.path(), &case);
            }
            continue;
        }
        for checkpoint in [loaded.unwrap().unwrap().0, latest.unwrap().unwrap()] {
            assert_eq!(checkpoint.step(), OLDER, "{case}");
            let [skipped] = checkpoint.skipped() else { panic!("{case}") };
            assert_eq!(skipped.path, folder.path().join(name(NEWER)));
        }
        assert_eq!(bits(&runs.run.values()), bits(&runs.older), "{case}");
    }
}

/// Checks that the error names both folders and the reasons.
fn check_none_left(error: Error, folder: &Path, case: &str) {
    let text = error.to_string();
    let Error::NoUsableCheckpoint { skipped, .. } = error else { panic!("{case}: {text}") };
    let paths: Vec<_> = skipped.iter().map(|checkpoint| checkpoint.path.clone()).collect();
    assert_eq!(paths, [NEWER, OLDER].map(|step| folder.join(name(step))), "{case}");
    for checkpoint in skipped {
        assert!(text.contains(&checkpoint.error.to_string()), "{case}: {text}");
    }
}

#[test]
fn errors_name_file_and_tensor() {
    let runs = TwoRuns::new();
    let whole = runs.step("this", NEWER);
    let path = whole.join(shard(0));
    let latest = || Checkpoints::new(whole.parent().unwrap()).latest().unwrap().unwrap();
    assert!(latest().skipped().is_empty());
    let original = fs::read(&path).unwrap();

    edit(&path, |bytes| *bytes.last_mut().unwrap() ^= 0x40);
    let text = latest().skipped()[0].error.to_string();
    let expected = format!("{}: tensor model/weight@0 is damaged, its", path.display());
    assert!(text.starts_with(&expected), "{text}");
    fs::write(&path, &original).unwrap();

    copy(&runs.step("other", NEWER).join(shard(0)), &path);
    let text = latest().skipped()[0].error.to_string();
    let expected = format!(
        "{}: the file is {file} of step 8 of run that, not {file} of step 8 of run this",
        path.display(),
        file = shard(0)
    );
    assert_eq!(text, expected);
    fs::write(&path, &original).unwrap();

    let other = Checkpoints::new(whole.parent().unwrap()).run("a third run");
    let text = other.latest().unwrap_err().to_string();
    assert!(text.contains("this is a checkpoint of run this, not of a third run"), "{text}");
    assert!(Checkpoints::new(whole.parent().unwrap()).latest().unwrap().is_some());
}

#[test]
fn foreign_checkpoint_in_the_way_is_renamed() {
    let mut runs = TwoRuns::new();
    let folder = runs.folder.path().join("this");
    // Rename a checkpoint, and put a checkpoint of another run in its place.
    fs::rename(runs.step("this", OLDER), folder.join(name(6))).unwrap();
    copy_all(&runs.step("other", OLDER), &folder.join(name(5)));
    let checkpoints = Checkpoints::new(&folder).run("this").keep(9);
    assert_eq!(checkpoints.latest().unwrap().unwrap().step(), NEWER);
    // Add a checkpoint of a later version of this crate.
    fs::create_dir(folder.join(name(7))).unwrap();
    let later_version = r#"{"format_version": 2}"#;
    fs::write(folder.join(name(7)).join("index.json"), later_version).unwrap();
    for step in [5, 6, 7] {
        runs.run.steps(step..step + 1);
        let state = runs.run.state_dict();
        checkpoints.save(&runs.run.mesh, step, &state, &()).unwrap();
    }
    assert_eq!(checkpoints.steps().unwrap(), [5, 6, 7, NEWER]);
    let moved = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
    let moved = moved.filter(|path| path.extension().is_some_and(|end| end == "moved"));
    let (later, moved): (Vec<_>, Vec<_>) =
        moved.partition(|path| path.to_string_lossy().contains(&name(7)));
    assert_eq!(fs::read_to_string(later[0].join("index.json")).unwrap(), later_version);
    let mut steps: Vec<_> = moved
        .into_iter()
        .map(|path| (Checkpoint::open(&path).unwrap().step(), path))
        .map(|(step, path)| (step, path.file_name().unwrap().to_string_lossy()[..15].to_owned()))
        .collect();
    steps.sort();
    assert_eq!(steps, [(OLDER, name(5)), (OLDER, name(6))]);
    let exists = checkpoints.save(&runs.run.mesh, NEWER, &runs.run.state_dict(), &());
    assert!(matches!(exists, Err(Error::Exists { step: NEWER, .. })));
}

#[test]
fn every_block_is_checked() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let len = 3 * (1 << 18) + 5;
    let values = Tensor::arange(0_f32, len as f32, &Device::Cpu).unwrap();
    let mut state = StateDict::new(&mesh, BTreeMap::from([("weight".to_owned(), vec![len])]));
    let key = TensorKey::model("weight", 0);
    state.add(0, key, values).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path());
    checkpoints.save(&mesh, 1, &state, &()).unwrap();
    let checkpoint = checkpoints.latest().unwrap().unwrap();
    checkpoint.items(key, len).unwrap();
    let path = checkpoint.path().join(shard(0));
    let original = fs::read(&path).unwrap();
    let start = header_len(&original);
    for block in 0..4 {
        edit(&path, |bytes| bytes[start + (block << 20) + 17] ^= 1);
        let error = checkpoints.latest().unwrap_err().to_string();
        assert!(error.contains("tensor model/weight@0 is damaged"), "{error}");
        assert!(checkpoint.items(key, len).is_err());
        fs::write(&path, &original).unwrap();
    }
}

#[test]
fn non_finite_model_is_not_saved() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = Run::cpu(2);
    run.steps(0..1);
    let checkpoints = Checkpoints::new(folder.path());
    checkpoints.save(&run.mesh, 1, &run.state_dict(), &()).unwrap();
    for value in [f32::NAN, f32::INFINITY] {
        let values = [[0.0, 1.0, 2.0], [3.0, value, 5.0]];
        run.values.insert("weight", Tensor::new(&values, &Device::Cpu).unwrap());
        let state = run.state_dict();
        let error = checkpoints.save(&run.mesh, 2, &state, &()).unwrap_err();
        assert!(
            matches!(&error, Error::NotFinite { tensor, item: 4, .. } if tensor == "model/weight@0"),
            "{error}"
        );
        let mut names: Vec<_> = fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, ["holder.json", "lock", "step-0000000001"], "nothing is left behind");
    }
    let state = run.state_dict();
    let allowed = checkpoints.clone().allow_non_finite();
    allowed.save(&run.mesh, 2, &state, &()).unwrap();
    assert_eq!(checkpoints.latest().unwrap().unwrap().step(), 1);
    let checkpoint = allowed.latest().unwrap().unwrap();
    assert_eq!(checkpoint.step(), 2);
    run.load(&checkpoint).unwrap();
    let loaded = run.load(&Checkpoint::open(checkpoint.path()).unwrap());
    assert!(matches!(loaded, Err(Error::NotFinite { .. })));
}

#[test]
fn checkpoints_of_other_runs_stay() {
    let runs = TwoRuns::new();
    let folder = runs.folder.path().join("this");
    // Add a checkpoint of a later version, and a damaged checkpoint.
    let later = folder.join(name(6));
    fs::create_dir(&later).unwrap();
    fs::write(later.join("index.json"), r#"{"format_version": 2}"#).unwrap();
    copy_all(&runs.step("this", OLDER), &folder.join(name(7)));
    fs::remove_file(folder.join(name(7)).join("index.json")).unwrap();

    let checkpoints = Checkpoints::new(&folder).run("another").keep(1);
    let state = runs.run.state_dict();
    for step in [9, 10] {
        checkpoints.save(&runs.run.mesh, step, &state, &()).unwrap();
    }
    assert_eq!(checkpoints.steps().unwrap(), [10]);
    for step in [OLDER, NEWER] {
        Checkpoint::open(folder.join(name(step))).unwrap();
    }
    assert!(later.exists() && !folder.join(name(7)).exists());
}

/// An unreadable checkpoint may be intact. If it were skipped, it would block the same step later.
#[cfg(target_os = "linux")]
#[test]
fn unreadable_checkpoint_is_not_skipped() {
    let mut runs = TwoRuns::new();
    let folder = runs.folder.path().join("this");
    let checkpoints = Checkpoints::new(&folder).run("this");
    let index = runs.step("this", NEWER).join("index.json");
    let original = fs::read(&index).unwrap();
    fs::remove_file(&index).unwrap();
    // A link to itself cannot be opened, not even by root.
    std::os::unix::fs::symlink("index.json", &index).unwrap();
    let mesh = runs.run.mesh.clone();
    let errors = [
        checkpoints.load_latest(&mesh, |checkpoint: &Checkpoint| runs.run.load(checkpoint)).err(),
        checkpoints.latest().err(),
    ];
    for error in errors.map(Option::unwrap) {
        assert!(matches!(&error, Error::Io { path, .. } if *path == index), "{error}");
    }
    fs::remove_file(&index).unwrap();
    fs::write(&index, original).unwrap();
    assert_eq!(checkpoints.latest().unwrap().unwrap().step(), NEWER);
}

#[test]
fn failed_meshes_end_the_search() {
    let folder = tempfile::tempdir().unwrap();
    let run = Run::cpu(1);
    for step in [1, 2] {
        saved(folder.path(), &run, step);
    }
    let mut n_loaded = 0;
    let found = Checkpoints::new(folder.path()).load_latest(&run.mesh, |_| {
        n_loaded += 1;
        Err::<(), _>(DeviceMesh::cpu(0).unwrap_err())
    });
    assert!(matches!(found, Err(Error::Mesh(_))));
    assert_eq!(n_loaded, 1, "no other checkpoint was tried");
}
