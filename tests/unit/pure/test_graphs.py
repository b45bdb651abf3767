"""The cache of CUDA graphs: what is captured, where it is replayed, and when something is launched instead."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_muon.orthogonalize import graphs
from ds_muon.orthogonalize.graphs import GraphCache

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")


class FakeGraph:
    """What the cache knows of a graph, without a device: a replay does the work that was captured."""

    def __init__(self, source: Any, memory: Any, work: Callable[..., object]) -> None:
        self.last_run, self.device, self._work = 0, torch.device("cuda"), work
        self._memory, self._source = memory, source
        made.append(self)

    def replay(self, source: Any) -> None:
        self._work("replay", self._memory)


made: list[FakeGraph] = []


def on_fake_device(monkeypatch: pytest.MonkeyPatch, places: Sequence[int | tuple[str, int]]) -> tuple[int, int]:
    """How often batches that come by at these addresses, of kinds or of one, are captured, and launched."""
    monkeypatch.setattr(graphs, "_Graph", FakeGraph)
    made.clear()
    cache = GraphCache()
    done: list[tuple[str, int, str]] = []
    wanted = [place if isinstance(place, tuple) else ("key", place) for place in places]
    for key, address in wanted:
        memory: Any = SimpleNamespace(data_ptr=lambda address=address: address)
        source: Any = SimpleNamespace(is_cuda=True)

        def work(source: Any, memory: Any, key: str = key) -> None:
            done.append((key, memory.data_ptr(), "replay" if source == "replay" else "launch"))

        cache.run(key, source, memory, work)
    # Each was done, once, and what was replayed was captured of this kind and at this address.
    assert [(key, address) for key, address, _ in done] == wanted
    return len(made), sum(how == "launch" for _, _, how in done)


def test_a_batch_is_launched_then_captured_at_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_fake_device(monkeypatch, [1, 1, 1, 1]) == (1, 1)
    assert on_fake_device(monkeypatch, [1, 2, 1, 2, 3, 1]) == (2, 3)
    assert on_fake_device(monkeypatch, range(100)) == (0, 100)


def test_kinds_of_batches_that_share_an_address_have_a_graph_each(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_fake_device(monkeypatch, [("a", 1), ("b", 1)] * 3) == (2, 2)
    assert on_fake_device(monkeypatch, [("a", 1), ("b", 1), ("a", 2), ("a", 1), ("b", 2), ("b", 1), ("a", 2)]) == (3, 4)


def test_addresses_that_come_by_rarely_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_MOST_SEEN", 4)
    assert on_fake_device(monkeypatch, list(range(5)) * 10) == (0, 50)
    assert on_fake_device(monkeypatch, list(range(4)) * 10) == (4, 4)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
@pytest.mark.parametrize(("method", "made"), [("__init__", 0), ("replay", 2)])
def test_a_graph_that_cannot_be_made_or_launched_ends_captures_and_the_batch_is_done(
    method: str, made: int, error: type[RuntimeError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise error("CUDA error")

    monkeypatch.setattr(FakeGraph, method, fail)
    assert on_fake_device(monkeypatch, [1, 1, 1, 2, 2]) == (made, 5)


def test_what_failed_when_it_was_launched_is_not_captured_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_Graph", FakeGraph)
    made.clear()
    cache = GraphCache()
    memory: Any = SimpleNamespace(data_ptr=lambda: 1)
    source: Any = SimpleNamespace(is_cuda=True)

    def fail(source: Any, memory: Any) -> None:
        raise ValueError("a kernel does not compile")

    with pytest.raises(ValueError):
        cache.run("key", source, memory, fail)
    cache.run("key", source, memory, lambda source, memory: None)
    assert not made
    cache.run("key", source, memory, lambda source, memory: None)
    assert len(made) == 1


def test_clear_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(graphs, "_Graph", FakeGraph)
    made.clear()
    cache, calls = GraphCache(), []
    memory: Any = SimpleNamespace(data_ptr=lambda: 1)
    source: Any = SimpleNamespace(is_cuda=True)
    for clears in (False, False, True, False):
        if clears:
            cache.clear()
        cache.run("key", source, memory, lambda source, memory: calls.append(source))
    assert calls == [source, "replay", source, "replay"] and len(made) == 2 and waited == [torch.device("cuda")]


def test_more_kinds_than_graphs_are_not_captured_over_and_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_MOST_GRAPHS", 4)
    assert on_fake_device(monkeypatch, list(range(5)) * 100) == (4, 5 + 99)
    # Until those that have one come by no more.
    monkeypatch.setattr(graphs, "_FORGOTTEN", 10)
    assert on_fake_device(monkeypatch, [*list(range(4)) * 2, *[7] * 20])[0] == 5
    assert on_fake_device(monkeypatch, [*list(range(4)) * 2, *list(range(4, 8)) * 20])[0] == 8


@needs_gpu
def test_a_graph_is_for_one_address_and_those_not_used_for_long_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_MOST_GRAPHS", 2)
    monkeypatch.setattr(graphs, "_FORGOTTEN", 0)
    cache, captures = GraphCache(), []

    def work(source: Tensor, memory: Tensor) -> None:
        captures.append(torch.cuda.is_current_stream_capturing())
        torch.add(source, 1, out=memory)

    memories = [torch.empty(5, device=DEVICE) for _ in range(3)]
    for step in range(4):
        for memory in memories[: 2 if step < 3 else 3]:
            source = torch.full((5,), float(step), device=DEVICE)
            cache.run("key", source, memory.zero_(), work)
            assert torch.equal(memory, source + 1)
    # Launched, captured, replayed twice; the third one came once.
    assert captures == [False, False, True, True, False]
    cache.run("key", source, memories[2], work)
    assert captures[-1] and len(cache._graphs) == 2
    cache.run("key", source, memories[0].zero_(), work)
    assert captures[-1] and torch.equal(memories[0], source + 1)


@needs_gpu
def test_a_graph_takes_its_source_from_any_stream() -> None:
    cache, memory = GraphCache(), torch.empty(1 << 20, device=DEVICE)

    def work(source: Tensor, memory: Tensor) -> None:
        torch.add(memory.zero_(), source, out=memory)

    sources = [torch.full((1,), float(value), device=DEVICE) for value in range(2)]
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    results = []
    torch.cuda.synchronize()
    for step in range(12):
        with torch.cuda.stream(streams[step // 2 % 2]):
            # Milliseconds, in which nothing but the cache keeps the other stream from overtaking.
            torch.cuda._sleep(5_000_000)
            cache.run("key", sources[step % 2], memory, work)
            results.append(memory.clone())
    torch.cuda.synchronize()
    assert len(cache._graphs) == 1
    for step, result in enumerate(results):
        assert torch.equal(result, torch.full_like(result, float(step % 2))), step


@needs_gpu
def test_what_cannot_be_captured_is_launched() -> None:
    cache, calls = GraphCache(), []

    def work(source: Tensor, memory: Tensor) -> None:
        calls.append(torch.cuda.is_current_stream_capturing())
        if calls[-1]:
            raise torch.OutOfMemoryError("no memory for a graph")
        memory.copy_(source)

    source = torch.arange(5, dtype=torch.uint8, device=DEVICE)
    memory = torch.empty_like(source)
    for _ in range(4):
        cache.run("key", source, memory.zero_(), work)
        assert torch.equal(memory, source)
    assert calls == [False, True, False, False, False]


@needs_gpu
def test_what_cuda_does_not_let_be_captured_is_launched() -> None:
    cache = GraphCache()

    def work(source: Tensor, memory: Tensor) -> None:
        torch.cuda.synchronize()  # which no capture allows
        memory.copy_(source)

    source = torch.arange(5, dtype=torch.uint8, device=DEVICE)
    memory = torch.empty_like(source)
    for _ in range(3):
        cache.run("key", source, memory.zero_(), work)
        assert torch.equal(memory, source)
    assert not cache._graphs
    # Neither torch's generators nor its allocator take the broken capture for one that goes on.
    assert torch.rand(5, device=DEVICE).unique().numel() == 5
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, other, size = torch.cuda.memory_reserved(), torch.cuda.Stream(), 1 << 25
    for _ in range(8):
        torch.empty(size, dtype=torch.uint8, device=DEVICE).record_stream(other)
        torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() - before < 2 * size


@needs_gpu
def test_nothing_is_collected_during_a_capture() -> None:
    cache, enabled = GraphCache(), []

    def work(source: Tensor, memory: Tensor) -> None:
        enabled.append(gc.isenabled())
        memory.copy_(source)

    source = torch.arange(5, device=DEVICE)
    memory = torch.empty_like(source)
    for _ in range(3):
        cache.run("key", source, memory, work)
    assert enabled == [True, False] and gc.isenabled()
