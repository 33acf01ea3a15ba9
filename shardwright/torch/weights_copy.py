"""A copy of the weights of a split model, as `copy.deepcopy` and torch's `AveragedModel` make it."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwright.backends.torch.compat import BatchNorm, pytree
from shardwright.backends.torch.machine.pipeline_messages import as_carried
from shardwright.core.errors import PlanError, PlanWarning, ShardwrightError
from shardwright.torch.model import DistributedModel
from shardwright.torch.session import Session


class WeightsCopy(nn.Module):
    """The weights that a split model had when it was copied: of each rank those that it holds.

    Its parameters and buffers are in the order of the model's, with those of other ranks on the meta device, and may be
    changed in place, as an average is. The model itself runs with them: in an evaluation step that is given the copy,
    or the `AveragedModel` around it, in the place of the model. Its modules are in the modes that they had when it was
    copied, or in that of the last ``train()`` or ``eval()``.

    Where the model is copied before its first step has split it, weights are whole until then.
    """

    def __init__(self, model: DistributedModel) -> None:
        super().__init__()
        model.runtime.split_model.make_values()
        self.model: DistributedModel
        vars(self)["model"] = model  # no module of this one
        self._fill(model.named_parameters(), model.named_buffers())
        self._modes = [module.training for module in model.modules()]
        self.training = model.training
        self._may_differ = not model.runtime.split_model.are_replicas_alike

    def _fill(self, parameters: Any, buffers: Any) -> None:
        for name, own in parameters:
            self._parameters[name] = nn.Parameter(own.detach().clone(), requires_grad=own.requires_grad)
        for name, own in buffers:
            self._buffers[name] = own.detach().clone()

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What this holds, and the model's own, once the model's parts are what they will be."""
        split_model, first = self.model.runtime.split_model, self.model.runtime.ownership.first_name
        if self._may_differ and split_model.are_replicas_alike:
            self._take_first()
        tables: tuple[tuple[dict[str, Any], Any], ...] = (
            (self._parameters, self.model.named_parameters()), (self._buffers, self.model.named_buffers()),
        )  # fmt: skip
        for table, named in tables:
            own: dict[str, torch.Tensor] = dict(named)
            for name, held in [*table.items()]:
                now = own[name]
                if not _is_like(held, now):
                    with torch.no_grad():
                        kept = _kept(name, held.detach(), now, partial(split_model.parts.part, first[name]))
                    held = nn.Parameter(kept, held.requires_grad) if isinstance(held, nn.Parameter) else kept
                    table[name] = held
                yield held, now

    def _take_first(self) -> None:
        """Take the weights of the first replica, as the models of all replicas did at their first step."""
        self._may_differ = False
        bound, watchdog = self.model.session.bound, self.model.session.watchdog
        for held in (*self._parameters.values(), *self._buffers.values()):
            if held is not None and not held.is_meta:
                carried = as_carried(held.detach())
                with watchdog.waiting("copied weights of the first replica", bound.groups["dp"]):
                    dist.broadcast(carried, bound.peer("dp", 0), group=bound.handles["dp"])
                if carried.data_ptr() != held.data_ptr():
                    held.detach().copy_(carried.view_as(held))

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """This module alone: what asks for parameters asks this first, so that they are those of the split by now."""
        for _ in self._pairs():
            pass
        yield from super().named_modules(*args, **kwargs)

    def train(self, mode: bool = True) -> "WeightsCopy":
        """Set the mode of all modules when the model runs with these weights."""
        self._modes = [bool(mode)] * len(self._modes)
        return super().train(mode)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the model has these weights and modes, and this has the model's."""
        run, modules = self.model.model_run, [*self.model.modules()]
        before = [module.training for module in modules]
        self._exchange()
        run.has_copied_weights = True
        try:
            for module, mode in zip(modules, self._modes, strict=True):
                module.training = mode
            yield
        finally:
            for module, mode in zip(modules, before, strict=True):
                module.training = mode
            run.has_copied_weights = False
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for held, now in self._pairs():
            if not now.is_meta:
                before = now.detach().clone()
                now.copy_(held)
                held.copy_(before)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward with these weights, where a rank holds the whole model, outside of steps and without
        gradients."""
        if self.model.session.running() is not None:
            raise ShardwrightError(
                f"a copy of the weights of {self.model.model_run.label} is called in a step that was not given it: "
                f"pass it, or the AveragedModel around it, as an argument in the place of the model"
            )
        _require_no_gradients(self)
        with self.in_place():
            return self.model(*args, **kwargs)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The whole state dict within that of the `AveragedModel` around this; every rank calls that.

        Raises ShardwrightError where it is asked for by itself: loops that average it in place would change a copy.
        """
        if args or keep_vars or destination is None:
            raise ShardwrightError(
                "the state dict of a copied DistributedModel is put together from the ranks, and what is written to it "
                "is lost: average over .parameters(), which are in the order of the model's; save that of "
                "torch.optim.swa_utils.AveragedModel(model), or model.state_dict()"
            )
        copies: dict[int, torch.Tensor] = {}
        with self.in_place():
            for name, entry in self.model.state_dict().items():
                is_tensor = isinstance(entry, torch.Tensor)
                destination[f"{prefix}{name}"] = copies.setdefault(id(entry), entry.clone()) if is_tensor else entry
        return destination

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        given = {name.removeprefix(prefix): entry for name, entry in state_dict.items() if name.startswith(prefix)}
        try:
            with self.in_place():
                missing, unexpected = self.model.load_state_dict(given, strict=False)
        except PlanError as error:
            error_msgs.append(str(error))
            return
        missing_keys.extend(f"{prefix}{name}" for name in missing)
        unexpected_keys.extend(f"{prefix}{name}" for name in unexpected if strict)

    def __deepcopy__(self, memo: Any) -> "WeightsCopy":
        made = WeightsCopy(self.model)
        made._fill(self._parameters.items(), self._buffers.items())
        made._may_differ = self._may_differ
        made._modes, made.training = [*self._modes], self.training
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse pickling. Raises ShardwrightError."""
        raise ShardwrightError(
            "a copy of a DistributedModel is pickled, and one rank of it holds a part of the weights: pickle the state "
            "dict of torch.optim.swa_utils.AveragedModel(model), which is whole"
        )


def copied(model: DistributedModel) -> WeightsCopy:
    """A copy of a split model's weights, of which the run is to know."""
    model.session.has_copied_weights = True
    if any(isinstance(module, BatchNorm) and module.track_running_stats for module in model.modules()):
        warnings.warn(
            f"a copy is made of {model.model_run.label}, which has batch norms: torch.optim.swa_utils.update_bn does "
            f"nothing with a copy, which holds no modules; AveragedModel(model, use_buffers=True) averages their "
            f"running statistics",
            PlanWarning,
            stacklevel=4,
        )
    return WeightsCopy(model)


@contextmanager
def with_models(args: Any, kwargs: Any, session: Session) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """A context in which the models have the weights of the copies among a step's arguments. It gives the arguments
    with the models in the places of the copies.

    Raises ShardwrightError, on all ranks, for a training step, and for two that are one model.
    """
    if not session.has_copied_weights:
        yield args, kwargs
        return
    found: dict[int, WeightsCopy] = {}
    failure: Exception | None = None

    def shown(leaf: Any) -> Any:
        copy = leaf.module if isinstance(leaf, torch.optim.swa_utils.AveragedModel) else leaf
        if not isinstance(copy, WeightsCopy):
            return leaf
        found[id(copy)] = copy
        return copy.model

    try:
        leaves = pytree.tree_leaves((args, kwargs), is_leaf=lambda leaf: isinstance(leaf, nn.Module))
        own = [id(leaf) for leaf in leaves if isinstance(leaf, DistributedModel)]
        args, kwargs = pytree.tree_map(shown, (args, kwargs), is_leaf=lambda leaf: isinstance(leaf, nn.Module))
        own += [id(copy.model) for copy in found.values()]
        for copy in found.values():
            _require_no_gradients(copy)
            if own.count(id(copy.model)) > 1:
                raise ShardwrightError(
                    f"a step is given {copy.model.model_run.label} and a copy of its weights, or two copies: the model "
                    f"runs with one of them at a time; call a step for each"
                )
    except ShardwrightError as error:
        failure = error
    if failure is not None:
        session.agreement.meet("a step with copied weights", failure=failure)
    with ExitStack() as stack:
        for copy in found.values():
            stack.enter_context(copy.in_place())
        yield args, kwargs


def _require_no_gradients(copy: WeightsCopy) -> None:
    if torch.is_grad_enabled():
        raise ShardwrightError(
            f"a copy of the weights of {copy.model.model_run.label} is called with gradients enabled: it is evaluated, "
            f"under torch.no_grad(), and its model is trained"
        )


def _is_like(held: torch.Tensor, now: torch.Tensor) -> bool:
    return (held.shape, held.dtype, held.device) == (now.shape, now.dtype, now.device)


def _kept(
    name: str, held: torch.Tensor, now: torch.Tensor, part: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """What this rank keeps of a copied tensor, now that the model's own is another part of it."""
    if now.is_meta:
        return torch.empty_like(now, requires_grad=False)
    kept = held if held.is_meta or held.shape == now.shape else part(held)
    if kept.is_meta or kept.shape != now.shape:
        raise ShardwrightError(
            f"{name} was copied with shape {tuple(held.shape)}{' on another rank' if held.is_meta else ''}, and the "
            f"model has had another split since, with {tuple(now.shape)} here: copy the model once its first steps "
            f"have run"
        )
    return kept.to(now).clone()
