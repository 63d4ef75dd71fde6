//! Memory to declare a model too large to build.

use candle_core::{DType, Device, Result};
use candle_nn::{VarBuilder, embedding, linear_no_bias, rms_norm};
use dist_train::declare;

use crate::{MEMORY, alone};

/// Declares the parameters of Llama 7B (arXiv 2302.13971), with Hugging Face's names and shapes.
fn llama_7b(vb: VarBuilder<'_>) -> Result<()> {
    const HIDDEN: usize = 4096;
    const INTERMEDIATE: usize = 11008;
    const VOCABULARY: usize = 32000;
    embedding(VOCABULARY, HIDDEN, vb.pp("model.embed_tokens"))?;
    for layer in 0..32 {
        let vb = vb.pp(format!("model.layers.{layer}"));
        for name in ["q_proj", "k_proj", "v_proj", "o_proj"] {
            linear_no_bias(HIDDEN, HIDDEN, vb.pp("self_attn").pp(name))?;
        }
        for name in ["gate_proj", "up_proj"] {
            linear_no_bias(HIDDEN, INTERMEDIATE, vb.pp("mlp").pp(name))?;
        }
        linear_no_bias(INTERMEDIATE, HIDDEN, vb.pp("mlp.down_proj"))?;
        rms_norm(HIDDEN, 1e-5, vb.pp("input_layernorm"))?;
        rms_norm(HIDDEN, 1e-5, vb.pp("post_attention_layernorm"))?;
    }
    rms_norm(HIDDEN, 1e-5, vb.pp("model.norm"))?;
    linear_no_bias(HIDDEN, VOCABULARY, vb.pp("lm_head")).map(drop)
}

#[test]
fn declaring_llama_7b_allocates_little() {
    let _alone = alone();
    let before = MEMORY.current_usage();
    MEMORY.reset_peak_usage();
    let declared = declare(llama_7b, DType::F32, &Device::Cpu).unwrap();
    let peak = MEMORY.peak_usage() - before;
    let parameters: usize = declared.iter().map(|parameter| parameter.shape.elem_count()).sum();
    assert_eq!((declared.len(), parameters), (291, 6_738_415_616));
    assert!(peak < declared.len() * 1000, "{peak} bytes for {} parameters", declared.len());
    // The list of parameters is small too.
    assert!(MEMORY.current_usage() - before < 256 << 10);
}
