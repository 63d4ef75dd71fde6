//! The drawing of a plan: one column for each rank, a block for what it holds of each unit, and the
//! limit.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    fs,
    process::{Command, Stdio},
};

// The colors of what stands for no unit, and of the root unit.
const OPTIMIZER: &str = "#F7BE96";
const PADDING: &str = "#F0F0F0";
const ROOT: &str = "#4A4E69";
const LIMIT: &str = "#C0262D";

/// What `plan` prints for a model that is given as a manifest.
fn plan(manifest: &str, args: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.json");
    fs::write(&path, manifest).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_candle-distributed"));
    let output = command
        .arg("plan")
        .arg(&path)
        .args(args.split_whitespace())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(output.status.success(), "{args}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The drawing, which is checked to be a document that is drawn the same again.
fn drawing(manifest: &str, args: &str) -> String {
    let args = format!("{args} --format svg");
    let svg = plan(manifest, &args);
    assert!(
        svg.starts_with("<svg ") && svg.ends_with("</svg>\n") && svg.matches("<svg").count() == 1,
        "{svg}"
    );
    assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    assert!(
        svg.chars().all(|char| char == '\n' || !char.is_control() && char < '\u{fffe}'),
        "{svg}"
    );
    // All elements but the document, its style and its texts are empty.
    let n_ends = svg.matches("</").count();
    assert_eq!(svg.matches('<').count() - n_ends, svg.matches("/>").count() + n_ends);
    assert_eq!(svg.matches("<text ").count() + 2, n_ends);
    assert_eq!(plan(manifest, &args), svg);
    svg
}

/// A model of `n_layers` layers between an embedding and a norm.
fn model(n_layers: usize, dtype: &str) -> String {
    let tensor = |name: &str, shape: [u64; 2]| {
        format!("{name:?}: {{\"dtype\": {dtype:?}, \"shape\": {shape:?}}}")
    };
    let layers = (0..n_layers).map(|layer| tensor(&format!("layers.{layer}.weight"), [256, 256]));
    let all: Vec<_> = [tensor("embed", [1024, 256])]
        .into_iter()
        .chain(layers)
        .chain([tensor("norm", [1, 256])])
        .collect();
    format!("{{{}}}", all.join(", "))
}

fn has_text(svg: &str, text: &str) -> bool {
    svg.lines().any(|line| line == text)
}

/// The rectangles of this color.
fn rectangles<'a>(svg: &'a str, color: &str) -> Vec<&'a str> {
    let fill = format!("fill=\"{color}\"");
    svg.lines().filter(|line| line.starts_with("<rect ") && line.contains(&fill)).collect()
}

/// An attribute of a rectangle in pixels.
fn pixels(rectangle: &str, attribute: &str) -> i64 {
    let (_, rest) = rectangle.split_once(&format!(" {attribute}=\"")).unwrap();
    rest.split('"').next().unwrap().parse().unwrap()
}

#[test]
fn a_drawing_says_what_is_planned_and_whether_it_fits() {
    let model = model(3, "F32");
    let svg = drawing(&model, "--world-size 3 --budget 2GiB");
    let report = plan(&model, "--world-size 3");
    assert!(has_text(&svg, report.lines().next().unwrap()), "{svg}");
    for text in [
        "held at the peak (MiB)",
        "stored parameters (KiB)",
        "rank",
        "limit",
        "2.00 GiB",
        "far above",
        "gathered at the peak",
        "optimizer state",
        "gradients",
        "padding",
        "parameters of 4 units",
        "(root)",
        "layers.0",
        "layers.1",
        "layers.2",
    ] {
        assert!(has_text(&svg, text), "no {text:?} in {svg}");
    }
    assert!(svg.contains(": every rank fits in 2.00 GiB\n"), "{svg}");
    assert_eq!(rectangles(&svg, LIMIT).len(), 0);
    // A column each, and one in the legend.
    assert_eq!(rectangles(&drawing(&model, "--world-size 3"), OPTIMIZER).len(), 4);
    assert!(!has_text(&drawing(&model, "--world-size 3"), "limit"));
}

#[test]
fn what_lies_beyond_the_limit_is_marked() {
    let svg = drawing(&model(3, "F32"), "--world-size 4 --strategy layer-wise --budget 5MiB");
    assert!(svg.contains(": 1 of 4 ranks above the limit of 5.00 MiB, by up to "), "{svg}");
    let beyond = rectangles(&svg, LIMIT);
    let [beyond] = beyond[..] else { panic!("{beyond:?}") };
    let limit =
        svg.lines().find(|line| line.starts_with("<polyline") && line.contains(LIMIT)).unwrap();
    let bottom = pixels(beyond, "y") + pixels(beyond, "height");
    assert!(limit.contains(&format!(",{bottom} ")), "{beyond} {limit}");
}

#[test]
fn ranks_beyond_what_there_is_room_for_share_a_column() {
    let model = model(3, "F32");
    for (world_size, n_columns, text) in [
        (1, 1, "rank"),
        (64, 64, "rank"),
        (65, 64, "rank: of every 1 or 2 neighbors, the one with the highest peak"),
        (256, 64, "rank: of every 4 neighbors, the one with the highest peak"),
    ] {
        let svg = drawing(&model, &format!("--world-size {world_size}"));
        assert_eq!(rectangles(&svg, OPTIMIZER).len(), n_columns + 1, "{world_size}");
        assert!(has_text(&svg, text), "{svg}");
    }
}

#[test]
fn replicas_have_brackets() {
    let svg = drawing(&model(3, "F32"), "--world-size 8 --replicas 2");
    let report = plan(&model(3, "F32"), "--world-size 8 --replicas 2");
    assert!(has_text(&svg, "replica 0") && has_text(&svg, "replica 1"), "{svg}");
    assert!(has_text(&svg, report.lines().next().unwrap()), "{svg}");
    assert!(!drawing(&model(3, "F32"), "--world-size 128 --replicas 2").contains("\nreplica "));
}

#[test]
fn many_units_are_named_by_the_first_and_the_last_ones() {
    let svg = drawing(&model(40, "F32"), "--world-size 2");
    let named = |layer| has_text(&svg, &format!("layers.{layer}"));
    assert!(has_text(&svg, "parameters of 41 units") && has_text(&svg, "(root)"), "{svg}");
    assert_eq!([0, 1, 38, 39].map(named), [true, false, false, true]);
}

#[test]
fn units_fill_a_column_whatever_they_are_held_as() {
    let root = |args: &str| -> Vec<(i64, i64)> {
        let svg = drawing(&model(3, "BF16"), &format!("--world-size 2 --layout flat {args}"));
        let below =
            rectangles(&svg, ROOT).into_iter().filter(|rectangle| pixels(rectangle, "y") > 410);
        below.map(|rectangle| (pixels(rectangle, "y"), pixels(rectangle, "height"))).collect()
    };
    let as_in_the_file = root("");
    assert_eq!((as_in_the_file.len(), as_in_the_file[0].1 > 20), (2, true));
    assert_eq!(root("--param-dtype f32"), as_in_the_file);
    assert_eq!(root("--optimizer none"), as_in_the_file);
}

#[test]
fn nothing_and_next_to_nothing_can_be_drawn() {
    let nothing =
        r#"{"a.0.w": {"dtype": "F32", "shape": [0, 3]}, "b.w": {"dtype": "F32", "shape": [0]}}"#;
    for world_size in [1, 2, 100] {
        let svg =
            drawing(nothing, &format!("--world-size {world_size} --optimizer none --budget 0"));
        assert!(
            svg.contains("at most 0.00 B per rank") && svg.contains("every rank fits"),
            "{svg}"
        );
    }
    // Two ranks have a row each, and the others padding alone.
    let svg = drawing(r#"{"fc.weight": {"dtype": "F32", "shape": [2, 2]}}"#, "--world-size 5");
    let above =
        |rectangles: Vec<&str>| rectangles.iter().filter(|block| pixels(block, "x") < 700).count();
    assert_eq!([PADDING, ROOT].map(|color| above(rectangles(&svg, color))), [2 * 3, 2 * 2]);
    assert!(has_text(&svg, "116.00") && has_text(&svg, "92.00"), "{svg}");
}

#[test]
fn names_cannot_break_the_document() {
    let odd = r#"{
        "a<b>&\"'\n\uffff.0.w": {"dtype": "F32", "shape": [9]},
        "\u001b]]>.1.w": {"dtype": "F32", "shape": [9]}
    }"#;
    let svg = drawing(odd, "--world-size 1");
    for text in [r"a&lt;b&gt;&amp;&quot;&apos;\n\u{ffff}.0", r"\u{1b}]]&gt;.1"] {
        assert!(has_text(&svg, text), "no {text:?} in {svg}");
    }
    let long = format!("{{\"{}.x.0.w\": {{\"dtype\": \"F32\", \"shape\": [9]}}}}", "é".repeat(300));
    assert!(has_text(&drawing(&long, "--world-size 1"), "…x.0"));
}
