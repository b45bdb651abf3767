"""DeepSpeed's own Muon beside DSMuon: what each applies where a config, a scale or a partition boundary interferes.

    deepspeed --num_accelerators 2 scripts/compare_muon.py              # GPUs
    TORCHDYNAMO_DISABLE=1 DS_ACCELERATOR=cpu deepspeed --num_accelerators 2 scripts/compare_muon.py

Every model here has prescribed gradients, so that the right update is known: -lr * s * O of the averaged gradient, by
the fp64 reference. Prints a table; see docs/measured.md for what it showed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any
from unittest import mock

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.muon import original_muon
from torch import Tensor, nn

import ds_muon
from ds_muon import muon_group
from ds_muon.update import update_scale

LR = 0.02
OPTIMIZERS = ("Muon", "DSMuon")


class PrescribedGradients(nn.Module):
    """Matrices whose gradients are what ``forward`` is given."""

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrices = nn.ParameterList(nn.Parameter(0.02 * torch.randn(shape)) for shape in shapes)

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        return torch.stack([(p.float() * g).sum() for p, g in zip(self.matrices, gradients, strict=True)]).sum()


def start(optimizer: str, shapes: Sequence[tuple[int, int]], **config: Any) -> Any:
    engine, *_ = deepspeed.initialize(
        model=PrescribedGradients(shapes),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": optimizer, "params": {"lr": LR, "momentum": 0.95}},
            "zero_optimization": {"stage": 2, "reduce_scatter": False},
            **config,
        },
    )
    return engine


def gradients_of(shapes: Sequence[tuple[int, int]], device: torch.device, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [scale * torch.randn(shape, generator=generator).to(device) for shape in shapes]


def full_weights(engine: Any) -> list[Tensor]:
    """Every matrix in fp32, from all partitions, in the model's order."""
    zero = engine.optimizer
    found: dict[int, Tensor] = {}
    for group, flat in enumerate(zero.single_partition_of_fp32_groups):
        pieces = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        torch.distributed.all_gather(pieces, flat.detach())
        joined, offsets = torch.cat(pieces), zero.round_robin_bit16_offsets[group]
        for p, offset in zip(zero.round_robin_bit16_groups[group], offsets, strict=True):
            found[id(p)] = joined[offset : offset + p.numel()].view(p.shape).double()
    return [found[id(p)] for p in engine.module.matrices]


def changes(optimizer: str, shapes: Sequence[tuple[int, int]], scale: float = 1.0, **config: Any) -> list[Tensor]:
    """What one step changes in each matrix."""
    engine = start(optimizer, shapes, **config)
    before = full_weights(engine)
    engine.backward(engine(gradients_of(shapes, engine.device, scale)))
    engine.step()
    return [new - old for new, old in zip(full_weights(engine), before, strict=True)]


def relative_error(found: Sequence[Tensor], shapes: Sequence[tuple[int, int]]) -> float:
    """Largest over the matrices, against the fp64 reference."""
    errors = []
    for change, gradient in zip(found, gradients_of(shapes, found[0].device), strict=True):
        expected = -LR * update_scale("original", *gradient.shape) * ds_muon.reference_newton_schulz(gradient)
        errors.append(float((change - expected).norm() / expected.norm()))
    return max(errors)


def clipped(optimizer: str) -> str:
    """The size of the applied update, with DeepSpeed's default clipping, over the right one."""
    shapes = [(256, 256)] * 8
    right = changes("DSMuon", shapes, gradient_clipping=0.0)[0].norm()
    return f"{float(changes(optimizer, shapes)[0].norm() / right):.3f}"


def tiny(optimizer: str) -> str:
    """The size of the update for gradients of norm 2.6e-6 and 2.6e-9, over that of the same gradients at norm 256."""
    shapes = [(256, 256)]
    usual = changes(optimizer, shapes, gradient_clipping=0.0)[0].norm()
    sizes = [float(changes(optimizer, shapes, s, gradient_clipping=0.0)[0].norm() / usual) for s in (1e-8, 1e-11)]
    return ", ".join(f"{size:.3f}" for size in sizes)


def orthogonalizations(optimizer: str) -> str:
    """Newton-Schulz runs in one step, summed over the ranks, for five matrices."""
    shapes = [(64, 64)] * 5
    engine = start(optimizer, shapes)
    count = torch.zeros(1, device=engine.device)
    theirs, ours = original_muon.muon_update, muon_group.orthogonalize_batch

    def count_theirs(*args: Any, **kwargs: Any) -> Tensor:
        count.add_(1)
        return theirs(*args, **kwargs)

    def count_ours(matrices: Sequence[Tensor], settings: Any) -> Tensor:
        count.add_(len(matrices))
        return ours(matrices, settings)

    with (
        mock.patch.object(original_muon, "muon_update", count_theirs),
        mock.patch.object(muon_group, "orthogonalize_batch", count_ours),
    ):
        engine.backward(engine(gradients_of(shapes, engine.device)))
        engine.step()
    torch.distributed.all_reduce(count)
    return f"{int(count)}"


def momentum(optimizer: str) -> str:
    """Dtype of the momentum under bf16, and its elements over those of the rank's partition, largest over ranks."""
    shapes = [(64, 64)] * 5
    engine = start(optimizer, shapes, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"})
    engine.backward(engine(gradients_of(shapes, engine.device)))
    engine.step()
    flat = engine.optimizer.single_partition_of_fp32_groups[0]
    buffer = engine.optimizer.optimizer.state[flat]["momentum_buffer"]
    ratio = torch.tensor([buffer.numel() / flat.numel()], device=engine.device)
    torch.distributed.all_reduce(ratio, op=torch.distributed.ReduceOp.MAX)
    return f"{str(buffer.dtype).removeprefix('torch.')}, {float(ratio):.2f}"


def accuracy(optimizer: str) -> str:
    """Largest relative error of an update with clipping off, for a wide, a tall and a square matrix."""
    shapes = [(256, 1024), (1024, 256), (512, 512)]
    return f"{relative_error(changes(optimizer, shapes, gradient_clipping=0.0), shapes):.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, help="set by the launcher")
    parser.parse_args()
    deepspeed.init_distributed()
    rows = {
        "update with gradient_clipping absent, over the right one": clipped,
        "update at gradient norm 2.6e-6, 2.6e-9, over that at 256": tiny,
        "Newton-Schulz runs for 5 matrices": orthogonalizations,
        "momentum at stage 2, bf16 with fp32 accumulation; elements held": momentum,
        "relative error with clipping off": accuracy,
    }
    table = {row: [measure(optimizer) for optimizer in OPTIMIZERS] for row, measure in rows.items()}
    if dist.get_rank() == 0:
        print(f"\n{dist.get_world_size()} ranks on {deepspeed.get_accelerator().device_name()}\n")
        print(f"{'':66}{'DeepSpeed Muon':>20}{'DSMuon':>16}")
        for row, (theirs, ours) in table.items():
            print(f"{row:66}{theirs:>20}{ours:>16}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
