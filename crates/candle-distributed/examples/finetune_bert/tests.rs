//! Tests of the example's claims.

use std::{collections::BTreeMap, path::Path};

use candle_distributed::train::Verdict;

use super::*;

fn train_model(frozen: &[&str], folder: &Path, last: u64) -> Result<Model> {
    let mesh = DeviceMesh::cpu(2)?;
    let mut model = model(&mesh, frozen)?;
    train(&mesh, &mut model, &Checkpoints::new(folder), last)?;
    Ok(model)
}

#[test]
fn gradients_match_finite_differences() -> Result<()> {
    let texts = LabeledTexts::draw(Seed::new(6), 16);
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
fn frozen_encoder_cannot_learn_the_task() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let frozen_folder = tempfile::tempdir()?;
    let frozen = ["embeddings", "encoder"];
    let full = accuracy(&mut train_model(&[], folder.path(), STEPS)?)?;
    let head_only = accuracy(&mut train_model(&frozen, frozen_folder.path(), STEPS)?)?;
    assert!(full > 0.95 && head_only < 0.7, "full {full}, head only {head_only}");
    Ok(())
}

#[test]
fn resumed_run_has_identical_weights() -> Result<()> {
    let uninterrupted = tempfile::tempdir()?;
    let resumed = tempfile::tempdir()?;
    let expected = bits(&train_model(&[], uninterrupted.path(), 80)?)?;
    // Stopped seven steps after a checkpoint; the resumed run repeats them.
    drop(train_model(&[], resumed.path(), 57)?);
    let checkpoint = Checkpoints::new(resumed.path()).latest()?.ok_or("no checkpoint")?;
    let state: BatchState = checkpoint.state()?;
    assert_eq!((checkpoint.step(), state.step), (50, 50));
    assert!(state.step < state.n_steps, "{state}");
    let found = bits(&train_model(&[], resumed.path(), 80)?)?;
    assert_eq!(found.len(), 41);
    for (name, values) in &found {
        assert!(values == &expected[name], "{name} differs");
    }
    Ok(())
}

/// Returns the values of all variables.
fn bits(model: &Model) -> Result<BTreeMap<String, Vec<u32>>> {
    let mut bits = BTreeMap::new();
    for (name, tensor) in model.parameters()? {
        let values: Vec<f32> = tensor.flatten_all()?.to_vec1()?;
        bits.insert(name, values.into_iter().map(f32::to_bits).collect());
    }
    Ok(bits)
}
