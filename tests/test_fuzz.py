"""Any program under any strategy: random programs, each trained one step in a random setting.

An example is a program and a setting, both drawn by hypothesis. The program (`fuzz/`) is a small tree over a random
pytree of parameters: products, gathers, slices, loops over stacked leaves and over indices, branches, custom rules,
remat with policies, vmap, casts, complex and integer leaves, leaves used twice and not at all. The setting is a mesh,
a built-in strategy or a legal one of one's own, microbatches, remat, a budget of whole leaves and what trains. The
oracle is the gradient of the whole batch on one device, by SGD with a known rate; the contract must hold, and shapes
and dtypes come back.

Nearly every example is a program of its own, with values drawn once, because what is looked for is the program that
nobody thought of. Each test counts what it has seen, so that the generator cannot degrade to a few in silence.

By default examples are the same in every run. To look for more:

    FUZZ_EXAMPLES=2000 pytest tests/test_fuzz.py -n 2              # as many for each test, other ones in every run
    FUZZ_EXAMPLES=2000 FUZZ_SEED=7 pytest tests/test_fuzz.py       # the same ones again
    pytest tests/test_fuzz.py --hypothesis-show-statistics         # which nodes and settings were drawn

A failure prints the smallest program found, as Python. To run it alone, in `tests/`:

    from fuzz import *
    check(Program(...), Setting(...), {})
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field

import hypothesis
import jax
import pytest
from fuzz import Leaf, Oracle, Program, Setting, check, nodes, programs, settings
from hypothesis import HealthCheck, Phase, given
from quick import QUICK

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "27"))
"""Of each test, at least."""
SEED = os.environ.get("FUZZ_SEED", "" if "FUZZ_EXAMPLES" in os.environ else "0")
"""Empty: others in every run."""
ROOTS = {
    "products": ("product", "take", "operation"),
    "loops": ("loop",),
    "branches": ("branch", "while"),
    "each example": ("each",),
    "custom rules": ("custom", "gradient"),
    "regions": ("remat", "jit"),
}
"""What stands at the root of a test's programs."""
FRESH = 11
"""Examples of one run of hypothesis: after ten it prefers to vary those it had, which makes for fewer programs."""


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_that_never_come_back_are_not_kept():
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    jax.config.update(name, before if SEED else 1e9)
    yield
    jax.config.update(name, before)


@dataclass
class Census:
    """What the examples of one test were: how often each program, kind of node and choice."""

    examples: set[tuple[Program, Setting]] = field(default_factory=set)
    kinds: Counter[str] = field(default_factory=Counter)
    choices: Counter[str] = field(default_factory=Counter)
    leaves: int = 0
    moving: int = 0

    def add(self, program: Program, setting: Setting, oracle: Oracle) -> None:
        self.examples.add((program, setting))
        read = [i for i, x in enumerate(program.leaves) if isinstance(x, Leaf) and x not in program.unused]
        learning = [i for i in read if setting.learns(i)]
        self.leaves += len(learning)
        self.moving += sum(bool(oracle.gradients[i].any()) for i in learning)
        kinds = {type(x).__name__ for x in nodes((program.hidden, program.penalty))}
        strategy = setting.strategy if isinstance(setting.strategy, str) else "own"
        choices = [f"mesh {setting.mesh}", f"accumulate {setting.accumulate}", f"remat {setting.remat}"]
        choices += [f"trains {setting.trains}", f"strategy {strategy}"]
        self.kinds.update(kinds)
        self.choices.update(choices)
        for name in sorted([*kinds, *choices]):
            hypothesis.event(name)

    def assert_diverse(self) -> None:
        """Nearly all are programs of their own, no large part of the language is missing, and leaves have gradients."""
        programs = {program for program, _ in self.examples}
        assert len(programs) >= 0.9 * EXAMPLES, f"only {len(programs)} distinct programs"
        assert len(self.kinds) >= 24, f"only {sorted(self.kinds)} in all programs"
        assert len(self.choices) >= 22, f"only {sorted(self.choices)} in all settings"
        assert self.moving >= 0.5 * self.leaves, f"only {self.moving} of {self.leaves} leaves have a gradient"


def fuzz(kinds: tuple[str, ...], examples: int, name: str) -> Census:
    """Checks at least so many examples whose roots are of these kinds."""
    census = Census()

    @hypothesis.settings(
        max_examples=FRESH,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(program=programs(*kinds), setting=settings())
    def step_equals_one_device(program, setting):
        if (program, setting) not in census.examples:  # the simplest one is the first of every run
            census.add(program, setting, check(program, setting, QUICK))

    runs = 0
    while len(census.examples) < examples:
        once = hypothesis.seed(f"{SEED} {name} {runs}")(step_equals_one_device) if SEED else step_equals_one_device
        once()
        runs += 1
        if runs % 20 == 0:
            jax.clear_caches()  # of traces of programs that never come back
    return census


@pytest.mark.parametrize("part", [0, 1] if "FUZZ_EXAMPLES" in os.environ else [0])
@pytest.mark.parametrize("root", ROOTS)
def test_any_program(root, part):
    fuzz(ROOTS[root], EXAMPLES, f"{root} {part}").assert_diverse()


@pytest.mark.smoke
def test_a_few_programs():
    assert len({program for program, _ in fuzz((), 10, "few").examples}) >= 9
