"""Ranks on this machine: start them with the `deepspeed` launcher, wait, and read what rank 0 found; and end a rank.

The command that starts them calls ``run_ranks``; the module that they run says what it is at with ``say_progress``, and
ends with ``say_why`` or ``finish``.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import BinaryIO, NoReturn, TypeVar

import torch

from ds_muon import leash
from ds_muon.say import printable, tell

T = TypeVar("T")

# A rank that fails writes its message between these; see `describe_failure`.
FAILED, END_OF_FAILURE = "ds-muon failed on rank", "ds-muon: end of the failure"
# How a line of progress begins.
PROGRESS = "ds-muon: now "
# The rank, as Open MPI, and MPICH and its kin, set it.
OF_MPI = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")

_LAUNCHER = (sys.executable, "-m", "deepspeed.launcher.runner")
_TRACEBACK = "Traceback (most recent call last):"
_LINES_OF_LOG = 25
_PATIENCE_SECONDS = 5.0
_BETWEEN_LOOKS_SECONDS = 0.2


class RanksFailed(Exception):
    """The ranks ended without a result. The message says why."""


def run_ranks(
    module: str,
    arguments: Sequence[str],
    world_size: int,
    read: Callable[[Path], T],
    environment: Mapping[str, str] | None = None,
) -> T:
    """Run ``python -m module`` with these arguments on ``world_size`` ranks and return what they found.

    The ranks' output goes to a file, which is kept if they crash; what they say of their progress is shown meanwhile.
    All of them end with this call, however it ends, and with this process, however that ends.

    Args:
        module: gets ``--json FILE`` besides; its rank 0 must write that file, whole or not at all.
        arguments: for the module.
        world_size: ranks to start.
        read: what to make of the file.
        environment: of the ranks; by default that of this process. Completed by ``placement``.

    Raises:
        RanksFailed: they ended without a result.
    """
    ours, devices = placement(environment or os.environ, world_size, torch.cuda.device_count())
    where = "the CPU" if ours["DS_ACCELERATOR"] == "cpu" else ours["DS_ACCELERATOR"]
    tell(f"starting {world_size} rank{'s' * (world_size > 1)} on {where} ...", to=sys.stderr)
    folder = Path(tempfile.mkdtemp(prefix="ds-muon-"))
    log, result = folder / "ranks.log", folder / "result.json"
    keep_log = False
    try:
        _launch([*devices, "--module", module, *arguments, "--json", str(result)], ours, log)
        # Not the exit code: a rank whose work is done may still abort while its interpreter shuts down.
        if result.exists():
            return read(result)
        message = describe_failure(log.read_text(errors="replace"))
        keep_log = not message.startswith(FAILED) or _TRACEBACK in message
        raise RanksFailed(message + (f"\n(the whole log: {log})" if keep_log else ""))
    finally:
        if not keep_log:
            shutil.rmtree(folder, ignore_errors=True)


def placement(environment: Mapping[str, str], world_size: int, gpus: int) -> tuple[dict[str, str], list[str]]:
    """Where ranks run: their environment, and the launcher's options.

    They run on what ``DS_ACCELERATOR`` names, else on GPUs if there is one for each, else on the CPU, whose cores they
    share. DeepSpeed's op builder cannot read architectures such as 9.0a: they lose their letter.

    Raises:
        RanksFailed: there are fewer GPUs than ranks.
    """
    ours = dict(environment)
    if "TORCH_CUDA_ARCH_LIST" in ours:
        ours["TORCH_CUDA_ARCH_LIST"] = re.sub(r"(?<=\d)[a-z]\b", "", ours["TORCH_CUDA_ARCH_LIST"])
    accelerator = ours.setdefault("DS_ACCELERATOR", "cuda" if gpus >= world_size else "cpu")
    if accelerator == "cpu":
        ours.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // world_size)))
    if accelerator == "cuda" and gpus < world_size:
        raise RanksFailed(
            f"DS_ACCELERATOR = cuda: {world_size} ranks need as many GPUs, and torch sees {gpus}. Ask for fewer ranks, "
            "or set it to cpu"
        )
    visible = ours.get("CUDA_VISIBLE_DEVICES", "")
    if accelerator == "cuda" and re.fullmatch(r"\d+(,\d+)*", visible):
        # Given a number of accelerators, the launcher would take the machine's first ones instead of these.
        del ours["CUDA_VISIBLE_DEVICES"]
        return ours, ["--include", f"localhost:{','.join(visible.split(',')[:world_size])}"]
    return ours, ["--num_accelerators", str(world_size)]


def describe_failure(log: str) -> str:
    """The message of the rank that failed first, with the end of its traceback; else the last lines of the log.

    A rank that a signal ended says nothing itself: the launcher's log tells.
    """
    signalled = re.search(r"exits with return code = -(\d+)", log)
    if signalled is None:
        return _last_words(log)
    name = _name_of_signal(int(signalled[1]))
    hint = ": as the system does when memory runs out" if name == "SIGKILL" else ""
    return f"{_last_words(log)}\na rank was ended by {name}{hint}"


def _name_of_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # of those for real time, only the first and the last have names
        return f"signal {number}"


def _last_words(log: str) -> str:
    block = re.search(rf"^{FAILED} .*?(?=^{END_OF_FAILURE}|\Z)", log, re.MULTILINE | re.DOTALL)
    if block is not None:
        message, traceback, calls = block[0].rstrip().partition(_TRACEBACK)
        lines = calls.splitlines()
        shown = lines if len(lines) <= _LINES_OF_LOG else ["", "  ...", *lines[-_LINES_OF_LOG:]]
        return message.rstrip() + ("\n" + traceback + "\n".join(shown) if traceback else "")
    lines = [line for line in log.splitlines() if line.strip() and not _is_noise(line)]
    return "\n".join(["the ranks ended without a result; the last lines of their log:", *lines[-_LINES_OF_LOG:]])


def _is_noise(line: str) -> bool:
    return re.match(r"\[[^]]*\] \[(INFO|WARNING|DEBUG)\]|.*Warning: |  warnings\.warn", line) is not None


def _launch(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    """Run the `deepspeed` launcher to its end, or end it and its ranks with this call or this process."""
    with _signals_as_exits(), held_port() as port, log.open("wb") as output:
        leashed = [sys.executable, "-I", "-S", leash.__file__, str(port), str(log.parent)]
        command = [*leashed, *_LAUNCHER, "--master_port", str(port), "--log_level", "warning", *arguments]
        # A session of their own: one signal reaches them all, and a terminal's Ctrl-C comes through here only.
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            with log.open("rb") as written:
                while process.poll() is None:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(_BETWEEN_LOOKS_SECONDS)
                    _show_progress(written)
        finally:
            _end(process)
            leash.remove_buffers(port)
            assert process.stdin is not None
            process.stdin.close()


def _show_progress(log: BinaryIO) -> None:
    """What the lines say that have been written since the last look."""
    while line := log.readline():
        if not line.endswith(b"\n"):
            log.seek(-len(line), os.SEEK_CUR)  # the rest of it is still to come
            return
        if line.startswith(PROGRESS.encode()):
            said = line.decode(errors="replace")[len(PROGRESS) :].rstrip()
            tell(f"{printable(said)} ...", to=sys.stderr)


@contextmanager
def held_port() -> Iterator[int]:
    """A port for the ranks' store to listen on. Inside, the system gives it to nobody who asks for any free port."""
    with socket.socket() as holder:
        # Linux lets the store have it all the same, because it sets this as well, and this socket does not listen.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


@contextmanager
def _signals_as_exits() -> Iterator[None]:
    """A signal to end leaves through `finally`."""

    def leave(signum: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + signum)

    previous = {signum: signal.signal(signum, leave) for signum in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the launcher and every rank that is left of this process group."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _PATIENCE_SECONDS
        try:
            os.killpg(process.pid, signum)
            while time.monotonic() < deadline:
                process.poll()  # reaps it
                os.killpg(process.pid, 0)
                time.sleep(0.05)
        except ProcessLookupError:
            return


# ---- the rank's side ------------------------------------------------------------------------------------------------


def say_progress(text: str) -> None:
    """Let the user know what the ranks are at. Rank 0 says it for all."""
    if os.environ.get("RANK", "0") == "0":
        # In one piece, so that ranks do not interrupt each other.
        _write_to_stderr(f"{PROGRESS}{text}\n")


def say_why(error: BaseException, *, in_words: bool) -> None:
    """Write why this rank failed, for ``describe_failure``; with the traceback unless the message says all."""
    rank = next((os.environ[name] for name in ("RANK", *OF_MPI) if name in os.environ), "?")
    message = f"{FAILED} {rank}: {'' if in_words else f'{type(error).__name__}: '}{error}\n"
    if not in_words:
        message += "".join(traceback.format_exception(error))
    _flush()
    _write_to_stderr(f"{message}{END_OF_FAILURE}\n")


def finish(code: int) -> NoReturn:
    """End this rank's process with this exit code."""
    if "mpi4py.MPI" in sys.modules:  # mpirun takes a process that has not finalized for a crashed one
        from mpi4py import MPI

        MPI.Finalize()
    _flush()
    # CPU ranks of DeepSpeed, with any optimizer, now and then abort while the interpreter shuts down.
    os._exit(code)


def _write_to_stderr(text: str) -> None:
    with suppress(OSError):  # a full disk under the log is no reason to end otherwise
        os.write(2, text.encode(errors="backslashreplace"))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
