"""What takes far longer than usual is said, with the stacks of all threads."""

from __future__ import annotations

import io
import threading

import pytest

from jaxshard.train.watchdog import MEMORY, Watchdog


class Pages(io.StringIO):
    """A file that can be waited for."""

    def __init__(self):
        super().__init__()
        self._grown = threading.Condition()

    def write(self, text: str) -> int:
        with self._grown:
            self._grown.notify_all()
            return super().write(text)

    def wait(self, text: str) -> str:
        with self._grown:
            assert self._grown.wait_for(lambda: text in self.getvalue(), timeout=60), self.getvalue()
            return self.getvalue()


class Clock:
    """Time that passes when it is told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_limit_follows_what_is_usual():
    """Oracle: the longest of the latest intervals but for the first of each kind, by hand."""
    clock = Clock()
    watchdog = Watchdog(times=10, least_seconds=5, first_seconds=100, clock=clock)

    def takes(what: str, seconds: float) -> None:
        watchdog.at(what)
        clock.now += seconds

    takes("step 1", 60)
    assert watchdog.limit(first=True) == 100
    takes("step 2", 0.3)
    assert watchdog.limit(first=False) == 5, "the first step compiles, and does not count"
    takes("step 3", 2)
    takes("saving step 3", 50)
    assert watchdog.limit(first=False) == 20
    takes("step 4", 0.1)
    takes("saving step 4", 4)
    takes("step 5", 0.1)
    assert watchdog.limit(first=False) == 40, "what is not the first of its kind does"
    assert watchdog.limit(first=True) == 100
    for step in range(MEMORY + 1):
        takes(f"step {step}", 0.1)
    assert watchdog.limit(first=False) == 5, "what was long ago does not"


def test_a_step_that_hangs_is_said_once_and_when_it_goes_on():
    file, go = Pages(), threading.Event()

    def waits_for_another():
        go.wait()

    thread = threading.Thread(target=waits_for_another, name="reader of batches", daemon=True)
    thread.start()
    with Watchdog(times=2, least_seconds=0.01, first_seconds=0, file=file) as watchdog:
        for step in (40, 41, 42):
            watchdog.at(f"step {step}")
        said = file.wait("test_a_step_that_hangs")
        assert "step 42 has taken " in said
        assert "the longest of the last 1 took " in said
        assert "thread reader of batches:" in said
        assert "in waits_for_another" in said
        assert said.index("thread reader") < said.index("thread MainThread:"), "the main thread is read first, last"
        assert "thread jaxshard: watchdog" not in said
        go.set()
        watchdog.at("step 43")
        said = file.wait("step 42 went on, after ")
        assert said.count("step 42 has taken ") == 1
    thread.join()


def test_what_is_as_usual_is_not_said():
    file, clock = io.StringIO(), Clock()
    with Watchdog(times=3, least_seconds=1, first_seconds=10, file=file, clock=clock) as watchdog:
        for step in range(3):
            watchdog.at(f"step {step}")
            clock.now += 0.9
        watchdog.at("saving step 2")
        clock.now += 9
    assert file.getvalue() == ""


def test_it_can_be_off():
    file = io.StringIO()
    before = threading.active_count()
    with Watchdog(times=0, least_seconds=0, first_seconds=0, file=file) as watchdog:
        watchdog.at("step 1")
        assert threading.active_count() == before
    assert file.getvalue() == ""


@pytest.mark.parametrize("name", ["times", "least_seconds", "first_seconds"])
def test_bad_numbers(name):
    with pytest.raises(ValueError, match=rf"Watchdog\({name}=-1.0\): it must be 0 or more"):
        Watchdog(**{name: -1.0})  # pyright: ignore[reportArgumentType]
