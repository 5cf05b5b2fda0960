"""config.json of published models, as far as their tensors follow from it: sizes from the papers and model cards."""

_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}  # fmt: skip


def _like_llama(model_type, layers, hidden, heads, groups, ffn, vocab, positions, theta, **more):
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "rope_theta": theta,
        **more,
    }


def _gpt2(layers, hidden, heads):
    return {"model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": 1024,
            "vocab_size": 50257, "n_ctx": 1024}  # fmt: skip


def _qwen2(layers, hidden, heads, groups, ffn, vocab=151936, **more):
    return _like_llama("qwen2", layers, hidden, heads, groups, ffn, vocab, 32768, 1e6,
                       sliding_window=131072, use_sliding_window=False, max_window_layers=layers, **more)  # fmt: skip


def _qwen3(layers, hidden, heads, ffn, **more):
    return _like_llama("qwen3", layers, hidden, heads, 8, ffn, 151936, 40960, 1e6, head_dim=128, **more)


def _mixtral(layers, hidden, heads, ffn, vocab, positions):
    return _like_llama("mixtral", layers, hidden, heads, 8, ffn, vocab, positions, 1e6, num_local_experts=8,
                       num_experts_per_tok=2, router_aux_loss_coef=0.02, sliding_window=None)  # fmt: skip


def _qwen3_moe(layers, hidden, heads, ffn, width):
    return _like_llama("qwen3_moe", layers, hidden, heads, 4, ffn, 151936, 40960, 1e6, head_dim=128, num_experts=128,
                       num_experts_per_tok=8, moe_intermediate_size=width, norm_topk_prob=True, decoder_sparse_step=1,
                       mlp_only_layers=[], max_window_layers=layers)  # fmt: skip


def _qwen2_moe(layers, hidden, heads, groups, ffn, width, shared, experts, topk, positions):
    return _like_llama("qwen2_moe", layers, hidden, heads, groups, ffn, 151936, positions, 1e6, num_experts=experts,
                       num_experts_per_tok=topk, moe_intermediate_size=width, norm_topk_prob=False,
                       shared_expert_intermediate_size=shared)  # fmt: skip


PUBLISHED = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "llama-2-7b": _like_llama("llama", 32, 4096, 32, 32, 11008, 32000, 4096, 1e4),
    "llama-2-13b": _like_llama("llama", 40, 5120, 40, 40, 13824, 32000, 4096, 1e4),
    "llama-2-70b": _like_llama("llama", 80, 8192, 64, 8, 28672, 32000, 4096, 1e4),
    "llama-3-8b": _like_llama("llama", 32, 4096, 32, 8, 14336, 128256, 8192, 5e5),
    "llama-3.1-70b": _like_llama("llama", 80, 8192, 64, 8, 28672, 128256, 131072, 5e5, rope_scaling=_LLAMA3),
    "llama-3.1-405b": _like_llama("llama", 126, 16384, 128, 8, 53248, 128256, 131072, 5e5, rope_scaling=_LLAMA3),
    "llama-3.2-1b": _like_llama("llama", 16, 2048, 32, 8, 8192, 128256, 131072, 5e5, head_dim=64,
                                tie_word_embeddings=True, rope_scaling=_LLAMA3 | {"factor": 32.0}),
    "mistral-7b-v0.1": _like_llama("mistral", 32, 4096, 32, 8, 14336, 32000, 4096, 1e4, sliding_window=4096),
    "mistral-7b-v0.3": _like_llama("mistral", 32, 4096, 32, 8, 14336, 32768, 32768, 1e6, sliding_window=None),
    "mistral-nemo-12b": _like_llama("mistral", 40, 5120, 32, 8, 14336, 131072, 131072, 1e6, head_dim=128,
                                    sliding_window=None),
    "qwen2-0.5b": _qwen2(24, 896, 14, 2, 4864, tie_word_embeddings=True),
    "qwen2.5-7b": _qwen2(28, 3584, 28, 4, 18944, 152064),
    "qwen2.5-72b": _qwen2(80, 8192, 64, 8, 29568, 152064),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tie_word_embeddings=True),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600),
    "gemma-2b": _like_llama("gemma", 18, 2048, 8, 1, 16384, 256000, 8192, 1e4, head_dim=256, hidden_act="gelu"),
    "gemma-7b": _like_llama("gemma", 28, 3072, 16, 16, 24576, 256000, 8192, 1e4, head_dim=256),
    "phi-3-mini-4k": _like_llama("phi3", 32, 3072, 32, 32, 8192, 32064, 4096, 1e4,
                                 original_max_position_embeddings=4096, sliding_window=None),
    "mixtral-8x7b": _mixtral(32, 4096, 32, 14336, 32000, 32768),
    "mixtral-8x22b": _mixtral(56, 6144, 48, 16384, 32000, 65536),
    "qwen1.5-moe-a2.7b": _qwen2_moe(24, 2048, 16, 16, 5632, 1408, 5632, 60, 4, 8192),
    "qwen2-57b-a14b": _qwen2_moe(28, 3584, 28, 4, 18944, 2560, 20480, 64, 8, 32768),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 32, 6144, 768),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 64, 12288, 1536),
}  # fmt: skip
