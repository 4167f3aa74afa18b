from __future__ import annotations

import itertools
import multiprocessing
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from data.memory_store import MemoryStore, random_store
from headway.account.errors import UserError
from headway.data.feed import Feeder
from headway.data.global_batch import Position
from headway.data.stream import Stream, StreamOptions
from headway.data.view import View, ViewOptions, Weighted


def make(store: MemoryStore, **options: object) -> Stream:
    view = View([Weighted(store)], ViewOptions(40, "drop"))
    return Stream(view, StreamOptions(**{"slots": 48, "sequences_per_step": 3, **options}))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("headway-")]


@pytest.mark.parametrize(("world", "process"), [(1, False), (3, False), (3, True)])
def test_feeds_what_the_stream_holds_over_epochs_from_any_position(world: int, process: bool) -> None:
    stream = make(random_store(40))
    start = stream.global_batch(Position()).next
    steps = stream.steps_in_epoch(0) + stream.steps_in_epoch(1)
    for rank in range(world):
        position = start
        with Feeder(stream, start, rank, world, process=process) as feeder:
            for fed in itertools.islice(feeder, steps):
                batch = stream.global_batch(position)
                assert (fed.batch.position, fed.batch.next) == (position, batch.next)
                for mine, expected in zip(fed.micro_batches, batch.micro_batches(rank, world), strict=True):
                    assert mine.input_ids.equal(expected.input_ids) and mine.labels.equal(expected.labels)
                position = batch.next
        assert position.epoch == 2


def test_it_runs_ahead_but_not_further_than_asked() -> None:
    store = random_store(200)
    stream = make(store)
    pieces = [len(batch.documents) for batch in itertools.islice(stream.epoch(0), 3)]
    with Feeder(stream, Position(), depth=2):
        deadline = time.monotonic() + 20
        while store.token_reads < sum(pieces) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)  # it would read on if nothing held it
        # Two batches wait in the queue and the third is ready to go in.
        assert store.token_reads == sum(pieces)


@pytest.mark.parametrize("process", [False, True])
def test_an_error_reaches_the_consumer_after_the_batches_before_it(process: bool) -> None:
    documents = [[1, 2, 3]] * 40
    store = MemoryStore(documents, name="bad.jsonl", vocab_size=100)
    stream = make(store, slots=3, sequences_per_step=1)
    broken = int(stream.global_batch(Position(0, 5)).documents[0])
    store._tokens[broken] += 500
    with Feeder(stream, Position(), depth=2, process=process) as feeder:
        assert [next(feeder).batch.position.documents for _ in range(5)] == [0, 1, 2, 3, 4]
        for _ in range(2):
            with pytest.raises(UserError, match=rf"bad\.jsonl:{broken + 1}"):
                next(feeder)


def test_closing_early_twice_and_while_waiting() -> None:
    feeder = Feeder(make(random_store(40)), Position(), depth=1)
    next(feeder)
    feeder.close()
    feeder.close()
    with pytest.raises(StopIteration):
        next(feeder)


def test_closing_ends_a_process_that_hangs_and_leaves_none_behind() -> None:
    store = random_store(40)
    store.tokens = lambda *arguments: time.sleep(600)  # type: ignore[method-assign]
    feeder = Feeder(make(store), Position(), process=True)
    started = time.monotonic()
    feeder.close()
    feeder.close()
    assert time.monotonic() - started < 60
    assert not [child for child in multiprocessing.active_children() if child.name == "headway-builder"]


def test_closing_frees_a_waiting_consumer() -> None:
    store = random_store(40)
    gate = threading.Event()
    tokens = store.tokens

    def slow(*arguments: int):  # type: ignore[no-untyped-def]
        gate.wait(20)
        return tokens(*arguments)

    store.tokens = slow  # type: ignore[method-assign]
    feeder = Feeder(make(store), Position())
    ended: list[str] = []
    consumer = threading.Thread(target=lambda: ended.extend("fed" for _ in feeder) or ended.append("end"))
    consumer.start()
    feeder._closing.set()
    consumer.join(20)
    assert not consumer.is_alive() and ended == ["end"]
    gate.set()
    feeder.close()


def test_the_next_epoch_is_planned_before_it_is_needed() -> None:
    stream = make(random_store(300))
    halfway = stream.steps_in_epoch(0) // 2
    with Feeder(stream, Position(), depth=1) as feeder:
        for _ in range(halfway + 3):
            next(feeder)
        deadline = time.monotonic() + 20
        while len(stream._plans._plans) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (1, frozenset()) in stream._plans._plans


def test_a_next_epoch_that_cannot_be_planned_stops_only_who_gets_there() -> None:
    stream = make(random_store(30))
    everything = stream.with_quarantine([(0, doc) for doc in range(30)], epoch=0)
    steps = stream.steps_in_epoch(0)
    with Feeder(everything, Position()) as feeder:
        assert len(list(itertools.islice(feeder, steps))) == steps
        with pytest.raises(UserError, match="epoch 1 has nothing to train on"):
            next(feeder)


def test_batches_come_on_the_device() -> None:
    with Feeder(make(random_store(10)), Position(), device="meta") as feeder:
        assert next(feeder).micro_batches[0].input_ids.device == torch.device("meta")
