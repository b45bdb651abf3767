"""What `ds-muon verify` trains: a model and its micro-batches, the user's own or the built-in ones.

A user's own come from a *factory*, named as ``module:factory``. What it is given and returns, and what becomes of the
batches, is in the help of the command (``command.VERIFY_MODEL``).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from ds_muon.sample.gpt import GPT, GPTConfig
from ds_muon.sample.text import draw_windows, standard_library
from ds_muon.verify.engine_view import CannotVerify

Factory = Callable[[int, int], tuple[nn.Module, Iterable[Any]]]

# At two ranks the boundary cuts the `mlp.up` of the middle layer: square, tall and wide matrices on either side of it.
BUILT_IN = GPTConfig(n_layer=3, n_head=4, n_embd=96, block_size=64)


def built_in_model() -> GPT:
    """A byte-level GPT small enough for a CPU."""
    return GPT(BUILT_IN)


def built_in_batches(sequences: int, rank: int, world_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (tokens, targets), each (sequences, block_size) int64, of the standard library's sources.

    Windows are drawn at random, others on every rank.
    """
    text = standard_library()
    generator = torch.Generator().manual_seed(seed * world_size + rank)
    while True:
        yield draw_windows(text, sequences, BUILT_IN.block_size, generator)


def parse_spec(spec: str) -> tuple[str, str]:
    """Names of module and function in ``module:factory``.

    Raises:
        CannotVerify: it is not of that form.
    """
    module, colon, name = spec.partition(":")
    if not (module and colon and name.isidentifier()):
        raise CannotVerify(f"--model {spec}: write it as module:factory, such as train:make_model")
    return module, name


def load_factory(spec: str) -> Factory:
    """The function that ``module:factory`` names. The current folder is looked in first.

    Raises:
        CannotVerify: there is no such module or function. Errors of the module's own code pass through.
    """
    module_name, name = parse_spec(spec)
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise
        raise CannotVerify(
            f"--model {spec}: there is no module {missing} in {folder} or among the installed ones; "
            "run from the folder that holds it, or set PYTHONPATH"
        ) from None
    factory = getattr(module, name, None)
    if not callable(factory):
        raise CannotVerify(f"--model {spec}: {module_name} ({module.__file__}) has no function {name}")
    return factory  # type: ignore[no-any-return]


def make_subject(spec: str, rank: int, world_size: int) -> tuple[nn.Module, Iterable[Any]]:
    """Call the factory that ``module:factory`` names.

    Raises:
        CannotVerify: there is none, or it returned something else than a model and an iterable.
    """
    made = load_factory(spec)(rank, world_size)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise CannotVerify(f"--model {spec} returned {_kind(made)}: return a pair (model, batches), model an nn.Module")
    model, batches = made
    if not isinstance(batches, Iterable):
        raise CannotVerify(f"--model {spec} returned batches of type {_kind(batches)}: return a list, or a DataLoader")
    return model, batches


def endless(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches, over and over.

    Raises:
        CannotVerify: they ran out and cannot be started over, as a generator cannot, or there are none.
    """
    for passes in count():
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise CannotVerify(
                "the batches of --model ran out and cannot be started over: return a list or more of them, "
                "or lower --steps"
                if passes
                else "the factory of --model returned no batches: return at least one"
            )


def loss_of(model: Callable[..., Any], batch: Any, device: torch.device) -> Tensor:
    """The scalar loss of the model on one micro-batch, which is moved to ``device`` first."""
    batch = on_device(batch, device)
    if isinstance(batch, Mapping):
        return pick_loss(model(**batch))
    if isinstance(batch, tuple | list):
        return pick_loss(model(*batch))
    return pick_loss(model(batch))


def on_device(batch: Any, device: torch.device) -> Any:
    """``batch`` with every tensor in it, at any depth of mappings, tuples and lists, on ``device``."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: on_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        moved = [on_device(value, device) for value in batch]
        return tuple(moved) if isinstance(batch, tuple) else moved
    return batch


def pick_loss(output: Any) -> Tensor:
    """The loss in what a model returned.

    Raises:
        CannotVerify: there is none, or it is no scalar.
    """
    loss = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif isinstance(output, tuple | list):
        loss = getattr(output, "loss", output[0] if output else None)
    elif not isinstance(output, Tensor):
        loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
        raise CannotVerify(
            f"the model returned {_kind(output)}{shape}, which has no scalar loss: return the loss as a scalar tensor, "
            'as .loss, as ["loss"], or first in a tuple'
        )
    return loss


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"
