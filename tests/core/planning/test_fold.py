import pytest

from shardwright.core.errors import CaptureError, PlanError
from shardwright.core.model.blocks import Node, find_blocks
from shardwright.core.model.fold import CallRef, fold
from shardwright.core.model.graph import Graph
from shardwright.core.model.structure import require_names, structure_of
from tests.core.toy import Builder, decoder


def test_blocks_fold_and_the_rest_are_the_gaps() -> None:
    folded = fold(decoder(layers=5))
    assert [unit.fold_class for unit in folded.units] == [0, 1, 1, 1, 1, 1, 2]
    assert folded.classes == ((0,), (1, 2, 3, 4, 5), (6,))
    assert folded.units[0].calls == (CallRef("wte"),)
    assert folded.units[3].calls == (CallRef("h.2"),)
    assert folded.units[6].calls == (CallRef("ln_f"), CallRef("head"))


@pytest.mark.parametrize("calls", [True, False])
def test_units_cover_every_op_once_in_order(calls: bool) -> None:
    graph = decoder(calls=calls)
    covered = [i for unit in fold(graph).units for i in range(unit.first_op, unit.end_op)]
    assert covered == list(range(len(graph.ops)))


def test_without_module_calls_ops_follow_the_parameters_they_use() -> None:
    """A pure JAX function gives the same units as a model whose calls were recorded: the residual sums, which use no
    parameter, fall to the side where fewer bytes cross."""
    named, bare = fold(decoder(calls=True)), fold(decoder(calls=False))
    assert [(u.first_op, u.end_op) for u in named.units] == [(u.first_op, u.end_op) for u in bare.units]


def test_a_block_called_again_is_another_unit() -> None:
    b = Builder()
    x = b.input("x", -1, 4, 8, dtype="float32")
    weight = b.parameter("layers.0.weight", 8, 8)
    for _ in range(3):
        back = b.enter("layers.0")
        x = b.linear(x, weight, None, 8)
        b.leave(back)
    folded = fold(b.build(x))
    assert [u.calls for u in folded.units] == [(CallRef("layers.0", i),) for i in range(3)]
    structure, _ = structure_of(folded)
    assert structure.ties == (("0/w0", "1/w0", "2/w0"),)
    assert structure.parameter_count == 64


def test_a_model_without_blocks_has_its_modules_as_units() -> None:
    b = Builder()
    x = b.input("x", -1, 4, 8, dtype="float32")
    for name, width in (("up", 16), ("down", 8)):
        back = b.enter(name)
        x = b.linear(x, b.parameter(f"{name}.weight", b.tensors[x].fixed[-1], width), None, width)
        b.leave(back)
    assert [u.calls for u in fold(b.build(x)).units] == [(CallRef("up"),), (CallRef("down"),)]


def test_an_empty_graph_is_refused() -> None:
    b = Builder()
    x = b.input("x", -1, dtype="float32")
    with pytest.raises(CaptureError, match="no op"):
        fold(b.build(x))


def structure(graph: Graph):
    return structure_of(fold(graph))[0]


def test_structure_is_the_same_however_weights_are_stored_and_ops_attributed() -> None:
    reference = structure(decoder())
    for other in (decoder(transposed=True), decoder(calls=False), decoder(transposed=True, calls=False)):
        assert reference.difference(structure(other)) is None
        assert reference.digest == structure(other).digest


def test_slots_put_the_summed_dim_first() -> None:
    s, binding = structure_of(fold(decoder(hidden=32, transposed=True)))
    assert dict(s.class_slots[1])["w2"] == (32, 128)
    roles = {role: (name, dims) for role, name, dims in binding.units[1].parameters}
    assert roles["w2"] == ("h.0.fc", (((1, 32),), ((0, 128),)))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (decoder(layers=3), "6 units against 5"),
        (decoder(hidden=64), r"unit 0, parameter w0: \(64, 32\) against \(64, 64\)"),
        (decoder(vocabulary=128), "unit 0, parameter w0"),
    ],
)
def test_structures_that_differ_name_the_first_difference(other: Graph, said: str) -> None:
    assert structure(decoder()).difference(structure(other)) is not None
    import re

    assert re.search(said, structure(decoder()).difference(structure(other)) or "")


def test_ties_are_kept_and_counted_once() -> None:
    s = structure(decoder(layers=2, hidden=32, vocabulary=64))
    assert s.ties == (("0/w0", "3/w0"),)
    graph = decoder(layers=2, hidden=32, vocabulary=64)
    assert s.parameter_count == graph.parameter_count()


def test_a_parameter_that_no_op_reads_is_bound_apart() -> None:
    b = Builder()
    x = b.input("x", -1, 4, 8, dtype="float32")
    y = b.linear(x, b.parameter("used", 8, 8), None, 8)
    b.parameter("spare", 3)
    _, binding = structure_of(fold(b.build(y)))
    assert binding.unused == ("spare",)
    require_names(binding, ("used", "spare"), "Toy")
    with pytest.raises(PlanError, match="spare"):
        require_names(binding, ("used",), "Toy")


def blocks_of(*modules: tuple[str, tuple[int, ...] | None]) -> list[str]:
    """The blocks of a tree of modules, given as paths in order, each with the shape of its own parameter or None."""
    nodes = [Node("")]
    place = {"": 0}
    for path, shape in modules:
        parent = path
        while parent not in place:
            parent = parent.rpartition(".")[0]
        place[path] = len(nodes)
        nodes[place[parent]].children.append(len(nodes))
        nodes.append(Node(path))
        while shape is not None:
            nodes[place[path]].shapes[shape] += 1
            if not path:
                break
            path = path.rpartition(".")[0]
            while path not in place:
                path = path.rpartition(".")[0]
    return [nodes[b].path for b in sorted(find_blocks(nodes))]


def encoder(prefix: str, names: list[str], width: int = 8) -> list[tuple[str, tuple[int, ...] | None]]:
    rows: list[tuple[str, tuple[int, ...] | None]] = [(prefix, None)] if prefix else []
    for name in names:
        path = f"{prefix}.{name}" if prefix else name
        rows += [(path, None), (f"{path}.Dense_0", (width, 4 * width)), (f"{path}.Dense_1", (4 * width, width))]
    return rows


@pytest.mark.parametrize("names", [[f"blk{i}" for i in range(4)], [f"Blk_{i}" for i in range(4)], ["0", "1", "2"]])
@pytest.mark.parametrize("prefix", ["", "Enc_0", "encoder", "0"])
def test_blocks_are_found_however_they_are_named_and_nested(prefix: str, names: list[str]) -> None:
    head = ("1", (8, 2)) if prefix == "0" else ("head", (8, 2))
    found = blocks_of(*encoder(prefix, names), head)
    expected = [f"{prefix}.{name}" if prefix else name for name in names]
    assert found == ([*expected, "1"] if prefix == "0" else expected)


def test_stages_of_unlike_widths_are_opened_and_like_blocks_are_not() -> None:
    stages = [*encoder("layer1", ["0", "1"], 8), *encoder("layer2", ["0", "1"], 16)]
    assert blocks_of(("conv1", (3, 3)), *stages, ("fc1", (16, 2))) == ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]
    like = [*encoder("block.0", ["layer.0", "layer.1"]), *encoder("block.1", ["layer.0", "layer.1"])]
    assert blocks_of(*like) == ["block.0", "block.1"]


def test_numbered_leaves_are_no_blocks_beside_real_ones() -> None:
    layer = [("h.0", None), ("h.0.ln_1", (8,)), ("h.0.ln_2", (8,)), ("h.0.fc", (8, 32))]
    assert blocks_of(*layer) == ["h.0"]
    assert blocks_of(("fc1", (8, 8)), ("fc2", (8, 8))) == []
