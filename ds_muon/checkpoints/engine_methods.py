"""The engine's ``save_checkpoint`` and ``load_checkpoint``, and what they call of it, for an engine that DSMuon steps.

``registration`` puts these in place of the engine's own methods; ``original`` is that method, bound to the engine.
"""

from __future__ import annotations

import glob
import uuid
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

from ds_muon.agree import gather, raise_together
from ds_muon.checkpoints.check import check_before_loading
from ds_muon.checkpoints.reading import below
from ds_muon.checkpoints.same_weights import check_same_weights
from ds_muon.checkpoints.saving import WholeCheckpoints
from ds_muon.checkpoints.shards import SAVE, Save
from ds_muon.checkpoints.universal import (
    LATEST,
    FoundUniversal,
    check_universal_before_loading,
    is_universal,
    loading_by_name,
)
from ds_muon.say import say
from ds_muon.schedulers import set_scheduled_rates
from ds_muon.zero import MuonZeroOptimizer


def load_checkpoint(
    original: Callable[..., Any], engine: Any, load_dir: str, tag: str | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Refuse a folder whose file ``latest`` names no tag, or lacks on some ranks; compare the weights afterwards."""
    if not isinstance(engine.optimizer, MuonZeroOptimizer):
        return original(load_dir, tag, *args, **kwargs)
    if tag is None:
        universal = engine.load_universal_checkpoint()
        named = _check_latest(Path(load_dir, LATEST if universal else "latest"), engine.optimizer.dp_process_group)
        if universal and named is None:
            raise FileNotFoundError(
                f"checkpoint.load_universal = true, and there is no {Path(load_dir, LATEST)}; write it by ds-muon "
                "to-universal, or set false: an ordinary checkpoint loads at any world size"
            )
        if universal and named:
            _say_what_is_newer(Path(load_dir, "latest"), named)
        tag = named if universal else None
    try:
        with loading_by_name(engine):
            path, client_state = original(load_dir, tag, *args, **kwargs)
    finally:
        # Files that are mapped into memory must not be held.
        engine._ds_muon_found = None
    if path is not None:
        check_same_weights(engine.optimizer, engine.module)
    return path, client_state


def _check_latest(path: Path, group: dist.ProcessGroup) -> str | None:
    """The tag that the file names; None if it is on no rank. A collective.

    Raises:
        ValueError, FileNotFoundError: on every rank, if it names no tag, or is there on some ranks only.
    """
    error, named = None, None
    try:
        if path.is_file():
            if named := path.read_text().strip():
                below(path.parent, named)
            else:
                error = ValueError(f"{path} is empty: what wrote it was stopped; pass the tag of a checkpoint")
    except Exception as caught:  # whatever it is, no rank may be left waiting
        error = ValueError(f"{path} cannot be read: {type(caught).__name__}: {caught}; pass the tag of a checkpoint")
    raise_together(error, group)
    there = [tag is not None for tag in gather(named, group)]
    if any(there) and not all(there):
        raise FileNotFoundError(
            f"{path} is there on rank {there.index(True)}, and not on rank {there.index(False)}; give every rank the "
            "same folder, or pass the tag"
        )
    return named


def _say_what_is_newer(latest: Path, named: str) -> None:
    """One line, where a run has saved on beside the checkpoint in the universal layout that it loads again."""
    with suppress(OSError, ValueError):  # another rank may read what this one cannot, and neither needs it
        if (newest := latest.read_text().strip()) not in ("", named):
            say(
                f"checkpoint.load_universal = true takes {named!r}, which {LATEST} names, and not {newest!r}, which "
                "latest names; set false to go on from what was saved last"
            )


def _get_all_ckpt_names(original: Callable[..., Any], engine: Any, checkpoints_path: str, tag: str) -> Any:
    """Take folder and tag as they are: DeepSpeed looks for the files by a pattern, in which ``[`` and ``*`` count."""
    if isinstance(engine.optimizer, MuonZeroOptimizer):
        checkpoints_path, tag = glob.escape(str(checkpoints_path)), glob.escape(str(tag))
    return original(checkpoints_path, tag)


def _load_checkpoint(original: Callable[..., Any], engine: Any, load_dir: str, tag: str, **options: Any) -> Any:
    """Refuse a checkpoint that does not fit while the engine is as it was."""
    with_optimizer = options.get("load_optimizer_states", True) and not options.get("load_module_only", False)
    if with_optimizer and isinstance(engine.optimizer, MuonZeroOptimizer):
        with_scheduler = options.get("load_lr_scheduler_states", True)
        is_there = gather(is_universal(Path(load_dir, str(tag))), engine.optimizer.dp_process_group)
        check = check_universal_before_loading if any(is_there) else check_before_loading
        engine._ds_muon_found = check(engine, load_dir, tag, with_scheduler=with_scheduler)
    elif isinstance(engine.optimizer, MuonZeroOptimizer):
        say("momentum, moments, variances and fp32 weights are not loaded: state stays as it is, zero in a new engine")
    return original(load_dir, tag, **options)


def _load_zero_checkpoint(original: Callable[..., bool], engine: Any, *args: Any, **kwargs: Any) -> bool:
    """Load what ``_load_checkpoint`` has found: DeepSpeed's reads this rank's shard alone, and refuses other sizes."""
    if not isinstance(engine.optimizer, MuonZeroOptimizer):
        return original(*args, **kwargs)
    found = engine._ds_muon_found
    engine.optimizer.load_found(found, from_fp32_weights=engine.zero_load_from_fp32_weights())
    if isinstance(found, FoundUniversal) and not found.content.of_dsmuon:
        # Its rates are of another optimizer: those of this run are set, for the place that its schedule has reached.
        set_scheduled_rates(engine.lr_scheduler)
    return True


def load_module_state_dict(
    original: Callable[..., None], engine: Any, checkpoint: dict[str, Any], *args: Any, **kwargs: Any
) -> None:
    """Let weights be loaded that were trained when they were saved, and are frozen now.

    From stage 2 on, DeepSpeed looks for every frozen parameter among those that were frozen then.
    """
    frozen = checkpoint.get(FROZEN_PARAM_FRAGMENTS)
    if frozen is not None and isinstance(engine.optimizer, MuonZeroOptimizer):
        checkpoint = {**checkpoint, FROZEN_PARAM_FRAGMENTS: {**checkpoint["module"], **frozen}}
    original(checkpoint, *args, **kwargs)


def _configure_checkpointing(original: Callable[..., None], engine: Any) -> None:
    """Save whole checkpoints, if DeepSpeed would save them by torch."""
    original()
    if isinstance(engine.optimizer, MuonZeroOptimizer) and type(engine.checkpoint_engine) is TorchCheckpointEngine:
        engine.checkpoint_engine = WholeCheckpoints(engine.checkpoint_engine, engine.optimizer.dp_process_group)


def save_checkpoint(
    original: Callable[..., bool],
    engine: Any,
    save_dir: str,
    tag: str | None = None,
    client_state: Mapping[str, Any] = MappingProxyType({}),
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> bool:
    """Let every file say which save it is of, and move ``latest`` when all ranks have written theirs."""
    zero = engine.optimizer
    if not isinstance(zero, MuonZeroOptimizer):
        return original(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    save = Save(_of_one_tag(save_dir, tag, save_latest, zero.dp_process_group), tag, engine.global_steps)
    files, whole = engine.checkpoint_engine, isinstance(engine.checkpoint_engine, WholeCheckpoints)
    # What a load has returned says of which save that was.
    client_state = {key: value for key, value in client_state.items() if key != SAVE}
    zero.save = save
    try:
        with files.together() if whole else nullcontext():
            done = original(save_dir, tag, client_state, save_latest and not whole, exclude_frozen_parameters)
        if save_latest and whole:
            files.set_latest(save_dir, tag)
    finally:
        zero.save = None
    return done


def _of_one_tag(save_dir: str, tag: str, save_latest: bool, group: dist.ProcessGroup) -> str:
    """A number for the save, if all ranks save the same tag, and one that can be loaded. A collective."""
    tags = gather((tag, uuid.uuid4().hex), group)
    for rank, (other, _) in enumerate(tags):
        if other != tags[0][0]:
            raise ValueError(f"rank 0 saves the tag {tags[0][0]!r}, and rank {rank} {other!r}; pass the same tag")
    if (save_latest and tag != tag.strip()) or not tag:
        raise ValueError(
            f"tag = {tag!r} would not be found again: DeepSpeed drops blanks at its ends, and takes an empty one for "
            "none; pass another tag"
        )
    below(Path(save_dir), tag)
    return tags[0][1]


def _common_checkpoint_state(
    original: Callable[..., dict[str, Any]], engine: Any, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """What the file of the weights says beside them."""
    state, zero = original(*args, **kwargs), engine.optimizer
    if isinstance(zero, MuonZeroOptimizer) and zero.save is not None:
        state[SAVE] = zero.save.as_saved()
    return state


WRAPPERS = (
    load_checkpoint,
    _get_all_ckpt_names,
    _load_checkpoint,
    _load_zero_checkpoint,
    load_module_state_dict,
    _configure_checkpointing,
    save_checkpoint,
    _common_checkpoint_state,
)
