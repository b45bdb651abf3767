"""Ranks for tests: worker processes that stay alive, one set per world size, each with a process group of its own.

``run_ranks(world_size, function, *args)`` calls ``function(*args)`` on every rank at once and returns the results in
order of rank. The function must be importable (module level). A rank that raises fails the test with its traceback; a
hang ends at the timeout, and the next call starts new workers.

Ranks run on CPU over gloo, or, with ``DS_MUON_TEST_DEVICE=cuda``, on GPUs over NCCL, where a test that needs more
ranks than there are GPUs is skipped. ``DS_MUON_TEST_DEFAULTS`` is of ``tests/unit/support/defaults.py``.
"""

from __future__ import annotations

import atexit
import multiprocessing as mp
import os
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ds_muon.ranks import held_port

DEVICE = os.environ.get("DS_MUON_TEST_DEVICE", "cpu")
if DEVICE == "cpu":
    # DeepSpeed's own Muon is compiled, on a CPU for minutes and to no use. Ranks inherit it.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# On CPU ranks Triton's interpreter runs the kernels that a test asks for.
INTERPRETER = {"TRITON_INTERPRET": "1"} if DEVICE == "cpu" else {}
PRELOADED: tuple[str, ...] = ("deepspeed", "ds_muon", "ds_muon.verify", "torch._dynamo")
# After one rank has failed, how long the others may take before they are taken for stuck in a collective.
_GRACE_SECONDS = 15.0


class RankFailure(AssertionError):
    """At least one rank raised or did not answer. ``errors`` maps a rank to its traceback."""

    def __init__(self, errors: dict[int, str]) -> None:
        super().__init__("\n".join(f"---- rank {rank} ----\n{text}" for rank, text in sorted(errors.items())))
        self.errors = errors


class _Workers:
    def __init__(self, world_size: int) -> None:
        context = mp.get_context("forkserver")
        # The server imports these once; every worker is forked from it.
        context.set_forkserver_preload([*PRELOADED])
        self._holding = ExitStack()
        self.port = self._holding.enter_context(held_port())
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, world_size, self.port), daemon=True)
            with mock.patch.dict(os.environ, INTERPRETER):  # which the server keeps, and hands on
                process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        for connection in self.connections:
            connection.send_bytes(pickle.dumps((function, args)))
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        pending = {connection: rank for rank, connection in enumerate(self.connections)}
        deadline = time.monotonic() + timeout
        while pending and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(pending), timeout=left):
                rank = pending.pop(connection)  # type: ignore[arg-type]
                try:
                    ok, value = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    ok, value = False, "the process died"
                if ok:
                    results[rank] = value
                else:
                    errors[rank] = value
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        errors.update({rank: "no answer: this rank hangs" for rank in pending.values()})
        if errors:
            raise RankFailure(errors)
        return [results[rank] for rank in range(len(self.connections))]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)
        self._holding.close()
        # DeepSpeed's CPU ranks leave 64 MiB each here.
        for leftover in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*{self.port}*"):
            leftover.unlink(missing_ok=True)


_running: dict[int, _Workers] = {}


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 240.0) -> list[Any]:
    """Call ``function(*args)`` on ``world_size`` ranks and return what each returned.

    Raises:
        RankFailure: a rank raised, died, or did not answer within ``timeout`` seconds.
    """
    _ask_for(world_size)
    if world_size not in _running:
        _running[world_size] = _Workers(world_size)
    try:
        return _running[world_size].run(function, args, timeout)
    except RankFailure as failure:
        # Ranks that all answered are in step with each other and can go on; else start afresh.
        if len(failure.errors) < world_size or any("hangs" in e or "died" in e for e in failure.errors.values()):
            _running.pop(world_size).stop()
        raise


def run_side_by_side(world_size: int, function: Callable[..., Any], cases: Sequence[Any]) -> list[RankFailure | None]:
    """Call ``function(*case)`` on ranks that end with it, for all cases at the same time: whether each has failed."""
    _ask_for(world_size)
    workers = [_Workers(world_size) for _ in cases]

    def failure(of_case: _Workers, case: Any) -> RankFailure | None:
        try:
            of_case.run(function, case, 240.0)
        except RankFailure as failed:
            return failed
        return None

    try:
        with ThreadPoolExecutor(len(cases)) as threads:
            return list(threads.map(failure, workers, cases))
    finally:
        for of_case in workers:
            of_case.stop()


def _ask_for(world_size: int) -> None:
    if DEVICE == "cuda":
        import torch

        if torch.cuda.device_count() < world_size:
            pytest.skip(f"needs {world_size} GPUs")


@atexit.register
def stop_all() -> None:
    while _running:
        _running.popitem()[1].stop()


def _serve(connection: Connection, rank: int, world_size: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        DS_ACCELERATOR=DEVICE,
    )
    import deepspeed
    import torch

    import ds_muon  # noqa: F401
    from tests.unit.support.defaults import FOREIGN, use_foreign_defaults

    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    deepspeed.init_distributed(dist_backend="nccl" if DEVICE == "cuda" else "gloo")
    if FOREIGN:
        use_foreign_defaults()
    while True:
        try:
            function, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer = (True, function(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send_bytes(pickle.dumps(answer))
