"""What the README says is so: its example runs and learns, its table of strategies is what the code computes."""

import re
import runpy
import sys
from fractions import Fraction
from pathlib import Path

import pytest

import jaxshard as js
from jaxshard.preflight import target
from jaxshard.preflight.line import Line, examine
from jaxshard.train.checkpoint import describe
from jaxshard.train.costs import rows

README = Path(__file__).parents[1] / "README.md"
# The largest model is asked of a target, in tests of its own.
EXAMPLES = [one for one in sorted((README.parent / "examples").glob("*.py")) if one.stem != "largest_model"]


@pytest.mark.smoke
def test_the_example_with_ones_own_loss_trains(tmp_path, capsys):
    script = tmp_path / "example.py"
    script.write_text(_code()[0])
    left = runpy.run_path(str(script))
    printed = capsys.readouterr().out
    assert float(printed.splitlines()[0]) < 0.1, "targets of 1 and predictions of 0 begin at a loss of 1"
    assert "reduce_scatter" in printed
    assert left["state"].step == 100


def test_a_loop_of_ones_own_saves_and_goes_on(tmp_path, monkeypatch):
    """Twice: the second time there is nothing left to do but to read the last state."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "example.py"
    script.write_text(_code()[0] + _code()[2])
    first = runpy.run_path(str(script))
    assert first["checkpoints"].steps() == [150, 200]
    second = runpy.run_path(str(script))
    assert int(second["state"].step) == int(first["state"].step) == 200
    assert describe("runs/mine").notes == {"seen": 102400}


def _code() -> list[str]:
    """The README's programs: an example that trains, a function for `compare`, a loop that goes on with the first."""
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_function_for_compare_is_one(tmp_path):
    code = _code()[1]
    script = tmp_path / "mine.py"
    script.write_text(code)
    build = runpy.run_path(str(script))["build"]
    row = examine(build, Line(strategy="zero3", options={"accumulate": 2}), target.parse("cpu:8"), None, {}, None)
    assert row.held["params"] == (4096 * 4096 + 4096 * 256) * 4 // 8
    assert not row.broken


@pytest.mark.parametrize("name", [row.names[0] for row in rows(8)])
def test_the_table_of_strategies(name):
    (cost,) = [row.cost for row in rows(8) if row.names[0] == name]
    section = README.read_text().partition("## Strategies")[2].partition("\n## ")[0]
    (line,) = [line for line in section.splitlines() if line.startswith(f"| `{name}`")]
    said = [float(Fraction(cell.strip())) for cell in line.strip("|").split("|")[1:]]
    assert said == pytest.approx([cost.params, cost.grads, cost.opt, cost.held, cost.sent])


def test_every_name_of_a_strategy_is_in_the_readme():
    text = README.read_text()
    assert [name for name in js.STRATEGIES if f"`{name}`" not in text] == []


def test_the_tour_names_every_file_of_the_library():
    named = set(re.findall(r"`(\w+\.py)`", README.read_text()))
    library = {path.name for path in (README.parent / "jaxshard").glob("*.py")}
    assert library - named == {"__init__.py", "__main__.py"}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(example, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(example)])
    runpy.run_path(str(example), run_name="__main__")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert losses[-1] < losses[0] / 2
