"""torch's default dtype and device are the script's: nothing here depends on them."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import ds_muon
from tests.unit.support.defaults import defaults
from tests.unit.support.faulty import faulty_backend, sick
from tests.unit.support.models import PrescribedGradients, ds_config, full_weights, start, train_step
from tests.unit.support.ranks import run_ranks
from tests.unit.support.steps import exact_gradients, state_of

SHAPES = [(16, 16), (24, 7), (5,), (7, 24)]
NORMUON = {"variant": "normuon", "momentum_dtype": "bfloat16"}

DEFAULTS: list[tuple[torch.dtype | None, str | None]] = [(torch.float64, None), (torch.bfloat16, "meta")]

RUNS: dict[str, dict[str, Any]] = {
    "muon": {"stage": 1},
    "normuon": {"params": NORMUON, "dtype": "bfloat16"},
    "normuon, skipped step": {"params": {**NORMUON, "nan_guard": "skip"}},
    "skipped step": {"params": {"nan_guard": "skip", "ns_method": "standard"}, "stage": 1, "dtype": "float16"},
    "checked": {"params": {"verify_every": 1, "clip_norm_scope": "all"}, "gradient_clipping": 0.1},
    "checked normuon": {"params": {"variant": "normuon", "verify_every": 1}, "stage": 1},
}


def train(config: dict[str, Any], folder: str, dtype: torch.dtype | None, device: str | None) -> dict[str, Any]:
    """Three steps, the second with a NaN from Newton-Schulz where there is a guard; saved, and loaded again."""
    model, guarded = PrescribedGradients(SHAPES), config["optimizer"]["params"].get("nan_guard") == "skip"
    capture = {"DS_MUON_NAN_CAPTURE": "1", "DS_MUON_NAN_CAPTURE_DIR": folder, "DS_MUON_NAN_CAPTURE_RAISE": "0"}
    with (
        mock.patch.dict("os.environ", capture),
        mock.patch("ds_muon.verify.in_training.log") as log,
        defaults(dtype, device),
    ):
        engine = start(model, config)
        with faulty_backend(engine):
            for step in range(3):
                with defaults(None, None):
                    gradients = exact_gradients(SHAPES, step, engine.device)
                with sick((24, 7) if guarded and step == 1 else None):
                    train_step(engine, gradients)
        engine.save_checkpoint(f"{folder}/checkpoint")
        engine.load_checkpoint(f"{folder}/checkpoint")
        norm = engine.get_global_grad_norm()
    found = {"weights": [*full_weights(engine).values()], "state": state_of(engine), "norm": [norm.cpu()]}
    # A check that fails, or finds an error, logs it.
    found["said"] = [[str(call.args[0]) for call in log.call_args_list], engine.skipped_steps]
    engine.destroy()
    return found


def train_under_all(config: dict[str, Any], folder: str) -> list[dict[str, Any]]:
    return [train(config, folder, *default) for default in [(None, None), *DEFAULTS]]


@pytest.mark.ranks
@pytest.mark.parametrize("name", RUNS)
def test_a_run_does_not_depend_on_the_default_dtype_and_device(name: str, tmp_path: Path) -> None:
    skips = "skipped step" in name
    for usual, *others in run_ranks(2, train_under_all, ds_config(**RUNS[name]), str(tmp_path)):
        assert usual["said"] == [[], int(skips)]
        for found in others:
            assert found["said"] == usual["said"]
            for key in ("weights", "state", "norm"):
                for a, b in zip(found[key], usual[key], strict=True):
                    assert torch.equal(a, b) and a.dtype == b.dtype, key
    # Two matrices have the sides of the one that came out with a NaN.
    assert len(list(tmp_path.glob("*.pt"))) == (2 * (1 + len(DEFAULTS)) if skips else 0)


@pytest.mark.parametrize("default", DEFAULTS)
def test_functions_do_not_depend_on_the_default_dtype_and_device(default: tuple[Any, Any]) -> None:
    gradient = torch.randn(24, 7, generator=torch.Generator().manual_seed(0))

    def results() -> list[Tensor]:
        momentum_buffer, row_variance = torch.zeros_like(gradient), gradient[:, 0].square()
        update = ds_muon.muon_update(gradient, momentum_buffer, row_variance=row_variance)
        return [update, momentum_buffer, row_variance, ds_muon.reference_newton_schulz(gradient.double())]

    usual = results()
    with defaults(*default):
        found = results()
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, usual, strict=True))


# What torch would take from the defaults if a call did not say it.
OPEN = {
    **dict.fromkeys(
        ("empty", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros"), ("dtype", "device")
    ),
    **dict.fromkeys(("arange", "randint", "randperm"), ("device",)),
}


def test_every_tensor_is_made_with_a_dtype_and_a_device() -> None:
    missing = []
    for path in sorted(Path(ds_muon.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch."):
                said = {keyword.arg for keyword in node.keywords}
                left_out = [what for what in OPEN.get(ast.unparse(node.func)[6:], ()) if what not in said]
                if left_out:
                    missing.append(f"{path.name}:{node.lineno} {ast.unparse(node)} without {left_out}")
    assert not missing, "\n".join(missing)
