//! `mesh`: devices, and collectives on them.

use serde_json::json;

use crate::support::{command, json, rejects_each, text};

const SMALL: [&str; 5] = ["mesh", "--bytes", "4KiB,100", "--repetitions", "2"];

#[test]
fn mesh_json_has_documented_fields() {
    let report = json(&[&SMALL[..], &["--world-size", "3"]].concat());
    assert_eq!((&report["format_version"], &report["world_size"]), (&json!(1), &json!(3)));
    assert_eq!(report["axes"], json!([{"name": "devices", "size": 3}]));
    assert_eq!(report["devices"], json!(["Cpu", "Cpu", "Cpu"]));
    assert_eq!(report["repetitions"], 2);
    let collectives = report["collectives"].as_array().unwrap();
    let names: Vec<_> =
        collectives.iter().map(|figures| figures["collective"].as_str().unwrap()).collect();
    assert_eq!(
        names,
        ["psum", "all_gather", "psum_scatter", "all_to_all", "ppermute"]
            .map(|name| [name; 2])
            .concat()
    );
    for (figures, factor) in
        collectives.iter().step_by(2).zip([4.0 / 3.0, 2.0 / 3.0, 2.0 / 3.0, 2.0 / 3.0, 1.0])
    {
        // The next multiple of three 4-byte numbers above 4 KiB.
        assert_eq!((&figures["group_size"], &figures["bytes"]), (&json!(3), &json!(4104)));
        let [seconds, algorithm, bus] =
            ["seconds", "algorithm_bytes_per_second", "bus_bytes_per_second"]
                .map(|name| figures[name].as_f64().unwrap());
        assert!(
            (algorithm * seconds - 4104.0).abs() < 1e-6 && (bus / algorithm - factor).abs() < 1e-9,
            "{figures}"
        );
    }
}

#[test]
fn mesh_measures_along_every_axis() {
    let grid = [&SMALL[..], &["--axis", "data=2", "--axis", "model=2"]].concat();
    let printed = text(&grid);
    assert!(
        printed.starts_with("data 2 x model 2\n[0: Cpu, 1: Cpu]\n[2: Cpu, 3: Cpu]\n"),
        "{printed}"
    );
    assert!(printed.contains("all results correct"), "{printed}");
    let report = json(&[&grid[..], &["--world-size", "4"]].concat());
    let groups: Vec<_> = report["collectives"].as_array().unwrap().iter().step_by(10).collect();
    let groups: Vec<_> =
        groups.into_iter().map(|figures| (&figures["axes"], &figures["group_size"])).collect();
    assert_eq!(
        groups,
        [
            (&json!(["data"]), &json!(2)),
            (&json!(["model"]), &json!(2)),
            (&json!(["data", "model"]), &json!(4))
        ]
    );
}

#[test]
fn mesh_prints_thread_counts() {
    let threads = |variable: Option<&str>| {
        let mut command = command(&[&SMALL[..], &["--world-size", "64"]].concat());
        command.env_remove("CANDLE_NUM_THREADS").env_remove("RAYON_NUM_THREADS");
        variable.map(|value| command.env("RAYON_NUM_THREADS", value));
        String::from_utf8(command.output().unwrap().stdout).unwrap()
    };
    assert!(threads(None).contains(", CANDLE_NUM_THREADS=1 RAYON_NUM_THREADS=1\n"));
    assert!(
        threads(Some("2")).contains(", CANDLE_NUM_THREADS=1 RAYON_NUM_THREADS=2\n"),
        "the user's value is kept"
    );
}

#[test]
fn launched_processes_need_an_engine() {
    let run = |more: &[&str]| {
        let mut command = command(&[&SMALL[..], more].concat());
        command.envs([("RANK", "1"), ("WORLD_SIZE", "4")]).output().unwrap()
    };
    let refused = run(&[]);
    assert_eq!(refused.status.code(), Some(2));
    let message = String::from_utf8(refused.stderr).unwrap();
    for word in ["started 4 processes", "--engine threads"] {
        assert!(message.contains(word), "{message}");
    }
    assert!(run(&["--engine", "threads"]).status.success());
}

#[test]
fn mesh_rejects_bad_input() {
    rejects_each(
        &["mesh"],
        &[
            ("--axis data", "data | data=2"),
            ("--axis =2", "=2 | at least 1"),
            ("--axis data=", "data= | at least 1"),
            ("--axis data=0", "data=0 | at least 1"),
            ("--axis data=-1", "data=-1 | at least 1"),
            ("--axis data=2x", "data=2x | at least 1"),
            ("--axis a=2 --axis a=2", "two axes named a"),
            ("--axis a=2 --axis b=3 --world-size 4", "grid of 6 | 4 devices"),
            ("--axis a=65535 --axis b=18446744073709551615", "18446744073709551615"),
            ("--bytes 0", "1 byte | 1.00 GiB"),
            ("--bytes 2GiB", "1.00 GiB"),
            ("--repetitions 0", "0"),
            ("--device tpu", "tpu | cpu"),
        ],
    );
}
