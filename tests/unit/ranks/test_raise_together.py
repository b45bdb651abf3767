"""An error on one rank stops all of them, with its words."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from ds_muon.agree import raise_together
from tests.unit.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def outcome(errors: dict[int, Exception], ranks: Any = None) -> str:
    """What ``raise_together`` raises here, as text; then proves that the ranks are still in step."""
    group = None if ranks is None else dist.new_group(ranks)
    if ranks is not None and dist.get_rank() not in ranks:
        return "outside"
    mine = errors.get(dist.get_rank(group))
    try:
        raise_together(mine, group)
        raised = "nothing"
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
        assert mine is None or error is mine
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, dist.get_rank(group), group=group)
    assert gathered == list(range(dist.get_world_size(group)))
    return raised


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_no_error_raises_nothing(world_size: int) -> None:
    assert run_ranks(world_size, outcome, {}) == ["nothing"] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_rank_raises_its_own_error_and_the_others_quote_it(world_size: int) -> None:
    last = world_size - 1
    raised = run_ranks(world_size, outcome, {last: ValueError("lr = -1: set more")})
    assert raised[last] == "ValueError: lr = -1: set more"
    for text in raised[:last]:
        assert text.startswith("RuntimeError: ")
        assert f"rank {last}" in text and "ValueError: lr = -1: set more" in text


def test_every_rank_with_an_error_raises_its_own_and_the_rest_quote_the_first() -> None:
    raised = run_ranks(3, outcome, {1: KeyError("one"), 2: OSError("two")})
    assert raised[1:] == ["KeyError: 'one'", "OSError: two"]
    assert raised[0].startswith("RuntimeError: ") and "rank 1" in raised[0] and "KeyError: 'one'" in raised[0]
    assert "two" not in raised[0]
    assert run_ranks(2, outcome, {0: ValueError("a"), 1: TypeError("b")}) == ["ValueError: a", "TypeError: b"]


def test_an_error_without_words_still_stops_the_others() -> None:
    raised = run_ranks(2, outcome, {0: ValueError()})
    assert raised[0] == "ValueError: "
    assert raised[1].startswith("RuntimeError: ") and "ValueError" in raised[1]


def test_only_the_ranks_of_the_group_take_part() -> None:
    raised = run_ranks(3, outcome, {1: ValueError("second of the group")}, [0, 2])
    assert raised[0].startswith("RuntimeError: ") and "second of the group" in raised[0]
    assert raised[1:] == ["outside", "ValueError: second of the group"]


def test_without_distributed_an_error_is_raised_as_it_is() -> None:
    assert not dist.is_initialized()
    raise_together(None)
    error = ValueError("here")
    with pytest.raises(ValueError, match="here") as caught:
        raise_together(error)
    assert caught.value is error
