"""Muon for DeepSpeed ZeRO-1/2: ``import ds_muon``, then ``"optimizer": {"type": "DSMuon"}`` in the DeepSpeed config.

The import makes the type known (``register``), and ``deepspeed.initialize`` the optimizer. What else there is to call:

    route(model)               which parameters Muon takes, and why: a ``Routing``, with a ``table()``
    DSMuonConfig.parse(dict)   ``optimizer.params``, validated: an object with an attribute for each key
    muon_update(grad, buffer)  one update of one matrix, without an engine, in plain torch
    reference_newton_schulz    the same orthogonalization in fp64, one matrix at a time
    NewtonSchulz.resolve       settings of the iteration on a device; ``COEFFICIENTS`` are its tables by name
    flat_layout                where ZeRO puts the parameters of a group, and where it cuts: a ``FlatLayout``
    make_plan                  who holds, who owns and what travels at a number of ranks: a ``Plan``, by ``Rates``

``engine.optimizer`` is ZeRO's optimizer, ``engine.optimizer.optimizer`` the ``DSMuon`` in it, with ``routing``. Errors:
``DSMuonConfigError`` (a key), ``RoutingError`` (a parameter or a pattern), ``DSMuonRefusal`` (what cannot be trained
right), all ``ValueError``; ``NonFiniteUpdate``, a ``RuntimeError``, with ``nan_guard``.

In a shell: ``ds-muon --help``. The rule: Keller Jordan, Muon (2024), https://kellerjordan.github.io/posts/muon/.
"""

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
