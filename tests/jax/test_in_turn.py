"""Equations that run in turn: the same numbers, and less memory than XLA's CPU compiler takes by itself."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardwright.backends.jax.machine.compiler_options import compiler_options
from shardwright.backends.jax.program.equations import FlatProgram, evaluate, value_of
from shardwright.backends.jax.program.flattening import flatten
from shardwright.backends.jax.program.host_operands import evaluate_from_host
from shardwright.backends.jax.program.in_turn import PRODUCTS, evaluate_in_turn
from shardwright.backends.jax.program.saved_activations import CHEAP
from tests.comparison import Comparison

LAYERS, BATCH, LENGTH, WIDTH = 6, 8, 64, 64


def layers(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """Heads that mix positions: the backward reads what was saved of each layer in another order of dims."""
    for weight in weights:
        heads = (x @ weight).reshape(BATCH, LENGTH, 4, WIDTH // 4)
        scores = jnp.tanh(jnp.einsum("bshd,bthd->bhst", heads, heads) / 8)
        x = x + jnp.einsum("bhst,bthd->bshd", scores, heads).reshape(x.shape)
    return x


def backward() -> tuple[Callable[..., Any], list[jax.Array]]:
    """The backward pass as a function of saved values and the gradient, with these."""
    keys = jax.random.split(jax.random.key(0), LAYERS + 2)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / 8 for key in keys[:LAYERS]]
    made, derivative = jax.vjp(layers, weights, jax.random.normal(keys[-1], (BATCH, LENGTH, WIDTH)))
    saved, structure = jax.tree.flatten(derivative)
    given = [*saved, jax.random.normal(keys[-2], made.shape)]
    return lambda *given: jax.tree.leaves(jax.tree.unflatten(structure, given[:-1])(given[-1])), given


def as_run(run: Callable[..., Any], *, in_turn: bool) -> Callable[..., Any]:
    flat = flatten(jax.make_jaxpr(run)(*backward()[1]))

    def function(*given: jax.Array) -> list[jax.Array]:
        known = dict(flat.constants) | dict(zip(flat.arguments, given, strict=True))
        if in_turn:
            evaluate_in_turn(flat.equations, known, CHEAP)
        else:
            evaluate(flat.equations, known)
        return [value_of(flat, output, known) for output in flat.outputs]

    return function


def test_the_numbers_are_the_same() -> None:
    run, given = backward()
    wanted = jax.jit(run)(*given)
    found = jax.jit(as_run(run, in_turn=True))(*given)
    Comparison().values(found, wanted, relative=1e-5, absolute=1e-5).require()
    assert len(found) == LAYERS + 1


def test_every_product_waits_for_the_one_before() -> None:
    run, given = backward()
    closed = jax.make_jaxpr(as_run(run, in_turn=True))(*given)
    names = [equation.primitive.name for equation in closed.eqns]
    products = [number for number, name in enumerate(names) if name in PRODUCTS]
    assert len(products) >= 2 * LAYERS
    for before, after in pairwise(products):
        assert "optimization_barrier" in names[before:after]


def test_less_memory_is_held() -> None:
    run, given = backward()
    taken = {}
    for in_turn in (False, True):
        lowered = jax.jit(as_run(run, in_turn=in_turn)).lower(*given)
        compiled = lowered.compile(compiler_options(jax.devices()[:1]))  # which keep barriers
        taken[in_turn] = compiled.memory_analysis().temp_size_in_bytes
    activation = 4 * BATCH * LENGTH * WIDTH
    assert taken[True] <= taken[False] - activation


def test_cheap_values_of_operands_are_made_again_by_each_stretch_that_reads_them() -> None:
    """Made once, all of them would be there from the first products that read them to the last."""
    units = 8

    def run(*given: jax.Array) -> list[jax.Array]:
        weights, saved, x = given[:units], given[units:-1], given[-1]
        inputs = [jnp.maximum(2 * one, 0) for one in saved]
        for weight, one in zip(weights, inputs, strict=True):
            x = (x * one) @ weight
        sums = []
        for weight, one in zip(weights, inputs, strict=True):
            x = x @ weight
            sums.append(one.T @ x)
        return sums

    keys = jax.random.split(jax.random.key(0), 2 * units + 1)
    given = [jax.random.normal(key, (WIDTH, WIDTH)) / 8 for key in keys]
    flat = flatten(jax.make_jaxpr(run)(*given))

    def function(*given: jax.Array) -> list[jax.Array]:
        known = dict(zip(flat.arguments, given, strict=True))
        evaluate_in_turn(flat.equations, known, CHEAP, after=given[-1].sum())
        return [value_of(flat, output, known) for output in flat.outputs]

    Comparison().values(jax.jit(function)(*given), jax.jit(run)(*given), relative=1e-5, absolute=1e-5).require()
    counts = [
        str(jax.make_jaxpr(each)(*given)).count(" max ") for each in (run, function)
    ]  # fmt: skip
    assert counts == [units, 2 * units]
    lowered = jax.jit(function).lower(*given)
    taken = lowered.compile(compiler_options(jax.devices()[:1])).memory_analysis().temp_size_in_bytes
    assert taken <= 4 * 4 * WIDTH**2


def test_what_would_keep_an_operand_is_not_made_again() -> None:
    """The operand would take as much as what is made of it; read for something else as well, it is there anyway."""
    units = 4

    def run(*given: jax.Array, also: bool) -> list[jax.Array]:
        saved, x = given[:-1], given[-1]
        inputs = [jnp.maximum(2 * one, 0) for one in saved]
        for one in (*inputs, *inputs):
            x = x @ one
        for one in saved if also else ():
            x = x @ one
        return [x]

    given = [jnp.ones((WIDTH, WIDTH)) / WIDTH for _ in range(units + 1)]
    for also in (False, True):
        flat = flatten(jax.make_jaxpr(lambda *given, also=also: run(*given, also=also))(*given))

        def function(*given: jax.Array, flat: FlatProgram = flat) -> list[jax.Array]:
            known = dict(zip(flat.arguments, given, strict=True))
            evaluate_in_turn(flat.equations, known, CHEAP, after=given[-1].sum())
            return [value_of(flat, output, known) for output in flat.outputs]

        Comparison().values(function(*given), run(*given, also=also), relative=1e-5, absolute=1e-5).require()
        assert str(jax.make_jaxpr(function)(*given)).count(" max ") == (2 if also else 1) * units


def test_gradients_are_added_where_the_last_of_them_is_made() -> None:
    """Behind the next barrier, both would be there until something reads the sum."""

    def run(x: jax.Array, *weights: jax.Array) -> jax.Array:
        y = x @ weights[0]
        return jnp.tanh(y @ weights[1]) @ weights[2] + jnp.tanh(y @ weights[3]) @ weights[4]

    keys = jax.random.split(jax.random.key(0), 6)
    given = [jax.random.normal(key, (WIDTH, WIDTH)) / 8 for key in keys]
    made, derivative = jax.vjp(run, *given)
    flat = flatten(jax.make_jaxpr(derivative)(made))

    def function(cotangent: jax.Array) -> list[jax.Array]:
        known = {**flat.constants, flat.arguments[0]: cotangent}
        evaluate_in_turn(flat.equations, known, CHEAP)
        return [value_of(flat, output, known) for output in flat.outputs]

    Comparison().values(jax.jit(function)(made), jax.jit(derivative)(made), relative=1e-5, absolute=1e-5).require()
    equations = jax.make_jaxpr(function)(made).eqns
    products = {id(v) for e in equations if e.primitive.name in PRODUCTS for v in e.outvars}
    sums = [n for n, e in enumerate(equations) if e.primitive.name == "add_any" and products & {*map(id, e.invars)}]
    assert len(sums) == 1
    before = [e.primitive.name for e in equations[: sums[0]] if e.primitive.name in {*PRODUCTS, "optimization_barrier"}]
    assert before[-1] in PRODUCTS


@pytest.mark.parametrize("kind", ["empty", "cheap alone"])
def test_programs_without_products(kind: str) -> None:
    def run(x: jax.Array) -> tuple[jax.Array, ...]:
        return () if kind == "empty" else (x.T + 1.0, -x)

    flat = flatten(jax.make_jaxpr(run)(jnp.ones((2, 3))))
    known = dict(zip(flat.arguments, [jnp.arange(6.0).reshape(2, 3)], strict=True))
    evaluate_in_turn(flat.equations, known, CHEAP)
    found = [value_of(flat, output, known) for output in flat.outputs]
    wanted = run(jnp.arange(6.0).reshape(2, 3))
    assert all(bool((a == b).all()) for a, b in zip(found, wanted, strict=True))


def test_results_are_made_before_the_next_stretch_begins() -> None:
    """Sums of gradients: each is added as soon as its gradient is made, and no sum comes after a product that its
    gradient does not wait for."""
    run, given = backward()
    flat = flatten(jax.make_jaxpr(run)(*given))
    results = [(atom, lambda array: array + 1) for atom in flat.outputs if isinstance(atom, int)]

    def function(*given: jax.Array) -> list[jax.Array]:
        known = dict(flat.constants) | dict(zip(flat.arguments, given, strict=True))
        return evaluate_in_turn(flat.equations, known, CHEAP, results, after=given[-1].sum())

    found, wanted = jax.jit(function)(*given), jax.jit(run)(*given)
    Comparison().values([each - 1 for each in found], wanted, relative=1e-5, absolute=1e-5).require()
    assert len(found) == LAYERS + 1
    equations = jax.make_jaxpr(function)(*given).eqns
    sums = [n for n, e in enumerate(equations) if e.primitive.name == "add" and e.outvars[0].aval.shape == (WIDTH,) * 2]
    products = [number for number, equation in enumerate(equations) if equation.primitive.name in PRODUCTS]
    assert len(sums) == LAYERS
    spread = [sum(product < number for product in products) for number in sums]
    assert spread == sorted(spread)
    assert len(set(spread)) == LAYERS, "some sums waited for each other"


def test_operands_on_the_host_come_one_unit_before_they_are_read() -> None:
    """Every copy but the first ones waits for a result, and at no time are more there than are due. What is made again
    of them by cheap arithmetic is written first, as a backward has it."""
    ahead, units = 2, 8

    def run(*given: jax.Array) -> list[jax.Array]:
        weights, saved, x = given[:units], given[units:-1], given[-1]
        slopes = [1.0 - one * one for one in saved]
        sums = []
        for weight, slope, one in zip(weights, slopes, saved, strict=True):
            x = (x * slope) @ weight + one
            sums.append(x.sum(0))
        return [x, *sums]

    keys = jax.random.split(jax.random.key(0), 2 * units + 1)
    given = [jax.random.normal(key, (WIDTH, WIDTH)) / 8 for key in keys]
    flat = flatten(jax.make_jaxpr(run)(*given))
    on_host = flat.arguments[units:-1]

    def function(*given: jax.Array) -> list[jax.Array]:
        at = dict(zip(flat.arguments, given, strict=True))
        known = dict(flat.constants) | {value: array for value, array in at.items() if value not in on_host}
        evaluate_from_host(flat.equations, known, {value: at[value] for value in on_host}, ahead, CHEAP)
        return [value_of(flat, output, known) for output in flat.outputs]

    Comparison().values(jax.jit(function)(*given), jax.jit(run)(*given), relative=1e-5, absolute=1e-5).require()
    program = jax.make_jaxpr(function)(*given).jaxpr
    waits: set[Any] = set()
    products = put = 0
    for equation in program.eqns:
        if equation.primitive.name == "optimization_barrier":
            assert equation.invars[0] in program.invars
            waits.add(equation.outvars[0])
        elif equation.primitive.name == "device_put":
            assert equation.invars[0] in waits or put <= ahead
            put += 1
            assert put <= products + ahead + 1
        products += equation.primitive.name == "dot_general"
    assert put == units


def test_roundings_to_the_same_precision_are_left_out_and_others_stay() -> None:
    def run(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = jax.lax.reduce_precision(jax.lax.reduce_precision(x, 8, 23), 8, 7)
        return x, jax.lax.reduce_precision(y, 8, 7)

    flat = flatten(jax.make_jaxpr(run)(jnp.ones(3), jnp.ones(3, jnp.bfloat16)))
    found = [(equation.inputs, equation.params["mantissa_bits"]) for equation in flat.equations]
    assert found == [((flat.arguments[0],), 7), ((flat.arguments[1],), 7)]
