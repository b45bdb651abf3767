"""Saving a checkpoint on all ranks or on none, and no weights that are torn, however a script saves."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo, TorchCheckpointEngine
from torch import nn

from ds_muon.agree import gather, raise_together
from ds_muon.checkpoints.reading import read_file, refused
from ds_muon.checkpoints.universal import FOLDERS
from ds_muon.failure import Failure
from ds_muon.files import on_disk, rename
from ds_muon.say import log

_SHARDS = "*zero_pp_rank_*_optim_states.pt"

_FAILURES: WeakKeyDictionary[nn.Module, tuple[Failure, bool]] = WeakKeyDictionary()
"""Of the engine that trains a module, and whether that is its whole model; the last one, if there have been several."""


def refuse_torn_weights(engine: Any, failure: Failure) -> None:
    """Let no ``state_dict`` of an engine's model, or of a part of it, be had while the weights of any rank are torn.

    Whatever saves a model asks for that: ``save_16bit_model``, ``save_checkpoint``, HF's and Accelerate's
    ``save_model``, ``save_pretrained``. A copy of the model can still be saved.
    """
    for module in engine.modules():
        if module not in _FAILURES and not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
            module.register_state_dict_pre_hook(_RefuseIfTorn())
        _FAILURES[module] = failure, module is engine.module


class _RefuseIfTorn:
    """The hook. In a copy or a pickle of the module there is one that does nothing, and that needs no ds_muon."""

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        failure, whole = _FAILURES.get(module, (None, False))
        if failure is not None and (whole or prefix.count(".") < 2):  # else what it is part of has been asked
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()  # until the others have sent their weights, they may still fail
            failure.refuse_to_save()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return partial, (chain,)  # which takes whatever it is given, and does nothing with it


class WholeCheckpoints(TorchCheckpointEngine):  # type: ignore[misc]
    """DeepSpeed's own files, which get their names when all ranks have written theirs.

    Until then they lie beside them, as ``.NAME.unfinished``. A save that fails on any rank, or is killed while they are
    written, leaves the checkpoints as they were. One that is killed while they get their names leaves some of them
    without, or, where it replaces a checkpoint, a mixture, which loading refuses.

    Args:
        usual: the one that DeepSpeed has made.
        process_group: all ranks that save.
    """

    def __init__(self, usual: TorchCheckpointEngine, process_group: dist.ProcessGroup) -> None:
        self.name = usual.name
        self.zipfile_serialization = usual.zipfile_serialization
        self._group = process_group
        self._unfinished: dict[Path, Path] = {}
        self._together = False
        self._error: Exception | None = None

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, nothing that fails on a rank is raised before ``commit``, where all ranks are, and then on all.

        DeepSpeed has no collective between ``create``, with which it starts, and ``commit``.
        """
        self._together, self._error = True, None
        try:
            yield
        except Exception as error:
            # Whatever is not written here, the others are in ``commit``, and wait.
            if self._together:
                raise_together(self._error or error, self._group)
            raise
        finally:
            self._together = False
            for unfinished in self._unfinished:
                with suppress(OSError):
                    unfinished.unlink()
            self._unfinished.clear()

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        try:
            super().makedirs(path, exist_ok=exist_ok)
        except Exception as error:  # whatever it is, no rank may be left waiting
            self._fail(error)

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file; outside of ``together``, under its name.

        Raises:
            OSError: it cannot be written. Inside, ``commit`` raises.
        """
        target = Path(path)
        unfinished = target.with_name(f".{target.name}.unfinished")
        self._unfinished[unfinished] = target
        try:
            with on_disk(unfinished) as file:
                torch.save(state_dict, file, _use_new_zipfile_serialization=self.zipfile_serialization)
            if self.zipfile_serialization and (types := refused(unfinished)):
                log(
                    f"{path} holds objects of types that loading refuses until the script allows them by "
                    f"torch.serialization.add_safe_globals: {', '.join(types)}"
                )
            if not self._together:
                rename(self._unfinished.items())
        except Exception as error:
            self._fail(OSError(f"{path} could not be written: {type(error).__name__}: {error}"), error)
        finally:
            if not self._together:
                with suppress(OSError):
                    unfinished.unlink()
                self._unfinished.clear()

    def load(self, path: str, map_location: Any = None) -> dict[str, Any]:
        """Read one file, with its tensors on the host. Unlike DeepSpeed's own, it runs no code that the file names.

        Raises:
            ValueError: see ``read_file``.
        """
        return read_file(Path(path), mapped=False)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Give the files their names. Inside of ``together`` a collective.

        Raises:
            OSError or RuntimeError: on every rank, if one has failed to write its files or to name them.
        """
        if self._together:
            self._together = False
            raise_together(self._error, self._group)
            names = gather([path.name for path in self._unfinished.values()], self._group)
            try:
                rename(self._unfinished.items())
                self._unfinished.clear()
            except Exception as error:
                self._error = OSError(f"{info.save_dir}, tag {info.tag!r}: files could not be renamed: {error}")
            raise_together(self._error, self._group)
            if dist.get_rank() == 0:
                self._clear_away(Path(info.save_dir, info.tag), {name for of_rank in names for name in of_rank})
        return True

    def _clear_away(self, folder: Path, saved: set[str]) -> None:
        """What killed saves have left, by more ranks than there are now, and a checkpoint that this one replaces.

        Shards of more ranks or of another dtype, and files in the universal layout, would be taken for this one's.
        """
        replaced = [path for path in folder.glob(_SHARDS) if path.name not in saved]
        for leftover in (*folder.glob(".*.unfinished"), *replaced):
            with suppress(OSError):
                leftover.unlink()
        for of_universal in FOLDERS:
            shutil.rmtree(folder / of_universal, ignore_errors=True)

    def set_latest(self, save_dir: str, tag: str) -> None:
        """Let the file ``latest`` name the tag: on rank 0, at once or not at all. A collective."""
        path, unfinished, error = Path(save_dir, "latest"), Path(save_dir, ".latest.unfinished"), None
        if dist.get_rank() == 0:
            try:
                with on_disk(unfinished) as file:
                    file.write(tag.encode())
                rename([(unfinished, path)])
            except Exception as caught:  # whatever it is, no rank may be left waiting
                error = OSError(f"{path} could not be written: {caught}")
                with suppress(OSError):
                    unfinished.unlink()
        raise_together(error, self._group)

    def _fail(self, error: Exception, cause: Exception | None = None) -> None:
        if not self._together:
            raise error from cause
        self._error = self._error or error
