"""Which model is in memory: loaded on first use, unloaded for another when it is idle, with a played supervisor."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from ostinato.errors import BadOption
from ostinato.serve.errors import Refusal
from ostinato.serve.served_models import ServedModel, ServedModels, restored, stamp_of
from ostinato.serve.settings import ServeOptions

GIB = 2**30


class Played:
    """A supervisor and its workers: each model needs `need`, and the device has `whole` for all."""

    def __init__(self, needs: list[int], whole: int = 10, **words: Any) -> None:
        self.stamp = 0  # of the models' files
        names = [f"/x/m{index}.gguf" for index in range(len(needs))]
        options = ServeOptions(names[0], more_models=tuple(names[1:]), **words)
        self.now = 0.0
        self.models = ServedModels(
            options, [""] * len(needs), self._tell, clock=lambda: self.now, stamp=lambda _: self.stamp
        )
        self._needs, self._whole = needs, whole
        self.commands: list[dict[str, Any]] = []
        self.done = 0  # of the commands
        self.loaded: set[int] = set()

    def _tell(self, event: dict[str, Any]) -> None:
        self.commands.append(event)

    def play(self, *, fails: str | None = None) -> None:
        """Do what was told, until nothing more is."""
        while self.done < len(self.commands):
            command = self.commands[self.done]
            self.done += 1
            index = command["model"]
            match command["event"]:
                case "load":
                    self.models.heard({"event": "starting", "model": index})
                    self._ask(index)
                case "look":
                    self._ask(index)
                case "go" if fails is not None:
                    self.end(index, fails)
                case "go":
                    self.loaded.add(index)
                    self.models.heard({"event": "ready", "model": index, "context": 64})
                case "unload":
                    self.loaded.discard(index)
                    self.end(index, None, unloaded=True)

    def _ask(self, index: int) -> None:
        free = self._whole - sum(self._needs[one] for one in self.loaded)
        sizes = {"need_bytes": self._needs[index] * GIB, "usable_bytes": free * GIB, "whole_bytes": self._whole * GIB}
        self.models.heard({"event": "needs", "model": index, "device": "cpu", **sizes})

    def end(self, index: int, why: str | None, *, unloaded: bool = False, again: bool = False) -> None:
        how = {"unloaded": unloaded, "starting_another": again, "restarts": {}}
        self.models.heard({"event": "ended", "model": index, "why": why, **how})

    async def taken(self, index: int) -> ServedModel:
        """Use a model as a request does."""
        model = self.models.all[index]
        with self.models.waiting(model) as waiting:
            while not await waiting.taken():
                assert await waiting.change_within(5.0)
        return model

    async def begun(self, index: int) -> asyncio.Task[ServedModel]:
        """A request that waits."""
        task = asyncio.ensure_future(self.taken(index))
        await asyncio.sleep(0)
        return task


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_a_model_is_loaded_on_first_use_and_the_least_recently_used_idle_one_makes_room() -> None:
    async def work() -> None:
        played = Played([4, 4, 4])
        for index in (0, 1, 0, 2):
            task = await played.begun(index)
            played.play()
            played.now += 1
            played.models.release(await task)
        assert played.loaded == {0, 2}
        one = played.models.all[1]
        assert (one.state, one.n_loads, one.n_unloads) == ("unloaded", 1, 1)
        assert one.unloaded_for == "m2 needs 4.0 GiB, and 2.0 GiB are free on cpu"

    run(work())


def test_a_running_request_keeps_its_model_and_the_other_waits_until_it_ends() -> None:
    async def work() -> None:
        played = Played([6, 6])
        task = await played.begun(0)
        played.play()
        first = await task
        waiting = await played.begun(1)
        played.play()
        assert (played.loaded, waiting.done()) == ({0}, False)
        again = await played.begun(0)  # the model in memory goes on answering
        assert await again is first
        played.models.release(first)
        played.play()
        assert played.loaded == {0}
        played.models.release(first)
        played.play()
        assert (await waiting).id == "m1"
        assert played.loaded == {1}

    run(work())


def test_after_a_while_a_busy_model_takes_no_further_requests_and_so_no_request_waits_for_ever() -> None:
    async def work() -> None:
        played = Played([6, 6])
        played.models._patience_s = 0.01
        first = played.models.all[0]
        task = await played.begun(0)
        played.play()
        await task
        waiting = await played.begun(1)
        played.play()
        played.now += 1
        await asyncio.sleep(0.05)
        late = await played.begun(0)
        assert not late.done()
        played.models.release(first)
        played.play()
        second = await waiting
        assert played.loaded == {1}
        played.models.release(second)
        played.play()
        assert await late is first
        assert played.loaded == {0}

    run(work())


def test_only_one_busy_model_takes_no_further_requests_and_it_takes_them_again_when_there_is_room() -> None:
    async def work() -> None:
        played = Played([4, 4, 4])
        for index in (0, 0, 1, 1):
            task = await played.begun(index)
            played.play()
            await task
        first, second, _ = played.models.all
        waiting = await played.begun(2)
        played.play()
        played.now += 11
        played.models._make_room()
        played.models.release(first)  # it is no longer the one that was used longest ago
        played.models.release(second)
        assert [model.draining for model in played.models.all] == [True, False, False]
        played.models.release(first)
        played.play()
        assert (await waiting).id == "m2"
        assert played.loaded == {1, 2}
        assert await played.taken(1) is second

    run(work())


def test_a_busy_model_takes_requests_again_when_no_model_waits_for_its_memory() -> None:
    async def work() -> None:
        played = Played([6, 6])
        task = await played.begun(0)
        played.play()
        first = await task
        waiting = await played.begun(1)
        played.play()
        played.now += 11
        played.models._make_room()
        late = await played.begun(0)
        assert first.draining
        assert not late.done()
        played.end(1, "signal SIGKILL")
        assert await late is first
        with pytest.raises(Refusal, match="SIGKILL"):
            await waiting

    run(work())


def test_who_waits_for_memory_and_leaves_gives_the_claim_up() -> None:
    async def work() -> None:
        played = Played([6, 6])
        task = await played.begun(0)
        played.play()
        first = await task
        waiting = await played.begun(1)
        played.play()
        waiting.cancel()
        await asyncio.wait((waiting,))
        played.play()
        assert played.models.all[1].state == "unloaded"
        played.models.release(first)
        played.play()
        assert played.loaded == {0}

    run(work())


def test_models_max_unloads_although_there_is_memory() -> None:
    async def work() -> None:
        played = Played([1, 1], models_max=1)
        for index in (0, 1):
            task = await played.begun(index)
            played.play()
            played.models.release(await task)
        assert played.loaded == {1}
        assert "--models-max" in (played.models.all[0].unloaded_for or "")

    run(work())


def test_a_model_that_fails_to_load_is_told_and_not_tried_again_for_a_while() -> None:
    async def work() -> None:
        played = Played([1, 1])
        waiting = [await played.begun(1), await played.begun(1)]
        played.play(fails="/x/m1.gguf: it is damaged")
        for task in waiting:
            with pytest.raises(Refusal, match=r"m1 could not be loaded: m1\.gguf: it is damaged") as caught:
                await task
            assert (caught.value.status, caught.value.code) == (503, "model_failed")
        for wait_s in (10, 20, 40, 80, 160, 320, 600, 600):
            n_commands = len(played.commands)
            with pytest.raises(Refusal, match="it is damaged") as caught:
                await played.taken(1)
            assert caught.value.retry_after_s == wait_s
            assert len(played.commands) == n_commands  # no process was started, so no model made room
            played.now += wait_s
            task = await played.begun(1)
            played.play(fails="/x/m1.gguf: it is damaged")
            with pytest.raises(Refusal, match="it is damaged"):
                await task
        failed_files = played.models.all[1].failed_files
        assert failed_files is not None
        await failed_files  # a thread looks at the file
        played.stamp = 1  # it was replaced
        task = await played.begun(1)
        while played.done == len(played.commands) and not task.done():
            await asyncio.sleep(0.01)
        played.play()
        played.models.release(await task)
        assert played.models.all[1].n_failures == 9
        played.end(1, "signal SIGKILL")
        assert played.models.all[1].retry_at == played.now + 10

    run(work())


def test_a_model_that_fails_makes_another_leave_the_memory_once_and_not_with_each_request() -> None:
    async def work() -> None:
        played = Played([6, 6])
        for index in (0, 1, 0, 1, 0, 1):
            task = await played.begun(index)
            played.play(fails="it is damaged" if index else None)
            if index:
                with pytest.raises(Refusal, match="it is damaged"):
                    await task
            else:
                played.models.release(await task)
        assert played.models.all[0].n_unloads == 1

    run(work())


def test_a_server_without_a_model_in_memory_takes_requests_if_one_can_be_loaded() -> None:
    async def work() -> None:
        played = Played([1, 1])
        assert not played.models.wait_for_requests  # the first one is about to be loaded
        played.models.heard({"event": "starting", "model": 0})
        assert not played.models.wait_for_requests
        played.end(0, "it is damaged")
        assert played.models.wait_for_requests
        task = await played.begun(1)
        played.play(fails="it is damaged too")
        with pytest.raises(Refusal):
            await task
        assert not played.models.wait_for_requests

    run(work())


def test_a_slow_disk_delays_only_the_requests_to_the_model_that_failed() -> None:
    async def work() -> None:
        played = Played([1, 1])
        may, n_looks = threading.Event(), 0

        def stamp(_: str) -> object:
            nonlocal n_looks
            n_looks += 1
            assert may.wait(20)
            return 0

        played.models._stamp = stamp
        task = await played.begun(1)
        played.play(fails="it is damaged")
        with pytest.raises(Refusal, match="it is damaged"):
            await task
        try:
            asking = [await played.begun(1) for _ in range(3)]
            other = await played.begun(0)
            played.play()
            played.models.release(await other)
            asking[0].cancel()  # its client has gone; the others wait on
            for one in asking[1:]:
                with pytest.raises(Refusal, match="it is damaged"):
                    await one
            assert n_looks == 2  # when it failed, and once for the three requests
        finally:
            may.set()

    run(work())


def test_the_stamp_of_a_model_changes_with_its_files(tmp_path: Path) -> None:
    folder, file = tmp_path / "folder", tmp_path / "a.gguf"
    folder.mkdir()
    found = []
    for content in (b"", b"a", b"bb"):
        file.write_bytes(content)
        (folder / "config.json").write_bytes(content)
        found += [stamp_of(str(file)), stamp_of(str(folder))]
    assert all(found.count(one) == 1 for one in found)
    assert stamp_of(str(file)) == found[-2]
    assert stamp_of(str(tmp_path / "none.gguf")) is None


def test_a_model_too_large_for_the_device_is_tried_alone_so_that_its_process_says_what_is_missing() -> None:
    async def work() -> None:
        played = Played([4, 12])
        task = await played.begun(0)
        played.play()
        played.models.release(await task)
        waiting = await played.begun(1)
        played.play(fails="the weights need 12 GiB, and cpu has 10 GiB to give")
        with pytest.raises(Refusal, match="need 12 GiB, and cpu has 10 GiB"):
            await waiting
        assert played.models.all[0].state == "unloaded"

    run(work())


def test_requests_of_a_model_whose_process_dies_end_and_those_that_wait_go_to_the_next() -> None:
    async def work() -> None:
        played = Played([1, 1])
        task = await played.begun(0)
        played.play()
        model = await task
        ended: list[Refusal] = []
        model.in_flight.add(ended.append)
        played.end(0, "signal SIGKILL", again=True)
        assert [(one.status, one.code) for one in ended] == [(503, "engine_restarting")]
        late = await played.begun(0)
        assert not late.done()
        played._ask(0)
        played.play()
        assert await late is model

    run(work())


def test_a_new_front_has_no_model_load_where_another_is_in_memory() -> None:
    async def work() -> None:
        played = Played([6, 6])
        sizes = {"device": "cpu", "need_bytes": 6 * GIB, "usable_bytes": 10 * GIB, "whole_bytes": 10 * GIB}
        told: dict[str, list[dict[str, Any]]] = {
            "0": [{"event": "starting"}, {"event": "needs", **sizes}],
            "1": [{"event": "starting"}, {"event": "loads", **sizes}, {"event": "ready", "context": 64}],
        }
        restored(played.models, {key: [{**one, "model": int(key)} for one in some] for key, some in told.items()})
        assert [(one["event"], one["model"]) for one in played.commands] == [("unload", 1)]

    run(work())


def test_a_model_that_was_unloaded_for_the_front_before_has_not_failed() -> None:
    async def work() -> None:
        played = Played([1])
        played.models.heard({"event": "ready", "model": 0, "context": 64})
        played.end(0, None, unloaded=True)
        (model,) = played.models.all
        assert (model.state, model.n_failures) == ("unloaded", 0)

    run(work())


def test_random_requests_are_all_answered_and_memory_is_never_exceeded() -> None:
    async def work() -> None:
        draw = random.Random(5)
        needs, whole = [3, 4, 5, 6], 10
        played = Played(needs, whole)
        waiting: list[asyncio.Task[ServedModel]] = []
        running: list[ServedModel] = []
        for _ in range(2000):
            played.now += 1
            match draw.choice(["ask", "end", "end", "play"]):
                case "ask" if len(waiting) + len(running) < 8:
                    waiting.append(await played.begun(draw.randrange(4)))
                case "end" if running:
                    played.models.release(running.pop(draw.randrange(len(running))))
                case _:
                    played.play()
            await asyncio.sleep(0)
            running += [task.result() for task in waiting if task.done()]
            waiting = [task for task in waiting if not task.done()]
            assert sum(needs[index] for index in played.loaded) <= whole
            assert all(model.index in played.loaded for model in running)
        while waiting:
            while running:
                played.models.release(running.pop())
            played.play()
            await asyncio.sleep(0)
            running += [task.result() for task in waiting if task.done()]
            waiting = [task for task in waiting if not task.done()]

    run(work())


def test_names_and_aliases() -> None:
    options = ServeOptions("/x/a.gguf", more_models=("smollm2", "b"), alias=("one", "two=smollm2", "2=smollm2", "a=b"))
    # `a` is an alias of another model, and so not the first one's own name.
    assert options.names == (("one", "/x/a.gguf"), ("two", "2", "smollm2"), ("a", "b"))
    assert options.of_engine(1).names == (("two", "2", "smollm2"),)
    assert ServeOptions.from_json(options.to_json()) == options
    odd = ServeOptions("/x/a=b.gguf", alias=("c=d=a=b",))
    assert odd.names == odd.of_engine(0).names == (("c=d", "a=b", "/x/a=b.gguf"),)
    models = ServedModels(options, [""] * 3, print)
    assert models.find(None) is models.find("one") is models.find("one:latest") is models.all[0]
    assert models.find("2") is models.find("smollm2") is models.all[1]
    assert models.find("a") is models.find("b") is models.all[2]
    with pytest.raises(Refusal, match="'x' is not served here; 'one', 'two' and 'a' are") as caught:
        models.find("x")
    assert caught.value.status == 404
    anything = ServedModels(ServeOptions("a", more_models=("b",), alias=("x=b",), any_model=True), ["", ""], print)
    assert anything.find("gpt-4") is anything.all[0]
    assert anything.find("b") is anything.find("x") is anything.all[1]


def test_files_of_one_name_are_told_apart_by_aliases() -> None:
    paths = ("/q4/a.gguf", "/q8/a.gguf")
    one = ServeOptions(paths[0], more_models=paths[1:], alias=("large=/q8/a.gguf",))
    assert one.names == (("a", "/q4/a.gguf"), ("large", "/q8/a.gguf"))
    both = ServeOptions(paths[0], more_models=paths[1:], alias=("small", "large=/q8/a.gguf"))
    assert both.names == (("small", "/q4/a.gguf"), ("large", "/q8/a.gguf"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"alias": ("",)}, "--alias is empty"),
        ({"more_models": ("/other/a.gguf",)}, "two models are called 'a'"),
        ({"more_models": ("b",), "alias": ("x", "x=b")}, "two models are called 'x'"),
        ({"models_max": 0}, "--models-max"),
        (
            {"more_models": ("b",), "alias": ("x=c",)},
            "--alias x=c names no model that is given; .*'/models/a.gguf', 'b'",
        ),
    ],
)
def test_names_that_cannot_be_told_apart_are_refused(words: dict[str, Any], told: str) -> None:
    with pytest.raises(BadOption, match=told):
        ServeOptions("/models/a.gguf", **words)
