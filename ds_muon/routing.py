"""Which half of the optimizer each parameter tensor goes to, and why: globs, then tags, then ``roles``."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

from torch import nn
from torch.nn.parameter import is_lazy

from ds_muon.layout import Layout, Piece, whole
from ds_muon.roles import (
    EMBEDDINGS,
    FLAT_STACK,
    STACK,
    TENSOR_3D,
    NamedTensor,
    adamw_reason,
    is_conv1d,
    is_raw,
    named_tensors,
    output_heads,
)
from ds_muon.say import printable
from ds_muon.text import columns

Half: TypeAlias = Literal["muon", "adamw", "none"]

# Less of the elements in matrices and stacks than this goes to Muon: the model trains mostly in AdamW.
LEAST_SHARE = 0.5

_TAG_TRUE, _TAG_FALSE = "use_muon = True", "use_muon = False"
# What deepspeed.initialize leaves on every parameter beside use_muon, where the optimizer's type is its own Muon.
_DEEPSPEEDS_MARK = "muon_num_heads"
_CLEAR_TAGS = (
    "DeepSpeed's Muon is given all of two or more dimensions by such tags: to clear what is left of them, run "
    '"for p in model.parameters(): p.use_muon = None" before deepspeed.initialize'
)
_ON_STACKS = (
    'No stack of matrices can go to Muon in this version: choose "adam_lr", the rate of most of this model, with care, '
    "or use AdamW"
)
_ON_TAGS = 'Clear the use_muon tags, or name the tensors in "muon_params"'
_NOT_GIVEN = "not given to deepspeed.initialize"


class RoutingError(ValueError):
    """A parameter, pattern or param group that cannot be routed as asked."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))  # it names parameters


@dataclass(frozen=True)
class Route:
    """One tensor: its first name, all its names, and the decision. Half "none" is not trained.

    ``overruled`` is what the rules say, where a glob or a tag decides otherwise. ``layout`` says what the rows of a
    matrix are, by the type of the module to which its first name belongs.
    """

    name: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    numel: int
    half: Half
    reason: str
    overruled: str = ""
    layout: Layout = "out_in"

    def __str__(self) -> str:
        return f"{self.name} ({self.shown_shape}, {self.overruled or self.reason})"

    @property
    def shown_shape(self) -> str:
        return " x ".join(map(str, self.shape)) or "scalar"


@dataclass(frozen=True)
class Routing:
    """Every parameter tensor of a model, in order of first appearance."""

    routes: tuple[Route, ...]

    def of_half(self, half: Half) -> list[Route]:
        return [route for route in self.routes if route.half == half]

    def given(self, names: Collection[str]) -> Routing:
        """The same with no other tensors trained than those of these first names."""
        return Routing(
            tuple(
                route if route.half == "none" or route.name in names else replace(route, half="none", reason=_NOT_GIVEN)
                for route in self.routes
            )
        )

    def layouts(self) -> dict[str, Layout]:
        """How each tensor lies in memory, by its first name."""
        return {route.name: route.layout for route in self.routes}

    def pieces(self) -> dict[str, tuple[Piece, ...]]:
        """Where the matrices lie in each of Muon's tensors, by its first name."""
        return {route.name: whole(*route.shape) for route in self.of_half("muon")}

    def table(self) -> str:
        """One aligned line per tensor: name (and a second one, if tied), shape, half, reason."""
        rows = [("name", "shape", "half", "reason")]
        for route in self.routes:
            name = " = ".join(route.names[:2]) + (" = ..." if len(route.names) > 2 else "")
            reason = route.reason + (", stored in x out" if route.layout == "in_out" else "")
            rows.append((printable(name), route.shown_shape, route.half, reason))
        return "\n".join(columns(rows, "< < < <"))

    def summary(self) -> list[str]:
        """One line per half with counts and its share of what is trained; a third one if some tensors are not."""
        muon, adamw = self.of_half("muon"), self.of_half("adamw")
        trained = _elements(muon) + _elements(adamw)
        lines = [
            f"Muon: {_count(muon, 'matrix', 'matrices')} ({_percent(_elements(muon), trained)})",
            f"AdamW: {_count(adamw, 'tensor', 'tensors')} ({_percent(_elements(adamw), trained)})",
        ]
        if idle := self.of_half("none"):
            some = ", ".join(f"{printable(route.name)} ({route.reason})" for route in idle[:3])
            lines.append(f"Not trained: {_count(idle, 'tensor', 'tensors')}: {some}{', ...' if len(idle) > 3 else ''}")
        return lines

    def warnings(self) -> list[str]:
        """What is likely not meant: a model that Muon hardly trains, and tags that send it what is no matrix."""
        lines = []
        muon, left = _elements(self.of_half("muon")), [route for route in self.routes if _is_left_to_adamw(route)]
        if left and muon < LEAST_SHARE * (muon + _elements(left)):
            stacks = [route for route in left if route.reason != _TAG_FALSE]
            remedies = [_ON_STACKS] * bool(stacks) + [_ON_TAGS] * (stacks != left)
            lines.append(
                f"only {_percent(muon, muon + _elements(left))} of the elements in matrices and stacks of matrices go "
                f"to Muon. AdamW has the other {_elements(left):,}, such as {_some(left)}. {'. '.join(remedies)}"
            )
        if odd := [route for route in self.of_half("muon") if route.reason == _TAG_TRUE and route.overruled]:
            lines.append(
                f"use_muon = True sends {_count(odd, 'tensor', 'tensors')} to Muon that AdamW would have, such as "
                f"{_some(odd)}. {_CLEAR_TAGS}"
            )
        return lines


def _elements(routes: Sequence[Route]) -> int:
    return sum(route.numel for route in routes)


def _count(routes: Sequence[Route], one: str, many: str) -> str:
    return f"{len(routes)} {one if len(routes) == 1 else many}, {_elements(routes):,} elements"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole if whole else 0:.1f} %"


def _some(routes: Sequence[Route]) -> str:
    return ", ".join(map(str, routes[:3])) + (", ..." if len(routes) > 3 else "")


def _is_left_to_adamw(route: Route) -> bool:
    """Whether AdamW has a matrix, or a stack of them, for which nobody has asked in the config."""
    if route.reason == _TAG_FALSE:
        return bool(route.overruled)
    return route.half == "adamw" and route.reason in (STACK, FLAT_STACK, TENSOR_3D)


def route(model: nn.Module, *, muon_params: Sequence[str] = (), adamw_params: Sequence[str] = ()) -> Routing:
    """Route every parameter of ``model``; reads the parameters and their ``use_muon`` tags, modifies nothing.

    Args:
        model: the module given to DeepSpeed.
        muon_params, adamw_params: glob patterns on parameter names; they overrule tags, and tags overrule the rules.

    Raises:
        RoutingError: a pattern without a match, two patterns that contradict each other, a tensor that Muon cannot
            take but a pattern or tag sends there, tags that DeepSpeed's own Muon has left, or no matrix for Muon.
    """
    tensors = named_tensors(model)
    for tensor in tensors:
        if is_lazy(tensor.param):
            raise RoutingError(f"{tensor.name} has no shape yet; run the model once before deepspeed.initialize")
    names = [name for tensor in tensors for name in tensor.names]
    for key, patterns in (("muon_params", muon_params), ("adamw_params", adamw_params)):
        check_matches(key, patterns, names)
    heads = output_heads(model, tensors)
    routing = Routing(tuple(_decide(tensor, heads, muon_params, adamw_params) for tensor in tensors))
    if left := [
        route
        for route, tensor in zip(routing.routes, tensors, strict=True)
        if route.overruled and route.reason in (_TAG_TRUE, _TAG_FALSE) and hasattr(tensor.param, _DEEPSPEEDS_MARK)
    ]:
        raise RoutingError(
            f"DeepSpeed's Muon has left use_muon tags, by dimensions and names alone, and {len(left)} of them are "
            f"wrong, such as use_muon = {left[0].reason == _TAG_TRUE} on {left[0]}. {_CLEAR_TAGS}"
        )
    for found, tensor in zip(routing.routes, tensors, strict=True):
        if found.half == "muon":
            _check_orthogonalizable(found, tensor)
    if not routing.of_half("muon"):
        raise RoutingError(
            "the model has no trainable matrix for Muon "
            f"({'; '.join(routing.summary()[1:])}); use AdamW, or name matrices in optimizer.params.muon_params"
        )
    return routing


def check_matches(key: str, patterns: Sequence[str], names: Sequence[str]) -> None:
    """Raise a ``RoutingError`` for a pattern of ``optimizer.params.KEY`` that matches none of the names."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern.replace("*", ""), names, n=3, cutoff=0.4) or names[:3]
            raise RoutingError(
                f"optimizer.params.{key}: {pattern!r} matches no parameter; names are such as {', '.join(near)}"
            )


def first_match(names: Sequence[str], patterns: Sequence[str]) -> str | None:
    """The first pattern that matches one of a tensor's names."""
    return next((pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in names)), None)


def _decide(
    tensor: NamedTensor, heads: frozenset[int], muon_params: Sequence[str], adamw_params: Sequence[str]
) -> Route:
    param = tensor.param

    def decided(half: Half, reason: str, overruled: str = "") -> Route:
        layout: Layout = "in_out" if param.ndim == 2 and is_conv1d(tensor.places[0].owner) else "out_in"
        return Route(tensor.name, tensor.names, tuple(param.shape), param.numel(), half, reason, overruled, layout)

    if not param.requires_grad:
        return decided("none", "frozen")
    if param.numel() == 0:
        return decided("none", "empty")
    if not param.is_floating_point():
        raise RoutingError(f"{tensor.name} is {param.dtype}; ZeRO's flat fp32 weights cannot hold it: use real weights")

    to_muon, to_adamw = first_match(tensor.names, muon_params), first_match(tensor.names, adamw_params)
    if to_muon and to_adamw:
        raise RoutingError(
            f"{tensor.name} matches both muon_params {to_muon!r} and adamw_params {to_adamw!r}; narrow one of them"
        )
    tag = getattr(param, "use_muon", None)
    if tag is not None and not isinstance(tag, bool):
        raise RoutingError(f"{tensor.name}.use_muon = {tag!r}; set True, False or None")
    no_matrix = adamw_reason(tensor, heads)
    by_rule: Half = "adamw" if no_matrix else "muon"
    reason = no_matrix or ("matrix, a raw parameter" if is_raw(tensor) else "matrix")
    if to_muon or to_adamw:
        half: Half = "muon" if to_muon else "adamw"
        asked_by = f"muon_params {to_muon!r}" if to_muon else f"adamw_params {to_adamw!r}"
    elif tag is not None:
        half, asked_by = ("muon", _TAG_TRUE) if tag else ("adamw", _TAG_FALSE)
    else:
        return decided(by_rule, reason)
    return decided(half, asked_by, reason if half != by_rule else "")


def _check_orthogonalizable(found: Route, tensor: NamedTensor) -> None:
    shape = found.shape
    if len(shape) > 2:
        why = f"{len(shape)}-D tensors are not available in this version"
    elif len(shape) < 2:
        why = "Muon takes matrices only"
    elif min(shape) == 1:
        why = "a matrix with a side of 1 has nothing to orthogonalize"
    elif any(isinstance(place.owner, EMBEDDINGS) and place.owner.sparse for place in tensor.places):
        why = "it has sparse gradients; set sparse=False on its embedding"
    else:
        return
    remedy = f"leave it to AdamW. {_CLEAR_TAGS}" if found.reason == _TAG_TRUE else "leave it to AdamW"
    raise RoutingError(f"{found.name} of shape {shape}: {found.reason} sends it to Muon, but {why}; {remedy}")
