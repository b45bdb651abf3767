"""Whether, after loading, all ranks hold the same weights, and the fp32 ones round to those of the model.

Ranks read weights and shards from files. Where one reads another file than the rest, each step would take its partition
from a model of its own, and nothing would say so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_muon.agree import gather
from ds_muon.dtypes import name_of

_CHUNK = 2**24
_INTEGERS = {1: torch.int8, 2: torch.int16}


@torch.no_grad()
def check_same_weights(zero: Any, module: nn.Module) -> None:
    """Compare all parameters of the model, frozen ones as well, to the last bit. A collective; blocks the host.

    Args:
        zero: the ZeRO optimizer, whose parameters are bound to its flat weights.
        module: the engine's.

    Raises:
        ValueError: on every rank, with the first parameter at fault. What has been loaded stays.
    """
    # Those of a type of their own, such as quantized and frozen ones, have no bits to look at.
    named = {name: p for name, p in module.named_parameters() if type(p.detach()) is Tensor and not p.is_meta}
    sums = torch.stack([checksum(p.detach()).to(zero.accelerator) for p in named.values()])
    index = {name: i for i, name in enumerate(named)}
    strays = torch.zeros_like(sums)
    for name, weight, fp32 in _own(zero):
        strays[index[name]] += _differ(weight, fp32.to(weight.device, weight.dtype)).to(zero.accelerator)
    # The largest and, negated, the smallest sum of all ranks, and the most elements that differ on one of them.
    found = torch.cat([sums, -sums, strays])
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=zero.dp_process_group)
    largest, smallest, most = torch.split(found.cpu(), len(named))
    problem = ""
    for i, name in enumerate(named):
        if largest[i] != -smallest[i]:
            theirs = gather(int(sums[i]), zero.dp_process_group)
            rank = next(rank for rank, value in enumerate(theirs) if value != theirs[0])
            problem = f"{name!r} has other values on rank {rank} than on rank 0: give every rank the same files"
            break
        if most[i]:
            problem = (
                f"{name!r} is not what its fp32 weights are in {name_of(named[name].dtype)}: the file of the weights "
                "has other values than the shards. A script may have written into one of them before it saved. To go "
                "on from the model's weights, set zero_optimization.load_from_fp32_weights = false"
            )
            break
    if problem:
        raise ValueError(f"after loading, {problem}. Do not train on: load again, or another checkpoint")


def checksum(tensor: Tensor) -> Tensor:
    """A number below 2^62 that depends on every bit of the tensor and on its place: 0-d int64, on the same device.

    A change of one element always changes it.
    """
    flat = tensor.reshape(-1)
    flat = flat.view(_INTEGERS.get(flat.element_size(), torch.int32))
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        bits = flat[start : start + _CHUNK].long()
        # Odd factors, of which none takes a bit away modulo 2^62.
        total += bits.mul_(torch.arange(2 * start + 1, 2 * (start + len(bits)) + 1, 2, device=flat.device)).sum()
    return total & (2**62 - 1)


def _own(zero: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Of every parameter that this rank holds a slice of: its name, the slice in the model, and the fp32 one."""
    groups = zip(
        zero.round_robin_bit16_groups,
        zero.round_robin_bit16_offsets,
        zero.partition_size,
        zero.single_partition_of_fp32_groups,
        zero.real_dp_process_group,
        strict=True,
    )
    for params, offsets, size, fp32, group in groups:
        first = dist.get_rank(group) * size
        for p, offset in zip(params, offsets, strict=True):
            start, end = max(offset, first), min(offset + p.numel(), first + size)
            if start < end:
                weight = p.detach().reshape(-1)[start - offset : end - offset]
                yield zero.param_names[p], weight, fp32.detach()[start - first : end - first]


def _differ(left: Tensor, right: Tensor) -> Tensor:
    """How many elements have other bits, those that are no number on both sides apart: their bits mean nothing."""
    bits = [tensor.view(_INTEGERS.get(tensor.element_size(), torch.int32)) for tensor in (left, right)]
    return ((bits[0] != bits[1]) & ~(left.isnan() & right.isnan())).sum()
