"""Whether a checkpoint fits the engine, checked before anything is loaded.

DeepSpeed's engine loads weights, scheduler and counters first, and the state of ZeRO last. An error at the end would
leave the checkpoint's weights beside another optimizer state, and might stop one rank only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import stage_1_and_2 as deepspeed_zero
from torch import Tensor

from ds_muon.agree import gather, raise_together
from ds_muon.checkpoints.reshard import Buffers, Offsets, Stretch, stretches
from ds_muon.checkpoints.shards import (
    LAYOUT,
    SHARD,
    Facts,
    Misfit,
    Shards,
    description,
    layout,
    partition_sizes,
    states_of,
)
from ds_muon.dtypes import name_of
from ds_muon.optimizer import ORIGIN
from ds_muon.param_groups import NO_DECAY
from ds_muon.say import say

WEIGHTS_ONLY = (
    "To go on from its weights alone, with a new optimizer: engine.load_checkpoint(..., load_module_only=True), with "
    "load_module_strict=False where the model has other parameters, or accelerator.load_state(..., "
    "load_module_only=True); with Hugging Face's Trainer, load the model by "
    "from_pretrained from the checkpoint's folder and leave out resume_from_checkpoint"
)


@dataclass(frozen=True)
class Found:
    """A checkpoint that fits the engine, and what this rank loads of it. Tensors are read only when they are used.

    Attributes:
        shards: those that this rank reads, by the rank that saved them.
        home: the shard from which this rank takes what is the same in all.
        stretches: the slices of the partitions of this rank, and where they lie in the shards.
        sources: for each param group, the saved group whose rates and settings it takes over.
        rows: for each parameter its saved group, its first row in NorMuon's ``row_variance`` there, and their number.
    """

    shards: Mapping[int, Mapping[str, Any]]
    home: int
    stretches: tuple[Stretch, ...]
    sources: tuple[int, ...]
    rows: Mapping[str, tuple[int, int, int]]

    @property
    def whole(self) -> Mapping[str, Any]:
        """The shard from which this rank takes what is the same in all."""
        return self.shards[self.home]

    def is_of_dtype(self, dtype: torch.dtype) -> bool:
        """Whether the model's weights had this dtype when they were saved."""
        ours = name_of(dtype)
        return bool(self.whole[SHARD].get("dtype", ours) == ours)

    @property
    def groups(self) -> list[Mapping[str, Any]]:
        """What each param group takes over."""
        saved = self.whole[deepspeed_zero.BASE_OPTIMIZER_STATE]["param_groups"]
        return [saved[source] for source in self.sources]

    def weights(self, stretch: Stretch) -> Tensor:
        """The fp32 weights of a stretch: (numel,)."""
        flat: Tensor = self.shards[stretch.shard][deepspeed_zero.SINGLE_PARTITION_OF_FP32_GROUPS][stretch.saved_group]
        return flat.narrow(0, stretch.saved_offset, stretch.numel)

    def state(self, stretch: Stretch, key: str) -> Tensor:
        """A stretch of the optimizer's state: (numel,)."""
        flat: Tensor = states_of(self.shards[stretch.shard])[stretch.saved_group][key]
        return flat.narrow(0, stretch.saved_offset, stretch.numel)

    def whole_state(self, source: int, key: str) -> Tensor:
        """State of a saved param group that is not cut."""
        state: Tensor = states_of(self.whole)[source][key]
        return state

    def row_variance(self, name: str) -> Tensor:
        """NorMuon's moments of one matrix: (rows,)."""
        source, first, count = self.rows[name]
        return self.whole_state(source, "row_variance").view(-1).narrow(0, first, count)


# ---- before loading -------------------------------------------------------------------------------------------------


def check_before_loading(engine: Any, load_dir: str, tag: str, *, with_scheduler: bool) -> Found:
    """Find what this rank will load of a checkpoint of any number of ranks. Modifies nothing.

    A collective. Reads shards without their tensors.

    Args:
        with_scheduler: whether the scheduler's state is loaded as well.

    Raises:
        ValueError: it is another optimizer's, has other parameters or shapes, lacks a shard, or has shards of several
            saves. The message names the first difference and says what to do. A rank that finds none raises a
            ``RuntimeError`` that quotes it.
        FileNotFoundError: there is no such checkpoint.
    """
    group, folder = engine.optimizer.dp_process_group, Path(load_dir, str(tag))
    files = Shards(engine, load_dir, tag)
    error: Exception | None = None
    facts: dict[int, Facts] = {}
    found: Found | None = None
    try:
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: there is no such checkpoint")
        facts = files.deal()
    except Exception as caught:  # whatever it is, no rank may be left waiting
        error = explained(caught, folder)
    raise_together(error, group)
    seen = gather((str(tag), facts), group)
    try:
        found = _fit(engine, files, seen, with_scheduler)
    except Exception as caught:
        error = explained(caught, folder)
    raise_together(error, group)
    assert found is not None
    say_what_changes(found, engine.optimizer)
    return found


def explained(error: Exception, folder: Path) -> Exception:
    if isinstance(error, Misfit):
        return ValueError(f"the checkpoint {folder} does not fit the optimizer: {error}. {WEIGHTS_ONLY}")
    return error


def _fit(engine: Any, files: Shards, seen: Sequence[tuple[str, Mapping[int, Facts]]], with_scheduler: bool) -> Found:
    """What this rank will read.

    Args:
        seen: by rank, the tag that it loads and the facts of the shards that it has looked at.

    Raises:
        Misfit: what does not fit.
    """
    zero = engine.optimizer
    rank = dist.get_rank(zero.dp_process_group)
    for other, (tag, _) in enumerate(seen):
        if tag != seen[0][0]:
            raise Misfit(f"rank 0 loads the tag {seen[0][0]!r}, and rank {other} {tag!r}; pass the same tag")
    facts = {k: of_shard for _, of_rank in seen for k, of_shard in of_rank.items()}
    _check_complete(files, facts)
    saved_by = facts[0].ranks
    home = rank % saved_by

    def opened(k: int) -> Mapping[str, Any]:
        if k not in files.opened and files.open(k) != facts[k]:
            raise Misfit(f"{files.path_of(k)} is another file on this rank than on rank {k % len(seen)}")
        return files.opened[k]

    whole = opened(home)
    sources = fit_groups(engine, whole, with_scheduler=with_scheduler)
    ours, states = layout(zero), states_of(whole)
    files.check_weights(facts[0].save)

    numels = {name: p.numel() for params in zero.bit16_groups for p in params for name in (zero.param_names[p],)}
    saved_buffers = Buffers(whole[LAYOUT], partition_sizes(states))
    to_hold = tuple(stretches(saved_buffers, Buffers(ours, zero.partition_size), numels, rank))
    shards = {k: opened(k) for k in sorted({home, *(stretch.shard for stretch in to_hold)})}
    return Found(shards, home, to_hold, sources, rows_of(whole[SHARD]["params"]))


def fit_groups(engine: Any, whole: Mapping[str, Any], *, with_scheduler: bool) -> tuple[int, ...]:
    """For each of our param groups, the saved one whose rates and settings it takes over.

    Args:
        whole: layout, description and optimizer's state, as a shard has them.

    Raises:
        Misfit: what does not fit.
    """
    zero = engine.optimizer
    model = {name for name, _ in engine.module.named_parameters()}
    ours, here = layout(zero), description(zero, None)
    saved_groups, groups = whole[deepspeed_zero.BASE_OPTIMIZER_STATE]["param_groups"], zero.optimizer.param_groups
    if difference := (
        other_parameters(whole[LAYOUT], ours, model)
        or other_shapes(whole[SHARD]["params"], here["params"])
        or (zero.optimizer.config.variant == "normuon" and _other_outputs(whole[SHARD], here))
        or _other_groups(whole[LAYOUT], ours, saved_groups, groups)
    ):
        raise Misfit(difference)
    states = states_of(whole)
    sources = _sources(whole[LAYOUT], ours, saved_groups, states)
    for i, source in enumerate(sources):
        (p,) = groups[i]["params"]
        for difference in _state_differences(saved_groups[source], states[source], groups[i], zero.optimizer.state[p]):
            raise Misfit(f"it was saved by another optimizer or variant: {difference}")
    if not zero.compute_grad_norm and whole[deepspeed_zero.CLIP_GRAD] > 0:
        raise Misfit("it was saved with gradient_clipping, which zero_optimization.compute_grad_norm = false forbids")
    same_groups = _are_the_same_groups(sources, saved_groups)
    if not same_groups and with_scheduler and (scheduler := _keeps_a_list(engine.lr_scheduler)):
        raise Misfit(
            f"it was saved with other param groups, for each of which the scheduler, a {scheduler}, keeps rates of its "
            "own; pass the param groups it was saved with, or load_lr_scheduler_states=False"
        )
    return tuple(sources)


def _check_complete(files: Shards, facts: Mapping[int, Facts]) -> None:
    """Refuse shards that are missing, or are not all of one save.

    Raises:
        Misfit: with the first file at fault.
    """
    if not facts:
        if not files.weights.exists():
            raise Misfit("it was not saved to its end: it holds neither weights nor optimizer state")
        raise Misfit("it holds weights, but no optimizer state (no file *_optim_states.pt)")
    first = facts.get(0, next(iter(facts.values())))
    for k in range(first.ranks):
        path = files.path_of(k)
        if k not in facts:
            raise Misfit(f"{path} is missing: it was not saved to its end, or not copied whole")
        shard = facts[k]
        if shard.save != first.save or shard.ranks != first.ranks:
            raise Misfit(
                f"{path} is of another save than {files.path_of(0)}: of {shard}, and not of {first}; "
                "shards of two saves are mixed up, or it was not saved to its end"
            )
        if shard.rank != k:
            raise Misfit(f"{path} is not what rank {k} saved, but rank {shard.rank}; copy that file anew")
        if shard.content != first.content:
            raise Misfit(f"{path} holds other parameters than {files.path_of(0)}, or cut in another way")


def other_shapes(saved: Sequence[Sequence[Any]], ours: Sequence[Sequence[Any]]) -> str | None:
    then = {name: shape for group in saved for name, shape, _ in group}
    for group in ours:
        for name, shape, _ in group:
            if then[name] != shape:
                return f"{name!r} has the shape {then[name]} there, and {shape} here; build the model that was saved"
    return None


def _other_outputs(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    """A tensor of Muon's in both whose outputs, each with a moment of NorMuon's, are others here; None without one.

    Of tensors of which a checkpoint does not say it, as an early version saves them, each was one matrix.
    """
    then = {name: rows for group in saved["params"] for name, _, rows in group}
    for group in ours["params"]:
        for name, _, rows in group:
            if not (rows and then[name]):
                continue
            here = ours["outputs"][name]
            order = saved.get("outputs", {}).get(name) or here.partition(";")[0]
            if (rows, here) != (then[name], order):
                return (
                    f"{name!r} has other outputs there ({then[name]}, {order}) than here ({rows}, {here}), and NorMuon "
                    "keeps a moment of each; build the model that was saved, with the muon_blocks it was saved with"
                )
    return None


def _sources(
    saved: Offsets, ours: Offsets, groups: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]]
) -> list[int]:
    """For each of our param groups, one of the saved groups in which its parameters were.

    Raises:
        Misfit: they were in several, of other values.
    """
    place = {name: j for j, group in enumerate(saved) for name, _ in group}
    sources = []
    for group in ours:
        first, source = group[0][0], place[group[0][0]]
        for name, _ in group:
            if place[name] == source:
                continue
            values = [_values(groups[j], states[j]) for j in (source, place[name])]
            for key in values[0].keys() | values[1].keys():
                if values[0].get(key) != values[1].get(key):
                    raise Misfit(
                        f"{first!r} and {name!r} are in one param group here, and were in two with {key} = "
                        f"{values[0].get(key)} and {values[1].get(key)}; pass the param groups it was saved with"
                    )
        sources.append(source)
    return sources


def _values(group: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """What all parameters of a saved group have in common."""
    values = {key: value for key, value in group.items() if key not in ("params", *ORIGIN)}
    return {**values, "step": float(state["step"])} if "step" in state else values


def _keeps_a_list(scheduler: Any) -> str | None:
    """The type of a scheduler whose state has something for each param group; None of another, or without one."""
    values = scheduler.state_dict().values() if hasattr(scheduler, "state_dict") else ()
    return type(scheduler).__name__ if any(isinstance(value, list | tuple) for value in values) else None


def rows_of(params: Sequence[Sequence[Any]]) -> dict[str, tuple[int, int, int]]:
    """See ``Found.rows``."""
    rows = {}
    for j, group in enumerate(params):
        start = 0
        for name, _, count in group:
            rows[name] = (j, start, count)
            start += count
    return rows


def say_what_changes(found: Found, zero: Any) -> None:
    states = states_of(found.whole)
    saved = {state["momentum_buffer"].dtype for state in states if "momentum_buffer" in state}
    ours = zero.optimizer.momentum_buffer(0).dtype
    if saved != {ours}:
        say(f"the checkpoint's momentum, {', '.join(map(name_of, saved))}, is converted to {name_of(ours)}")
    dtype = zero.bit16_groups_flat[0].dtype
    if not found.is_of_dtype(dtype):
        say(
            f"the checkpoint's model, {found.whole[SHARD]['dtype']}, is loaded in {name_of(dtype)}; the loss scale is "
            "that of the config"
        )
    if not _are_the_same_groups(found.sources, states):
        say(
            "the checkpoint was saved with other param groups: each takes the rates and settings that its parameters "
            "had in there"
        )


def _are_the_same_groups(sources: Sequence[int], saved: Sequence[Any]) -> bool:
    return list(sources) == list(range(len(saved)))


def _half(group: Mapping[str, Any]) -> str:
    return "Muon's" if group["use_muon"] else "AdamW's"


def _is_kept_from_decay(group: Mapping[str, Any]) -> bool:
    return str(group.get("name", "")).endswith(f"-{NO_DECAY}")


def other_parameters(saved: Offsets, ours: Offsets, model: set[str]) -> str | None:
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
    """A parameter in another half, or with weight decay in one run only; None if none is."""
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
    return None


def _state_differences(
    saved_group: Mapping[str, Any], theirs: Mapping[str, Any], group: Mapping[str, Any], mine: Mapping[str, Any]
) -> Iterator[str]:
    """Why the state of a saved group is none for the parameters of ``group``, wherever they are cut.

    Args:
        theirs, mine: the state that was saved, and this optimizer's, by key.
    """
    if group["use_muon"] and ("row_variance" in theirs) != ("row_variance" in mine):
        names = ['"normuon"' if "row_variance" in state else '"muon"' for state in (theirs, mine)]
        yield f"its variant is {names[0]}, this optimizer's {names[1]}; set optimizer.params.variant to {names[0]}"
    if theirs.keys() != mine.keys():
        yield f"its state has {sorted(theirs)}, this optimizer's has {sorted(mine)}"
    for key in ("use_muon", "momentum", "nesterov"):
        if key in group and key not in saved_group:
            yield f"its param groups have no {key!r}"
    if saved_group.get("use_muon") != group["use_muon"]:
        yield "a group of matrices was AdamW's, or the other way round"
