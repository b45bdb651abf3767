"""What Hugging Face Trainer needs of its own. Needs transformers."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from ds_muon.telemetry import PREFIX


class TelemetryCallback(TrainerCallback):  # type: ignore[misc]
    """Adds what DSMuon observed last to the training entries of Trainer's log, for ``Trainer.add_callback``."""

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, float] | None = None,
        optimizer: Any = None,
        **others: Any,
    ) -> None:
        # Accelerate's wrapper holds DeepSpeed's ZeRO optimizer.
        telemetry = getattr(getattr(optimizer, "optimizer", None), "telemetry", None)
        if telemetry is not None and logs is not None and "loss" in logs:
            found = {PREFIX + name: value for name, value in telemetry.last.items()}
            logs.update(found)  # for the callbacks that come after this one
            state.log_history[-1].update(found)
