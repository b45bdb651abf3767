"""How a tensor is made of matrices: the rules of ``muon_blocks``, and the pieces that a rule makes of a shape. Pure."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, Literal, TypeAlias

from ds_muon.layout import Layout, Piece, Strip, whole
from ds_muon.say import printable

Axis: TypeAlias = Literal["out", "in"]
HEADS: Literal["heads"] = "heads"


@dataclass(frozen=True)
class Rule:
    """One value of ``muon_blocks``. What is None is known from the module: see ``docs/blocks.md``.

    Attributes:
        split: a number of equal parts, the sizes of the parts, or "heads".
        axis: which features are split, those that go out or those that come in.
        layout: how the tensor, or each matrix of a stack, is stored.
        interleaved: the parts, of one feature each or of the sizes given, take turns along the axis.
    """

    split: int | tuple[int, ...] | Literal["heads"] = 1
    axis: Axis | None = None
    layout: Layout | None = None
    interleaved: bool = False

    def __str__(self) -> str:
        """As it stands in the config."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return json.dumps(given)


Rules: TypeAlias = tuple[tuple[str, Rule], ...]
"""Glob patterns on parameter names, each with its rule."""

WHOLE = Rule()


class BlocksError(ValueError):
    """A rule that does not fit a tensor. The text completes "NAME of shape SHAPE: RULE ..."."""


# ---- reading ---------------------------------------------------------------------------------------------------------

_CHOICES = {
    "split": 'set a number of equal parts such as 3, a list of sizes such as [2048, 512, 512], or "heads"',
    "axis": 'set "out" or "in"',
    "layout": 'set "out_in" or "in_out"',
    "interleaved": "set true or false",
}
_EXAMPLE = '{"*.qkv_proj.weight": {"split": 3}}'


def read_rules(value: Any, show: Callable[[Any], str]) -> tuple[Rules, list[str]]:
    """The rules of ``muon_blocks``, and a line for each thing wrong.

    Args:
        value: as read from JSON; not modified.
        show: writes a value into a line.

    Returns:
        The rules that are right, and lines "[PATTERN].KEY = VALUE: what is wrong; what to set instead".
    """
    if not isinstance(value, Mapping):
        return (), [f" = {show(value)}: is not a JSON object; set one from patterns to rules, such as {_EXAMPLE}"]
    rules, problems = [], []
    for pattern, given in value.items():
        where = f"[{show(pattern)}]"
        if not isinstance(pattern, str) or not pattern:
            problems.append(f"{where} = {show(given)}: is not under a pattern; set {_EXAMPLE}")
        elif not isinstance(given, Mapping):
            problems.append(f'{where} = {show(given)}: is not a rule; set one, such as {{"split": 3}}')
        elif wrong := _problems(given, show):
            problems += [where + line for line in wrong]
        else:
            split = given.get("split", WHOLE.split)
            rule = Rule(**{**given, "split": tuple(split) if isinstance(split, list | tuple) else split})
            rules.append((pattern, rule))
    return tuple(rules), problems


def _problems(given: Mapping[Any, Any], show: Callable[[Any], str]) -> list[str]:
    lines = []
    for key, value in given.items():
        if problem := _unknown_key(key) if key not in _CHOICES else _problem(key, value):
            lines.append(f".{printable(str(key))} = {show(value)}: {problem}")
    if not lines and given.get("interleaved"):
        split = given.get("split", WHOLE.split)
        if split == HEADS or split == 1:
            lines.append(f'.interleaved = true: has no effect with "split": {show(split)}; remove the key')
    return lines


def _unknown_key(key: Any) -> str:
    near = difflib.get_close_matches(str(key).lower(), _CHOICES, n=1, cutoff=0.5)
    return (
        f'is not a key of a rule; did you mean "{near[0]}"?'
        if near
        else (f"is not a key of a rule; remove it, or use one of {', '.join(_CHOICES)}")
    )


def _problem(key: str, value: Any) -> str | None:
    if key == "interleaved":
        right = isinstance(value, bool)
    elif key == "axis":
        right = value in ("out", "in")
    elif key == "layout":
        right = value in ("out_in", "in_out")
    elif isinstance(value, list | tuple):
        if not all(map(_is_size, value)):
            return f"has an entry that is not a size of at least 1; {_CHOICES[key]}"
        right = len(value) > 0
    else:
        right = value == HEADS if isinstance(value, str) else _is_size(value)
    return None if right else f"is not one of the choices; {_CHOICES[key]}"


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


# ---- pieces ----------------------------------------------------------------------------------------------------------


def pieces(shape: tuple[int, ...], rule: Rule, layout: Layout, heads: int | None = None) -> tuple[Piece, ...]:
    """The pieces of a tensor, in the order in which they lie in it: a stack's members, blocks within each.

    Args:
        shape: (rows, cols), or (members, rows, cols) of a stack. A convolution's is (out, in * kh * kw).
        rule: how each matrix is split. Its own ``layout`` is not read.
        layout: how each matrix is stored.
        heads: the number of blocks of "heads".

    Raises:
        BlocksError: the rule does not fit the shape.
    """
    *stack, rows, cols = shape
    inner = _of_matrix(rows, cols, rule, layout, heads)
    if not stack:
        return inner
    (members,) = stack
    return tuple(
        Piece(
            (member, *piece.index), member * rows * cols + piece.start, piece.rows, piece.cols, piece.strips, piece.axis
        )
        for member in range(members)
        for piece in inner
    )


def _of_matrix(rows: int, cols: int, rule: Rule, layout: Layout, heads: int | None) -> tuple[Piece, ...]:
    axis = rule.axis or "out"
    stored_axis = 0 if (axis == "out") == (layout == "out_in") else 1
    features = (rows, cols)[stored_axis]
    sizes, period = _sizes(features, rule, axis, heads)
    if len(sizes) == 1:
        sides = (rows, cols)
    else:
        smallest = min(sizes) * (features // period)
        sides = (rows, smallest) if stored_axis else (smallest, cols)
    if min(sides) < 2:
        raise BlocksError(
            f"makes a matrix of {sides[0]} x {sides[1]}, which has nothing to orthogonalize; give every part at least "
            "2 features, or leave the tensor whole"
        )
    if len(sizes) == 1:
        return whole(rows, cols)
    firsts = [0, *accumulate(sizes)][:-1]
    count = features // period
    if stored_axis == 0 and count == 1:
        return tuple(
            Piece((block,), first * cols, size, cols)
            for block, (first, size) in enumerate(zip(firsts, sizes, strict=True))
        )
    strips = tuple(
        Strip(first, size, *((period, count) if count > 1 else ())) for first, size in zip(firsts, sizes, strict=True)
    )
    return (Piece((), 0, rows, cols, strips, stored_axis),)


def _sizes(features: int, rule: Rule, axis: Axis, heads: int | None) -> tuple[tuple[int, ...], int]:
    """The sizes of the blocks, and after how many features they come again."""
    noun = f'{features} features of axis "{axis}"'
    if isinstance(rule.split, tuple):
        total = sum(rule.split)
        if rule.interleaved and features % total:
            raise BlocksError(
                f"repeats every {total} of {noun}, which {total} does not divide; {_would_fit(features, total)}"
            )
        if not rule.interleaved and features != total:
            raise BlocksError(f"has sizes that sum to {total}, not to the {noun}; give sizes that sum to {features}")
        return rule.split, total
    parts = rule.split if isinstance(rule.split, int) else heads
    if parts is None:
        raise ValueError('"heads" is a number of blocks here')
    if features % parts:
        raise BlocksError(f"has {parts} parts, which do not divide the {noun}; {_would_fit(features, parts)}")
    if rule.interleaved:
        return (1,) * parts, parts
    return (features // parts,) * parts, features


def _would_fit(features: int, parts: int) -> str:
    """The nearest numbers of parts that divide, into more than one feature each."""
    divisors = {d for n in range(1, math.isqrt(features) + 1) if features % n == 0 for d in (n, features // n)}
    near = sorted(divisors - {features} or {1}, key=lambda d: (abs(d - parts), d))[:3]
    return f"such as {', '.join(map(str, sorted(near)))} would"


def described(made: tuple[Piece, ...]) -> str:
    """How many matrices of which sizes, as stored: ``64 matrices of 512 x 1024``."""
    counts: dict[tuple[int, int], int] = {}
    for piece in made:
        for shape in piece.shapes():
            counts[shape] = counts.get(shape, 0) + 1
    texts = [f"{count} {'matrix' if count == 1 else 'matrices'} of {r} x {c}" for (r, c), count in counts.items()]
    return ", ".join(texts[:3]) + (", ..." if len(texts) > 3 else "")


def matrices(made: tuple[Piece, ...]) -> int:
    """How many matrices there are."""
    return sum(len(piece.strips) or 1 for piece in made)
