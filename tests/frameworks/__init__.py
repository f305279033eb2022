"""Models as their frameworks' users write them, each with the framework's own plain training loop as the oracle."""

from frameworks import eqx, flax_linen, flax_nnx, hk, trees
from frameworks.case import Case

CASES: dict[str, Case] = {
    f"{module.__name__.split('.')[-1]}, {name}": case
    for module in (flax_nnx, flax_linen, eqx, hk, trees)
    for name, case in module.CASES.items()
}
DROPOUT = {
    f"{module.__name__.split('.')[-1]}, {name}": drop
    for module in (flax_nnx, flax_linen, eqx, hk)
    for name, drop in module.DROPOUT.items()
}
