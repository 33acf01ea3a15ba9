"""The gradients of one microbatch inside the program of a whole step, whose backward runs its equations in turn.

XLA's CPU compiler puts first whatever needs no other result: in a backward these are parameters and saved activations
in another order of dims, derivatives of activation functions, and sharded parameters that are gathered, of all layers
at once. So the backward is written out as that of a pipeline's stage is: it reads parameters, saved activations
(`program.saved_activations`), and what cheap arithmetic makes of both, each when the product before is done
(`program.in_turn`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.backends.jax.capture.inner_programs import OWN_DERIVATIVES
from shardwright.backends.jax.program.equations import evaluate, value_of
from shardwright.backends.jax.program.flattening import flatten
from shardwright.backends.jax.program.in_turn import SHAPES, Finish, barrier, evaluate_in_turn
from shardwright.backends.jax.program.random_draws import evaluate_draws_in_turn, masks_of
from shardwright.backends.jax.program.saved_activations import CHEAP, residuals

GATHERS = frozenset({"sharding_constraint", "broadcast_in_dim"})
"""The primitives that make of a sharded parameter what a replica reads; they run when another equation first reads
their result."""
Copied = Callable[[Sequence[jax.Array]], list[jax.Array]]


def gradients_in_turn(
    total: Callable[..., Any],
    held: Sequence[jax.Array],
    rest: Any,
    added: Sequence[Finish],
    *,
    copied: Copied,
    apart: Copied | None,
    donated: bool,
) -> tuple[Any, list[jax.Array]]:
    """What ``total(copied(held), *rest)`` returns beside its value, and the gradients of the copies, each as ``added``
    makes a sum of it.

    ``copied`` makes of the parameters what the function takes. Where it gathers them, ``apart`` gives them for the
    forward so that no compiler gathers them before: then the forward runs in turn too. ``donated``: whether results of
    the same program take the memory of the parameters: a barrier would copy them.
    """
    copies = copied(held)
    others, structure = jax.tree.flatten(rest)
    pullbacks: list[Any] = []

    def ahead(copies: list[jax.Array], others: list[jax.Array]) -> Any:
        given = jax.tree.unflatten(structure, others)
        value, pullback, beside = jax.vjp(lambda copies: total(copies, *given), copies, has_aux=True)
        saved, kind = jax.tree.flatten(pullback)
        pullbacks.append(kind)
        return (value, beside), saved

    closed, (results, _) = jax.make_jaxpr(ahead, return_shape=True)(copies, others)
    program, returned = flatten(closed), len(jax.tree.leaves(results))
    saved = program.outputs[returned:]
    residual = residuals(program, [atom for atom in saved if isinstance(atom, int)], least=True)

    def front(held: Sequence[jax.Array], others: list[jax.Array]) -> list[jax.Array]:
        known: dict[int, Any] = dict(zip(program.arguments, [*copied(held), *others], strict=True))
        known.update(program.constants)
        evaluate_draws_in_turn(program, known, set(residual.kept))
        return [value_of(program, atom, known) for atom in (*program.outputs[:returned], *residual.kept)]

    values: dict[int, Any]
    if apart is None:
        made = front(held, others)
    else:
        given = [*apart(held), *others]
        forward = flatten(jax.make_jaxpr(front)(given[: len(held)], others))
        values = {**forward.constants, **dict(zip(forward.arguments, given, strict=True))}
        evaluate_in_turn(forward.equations, values, GATHERS | SHAPES)
        made = [value_of(forward, atom, values) for atom in forward.outputs]
    value, beside = jax.tree.unflatten(jax.tree.structure(results), made[:returned])

    def back(held: list[jax.Array], others: list[jax.Array], kept: list[jax.Array], cotangent: jax.Array) -> Any:
        again = {**program.constants, **dict(zip(program.arguments, [*copied(held), *others], strict=True))}
        again.update(zip(residual.kept, kept, strict=True))
        evaluate(residual.remade, again)
        (gradients,) = jax.tree.unflatten(pullbacks[0], [value_of(program, atom, again) for atom in saved])(cotangent)
        return gradients

    # XLA drops from a barrier whatever nothing reads behind it, so the loss returned is the one behind it. Else the
    # compiler would be free to leave the loss for the end, and to keep the logits until then.
    value, beside, kept = jax.lax.optimization_barrier((value, beside, made[returned:]))
    one = jnp.ones_like(value)
    traced = jax.make_jaxpr(back)(list(held), others, kept, one)
    # What is computed again waits for the product before it too, equation by equation.
    backward = flatten(traced, opens_checkpoints=True)
    backward.equations = [replace(equation, region=None) for equation in backward.equations]
    operands = [*held, *others, *kept, one]
    values = {**backward.constants, **dict(zip(backward.arguments, operands, strict=True))}
    results = [(atom, add) for atom, add in zip(backward.outputs, added, strict=True) if isinstance(atom, int)]
    free = backward.arguments[: len(held)] if donated and apart is None else ()
    soon = iter(
        evaluate_in_turn(
            backward.equations,
            values,
            CHEAP | GATHERS | OWN_DERIVATIVES,
            results,
            free=free,
            after=value,
            masks=masks_of(backward),
        )
    )
    sums = [
        next(soon) if isinstance(atom, int) else add(value_of(backward, atom, values))
        for atom, add in zip(backward.outputs, added, strict=True)
    ]
    # Where nothing says that a parameter is read before it is updated, the compiler copies it.
    return beside, barrier(sums) if free else sums
