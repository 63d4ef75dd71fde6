//! How `train` learns: schedules of its learning rate and clipped gradients, resumed as they were.

use std::fs;

use serde_json::Value;

use crate::support::{
    refuses,
    run::{Home, STEPS, said},
};

/// A number of each step of a run.
fn of_steps(home: &Home, name: &str, what: &str) -> Vec<f64> {
    let metrics = fs::read_to_string(home.at(name).join("metrics.jsonl")).unwrap();
    let number = |line: &str| serde_json::from_str::<Value>(line).unwrap()[what].as_f64().unwrap();
    metrics.lines().map(number).collect()
}

const COSINE: [&str; 6] =
    ["--lr-schedule", "cosine", "--warmup-steps", "2", "--min-lr-rate", "0.1"];

#[test]
fn the_learning_rate_follows_its_schedule() {
    let home = Home::new();
    home.train("run", &[&["--steps", STEPS][..], &COSINE].concat());
    let rates = of_steps(&home, "run", "learning_rate");
    let progress = |step: u32| f64::from(step - 2) / 10.0;
    let cosine = |step| 0.1 + 0.45 * (1.0 + (std::f64::consts::PI * progress(step)).cos());
    let expected = [0.5, 1.0].into_iter().chain((2..12).map(cosine));
    for (found, expected) in rates.iter().zip(expected) {
        assert!((found - 3e-3 * expected).abs() < 1e-9, "{found}, {expected}");
    }
    assert_eq!(rates.len(), 12);
}

#[test]
fn a_run_is_resumed_as_it_began() {
    let home = Home::new();
    let options = [&COSINE[..], &["--max-grad-norm", "0.3"]].concat();
    home.train("run", &[&["--steps", STEPS], &options[..]].concat());
    let (model, rates) = (home.model("run"), of_steps(&home, "run", "learning_rate"));
    for more in [&[][..], &options] {
        fs::remove_dir_all(home.at("run").join("model")).unwrap();
        let resumed = home.resume("run", more);
        assert!(resumed.status.success(), "{}", said(&resumed));
        assert!(home.model("run") == model);
        assert_eq!(of_steps(&home, "run", "learning_rate"), rates);
    }
    fs::remove_dir_all(home.at("run").join("model")).unwrap();
    for (more, words) in [
        (&["--lr-schedule", "linear"][..], "with --lr-schedule cosine"),
        (&["--lr-schedule", "cosine", "--warmup-steps", "3"], "with --warmup-steps 2"),
        (&["--lr-schedule", "cosine", "--min-lr-rate", "0.2"], "with --min-lr-rate 0.1"),
        (&["--max-grad-norm", "1"], "with --max-grad-norm 0.3"),
    ] {
        home.is_refused("run", more, &[words, "can only be resumed with the same"]);
    }
    home.killed("plain");
    home.is_refused("plain", &["--max-grad-norm", "1"], &["without --max-grad-norm"]);

    let run_json = home.at("run").join("run.json");
    let other = fs::read_to_string(&run_json)
        .unwrap()
        .replace("\"warmup_steps\": 2", "\"warmup_steps\": 1");
    fs::write(&run_json, other).unwrap();
    home.is_refused("run", &[], &["run.json is damaged"]);
}

#[test]
fn a_run_begins_with_the_model_of_another() {
    let home = Home::new();
    let short = ["--steps", "4"];
    home.train("first", &short);
    let first = home.path("first");
    let model = home.path("first/model");
    let more = ["--steps", "8", "--lr-schedule", "constant", "--lr", "0.003"];
    for (name, model, sharded) in
        [("whole", &first, &[][..]), ("parts", &model, &["--strategy", "full"])]
    {
        home.train(name, &[&more[..], &["--model", model], sharded].concat());
    }
    assert!(home.model("whole") == home.model("parts"));
    let last = *of_steps(&home, "first", "loss").last().unwrap();
    let next = of_steps(&home, "whole", "loss")[0];
    assert!(next < last, "{next} is not below {last}");

    // It is resumed with the same model, wherever that is now, and with no other.
    for name in ["whole", "parts"] {
        fs::remove_dir_all(home.at(name).join("model")).unwrap();
    }
    fs::rename(&model, home.at("moved")).unwrap();
    let moved = home.path("moved");
    home.is_refused("whole", &[], &["is not a folder", "hint: "]);
    let other = crate::support::golden("llama");
    home.is_refused("whole", &["--model", &other], &["is not the model that"]);
    let resumed = home.resume("whole", &["--model", &moved]);
    assert!(resumed.status.success(), "{}", said(&resumed));
    home.killed("new");
    home.is_refused("new", &["--model", &moved], &["without --model"]);
}

#[test]
fn large_gradients_are_clipped() {
    let home = Home::new();
    let short = ["--steps", "3"];
    home.train("plain", &short);
    // Above every norm, and below.
    home.train("loose", &[&short[..], &["--max-grad-norm", "1e9"]].concat());
    assert!(home.model("loose") == home.model("plain"));
    home.train("tight", &[&short[..], &["--max-grad-norm", "1e-9"]].concat());
    assert!(home.model("tight") != home.model("plain"));
    home.train("parts", &[&short[..], &["--max-grad-norm", "0.3", "--strategy", "full"]].concat());
    home.train("whole", &[&short[..], &["--max-grad-norm", "0.3"]].concat());
    let [parts, whole] = ["parts", "whole"].map(|name| of_steps(&home, name, "loss"));
    for (found, expected) in parts.iter().zip(whole) {
        assert!((found - expected).abs() < 1e-5, "{found}, {expected}");
    }
}

#[test]
fn what_cannot_be_followed_is_refused() {
    for (args, words) in [
        (&["--warmup-steps", "3"][..], &["--lr-schedule"][..]),
        (&["--min-lr-rate", "0.1"], &["--lr-schedule"]),
        (
            &["--steps", "9", "--lr-schedule", "linear", "--warmup-steps", "9"],
            &["--warmup-steps 9 must be less than the 9 steps"],
        ),
        (
            &["--lr-schedule", "cosine", "--min-lr-rate", "1.5"],
            &["--min-lr-rate is 1.5, must be from 0 to 1"],
        ),
        (&["--lr-schedule", "constant", "--min-lr-rate", "NaN"], &["--min-lr-rate is NaN"]),
        (&["--max-grad-norm", "0"], &["--max-grad-norm is 0, must be above 0"]),
        (&["--max-grad-norm", "inf"], &["--max-grad-norm is inf"]),
        (
            &["--strategy", "full", "--optimizer-in-backward", "--max-grad-norm", "2"],
            &["--optimizer-in-backward cannot be used with --max-grad-norm 2"],
        ),
    ] {
        refuses(&[&["train"][..], args].concat(), words);
    }
}
