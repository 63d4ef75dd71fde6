//! Public names without a user in this workspace that stay: users of PyTorch, JAX, TRL or Hugging
//! Face look for them, or write programs that are not here.

use crate::tidy::{Violation, surface::UnusedName};

/// A crate's folder, a public name of it, and the reason to keep it. A type keeps its methods.
const SOUGHT: &[(&str, &str, &str)] = &[
    ("crates/data-loader", "NpyDataset::open", "NumPy's load"),
    ("crates/data-loader", "JsonlDataset::open_with", "limits for files of others"),
    ("crates/data-loader", "LoaderBuilder::prefetch_factor", "PyTorch's DataLoader"),
    ("crates/data-loader", "SampleBatch::with_lengths", "transforms that change a length"),
    ("crates/data-loader", "ShardedDataset::new", "shards of other formats, as WebDataset has"),
    ("crates/data-loader", "TokenDataset::open", "token files of nanoGPT and Megatron"),
    ("crates/dist-sampler", "DistributedSampler::spdl_deterministic", "SPDL's sampler"),
    ("crates/dist-sampler", "DistributedSampler::spdl_random", "SPDL's sampler"),
    (
        "crates/dist-train",
        "DistributedModel::set_schedule",
        "PyTorch's schedulers, changed in a run",
    ),
    ("crates/dist-train", "StepMetrics::new", "metrics of a loop without `step`"),
    ("crates/dist-train", "SyncBatchNorm::forward_t", "candle-nn's ModuleT"),
    ("crates/dist-train", "SyncBatchNorm::new", "PyTorch's SyncBatchNorm"),
    ("crates/dyn-batch", "BatchConfig::with_max_cost", "budgets that are no number of tokens"),
    ("crates/dyn-batch", "SequenceLayout::position_ids", "Hugging Face's packed batches"),
    ("crates/dyn-batch", "SequenceLayout::segment_ids", "JAX's packed batches"),
    ("crates/dyn-batch", "SplitLengths", "TRL's bfd_split"),
    ("crates/finetune", "Examples::read", "examples of a program's own loop"),
    ("crates/finetune", "Folder::open", "Hugging Face's from_pretrained"),
    ("crates/finetune", "Generator::open", "Hugging Face's from_pretrained"),
    ("crates/finetune", "Decoder::with_context", "models with LongRoPE in a loop of a program"),
    ("crates/finetune", "Decoder::undecayed", "parameters without weight decay"),
    ("crates/fsdp-plan", "ParameterInfo::with_always_gather", "FSDP's ignored parameters"),
    ("crates/fsdp-plan", "ParameterInfo::with_tied_to", "tied weights under two names"),
    ("crates/fsdp-plan", "PlannedParameter::new", "plans of a strategy of one's own"),
    ("crates/fsdp-plan", "ShardingPlan::new", "plans of a strategy of one's own"),
    ("crates/fused-ops", "LayerNorm::new", "candle-nn's constructor"),
    ("crates/fused-ops", "Linear::with_adapter", "PEFT's layer in a model of one's own"),
    ("crates/fused-ops", "add_rms_norm", "fused_add_rms_norm of vLLM and Liger"),
    ("crates/pmap-mesh", "P::concat", "JAX's out_specs"),
];

/// Returns a violation for each unused name of the crate in `folder` that is not sought, and for each
/// sought name that has a user.
pub(super) fn check(folder: &str, unused: Vec<UnusedName>) -> Vec<Violation> {
    check_against(SOUGHT, folder, unused)
}

fn check_against(
    sought: &[(&str, &str, &str)],
    folder: &str,
    unused: Vec<UnusedName>,
) -> Vec<Violation> {
    let names: Vec<&str> =
        sought.iter().filter(|(at, ..)| *at == folder).map(|(_, name, _)| *name).collect();
    let idle = names.iter().filter(|name| !unused.iter().any(|one| one.belongs_to(name)));
    let idle = idle.map(|name| {
        let rule = format!("`{name}` of {folder} has a user, or is gone");
        Violation::new("xtask/src/tidy/sought.rs", 1, rule)
    });
    let mut violations: Vec<_> = idle.collect();
    let is_lost = |one: &UnusedName| !names.iter().any(|name| one.belongs_to(name));
    violations.extend(unused.into_iter().filter(is_lost).map(UnusedName::into_violation));
    violations
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sought_name_needs_no_user() {
        let name = |name: &str| UnusedName { name: name.into(), file: "a.rs".into(), line: 1 };
        let unused = || vec![name("Lengths"), name("Lengths::new"), name("LengthsError")];
        let n_violations =
            |sought: &[(&str, &str, &str)]| check_against(sought, "a", unused()).len();
        assert_eq!(n_violations(&[]), 3);
        assert_eq!(n_violations(&[("a", "Lengths", "why")]), 1);
        assert_eq!(n_violations(&[("a", "Lengths::new", "why")]), 2);
        // Another crate's name, and a name with a user.
        assert_eq!(n_violations(&[("b", "Lengths", "why")]), 3);
        assert_eq!(n_violations(&[("a", "Used", "why")]), 4);
    }
}
