"""A model on the command line: FILE.py:FUNCTION, a function that returns (model, sample) or (model, sample, loss)."""

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from shardwright.backends.registry import registered
from shardwright.core.errors import CaptureError, nearest

_EXPECTED = "expected (model, sample) or (model, sample, loss)"
_MODEL = "a model is FILE.py:FUNCTION, a function that returns (model, sample)"
_LOSS = "a loss is FILE.py:FUNCTION, a function of the model's output"
_DATA = "data are FILE.py:FUNCTION, a function that returns batches"

LossOption = Annotated[
    str | None,
    typer.Option(
        "--loss",
        metavar="FILE.py:FUNCTION",
        help="The loss, where the model's function returns none: a function of the model's output, or for Flax of "
        "(model, sample), which finds the targets in the sample.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class ModelGiven:
    """The model, the sample and the loss that a model function returned, or the loss that was named beside it."""

    model: Any
    sample: Any
    loss: Callable[..., Any] | None


def load_model(target: str, loss: str | None = None) -> ModelGiven:
    """Run the function that ``target``, FILE.py:FUNCTION, names. What it prints goes to stderr. ``loss`` names the loss
    in the same way, where the function returns none.

    Raises CaptureError for a missing file or function (with the nearest), for a file or a function that fails (where,
    and with what), for another return value, and for two losses.
    """
    path, name = _parts(target, _MODEL)
    named = None if loss is None else _parts(loss, _LOSS)
    with redirect_stdout(sys.stderr):  # stdout is the command's
        module = _run_file(path)
        function = _function(module, path, name)
        _require_no_arguments(function, path, name)
        chosen = None
        if named is not None:
            chosen = _function(module if named[0].samefile(path) else _run_file(named[0]), *named)
        try:
            returned = function()
        except (Exception, SystemExit) as error:
            raise CaptureError(f"{target} failed: {_said(error, path)}") from error
    given = _checked(target, returned)
    if chosen is not None and given.loss is not None:
        raise CaptureError(f"{target} returns a loss, and --loss {loss} names one: leave out one of them")
    return given if chosen is None else replace(given, loss=chosen)


def load_data(target: str) -> Any:
    """The batches that the function ``target``, FILE.py:FUNCTION, returns. What it prints goes to stderr.

    Raises CaptureError for a missing file or function (with the nearest), for one that fails, and for what is no
    iterable.
    """
    path, name = _parts(target, _DATA)
    with redirect_stdout(sys.stderr):
        function = _function(_run_file(path), path, name)
        _require_no_arguments(function, path, name, "a function of batches")
        try:
            returned = function()
        except (Exception, SystemExit) as error:
            raise CaptureError(f"{target} failed: {_said(error, path)}") from error
    if not hasattr(returned, "__iter__") and not hasattr(returned, "__getitem__"):
        raise CaptureError(f"{target} returned a {type(returned).__name__}: expected batches to go through, one a step")
    return returned


def load_function(target: str, what: str) -> Callable[..., Any]:
    """The function that ``target``, FILE.py:FUNCTION, names; ``what`` it is, for errors. Raises CaptureError for a
    missing file or function (with the nearest)."""
    path, name = _parts(target, what)
    with redirect_stdout(sys.stderr):
        return _function(_run_file(path), path, name)


def _parts(target: str, what: str) -> tuple[Path, str]:
    """The file and the name in it. Raises CaptureError, with ``what`` was expected, for anything else."""
    file, colon, name = target.rpartition(":")
    if not colon or not file or not name:
        raise CaptureError(f"{what}; given {target!r}")
    path = Path(file)
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path()
        beside = [str(folder / each.name) for each in folder.glob("*.py")]
        raise CaptureError(f"there is no file {file}: {nearest(file, beside)}")
    if path.suffix != ".py":
        raise CaptureError(f"{file} is not a Python file: {what.partition(',')[0]}")
    return path, name


def _run_file(path: Path) -> ModuleType:
    """The module of the file. As for a script, modules beside it can be imported."""
    name = f"_shardwright_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise CaptureError(f"{path} cannot be loaded as a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look it up
    beside = str(path.parent.resolve())
    if beside not in sys.path:
        sys.path.insert(0, beside)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise CaptureError(f"{path} cannot be loaded: {_said(error, path)}") from error
    return module


def _function(module: ModuleType, path: Path, name: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if function is None:
        own = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
        ]
        raise CaptureError(f"{path} has no function {name!r}: {nearest(name, own)}")
    if not callable(function):
        raise CaptureError(f"{path}:{name} is a {type(function).__name__}, not a function")
    found: Callable[..., Any] = function
    return found


def _require_no_arguments(function: Callable[..., Any], path: Path, name: str, what: str = "a model function") -> None:
    try:
        needed = [
            parameter.name
            for parameter in inspect.signature(function).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
    except (TypeError, ValueError):
        needed = []
    if needed:
        raise CaptureError(f"{path}:{name} needs {', '.join(needed)}: {what} is called without arguments")


def _checked(target: str, returned: Any) -> ModelGiven:
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        what = type(returned).__name__ + (f" of {len(returned)}" if isinstance(returned, tuple) else "")
        raise CaptureError(f"{target} returned a {what}: {_EXPECTED}")
    loss = returned[2] if len(returned) == 3 else None
    if loss is not None and not callable(loss):
        raise CaptureError(f"{target} returned a loss that is a {type(loss).__name__}, not a function: {_EXPECTED}")
    return ModelGiven(returned[0], returned[1], loss)


def _said(error: BaseException, path: Path) -> str:
    """The text of an error: ``ValueError: … (models.py, line 12)``, with the last line of the user's file that it went
    through."""
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return said
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    if lines:
        said = f"{said} ({path}, line {lines[-1]})"
    if isinstance(error, ModuleNotFoundError):
        installs = [found.install for found in registered().values() if error.name in found.needs and found.install]
        said = f"{said}; to get it: pip install {installs[0]!r}" if installs else said
    return said
