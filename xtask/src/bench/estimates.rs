//! What criterion has measured, as it leaves it in its folder.

use std::{
    fs,
    path::{Path, PathBuf},
    time::SystemTime,
};

use serde_json::Value;

use crate::{cmd::Result, workspace};

/// A bench that has results.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Bench {
    dir: PathBuf,
}

/// The benches that have results under `name` no older than `since`, which leaves out the benches
/// that were filtered or have been deleted.
pub(super) fn measured(home: &Path, name: &str, since: SystemTime) -> Result<Vec<Bench>> {
    let mut benches = Vec::new();
    for path in workspace::files_below(home)? {
        if path.ends_with(Path::new(name).join("estimates.json"))
            && since <= fs::metadata(&path)?.modified()?
        {
            benches.extend(path.ancestors().nth(2).map(|dir| Bench { dir: dir.to_owned() }));
        }
    }
    Ok(benches)
}

impl Bench {
    /// As the source calls it, `topic/operation/variant`.
    pub(super) fn id(&self) -> Result<String> {
        Ok(json(&self.dir.join("new/benchmark.json"))?["full_id"]
            .as_str()
            .unwrap_or_default()
            .to_owned())
    }

    /// Whether there are results under `name`.
    pub(super) fn has(&self, name: &str) -> bool {
        self.dir.join(name).exists()
    }

    /// The median of one pass in the results under `name`, in seconds.
    pub(super) fn median(&self, name: &str) -> Result<f64> {
        let estimates = self.dir.join(name).join("estimates.json");
        let nanoseconds = json(&estimates)?["median"]["point_estimate"].as_f64();
        Ok(nanoseconds.ok_or_else(|| format!("no median in {}", estimates.display()))? / 1e9)
    }
}

fn json(path: &Path) -> Result<Value> {
    let text = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(serde_json::from_str(&text)?)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn results_are_found_by_baseline_and_time() {
        let home = std::env::temp_dir().join(format!("xtask-bench-{}", std::process::id()));
        let dir = home.join("group/bench");
        fs::create_dir_all(dir.join("main")).unwrap();
        fs::write(dir.join("main/estimates.json"), r#"{"median":{"point_estimate":1.5e9}}"#)
            .unwrap();
        let before = SystemTime::now() - Duration::from_secs(3600);
        let found = measured(&home, "main", before).unwrap();
        assert_eq!(found, [Bench { dir }]);
        assert!((found[0].median("main").unwrap() - 1.5).abs() < 1e-9);
        assert!(found[0].has("main") && !found[0].has("other"));
        assert!(measured(&home, "other", before).unwrap().is_empty());
        assert!(measured(&home, "main", before + Duration::from_secs(7200)).unwrap().is_empty());
        fs::remove_dir_all(&home).unwrap();
    }
}
