//! `train --dtype`: training in half precision.

use crate::support::{
    rejects,
    run::{Home, STEPS},
    text,
};

#[test]
fn resume_keeps_the_precision() {
    let home = Home::new();
    let halves = ["--steps", STEPS, "--dtype", "bf16"];
    home.train("whole", &halves);
    let model = home.model("whole");
    home.end_again("whole", &["--dtype", "bf16", "--strategy", "full", "--layout", "flat"]);
    assert!(home.model("whole") == model);
    home.remove_model("whole");
    home.is_rejected("whole", &["--dtype", "f32"], &["with --dtype bf16"]);
    home.killed("single");
    home.is_rejected("single", &["--dtype", "bf16"], &["without --dtype"]);
}

#[test]
fn bf16_halves_gathered_bytes() {
    let home = Home::new();
    let data = home.path("text.txt");
    let dry = ["train", "--data", &data, "--strategy", "full", "--dry-run", "--dtype"];
    let bytes = |dtype: &str| {
        let printed = text(&[&dry[..], &[dtype]].concat());
        let row = printed.lines().find(|line| line.trim_start().starts_with("all_gather")).unwrap();
        let cells: Vec<u64> = row
            .split_whitespace()
            .skip(1)
            .map(|cell| cell.replace(',', "").parse().unwrap())
            .collect();
        assert!(cells[3] - cells[2] < 1000, "{printed}");
        cells[2]
    };
    assert_eq!(bytes("f32"), 2 * bytes("bf16"));
    rejects(&["train", "--dtype", "f16"], &["invalid value 'f16'", "hint: f16 loses small"]);
}
