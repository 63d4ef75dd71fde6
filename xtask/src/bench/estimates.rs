//! What criterion has measured, as it leaves it in its folder.

use std::{collections::BTreeMap, fs, path::Path, time::SystemTime};

use serde_json::Value;

use crate::{cmd::Result, workspace};

/// The median of one pass of each bench, in seconds, by its id (`topic/operation/variant`).
///
/// Results from before `since` are left out: of benches that were filtered, or are no more.
pub(super) fn medians(home: &Path, since: SystemTime) -> Result<BTreeMap<String, f64>> {
    let mut medians = BTreeMap::new();
    for path in workspace::files_below(home)? {
        if path.ends_with("new/estimates.json") && since <= fs::metadata(&path)?.modified()? {
            let bench = json(&path.with_file_name("benchmark.json"))?;
            let median = json(&path)?;
            medians.extend(id(&bench).zip(seconds(&median)));
        }
    }
    Ok(medians)
}

fn id(bench: &Value) -> Option<String> {
    Some(bench["full_id"].as_str()?.to_owned())
}

fn seconds(estimates: &Value) -> Option<f64> {
    Some(estimates["median"]["point_estimate"].as_f64()? / 1e9)
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
    fn results_are_found_by_their_time() {
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("group/bench/new");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("estimates.json"), r#"{"median":{"point_estimate":1.5e9}}"#).unwrap();
        fs::write(dir.join("benchmark.json"), r#"{"full_id":"group/bench"}"#).unwrap();
        let before = SystemTime::now() - Duration::from_secs(3600);
        let found = medians(home.path(), before).unwrap();
        assert_eq!(found, BTreeMap::from([("group/bench".to_owned(), 1.5)]));
        let later = medians(home.path(), before + Duration::from_secs(7200)).unwrap();
        assert!(later.is_empty());
    }
}
