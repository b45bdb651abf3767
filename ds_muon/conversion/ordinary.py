"""An ordinary checkpoint of ZeRO-1/2, of any number of ranks, read by parameter name; without an engine and its ranks.

Where a parameter lies follows from the order and the gaps of its param group, which every optimizer's checkpoint has.
DeepSpeed's own ``param_slice_mappings`` do not say it: they take no note of ``round_robin_gradients``. Tensors are read
only when they are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_muon.checkpoints.reading import below, read_file
from ds_muon.checkpoints.shards import CUT_STATE, FORMAT, LAYOUT, SAVE, SHARD, optimizer_of, states_of
from ds_muon.plan.zero_layout import Slice, cut

MODEL_FILE = "mp_rank_00_model_states.pt"
_FP32, _BASE = "single_partition_of_fp32_groups", "base_optimizer_state"
_PADDINGS, _GAPS = "group_paddings", "param_alignment_paddings"
_ADAMS = ("adam", "adamw", "fusedadam", "torch.optim.adamw")


class ConversionError(ValueError):
    """What was given is no checkpoint, or none that can be converted."""


@dataclass(frozen=True)
class Param:
    """A trained parameter: its shape, its param group, and its slices in their order."""

    shape: tuple[int, ...]
    group: int
    slices: tuple[Slice, ...]


class Ordinary:
    """All files of one checkpoint.

    Args:
        path: of the checkpoint, or of the folder in which ``latest`` names it.
        trusted: as ``read_file`` takes it.

    Attributes:
        folder: of the checkpoint: its name is the tag.
        root: the folder that was given, if ``latest`` lies in it; else None.
        model: contents of the file of the model's weights.
        shards: what each rank has saved of ZeRO's state.
        params: every trained parameter, by name.
        optimizer: by name, the one that saved it.

    Raises:
        ValueError: it is none of ZeRO-1/2, or a file is missing, torn, of another save, or one that may run code.
    """

    def __init__(self, path: Path, *, trusted: bool = False) -> None:
        self.root, self.folder = _root_and_folder(path)
        self.model_path = self.folder / MODEL_FILE
        if not self.model_path.is_file():
            raise ConversionError(
                f"{path} is no checkpoint of DeepSpeed's: there is no {self.model_path}; give the folder that holds "
                "latest, or that of one checkpoint, such as global_step1000"
            )
        if (self.folder / MODEL_FILE.replace("00", "01")).exists():
            raise ConversionError(
                f"{self.folder} is of a tensor- or pipeline-parallel model, whose pieces are not read"
            )
        self.model = read_file(self.model_path, trusted=trusted)
        bf16 = self._path(0, "bf16_").exists()
        files = [self._path(k, "bf16_" if bf16 else "") for k in range(self.model.get("dp_world_size", 1))]
        if missing := [file for file in files if not file.is_file()]:
            raise ConversionError(f"{missing[0]} is missing: it was not saved to its end, or not copied whole")
        contents = [read_file(file, trusted=trusted) for file in files]
        self.optimizer = optimizer_of(contents[0])
        settings = contents[0].get("ds_config")
        self.settings: Mapping[str, Any] = settings if isinstance(settings, Mapping) else {}
        self.shards: list[Mapping[str, Any]] = [content["optimizer_state_dict"] for content in contents]
        for file, shard in zip(files, self.shards, strict=True):
            if _PADDINGS not in shard or not isinstance(shard.get(_BASE), Mapping):
                raise ConversionError(f"{file} is not of ZeRO stage 1 or 2, or it is an elastic checkpoint")
        self._check_one_save(files)
        self.states = [states_of(shard) for shard in self.shards]
        # By rank and param group, the parameters of which it holds a slice, in their order.
        self._held: dict[tuple[int, int], list[str]] = {}
        self.params = self._find_params()

    def _path(self, rank: int, prefix: str) -> Path:
        return self.folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"

    @property
    def of_dsmuon(self) -> bool:
        return LAYOUT in self.shards[0]

    @property
    def groups(self) -> Sequence[Mapping[str, Any]]:
        """The param groups, as the optimizer has saved them."""
        groups: Sequence[Mapping[str, Any]] = self.shards[0][_BASE]["param_groups"]
        return groups

    def _check_one_save(self, files: Sequence[Path]) -> None:
        """Of DSMuon's shards, each says whose it is, and of which save."""
        said = [shard.get(SHARD) for shard in self.shards]
        for rank, (file, own) in enumerate(zip(files, said, strict=True)):
            if (own is None) is not (said[0] is None):
                raise ConversionError(f"{file} is of another version of ds_muon than {files[0]}")
            if own is not None and said[0] is not None:
                if own["format"] > FORMAT:
                    raise ConversionError(
                        f"{file} has format {own['format']}, of a later ds_muon; this one reads {FORMAT}"
                    )
                if own["rank"] != rank:
                    raise ConversionError(f"{file} is not what rank {rank} saved, but rank {own['rank']}")
                if (own["save"], own["ranks"]) != (said[0]["save"], len(files)):
                    raise ConversionError(f"{file} is of another save than {files[0]}, or than {self.model_path}")
        save, step = said[0] and said[0]["save"], self.model.get("global_steps")
        if (save and step is not None and save[2] != step) or self.model.get(SAVE, save) != save:
            raise ConversionError(f"{self.model_path} is of another save than {files[0]}: of step {step}")

    def _find_params(self) -> dict[str, Param]:
        params: dict[str, Param] = {}
        gaps = self.shards[0].get(_GAPS)
        for group, shapes in enumerate(self.model.get("param_shapes") or []):
            size = self.shards[0][_FP32][group].numel() + self.shards[0][_PADDINGS][group]
            offset = 0
            for i, (name, shape) in enumerate(shapes.items()):
                params[name] = Param(tuple(shape), group, cut(offset, math.prod(shape), size))
                offset += math.prod(shape) + (gaps[group][i] if gaps else 0)
                for piece in params[name].slices:
                    if (
                        piece.rank >= len(self.shards)
                        or self._flat(piece.rank, group).numel() < piece.offset + piece.numel
                    ):
                        raise ConversionError(f"{self.folder}: its shards do not hold all of {name!r}, {tuple(shape)}")
                    self._held.setdefault((piece.rank, group), []).append(name)
        if not params:
            raise ConversionError(f"{self.model_path} names no trained parameters")
        return params

    def _flat(self, rank: int, group: int) -> Tensor:
        """The fp32 weights of a rank, without the padding at their end."""
        flat: Tensor = self.shards[rank][_FP32][group]
        return flat

    def dtype(self) -> torch.dtype:
        """Of the model's trained weights."""
        name = next(iter(self.params))
        dtype: torch.dtype = self.model["module"][name].dtype
        return dtype

    def keys(self, name: str) -> list[str]:
        """The optimizer's state that is cut as the weights are, by key."""
        param = self.params[name]
        if not param.slices:
            return []
        return sorted(self.states[param.slices[0].rank][param.group].keys() & CUT_STATE)

    def weight(self, name: str) -> Tensor:
        """The fp32 weights of a parameter, in its shape. Reads them into new memory."""
        return self._join(name, self._flat)

    def state(self, name: str, key: str) -> Tensor:
        """State of a parameter, in its shape. Reads it into new memory."""
        return self._join(name, lambda rank, group: self.states[rank][group][key])

    def _join(self, name: str, flat: Callable[[int, int], Tensor]) -> Tensor:
        """The slices of a parameter, in new memory; ``flat`` gives the partition of a rank and param group."""
        param = self.params[name]
        held = [flat(s.rank, param.group).narrow(0, s.offset, s.numel) for s in param.slices]
        return (
            torch.cat(held).view(param.shape) if held else torch.zeros(param.shape, dtype=torch.float32, device="cpu")
        )

    def step(self, group: int) -> float | None:
        """Steps of Adam that a group has behind it."""
        step = self.states[0][group].get("step", self.groups[group].get("step"))
        return None if step is None else float(step)

    # ---- DeepSpeed's own Muon -----------------------------------------------------------------------------------

    def no_muon_momentum(self) -> str | None:
        """Why no momentum of DeepSpeed's Muon can be taken over; None if it can.

        It is the same average as ours, ``M <- M + (1 - momentum) (G - M)``, of the averaged gradients. Without offload
        these carry the loss scale of their time.
        """
        if self._offloads() or self._loss_scale() is not None:
            return None
        return "it averages gradients that each carry the loss scale of their step, and that scale is dynamic"

    def _offloads(self) -> bool:
        offload = self.settings.get("zero_optimization", {}).get("offload_optimizer") or {}
        return bool(offload.get("device", "none") != "none")

    def _loss_scale(self) -> float | None:
        """What the gradients were multiplied by; None if not always by the same."""
        scaler = self.shards[0].get("loss_scaler")
        scale = float(getattr(scaler, "loss_scale", 1.0))
        return None if self.shards[0].get("dynamic_loss_scale") else scale

    def muon_momentum(self, name: str) -> Tensor | None:
        """The momentum of one of DeepSpeed's Muon matrices, unscaled; None if what is saved does not say.

        With optimizer offload it is cut like the weights. Without, every rank keeps the whole momentum of each matrix
        of which it holds a slice, one after another. Ranks have then to agree on it.
        """
        if self._offloads():
            return self.state(name, "momentum_buffer")
        found: list[Tensor] = []
        param = self.params[name]
        for piece in param.slices:
            held = self._held[piece.rank, param.group]
            sizes = [math.prod(self.params[other].shape) for other in held]
            buffer = self.states[piece.rank][param.group].get("momentum_buffer")
            if buffer is None or buffer.numel() != sum(sizes):
                return None
            start = sum(sizes[: held.index(name)])
            found.append(buffer.narrow(0, start, math.prod(param.shape)))
        if not found or any(not torch.equal(found[0], other) for other in found[1:]):
            return None
        scale = self._loss_scale()
        momentum = found[0].clone().view(param.shape)
        return momentum if scale in (None, 1.0) else momentum.div_(scale)

    @property
    def is_adam(self) -> bool:
        """Whether Adam or AdamW saved it, by name or, of an optimizer that the script made, by its state."""
        if self.optimizer.lower() in _ADAMS:
            return True
        return self.optimizer == "Adam or AdamW"

    @property
    def is_deepspeeds_muon(self) -> bool:
        return self.optimizer.lower() == "muon"


def _root_and_folder(path: Path) -> tuple[Path | None, Path]:
    path = path.resolve()
    latest = path / "latest"
    if not path.is_dir():
        raise ConversionError(f"{path} is no folder")
    if not latest.is_file():
        return None, path
    folder = below(path, latest.read_text().strip())
    if not folder.is_dir():
        raise ConversionError(f"{latest} names {folder.name!r}, and there is no {folder}")
    return path, folder
