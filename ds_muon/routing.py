"""Which half of the optimizer each parameter tensor goes to, and why: globs, then tags, then ``roles``."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import is_lazy

from ds_muon.blocks import HEADS, WHOLE, BlocksError, Rule, described, matrices, pieces
from ds_muon.heads import Attentions
from ds_muon.layout import Layout, Piece, out_and_in
from ds_muon.roles import (
    EMBEDDINGS,
    FLAT_STACK,
    TENSOR_3D,
    NamedTensor,
    adamw_reason,
    is_raw,
    named_tensors,
    output_heads,
)
from ds_muon.say import printable
from ds_muon.stored import stored
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
    'Where these are matrices, name them in "muon_params", and how many each tensor holds in "muon_blocks", such as '
    '{"split": 16}; else choose "adam_lr", the rate of most of this model, with care'
)
# What DeepSpeed's key of this name splits.
_PER_HEAD = ("q", "k", "v", "q_b", "kv_b")
_ON_TAGS = 'Clear the use_muon tags, or name the tensors in "muon_params"'
_NOT_GIVEN = "not given to deepspeed.initialize"


class RoutingError(ValueError):
    """A parameter, pattern or param group that cannot be routed as asked."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))  # it names parameters


@dataclass(frozen=True)
class Route:
    """One tensor: its first name, all its names, and the decision. Half "none" is not trained.

    Attributes:
        overruled: what the rules say, where a glob or a tag decides otherwise.
        layout: what the rows of the matrix are, or of each of a stack, by the module to which its first name belongs.
        guessed: nothing tells how the matrices of this stack are stored.
        unsplit: why ``per_head_muon`` leaves this projection whole.
        pieces: of a tensor of Muon, which matrices lie where in it.
    """

    name: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    numel: int
    half: Half
    reason: str
    overruled: str = ""
    layout: Layout = "out_in"
    guessed: bool = False
    unsplit: str = ""
    pieces: tuple[Piece, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} ({self.shown_shape}, {self.overruled or self.reason})"

    @property
    def shown_shape(self) -> str:
        return " x ".join(map(str, self.shape)) or "scalar"

    @property
    def explained(self) -> str:
        """The reason, the matrices where they are not the tensor as it is, and how they are stored."""
        one = len(self.shape) == 2 and matrices(self.pieces) < 2
        of = f", {described(self.pieces)}" if self.pieces and not one else ""
        return self.reason + of + (", stored as (in, out)" if self.layout == "in_out" else "")


@dataclass(frozen=True)
class Routing:
    """Every parameter tensor of a model, in order of first appearance.

    Attributes:
        routes: names, shape, half ("muon", "adamw", or "none" if it is not trained) and reason of each tensor.
    """

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
        """Which matrices lie where in each tensor of Muon, by its first name."""
        return {route.name: route.pieces for route in self.of_half("muon")}

    def table(self) -> str:
        """One aligned line per tensor: name (and a second one, if tied), shape, half, reason and matrices."""
        rows = [("name", "shape", "half", "reason")]
        for route in self.routes:
            name = " = ".join(route.names[:2]) + (" = ..." if len(route.names) > 2 else "")
            rows.append((printable(name), route.shown_shape, route.half, route.explained))
        return "\n".join(columns(rows, "< < < <"))

    def summary(self) -> list[str]:
        """One line per half with counts and its share of what is trained; a third one if some tensors are not."""
        muon, adamw = self.of_half("muon"), self.of_half("adamw")
        trained = _elements(muon) + _elements(adamw)
        lines = [
            f"Muon: {_matrices(muon)} ({_percent(_elements(muon), trained)})",
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
            unnamed = [route for route in left if route.reason != _TAG_FALSE]
            remedies = [_ON_STACKS] * bool(unnamed) + [_ON_TAGS] * (unnamed != left)
            lines.append(
                f"only {_percent(muon, muon + _elements(left))} of the elements in matrices and stacks of matrices go "
                f"to Muon. AdamW has the other {_elements(left):,}, such as {_some(left)}. {'. '.join(remedies)}"
            )
        if odd := [route for route in self.of_half("muon") if route.reason == _TAG_TRUE and route.overruled]:
            lines.append(
                f"use_muon = True sends {_count(odd, 'tensor', 'tensors')} to Muon that AdamW would have, such as "
                f"{_some(odd)}. {_CLEAR_TAGS}"
            )
        if whole := [route for route in self.of_half("muon") if route.unsplit]:
            lines.append(
                f"per_head_muon leaves {_count(whole, 'projection', 'projections')} whole: {whole[0].name} of shape "
                f"{whole[0].shape} {whole[0].unsplit}"
            )
        if guessed := [route for route in self.of_half("muon") if route.guessed]:
            lines.append(
                f"nothing says how {_count(guessed, 'stack', 'stacks')} are stored, such as {_some(guessed)}: taken "
                'as (members, out, in). Set "layout" for them in "muon_blocks": "in_out" if their module multiplies by '
                '(members, in, out), else "out_in"'
            )
        return lines


def _elements(routes: Sequence[Route]) -> int:
    return sum(route.numel for route in routes)


def _count(routes: Sequence[Route], one: str, many: str) -> str:
    return f"{len(routes)} {one if len(routes) == 1 else many}, {_elements(routes):,} elements"


def _matrices(routes: Sequence[Route]) -> str:
    """As ``_count``, of matrices, and of tensors where they are fewer."""
    count = sum(matrices(route.pieces) for route in routes)
    tensors = "" if count == len(routes) else f" in {len(routes)} tensor{'s' * (len(routes) != 1)}"
    return f"{count:,} {'matrix' if count == 1 else 'matrices'}{tensors}, {_elements(routes):,} elements"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole if whole else 0:.1f} %"


def _some(routes: Sequence[Route]) -> str:
    return ", ".join(map(str, routes[:3])) + (", ..." if len(routes) > 3 else "")


def _is_left_to_adamw(route: Route) -> bool:
    """Whether AdamW has a matrix, or a stack of them, for which nobody has asked in the config."""
    if route.reason == _TAG_FALSE:
        return bool(route.overruled)
    return route.half == "adamw" and route.reason in (FLAT_STACK, TENSOR_3D)


def route(
    model: nn.Module,
    *,
    muon_params: Sequence[str] = (),
    adamw_params: Sequence[str] = (),
    muon_blocks: Sequence[tuple[str, Rule]] = (),
    per_head_muon: bool = False,
) -> Routing:
    """Route every parameter of ``model``; reads the parameters and their ``use_muon`` tags, modifies nothing.

    Args:
        model: the module given to DeepSpeed.
        muon_params, adamw_params: glob patterns on parameter names; they overrule tags, and tags overrule the rules.
        muon_blocks: glob patterns, each with how the tensors that it matches are made of matrices.
        per_head_muon: the rule "heads" for the query, key and value projections that no pattern of ``muon_blocks``
            matches.

    Raises:
        RoutingError: a pattern without a match, two patterns that contradict each other, a tensor that Muon cannot
            take but a pattern or tag sends there, a rule that does not fit its tensor, tags that DeepSpeed's own Muon
            has left, or no matrix for Muon.
    """
    tensors = named_tensors(model)
    for tensor in tensors:
        if is_lazy(tensor.param):
            raise RoutingError(f"{tensor.name} has no shape yet; run the model once before deepspeed.initialize")
    names = [name for tensor in tensors for name in tensor.names]
    rules = [pattern for pattern, _ in muon_blocks]
    for key, patterns in (("muon_params", muon_params), ("adamw_params", adamw_params), ("muon_blocks", rules)):
        check_matches(key, patterns, names)
    heads = output_heads(model, tensors)
    decided = [_decide(tensor, heads, muon_params, adamw_params) for tensor in tensors]
    if left := [
        route
        for route, tensor in zip(decided, tensors, strict=True)
        if route.overruled and route.reason in (_TAG_TRUE, _TAG_FALSE) and hasattr(tensor.param, _DEEPSPEEDS_MARK)
    ]:
        raise RoutingError(
            f"DeepSpeed's Muon has left use_muon tags, by dimensions and names alone, and {len(left)} of them are "
            f"wrong, such as use_muon = {left[0].reason == _TAG_TRUE} on {left[0]}. {_CLEAR_TAGS}"
        )
    routing = Routing(_with_pieces(decided, tensors, model, muon_blocks, per_head_muon))
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
        layout, _ = stored(tensor)
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
    reason = no_matrix or (
        "stack of experts" if param.ndim == 3 else "matrix, a raw parameter" if is_raw(tensor) else "matrix"
    )
    if to_muon or to_adamw:
        half: Half = "muon" if to_muon else "adamw"
        asked_by = f"muon_params {to_muon!r}" if to_muon else f"adamw_params {to_adamw!r}"
    elif tag is not None:
        half, asked_by = ("muon", _TAG_TRUE) if tag else ("adamw", _TAG_FALSE)
    else:
        return decided(by_rule, reason)
    return decided(half, asked_by, reason if half != by_rule else "")


# ---- matrices --------------------------------------------------------------------------------------------------------


def _with_pieces(
    routes: Sequence[Route],
    tensors: Sequence[NamedTensor],
    model: nn.Module,
    muon_blocks: Sequence[tuple[str, Rule]],
    per_head_muon: bool,
) -> tuple[Route, ...]:
    """The routes with the matrices of each tensor of Muon."""
    attentions = Attentions(model)
    made: list[Route] = []
    per_head = 0
    for route, tensor in zip(routes, tensors, strict=True):
        found = _rule(route, muon_blocks)
        if route.half != "muon":
            if found and route.half == "adamw":
                pattern, rule = found
                raise RoutingError(
                    f"optimizer.params.muon_blocks: {pattern!r}: {rule} matches {route}, which goes to AdamW; narrow "
                    "the pattern, or name the tensor in optimizer.params.muon_params"
                )
            made.append(route)
            continue
        shape = _as_matrices(route, tensor)
        if found:
            made.append(_split(route, tensor, shape, *found, attentions))
            continue
        layout, told_by = stored(tensor)
        rule, count, unsplit = WHOLE, None, ""
        if per_head_muon and len(shape) == 2 and attentions.kind(route.name) in _PER_HEAD:
            try:
                by_head = attentions.heads(route.name, *out_and_in(*shape, layout))
                rule, count = Rule(HEADS, by_head.axis), by_head.count
                per_head += 1
            except BlocksError as error:
                unsplit = str(error)
        made.append(
            replace(
                route,
                layout=layout,
                guessed=len(shape) == 3 and not told_by,
                unsplit=unsplit,
                pieces=pieces(shape, rule, layout, count),
            )
        )
    if per_head_muon and not per_head:
        why = next((f": {route.name} {route.unsplit}" for route in made if route.unsplit), "")
        raise RoutingError(
            "optimizer.params.per_head_muon = true: no query, key or value projection is known whose shape confirms a "
            f"number of heads{why}; remove the key, or write the heads in optimizer.params.muon_blocks"
        )
    return tuple(made)


def _rule(route: Route, muon_blocks: Sequence[tuple[str, Rule]]) -> tuple[str, Rule] | None:
    """The pattern and rule of a tensor.

    Raises:
        RoutingError: two patterns match it.
    """
    found = [each for each in muon_blocks if first_match(route.names, [each[0]])]
    if len(found) > 1:
        (one, first), (other, second) = found[:2]
        raise RoutingError(
            f"optimizer.params.muon_blocks: {route.name} of shape {route.shape} matches both {one!r}: {first} and "
            f"{other!r}: {second}; narrow one of them"
        )
    return found[0] if found else None


def _split(
    route: Route, tensor: NamedTensor, shape: tuple[int, ...], pattern: str, rule: Rule, attentions: Attentions
) -> Route:
    """The route with the matrices that a rule makes of its tensor."""
    layout, told_by = stored(tensor)
    try:
        if rule.layout and told_by and rule.layout != layout:
            raise BlocksError(f'says "{rule.layout}", but {told_by} stores it "{layout}"; remove "layout"')
        layout = rule.layout or layout
        if len(route.shape) > len(shape) and (rule.axis == "in" or layout == "in_out"):
            raise BlocksError(
                f"is for linear layers; this convolution is a matrix of {shape[0]} outputs x {shape[1]} inputs"
            )
        count = None
        if rule.split == HEADS:
            if len(shape) != 2:
                raise BlocksError('has "heads", which a stack has not; give the number of equal parts')
            by_head = attentions.heads(route.name, *out_and_in(*shape, layout))
            if rule.axis and rule.axis != by_head.axis:
                raise BlocksError(
                    f'says "axis": "{rule.axis}", but its heads lie along "{by_head.axis}"; remove "axis"'
                )
            rule, count = replace(rule, axis=by_head.axis), by_head.count
        made = pieces(shape, rule, layout, count)
    except BlocksError as error:
        raise RoutingError(
            f"optimizer.params.muon_blocks: {route.name} of shape {route.shape}: {pattern!r}: {rule} {error}"
        ) from None
    guessed = len(shape) == 3 and not (told_by or rule.layout)
    return replace(route, layout=layout, guessed=guessed, pieces=made)


def _as_matrices(found: Route, tensor: NamedTensor) -> tuple[int, ...]:
    """The shape as (rows, cols) of a matrix, or (members, rows, cols) of a stack.

    Raises:
        RoutingError: Muon cannot take it.
    """
    shape = found.shape
    convolution = next((place.owner for place in tensor.places if isinstance(place.owner, _ConvNd)), None)
    by_tag = found.reason == _TAG_TRUE
    matrix = (shape[0], found.numel // shape[0]) if convolution is not None and shape else shape
    if len(shape) < 2:
        why = "Muon takes matrices only"
    elif len(shape) > 2 and by_tag and found.overruled:
        why = f"{len(shape)}-D tensors go to Muon by name only, in muon_params"
    elif isinstance(convolution, _ConvTransposeNd):
        why = "a transposed convolution is not one matrix"
    elif convolution is not None and convolution.groups != 1:
        kind = "depthwise" if convolution.groups == convolution.in_channels else "grouped"
        why = f"a {kind} convolution is not one matrix"
    elif len(matrix) > 3:
        why = f"{len(matrix)}-D tensors are neither matrices nor stacks of them"
    elif min(matrix[-2:]) == 1:
        why = "a matrix with a side of 1 has nothing to orthogonalize"
    elif any(isinstance(place.owner, EMBEDDINGS) and place.owner.sparse for place in tensor.places):
        why = "it has sparse gradients; set sparse=False on its embedding"
    else:
        return matrix
    remedy = f"leave it to AdamW. {_CLEAR_TAGS}" if by_tag else "leave it to AdamW"
    raise RoutingError(f"{found.name} of shape {shape}: {found.reason} sends it to Muon, but {why}; {remedy}")
