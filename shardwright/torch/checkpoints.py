"""Checkpoints of a training run: written by all ranks, read under any plan.

A checkpoint holds the logical state by original names (`core.checkpoint`), so that it does not matter how the model was
split when it was written, nor how it is when it is read.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwright.backends.torch.machine.agreement import Claim
from shardwright.backends.torch.state.saved_parts import read_whole
from shardwright.core.checkpoint import folder as folders
from shardwright.core.checkpoint.folder import Save
from shardwright.core.checkpoint.name_map import NameMap, Side
from shardwright.core.checkpoint.reader import Reader
from shardwright.core.checkpoint.saved_tensors import SavedState
from shardwright.core.errors import CheckpointError
from shardwright.torch import session as sessions
from shardwright.torch.checkpoint_state import USER, CheckpointState, Optimizers, copied
from shardwright.torch.model import DistributedModel
from shardwright.torch.model_run import ModelRun
from shardwright.torch.pending_checkpoint import PendingCheckpoint

BEHIND_S = 600.0
"""The seconds that a checkpoint in the background waits for the parts of other ranks, at least."""


def save_checkpoint(
    path: str | Path,
    tag: str,
    partial: bool = True,
    model: DistributedModel | None = None,
    optimizer: Optimizers = None,
    user_content: Any = None,
    *,
    num_kept_partial_checkpoints: int | None = None,
    background: bool = False,
) -> PendingCheckpoint:
    """Write the state of training to ``path/tag``: parameters, buffers, optimizers, loss scale, seed, step and what the
    user adds. Every rank calls this, and writes what it holds; `resume_from_checkpoint` reads it under any plan.

    It is complete when its marker is there, which is written last. Until then, and where anything fails, what was there
    under the tag before stays; a run that is killed leaves nothing that is taken for a checkpoint.

    Args:
        path: a folder that all ranks share.
        tag: the name of the checkpoint.
        partial: True: every rank writes what it holds. False: the same, put together in one file of parameters and
            buffers, one of each optimizer and so on, by rank 0.
        model: default: the only one of this run. Several are saved each to a folder of its own, in which a run writes
            no checkpoints of another.
        optimizer: one or several of the model's; default: all of them.
        user_content: numbers, texts, lists, tuples, dicts and tensors, as state dicts of schedulers and data loaders
            are; the same on every rank. Nothing is pickled.
        num_kept_partial_checkpoints: so many of the newest checkpoints of the folder are kept; None: all.
        background: go on at once: what is to be written is copied to the host's memory first, as many bytes as this
            rank writes. The next checkpoint waits for this one, and so does `shutdown`.

    Raises:
        ShardwrightError: there are several models, and none is given.
        CheckpointError: the folder cannot be written to, ranks do not share it, it has checkpoints of another model of
            this run, or something cannot be saved.
        DisagreementError: on all ranks, where one has failed, or their user_content differs.
    """
    session = sessions.current()
    call = f"sw.save_checkpoint(…, {tag!r})"
    state: CheckpointState | None = None
    save: Save | None = None
    failure: Exception | None = None
    notes: tuple[int, ...] = ()
    claims: list[Claim] = []
    own: dict[str, dict[str, Any]] = {}
    try:
        folder = folders.folder_of(path)
        folders.require_keep(num_kept_partial_checkpoints)
        wait_for_checkpoints(session)
        state = CheckpointState(session, model, optimizer)
        call = state.run.of_model(call)
        _require_own_folder(session, folder, state.run)
        content, pieces, claims = state.gathered(user_content)
        if session.bound.rank == 0:
            save = folders.begin(folder, tag, session.saves)
            notes = int(save.name, 16), save.sequence
        else:
            folders.require_tag(tag)
            pieces[USER] = []  # rank 0 writes them
        own = state.own_content(pieces)
    except Exception as error:
        failure = error
    try:
        told = session.agreement.meet(call, claims, failure=failure, notes=notes)
    except Exception:
        if save is not None:
            folders.abandon(save)
        raise
    assert state is not None
    if save is None:
        number, sequence, *_ = told[0]
        save = Save(folder / tag, f"{number:012x}", sequence)
    chosen: Save = save
    session.folders[folder.resolve()] = state.run

    def write() -> None:
        folders.write_rank(chosen, session.bound.rank, pieces, own)

    wait_s = max(session.config.wait_timeout_s, BEHIND_S) if background else session.config.wait_timeout_s

    def publish() -> None:
        folders.publish(
            chosen, session.bound.mesh.size, wait_s, step=state.steps, framework="torch",
            content=content, plan=state.run.plan_document(), keep=num_kept_partial_checkpoints, together=not partial,
        )  # fmt: skip

    if background:
        pieces = {part: [copied(piece) for piece in held] for part, held in pieces.items()}
        pending = PendingCheckpoint()
        session.pending = pending

        def give_up(error: Exception) -> None:
            if session.bound.rank == 0:
                folders.abandon(chosen)
            else:
                folders.tell_failure(chosen, session.bound.rank, error)

        pending.start([write, publish] if session.bound.rank == 0 else [write], give_up)
        return pending
    for work, is_mine in ((write, True), (publish, session.bound.rank == 0)):
        failure = None
        try:
            if is_mine:
                work()
        except Exception as error:
            failure = error
        try:
            session.agreement.meet(f"{call}, {work.__name__}", failure=failure)
        except Exception:
            if session.bound.rank == 0:
                folders.abandon(chosen)
            raise
    return PendingCheckpoint()


def resume_from_checkpoint(
    path: str | Path,
    tag: str | None = None,
    partial: bool = True,
    *,
    model: DistributedModel | None = None,
    optimizer: Optimizers = None,
    strict: bool = True,
    load_optimizer: bool = True,
    names: NameMap | Mapping[str, str] | str | Path | None = None,
    missing_ok: bool = False,
) -> Any:
    """Go on from a checkpoint of `save_checkpoint`, under whatever plan it was written: every rank reads what it holds.
    Every rank calls this, once the model and the optimizers are wrapped, before the first step or later.

    Of several models each is read from its own folder: its weights, optimizers, seed, steps and samples. States of
    random generators are the process's, and are those of the checkpoint that was read last.

    Args:
        path: the folder of checkpoints.
        tag: the name of one; None: the newest that is complete.
        model, optimizer: as of `save_checkpoint`.
        partial: is taken for SageMaker's sake: both forms are read alike.
        strict: whether a model and a checkpoint of different names are refused; else what fits is loaded.
        load_optimizer: whether the states of optimizers are loaded too.
        names: for a checkpoint of JAX, how this model's names and layouts become those of its twin: the name of a
            family, a `NameMap`, its TOML file, or its relations. The states of Adam, AdamW and SGD with momentum come
            along, and the counts of steps; options of the optimizer, seeds and random states stay as they are.
        missing_ok: whether a folder without a complete checkpoint, or none, is a first start: then nothing is loaded.

    Returns:
        what was given as ``user_content``; None where nothing was loaded.

    Raises:
        CheckpointError: there is none, it is not complete, damaged, or of another model or optimizer.
        DisagreementError: on all ranks, where one has failed, or reads another checkpoint.
    """
    return resumed(
        path, tag, model=model, optimizer=optimizer, strict=strict, load_optimizer=load_optimizer, names=names,
        missing_ok=missing_ok,
    )  # fmt: skip


def resumed(
    path: str | Path,
    tag: str | None,
    *,
    model: DistributedModel | None = None,
    optimizer: Optimizers = None,
    strict: bool = True,
    load_optimizer: bool = True,
    load_scale: bool = False,
    names: NameMap | Mapping[str, str] | str | Path | None = None,
    missing_ok: bool = False,
) -> Any:
    """As `resume_from_checkpoint`. ``load_scale``: the scale of losses is loaded where the states of optimizers are
    not."""
    session = sessions.current()
    failure: Exception | None = None
    claims: list[Claim] = []
    content: Any = None
    state: CheckpointState | None = None
    reader: SavedState | None = None
    torch_only: tuple[Side, ...] = ()
    source = ""
    call = f"sw.resume_from_checkpoint({tag=})"
    try:
        wait_for_checkpoints(session)
        state = CheckpointState(session, model, optimizer)
        call = state.run.of_model(call)
        folder = folders.folder_of(path)
        is_missing = missing_ok and tag is None and folders.has_none(folder)
        found = None if is_missing else Reader.open(folder, tag)
        source = "none" if found is None else f"{found}, {found.marker.index_digest[:8]}"
        claims = [Claim.of("the checkpoint that is loaded", source, "Give every rank one folder that they share.")]
        if found is None or found.framework == "torch":
            reader, torch_only = found, ()
        else:
            reader, torch_only = state.translated(found, names, load_optimizer=load_optimizer)
        if reader is not None:
            content = _content_of(reader)
            state.require_fits(reader, content, torch_only, strict=strict, load_optimizer=load_optimizer)
    except Exception as error:
        failure = error
    session.agreement.meet(call, claims, failure=failure)
    if reader is None:
        return None
    assert state is not None
    try:
        state.load(reader, content, load_optimizer=load_optimizer)
        if load_scale and not load_optimizer:
            state.load_scales(content)
    except Exception as error:
        failure = error
    session.agreement.meet(f"{call}, loading", failure=failure)
    session.note_loaded(source)
    return content["user"]


def _content_of(reader: SavedState) -> Any:
    return reader.content(lambda name: read_whole(reader, name))


def _require_own_folder(session: "sessions.Session", folder: Path, run: ModelRun) -> None:
    """Raise CheckpointError for a folder to which this run has written checkpoints of another model: the newest of a
    folder, and the number of those that are kept, are of one model."""
    before = session.folders.get(folder.resolve())
    if before is not None and before is not run:
        raise CheckpointError(
            f"{folder} has checkpoints of {before.label} of this run: give {run.label} a folder of its own"
        )


def wait_for_checkpoints(session: "sessions.Session") -> None:
    """Wait for the checkpoint that is being written in the background. Raises CheckpointError where it has failed."""
    pending, session.pending = session.pending, None
    if pending is not None:
        pending.settle()
