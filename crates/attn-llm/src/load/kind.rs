//! The kinds of models: which parts their layers have beside the weights of products and norms.

/// Whether every layer of a model has a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Presence {
    Never,
    /// If the first layer has it.
    Optional,
    Required,
}

/// Where the matrix of the logits comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Output {
    /// From the embeddings; a matrix of its own must equal them.
    Tied,
    /// It is a matrix of its own.
    Own,
    /// It is a matrix of its own where the file has one, else the embeddings. So are GGUF files, which have no key for it: llama.cpp takes
    /// `token_embd.weight` where `output.weight` is missing, for all architectures that are read here (`load_arch_tensors` of
    /// `llama`, `qwen2` and `qwen3` in its `src/models`).
    Either,
}

/// What the tensors of a kind of model must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Kind {
    /// Biases of Q, K and V.
    pub qkv_bias: Presence,
    /// The bias behind attention.
    pub output_bias: Presence,
    /// Biases of the feed-forward layer.
    pub mlp_bias: Presence,
    /// RMSNorm of each head of Q and K.
    pub head_norms: Presence,
    pub output: Output,
}

impl Kind {
    /// The kind of this name, as `config.json` and GGUF files give it; none if it is not supported.
    pub fn of(name: &str) -> Option<Self> {
        let bare = Kind {
            qkv_bias: Presence::Never,
            output_bias: Presence::Never,
            mlp_bias: Presence::Never,
            head_norms: Presence::Never,
            output: Output::Either,
        };
        match name {
            "llama" => Some(Kind {
                qkv_bias: Presence::Optional,
                output_bias: Presence::Optional,
                mlp_bias: Presence::Optional,
                ..bare
            }),
            "mistral" => Some(bare),
            "qwen2" => Some(Kind {
                qkv_bias: Presence::Required,
                ..bare
            }),
            "qwen3" => Some(Kind {
                qkv_bias: Presence::Optional,
                output_bias: Presence::Optional,
                head_norms: Presence::Required,
                ..bare
            }),
            _ => None,
        }
    }

    /// Whether each layer has a part of this GGUF name: its weight, its bias.
    pub fn presence(&self, part: &str) -> [Presence; 2] {
        match part {
            "attn_q" | "attn_k" | "attn_v" => [Presence::Required, self.qkv_bias],
            "attn_output" => [Presence::Required, self.output_bias],
            "ffn_gate" | "ffn_up" | "ffn_down" => [Presence::Required, self.mlp_bias],
            "attn_q_norm" | "attn_k_norm" => [self.head_norms, Presence::Never],
            _ => [Presence::Required, Presence::Never],
        }
    }
}
