//! The names of a decoder's variables, as in the files of transformers.

use candle_nn::{Init, init};

use crate::models::config::{Biases, DecoderConfig, ExpertNames, ExpertsConfig, QkNorm};

pub(super) const EMBEDDING: &str = "model.embed_tokens";
pub(super) const NORM: &str = "model.norm";
pub(super) const HEAD: &str = "lm_head";
pub(super) const ATTENTION: &str = "self_attn";
pub(super) const MLP: &str = "mlp";
pub(super) const QUERY_NORM: &str = "q_norm";
pub(super) const KEY_NORM: &str = "k_norm";
pub(super) const SINKS: &str = "sinks";

/// The start of the names of the text part in the weight files of a model that also sees images.
pub(super) const TEXT_PART: &str = "language_model.";

/// Patterns of the weights outside of the text part.
pub(super) const OTHER_PARTS: [&str; 2] = ["vision_tower", "multi_modal_projector"];

/// Names of the units other than blocks.
pub(super) const EMBED_UNIT: &str = "embed";
pub(super) const HEAD_UNIT: &str = "head";

/// A linear layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct LinearSizes {
    pub(super) name: &'static str,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    pub(super) bias: bool,
}

/// A variable of a block.
#[derive(Clone, Debug)]
pub(super) struct Variable {
    /// Name of the layer within the block.
    pub(super) layer: String,
    /// `weight` or `bias`; the name of a tensor of all experts.
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    /// Its values in a new model.
    pub(super) init: Init,
}

impl DecoderConfig {
    /// Returns the name of a layer outside of blocks in weight files.
    pub(super) fn full_name(&self, layer: &str) -> String {
        format!("{}{layer}", self.name_prefix)
    }

    /// Returns the name of a block in weight files.
    pub(super) fn block_name(&self, layer: usize) -> String {
        self.full_name(&format!("model.layers.{layer}"))
    }

    /// Returns the name of the layer with the head's weight.
    pub(super) fn head_name(&self) -> String {
        self.full_name(if self.tie_word_embeddings { EMBEDDING } else { HEAD })
    }

    /// Returns the projections to queries, keys and values: three, or one with the rows of all.
    pub(super) fn input_projections(&self) -> Vec<LinearSizes> {
        let (queries, keys) = (self.query_width(), self.key_width());
        let layer = |name, outputs| LinearSizes {
            name,
            inputs: self.hidden_size,
            outputs,
            bias: self.biases.qkv,
        };
        if self.fused_qkv {
            return vec![layer("qkv_proj", queries + 2 * keys)];
        }
        vec![layer("q_proj", queries), layer("k_proj", keys), layer("v_proj", keys)]
    }

    /// Returns the projection of attention's result.
    pub(super) fn output_projection(&self) -> LinearSizes {
        LinearSizes {
            name: "o_proj",
            inputs: self.query_width(),
            outputs: self.hidden_size,
            bias: self.biases.output,
        }
    }

    /// Returns gate and up, or one layer with the rows of both.
    pub(super) fn gates(&self) -> Vec<LinearSizes> {
        let layer = |name, outputs| LinearSizes {
            name,
            inputs: self.hidden_size,
            outputs,
            bias: self.biases.mlp,
        };
        if self.fused_gate_up {
            return vec![layer("gate_up_proj", 2 * self.intermediate_size)];
        }
        vec![layer("gate_proj", self.intermediate_size), layer("up_proj", self.intermediate_size)]
    }

    /// Returns the last layer of the feed-forward network.
    pub(super) fn down(&self) -> LinearSizes {
        LinearSizes {
            name: "down_proj",
            inputs: self.intermediate_size,
            outputs: self.hidden_size,
            bias: self.biases.mlp,
        }
    }

    /// Returns the variables of the block of a layer.
    pub(super) fn block_variables(&self, layer: usize) -> Vec<Variable> {
        let experts = self.experts.filter(|_| self.layers[layer].has_experts);
        let mut variables = experts.map_or_else(Vec::new, |experts| self.experts(&experts));
        for (name, size) in self.block_norms() {
            variables.push(self.norm(name, size));
        }
        let attention = self.input_projections().into_iter().chain([self.output_projection()]);
        let attention = attention.map(|layer| (ATTENTION, layer));
        let mlp = self.gates().into_iter().chain([self.down()]).filter(|_| experts.is_none());
        let mlp = mlp.map(|layer| (MLP, layer));
        for (part, layer) in attention.chain(mlp) {
            variables.extend(self.linear(format!("{part}.{}", layer.name), layer));
        }
        if self.sinks {
            let shape = vec![self.num_attention_heads];
            variables.push(self.random(ATTENTION.into(), SINKS.into(), shape));
        }
        variables
    }

    /// Returns the variables of a router and its experts.
    fn experts(&self, experts: &ExpertsConfig) -> Vec<Variable> {
        let (n, inner, hidden) = (experts.n, experts.inner, self.hidden_size);
        let part = experts.part();
        let router = experts.router(hidden);
        let mut variables = self.linear(format!("{part}.{}", router.name), router);
        match experts.names {
            ExpertNames::Separate(names) => {
                let shapes = [[inner, hidden], [inner, hidden], [hidden, inner]];
                for expert in 0..n {
                    for (name, shape) in names.iter().zip(shapes) {
                        let layer = format!("{part}.experts.{expert}.{name}");
                        variables.push(self.matrix(layer, shape));
                    }
                }
            }
            ExpertNames::Stacked(_) => {
                let sizes = [("gate_up_proj", hidden, 2 * inner), ("down_proj", inner, hidden)];
                for (name, inputs, outputs) in sizes {
                    let layer = format!("{part}.experts");
                    let shape = vec![n, outputs];
                    let bias = Variable {
                        layer: layer.clone(),
                        name: format!("{name}_bias"),
                        shape,
                        init: init::ZERO,
                    };
                    let shape = vec![n, inputs, outputs];
                    variables.extend([self.random(layer, name.into(), shape), bias]);
                }
            }
        }
        variables
    }

    /// Returns the variables outside of blocks.
    pub(super) fn other_variables(&self) -> Vec<Variable> {
        let sizes = [self.vocab_size, self.hidden_size];
        let matrix = |layer: &str| self.matrix(self.full_name(layer), sizes);
        let head = (!self.tie_word_embeddings).then(|| matrix(HEAD));
        let norm = self.norm(self.full_name(NORM), self.hidden_size);
        [matrix(EMBEDDING), norm].into_iter().chain(head).collect()
    }

    /// Returns the names of norms within a block, and their sizes.
    fn block_norms(&self) -> Vec<(String, usize)> {
        let norms = self.norms.names().all().map(|name| (name.to_owned(), self.hidden_size));
        norms.chain(self.qk_norms()).collect()
    }

    fn qk_norms(&self) -> Vec<(String, usize)> {
        let name = |norm| format!("{ATTENTION}.{norm}");
        let sizes = self.qk_norm_sizes();
        sizes.map_or_else(Vec::new, |(_, [queries, keys])| {
            vec![(name(QUERY_NORM), queries), (name(KEY_NORM), keys)]
        })
    }

    /// Returns the numbers of elements that the norms of queries and keys take together.
    pub(super) fn qk_norm_sizes(&self) -> Option<(QkNorm, [usize; 2])> {
        self.qk_norm.map(|kind| match kind {
            QkNorm::PerHead => (kind, [self.head_dim; 2]),
            QkNorm::AllHeads => (kind, [self.query_width(), self.key_width()]),
        })
    }

    /// Returns patterns of the variables that usually have no weight decay: norms, biases and sinks.
    pub(crate) fn undecayed(&self) -> Vec<&'static str> {
        let of_blocks = self.norms.names().all();
        let of_heads = [QUERY_NORM, KEY_NORM].into_iter().filter(|_| self.qk_norm.is_some());
        let biases = (self.biases != Biases::default()).then_some("bias");
        let stacked = ["gate_up_proj_bias", "down_proj_bias", SINKS];
        let stacked = stacked.into_iter().filter(|_| self.sinks);
        let of_layers = of_blocks.chain(of_heads).chain(biases).chain(stacked);
        ["norm"].into_iter().chain(of_layers).collect()
    }

    /// Returns the layers that have adapters by default, as in PEFT.
    pub(crate) fn adapted(&self) -> &'static [&'static str] {
        if self.fused_qkv { &["qkv_proj"] } else { &["q_proj", "v_proj"] }
    }

    /// Returns the layers that cannot have adapters, with the reasons.
    pub(super) fn unadaptable(&self) -> Vec<(String, &'static str)> {
        const TIED: &str = "the embedding and the head share its weight (tie_word_embeddings), and the \
                            merged adapter would change both";
        let embedding =
            if self.tie_word_embeddings { TIED } else { "it is an embedding, not a linear layer" };
        let head = self.tie_word_embeddings.then(|| (self.full_name(HEAD), TIED));
        let of_layer = |layer: usize| {
            let experts = self.experts.filter(|_| self.layers[layer].has_experts);
            let variables = experts.map_or_else(Vec::new, |experts| self.experts(&experts));
            let name =
                move |variable: Variable| format!("{}.{}", self.block_name(layer), variable.layer);
            variables
                .into_iter()
                .map(name)
                .map(|name| (name, "experts and routers cannot have one yet"))
        };
        let experts = (0..self.layers.len()).flat_map(of_layer);
        [(self.full_name(EMBEDDING), embedding)].into_iter().chain(head).chain(experts).collect()
    }

    fn norm(&self, layer: String, size: usize) -> Variable {
        let init = if self.norm_offset == 0. { init::ONE } else { init::ZERO };
        Variable { layer, name: "weight".into(), shape: vec![size], init }
    }

    fn linear(&self, layer: String, sizes: LinearSizes) -> Vec<Variable> {
        let weight = self.matrix(layer.clone(), [sizes.outputs, sizes.inputs]);
        let shape = vec![sizes.outputs];
        let bias = Variable { layer, name: "bias".into(), shape, init: init::ZERO };
        if sizes.bias { vec![weight, bias] } else { vec![weight] }
    }

    fn matrix(&self, layer: String, shape: [usize; 2]) -> Variable {
        self.random(layer, "weight".into(), shape.into())
    }

    fn random(&self, layer: String, name: String, shape: Vec<usize>) -> Variable {
        let init = Init::Randn { mean: 0., stdev: self.initializer_range };
        Variable { layer, name, shape, init }
    }
}

impl ExpertsConfig {
    /// Returns the name of the network within a block.
    pub(super) fn part(&self) -> &'static str {
        // The files of Mixtral, whose experts have these names, are older than those of other families.
        if matches!(self.names, ExpertNames::Separate(["w1", ..])) {
            "block_sparse_moe"
        } else {
            MLP
        }
    }

    pub(super) fn router(&self, hidden: usize) -> LinearSizes {
        let is_stacked = matches!(self.names, ExpertNames::Stacked(_));
        let name = if is_stacked { "router" } else { "gate" };
        LinearSizes { name, inputs: hidden, outputs: self.n, bias: is_stacked }
    }
}
