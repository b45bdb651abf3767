"""``--all`` runs every case. By default those marked ``full`` are left out: what they show, others show as well.

``--integrations`` runs the tests with the frameworks instead of all others: whose imports take as long as many tests.
"""

from __future__ import annotations

import os

import pytest

from tests.unit.support import ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run every case, also those marked full")
    parser.addoption("--integrations", action="store_true", help="run the tests with the frameworks, and only those")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--integrations"):
        os.environ["HF_HUB_OFFLINE"] = "1"
        ranks.PRELOADED += ("transformers.trainer", "peft", "trl.trainer.sft_trainer", "lightning")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def runs(item: pytest.Item) -> bool:
        if bool(item.get_closest_marker("integrations")) != config.getoption("--integrations"):
            return False
        return config.getoption("--all") or not item.get_closest_marker("full")

    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = [item for item in items if runs(item)]
