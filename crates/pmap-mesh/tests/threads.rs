//! The thread counts of candle's kernels, set in time by a program or reported by a warning, and the
//! settings of the C library's allocator.
//!
//! This is a separate program: its tests start it again with environments that other tests must not
//! see.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    env,
    process::{Command, Output},
    thread,
};

use candle_core::{DType, Device, Tensor};
use pmap_mesh::{DeviceMesh, Error, MeshError, init_threads, support::THREAD_VARIABLES};

/// The variable that marks a process as started by another test.
const CHILD: &str = "PMAP_MESH_TEST_THREADS";

#[test]
fn second_thread_prevents_init_threads() {
    if env::var_os(CHILD).is_some() {
        // The thread of this test is the second one.
        let refused = init_threads(2).unwrap_err();
        assert!(
            matches!(&refused, Error::Mesh(MeshError::Threads { reason }) if reason.starts_with("while the process has ")),
            "{refused}"
        );
        assert!(refused.to_string().contains("in the first line of `main`"), "{refused}");
        assert!(THREAD_VARIABLES.iter().all(|name| env::var_os(name).is_none()));
        return;
    }
    // Windows does not count them.
    if !cfg!(windows) {
        let name = "second_thread_prevents_init_threads";
        run(name, &[]);
    }
}

#[test]
fn user_variables_stay() {
    if env::var_os(CHILD).is_some() {
        init_threads(2).unwrap();
        assert!(THREAD_VARIABLES.iter().all(|name| env::var(name).unwrap() == "7"));
        return;
    }
    run("user_variables_stay", &THREAD_VARIABLES.map(|name| (name, "7")));
}

#[test]
fn zero_slots_is_an_error() {
    assert!(matches!(init_threads(0), Err(Error::Mesh(MeshError::Size { count: 0, .. }))));
}

#[test]
fn shared_threads_warn_once() {
    if env::var_os(CHILD).is_some() {
        // A single slot shares with no other.
        for slots in [1, 3, 2] {
            let double = DeviceMesh::cpu(slots).unwrap().pmap(|_, x: Tensor| x * 2.);
            double.call(Tensor::ones(6, DType::F32, &Device::Cpu).unwrap()).unwrap();
        }
        return;
    }
    let name = "shared_threads_warn_once";
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

/// Whether memory at this address is in the process's heap.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn is_in_heap(memory: &[u8]) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let heap = maps.lines().find(|line| line.ends_with("[heap]")).unwrap();
    let (first, end) = heap.split_once(' ').unwrap().0.split_once('-').unwrap();
    let [first, end] = [first, end].map(|address| usize::from_str_radix(address, 16).unwrap());
    (first..end).contains(&memory.as_ptr().addr())
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn resident_pages() -> usize {
    let sizes = std::fs::read_to_string("/proc/self/statm").unwrap();
    sizes.split(' ').nth(1).unwrap().parse().unwrap()
}

/// Returns whether a large and a small allocation are in the heap, and whether freed memory is kept.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn allocate() -> [bool; 3] {
    const PAGE: usize = 4096;
    const LARGE: usize = 64 << 20;
    let before = resident_pages();
    let large = vec![1; LARGE];
    let are_in_heap = [&large, &vec![1; 64 << 10]].map(|memory| is_in_heap(memory));
    drop(large);
    let is_kept = resident_pages() >= before + LARGE / PAGE;
    [are_in_heap[0], are_in_heap[1], is_kept]
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[test]
fn freed_memory_is_kept_unless_the_user_objects() {
    if let Some(expected) = env::var_os("EXPECTED") {
        pmap_mesh::keep_freed_memory();
        // The thread of this test may have a heap of its own, which it took before the call.
        let found = thread::spawn(allocate).join().unwrap();
        assert_eq!(format!("{found:?}"), expected.to_str().unwrap());
        return;
    }
    let name = "freed_memory_is_kept_unless_the_user_objects";
    for (expected, variable, tunable) in [
        ([true, true, true], "UNUSED", "glibc.malloc.perturb"),
        ([false, true, false], "MALLOC_MMAP_MAX_", "glibc.malloc.mmap_max"),
        ([true, true, false], "MALLOC_TRIM_THRESHOLD_", "glibc.malloc.trim_threshold"),
        ([false, false, false], "MALLOC_ARENA_MAX", "glibc.malloc.arena_max"),
    ] {
        let expected = format!("{expected:?}");
        run(name, &[("EXPECTED", &expected), (variable, "9")]);
        run(name, &[("EXPECTED", &expected), ("GLIBC_TUNABLES", &format!("{tunable}=9"))]);
    }
}

/// Runs the test of this name in a separate process, with only these variables.
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
