//! Hunts for lost results and wrong predictions: short ones by default, long ones with other seeds if
//! the variable `HUNT` is a seed.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use core_types::Seed;
use serde_json::{Value, json};

use crate::support::{
    as_given, command,
    finetune::{ModelHome, config, files},
    run::{contents, copy, said},
};

/// The variable with the seed of a long hunt, some ten minutes with `--release`.
const HUNT: &str = "HUNT";

/// A sequence of random numbers.
struct RandomDraws(Seed, u64);

impl RandomDraws {
    /// Returns the numbers of a hunt.
    fn new() -> Self {
        Self(Seed::new(seed().unwrap_or(0)), 0)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.1 += 1;
        self.0.derive(self.1).as_u64() % n
    }

    fn choose<T: Copy>(&mut self, values: &[T]) -> T {
        values[usize::try_from(self.below(values.len() as u64)).unwrap()]
    }
}

fn seed() -> Option<u64> {
    env::var(HUNT).ok()?.parse().ok()
}

/// Returns `long` in a long hunt, and `short` otherwise.
fn size(short: u64, long: u64) -> u64 {
    if seed().is_some() { long } else { short }
}

/// System calls that change the files of a run, by the names that the system may have for them.
#[cfg(target_os = "linux")]
const CALLS: [&str; 6] =
    ["/^rename", "/^unlink|^rmdir", "/^mkdir", "/^f(data)?sync", "/^link", "/^p?write(64)?$"];

/// Runs a command that is killed at the call with this number, from 1, if it has so many.
#[cfg(target_os = "linux")]
fn kill_at(call: &str, number: u64, args: &[&str]) -> Output {
    let program = as_given(args);
    Command::new("strace")
        .args(["-f", "-qq", "-o", "/dev/null", "-e", &format!("trace={call}"), "-e"])
        .arg(format!("inject={call}:signal=SIGKILL:when={number}"))
        .arg(program.get_program())
        .args(program.get_args())
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

/// Returns the results of a run without the fields that hold times.
#[cfg(target_os = "linux")]
fn results(run: &Path) -> BTreeMap<PathBuf, Value> {
    let mut results = BTreeMap::new();
    for (path, content) in contents(run) {
        let name = path.strip_prefix(run).unwrap().to_owned();
        let folder = name.iter().next().unwrap().to_str().unwrap();
        if ["model", "best", "adapter"].contains(&folder) {
            results.insert(name, json!(content));
        } else if [Some("metrics.jsonl"), Some("validation.jsonl")].contains(&name.to_str()) {
            let lines = String::from_utf8(content.unwrap()).unwrap();
            let mut losses = Vec::new();
            for line in lines.lines() {
                let line: Value = serde_json::from_str(line).unwrap();
                losses.push(json!([line["step"], line["loss"]]));
            }
            results.insert(name, json!(losses));
        }
    }
    results
}

/// A kill at any change of a file leaves a run that resumes to the same bits, with no leftover file
/// in its models.
#[cfg(target_os = "linux")]
#[test]
fn killed_runs_resume_bit_identical() {
    if Command::new("strace").arg("-V").stdout(Stdio::null()).status().is_err() {
        println!("SKIPPED: there is no strace");
        return;
    }
    let home = ModelHome::new();
    let lora: &[&str] = &["--lora", "2", "--merge"];
    let mut draw = RandomDraws::new();
    let kinds = [("adapted", lora), ("whole", &[][..])];
    // Adapters have all folders of a run.
    for (kind, more) in kinds.into_iter().take(if seed().is_some() { 2 } else { 1 }) {
        let options =
            [&["--init", "3", "--steps", "6", "--no-sample", "--validation", "0.5"], more];
        let arguments =
            |run: &str| home.arguments(run, &[&options.concat()[..], &["--resume"]].concat());
        home.train(kind, &options.concat());
        let expected = results(&home.at(kind));
        let mut n_kills = 0;
        for call in CALLS {
            // The first calls are tried more often by chance, since a run ends at its last one.
            let mut number = 1 + draw.below(size(40, 1));
            loop {
                let arguments = arguments("killed");
                let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
                let killed = kill_at(call, number, &arguments);
                if killed.status.success() {
                    break;
                }
                n_kills += 1;
                let resumed = command(&arguments).output().unwrap();
                let case = format!("{kind}, {call} {number}");
                assert!(resumed.status.success(), "{case}: {}", said(&resumed));
                assert!(results(&home.at("killed")) == expected, "{case}: {}", said(&resumed));
                fs::remove_dir_all(home.at("killed")).unwrap();
                number += 1 + draw.below(size(80, 1));
            }
            fs::remove_dir_all(home.at("killed")).unwrap();
        }
        println!("{kind}: {n_kills} kills");
        assert!(n_kills >= 4, "{n_kills} kills");
    }
}

/// A flipped bit anywhere in a model or its run is never used in silence.
#[test]
fn random_flips_are_found() {
    let home = ModelHome::new();
    let options = ["--steps", "4", "--init", "3", "--validation", "0.5", "--lora", "2", "--merge"];
    home.train("run", &options);
    let mut draw = RandomDraws::new();
    copy(&home.at("run/model"), &home.at("copied"));
    let [run, model, best, adapter, copied] =
        ["run", "run/model", "run/best", "run/adapter", "copied"].map(|name| home.path(name));
    let generate = |args: &[&str]| {
        let args = [&["generate"], args, &["--prompt", "1 and", "--max-tokens", "1"]].concat();
        command(&args).output().unwrap()
    };
    let use_model = |folder: &str| match folder {
        folder if folder == run => command(&["report", folder]).output().unwrap(),
        folder if folder == adapter => generate(&[&model, "--adapter", folder]),
        folder if folder == model => generate(&[&run]),
        folder => generate(&[folder]),
    };
    let mut n_flips = 0;
    for folder in [&run, &model, &best, &adapter, &copied] {
        let run_json =
            || BTreeMap::from([("run.json".into(), fs::read(home.at("run/run.json")).unwrap())]);
        let damaged = if folder == &run { run_json() } else { files(Path::new(folder)) };
        for (name, content) in damaged {
            for _ in 0..size(2, 40) {
                let mut flipped = content.clone();
                let at = usize::try_from(draw.below(content.len() as u64)).unwrap();
                let bit = draw.below(8);
                flipped[at] ^= 1 << bit;
                fs::write(Path::new(folder).join(&name), flipped).unwrap();
                let output = use_model(folder);
                let said = said(&output);
                let is_said = said.contains("has changed since") && folder == &copied;
                let case = format!("{folder}/{name}, bit {bit} of byte {at}: {said}");
                assert!(!output.status.success() || is_said, "{case}");
                assert!(output.status.code().is_some(), "{case}");
                n_flips += 1;
            }
            fs::write(Path::new(folder).join(&name), content).unwrap();
        }
    }
    println!("{n_flips} flips");
}

/// Returns the bytes in a cell of a table, such as `1.50 GiB`.
fn bytes(number: &str, unit: &str) -> f64 {
    let power = ["B", "KiB", "MiB", "GiB"].iter().position(|name| *name == unit).unwrap();
    number.parse::<f64>().unwrap() * 1024_f64.powi(i32::try_from(power).unwrap())
}

/// Draws the family of a model.
fn set_family(fields: &mut Value, draw: &mut RandomDraws) {
    let families = ["Llama", "Llama", "Qwen3", "Gemma2", "Phi3", "Olmo2", "Granite", "Glm4"];
    let family = draw.choose(&families);
    fields["architectures"] = json!([format!("{family}ForCausalLM")]);
    match family {
        "Qwen3" => fields["head_dim"] = json!(32),
        "Gemma2" => {
            fields["hidden_act"] = json!("gelu_pytorch_tanh");
            fields["head_dim"] = json!(32);
            fields["sliding_window"] = json!(48);
        }
        "Granite" => fields["residual_multiplier"] = json!(0.25),
        "Glm4" => fields["head_dim"] = json!(16),
        _ => {}
    }
}

/// Draws a model and options, and returns the arguments of their dry run. Its step takes a few seconds.
fn random_dry_run(draw: &mut RandomDraws, home: &ModelHome) -> Vec<String> {
    let (vocabulary, hidden, width, layers, tokens) = loop {
        let least = 260 << draw.below(10);
        let vocabulary = (least + draw.below(least)).min(152_000);
        let hidden = draw.choose(&[32, 64, 128, 256]);
        let width = hidden * draw.choose(&[1, 2, 3, 5, 8, 16, 32, 64]) / 2 + draw.below(2);
        let most_layers = 1 << draw.below(5);
        let layers = 1 + draw.below(most_layers);
        let tokens = 128 << draw.below(6);
        let numbers = 2 * vocabulary * hidden + layers * hidden * (4 * hidden + 3 * width);
        if numbers < 60_000_000 && numbers * tokens < 8_000_000_000 {
            break (vocabulary, hidden, width, layers, tokens);
        }
    };
    let mut fields = config();
    fields["vocab_size"] = json!(vocabulary);
    fields["hidden_size"] = json!(hidden);
    fields["intermediate_size"] = json!(width);
    fields["num_hidden_layers"] = json!(layers);
    fields["max_position_embeddings"] = json!(512);
    fields["tie_word_embeddings"] = json!(draw.below(2) == 0);
    set_family(&mut fields, draw);
    fs::write(home.at("new/config.json"), fields.to_string()).unwrap();
    let lines: Vec<String> = (0..1500)
        .map(|_| json!("a text of many words, ".repeat(draw.choose(&[1, 3, 10, 40]))).to_string())
        .collect();
    fs::write(home.at("texts/0.jsonl"), lines.join("\n")).unwrap();
    let context = draw.choose(&[16, 64, 128, 512]);
    let devices = draw.choose(&[1, 2, 2, 3, 4, 8]);
    let (model, texts) = (home.path("new"), home.path("texts"));
    let options = ["train", "--init", "1", "--dry-run", "--overlong", "truncate"];
    let mut all: Vec<&str> = [&options[..], &["--model", &model, "--data", &texts]].concat();
    // Each device has a longest sequence, and so has each of two micro-batches.
    let [context, world_size, tokens] =
        [context, devices, tokens.max(context * devices.max(2))].map(|number| number.to_string());
    all.extend(["--context", &context, "--world-size", &world_size, "--max-tokens", &tokens]);
    all.extend(["--dtype", draw.choose(&["f32", "f32", "bf16"])]);
    all.extend(draw.choose(&[&[][..], &[], &["--rows", "packed"]]));
    all.extend(draw.choose(&[&[][..], &[], &["--lora", "8"]]));
    all.extend(draw.choose(&[&[][..], &[], &["--accumulate", "2"]]));
    if let Some(strategy) = draw.choose(&[None, Some("full"), Some("whole-tensor")]) {
        all.extend(["--strategy", strategy]);
        all.extend(["--keep", draw.choose(&["inputs", "inputs", "graph", "gathered"])]);
    }
    all.into_iter().map(str::to_owned).collect()
}

/// No dry run takes more memory than the bound that the limit compares, and nine of ten take at least
/// half of it.
#[cfg(target_os = "linux")]
#[test]
fn predicted_memory_bounds_the_peak() {
    let mut draw = RandomDraws::new();
    let (mut shares, mut above) = (Vec::new(), Vec::new());
    for _ in 0..size(2, 300) {
        let home = ModelHome::new();
        let args = random_dry_run(&mut draw, &home);
        let output =
            as_given(&args.iter().map(String::as_str).collect::<Vec<_>>()).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", said(&output));
        let table = String::from_utf8(output.stdout).unwrap();
        let cells = |name| {
            let row = table.lines().find_map(|line| line.trim().strip_prefix(name)).unwrap();
            row.split_whitespace().collect::<Vec<_>>()
        };
        let ([_, _, measured, measured_unit], [number, unit]) =
            (&cells("peak")[..], &cells("bound of the peak")[..])
        else {
            panic!("{table}")
        };
        let config = fs::read_to_string(home.at("new/config.json")).unwrap();
        let share = bytes(measured, measured_unit) / bytes(number, unit);
        println!("{share:.2} of {number} {unit}: {} {config}", args[8..].join(" "));
        shares.push(share);
        if share > 1.0 {
            above.push(format!("{share:.2}: {} {config}", args[8..].join(" ")));
        }
    }
    assert!(above.is_empty(), "{}", above.join("\n"));
    let n_loose = shares.iter().filter(|&&share| share < 0.5).count();
    assert!(10 * n_loose <= shares.len().max(20), "{n_loose} of {} are below half", shares.len());
}

/// A text in one line stays within the limit, or is rejected before it takes more.
#[cfg(target_os = "linux")]
#[test]
fn long_lines_stay_within_the_limit() {
    let home = ModelHome::new();
    let n_bytes = size(1_000_000, 100_000_000);
    let text = "a text without end ".repeat(usize::try_from(n_bytes / 19).unwrap());
    fs::write(home.at("long.txt"), text).unwrap();
    let data = home.path("long.txt");
    for (overlong, limit) in
        [("truncate", 1 << 30), ("split", 1 << 30), ("truncate", 100_u64 << 20)]
    {
        let limit_text = limit.to_string();
        let more = ["--init", "1", "--steps", "1", "--no-sample", "--memory-limit", &limit_text];
        let more = [&more[..], &["--data", &data, "--overlong", overlong]].concat();
        let arguments = home.arguments("run", &more);
        let program = as_given(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        // Address space that is reserved but not used counts as well.
        let script = format!("ulimit -v {}; exec \"$0\" \"$@\"", (limit + (1 << 30)) >> 10);
        let output = Command::new("sh")
            .args(["-c", &script])
            .arg(program.get_program())
            .args(program.get_args())
            .output()
            .unwrap();
        let said = said(&output);
        assert!(matches!(output.status.code(), Some(0 | 2)), "{overlong}: {said}");
        if output.status.success() {
            let metrics = fs::read_to_string(home.at("run/metrics.jsonl")).unwrap();
            let line: Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
            assert!(line["peak_bytes"].as_u64().unwrap() <= limit, "{overlong}: {line}");
            fs::remove_dir_all(home.at("run")).unwrap();
        }
    }
}
