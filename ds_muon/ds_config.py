"""A DeepSpeed config without an engine, for the commands that look at one: read from its file, and refused or not."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.utils import logger

from ds_muon.config import OPTIMIZER_TYPE
from ds_muon.refusals import config_refusals
from ds_muon.say import printable

BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""They depend on the number of ranks, which is known when there are ranks."""


Place = tuple[str, ...]
"""Where a value stands: the keys that lead there."""

ABSENT: Any = object()
"""In place of a value: the key is not there."""


class NotAConfig(ValueError):
    """A file that holds no config, and why."""


def read(path: Path) -> tuple[str, dict[str, Any]]:
    """The text of a config file, and what it holds.

    Raises:
        NotAConfig: it cannot be read, or is no JSON object. Begins with the option, ``--config``.
    """
    where = f"--config {printable(str(path))}"
    try:
        text = path.read_text(encoding="utf-8")
        config = copy.deepcopy(json.loads(text))  # what can be read may still be too deep for all that follows
    except OSError as error:
        raise NotAConfig(f"{where}: {error.strerror or error}") from None
    except ValueError as error:
        raise NotAConfig(f"{where} is not valid JSON: {error}") from None
    except RecursionError:
        raise NotAConfig(f"{where} is nested too deep: no setting of DeepSpeed is") from None
    if not isinstance(config, dict):
        raise NotAConfig(f"{where} holds a {type(config).__name__}: it must be a JSON object")
    return text, config


def optimizer_name(config: dict[str, Any]) -> str | None:
    """``optimizer.type``; None if the section is not there, or names none."""
    section = config.get("optimizer")
    kind = section.get("type") if isinstance(section, dict) else None
    return kind if isinstance(kind, str) else None


def is_ours(kind: str | None) -> bool:
    return kind is not None and kind.lower() == OPTIMIZER_TYPE.lower()


def value_at(config: dict[str, Any], place: Place) -> Any:
    """``ABSENT`` where there is none."""
    found: Any = config
    for key in place:
        found = found.get(key, ABSENT) if isinstance(found, dict) else ABSENT
    return found


def changed(config: dict[str, Any], values: Mapping[Place, Any]) -> dict[str, Any]:
    """A copy with other values; what leads to one is made where it is no section."""
    result = copy.deepcopy(config)
    for place, value in values.items():
        if value is ABSENT and value_at(result, place) is ABSENT:
            continue
        section = result
        for key in place[:-1]:
            if not isinstance(section.get(key), dict):
                section[key] = {}
            section = section[key]
        if value is ABSENT:
            del section[place[-1]]
        else:
            section[place[-1]] = copy.deepcopy(value)
    return result


def autos(section: dict[str, Any], prefix: Place = ()) -> Iterator[Place]:
    """The places of every value "auto"."""
    for key, value in section.items():
        if value == "auto":
            yield (*prefix, key)
        elif isinstance(value, dict):
            yield from autos(value, (*prefix, key))


def refusals(config: dict[str, Any]) -> list[str]:
    """What ``config_refusals`` says of a config, whatever the number of ranks.

    Raises:
        Exception: what DeepSpeed raises of a config that it cannot read.
    """
    rest = {key: value for key, value in config.items() if key not in BATCH_SIZES}
    with quiet():
        return config_refusals(DeepSpeedConfig({**rest, BATCH_SIZES[1]: 1}), _sequence_parallel(config))


@contextmanager
def quiet() -> Iterator[None]:
    """DeepSpeed logs no more than errors in here."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _sequence_parallel(config: dict[str, Any]) -> int:
    """Ranks that share a sequence on the device mesh that ``deepspeed.initialize`` makes of such a config."""
    size = config.get("sequence_parallel_size", 1) if "data_parallel_size" in config else 1
    return size if isinstance(size, int) else 1
