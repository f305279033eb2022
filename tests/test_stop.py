"""A run that is asked to stop finishes its step; of several processes all stop after the same one."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from several import Process, environment, processes, script

from jaxshard.train.stop import SIGNALS, Stop

RUN = """
import os, signal, sys, threading
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxshard.train.processes import index, initialize, is_first, told_to_others
from jaxshard.train.stop import Stop

initialize()
mesh = jax.make_mesh((jax.device_count(),), ("d",))
zeros = np.zeros((jax.device_count(), 4), "float32")
x = jax.make_array_from_callback(zeros.shape, NamedSharding(mesh, P("d")), lambda part: zeros[part])
step_fn = jax.jit(lambda x: x + x.sum() + 1, donate_argnums=0, out_shardings=NamedSharding(mesh, P("d")))
last = int(sys.argv[1])
with told_to_others(), Stop() as stop:
    for step in range(1, last + 1):
        x = step_fn(x).block_until_ready()
        if step == 3:
            print("step 3", flush=True)
        if stop.asked(step):
            break
print("stopped after", step)
"""
LONG = str(10**9)


@pytest.mark.parametrize(
    "signals",
    [{1: signal.SIGTERM}, {0: signal.SIGINT}, {0: signal.SIGTERM, 1: signal.SIGINT}],
    ids=["one", "first", "all"],
)
def test_all_processes_stop_after_the_same_step(signals):
    """Whichever are asked; in a step that one of them does not make, the others would wait for ever."""
    with processes(script(RUN, LONG), devices=1) as job:
        for one in job:
            one.expect("step 3")
        for i, number in signals.items():
            job[i].signal(number)
        assert [one.wait() for one in job] == [0, 0], [one.out for one in job]
    last = [one.lines[-1] for one in job]
    assert last[0].startswith("stopped after ")
    assert last[0] == last[1]
    assert int(last[0].split()[-1]) > 3
    heard = "jaxshard: stops after this step, and saves; Ctrl-C again leaves at once" in job[0].lines
    assert heard == (signals.get(0) == signal.SIGINT)


def test_signals_at_any_moment():
    """To some, all or none, also after the last step. Oracle: all made the same number of steps."""
    text = (
        RUN[: RUN.index("last =")]
        + """
import random
from jaxshard.train.processes import agree
early = []
for i in range(int(sys.argv[1])):
    chance = random.Random(f"{i} of {index()}")
    number = chance.choice([signal.SIGTERM, signal.SIGINT])
    sent = threading.Timer(chance.uniform(0, 0.5), os.kill, [os.getpid(), number])
    with Stop() as stop:
        if chance.random() < 0.7:
            sent.start()
        for step in range(1, 501):
            x = step_fn(x).block_until_ready()
            if stop.asked(step):
                early.append(step)
                break
        if sent.is_alive():
            sent.join()
    agree("last step", {"step": step})
print("stopped early", len(early))
"""
    )
    with processes(script(text, "10"), devices=1) as job:
        assert [one.wait() for one in job] == [0, 0], [one.out for one in job]
    assert 0 < int(job[0].lines[-1].split()[-1]) <= 10


@pytest.mark.parametrize("number", SIGNALS)
def test_one_process_stops_after_its_step(number):
    before = {one: signal.getsignal(one) for one in SIGNALS}
    with Stop() as stop:
        assert not stop.asked(1)
        os.kill(os.getpid(), number)
        assert stop.asked(2)
        assert stop.asked(3)
    assert {one: signal.getsignal(one) for one in SIGNALS} == before
    assert signal.set_wakeup_fd(-1) == -1
    with Stop() as stop:
        assert not stop.asked(4)


def test_a_second_interrupt_leaves_at_once():
    """Also while the main thread is in a computation that does not end, where Python runs no handler."""
    text = """
import jax
from jaxshard.train.stop import Stop
with Stop():
    print("begins", flush=True)
    jax.lax.while_loop(lambda x: x < 1, lambda x: x * 0, 0.0).block_until_ready()
"""
    one = Process(script(text), environment(1))
    one.expect("begins")
    one.signal(signal.SIGINT)
    one.expect("stops after this step")
    one.signal(signal.SIGINT)
    one.expect("left at once")
    assert one.wait() == 130


def test_only_the_main_thread_hears_signals():
    said = []

    def enter():
        try:
            Stop().__enter__()
        except RuntimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread alone: enter it there" in said[0]
