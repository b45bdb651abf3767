"""What a rank does with an error that the others do not have: it takes part until all ranks can stop together.

The others would wait for a rank that only raises, or apply what it does not. So it holds its error, sends zeros where
it has nothing, and says that it has failed when all ranks decide on the step.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from ds_muon.agree import Notice, raise_together
from ds_muon.refusals import DSMuonRefusal
from ds_muon.say import log

_UNMOVED = "Nothing has moved on any rank"
_STAGED = "No weight has moved on any rank, but momentum may have: load a checkpoint before you go on"
_LOAD = "load a checkpoint with its optimizer states"
_TORN = {
    "commit": f"Its weights may have moved in part: {_LOAD}",
    "load_checkpoint": f"Its weights and state are old in part, and new in part: {_LOAD}",
}
AFTERMATH = {
    **{"take_gradients": _UNMOVED, "measure": _UNMOVED, "stage": _STAGED, "decide": _STAGED},
    **_TORN,
}
"""By what has failed on a rank: a phase of a step, or a load."""


class Failure:
    """The first error of this rank in a step or a load, held until all ranks stop.

    A rank alone raises its error where it occurs. What has failed in ``commit`` or a load has torn this rank's weights:
    it stays, and no step or save is made, until a load succeeds. Others may save before they meet in the next step, so
    they find it in a notice.

    Args:
        process_group: the ranks that step together.

    Attributes:
        error: None as long as nothing has failed.
        torn: whether it has torn this rank's weights.
        step: the number of the step, for the words.
        notice: where ranks let each other know whose weights are torn. ``registration`` sets it; else None.
    """

    notice: Notice | None = None

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.error: Exception | None = None
        self.torn = False
        self.step = 0
        self._about = ""
        self._process_group = process_group
        self.alone = dist.get_world_size(process_group) == 1

    @contextmanager
    def holding(self, phase: str) -> Iterator[None]:
        """Hold what is raised inside, where there must be no collective that others wait for."""
        try:
            yield
        except BaseException as error:
            passes_on = self.alone or not isinstance(error, Exception)
            if not passes_on:
                # It may have been for want of memory, and this rank has yet to take part.
                traceback.clear_frames(error.__traceback__)
            if self.error is None and (phase in _TORN or not passes_on):
                self.error = error if isinstance(error, Exception) else RuntimeError(type(error).__name__)
                self.torn = phase in _TORN
                if not isinstance(error, DSMuonRefusal):
                    self._about = (
                        f". In {phase}, step {self.step} since start, at {place_of(error)}. {AFTERMATH[phase]}"
                    )
                    log(f"an error on rank {dist.get_rank(self._process_group)}: {self}")
                if self.torn and self.notice is not None:
                    self.notice.leave(f"rank {dist.get_rank(self._process_group)} has failed. {self}")
            if passes_on:
                raise

    def __str__(self) -> str:
        return f"{type(self.error).__name__}: {self.error}{self._about}"

    def clear(self) -> None:
        self.error, self.torn, self._about = None, False, ""

    def refuse_if_torn(self, what: str) -> None:
        """Raise on this rank if its weights are torn.

        Raises:
            RuntimeError: of the error that has torn them.
        """
        if self.torn:
            raise RuntimeError(f"{what}: {self}") from self.error

    def refuse_to_save(self) -> None:
        """Raise if the weights of any rank are torn. Not a collective: a script may save on one rank alone.

        Raises:
            RuntimeError: of the error that has torn them.
        """
        self.refuse_if_torn("nothing is saved")
        if self.notice is not None:
            self.notice.refuse("nothing is saved")

    def settle(self) -> None:
        """Let ranks save again. All have loaded, so that no weights are torn."""
        if self.notice is not None:
            self.notice.take_down()

    def raise_on_all(self) -> None:
        """See ``raise_together``. Nothing is held afterwards, unless weights are torn."""
        error, about = self.error, self._about
        if not self.torn:
            self.clear()
        raise_together(error, self._process_group, about=about)


def place_of(error: BaseException) -> str:
    """The innermost function of this package that the error has passed."""
    here = Path(__file__).parent
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(here)]
    *_, ours = [frame for frame in frames if frame.name.isidentifier()]  # no comprehension
    return f"{ours.name} ({Path(ours.filename).name}:{ours.lineno})"
