"""Models and training loops that tests run on ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from ds_muon.orthogonalize import NewtonSchulz

Shapes = Sequence[tuple[int, ...]]


class PrescribedGradients(nn.Module):
    """Parameters whose gradients are exactly what ``forward`` is given: the loss is the sum of ``p * g``.

    Parameters are named ``p0``, ``p1``, ... by their place in ``shapes``.
    """

    def __init__(self, shapes: Shapes, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for index, shape in enumerate(shapes):
            self.register_parameter(f"p{index}", nn.Parameter(0.1 * torch.randn(shape, generator=generator)))

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.parameters(), gradients, strict=True)]).sum()


class Block(nn.Module):
    """A small network with every kind of parameter: embedding, matrices, biases, norms, output head."""

    def __init__(self, vocabulary: int = 40, width: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.square = nn.Linear(width, width)
        self.tall = nn.Linear(width, 2 * width)
        self.wide = nn.Linear(2 * width, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        h = self.norm(self.embedding(tokens))
        h = h + self.square(h)
        h = h + self.wide(torch.relu(self.tall(h)))
        return nn.functional.cross_entropy(self.lm_head(h).float().flatten(0, 1), targets.flatten())


def ds_config(
    params: Mapping[str, Any] | None = None, *, dtype: str = "float32", stage: int = 2, zero: Any = None, **top: Any
) -> dict[str, Any]:
    """A DeepSpeed config with DSMuon; ``zero`` and ``top`` add to or replace its sections."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "DSMuon", "params": {"lr": 0.02, "adam_lr": 1e-3, **(params or {})}},
        "zero_optimization": {"stage": stage, "reduce_scatter": False, **(zero or {})},
    }
    if dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
    if dtype == "float16":
        config["fp16"] = {"enabled": True, "loss_scale": 1.0}
    config.update(top)
    return {key: value for key, value in config.items() if value is not None}


def start(model: nn.Module, config: dict[str, Any], **kwargs: Any) -> Any:
    """``deepspeed.initialize`` on a copy of the config; returns the engine."""
    accelerator = get_accelerator()
    if "fp16" in config and not accelerator.is_fp16_supported():
        # torch's CPU kernels have fp16; DeepSpeed asks for hardware that is fast at it.
        accelerator.is_fp16_supported = lambda: True
    engine, *_ = deepspeed.initialize(model=model, config=copy.deepcopy(config), **kwargs)
    return engine


def start_groups(shapes: Shapes, config: dict[str, Any], groups: int = 1) -> Any:
    """An engine for ``PrescribedGradients`` in one param group, or in two that take turns."""
    model = PrescribedGradients(shapes)
    parameters = list(model.parameters())
    dealt = [{"params": parameters[first::groups]} for first in range(groups)]
    return start(model, config, model_parameters=parameters if groups == 1 else dealt)


def train_step(engine: Any, *inputs: Any) -> None:
    """Forward, backward and step on one micro-batch."""
    engine.backward(engine(*inputs))
    engine.step()


def change_newton_schulz(engine: Any, **changes: Any) -> NewtonSchulz:
    """Give the engine another iteration, such as a backend of the test's own, and return it."""
    zero = engine.optimizer
    zero.newton_schulz = settings = replace(zero.newton_schulz, **changes)
    for group in zero.muon_groups:
        group._settings = settings
    return settings


def full_weights(engine: Any) -> dict[str, Tensor]:
    """The fp32 weights of every parameter by name, assembled from all partitions, on CPU."""
    return assembled(engine, engine.optimizer.single_partition_of_fp32_groups)


def full_momentum(engine: Any) -> dict[str, Tensor]:
    """Muon's momentum of every matrix by name, assembled from all partitions, on CPU."""
    zero = engine.optimizer
    return assembled(engine, [zero.optimizer.momentum_buffer(i) for i in range(len(zero.muon_groups))])


def variances(engine: Any) -> dict[str, Tensor]:
    zero = engine.optimizer
    return {
        matrix.name: group.row_variance.of(zero.optimizer.row_variance(i), matrix.name).cpu()
        for i, (group, plan) in enumerate(zip(zero.muon_groups, zero.plan.groups, strict=True))
        for matrix in plan.matrices
    }


def assembled(engine: Any, flats: Sequence[Tensor]) -> dict[str, Tensor]:
    """What partitions of the first param groups hold of every parameter, by name, on CPU."""
    zero = engine.optimizer
    whole = {}
    for group, flat in enumerate(flats):
        here = flat.detach().to(engine.device)
        pieces = [torch.empty_like(here) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(pieces, here)
        joined = torch.cat(pieces).cpu()
        offsets = zero.round_robin_bit16_offsets[group]
        for p, offset in zip(zero.round_robin_bit16_groups[group], offsets, strict=True):
            whole[zero.param_names[p]] = joined[offset : offset + p.numel()].view(p.shape).clone()
    return dict(sorted(whole.items()))


@contextmanager
def sequence_parallel(size: int) -> Iterator[Any]:
    """Within this context groups of ``size`` ranks share a sequence. Yields the mpu for ``deepspeed.initialize``."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.utils import groups

    # Ranks live on from test to test.
    parallel_state_sp._SEQUENCE_PARALLEL_GROUP = parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None
    parallel_state_sp.initialize_sequence_parallel(size)
    try:
        yield parallel_state_sp
    finally:
        groups.mpu = None


class Sometimes(PrescribedGradients):
    """Parameters whose gradient is None are left out of the loss."""

    def forward(self, gradients: Sequence[Tensor | None]) -> Tensor:
        used = [(p * g).sum() for p, g in zip(self.parameters(), gradients, strict=True) if g is not None]
        return torch.stack(used).sum()
