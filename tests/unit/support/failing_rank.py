"""``ds_muon.bench.step_rank`` with a rank 1 that fails by itself in the method of ``Contender`` that FAILING names."""

from __future__ import annotations

import os
from typing import Any, NoReturn

from ds_muon.bench import step_rank


def fail(*args: Any) -> NoReturn:
    raise RuntimeError("rank 1 is at fault")


if __name__ == "__main__":
    step_rank._PATIENCE = 1.0
    if os.environ["RANK"] == "1":
        setattr(step_rank.Contender, os.environ["FAILING"], fail)
    step_rank.main()
