"""Muon for DeepSpeed ZeRO-1/2: ``import ds_muon``, then ``"optimizer": {"type": "DSMuon"}`` in the DeepSpeed config."""

from ds_muon import command_log  # noqa: F401
from ds_muon.config import DSMuonConfig, DSMuonConfigError
from ds_muon.one_matrix import muon_update
from ds_muon.optimizer import DSMuon
from ds_muon.orthogonalize import COEFFICIENTS, NewtonSchulz, reference_newton_schulz
from ds_muon.plan.partition import Plan, make_plan
from ds_muon.plan.rates import Rates
from ds_muon.plan.zero_layout import FlatLayout, flat_layout
from ds_muon.refusals import DSMuonRefusal
from ds_muon.registration import register
from ds_muon.routing import Routing, RoutingError, route
from ds_muon.skipped import NonFiniteUpdate
from ds_muon.version import VERSION

__version__ = VERSION

__all__ = [
    "COEFFICIENTS",
    "DSMuon",
    "DSMuonConfig",
    "DSMuonConfigError",
    "DSMuonRefusal",
    "FlatLayout",
    "NewtonSchulz",
    "NonFiniteUpdate",
    "Plan",
    "Rates",
    "Routing",
    "RoutingError",
    "flat_layout",
    "make_plan",
    "muon_update",
    "reference_newton_schulz",
    "register",
    "route",
]

register()
