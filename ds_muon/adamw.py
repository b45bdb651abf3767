"""AdamW's half of DSMuon: ``torch.optim.AdamW`` on the flat partitions of some param groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ds_muon.param_groups import GROUP_KEYS
from ds_muon.passes import LARGEST_IN_LIST, chunk_on


def new_state(p: Tensor) -> dict[str, Tensor]:
    """The state of a partition before the first step, all zeros."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=p.device),
        "exp_avg": torch.zeros_like(p, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(p, requires_grad=False),
    }


class AdamW:
    """Torch's own AdamW, fused on accelerators that have it, or its loop for the host.

    Args:
        groups: param groups with one partition each; they get the keys that torch's AdamW reads and DSMuon lacks.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self._torch = _adamw_of(groups)
        self.complete(groups)

    def complete(self, groups: list[dict[str, Any]]) -> None:
        """Give groups the keys that torch's AdamW reads and DSMuon does not set."""
        others = {key: value for key, value in self._torch.defaults.items() if key not in GROUP_KEYS}
        for group in groups:
            group.update(others)

    def step(
        self,
        groups: list[dict[str, Any]],
        gradients: Sequence[Tensor],
        state: Mapping[Tensor, dict[str, Any]],
        host_passes: ModuleType | None,
    ) -> None:
        """Apply gradients. Modifies the partitions and their state.

        Args:
            groups: all of AdamW's.
            gradients: (partition_size,) fp32 for each group.
            state: of their partitions.
            host_passes: compiled passes, if the partitions are on the host and these can be had.
        """
        if host_passes is None:
            self._torch.param_groups, self._torch.state = _in_pieces(groups, gradients, state)
            self._torch.step()
            return
        for group, gradient in zip(groups, gradients, strict=True):
            (p,) = group["params"]
            of_p = state[p]
            of_p["step"] += 1
            settings = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
            host_passes.adamw_(p, gradient, of_p["exp_avg"], of_p["exp_avg_sq"], step=float(of_p["step"]), **settings)


def _in_pieces(
    groups: list[dict[str, Any]], gradients: Sequence[Tensor], state: Mapping[Tensor, dict[str, Tensor]]
) -> tuple[list[dict[str, Any]], defaultdict[Tensor, dict[str, Tensor]]]:
    """AdamW's groups and state, as views of at most ``LARGEST_IN_LIST`` elements; on a CPU, that fit its caches.

    AdamW is elementwise, so the views get the bits of the whole. The group's ``step`` must advance once: the first view
    has it, the others have copies.
    """
    new_groups: list[dict[str, Any]] = []
    new_state: defaultdict[Tensor, dict[str, Tensor]] = defaultdict(dict)
    for group, whole in zip(groups, gradients, strict=True):
        (p,) = group["params"]
        step = state[p]["step"]
        flat = (p.detach(), whole, state[p]["exp_avg"], state[p]["exp_avg_sq"])
        most = min(LARGEST_IN_LIST, chunk_on(p.device)) if p.device.type == "cpu" else LARGEST_IN_LIST
        pieces = list(zip(*(torch.split(tensor, most) for tensor in flat), strict=True))
        for i, (piece, gradient, exp_avg, exp_avg_sq) in enumerate(pieces):
            piece.grad = gradient
            own = step.clone() if i else step
            new_state[piece] = {"step": own, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        new_groups.append({**group, "params": [piece for piece, *_ in pieces]})
    return new_groups, new_state


def _adamw_of(groups: list[dict[str, Any]]) -> torch.optim.AdamW:
    # On a CPU, fused AdamW rounds the ends of a tensor unlike its body: weights would depend on the partition.
    if all(p.device.type != "cpu" for group in groups for p in group["params"]):
        try:
            return torch.optim.AdamW(groups, fused=True)
        except RuntimeError:
            # torch has no fused AdamW for this device.
            for group in groups:
                group.pop("fused", None)
    return torch.optim.AdamW(groups)
