"""Within the library a file imports only from files above it in one list, so that it can be read from the top down."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import jaxshard

ROOT = Path(jaxshard.__file__).parent
ORDER = [
    "strategy",
    "mesh",
    "checks",
    "loss",
    "precision",
    "jaxprs",
    "varying",
    "onshard",
    "collectives",
    "held",
    "remat",
    "gather",
    "specs",
    "program",
    "parts",
    "host_memory",
    "gradients",
    "state",
    "update",
    "update_place",
    "setup",
    "nans",
    "evaluate",
    "contract",
    "link",
    "compiled",
    "compiler",
    "update_traffic",
    "explain",
    "dp",
    "step",
]
PACKAGES = {"compiled"}  # whose files stand together in the list
PROGRAM = {"preflight", "train", "cli", "testing", "__main__"}  # what knows the library


def imported(path: Path) -> set[str]:
    """The modules of this package that a file imports, anywhere in it; ``""`` is the package itself."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names = [node.module or ""]
            if node.module == "jaxshard":
                names = [
                    f"jaxshard.{alias.name}"
                    if (ROOT / f"{alias.name}.py").exists() or (ROOT / alias.name).is_dir()
                    else "jaxshard"
                    for alias in node.names
                ]
        else:
            continue
        found |= {".".join(name.split(".")[1:2]) for name in names if name.split(".")[0] == "jaxshard"}
    return found


def test_the_list_is_complete():
    files = {path.stem for path in ROOT.glob("*.py")} - {"__init__"} - PROGRAM
    assert files | PACKAGES == set(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_a_file_imports_only_from_above(name):
    above = set(ORDER[: ORDER.index(name)])
    if name in PACKAGES:
        files = list((ROOT / name).glob("*.py"))
        assert len(files) > 1
        assert all(imported(path) <= above | {name} for path in files)
    else:
        assert imported(ROOT / f"{name}.py") <= above


def test_the_library_is_imported_at_all():
    """The search finds imports: the last file uses much of what is above it."""
    assert len(imported(ROOT / "step.py")) > 5
    assert imported(ROOT / "__init__.py") <= set(ORDER)


def test_models_import_nothing_of_the_library():
    for path in (ROOT / "models").rglob("*.py"):
        assert imported(path) <= {"models"}, path


def test_the_training_program_stands_on_the_library():
    for path in (ROOT / "preflight").rglob("*.py"):
        assert imported(path) <= {"", "preflight", *ORDER}, path
    for path in (ROOT / "train").rglob("*.py"):
        assert imported(path) <= {"", "train", "models", *ORDER}, path
