"""Plans, comparisons and timelines as tables for a terminal."""

import math
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright.core.layout.placements import Layout, Split
from shardwright.core.plan.breakdown import RankStep
from shardwright.core.plan.compare import Comparison
from shardwright.core.plan.decision import sharing_words
from shardwright.core.plan.memory_over_time import Moment
from shardwright.core.plan.plan import Plan, stale_note
from shardwright.core.plan.training_run import DAY_S
from shardwright.core.schedule.timeline import Timeline
from shardwright.core.tables.memory import MemoryUse
from shardwright.core.values.amounts import bytes_text, count_text, seconds_text

BARS = 64
"""The number of columns of a picture of memory over time."""


def plan_view(plan: Plan) -> RenderableType:
    """The tables of a plan: its decision, stages, memory, layouts, and the alternatives not chosen."""
    parts: list[RenderableType] = [_heading(plan), _stages(plan), _memory(plan)]
    if plan.decision.layouts:
        parts.append(_layouts(plan))
    if plan.alternatives:
        parts.append(_alternatives(plan))
    return Group(*parts)


def comparison_view(comparison: Comparison, first: str, second: str) -> RenderableType:
    """The differences of two plans, and whether their decisions differ."""
    notes = "".join(f"\nNOTE: {note}" for note in comparison.notes)
    decision = Text(f"{first}: {comparison.first.summary()}\n{second}: {comparison.second.summary()}{notes}")
    if not comparison.differences:
        return Group(decision, Text("The plans are equal.", style="green"))
    verdict = Text("The decisions differ.", style="yellow")
    if comparison.same_decision:
        verdict = Text("Same decision: degrees, cuts, layouts, schedule and memory policy.", style="green")
    if comparison.faster:
        verdict.append(f"\n{comparison.faster}", style="default")
    frameworks = {plan.provenance.captured_from for plan in (comparison.first, comparison.second)}
    unexpected = set(comparison.unexpected)
    table = new_table("What differs", "section", "field", Text(first), Text(second), "between frameworks")
    for each in comparison.differences:
        expected = len(frameworks) > 1 and each not in unexpected
        note = Text("expected", style="dim") if expected else Text("")
        table.add_row(each.part, each.field, Text(each.first), Text(each.second), note)
    if len(frameworks) == 1:
        table.columns.pop()
    return Group(decision, verdict, table)


def timeline_view(plan: Plan, timeline: Timeline) -> RenderableType:
    """The time of the pipeline, and the load of every rank: actions, idle share and activations."""
    decision = plan.decision
    head = Text(
        f"{decision.schedule}: {decision.stages} stages on {decision.pp} ranks, {plan.microbatches} microbatches, "
        f"{seconds_text(timeline.makespan_s)}"
    )
    table = new_table("Pipeline", "rank", ">actions", ">idle", ">live activations", ">activation memory")
    peaks = zip(timeline.peak_live_activations, timeline.peak_activation_bytes, strict=True)
    for rank, (live, size) in enumerate(peaks):
        idle = f"{timeline.bubble_fraction[rank]:.1%}"
        table.add_row(str(rank), str(len(timeline.actions[rank])), idle, str(live), bytes_text(size))
    return Group(head, table)


def step_view(parts: Sequence[RankStep]) -> RenderableType:
    """The parts of a step's time, rank by rank."""
    table = new_table(
        "Step", "rank", ">compute", ">tensor axis", ">transfers", ">bubble", ">gradients", ">optimizer", ">together"
    )
    for rank, part in enumerate(parts):
        waits = (part.tensor_s, part.transfer_s, part.bubble_s, part.gradients_s, part.optimizer_s)
        columns = (part.compute_s, *waits, part.total_s)
        table.add_row(str(rank), *map(seconds_text, columns))
    return table


def memory_view(held: Sequence[Sequence[Moment]], step_s: float) -> RenderableType:
    """The memory of every pipeline rank: by class where it is fullest, and all of it over the step."""
    fullest = [max(moments, key=lambda moment: moment.memory.total_bytes).memory for moments in held]
    classes = _classes(fullest)
    table = new_table("Memory at its fullest", "rank", *(f">{name}" for name in classes), ">together")
    pictures = ["\nMemory over the step, of each rank's fullest"]
    for rank, (moments, use) in enumerate(zip(held, fullest, strict=True)):
        most = max(1, use.total_bytes)
        shares = [0.0] * BARS
        for moment in moments:
            first, last = (int(BARS * at / step_s) if step_s else 0 for at in (moment.start_s, moment.end_s))
            for bar in range(min(first, BARS - 1), min(last, BARS - 1) + 1):
                shares[bar] = max(shares[bar], moment.memory.total_bytes / most)
        drawn = "".join(" ▁▂▃▄▅▆▇█"[round(8 * share)] for share in shares)
        table.add_row(str(rank), *(bytes_text(use.classes[name]) for name in classes), bytes_text(use.total_bytes))
        pictures.append(f"rank {rank}  {drawn}")
    return Group(table, Text("\n".join(pictures)))


def _heading(plan: Plan) -> Text:
    d, p = plan.decision, plan.predicted
    policy = [d.schedule] if d.pp > 1 else []
    policy += [f"{d.virtual_stages} virtual stages"] if d.virtual_stages > 1 else []
    policy += [
        _precision_text(plan),
        d.optimizer,
        f"recompute {d.recompute}" + (f" but for {len(d.kept_units)} units" if d.kept_units else ""),
        *([f"{d.other_recompute} of {len(d.other_units)} units"] if d.other_units else []),
        *([f"{len(d.offloaded_units)} units offloaded to the host"] if d.offloaded_units else []),
    ]
    policy += [f"placed {d.placement_order}"] if d.placement_order != "PDT" else []
    policy += sharing_words(d)
    terms = {
        "pipeline": p.pipeline_s,
        "traffic over the data axis": p.data_parallel_s,
        "optimizer": p.optimizer_s,
    }
    old = "before the edit: " * plan.is_stale
    lines = [
        *([f"NOTE: {note}"] if (note := stale_note(plan)) is not None else []),
        f"{count_text(plan.model.parameter_count)} parameters, captured from {plan.provenance.captured_from}, "
        f"bound to {', '.join(name for name, _ in plan.bindings)}",
        f"pp {d.pp} × dp {d.dp} × tp {d.tp}, "
        f"batch {d.batch} = dp {d.dp} × {plan.microbatches} microbatches of {d.microbatch}",
        ", ".join(policy),
        f"given: {', '.join(plan.provenance.pinned) or 'nothing, all was searched'}",
        f"{old}step {seconds_text(p.step_time_s)} ± {p.error.step_time:.0%} ({p.error.basis}) = "
        + " + ".join(f"{name} {seconds_text(value)}" for name, value in terms.items() if value),
        f"{old}of the pipeline, idle {p.bubble_fraction:.1%}, tensor collectives {seconds_text(p.tensor_collective_s)}"
        + (f", waiting for sharded parameters {seconds_text(p.passes_wait_s)}" if p.passes_wait_s else "")
        + (f"; ranks at work get {plan.costs.idle_lent:.0%} of what idle ones leave" if plan.costs.idle_lent else ""),
    ]
    lines += [f"{old}{line}" for line in (*_hidden(plan), *_rates(plan), *_price(plan))]
    if plan.provenance.slices:
        lines.append(f"{old}{plan.provenance.slices}")
    if plan.provenance.left_out:
        why = "left out" if plan.is_pinned("devices") else "not worth using, left out"
        lines.insert(1, f"{why}: {plan.provenance.left_out}")
    return Text(f"{plan.model_name} on {plan.provenance.cluster}", style="bold").append(
        "".join(f"\n  {line}" for line in lines), style="not bold"
    )


def _hidden(plan: Plan) -> list[str]:
    """The traffic that a step hides, and by whose overlap."""
    p, parts = plan.predicted, []
    if p.data_parallel_hidden_s:
        parts.append(f"{seconds_text(p.data_parallel_hidden_s)} of traffic over the data axis")
    if p.tensor_hidden_s:
        parts.append(f"{seconds_text(p.tensor_hidden_s)} of tensor collectives")
    runs = f"as {plan.costs.execution.system} {plan.costs.execution.version} overlaps"
    return [f"hidden behind computing: {' and '.join(parts)}, {runs}"] if parts else []


def _rates(plan: Plan) -> list[str]:
    """Samples, tokens and FLOPs per second, as far as they are known."""
    found, work = plan.throughput, plan.work
    rates = [f"{_rate(found.samples_per_s)} samples/s"]
    if found.tokens_per_s is not None:
        each = found.tokens_per_s / plan.predicted.mesh.size
        rates.append(f"{_rate(found.tokens_per_s)} tokens/s ({_rate(each)} a device; entries of {work.tokens_of})")
    if work.unknown:
        return [", ".join(rates), f"FLOPs are not told, as those of {', '.join(work.unknown[:3])} are not known"]
    if found.flops_per_s is None or found.hardware_flops_per_s is None:
        return [", ".join(rates)]
    flops = [f"{_rate(found.flops_per_s / 1e12)} TFLOP/s a device"]
    flops += [f"MFU {found.mfu:.1%}"] if found.mfu is not None else []
    flops.append("of the model's products, attention whole")
    if work.recomputed_flops:
        flops.append(f"{_rate(found.hardware_flops_per_s / 1e12)} TFLOP/s with what is computed again")
    return [", ".join(rates), ", ".join(flops)]


def _price(plan: Plan) -> list[str]:
    """The price of the devices and the length and price of the training, as far as they are known."""
    run, step_s, error = plan.run, plan.predicted.step_time_s, plan.predicted.error.step_time
    lines = []
    if run.usd_per_hour is not None:
        per_step = run.usd_per_hour * step_s / 3600
        each = f", {per_step / plan.work.tokens * 1e9:,.3g} USD for a billion tokens" if plan.work.tokens else ""
        lines.append(f"{run.usd_per_hour:,.2f} USD an hour for all devices, {per_step:.3g} USD a step{each}")
    training = plan.training
    if training is not None:
        amount = f"{run.tokens:.4g} tokens" if run.tokens else f"{run.samples:,} samples"
        lines.append(f"{amount} are {training}, ± {error:.0%}")
        late = run.deadline_s is not None and training.days * DAY_S * (1 + error) > run.deadline_s
        dear = run.budget_usd is not None and training.usd is not None and training.usd * (1 + error) > run.budget_usd
        for limit, tight in (("deadline", late), ("budget", dear)):
            lines += [f"NOTE: the {limit} is nearer than the prediction's error: it may be missed"] if tight else []
    return lines


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _precision_text(plan: Plan) -> str:
    """The precision; of fp8, the number of weights that are multiplied in it."""
    if not plan.decision.fp8_weights:
        return plan.decision.precision
    return f"products of {len(plan.fp8_parameters(plan.bindings[0][0]))} weights in fp8, the rest in bf16"


def _stages(plan: Plan) -> Table:
    """The stages of the decision. An edited plan knows no times of them: its costs are those of the stages before."""
    costs = None if plan.is_stale else plan.stage_costs()
    framework, binding = plan.bindings[0]
    times = [] if costs is None else [">forward", ">backward"]
    table = new_table(f"Stages ({framework}'s names)", "stage", "pp", "units", "modules", ">parameters", *times)
    classes = plan.model.class_slots
    first_of_tied = {slot: tied[0] for tied in plan.model.ties for slot in tied}
    for stage, units in enumerate(plan.stage_units):
        calls = [call.path for unit in units for call in binding.units[unit].calls]
        held = {
            first_of_tied.get(f"{unit}/{role}", f"{unit}/{role}"): math.prod(shape)
            for unit in units
            for role, shape in classes[plan.model.unit_classes[unit]]
        }
        if costs is not None:
            seconds = costs.forward_s[stage], costs.input_grad_s[stage] + costs.weight_grad_s[stage]
            times = list(map(seconds_text, seconds))
        table.add_row(
            str(stage),
            str(plan.decision.stage_ranks[stage]),
            f"{units[0]}–{units[-1]}" if len(units) > 1 else str(units[0]),
            Text(_span(calls)),
            count_text(sum(held.values())),
            *times,
        )
    return table


def _memory(plan: Plan) -> Table:
    limits, uses = plan.provenance.device_memory_bytes, plan.predicted.memory_by_stage_rank
    apart = [">not at once"] if any(use.apart_bytes for use in uses) else []
    classes = _classes(uses)
    unlike = len(set(limits)) > 1
    title = "each of its smallest device" if unlike else f"of {bytes_text(limits[0])}"
    whose = [">of"] if unlike else []
    free, error = plan.provenance.headroom, plan.predicted.error.memory
    title += f", {free:.1%} of it left free" if free else ""
    table = new_table(
        f"Memory per rank{' before the edit' * plan.is_stale} ({title}; predictions may be {error:.1%} too low)",
        "pp",
        *(f">{name}" for name in classes),
        *apart,
        ">total",
        *whose,
        ">used",
        ">margin",
    )
    for rank, (use, limit) in enumerate(zip(uses, limits, strict=True)):
        less = [f"-{bytes_text(use.apart_bytes)}"] if apart else []
        own = [bytes_text(limit)] if unlike else []
        margin = limit - use.total_bytes
        total = (
            bytes_text(use.total_bytes),
            *own,
            f"{use.total_bytes / limit:.1%}",
            bytes_text(margin) if margin >= 0 else f"-{bytes_text(-margin)}",
        )
        table.add_row(str(rank), *(bytes_text(use.classes[name]) for name in classes), *less, *total)
    return table


def _classes(uses: Sequence[MemoryUse]) -> list[str]:
    """The classes of bytes of which some rank holds any."""
    return [name for name in MemoryUse(0, 0, 0, 0, 0).classes if any(use.classes[name] for use in uses)]


def _layouts(plan: Plan) -> Table:
    framework, binding = plan.bindings[0]
    table = new_table(f"Layouts ({framework}'s names)", "parameter", ">units", ">shape (in, out)", "layout")
    for slot, layout in plan.decision.layouts:
        whose, role = slot.split("/", 1)
        if whose.startswith("@"):  # of one unit that differs from its class
            units = [int(whose[1:])]
        else:
            units = [unit for unit, own in enumerate(plan.model.unit_classes) if own == int(whose)]
        names = [name for unit in units for own, name, _ in binding.units[unit].parameters if own == role]
        shape = plan.model.slot_shapes[slot]
        table.add_row(
            Text(_common_name(names)),
            str(len(units)),
            " × ".join(map(str, shape)),
            Text(_layout_text(layout, len(shape))),
        )
    return table


def _alternatives(plan: Plan) -> Table:
    table = new_table(f"Not chosen{' before the edit' * plan.is_stale}", "plan", ">step", ">peak memory", "why")
    for each in plan.alternatives:
        scored = each.step_time_s > 0  # a default that does not fit has no figures
        figures = (seconds_text(each.step_time_s), bytes_text(each.peak_memory_bytes)) if scored else ("–", "–")
        table.add_row(Text(each.summary), *figures, Text(each.reason))
    return table


def new_table(title: str, *columns: str | Text) -> Table:
    """An empty table; a column whose name begins with > is aligned to the right."""
    table = Table(
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    for column in columns:
        name = column if isinstance(column, Text) else Text(column.removeprefix(">"))
        right = isinstance(column, str) and column.startswith(">")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    return table


def _span(calls: Sequence[str]) -> str:
    """The span of the modules of a stage: ``wte … h.5``."""
    distinct = list(dict.fromkeys(call for call in calls if call))
    if len(distinct) > 3:
        return f"{distinct[0]} … {distinct[-1]}"
    return ", ".join(distinct) or "operations between modules"


def _common_name(names: Iterable[str]) -> str:
    """The common name of the same parameter of several blocks: ``h.*.attn.weight``."""
    split = [name.split(".") for name in names]
    if len({len(parts) for parts in split}) > 1:
        return f"{'.'.join(split[0])} …"
    return ".".join(same[0] if len(set(same)) == 1 else "*" for same in zip(*split, strict=True))


def _layout_text(layout: Layout, dims: int) -> str:
    """The text of a layout: ``tp: S1 (out)``. Dims of matrices count as (in, out), whatever the framework keeps."""
    said = []
    for axis, placement in layout.placements:
        side = f" ({('in', 'out')[placement.dim]})" if isinstance(placement, Split) and dims == 2 else ""
        said.append(f"{axis}: {placement}{side}")
    return ", ".join(said)
