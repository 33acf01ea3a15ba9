"""The optimizer of a split model: the user's own, over the parameters that this rank holds."""

import dataclasses
import logging
import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from shardwright.backends.torch.state.elementwise import is_elementwise, require_separate, takes_whole_norms
from shardwright.backends.torch.state.host_states import step_on_host
from shardwright.backends.torch.state.model_agreement import plain_text
from shardwright.backends.torch.state.optimizer_states import (
    gather_states,
    is_local,
    load_states,
    local_states,
    put_states_together,
)
from shardwright.backends.torch.state.ownership import is_hollow
from shardwright.backends.torch.state.parts import Parts
from shardwright.backends.torch.state.saved_parts import SavedParts
from shardwright.backends.torch.state.whole_norms import WholeNorms
from shardwright.core.checkpoint.reader import FRESH, require_names
from shardwright.core.checkpoint.saved_tensors import SavedState
from shardwright.core.errors import CheckpointError, MissingCapabilityError, PlanWarning, ShardwrightError
from shardwright.core.model.loss.scaling import LossScale, loss_scale_of
from shardwright.torch import session as sessions
from shardwright.torch.run_agreement import optimizers_claim
from shardwright.torch.scaler import require_unscaled

log = logging.getLogger("shardwright")
LOSS_SCALE = "loss_scale"
"""The key of the factor of losses in state dicts."""


class DistributedOptimizer(torch.optim.Optimizer):
    """A wrapper of an optimizer made from a model's parameters, before or after the model was wrapped or split. It
    belongs to the model that has them; a model may have several.

    Parameters are matched by identity: those of other ranks leave the groups, those of a model on the meta device are
    replaced by the ones with data. Learning-rate schedulers take the wrapper, and so does ``torch.amp.GradScaler``,
    which then skips an update on all ranks where a gradient overflows on one.

    Args:
        static_loss_scale: a fixed factor of losses; gradients are divided by it again. It acts in float16 alone, as the
            dynamic one does; elsewhere a warning says that it does not. None is 1.
        dynamic_loss_scale: whether the factor is found while training goes on: a step whose gradients overflow on any
            rank is skipped on all, and said.
        dynamic_loss_args: the arguments of a dynamic factor, which can be given by name too: ``init_scale`` (2**32),
            ``scale_factor`` (2), ``scale_window`` (1000), ``min_scale`` (1), ``delayed_shift`` (1),
            ``consecutive_hysteresis`` (False); see `core.model.loss.scaling.LossScale`.

    Attributes:
        overflow: whether the last step was skipped, because gradients overflowed.

    Raises:
        ShardwrightError: no model was wrapped, the parameters are of several models, or of none where there are
            several, or an argument is not possible.
    """

    holds_a_split_model = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        **more_dynamic_loss_args: Any,
    ) -> None:
        # Deliberately not torch's own __init__: the groups and the state are those of the wrapped optimizer.
        session = sessions.current()
        if not session.models:
            raise ShardwrightError("wrap the model first: sw.DistributedModel(model), then the optimizer")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.model_run = session.of_parameters(parameters, f"a DistributedOptimizer ({type(optimizer).__name__})")
        runtime = self.model_run.runtime
        self.optimizer = optimizer
        self._ownership, self._bound, self._watchdog = runtime.ownership, session.bound, session.watchdog
        self._split_model = runtime.split_model
        if takes_whole_norms(optimizer):
            optimizer.norms = WholeNorms(  # type: ignore[attr-defined]
                runtime.ownership, runtime.split_model.parts, session.bound, session.watchdog
            )
        self._load_later: Callable[[], None] | None = None
        """Loads states once the first step has cut the parameters."""
        self._load_whole: Callable[[], None] | None = None
        """Loads states once the parameters have values, though they are not cut yet."""
        self._names: list[list[str | torch.Tensor]] = []
        self._note_groups()
        self._rebind()
        self._steps = 0
        self._log = self.model_run.log
        self.overflow = False
        asked = {**(dynamic_loss_args or {}), **more_dynamic_loss_args}
        self._scaling = loss_scale_of(static_loss_scale, dynamic_loss_scale, asked)
        if self._scaling is not None and not self._is_in_half(self.model_run.compute):
            warnings.warn(
                "the loss scale has no effect: steps do not compute in float16, whose gradients alone underflow",
                PlanWarning,
                stacklevel=2,
            )
            self._scaling = None
        if self._scaling is not None:
            runtime.split_model.loss_scale = self._scaling
        runtime.split_model.listeners.append(self._rebind)
        runtime.split_model.before_whole.append(self._put_together)
        runtime.split_model.before_sharding.append(self._needs_whole_matrices)
        runtime.split_model.after_sharding.append(self._cut_to_pieces)
        self._require_fits_shards()
        self.model_run.optimizers.append(weakref.ref(self))

    def _is_in_half(self, compute: torch.dtype | None) -> bool:
        """Whether gradients are in float16 anywhere."""
        own = (p.dtype for group in self.optimizer.param_groups for p in group["params"])
        return torch.float16 in (own if compute is None else (compute,))

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters of this rank from their gradients, which the step has reduced already."""
        if closure is not None:
            raise ShardwrightError("a closure would run part of a model only: call the step function, then step()")
        if self.model_run.runtime.in_step_body:
            raise ShardwrightError(
                "optimizer.step() is called inside of the step, where gradients are not summed yet: call it after the "
                "step function"
            )
        self._steps += 1
        self.cut_states()
        skipped = self._scaling is not None and self._scaling.is_dynamic and self._overflows(self._scaling)
        if not skipped and self._split_model.clips_at is not None:
            require_unscaled(self.model_run, self.model_run.optimizers_alive())
            self._split_model.gradients.clip_once(self._split_model.clips_at)
        found = None if skipped else self._update()
        if self._log is not None:
            self._log.updated(self, self._split_model.gradients.last_norm, skipped=skipped)
        return found

    def _update(self) -> Any:
        flat = self._split_model.parts.flat
        if flat is None or flat.store is None:
            return self.optimizer.step()
        if takes_whole_norms(self.optimizer):
            raise MissingCapabilityError(
                f"offload_states steps parameters in parts, and {type(self.optimizer).__name__} needs norms of all of "
                f"them at once: leave offload_states out, or take an optimizer such as AdamW"
            )
        return step_on_host(self.optimizer, flat)

    @property
    def loss_scale(self) -> float:
        """The factor of the loss in the next step."""
        return self._split_model.loss_scale.scale

    @property
    def _global_grad_norm(self) -> torch.Tensor | None:
        """The norm of all gradients of the last step, if it was asked for: a name that SageMaker's scripts read."""
        return self._split_model.gradients.last_norm

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """SageMaker's name for `DistributedModel.clip_grad_norm_`."""
        require_unscaled(self.model_run)
        call = f"optimizer.clip_master_grads({float(max_norm)}, {float(norm_type)})"
        sessions.current().agreement.meet(self.model_run.of_model(call))
        return self._split_model.gradients.clip_norm(float(max_norm), float(norm_type), False)

    def _overflows(self, scaling: LossScale) -> bool:
        """Whether a gradient of the step is not finite on any rank, by the norm that all ranks have; the factor of the
        loss follows."""
        gradients = self._split_model.gradients
        norm = gradients.last_norm if gradients.last_norm is not None else gradients.norm()
        self.overflow = not bool(torch.isfinite(norm))
        before = scaling.scale
        scaling.update(self.overflow)
        if self.overflow and self._bound.rank == 0:
            log.warning(
                "optimizer step %d is skipped: gradients overflowed at a loss scale of %g; the next is %g",
                self._steps, before, scaling.scale,
            )  # fmt: skip
        return self.overflow

    def said(self, name: str) -> dict[str, str]:
        """The settings of the optimizer in words, by name: every rank must have the same."""
        found = {name: type(self.optimizer).__name__, f"the steps of {name}": str(self._steps)}
        if self._scaling is not None:
            found[f"the loss scale of {name}"] = f"{self._scaling}"
        for number, group in enumerate(self.param_groups):
            for key, value in group.items():
                if key != "params" and (text := plain_text(value)) is not None:
                    found[f"{key} of {name}, group {number}"] = text
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._log is not None:
            self._log.restart()
        self.optimizer.zero_grad(set_to_none)
        self._split_model.gradients.forget_held(p for group in self.param_groups for p in group["params"])

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is one of its groups', and none of its model's."""
        return any(parameter is one for names in self._names for one in names)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        given = param_group["params"]
        added = [given] if isinstance(given, torch.Tensor) else list(given)
        for run in sessions.current().models:
            if run is not self.model_run and any(map(run.runtime.ownership.name_of, added)):
                raise ShardwrightError(
                    f"an optimizer of {self.model_run.label} is given a parameter of {run.label}: make one for each "
                    f"model"
                )
        self.optimizer.add_param_group({**param_group, "params": added})
        self._note_groups()
        self._rebind()

    def state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """The states of all parameters, by their original names, whatever the split: `load_state_dict` takes them under
        any other. They are on every rank, or with ``rank0_only`` on rank 0 and empty elsewhere. Every rank calls this.

        Returns:
            ``{"state": {name: {...}}, "param_groups": [{"params": [names], ...}]}``, tensors on the CPU.

        Raises:
            MissingCapabilityError: a parameter is sharded along the tensor axis, and has a state of another shape.
        """
        self.cut_states()
        claims = [optimizers_claim(self.model_run)]
        call = self.model_run.of_model(f"optimizer.state_dict({rank0_only=})")
        sessions.current().agreement.meet(call, claims, in_replica=True)
        found = gather_states(
            self._ownership, self.optimizer, self.named_groups(), self._bound, self._watchdog, rank0_only,
            self._split_model.parts,
        )  # fmt: skip
        return found | self._said_scale() if found else found

    def local_state_dict(self) -> dict[str, Any]:
        """The states of this rank's parameters, or of its parts of them, by their original names."""
        return local_states(self._ownership, self.optimizer, self.named_groups()) | self._said_scale()

    def _said_scale(self) -> dict[str, Any]:
        return {} if self._scaling is None else {LOSS_SCALE: dataclasses.asdict(self._scaling)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's share of a state dict from `state_dict` under any plan, or from torch's own optimizer for
        the unsplit model; or one from `local_state_dict` on this rank under the same plan.

        Raises PlanError for parameters and shapes that do not fit.
        """
        if self._scaling is not None and LOSS_SCALE in state_dict:
            self._scaling = self._split_model.loss_scale = LossScale(**state_dict[LOSS_SCALE])
        # The first step cuts parameters; states are cut after it.
        cut = self._split_model.has_cut_parameters
        now = state_dict if cut or not is_local(state_dict) else {**state_dict, "state": {}}
        load_states(self._ownership, self.optimizer, self.named_groups(), now, self._split_model.parts)
        along_tensor_axis = self._bound.size("tp") > 1 and not self._split_model.is_cut_for_tensor_axis
        load_later = partial(
            load_states, self._ownership, self.optimizer, self.named_groups(), state_dict, self._split_model.parts,
            with_options=False,
        )  # fmt: skip
        self._load_later = load_later if along_tensor_axis or (not cut and is_local(state_dict)) else None
        sessions.current().note_loaded("states of the optimizer")

    def cut_states(self) -> None:
        """Load the states that wait for the first step, which cuts the parameters."""
        if self._load_later is not None and self._split_model.has_cut_parameters:
            load, self._load_later, self._load_whole = self._load_later, None, None
            load()
        elif self._load_whole is not None and not self._lacks_values():
            load, self._load_whole = self._load_whole, None
            load()

    def told(self) -> dict[str, Any]:
        """The optimizer without its states, as a checkpoint has it: its class, the options of its groups with the names
        of their parameters, the number of its steps and the scale of losses."""
        groups = [
            {key: entry for key, entry in group.items() if key != "params"} | {"params": names}
            for group, names in zip(self.param_groups, self.named_groups(), strict=True)
        ]
        scale = None if self._scaling is None else dataclasses.asdict(self._scaling)
        return {"class": type(self.optimizer).__name__, "groups": groups, "steps": self._steps, LOSS_SCALE: scale}

    def require_like(self, told: Mapping[str, Any], source: str) -> None:
        """Raise CheckpointError where an optimizer of `told` is of another class than this one, or of other
        parameters."""
        own = type(self.optimizer).__name__
        if told["class"] != own:
            raise CheckpointError(
                f"{source} has the states of {told['class']}, and this optimizer is {own}: make one of that class, or "
                f"give load_optimizer=False, and begin with fresh states"
            )
        saved, groups = [group["params"] for group in told["groups"]], self.named_groups()
        if len(saved) != len(groups):
            raise CheckpointError(f"{source} has {len(saved)} parameter groups, and this optimizer {len(groups)}")
        for number, (before, names) in enumerate(zip(saved, groups, strict=True)):
            require_names(names, before, f"group {number} of the optimizer", FRESH)

    def require_across(self, reader: SavedState, section: str) -> None:
        """Raise CheckpointError where states that come from a JAX run are not those that this optimizer has, or lack a
        parameter."""
        saved: dict[str, list[str]] = {}
        for label in reader.names(section):
            key, _, name = label.partition("/")
            saved.setdefault(key, []).append(name)
        saved.pop("step", None)
        own = _states_across(self.optimizer)
        if own is None or own != set(saved):
            kind = type(self.optimizer).__name__
            raise CheckpointError(
                f"{reader} has the states {', '.join(sorted(saved)) or 'of no parameter'}, and {kind} here keeps "
                f"{', '.join(sorted(own or ())) or 'others'}: Adam, AdamW and SGD with momentum cross over. {FRESH}"
            )
        for key, names in saved.items():
            wanted = [name for held in self.named_groups() for name in held]
            require_names(wanted, names, f"the optimizer's {key}", FRESH)
            for name in names:
                if (dtype := reader.tensor(f"{section}/{key}/{name}").dtype) not in ("F32", "F64"):
                    raise CheckpointError(
                        f"{reader} keeps {key} of {name} in {dtype}, and torch's optimizers keep it in the parameter's "
                        f"dtype. {FRESH}"
                    )

    def resume(self, told: Mapping[str, Any] | None, reader: SavedState, section: str, steps: int | None) -> None:
        """Take the options and the states of an optimizer in a checkpoint; those that the first step cuts, after it.
        ``told``: None where it comes from a JAX run, whose options `crossed_options.take_options` takes; ``steps`` is
        the number of its updates then."""
        for group, saved in zip(self.param_groups, told["groups"] if told else (), strict=told is not None):
            for key, entry in saved.items():
                before = group.get(key)
                if isinstance(entry, torch.Tensor) and isinstance(before, torch.Tensor):
                    entry = entry.to(before.device)
                if key != "params":
                    group[key] = entry
        self._steps = told["steps"] if told else self._steps if steps is None else steps
        if told:
            self.resume_scale(told)
        names = [name for group in self.named_groups() for name in group]

        def load() -> None:
            saved = SavedParts(self._ownership, self._split_model.parts, self._bound)
            saved.read_states(reader, section, self.optimizer, names)

        load()
        # The tensor axis cuts no states, and parameters without values have none yet.
        cut_later = self._bound.size("tp") > 1 and not self._split_model.has_cut_parameters
        lacks = self._lacks_values()
        self._load_later, self._load_whole = load if cut_later or lacks else None, load if lacks else None

    def resume_scale(self, told: Mapping[str, Any]) -> None:
        """Take the scale of losses of an optimizer in a checkpoint, where both have one."""
        if self._scaling is not None and told[LOSS_SCALE] is not None:
            self._scaling = self._split_model.loss_scale = LossScale(**told[LOSS_SCALE])

    def require_states(self) -> None:
        """Raise CheckpointError where states of a checkpoint wait for parameters without values."""
        if self._load_whole is not None:
            raise CheckpointError(
                "the states of a checkpoint wait for the first step, which makes the parameters: run a step, then save"
            )

    def _lacks_values(self) -> bool:
        names = [name for group in self.named_groups() for name in group if self._ownership.holds(name)]
        tensors = [self._ownership.tensor(name) for name in names]
        return any(tensor.is_meta or is_hollow(tensor) for tensor in tensors)

    def _put_together(self, parts: Parts) -> None:
        put_states_together(self._ownership, self.optimizer, self._names, parts)

    def _needs_whole_matrices(self) -> bool:
        """Whether pieces of parameters will not do for this optimizer. Raises MissingCapabilityError where whole ones
        will not either."""
        require_separate(self.optimizer)
        return not is_elementwise(self.optimizer)

    def _cut_to_pieces(self, parts: Parts) -> None:
        """Cut the states that were there before the parameters were sharded over the data axis."""
        flat = parts.flat
        for names in self._names:
            for name in names:
                if flat is None or not isinstance(name, str) or name not in flat.group_of:
                    continue
                parameter = self._ownership.parameter(name)
                if not parameter.numel():
                    self.state.pop(parameter, None)
                states = self.state.get(parameter, {})
                for key, entry in states.items():
                    if isinstance(entry, torch.Tensor) and entry.dim() and entry.shape == flat.shape(name):
                        states[key] = flat.piece(name, entry).clone()

    def _require_fits_shards(self) -> None:
        flat = self._split_model.parts.flat
        if flat is not None and not flat.holds_whole_parameters and self._needs_whole_matrices():
            raise MissingCapabilityError(
                f"{type(self.optimizer).__name__} needs whole parameters, and those of this model were cut into pieces "
                f"by its first step already: make the optimizer before the first step"
            )

    def named_groups(self) -> list[list[str]]:
        """The names of the parameters of every group, those of other ranks among them. Raises ShardwrightError where a
        parameter is none of the model's."""
        foreign = [p for names in self._names for p in names if not isinstance(p, str)]
        if foreign:
            raise ShardwrightError(
                f"the optimizer has a parameter of shape {tuple(foreign[0].shape)} that is none of the model's, and so "
                f"has no name: give it an optimizer of its own"
            )
        return [[str(name) for name in names] for names in self._names]

    def _note_groups(self) -> None:
        """Remember every group by names. A parameter that is not the model's is remembered itself."""
        for group in self.param_groups[len(self._names) :]:
            self._names.append([self._ownership.name_of(p) or p for p in group["params"]])

    def _rebind(self) -> None:
        old = {self._ownership.name_of(p): p for group in self.param_groups for p in group["params"]}
        for group, names in zip(self.param_groups, self._names, strict=True):
            kept: list[torch.Tensor] = []
            for name in names:
                parameter = self._ownership.parameter(name) if isinstance(name, str) else name
                before = old.get(name) if isinstance(name, str) else None
                if before is not None and before is not parameter and before in self.state:
                    state = self.state.pop(before)
                    if not parameter.is_meta:
                        self.state[parameter] = state
                if not parameter.is_meta:
                    kept.append(parameter)
            group["params"] = kept

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"


def _states_across(optimizer: torch.optim.Optimizer) -> set[str] | None:
    """The states as large as a parameter that an optimizer keeps, of those that other frameworks' have too; None where
    it is of another class."""
    groups = optimizer.param_groups
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return None if any(group["amsgrad"] for group in groups) else {"exp_avg", "exp_avg_sq"}
    if isinstance(optimizer, torch.optim.SGD):
        return {"momentum_buffer"} if any(group["momentum"] for group in groups) else set()
    return None
