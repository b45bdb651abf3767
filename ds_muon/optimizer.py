"""DSMuon: the torch optimizer that owns the state of both halves and applies their updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ds_muon.adamw import AdamW, new_state
from ds_muon.config import DSMuonConfig
from ds_muon.dtypes import DTYPES
from ds_muon.learning_rates import GroupRate
from ds_muon.offload import Stretch
from ds_muon.passes import Goal, Moves, advance_momentum_, apply_update_
from ds_muon.routing import Routing

ORIGIN = ("name", "user_group")
"""What says of a param group where it comes from: this run's, not that of a checkpoint."""


class DSMuon(Optimizer):
    """Muon for matrices, AdamW for the rest, on ZeRO's flat partitions.

    DeepSpeed makes it from ``"optimizer": {"type": "DSMuon"}``. ZeRO replaces the parameters of every group with this
    rank's partition of the group's flat fp32 weights. So state is flat as well, one tensor of each kind per group:
    ``momentum_buffer`` for Muon; ``exp_avg``, ``exp_avg_sq`` and ``step`` for AdamW, with the arithmetic of
    ``torch.optim.AdamW`` (fused on accelerators that have it). NorMuon also has ``row_variance``, one number per row of
    the group's matrices. It is not partitioned, but the same on every rank.

    Args:
        param_groups: from ``param_groups.split_param_groups``: Muon groups first, each group with ``use_muon``.
        config: the validated ``optimizer.params`` of the DeepSpeed config.
        routing: Muon or AdamW for every parameter, and why.

    Raises:
        TypeError: it was made by hand.
    """

    _has_all_groups = False

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        config: DSMuonConfig | None = None,
        routing: Routing | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(config, DSMuonConfig) or not isinstance(routing, Routing) or settings:
            raise TypeError(
                'DSMuon is made by DeepSpeed, not by hand: set "optimizer": {"type": "DSMuon", "params": {"lr": 0.02, '
                '"adam_lr": 3e-4}} in the DeepSpeed config, and leave optimizer= out of deepspeed.initialize'
            )
        super().__init__(param_groups, defaults={"lr": config.lr, "weight_decay": config.weight_decay})
        self._has_all_groups = True
        self.config = config
        self.routing = routing
        # Kept apart from the groups, because schedulers and checkpoints write to those.
        self.configured_rates = tuple(
            GroupRate(group["lr"], group["use_muon"], group.get("user_group", 0)) for group in self.param_groups
        )
        self._adamw: AdamW | None = None
        self.host_passes: ModuleType | None = None
        """Compiled passes, if the partitions are on the host for CPU offload and these can be had."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Serves the constructor only.

        Raises:
            RuntimeError: it is called later.
        """
        if self._has_all_groups:
            raise RuntimeError(
                "DSMuon takes no param group after deepspeed.initialize: by then ZeRO has cut its weights. "
                "Give it all parameters that are ever to train, with requires_grad = True; or, for a model that has "
                "grown, make a new engine and load the weights into it"
            )
        super().add_param_group(param_group)

    @property
    def adamw_groups(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if not group["use_muon"]]

    def init_state(self, rows: Sequence[int], device: torch.device) -> None:
        """Allocate all state as zeros, once the groups hold their flat partitions.

        ZeRO links state tensors to model parameters only once. So they exist before the first step, and from then on
        are written in place.

        Args:
            rows: for each Muon group, the number of rows (outputs) of all its matrices.
            device: the accelerator, where NorMuon's second moments are.
        """
        for i, group in enumerate(self.param_groups):
            for p in group["params"]:
                if group["use_muon"]:
                    dtype = DTYPES[self.config.momentum_dtype]
                    self.state[p] = {"momentum_buffer": torch.zeros_like(p, dtype=dtype, requires_grad=False)}
                    if self.config.variant == "normuon":
                        # A column, because ZeRO takes state of the partition's own shape to be partitioned.
                        self.state[p]["row_variance"] = torch.zeros((rows[i], 1), dtype=torch.float32, device=device)
                else:
                    self.state[p] = new_state(p)
        if self.adamw_groups:
            self._adamw = AdamW(self.adamw_groups)

    def momentum_buffer(self, group_index: int) -> Tensor:
        """The momentum of a Muon group: (partition_size,)."""
        (p,) = self.param_groups[group_index]["params"]
        momentum_buffer: Tensor = self.state[p]["momentum_buffer"]
        return momentum_buffer

    def row_variance(self, group_index: int) -> Tensor | None:
        """NorMuon's second moments of a Muon group: (rows, 1) fp32; None for plain Muon."""
        (p,) = self.param_groups[group_index]["params"]
        variance: Tensor | None = self.state[p].get("row_variance")
        return variance

    def advance_momentum_(
        self,
        group_index: int,
        gradient: Tensor,
        moves: Moves | None,
        offset: int = 0,
        numel: int | None = None,
        into: Tensor | Goal | None = None,
    ) -> None:
        """Advance the momentum of a Muon group by one averaged, unscaled gradient.

        Args:
            group_index: a Muon group.
            gradient: (partition_size,) fp32; overwritten with U.
            moves: which of the partition's matrices move; None for all.
            offset, numel: the elements to work on; by default all.
            into: with CPU offload, where U of these goes in place of the gradient: (numel,) fp32.
        """
        group = self.param_groups[group_index]
        end = None if numel is None else offset + numel
        g, m = (flat[offset:end] for flat in (gradient, self.momentum_buffer(group_index)))
        how: dict[str, Any] = {"moves": moves and moves.starting(offset), "into": into}
        advance_momentum_(g, m, momentum=group["momentum"], nesterov=group["nesterov"], **how)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        updates: Sequence[tuple[Moves | None, Iterable[Stretch]]] = (),
        gradients: Sequence[Tensor] = (),
    ) -> None:
        """Apply updates ``s O`` to the weights of Muon groups, and gradients to those of AdamW groups.

        Args:
            closure: none.
            updates: of each Muon group, which of the partition's matrices move, None for all, and its updates, which
                are overwritten. As soon as a stretch has been applied, the next is asked for.
            gradients: (partition_size,) fp32 for each AdamW group.

        Raises:
            ValueError: a closure was given.
            RuntimeError: there is nothing to apply.
        """
        if closure is not None:
            raise ValueError("DSMuon.step takes no closure: its gradients come from the ZeRO optimizer")
        if not updates:
            raise RuntimeError("DSMuon.step has nothing to apply: the ZeRO optimizer calls it; call engine.step()")
        for group, (moves, stretches) in zip(self.param_groups, updates, strict=False):
            (p,) = group["params"]
            for offset, update, scale, rounded in stretches:
                weight = p.narrow(0, offset, update.numel())
                how: dict[str, Any] = {"moves": moves and moves.starting(offset), "scale": scale, "rounded": rounded}
                apply_update_(weight, update, lr=group["lr"], weight_decay=group["weight_decay"], **how)
        if self._adamw is not None:
            self._adamw.step(self.adamw_groups, gradients, self.state, self.host_passes)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused: torch's own would put other tensors in the place of those that ZeRO has linked to parameters."""
        raise NotImplementedError("DSMuon loads no state dict; use engine.load_checkpoint")

    def load_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take over rates and settings, one saved param group for each group."""
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key not in ("params", *ORIGIN)})
        # The checkpoint may be of another device, or of a torch whose AdamW reads other keys.
        if self._adamw is not None:
            self._adamw.complete(self.adamw_groups)
