//! What the example promises.

use std::{collections::BTreeMap, path::Path};

use candle_distributed::train::Verdict;

use super::*;

fn trained(frozen: &[&str], folder: &Path, last: u64) -> Result<Model> {
    let mesh = DeviceMesh::cpu(2)?;
    let mut model = model(&mesh, frozen)?;
    train(&mesh, &mut model, &Checkpoints::new(folder), last)?;
    Ok(model)
}

#[test]
fn gradients_are_those_of_the_loss() -> Result<()> {
    let texts = Texts::draw(Seed::new(6), 16);
    let config = BatchConfig::default().with_max_batch_size(16);
    let batch =
        DynamicBatchSampler::new(texts.lengths(), config)?.iter().next().ok_or("empty")??;
    let mut model = model(&DeviceMesh::cpu(2)?, &[])?;
    let report = model.check_gradients(texts.collate(&batch)?, |ctx, model, batch| {
        loss(model, batch, Some(ctx.batch_keys()))
    })?;
    assert!(report.prefixes.iter().all(|part| part.verdict == Verdict::Right), "{report}");
    Ok(())
}

#[test]
fn the_encoder_learns_what_a_frozen_one_cannot_tell() -> Result<()> {
    let (folder, frozen) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let whole = accuracy(&mut trained(&[], folder.path(), STEPS)?)?;
    let head_alone = accuracy(&mut trained(&["embeddings", "encoder"], frozen.path(), STEPS)?)?;
    assert!(whole > 0.95 && head_alone < 0.7, "{whole} and {head_alone}");
    Ok(())
}

#[test]
fn a_run_resumed_within_an_epoch_ends_with_the_same_bits() -> Result<()> {
    let (whole, resumed) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let expected = bits(&trained(&[], whole.path(), 80)?)?;
    // It is stopped some steps after its checkpoint, which are taken again.
    drop(trained(&[], resumed.path(), 57)?);
    let checkpoint = Checkpoints::new(resumed.path()).latest()?.ok_or("no checkpoint")?;
    let state: BatchState = checkpoint.state()?;
    assert_eq!((checkpoint.step(), state.step), (50, 50));
    assert!(state.step < state.n_steps, "{state}");
    let found = bits(&trained(&[], resumed.path(), 80)?)?;
    assert_eq!(found.len(), 41);
    for (name, values) in &found {
        assert!(values == &expected[name], "{name} has other bits");
    }
    Ok(())
}

/// The values of all variables.
fn bits(model: &Model) -> Result<BTreeMap<String, Vec<u32>>> {
    let bits = |(name, tensor): (String, Tensor)| {
        let values: Vec<f32> = tensor.flatten_all()?.to_vec1()?;
        Ok((name, values.into_iter().map(f32::to_bits).collect()))
    };
    model.parameters().unwrap().into_iter().map(bits).collect()
}
