//! `generate`: texts of models in folders, and rejected folders.

use std::{fs, path::Path};

use candle_core::{Device, safetensors};
use serde_json::{Value, json};

use crate::support::{
    file,
    finetune::ModelHome,
    golden, json, rejects, run,
    run::{Home, copy},
    text, words,
};

const PROMPT: [&str; 2] = ["--prompt", "When the fog came in"];

fn generate(folder: &str, more: &[&str]) -> Value {
    json(&[&["generate", folder], more].concat())
}

/// A copy of a model folder.
struct FolderCopy(tempfile::TempDir);

impl FolderCopy {
    fn new(model: &str) -> Self {
        let home = tempfile::tempdir().unwrap();
        copy(Path::new(&golden(model)), home.path());
        Self(home)
    }

    fn path(&self) -> &str {
        self.0.path().to_str().unwrap()
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> &Self {
        fs::write(self.0.path().join(name), content).unwrap();
        self
    }

    fn remove(&self, name: &str) -> &Self {
        fs::remove_file(self.0.path().join(name)).unwrap();
        self
    }

    /// Sets a field of a JSON file.
    fn set(&self, name: &str, field: &str, value: Value) -> &Self {
        let path = self.0.path().join(name);
        let mut content: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        content[field] = value;
        self.write(name, content.to_string())
    }

    /// Checks that `generate` fails with these words and a hint.
    fn is_rejected(&self, words: &[&str]) {
        let args = ["generate", self.path(), "--prompt", "a", "--max-tokens", "2"];
        rejects(&args, &[&["\nhint: "], words].concat());
    }
}

#[test]
fn prompts_keep_their_own_texts() {
    let llama = golden("llama");
    let prompts = ["3", "When the fog came in", "Two ships and a lamp"];
    let format = ["--format", "json"];
    let alone = prompts
        .map(|prompt| text(&[&["generate", &llama, "--prompt", prompt], &format[..]].concat()));
    let several = prompts.map(|prompt| ["--prompt", prompt]).concat();
    let together = [&["generate", &llama][..], &several, &format].concat();
    assert_eq!(text(&together), alone.concat());
    rejects(
        &[&together[..], &["--logits", "logits.safetensors"]].concat(),
        &["--logits takes one --prompt", "\nhint: "],
    );
}

#[test]
fn logits_cover_all_tokens() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("logits.safetensors");
    let more = ["--max-tokens", "16", "--ignore-eos", "--logits", file.to_str().unwrap()];
    let found = generate(&golden("llama"), &[&PROMPT[..], &more].concat());
    let logits = safetensors::load(file, &Device::Cpu).unwrap().remove("logits").unwrap();
    let ids = |field: &str| serde_json::from_value::<Vec<u32>>(found[field].clone()).unwrap();
    let prompt = ids("prompt_ids");
    let new = ids("ids");
    assert_eq!(logits.dims(), [prompt.len() + 16, 320]);
    let likeliest: Vec<u32> = logits.argmax(1).unwrap().to_vec1().unwrap();
    assert_eq!(likeliest[prompt.len() - 1..][..16], new);
    let nowhere = ["--logits", "no/such/folder/logits"];
    let failed = run(&[&["generate", &golden("llama")], &PROMPT[..], &nowhere].concat());
    let message = String::from_utf8(failed.stderr).unwrap();
    assert_eq!(failed.status.code(), Some(1), "{message}");
    assert!(message.contains("cannot write no/such/folder/logits"), "{message}");
}

#[test]
#[cfg(unix)]
fn logits_never_replace_model_files() {
    let copy = FolderCopy::new("llama");
    let weights = copy.0.path().join("model.safetensors");
    let before = fs::read(&weights).unwrap();
    let more = [&PROMPT[..], &["--max-tokens", "1", "--logits"]].concat();
    let weights_path = weights.to_str().unwrap();
    let new = format!("{}/a", copy.path());
    let home = tempfile::tempdir().unwrap();
    let link = home.path().join("link");
    std::os::unix::fs::symlink(&weights, &link).unwrap();
    for file in [weights_path, &new, link.to_str().unwrap()] {
        rejects(
            &[&["generate", copy.path()], &more[..], &[file]].concat(),
            &["--logits", "which the model is read from", "\nhint: "],
        );
    }
    assert!(fs::read(&weights).unwrap() == before);
    // Hard links keep the old content, since the file is replaced atomically.
    let file = home.path().join("logits");
    fs::write(&file, "old").unwrap();
    fs::hard_link(&file, home.path().join("other")).unwrap();
    generate(copy.path(), &[&more[..], &[file.to_str().unwrap()]].concat());
    assert!(safetensors::load(&file, &Device::Cpu).unwrap().contains_key("logits"));
    assert_eq!(fs::read(home.path().join("other")).unwrap(), b"old");
}

#[test]
fn sampling_is_reproducible_by_seed() {
    let drawn = |seed: &str| {
        let more = ["--temperature", "1.5", "--seed", seed, "--max-tokens", "12", "--ignore-eos"];
        generate(&golden("llama"), &[&PROMPT[..], &more].concat())["ids"].clone()
    };
    assert_eq!(drawn("1"), drawn("1"));
    assert_ne!(drawn("1"), drawn("2"));
    let llama = golden("llama");
    rejects(
        &["generate", &llama, "--prompt", "a", "--temperature", "0"],
        &["the temperature is 0, must be a finite number above 0", "\nhint: "],
    );
    rejects(&["generate", &llama, "--prompt", "a", "--seed", "1"], &["--temperature"]);
}

#[test]
fn chat_uses_the_chat_template() {
    let copy = FolderCopy::new("qwen2");
    let template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n\
                    {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    copy.write("chat_template.jinja", template);
    let more = ["--prompt", "Why?", "--chat", "--max-tokens", "3", "--ignore-eos"];
    let plain = generate(copy.path(), &more);
    let ids = plain["prompt_ids"].as_array().unwrap();
    // <|im_start|> is 318, <|im_end|> 319: the user's message, and the start of the answer.
    let marks: Vec<u64> =
        ids.iter().filter_map(Value::as_u64).filter(|id| (317..=319).contains(id)).collect();
    assert_eq!(marks, [318, 319, 318]);
    assert!(!plain["text"].as_str().unwrap().contains("Why?"), "the answer alone");
    let with_system = generate(copy.path(), &[&more[..], &["--system", "Be brief."]].concat());
    let longer = with_system["prompt_ids"].as_array().unwrap();
    assert!(longer.ends_with(ids) && longer.len() > ids.len());
    rejects(
        &[&["generate", &golden("qwen2")], &more[..]].concat(),
        &["has no chat template for messages", "\nhint: "],
    );
}

#[test]
fn incomplete_folders_are_rejected() {
    rejects(
        &["generate", "meta/llama", "--prompt", "a"],
        &["meta/llama is not a folder", "\nhint: ", "hf download"],
    );
    let (_dir, path) = file("mine.txt", "a text");
    rejects(&["generate", &path, "--prompt", "a"], &["mine.txt is not a folder", "\nhint: "]);
    let copy = FolderCopy::new("llama");
    copy.remove("config.json").is_rejected(&["config.json", "hf download"]);
    let copy = FolderCopy::new("llama");
    copy.remove("model.safetensors").write("pytorch_model.bin", "PK");
    copy.is_rejected(&["has weights only in pytorch_model.bin", "save_pretrained"]);
    copy.remove("pytorch_model.bin").is_rejected(&["has no model.safetensors and no"]);
    let copy = FolderCopy::new("llama");
    copy.remove("tokenizer.json").is_rejected(&["has no tokenizer.json", "AutoTokenizer"]);
    let copy = FolderCopy::new("mistral");
    copy.remove("model-00002-of-00002.safetensors");
    copy.is_rejected(&["model-00002-of-00002.safetensors: "]);
    let copy = FolderCopy::new("mistral");
    copy.set("model.safetensors.index.json", "weight_map", json!({"a": "../a.safetensors"}));
    copy.is_rejected(&["\"../a.safetensors\"", "not a plain file name"]);
    copy.set("model.safetensors.index.json", "weight_map", json!({}));
    copy.is_rejected(&["model.safetensors.index.json: 21 of 21 parameters are missing"]);
    let copy = FolderCopy::new("mistral");
    let shard = |n: u8| copy.0.path().join(format!("model-0000{n}-of-00002.safetensors"));
    let [first, mut second] = [1, 2].map(|n| safetensors::load(shard(n), &Device::Cpu).unwrap());
    second.insert("model.embed_tokens.weight".into(), first["model.embed_tokens.weight"].clone());
    safetensors::save(&second, shard(2)).unwrap();
    copy.is_rejected(&["model-00002-of", "model.embed_tokens.weight"]);
}

#[test]
fn mismatched_tokenizers_are_rejected() {
    // The library panics.
    let copy = FolderCopy::new("llama");
    let pieces = json!([
        {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    ]);
    let template = json!({
        "type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": {}
    });
    copy.set("tokenizer.json", "post_processor", template);
    copy.is_rejected(&["tokenizer.json: ", "the file is inconsistent"]);
    let copy = FolderCopy::new("llama");
    copy.write("chat_template.jinja", "{% for %}");
    let prompt = ["generate", copy.path(), "--prompt", "a", "--max-tokens", "1"];
    assert!(!text(&prompt).is_empty(), "a template that is not used may be anything");
    let chat = [&prompt[..], &["--chat"]].concat();
    rejects(&chat, &["chat_template.jinja: ", "\nhint: "]);
}

/// Options of a byte model that learns the lines of a text.
const LEARNS: &str = "--world-size 1 --hidden 64 --n-layers 1 --n-heads 2 --context 48 --max-tokens 512 \
                      --lr 0.01 --steps 60";

#[test]
fn byte_model_repeats_its_training_text() {
    let home = Home::new();
    let (data, run) = (home.path("text.txt"), home.path("run"));
    let train = ["train", "--data", &data, "--out", &run, "--prompt", "Line 12 of"];
    let printed = text(&[&train[..], &words(LEARNS)].concat());
    let line = text(&["generate", &run, "--prompt", "Line 12 of"]);
    assert_eq!(line, "Line 12 of a text to learn.\n");
    assert!(printed.ends_with(&format!("\n{line}")), "the sample of train: {printed}");
    let found = generate(&run, &["--prompt", "Line 7 of a", "--max-tokens", "20"]);
    assert_eq!(found["text"], "Line 7 of a text to learn.", "{found}");
    assert_eq!((&found["prompt_ids"], &found["stop"]), (&json!(b"Line 7 of a"), &json!("end")));
    rejects(&["generate", &run, "--prompt", "a", "--chat"], &["has no chat template", "\nhint: "]);
    rejects(&["generate", &run, "--prompt", ""], &["the prompt has no token", "\nhint: "]);
    fs::remove_dir_all(home.at("run/model")).unwrap();
    rejects(&["generate", &run, "--prompt", "a"], &["has not ended", "\nhint: "]);
}

#[test]
fn generate_accepts_runs_models_and_adapters() {
    let model = ModelHome::new();
    let learns = ["--steps", "4", "--lr", "0.01"];
    model.train("base", &[&learns[..], &["--init", "7"]].concat());
    let base = model.path("base/model");
    let prompt = ["--prompt", "3 and 1 is", "--max-tokens", "12", "--ignore-eos"];
    let whole = generate(&model.path("base"), &prompt);
    assert_eq!(generate(&base, &prompt), whole);

    let lora = ["--steps", "12", "--lr", "0.1", "--model", &base, "--lora", "4"];
    model.train("lora", &lora);
    model.train("merged", &[&lora[..], &["--merge"]].concat());
    let run = model.path("lora");
    let adapter = model.path("lora/adapter");
    let found = generate(&run, &prompt);
    assert_ne!(found["ids"], whole["ids"]);
    let others = [
        generate(&base, &[&prompt[..], &["--adapter", &adapter]].concat()),
        generate(&model.path("merged"), &prompt),
        generate(&model.path("merged/model"), &prompt),
    ];
    assert!(others.iter().all(|other| *other == found), "{found} {others:?}");

    rejects(&["generate", &adapter, "--prompt", "a"], &["holds adapters", "hint: ", "--adapter"]);
    // These models have more or other layers.
    for other in ["qwen2", "mistral"].map(golden) {
        let other = [&["generate", &other, "--adapter", &adapter][..], &prompt].concat();
        rejects(&other, &["\nhint: adapters are of one model"]);
    }
    let missing = [&["generate", &base, "--adapter", &base][..], &prompt].concat();
    rejects(&missing, &["adapter_config.json", "\nhint: "]);
    fs::rename(model.at("base"), model.at("moved")).unwrap();
    rejects(&["generate", &run, "--prompt", "a"], &["is not a folder", "hint: ", "--adapter"]);
    // Random weights exist nowhere else, so the model is written too.
    model.train("random", &["--steps", "1", "--init", "7", "--lora", "4"]);
    generate(&model.path("random"), &prompt);
    assert!(model.at("random/adapter").is_dir() && model.at("random/model").is_dir());
}

#[test]
fn train_sample_equals_generate_output() {
    let model = ModelHome::new();
    for (out, options, drawn) in [
        (
            "drawn",
            "--steps 2 --init 7 --seed 3 --prompt L --temperature 2",
            "--seed 3 --temperature 2",
        ),
        ("sharded", "--steps 2 --init 7 --strategy full --prompt L", ""),
    ] {
        let arguments = model.arguments(out, &words(options));
        let printed = text(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        let run = model.path(out);
        let drawn: Vec<&str> = drawn.split_whitespace().collect();
        let line = text(&[&["generate", &run, "--prompt", "L"], &drawn[..]].concat());
        assert!(printed.ends_with(&format!("\n{line}")), "{printed}{line}");
    }
}

#[test]
fn train_rejects_unusable_prompts_early() {
    let home = Home::new();
    let (data, run) = (home.path("text.txt"), home.path("run"));
    let train = ["train", "--data", &data, "--steps", "2", "--context", "384", "--out", &run];
    let long = "a".repeat(385);
    for (more, words) in [
        (&["--prompt", &long][..], "the prompt has 385 tokens, but the model has 384 positions"),
        (&["--prompt", ""], "the prompt has no token"),
        (
            &["--prompt", "a", "--temperature", "0"],
            "the temperature is 0, must be a finite number above 0",
        ),
        (&["--temperature", "1"], "--prompt"),
    ] {
        rejects(&[&train[..], more].concat(), &[words]);
        assert!(!home.at("run").exists(), "{words}");
    }
}
