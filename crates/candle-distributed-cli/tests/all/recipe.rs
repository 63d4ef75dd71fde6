//! Learning rate schedules and gradient clipping of `train`, also after resuming.

use std::fs;

use crate::support::{
    rejects,
    run::{Home, STEPS, said},
};

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
    for more in [&[][..], &options] {
        home.end_again("run", more);
        assert!(home.model("run") == model);
        assert_eq!(home.numbers("run", "learning_rate"), rates);
    }
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

#[test]
fn run_starts_from_model_of_another() {
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
    let last = *home.numbers("first", "loss").last().unwrap();
    let next = home.numbers("whole", "loss")[0];
    assert!(next < last, "{next} is not below {last}");

    // The run resumes only with the same model, which may have moved.
    home.remove_model("whole");
    fs::rename(&model, home.at("moved")).unwrap();
    let moved = home.path("moved");
    home.is_rejected("whole", &[], &["is not a folder", "hint: "]);
    let other = crate::support::golden("llama");
    home.is_rejected("whole", &["--model", &other], &["is not the model that"]);
    let resumed = home.resume("whole", &["--model", &moved]);
    assert!(resumed.status.success(), "{}", said(&resumed));
    home.killed("new");
    home.is_rejected("new", &["--model", &moved], &["without --model"]);
}

#[test]
fn large_gradients_are_clipped() {
    let home = Home::new();
    let short = ["--steps", "3"];
    home.train("plain", &short);
    // A limit above every norm changes nothing.
    home.train("loose", &[&short[..], &["--max-grad-norm", "1e9"]].concat());
    assert!(home.model("loose") == home.model("plain"));
    home.train("tight", &[&short[..], &["--max-grad-norm", "1e-9"]].concat());
    assert!(home.model("tight") != home.model("plain"));
}

#[test]
fn invalid_schedules_are_rejected() {
    for (args, words) in [
        (&["--warmup-steps", "3"][..], &["--lr-schedule"][..]),
        (&["--min-lr-rate", "0.1"], &["--lr-schedule"]),
        (
            &["--steps", "9", "--lr-schedule", "linear", "--warmup-steps", "9"],
            &["--warmup-steps is 9, must be less than the 9 steps"],
        ),
        (
            &["--lr-schedule", "cosine", "--min-lr-rate", "1.5"],
            &["--min-lr-rate is 1.5, must be from 0 to 1"],
        ),
        (&["--lr-schedule", "constant", "--min-lr-rate", "NaN"], &["--min-lr-rate is NaN"]),
        (&["--max-grad-norm", "0"], &["--max-grad-norm is 0, must be above 0"]),
        (&["--max-grad-norm", "NaN"], &["--max-grad-norm is NaN"]),
    ] {
        rejects(&[&["train"][..], args].concat(), words);
    }
}
