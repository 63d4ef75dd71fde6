//! Tests of agreement, contradiction and mistakes among launchers.

use super::{vars::WHOLE_NUMBER, *};

/// Reads the variables in `vars`, given as in a shell.
fn outcome(vars: &str) -> Result<Option<LaunchEnv>> {
    from_lookup(&|name| {
        let mut pairs = vars.split_whitespace().filter_map(|pair| pair.split_once('='));
        pairs.find(|pair| pair.0 == name).map(|pair| OsString::from(pair.1))
    })
}

/// Formats the outcome as one line: `torchrun: 3 of 8, local 1 of 2`, `alone`, or the error's text.
fn words(vars: &str) -> String {
    let launched = match outcome(vars) {
        Ok(Some(launched)) => launched,
        Ok(None) => return "alone".to_owned(),
        Err(error) => return error.to_string(),
    };
    let LaunchEnv { placement, launcher, local_rank, local_world_size } = launched;
    let local = match (local_rank, local_world_size) {
        (Some(rank), Some(size)) => format!(", local {rank} of {size}"),
        (Some(rank), None) => format!(", local {rank}"),
        (None, Some(size)) => format!(", local of {size}"),
        (None, None) => String::new(),
    };
    format!("{launcher}: {} of {}{local}", placement.rank(), placement.world_size())
}

fn check(table: &[(&str, &str)]) {
    for (vars, expected) in table {
        assert_eq!(words(vars), *expected, "{vars}");
    }
}

#[test]
fn no_launcher_means_one_process() {
    check(&[
        ("", "alone"),
        ("HOME=/root MASTER_ADDR=node1 MASTER_PORT=29500", "alone"),
        ("TORCHELASTIC_RUN_ID=none", "alone"),
        ("SLURM_NTASKS=8 SLURM_JOB_ID=7", "alone"),
    ]);
}

#[test]
fn one_launcher_sets_the_placement() {
    check(&[
        (
            "RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=x",
            "torchrun: 3 of 8, local 1 of 2",
        ),
        ("RANK=3 WORLD_SIZE=8", "env://: 3 of 8"),
        ("RANK=0 WORLD_SIZE=1", "env://: 0 of 1"),
        ("RANK=03 WORLD_SIZE=8", "env://: 3 of 8"),
        ("RANK=3 WORLD_SIZE=8 LOCAL_WORLD_SIZE=4", "env://: 3 of 8, local of 4"),
        ("RANK=1048575 WORLD_SIZE=1048576", "env://: 1048575 of 1048576"),
        (
            "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 \
             OMPI_COMM_WORLD_LOCAL_SIZE=4",
            "Open MPI: 5 of 8, local 1 of 4",
        ),
        ("PMI_RANK=4 PMI_SIZE=5 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2", "PMI: 4 of 5, local 1 of 2"),
        ("PMI_RANK=4 PMI_SIZE=5", "PMI: 4 of 5"),
        ("SLURM_STEP_ID=0 SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_LOCALID=1", "Slurm: 5 of 8, local 1"),
    ]);
}

#[test]
fn slurm_counts_only_in_a_step() {
    check(&[
        ("SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_LOCALID=0", "alone"),
        ("SLURM_STEP_ID=batch SLURM_PROCID=0 SLURM_NTASKS=8", "alone"),
        // The batch step, a shell of `salloc`, the first id that is no step's, and the last id of a step.
        ("SLURM_STEP_ID=4294967291 SLURM_PROCID=0 SLURM_NTASKS=8", "alone"),
        ("SLURM_STEP_ID=4294967290 SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=1", "alone"),
        ("SLURM_STEP_ID=4294967281 SLURM_PROCID=0 SLURM_NTASKS=8", "alone"),
        ("SLURM_STEP_ID=4294967280 SLURM_PROCID=0 SLURM_NTASKS=8", "Slurm: 0 of 8"),
        ("SLURM_PROCID=x SLURM_NTASKS=0", "alone"),
        ("SLURM_STEP_ID=2", "alone"),
        (
            "SLURM_STEP_ID=zero SLURM_PROCID=0 SLURM_NTASKS=8",
            "environment variable SLURM_STEP_ID is \"zero\", it must be a whole number of at most \
             64 bits",
        ),
    ]);
}

#[test]
fn slurm_step_size_precedes_job_size() {
    check(&[
        ("SLURM_STEP_ID=1 SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=4 SLURM_NTASKS=16", "Slurm: 3 of 4"),
        ("SLURM_STEP_ID=1 SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=4", "Slurm: 3 of 4"),
    ]);
}

#[test]
fn slurm_local_size_follows_node_entry() {
    let step =
        "SLURM_STEP_ID=0 SLURM_PROCID=6 SLURM_NTASKS=7 SLURM_LOCALID=0 SLURM_NTASKS_PER_NODE=2";
    let on_node = |node: &str, list: &str| {
        words(&format!("{step} SLURM_NODEID={node} SLURM_STEP_TASKS_PER_NODE={list}"))
    };
    assert_eq!(on_node("3", "2(x3),1"), "Slurm: 6 of 7, local 0 of 1");
    assert_eq!(on_node("2", "2(x3),1"), "Slurm: 6 of 7, local 0 of 2");
    assert_eq!(on_node("0", "7"), "Slurm: 6 of 7, local 0 of 7");
    assert_eq!(on_node("9", "2(x3),1"), "Slurm: 6 of 7, local 0");
    assert_eq!(on_node("0 SLURM_HET_SIZE=2", "1"), "Slurm: 6 of 7, local 0");
    assert_eq!(words(step), "Slurm: 6 of 7, local 0");
    for list in ["2(x3", "2(3)", "x", "2,", "2(x)", "1(x18446744073709551615),1"] {
        let expected = format!(
            "environment variable SLURM_STEP_TASKS_PER_NODE is \"{list}\", it must be tasks per \
             node, such as 2(x3),1"
        );
        assert_eq!(on_node("0", list), expected);
    }
}

#[test]
fn incomplete_pairs_are_refused() {
    check(&[
        ("RANK=3", "environment variable RANK is 3 but WORLD_SIZE is not set"),
        ("WORLD_SIZE=8", "environment variable WORLD_SIZE is 8 but RANK is not set"),
        ("LOCAL_RANK=1", "environment variable LOCAL_RANK is 1 but RANK is not set"),
        ("LOCAL_WORLD_SIZE=2", "environment variable LOCAL_WORLD_SIZE is 2 but RANK is not set"),
        (
            "OMPI_COMM_WORLD_SIZE=8",
            "environment variable OMPI_COMM_WORLD_SIZE is 8 but OMPI_COMM_WORLD_RANK is not set",
        ),
        ("PMI_RANK=0", "environment variable PMI_RANK is 0 but PMI_SIZE is not set"),
        ("MPI_LOCALRANKID=0", "environment variable MPI_LOCALRANKID is 0 but PMI_RANK is not set"),
        (
            "SLURM_STEP_ID=0 SLURM_PROCID=1",
            "environment variable SLURM_PROCID is 1 but SLURM_NTASKS is not set",
        ),
        (
            "SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2",
            "environment variable SLURM_STEP_NUM_TASKS is 2 but SLURM_PROCID is not set",
        ),
        ("RANK=1 PMI_SIZE=2", "environment variable RANK is 1 but WORLD_SIZE is not set"),
    ]);
}

#[test]
fn matching_incomplete_pairs_are_accepted() {
    let step = "SLURM_STEP_ID=0 SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_LOCALID=1";
    let with_slurm_step = |half: &str| words(&format!("{step} {half}"));
    assert_eq!(with_slurm_step("WORLD_SIZE=8 MASTER_ADDR=node1"), "Slurm: 5 of 8, local 1");
    assert_eq!(with_slurm_step("RANK=5"), "Slurm: 5 of 8, local 1");
    assert_eq!(with_slurm_step("LOCAL_RANK=1"), "Slurm: 5 of 8, local 1");
    assert_eq!(with_slurm_step("MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4"), "Slurm: 5 of 8, local 1");
    assert_eq!(
        with_slurm_step("WORLD_SIZE=4"),
        "environment variable WORLD_SIZE is 4 but RANK is not set"
    );
    assert_eq!(
        with_slurm_step("RANK=4"),
        "environment variable RANK is 4 but WORLD_SIZE is not set"
    );
}

#[test]
fn non_numeric_values_are_rejected() {
    for value in ["", "abc", "-1", "+1", "1.0", "0x1", "18446744073709551616"] {
        for shell in [format!("RANK={value} WORLD_SIZE=2"), format!("RANK={value}")] {
            assert_eq!(outcome(&shell), Err(vars::invalid("RANK", value, WHOLE_NUMBER)));
        }
    }
    check(&[(
        "PMI_RANK=0 PMI_SIZE=two",
        "environment variable PMI_SIZE is \"two\", it must be a whole number of at most 64 bits",
    )]);
}

#[cfg(unix)]
#[test]
fn invalid_unicode_is_refused() {
    use std::os::unix::ffi::OsStringExt as _;

    let value = OsString::from_vec(vec![b'1', 0xff]);
    for name in ["RANK", "TORCHELASTIC_RUN_ID", "PMI_SIZE", "SLURM_STEP_ID"] {
        let error = from_lookup(&|wanted| (wanted == name).then(|| value.clone())).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("environment variable {name} is \"1\\xFF\", it must be Unicode")
        );
    }
}

#[test]
fn ranks_out_of_range_are_refused() {
    check(&[
        (
            "RANK=4 WORLD_SIZE=4",
            "environment variable RANK is \"4\", it must be below WORLD_SIZE, which is 4",
        ),
        (
            "RANK=0 WORLD_SIZE=0",
            "environment variable WORLD_SIZE is \"0\", it must be from 1 to 1048576",
        ),
        (
            "RANK=0 WORLD_SIZE=1048577",
            "environment variable WORLD_SIZE is \"1048577\", it must be from 1 to 1048576",
        ),
        (
            "PMI_RANK=9 PMI_SIZE=4",
            "environment variable PMI_RANK is \"9\", it must be below PMI_SIZE, which is 4",
        ),
        (
            "SLURM_STEP_ID=0 SLURM_PROCID=4 SLURM_NTASKS=4",
            "environment variable SLURM_PROCID is \"4\", it must be below SLURM_NTASKS, which is 4",
        ),
        (
            "RANK=0 WORLD_SIZE=4 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2",
            "environment variable LOCAL_RANK is \"2\", it must be below LOCAL_WORLD_SIZE, which is 2",
        ),
        (
            "RANK=0 WORLD_SIZE=4 LOCAL_RANK=4",
            "environment variable LOCAL_RANK is \"4\", it must be below WORLD_SIZE, which is 4",
        ),
        (
            "RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=8",
            "environment variable LOCAL_WORLD_SIZE is \"8\", it must be from 1 to 4",
        ),
    ]);
}

#[test]
fn agreeing_launchers_are_accepted() {
    check(&[
        // `mpirun` inside a step, with one daemon per rank.
        (
            "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 SLURM_STEP_ID=0 SLURM_PROCID=1 \
             SLURM_NTASKS=2",
            "Open MPI: 1 of 2",
        ),
        // `srun --mpi=pmi2`, which does not say which machine a task is on; Slurm's variables do.
        (
            "PMI_RANK=5 PMI_SIZE=8 SLURM_STEP_ID=0 SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_LOCALID=1 \
             SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=4(x2)",
            "PMI: 5 of 8, local 1 of 4",
        ),
        // A script that copies MPI's numbers into PyTorch's variables.
        (
            "RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2",
            "env://: 1 of 2, local 0",
        ),
    ]);
}

#[test]
fn inner_launcher_precedes_outer_launcher() {
    check(&[
        // `srun` starts one agent on each of two nodes. In the second case `mpirun` does, and the variables of all
        // three launchers are set.
        (
            "RANK=6 WORLD_SIZE=8 LOCAL_RANK=2 LOCAL_WORLD_SIZE=4 TORCHELASTIC_RUN_ID=x \
             SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0",
            "torchrun: 6 of 8, local 2 of 4",
        ),
        (
            "RANK=6 WORLD_SIZE=8 TORCHELASTIC_RUN_ID=x OMPI_COMM_WORLD_RANK=1 \
             OMPI_COMM_WORLD_SIZE=2 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=1",
            "torchrun: 6 of 8",
        ),
        ("RANK=6 WORLD_SIZE=8 TORCHELASTIC_RUN_ID=x PMI_RANK=1 PMI_SIZE=2", "torchrun: 6 of 8"),
        // One agent per node: torchrun numbers the ranks in the order of arrival.
        (
            "RANK=1 WORLD_SIZE=2 TORCHELASTIC_RUN_ID=x SLURM_STEP_ID=0 SLURM_PROCID=0 \
             SLURM_NTASKS=2",
            "torchrun: 1 of 2",
        ),
        // `mpirun` starts one daemon per node by `srun`. In the second case `mpiexec` runs in a shell that `srun --pty`
        // opened.
        (
            "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 SLURM_STEP_ID=0 SLURM_PROCID=1 \
             SLURM_NTASKS=2",
            "Open MPI: 5 of 8",
        ),
        ("PMI_RANK=3 PMI_SIZE=4 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=1", "PMI: 3 of 4"),
        // As above, but a script copies the numbers into PyTorch's variables.
        (
            "RANK=3 WORLD_SIZE=4 PMI_RANK=3 PMI_SIZE=4 SLURM_STEP_ID=0 SLURM_PROCID=0 \
             SLURM_NTASKS=1",
            "env://: 3 of 4",
        ),
    ]);
}

#[test]
fn contradicting_launchers_are_refused() {
    check(&[
        (
            "RANK=0 WORLD_SIZE=8 SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_NTASKS=8",
            "env:// says rank 0 of 8 (RANK, WORLD_SIZE), but Slurm says rank 3 of 8 (SLURM_PROCID, \
             SLURM_STEP_NUM_TASKS or SLURM_NTASKS)",
        ),
        (
            "RANK=1 WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2",
            "env:// says rank 1 of 2 (RANK, WORLD_SIZE), but Open MPI says rank 0 of 2 \
             (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE)",
        ),
        (
            "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 PMI_RANK=0 PMI_SIZE=4",
            "Open MPI says rank 0 of 2 (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE), but PMI says \
             rank 0 of 4 (PMI_RANK, PMI_SIZE)",
        ),
    ]);
}

#[test]
fn smaller_inner_world_is_refused() {
    let disagree = |vars: &str| matches!(outcome(vars), Err(Error::LaunchersDisagree { .. }));
    // `srun` from a shell that `mpirun` started: every task would be rank 0.
    assert!(disagree(
        "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 SLURM_STEP_ID=0 SLURM_PROCID=3 \
         SLURM_NTASKS=4"
    ));
    // Four tasks that each start `torchrun --standalone`, which makes four worlds.
    let torchrun = "RANK=1 WORLD_SIZE=2 TORCHELASTIC_RUN_ID=x";
    assert!(disagree(&format!("{torchrun} SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_NTASKS=4")));
}
