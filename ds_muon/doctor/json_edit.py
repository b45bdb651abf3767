"""Change values in the text of a JSON object, and nothing else of it: indents, order and numbers stay as they were."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

from ds_muon.ds_config import ABSENT, Place

_BLANK = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True)
class _Member:
    """Where a key and its value stand in the text."""

    key: str
    start: int
    value: int
    end: int


def edited(text: str, place: Place, value: Any) -> str:
    """The text with another value in a place, or, for ``ABSENT``, without its key.

    Args:
        text: of a valid JSON object.
        place: the keys that lead to the value. What is missing on the way is made.
        value: what JSON can hold.
    """
    start = _skip(text, 0)
    for depth, key in enumerate(place):
        members = _members(text, start)
        # Of a key that stands there twice, the last one counts.
        index = max((i for i, member in enumerate(members) if member.key == key), default=None)
        below = place[depth + 1 :]
        if index is None:
            return text if value is ABSENT else _with_member(text, start, members, key, _nested(below, value))
        member = members[index]
        if not below:
            if value is ABSENT:
                return _without_member(text, start, members, index)
            break
        if text[member.value] != "{":
            value = _nested(below, value)
            break
        start = member.value
    return text[: member.value] + _written(text, value, _indent(text, member.start)) + text[member.end :]


def _nested(place: Place, value: Any) -> Any:
    for key in reversed(place):
        value = {key: value}
    return value


def _members(text: str, start: int) -> list[_Member]:
    """Of the object that begins at ``start``."""
    decoder, members = json.JSONDecoder(), []
    at = _skip(text, start + 1)
    while text[at] != "}":
        key, after = scanstring(text, at + 1, True)
        value = _skip(text, _skip(text, after) + 1)
        _, end = decoder.raw_decode(text, value)
        members.append(_Member(key, at, value, end))
        at = _skip(text, end)
        at = _skip(text, at + 1) if text[at] == "," else at
    return members


def _with_member(text: str, start: int, members: list[_Member], key: str, value: Any) -> str:
    """With one more key, at the end of the object that begins at ``start``."""
    if not members:
        whole = _written(text, {key: value}, _indent(text, start))
        return text[:start] + whole + text[text.index("}", start) + 1 :]
    first, last = members[0], members[-1]
    lines = "\n" in text[start : first.start]
    indent = _indent(text, first.start if lines else start)
    lead = f",\n{indent}" if lines else ", "
    return f"{text[: last.end]}{lead}{json.dumps(key)}: {_written(text, value, indent)}{text[last.end :]}"


def _without_member(text: str, start: int, members: list[_Member], index: int) -> str:
    if len(members) == 1:
        return text[: start + 1] + text[text.index("}", members[0].end) :]
    if index + 1 < len(members):
        return text[: members[index].start] + text[members[index + 1].start :]
    return text[: members[index - 1].end] + text[members[index].end :]


def _written(text: str, value: Any, indent: str) -> str:
    """As JSON, in a line that begins with ``indent``; with a line for each key where the file has it so."""
    if not isinstance(value, dict) or not value or "\n" not in text.strip():
        return json.dumps(value)
    if not any(isinstance(inner, dict) for inner in value.values()) and re.search(r"\{[^{}\n]*\S[^{}\n]*\}", text):
        return json.dumps(value)
    inside = indent + _unit(text)
    lines = [f"{inside}{json.dumps(key)}: {_written(text, inner, inside)}" for key, inner in value.items()]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def _unit(text: str) -> str:
    """The indent of the first key."""
    found = re.match(r"\s*\{[^\S\n]*\r?\n([ \t]*)", text)
    return found[1] if found else "  "


def _indent(text: str, at: int) -> str:
    """Of the line in which this stands."""
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _skip(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    return found.end() if found else at
