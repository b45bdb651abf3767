"""The plan of an engine: from where its DeepSpeed has put the weights, checked against where ds_muon expects them."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import torch.distributed as dist
from deepspeed.runtime.zero import stage_1_and_2 as deepspeed_zero

from ds_muon.agree import alike
from ds_muon.exchange import element_bytes
from ds_muon.making import making
from ds_muon.orthogonalize import NewtonSchulz
from ds_muon.plan.partition import Plan, make_plan
from ds_muon.plan.rates import RATES
from ds_muon.plan.zero_layout import FlatLayout, flat_layout
from ds_muon.refusals import SUPPORTED_DEEPSPEED

if TYPE_CHECKING:
    from ds_muon.zero_base import MuonZeroBase


def plan_of(zero: MuonZeroBase, newton_schulz: NewtonSchulz) -> Plan:
    """The plan of all Muon param groups, which are the first ones. A collective.

    Raises:
        RuntimeError: this DeepSpeed lays out a group in another way.
    """
    optimizer, process_group = zero.optimizer, zero.dp_process_group
    groups = [i for i, group in enumerate(optimizer.param_groups) if group["use_muon"]]
    # With CPU offload a matrix would travel over the bus as well, and take memory of the accelerator.
    least_gain = 1.0 if zero.cpu_offload else RATES.least_gain
    return make_plan(
        [zero.shapes(i) for i in groups],
        [_layout(zero, i) for i in groups],
        dist.get_world_size(process_group),
        newton_schulz.cost,
        rates=replace(RATES, ranks_per_node=_ranks_per_node(process_group), least_gain=least_gain),
        element_bytes=element_bytes(newton_schulz, normuon=optimizer.config.variant == "normuon"),
        stored=optimizer.routing.layouts(),
        pieces=optimizer.routing.pieces(),
    )


def _layout(zero: MuonZeroBase, i: int) -> FlatLayout:
    params = zero.bit16_groups[i]
    layout = flat_layout(
        [p.numel() for p in params],
        dist.get_world_size(zero.dp_process_group),
        element_size=params[0].element_size(),
        parameter_alignment=zero.parameter_alignment,
        round_robin=zero.round_robin_gradients,
    )
    flat_order = zip(zero.round_robin_bit16_groups[i], layout.order, strict=True)
    if (
        any(p is not params[k] for p, k in flat_order)
        or tuple(zero.round_robin_bit16_offsets[i]) != layout.offsets
        or zero.partition_size[i] != layout.partition_size
    ):
        raise RuntimeError(
            f"this DeepSpeed ({deepspeed_zero.version}) does not lay out param group {i} as ds_muon expects; "
            f"install deepspeed {SUPPORTED_DEEPSPEED}"
        )
    return layout


def _ranks_per_node(process_group: dist.ProcessGroup) -> int:
    """As the launcher says; 0 if it does not, or nodes differ. A collective."""
    said = (os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"))
    here = next((int(number) for number in said if number.isdecimal()), 0)
    with making.together():
        same = alike(str(here), process_group)
    return here if same and dist.get_world_size(process_group) == dist.get_world_size() else 0
