"""How many heads a projection of attention has, from the module that holds it and from the model's config.

A head is a run of features of one width, that go out of q, k and v or come into o, in every class that is listed or
named here. So "heads" is a number of equal parts, and an axis. A number that the weight's shape does not confirm is
never used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import nn

from ds_muon.blocks import Axis, BlocksError

Kind: TypeAlias = Literal["q", "k", "v", "o", "q_b", "kv_b", "fused"]

# The layer's own name, in an attention module.
_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("q_proj", "query", "query_proj", "wq", "q", "q_lin", "to_q", "q_proj_weight", "q_attn"), "q"),
    **dict.fromkeys(("k_proj", "key", "key_proj", "wk", "k", "k_lin", "to_k", "k_proj_weight"), "k"),
    **dict.fromkeys(("v_proj", "value", "value_proj", "wv", "v", "v_lin", "to_v", "v_proj_weight"), "v"),
    **dict.fromkeys(("o_proj", "out_proj", "wo", "Wo", "o", "out_lin", "dense", "c_proj"), "o"),
    # DeepSeek's latent attention: the projections up from the latents. Those down to them have no heads.
    "q_b_proj": "q_b",
    "kv_b_proj": "kv_b",
}
# One matrix of queries, keys and values. In whatever order its class has them, each head of each is a run of features:
# read from the forward of every class, and checked against it in tests/unit/pure/test_heads.py.
_FUSED: dict[str, str] = {
    "BloomAttention": "query_key_value",
    "DbrxAttention": "Wqkv",
    "FalconAttention": "query_key_value",
    "GPT2Attention": "c_attn",
    "GPTBigCodeAttention": "c_attn",
    "GPTNeoXAttention": "query_key_value",
    "ModernBertAttention": "Wqkv",
    "MptAttention": "Wqkv",
    "MultiheadAttention": "in_proj_weight",
    "Phi3Attention": "qkv_proj",
}
_ATTENTION_CLASS = re.compile(r"Attention|Attn", re.IGNORECASE)

_QUERIES = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KEYS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_n_heads", "kv_heads")
_WIDTHS = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "d_kv")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "embed_dim", "dim")


@dataclass(frozen=True)
class Heads:
    """``count`` equal parts along ``axis``, for a weight of this kind."""

    count: int
    axis: Axis
    kind: Kind


class Attentions:
    """The attention modules of a model, by name."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = dict(model.named_modules(remove_duplicate=False))

    def kind(self, name: str) -> Kind | None:
        """What the parameter of this name is to its attention module; None if it is no projection of one."""
        found = self._found(name)
        return found[1] if found else None

    def heads(self, name: str, outputs: int, inputs: int) -> Heads:
        """The heads of a projection with so many features.

        Raises:
            BlocksError: it is no projection of attention that is known, or its shape confirms no number of heads.
        """
        found = self._found(name)
        if not found:
            raise BlocksError(
                'has "heads", but this is not known as a projection of attention (docs/blocks.md lists them); give '
                'the number of equal parts, such as {"split": 16}, with "axis": "in" for an output projection'
            )
        attention, kind = found
        axis: Axis = "in" if kind == "o" else "out"
        features = inputs if kind == "o" else outputs
        counts = _counts(attention, self._model)
        count, width = counts.of(kind)
        if not count or not width or count * width != features:
            if count and width:
                problem = f'{count} heads of {width} are not the {features} features of axis "{axis}"'
            else:
                problem = f'the {features} features of axis "{axis}" cannot be told apart'
            raise BlocksError(
                f'has "heads", but {type(attention).__name__} and the config have {counts}: {problem}; give the number '
                f'of equal parts, such as {{"split": 16}}, or leave the weight whole'
            )
        return Heads(count, axis, kind)

    def _found(self, name: str) -> tuple[nn.Module, Kind] | None:
        path, _, own = name.partition(".parametrizations.")[0].rpartition(".")
        if ".parametrizations." in name:  # MODULE.parametrizations.weight.original is MODULE's weight
            path, own = f"{path}.{own}" if path else own, name.partition(".parametrizations.")[2].partition(".")[0]
        holder = self._modules.get(path)
        if own == "weight":
            path, _, own = path.rpartition(".")
            holder = self._modules.get(path)
        if holder is None:
            return None
        classes = type(holder).__mro__
        # Another class of the same name may have them in any order.
        checked = [each.__name__ for each in classes if each.__module__.partition(".")[0] in ("torch", "transformers")]
        if any(_FUSED.get(each) == own for each in checked):
            return holder, "fused"
        if own in _KINDS and any(_ATTENTION_CLASS.search(each.__name__) for each in classes):
            return holder, _KINDS[own]
        return None


@dataclass(frozen=True)
class _Counts:
    """Numbers of heads and their widths; 0: not known."""

    queries: int
    keys: int
    width: int
    nope: int
    rope: int
    value: int
    cross: bool

    def __str__(self) -> str:
        known = {"query": self.queries, "key-value": self.keys}
        heads = ", ".join(f"{number} {what} heads" for what, number in known.items() if number) or "no number of heads"
        widths = f"{self.nope} + {self.rope} (values {self.value})" if self.nope else str(self.width or "unknown")
        return f"{heads}, width {widths}"

    def of(self, kind: Kind) -> tuple[int, int]:
        """How many heads of which width a weight of this kind should have."""
        latent = bool(self.nope and self.value)
        if kind in ("q", "q_b"):
            return self.queries, self.nope + self.rope if latent else self.width
        if kind == "kv_b":
            return self.queries, self.nope + self.value if latent else 0
        if kind == "o":
            return self.queries, self.value if latent else self.width
        if kind == "fused":
            return (2 * self.keys if self.cross else self.queries + 2 * self.keys), self.width
        return self.keys, 0 if latent else self.width


def _counts(attention: nn.Module, model: nn.Module) -> _Counts:
    sources: list[Any] = [attention]
    if (config := getattr(attention, "config", None)) is not None:
        sources.append(config)
    elif not any(_ints(sources, _QUERIES)) and (config := getattr(model, "config", None)) is not None:
        # Of a model with several networks its parts have their own; the whole then has no such numbers.
        sources.append(config)

    def first(*names: str) -> int:
        return next(_ints(sources, names), 0)

    queries, hidden = first(*_QUERIES), first(*_HIDDEN)
    whole = queries and hidden % queries == 0
    return _Counts(
        queries=queries,
        keys=first(*_KEYS) or queries,
        width=first(*_WIDTHS) or (hidden // queries if whole else 0),
        nope=first("qk_nope_head_dim"),
        rope=first("qk_rope_head_dim"),
        value=first("v_head_dim"),
        cross=getattr(attention, "is_cross_attention", None) is True,
    )


def _ints(sources: Sequence[Any], names: Sequence[str]) -> Iterator[int]:
    """The numbers under these names: all names in the first source, then in the next."""
    for source in sources:
        for name in names:
            value = getattr(source, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                yield value
