//! Pretrained weights: processes write the same files as threads, and report a failed write.

use std::{collections::BTreeMap, fs, path::Path};

use candle_core::{Result, Tensor};
use candle_nn::{Module, Optimizer, ParamsAdamW, VarBuilder, linear};
use dist_train::{
    AdamW, CheckpointError, DataParallel, DistributedModel, Error, FullyShard, Group,
    PretrainedFiles, Units,
};
use pmap_mesh::{DeviceMesh, Replica};
use process_tests::{Engine, folder, mesh, threads};

/// Saves after a step on processes and on threads, and compares the files.
pub(super) fn run(engine: &impl Engine, ranks: usize) {
    let tested = mesh(engine, &[], None);
    let rank = tested.local_slots().start;
    let threads = threads(&[(DeviceMesh::AXIS, ranks)], &engine.device());
    // Two parameters in one file, and one file for each.
    for max_bytes in [1000, 10] {
        let files = PretrainedFiles::default().max_bytes(max_bytes);
        let saved = ["whole", "cut"].map(|kind| folder().join(format!("{kind}-{max_bytes}")));
        let [whole, cut] = &saved;
        data_parallel(&tested).save_pretrained(whole, files.clone()).unwrap();
        sharded(&tested).save_pretrained(cut, files.clone()).unwrap();
        if rank == 0 {
            let expected = folder().join(format!("threads-{max_bytes}"));
            data_parallel(&threads).save_pretrained(&expected, files).unwrap();
            assert!(saved.iter().all(|saved| contents(saved) == contents(&expected)));
        }
        // Every process reads the complete files.
        let again = DataParallel::builder(&tested, build).weights(cut).build(adam).unwrap();
        again.check_in_sync().unwrap();
    }

    // A file takes the path of the folder.
    let taken = folder().join("taken");
    if rank == 0 {
        fs::write(&taken, "").unwrap();
    }
    let refused = data_parallel(&tested).save_pretrained(taken, PretrainedFiles::default());
    let is_expected = match refused {
        Err(Error::Checkpoint(CheckpointError::Io { .. })) => rank == 0,
        Err(Error::OtherProcess { slot: 0, .. }) => rank > 0,
        other => panic!("{other:?}"),
    };
    assert!(is_expected);
}

fn build(vb: VarBuilder<'_>) -> Result<candle_nn::Linear> {
    linear(5, 3, vb.pp("head"))
}

fn adam(group: Group) -> Result<AdamW> {
    AdamW::new(group.vars, ParamsAdamW::default())
}

fn batch(mesh: &DeviceMesh) -> Tensor {
    let items = mesh.len() * 2 * 5;
    let x = Tensor::arange(0_f32, items as f32, &mesh.devices()[0]);
    x.and_then(|x| x.reshape((mesh.len() * 2, 5))).unwrap()
}

fn data_parallel(mesh: &DeviceMesh) -> DistributedModel<candle_nn::Linear, AdamW> {
    let mut model = DataParallel::builder(mesh, build).build(adam).unwrap();
    model.step(batch(mesh), |_, model, x| model.forward(&x)?.sqr()?.mean_all()).unwrap();
    model
}

fn sharded(mesh: &DeviceMesh) -> DistributedModel<Units, AdamW> {
    let mut model = FullyShard::builder(mesh, build).unit("head", ["head"]).build(adam).unwrap();
    let step = model.step(batch(mesh), |_: &Replica, model: &Units, x| {
        model.unit("head", &x, |vb, x| linear(5, 3, vb)?.forward(x))?.sqr()?.mean_all()
    });
    step.unwrap();
    model
}

fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    entries
        .map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap()))
        .collect()
}
