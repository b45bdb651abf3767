"""What a script does around the engine, beside DeepSpeed's AdamW: the table of ``docs/around-the-engine.md``.

Most of it must not change a single bit of the training. Every row runs with both optimizers, so that what is said of
AdamW is seen, too.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
)
from torch import Tensor, nn

from ds_muon import DSMuon
from ds_muon.refusals import NO_GRADIENTS
from tests.unit.support.models import PrescribedGradients, ds_config, full_weights, start, train_step
from tests.unit.support.ranks import DEVICE, run_ranks
from tests.unit.support.steps import exact_gradients

pytestmark = pytest.mark.ranks

SHAPES = [(16, 16), (24, 7), (5,), (7, 24)]
OPTIMIZERS = ["DSMuon", "AdamW"]

Around = Callable[[Any], None]


def config_of(optimizer: str, **settings: Any) -> dict[str, Any]:
    config = ds_config(**settings)
    if optimizer == "AdamW":
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    return config


def gradients_of(engine: Any, step: int) -> list[Tensor]:
    return exact_gradients(SHAPES, step, engine.device)


def model_of(engine: Any) -> dict[str, Tensor]:
    return {name: p.detach().cpu().clone() for name, p in engine.module.named_parameters()}


def is_bound(engine: Any) -> bool:
    """Whether every parameter lies in the flat weights, and holds what the fp32 weights round to."""
    zero, weights = engine.optimizer, full_weights(engine)
    flat = {f.untyped_storage().data_ptr() for f in zero.bit16_groups_flat}
    return all(
        p.untyped_storage().data_ptr() in flat and torch.equal(p.detach().cpu(), weights[name].to(p.dtype))
        for name, p in engine.module.named_parameters()
    )


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
    for p, weight in zip(engine.module.parameters(), weights, strict=True):
        p.data = weight


def through_the_host(engine: Any) -> None:
    engine.module.cpu().to(engine.device)


STORAGE: dict[str, Around] = {
    "clones": clones,
    "transposed": transposed,
    "through another dtype": through_another_dtype,
    "average in and out": average_in_and_out,
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


# ---- states that are offloaded --------------------------------------------------------------------------------------


def offload_and_reload(config: dict[str, Any], offload: bool) -> dict[str, Any]:
    engine = start(PrescribedGradients(SHAPES), config)
    train_step(engine, gradients_of(engine, 0))
    if offload:
        away(engine)
        engine.reload_states()
    found: dict[str, Any] = {}
    links = [p._hp_mapping for p in engine.module.parameters() if p._hp_mapping is not None]
    found["linked"] = all(link.optim_fragment is not None for link in links)
    if isinstance(engine.optimizer.optimizer, DSMuon):
        found["state"] = safe_get_full_optimizer_state(engine.module.p0, "momentum_buffer").cpu()
    train_step(engine, gradients_of(engine, 1))
    return {**found, "weights": full_weights(engine), "bound": is_bound(engine)}


def away(engine: Any, **which: Any) -> None:
    # DeepSpeed looks for garbage three times, which takes seconds beside all that the tests have imported.
    with mock.patch("gc.collect"):
        engine.offload_states(pin_memory=False, **which)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_states_that_were_away_change_nothing(optimizer: str) -> None:
    config = config_of(optimizer, dtype="bfloat16")
    stayed, returned = (run_ranks(2, offload_and_reload, config, offload)[0] for offload in (False, True))
    assert returned["bound"]
    assert all(torch.equal(w, returned["weights"][name]) for name, w in stayed["weights"].items())
    # What safe_get_full_optimizer_state reads.
    assert stayed["linked"] and returned["linked"] == (optimizer == "DSMuon")
    assert optimizer == "AdamW" or torch.equal(stayed["state"], returned["state"])


# ---- what is refused ------------------------------------------------------------------------------------------------


def error_of(do: Callable[[], object]) -> str:
    try:
        do()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def misuse(config: dict[str, Any]) -> dict[str, str]:
    """Errors of what cannot be right, each followed by a step that must be."""
    found: dict[str, str] = {}
    model = PrescribedGradients(SHAPES)
    model.p3.requires_grad_(False)
    engine = start(model, config)
    new = nn.Parameter(torch.ones(4, 4))

    def step(number: int) -> None:
        train_step(engine, gradients_of(engine, number))

    found["step before backward"] = error_of(engine.step)
    found["optimizer.step() before backward"] = error_of(engine.optimizer.step)
    step(0)
    found["a second step"] = error_of(engine.step)
    found["the inner optimizer's step"] = error_of(engine.optimizer.optimizer.step)
    found["add_param_group"] = error_of(lambda: engine.optimizer.add_param_group({"params": [new]}))
    if isinstance(engine.optimizer.optimizer, DSMuon):  # AdamW takes it, and cannot step any more
        found["the inner add_param_group"] = error_of(
            lambda: engine.optimizer.optimizer.add_param_group({"params": [new]})
        )
    engine.backward(engine(gradients_of(engine, 1)))
    away(engine, include=[OffloadStateTypeEnum.lp_params])
    found["step while away"] = error_of(engine.step)
    engine.reload_states()
    if found["step while away"].startswith("DSMuonRefusal"):
        engine.step()
    else:
        step(1)
    model.p3.requires_grad_(True)
    found["unfrozen"] = error_of(lambda: step(2))
    model.p3.requires_grad_(False)
    model.p3.grad = None
    found["in the end"] = error_of(lambda: step(2))
    return found


def thaw_on_one_rank(config: dict[str, Any]) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    """What is wrong on the last rank alone stops all of them, and moves nothing; the next step is good again."""
    model = PrescribedGradients(SHAPES)
    model.p3.requires_grad_(False)
    engine = start(model, config)
    before = full_weights(engine)
    model.p3.requires_grad_(torch.distributed.get_rank() == torch.distributed.get_world_size() - 1)
    error = error_of(lambda: train_step(engine, gradients_of(engine, 0)))
    assert not engine.optimizer.optimizer.momentum_buffer(0).any()
    unmoved = full_weights(engine)
    model.p3.requires_grad_(False)
    model.p3.grad = None
    train_step(engine, gradients_of(engine, 1))
    assert all(not torch.equal(new, before[name]) for name, new in full_weights(engine).items())
    return error, before, unmoved


@pytest.mark.parametrize("nan_guard", ["off", "skip"])
def test_what_one_rank_alone_refuses_stops_all_before_anything_moves(nan_guard: str) -> None:
    for error, before, unmoved in run_ranks(2, thaw_on_one_rank, ds_config({"nan_guard": nan_guard}), timeout=60.0):
        assert "p3 was frozen at deepspeed.initialize" in error
        assert before.keys() == unmoved.keys() and all(torch.equal(unmoved[name], before[name]) for name in before)


def test_misuse_is_refused_with_the_remedy_on_every_rank_and_a_good_step_follows() -> None:
    first, second = run_ranks(2, misuse, ds_config())
    assert first == second
    nothing = f"DSMuonRefusal: {NO_GRADIENTS}"
    assert [
        first.pop(key) for key in ("step before backward", "optimizer.step() before backward", "a second step")
    ] == [nothing] * 3
    assert "call engine.step()" in first.pop("the inner optimizer's step")
    assert "all parameters that are ever to train" in first["add_param_group"]
    assert first.pop("add_param_group") == first.pop("the inner add_param_group")
    assert "call engine.reload_states() first" in first.pop("step while away")
    assert "p3 was frozen at deepspeed.initialize" in first["unfrozen"] and "before initialize" in first.pop("unfrozen")
    assert first == {"in the end": "no error"}


def test_adamw_does_no_better_with_misuse() -> None:
    found = run_ranks(2, misuse, config_of("AdamW"))[0]
    for key in ("step before backward", "optimizer.step() before backward"):
        assert found[key] == "KeyError: 0"
    assert found["a second step"].startswith("TypeError: 'NoneType'")
    assert found["step while away"].startswith("IndexError: list index")
    assert found["add_param_group"].startswith("AttributeError")
    # Nothing is said of what changes nothing.
    assert found["the inner optimizer's step"] == found["unfrozen"] == "no error"


def add_to_the_inner_optimizer(config: dict[str, Any]) -> list[str]:
    engine = start(PrescribedGradients(SHAPES), config)
    new = nn.Parameter(torch.ones(4, 4, device=engine.device))
    adding = error_of(lambda: engine.optimizer.optimizer.add_param_group({"params": [new]}))
    return [adding, error_of(lambda: train_step(engine, gradients_of(engine, 0)))]


def test_adamw_takes_a_param_group_that_ends_its_next_step() -> None:
    found = run_ranks(2, add_to_the_inner_optimizer, config_of("AdamW"))
    assert found == [["no error", "IndexError: list index out of range"]] * 2


def step_before_backward(config: dict[str, Any]) -> str:
    return error_of(start(PrescribedGradients(SHAPES), config).step)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_before_backward_is_refused_where_the_script_accumulates_by_itself(stage: int) -> None:
    config = ds_config(stage=stage, managed_gradient_accumulation=False)
    assert run_ranks(2, step_before_backward, config) == [f"DSMuonRefusal: {NO_GRADIENTS}"] * 2


def cycle_momentum(config: dict[str, Any]) -> tuple[str, bool]:
    engine = start(PrescribedGradients(SHAPES), config)
    train_step(engine, gradients_of(engine, 0))
    before = full_weights(engine)
    engine.optimizer.param_groups[0]["momentum"] = 0.999
    error = error_of(lambda: train_step(engine, gradients_of(engine, 1)))
    unmoved = all(torch.equal(w, before[name]) for name, w in full_weights(engine).items())
    engine.optimizer.param_groups[0]["momentum"] = 0.9
    train_step(engine, gradients_of(engine, 1))
    return error, unmoved and is_bound(engine)


def test_a_scheduler_that_cycles_bf16_momentum_too_high_is_stopped_before_anything_moves() -> None:
    for error, unmoved_and_well_after in run_ranks(2, cycle_momentum, ds_config({"momentum_dtype": "bfloat16"})):
        assert "param group 'muon' has momentum = 0.999" in error and 'set momentum_dtype to "float32"' in error
        assert unmoved_and_well_after


@pytest.mark.parametrize("arguments", [{"lr": 0.02}, {}, {"config": 0.02}])
def test_an_optimizer_made_by_hand_is_refused_with_the_config_entry(arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r'set "optimizer": \{"type": "DSMuon"'):
        DSMuon(nn.Linear(4, 4).parameters(), **arguments)  # type: ignore[arg-type]


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


def accumulate(config: dict[str, Any], micro_batches: int, factor: float) -> dict[str, Tensor]:
    """Two steps, each of some micro-batches, or of one whose gradients are ``factor`` times the sum of theirs."""
    engine = start(PrescribedGradients(SHAPES), config)
    managed = config.get("managed_gradient_accumulation", True)
    for step in range(2):
        batches = [gradients_of(engine, 10 * step + i) for i in range(2)]
        if micro_batches == 1:
            batches = [[factor * sum(gs) for gs in zip(*batches, strict=True)]]  # type: ignore[misc]
        for gradients in batches:
            engine.backward(engine(gradients))
            if managed:
                engine.step()
        if not managed:
            engine.step()
    assert is_bound(engine)
    return full_weights(engine)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("managed", [True, False])
def test_several_backwards_make_one_step(managed: bool, stage: int, optimizer: str) -> None:
    how = {"gradient_accumulation_steps": 2} if managed else {"managed_gradient_accumulation": False}
    found = run_ranks(2, accumulate, config_of(optimizer, stage=stage, **how), 2, 1.0)[0]
    at_once = run_ranks(2, accumulate, config_of(optimizer, stage=stage), 1, 0.5 if managed else 1.0)[0]
    assert all(torch.equal(w, at_once[name]) for name, w in found.items())


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
