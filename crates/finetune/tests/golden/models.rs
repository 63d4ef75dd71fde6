//! The names of the golden folders.

/// Models of the Llama family.
pub(crate) const MODELS: [&str; 4] = ["llama", "llama3", "qwen2", "mistral"];

/// Models of other families.
pub(crate) const FAMILIES: [&str; 17] = [
    "gemma2",
    "gemma3",
    "glm4",
    "gpt_oss",
    "granite",
    "llama_bias",
    "ministral3",
    "mistral_window",
    "mixtral",
    "olmo2",
    "olmo3",
    "phi3",
    "phi3_longrope",
    "qwen2_yarn",
    "qwen3",
    "qwen3_moe",
    "smollm3",
];
