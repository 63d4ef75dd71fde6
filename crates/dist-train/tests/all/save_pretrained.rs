//! Pretrained weights: every layout writes the same files and reads them back.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use candle_core::{Device, Result, Tensor};
use candle_nn::{Linear, Module, Optimizer as _, ParamsAdamW, VarBuilder, linear};
use dist_train::{
    AdamW, DataParallel, DistributedModel, FullyShard, Group, Keep, ModelBuilder, PretrainedFiles,
    UnitRules, Units,
};
use fsdp_plan::strategy::{Full, LayerWise, Layout, ShardingStrategy};
use pmap_mesh::{DeviceMesh, Replica};

const BLOCKS: usize = 12;

fn build(vb: VarBuilder<'_>) -> Result<Vec<Linear>> {
    (0..BLOCKS).map(|n| linear(4, 4, vb.pp(format!("h.{n}")))).collect()
}

fn block(vb: VarBuilder<'_>, x: &Tensor) -> Result<Tensor> {
    linear(4, 4, vb)?.forward(x)?.tanh()
}

fn loss(_: &Replica, model: &Units, x: Tensor) -> Result<Tensor> {
    (0..BLOCKS).try_fold(x, |x, n| model.unit(&format!("h.{n}"), &x, block))?.sqr()?.mean_all()
}

fn adam(group: Group) -> Result<AdamW> {
    AdamW::new(group.vars, ParamsAdamW { lr: 0.1, ..ParamsAdamW::default() })
}

fn batch() -> Tensor {
    Tensor::arange(0_f32, 24., &Device::Cpu).unwrap().reshape((6, 4)).unwrap()
}

fn trained(builder: ModelBuilder<'_, Units>) -> DistributedModel<Units, AdamW> {
    let mut model = builder.build(adam).unwrap();
    for _ in 0..3 {
        model.step(batch(), loss).unwrap();
    }
    model
}

fn data_parallel(slots: usize) -> DistributedModel<Units, AdamW> {
    let mesh = DeviceMesh::cpu(slots).unwrap();
    trained(DataParallel::builder(&mesh, build).by_units(UnitRules::new()))
}

fn sharded(
    slots: usize,
    strategy: impl ShardingStrategy + 'static,
    keep: Keep,
) -> DistributedModel<Units, AdamW> {
    let mesh = DeviceMesh::cpu(slots).unwrap();
    trained(FullyShard::builder(&mesh, build).strategy(strategy).keep(keep))
}

/// Returns the names and bytes of all files in a folder.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| (path.file_name().unwrap().into(), fs::read(&path).unwrap())).collect()
}

/// Returns options for one file and for several.
fn sizes() -> [PretrainedFiles; 2] {
    [PretrainedFiles::default(), PretrainedFiles::default().max_bytes(200)]
}

#[test]
fn every_layout_writes_the_same_files() {
    for size in sizes() {
        let saved = |save: &dyn Fn(&Path) -> dist_train::Result<()>| {
            let folder = tempfile::tempdir().unwrap();
            save(folder.path()).unwrap();
            files(folder.path())
        };
        for slots in [2, 3] {
            let whole = data_parallel(slots);
            let expected = saved(&|folder| whole.save_pretrained(folder, size.clone()));
            let strategies: [(Box<dyn ShardingStrategy>, _); 3] = [
                (Box::new(Full::default()), Keep::Inputs),
                (Box::new(Full::new(Layout::Flat)), Keep::Gathered),
                (Box::new(LayerWise::default()), Keep::Inputs),
            ];
            for (strategy, keep) in strategies {
                let model = sharded(slots, strategy, keep);
                assert!(saved(&|folder| model.save_pretrained(folder, size.clone())) == expected);
            }
            assert_eq!(expected.len() > 1, size != PretrainedFiles::default());
        }
    }
}

#[test]
fn saved_weights_load_in_every_layout() {
    for size in sizes() {
        let folder = tempfile::tempdir().unwrap();
        sharded(2, Full::default(), Keep::Inputs).save_pretrained(folder.path(), size).unwrap();
        let expected = data_parallel(2).parameters().unwrap();

        let mesh = DeviceMesh::cpu(3).unwrap();
        let whole = DataParallel::builder(&mesh, build).weights(folder.path());
        let whole = whole.build(adam).unwrap().parameters().unwrap();
        let cut = FullyShard::builder(&mesh, build).weights(folder.path()).build(adam).unwrap();
        for (name, expected) in expected {
            let numbers = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(numbers(&whole[&name]), numbers(&expected));
            assert_eq!(numbers(&cut.parameter(&name).unwrap()), numbers(&expected));
        }
    }
}

#[test]
fn missing_weights_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let mesh = DeviceMesh::cpu(1).unwrap();
    let refused = DataParallel::builder(&mesh, build).weights(folder.path()).build(adam);
    let text = refused.map(drop).unwrap_err().to_string();
    assert!(text.contains("model.safetensors.index.json"), "{text}");
}
