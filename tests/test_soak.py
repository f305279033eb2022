"""The short form of `benchmarks/soak.py`: a run killed eight times ends where one left alone does, to the bit."""

import subprocess
import sys
from pathlib import Path

SOAK = Path(__file__).parent.parent / "benchmarks" / "soak.py"


def test_eight_kills_change_nothing():
    # In a process of its own, which has started nothing: it forks.
    command = [sys.executable, SOAK, "--kills", "8", "--steps", "80"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    kills, cut = (int(done.stdout.split()[i]) for i in (0, 2))
    assert kills == 8
    assert cut >= 2, done.stdout
