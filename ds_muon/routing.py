"""Which half of the optimizer each parameter tensor goes to, and why.

A tensor is judged by all its names and by the modules that own them, so a tied weight gets the same answer whichever
name was registered first. The type of the owning module comes first, whole segments of the path second; a part of a
segment never counts.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from ds_muon.say import printable

Half: TypeAlias = Literal["muon", "adamw", "none"]

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
# Their weights scale element by element, also where normalized_shape makes them two-dimensional.
NORMS = (nn.LayerNorm, nn.RMSNorm)

# A module with one of these names is an output head; anywhere else in a path they count like HEAD_WORDS.
HEAD_NAMES = frozenset({"lm_head", "embed_out", "unembed", "unembedding", "output_embeddings"})
# These name other things too: part of a head only if the matrix maps onto the vocabulary.
HEAD_WORDS = HEAD_NAMES | {
    *("classifier_head", "decoder", "generator", "head", "logits", "mlm_head", "output", "output_head", "output_layer"),
    *("output_projection", "predictions", "to_logits"),
}
POSITION_WORDS = frozenset(
    {
        *("abs_pos_emb", "embed_positions", "pos_emb", "pos_embed", "pos_embedding", "pos_embeddings", "pos_encoding"),
        *("position_embedding", "position_embeddings", "position_encoding", "position_table", "positional_embedding"),
        *("positional_embeddings", "positional_encoding", "w_pos", "wpe"),
    }
)
EMBEDDING_WORDS = frozenset(
    {
        *("emb", "embed", "embed_in", "embed_tokens", "embedding", "embedding_table", "embeddings", "input_embeddings"),
        *("tok_emb", "tok_embed", "tok_embedding", "tok_embeddings", "token_emb", "token_embed", "token_embedding"),
        *("token_embeddings", "w_e", "word_embed", "word_embedding", "word_embeddings", "wte"),
    }
)


class RoutingError(ValueError):
    """A parameter, pattern or param group that cannot be routed as asked."""


@dataclass(frozen=True)
class Route:
    """One tensor: its first name, all its names, and the decision. Half "none" is not trained."""

    name: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    numel: int
    half: Half
    reason: str


@dataclass(frozen=True)
class Routing:
    """Every parameter tensor of a model, in order of first appearance."""

    routes: tuple[Route, ...]

    def of_half(self, half: Half) -> list[Route]:
        return [route for route in self.routes if route.half == half]

    def table(self) -> str:
        """One aligned line per tensor: name (and a second one, if tied), shape, half, reason."""
        rows = [("name", "shape", "half", "reason")]
        for route in self.routes:
            name = " = ".join(route.names[:2]) + (" = ..." if len(route.names) > 2 else "")
            rows.append((printable(name), " x ".join(map(str, route.shape)) or "scalar", route.half, route.reason))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        return "\n".join(line.rstrip() for line in lines)

    def summary(self) -> list[str]:
        """One line per half with counts; a third one if some tensors are not trained."""
        lines = [
            f"Muon: {_count(self.of_half('muon'), 'matrix', 'matrices')}",
            f"AdamW: {_count(self.of_half('adamw'), 'tensor', 'tensors')}",
        ]
        if idle := self.of_half("none"):
            some = ", ".join(f"{printable(route.name)} ({route.reason})" for route in idle[:3])
            lines.append(f"Not trained: {_count(idle, 'tensor', 'tensors')}: {some}{', ...' if len(idle) > 3 else ''}")
        return lines

    def digest(self, extra: str = "") -> bytes:
        """SHA-256 over names, shapes, halves and ``extra``: equal on two ranks that route equally."""
        facts = [[route.names, route.shape, route.half] for route in self.routes]
        return hashlib.sha256(json.dumps([facts, extra]).encode()).digest()


def _count(routes: Sequence[Route], one: str, many: str) -> str:
    return f"{len(routes)} {one if len(routes) == 1 else many}, {sum(route.numel for route in routes):,} elements"


def route(model: nn.Module, *, muon_params: Sequence[str] = (), adamw_params: Sequence[str] = ()) -> Routing:
    """Route every parameter of ``model``; reads the parameters and their ``use_muon`` tags, modifies nothing.

    Args:
        model: the module given to DeepSpeed.
        muon_params, adamw_params: glob patterns on parameter names; they overrule tags, and tags overrule the rules.

    Raises:
        RoutingError: a pattern without a match, two patterns that contradict each other, a tensor that Muon cannot
            take but a pattern or tag sends there, or no matrix for Muon at all.
    """
    tensors = _tensors(model)
    for key, patterns in (("muon_params", muon_params), ("adamw_params", adamw_params)):
        _check_matches(key, patterns, tensors)
    heads = _Heads.of(model, tensors)
    routes = []
    for tensor in tensors:
        half, reason = _decide(tensor, heads, muon_params, adamw_params)
        param = tensor.param
        routes.append(Route(tensor.name, tensor.names, tuple(param.shape), param.numel(), half, reason))
    routing = Routing(tuple(routes))
    if not routing.of_half("muon"):
        raise RoutingError(
            "the model has no trainable matrix for Muon "
            f"({'; '.join(routing.summary()[1:])}); use AdamW, or name matrices in optimizer.params.muon_params"
        )
    return routing


@dataclass(frozen=True)
class _Tensor:
    """A parameter with every (name, owning module) under which the model holds it."""

    param: nn.Parameter
    names: tuple[str, ...]
    owners: tuple[nn.Module, ...]

    @property
    def name(self) -> str:
        return self.names[0]

    def owned_by(self, types: tuple[type[nn.Module], ...]) -> bool:
        return any(isinstance(owner, types) for owner in self.owners)

    def places(self) -> Iterable[tuple[list[str], nn.Module]]:
        """Path segments of the owning module plus the parameter's own, with the owner."""
        for name, owner in zip(self.names, self.owners, strict=True):
            yield [*_owner_path(name).lower().split("."), name.lower().rpartition(".")[2]], owner


def _owner_path(name: str) -> str:
    # torch.nn.utils.parametrize moves a weight to MODULE.parametrizations.weight.original; MODULE still is its owner.
    return name.rpartition(".")[0].partition(".parametrizations.")[0]


def _tensors(model: nn.Module) -> list[_Tensor]:
    modules = dict(model.named_modules(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    params: dict[int, nn.Parameter] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if is_lazy(param):
            raise RoutingError(f"{name} has no shape yet; run the model once before deepspeed.initialize")
        names.setdefault(id(param), []).append(name)
        params[id(param)] = param
    return [
        _Tensor(params[key], tuple(names[key]), tuple(modules[_owner_path(name)] for name in names[key]))
        for key in names
    ]


def _check_matches(key: str, patterns: Sequence[str], tensors: list[_Tensor]) -> None:
    names = [name for tensor in tensors for name in tensor.names]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern.replace("*", ""), names, n=3, cutoff=0.4) or names[:3]
            raise RoutingError(
                f"optimizer.params.{key}: {pattern!r} matches no parameter; names are such as {', '.join(near)}"
            )


def _decide(
    tensor: _Tensor, heads: _Heads, muon_params: Sequence[str], adamw_params: Sequence[str]
) -> tuple[Half, str]:
    param = tensor.param
    if not param.requires_grad:
        return "none", "frozen"
    if param.numel() == 0:
        return "none", "empty"
    if not param.is_floating_point():
        raise RoutingError(f"{tensor.name} is {param.dtype}; ZeRO's flat fp32 weights cannot hold it: use real weights")

    to_muon, to_adamw = _first_match(tensor, muon_params), _first_match(tensor, adamw_params)
    if to_muon and to_adamw:
        raise RoutingError(
            f"{tensor.name} matches both muon_params {to_muon!r} and adamw_params {to_adamw!r}; narrow one of them"
        )
    tag = getattr(param, "use_muon", None)
    if tag is not None and not isinstance(tag, bool):
        raise RoutingError(f"{tensor.name}.use_muon = {tag!r}; set True, False or None")
    if to_muon or (tag and not to_adamw):
        asked_by = f"muon_params {to_muon!r}" if to_muon else "use_muon = True"
        _check_orthogonalizable(tensor, asked_by)
        return "muon", asked_by
    if to_adamw or tag is False:
        return "adamw", f"adamw_params {to_adamw!r}" if to_adamw else "use_muon = False"

    reason = _adamw_by_shape(tensor) or _adamw_by_type(tensor) or heads.reason(tensor) or _adamw_by_name(tensor)
    return ("adamw", reason) if reason else ("muon", "matrix")


def _first_match(tensor: _Tensor, patterns: Sequence[str]) -> str | None:
    return next((p for p in patterns if any(fnmatchcase(name, p) for name in tensor.names)), None)


def _check_orthogonalizable(tensor: _Tensor, asked_by: str) -> None:
    param = tensor.param
    if param.ndim > 2:
        why = f"{param.ndim}-D tensors are not available in this version; leave it to AdamW"
    elif param.ndim < 2:
        why = "Muon takes matrices only; leave it to AdamW"
    elif min(param.shape) == 1:
        why = "a matrix with a side of 1 has nothing to orthogonalize; leave it to AdamW"
    elif any(isinstance(owner, EMBEDDINGS) and owner.sparse for owner in tensor.owners):
        why = "it has sparse gradients; set sparse=False on its embedding, or leave it to AdamW"
    else:
        return
    raise RoutingError(f"{tensor.name} of shape {tuple(param.shape)}: {asked_by} sends it to Muon, but {why}")


def _adamw_by_shape(tensor: _Tensor) -> str | None:
    param = tensor.param
    if param.ndim < 2:
        return ("scalar", "vector")[param.ndim]
    if param.ndim > 2:
        return "convolution" if tensor.owned_by((_ConvNd,)) else f"{param.ndim}-D tensor"
    return "a side of 1" if min(param.shape) == 1 else None


def _adamw_by_type(tensor: _Tensor) -> str | None:
    if tensor.owned_by(EMBEDDINGS):
        return "embedding" if isinstance(tensor.owners[0], EMBEDDINGS) else "tied to an embedding"
    return "normalization" if tensor.owned_by(NORMS) else None


def _adamw_by_name(tensor: _Tensor) -> str | None:
    """For raw parameters and custom modules; a Linear inside ``patch_embed`` is a matrix like any other."""
    words = {word for path, owner in tensor.places() if not isinstance(owner, nn.Linear) for word in path[-2:]}
    if words & POSITION_WORDS:
        return "position table"
    if words & EMBEDDING_WORDS:
        return "embedding by name"
    return "output head by name" if words & HEAD_NAMES else None


@dataclass(frozen=True)
class _Heads:
    """What tells an output head of this model.

    Attributes:
        declared: ids of the parameters of what ``get_output_embeddings()`` returns.
        vocabularies: numbers of rows of its embeddings, position tables excepted.
        widths: input widths of its Linears. A vocabulary of such a size (bytes, say) may be met by chance.
    """

    declared: frozenset[int]
    vocabularies: frozenset[int]
    widths: frozenset[int]

    @classmethod
    def of(cls, model: nn.Module, tensors: list[_Tensor]) -> _Heads:
        declared = {id(param) for module in model.modules() for param in _declared_head(module)}
        vocabularies: set[int] = set()
        widths: set[int] = set()
        for tensor in (tensor for tensor in tensors if tensor.param.ndim == 2):
            rows, cols = tensor.param.shape
            if tensor.owned_by((nn.Linear,)):
                widths.add(cols)
            embedding = tensor.owned_by(EMBEDDINGS) or _adamw_by_name(tensor) == "embedding by name"
            if embedding and not any(POSITION_WORDS.intersection(path[-2:]) for path, _ in tensor.places()):
                vocabularies.add(rows)
        return cls(frozenset(declared), frozenset(vocabularies), frozenset(widths))

    def reason(self, tensor: _Tensor) -> str | None:
        if id(tensor.param) in self.declared:
            return "output head"
        linear = (path[:-1] for path, owner in tensor.places() if isinstance(owner, nn.Linear))
        return "output head" if any(self._named_as_head(path, tensor.param) for path in linear) else None

    def _named_as_head(self, path: list[str], param: nn.Parameter) -> bool:
        if path[-1] in HEAD_NAMES:
            return True
        rows = param.shape[0]
        if rows not in self.vocabularies or not HEAD_WORDS.intersection(path):
            return False
        # layers.3.attention.output of a byte-level model of width 256 is no head: inside numbered layers, where a
        # vocabulary may be met by chance, a word is not enough.
        return rows not in self.widths or not any(segment.isdigit() for segment in path[:-1])


def _declared_head(module: nn.Module) -> list[nn.Parameter]:
    try:
        # Any model may define the method, for any purpose; without an answer the names decide.
        head = module.get_output_embeddings()  # type: ignore[operator]
    except Exception:
        return []
    pieces = head if isinstance(head, list | tuple | nn.ModuleList) else [head]
    return [param for piece in pieces if isinstance(piece, nn.Module) for param in piece.parameters(recurse=False)]
