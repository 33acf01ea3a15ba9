"""The modes of recompute: what is computed again in the backward pass, of a model and of a unit.

Some go by op: what a unit keeps beside what enters it are results of products, matrix products and attention. Those of
"products" are named by the modules inside the unit that make them, as in "products:attn.c_attn,mlp.c_fc".
"""

from typing import Annotated

from shardwright.core.values.fields import Words

NAMED = "products"
"""The mode whose kept results are named."""
PREFIX = f"{NAMED}:"
MODES = ("none", "selective", "elementwise", "alternate", NAMED, "full")
"""The kinds of modes, from nothing to all."""
BY_OP = ("elementwise", "alternate", NAMED)
"""The kinds in which results of products are kept op by op."""


def names_products(mode: str) -> bool:
    """Whether a mode names the modules whose products are kept, each once and in the order of the alphabet."""
    names = mode.removeprefix(PREFIX).split(",")
    return mode.startswith(PREFIX) and all(name.strip() == name for name in names) and names == sorted(set(names))


WHOLE = tuple(mode for mode in MODES if mode != NAMED)

Recompute = Annotated[str, Words(lambda: WHOLE, names_products, f"{PREFIX}MODULE,…")]
"""What is computed again in the backward pass: nothing ("none"); the softmax part of attention ("selective", arXiv
2205.05198, section 5); all but products and attention, whose results are kept op by op ("elementwise": PyTorch's
selective checkpointing of products, JAX's ``dots_saveable``); these and every second product ("alternate":
torchtitan's policy by op); these and the products of all modules that are not named ("products:…"); whole units
("full")."""
Mode = str
"""The treatment of one unit's activations: a mode of recompute, or "offload", to the host's memory and back."""


def kind_of(mode: str) -> str:
    """The kind of a mode, of `MODES`, or "offload"."""
    return NAMED if mode.startswith(PREFIX) else mode


def is_computed_again(mode: str) -> bool:
    """Whether a unit of a mode is computed again, in full or but for results of products; "selective" is of parts of
    attention alone."""
    return mode == "full" or goes_by_op(mode)


def goes_by_op(mode: str) -> bool:
    """Whether results of products are kept op by op."""
    return kind_of(mode) in BY_OP


def kept_modules(mode: str) -> frozenset[str]:
    """The modules whose products are kept, by their paths inside of a unit; "" for the unit's own."""
    return frozenset(mode.removeprefix(PREFIX).split(","))


def keeping_products_of(modules: frozenset[str]) -> str:
    """The mode that keeps the products of some modules."""
    return PREFIX + ",".join(sorted(modules)) if modules else "full"
