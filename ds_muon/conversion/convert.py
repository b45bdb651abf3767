"""Writes the universal layout (see ``universal``) from the shards of an ordinary checkpoint, one parameter at a time.

Besides the pages of files, which the system may drop, memory holds one tensor and the copy of it that is being written.
"""

from __future__ import annotations

import math
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_muon.checkpoints.shards import BASE, CUT_STATE, LAYOUT, SAVE, SHARD
from ds_muon.checkpoints.shards import FORMAT as SHARD_FORMAT
from ds_muon.checkpoints.universal import CONTENT, CONVERSION, FORMAT, LATEST, OPTIMIZER_FILE, PARAM, Content, file_of
from ds_muon.conversion.ordinary import ConversionError, Ordinary
from ds_muon.dtypes import name_of
from ds_muon.files import check_writable, write_text, writing

_LOCAL = ("param_slice_mappings", "single_partition_of_fp32_groups", BASE)
# Of a scheduler's state, what has something for each param group: the run that loads it has others.
_PER_GROUP = frozenset({"base_lrs", "_last_lr", "min_lrs", "max_lrs", "base_momentums", "max_momentums"})
_NOT_OF_THE_RUN = ("latest", LATEST, "zero_to_fp32.py", "zero_to_torch.py")


@dataclass
class Converted:
    """What was written: the parameters by the state that they have, and what of it could not be taken."""

    folder: Path
    elements: dict[str, int] = field(default_factory=dict)
    with_state: dict[str, list[str]] = field(default_factory=dict)
    why_not: dict[str, str] = field(default_factory=dict)


def convert(source: Ordinary, out: Path) -> Converted:
    """Write a checkpoint into ``out``, under its own tag, and ``latest`` and ``latest_universal`` last.

    What lies beside ``latest`` where it comes from, such as the files of Hugging Face's Trainer, is copied.

    Args:
        out: a new or an empty folder.

    Raises:
        ValueError: ``out`` is neither, or a parameter's name leads out of it.
        OSError: it cannot be written. What has been written by then stays; without ``latest`` it is no checkpoint.
    """
    _check_out(source, out)
    folder = out / source.folder.name
    for name in (*source.params, *source.model["module"]):
        file_of(folder, name, "fp32")
    done, number = Converted(folder), uuid.uuid4().hex
    params: dict[str, tuple[tuple[int, ...], int, dict[str, str]]] = {}
    for name, param in source.params.items():
        files: dict[str, str] = {}
        for key in ("fp32", *source.keys(name)):
            tensor = source.weight(name) if key == "fp32" else _state(source, name, key, done)
            if tensor is None:
                continue
            files[key] = name_of(tensor.dtype)
            _save({PARAM: tensor, "cat_dim": 0, CONVERSION: number}, file_of(folder, name, key))
            del tensor
        if (step := source.step(param.group)) is not None and "exp_avg" in files:
            _save(torch.tensor(step, dtype=torch.float32, device="cpu"), file_of(folder, name, "step"))
        params[name] = (param.shape, param.group, files)
        done.elements[name] = math.prod(param.shape)
        done.with_state.setdefault(_kind(files), []).append(name)
    _save_the_untrained(source, folder, number)
    content = Content(
        format=FORMAT,
        conversion=number,
        optimizer=source.optimizer,
        of_dsmuon=source.of_dsmuon,
        save=source.model.get(SAVE),
        step=source.model.get("global_steps"),
        dtype=name_of(source.dtype()),
        params=params,
        steps=[source.step(group) for group in range(len(source.groups))],
    )
    _save_model(source, folder)
    _save(_common(source, content), folder / OPTIMIZER_FILE)
    _copy_what_lies_beside(source, out)
    for pointer in (LATEST, "latest"):
        write_text(out / pointer, folder.name)
    return done


def _check_out(source: Ordinary, out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConversionError(f"{out} is there and is not an empty folder; give the name of a new one")
    if out.resolve().is_relative_to(source.folder):
        raise ConversionError(f"{out} lies in the checkpoint itself, {source.folder}; give another one")
    check_writable(out / "latest")


def _kind(files: Mapping[str, str]) -> str:
    if "momentum_buffer" in files:
        return "momentum"
    return "moments" if {"exp_avg", "exp_avg_sq"} <= files.keys() else "weights only"


def _state(source: Ordinary, name: str, key: str, done: Converted) -> Tensor | None:
    """State of a parameter; None, and why, where it is not the quantity that it is here."""
    if key != "momentum_buffer" or source.of_dsmuon:
        return source.state(name, key)
    reason = source.no_muon_momentum()
    momentum = None if reason else source.muon_momentum(name)
    if momentum is None:
        done.why_not[name] = reason or "the ranks that hold it have saved other momentum, or of another size"
    return momentum


def _save(contents: Any, path: Path) -> None:
    with writing(path) as file:
        torch.save(contents, file)


def _save_the_untrained(source: Ordinary, folder: Path, number: str) -> None:
    """Frozen weights, buffers, and other names of tied weights: DeepSpeed's own converter writes these as well."""
    for name, tensor in source.model["module"].items():
        if isinstance(tensor, Tensor) and name not in source.params:
            _save({PARAM: tensor.float().clone(), CONVERSION: number}, file_of(folder, name, "fp32"))


def _common(source: Ordinary, content: Content) -> dict[str, Any]:
    """What is the same on every rank: as DeepSpeed's converter writes it, and what DSMuon needs beside it."""
    shard = source.shards[0]
    common = {key: value for key, value in shard.items() if key not in _LOCAL}
    common["param_groups"] = list(source.groups)
    common[CONTENT] = asdict(content)
    if source.of_dsmuon:
        # Of state that is cut, the files of the parameters have the numbers, and this the dtype.
        states = {
            i: {
                key: torch.empty(0, dtype=value.dtype, device="cpu") if key in CUT_STATE else value.clone()
                for key, value in state.items()
            }
            for i, state in enumerate(source.states[0])
        }
        groups = [{**group, "params": [i]} for i, group in enumerate(source.groups)]
        common[BASE] = {"state": states, "param_groups": groups}
        if SHARD not in common:
            common[SHARD] = _description_of_early(source)
    return common


def _description_of_early(source: Ordinary) -> dict[str, Any]:
    """What shards say of themselves, of an early ds_muon whose shards do not.

    Raises:
        ConversionError: it cannot be known, of NorMuon's moments, in which order they lie.
    """
    params = []
    for i, (offsets, group) in enumerate(zip(source.shards[0][LAYOUT], source.groups, strict=True)):
        names = [name for name, _ in offsets]
        variance = source.states[0][i].get("row_variance")
        rows = [0] * len(names)
        if variance is not None:
            rows = [source.params[name].shape[0] for name in names]
            in_order = all(
                list(shard["param_slice_mappings"][i]) == [n for n in names if n in shard["param_slice_mappings"][i]]
                for shard in source.shards
            )
            if sum(rows) != variance.numel() or not in_order:
                raise ConversionError(
                    f"{source.folder} does not say to which rows of the param group {group.get('name')!r} its "
                    "row_variance belongs: it is of an early ds_muon; load it with the world size it was saved with, "
                    "and save it again"
                )
        params.append([(name, source.params[name].shape, count) for name, count in zip(names, rows, strict=True)])
    return {
        "format": SHARD_FORMAT,
        "rank": 0,
        "ranks": len(source.shards),
        "save": None,
        "dtype": name_of(source.dtype()),
        "params": params,
    }


def _save_model(source: Ordinary, folder: Path) -> None:
    """The file of the model's weights; of another optimizer, without what its scheduler has for each param group."""
    path = folder / source.model_path.name
    scheduler = source.model.get("lr_scheduler")
    if source.of_dsmuon or not isinstance(scheduler, dict):
        shutil.copy2(source.model_path, path)
    else:
        _save({**source.model, "lr_scheduler": without_groups(scheduler)}, path)


def without_groups(scheduler: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a scheduler without what it has for each param group."""
    state = {key: value for key, value in scheduler.items() if key not in _PER_GROUP}
    if "lr_lambdas" in state:  # torch's LambdaLR asks for it
        state["lr_lambdas"] = []
    if "_schedulers" in state:
        state["_schedulers"] = [without_groups(inner) for inner in state["_schedulers"]]
    return state


def _copy_what_lies_beside(source: Ordinary, out: Path) -> None:
    for path in sorted(source.root.iterdir()) if source.root else ():
        if path.is_file() and path.name not in _NOT_OF_THE_RUN:
            shutil.copy2(path, out / path.name)
