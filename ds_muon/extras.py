"""The optional dependencies that users may lack, by the names of pyproject.toml."""

from __future__ import annotations

from typing import Literal

Extra = Literal["integrations", "mpi", "plot", "triton"]

# As in pyproject.toml. torch may have brought an older one.
OLDEST_TRITON = (3, 4)


def how_to_install(extra: Extra) -> str:
    """A command line. In quotes, for in zsh brackets are a pattern."""
    return f"pip install 'ds-muon[{extra}]'"
