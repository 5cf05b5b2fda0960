"""Hugging Face models of toy size, one an architecture, and their weights in ours through the tables of interchange."""

import json
from pathlib import Path

import tokenizers
import torch
import transformers

from megatron.core.dist_checkpointing.loading import load_pieces
from megatron.core.dist_checkpointing.state import LocalPiece
from megatron.core.models.gpt.gpt import GPTModel
from megatron.interchange.hf_folder import open_folder, read_config_file
from megatron.interchange.known import ARCHITECTURES

VOCAB, POSITIONS = 61, 32
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_GPT2 = {"vocab_size": VOCAB, "n_positions": POSITIONS, "n_embd": 32, "n_layer": 2, "n_head": 4,
         "bos_token_id": 0, "eos_token_id": 1}  # fmt: skip
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
           "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
TOYS = {
    "gpt2": ("gpt2", _GPT2),
    "gpt2-erf": ("gpt2", {**_GPT2, "activation_function": "gelu"}),
    "llama2": ("llama", {**_SIZES, "num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "llama3.2": ("llama", {**_SIZES, "tie_word_embeddings": True, "rope_parameters": _LLAMA3}),
    "llama-biases": ("llama", {**_SIZES, "attention_bias": True, "head_dim": 12}),
    "mistral": ("mistral", {**_SIZES, "sliding_window": POSITIONS, "head_dim": 12}),
    "qwen2": ("qwen2", _SIZES),
    "qwen3": ("qwen3", {**_SIZES, "head_dim": 12, "tie_word_embeddings": True}),
    # Of a width whose root is no number of bf16's: 6.9375, not 6.9282.
    "gemma": ("gemma", {**_SIZES, "hidden_size": 48, "head_dim": 12, "num_key_value_heads": 1}),
    "phi3": ("phi3", {**_SIZES, "sliding_window": None, "original_max_position_embeddings": POSITIONS}),
}
_ROUTED = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.001}
_SPARSE = {"num_experts": 6, "moe_intermediate_size": 20, **_ROUTED}
TOYS |= {
    "mixtral": ("mixtral", {**_SIZES, "num_local_experts": 5, "head_dim": 12, **_ROUTED}),
    "qwen2-moe": (
        "qwen2_moe",
        {**_SIZES, **_SPARSE, "shared_expert_intermediate_size": 28, "mlp_only_layers": [1]},
    ),
    "qwen3-moe": ("qwen3_moe", {**_SIZES, **_SPARSE, "head_dim": 12, "norm_topk_prob": True}),
    "qwen3-moe-sums": ("qwen3_moe", {**_SIZES, **_SPARSE, "head_dim": 12, "mlp_only_layers": [0]}),
}

# A vocabulary that tensor parallel ranks do not divide; `save_character_tokenizer` has it.
ODD = {
    "odd": ("llama", {**_SIZES, "vocab_size": 101, "num_key_value_heads": 4, "max_position_embeddings": 64})
}


def toy_model(
    name: str, dtype: torch.dtype = torch.float32, seed: int = 3, layers: int = 2, vocab: int | None = None
):
    """A Hugging Face model with random weights, norms and biases among them."""
    model_type, sizes = {**TOYS, **ODD}[name]
    depth = "n_layer" if "n_layer" in sizes else "num_hidden_layers"
    sizes = {**sizes, depth: layers, "vocab_size": vocab or sizes["vocab_size"]}
    config = transformers.AutoConfig.for_model(model_type, **sizes, attn_implementation="eager")
    config._experts_implementation = "eager"  # the grouped product is not built for fp64
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2, generator=generator)
    return model


def saved_toy(name: str, folder: Path, dtype: torch.dtype = torch.float32, **options):
    """The same, saved to a folder."""
    model = toy_model(name, dtype)
    model.save_pretrained(folder, **options)
    return model


def stored_shapes(model) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's tensors by the names that they have in its files: of experts, which are one tensor in
    memory, one each."""
    mixtral = model.config.model_type == "mixtral"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    shapes: dict[str, tuple[int, ...]] = {}
    for name, value in model.named_parameters():
        name, shape = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name, tuple(value.shape)
        prefix, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            parts = [(gate, (shape[1] // 2, shape[2])), (up, (shape[1] // 2, shape[2]))]
        elif last == "down_proj" and prefix.endswith(".experts"):
            parts = [(down, shape[1:])]
        else:
            shapes[name] = shape
            continue
        shapes |= {f"{prefix}.{n}.{part}.weight": its for n in range(shape[0]) for part, its in parts}
    return shapes


CHARACTERS = [*map(chr, range(0x20, 0x7F)), "\n", "\u00e9", "\u00df", "<unk>", "<s>", "</s>"]


def save_character_tokenizer(folder: Path) -> None:
    """A tokenizer.json of 101 ids, a character each, that begins texts with <s>."""
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(
            {text: number for number, text in enumerate(CHARACTERS)}, unk_token="<unk>"
        )
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(CHARACTERS[-3:])
    backend.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", None, [("<s>", 99)])
    roles = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **roles).save_pretrained(folder)


def our_model(folder: Path, dtype: torch.dtype = torch.float32, padding: int = 0) -> GPTModel:
    """Ours with the weights of a folder."""
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    source = open_folder(folder, rows=rows + padding)
    config = read_config_file(folder)[0].config(seq_length=POSITIONS)
    model = GPTModel(config, padded_vocab_size=rows + padding, seed=1, params_dtype=dtype)
    pieces = [
        LocalPiece("model." + name, tuple(weight.shape), (0,) * weight.dim(), weight.detach())
        for name, weight in model.named_parameters()
    ]
    load_pieces(source, pieces)
    return model.eval()


@torch.no_grad()
def copy_weights(theirs, ours: GPTModel) -> None:
    """A transformers model's weights into ours of the same sizes, by the table of its architecture."""
    tensors = dict(theirs.named_parameters()), dict(ours.named_parameters())
    rows = theirs.config.vocab_size
    catalogue = ARCHITECTURES[theirs.config.model_type].catalogue(ours.config, rows, rows)
    shapes = [{name: tuple(value.shape) for name, value in side.items()} for side in tensors]
    assert catalogue.problems(ours=shapes[1], theirs=shapes[0]) == []
    for move in catalogue.moves:
        part = tensors[0][move.theirs.name][move.theirs.box.slices]
        tensors[1][move.ours.name][move.ours.box.slices].copy_(part.t() if move.transposed else part)
