"""`wlb train --calibrate`: fits a kernel profile to the measured times of a run.

The new profile is written under another name when training has ended. So the prices of the run that
writes it do not change; only later runs that name the new profile (`cost.profile`) use it. A report
says for which terms, such as attention forward, the old profile predicted wrong times.
"""

import os
from dataclasses import replace
from datetime import date
from pathlib import Path

from rich.console import Console

from wlb.cost import ProfiledWorkload, Provenance, ProvenanceKind, profile_names, save_profile
from wlb.cost.machine import program_version
from wlb.data.folder import make_folder
from wlb.plan import Telemetry, UserError
from wlb.profile.calibrate import Scales, calibrated_name, fit_scales, scaled_profile
from wlb.spec import RunSpec
from wlb.train.hooks import ExecutedStep, Hook, RunContext
from wlb.train.telemetry.meter import TelemetryMeter

DRIFT_THRESHOLD = 0.15
"""The report says that a term drifted if its relative ratio differs from 1 by more than this.

A term is, for example, attention forward. Its relative ratio is its measured over its predicted
time, divided by the median of the same quotient of the other terms. Differences of less than 0.15
are usual between runs."""


def profile_path(wanted: str, *, priced_by: str, folder: Path) -> Path:
    """Return the path of the profile that --calibrate writes.

    Args:
        wanted: Value of the option: a path that ends in .json, or the name of a new profile in
            `folder`. With "", the name is `priced_by` with "-calibrated" added, and a number if
            that file exists.
        priced_by: Name of the profile that prices the run.
        folder: Folder in which a profile is written if `wanted` is not a path.

    Raises:
        UserError: If the file exists, because profiles are never overwritten, or if the name is not
            valid.
    """
    if not wanted:
        name = calibrated_name(priced_by)
        while (path := folder / f"{name}.json").exists():
            name = calibrated_name(name)
        return path
    path = Path(wanted)
    if path.suffix != ".json":
        if path.name != wanted:
            raise UserError(
                f"--calibrate {wanted} must be a name without folders, or the path of "
                "a file that ends in .json; correct the value"
            )
        path = folder / f"{wanted}.json"
    if path.stem in profile_names():
        raise UserError(
            f"--calibrate: {path.stem!r} is already the name of a profile that comes "
            "with wlb, so logs would be ambiguous; give another name"
        )
    # Unlike exists, lexists is true for a symbolic link to a missing file. Refuse such a link too.
    if os.path.lexists(path):
        raise UserError(
            f"--calibrate: {path} already exists, and --calibrate never overwrites a "
            "profile; give another name"
        )
    return path


class Calibration:
    """Collects measured times of a run's steps, and fits a kernel profile to them."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self._records: list[Telemetry] = []

    def add(self, record: Telemetry) -> None:
        """Add the measured and predicted times of one or more steps."""
        self._records.append(record)

    def finish(
        self,
        path: Path,
        *,
        cost: ProfiledWorkload,
        run: Path,
        collectives: bool,
        console: Console | None,
    ) -> None:
        """Fit and write the profile, and print which times the run's own profile predicted wrong.

        Does nothing except on rank 0.

        Args:
            path: The file to write. If the file exists by now, another name is used.
            cost: The workload model that priced the run.
            run: The run's folder, which the profile names as its source.
            collectives: Whether the measured times include collectives.
            console: Where messages are printed; None on ranks other than 0.
        """
        if console is None:
            return
        try:
            scales = fit_scales(self._records)
        except UserError as error:
            console.print(f"no profile was written: {error}")
            return
        old = cost.profile.name
        name = path.stem
        provenance = _provenance(scales, cost, run, name)
        # The constant part of linear layers' time was fitted for a micro-batch in a stage, but a
        # profile has it for a micro-batch in a layer. So divide it by the layers of a stage.
        layers = self.spec.model.num_layers / self.spec.num_stages
        made = scaled_profile(
            cost.profile,
            **scales.by_term,
            linear_forward_extra_ns=scales.linear_forward_extra_ns / layers,
            linear_backward_extra_ns=scales.linear_backward_extra_ns / layers,
            head=scales.head,
            name=name,
            provenance=provenance,
            table=cost.table,
            backend=cost.backend,
            collectives=collectives,
        )
        make_folder(path.parent)
        taken = path
        # Another run may have written a profile of this name since the start.
        while path.exists():
            path = path.with_name(f"{calibrated_name(path.stem)}.json")
        save_profile(path, replace(made, name=path.stem))
        if path != taken:
            console.print(
                f"another run has written {taken} in the meantime, so this run's "
                "profile gets another name"
            )
        _print_ratios(scales, DRIFT_THRESHOLD, old, console)
        console.print(f"profile: {path} (the plans of this run used the prices of {old!r})")


class WriteProfile(Hook):
    """Collects the times of a run's steps, and writes the kernel profile `path` when the run ends.

    A run that was stopped early writes no profile.
    """

    def __init__(self, calibration: Calibration, path: Path, meter: TelemetryMeter) -> None:
        self.calibration, self.path, self.meter = calibration, path, meter

    def record(self, run: RunContext, step: ExecutedStep) -> None:
        """Collect the times of a step, except in the first telemetry.warmup_steps steps."""
        # In the first telemetry.warmup_steps steps, `own_ns` is None.
        if step.own_ns is not None and step.telemetry is not None:
            self.calibration.add(step.telemetry)

    def finished(self, run: RunContext) -> None:
        """Fit and write the profile, unless the run was stopped."""
        if not run.stop:
            self.calibration.finish(
                self.path,
                cost=self.meter.cost,
                run=run.job.directory,
                collectives=self.meter.times_hold_collectives,
                console=run.report.console if run.report.display is not None else None,
            )


def _provenance(scales: Scales, cost: ProfiledWorkload, run: Path, name: str) -> Provenance:
    """Describe from which run and which profile the profile `name` was made, and how."""
    factors = ", ".join(f"{term} {scale:.4g}" for term, scale in scales.by_term.items())
    kernel = cost.backend or cost.table.backends[0]
    extra = " / ".join(
        f"{ns * 1e-6:.3g}"
        for ns in (scales.linear_forward_extra_ns, scales.linear_backward_extra_ns)
    )
    return Provenance(
        kind=ProvenanceKind.MEASURED,
        source=f"run {run}: profile {cost.profile.name!r} with times of {kernel} and of linear "
        f"layers multiplied by {factors}, the head's by {scales.head:.4g}, and {extra} ms (forward "
        f"/ backward) added per micro-batch and stage (weighted medians of {scales.num_records} "
        f"records, {scales.num_steps} steps)",
        device=cost.machine or cost.profile.device,
        dtype=cost.profile.dtype,
        date=date.today().isoformat(),
        commit=program_version(),
        command=f"wlb train --calibrate {name}",
    )


def _print_ratios(scales: Scales, threshold: float, profile: str, console: Console) -> None:
    """Print the ratio of measured to predicted time for each term, such as attention forward.

    A term whose ratio differs too much from that of the other terms is said to have drifted.

    `threshold` is `DRIFT_THRESHOLD`. `profile` is the name of the profile that predicted the times.
    """
    drifted = scales.drifted(threshold)
    console.print(
        f"calibration: time measured / predicted by {profile!r} (weighted median of "
        f"{scales.num_steps} steps), then the same relative to the other terms"
    )
    extra = {"linear_forward": scales.linear_forward_extra_ns}
    extra["linear_backward"] = scales.linear_backward_extra_ns
    for term, scale in scales.by_term.items():
        verdict = f"drifted by more than {threshold:g}" if term in drifted else "as predicted"
        more = f", plus {extra[term] * 1e-6:.2f} ms per micro-batch" if extra.get(term) else ""
        console.print(
            f"  {term.replace('_', ' '):<19} {scale:.3f}  {scales.relative[term]:.3f}  "
            f"{verdict}{more}"
        )
    if scales.head != 1:
        console.print(f"  {'head and loss':<19} {scales.head:.3f}         does not affect plans")
    if not drifted and abs(scales.common - 1) > threshold:
        console.print(
            f"  everything takes {scales.common:.2f} times its price, which does not change plans, "
            f"because they depend only on the relation between terms"
        )
