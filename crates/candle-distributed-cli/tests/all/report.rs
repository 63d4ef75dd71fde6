//! The page of `report`: its content, and well-formed HTML.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::support::{file, rejects, text};

const SECTIONS: [&str; 7] =
    ["summary", "settings", "sample", "training", "plan", "batches", "coverage"];

/// Trains a few steps on this text, in the folder `run` of a temporary folder.
fn run_on(text_to_learn: &str) -> (tempfile::TempDir, PathBuf) {
    let (dir, data) = file("text <&>.txt", text_to_learn);
    let run = dir.path().join("run");
    let steps = ["train", "--steps", "3", "--world-size", "3", "--checkpoint-every", "2"];
    text(&[&steps[..], &["--data", &data, "--out", run.to_str().unwrap()]].concat());
    (dir, run)
}

const TEXT: &str = "to be or not to be, that is the question.\n\nshort\n\n";

/// Writes and reads the page about a run.
fn page(run: &Path) -> String {
    let said = text(&["report", run.to_str().unwrap()]);
    assert!(said.trim_end().ends_with("report.html"), "{said}");
    fs::read_to_string(run.join("report.html")).unwrap()
}

/// Checks a page about one run, and returns its body.
fn checked(page: &str) -> &str {
    checked_sections(page, &SECTIONS)
}

/// Checks that a page has these sections, well-formed and without external resources, and returns
/// its body.
fn checked_sections<'a>(page: &'a str, sections: &[&str]) -> &'a str {
    assert!(
        page.starts_with("<!DOCTYPE html>") && !page.contains("http") && !page.contains("<script"),
        "{page}"
    );
    let body = &page[page.find("<body>").unwrap()..page.rfind("</html>").unwrap()];
    let document = roxmltree::Document::parse(body).unwrap();
    let ids: Vec<&str> =
        document.descendants().filter_map(|element| element.attribute("id")).collect();
    assert_eq!(ids, sections);
    assert!(!page.contains("NaN") && !page.contains("inf<"), "{page}");
    body
}

fn n_pictures(body: &str) -> usize {
    body.matches("<svg ").count()
}

#[test]
fn page_covers_the_whole_run() {
    let (_dir, run) = run_on(&TEXT.repeat(200));
    let page = page(&run);
    let body = checked(&page);
    assert_eq!(n_pictures(body), 2);
    for words in [
        "Complete: 3 steps on 3 devices.",
        "text &lt;&amp;&gt;.txt",
        "full over 3 ranks: 21 parameters",
        "Every sequence is read exactly once.",
        "steps 2",
        "3 devices from step 1 on",
    ] {
        assert!(body.contains(words), "no {words:?} in {body}");
    }
    assert_eq!(body.contains("Peak memory of the process: "), cfg!(target_os = "linux"));
    // Equal arguments write equal pages.
    assert_eq!(self::page(&run), page);
    let curve = fs::read_to_string(run.join("loss.svg")).unwrap();
    assert!(roxmltree::Document::parse(&curve).is_ok() && curve.contains("tokens/s"), "{curve}");
}

#[test]
fn missing_data_is_noted() {
    let (dir, run) = run_on(&TEXT.repeat(200));
    let data = dir.path().join("text <&>.txt");
    fs::write(&data, "another text").unwrap();
    let changed = page(&run);
    let body = checked(&changed);
    assert!(body.contains("has changed since") && !body.contains("exactly once"), "{body}");
    assert_eq!(n_pictures(body), 2);
    fs::remove_file(&data).unwrap();
    assert!(checked(&page(&run)).contains("can no longer be read"));

    // Simulates a run killed before its first step.
    fs::remove_dir_all(run.join("model")).unwrap();
    fs::remove_file(run.join("metrics.jsonl")).unwrap();
    let begun = page(&run);
    let body = checked(&begun);
    assert!(body.contains("0 of 3 steps") && body.contains("No step is done yet"), "{body}");
    assert_eq!(n_pictures(body), 1);
}

#[test]
fn out_option_moves_the_page() {
    let (dir, run) = run_on(&TEXT.repeat(100));
    let out = dir.path().join("page.html");
    text(&["report", run.to_str().unwrap(), "--out", out.to_str().unwrap()]);
    checked(&fs::read_to_string(out).unwrap());
    assert!(!run.join("report.html").exists());
    rejects(&["report", dir.path().to_str().unwrap()], &["does not hold a run", "hint: ", "train"]);
    rejects(&["report"], &["RUN_DIR"]);
}

#[test]
fn several_runs_are_compared() {
    let (dir, run) = run_on(&TEXT.repeat(200));
    let data = dir.path().join("text <&>.txt");
    let other = dir.path().join("other");
    let steps = ["train", "--steps", "2", "--strategy", "full", "--max-grad-norm", "0.5"];
    let paths = ["--data", data.to_str().unwrap(), "--out", other.to_str().unwrap()];
    text(&[&steps[..], &paths].concat());
    fs::write(other.join("sample.txt"), "to be <or>\n\u{1b}[2J not").unwrap();
    let said = text(&["report", run.to_str().unwrap(), other.to_str().unwrap()]);
    assert!(said.trim_end().ends_with("comparison.html"), "{said}");
    let page = fs::read_to_string(run.join("comparison.html")).unwrap();
    let body = checked_sections(&page, &["summary", "settings", "training", "sample"]);
    assert_eq!(n_pictures(body), 1);
    for words in ["3 of 3", "2 of 2", "sharded by full", "to be &lt;or&gt;\n\\u{1b}[2J not"] {
        assert!(body.contains(words), "no {words:?} in {body}");
    }
    assert!(!body.contains("fingerprint"), "the text is the same: {body}");

    // A page about one run shows the generated text.
    let single = self::page(&other);
    assert!(checked(&single).contains("Generated text"));
    rejects(&["report", "a", "b", "c", "d", "e"], &["RUN_DIR"]);
}

#[test]
fn curve_covers_resumed_steps() {
    let (_dir, run) = run_on(&TEXT.repeat(200));
    let whole = fs::read_to_string(run.join("loss.svg")).unwrap();
    fs::remove_dir_all(run.join("model")).unwrap();
    text(&["train", "--resume", "--out", run.to_str().unwrap()]);
    let resumed = fs::read_to_string(run.join("loss.svg")).unwrap();
    let n_points = |svg: &str| svg.matches("<circle ").count();
    // Losses, learning rates, norms and speeds of three steps, and the mark of the legend.
    assert_eq!((n_points(&whole), n_points(&resumed)), (13, 13));
    assert!(checked(&page(&run)).contains("2 devices from step 3 on"));
}
