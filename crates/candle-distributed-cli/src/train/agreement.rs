//! The comparison of the processes of a run, before anything is written.

use candle_distributed::mesh::DeviceMesh;

use crate::{
    error::{self, Error, ErrorKind, Result, WithHint},
    hint,
};

/// Checks that every process of a mesh has the same `words`, such as `has --steps 12`. A difference is
/// an error in all processes, and the first process reports it.
pub(crate) fn compare(mesh: &DeviceMesh, words: &[String]) -> Result<()> {
    // Processes with different --replicas have different meshes, and cannot even compare.
    let said = gather(mesh, words).with_hint(hint::SAME_RUN)?;
    let difference = differences(&said);
    if difference.is_empty() {
        return Ok(());
    }
    Err(first_reports(mesh, || {
        let different = format!("the processes do not start the same run: {difference}");
        Error::usage(different).hinted(hint::SAME_RUN)
    }))
}

/// Describes the differences between processes, by the ranks of their first devices.
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

/// Returns the error in the first process; the other processes end silently.
fn first_reports(mesh: &DeviceMesh, error: impl FnOnce() -> Error) -> Error {
    if mesh.is_first_process() {
        error()
    } else {
        ErrorKind::ReportedByFirst { exit_code: error::BAD_INPUT, ends_all_processes: false }.into()
    }
}

/// Returns the words of each process, by the rank of its first device.
fn gather(mesh: &DeviceMesh, words: &[String]) -> Result<Vec<(usize, Vec<String>)>> {
    let texts = mesh.gather_texts(words)?.into_iter().enumerate();
    // Only the first device of each process has words.
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
