"""Arbitrary programs, as data: small trees of frozen dataclasses, each of which is a loss function.

`nodes`, `operations` and `control` are the language, and `program` makes a loss of a tree. `grammar` draws trees at
random, by the rules in `grow_operations` and `grow_control`; `programs` draws whole programs, and `setting` how to
train them. `check` compares a step with one device. A tree's `repr` is the Python that builds it, given
``from fuzz import *``.
"""

from jaxshard import Placement, Strategy

from .check import Oracle, check
from .control import Custom, Each, Gradient, Jit, Loop, Map, Remat, Switch, While
from .nodes import Constant, Data, Index, Int, IntLeaf, Leaf, Node, OfPart, Var, nodes
from .operations import (
    Apply,
    Broadcast,
    Cast,
    Concatenate,
    Mean,
    Pair,
    Piece,
    Product,
    Put,
    Reshape,
    Row,
    Slice,
    Take,
    Transpose,
    Window,
)
from .program import Program
from .programs import programs
from .setting import MESHES, Setting, settings

__all__ = [
    "MESHES",
    "Apply",
    "Broadcast",
    "Cast",
    "Concatenate",
    "Constant",
    "Custom",
    "Data",
    "Each",
    "Gradient",
    "Index",
    "Int",
    "IntLeaf",
    "Jit",
    "Leaf",
    "Loop",
    "Map",
    "Mean",
    "Node",
    "OfPart",
    "Oracle",
    "Pair",
    "Piece",
    "Placement",
    "Product",
    "Program",
    "Put",
    "Remat",
    "Reshape",
    "Row",
    "Setting",
    "Slice",
    "Strategy",
    "Switch",
    "Take",
    "Transpose",
    "Var",
    "While",
    "Window",
    "check",
    "nodes",
    "programs",
    "settings",
]
