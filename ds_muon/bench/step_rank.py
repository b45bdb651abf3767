"""One rank of ``ds-muon bench step``, started by it: builds the engines, times them, and rank 0 writes a ``Run``.

All ranks make the same decisions: what one of them finds out is agreed on first.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import math
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from ds_muon.agree import gather
from ds_muon.bench.clock import synchronize
from ds_muon.bench.parts import PARTS, Recorder, instrumented
from ds_muon.bench.step import (
    CANDIDATES,
    COULD_NOT_RUN,
    Candidate,
    Measured,
    Parts,
    RankParts,
    Run,
    Task,
    Wire,
)
from ds_muon.exchange import element_bytes
from ds_muon.files import write_text
from ds_muon.ranks import finish, say_progress, say_why
from ds_muon.sample.gpt import GPT, GPTConfig
from ds_muon.sample.text import draw_windows, standard_library
from ds_muon.version import VERSION

SEED = 0
HEAD_SIZE = 64
WARMUP = 3
PASSES = 2
# Instrumented iterations, beside one that is dropped.
_INSTRUMENTED = 12
# How long a rank that failed gives others to fail as well, in seconds, before it ends the run.
_PATIENCE = 30.0
# Numbers them, alike on all ranks.
_BUILDS = itertools.count()
# How much of what is free the estimate may fill.
_SHARE_OF_MEMORY = 0.8
_ROUNDS_PER_LINE = 10


class Text:
    """The standard library's sources in windows drawn at random: the same for all candidates, others on every rank."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self._task, self._device, self._bytes = task, device, standard_library()

    def window(self, index: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets, each (micro_batch, sequence) int64 on the device, of one iteration."""
        generator = torch.Generator().manual_seed((SEED + index) * dist.get_world_size() + dist.get_rank())
        windows = draw_windows(self._bytes, self._task.micro_batch, self._task.sequence, generator)
        return windows[0].to(self._device), windows[1].to(self._device)


class Contender:
    """A candidate with its engine, and what has been measured of it on this rank."""

    def __init__(self, candidate: Candidate, device: torch.device) -> None:
        self.candidate = candidate
        self.problem = candidate.problem
        self.engine: Any = None
        self.times_ms: list[float] = []
        self.resident_bytes: int | None = None
        self.peak_bytes: int | None = None
        self.loss = math.nan
        self.wire: Wire | None = None
        self.parts: RankParts | None = None
        self._device = device
        self._resident_now = 0

    def build(self, task: Task, text: Text) -> None:
        """Build the engine and let it make its first steps, alone; measure the memory that this added and that stays.

        A collective. What it cannot do becomes ``problem``, on all ranks.

        Raises:
            Exception: what went wrong on this rank, if other ranks are stuck in a collective over it.
        """
        say_progress(f"building: {self.candidate.name}")
        before = _allocated(self._device)
        problem: Exception | None = None
        try:
            self.engine = _engine(task, self.candidate, self._device)
            for index in range(WARMUP):
                self.iterate(text.window(index))
        except torch.OutOfMemoryError:
            raise  # says more than the table could, and may have come to one rank only
        except Exception as error:  # whatever its kernels or its config make of this machine
            problem = error
        self.problem = _first_problem(problem)
        if self.problem is not None:
            self.engine = None
            return
        gc.collect()
        synchronize(self._device)
        after = _allocated(self._device)
        if before is not None and after is not None:
            # A second build finds in place what all engines of this kind share.
            self._resident_now = after - before
            self.resident_bytes = max(self.resident_bytes or 0, self._resident_now)
        self.wire = _wire(self.engine)

    def destroy(self) -> None:
        """Give the engine's memory back."""
        if self.engine is not None:
            self.engine.destroy()
            self.engine = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def iterate(self, window: tuple[Tensor, Tensor]) -> tuple[float, Tensor]:
        """Forward, backward and step. A collective. Returns the milliseconds, and the loss on the device."""
        dist.barrier()
        synchronize(self._device)
        start = time.perf_counter()
        loss: Tensor = self.engine(*window)
        self.engine.backward(loss)
        self.engine.step()
        synchronize(self._device)
        return 1e3 * (time.perf_counter() - start), loss.detach()

    def measure(self, window: tuple[Tensor, Tensor]) -> None:
        """Time one iteration, and its memory."""
        before = _allocated(self._device)
        if before is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
        ms, loss = self.iterate(window)
        self.times_ms.append(ms)
        self.loss = loss.item()
        if before is not None:
            of_others = before - self._resident_now
            peak = torch.cuda.max_memory_allocated(self._device) - of_others
            self.peak_bytes = max(self.peak_bytes or 0, peak)

    def measure_parts(self, text: Text) -> None:
        """Time the parts of DSMuon's iterations, none of which counts among the others."""
        recorder = Recorder(partial(synchronize, self._device))
        iterations: list[tuple[float, dict[str, float]]] = []
        say_progress(f"measuring the parts of {self.candidate.name}")
        with instrumented(self.engine, recorder):
            for index in range(1 + _INSTRUMENTED):
                window = text.window(index)
                dist.barrier()
                recorder.reset()
                sent_before = self._sent_bytes()
                with recorder.part("rest"):
                    with recorder.part("forward"):
                        loss = self.engine(*window)
                    with recorder.part("backward"):
                        self.engine.backward(loss)
                    self.engine.step()
                iterations.append((sum(recorder.ms.values()), {part: recorder.ms[part] for part in PARTS}))
        self.parts = RankParts(*_middle_half(iterations[1:]), self._sent_bytes() - sent_before)

    def _sent_bytes(self) -> int:
        return sum(group.exchange.sent_bytes for group in self.engine.optimizer.muon_groups)

    def measured(self) -> Measured:
        """Of all ranks. A collective."""
        times, resident, peak, losses, parts = zip(
            *gather((self.times_ms, self.resident_bytes, self.peak_bytes, self.loss, self.parts), None), strict=True
        )
        if self.problem is not None:
            return Measured(self.candidate.name, self.problem)
        return Measured(
            self.candidate.name,
            times_ms=tuple(max(of_round) for of_round in zip(*times, strict=True)),
            resident_bytes=None if self.resident_bytes is None else max(resident),
            peak_bytes=None if self.peak_bytes is None else max(peak),
            loss=statistics.fmean(losses),
            wire=self.wire,
            parts=None if self.parts is None else Parts(parts),
        )


def _middle_half(iterations: Sequence[tuple[float, dict[str, float]]]) -> tuple[float, dict[str, float]]:
    """Mean time and mean parts of the iterations that are neither among the fastest nor the slowest quarter."""
    quarter = len(iterations) // 4
    middle = sorted(iterations, key=lambda iteration: iteration[0])[quarter : len(iterations) - quarter]
    parts = {part: statistics.fmean(ms[part] for _, ms in middle) for part in PARTS}
    return sum(parts.values()), parts


def _engine(task: Task, candidate: Candidate, device: torch.device) -> Any:
    """A DeepSpeed engine around a model of its own, with the same initial weights as every other."""
    torch.manual_seed(SEED)
    with torch.device(device):
        model = GPT(_config(task))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": task.micro_batch,
        "gradient_clipping": 1.0,
        "optimizer": copy.deepcopy(candidate.optimizer),
        "zero_optimization": {"stage": task.stage, **candidate.zero},
        "bf16": {"enabled": device.type != "cpu"},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def _config(task: Task) -> GPTConfig:
    return GPTConfig(task.layers, task.width // HEAD_SIZE, task.width, block_size=task.sequence)


def _wire(engine: Any) -> Wire:
    """From the parameter counts, and DSMuon's plan."""
    zero, others = engine.optimizer, dist.get_world_size() - 1
    elements = sum(p.numel() for p in engine.module.parameters())
    exchange = 0
    if hasattr(zero, "muon_groups"):
        normuon = zero.optimizer.config.variant == "normuon"
        exchange = zero.plan.moved_elements() * element_bytes(zero.newton_schulz, normuon=normuon)
    # A ring all-reduce is a reduce-scatter and an all-gather; in each, a rank sends all pieces but one.
    reduction = 2 * others * elements * zero.communication_data_type.itemsize
    return Wire(reduction, others * elements * next(engine.module.parameters()).element_size(), exchange)


def _first_problem(problem: Exception | None) -> str | None:
    """That of any rank, on all of them, in a line. A collective, but through the store: others may wait in another.

    Raises:
        Exception: ``problem``, if other ranks have not said within ``_PATIENCE`` seconds how they fared.
    """
    said = "" if problem is None else (str(problem) or type(problem).__name__).strip().splitlines()[0]
    store, build = _get_default_store(), next(_BUILDS)
    keys = [f"ds_muon.bench.step/{build}/{rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], said)
    deadline = time.monotonic() + _PATIENCE
    while not store.check(keys):
        if problem is not None and time.monotonic() > deadline:
            raise problem
        time.sleep(0.01)
    return next((text for text in (store.get(key).decode() for key in keys) if text), None)


def _allocated(device: torch.device) -> int | None:
    """Bytes in tensors on the device; a CPU does not tell."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


# ---- all candidates -------------------------------------------------------------------------------------------------


def bytes_together(task: Task, parameters: int, world_size: int) -> int:
    """An estimate, from above, of what one rank needs if all engines are there at once, in bf16.

    Each has a bf16 copy of the model and, of its partition, fp32 weights and two moments. One at a time also has bf16
    and fp32 gradients, a bucket, activations (80 bytes per token and channel of a layer, logits apart), or the fp32
    model from which it is built.
    """
    engines = sum(candidate.problem is None for candidate in task.candidates)
    resident = engines * parameters * (2 + 12 / world_size)
    activations = 80 * task.micro_batch * task.sequence * task.width * task.layers
    return int(resident + parameters * (2 + 4 / world_size) + 2**31 + activations)


def fit_together(task: Task, parameters: int, device: torch.device) -> bool:
    """Whether all engines are to be there at once; the same on every rank. A collective."""
    if task.together != "auto" or device.type == "cpu":
        return task.together != "no"
    free, _ = torch.cuda.mem_get_info(device)
    return min(gather(free, None)) * _SHARE_OF_MEMORY > bytes_together(task, parameters, dist.get_world_size())


def measure(task: Task, device: torch.device) -> Run:
    """Measure all candidates. A collective."""
    _start_libraries(task, device)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(_config(task)).parameters())
    text = Text(task, device)
    together = fit_together(task, parameters, device)
    contenders = [Contender(candidate, device) for candidate in task.candidates]
    take_turns = _all_at_once if together else _one_at_a_time
    take_turns(task, [c for c in contenders if c.problem is None], text)
    return Run(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        world_size=dist.get_world_size(),
        dtype="fp32" if device.type == "cpu" else "bf16",
        parameters=parameters,
        passes=1 if together else PASSES,
        notes=tuple(_notes(task)),
        versions={"torch": torch.__version__, "deepspeed": deepspeed.__version__, "ds_muon": VERSION},
        measured=tuple(contender.measured() for contender in contenders),
    )


def _start_libraries(task: Task, device: torch.device) -> None:
    """Let the matmul library take its workspaces before any engine is charged for them."""
    with torch.device(device):
        model = GPT(GPTConfig(1, 1, HEAD_SIZE, block_size=task.sequence)).to(
            torch.float32 if device.type == "cpu" else torch.bfloat16
        )
        tokens = torch.zeros(1, task.sequence, dtype=torch.int64, device=device)
    model(tokens, tokens).backward()


def _all_at_once(task: Task, contenders: Sequence[Contender], text: Text) -> None:
    for contender in contenders:
        contender.build(task, text)
    ready = [contender for contender in contenders if contender.problem is None]
    order = random.Random(SEED)
    for contender in ready:  # what is cached on the device changes hands
        contender.iterate(text.window(WARMUP))
    for index in range(task.rounds):
        _say_round(index, task)
        window = text.window(1 + WARMUP + index)
        for contender in order.sample(ready, len(ready)):
            contender.measure(window)
    for contender in filter(_is_ours, ready):
        contender.measure_parts(text)


def _one_at_a_time(task: Task, contenders: Sequence[Contender], text: Text) -> None:
    for share in range(PASSES):
        for contender in contenders:
            if contender.problem is None:
                contender.build(task, text)
            if contender.problem is None:
                for index in range(task.rounds * share // PASSES, task.rounds * (share + 1) // PASSES):
                    _say_round(index, task)
                    contender.measure(text.window(1 + WARMUP + index))
                if share == PASSES - 1 and _is_ours(contender):
                    contender.measure_parts(text)
            contender.destroy()


def _say_round(index: int, task: Task) -> None:
    if index % _ROUNDS_PER_LINE == 0:
        say_progress(f"round {index + 1} of {task.rounds}")


def _is_ours(contender: Contender) -> bool:
    return bool(contender.candidate.optimizer["type"] == "DSMuon")


def _notes(task: Task) -> Iterator[str]:
    muon = any(candidate.name == CANDIDATES["muon"] for candidate in task.candidates)
    if muon and os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        yield f"{CANDIDATES['muon']} is not compiled here (TORCHDYNAMO_DISABLE=1)"


# ---- the process ----------------------------------------------------------------------------------------------------


def main() -> NoReturn:
    """Run this rank's part and end the process."""
    parser = argparse.ArgumentParser(prog="python -m ds_muon.bench.step_rank", description=__doc__)
    parser.add_argument("--task", type=Task.from_json, required=True, help="a Task, as JSON")
    parser.add_argument("--json", type=Path, required=True, help="where rank 0 writes the Run")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher's
    options = parser.parse_args()
    try:
        if get_accelerator().device_name() == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        deepspeed.init_distributed()
        found = measure(options.task, torch.device(get_accelerator().current_device_name()))
        if dist.get_rank() == 0:
            write_text(options.json, found.to_json())
        # The launcher ends everything when the first rank ends with another code than 0.
        dist.barrier()
    except BaseException as error:
        say_why(error, in_words=False)
        os._exit(COULD_NOT_RUN)
    finish(0)


if __name__ == "__main__":
    main()
