"""What an architecture is: its settings and its tensors, each as one table (floor 0, pure)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.rectangles import Rectangle
from megatron.core.transformer.layer_table import expert_layers, layer_table
from megatron.core.transformer.model_config import TransformerConfig
from megatron.core.words import first_of
from megatron.interchange.fields import VOCABULARY, Field, Json, SettingError, own_code
from megatron.interchange.moves import Catalogue, Move, Part, all_rows, stacked


class InterchangeError(CheckpointError):
    """Another format's checkpoint cannot be read or written as asked: which fields or tensors (status 3)."""


Tensors = Callable[[TransformerConfig], Iterator[Move]]

# Fields of config.json that say nothing about the model that is trained: how it is sampled from, stored, shown.
MEANINGLESS = frozenset(
    "_name_or_path _attn_implementation _commit_hash architectures model_type transformers_version dtype torch_dtype "
    "use_cache return_dict output_hidden_states output_attentions output_scores chunk_size_feed_forward "
    "id2label label2id num_labels problem_type finetuning_task task_specific_params torchscript use_bfloat16 "
    "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id "
    "pretraining_tp gradient_checkpointing is_decoder prefix max_length min_length do_sample "
    "temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size num_beams "
    "num_beam_groups diversity_penalty early_stopping bad_words_ids encoder_no_repeat_ngram_size "
    "num_return_sequences return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values "
    "exponential_decay_length_penalty suppress_tokens begin_suppress_tokens tf_legacy_loss tokenizer_class "
    "summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout n_ctx "
    "unsloth_version unsloth_fixed".split()
)
# Far beyond any model; tables of more are not made, whatever a config.json says.
_MOST_PARTS = 1 << 16
# What no architecture here has; false or null says so.
ABSENT = ("is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size", "pruned_heads",
           "quantization_config", "tie_encoder_decoder")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class HFModel:
    """What a config.json says of a model. flags: values of our fields."""

    architecture: Architecture
    flags: Mapping[str, Any]
    vocab_size: int

    def config(self, **more: Any) -> TransformerConfig:
        """The resolved model. more: fields that are given instead."""
        sequence = {"seq_length": self.flags["max_position_embeddings"]}
        return TransformerConfig(**{**sequence, **self.flags, **more}).resolved()


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One `model_type` of Hugging Face.

    class_name: in field `architectures`. always: our fields that are the same in each of its models. fields: its
    settings. tensors: its moves but for word embeddings and output layer. word, head: their names of these.
    base: the prefix that files of the bare model leave out. ignored: patterns of tensors that hold nothing trained.
    """

    model_type: str
    class_name: str
    always: Mapping[str, Any]
    fields: tuple[Field, ...]
    tensors: Tensors
    word: str = "model.embed_tokens.weight"
    head: str = "lm_head.weight"
    base: str = "model."
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)

    @property
    def settings(self) -> tuple[Field, ...]:
        """Its own, and those of every architecture."""
        return (*self.fields, VOCABULARY, own_code(self.class_name))

    def read(self, json: Json, given: Mapping[str, Any] | None = None) -> HFModel:
        """given: our fields that flags give; they count. Raises InterchangeError with every problem."""
        given, flags, problems = dict(given or {}), dict(self.always), []
        for field in self.settings:
            try:
                flags |= field.read(json, given)
            except SettingError as error:
                problems.append(str(error))
        known = {key for field in self.settings for key in field.keys} | MEANINGLESS
        for key in sorted(json.keys() - known):
            if key not in ABSENT:
                problems.append(
                    f"{key}: not known for model_type {self.model_type!r}, so what it changes is not known"
                )
            elif json[key] not in (None, False, {}, []):
                problems.append(f"{key}: models with it cannot be expressed")
        for parts, key in (("heads of attention", "num_attention_heads"), ("experts", "num_experts")):
            if not problems and flags["num_layers"] * flags.get(key, 1) > _MOST_PARTS:
                problems.append(f"more than {_MOST_PARTS} {parts} in all layers")
        if problems:
            raise InterchangeError("config.json: " + "; ".join(problems))
        return HFModel(self, flags | given, json["vocab_size"])

    def write(self, config: TransformerConfig, vocab_size: int) -> dict[str, Any]:
        """config.json of a model of ours. Raises InterchangeError where this architecture cannot say it."""
        json: dict[str, Any] = {"architectures": [self.class_name], "model_type": self.model_type}
        json["vocab_size"] = vocab_size
        for field in self.settings:
            json |= field.write(config)
        there = self.read(json).config(seq_length=config.seq_length)
        ours, theirs = _meaning(config), _meaning(there)
        differing = [
            f"{name} is {ours.get(name)!r}, {self.model_type} has {theirs.get(name)!r}"
            for name in {**ours, **theirs}
            if ours.get(name) != theirs.get(name)
        ]
        if differing:
            raise InterchangeError(
                f"--model-type {self.model_type} cannot express this model: {first_of(differing, '; ')}"
            )
        return json

    def catalogue(self, config: TransformerConfig, vocab_size: int, padded_vocab_size: int) -> Catalogue:
        """All moves of a model. vocab_size: rows of theirs; padded_vocab_size: of ours."""
        names = {"embedding.word_embeddings.weight": self.word}
        if config.untie_embeddings_and_output_weights:
            names["output_layer.weight"] = self.head
        hidden, more = config.hidden_size, padded_vocab_size - vocab_size
        assert more >= 0, f"{vocab_size} rows do not fit into {padded_vocab_size}"
        moves = [
            move
            for ours, theirs in names.items()
            for move in stacked(ours, [all_rows(theirs, vocab_size)], (hidden,), padding=more)
        ]
        added = Rectangle((vocab_size, 0), (more, hidden))
        padding = tuple(Part(ours, (padded_vocab_size, hidden), added) for ours in names) if more else ()
        return Catalogue((*moves, *self.tensors(config)), padding)

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor of theirs holds nothing that is trained."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)


# What weights mean by: all but sizes of a run, dropout, initial values and ways to compute the same.
_COMPARED = tuple(
    "num_layers hidden_size num_attention_heads num_query_groups kv_channels max_position_embeddings "
    "position_embedding_type rotary_base rotary_percent rotary_interleaved rotary_seq_len_interpolation_factor "
    "use_rope_scaling untie_embeddings_and_output_weights embedding_multiplier normalization norm_epsilon "
    "apply_layernorm_1p qk_layernorm activation add_bias_linear add_qkv_bias attention_output_bias".split()
)
_COMPARED_OF_EXPERTS = tuple(
    "moe_router_score_function moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_enable_expert_bias "
    "moe_router_num_groups moe_router_group_topk moe_shared_expert_gate".split()
)


def _meaning(config: TransformerConfig) -> dict[str, Any]:
    """The values that are compared, by name."""
    names, table = _COMPARED, layer_table(config)
    values: dict[str, Any] = {}
    for layer, kind in enumerate(table):
        values[f"layer {layer}'s MLP"] = kind.experts or kind.mlp_width
    if expert_layers(config):
        names += _COMPARED_OF_EXPERTS
        values["sinkhorn"] = "sinkhorn" in config.moe_router_load_balancing_type
    return {name: getattr(config, name) for name in names} | values
