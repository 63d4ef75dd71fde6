//! `train --model`: fine-tunes the model of a folder into another folder.

use std::fs;

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Value, json};

use crate::support::{
    command,
    finetune::{ModelHome, config, files, tensors},
    golden, rejects, rejects_each,
    run::{replace, said},
    text, words,
};

#[test]
fn fine_tuning_writes_a_model_folder() {
    let model = ModelHome::new();
    let learns = ["--steps", "24", "--lr", "0.01"];
    model.train("first", &[&learns[..], &["--init", "7"]].concat());
    let losses = model.losses("first");
    assert!(losses[23] < 0.8 * losses[0], "{losses:?}");

    let folder = files(&model.at("first/model"));
    let names: Vec<&str> = folder.keys().map(String::as_str).collect();
    let expected = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];
    assert_eq!(names, expected);
    assert_eq!(folder["config.json"], fs::read(model.at("new/config.json")).unwrap());
    let found = tensors(&model.at("first/model/model.safetensors"));
    assert_eq!(found.len(), 2 * 9 + 3);
    assert!(found.values().all(|&dtype| dtype == Dtype::F32));

    // Another run starts from the result.
    let ended = model.path("first/model");
    model.train("second", &["--steps", "1", "--model", &ended]);
    assert!(model.losses("second")[0] < 0.8 * losses[0]);
    let report = model.path("first");
    text(&["report", &report]);
    let page = fs::read_to_string(model.at("first/report.html")).unwrap();
    assert!(page.contains("model.layers.1.mlp.gate_proj.weight"));
}

#[path = "../../../finetune/examples/finetune_folder.rs"]
#[expect(dead_code, reason = "its `main` reads the arguments of a program")]
mod finetune_folder;

#[test]
fn the_library_writes_the_same_weights() {
    let home = tempfile::tempdir().unwrap();
    let at = |name: &str| home.path().join(name);
    let [data, program, library] =
        ["data.jsonl", "program", "library"].map(|name| at(name).to_str().unwrap().to_owned());
    let lines: Vec<String> = (0..20).map(|n| format!("\"{n} and {}\"\n", n + 1)).collect();
    fs::write(&data, lines.concat()).unwrap();
    let model = golden("llama");
    finetune_folder::finetune_folder(model.as_ref(), data.as_ref(), library.as_ref()).unwrap();
    let options = "--steps 40 --batch-size 2 --validation 0.2 --validate-every 10 --lr 0.001 \
                   --strategy full --no-sample";
    let named = ["train", "--model", &model, "--data", &data, "--out", &program];
    text(&[&named[..], &words(options)].concat());
    for folder in ["model", "best"] {
        let [expected, found] = ["program", "library"].map(|run| files(&at(run).join(folder)));
        assert!(found == expected, "{folder}");
    }
}

#[test]
fn weighted_texts_are_mixed() {
    let home = tempfile::tempdir().unwrap();
    let lines: Vec<String> = (0..20).map(|n| format!("\"{n} and {}\"\n", n + 1)).collect();
    let [chats, stories] = ["chats.jsonl", "stories.txt"].map(|name| home.path().join(name));
    fs::write(&chats, lines.concat()).unwrap();
    fs::write(&stories, lines[..5].join("\n")).unwrap();
    let [chats, stories] = [chats, stories].map(|path| path.to_str().unwrap().to_owned());
    let weighted = format!("{chats}:7");
    let mut train = vec!["train", "--data", &weighted, "--data", &stories, "--dry-run"];
    train.extend(words("--n-layers 1 --hidden 16 --n-heads 2"));
    let predicted = text(&train);
    let mixture = format!("texts from epoch 0 on: {weighted}, {stories}:1\n");
    assert!(predicted.starts_with(&mixture), "{predicted}");
    rejects(&["train", "--data", "no-such-text:0"], &["weight is 0, must be 1 to 1048576"]);
    let too_fine = format!("{stories}:1048576");
    train[4] = &too_fine;
    rejects(&train, &["cycle of 1048583 entries"]);
}

#[test]
fn bf16_models_are_saved_as_bf16() {
    let model = ModelHome::new();
    model.train("parts", &words("--steps 1 --init 1 --dtype bf16 --strategy full"));
    let found = tensors(&model.at("parts/model/model.safetensors"));
    assert!(found.values().all(|&dtype| dtype == Dtype::BF16));
    let config: Value =
        serde_json::from_slice(&fs::read(model.at("parts/model/config.json")).unwrap()).unwrap();
    assert_eq!(config["torch_dtype"], "bfloat16");
}

/// Runs of other kinds are killed in the hunts.
#[test]
fn resumed_run_is_bit_identical() {
    let model = ModelHome::new();
    let packed = "--steps 10 --init 3 --validation 0.5 --rows packed --strategy full";
    model.train("run", &words(packed));
    let at = |name: &str| model.at(&format!("run/{name}"));
    let results = || {
        let lines = ["loss", "grad_norm"].map(|field| model.numbers("run/metrics.jsonl", field));
        let folders = ["model", "best"].map(|name| files(&at(name)));
        (lines, folders, fs::read_to_string(at("validation.jsonl")).unwrap())
    };
    let before = results();
    assert_eq!(before.2.lines().count(), 3);
    fs::remove_dir_all(at("model")).unwrap();
    let out = model.path("run");
    let resumed =
        ["train", "--resume", "--out", &out, "--checkpoint-every", "4", "--strategy", "full"];
    text(&resumed);
    assert!(results() == before);
    assert!(text(&resumed).contains("is complete"));
}

#[test]
fn packed_losses_equal_padded_losses() {
    let model = ModelHome::new();
    // All texts are in one step.
    let padded = ["--steps", "3", "--init", "3", "--batch-size", "16"];
    model.train("padded", &padded);
    model.train("packed", &words("--steps 3 --init 3 --rows packed --batch-size 8 --world-size 3"));
    for field in ["sequences", "real_tokens", "weight"] {
        let [padded, packed] =
            ["padded", "packed"].map(|run| model.numbers(&format!("{run}/metrics.jsonl"), field));
        assert_eq!(padded, packed, "{field}");
    }
    let padded = model.losses("padded");
    let packed = model.losses("packed");
    for (padded, packed) in padded.iter().zip(&packed) {
        assert!((padded - packed).abs() < 1e-5, "{padded}, {packed}");
    }
    text(&["report", &model.path("packed")]);
    let page = fs::read_to_string(model.at("packed/report.html")).unwrap();
    assert!(page.contains("Sequences packed into rows"));
    let tokens = |run: &str| model.numbers(&format!("{run}/metrics.jsonl"), "padded_tokens")[0];
    assert!(tokens("packed") < tokens("padded"));
}

#[test]
fn held_out_examples_are_not_trained() {
    let model = ModelHome::new();
    let options = ["--steps", "8", "--init", "3", "--lr", "0.01", "--batch-size", "4"];
    model.train("run", &[&options[..], &["--validation", "0.25"]].concat());
    let sequences = model.numbers("run/metrics.jsonl", "sequences");
    let epochs = model.numbers("run/metrics.jsonl", "epoch");
    let in_first = sequences.iter().zip(&epochs).filter(|(_, epoch)| **epoch < 1.);
    let in_first: Vec<f64> = in_first.map(|(sequences, _)| *sequences).collect();
    assert_eq!(in_first, [4., 4., 4.]);
    let steps = model.numbers("run/validation.jsonl", "step");
    assert_eq!(steps, [4., 8.]);
    let losses = model.numbers("run/validation.jsonl", "loss");
    // The best model is the last model here.
    assert!(losses[1] < losses[0], "{losses:?}");
    assert_eq!(files(&model.at("run/best")), files(&model.at("run/model")));
    text(&["report", &model.path("run")]);
    let page = fs::read_to_string(model.at("run/report.html")).unwrap();
    for words in ["loss of held-out examples", "lowest after step 8"] {
        assert!(page.contains(words), "{words}");
    }
    // Another validation changes nothing.
    model.train(
        "often",
        &[&options[..], &["--validation", "0.25", "--validate-every", "3"]].concat(),
    );
    assert_eq!(model.losses("often"), model.losses("run"));

    let mut small = model.arguments("small", &["--init", "3", "--validation", "0.1"]);
    small.extend(["--steps", "1"].map(str::to_owned));
    let small: Vec<&str> = small.iter().map(String::as_str).collect();
    rejects(&small, &["are held out, fewer than one step (96)", "hint: a larger --validation"]);
}

#[test]
fn nan_loss_is_never_best() {
    let model = ModelHome::new();
    let options = ["--steps", "4", "--init", "3", "--lr", "1e39", "--allow-non-finite"];
    model.train("run", &[&options[..], &["--validation", "0.5", "--no-sample"]].concat());
    let found = fs::read_to_string(model.at("run/validation.jsonl")).unwrap();
    assert!(found.contains("\"loss\":null"), "{found}");
    assert!(!model.at("run/best").exists());
    text(&["report", &model.path("run")]);
}

#[test]
fn a_failed_drawing_does_not_hide_the_cause() {
    let model = ModelHome::new();
    // A folder is not replaced.
    fs::create_dir_all(model.at("run/loss.svg")).unwrap();
    let arguments = model.arguments("run", &words("--steps 4 --init 3 --lr 1e39 --no-sample"));
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let ended = command(&arguments).output().unwrap();
    let said = said(&ended);
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(said.contains("warning: cannot draw loss.svg: "), "{said}");
    assert!(said.contains("error: step 2 of 4 failed on batch"), "{said}");
}

#[test]
fn adapters_have_peft_format() {
    let model = ModelHome::new();
    model.train("base", &["--steps", "4", "--init", "3"]);
    let base = model.path("base/model");
    let lora = ["--steps", "4", "--model", &base, "--lora", "2"];
    model.train("lora", &lora);
    let adapter = files(&model.at("lora/adapter"));
    let names: Vec<&str> = adapter.keys().map(String::as_str).collect();
    let expected = [
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ];
    assert_eq!(names, expected);
    assert!(!model.at("lora/model").exists());
    let found = tensors(&model.at("lora/adapter/adapter_model.safetensors"));
    assert_eq!(found.len(), 2 * 2 * 2);
    let described: Value = serde_json::from_slice(&adapter["adapter_config.json"]).unwrap();
    assert_eq!(described["target_modules"], json!(["q_proj", "v_proj"]));

    let on = ["--lora-on", "o_proj,mlp.up_proj", "--merge", "--strategy", "full"];
    model.train("merged", &[&lora[..], &on].concat());
    let found = tensors(&model.at("merged/adapter/adapter_model.safetensors"));
    assert!(found.keys().all(|name| name.contains("o_proj") || name.contains("mlp.up_proj")));
    let merged = model.at("merged/model/model.safetensors");
    assert_eq!(tensors(&merged), tensors(&model.at("base/model/model.safetensors")));
    let ended = model.path("merged/model");
    model.train("next", &["--steps", "1", "--model", &ended]);

    let unmatched = [&lora[..], &["--lora-on", "q_proj,query"]].concat();
    is_rejected(
        &model,
        &unmatched,
        &["no linear layer of the model is named query", "hint: --lora-on"],
    );
    is_rejected(
        &model,
        &[&lora[..], &["--lora-on", "embed_tokens"]].concat(),
        &["model.embed_tokens cannot have an adapter: it is an embedding", "hint: --lora-on"],
    );
}

#[test]
fn adapters_resume_and_shard() {
    let model = ModelHome::new();
    model.train("base", &["--steps", "4", "--init", "3"]);
    let base = model.path("base");
    let lora = ["--steps", "6", "--model", &base, "--lora", "4", "--lora-alpha", "4"];
    model.train("whole", &lora);
    let found = model.losses("whole");
    // The first loss is the loss of the model, since B starts at zero.
    model.train("all", &["--steps", "1", "--model", &base]);
    assert_eq!(model.losses("all"), found[..1]);
    let adapter = files(&model.at("whole/adapter"));
    fs::remove_dir_all(model.at("whole/adapter")).unwrap();
    let out = model.path("whole");
    rejects(&resume(&out, &["--lora", "2"]), &["with --lora 4"]);
    text(&resume(&out, &["--strategy", "full"]));
    assert!(files(&model.at("whole/adapter")) == adapter);
    text(&["report", &out]);
    let page = fs::read_to_string(model.at("whole/report.html")).unwrap();
    assert!(page.contains("lora") && page.contains("started from"), "{page}");
    // A run that trained only adapters has no model.
    is_rejected(&model, &["--model", &out], &["holds adapters, but not their model"]);
}

#[test]
fn adapters_without_model_are_rejected() {
    rejects(&["train", "--lora", "2"], &["adapters of rank 2 need a model", "hint: --model"]);
    rejects(&["train", "--lora-alpha", "2"], &["--lora"]);
    let model = ModelHome::new();
    let base = model.path("new");
    let data = model.path("texts");
    let train = ["train", "--model", &base, "--data", &data, "--init", "1", "--lora"];
    for (options, words) in [
        (&["0"][..], "the rank of adapters is 0"),
        (&["1", "--lora-alpha", "0"], "the alpha of adapters is 0"),
    ] {
        rejects(&[&train[..], options].concat(), &[words]);
    }
}

/// Checks that a run is rejected with these words before anything is written.
fn is_rejected(model: &ModelHome, options: &[&str], words: &[&str]) {
    let arguments = model.arguments("rejected", options);
    rejects(&arguments.iter().map(String::as_str).collect::<Vec<_>>(), words);
    assert!(!model.at("rejected").exists(), "{options:?}");
}

#[test]
fn untrainable_models_are_rejected_by_name() {
    let model = ModelHome::new();
    is_rejected(&model, &[], &["has no model.safetensors", "hint: --init SEED of train"]);
    let init = ["--init", "3"];
    for (options, parts) in [
        ("--context 49", "--context is 49, must be 2 to 48"),
        ("--max-tokens 25", "--max-tokens is 25, must be at least 26"),
        ("--batch-size 0", "--batch-size is 0"),
        (
            "--rows packed --batch-size 3 --accumulate 2",
            "--batch-size is 3, must be 2, the packed rows of the micro-batches of a step",
        ),
        ("--lr 0", "--lr is 0"),
        ("--validation 1", "a fraction 1 of 16 examples is 16"),
        ("--n-layers 3", "--n-layers|cannot be used with"),
        ("--context 12", "more than the context of 12|--overlong truncate"),
    ] {
        let parts: Vec<&str> = parts.split('|').collect();
        is_rejected(&model, &[&init[..], &words(options)].concat(), &parts);
    }
    let new = model.path("new");
    rejects(&["train", "--model", &new, "--init", "3"], &["--model needs --data"]);

    let changed = |field: &str, value: Value| {
        let mut config = config();
        config[field] = value;
        fs::write(model.at("new/config.json"), config.to_string()).unwrap();
    };
    changed("architectures", json!(["GPT2LMHeadModel"]));
    is_rejected(&model, &init, &["architectures is", "GPT2LMHeadModel", "config.json"]);
    changed("rope_scaling", json!({"rope_type": "dynamic", "factor": 2.0}));
    is_rejected(&model, &init, &["rope_scaling.type is dynamic"]);
    changed("quantization_config", json!({"bits": 4}));
    is_rejected(&model, &init, &["quantized"]);
}

#[test]
fn tied_head_may_be_stored() {
    let model = ModelHome::new();
    let mut tied = config();
    tied["tie_word_embeddings"] = json!(true);
    fs::write(model.at("new/config.json"), tied.to_string()).unwrap();
    model.train("base", &["--steps", "1", "--init", "3"]);
    let file = model.at("base/model/model.safetensors");
    let bytes = fs::read(&file).unwrap();
    let weights = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors = weights.tensors();
    let head = weights.tensor("model.embed_tokens.weight").unwrap();
    tensors.push(("lm_head.weight".to_owned(), head));
    fs::write(&file, safetensors::serialize(tensors, None).unwrap()).unwrap();
    let base = model.path("base/model");
    model.train("next", &["--steps", "1", "--model", &base]);
    model.train("parts", &["--steps", "1", "--model", &base, "--strategy", "full"]);
    let generate = ["generate", &base, "--prompt", "a", "--max-tokens", "1"];
    text(&generate);

    // Another head would be ignored.
    let weights = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors = weights.tensors();
    let embedding = weights.tensor("model.embed_tokens.weight").unwrap();
    let other = [&embedding.data()[4..], &[0; 4]].concat();
    let other = TensorView::new(Dtype::F32, embedding.shape().to_vec(), &other).unwrap();
    tensors.push(("lm_head.weight".to_owned(), other));
    fs::write(&file, safetensors::serialize(tensors, None).unwrap()).unwrap();
    let refusal =
        ["lm_head.weight is another matrix", "hint: set \"tie_word_embeddings\" to false"];
    rejects(&generate, &refusal);
    is_rejected(&model, &["--steps", "1", "--model", &base], &refusal);
}

#[test]
fn failed_sample_does_not_fail_run() {
    let model = ModelHome::new();
    let run = |out: &str, more: &[&str]| {
        let more = [&["--steps", "1", "--init", "3"][..], more].concat();
        let arguments = model.arguments(out, &more);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let run = command(&arguments).output().unwrap();
        assert!(run.status.success(), "{}", said(&run));
        assert!(model.at(out).join("model/config.json").exists());
        String::from_utf8(run.stdout.clone()).unwrap() + &said(&run)
    };
    assert!(run("usual", &[]).contains("the model writes:"));
    assert!(model.at("usual/sample.txt").is_file());
    assert!(!run("silent", &["--no-sample"]).contains("the model writes"));
    assert!(!model.at("silent/sample.txt").exists());
    // A folder is not replaced.
    fs::create_dir_all(model.at("taken/sample.txt")).unwrap();
    assert!(run("taken", &[]).contains("cannot generate a sample: "));
}

#[test]
fn resume_requires_same_model_and_options() {
    let model = ModelHome::new();
    model.train("run", &["--steps", "8", "--init", "3"]);
    fs::remove_dir_all(model.at("run/model")).unwrap();
    let out = model.path("run");
    let new = model.path("new");
    rejects_each(
        &resume(&out, &["--model", &new]),
        &[
            ("--init 4", "the run started with --init 3"),
            ("--rows packed", "the run started with --rows padded"),
        ],
    );
    rejects(&resume(&out, &["--hidden", "32"]), &["the run started without --hidden"]);
    let config = model.at("new/config.json");
    replace(config.clone(), "\"rms_norm_eps\":1e-6", "\"rms_norm_eps\":1e-5");
    rejects(
        &resume(&out, &[]),
        &["is not the model that the run started with", "hint: give --model"],
    );
    replace(config, "\"rms_norm_eps\":1e-5", "\"rms_norm_eps\":1e-6");
    // The folder may have moved.
    fs::rename(model.at("new"), model.at("moved")).unwrap();
    let moved = model.path("moved");
    let resumed = command(&resume(&out, &["--model", &moved])).output().unwrap();
    assert!(resumed.status.success(), "{}", said(&resumed));
}

#[test]
fn default_context_fits_the_texts() {
    let model = ModelHome::new();
    let config = model.at("new/config.json");
    replace(config, "\"max_position_embeddings\":48", "\"max_position_embeddings\":32768");
    let (new, texts) = (model.path("new"), model.path("texts"));
    for (rows, context) in [("padded", 26), ("packed", 2048)] {
        let out = model.path(rows);
        let train = ["train", "--model", &new, "--data", &texts, "--init", "3", "--steps", "1"];
        text(&[&train[..], &["--rows", rows, "--out", &out]].concat());
        let run = fs::read(model.at(&format!("{rows}/run.json"))).unwrap();
        let run: Value = serde_json::from_slice(&run).unwrap();
        assert_eq!(
            (&run["finetune"]["context"], &run["max_tokens"]),
            (&json!(context), &json!(4096))
        );
    }
}

#[test]
fn extra_files_in_model_folder_are_allowed() {
    let model = ModelHome::new();
    model.train("run", &["--steps", "1", "--init", "3"]);
    let at = |name: &str| model.at(&format!("run/model/{name}"));
    fs::write(at("README.md"), "What it learnt.").unwrap();
    fs::create_dir(at("notes")).unwrap();
    let out = model.path("run");
    assert!(text(&resume(&out, &[])).contains("is complete"));
    replace(at("config.json"), "\"vocab_size\":260", "\"vocab_size\":261");
    let resumed = command(&resume(&out, &[])).output().unwrap();
    let fault = "does not complete the run: it is not as the run wrote it";
    assert!(resumed.status.success() && said(&resumed).contains(fault), "{}", said(&resumed));
}

fn resume<'a>(out: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["train", "--resume", "--out", out][..], more].concat()
}

#[test]
fn files_without_examples_cause_warnings() {
    let model = ModelHome::new();
    fs::write(model.at("texts/README.md"), "About it.").unwrap();
    fs::write(model.at("texts/picture"), b"\xff").unwrap();
    let arguments = model.arguments("run", &["--init", "1", "--steps", "1"]);
    let output =
        command(&arguments.iter().map(String::as_str).collect::<Vec<_>>()).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    assert!(said.contains("warning: 1 file of --data cannot be read as UTF-8: skipped"), "{said}");
    assert!(
        said.contains("warning: --data has 1 file of plain text beside .jsonl files"),
        "{said}"
    );
}
