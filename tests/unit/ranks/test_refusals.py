"""What ``deepspeed.initialize`` refuses: with the key, the value and what to set instead, on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch
from torch import nn

from tests.unit.support.models import PrescribedGradients, ds_config, start
from tests.unit.support.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.ranks


def initialize(config: dict[str, Any], kind: str = "plain") -> None:
    from deepspeed.utils import groups

    rank = torch.distributed.get_rank()
    shapes: list[tuple[int, ...]] = [(8, 8), (8,)]
    kwargs: dict[str, Any] = {}
    if kind == "no matrix":
        shapes = [(8,), (4,)]
    elif kind == "other shapes on rank 1" and rank == 1:
        shapes = [(8, 8), (8, 4), (8,)]
    elif kind == "no matrix on rank 1" and rank == 1:
        shapes = [(8,)]
    model: nn.Module = PrescribedGradients(shapes)
    if kind == "tagged on rank 1" and rank == 1:
        model.p0.use_muon = False
        model.p1.use_muon = False
    elif kind == "tensor parallel":
        model.p0.tensor_model_parallel = True
    elif kind == "sparse":
        model = nn.Sequential(nn.Embedding(8, 8, sparse=True), nn.Linear(8, 8))
    elif kind == "foreign parameter":
        kwargs["model_parameters"] = [*model.parameters(), nn.Parameter(torch.ones(4, 4))]
    elif kind == "no tensor on rank 1" and rank == 1:
        kwargs["model_parameters"] = [{"params": 3}]
    elif kind == "other order on rank 1" and rank == 1:
        kwargs["model_parameters"] = list(model.parameters())[::-1]
        kwargs["model_parameters"] = [{"params": [p]} for p in kwargs["model_parameters"]]
    elif kind == "other group lr on rank 1":
        kwargs["model_parameters"] = [{"params": list(model.parameters()), "lr": 0.1 + rank}]
    elif kind == "one matrix less on rank 1":
        model = PrescribedGradients([(8, 8), (8, 4), (8,)])
        kwargs["model_parameters"] = list(model.parameters())[rank:]
    elif kind == "other layout on rank 1" and rank == 1:
        config["zero_optimization"]["round_robin_gradients"] = True
    elif kind == "other clipping on rank 1" and rank == 1:
        config["gradient_clipping"] = 0.5
    elif kind == "moe":
        from deepspeed.moe.layer import MoE

        model = nn.Sequential(nn.Linear(8, 8), MoE(8, nn.Linear(8, 8), num_experts=2, ep_size=1))
    elif kind == "pipeline":
        from deepspeed.pipe import PipelineModule

        model = PipelineModule([nn.Linear(8, 8), nn.Linear(8, 8)], num_stages=1, loss_fn=nn.MSELoss())
    elif kind == "mpu":
        kwargs["mpu"] = _Mpu()
    elif kind == "client optimizer":
        from ds_muon import DSMuon, DSMuonConfig
        from ds_muon.routing import route

        groups = [{"params": [model.p0], "use_muon": True, "momentum": 0.9, "nesterov": True}]
        kwargs["optimizer"] = DSMuon(groups, DSMuonConfig.parse({}), route(model))
    if kind == "other config on rank 1" and rank == 1:
        config["optimizer"]["params"]["ns_steps"] = 4
    if kind == "unknown key on rank 1" and rank == 1:
        config["optimizer"]["params"]["ns_step"] = 4
    try:
        with another_dtype() if kind == "other dtype on rank 1" and rank == 1 else nullcontext():
            start(model, config, **kwargs)
    finally:
        groups.mesh_device = groups.mpu = None


@contextmanager
def another_dtype() -> Iterator[None]:
    """As where "auto" finds other hardware."""
    from ds_muon import DSMuonConfig

    resolve = DSMuonConfig.newton_schulz

    def to_bfloat16(config: DSMuonConfig, device: torch.device) -> Any:
        return replace(resolve(config, device), dtype=torch.bfloat16)

    with patch.object(DSMuonConfig, "newton_schulz", to_bfloat16):
        yield


class _Mpu:
    """As Megatron's, with two tensor-parallel ranks."""

    def get_model_parallel_world_size(self) -> int:
        return 2

    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_model_parallel_rank(self) -> int:
        return int(torch.distributed.get_rank())

    get_tensor_model_parallel_rank = get_model_parallel_rank

    def get_data_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_group(self) -> Any:
        return None

    get_model_parallel_group = get_data_parallel_group
    get_tensor_model_parallel_group = get_data_parallel_group


CONFIGS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "reduce_scatter": (
        {"zero": {"reduce_scatter": True}},
        ["zero_optimization.reduce_scatter = true:", "set it to false"],
    ),
    "stage 0": ({"stage": 0}, ["zero_optimization.stage = 0", "set 1 or 2"]),
    "stage 3": ({"stage": 3}, ["zero_optimization.stage = 3", "set 1 or 2"]),
    "nvme offload": (
        {"zero": {"offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}},
        ["offload_optimizer.device = nvme", 'set "cpu"'],
    ),
    "offload of ZeRO-3": (
        {"zero": {"offload_optimizer": {"device": "cpu", "super_offload": True}}},
        ["offload_optimizer.super_offload = true", "remove super_offload"],
    ),
    "offload without norms": (
        {"zero": {"offload_optimizer": {"device": "cpu"}, "compute_grad_norm": False}},
        ["zero_optimization.compute_grad_norm = false", "remove"],
    ),
    "fp16 autocast": (
        {"torch_autocast": {"enabled": True, "dtype": "float16"}},
        ["torch_autocast.dtype = float16", "bfloat16"],
    ),
    "sequence parallel mesh": (
        {"sequence_parallel_size": 2, "data_parallel_size": 1},
        ["sequence_parallel_size = 2", "parallel_state_sp"],
    ),
    "a blank": (
        {"gradient_clipping": "auto"},
        ['gradient_clipping = "auto"', "it is not a number", "set one, such as"],
    ),
    "no clipping": ({"gradient_clipping": float("nan")}, ['gradient_clipping = "NaN"', "0 for none"]),
    "elastic checkpoint": ({"zero": {"elastic_checkpoint": True}}, ["elastic_checkpoint = true", "set it to false"]),
    "deepcompile": ({"compile": {"deepcompile": True}}, ["compile.deepcompile = true", "set it to false"]),
    "unknown key": ({"params": {"ns_step": 3}}, ["ns_step", "ns_steps"]),
    "auto": ({"params": {"lr": "auto"}}, ['lr = "auto"']),
    "range": ({"params": {"momentum": 1.5}}, ["momentum = 1.5"]),
    "triton on CPU": ({"params": {"ns_backend": "triton"}}, ['ns_backend = "triton"', "needs a GPU", '"torch"']),
    "beta2 without normuon": ({"params": {"beta2": 0.9}}, ["beta2 = 0.9", "has no effect", "normuon"]),
    "pattern": ({"params": {"muon_params": ["nothing.*"]}}, ["muon_params", "nothing.*"]),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_cannot_train_right_is_refused_on_every_rank(case: str) -> None:
    settings, fragments = CONFIGS[case]
    settings = dict(settings)
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, initialize, ds_config(settings.pop("params", {}), **settings))
    assert set(failure.value.errors) == {0, 1}
    for error in failure.value.errors.values():
        assert all(fragment in error for fragment in fragments), error


def test_everything_that_is_wrong_is_said_at_once_on_every_rank() -> None:
    params = {"lr": "x", "momentum": 2, "\ud800\n": 1, "ns_backend": "triton"}
    params |= {
        "muon_params": ["nothing.*", "p0", "none"],
        "no_decay_params": ["never"],
        "muon_blocks": {"missing": {"split": 2}},
    }
    config = ds_config(params, zero={"reduce_scatter": True}, compile={"deepcompile": True})
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, initialize, config)
    beginnings = (
        "ds_muon.refusals.DSMuonRefusal: DSMuon refuses this setup (ds-muon doctor",
        "zero_optimization.reduce_scatter = true",
        "compile.deepcompile = true",
        'optimizer.params.lr = "x"',
        "optimizer.params.momentum = 2",
        "optimizer.params.\\ud800\\n = 1",
        "ns_backend",
        "optimizer.params.muon_params: 'nothing.*' matches no parameter",
        "optimizer.params.muon_params: 'none' matches no parameter",
        "optimizer.params.no_decay_params: 'never' matches no parameter",
        "optimizer.params.muon_blocks: 'missing' matches no parameter",
    )
    for error in failure.value.errors.values():
        lines = error.splitlines()[-len(beginnings) :]
        assert all(beginning in line for line, beginning in zip(lines, beginnings, strict=True)), error


@pytest.mark.parametrize("kind", ["lone surrogate", "nested", "huge", "lr"])
def test_what_no_setting_can_be_is_refused_in_words_on_every_rank(kind: str) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, initialize_with, kind)
    assert set(failure.value.errors) == {0, 1}
    assert all("DSMuonConfigError: optimizer.params." in error for error in failure.value.errors.values())


def initialize_with(kind: str) -> None:
    # Made here: a value nested so deep can be neither sent nor copied.
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    values = {"lone surrogate": {"\ud800": 1}, "nested": {"betas": deep}, "huge": {"lr": 10**5000}, "lr": {"lr": 1e39}}
    deepspeed.initialize(model=PrescribedGradients([(8, 8)]), config=ds_config(values[kind]))


def test_an_absent_reduce_scatter_is_refused_as_deepspeeds_default() -> None:
    config = ds_config()
    del config["zero_optimization"]["reduce_scatter"]
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, initialize, config)
    assert all("default when the key is absent" in error for error in failure.value.errors.values())


MODELS = {
    "no matrix": "AdamW",
    "no matrix on rank 1": "no trainable matrix for Muon",
    "other shapes on rank 1": "ranks [1] have other parameters",
    "tagged on rank 1": "no trainable matrix for Muon",
    "other config on rank 1": "ranks [1] have other",
    "unknown key on rank 1": "ns_steps",
    "no tensor on rank 1": "TypeError",
    "other order on rank 1": "ranks [1] have other",
    "other group lr on rank 1": "ranks [1] have other",
    "one matrix less on rank 1": "ranks [1] have other",
    "other layout on rank 1": "ranks [1] have other",
    "other clipping on rank 1": "ranks [1] have other",
    "other dtype on rank 1": "rank 1 would run Newton-Schulz by torch in torch.bfloat16, rank 0 by torch in",
    "tensor parallel": "tensor-parallel weights (p0)",
    "foreign parameter": "not a parameter of the model",
    "moe": "reduce_scatter: true",
    "pipeline": "PipelineModule",
    "mpu": "model-parallel world size = 2",
    "client optimizer": '"type": "DSMuon"',
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_cannot_train_right_is_refused_on_every_rank(kind: str) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, initialize, ds_config(), kind)
    assert set(failure.value.errors) == {0, 1}
    for error in failure.value.errors.values():
        assert MODELS[kind] in error, error


def test_a_sparse_embedding_forced_to_muon_is_refused() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, initialize, ds_config({"muon_params": ["0.weight"]}), "sparse")
    assert all("sparse" in error for error in failure.value.errors.values())


def test_the_plain_case_is_not_refused() -> None:
    run_ranks(2, initialize, ds_config())
