"""Decide what `wlb profile` measures on a device (a sweep), and measure it.

The order is: collectives, the held-out attention batches (random batches that the fit does not use
but is tested on), all other tasks, and the held-out batches a second time.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count, pairwise, takewhile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from wlb.kernels.select import AUTO_ORDER, choose_backend
from wlb.parallel import world as worlds
from wlb.plan import UserError
from wlb.profile.attention import (
    AttentionGrid,
    HeadLayout,
    batch_tasks,
    grid_tasks,
    head_tasks,
    steps,
)
from wlb.profile.collectives import collective_tasks
from wlb.profile.device import Monitor, describe
from wlb.profile.linear import linear_tasks
from wlb.profile.tasks import Record, RecordFile, Task
from wlb.profile.timing import KernelTimer, make_timer, pinned_threads
from wlb.spec import AttentionBackend, ModelSpec, RunSpec

PRESETS = {"cpu": "demo", "cuda": "7b_128k"}
"""Device -> preset whose model and context window are measured by default."""
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
MOST_LAYOUTS_TP = 8
"""Largest TP degree whose shapes are measured."""
COST_OF_BUDGET = 3.0
"""Assumed time of a task, as a multiple of the time for its repeats.

A task also makes inputs and warms up, and a single call may take longer than the time for repeats.
In two sweeps on CPUs the multiple was 2.4 and 3.2."""
LONG_KINDS = ("batch", "held_batch")
"""Kinds of tasks that are repeated for four times as long as others."""
ATTENTION_KINDS = (*LONG_KINDS, "call", "two_groups", "grid", "held_pair", "heads")
QUICK_LONGEST = {"cpu": 2048, "cuda": 32768}
"""Device -> longest segment of a quick sweep, in tokens."""
CPU_LONGEST = 8192
"""Longest segment on a CPU, in tokens."""
Shape = tuple[int, int, int]
"""(query heads, KV heads, head size)."""
DENSE = (16, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Lengths of short segments that are measured on a GPU, in tokens.

They are dense enough to show that time is constant within a tile, and the jump of throughput at 256
tokens (Figure 10 of the paper)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    """What a sweep measures, decided before it begins."""

    device: torch.device
    dtype: torch.dtype
    model: ModelSpec
    tp_degrees: tuple[int, ...]
    layouts: tuple[HeadLayout, ...]  # kernels and heads that each get an attention table
    # Further numbers of heads, which get no table. Only their throughput relative to a table is
    # measured.
    other_heads: tuple[HeadLayout, ...]
    grid: AttentionGrid
    tokens: tuple[int, ...]  # numbers of rows in tasks that do not measure attention
    linear_budget_s: float  # seconds for the repeats of a task that does not measure attention
    collective_budget_s: float  # seconds for the repeats of a collective

    def header(self) -> dict[str, Any]:
        """Return the header of the file of records.

        A sweep can resume with the records of an earlier start only if their headers are equal.
        """
        grid = self.grid
        return {
            **describe(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "lengths": list(grid.lengths),
            "batch_tokens": list(grid.batch_tokens),
            "model": asdict(self.model),
            "budgets_s": [grid.budget_s, self.linear_budget_s, self.collective_budget_s],
        }


def settings_of(
    spec: RunSpec, *, device: torch.device, backend: str | None, heads: Sequence[str], quick: bool
) -> SweepSettings:
    """Return the settings of a sweep for the model, TP degree and window of a run.

    Args:
        spec: Configuration of the run.
        device: Device to measure.
        backend: The only attention kernel to measure; None means all that are available.
        heads: Further head layouts in the form of the option --heads. For example, "8:2x128" means
            8 query heads, 2 KV heads and 128 channels per head.
        quick: Whether to measure fewer points.

    Raises:
        UserError: If the backend does not work here or a head layout is not valid.
    """
    model = spec.model
    if not model.vocab_size:
        model = replace(model, vocab_size=spec.data.bpe_vocab_size)
    degrees = _tp_degrees(model, spec.parallel.tp)
    dtype = DTYPES[device.type]
    shapes = [
        (model.num_heads // tp, model.with_kv_copies(tp).num_kv_heads // tp, model.head_size)
        for tp in degrees[::-1]
    ]
    # On a CPU, a table takes seconds, so each TP degree gets one. On a GPU, only the first layout
    # gets a table, and each other layout gets a factor by which throughput differs from this table.
    of_tables = shapes[:1] if quick or device.type == "cuda" else shapes
    of_tables = list(dict.fromkeys([*of_tables, *map(_shape, heads)]))

    def layouts(shapes: Sequence[Shape]) -> tuple[HeadLayout, ...]:
        return tuple(
            HeadLayout(
                backend=name,
                num_heads=q,
                num_kv_heads=kv,
                head_dim=size,
                dtype=dtype,
                device=device,
            )
            for q, kv, size in shapes
            for name in _backends(device, dtype, size, backend)
        )

    is_gpu = device.type == "cuda"
    window = spec.data.context_window
    longest = min(window, QUICK_LONGEST[device.type]) if quick else window
    return SweepSettings(
        device=device,
        dtype=dtype,
        model=model,
        tp_degrees=degrees[-1:] if quick else degrees,
        layouts=layouts(of_tables),
        other_heads=layouts(shapes[1:]) if is_gpu and not quick else (),
        grid=_gpu_grid(longest, quick) if is_gpu else _cpu_grid(min(longest, CPU_LONGEST), quick),
        # Powers of two are enough, because throughput is interpolated linearly between them.
        tokens=steps(128, max(512, longest), (1.0,)),
        linear_budget_s=(0.05 if is_gpu else 0.1) * (0.5 if quick else 1.0),
        collective_budget_s=0.03 if quick else 0.1,
    )


def _tp_degrees(model: ModelSpec, tp: int) -> tuple[int, ...]:
    """Return the TP degrees to measure: all powers of two up to `tp` that divide the heads."""
    powers = takewhile(lambda n: n <= min(tp, MOST_LAYOUTS_TP), (1 << i for i in count()))

    def divides(n: int) -> bool:
        return model.num_heads % n == model.with_kv_copies(n).num_kv_heads % n == 0

    return tuple(takewhile(divides, powers))


def _shape(text: str) -> Shape:
    """Return (query heads, KV heads, head size) of a value of --heads, such as "8:2x128"."""
    match = re.fullmatch(r"([0-9]+)(?::([0-9]+))?x([0-9]+)", text)
    numbers = [int(n or match[1]) for n in match.groups()] if match else [0]
    if match is None or min(numbers) < 1 or numbers[0] % numbers[1]:
        raise UserError(
            f"--heads {text!r} is not a head layout; give QUERYxSIZE such as 8x64, or "
            f"QUERY:KVxSIZE such as 8:2x128, where QUERY heads are a multiple of KV heads"
        )
    return numbers[0], numbers[1], numbers[2]


def _backends(
    device: torch.device, dtype: torch.dtype, head_size: int, only: str | None
) -> list[str]:
    """Return the available kernels for heads of this size, in the order that `auto` prefers.

    Args:
        device: Device to measure.
        dtype: Data type of q, k and v.
        head_size: Channels of a head.
        only: The only kernel to return; None means all.

    Raises:
        UserError: If the kernel `only` is unknown or does not work here.
    """
    if only is not None and only not in AUTO_ORDER:
        raise UserError(f"--backend {only!r} is not one of {', '.join(AUTO_ORDER)}")
    found: list[str] = []
    for name in AUTO_ORDER if only is None else (AttentionBackend(only),):
        try:
            choose_backend(name, device=device, dtype=dtype, head_size=head_size)
        except UserError:
            if only is not None:
                raise
            continue
        found.append(str(name))
    # On a GPU, runs use sdpa only for float32 and for head sizes that no other kernel supports. So
    # measure sdpa only if no other kernel is available.
    return found if found == ["sdpa"] or only else [b for b in found if b != "sdpa"]


def _cpu_grid(longest: int, quick: bool) -> AttentionGrid:
    return AttentionGrid(
        lengths=steps(8, longest, (1.0,) if quick else (1.0, 1.5)),
        held_pairs=12 if quick else 40,
        batches=20 if quick else 60,
        held_batches=12 if quick else 40,
        batch_tokens=(1024, 2048) if quick else (1024, 2048, 4096),
        budget_s=0.02 if quick else 0.05,
    )


def _gpu_grid(longest: int, quick: bool) -> AttentionGrid:
    lengths = {*DENSE[:: 2 if quick else 1], *steps(1024, max(1024, longest), (1.0,)), longest}
    return AttentionGrid(
        lengths=tuple(sorted(n for n in lengths if n <= longest)),
        held_pairs=16 if quick else 40,
        batches=20 if quick else 60,
        held_batches=16 if quick else 40,
        batch_tokens=(8192, 16384, 32768) if quick else (16384, 32768, 65536),
        budget_s=0.02 if quick else 0.04,
    )


def tasks_of(settings: SweepSettings, timer: KernelTimer) -> list[Task]:
    """Return all tasks except collectives, in the order in which they run.

    Held-out batches are measured first and once more at the end, which shows how well times can be
    reproduced.

    Args:
        settings: Settings of the sweep.
        timer: Timer of the device.
    """
    grid = settings.grid
    first, middle, last = [], [], []
    for layout in settings.layouts:
        first += batch_tasks(layout, grid, timer, held=True)
        middle += grid_tasks(layout, grid, timer)
        middle += batch_tasks(layout, grid, timer, held=False)
        others = [o for o in settings.other_heads if o.kernel == layout.kernel]
        if others:
            middle += head_tasks(layout, others, grid, timer)
        last += batch_tasks(layout, grid, timer, held=True, repeat=1)
    linear = linear_tasks(
        settings.model,
        settings.tp_degrees,
        settings.tokens,
        timer,
        device=settings.device,
        dtype=settings.dtype,
        held_tokens=[round((a * b) ** 0.5) for a, b in pairwise(settings.tokens)],
        budget_s=settings.linear_budget_s,
    )
    return [*first, *middle, *linear, *last]


def expected_s(settings: SweepSettings, tasks: Sequence[Task]) -> float:
    """Return an estimate of the seconds that all tasks of a sweep take.

    A task repeats its measurement for a time that `settings` gives. The task itself is assumed to
    take COST_OF_BUDGET times as long.
    """
    attention = settings.grid.budget_s
    budgets: dict[str, float] = dict.fromkeys(ATTENTION_KINDS, attention)
    budgets |= dict.fromkeys(LONG_KINDS, 4 * attention)
    return COST_OF_BUDGET * sum(budgets.get(t.kind, settings.linear_budget_s) for t in tasks)


def describe_sweep(settings: SweepSettings, tasks: Sequence[Task], num_collectives: int) -> str:
    """Return a sentence that says what will be measured, and about how long this takes.

    Args:
        settings: Settings of the sweep.
        tasks: Tasks that are still to be measured, without collectives.
        num_collectives: Number of collectives that are still to be measured.
    """
    kernels = ", ".join(
        f"{layout.backend} of {layout.num_heads}:{layout.num_kv_heads} heads of {layout.head_dim}"
        for layout in settings.layouts
    )
    attention = sum(task.kind in ATTENTION_KINDS for task in tasks)
    collectives = f", {num_collectives} of collectives" if num_collectives else ""
    dtype = str(settings.dtype).removeprefix("torch.")
    minutes = expected_s(settings, tasks) / 60
    return (
        f"measures {describe(settings.device)['name']} in {dtype}: {attention} points of attention "
        f"({kernels}), {len(tasks) - attention} of matrix products and other operators"
        f"{collectives}; this takes about {max(1, math.ceil(minutes))} min, in which nothing else "
        f"should run on the device; Ctrl-C keeps what was measured, and the same command resumes "
        f"the sweep"
    )


def run_sweep(
    settings: SweepSettings,
    path: Path,
    world: worlds.World | None,
    console: Console,
    start: Mapping[str, Any],
) -> tuple[list[Record], dict[str, Any]]:
    """Run a sweep. All ranks of a launcher call this, but only rank 0 measures kernels.

    Args:
        settings: What to measure.
        path: File of records, which may already have records of an earlier start of this sweep.
        world: This process among the ranks of a launcher; None if there is no launcher.
        console: Console on which to show progress.
        start: Date, commit and command of this start, for the file.

    Returns:
        All records of the file (new ones and those of earlier starts), and the file's header with
        an additional key "starts", which has all starts. Both are empty on ranks other than 0.
    """
    with pinned_threads(settings.device), Monitor(settings.device) as monitor:
        budget_s = settings.collective_budget_s
        collectives = collective_tasks(
            world, settings.device, dtype=settings.dtype, budget_s=budget_s
        )
        if world is not None and world.rank:
            with collectives:
                collectives.follow()
            return [], {}
        header = settings.header()
        # `collectives` is entered first. So even if the file or a task raises an error, the other
        # ranks return from `follow`.
        with collectives, RecordFile(path, header) as file:
            tasks = tasks_of(settings, make_timer(settings.device))
            num = len(collectives.tasks) + len(tasks)
            known = sum(task.key in file.records for task in (*collectives.tasks, *tasks))
            if known:
                console.print(f"an earlier start measured {known} of {num} points, see {path}")
            console.print(collectives.note, markup=False, highlight=False)
            left = [task for task in tasks if task.key not in file.records]
            more = [task for task in collectives.tasks if task.key not in file.records]
            console.print(describe_sweep(settings, left, len(more)), markup=False)
            try:
                records = list(_shown(file, collectives.tasks, "collectives", console))
                # Let the other ranks stop waiting for collectives, because they would time out
                # while rank 0 measures kernels.
                collectives.release()
                what = f"kernels of {describe(settings.device)['name']}"
                records += _shown(file, tasks, what, console)
            finally:
                monitor.stop()
                file.end({**start, "conditions": monitor.record()})
            return records, {**header, "starts": file.starts}


def _shown(
    file: RecordFile, tasks: Sequence[Task], what: str, console: Console
) -> Iterable[Record]:
    return track(file.run(tasks), what, total=len(tasks), console=console)
