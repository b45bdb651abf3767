"""Steps in which the rank that owns a matrix gets a NaN from Newton-Schulz, and what they leave behind."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from ds_muon.skipped import NonFiniteUpdate
from tests.unit.support.faulty import faulty_backend, sick
from tests.unit.support.models import PrescribedGradients, full_weights, start, train_step
from tests.unit.support.steps import exact_gradients, state_by_key

# Two param groups. In the first, one matrix straddles at 2, 3 and 4 ranks, and one lies whole on a rank at each. The
# second has 6 elements: at 4 ranks one holds nothing but padding of it.
SHAPES = [(30, 20), (8, 8), (20, 36), (5,), (2, 3), (4,)]
STRADDLING, WHOLE, TINY = (30, 20), (8, 8), (2, 3)
CASES = [(2, STRADDLING), (2, WHOLE), (3, STRADDLING), (3, TINY), (4, STRADDLING), (4, WHOLE), (4, TINY)]


def engine_of(config: dict[str, Any]) -> Any:
    model = PrescribedGradients(SHAPES)
    parameters = list(model.parameters())
    groups = [{"params": parameters[:4]}, {"params": parameters[4:]}]
    scheduler = lambda optimizer: LambdaLR(optimizer, lambda step: 0.5**step)  # noqa: E731
    return start(model, config, model_parameters=groups, lr_scheduler=scheduler)


def bad_second_step(config: dict[str, Any], shape: tuple[int, int]) -> dict[str, Any]:
    """A good step, then one in which the rank that owns the matrix of ``shape`` gets a NaN."""
    engine = engine_of(config)
    found: dict[str, Any] = {}
    with faulty_backend(engine):
        train_step(engine, exact_gradients(SHAPES, 0, engine.device))
        before, state = full_weights(engine), state_by_key(engine)
        rates, scale = engine.get_lr(), engine.optimizer.loss_scale
        with sick(shape), mock.patch("ds_muon.skipped.log") as warning:
            try:
                train_step(engine, exact_gradients(SHAPES, 1, engine.device))
            except NonFiniteUpdate as error:
                found["raised"] = str(error)
        after, state_after = full_weights(engine), state_by_key(engine)
        found |= {
            "weights stayed": all(torch.equal(before[name], after[name]) for name in before),
            "model stayed": model_matches(engine, before),
            "finite": all(weight.isfinite().all() for weight in after.values()),
            "skipped": engine.skipped_steps,
            "rates stayed": rates == engine.get_lr(),
            "scale stayed": scale == engine.optimizer.loss_scale,
            "norm": float(engine.get_global_grad_norm() or 0.0),
            "warnings": [call.args[0] for call in warning.call_args_list],
            "moved": {key for (i, key), tensor in state_after.items() if not torch.equal(tensor, state[i, key])},
        }
    engine.destroy()
    return found


def model_matches(engine: Any, weights: dict[str, Tensor]) -> bool:
    return all(torch.equal(p.detach().cpu(), weights[n].to(p.dtype)) for n, p in engine.module.named_parameters())
