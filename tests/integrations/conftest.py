"""Tests with the frameworks, whose imports take as long as many tests: ``scripts/test --integrations`` runs them."""

from __future__ import annotations

import os

from tests.unit.support import ranks

# Nothing is to be looked for in the network.
os.environ["HF_HUB_OFFLINE"] = "1"
ranks.PRELOADED += ("transformers.trainer", "peft", "trl.trainer.sft_trainer", "lightning")
