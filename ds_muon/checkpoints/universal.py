"""Checkpoints in DeepSpeed's universal layout: a file for each parameter and kind of state, whatever ranks saved it.

A folder of one tag holds

- ``mp_rank_00_model_states.pt``: weights of the model, scheduler and counters, as in an ordinary checkpoint;
- ``zero/<parameter>/fp32.pt``, and of AdamW's half ``exp_avg.pt``, ``exp_avg_sq.pt`` and ``step.pt``;
- ``ds_muon/<parameter>/momentum_buffer.pt``, apart because an AdamW that DeepSpeed loads could not step with it;
- ``zero/optimizer_state.pt``: what is the same on every rank, NorMuon's moments too. It is written last.

``convert`` writes it. Here ``engine.load_checkpoint`` reads it, into the same ``Found`` as an ordinary checkpoint. Of
one that ``ds-muon migrate`` has made from another optimizer's, parameters take the moments and momentum that they need.
The rest of the state starts from zero; rates and settings are this run's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_muon.agree import gather, raise_together
from ds_muon.checkpoints.check import (
    Found,
    explained,
    fit_groups,
    other_parameters,
    other_shapes,
    rows_of,
    say_what_changes,
)
from ds_muon.checkpoints.reading import below, read_file
from ds_muon.checkpoints.reshard import Buffers, Stretch, stretches
from ds_muon.checkpoints.shards import BASE, CLIP_GRAD, CUT_STATE, LAYOUT, SAVE, SHARD, Misfit, description, layout
from ds_muon.dtypes import name_of
from ds_muon.say import say
from ds_muon.text import count

LATEST = "latest_universal"
"""File beside the tags that names the newest one in this layout, as ``latest`` names the newest of all."""
FOLDERS = ("zero", "ds_muon")
"""Those in the folder of a tag: see above."""
OPTIMIZER_FILE = Path("zero", "optimizer_state.pt")
CONTENT = "ds_muon_universal"
"""Key in ``OPTIMIZER_FILE``: a ``Content``, as a dict."""
CONVERSION = "ds_muon_conversion"
"""Key in a parameter's file: ``Content.conversion``."""
PARAM = "param"
"""Key in a parameter's file: the tensor."""
FORMAT = 1
"""Number of this format. A later ds_muon may write a larger one, which this one refuses."""


@dataclass(frozen=True)
class Content:
    """What ``OPTIMIZER_FILE`` says of its checkpoint.

    Attributes:
        conversion: a number that all files of one conversion share, and no others.
        optimizer: that saved it; ``of_dsmuon`` whether that was DSMuon.
        save, step: of the file of the model's weights; ``save`` only of DSMuon, as that file says it.
        dtype: of the model.
        params: for each parameter its shape, its param group, and the dtype of each file by key.
        steps: for each saved param group, the steps that Adam has behind it.
    """

    format: int
    conversion: str
    optimizer: str
    of_dsmuon: bool
    save: tuple[str, str, int] | None
    step: int | None
    dtype: str
    params: Mapping[str, tuple[tuple[int, ...], int, Mapping[str, str]]]
    steps: Sequence[float | None]


@dataclass(frozen=True)
class FoundUniversal(Found):
    """A checkpoint in this layout that fits the engine. Each parameter counts as a saved group of its own.

    Attributes:
        content: of the checkpoint.
        tensors: by the place of a parameter in ``content.params``, its tensors by key: those that this rank reads.
    """

    content: Content
    tensors: Mapping[int, Mapping[str, Tensor]]

    def weights(self, stretch: Stretch) -> Tensor:
        """The fp32 weights of a stretch: (numel,)."""
        return self.state(stretch, "fp32")

    def state(self, stretch: Stretch, key: str) -> Tensor:
        """A stretch of the optimizer's state: (numel,). Zeros where another optimizer had no such state."""
        tensor = self.tensors[stretch.saved_group].get(key)
        if tensor is None:
            return torch.zeros(stretch.numel, dtype=torch.float32, device="cpu")
        return tensor.view(-1).narrow(0, stretch.saved_offset, stretch.numel)


def file_of(folder: Path, name: str, key: str) -> Path:
    """Where the tensor of a parameter lies.

    Raises:
        ValueError: by its name, not in the folder.
    """
    return below(folder / ("ds_muon" if key == "momentum_buffer" else "zero"), name) / f"{key}.pt"


def is_universal(folder: Path) -> bool:
    """Whether the folder of a tag is in this layout, or what is left of it."""
    return (folder / "zero").is_dir()


@contextmanager
def loading_by_name(engine: Any) -> Iterator[None]:
    """Within this context DeepSpeed's engine loads weights and counters as of an ordinary checkpoint.

    With ``checkpoint.load_universal`` it would leave out buffers and frozen weights, and read the fp32 ones by itself.
    """
    config = engine._config
    asked, config.load_universal_checkpoint = config.load_universal_checkpoint, False
    try:
        yield
    finally:
        config.load_universal_checkpoint = asked


def check_universal_before_loading(engine: Any, load_dir: str, tag: str, *, with_scheduler: bool) -> FoundUniversal:
    """As ``checkpoint.check_before_loading``, for this layout.

    Raises:
        ValueError, FileNotFoundError, RuntimeError: as there.
    """
    group, folder = engine.optimizer.dp_process_group, Path(load_dir, str(tag))
    error: Exception | None = None
    content: Content | None = None
    saved: Mapping[str, Any] = {}
    found: FoundUniversal | None = None
    try:
        content, saved = _read_content(folder)
    except Exception as caught:  # whatever it is, no rank may be left waiting
        error = explained(caught, folder)
    raise_together(error, group)
    assert content is not None
    seen = gather((str(tag), content.conversion), group)
    try:
        found = _fit(engine, folder, content, saved, seen, with_scheduler)
    except Exception as caught:
        error = explained(caught, folder)
    raise_together(error, group)
    assert found is not None
    if content.of_dsmuon:
        say_what_changes(found, engine.optimizer)
    else:
        say(_what_starts_anew(engine.optimizer, content))
    return found


def _read_content(folder: Path) -> tuple[Content, Mapping[str, Any]]:
    path = folder / OPTIMIZER_FILE
    if not path.is_file():
        raise Misfit(f"{path} is missing: it was not converted to its end, or not copied whole")
    saved = read_file(path)
    if CONTENT not in saved:
        raise Misfit(
            f"{path} was not written by ds-muon; convert the checkpoint that it was made from, by ds-muon to-universal "
            "one of DSMuon, by ds-muon migrate one of another optimizer"
        )
    if (number := saved[CONTENT]["format"]) > FORMAT:
        raise Misfit(f"{path} has format {number}, of a later ds_muon; this one reads up to {FORMAT}")
    return Content(**saved[CONTENT]), saved


def _fit(
    engine: Any,
    folder: Path,
    content: Content,
    saved: Mapping[str, Any],
    seen: Sequence[tuple[str, str]],
    with_scheduler: bool,
) -> FoundUniversal:
    """What this rank will read.

    Args:
        seen: by rank, the tag and the conversion that it loads.

    Raises:
        Misfit: what does not fit.
    """
    zero = engine.optimizer
    for rank, other in enumerate(seen):
        if other != seen[0]:
            raise Misfit(f"rank 0 loads {seen[0][0]!r} and rank {rank} {other[0]!r}, of another conversion")
    weights = Path(engine._get_ckpt_name(str(folder.parent), folder.name))
    model, common = read_file(weights), folder / OPTIMIZER_FILE
    if (step := model.get("global_steps")) != content.step or model.get(SAVE) != content.save:
        raise Misfit(f"{weights} is of another save than {common}: of step {step}, and not {content.step}")
    if content.of_dsmuon:
        whole: Mapping[str, Any] = saved
        sources = fit_groups(engine, whole, with_scheduler=with_scheduler)
    else:
        _check_same_parameters(engine, content)
        whole, sources = _as_ours(zero, content, saved), tuple(range(len(zero.optimizer.param_groups)))
    ours, names = layout(zero), list(content.params)
    numels = {name: p.numel() for params in zero.bit16_groups for p in params for name in (zero.param_names[p],)}
    alone = Buffers([[(name, 0)] for name in names], [numels.get(name, 0) for name in names])
    rank = dist.get_rank(zero.dp_process_group)
    to_hold = tuple(stretches(alone, Buffers(ours, zero.partition_size), numels, rank))
    states = [zero.optimizer.state[p] for group in zero.optimizer.param_groups for p in group["params"]]
    tensors = {
        stretch.saved_group: _open(
            folder, content, names[stretch.saved_group], states[stretch.group].keys() & CUT_STATE
        )
        for stretch in to_hold
    }
    return FoundUniversal({0: whole}, 0, to_hold, sources, rows_of(whole[SHARD]["params"]), content, tensors)


def _open(folder: Path, content: Content, name: str, keys: set[str]) -> dict[str, Tensor]:
    """The tensors of one parameter, as far as another optimizer has saved them.

    Raises:
        Misfit: one is missing, torn or of another conversion.
    """
    shape, _, files = content.params[name]
    tensors = {}
    for key in sorted({"fp32", *keys} & files.keys()):
        path = file_of(folder, name, key)
        if not path.is_file():
            raise Misfit(f"{path} is missing: it was not converted to its end, or not copied whole")
        held = read_file(path)
        if held.get(CONVERSION) != content.conversion:
            raise Misfit(f"{path} is of another conversion than {folder / OPTIMIZER_FILE}; two are mixed up")
        tensor = held[PARAM]
        if tuple(tensor.shape) != tuple(shape) or name_of(tensor.dtype) != files[key]:
            raise Misfit(f"{path} holds {tuple(tensor.shape)} in {name_of(tensor.dtype)}, not {shape} in {files[key]}")
        tensors[key] = tensor
    return tensors


# ---- of another optimizer -------------------------------------------------------------------------------------------


def _check_same_parameters(engine: Any, content: Content) -> None:
    ours = layout(engine.optimizer)
    model = {name for name, _ in engine.module.named_parameters()}
    then = [[(name, shape, 0) for name, (shape, _, _) in content.params.items()]]
    difference = other_parameters([[(name, 0) for name in content.params]], ours, model) or other_shapes(
        then, description(engine.optimizer, None)["params"]
    )
    if difference:
        raise Misfit(difference)


def _as_ours(zero: Any, content: Content, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a shard of ours would say: our param groups, without rates or settings, and Adam's steps.

    Raises:
        Misfit: parameters of one param group have taken numbers of steps that differ.
    """
    ours, state = layout(zero), {}
    for i, (names, group) in enumerate(zip(ours, zero.optimizer.param_groups, strict=True)):
        (p,) = group["params"]
        state[i] = {key: torch.zeros_like(tensor, device="cpu") for key, tensor in zero.optimizer.state[p].items()
                    if key not in CUT_STATE}  # fmt: skip
        steps = {
            step: name for name, _ in names if "exp_avg" in content.params[name][2]
            if (step := content.steps[content.params[name][1]]) is not None
        }  # fmt: skip
        if "step" in state[i] and steps:
            if len(steps) > 1:
                (first, name), (second, other), *_ = steps.items()
                raise Misfit(
                    f"{name!r} and {other!r} are in one param group here, and have {first:g} and {second:g} steps of "
                    "Adam behind them; pass param groups that keep them apart"
                )
            state[i]["step"].fill_(next(iter(steps)))
    groups = [{"params": [i]} for i in range(len(ours))]
    kept = {key: value for key, value in saved.items() if key != CLIP_GRAD}
    said = {**description(zero, None), "dtype": content.dtype}
    return {**kept, LAYOUT: ours, SHARD: said, BASE: {"state": state, "param_groups": groups}}


def _what_starts_anew(zero: Any, content: Content) -> str:
    """One line on what a checkpoint of another optimizer gives and what starts from zero."""
    kept: dict[str, int] = {}
    fresh: dict[str, list[str]] = {}
    for names, group in zip(layout(zero), zero.optimizer.param_groups, strict=True):
        # Muon's groups come first.
        what, key = ("momentum", "momentum_buffer") if group["use_muon"] else ("moments", "exp_avg")
        for name, _ in names:
            if key in content.params[name][2]:
                kept[what] = kept.get(what, 0) + 1
            else:
                fresh.setdefault(what, []).append(name)
    takes = [f"the {what} of {count(number, 'parameter')}" for what, number in kept.items()]
    anew = [
        f"the {what} of {count(len(names), 'parameter')} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for what, names in fresh.items()
    ]
    converted = {content.params[name][2].get("momentum_buffer") for group in layout(zero) for name, _ in group}
    ours = name_of(zero.optimizer.momentum_buffer(0).dtype)
    if "momentum" in kept and (other := converted - {None, ours}):
        takes[0] += f" (in {', '.join(map(str, other))}, converted to {ours})"
    rest = f"; from zero start {' and '.join(anew)}" if anew else ""
    taken = " and ".join(takes) or "no state"
    return (
        f"from the checkpoint of {content.optimizer} this run takes over {taken}{rest}; rates and settings are its own"
    )
