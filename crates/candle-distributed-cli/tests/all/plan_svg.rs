//! The drawing of a plan: one column per rank, and the limit.

use std::{fs, process::Command};

const OPTIMIZER: &str = "fill=\"#F7BE96\"";
/// A dash of the limit line. The style sheet has the color too, but not as an attribute.
const LIMIT: &str = " stroke=\"#C0262D\"";

const MODEL: &str = r#"{"embed": {"dtype": "F32", "shape": [1024, 256]},
    "layers.0.weight": {"dtype": "F32", "shape": [256, 256]},
    "layers.1.weight": {"dtype": "F32", "shape": [256, 256]}}"#;

/// Returns the drawing that `plan` prints for a manifest.
fn picture(manifest: &str, args: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.json");
    fs::write(&path, manifest).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_candle-distributed"));
    command.arg("plan").arg(&path).args(args.split_whitespace()).args(["--format", "svg"]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{args}: {}", String::from_utf8_lossy(&output.stderr));
    let svg = String::from_utf8(output.stdout).unwrap();
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"), "{svg}");
    assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    svg
}

fn has_text(svg: &str, text: &str) -> bool {
    svg.lines().any(|line| line == text)
}

#[test]
fn drawing_names_all_memory_parts() {
    let svg = picture(MODEL, "--world-size 3 --budget 2GiB");
    for text in
        ["at the peak (MiB)", "rank", "parameters", "padding", "gradients", "optimizer state"]
    {
        assert!(has_text(&svg, text), "no {text:?} in {svg}");
    }
    assert!(svg.contains(": every rank fits in 2.00 GiB\n"), "{svg}");
    assert!(has_text(&svg, "limit 2.00 GiB"), "{svg}");
    // One column per rank, and the legend.
    assert_eq!(svg.matches(OPTIMIZER).count(), 4);
    assert!(!picture(MODEL, "--world-size 3").contains(LIMIT));
}

#[test]
fn drawing_counts_ranks_above_limit() {
    let svg = picture(MODEL, "--world-size 4 --strategy layer-wise --budget 5MiB");
    assert!(svg.contains(": 1 of 4 ranks above the limit of 5.00 MiB, by up to "), "{svg}");
    assert!(svg.matches(LIMIT).count() > 10, "a dashed line: {svg}");
}

/// Returns the number after `prefix`.
fn number_after(line: &str, prefix: &str) -> i32 {
    let digits = line.split_once(prefix).unwrap().1;
    digits.split(|char: char| !char.is_ascii_digit()).next().unwrap().parse().unwrap()
}

#[test]
fn limit_is_as_high_as_its_number_on_the_axis() {
    let svg = picture(MODEL, "--world-size 4 --strategy layer-wise --budget 4MiB");
    let lines: Vec<&str> = svg.lines().collect();
    let dash = lines.iter().rfind(|line| line.contains(LIMIT)).unwrap();
    let (_, points) = dash.split_once("points=\"").unwrap();
    let label = lines.windows(2).find(|lines| lines[0].contains("\"end\"") && lines[1] == "4");
    let height = number_after(label.unwrap()[0], " y=\"");
    assert!(number_after(points, ",").abs_diff(height) <= 1, "{dash}, {height}: {svg}");
}

/// `plan tests/fixtures/models/llama-3.1-8b.json ARGS --format svg > docs/plan.svg` draws it again.
#[test]
fn readme_shows_this_plan() {
    let args = "--world-size 8 --param-dtype F32 --mixed-precision BF16,F32 --budget 24GiB";
    let llama = include_str!("../../../../tests/fixtures/models/llama-3.1-8b.json");
    assert_eq!(picture(llama, args), include_str!("../../../../docs/plan.svg"));
}

#[test]
fn large_worlds_share_columns() {
    for (world_size, n_columns, text) in [
        (1, 1, "rank"),
        (65, 64, "rank with the highest peak of every 1 or 2 neighbors"),
        (256, 64, "rank with the highest peak of every 4 neighbors"),
    ] {
        let svg = picture(MODEL, &format!("--world-size {world_size}"));
        assert_eq!(svg.matches(OPTIMIZER).count(), n_columns + 1, "{world_size}");
        assert!(has_text(&svg, text), "{svg}");
    }
}

#[test]
fn empty_model_is_drawn() {
    let svg = picture(
        r#"{"a": {"dtype": "F32", "shape": [0, 3]}}"#,
        "--world-size 2 --optimizer none --budget 0",
    );
    assert!(svg.contains("at most 0.00 B per rank") && svg.contains("every rank fits"), "{svg}");
}
