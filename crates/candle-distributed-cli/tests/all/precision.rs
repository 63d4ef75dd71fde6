//! `train --dtype`: training in half precision.

use safetensors::{Dtype, SafeTensors};

use crate::support::{
    rejects,
    run::{Home, STEPS},
    text,
};

#[test]
fn bf16_learns_whole_and_sharded() {
    let home = Home::new();
    let long = ["--steps", "40"];
    home.train("single", &long);
    let halves = [&long[..], &["--dtype", "bf16"]].concat();
    home.train("whole", &halves);
    for (name, more) in [
        ("parts", &["--strategy", "full"][..]),
        ("graphs", &["--strategy", "layer-wise", "--keep", "graph", "--prefetch", "1"]),
    ] {
        home.train(name, &[&halves[..], more].concat());
        assert_eq!(home.losses(name), home.losses("whole"), "{name}");
    }
    let file = home.model("whole");
    let tensors = SafeTensors::deserialize(&file).unwrap();
    assert!(tensors.tensors().iter().all(|(_, tensor)| tensor.dtype() == Dtype::BF16));

    let [single, whole] = ["single", "whole"].map(|name| home.losses(name));
    let expected = single[39];
    let found = whole[39];
    assert!((found - expected).abs() < 0.1 * expected, "{found}, {expected}");
    assert_ne!(single, whole);
    // A run in single precision may start with this model.
    let model = home.path("whole");
    home.train("next", &["--steps", "1", "--model", &model]);
    assert!(home.losses("next")[0] < 1.1 * found);
}

#[test]
fn resume_keeps_the_precision() {
    let home = Home::new();
    let halves = ["--steps", STEPS, "--dtype", "bf16"];
    home.train("whole", &halves);
    home.train("parts", &[&halves[..], &["--strategy", "full"]].concat());
    let model = home.model("whole");
    assert!(home.model("parts") == model, "both layouts have the same bits");
    let sharded = ["--dtype", "bf16", "--strategy", "full", "--layout", "flat"];
    for (name, more) in
        [("whole", &[][..]), ("whole", &sharded), ("parts", &sharded), ("parts", &[])]
    {
        home.end_again(name, more);
        assert!(home.model(name) == model, "{name}");
    }
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
