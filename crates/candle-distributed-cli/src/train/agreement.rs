//! Checks that all processes start the same run, before anything is written.

use candle_distributed::mesh::DeviceMesh;

use crate::{
    error::{Error, Result, WithHint},
    hint,
};

/// Checks that every process of a mesh has the same `facts`, such as `has --steps 12`. A difference is
/// an error in all processes, and the first process reports it.
pub(crate) fn compare(mesh: &DeviceMesh, facts: &[String]) -> Result<()> {
    // Processes with different --replicas have different meshes, so even the comparison fails.
    let facts_by_rank = gather(mesh, facts).with_hint(hint::SAME_RUN)?;
    let differences = describe_differences(&facts_by_rank);
    if differences.is_empty() {
        return Ok(());
    }
    let message = format!("the processes do not start the same run: {differences}");
    Err(Error::usage(message).with_hint(hint::SAME_RUN).on_first(mesh.is_first_process()))
}

/// Describes the differences between processes, by the ranks of their first devices.
fn describe_differences(facts_by_rank: &[(usize, Vec<String>)]) -> String {
    let Some(((first, first_facts), others)) = facts_by_rank.split_first() else {
        return String::new();
    };
    let mut differences = Vec::new();
    for (rank, facts) in others {
        for (expected, fact) in first_facts.iter().zip(facts) {
            if expected != fact {
                differences.push(format!("rank {first} {expected}, rank {rank} {fact}"));
            }
        }
    }
    differences.join("; ")
}

/// Returns the facts of each process, with the rank of its first device.
fn gather(mesh: &DeviceMesh, facts: &[String]) -> Result<Vec<(usize, Vec<String>)>> {
    let facts_by_rank = mesh.gather_texts(facts)?.into_iter().enumerate();
    // `gather_texts` returns the texts of a process at its first device, and none at the others.
    Ok(facts_by_rank.filter(|(_, facts)| !facts.is_empty()).collect())
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
        assert_eq!(describe_differences(&[(0, same.clone()), (1, same.clone())]), "");
        assert_eq!(
            describe_differences(&[(0, same.clone()), (1, same.clone()), (2, other)]),
            "rank 0 has --steps 12, rank 2 has --steps 9; \
             rank 0 writes into run, rank 2 writes into elsewhere"
        );
        assert_eq!(
            describe_differences(&[(0, same), (1, complete)]),
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
