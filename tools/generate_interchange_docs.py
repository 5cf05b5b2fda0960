#!/usr/bin/env python3
"""Write what docs/interchange.md says of names and settings, from the tables of architectures.

`--check` exits 1 when it is stale.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.interchange.architecture import ABSENT, MEANINGLESS
from megatron.interchange.fields import ATTENTION_BIAS, VOCABULARY
from megatron.interchange.known import ARCHITECTURES, read_config
from megatron.interchange.moves import Move
from tools import generated

PAGE = generated.ROOT / "docs" / "interchange.md"
# One layer, with all that an architecture may have: biases, an output layer of its own.
_LAYER = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 1),
    **dict.fromkeys(("hidden_size", "n_embd"), 16),
    **dict.fromkeys(("num_attention_heads", "n_head"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "vocab_size", "intermediate_size"), 32),
    **dict.fromkeys(("num_key_value_heads", "num_experts", "num_local_experts", "num_experts_per_tok"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    "tie_word_embeddings": False,
}


def examples() -> Iterator[tuple[str, dict[str, object]]]:
    """A config.json of each architecture."""
    for name, architecture in ARCHITECTURES.items():
        known = {key for field in architecture.settings for key in field.keys}
        json = {key: value for key, value in _LAYER.items() if key in known}
        biases = {"attention_bias": True} if ATTENTION_BIAS in architecture.settings else {}
        yield name, {"model_type": name, **json, **biases}


def _table(head: str, rows: Iterable[tuple[str, tuple[str, ...]]]) -> str:
    """Rows that several architectures have, once. rows: an architecture, and its cells."""
    having: dict[tuple[str, ...], list[str]] = {}
    for name, cells in rows:
        having.setdefault(cells, []).append(name)
    everywhere = len(ARCHITECTURES)
    lines = [head, "|" + "---|" * (head.count("|") - 1)]
    for cells, names in having.items():
        where = "all" if len(names) == everywhere else ", ".join(names)
        lines.append(f"| {' | '.join((*cells, where))} |")
    return "\n".join(lines) + "\n"


def _names() -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, json in examples():
        model = read_config(json)
        by_ours: dict[str, list[Move]] = {}
        for move in model.architecture.catalogue(model.config(), 32, 32).moves:
            by_ours.setdefault(move.ours.name, []).append(move)
        for ours, moves in by_ours.items():
            of_experts = ".mlp.experts." in ours
            moves = [move for move in moves if not of_experts or move.ours.box.offset[0] == 0]
            theirs = list(dict.fromkeys(move.theirs.name for move in moves))
            how = (
                ["by query group"]
                if len(moves) > len(theirs)
                else ["one below the other"] * (len(theirs) > 1)
            )
            how += ["transposed"] * moves[0].transposed + ["for each expert E"] * of_experts
            numbered = [
                f"`{re.sub(r'layers[.]0[.]|h[.]0[.]', _numbered, tensor)}`" for tensor in (ours, *theirs)
            ]
            numbered = [text.replace(".experts.0.", ".experts.E.") for text in numbered]
            yield name, (numbered[0], ", ".join(numbered[1:]), ", ".join(how))


def _numbered(layer: re.Match[str]) -> str:
    return layer[0].replace("0", "N")


def _settings(*, taken: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    """taken: those that become fields of ours; the others have to say what the model is anyway."""
    for name, json in examples():
        for field in ARCHITECTURES[name].settings:
            if bool(field.read(json, {}) or field is VOCABULARY) == taken:
                yield name, (", ".join(f"`{key}`" for key in field.keys), field.means)


def _fixed() -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, architecture in ARCHITECTURES.items():
        for ours, value in architecture.always.items():
            yield name, (f"`{ours}`", str(value).lower() if isinstance(value, bool) else str(value))


def tables() -> str:
    """Markdown."""
    listed = [", ".join(f"`{key}`" for key in sorted(keys)) for keys in (MEANINGLESS, ABSENT)]
    return (
        "### Names\nN: the layer. Biases and the output layer are there where the settings say so.\n\n"
        + _table("| here | there | rows | architectures |", _names())
        + "\n### Fields of `config.json`\n"
        + _table("| field | here | architectures |", _settings(taken=True))
        + "\n### What cannot be expressed\nA field with any other value is refused by its name.\n\n"
        + _table("| field | what it may be | architectures |", _settings(taken=False))
        + f"\nRefused in every architecture unless null, false or empty: {listed[1]}.\n"
        "\nA model of ours is exported as an architecture that has its settings; these are fixed:\n\n"
        + _table("| field of ours | value | architectures |", _fixed())
        + f"\n### Fields that mean nothing for training\n{listed[0]}.\n"
    )


def page(text: str) -> str:
    """The page with its tables."""
    return generated.between(text, "tables", "generate_interchange_docs.py", tables())


def main() -> int:
    """0, or 1 with --check when the page is stale."""
    return generated.main(__doc__, lambda: {PAGE: page(PAGE.read_text())})


if __name__ == "__main__":
    sys.exit(main())
