"""Rules on the model's shape and on recompute (floor 0)."""

from __future__ import annotations

from megatron.core.optional import available
from megatron.core.transformer.transformer_config import ACTIVATIONS
from megatron.training.config.flag_lists import TRANSFORMER_ENGINE
from megatron.training.config.rule_table import RuleContext, RuleTable, spelled

RULES = RuleTable()
rule = RULES.rule


# Model


@rule(
    "heads", "--hidden-size --num-attention-heads --kv-channels", "change one of them, or give --kv-channels"
)
def _heads(s: RuleContext) -> str | None:
    return None if s.given("kv_channels") else s.undivided("hidden_size", "num_attention_heads")


@rule("query-groups", "--num-query-groups --num-attention-heads", "choose groups that divide the heads")
def _query_groups(s: RuleContext) -> str | None:
    return s.undivided("num_attention_heads", "num_query_groups")


@rule(
    "positions",
    "--max-position-embeddings --seq-length",
    "raise --max-position-embeddings to the sequence length",
)
def _positions(s: RuleContext) -> str | None:
    positions, length = s.value("max_position_embeddings"), s.value("seq_length")
    if positions is None or length is None or positions >= length:
        return None
    return f"--max-position-embeddings {positions} is below --seq-length {length}"


@rule(
    "rotary",
    "--rotary-percent --kv-channels --position-embedding-type",
    "choose a share that gives an even number",
)
def _rotary(s: RuleContext) -> str | None:
    percent, head = s.value("rotary_percent"), s.value("kv_channels")
    if s.value("position_embedding_type") != "rope" or head is None:
        return None
    if not 0 < percent <= 1:
        return f"--rotary-percent {percent}: must be above 0 and at most 1"
    rotated = int(head * percent)
    return f"{rotated} of {head} head dimensions would be rotated" if rotated < 2 or rotated % 2 else None


@rule(
    "position-embedding-type",
    "--use-rotary-position-embeddings --position-embedding-type",
    "pass --position-embedding-type rope alone",
)
def _position_embedding_type(s: RuleContext) -> str | None:
    kind = s.value("position_embedding_type")
    if s.value("use_rotary_position_embeddings") and kind != "rope":
        return f"--use-rotary-position-embeddings contradicts --position-embedding-type {kind}"
    return None


@rule(
    "no-position-embedding",
    "--no-position-embedding",
    "pass --position-embedding-type none (or rope) instead",
)
def _no_position_embedding(s: RuleContext) -> str | None:
    given = any(used.entry.name == "no_position_embedding" for used in s.used)
    learned = s.value("position_embedding_type") == "learned_absolute"
    return "--no-position-embedding contradicts learned_absolute positions" if given and learned else None


@rule("activation", " ".join(map(spelled, ACTIVATIONS)), "keep one of them")
def _activation(s: RuleContext) -> str | None:
    chosen = [spelled(name) for name in ACTIVATIONS if s.value(name)]
    return f"{' and '.join(chosen)} exclude each other" if len(chosen) > 1 else None


@rule("attention-backend", "--use-flash-attn --attention-backend", "keep one of them")
def _attention_backend(s: RuleContext) -> str | None:
    backend = s.value("attention_backend")
    if s.value("use_flash_attn") and backend not in ("flash", "auto"):
        return f"--use-flash-attn contradicts --attention-backend {backend}"
    return None


@rule(
    "transformer-engine",
    "--transformer-impl",
    "pass --transformer-impl local, or install it (pip install 'transformer_engine[pytorch]') once layers "
    "on it are "
    f"built, see docs/roadmap.md, {TRANSFORMER_ENGINE[9:]!r}",
)
def _transformer_engine(s: RuleContext) -> str | None:
    if s.value("transformer_impl") != "transformer_engine" or s.check_only:
        return None
    if not available("transformer_engine"):
        return "--transformer-impl transformer_engine: Transformer Engine is not installed here"
    return "--transformer-impl transformer_engine: layers on Transformer Engine are not supported yet"


# Recompute


@rule(
    "recompute",
    "--recompute-granularity --recompute-method --recompute-num-layers --recompute-activations",
    "full: give --recompute-method uniform|block and --recompute-num-layers",
)
def _recompute(s: RuleContext) -> str | None:
    granularity, method, layers = (
        s.value("recompute_granularity"),
        s.value("recompute_method"),
        s.value("recompute_num_layers"),
    )
    if s.value("recompute_activations") and granularity == "full":
        return "--recompute-activations (selective) contradicts --recompute-granularity full"
    if granularity == "full" and (method is None or layers is None):
        return "--recompute-granularity full needs --recompute-method and --recompute-num-layers"
    return None


@rule(
    "recompute-modules",
    "--recompute-modules",
    "pass core_attn; other modules: see docs/roadmap.md, 'model variants'",
)
def _recompute_modules(s: RuleContext) -> str | None:
    if s.value("recompute_granularity") != "selective":
        return None  # without effect: a warning
    others = [name for name in s.value("recompute_modules") if name != "core_attn"]
    return f"--recompute-modules {' '.join(others)}: only core_attn is supported" if others else None
