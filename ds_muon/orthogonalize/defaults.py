"""What Newton-Schulz runs with where nothing is said: in the config, in ``muon_update``, in the fp64 reference."""

from __future__ import annotations

from typing import Final

NS_STEPS: Final = None  # the number of the coefficient table
NS_METHOD: Final = "gram"
NS_COEFFICIENTS: Final = "quintic"
NS_DTYPE: Final = "auto"
NS_EPS: Final = 1e-15
NS_BACKEND: Final = "auto"
