//! The number of threads of candle's kernels: set in time by a program, or warned about.
//!
//! A program of its own: its tests start it again with environments that other tests must not see.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    env,
    process::{Command, Output},
};

use candle_core::{DType, Device, Tensor};
use pmap_mesh::{DeviceMesh, Error, MeshError, init_threads, support::THREAD_VARIABLES};

/// Says to a test that it is the process that another one has started.
const CHILD: &str = "PMAP_MESH_TEST_THREADS";

#[test]
fn a_process_with_a_second_thread_is_refused_and_left_as_it_is() {
    if env::var_os(CHILD).is_some() {
        // The thread of this test is the second one.
        let refused = init_threads(2).unwrap_err();
        assert!(
            matches!(refused, Error::Mesh(MeshError::ThreadsRun { threads }) if threads >= 2),
            "{refused}"
        );
        assert!(refused.to_string().contains("in the first line of `main`"), "{refused}");
        assert!(THREAD_VARIABLES.iter().all(|name| env::var_os(name).is_none()));
        return;
    }
    // Windows does not count them.
    if !cfg!(windows) {
        let name = "a_process_with_a_second_thread_is_refused_and_left_as_it_is";
        run(name, &[]);
    }
}

#[test]
fn what_the_user_has_set_stays() {
    if env::var_os(CHILD).is_some() {
        init_threads(2).unwrap();
        assert!(THREAD_VARIABLES.iter().all(|name| env::var(name).unwrap() == "7"));
        return;
    }
    run("what_the_user_has_set_stays", &THREAD_VARIABLES.map(|name| (name, "7")));
}

#[test]
fn no_slots_have_no_share() {
    assert!(matches!(init_threads(0), Err(Error::Mesh(MeshError::Size { count: 0, .. }))));
}

#[test]
fn a_mesh_whose_slots_share_the_threads_says_so_once() {
    if env::var_os(CHILD).is_some() {
        // One slot shares with nobody.
        for slots in [1, 3, 2] {
            let double = DeviceMesh::cpu(slots).unwrap().pmap(|_, x: Tensor| x * 2.);
            double.call(Tensor::ones(6, DType::F32, &Device::Cpu).unwrap()).unwrap();
        }
        return;
    }
    let name = "a_mesh_whose_slots_share_the_threads_says_so_once";
    let warnings = |variables: &[(&str, &str)]| {
        let stderr = String::from_utf8(run(name, variables).stderr).unwrap();
        let warnings = stderr.lines().filter(|line| line.starts_with("warning: "));
        warnings.map(str::to_owned).collect::<Vec<_>>()
    };
    for unset in [&[][..], &[("RAYON_NUM_THREADS", "1")], &[("CANDLE_NUM_THREADS", "1")]] {
        let said = warnings(unset);
        assert!(said.len() == 1 && said[0].contains("`pmap_mesh::init_threads(3)`"), "{said:?}");
    }
    assert_eq!(warnings(&THREAD_VARIABLES.map(|name| (name, "1"))), [""; 0]);
}

/// The test of this name in a process of its own, with these variables only.
fn run(name: &str, variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env::current_exe().unwrap());
    for name in THREAD_VARIABLES {
        command.env_remove(name);
    }
    let command = command.args(["--exact", name, "--nocapture"]).env(CHILD, "1");
    let output = command.envs(variables.iter().copied()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
    output
}
