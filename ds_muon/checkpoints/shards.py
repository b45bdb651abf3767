"""The shards of a checkpoint, and what each of them says of itself: one for each rank that saved it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine import DataStatesCheckpointEngine
from deepspeed.runtime.zero import stage_1_and_2 as deepspeed_zero

from ds_muon.checkpoints.reading import read_file
from ds_muon.checkpoints.reshard import Offsets
from ds_muon.dtypes import name_of
from ds_muon.layout import order_of_outputs

LAYOUT = "ds_muon_layout"
"""Key in a checkpoint's shard: the ``layout`` that it was saved with."""
SHARD = "ds_muon_shard"
"""Key in a checkpoint's shard: its ``description``."""
SAVE = "ds_muon_save"
"""Key in a checkpoint's file of weights: the number of the ``Save``, its tag and its step, as in a description."""
BASE, CLIP_GRAD = deepspeed_zero.BASE_OPTIMIZER_STATE, deepspeed_zero.CLIP_GRAD
"""DeepSpeed's keys in a shard: state and param groups of the optimizer; gradient_clipping."""
CUT_STATE = frozenset({"momentum_buffer", "exp_avg", "exp_avg_sq"})
"""State with a number for each element of the flat partition; the other is the same on every rank."""
FORMAT = 1
"""Number of the format of these. A later ds_muon may write a larger one, which this one refuses."""


class Misfit(Exception):
    """Why the checkpoint does not fit."""


@dataclass(frozen=True)
class Save:
    """One call of ``save_checkpoint``: a number that it shares with no other, and when it was."""

    number: str
    tag: str
    step: int

    def as_saved(self) -> tuple[str, str, int]:
        return self.number, self.tag, self.step

    def __str__(self) -> str:
        return f"step {self.step}, as tag {self.tag!r}"


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

    ``params`` lists, for each param group in its own order, name, shape and, of a tensor of Muon's, number of outputs.
    ``outputs`` says in which order these are, and ``dtype`` is that of the model's weights.
    """
    stored, pieces = zero.optimizer.routing.layouts(), zero.optimizer.routing.pieces()
    rows = Counter({unit.tensor: 0 for unit in zero.plan.units})
    for unit in zero.plan.units:
        rows[unit.tensor] += sum(matrix.sides[0] for matrix in unit.matrices)
    group = zero.dp_process_group
    return {
        "format": FORMAT,
        "rank": dist.get_rank(group),
        "ranks": dist.get_world_size(group),
        "save": None if save is None else save.as_saved(),
        "dtype": name_of(zero.bit16_groups_flat[0].dtype),
        "params": [
            [(name := zero.param_names[p], tuple(p.shape), rows.get(name, 0)) for p in params]
            for params in zero.bit16_groups
        ],
        "outputs": {name: order_of_outputs(pieces[name], stored[name]) for name in rows},
    }


# ---- reading --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """What shards of one save have in common, but for the rank."""

    rank: int
    ranks: int
    save: Save | None
    content: str

    def __str__(self) -> str:
        return f"{f'{self.save}, ' if self.save else ''}by {self.ranks} rank{'s' if self.ranks > 1 else ''}"


class Shards:
    """The shards of a checkpoint, opened when they are asked for.

    Attributes:
        opened: what has been read, by the rank that saved it. Tensors are read only when they are used.
    """

    def __init__(self, engine: Any, load_dir: str, tag: str) -> None:
        self._engine, self._load_dir, self._tag = engine, load_dir, tag
        self.opened: dict[int, dict[str, Any]] = {}

    @property
    def weights(self) -> Path:
        """The file of the model's weights."""
        return Path(self._engine._get_ckpt_name(self._load_dir, self._tag))

    def path_of(self, rank: int) -> Path:
        """The shard of a rank; its name says whether it was saved with bf16, whatever the engine's dtype."""
        engine = self._engine
        bf16 = engine.bfloat16_enabled()
        ours, other = (
            Path(engine._get_rank_zero_ckpt_name(self._load_dir, self._tag, engine.checkpoint_mp_rank, rank, prefixed))
            for prefixed in (bf16, not bf16)
        )
        return other if other.exists() and not ours.exists() else ours

    def deal(self) -> dict[int, Facts]:
        """The facts of every world-size-th shard, as far as there are any: all ranks together look at all."""
        zero = self._engine.optimizer
        k, step = dist.get_rank(zero.dp_process_group), dist.get_world_size(zero.dp_process_group)
        facts = {}
        while self.path_of(k).exists():
            facts[k] = self.open(k)
            k += step
        return facts

    def open(self, k: int) -> Facts:
        """Read the shard of rank ``k`` into ``opened``.

        Raises:
            Misfit: it is not of this optimizer.
            ValueError: it cannot be read.
        """
        path = self.path_of(k)
        saved = _read(self._engine, path)
        shard = saved.get("optimizer_state_dict")
        if not isinstance(shard, Mapping):
            raise Misfit(f"{path} holds no state of a ZeRO optimizer; copy that file anew")
        if LAYOUT not in shard:
            raise Misfit(
                f"it was saved by another optimizer, {optimizer_of(saved)}, and not by DSMuon; of AdamW or DeepSpeed's "
                "Muon, ds-muon migrate converts it"
            )
        said = shard.get(SHARD) or self._of_unsaid(k, shard)
        if said["format"] > FORMAT:
            raise Misfit(f"{path} has format {said['format']}, of a later ds_muon; this one reads up to {FORMAT}")
        # A shard without a description gets one, which loading reads.
        self.opened[k] = {**shard, SHARD: said}
        states = [{key: tuple(value.shape) for key, value in state.items()} for state in states_of(shard)]
        content = repr((shard[LAYOUT], said["params"], states))
        save = None if said["save"] is None else Save(*said["save"])
        return Facts(said["rank"], said["ranks"], save, hashlib.sha256(content.encode()).hexdigest())

    def _of_unsaid(self, k: int, shard: Mapping[str, Any]) -> dict[str, Any]:
        ours = description(self._engine.optimizer, None)
        if shard[LAYOUT] != layout(self._engine.optimizer) or ours["ranks"] != max(
            shard[deepspeed_zero.PARTITION_COUNT]
        ):
            raise Misfit(
                f"{self.path_of(k)} does not say what lies in it: it is of an early ds_muon, and loads only with the "
                "world size, param groups, zero_optimization.round_robin_gradients and parameter_alignment that it was "
                "saved with; load it so, and save it again, or convert it by ds-muon migrate"
            )
        # Its own order of outputs it does not say.
        return {**ours, "rank": k, "outputs": {}}

    def check_weights(self, save: Save | None) -> None:
        """Refuse a file of the model's weights that is not of the save of the shards.

        A file that does not say of which save it is, as an early version writes it, must be of the same step.

        Args:
            save: of the shards; None if they do not say it.

        Raises:
            Misfit: it is of another one.
            ValueError: it cannot be read.
        """
        path = self.weights
        weights = _read(self._engine, path)
        said = Save(*weights[SAVE]) if weights.get(SAVE) else None
        step = weights.get("global_steps")
        if said is None and (save is None or step is None or step == save.step):
            return
        if said is None or said != save:
            theirs = f"step {step}" if said is None else said
            raise Misfit(
                f"{path} is of another save than {self.path_of(0)}: of {theirs}, and not of "
                f"{save or 'an early ds_muon'}; files of two saves are mixed up, or it was not saved to its end"
            )


def states_of(shard: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The optimizer's state of each param group."""
    base = shard[deepspeed_zero.BASE_OPTIMIZER_STATE]
    return [base["state"].get(key, {}) for group in base["param_groups"] for key in group["params"]]


def partition_sizes(states: Sequence[Mapping[str, Any]]) -> list[int]:
    """Elements of each param group's partition, by ``states_of`` a shard."""
    return [next((state[key].numel() for key in state.keys() & CUT_STATE), 0) for state in states]


def _read(engine: Any, path: Path) -> dict[str, Any]:
    files = engine.checkpoint_engine
    if isinstance(files, DataStatesCheckpointEngine):  # a format of its own
        contents: dict[str, Any] = files.load(str(path), map_location="cpu")
        return contents
    return read_file(path)


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
