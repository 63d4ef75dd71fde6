//! What the processes of a run must have in common, compared before anything is written.

use candle_distributed::mesh::DeviceMesh;

use crate::{
    error::{self, Error, ErrorKind, Result, WithHint},
    hint,
};

/// Checks that every process of a mesh says the same, in as many `words`: what it has and does,
/// such as `has --steps 12`. What differs is an error in all of them, which the first one reports.
pub(crate) fn compare(mesh: &DeviceMesh, words: &[String]) -> Result<()> {
    // Processes whose --replicas differ have meshes that differ, and cannot even compare.
    let said = gather(mesh, words).with_hint(hint::SAME_RUN)?;
    let difference = differences(&said);
    if difference.is_empty() {
        return Ok(());
    }
    Err(of_first(mesh, || {
        let different = format!("the processes do not start the same run: {difference}");
        Error::usage(different).hinted(hint::SAME_RUN)
    }))
}

/// What the processes of these ranks do not say alike.
fn differences(said: &[(usize, Vec<String>)]) -> String {
    let Some(((first, of_first), others)) = said.split_first() else { return String::new() };
    let mut differences = Vec::new();
    for (rank, words) in others {
        for (here, there) in of_first.iter().zip(words).filter(|(here, there)| here != there) {
            differences.push(format!("rank {first} {here}, rank {rank} {there}"));
        }
    }
    differences.join("; ")
}

/// The error of a process if it is the first; the others end without a word.
fn of_first(mesh: &DeviceMesh, error: impl FnOnce() -> Error) -> Error {
    if mesh.is_first_process() {
        error()
    } else {
        ErrorKind::SaidByFirst { exit_code: error::BAD_INPUT, is_of_all: false }.into()
    }
}

/// What each process says, by the rank of its first device.
fn gather(mesh: &DeviceMesh, words: &[String]) -> Result<Vec<(usize, Vec<String>)>> {
    let texts = mesh.gather_texts(words)?.into_iter().enumerate();
    // Only the first device of each process speaks.
    Ok(texts.filter(|(_, words)| !words.is_empty()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_said_with_the_rank() {
        let words = |words: &[&str]| words.iter().map(ToString::to_string).collect::<Vec<_>>();
        let same = words(&["starts after step 0", "has --steps 12", "writes into run"]);
        let other = words(&["starts after step 0", "has --steps 9", "writes into elsewhere"]);
        let complete = words(&["finds the run complete"]);
        assert_eq!(differences(&[(0, same.clone()), (1, same.clone())]), "");
        assert_eq!(
            differences(&[(0, same.clone()), (1, same.clone()), (2, other)]),
            "rank 0 has --steps 12, rank 2 has --steps 9; \
             rank 0 writes into run, rank 2 writes into elsewhere"
        );
        assert_eq!(
            differences(&[(0, same), (1, complete)]),
            "rank 0 starts after step 0, rank 1 finds the run complete"
        );
    }

    #[test]
    fn a_process_alone_agrees_with_itself() {
        let mesh = DeviceMesh::cpu(3).unwrap();
        let words = [String::from("has --steps 12"), String::from("writes into \u{fc}")];
        assert_eq!(gather(&mesh, &words).unwrap(), [(0, words.to_vec())]);
        compare(&mesh, &words).unwrap();
    }
}
