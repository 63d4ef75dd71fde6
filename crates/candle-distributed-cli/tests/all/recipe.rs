//! Learning rate schedules and gradient clipping of `train`, also after resuming.

use std::fs;

use crate::support::run::{Home, STEPS};

const COSINE: [&str; 6] =
    ["--lr-schedule", "cosine", "--warmup-steps", "2", "--min-lr-rate", "0.1"];

#[test]
fn resume_keeps_the_schedule() {
    let home = Home::new();
    let options = [&COSINE[..], &["--max-grad-norm", "0.3"]].concat();
    home.train("run", &[&["--steps", STEPS], &options[..]].concat());
    let model = home.model("run");
    let rates = home.numbers("run", "learning_rate");
    let mut rises = rates.iter().zip([0.0015, 0.003, 0.003]);
    assert!(rises.all(|(found, expected)| (found - expected).abs() < 1e-9), "{rates:?}");
    assert_eq!(rates.len(), 12);
    home.end_again("run", &options);
    assert!(home.model("run") == model);
    assert_eq!(home.numbers("run", "learning_rate"), rates);
    home.remove_model("run");
    for (more, words) in [
        (&["--lr-schedule", "linear"][..], "with --lr-schedule cosine"),
        (&["--lr-schedule", "cosine", "--warmup-steps", "3"], "with --warmup-steps 2"),
        (&["--lr-schedule", "cosine", "--min-lr-rate", "0.2"], "with --min-lr-rate 0.1"),
        (&["--max-grad-norm", "1"], "with --max-grad-norm 0.3"),
    ] {
        home.is_rejected("run", more, &[words, "can only be resumed with the same"]);
    }
    home.killed("plain");
    home.is_rejected("plain", &["--max-grad-norm", "1"], &["with --max-grad-norm none"]);

    let run_json = home.at("run").join("run.json");
    let other = fs::read_to_string(&run_json)
        .unwrap()
        .replace("\"warmup_steps\": 2", "\"warmup_steps\": 1");
    fs::write(&run_json, other).unwrap();
    home.is_rejected("run", &[], &["run.json is damaged"]);
}
