//! Random checkpoints and weights: what was saved is read, and flipped or truncated files are errors.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
};

use candle_core::{DType, Device, Tensor};
use core_types::Seed;
use dist_checkpoint::{
    Checkpoint, Checkpoints, StateDict, StoredWeights, TensorFile, TensorInfo, TensorKey,
    files::AtomicFile,
};
use pmap_mesh::DeviceMesh;

struct Draws(Seed, u64);

impl Draws {
    fn below(&mut self, n: usize) -> usize {
        self.1 += 1;
        usize::try_from(self.0.derive(self.1).as_u64() % n as u64).unwrap()
    }
}

const DTYPES: [DType; 6] = [DType::F32, DType::F64, DType::BF16, DType::F16, DType::U8, DType::I64];

fn values(len: usize, dtype: DType, first: usize) -> Tensor {
    let items: Vec<u32> = (0..len).map(|n| ((first + n) % 97) as u32).collect();
    Tensor::new(&items[..], &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

fn bits(tensor: &Tensor) -> Vec<u8> {
    let mut bytes = Vec::new();
    tensor.write_bytes(&mut bytes).unwrap();
    bytes
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.is_file());
    files.sort();
    files
}

fn case(draw: &mut Draws) -> (usize, usize) {
    let folder = tempfile::tempdir().unwrap();
    let world = 1 + draw.below(5);
    let mesh = DeviceMesh::builder().axis("rows", world).pin(false).cpu().unwrap();
    let lens: Vec<usize> = (0..1 + draw.below(4))
        .map(|_| [0, 1, draw.below(9), draw.below(600)][draw.below(4)])
        .collect();
    let names: Vec<String> = (0..lens.len())
        .map(|n| ["a", "b/c@1", "", "ü\n", "x.weight"][draw.below(5)].to_owned() + &n.to_string())
        .collect();
    let dtypes: Vec<DType> = lens.iter().map(|_| DTYPES[draw.below(6)]).collect();
    let shapes: BTreeMap<_, _> =
        names.iter().cloned().zip(lens.iter().map(|&len| vec![len])).collect();
    let mut state = StateDict::new(&mesh, shapes);
    for ((name, &len), &dtype) in names.iter().zip(&lens).zip(&dtypes) {
        let mut start = 0;
        for slot in 0..world {
            let end = if slot + 1 == world { len } else { start + draw.below(len - start + 1) };
            if end > start || draw.below(2) == 0 {
                state
                    .add(slot, TensorKey::model(name, start), values(end - start, dtype, start))
                    .unwrap();
            }
            start = end;
        }
    }
    let checkpoints = Checkpoints::new(folder.path());
    checkpoints.save(&mesh, 3, &state, &7).unwrap();
    let path = folder.path().join("step-0000000003");
    let read = |path: &Path| -> Result<Vec<Vec<u8>>, dist_checkpoint::Error> {
        let checkpoint = Checkpoint::open(path)?;
        checkpoint.verify()?;
        assert_eq!(checkpoint.state::<u32>()?, 7);
        let mut all = Vec::new();
        for (name, &len) in names.iter().zip(&lens) {
            if len > 0 {
                all.push(bits(&checkpoint.items(TensorKey::model(name, 0), len)?));
                let start = len / 3;
                all.push(bits(&checkpoint.items(TensorKey::model(name, start), len - start)?));
            }
        }
        Ok(all)
    };
    let expected: Vec<Vec<u8>> = lens
        .iter()
        .zip(&dtypes)
        .filter(|(len, _)| **len > 0)
        .flat_map(|(&len, &dtype)| {
            [bits(&values(len, dtype, 0)), bits(&values(len - len / 3, dtype, len / 3))]
        })
        .collect();
    assert_eq!(read(&path).unwrap(), expected);
    // Pretrained weights.
    let weights = folder.path().join("w.safetensors");
    let tensors: Vec<Tensor> =
        lens.iter().zip(&dtypes).map(|(&len, &dtype)| values(len, dtype, 0)).collect();
    let mut infos: Vec<TensorInfo> =
        names.iter().zip(&tensors).map(|(name, tensor)| TensorInfo::new(name, tensor)).collect();
    TensorInfo::sort(&mut infos);
    let mut file =
        TensorFile::create(AtomicFile::new(&weights).unwrap(), &weights, &infos, BTreeMap::new())
            .unwrap();
    for info in &infos {
        let position = names.iter().position(|name| *name == info.name).unwrap();
        file.write(&tensors[position]).unwrap();
    }
    file.finish().unwrap().persist().unwrap();
    let read_weights = |path: &Path| -> Result<Vec<Vec<u8>>, dist_checkpoint::Error> {
        let weights = StoredWeights::open(path)?;
        let mut all = Vec::new();
        for info in &infos {
            let len = info.shape.iter().product();
            match weights.items(info, 0..len, &Device::Cpu)? {
                Some(items) => all.push(bits(&items)),
                None => all.push(vec![1, 2, 3]),
            }
        }
        Ok(all)
    };
    let expected_weights = read_weights(&weights).unwrap();
    let mut n = (0, 0);
    for file in files(&path).into_iter().chain([weights.clone()]) {
        let content = fs::read(&file).unwrap();
        for _ in 0..20 {
            let mut damaged = content.clone();
            match draw.below(4) {
                0 => damaged.truncate(draw.below(content.len())),
                1 => damaged.push(draw.below(256) as u8),
                _ => damaged[draw.below(content.len())] ^= 1 << draw.below(8),
            }
            fs::write(&file, &damaged).unwrap();
            n.0 += 1;
            let name = file.display();
            if file == weights {
                if let Ok(found) = read_weights(&weights) {
                    // A file without any checksum is another program's: no tensor may be different.
                    assert!(found == expected_weights, "{name}: {names:?}");
                    n.1 += 1;
                }
            } else {
                assert!(read(&path).is_err(), "{name}: {names:?} {lens:?}");
            }
        }
        fs::write(&file, content).unwrap();
    }
    n
}

#[test]
fn damaged_files_are_never_used() {
    let seed = env::var("HUNT").ok().and_then(|seed| seed.parse().ok());
    let n_cases: u64 = env::var("CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(20);
    let (mut n_damages, mut n_equal) = (0, 0);
    for number in 0..n_cases {
        let mut draw = Draws(Seed::new(seed.unwrap_or(0)).derive(number), 0);
        let found = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| case(&mut draw)));
        let Ok((damages, equal)) = found else { panic!("case {number}") };
        n_damages += damages;
        n_equal += equal;
    }
    println!("{n_damages} damages, {n_equal} read as equal");
}
