"""Agreement between ranks: whether all are there, whether all have the same settings, and whether one has an error.

Ranks in different collectives wait for each other in vain. So they first meet in the store of the process group, where
waiting can end (``RollCall``). Then they compare their settings (``agree``). Later, an error on one rank stops all
(``raise_together``; ``failure`` in the middle of a step), and what others need to know only before they save waits for
them in the store (``Notice``).
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePath
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _get_object_coll_device

from ds_muon.refusals import DSMuonRefusal
from ds_muon.say import log, printable

T = TypeVar("T")

PATIENCE_SECONDS = 30.0
"""How long ranks wait before they warn of a missing rank, or refuse because one builds another engine."""
STRANGER_PATIENCE_SECONDS = 45.0
"""How long they wait for a rank that has not even imported this package."""

_LONGEST_VALUE = 120
_RANKS_SHOWN = 8
# No setting of DeepSpeed is nested so deep. Python's own recursion ends at 1000.
_DEEPEST = 100

Place = tuple[str, ...]


def gather(value: T, process_group: dist.ProcessGroup | None) -> list[T]:
    """The ``value`` of every rank, in order of rank. A collective; blocks the host."""
    values: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(values, value, group=process_group)
    return values


def any_rank(it_is: bool, process_group: dist.ProcessGroup | None) -> bool:
    """Whether it is so on any rank. A collective of one number; blocks the host."""
    return bool(_largest([it_is], process_group)[0])


def alike(text: str, process_group: dist.ProcessGroup | None) -> bool:
    """Whether all ranks have the same text, by its hash. A collective of 128 bytes; blocks the host."""
    digest = hashlib.sha256(text.encode()).digest()
    words = [int.from_bytes(digest[i : i + 4], "big") for i in range(0, len(digest), 4)]
    largest = _largest([*words, *(-word for word in words)], process_group)
    return largest[: len(words)] == [-negated for negated in largest[len(words) :]]


def _largest(numbers: Sequence[int], process_group: dist.ProcessGroup | None) -> list[int]:
    """The largest of each number on any rank. Costs the same on any number of ranks, which ``gather`` does not."""
    found = torch.tensor(numbers, dtype=torch.int64, device=_get_object_coll_device(process_group))
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=process_group)
    largest: list[int] = found.tolist()
    return largest


def raise_together(error: Exception | None, process_group: dist.ProcessGroup | None = None, *, about: str = "") -> None:
    """Raise on every rank of the group if any rank has an error, so that none is left waiting in a collective.

    A rank with an error raises it. The others raise a ``RuntimeError`` that quotes the first rank with an error, and
    what it says ``about`` that. A collective: every rank of the group must call it. Blocks the host.
    """
    if not dist.is_initialized() or dist.get_world_size(process_group) == 1:
        if error is not None:
            raise error
        return
    if not any_rank(error is not None, process_group):
        return
    messages = gather(None if error is None else f"{type(error).__name__}: {error}{about}", process_group)
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise RuntimeError(f"rank {rank} stopped, and this rank with it. {message}")


# ---- the same on every rank -----------------------------------------------------------------------------------------


def agree(
    what: str, facts: Mapping[str, Any], remedy: str, may_differ: Callable[[Place], bool] = lambda place: False
) -> None:
    """Raise the same error on every rank if the facts of any rank differ from those of rank 0.

    A collective over all ranks; blocks the host.

    Args:
        what: a plural noun for the facts, such as "settings".
        facts: mappings and sequences of values, nested as in a JSON file. The order of keys and the type of a number do
            not count: 1 is 1.0. An object that JSON does not know is compared by its type.
        remedy: what to do about it on every rank.
        may_differ: whether to leave out a value, by the keys that lead to it.

    Raises:
        DSMuonRefusal: with the first key that differs, its values, and the ranks that have them.
    """
    if dist.get_world_size() == 1:
        return
    ours = {place: value for place, value in _leaves(facts) if not may_differ(place)}
    if alike(json.dumps(sorted(ours.items())), None):
        return
    box = [ours]
    dist.broadcast_object_list(box, src=0)
    differences = gather(_first_difference(box[0], ours), None)
    others = [rank for rank, difference in enumerate(differences) if difference is not None]
    _, place = min(difference[:2] for difference in differences if difference is not None)
    ranks_of: dict[str, list[int]] = {}
    for rank in others:
        difference = differences[rank]
        if difference is not None and difference[1] == place:
            ranks_of.setdefault(difference[2], []).append(rank)
    values = [f"{value} on {_ranks(ranks)}" for value, ranks in list(ranks_of.items())[:2]]
    raise DSMuonRefusal(
        f"ranks {_listed(others)} have other {what} than rank 0: {_name(place)} is {_shown(box[0].get(place))} on "
        f"rank 0, {' and '.join(values)}; {remedy} on every rank"
    )


def _first_difference(theirs: Mapping[Place, str], ours: Mapping[Place, str]) -> tuple[int, Place, str] | None:
    """The first fact that differs from rank 0's, in the order of rank 0: its position, place and value on this rank."""
    for position, place in enumerate([*theirs, *(place for place in ours if place not in theirs)]):
        if theirs.get(place) != ours.get(place):
            return position, place, _shown(ours.get(place))
    return None


def _leaves(value: Any, place: Place = ()) -> Iterator[tuple[Place, str]]:
    """Every single value with its place, as text that is the same in every process."""
    children: Sequence[tuple[Any, Any]] = ()
    if len(place) < _DEEPEST:
        if isinstance(value, Mapping):
            children = list(value.items())
        elif isinstance(value, list | tuple):
            children = [(f"[{index}]", child) for index, child in enumerate(value)]
    if not children:
        yield place, _text(value)
    for key, child in children:
        yield from _leaves(child, (*place, str(key)))


def _text(value: Any) -> str:
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        # Python writes no more than 4300 digits of an integer.
        return str(value) if abs(value) < 10**18 else hex(value)
    if value is None or isinstance(value, str | bool | float):
        return json.dumps(value)
    if isinstance(value, torch.dtype | torch.device | PurePath):
        return json.dumps(str(value))
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if isinstance(value, Mapping | list | tuple) and not value:
        return "{}" if isinstance(value, Mapping) else "[]"
    # An address in its repr would differ between ranks that agree.
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def _name(place: Place) -> str:
    return printable(".".join(place).replace(".[", "["))


def _shown(text: str | None) -> str:
    if text is None:
        return "absent"
    return text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "..."


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_listed(ranks)}"


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_RANKS_SHOWN]))
    return f"[{shown}{f', ... {len(ranks)} in all' if len(ranks) > _RANKS_SHOWN else ''}]"


# ---- all ranks are there --------------------------------------------------------------------------------------------


def leave_word() -> None:
    """Let the other ranks know that this one has imported ds_muon. Needs a process group; never raises."""
    with suppress(Exception):
        store = _store() if dist.is_initialized() else None
        if store is not None and not store.check([_imported(dist.get_rank())]):
            store.set(_imported(dist.get_rank()), "")
            store.add(_IMPORTED, 1)


# How many ranks have left word.
_IMPORTED = "ds_muon/imported"


def _imported(rank: int) -> str:
    return f"{_IMPORTED}/{rank}"


def _absent(store: Any, keys: Sequence[str]) -> list[int]:
    """The places of the keys that the store lacks. In few requests, because thousands of ranks may ask at once."""
    if not keys or store.check(list(keys)):
        return []
    half = len(keys) // 2
    if not half:
        return [0]
    return _absent(store, keys[:half]) + [half + place for place in _absent(store, keys[half:])]


class RollCall:
    """Waits until all ranks are about to build an engine with DSMuon, before any of them enters a collective.

    Ranks leave word in the store of the process group. A rank that builds another engine instead says so there. A rank
    that has left no word that it imported this package will not come. Any other missing rank may only take long to
    load its model: the others warn, and wait for it as long as in a collective. One instance per process.
    """

    def __init__(self) -> None:
        # Engines that this process has built: with DSMuon, and since the last of those, without it.
        self._ours = 0
        self._others = 0

    def pass_by(self, what: str) -> None:
        """Leave word that this rank builds ``what``, an engine without DSMuon. Waits for nobody and never raises."""
        with suppress(Exception):
            store = _store()
            if store is not None:
                store.set(f"{self._place()}/{dist.get_rank()}", what)
                store.add(self._place(), 1)
        self._others += 1

    def wait_for_all(self) -> None:
        """Return once every rank has called this as often as this rank.

        Raises:
            DSMuonRefusal: a rank builds an engine without DSMuon instead, has not imported ds_muon, or did not come
                within the time-out of the process group.
            RuntimeError: the store is gone.
        """
        store = _store()
        if store is not None:
            try:
                self._wait(store)
            except dist.DistError as error:
                raise RuntimeError(
                    "the store of the process group does not answer: the rank that holds it, usually 0, may have ended "
                    f"with an error of its own; see its output ({error})"
                ) from error
        self._ours += 1
        self._others = 0

    def notice(self, about: str) -> Notice:
        """One of the engine that all ranks have last come to build."""
        return Notice(f"ds_muon/{self._ours}/{about}")

    def _place(self) -> str:
        return f"ds_muon/{self._ours}/without/{self._others}"

    def _wait(self, store: Any) -> None:
        here = f"ds_muon/{self._ours}/here"
        world_size, rank = dist.get_world_size(), dist.get_rank()
        store.set(f"{here}/{rank}", "")
        came_first = store.add(here, 1) == 1
        start = time.monotonic()
        elsewhere_since: float | None = None
        strangers_after = STRANGER_PATIENCE_SECONDS
        warned = False
        pause = 0.001
        while store.add(here, 0) < world_size:
            now = time.monotonic()
            refusal = None
            if elsewhere_since is None and store.add(self._place(), 0):
                elsewhere_since = now
            if elsewhere_since is not None and now - elsewhere_since > PATIENCE_SECONDS:
                refusal = self._of_ranks_elsewhere(store, self._missing(store, here))
                elsewhere_since = now  # those ranks may have come since, and another one is missing
            if now - start > strangers_after:
                refusal = refusal or self._of_strangers(store, here, now - start)
                strangers_after = math.inf
            if now - start > store.timeout.total_seconds():
                refusal = self._of_ranks_missing(self._missing(store, here), now - start)
            if refusal is not None:
                # Whoever catches this may try again.
                store.delete_key(f"{here}/{rank}")
                store.add(here, -1)
                raise DSMuonRefusal(refusal)
            if came_first and not warned and now - start > PATIENCE_SECONDS:
                log(self._of_ranks_missing(self._missing(store, here), now - start))
                warned = True
            time.sleep(pause)
            pause = min(2 * pause, 0.5)

    def _missing(self, store: Any, here: str) -> list[int]:
        return _absent(store, [f"{here}/{rank}" for rank in range(dist.get_world_size())])

    def _of_ranks_elsewhere(self, store: Any, missing: Sequence[int]) -> str | None:
        elsewhere = [rank for rank in missing if store.check([f"{self._place()}/{rank}"])]
        if not elsewhere:
            return None
        what = store.get(f"{self._place()}/{elsewhere[0]}").decode(errors="replace")
        return (
            f"ranks {_listed(elsewhere)} build an engine with {what} where rank {dist.get_rank()} builds one with "
            "DSMuon; read the same DeepSpeed config on every rank"
        )

    def _of_strangers(self, store: Any, here: str, seconds: float) -> str | None:
        if store.add(_IMPORTED, 0) == dist.get_world_size():
            return None
        missing = self._missing(store, here)
        strangers = [missing[place] for place in _absent(store, [_imported(rank) for rank in missing])]
        if not strangers:
            return None
        return (
            f"ranks {_listed(strangers)} have not imported ds_muon, {seconds:.0f} s after rank {dist.get_rank()} came "
            "to build its engine with DSMuon: put `import ds_muon` at the top of the script, and read the same "
            "DeepSpeed config, on every rank; or they have ended with an error of their own (see their output)"
        )

    def _of_ranks_missing(self, missing: Sequence[int], seconds: float) -> str:
        return (
            f"ranks {_listed(missing)} have not come to build their engine with DSMuon, for which rank "
            f"{dist.get_rank()} has waited for {seconds:.0f} s: they may still be loading the model or data, have "
            "ended with an error of their own (see their output), or build no engine"
        )


class Notice:
    """Text that a rank leaves for the others in the store of the process group, where they find it on their own.

    With a single rank, over MPI, or once the store is gone, a rank finds only what it has left itself.

    Args:
        key: the same on every rank.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._ours = ""

    def leave(self, text: str) -> None:
        self._ours = text
        with suppress(Exception):
            _store().set(self._key, text)
            _store().check([self._key])  # unlike ``set``, waits for the store

    def refuse(self, what: str) -> None:
        """Raise if anything was left that has not been taken down.

        Raises:
            RuntimeError: it.
        """
        if text := self._ours or self._of_others():
            raise RuntimeError(f"{what}: {text}")

    def _of_others(self) -> str:
        with suppress(Exception):
            store = _store()
            if store.check([self._key]):
                return str(store.get(self._key).decode(errors="replace"))
        return ""

    def take_down(self) -> None:
        self._ours = ""
        with suppress(Exception):
            _store().delete_key(self._key)


def _store() -> Any:
    """Where ranks meet without a collective; None with a single rank, or with MPI, which has no store."""
    if dist.get_world_size() == 1 or dist.get_backend() == "mpi":
        return None
    return _get_default_store()
