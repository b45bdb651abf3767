"""What a script does around the engine, beside DeepSpeed's AdamW: the table of ``docs/around-the-engine.md``.

Most of it must not change a single bit of the training. Every row runs with both optimizers, so that what is said of
AdamW is seen, too.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_set_full_fp32_param,
    safe_set_full_grad,
)
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.unit.support.around_engine import (
    BUT_THE_MODEL,
    SHAPES,
    away,
    config_of,
    evaluate,
    gradients_of,
    is_bound,
    offload_and_reload,
)
from tests.unit.support.models import PrescribedGradients, full_weights, start, train_step
from tests.unit.support.ranks import DEVICE, run_ranks

pytestmark = pytest.mark.ranks

OPTIMIZERS = ["DSMuon", "AdamW"]

Around = Callable[[Any], None]


def model_of(engine: Any) -> dict[str, Tensor]:
    return {name: p.detach().cpu().clone() for name, p in engine.module.named_parameters()}


# ---- other storage for the parameters -------------------------------------------------------------------------------


def clones(engine: Any) -> None:
    for p in engine.module.parameters():
        p.data = p.data.clone()


def transposed(engine: Any) -> None:
    for p in engine.module.parameters():
        if p.ndim == 2:
            p.data = p.data.t().contiguous().t()


def through_another_dtype(engine: Any) -> None:
    dtype = next(engine.module.parameters()).dtype
    if dtype == torch.float32:
        engine.module.double().float()
    else:
        engine.module.float().to(dtype)


def average_in_and_out(engine: Any) -> None:
    weights = [p.data.clone() for p in engine.module.parameters()]
    for p in engine.module.parameters():
        p.data = torch.zeros_like(p)
    evaluate(engine)
    for p, weight in zip(engine.module.parameters(), weights, strict=True):
        p.data = weight


def average_copied_in_and_out(engine: Any) -> None:
    average = AveragedModel(engine.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.update_parameters(engine.module)
    weights = [p.data.clone() for p in engine.module.parameters()]
    for p, mean in zip(engine.module.parameters(), average.parameters(), strict=True):
        p.data.copy_(mean)
    evaluate(engine)
    for p, weight in zip(engine.module.parameters(), weights, strict=True):
        p.data.copy_(weight)


def through_the_host(engine: Any) -> None:
    engine.module.cpu().to(engine.device)


STORAGE: dict[str, Around] = {
    "clones": clones,
    "transposed": transposed,
    "through another dtype": through_another_dtype,
    "average in and out": average_in_and_out,
    "average copied in and out": average_copied_in_and_out,
}
if DEVICE != "cpu":
    STORAGE["through the host"] = through_the_host

MOMENTS = ["before the first forward", "after a step", "between backward and step", "before a skipped step"]
LAYOUTS = [{}, {"round_robin_gradients": True}, {"parameter_alignment": True}]


def train_around(config: dict[str, Any], around: Around | None, moment: str) -> dict[str, Any]:
    """Three good steps and a skipped one, with something done to the engine in between."""
    engine = start(PrescribedGradients(SHAPES), config)
    hooks: list[int] = []
    for p in engine.module.parameters():
        p.register_post_accumulate_grad_hook(lambda p: hooks.append(p.numel()))

    def now(this: str) -> None:
        if around is not None and moment == this:
            around(engine)

    now("before the first forward")
    train_step(engine, gradients_of(engine, 0))
    now("after a step")
    engine.backward(engine(gradients_of(engine, 1)))
    now("between backward and step")
    engine.step()
    now("before a skipped step")
    before = model_of(engine)
    train_step(engine, [torch.full_like(g, float("nan")) for g in gradients_of(engine, 2)])
    skipped = engine.skipped_steps == 1 and all(torch.equal(p, before[name]) for name, p in model_of(engine).items())
    train_step(engine, gradients_of(engine, 2))
    found = {"weights": full_weights(engine), "bound": is_bound(engine), "skipped": skipped, "hooks": len(hooks)}
    engine.destroy()
    return found


def train_around_all(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = {"nothing": train_around(config, None, "")}
    zero = config["zero_optimization"]
    layouts = cycle(LAYOUTS)
    for name, around in STORAGE.items():
        # DeepSpeed's reduction takes no gradients that lie transposed.
        for moment in MOMENTS if around is not transposed else ["between backward and step"]:
            settings = {**config, "zero_optimization": {**zero, **next(layouts)}}
            found[f"{name}, {moment}"] = train_around(settings, around, moment)
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("dtype", "stage"), [("float32", 1), ("bfloat16", 2)])
def test_parameters_with_other_storage_train_on_as_if_nothing_had_been(dtype: str, stage: int, optimizer: str) -> None:
    for found in run_ranks(2, train_around_all, config_of(optimizer, dtype=dtype, stage=stage)):
        undisturbed = found["nothing"]
        for name, run in found.items():
            assert run["bound"] and run["skipped"], name
            assert run["hooks"] == undisturbed["hooks"] == 4 * len(SHAPES), name
            assert all(torch.equal(w, run["weights"][p]) for p, w in undisturbed["weights"].items()), name


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8)
        self.proj = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.lstm.flatten_parameters()
        return self.proj(self.lstm(x)[0]).square().mean()


def train_recurrent(config: dict[str, Any]) -> tuple[bool, bool]:
    torch.manual_seed(0)
    engine = start(Recurrent(), config)
    before, x = model_of(engine), torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(0)).to(engine.device)
    losses = []
    for _ in range(8):
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    moved = all(not torch.equal(p, before[name]) for name, p in model_of(engine).items())
    return is_bound(engine), moved and losses[-1] < losses[0]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_recurrent_network_that_flattens_its_weights_learns(optimizer: str) -> None:
    # On GPUs cuDNN's weights are moved into one piece of memory, in every forward.
    assert run_ranks(2, train_recurrent, config_of(optimizer)) == [(True, True)] * 2


def write_then_step(config: dict[str, Any], write: bool) -> dict[str, Tensor]:
    engine = start(PrescribedGradients(SHAPES), config)
    train_step(engine, gradients_of(engine, 0))
    if write:
        for p in engine.module.parameters():
            p.data = p.data + 1
    train_step(engine, gradients_of(engine, 1))
    assert is_bound(engine)
    return model_of(engine)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_written_into_the_model_is_gone_after_the_next_step(optimizer: str) -> None:
    """The fp32 weights are the truth: a script writes to them with ``safe_set_full_fp32_param``."""
    config = config_of(optimizer, dtype="bfloat16")
    for found, other in zip(
        run_ranks(2, write_then_step, config, True), run_ranks(2, write_then_step, config, False), strict=True
    ):
        assert all(torch.equal(p, other[name]) for name, p in found.items())


def load_over_other_storage(config: dict[str, Any], folder: str, how: dict[str, bool]) -> bool:
    """Whether the fp32 weights are those of the checkpoint, as exactly as the model's dtype has them."""
    engine = start(PrescribedGradients(SHAPES), config)
    train_step(engine, gradients_of(engine, 0))
    engine.save_checkpoint(folder)
    saved = model_of(engine)
    train_step(engine, gradients_of(engine, 1))
    clones(engine)
    engine.load_checkpoint(folder, **how)
    loaded = full_weights(engine)
    assert all(torch.equal(p, saved[name]) for name, p in model_of(engine).items())
    assert "AdamW" in type(engine.optimizer.optimizer).__name__ or is_bound(engine)
    return all(torch.equal(p, loaded[name].to(p.dtype)) for name, p in saved.items())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("how", [{}, {"load_optimizer_states": False}, {"load_module_only": True}])
def test_a_checkpoint_loads_over_other_storage(tmp_path: Path, how: dict[str, bool], optimizer: str) -> None:
    from_model = "load_optimizer_states" in how
    config = config_of(optimizer, dtype="bfloat16", zero={"load_from_fp32_weights": not from_model})
    found = run_ranks(2, load_over_other_storage, config, str(tmp_path), how)
    # Where the fp32 weights are made from the model's, AdamW takes them from where the model's were.
    assert found == [optimizer == "DSMuon" or how == {}] * 2


def save_with_an_average(config: dict[str, Any], folder: str) -> tuple[str, bool]:
    """What is said of a checkpoint that was saved while an average stood in; whether training goes on right."""
    engine = start(PrescribedGradients(SHAPES), config)
    train_step(engine, gradients_of(engine, 0))
    weights = [p.data.clone() for p in engine.module.parameters()]
    for p in engine.module.parameters():
        p.data.mul_(0.5)
    engine.save_checkpoint(folder)
    for p, weight in zip(engine.module.parameters(), weights, strict=True):
        p.data.copy_(weight)
    train_step(engine, gradients_of(engine, 1))
    right, said = full_weights(engine), ""
    try:
        engine.load_checkpoint(folder)
    except ValueError as error:
        said = str(error)
    train_step(engine, gradients_of(engine, 1))
    return said, is_bound(engine) and all(torch.equal(w, right[name]) for name, w in full_weights(engine).items())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_checkpoint_that_was_saved_with_an_average_in_place_is_known_for_one(tmp_path: Path, optimizer: str) -> None:
    for said, right in run_ranks(2, save_with_an_average, config_of(optimizer, dtype="bfloat16"), str(tmp_path)):
        assert right
        assert ("A script may have written into one of them before it saved" in said) == (optimizer == "DSMuon")


# ---- states that are offloaded --------------------------------------------------------------------------------------


def save_and_load_while_away(config: dict[str, Any], folder: str, which: str) -> dict[str, Tensor]:
    engine = start(PrescribedGradients(SHAPES), config)
    train_step(engine, gradients_of(engine, 0))
    for do in ("save", "load"):
        if do == which:
            away(engine, pin_memory=True)
        if do == "save":
            engine.save_checkpoint(folder)
        else:
            engine.load_checkpoint(folder)
        engine.reload_states()
        if do == "save":
            train_step(engine, gradients_of(engine, 9))
    assert is_bound(engine)
    train_step(engine, gradients_of(engine, 1))
    return full_weights(engine)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_states_that_are_away_are_saved_and_loaded(tmp_path: Path, optimizer: str) -> None:
    config = config_of(optimizer, dtype="bfloat16")
    expected, *found = (
        run_ranks(2, save_and_load_while_away, config, str(tmp_path), which)[0] for which in ("", "save", "load")
    )
    assert all(torch.equal(w, weights[name]) for weights in found for name, w in expected.items())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("stage", "how"), [(2, {}), (1, {"pin_memory": True}), (2, {"pin_memory": True, "include": BUT_THE_MODEL})]
)
def test_states_that_were_away_change_nothing(stage: int, how: dict[str, Any], optimizer: str) -> None:
    config = config_of(optimizer, stage=stage, dtype="bfloat16")
    stayed, returned = (run_ranks(2, offload_and_reload, config, this)[0] for this in (None, how))
    assert returned["bound"]
    assert all(torch.equal(w, returned["weights"][name]) for name, w in stayed["weights"].items())
    # What safe_get_full_optimizer_state reads.
    assert stayed["linked"] and returned["linked"] == (optimizer == "DSMuon")
    if optimizer == "DSMuon":
        for key, states in stayed["states"].items():
            assert states and all(torch.equal(t, returned["states"][key][name]) for name, t in states.items()), key


# ---- gradients and weights ------------------------------------------------------------------------------------------


def read_and_write(config: dict[str, Any]) -> dict[str, Any]:
    engine = start(PrescribedGradients(SHAPES), config)
    named = dict(engine.module.named_parameters())
    world_size = torch.distributed.get_world_size()
    expected = [g.clone() for g in gradients_of(engine, 0)]
    for g in expected:
        torch.distributed.all_reduce(g)
    engine.backward(engine(gradients_of(engine, 0)))
    found: dict[str, Any] = {"grad": [p.grad for p in named.values()]}
    found["gradients"] = [
        torch.equal(safe_get_full_grad(p).float(), g / world_size)
        for p, g in zip(named.values(), expected, strict=True)
    ]
    engine.optimizer.zero_grad()
    engine.zero_grad()
    engine.step()
    found["zero_grad changes nothing"] = full_weights(engine)
    engine.backward(engine(gradients_of(engine, 1)))
    for p, g in zip(named.values(), gradients_of(engine, 2), strict=True):
        torch.distributed.all_reduce(g)
        safe_set_full_grad(p, (g / world_size).to(safe_get_full_grad(p).dtype))
    engine.step()
    found["gradients that were set"] = full_weights(engine)
    for p in named.values():
        safe_set_full_fp32_param(p, torch.ones_like(p, dtype=torch.float32))
    found["weights"] = [bool((safe_get_full_fp32_param(p) == 1).all()) for p in named.values()]
    train_step(engine, [torch.zeros_like(g) for g in expected])
    found["bound"] = is_bound(engine)
    return found


def two_steps(config: dict[str, Any]) -> list[dict[str, Tensor]]:
    engine = start(PrescribedGradients(SHAPES), config)
    weights = []
    for step in (0, 2):
        train_step(engine, gradients_of(engine, step))
        weights.append(full_weights(engine))
    return weights


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_and_weights_are_read_and_set_through_deepspeed(stage: int, optimizer: str) -> None:
    config = config_of(optimizer, stage=stage)
    expected = run_ranks(2, two_steps, config)[0]
    for found in run_ranks(2, read_and_write, config):
        assert found["grad"] == [None] * len(SHAPES)
        assert all(found["gradients"]) and all(found["weights"]) and found["bound"]
        for key, weights in zip(("zero_grad changes nothing", "gradients that were set"), expected, strict=True):
            assert all(torch.equal(w, found[key][name]) for name, w in weights.items()), key


def step_on(config: dict[str, Any], given: int, written: int) -> dict[str, Tensor]:
    """The weights after a step on the gradients of ``given``, in whose place a script sets those of ``written``."""
    engine = start(PrescribedGradients(SHAPES), config)
    engine.backward(engine(gradients_of(engine, given)))
    if written != given:
        for p, g in zip(engine.module.parameters(), gradients_of(engine, written), strict=True):
            safe_set_full_grad(p, g.float())
    engine.step()
    return full_weights(engine)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gradients_that_are_set_on_the_host_before_a_script_ends_the_step_count(optimizer: str) -> None:
    of_run = {"managed_gradient_accumulation": False, "data_types": {"grad_accum_dtype": "fp32"}}
    config = config_of(optimizer, dtype="bfloat16", zero={"offload_optimizer": {"device": "cpu"}}, **of_run)
    given, written, found = (run_ranks(1, step_on, config, *which)[0] for which in ((0, 0), (2, 2), (0, 2)))
    counted = written if optimizer == "DSMuon" else given
    assert all(torch.equal(weight, counted[name]) for name, weight in found.items())
    assert not torch.equal(given["p0"], written["p0"])


def freeze(config: dict[str, Any], frozen: bool) -> tuple[dict[str, Tensor], list[str]]:
    """After the first step a matrix and a vector are frozen, or get zero gradients."""
    engine = start(PrescribedGradients(SHAPES), config)
    train_step(engine, gradients_of(engine, 0))
    before = full_weights(engine)
    if frozen:
        for p in (engine.module.p0, engine.module.p2):
            p.requires_grad_(False)
    for step in range(1, 4):
        train_step(engine, [g * (i not in (0, 2)) for i, g in enumerate(gradients_of(engine, step))])
    assert is_bound(engine)
    after = full_weights(engine)
    return after, [name for name, w in after.items() if torch.equal(w, before[name])]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stage", [1, 2])
def test_what_is_frozen_later_is_stepped_as_with_zero_gradients(stage: int, optimizer: str) -> None:
    config = config_of(optimizer, stage=stage)
    (found, stayed), (zeros, _) = (run_ranks(2, freeze, config, frozen)[0] for frozen in (True, False))
    assert all(torch.equal(w, zeros[name]) for name, w in found.items())
    assert stayed == (["p0"] if optimizer == "DSMuon" else [])
