"""`wlb train --calibrate`: a new kernel profile from what the run measured, and what drifted.

Running plans are never priced anew: the profile is written when training has ended, under another
name than the one that priced the run, and only a run that is told to (`cost.profile`) uses it.
"""

import subprocess
from datetime import date
from pathlib import Path

from rich.console import Console

from wlb.cost import (
    Kind,
    ProfiledWorkload,
    Provenance,
    Scales,
    calibrated_name,
    fit_scales,
    save_profile,
    scaled_profile,
)
from wlb.plan import Telemetry
from wlb.spec import RunSpec


def profile_path(wanted: str, *, priced_by: str, folder: Path) -> Path:
    """Where --calibrate writes. wanted: a path ending in .json, a name for a file in `folder`, or
    empty: the name of the run's profile, `priced_by`, and "-calibrated", numbered if that is taken.

    ValueError for a file that exists: profiles are never overwritten.
    """
    if not wanted:
        name = calibrated_name(priced_by)
        while (path := folder / f"{name}.json").exists():
            name = calibrated_name(name)
        return path
    path = Path(wanted)
    if path.suffix != ".json":
        if path.name != wanted:
            raise ValueError(
                f"--calibrate {wanted}: give a name, or the path of a file that ends in .json"
            )
        path = folder / f"{wanted}.json"
    if path.exists():
        raise ValueError(
            f"--calibrate: {path} exists, and profiles are never overwritten; give another name"
        )
    return path


class Calibration:
    """Records of a run after its warm-up, and the profile that is made of them."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self._records: list[Telemetry] = []
        self._num_seen = 0

    def take(self, record: Telemetry) -> bool:
        """Whether `record` counts: it has no step of the warm-up."""
        is_warm = self._num_seen >= self.spec.telemetry.warmup_steps
        self._num_seen += record.num_steps
        if is_warm:
            self._records.append(record)
        return is_warm

    def finish(
        self,
        path: Path,
        *,
        cost: ProfiledWorkload,
        run: Path,
        collectives: bool,
        console: Console | None,
    ) -> None:
        """Fit, and on the rank that has a console write the profile and say what drifted.

        ValueError on every rank if nothing was measured.
        """
        scales = fit_scales(self._records)
        if console is None:
            return
        old = cost.profile.name
        name = path.stem
        factors = ", ".join(f"{term} {scale:.4g}" for term, scale in scales.by_term.items())
        provenance = Provenance(
            kind=Kind.MEASURED,
            source=f"run {run}: profile {old!r} with times of {cost.table.backends[0]} and of "
            f"linear layers multiplied by {factors} (weighted medians of {scales.num_records} "
            f"records, {scales.num_steps} steps)",
            device=cost.profile.device,
            dtype=cost.profile.dtype,
            date=date.today().isoformat(),
            commit=_commit(),
            command=f"wlb train --calibrate {name}",
        )
        made = scaled_profile(
            cost.profile,
            **scales.by_term,
            name=name,
            provenance=provenance,
            table=cost.table,
            collectives=collectives,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        save_profile(path, made)
        _say(scales, self.spec.telemetry.drift_threshold, old, console)
        console.print(f"profile: {path} (this run's plans were priced by {old!r} to the end)")


def _say(scales: Scales, threshold: float, profile: str, console: Console) -> None:
    drifted = scales.drifted(threshold)
    console.print(
        f"calibration: measured / predicted by {profile!r}, weighted median of "
        f"{scales.num_steps} steps"
    )
    for term, scale in scales.by_term.items():
        verdict = f"drifted, past {threshold:g}" if term in drifted else "as predicted"
        console.print(f"  {term.replace('_', ' '):<19} {scale:.3f}  {verdict}")


def _commit() -> str:
    """Short hash of the checkout that runs, "" outside one."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()
