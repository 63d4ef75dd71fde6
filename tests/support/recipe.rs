//! The parameters of the largest open model, made from a recipe instead of a list of 45,395 tensors.

#![allow(clippy::unwrap_used, reason = "a fixture that cannot be made must not be used")]

use candle_distributed::plan::{ElemType, ParameterInfo};
use serde::Deserialize;

#[derive(Deserialize)]
struct Recipe {
    dtype_default: ElemType,
    before: Vec<Entry>,
    groups: Vec<Group>,
    after: Vec<Entry>,
    tensors: usize,
    params: u128,
}

#[derive(Deserialize)]
struct Group {
    layers: (u64, u64),
    experts: u64,
    tensors: Vec<Entry>,
}

/// A name with `{l}` for the layer and `{e}` for the expert, a shape, and a dtype where it is not the usual one.
#[derive(Deserialize)]
struct Entry(String, Vec<u64>, #[serde(default)] Option<ElemType>);

impl Recipe {
    fn parameter(&self, Entry(name, shape, dtype): &Entry, layer: u64, expert: u64) -> ParameterInfo {
        let name = name.replace("{l}", &layer.to_string()).replace("{e}", &expert.to_string());
        ParameterInfo::new(name, shape.as_slice(), dtype.unwrap_or(self.dtype_default)).unwrap()
    }

    /// Runs of entries with `{e}` are listed expert by expert.
    fn layer(&self, group: &Group, layer: u64) -> Vec<ParameterInfo> {
        let of_expert = |entry: &Entry| entry.0.contains("{e}");
        let runs = group.tensors.chunk_by(|left, right| of_expert(left) == of_expert(right));
        let listed = runs.flat_map(|run| {
            let experts = if of_expert(&run[0]) { group.experts } else { 1 };
            (0..experts).flat_map(move |expert| run.iter().map(move |entry| self.parameter(entry, layer, expert)))
        });
        listed.collect()
    }
}

/// DeepSeek-V3 with 671 billion parameters, most in `BF16`.
///
/// # Panics
///
/// If the recipe does not give the tensors that it counts.
pub fn deepseek() -> Vec<ParameterInfo> {
    let recipe: Recipe = serde_json::from_str(include_str!("../plans/models/deepseek-v3.recipe.json")).unwrap();
    let once = |entries: &[Entry]| entries.iter().map(|entry| recipe.parameter(entry, 0, 0)).collect::<Vec<_>>();
    let layers =
        recipe.groups.iter().flat_map(|group| (group.layers.0..group.layers.1).map(move |layer| (group, layer)));
    let blocks = layers.flat_map(|(group, layer)| recipe.layer(group, layer));
    let parameters: Vec<_> = once(&recipe.before).into_iter().chain(blocks).chain(once(&recipe.after)).collect();
    assert_eq!(parameters.len(), recipe.tensors);
    assert_eq!(parameters.iter().map(|info| u128::from(info.numel())).sum::<u128>(), recipe.params);
    parameters
}

/// A safetensors file of `parameters` up to the end of its header.
pub fn safetensors(parameters: &[ParameterInfo]) -> Vec<u8> {
    let mut end = 0;
    let entries = parameters.iter().map(|info| {
        let begin = end;
        end += info.bytes();
        let (name, dtype, shape) = (info.name(), info.dtype(), info.shape());
        format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{end}]}}"#)
    });
    let header = format!("{{{}}}", entries.collect::<Vec<_>>().join(","));
    [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat()
}
