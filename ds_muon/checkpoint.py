"""What shards say of themselves, and whether a checkpoint fits the engine, checked before anything is loaded.

DeepSpeed's engine loads weights, scheduler and counters first, and the state of ZeRO last. An error at the end would
leave the checkpoint's weights beside another optimizer state, and might stop one rank only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import stage_1_and_2 as deepspeed_zero
from torch import Tensor

from ds_muon.agree import gather, raise_together
from ds_muon.dtypes import name_of
from ds_muon.optimizer import CUT_STATE, ORIGIN, state_differences
from ds_muon.param_groups import NO_DECAY
from ds_muon.reshard import Buffers, Offsets, Piece, pieces
from ds_muon.say import say

BASE, CLIP_GRAD = deepspeed_zero.BASE_OPTIMIZER_STATE, deepspeed_zero.CLIP_GRAD
"""DeepSpeed's keys in a shard: state and param groups of the optimizer; gradient_clipping."""
LAYOUT = "ds_muon_layout"
"""Key in a checkpoint's shard: the ``layout`` that it was saved with."""
SHARD = "ds_muon_shard"
"""Key in a checkpoint's shard: its ``description``."""
FORMAT = 1
"""Number of the format of both. A later ds_muon may write a larger one, which this one refuses."""

WEIGHTS_ONLY = (
    "To go on from its weights alone, with a new optimizer: engine.load_checkpoint(..., load_module_only=True), with "
    "load_module_strict=False where the model has other parameters, or accelerator.load_state(..., "
    "load_module_only=True); with Hugging Face's Trainer, load the model by "
    "from_pretrained from the checkpoint's folder and leave out resume_from_checkpoint"
)


@dataclass(frozen=True)
class Save:
    """One call of ``save_checkpoint``: a number that it shares with no other, and when it was."""

    number: str
    tag: str
    step: int

    def __str__(self) -> str:
        return f"step {self.step}, as tag {self.tag!r}"


@dataclass(frozen=True)
class Found:
    """A checkpoint that fits the engine, and what this rank loads of it. Tensors are read only when they are used.

    Attributes:
        shards: those that this rank reads, by the rank that saved them.
        home: the shard from which this rank takes what is the same in all.
        pieces: the slices of the partitions of this rank, and where they lie in the shards.
        sources: for each param group, the saved group whose rates and settings it takes over.
        rows: for each parameter its saved group, its first row in NorMuon's ``row_variance`` there, and their number.
    """

    shards: Mapping[int, Mapping[str, Any]]
    home: int
    pieces: tuple[Piece, ...]
    sources: tuple[int, ...]
    rows: Mapping[str, tuple[int, int, int]]

    @property
    def whole(self) -> Mapping[str, Any]:
        """The shard from which this rank takes what is the same in all."""
        return self.shards[self.home]

    @property
    def groups(self) -> list[Mapping[str, Any]]:
        """What each param group takes over."""
        saved = self.whole[deepspeed_zero.BASE_OPTIMIZER_STATE]["param_groups"]
        return [saved[source] for source in self.sources]

    def weights(self, piece: Piece) -> Tensor:
        """The fp32 weights of a piece: (numel,)."""
        flat: Tensor = self.shards[piece.shard][deepspeed_zero.SINGLE_PARTITION_OF_FP32_GROUPS][piece.saved_group]
        return flat.narrow(0, piece.saved_offset, piece.numel)

    def state(self, piece: Piece, key: str) -> Tensor:
        """A piece of the optimizer's state: (numel,)."""
        flat: Tensor = states_of(self.shards[piece.shard])[piece.saved_group][key]
        return flat.narrow(0, piece.saved_offset, piece.numel)

    def whole_state(self, source: int, key: str) -> Tensor:
        """State of a saved param group that is not cut."""
        state: Tensor = states_of(self.whole)[source][key]
        return state

    def row_variance(self, name: str) -> Tensor:
        """NorMuon's moments of one matrix: (rows,)."""
        source, first, count = self.rows[name]
        return self.whole_state(source, "row_variance").view(-1).narrow(0, first, count)


class Misfit(Exception):
    """Why the checkpoint does not fit."""


# ---- saving ---------------------------------------------------------------------------------------------------------


def layout(zero: Any) -> Offsets:
    """For each param group of a ZeRO optimizer, name and offset of its parameters in flat order."""
    groups = zip(zero.round_robin_bit16_groups, zero.round_robin_bit16_offsets, strict=True)
    return [
        [(zero.param_names[p], int(offset)) for p, offset in zip(group, offsets, strict=True)]
        for group, offsets in groups
    ]


def description(zero: Any, save: Save | None) -> dict[str, Any]:
    """What a shard says of itself, beside its layout: whose it is, of which save, and what lies in it.

    ``params`` lists, for each param group in its own order, name, shape and, of a matrix of Muon's, number of outputs.
    """
    rows = {matrix.name: matrix.sides[0] for matrix in zero.plan.matrices}
    group = zero.dp_process_group
    return {
        "format": FORMAT,
        "rank": dist.get_rank(group),
        "ranks": dist.get_world_size(group),
        "save": None if save is None else (save.number, save.tag, save.step),
        "params": [
            [(name := zero.param_names[p], tuple(p.shape), rows.get(name, 0)) for p in params]
            for params in zero.bit16_groups
        ],
    }


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
    files = _Files(engine, load_dir, tag)
    error: Exception | None = None
    facts: dict[int, _Facts] = {}
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
    say_what_changes(found, engine.optimizer.optimizer)
    return found


def explained(error: Exception, folder: Path) -> Exception:
    if isinstance(error, Misfit):
        return ValueError(f"the checkpoint {folder} does not fit the optimizer: {error}. {WEIGHTS_ONLY}")
    return error


@dataclass(frozen=True)
class _Facts:
    """What shards of one save have in common, but for the rank."""

    rank: int
    ranks: int
    save: Save | None
    content: str


class _Files:
    """The shards of a checkpoint, opened when they are asked for."""

    def __init__(self, engine: Any, load_dir: str, tag: str) -> None:
        self._engine, self._load_dir, self._tag = engine, load_dir, tag
        self.shards: dict[int, dict[str, Any]] = {}

    def path_of(self, rank: int, *, other_precision: bool = False) -> Path:
        engine = self._engine
        bf16 = engine.bfloat16_enabled() is not other_precision
        mp_rank = engine.checkpoint_mp_rank
        return Path(engine._get_rank_zero_ckpt_name(self._load_dir, self._tag, mp_rank, rank, bf16))

    def deal(self) -> dict[int, _Facts]:
        """The facts of every world-size-th shard, as far as there are any: all ranks together look at all."""
        zero = self._engine.optimizer
        k, step = dist.get_rank(zero.dp_process_group), dist.get_world_size(zero.dp_process_group)
        facts = {}
        while self.path_of(k).exists():
            facts[k] = self.open(k)
            k += step
        return facts

    def open(self, k: int) -> _Facts:
        """Read the shard of rank ``k`` into ``shards``.

        Raises:
            Misfit: it is not of this optimizer.
            ValueError: it cannot be read.
        """
        path = self.path_of(k)
        saved = _read(self._engine, path)
        shard = saved["optimizer_state_dict"]
        if LAYOUT not in shard:
            raise Misfit(f"it was saved by another optimizer, {optimizer_of(saved)}, and not by DSMuon")
        said = shard.get(SHARD) or self._of_unsaid(k, shard)
        if said["format"] > FORMAT:
            raise Misfit(f"{path} has format {said['format']}, of a later ds_muon; this one reads up to {FORMAT}")
        # A shard without a description gets one, which loading reads.
        self.shards[k] = {**shard, SHARD: said}
        states = [{key: tuple(value.shape) for key, value in state.items()} for state in states_of(shard)]
        content = repr((shard[LAYOUT], said["params"], states))
        save = None if said["save"] is None else Save(*said["save"])
        return _Facts(said["rank"], said["ranks"], save, hashlib.sha256(content.encode()).hexdigest())

    def _of_unsaid(self, k: int, shard: Mapping[str, Any]) -> dict[str, Any]:
        ours = description(self._engine.optimizer, None)
        if shard[LAYOUT] != layout(self._engine.optimizer) or ours["ranks"] != max(
            shard[deepspeed_zero.PARTITION_COUNT]
        ):
            raise Misfit(
                f"{self.path_of(k)} does not say what lies in it: it is of an early ds_muon, and loads only with the "
                "world size, param groups, zero_optimization.round_robin_gradients and parameter_alignment that it was "
                "saved with; load it so, and save it again"
            )
        return {**ours, "rank": k}

    def step_of_weights(self) -> tuple[Path, Any]:
        """The file of the model's weights, and the step at which it was saved."""
        path = Path(self._engine._get_ckpt_name(self._load_dir, self._tag))
        return path, _read(self._engine, path).get("global_steps")


def states_of(shard: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The optimizer's state of each param group."""
    base = shard[deepspeed_zero.BASE_OPTIMIZER_STATE]
    return [base["state"].get(key, {}) for group in base["param_groups"] for key in group["params"]]


def _partition_sizes(states: Sequence[Mapping[str, Any]]) -> list[int]:
    return [next((state[key].numel() for key in state.keys() & CUT_STATE), 0) for state in states]


def _fit(engine: Any, files: _Files, seen: Sequence[tuple[str, Mapping[int, _Facts]]], with_scheduler: bool) -> Found:
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
    _check_complete(engine, files, facts)
    saved_by = facts[0].ranks
    home = rank % saved_by

    def opened(k: int) -> Mapping[str, Any]:
        if k not in files.shards and files.open(k) != facts[k]:
            raise Misfit(f"{files.path_of(k)} is another file on this rank than on rank {k % len(seen)}")
        return files.shards[k]

    whole = opened(home)
    sources = fit_groups(engine, whole, with_scheduler=with_scheduler)
    ours, states = layout(zero), states_of(whole)
    if facts[0].save is not None:
        path, step = files.step_of_weights()
        if step is not None and step != facts[0].save.step:
            raise Misfit(f"{path} is of step {step}, and {files.path_of(0)} of {facts[0].save}")

    numels = {name: p.numel() for params in zero.bit16_groups for p in params for name in (zero.param_names[p],)}
    saved_buffers = Buffers(whole[LAYOUT], _partition_sizes(states))
    to_hold = tuple(pieces(saved_buffers, Buffers(ours, zero.partition_size), numels, rank))
    shards = {k: opened(k) for k in sorted({home, *(piece.shard for piece in to_hold)})}
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
    ours = layout(zero)
    saved_groups, groups = whole[deepspeed_zero.BASE_OPTIMIZER_STATE]["param_groups"], zero.optimizer.param_groups
    if difference := (
        other_parameters(whole[LAYOUT], ours, model)
        or other_shapes(whole[SHARD]["params"], description(zero, None)["params"])
        or _other_groups(whole[LAYOUT], ours, saved_groups, groups)
    ):
        raise Misfit(difference)
    states = states_of(whole)
    sources = _sources(whole[LAYOUT], ours, saved_groups, states)
    for i, source in enumerate(sources):
        (p,) = groups[i]["params"]
        for difference in state_differences(saved_groups[source], states[source], groups[i], zero.optimizer.state[p]):
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


def _check_complete(engine: Any, files: _Files, facts: Mapping[int, _Facts]) -> None:
    """Refuse shards that are missing, or are not all of one save.

    Raises:
        Misfit: with the first file at fault.
    """
    if 0 not in facts:
        if files.path_of(0, other_precision=True).exists():
            is_bf16 = engine.bfloat16_enabled()
            raise Misfit(
                f"it was saved with bf16.enabled = {str(not is_bf16).lower()}, and here it is {str(is_bf16).lower()}"
            )
        if not facts:
            raise Misfit("it holds weights, but no optimizer state (no file *_optim_states.pt)")
    first = facts.get(0, next(iter(facts.values())))
    for k in range(first.ranks):
        path = files.path_of(k)
        if k not in facts:
            raise Misfit(f"{path} is missing: it was not saved to its end, or not copied whole")
        shard = facts[k]
        if shard.save != first.save or shard.ranks != first.ranks:
            raise Misfit(
                f"{path} is of another save than {files.path_of(0)}: of {_whose(shard)}, and not of {_whose(first)}; "
                "shards of two saves are mixed up, or it was not saved to its end"
            )
        if shard.rank != k:
            raise Misfit(f"{path} is not what rank {k} saved, but rank {shard.rank}; copy that file anew")
        if shard.content != first.content:
            raise Misfit(f"{path} holds other parameters than {files.path_of(0)}, or cut in another way")


def _whose(shard: _Facts) -> str:
    return f"{f'{shard.save}, ' if shard.save else ''}by {shard.ranks} rank{'s' if shard.ranks > 1 else ''}"


def other_shapes(saved: Sequence[Sequence[Any]], ours: Sequence[Sequence[Any]]) -> str | None:
    then = {name: (shape, rows) for group in saved for name, shape, rows in group}
    for group in ours:
        for name, shape, rows in group:
            if then[name][0] != shape:
                return f"{name!r} has the shape {then[name][0]} there, and {shape} here; build the model that was saved"
            if then[name][1] != rows and then[name][1] and rows:
                return f"{name!r} has {then[name][1]} outputs there, and {rows} here; build the model that was saved"
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


def say_what_changes(found: Found, optimizer: Any) -> None:
    states = states_of(found.whole)
    saved = {state["momentum_buffer"].dtype for state in states if "momentum_buffer" in state}
    ours = optimizer.momentum_buffer(0).dtype
    if saved != {ours}:
        say(f"the checkpoint's momentum, {', '.join(map(name_of, saved))}, is converted to {name_of(ours)}")
    if not _are_the_same_groups(found.sources, states):
        say(
            "the checkpoint was saved with other param groups: each takes the rates and settings that its parameters "
            "had in there"
        )


def _are_the_same_groups(sources: Sequence[int], saved: Sequence[Any]) -> bool:
    return list(sources) == list(range(len(saved)))


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


def optimizer_of(saved: Mapping[str, Any]) -> str:
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
