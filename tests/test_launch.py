"""The launcher: processes of one job start together, end together and start again; and a job trains as one process."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from several import Process, environment, script

from jaxshard.cli import main

LAUNCH = """
import json, sys
from jaxshard.train import launch
text, options = sys.argv[1], json.loads(sys.argv[2])
launch.GRACE = options.pop("grace", 60)
gpus = ["0,1", "2,3", "4,5"]
options["environment"] = lambda place: {"CUDA_VISIBLE_DEVICES": gpus[place]}
sys.exit(launch.launch([sys.executable, "-c", text, *sys.argv[3:]], **options))
"""

CHILD = """
import os, signal, sys
index, count = int(os.environ.get("JAX_PROCESS_ID", "0")), int(os.environ["JAX_NUM_PROCESSES"])

def wait_for_others(folder):
    "Until all have come here."
    from pathlib import Path
    Path(folder, f"{index} of {count}").touch()
    while len(list(Path(folder).glob(f"* of {count}"))) < count:
        pass
"""
"""The beginning of what is launched: where the launcher is tested, JAX is not needed."""


def launched(text: str, options: str, *args: str) -> Process:
    """A launcher under way, in a process of its own. options: of `launch`, as JSON."""
    return Process(script(LAUNCH, CHILD + text, options, *args), environment(1))


def test_what_processes_print_is_passed_on():
    """Where it was printed, but for what the CPU collectives say of their connections, which runs into itself."""
    text = """
print("out", index)
print("[Gloo] Rank 3 is connected to [Gloo] Rank 72 is connected to 7 peer ranks. ")
print("7 peer ranks. Expected number of connected peer ranks is : 7")
print(7, "peer ranks are not enough")
print("err", index, file=sys.stderr)
"""
    command = script(LAUNCH, CHILD + text, '{"count": 3}')
    done = subprocess.run(command, env=environment(1), capture_output=True, text=True, check=True)
    for said, lines in {done.stdout: ["out {}", "7 peer ranks are not enough"], done.stderr: ["err {}"]}.items():
        expected = [f"[{i}] {line}".removeprefix("[0] ").format(i) for line in lines for i in range(3)]
        assert sorted(said.splitlines()) == sorted(expected)


@pytest.mark.parametrize("dead", [0, 1])
def test_one_that_is_killed_ends_the_job(dead):
    """And is named, with its last lines; not another that it took with it, here one that aborts, as JAX does."""
    text = """
print("pid", index, os.getpid(), flush=True)
if index == int(sys.argv[1]):
    for i in range(30):
        print("line", i, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if index == 2:
    os.abort()
signal.pause()
"""
    one = launched(text, '{"count": 3}', str(dead))
    assert one.wait() == 128 + signal.SIGKILL
    how = f"process {dead} was ended by SIGKILL (was there memory enough?)"
    said = one.lines.index(f"jaxshard: {how}, and the job with it. Its last lines:")
    assert one.lines[said + 1 :] == [f"    line {i}" for i in range(10, 30)]
    pids = [int(line.split()[-1]) for line in one.lines if "pid" in line]
    assert len(pids) == 3
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_it_starts_again_with_all(tmp_path):
    """Until it succeeds, or no restart is left."""
    text = """
from pathlib import Path
runs = Path(sys.argv[1], str(index))
runs.mkdir(exist_ok=True)
(runs / str(len(list(runs.iterdir())))).touch()
print("run", len(list(runs.iterdir())), "of", count, os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
wait_for_others(sys.argv[1])
if len(list(runs.iterdir())) > int(sys.argv[2]):
    sys.exit(0)
if index == 1:
    sys.exit(3)
signal.pause()
"""
    (tmp_path / "a").mkdir()
    one = launched(text, '{"count": 2, "restarts": 2, "grace": 0}', str(tmp_path / "a"), "1")
    assert one.wait() == 0
    assert sorted(line for line in one.lines if "run" in line and line[0] != " ") == [
        "[1] run 1 of 2 2,3",
        "[1] run 2 of 2 2,3",
        "run 1 of 2 0,1",
        "run 2 of 2 0,1",
    ]
    assert "jaxshard: process 1 ended with code 3, and the job with it. Its last lines:" in one.lines
    assert "jaxshard: starts again with 2 processes, from the last checkpoint: restart 1 of 2" in one.lines

    (tmp_path / "b").mkdir()
    one = launched(text, '{"count": 2, "restarts": 1, "grace": 0}', str(tmp_path / "b"), "9")
    assert one.wait() == 3
    assert one.out.count("jaxshard: process 1 ended with code 3") == 2
    assert one.out.count("starts again") == 1


def test_a_restart_can_leave_out_the_one_that_failed(tmp_path):
    """With its GPUs; down to a number; and one process that is left is no job that waits for others."""
    text = """
print("run", index, "of", count, os.environ["CUDA_VISIBLE_DEVICES"], sorted(x for x in os.environ if "COORD" in x))
wait_for_others(sys.argv[1])
sys.exit(0 if count == 1 else 4 if index == 1 else signal.pause())
"""
    one = launched(text, '{"count": 3, "restarts": 5, "fewest": 1, "grace": 0}', str(tmp_path))
    assert one.wait() == 0
    variables = "['JAX_COORDINATOR_ADDRESS', 'JAX_COORDINATOR_BIND_ADDRESS']"
    runs = [
        line.removeprefix("[1] ").removeprefix("[2] ") for line in one.lines if "] run" in line or "run" in line[:4]
    ]
    assert sorted(runs[:3]) == [f"run {i} of 3 {2 * i},{2 * i + 1} {variables}" for i in range(3)]
    assert sorted(runs[3:5]) == [f"run 0 of 2 0,1 {variables}", f"run 1 of 2 4,5 {variables}"]
    assert runs[5:] == ["run 0 of 1 0,1 []"]
    assert "jaxshard: starts again with 1 process, from the last checkpoint: restart 2 of 5" in one.lines


def test_a_mistake_is_not_repeated():
    """It has been said in a line, to which nothing is added."""
    one = launched("print('jaxshard: a mistake')\nsys.exit(2)", '{"count": 2, "restarts": 5}')
    assert one.wait() == 2
    assert sorted(one.lines) == ["[1] jaxshard: a mistake", "jaxshard: a mistake"]


LISTEN = """
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), os._exit(0)))
signal.signal(signal.SIGINT, lambda *_: print("heard", flush=True))
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_a_request_to_stop_is_passed_on():
    """All of them save and end well: so does the job, and is not started again."""
    one = launched(LISTEN, '{"count": 2, "restarts": 5}')
    one.expect("ready")
    one.expect("ready")
    one.signal(signal.SIGTERM)
    assert one.wait() == 0
    assert sorted(one.lines) == ["[1] ready", "[1] saved", "ready", "saved"]


def test_a_second_interrupt_ends_all_at_once():
    one = launched(LISTEN, '{"count": 2, "restarts": 5}')
    one.expect("ready")
    one.expect("ready")
    one.signal(signal.SIGINT)
    one.expect("heard")
    one.expect("heard")
    one.signal(signal.SIGINT)
    assert one.wait() == 130
    assert one.lines[-1] == "jaxshard: stopped"


def test_processes_do_not_outlive_the_launcher(tmp_path):
    """Whatever ends it, and though they wait in something that nothing can reach."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    text = """
from jaxshard.train.processes import initialize
pipe = os.open(sys.argv[1], os.O_WRONLY)
initialize()
print("ready", flush=True)
while True:
    signal.pause()
"""
    one = launched(text, '{"count": 2}', str(fifo))
    with fifo.open() as ends:
        one.expect("ready")
        one.expect("ready")
        one.signal(signal.SIGKILL)
        assert ends.read() == "", "it ends when nobody can write to it any more"
    assert one.wait() == -signal.SIGKILL


COMMAND = importlib.import_module("jaxshard.cli.launch")
CONFIG = str(Path(__file__).parent.parent / "configs" / "zero3.toml")


def test_options_come_apart(monkeypatch):
    """Those of the launcher from those of `jaxshard train`, wherever they stand."""
    asked = {}

    def run(line, **options):
        asked.update(options, line=line, gpus=[options["environment"](i) for i in range(options["count"])])
        return 7

    monkeypatch.setattr(COMMAND, "run", run)
    args = ["launch", "--processes", "2", "--devices=4", CONFIG, "--steps", "3", "--restarts", "1", "--run.dir", "x"]
    assert main([*args, "--min-processes", "1", "--fresh"]) == 7
    train = [sys.executable, "-m", "jaxshard", "train", CONFIG]
    assert asked["line"] == [*train, "--steps", "3", "--run.dir", "x", "--fresh", "--devices", "4"]
    assert (asked["count"], asked["restarts"], asked["fewest"], asked["gpus"]) == (2, 1, 1, [{}, {}])

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,0")
    assert main(["launch", "--processes", "2", "--gpu", "--devices", "2", CONFIG]) == 7
    cuda = {"JAX_PLATFORMS": "cuda"}  # else JAX would train on a CPU where there is no GPU
    assert asked["gpus"] == [{"CUDA_VISIBLE_DEVICES": "4,5", **cuda}, {"CUDA_VISIBLE_DEVICES": "6,7", **cuda}]
    assert asked["line"] == [*train, "--mesh.devices", "None"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([CONFIG], "--processes 0: how many to start, 1 or more"),
        (["--processes", "2"], "launch needs a TOML file"),
        (["--processes", "2", "absent.toml"], "cannot read absent.toml"),
        (
            ["--proceses", "2", CONFIG],
            "--proceses before the TOML file is no option of launch, which are --processes, ",
        ),
        (["--steps", "2", CONFIG], "keys of the file come after it"),
        (["--processes", "two", CONFIG], "invalid literal for int"),
        (["--processes", "2", "--devices", "0", CONFIG], "--devices 0: of each process, 1 or more"),
        (["--processes", "2", "--restarts", "-1", CONFIG], "--restarts -1: 0 or more"),
        (["--processes", "2", "--restarts", "1", "--min-processes", "3", CONFIG], "at most --processes 2"),
        (["--processes", "2", "--min-processes", "1", CONFIG], "--min-processes is for restarts"),
        (["--processes", "2", "--gpu", CONFIG], "--gpu needs --devices"),
        (["--processes", "2", "--gpu", "--devices", "2", CONFIG], "2 processes x 2 GPUs are 4, and CUDA_VISIBLE_"),
    ],
    ids=lambda value: " ".join(value).replace(CONFIG, "CONFIG") if isinstance(value, list) else None,
)
def test_mistakes_take_one_line_and_start_nothing(args, message, monkeypatch, capsys):
    monkeypatch.setattr(COMMAND, "run", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert main(["launch", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err
