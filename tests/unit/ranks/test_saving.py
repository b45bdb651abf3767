"""A save is one of all ranks or none: whatever fails or is killed, what was there before can be loaded."""

from __future__ import annotations

import argparse
import errno
import functools
import math
import os
import random
import re
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from ds_muon.checkpoints import saving
from ds_muon.cli import main
from tests.unit.support.cases import full
from tests.unit.support.checkpoints import Layers, assert_same, by_name
from tests.unit.support.models import ds_config, start, train_step
from tests.unit.support.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.ranks

CONFIG = ds_config(dtype="bfloat16")


def started() -> Any:
    torch.manual_seed(3)
    return start(Layers(), CONFIG)


def step(engine: Any) -> None:
    train_step(engine, torch.ones(4, 16, device=engine.device, dtype=torch.bfloat16))


# ---- what fails -----------------------------------------------------------------------------------------------------


@contextmanager
def full_disk() -> Iterator[None]:
    """The disk takes the first bytes of a file only."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def full_at_fsync() -> Iterator[None]:
    with mock.patch("os.fsync", no_space):
        yield


@contextmanager
def fails_to_rename() -> Iterator[None]:
    with mock.patch("os.replace", no_space):
        yield


@contextmanager
def fails_to_gather_its_state() -> Iterator[None]:
    with mock.patch("ds_muon.zero.MuonZeroOptimizer.state_dict", no_space):
        yield


@contextmanager
def has_no_folder() -> Iterator[None]:
    with mock.patch("os.makedirs", no_space):
        yield


@contextmanager
def cannot_write_latest() -> Iterator[None]:
    usual = os.replace

    def replace(old: Path, new: Path) -> None:
        (no_space if new.name == "latest" else usual)(old, new)

    with mock.patch("os.replace", replace):
        yield


# How saving fails, on which rank, and what is said of it.
FAILURES: list[tuple[Callable[[], Any], int, str]] = [
    (full_disk, 1, "rank_1_mp_rank_00_optim_states.pt could not be written: OSError: [Errno 27]"),
    (full_disk, 0, "mp_rank_00_model_states.pt could not be written: OSError: [Errno 27]"),
    (full_at_fsync, 1, "rank_1_mp_rank_00_optim_states.pt could not be written: OSError: [Errno 28]"),
    (fails_to_gather_its_state, 1, "[Errno 28]"),
    (has_no_folder, 0, "[Errno 28]"),
    (fails_to_rename, 1, "files could not be renamed: [Errno 28]"),
    (cannot_write_latest, 0, "latest could not be written: [Errno 28]"),
]


def fail_to_save(folder: str) -> list[str]:
    engine, rank, said = started(), torch.distributed.get_rank(), []
    for number, (fails, on, _) in enumerate(FAILURES):
        for tag in ("old", f"new{number}"):
            step(engine)
            engine.save_checkpoint(folder, tag="old")
            old = by_name(engine)
            step(engine)
            new = by_name(engine)
            with fails() if rank == on else nullcontext(), pytest.raises((OSError, RuntimeError)) as failed:
                engine.save_checkpoint(folder, tag=tag)
            said.append(str(failed.value))
            assert_same(by_name(engine), new)
            assert Path(folder, "latest").read_text() == "old" and not [*Path(folder).rglob("*.unfinished")]
            if fails is fails_to_rename and tag == "old":
                with pytest.raises((ValueError, RuntimeError), match="of another save than"):
                    engine.load_checkpoint(folder)
            else:
                engine.load_checkpoint(folder)
                assert_same(by_name(engine), new if fails is cannot_write_latest and tag == "old" else old)
    engine.destroy()
    return said


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_what_was_there(tmp_path: Path) -> None:
    for said in run_ranks(2, fail_to_save, str(tmp_path)):
        for text, (*_, wanted) in zip(said, [failure for failure in FAILURES for _ in range(2)], strict=True):
            assert wanted in text


def save_and_load(folder: str, dtype: str, *, save: bool) -> dict[str, Any]:
    torch.manual_seed(3)
    engine = start(Layers(), ds_config(dtype=dtype))
    if save:
        train_step(engine, torch.ones(4, 16, device=engine.device, dtype=getattr(torch, dtype)))
        engine.save_checkpoint(folder, tag="same")
    else:
        engine.load_checkpoint(folder)
    state = by_name(engine)
    engine.destroy()
    return state


# Who saved the tag before, and who saves over it; what was there before is in the universal layout.
@pytest.mark.parametrize(
    ("ranks", "dtypes", "universal"),
    [
        ((3, 2), ("bfloat16", "bfloat16"), False),
        ((2, 2), ("bfloat16", "float32"), False),
        ((2, 2), ("float32",) * 2, True),
    ],
)
def test_a_save_replaces_the_checkpoint_of_its_tag_whatever_that_was(
    tmp_path: Path, ranks: tuple[int, int], dtypes: tuple[str, str], universal: bool
) -> None:
    folder = tmp_path / "saved"
    run_ranks(ranks[0], functools.partial(save_and_load, save=True), str(folder), dtypes[0])
    if universal:
        assert main(["to-universal", str(folder), str(tmp_path / "universal")]) == 0
        folder = tmp_path / "universal"
    saved = run_ranks(ranks[1], functools.partial(save_and_load, save=True), str(folder), dtypes[1])[0]
    assert len([*Path(folder, "same").iterdir()]) == 1 + ranks[1]
    for dtype in dtypes:
        loaded = run_ranks(1, functools.partial(save_and_load, save=False), str(folder), dtype)[0]
        assert_same(loaded["weight"], saved["weight"])
    weights = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    assert_same(dict(sorted(weights.items())), dict(sorted(saved["weight"].items())))


def save_what_was_loaded(folder: str) -> dict[str, Any]:
    engine = started()
    engine.save_checkpoint(folder, client_state={"epoch": 1})
    _, client_state = engine.load_checkpoint(folder)
    step(engine)
    del client_state["checkpoint_parallel_dimensions"]  # of DeepSpeed's own, which it refuses
    engine.save_checkpoint(folder, client_state=client_state)
    saved = by_name(engine)
    step(engine)
    _, client_state = engine.load_checkpoint(folder)
    assert_same(by_name(engine), saved)
    engine.destroy()
    return dict(client_state)


def test_a_client_state_that_was_loaded_can_be_saved_again(tmp_path: Path) -> None:
    for client_state in run_ranks(2, save_what_was_loaded, str(tmp_path)):
        assert client_state["epoch"] == 1


def load_what_scripts_keep(folder: str) -> bool:
    engine, logged = started(), list[str]()
    kept = {"args": argparse.Namespace(epochs=3), "python": random.getstate(), "numpy": np.random.get_state()}
    with mock.patch.object(saving, "log", logged.append):
        engine.save_checkpoint(folder, client_state=kept)
    _, found = engine.load_checkpoint(folder)
    engine.destroy()
    same = found["args"] == kept["args"] and found["python"] == kept["python"] and not logged
    return bool(same and (found["numpy"][1] == kept["numpy"][1]).all())


def test_arguments_and_random_states_in_a_client_state_are_loaded(tmp_path: Path) -> None:
    assert run_ranks(1, load_what_scripts_keep, str(tmp_path)) == [True]


def load_an_object(folder: str) -> tuple[list[str], Decimal]:
    engine, said = started(), list[str]()
    with mock.patch.object(saving, "log", said.append):
        engine.save_checkpoint(folder, client_state={"loss": Decimal(3)})
    assert engine.global_rank != 0 or (len(said) == 1 and "decimal.Decimal" in said.pop())
    before = by_name(engine)
    step(engine)
    after = by_name(engine)
    for how in ({}, {"load_module_only": True}, {"load_optimizer_states": False}):
        with pytest.raises((ValueError, RuntimeError)) as refused:
            engine.load_checkpoint(folder, **how)
        said.append(str(refused.value))
        assert_same(by_name(engine), after)
    with torch.serialization.safe_globals([Decimal]):
        _, client_state = engine.load_checkpoint(folder)
    assert_same(by_name(engine), before)
    engine.destroy()
    return said, client_state["loss"]


def test_objects_in_the_file_of_the_weights_are_made_only_if_the_script_allows_their_type(tmp_path: Path) -> None:
    for said, loss in run_ranks(2, load_an_object, str(tmp_path)):
        assert len(said) == 3 and loss == 3
        assert all(re.search(r"holds a decimal\.Decimal, and .*add_safe_globals", text) for text in said)


def save_what_cannot_be_found(folder: str) -> list[str]:
    engine, said = started(), []
    rank = torch.distributed.get_rank()
    for tag in (" a", "", f"step{rank}", "../a", "."):
        with pytest.raises(ValueError) as refused:
            engine.save_checkpoint(folder, tag=tag)
        said.append(str(refused.value))
    engine.save_checkpoint(folder, tag=" a", save_latest=False)
    engine.load_checkpoint(folder, tag=" a")
    # Without a collective, as scripts call it on one rank.
    if rank == 0:
        engine.save_16bit_model(folder)
        assert torch.load(f"{folder}/pytorch_model.bin").keys() == engine.module.state_dict().keys()
        with mock.patch("os.fsync", no_space), pytest.raises(OSError, match=r"model\.bin could not be written"):
            engine.save_16bit_model(folder)
    torch.distributed.barrier()
    assert not [*Path(folder).rglob("*.unfinished")]
    return said


def test_tags_that_would_not_be_found_again_are_refused_on_every_rank(tmp_path: Path) -> None:
    for said in run_ranks(2, save_what_cannot_be_found, str(tmp_path)):
        assert "tag = ' a' would not be found again" in said[0] and "tag = '' would not" in said[1]
        assert "rank 0 saves the tag 'step0', and rank 1 'step1'" in said[2]
        assert [text.split(" leads out of ")[0] for text in said[3:]] == ["'../a'", "'.'"]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [" a"]


# ---- what is killed -------------------------------------------------------------------------------------------------


class Moments:
    """Counts the moments of a save on this rank: every write, fsync and renaming. Ends the process at one of them."""

    def __init__(self, last: float = math.inf, note: Path | None = None) -> None:
        self.count, self._last, self._note = 0, last, note

    def come(self, what: str) -> None:
        if self.count >= self._last:
            if self._note is not None:
                self._note.write_text(what)
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1

    @contextmanager
    def counted(self) -> Iterator[None]:
        replace, fsync, save = os.replace, os.fsync, torch.save

        def counted_replace(old: Path, new: Path) -> None:
            self.come("rename")
            replace(old, new)

        def counted_fsync(descriptor: int) -> None:
            self.come("write")
            fsync(descriptor)

        def counted_save(contents: Any, stream: Any, **how: Any) -> None:
            def write(data: Any) -> int:
                # A kill leaves half of them.
                half = len(data) // 2
                stream.write(data[:half])
                stream.flush()
                self.come("write")
                return half + stream.write(data[half:])

            save(contents, SimpleNamespace(write=write, flush=stream.flush), **how)

        with (
            mock.patch("os.replace", counted_replace),
            mock.patch("os.fsync", counted_fsync),
            mock.patch("torch.save", counted_save),
        ):
            yield


def be_killed(folder: str, rank: int, tag: str, moment: float) -> None:
    """Save the tag "old", and, a step later, another one, in which the rank ends.

    Args:
        moment: part of a rank's moments, or, if negative, one from their end.
    """
    engine = started()
    step(engine)
    counter = Moments()
    with counter.counted():
        engine.save_checkpoint(folder, tag="old")
    engine.save_checkpoint(f"{folder} old", tag="old")
    step(engine)
    engine.save_checkpoint(f"{folder} new", tag="old")
    last = counter.count + moment if moment < 0 else int(moment * counter.count)
    with Moments(last if torch.distributed.get_rank() == rank else math.inf, Path(folder, "moment")).counted():
        engine.save_checkpoint(folder, tag=tag)


def load_after_kill(folder: str, tag: str) -> tuple[str, str]:
    """What is there by ``latest`` and by the tag: the state "old" or "new", or what is said."""
    engine = started()
    states = {}
    for name in ("old", "new"):
        engine.load_checkpoint(f"{folder} {name}")
        states[name] = by_name(engine)

    def load(tag: str | None) -> str:
        try:
            path, _ = engine.load_checkpoint(folder, tag=tag)
        except (ValueError, FileNotFoundError) as error:
            return str(error)
        (name,) = [name for name, state in states.items() if engine.global_steps == state["counters"][0]]
        assert_same(by_name(engine), states[name])
        assert tag is None or Path(path).parent.name == tag
        return name

    found = load(None), load(tag)
    engine.save_checkpoint(folder, tag=tag)
    engine.load_checkpoint(folder)
    assert not [*Path(folder, tag).glob(".*")]
    engine.destroy()
    return found


def drill(seed: int) -> tuple[int, str, float]:
    chance = random.Random(seed)
    return seed % 2, ["old", "new"][seed // 2 % 2], chance.choice([chance.random(), -chance.randint(1, 6)])


def is_refused(text: str) -> bool:
    return re.search("of another save than|was not saved to its end|there is no such checkpoint", text) is not None


# While rank 1 writes over what is there; on rank 0 between two names, and before `latest` moves; by chance.
@pytest.mark.parametrize(
    ("rank", "tag", "moment"),
    [(1, "old", 0.4), (0, "old", -5), (0, "new", -2), *(full(*drill(seed)) for seed in range(20))],
)
def test_after_a_kill_at_any_moment_of_a_save_a_whole_checkpoint_is_loaded(
    tmp_path: Path, rank: int, tag: str, moment: float
) -> None:
    folder = str(tmp_path / "saved")
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, be_killed, folder, rank, tag, moment)
    assert failure.value.errors[rank] == "the process died"
    by_latest, by_tag = run_ranks(1, load_after_kill, folder, tag)[0]
    during = Path(folder, "moment").read_text()
    if tag == "new":
        assert by_latest == ("new" if (rank, moment) == (0, -1) else "old")
        assert by_tag == "new" or is_refused(by_tag)
    else:
        # A mixture is what a kill may leave among the names, and never loads.
        assert by_latest == by_tag
        assert by_tag in ("old", "new") or (during == "rename" and is_refused(by_tag))
    assert moment < 0 or during == "rename" or by_latest == "old"
