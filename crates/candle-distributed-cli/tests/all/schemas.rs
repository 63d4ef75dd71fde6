//! `docs/schemas` describe what the program writes and reads: its real outputs hold, damaged ones
//! do not.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use candle_distributed::{
    plan::{
        ElemType, ParameterInfo,
        strategy::{Full, Layout, ShardingStrategy},
    },
    types::WorldSize,
};
use jsonschema::Validator;
use serde_json::{Value, json};

use crate::support::{file, finetune::Model, golden, json, run, text, words};

/// A schema, and what the program really writes of its form.
struct Form {
    name: &'static str,
    documents: Vec<Value>,
    /// Where anything may stand, as JSON pointers.
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

/// The schema with no room for fields that it does not name. Outputs may grow, but not without
/// their schema.
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
            // A field of the name `properties` would be described within another `properties`;
            // there is none.
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

/// Every form, with outputs that have all of its fields between them.
fn forms() -> Vec<Form> {
    let dir = tempfile::tempdir().unwrap();
    let mut forms =
        vec![samples(dir.path()), batches(), batch_states(dir.path()), written(), mesh()];
    forms.extend(plans(dir.path()));
    forms.extend(run_of(dir.path()));
    forms
}

fn samples(dir: &Path) -> Form {
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
    Form { name: "sample", documents, free: &[] }
}

fn batches() -> Form {
    let (_dir, lengths) = file("lengths.txt", "12 80 15 70 9");
    let batch = |more: &[&str]| json(&[&["batch", "--lengths", &lengths], more].concat());
    let ranks = ["--strategy", "sorted", "--max-tokens", "100", "--world-size", "2", "--rank", "1"];
    let lines = |more: &[&str]| {
        text(&[&["batch", "--lengths", &lengths, "--format", "jsonl"], more].concat())
    };
    let [alone, of_rank] = [lines(&["--strategy", "pack", "--capacity", "100"]), lines(&ranks)];
    let lines = alone.lines().chain(of_rank.lines());
    let mut documents = vec![
        batch(&["--strategy", "bucket", "--max-tokens", "160"]),
        batch(&["--strategy", "pack", "--capacity", "100"]),
        batch(&ranks),
        batch(&words(
            "--strategy pad-to-max --max-batch-size 9 --max-sequence-length 5 --overlong skip",
        )),
    ];
    documents.extend(lines.map(|line| serde_json::from_str::<Value>(line).unwrap()));
    Form { name: "batch", documents, free: &[] }
}

fn mesh() -> Form {
    let documents =
        vec![json(&words("mesh --axis data=2 --axis model=2 --bytes 64 --repetitions 1"))];
    Form {
        name: "mesh",
        documents,
        free: &["/threads/CANDLE_NUM_THREADS", "/threads/RAYON_NUM_THREADS"],
    }
}

fn written() -> Form {
    let llama = golden("llama");
    let generate = |more: &[&str]| json(&[&["generate", &llama], more].concat());
    let documents = vec![
        generate(&["--prompt", "When the fog came in", "--max-tokens", "3"]),
        generate(&["--prompt", "", "--max-tokens", "400", "--ignore-eos"]),
    ];
    Form { name: "generate", documents, free: &[] }
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

fn plans(dir: &Path) -> [Form; 4] {
    let at = |name: &str| dir.join(name).to_str().unwrap().to_owned();
    let (model, rules, old) = (at("model.json"), at("rules.json"), at("old.json"));
    fs::write(&model, MANIFEST).unwrap();
    fs::write(&rules, RULES).unwrap();
    let plan = |more: &[&str]| json(&[&["plan", &model], more].concat());
    let plans = vec![
        plan(&words("--world-size 4 --rank 1 --budget 1KiB --links h100 --stay-gathered h.1")),
        plan(&words("--world-size 4 --runtime candle --tokens 9 --width 8 --slots 2")),
        plan(&["--world-size", "4", "--replicas", "2", "--layout", "flat"]),
        plan(&["--world-size", "4", "--layout", "flat-aligned"]),
        plan(&["--world-size", "4", "--layout", "row-ragged"]),
        plan(&["--world-size", "3", "--strategy", "layer-wise"]),
        plan(&["--world-size", "3", "--strategy", "whole-tensor", "--rank", "2"]),
        plan(&["--world-size", "3", "--rules", &rules]),
        resized(),
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
    [
        Form { name: "plan", documents: plans, free: &[] },
        // It describes parameters in the same words.
        Form { name: "plan-diff", documents: differences, free: &[] },
        Form { name: "rules", documents: vec![serde_json::from_str(RULES).unwrap()], free: &[] },
        Form {
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

/// A resized plan, which remembers what each rank kept; only a Rust program makes one.
fn resized() -> Value {
    let parameters = [ParameterInfo::new("fc.weight", [12, 4], ElemType::F32).unwrap()];
    let four = Full::new(Layout::RowRagged { rows: 1 })
        .plan(&parameters, WorldSize::new(4).unwrap())
        .unwrap();
    serde_json::to_value(four.resized(WorldSize::new(3).unwrap()).unwrap()).unwrap()
}

/// States of the batches of a rank.
fn batch_states(dir: &Path) -> Form {
    let (_dir, lengths) = file("lengths.txt", "12 80 15 70 9");
    let state = dir.join("batches.json").to_str().unwrap().to_owned();
    let batch = |more: &[&str]| {
        let args = ["batch", "--lengths", &lengths, "--max-tokens", "100", "--world-size", "2"];
        let rest = ["--rank", "1", "--count", "1", "--save-state", &state, "--strategy"];
        text(&[&args[..], &rest, more].concat());
        read(Path::new(&state))
    };
    let documents = vec![batch(&["sorted"]), batch(&["dynamic", "--shuffle", "--epoch", "7"])];
    Form { name: "batch-state", documents, free: &[] }
}

/// The settings of runs that fine-tune, and what their validations have found.
fn finetuned(dir: &Path) -> (Vec<Value>, Vec<Value>) {
    let model = Model::new();
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
                "--model",
                first.join("model").to_str().unwrap(),
                "--lora",
                "2",
                "--lora-on",
                "q_proj",
                "--merge",
                "--rows",
                "packed",
                "--max-tokens",
                "64",
            ],
        ),
    ];
    let found = fs::read_to_string(first.join("validation.jsonl")).unwrap();
    (settings, found.lines().map(|line| serde_json::from_str(line).unwrap()).collect())
}

/// The files that are written: states of samplers, and the folder of a run.
fn run_of(dir: &Path) -> [Form; 5] {
    let at = |name: &str| dir.join(name).to_str().unwrap().to_owned();
    let (state, data, out) = (at("state.json"), at("text.txt"), at("run"));
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
    let adapted = ["--lora", "2", "--lora-alpha", "3", "--dtype", "bf16"];
    text(&[&train[..], &sharded, &learns, &clipped, &adapted].concat());
    let run = Path::new(&out);
    let metrics = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let mut checkpoints: Vec<_> = fs::read_dir(run.join("checkpoints"))
        .unwrap()
        .map(|entry| entry.unwrap().path().join("index.json"))
        .filter(|index| index.exists())
        .collect();
    checkpoints.sort();
    let mut of_own_text = read(&run.join("run.json"));
    of_own_text["data"] = Value::Null;
    of_own_text["allow_non_finite"] = true.into();
    of_own_text["sessions"][0]["sharding"]["optimizer_in_backward"] = true.into();
    let (mut runs, validations) = finetuned(dir);
    runs.extend([read(&run.join("run.json")), of_own_text]);
    let indices: Vec<_> = checkpoints.iter().map(|path| read(path)).collect();
    [
        Form { name: "sampler-state", documents: states, free: &[] },
        Form { name: "run", documents: runs, free: &["/finetune/config"] },
        Form { name: "validation", documents: validations, free: &[] },
        Form {
            name: "metrics",
            documents: metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect(),
            free: &[],
        },
        Form { name: "checkpoint-index", documents: indices, free: &["/state"] },
    ]
}

#[test]
fn outputs_match_their_schemas() {
    for Form { name, documents, .. } in forms() {
        let (open, closed) = (validator(&schema(name)), validator(&closed(schema(name))));
        assert!(!documents.is_empty(), "{name}");
        for document in documents {
            for (validator, kind) in [(&open, "open"), (&closed, "closed")] {
                let faults: Vec<_> =
                    validator.iter_errors(&document).map(|fault| fault.to_string()).collect();
                assert!(faults.is_empty(), "{name}, {kind}: {faults:?} in {document}");
            }
        }
    }
}

#[test]
fn every_schema_field_has_an_example() {
    for Form { name, documents, .. } in forms() {
        let mut written = BTreeSet::new();
        for mut document in documents {
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
    for Form { name, documents, free } in forms() {
        let (schema, closed) = (schema(name), closed(schema(name)));
        let (open, closed) = (validator(&schema), validator(&closed));
        let is_free = |place: &str| {
            free.iter().any(|free| place == *free || place.starts_with(&format!("{free}/")))
        };
        for document in documents {
            for place in places(&document).iter().filter(|place| !is_free(place)) {
                let original = document.pointer(place).unwrap();
                for damage in [
                    json!({ "no": "such thing" }),
                    json!([["x"]]),
                    json!(-1.5),
                    json!(true),
                    json!("\u{1}"),
                ] {
                    // Of the same type it may be another value that is as good.
                    let same_type =
                        std::mem::discriminant(original) == std::mem::discriminant(&damage);
                    if same_type || (original.is_null() && !damage.is_object()) {
                        continue;
                    }
                    let mut damaged = document.clone();
                    *damaged.pointer_mut(place).unwrap() = damage;
                    assert!(!open.is_valid(&damaged), "{name}{place}: accepted in {damaged}");
                }
                // An entry of a manifest may have any other field, as headers of safetensors files
                // do; groups of variables may have any names.
                let any_field = name == "manifest" || place.ends_with("/learning_rates");
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

/// Whether an object of this form always has the field.
fn is_required(schema: &Value, field: &str) -> bool {
    let alternatives = schema["anyOf"].as_array().map_or_else(Vec::new, Clone::clone);
    let mut of_this = alternatives
        .iter()
        .map(|one| &schema["$defs"][&one["$ref"].as_str().unwrap()["#/$defs/".len()..]]);
    let requires = |schema: &Value| {
        schema["required"].as_array().is_some_and(|fields| fields.contains(&json!(field)))
    };
    requires(schema) || of_this.any(requires)
}

/// Where values stand in a document, as JSON pointers: all of its objects, the first and last items
/// of its arrays.
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
    let (model, rules) = (at("model.json"), at("rules.json"));
    let plan_fails =
        || run(&["plan", &model, "--world-size", "2", "--rules", &rules]).status.code() == Some(2);
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
            assert_eq!(plan_fails(), !is_good, "plan with {name} {text}");
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
        forms().iter().map(|form| format!("{}.schema.json", form.name)).collect();
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
                    "{name}: what is {field}?"
                );
            }
        });
    }
}
