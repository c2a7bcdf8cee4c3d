"""`wlb simulate --run FOLDER`: compare measured and simulated steps of a finished run."""

import argparse
from pathlib import Path

from wlb.cli import output
from wlb.plan import UserError
from wlb.report.simulation import worth_line
from wlb.report.tables import console, new_table

_PROFILE = "cost.profile="
_SHOWN = 40  # most steps that the table lists
GIB = 1 << 30
_UNUSED = "systems steps step in_order device trace timeline over_memory strict replay"
"""Options of `wlb simulate` that have no effect with --run."""


def refuse_others(options: argparse.Namespace, defaults: argparse.Namespace) -> None:
    """Raise a UserError that names the given options that have no effect with --run.

    Args:
        options: The parsed command line.
        defaults: The values that the options have if they are not given.
    """
    given = [
        name if name == "NAME" else f"--{name.replace('_', '-')}"
        for name, dest in (*((n, n) for n in _UNUSED.split()), ("NAME", "name"))
        if getattr(options, dest) != getattr(defaults, dest)
    ]
    if given:
        raise UserError(
            f"--run simulates a run with its own configuration, and may be combined only with "
            f"--set {_PROFILE}... and --json; remove {', '.join(given)}"
        )


def show(options: argparse.Namespace) -> int:
    """Simulate a run's steps, print simulated and measured times, and return the exit status."""
    with output.needs_train_extra("--run needs"):
        from wlb.validation.recorded import simulate_recorded
    # The steps are simulated with the configuration with which they were trained, so the user may
    # change only the kernel profile.
    other = [o for o in options.overrides if not o.startswith(_PROFILE)]
    if other:
        raise UserError(
            f"--run simulates a run with its own configuration, so --set may change only "
            f"cost.profile; remove {', '.join(other)}"
        )
    profile = options.overrides[-1].removeprefix(_PROFILE) if options.overrides else ""
    made = simulate_recorded(Path(options.recorded), profile=profile)
    data = {
        "run": options.recorded,
        "profile": made.profile.name,
        "steps": [m.step for m in made.measured],
        "measured_s": made.measured_s.tolist(),
        "simulated_s": made.simulated_s.tolist(),
        "ratio": made.ratio,
        "mape": made.mape,
        "peak_bytes": made.peak_bytes,
        "estimated_bytes": made.estimated_bytes,
        **({"remark": made.remark} if made.remark else {}),
    }
    if output.write_json(options, data):
        return 0
    screen = console(markup=False)
    screen.print(worth_line(made.profile))
    table = new_table(labels=["step"], numbers=["measured s", "simulated s", "difference"])
    rows = list(zip(made.measured, made.measured_s, made.simulated_s, strict=True))
    for metrics, measured, simulated in rows[:_SHOWN]:
        difference = f"{simulated / measured - 1:+.1%}"
        table.add_row(str(metrics.step), f"{measured:.3f}", f"{simulated:.3f}", difference)
    screen.print(table)
    if len(rows) > _SHOWN:
        screen.print(
            f"These are the first {_SHOWN} of {len(rows)} steps; --json FILE writes all of them."
        )
    screen.print(
        f"Simulated time over measured time of all steps: {made.ratio:.3f}; mean absolute error of "
        f"a step: {made.mape:.1%}; correlation: {made.correlation:.3f} (without {made.left_out} "
        f"steps of warm-up)."
    )
    if made.peak_bytes is not None:
        peak, estimated = made.peak_bytes / GIB, made.estimated_bytes / GIB
        screen.print(
            f"Peak memory of rank 0: {peak:.2f} GiB measured, {estimated:.2f} GiB estimated."
        )
    if made.remark:
        screen.print(made.remark)
    return 0
