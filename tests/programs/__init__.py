"""Small, complete loss functions: between them, every way in which a loss may read its parameters.

`PROGRAMS` maps a name to its `Program`. One file per theme; a new program only has to be defined there.
"""

from types import ModuleType

from . import algebra, autodiff, axes, control, effects, leaves, nested, remat, scans, shapes, sharing
from .program import AXES, EXAMPLES, Program

THEMES: tuple[ModuleType, ...] = (
    scans,
    nested,
    control,
    autodiff,
    remat,
    sharing,
    leaves,
    algebra,
    shapes,
    effects,
    axes,
)

PROGRAMS: dict[str, Program] = {
    program.name: program for theme in THEMES for program in vars(theme).values() if isinstance(program, Program)
}

SMOKE = (
    "scan_several_stacks",
    "scan_lstm",
    "scan_fast_weights",
    "stack_in_fori_loop",
    "nested_stack_of_stacks",
    "nested_rnn_layers",
    "cond_on_data",
    "cond_in_scan",
    "while_spectral_norm",
    "custom_jvp_of_weight",
    "custom_vjp_over_scan",
    "gradient_penalty_through_scan",
    "vmap_on_other_dims",
    "remat_nested",
    "remat_in_scan_names",
    "tied_embedding_cast_once",
    "stack_also_read_whole",
    "lora_of_stack",
    "jit_returns_its_inputs",
    "leaf_keys_scanned",
    "leaf_empty",
    "attention_grouped",
    "ragged_dot_experts",
    "fused_projections",
    "literals_not_linear",
    "reshape_across_dims",
    "pure_callback_in_scan",
    "batch_norm_synchronised",
)
"""Names of a few programs that stand for the rest, where running all of them would take too long."""

__all__ = ["AXES", "EXAMPLES", "PROGRAMS", "SMOKE", "THEMES", "Program"]
