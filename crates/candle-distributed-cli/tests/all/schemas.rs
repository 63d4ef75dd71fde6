//! The schemas in `docs/schemas` accept real outputs of the program, and reject damaged outputs.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use jsonschema::Validator;
use serde_json::{Value, json};

use crate::support::{file, finetune::ModelHome, golden, json, run, text, words};

/// A schema with real documents of the program.
struct SchemaExamples {
    name: &'static str,
    documents: Vec<Value>,
    /// JSON pointers of values without constraints.
    free: &'static [&'static str],
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs")
}

fn read(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn schema(name: &str) -> Value {
    read(&folder().join(format!("schemas/{name}.schema.json")))
}

/// Closes a schema against unknown fields. New fields of outputs must be added to their schema.
fn closed(mut schema: Value) -> Value {
    visit(&mut schema, &mut |object| {
        if object.contains_key("properties") {
            object.entry("additionalProperties").or_insert(json!(false));
        }
    });
    schema
}

fn visit(value: &mut Value, change: &mut impl FnMut(&mut serde_json::Map<String, Value>)) {
    match value {
        Value::Object(object) => {
            // No schema describes a field named `properties`, so this key is always a keyword.
            change(object);
            object.values_mut().for_each(|value| visit(value, change));
        }
        Value::Array(values) => values.iter_mut().for_each(|value| visit(value, change)),
        _ => {}
    }
}

fn validator(schema: &Value) -> Validator {
    jsonschema::draft202012::new(schema).unwrap()
}

/// Examples for every schema, which cover all fields.
static FORMS: LazyLock<Vec<SchemaExamples>> = LazyLock::new(|| {
    let dir = tempfile::tempdir().unwrap();
    let mut forms =
        vec![samples(dir.path()), batches(), batch_states(dir.path()), generated(), mesh()];
    forms.extend(plans(dir.path()));
    forms.extend(run_files(dir.path()));
    forms
});

fn samples(dir: &Path) -> SchemaExamples {
    let world = ["sample", "--len", "11", "--world-size", "4"];
    let states = dir.join("states");
    fs::create_dir(&states).unwrap();
    let documents = vec![
        json(&world),
        json(&[&world[..], &["--rank", "3", "--preset", "torch", "--mark-padding"]].concat()),
        json(&[&world[..], &["--locate", "3"]].concat()),
        json(&words("sample --len 11 --world-size 4 --tail drop --order sequential --locate 10")),
        json(&["sample", "--mix", "9:1,5:2", "--count", "5"]),
    ];
    SchemaExamples { name: "sample", documents, free: &[] }
}

fn batches() -> SchemaExamples {
    let (_dir, lengths) = file("lengths.txt", "12 80 15 70 9");
    let batch = |more: &[&str]| json(&[&["batch", "--lengths", &lengths], more].concat());
    let ranks = ["--strategy", "sorted", "--max-tokens", "100", "--world-size", "2", "--rank", "1"];
    let lines = |more: &[&str]| {
        text(&[&["batch", "--lengths", &lengths, "--format", "jsonl"], more].concat())
    };
    let all_lines = lines(&["--strategy", "pack", "--capacity", "100"]);
    let rank_lines = lines(&ranks);
    let lines = all_lines.lines().chain(rank_lines.lines());
    let mut documents = vec![
        batch(&["--strategy", "bucket", "--max-tokens", "160"]),
        batch(&["--strategy", "pack", "--capacity", "100"]),
        batch(&ranks),
        batch(&[&ranks[..], &["--accumulate", "2", "--cost", "attention"]].concat()),
        batch(&words("--strategy sorted --max-tokens 200 --world-size 2 --steps grid")),
        batch(&words(
            "--strategy pad-to-max --max-batch-size 9 --max-sequence-length 5 --overlong skip",
        )),
    ];
    documents.extend(lines.map(|line| serde_json::from_str::<Value>(line).unwrap()));
    SchemaExamples { name: "batch", documents, free: &[] }
}

fn mesh() -> SchemaExamples {
    let documents =
        vec![json(&words("mesh --axis data=2 --axis model=2 --bytes 64 --repetitions 1"))];
    SchemaExamples {
        name: "mesh",
        documents,
        free: &["/threads/CANDLE_NUM_THREADS", "/threads/RAYON_NUM_THREADS"],
    }
}

fn generated() -> SchemaExamples {
    let llama = golden("llama");
    let generate = |more: &[&str]| json(&[&["generate", &llama], more].concat());
    let documents = vec![
        generate(&["--prompt", "When the fog came in", "--max-tokens", "3"]),
        generate(&["--prompt", "", "--max-tokens", "400", "--ignore-eos"]),
    ];
    SchemaExamples { name: "generate", documents, free: &[] }
}

const MANIFEST: &str = r#"{
    "__metadata__": {"format": "pt"},
    "embed.weight": {"dtype": "BF16", "shape": [100, 8], "data_offsets": [0, 1600]},
    "h.0.mlp.weight": {"dtype": "F32", "shape": [32, 8], "layer": "h.0", "unit": "block", "requires_grad": false},
    "h.1.mlp.weight": {"dtype": "F32", "shape": [33, 8], "always_gather": true},
    "scale": {"dtype": "F32", "shape": [], "always_gather": true},
    "head.weight": {"dtype": "BF16", "shape": [100, 8], "tied_to": "embed.weight"}
}"#;

const RULES: &str = r#"{"rules": [
    {"pattern": "head", "choice": "replicate"},
    {"pattern": "h.0", "choice": {"full": "flat_aligned"}},
    {"pattern": "h.*.mlp.*", "choice": {"full": {"row_ragged": {"rows": 2}}}},
    {"pattern": "embed", "choice": {"full": {"block_ragged": {"block": 16}}}},
    {"pattern": "*", "choice": "layer_wise"}
], "default": {"full": "dim0"}}"#;

fn plans(dir: &Path) -> [SchemaExamples; 4] {
    let at = |name: &str| dir.join(name).to_str().unwrap().to_owned();
    let model = at("model.json");
    let rules = at("rules.json");
    let old = at("old.json");
    fs::write(&model, MANIFEST).unwrap();
    fs::write(&rules, RULES).unwrap();
    let plan = |more: &[&str]| json(&[&["plan", &model], more].concat());
    let mut plans = vec![
        plan(&words("--world-size 4 --rank 1 --budget 1KiB --links h100 --stay-gathered h.1")),
        plan(&words("--world-size 4 --runtime candle --tokens 9 --width 8 --slots 2")),
        plan(&["--world-size", "4", "--replicas", "2", "--layout", "flat"]),
        plan(&["--world-size", "4", "--layout", "flat-aligned"]),
        plan(&["--world-size", "4", "--layout", "row-ragged"]),
        plan(&["--world-size", "3", "--strategy", "layer-wise"]),
        plan(&["--world-size", "3", "--strategy", "whole-tensor", "--rank", "2"]),
        plan(&["--world-size", "3", "--rules", &rules]),
        plan(&["--world-size", "3"]),
    ];
    let against = |old_plan: &Value| {
        fs::write(&old, old_plan.to_string()).unwrap();
        plan(&["--world-size", "3", "--against", &old])
    };
    let mut differences: Vec<_> = plans.iter().map(against).collect();
    fs::write(
        &model,
        r#"{"embed.weight": {"dtype": "F16", "shape": [100, 8]}, "new": {"dtype": "F16", "shape": [1]}}"#,
    )
    .unwrap();
    differences.push(against(&plans[0]));
    plans.push(plan_of_run(dir));
    [
        SchemaExamples { name: "plan", documents: plans, free: &[] },
        // Differences describe parameters in the same format.
        SchemaExamples { name: "plan-diff", documents: differences, free: &[] },
        SchemaExamples {
            name: "rules",
            documents: vec![serde_json::from_str(RULES).unwrap()],
            free: &[],
        },
        SchemaExamples {
            name: "manifest",
            documents: vec![serde_json::from_str(MANIFEST).unwrap()],
            free: &[
                "/__metadata__",
                "/__metadata__/format",
                "/embed.weight/data_offsets",
                "/embed.weight/data_offsets/0",
            ],
        },
    ]
}

/// Trains a sharded run for a step, and returns its plan.
fn plan_of_run(dir: &Path) -> Value {
    let [data, out] =
        ["planned.txt", "planned"].map(|name| dir.join(name).to_str().unwrap().to_owned());
    fs::write(&data, "A text.\n\nAnother text.\n\n").unwrap();
    let options = words("--steps 1 --strategy full --world-size 2 --no-sample");
    text(&[&["train", "--data", &data, "--out", &out], &options[..]].concat());
    json(&["plan", &out])
}

/// Returns states of batches.
fn batch_states(dir: &Path) -> SchemaExamples {
    let (_dir, lengths) = file("lengths.txt", "12 80 15 70 9");
    let state = dir.join("batches.json").to_str().unwrap().to_owned();
    let batch = |more: &[&str]| {
        let args = ["batch", "--lengths", &lengths, "--max-tokens", "100", "--rank", "0"];
        let rest = ["--count", "1", "--save-state", &state, "--world-size"];
        text(&[&args[..], &rest, more].concat());
        read(Path::new(&state))
    };
    let documents = vec![
        batch(&["2", "--strategy", "sorted"]),
        batch(&["2", "--strategy", "dynamic", "--shuffle", "--epoch", "7"]),
        batch(&["1", "--strategy", "dynamic", "--shuffle", "--resume", &state]),
    ];
    SchemaExamples { name: "batch-state", documents, free: &[] }
}

/// Returns the settings of fine-tuning runs, and the results of validations.
fn finetuned(dir: &Path) -> (Vec<Value>, Vec<Value>) {
    let model = ModelHome::new();
    let train = |out: &Path, more: &[&str]| {
        let out_name = out.to_str().unwrap();
        model.train(out_name, &[&["--steps", "2", "--validation", "0.4"], more].concat());
        read(&out.join("run.json"))
    };
    let [first, second] = ["first-model", "second-model"].map(|name| dir.join(name));
    let settings = vec![
        train(&first, &["--init", "1", "--weight-decay", "0.1", "--batch-size", "2"]),
        train(
            &second,
            &[
                &["--model", first.join("model").to_str().unwrap()],
                &words("--lora 2 --lora-on q_proj --merge --rows packed --max-tokens 64")[..],
            ]
            .concat(),
        ),
    ];
    let found = fs::read_to_string(first.join("validation.jsonl")).unwrap();
    (settings, found.lines().map(|line| serde_json::from_str(line).unwrap()).collect())
}

/// Returns examples of written files: states of samplers, and the folder of a run.
fn run_files(dir: &Path) -> [SchemaExamples; 5] {
    let at = |name: &str| dir.join(name).to_str().unwrap().to_owned();
    let state = at("state.json");
    let data = at("text.txt");
    let out = at("run");
    let sample = |more: &[&str]| {
        text(&[&["sample", "--len", "100", "--count", "2", "--save-state", &state], more].concat());
        read(Path::new(&state))
    };
    let states = vec![
        sample(&["--world-size", "8", "--seed", "-1"]),
        sample(&["--resume", &state, "--world-size", "3", "--seed", "-1"]),
        sample(&["--world-size", "2", "--rank-weights", "3,1"]),
        sample(&["--preset", "torch"]),
    ];
    fs::write(&data, "What a run writes.\n\nAnd what it has written.").unwrap();
    let train = ["train", "--data", &data, "--steps", "3", "--checkpoint-every", "1"];
    let sharded = ["--strategy", "full", "--replicas", "2", "--prefetch", "1"];
    let learns = ["--lr-schedule", "cosine", "--warmup-steps", "1", "--min-lr-rate", "0.1"];
    let first = at("first");
    text(&[&train[..], &["--out", &first]].concat());
    let clipped = ["--max-grad-norm", "1", "--model", &first, "--out", &out];
    let adapted = ["--lora", "2", "--lora-alpha", "3", "--dtype", "bf16", "--accumulate", "2"];
    text(&[&train[..], &sharded, &learns, &clipped, &adapted].concat());
    let run = Path::new(&out);
    let metrics = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let mut checkpoints: Vec<_> = fs::read_dir(run.join("checkpoints"))
        .unwrap()
        .map(|entry| entry.unwrap().path().join("index.json"))
        .filter(|index| index.exists())
        .collect();
    checkpoints.sort();
    let mut without_data = read(&run.join("run.json"));
    without_data["data"] = Value::Null;
    without_data["allow_non_finite"] = true.into();
    without_data["finetune"]["max_tokens_per_batch"] = 256.into();
    without_data["sessions"][0]["sharding"]["optimizer_in_backward"] = true.into();
    let (mut runs, validations) = finetuned(dir);
    let [more, mixed] = ["more.txt", "mixed"].map(at);
    fs::write(&more, "What another run writes.").unwrap();
    let weighted = format!("{more}:3");
    text(&["train", "--data", &data, "--data", &weighted, "--steps", "1", "--out", &mixed]);
    let mut mixed = read(&Path::new(&mixed).join("run.json"));
    // As after a change of the weights within an epoch.
    visit(&mut mixed, &mut |object| {
        if object.contains_key("from_epoch") {
            object.insert("from_step".to_owned(), 1.into());
        }
    });
    runs.extend([read(&run.join("run.json")), without_data, mixed]);
    let indices: Vec<_> = checkpoints.iter().map(|path| read(path)).collect();
    [
        SchemaExamples { name: "sampler-state", documents: states, free: &[] },
        SchemaExamples { name: "run", documents: runs, free: &["/finetune/config"] },
        SchemaExamples { name: "validation", documents: validations, free: &[] },
        SchemaExamples {
            name: "metrics",
            documents: metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect(),
            free: &[],
        },
        SchemaExamples { name: "checkpoint-index", documents: indices, free: &["/state"] },
    ]
}

#[test]
fn outputs_match_their_schemas() {
    for SchemaExamples { name, documents, .. } in &*FORMS {
        let open = validator(&schema(name));
        let closed = validator(&closed(schema(name)));
        assert!(!documents.is_empty(), "{name}");
        for document in documents {
            for (validator, kind) in [(&open, "open"), (&closed, "closed")] {
                let faults: Vec<_> =
                    validator.iter_errors(document).map(|fault| fault.to_string()).collect();
                assert!(faults.is_empty(), "{name}, {kind}: {faults:?} in {document}");
            }
        }
    }
}

#[test]
fn every_schema_field_has_an_example() {
    for SchemaExamples { name, documents, .. } in &*FORMS {
        let mut written = BTreeSet::new();
        for mut document in documents.clone() {
            visit(&mut document, &mut |object| written.extend(object.keys().cloned()));
        }
        visit(&mut schema(name), &mut |object| {
            for field in object
                .get("properties")
                .and_then(Value::as_object)
                .into_iter()
                .flat_map(|fields| fields.keys())
            {
                assert!(written.contains(field), "{name}: nothing here has {field}");
            }
        });
    }
}

#[test]
fn damaged_outputs_fail_validation() {
    for &SchemaExamples { name, ref documents, free } in &*FORMS {
        let schema = schema(name);
        let open = validator(&schema);
        let closed = validator(&closed(schema.clone()));
        for document in documents {
            for place in places(document).iter().filter(|place| !is_free(free, place)) {
                let original = document.pointer(place).unwrap();
                for damage in [
                    json!({ "no": "such thing" }),
                    json!([["x"]]),
                    json!(-1.5),
                    json!(true),
                    json!("\u{1}"),
                ] {
                    // A value of the same type may be valid.
                    let same_type =
                        std::mem::discriminant(original) == std::mem::discriminant(&damage);
                    if same_type || (original.is_null() && !damage.is_object()) {
                        continue;
                    }
                    let mut damaged = document.clone();
                    *damaged.pointer_mut(place).unwrap() = damage;
                    assert!(!open.is_valid(&damaged), "{name}{place}: accepted in {damaged}");
                }
                // Entries of a manifest may have other fields, like headers of safetensors files,
                // and groups of variables and terms of memory may have any names.
                let any_field = name == "manifest"
                    || ["/learning_rates", "/terms"].iter().any(|end| place.ends_with(end));
                if original.is_object() && !any_field {
                    let mut longer = document.clone();
                    longer.pointer_mut(place).unwrap()["surprise"] = json!(0);
                    assert!(
                        !closed.is_valid(&longer),
                        "{name}{place}: an unknown field is accepted"
                    );
                }
            }
            let mut later = document.clone();
            if let Some(version) = later.pointer_mut("/format_version") {
                *version = json!(version.as_u64().unwrap() + 1);
                assert!(!open.is_valid(&later), "{name}: another version is accepted");
            }
            let fields: Vec<_> = document.as_object().unwrap().keys().collect();
            for field in fields.iter().filter(|field| is_required(&schema, field)) {
                let mut shorter = document.clone();
                shorter.as_object_mut().unwrap().remove(*field);
                assert!(!open.is_valid(&shorter), "{name} without {field} is accepted");
            }
        }
    }
}

/// Returns true if a place is inside a value without constraints.
fn is_free(free: &[&str], place: &str) -> bool {
    free.iter().any(|free| place == *free || place.starts_with(&format!("{free}/")))
}

/// Returns true if the schema requires the field.
fn is_required(schema: &Value, field: &str) -> bool {
    let alternatives = schema["anyOf"].as_array().map_or_else(Vec::new, Clone::clone);
    let mut definitions = alternatives
        .iter()
        .map(|one| &schema["$defs"][&one["$ref"].as_str().unwrap()["#/$defs/".len()..]]);
    let requires = |schema: &Value| {
        schema["required"].as_array().is_some_and(|fields| fields.contains(&json!(field)))
    };
    requires(schema) || definitions.any(requires)
}

/// Returns JSON pointers to the values of a document: all fields of objects, and the first and last
/// items of arrays.
fn places(document: &Value) -> Vec<String> {
    let mut found = vec![String::new()];
    let mut add = |key: &str, value: &Value| {
        let key = key.replace('~', "~0").replace('/', "~1");
        found.extend(places(value).iter().map(|place| format!("/{key}{place}")));
    };
    match document {
        Value::Object(object) => object.iter().for_each(|(key, value)| add(key, value)),
        Value::Array(items) => {
            let ends: BTreeSet<_> = [0, items.len().saturating_sub(1)].into();
            ends.iter()
                .filter_map(|&at| Some((at, items.get(at)?)))
                .for_each(|(at, item)| add(&at.to_string(), item));
        }
        _ => {}
    }
    found
}

#[test]
fn program_rejects_schema_violations() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let model = at("model.json");
    let rules = at("rules.json");
    let agree = |name: &str, file: &str, good: &str, damaged: &[&str]| {
        let schema = validator(&schema(name));
        for (text, is_good) in
            [(good, true)].into_iter().chain(damaged.iter().map(|text| (*text, false)))
        {
            fs::write(file, text).unwrap();
            assert_eq!(
                schema.is_valid(&serde_json::from_str(text).unwrap()),
                is_good,
                "{name}: {text}"
            );
            let planned = run(&["plan", &model, "--world-size", "2", "--rules", &rules]);
            assert_eq!(planned.status.code() == Some(2), !is_good, "plan with {name} {text}");
        }
        fs::write(file, good).unwrap();
    };
    fs::write(&rules, RULES).unwrap();
    agree(
        "manifest",
        &model,
        MANIFEST,
        &[
            r#"{"w": {"dtype": "F32"}}"#,
            r#"{"w": {"shape": [1]}}"#,
            r#"{"w": {"dtype": "F33", "shape": [1]}}"#,
            r#"{"w": {"dtype": "F32", "shape": [-1]}}"#,
            r#"{"w": 1}"#,
        ],
    );
    agree(
        "rules",
        &rules,
        RULES,
        &[
            "{}",
            r#"{"rules": [], "defualt": "replicate"}"#,
            r#"{"rules": [{"pattern": "h", "choice": "half"}]}"#,
            r#"{"rules": [{"pattern": "h", "choice": "replicate", "why": "small"}]}"#,
            r#"{"rules": [{"pattern": "h", "choice": {"full": {"row_ragged": {"rows": 0}}}}]}"#,
            r#"{"rules": [{"choice": "replicate"}]}"#,
        ],
    );
}

#[test]
fn schemas_are_valid_and_documented() {
    let written: BTreeSet<_> =
        FORMS.iter().map(|form| format!("{}.schema.json", form.name)).collect();
    let page = fs::read_to_string(folder().join("guide/formats.md")).unwrap();
    let files =
        fs::read_dir(folder().join("schemas")).unwrap().map(|entry| entry.unwrap().file_name());
    let files: BTreeSet<_> = files.map(|name| name.to_str().unwrap().to_owned()).collect();
    assert_eq!(files, written);
    for shared in ["cut", "flat", "parameter"] {
        assert_eq!(schema("plan-diff")["$defs"][shared], schema("plan")["$defs"][shared]);
    }
    for name in files {
        let mut schema = read(&folder().join("schemas").join(&name));
        jsonschema::meta::validate(&schema).unwrap_or_else(|fault| panic!("{name}: {fault}"));
        assert_eq!(schema["$schema"], "https://json-schema.org/draft/2020-12/schema", "{name}");
        assert!(schema["title"].is_string() && schema["description"].is_string(), "{name}");
        assert!(
            page.contains(&format!("](../schemas/{name})")),
            "{name} is not on the page of formats"
        );
        visit(&mut schema, &mut |object| {
            for (field, about) in
                object.get("properties").and_then(Value::as_object).into_iter().flatten()
            {
                assert!(
                    about["description"].is_string() || about["$ref"].is_string(),
                    "{name}: {field} has no description"
                );
            }
        });
    }
}
