//! What the example promises.

use std::path::Path;

use super::*;

fn trained(frozen: &[&str], folder: &Path, last: u64) -> Result<Model> {
    let mesh = DeviceMesh::cpu(2)?;
    let mut model = model(&mesh, frozen)?;
    train(&mesh, &mut model, &Checkpoints::new(folder), last)?;
    Ok(model)
}

#[test]
fn the_encoder_learns_what_a_frozen_one_cannot_tell() -> Result<()> {
    let (folder, frozen) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let accuracy_of = |frozen: &[&str], folder| accuracy(&mut trained(frozen, folder, STEPS)?);
    let whole = accuracy_of(&[], folder.path())?;
    let classifier_alone = accuracy_of(&["bert"], frozen.path())?;
    assert!(whole > 0.95, "{whole}");
    assert!(classifier_alone < 0.7, "{classifier_alone}");
    Ok(())
}

#[test]
fn a_run_resumed_within_an_epoch_ends_with_the_same_bits() -> Result<()> {
    let (whole, resumed) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let expected = trained(&[], whole.path(), 80)?;
    // It is stopped after a few more steps than its checkpoint has.
    drop(trained(&[], resumed.path(), 57)?);
    let checkpoint = Checkpoints::new(resumed.path()).latest()?.ok_or("no checkpoint")?;
    let state: BatchState = checkpoint.state()?;
    assert_eq!((checkpoint.step(), state.step), (50, 50));
    assert!(state.step < state.n_steps, "{state}");
    let found = trained(&[], resumed.path(), 80)?;
    let (found, expected) = (bits(&found)?, bits(&expected)?);
    let differs =
        |(found, expected): &(&(String, Vec<u32>), &(String, Vec<u32>))| found != expected;
    let different: Vec<_> =
        found.iter().zip(&expected).filter(differs).map(|(found, _)| &found.0).collect();
    assert!(different.is_empty() && found.len() == 39, "{different:?} of {}", found.len());
    Ok(())
}

/// The values of all variables.
fn bits(model: &Model) -> Result<Vec<(String, Vec<u32>)>> {
    let bits = |(name, tensor): (String, Tensor)| {
        let values: Vec<f32> = tensor.flatten_all()?.to_vec1()?;
        Ok((name, values.into_iter().map(f32::to_bits).collect()))
    };
    model.variables().into_iter().map(bits).collect()
}
