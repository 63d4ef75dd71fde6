//! The file of a slot: its name, what it says of itself, and the form of its header.
//!
//! The metadata of its safetensors header say which run, step and slot it belongs to, and have the
//! checksums of its tensors under their names. The index has the checksum of the header.

pub(super) mod read;
pub(super) mod write;

use std::{collections::BTreeMap, fmt};

/// What a file belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Origin {
    /// What the run is called, if it has a name.
    pub(super) run: Option<String>,
    pub(super) step: u64,
    /// The name of the file in its folder.
    pub(super) file: String,
}

const RUN: &str = "run";
const STEP: &str = "step";
const FILE: &str = "file";

impl Origin {
    /// The texts that say so in a header.
    fn to_texts(&self) -> BTreeMap<String, String> {
        let run = self.run.iter().map(|run| (RUN, run.clone()));
        let others = [(STEP, self.step.to_string()), (FILE, self.file.clone())];
        run.chain(others).map(|(key, text)| (key.to_owned(), text)).collect()
    }

    /// What the texts of a header say.
    fn of_texts(texts: &BTreeMap<String, String>) -> Option<Self> {
        let run = texts.get(RUN).cloned();
        Some(Self { run, step: texts.get(STEP)?.parse().ok()?, file: texts.get(FILE)?.clone() })
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of step {}", self.file, self.step)?;
        match &self.run {
            Some(run) => write!(f, " of run {run}"),
            None => write!(f, " of a run without a name"),
        }
    }
}

/// The name of a slot's file.
pub(super) fn name(slot: usize, n_slots: usize) -> String {
    format!("shard-{:05}-of-{n_slots:05}.safetensors", slot + 1)
}

/// Whether this is the name of a slot's file, in the folder of its checkpoint: an index must not
/// lead to files elsewhere.
pub(super) fn is_name(name: &str) -> bool {
    name.starts_with("shard-") && name.ends_with(".safetensors") && !name.contains(['/', '\\'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_is_read_as_it_is_written() {
        for run in [None, Some("c0ffee".to_owned())] {
            let origin = Origin { run, step: u64::MAX, file: name(1, 4) };
            assert_eq!(Origin::of_texts(&origin.to_texts()).as_ref(), Some(&origin));
        }
        assert_eq!(Origin::of_texts(&BTreeMap::new()), None);
    }
}
