"""Whether a checkpoint fits the engine, checked before anything is loaded.

DeepSpeed's engine loads weights, scheduler and counters first, and the state of ZeRO last. An error at the end would
leave the checkpoint's weights beside another optimizer state, and might stop one rank only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import stage_1_and_2 as deepspeed_zero

from ds_muon.agree import raise_together
from ds_muon.param_groups import NO_DECAY

LAYOUT = "ds_muon_layout"
"""Key in a checkpoint's shard: the ``layout`` that it was saved with."""

Offsets = list[list[tuple[str, int]]]

WEIGHTS_ONLY = (
    "To go on from its weights alone, with a new optimizer: engine.load_checkpoint(..., load_module_only=True), with "
    "load_module_strict=False where the model has other parameters, or accelerator.load_state(..., "
    "load_module_only=True); with Hugging Face's Trainer, load the model by "
    "from_pretrained from the checkpoint's folder and leave out resume_from_checkpoint"
)


def layout(zero: Any) -> Offsets:
    """For each param group of a ZeRO optimizer, name and offset of its parameters in flat order."""
    groups = zip(zero.round_robin_bit16_groups, zero.round_robin_bit16_offsets, strict=True)
    return [
        [(zero.param_names[p], int(offset)) for p, offset in zip(group, offsets, strict=True)]
        for group, offsets in groups
    ]


def check_before_loading(engine: Any, load_dir: str, tag: str) -> None:
    """Refuse, on every rank, a checkpoint whose optimizer state the engine cannot load. Modifies nothing.

    A collective. Reads the rank's shard without its tensors.

    Raises:
        ValueError: it is another optimizer's, has other parameters, param groups or ranks, or lacks a shard. The
            message names the first difference and says what to do.
        FileNotFoundError: there is no such checkpoint.
    """
    error: Exception | None = None
    try:
        folder = Path(load_dir, str(tag))
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: there is no such checkpoint")
        if difference := _difference(engine, load_dir, tag):
            error = ValueError(f"the checkpoint {folder} does not fit the optimizer: {difference}. {WEIGHTS_ONLY}")
    except Exception as caught:  # whatever it is, no rank may be left waiting
        error = caught
    raise_together(error, engine.optimizer.dp_process_group)


def _difference(engine: Any, load_dir: str, tag: str) -> str | None:
    zero = engine.optimizer
    rank, ranks = dist.get_rank(zero.dp_process_group), dist.get_world_size(zero.dp_process_group)

    def path_of(rank: int, *, other_precision: bool = False) -> Path:
        bf16 = engine.bfloat16_enabled() is not other_precision
        return Path(engine._get_rank_zero_ckpt_name(load_dir, tag, engine.checkpoint_mp_rank, rank, bf16))

    is_there = path_of(rank).exists()
    first = path_of(rank if is_there else 0)
    if not first.exists():
        if path_of(0, other_precision=True).exists():
            is_bf16 = engine.bfloat16_enabled()
            return f"it was saved with bf16.enabled = {str(not is_bf16).lower()}, and here it is {str(is_bf16).lower()}"
        return "it holds weights, but no optimizer state (no file *_optim_states.pt)"
    saved = _read(engine, first)
    shard = saved["optimizer_state_dict"]
    if LAYOUT not in shard:
        return f"it was saved by another optimizer, {_optimizer_of(saved)}, and not by DSMuon"
    base = shard[deepspeed_zero.BASE_OPTIMIZER_STATE]
    model = {name for name, _ in engine.module.named_parameters()}
    ours = layout(zero)
    if difference := _other_parameters(shard[LAYOUT], ours, model) or _other_groups(
        shard[LAYOUT], ours, base["param_groups"], zero.optimizer.param_groups
    ):
        return difference
    saved_by = max(shard[deepspeed_zero.PARTITION_COUNT])
    if saved_by != ranks:
        return f"it was saved by {saved_by} ranks, and here are {ranks}; resume on {saved_by}"
    if not is_there:
        return f"{path_of(rank)} is missing: it was not saved to its end, or not copied whole"
    if difference := _other_places(shard[LAYOUT], ours):
        return difference
    difference = zero.optimizer.state_difference(base)
    return None if difference is None else f"it was saved by another optimizer or variant: {difference}"


def _read(engine: Any, path: Path) -> dict[str, Any]:
    """The contents of a checkpoint's file. If the format allows it, tensors are read only when they are used."""
    try:
        try:
            contents: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
        except RuntimeError:  # another format than torch's present one
            contents = engine.checkpoint_engine.load(str(path), map_location="cpu")
    except Exception as error:
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    return contents


def _optimizer_of(saved: Mapping[str, Any]) -> str:
    """The optimizer that saved a checkpoint, by the config that DeepSpeed saves, else by its state."""
    config = saved.get("ds_config")
    section = config.get("optimizer") if isinstance(config, Mapping) else None
    if isinstance(section, Mapping) and "type" in section:
        return str(section["type"])
    base = saved["optimizer_state_dict"].get(deepspeed_zero.BASE_OPTIMIZER_STATE)
    states = base.get("state", {}).values() if isinstance(base, Mapping) else ()
    keys = sorted({key for state in states if isinstance(state, Mapping) for key in state})
    if {"exp_avg", "exp_avg_sq"} <= set(keys):
        return "Adam or AdamW"
    return f"whose state is {', '.join(keys)}" if keys else "which has no state"


def _half(group: Mapping[str, Any]) -> str:
    return "Muon's" if group["use_muon"] else "AdamW's"


def _is_kept_from_decay(group: Mapping[str, Any]) -> bool:
    return str(group.get("name", "")).endswith(f"-{NO_DECAY}")


def _other_parameters(saved: Offsets, ours: Offsets, model: set[str]) -> str | None:
    """The parameters that only one of the two runs trains; None if there are none.

    Args:
        saved, ours: layouts.
        model: names of all parameters of the engine's model.
    """
    then = [name for group in saved for name, _ in group]
    now = [name for group in ours for name, _ in group]
    added = [name for name in now if name not in set(then)]
    frozen = [name for name in then if name not in set(now) and name in model]
    gone = [name for name in then if name not in model]
    lines = []
    if added:
        lines.append(f"{_some(added)} trained here, but not in the run that saved it; freeze what was not trained")
    if frozen:
        lines.append(
            f"{_some(frozen)} not trained here (frozen, or not among the model_parameters), but in the run that saved "
            "it; train what was trained"
        )
    if gone:
        lines.append(f"{_some(gone)} not in this model, or under another name; build the model that was saved")
    return "; ".join(lines) or None


def _some(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"{names[0]!r} is"
    return f"{names[0]!r} and {len(names) - 1} more parameter{'s' if len(names) > 2 else ''} are"


def _other_groups(
    saved: Offsets, ours: Offsets, groups: Sequence[Mapping[str, Any]], our_groups: Sequence[Mapping[str, Any]]
) -> str | None:
    """A parameter in another half, with weight decay in one run only, or in another param group; None if none is."""
    place = {name: j for j, group in enumerate(ours) for name, _ in group}
    moved = [(name, i, place[name]) for i, group in enumerate(saved) for name, _ in group]
    for name, i, j in moved:
        if (then := _half(groups[i])) != (now := _half(our_groups[j])):
            return (
                f"{name!r} is in another param group: it was {then}, and is {now} here; use the muon_params and "
                "adamw_params it was saved with, or name it in one of them"
            )
    for name, i, j in moved:
        if (kept := _is_kept_from_decay(groups[i])) != _is_kept_from_decay(our_groups[j]):
            when, other = ("then", "here") if kept else ("here", "then")
            return (
                f"{name!r} is in another param group: no_decay_params named it {when}, and not {other}; use the "
                "no_decay_params it was saved with"
            )
    for name, i, j in moved:
        if i != j or len(saved) != len(ours):
            return (
                f"{name!r} is in another param group: in {i} of {len(saved)} then, and in {j} of {len(ours)} here; "
                "pass the param groups it was saved with"
            )
    return None


def _other_places(saved: Offsets, ours: Offsets) -> str | None:
    """How the flat buffers of the same parameters differ in layout; None if they do not."""
    for theirs, mine in zip(saved, ours, strict=True):
        for (name, offset), (our_name, our_offset) in zip(theirs, mine, strict=True):
            if name != our_name:
                return (
                    f"parameters lie in another order, {name!r} where {our_name!r} is here; use the model, order of "
                    "parameters and zero_optimization.round_robin_gradients it was saved with"
                )
            if offset != our_offset:
                return (
                    f"parameters begin at other places, {name!r} at {offset}, here at {our_offset}; use the shapes of "
                    "parameters and zero_optimization.parameter_alignment it was saved with"
                )
    return None
