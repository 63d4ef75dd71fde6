//! Help, version, completions and manual pages.

use std::{fs, path::Path};

use crate::support::{SUBCOMMANDS, command, golden, rejects, run, text};

#[test]
fn help_lists_every_subcommand() {
    let help = text(&["--help"]);
    let commands = help.split_once("Commands:\n").unwrap().1.split_once("\n\n").unwrap().0;
    let names = commands.lines().filter_map(|line| line.split_whitespace().next());
    assert!(names.eq(SUBCOMMANDS.into_iter().chain(["help"])), "{commands}");
}

#[test]
fn version_prints_name_and_version() {
    assert_eq!(
        text(&["--version"]),
        concat!("candle-distributed ", env!("CARGO_PKG_VERSION"), "\n")
    );
}

/// Returns the example commands of a help page.
#[cfg(unix)]
fn examples(page: &[&str]) -> Vec<String> {
    let help = text(&[page, &["--help"]].concat());
    let lines = help.lines().skip_while(|line| *line != "Examples:").skip(1);
    lines
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(str::to_owned)
        .collect()
}

/// Creates a folder with the files and folders that examples use.
#[cfg(unix)]
fn home() -> tempfile::TempDir {
    let home = tempfile::tempdir().unwrap();
    let lengths: Vec<String> = (1..=2000).map(|n| (n * 37 % 2000 + 1).to_string()).collect();
    fs::write(home.path().join("lengths.txt"), lengths.join("\n")).unwrap();
    let header = r#"{"h.0.w": {"dtype": "F32", "shape": [64, 4], "data_offsets": [0, 1024]}}"#;
    let model = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 1024]].concat();
    fs::write(home.path().join("model.safetensors"), model).unwrap();
    let data = home.path().join("text.txt");
    fs::write(&data, "to be or not to be").unwrap();
    for folder in ["runs/0001", "runs/0002"] {
        let out = home.path().join(folder);
        let [data, out] = [&data, &out].map(|path| path.to_str().unwrap());
        text(&["train", "--steps", "1", "--no-sample", "--data", data, "--out", out]);
    }
    fs::create_dir(home.path().join("llama")).unwrap();
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"] {
        let from = Path::new(&golden("llama")).join(name);
        fs::copy(from, home.path().join("llama").join(name)).unwrap();
    }
    for folder in [".config/fish/completions", ".zfunc"] {
        fs::create_dir_all(home.path().join(folder)).unwrap();
    }
    home
}

#[cfg(unix)]
#[test]
fn every_help_example_works() {
    use std::{env, iter, process::Command};

    let home = home();
    let bin = Path::new(env!("CARGO_BIN_EXE_candle-distributed")).parent().unwrap().to_owned();
    let path =
        env::join_paths(iter::once(bin).chain(env::split_paths(&env::var_os("PATH").unwrap())))
            .unwrap();
    // Training takes a minute, and is tested elsewhere.
    for page in SUBCOMMANDS.into_iter().filter(|name| *name != "train").map(Some).chain([None]) {
        let examples = examples(page.as_slice());
        assert!((2..=5).contains(&examples.len()), "{page:?} has {} examples", examples.len());
        for example in examples {
            let mut shell = Command::new("bash");
            shell.args(["-e", "-o", "pipefail", "-c", &example]).current_dir(&home);
            let output = shell.env("PATH", &path).env("HOME", home.path()).output().unwrap();
            assert!(
                output.status.success(),
                "{example}: {}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
    }
    for made in [
        "packed.json",
        "plan.json",
        "runs/0001/report.html",
        "runs/0001/comparison.html",
        "candle-distributed.1",
        ".zfunc/_candle-distributed",
    ] {
        assert!(fs::metadata(home.path().join(made)).unwrap().len() > 100, "{made}");
    }
}

#[test]
fn completions_cover_subcommands_in_every_shell() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = text(&["completions", shell]);
        for name in SUBCOMMANDS {
            assert!(script.contains(name), "{shell}: {name}");
        }
        assert!(script.contains("world-size"), "{shell}");
    }
    rejects(&["completions", "tcsh"], &["tcsh", "bash"]);
}

#[test]
fn manual_pages_cover_all_subcommands() {
    let main = text(&["man"]);
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("man/man1");
    assert_eq!(text(&["man", "--out", folder.to_str().unwrap()]), "");
    assert_eq!(fs::read_to_string(folder.join("candle-distributed.1")).unwrap(), main);
    for name in SUBCOMMANDS {
        assert!(main.contains(&format!("candle\\-distributed\\-{name}(1)")), "{name}");
        let page = fs::read_to_string(folder.join(format!("candle-distributed-{name}.1"))).unwrap();
        assert!(page.contains(".SH OPTIONS"), "{name}");
    }
    assert_eq!(fs::read_dir(&folder).unwrap().count(), SUBCOMMANDS.len() + 1);

    let output = run(&["man", "--out", folder.join("candle-distributed.1").to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot write"));
}

#[test]
fn colors_need_a_terminal() {
    let is_colored = |args: &[&str], force: bool| {
        let mut command = command(args);
        command.env_remove("NO_COLOR").env_remove("CLICOLOR_FORCE");
        let output =
            if force { command.env("CLICOLOR_FORCE", "1") } else { &mut command }.output().unwrap();
        [output.stdout, output.stderr].concat().contains(&0x1b)
    };
    for args in [&["--help"][..], &["plan", "--help"], &["sample"], &["sample", "--len", "0"]] {
        assert!(!is_colored(args, false), "{args:?}");
        assert!(is_colored(args, true), "{args:?}");
    }
    for args in [&["man"][..], &["completions", "bash"]] {
        assert!(!is_colored(args, true), "{args:?}");
    }
}
