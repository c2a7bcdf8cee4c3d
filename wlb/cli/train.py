"""`wlb train`: train a preset or TOML file, or with `--dry-run` only plan and simulate the run."""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from wlb.cli.options import add_flag, add_overrides, add_text
from wlb.cli.output import needs_train_extra
from wlb.cli.system import with_system
from wlb.plan import RunError, UserError
from wlb.planner.liveness import PlanningError
from wlb.report.tables import console
from wlb.spec import KNOWN_SYSTEMS, RunSpec, list_keys, load, presets
from wlb.train import dry_run
from wlb.train.faults.disk_full import full_disk
from wlb.train.faults.stop import Signals

_DESCRIPTION = """\
Train a preset or a TOML file, on the ranks of torchrun or Slurm if there are any, otherwise on as
many local processes as the layout needs.

  wlb train demo --set training.steps=100 data.context_window=8192    override any key
  wlb train path/to/run.toml --dry-run                                time, days, memory, first plan
  wlb train path/to/run.toml --resume                                 continue the run
  torchrun --nproc-per-node 8 -m wlb train path/to/run.toml           under torchrun
  torchrun --max-restarts 3 ... -m wlb train run.toml --resume auto   continue after a rank died

A layout, configuration key or token store that cannot work is refused before a rank starts. The
folder run.output_dir/run.name has the files of the run:
- metrics.jsonl: one line for each step, with measured values, predicted values, and values
  predicted for the usual loader
- checkpoints/: safetensors and JSON with checksums, nothing pickled
- logs/rank-<n>.log
- failure.txt, after a failure

Stopping: Ctrl-C, SIGTERM, SIGUSR1 or the file run.stop_file ends the run after its present step.
The run then saves a checkpoint and exits with status 4. Under torchrun and Slurm the status is 0,
because they take any other status for a failure and kill the ranks that are still saving. A second
Ctrl-C ends the run at once, without saving. Before the first step, a signal also ends the run at
once.

Resuming: a resumed run may have another layout and another number of micro-batches. It continues
with the documents that were waiting.

Failures: if a checkpoint cannot be written, the run says so and continues; only a failure of the
last checkpoint is an error. If a rank dies, hangs or raises an exception, all ranks end with one
report. The next start of the run and `wlb report --failure RUN` print the report again.

Summary at the end: imbalance = predicted time of a step's slowest micro-batch over the mean of its
micro-batches (Section 7.4 of the paper; 1.20 means that the average micro-batch waits for a sixth
of the step). usual = the loader of Megatron-LM and torchtitan, which cuts the same documents
wherever a window ends. --verbose adds: measured / predicted = measured time over the time that the
kernel profile predicts (--calibrate fits a better profile); token delay = number of steps between
reading and training a token; model FLOP/s, which counts attention only within documents, and no
recomputation or padding."""


STOPPED = 4
"""Exit status of a run that a signal or a stop file ended early, after it saved a checkpoint."""
COMMON = (
    "run.name",
    "run.output_dir",
    "run.seed",
    "run.device",
    "model.vocab_size",
    "model.hidden_size",
    "model.num_layers",
    "model.num_heads",
    "model.num_kv_heads",
    "model.ffn_hidden_size",
    "model.tied_embeddings",
    "model.rope_theta",
    "parallel.tp",
    "parallel.cp",
    "parallel.pp",
    "parallel.dp",
    "parallel.ep",
    "pp.schedule",
    "pp.virtual_stages",
    "data.store",
    "data.heldout_store",
    "data.corpus",
    "data.context_window",
    "data.num_windows",
    "data.row_multiple",
    "packing.method",
    "packing.policy",
    "packing.s_max",
    "packing.step_tokens",
    "packing.queue_thresholds",
    "sharding.strategy",
    "cost.profile",
    "kernels.attention",
    "training.steps",
    "training.learning_rate",
    "training.min_learning_rate",
    "training.warmup_steps",
    "training.dtype",
    "training.loss_normalizer",
    "training.recompute",
    "training.compile",
    "eval.interval",
    "checkpoint.interval",
    "checkpoint.keep",
)
"""Keys that `wlb train --help` lists, because presets or the README at the top set them. --help-all
lists all keys."""


class _HelpOfAllKeys(argparse.Action):
    """The action of --help-all: print the help with all configuration keys, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        parser.epilog = _keys_help([key.name for key in list_keys(RunSpec)])
        parser.print_help()
        parser.exit()


def add_parser(commands: Any) -> None:
    """Add the parser of `wlb train` to the subparsers `commands`."""
    parser = commands.add_parser(
        "train",
        help="train a preset or a TOML file",
        description=_DESCRIPTION,
        epilog=_keys_help(COMMON),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = "show this help message with every key, not only the common ones, and exit"
    parser.add_argument("--help-all", action=_HelpOfAllKeys, nargs=0, help=text)
    parser.add_argument("name", help=f"a TOML file, or a preset: {', '.join(presets())}")
    text = "set configuration keys to other values, as in --set training.steps=100 parallel.tp=4"
    add_overrides(parser, metavar="KEY=VALUE", help=text)
    text = (
        f"use the settings of a training system, such as usual (the loader of Megatron-LM and "
        f"torchtitan) or paper (WLB-LLM): {', '.join(KNOWN_SYSTEMS)}. fixed_4d:2 and wlb:2 choose "
        f"the second alternative of these systems. Keys of --set replace those of the system"
    )
    add_text(parser, "--system", "SYSTEM", text)
    text = (
        "only print the size of the model, the predicted step time and days, the memory, and the "
        "plan of the first step, without reading data or training. The exit status is 3 if the run "
        "does not fit in memory"
    )
    add_flag(parser, "--dry-run", text)
    text = (
        "resume the run: without a value, from its last checkpoint; STEP = from its checkpoint "
        "after that step; FOLDER = from the checkpoint in that folder; auto = from its last "
        "checkpoint if there is one, otherwise start anew (for jobs that are requeued)"
    )
    add_text(parser, "--resume", "STEP|FOLDER|auto", text, nargs="?", const="")
    text = (
        "at the end of the run, fit the kernel profile to the measured times, print which "
        "predicted times have changed, and write a new profile. The value is a path that ends in "
        ".json, or a NAME for run.output_dir/NAME.json (default: a name made from that of the old "
        "profile). Use the new profile with --set "
        "cost.profile=PATH"
    )
    add_text(parser, "--calibrate", "NAME_OR_PATH", text, nargs="?", const="")
    text = "print all columns of the table of steps, and all lines of the summary"
    add_flag(parser, "--verbose", text)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run `wlb train` and return its exit status."""
    started_s = time.time()
    spec = load(options.name, with_system(options.name, options.overrides, options.system))
    for name, given in (("--calibrate", options.calibrate), ("--resume", options.resume)):
        if options.dry_run and given is not None:
            raise UserError(f"{name} has no effect with --dry-run; remove {name} or --dry-run")
    if options.dry_run:
        # A dry run takes seconds on any machine, because it neither imports torch nor uses a GPU.
        return 0 if dry_run.show(spec, console(markup=False)) else 3
    # Handle signals from here, before torch is imported, because the import takes seconds.
    with Signals(answers=True) as signals:
        return _train(spec, options, signals, started_s)


def _train(spec: RunSpec, options: argparse.Namespace, signals: Signals, started_s: float) -> int:
    """Train the run and return the exit status. A failure of the run is printed as a message.

    Args:
        spec: The configuration.
        options: The parsed command line.
        signals: Handler of the signals that stop a run.
        started_s: Time at which the command began, from `time.time`.
    """
    with needs_train_extra("training needs"):
        from wlb.launch.local import RankFailure
        from wlb.train import start
    screen = console()
    try:
        stopped = start.train(
            spec,
            resume=options.resume,
            console=screen,
            calibrate=options.calibrate,
            signals=signals,
            started_s=started_s,
            verbose=options.verbose,
        )
    except (RankFailure, FloatingPointError, RunError, PlanningError) as failure:
        print(f"wlb train: {failure}", file=sys.stderr)
        return 1
    except OSError as error:
        # A full disk is a failure of the run (exit status 1). `main` handles all other OSErrors as
        # wrong input (exit status 2).
        if (failure := full_disk(error)) is None:
            raise
        print(f"wlb train: {failure}", file=sys.stderr)
        return 1
    finally:
        # Show the cursor: a rank that is killed while it draws a live table leaves it hidden.
        screen.show_cursor()
    return STOPPED if stopped else 0


def _keys_help(names: Sequence[str]) -> str:
    """Return the help text of the configuration keys `names`, grouped by section."""
    keys = list_keys(RunSpec)
    shown = [key for key in keys if key.name in names]
    title = "keys of a TOML file and of --set (section.key, default, unit)"
    if len(shown) < len(keys):
        title = f"common {title}; --help-all shows all {len(keys)}"
    lines, section = [f"{title}:"], ""
    for item in shown:
        head = item.name.rsplit(".", 1)[0]
        if head != section:
            section = head
            lines.append(f"\n[{section}]")
        unit = f" {item.unit}" if item.unit else ""
        lines.append(f"  {item.name} = {item.default}{unit}  ({item.type})")
        lines.append(f"      {item.doc}")
    return "\n".join(lines)
