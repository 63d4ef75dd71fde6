//! Runs every command of the guide, and compares its output with the page. Rust blocks run as
//! doctests of `tests/support`.

mod page;
mod transcript;

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use self::{
    page::{Block, Page},
    transcript::Shell,
};

/// The quick start, which newcomers follow from top to bottom.
const FIRST_PAGE: &str = "index.md";

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs")
}

/// Returns the paths of the pages in a folder of `docs`.
fn markdown_in(folder: &str) -> Vec<String> {
    let names = fs::read_dir(docs().join(folder)).unwrap().map(|entry| entry.unwrap().file_name());
    let names = names.filter_map(|name| name.to_str().map(|name| format!("{folder}{name}")));
    names
        .filter(|name| Path::new(name).extension().is_some_and(|extension| extension == "md"))
        .collect()
}

/// Reads the pages of the guide.
fn pages() -> Vec<Page> {
    let mut names = markdown_in("guide/");
    names.extend([FIRST_PAGE, "multi-node.md"].map(str::to_owned));
    names.sort();
    names
        .iter()
        .map(|name| Page::parse(name, &fs::read_to_string(docs().join(name)).unwrap()))
        .collect()
}

/// Runs the consoles and scripts of a page in order, in one folder.
fn run_blocks(page: &Page, shell: &Shell<'_>) {
    for block in &page.blocks {
        match &block.needs {
            Some(tool) if !shell.knows(tool) => {
                eprintln!("{}:{}: SKIPPED, {tool} is not installed", page.name, block.line);
            }
            _ if block.is_script() => {
                shell.run(&block.text, &format!("{}:{}", page.name, block.line));
            }
            _ if block.is_run() => transcript::parse(&block.text, block.figures_vary)
                .iter()
                .for_each(|entry| shell.check(entry, &format!("{}:{}", page.name, block.line))),
            _ => {}
        }
    }
}

#[test]
fn guide_transcripts_match_output() {
    for page in pages().iter().filter(|page| page.name != FIRST_PAGE) {
        let folder = tempfile::tempdir().unwrap();
        run_blocks(page, &Shell::new(folder.path()));
    }
}

/// Creates a folder with the files that the READMEs use: lengths, texts, a model header, and a run.
fn readme_folder() -> tempfile::TempDir {
    let home = tempfile::tempdir().unwrap();
    let write = |name: &str, content: &[u8]| fs::write(home.path().join(name), content).unwrap();
    let lengths: Vec<String> = (1..=500).map(|n| (n * 37 % 2000 + 1).to_string()).collect();
    write("lengths.txt", lengths.join(" ").as_bytes());
    fs::create_dir(home.path().join("docs")).unwrap();
    write("docs/text.txt", "A line of a text.\n\n".repeat(20).as_bytes());
    let header =
        r#"{"lm_head.weight": {"dtype": "F32", "shape": [64, 4], "data_offsets": [0, 1024]}}"#;
    let length = (header.len() as u64).to_le_bytes();
    write("model.safetensors", &[&length[..], header.as_bytes(), &[0; 1024]].concat());
    Shell::new(home.path())
        .run("candle-distributed train --data docs --steps 2 --out runs/0001", "a run");
    home
}

#[test]
fn readme_commands_run() {
    let root = docs().join("..");
    for name in ["README.md", "crates/candle-distributed-cli/README.md"] {
        let home = readme_folder();
        let page = Page::parse(name, &fs::read_to_string(root.join(name)).unwrap());
        let n_run = page.blocks.iter().filter(|block| block.is_run() || block.is_script()).count();
        assert!(n_run > 0, "{name}");
        run_blocks(&page, &Shell::new(home.path()));
    }
}

#[test]
fn readme_dependencies_exist() {
    let root = docs().join("..");
    let readme = Page::parse("README.md", &fs::read_to_string(root.join("README.md")).unwrap());
    let lines = readme.blocks.iter().filter(|block| block.kind == "toml");
    let lines = lines.flat_map(|block| block.text.lines()).filter(|line| line.contains("path = "));
    let mut n_found = 0;
    for line in lines {
        let quoted: Vec<&str> = line.split('"').skip(1).step_by(2).collect();
        let [path, features @ ..] = &quoted[..] else { panic!("{line}") };
        let manifest = root.join(path.trim_start_matches("candle-distributed/")).join("Cargo.toml");
        let manifest = fs::read_to_string(manifest).unwrap();
        let name = line.split(' ').next().unwrap();
        assert!(manifest.contains(&format!("name = \"{name}\"")), "{line}");
        for feature in features {
            assert!(manifest.contains(&format!("\n{feature} = [")), "{name} has no {feature}");
        }
        n_found += 1;
    }
    assert_eq!(n_found, 1);
}

/// Runs the quick start. CI itself runs the commands before it, `cargo run` and `cargo test`.
#[test]
fn first_page_works_from_start_to_end() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);

    let page = pages().into_iter().find(|page| page.name == FIRST_PAGE).unwrap();
    run_blocks(&page, &Shell::new(folder.path()));

    let steps = [
        "train ",
        "--resume",
        "report run",
        "plan model.json",
        "batch ",
        "sample --len 1000000000000",
    ];
    let script: String = page
        .blocks
        .iter()
        .filter(|block| block.is_run())
        .map(|block| block.text.as_str())
        .collect();
    let places: Vec<_> =
        steps.iter().map(|step| script.find(step).unwrap_or_else(|| panic!("no {step}"))).collect();
    assert!(places.is_sorted(), "{steps:?} come at {places:?}");

    // The run was interrupted, but no step is missing or repeated.
    let metrics = fs::read_to_string(at("run/metrics.jsonl")).unwrap();
    let steps = metrics
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["step"].as_u64());
    assert!(steps.eq((0..60).map(Some)), "{metrics}");
    assert!(at("run/model/model.safetensors").exists());
    assert!(fs::read_to_string(at("run/report.html")).unwrap().contains("</html>"));
}

#[test]
fn every_block_has_a_checked_kind() {
    for page in pages() {
        for Block { line, kind, is_ignored, reason, text, .. } in &page.blocks {
            let place = format!("{}:{line}", page.name);
            assert_eq!(*is_ignored, reason.is_some(), "{place}: an ignored block needs a reason");
            match kind.as_str() {
                "console" | "rust" | "text" => {}
                "json" => drop(serde_json::from_str::<serde_json::Value>(text).unwrap()),
                _ => assert!(is_ignored, "{place}: nothing checks a block of {kind:?}"),
            }
        }
    }
}

#[test]
fn rust_blocks_are_doctests() {
    let doctests = fs::read_to_string(docs().join("../tests/support/guide.rs")).unwrap();
    for page in pages().iter().filter(|page| page.blocks.iter().any(|block| block.kind == "rust")) {
        assert!(
            doctests.contains(&format!("/docs/{}\"", page.name)),
            "{} is not in tests/support/guide.rs",
            page.name
        );
    }
}

#[test]
fn pages_are_listed_and_links_valid() {
    let contents = fs::read_to_string(docs().join("SUMMARY.md")).unwrap();
    let listed: BTreeSet<_> = page::links(&contents).map(str::to_owned).collect();
    let mut existing: BTreeSet<String> =
        ["", "adr/", "guide/"].into_iter().flat_map(markdown_in).collect();
    existing.remove("SUMMARY.md");
    assert_eq!(listed, existing);
    for name in &listed {
        let text = fs::read_to_string(docs().join(name)).unwrap();
        let folder = Path::new(name).parent().unwrap();
        for link in page::links(&text).filter(|link| !link.contains("://")) {
            let target = folder.join(link.split('#').next().unwrap());
            let file = docs().join(&target);
            assert!(link.starts_with('#') || file.exists(), "{name}: no {link}");
            let inside = file.canonicalize().unwrap().starts_with(docs().canonicalize().unwrap());
            assert!(inside, "{name}: {link} leads out of the book");
        }
    }
}
