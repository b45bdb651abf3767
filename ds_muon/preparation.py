"""What a config and a model come to, before an engine trains them: settings and routes, on which all ranks agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_muon.agree import agree, alike, gather
from ds_muon.blocks import described
from ds_muon.config import DSMuonConfig, DSMuonConfigError
from ds_muon.making import making
from ds_muon.refusals import DSMuonRefusal, config_refusals, may_differ, model_refusals
from ds_muon.routing import Routing, RoutingError, check_matches, route

_REFUSED = "DSMuon refuses this setup (ds-muon doctor --config FILE --fix OUT mends configs):"


@dataclass(frozen=True)
class Prepared:
    """What an engine trains by."""

    config: DSMuonConfig
    routing: Routing
    iteration: str
    """Backend and dtype of Newton-Schulz on this rank, where the config leaves them open."""


def prepare(engine: Any, model: nn.Module) -> Prepared:
    """Validate the config, refuse what cannot be trained correctly, route the parameters; agree with all ranks."""
    prepared = _read(engine, model)
    scheduler = type(engine.client_lr_scheduler).__name__
    settings = {**engine._config._param_dict, "deepspeed.initialize(lr_scheduler=...)": scheduler}
    routes = _routes(prepared.routing)
    with making.together():
        agree("settings", settings, "read the same DeepSpeed config", may_differ)
        agree("parameters", routes, "build the same model")
        if not alike(prepared.iteration, None):
            iterations = gather(prepared.iteration, None)
            rank, iteration = next((i, other) for i, other in enumerate(iterations) if other != iterations[0])
            raise DSMuonRefusal(
                f"rank {rank} would run Newton-Schulz by {iteration}, rank 0 by {iterations[0]}: "
                'set "ns_backend" and "ns_dtype" to what every rank can run'
            )
    return prepared


def _read(engine: Any, model: nn.Module) -> Prepared:
    """What the config and the model come to on this rank.

    Raises:
        DSMuonRefusal, DSMuonConfigError, RoutingError or ValueError: everything that is wrong, at once.
    """
    problems: list[Exception] = []
    if engine.client_optimizer is not None:
        problems.append(
            DSMuonRefusal(
                'DSMuon was passed to deepspeed.initialize(optimizer=...); set "optimizer": {"type": "DSMuon"} in the '
                "DeepSpeed config instead, so that it can see the model and the ZeRO settings"
            )
        )
    of_model = model_refusals(model, engine.mpu)
    mesh = engine.mesh_device
    sequence_parallel = 1 if mesh is None else mesh.get_group(mesh_dim="sequence_parallel").size()
    if refusals := config_refusals(engine._config, sequence_parallel) + of_model:
        problems.append(DSMuonRefusal("\n".join([_REFUSED, *refusals])))
    params = {} if engine.optimizer_params() is None else engine.optimizer_params()
    config, lines = DSMuonConfig.read(params)
    if lines:
        problems.append(DSMuonConfigError("\n".join(lines)))
    routing = iteration = None
    try:
        # Refuses a backend that cannot run.
        newton_schulz = config.newton_schulz(torch.device(get_accelerator().current_device_name()))
        iteration = f"{newton_schulz.backend} in {newton_schulz.dtype}"
    except ValueError as error:
        problems.append(error)
    # Pieces of weights have no shapes to go by, and a pattern that cannot be read may be the one that matters.
    in_pieces = of_model or engine._config.zero_optimization_stage == 3
    patterns = {"muon_params", "adamw_params", "muon_blocks"}
    unread = isinstance(params, Mapping) and patterns & params.keys() - config.model_fields_set
    if not in_pieces and not unread:
        unmatched = _unmatched_patterns(config, model)
        problems += unmatched
        if not unmatched:
            try:
                routing = route(
                    model,
                    muon_params=config.muon_params,
                    adamw_params=config.adamw_params,
                    muon_blocks=config.muon_blocks,
                    per_head_muon=config.per_head_muon,
                )
            except RoutingError as error:
                problems.append(error)
    if not problems:
        assert routing is not None and iteration is not None
        return Prepared(config, routing, iteration)
    if len(problems) == 1:
        raise problems[0]
    texts = [str(problem).removeprefix(f"{_REFUSED}\n") for problem in problems]
    raise DSMuonRefusal("\n".join([_REFUSED, *texts]))


def _unmatched_patterns(config: DSMuonConfig, model: nn.Module) -> list[RoutingError]:
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    errors = []
    rules = [pattern for pattern, _ in config.muon_blocks]
    for key, patterns in {
        "muon_params": config.muon_params,
        "adamw_params": config.adamw_params,
        "no_decay_params": config.no_decay_params,
        "muon_blocks": rules,
    }.items():
        for pattern in patterns:
            try:
                check_matches(key, [pattern], names)
            except RoutingError as error:
                errors.append(error)
    return errors


def _routes(routing: Routing) -> dict[str, str]:
    """Where every parameter goes, under all its names."""
    return {
        " = ".join(r.names): f"{r.shown_shape}, to {r.half}, stored {r.layout}, {described(r.pieces)}"
        for r in routing.routes
    }
