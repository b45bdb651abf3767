"""On a rank: build an engine from the config, train it for a few steps, and collect what the check finds."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_muon import ds_config
from ds_muon.config import DSMuonConfig
from ds_muon.ranks import say_progress
from ds_muon.say import printable
from ds_muon.verify.check import UpdateCheck
from ds_muon.verify.engine_view import CannotVerify
from ds_muon.verify.inject import FAULTS, plant
from ds_muon.verify.outcome import NotShown, Outcome
from ds_muon.verify.record import UpdateRecord, VerifyResult
from ds_muon.verify.subject import built_in_batches, built_in_model, endless, loss_of, make_subject
from ds_muon.version import VERSION

DEFAULT_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "DSMuon", "params": {"lr": 0.02, "adam_lr": 3e-4, "weight_decay": 0.1}},
    "zero_optimization": {"stage": 2, "reduce_scatter": False},
}
ALL_FAULTS = "all"

# A dynamic loss scale starts at 2^16 and halves in every step that overflows.
_EXTRA_STEPS = 30
_MOST_SEQUENCES = 8


@dataclass(frozen=True)
class Task:
    """What to verify.

    Attributes:
        config: the DeepSpeed config.
        steps: optimizer steps to check.
        model: ``module:factory``, or None for the built-in model.
        seed: of weights and data.
        inject: a fault to plant, or ``"all"``, one after another.
    """

    config: dict[str, Any]
    steps: int
    model: str | None
    seed: int
    inject: str | None


def read_config(path: Path | None) -> dict[str, Any]:
    """The DeepSpeed config in a file, or the default.

    Raises:
        CannotVerify: the file cannot be read, is not a JSON object, has blanks that a trainer was to fill in, or holds
            what DSMuon refuses: everything that can be seen without ranks, at once.
    """
    if path is None:
        return copy.deepcopy(DEFAULT_CONFIG)
    try:
        _, config = ds_config.read(path)
    except ds_config.NotAConfig as error:
        raise CannotVerify(str(error)) from None
    if problems := _problems(config):
        where = f"--config {printable(str(path))}"
        raise CannotVerify(f"{where}: {problems[0]}" if len(problems) == 1 else "\n".join([f"{where}:", *problems]))
    return config


def _problems(config: dict[str, Any]) -> list[str]:
    """One line for each thing that is wrong whatever the ranks and the model are."""
    kind = ds_config.optimizer_name(config)
    places = list(ds_config.autos(config))
    blanks = [".".join(place) for place in places]
    if ds_config.is_ours(kind) or kind is None:  # DSMuon has an "auto" that is a choice, and says itself which is not
        blanks = [key for key in blanks if not key.startswith("optimizer.params.")]
    problems = []
    if blanks:
        problems.append(
            f'{", ".join(map(printable, blanks))} {"is" if len(blanks) == 1 else "are"} "auto", a blank that a '
            "trainer fills in: write down what it would fill in, or leave the key out"
        )
    if ds_config.is_ours(kind):
        with suppress(Exception):  # DeepSpeed cannot read it: it says so itself, on the ranks
            problems += ds_config.refusals(ds_config.changed(config, dict.fromkeys(places, ds_config.ABSENT)))
        params = config["optimizer"].get("params")
        problems += DSMuonConfig.read({} if params is None else params)[1]
    return problems


def optimizer_type(config: dict[str, Any]) -> str:
    """``optimizer.type``.

    Raises:
        CannotVerify: there is none.
    """
    kind = ds_config.optimizer_name(config)
    if kind is None:
        raise CannotVerify('the config has no optimizer.type: set it to "DSMuon" (or to "Muon", DeepSpeed\'s own)')
    return kind


def run(task: Task) -> list[Outcome]:
    """One outcome, or one per fault. Every rank calls it, in an initialized process group, and gets the same.

    Raises:
        CannotVerify: the engine cannot be checked, or made no step, or cannot show the one fault that was asked for.
    """
    # Torch compiles DeepSpeed's Muon, on a CPU for minutes and to no use.
    eager = optimizer_type(task.config).lower() == "muon" and get_accelerator().device_name() == "cpu"
    with torch.compiler.set_stance("force_eager") if eager else nullcontext():
        return _run(task)


def _run(task: Task) -> list[Outcome]:
    if task.inject != ALL_FAULTS:
        return [_train(task, task.inject)]
    outcomes: list[Outcome] = []
    for number, fault in enumerate(FAULTS, 1):
        say_progress(f"fault {number} of {len(FAULTS)}: {fault}")
        try:
            outcomes.append(_train(task, fault))
        except _CannotShow as error:
            outcomes.append(NotShown(fault, str(error)))
        gc.collect()  # an engine is full of cycles
    return outcomes


class _CannotShow(CannotVerify):
    """The config, or the model, cannot show a fault."""


def _train(task: Task, fault: str | None) -> VerifyResult:
    """A new model and engine, from the same seed every time."""
    if fault is not None and task.steps < FAULTS[fault].steps:
        raise _CannotShow(f"--steps {task.steps}: {fault} takes {FAULTS[fault].steps} steps to show")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(task.seed)
    if task.model is None:
        engine = build_engine(built_in_model(), task.config)
        sequences = min(_MOST_SEQUENCES, engine.train_micro_batch_size_per_gpu())
        feed: Iterator[Any] = built_in_batches(sequences, rank, world_size, task.seed)
    else:
        model, batches = make_subject(task.model, rank, world_size)
        engine = build_engine(model, task.config)
        feed = endless(batches)

    rates: list[float] = []
    records: list[UpdateRecord] = []
    checked = 0
    with ExitStack() as stack:
        if fault is not None:
            try:
                stack.enter_context(plant(fault, engine))
            except CannotVerify as error:
                raise _CannotShow(str(error)) from None
        check = UpdateCheck(engine)
        for _ in range(task.steps + _EXTRA_STEPS):
            for _ in range(engine.gradient_accumulation_steps()):
                rates += [group["lr"] for group in engine.optimizer.param_groups]
                engine.backward(loss_of(engine, next(feed), engine.device))
                engine.step()
            of_step = check.after_step()
            records += of_step
            checked += bool(of_step)
            if checked == task.steps:
                break
    check.close()
    if not any(rates):
        raise CannotVerify(
            "every learning rate was 0 in all steps, so nothing could be seen to move: raise --steps beyond the "
            "warmup, or leave the scheduler out of the config"
        )
    if checked < task.steps:
        raise CannotVerify(
            f"{'all' if not checked else 'too many'} of {task.steps + _EXTRA_STEPS} steps were skipped: "
            + _why_skipped(engine.optimizer)
        )
    result = VerifyResult(
        optimizer=optimizer_type(task.config),
        device=_device_name(),
        world_size=world_size,
        precision=check.precision,
        steps=checked,
        skipped_steps=int(engine.skipped_steps),
        partition_sizes=tuple(int(size) for size in engine.optimizer.partition_size),
        config=task.config,
        versions={"ds_muon": VERSION, "deepspeed": str(deepspeed.__version__), "torch": str(torch.__version__)},
        records=tuple(records),
        fault=fault,
    )
    engine.destroy()
    return result


def _why_skipped(zero: Any) -> str:
    """The reason of the last skipped step, and what to do about it."""
    skips = getattr(zero, "skips", None)
    if skips is not None and skips.last is skips.spikes:
        return f"{skips.spikes.why}. Raise it, or leave it out for this check"
    if skips is not None and skips.last is skips.bad_updates:
        return f"{skips.bad_updates.why}. DS_MUON_NAN_CAPTURE=1 saves its input for ds-muon replay"
    why = "a gradient is not finite" if skips is None else skips.bad_gradients.why
    remedy = "look for what is infinite in the data or the model"
    if zero.dtype == torch.float16:
        remedy += f", or set a smaller initial_scale_power: the loss scale was {zero.loss_scale:g}"
    return f"{why}; {remedy}"


def build_engine(model: torch.nn.Module, config: dict[str, Any]) -> Any:
    """``deepspeed.initialize`` for all parameters of the model; the config is not modified."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        # DeepSpeed asks whether the hardware is fast at fp16. It need not be for a check: torch's CPU kernels have it.
        accelerator.is_fp16_supported = lambda: True
    # DeepSpeed writes into the config that it is given.
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=copy.deepcopy(config))
    return engine


def _device_name() -> str:
    kind = str(get_accelerator().device_name())
    return torch.cuda.get_device_name() if kind == "cuda" else kind
