"""Private names of the frameworks stand in one file for each, `compat.py`."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "shardwright"
FRAMEWORKS = ("torch", "jax", "flax", "optax")
SHORT = {
    "dist": "torch.distributed",
    "nn": "torch.nn",
    "F": "torch.nn.functional",
    "jnp": "jax.numpy",
    "nnx": "flax.nnx",
}


def private_names(tree: ast.Module) -> Iterator[str]:
    """Names of a framework's modules, and what is in them, with a part that begins with one underscore."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [dotted(node)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            names = [node.value]
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            own = SHORT.get(first, first).split(".")[0] in FRAMEWORKS and not name.startswith("torch.ops.")
            if own and any(part.startswith("_") and not part.startswith("__") for part in rest):
                yield name


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def test_private_names_are_those_of_compat() -> None:
    found = {
        str(path.relative_to(PACKAGE)): names
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "compat.py"
        and (names := sorted(set(private_names(ast.parse(path.read_text(encoding="utf-8"))))))
    }
    assert not found, found


def test_the_check_sees_them() -> None:
    code = (
        "from jax._src import core\nimport torch._C\nx = dist.group._y\nz = torch.ops.aten._a\nw = load('jax._src.lib')"
    )
    assert set(private_names(ast.parse(code))) == {"jax._src.core", "torch._C", "dist.group._y", "jax._src.lib"}
