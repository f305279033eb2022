"""At most five lines turn a script for one device into one for many, and it prints the same losses."""

from __future__ import annotations

import difflib
import re
import runpy
from pathlib import Path

import jax
import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "frameworks"
EXAMPLES = sorted(FOLDER.glob("*.py"))
RANDOM = ["flax_linen"]  # has dropout, and so other masks on every device


def losses(script, capsys):
    with jax.numpy_dtype_promotion("standard"):
        runpy.run_path(str(script), run_name="__main__")
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_five_lines_differ_and_the_losses_do_not(script, capsys):
    plain = FOLDER / "one_device" / script.name
    lines = difflib.ndiff(plain.read_text().splitlines(), script.read_text().splitlines())
    assert 0 < sum(line.startswith("+ ") and line.strip() != "+" for line in lines) <= 5
    ours, theirs = losses(script, capsys), losses(plain, capsys)
    assert ours[-1] < ours[0] / 2
    assert theirs[-1] < theirs[0] / 2
    if script.stem not in RANDOM:
        assert ours == pytest.approx(theirs, rel=1e-3)


def test_every_script_has_one_for_one_device():
    assert [path.name for path in EXAMPLES] == sorted(path.name for path in (FOLDER / "one_device").glob("*.py"))
    assert len(EXAMPLES) == 4
