"""The matrices of a model that is not at hand: made on the meta device, without memory, and routed as in training."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_muon.extras import how_to_install
from ds_muon.layout import Piece
from ds_muon.plan_cost import MODELS, Shapes
from ds_muon.routing import Route, Routing, RoutingError, route
from ds_muon.say import printable
from ds_muon.text import columns
from ds_muon.verify.engine_view import CannotVerify
from ds_muon.verify.subject import make_subject

# What others say of a config they cannot read may go on for pages.
_LONGEST = 300


class NoModel(ValueError):
    """Nothing that a plan could be made for, and why."""


@dataclass(frozen=True)
class Planned:
    """A model to plan for.

    Attributes:
        shapes: of its tensors in Muon, in its order.
        pieces: of those tensors, by name; a tensor that is not there is one matrix.
        routing: of all its tensors; None of a model of which only the matrices are known.
    """

    name: str
    shapes: Shapes
    pieces: Mapping[str, tuple[Piece, ...]]
    routing: Routing | None


@dataclass(frozen=True)
class Row:
    """Tensors of one kind: equal in all but the numbers in their names, for which a * stands."""

    name: str
    tensors: int
    shape: tuple[int, ...]
    half: str
    share: float
    """Of the elements that are trained."""
    reason: str


def named(name: str) -> Planned:
    """A model by its name in ``MODELS``, or by the folder or file of its Hugging Face config.

    Raises:
        NoModel: there is none, or it cannot be made.
    """
    if name in MODELS:
        return Planned(name, MODELS[name](), {}, None)
    path = Path(name)
    if not (path.is_file() or (path / "config.json").is_file()):
        raise NoModel(
            f"{name}: neither one of {', '.join(MODELS)}, nor the folder or file of a Hugging Face config.json"
        )
    if find_spec("transformers") is None:
        raise NoModel(f"{name}: a Hugging Face config needs transformers: {how_to_install('integrations')}")
    return _routed(name, lambda: _of_config(name))


def made_by(spec: str) -> Planned:
    """What the function that ``module:factory`` names makes, as for ``ds-muon verify``.

    Raises:
        NoModel: there is no such function, or it returns no model.
    """

    return _routed(spec, lambda: make_subject(spec, 0, 1)[0])


def rows(routing: Routing) -> list[Row]:
    """The routing with a row for each kind of tensor, in the order of first appearance."""
    kinds: dict[tuple[Any, ...], list[Route]] = {}
    for each in routing.routes:
        name = re.sub(r"(?<![^.])\d+(?![^.])", "*", each.name)
        kinds.setdefault((name, each.shape, each.half, each.explained), []).append(each)
    trained = sum(each.numel for each in routing.routes if each.half != "none")
    return [
        Row(name, len(found), shape, half, sum(e.numel for e in found) / trained if half != "none" else 0.0, reason)
        for (name, shape, half, reason), found in kinds.items()
    ]


def table(found: list[Row]) -> str:
    """A line for each row."""
    cells = [("tensors", "name", "shape", "half", "share", "reason")]
    for row in found:
        share = f"{100 * row.share:.2f} %"
        cells.append(
            (str(row.tensors), printable(row.name), " x ".join(map(str, row.shape)), row.half, share, row.reason)
        )
    return "\n".join(columns(cells, "> < < < > <"))


def _routed(name: str, make: Callable[[], nn.Module]) -> Planned:
    try:
        with torch.device("meta"):
            model = make()
        routing = route(model)
    except CannotVerify as error:  # says which --model
        raise NoModel(str(error)) from None
    except (NoModel, RoutingError) as error:
        raise NoModel(f"{name}: {error}") from None
    except Exception as error:  # a config that a class cannot take, or a factory that needs values
        said = " ".join(str(error).split())[:_LONGEST] or type(error).__name__
        raise NoModel(f"{name}: the model cannot be made on the meta device: {said}") from error
    shapes: Shapes = [(each.name, each.shape) for each in routing.of_half("muon")]
    return Planned(name, shapes, routing.pieces(), routing)


def _of_config(name: str) -> nn.Module:
    transformers: Any = import_module("transformers")
    transformers.logging.set_verbosity_error()
    # Code that a config brings along is not run.
    config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    known = [kind for kind in config.architectures or () if hasattr(transformers, kind)]
    if config.architectures and not known:
        raise NoModel(f"transformers {transformers.__version__} has no class {config.architectures[0]}")
    model: nn.Module
    if known:
        model = getattr(transformers, known[0])(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return model
