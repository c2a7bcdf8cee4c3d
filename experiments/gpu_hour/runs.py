"""Defines the training runs of gpu_hour and writes their TOML files.

The runs fit one node: some layers of LLaMA 7B at the paper's windows, and a model of a billion
parameters with several micro-batches per step. They are long enough for their step times to be
compared with predictions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from experiments.gpu_hour.setting import Setting
from wlb.prepare.synthetic import prepare_synthetic
from wlb.spec import RunSpec, load

WARM_UP_STEPS = 3
"""First steps of a run, in which kernels compile and memory is allocated; they do not count."""

BILLION = {
    "model.vocab_size": 32000,
    "model.hidden_size": 2048,
    "model.num_layers": 16,
    "model.num_heads": 16,
    "model.num_kv_heads": 16,
    "model.ffn_hidden_size": 5632,
}
LAYERS_7B = {
    "model.vocab_size": 32000,
    "model.hidden_size": 4096,
    "model.num_layers": 4,
    "model.num_heads": 32,
    "model.num_kv_heads": 32,
    "model.ffn_hidden_size": 11008,
}
TINY = {
    "model.vocab_size": 512,
    "model.hidden_size": 64,
    "model.num_layers": 4,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.ffn_hidden_size": 176,
}
FULL = {"training.recompute": "full"}
EIGHT_GPUS = 8
EIGHT = {"parallel.tp": 2, "parallel.cp": 2, "parallel.pp": 2, "pp.schedule": "1f1b"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """A training run of gpu_hour, small enough for one node."""

    name: str
    window: int  # context window in tokens
    windows: int  # windows in a global batch, which is also the number of micro-batches
    steps: int
    # Configuration keys that differ from wlb's defaults, such as "model.num_layers".
    settings: Mapping[str, object] = field(default_factory=dict[str, object])

    def write(self, setting: Setting, *, folder: Path) -> Path:
        """Writes the run's TOML file and returns its path.

        Args:
            setting: The device, and where the token store is.
            folder: Folder of the file. The run writes into its subfolder runs.
        """
        keys: dict[str, object] = {
            "run.name": self.name,
            "run.device": setting.device,
            "run.output_dir": str(folder / "runs"),
            "data.store": str(documents(setting)),
            "data.context_window": self.window,
            "data.num_windows": self.windows,
            "data.row_multiple": 128 if setting.device == "cuda" else 1,
            "cost.profile": "h100_runs" if setting.device == "cuda" else "cpu",
            "training.dtype": "bfloat16" if setting.device == "cuda" else "float32",
            "training.steps": self.steps,
            "training.warmup_steps": 2,
            "telemetry.warmup_steps": WARM_UP_STEPS,
            **self.settings,
        }
        path = folder / f"{self.name}.toml"
        path.write_text(toml_of(keys), "utf-8")
        return path

    def spec(self, setting: Setting, *, folder: Path) -> RunSpec:
        return load(str(self.write(setting, folder=folder)))


def toml_of(keys: Mapping[str, object]) -> str:
    """Formats keys such as "model.num_layers" as a TOML file with sections."""
    sections: dict[str, list[str]] = {}
    for name, value in keys.items():
        section, key = name.split(".")
        written = f'"{value}"' if isinstance(value, str) else str(value).lower()
        sections.setdefault(section, []).append(f"{key} = {written}")
    return "\n".join(f"[{name}]\n" + "\n".join(lines) + "\n" for name, lines in sections.items())


def documents(setting: Setting) -> Path:
    """Returns the prefix of the token store that all runs read.

    The process of each part (`worker`) makes the store if it is missing.
    """
    return setting.folder / "documents" / "wlb_paper"


def make_store(prefix: Path, *, tokens: int, window: int) -> None:
    """Makes a token store with the paper's document lengths, unless it exists.

    Its documents are the same on any machine.
    """
    if not Path(f"{prefix}.json").exists():
        prepare_synthetic(
            prefix, family="wlb_paper", num_tokens=tokens, window=window, seed=0, overwrite=True
        )


def document_window(setting: Setting) -> int:
    """Returns the longest context window of all runs; the longest document is as long."""
    return max(run.window for run in (*trainings(setting), balanced(setting)))


def trainings(setting: Setting) -> tuple[TrainingRun, ...]:
    """Returns the runs whose step times and memory are compared with predictions.

    Each needs one GPU.
    """
    if setting.device == "cpu":
        return (TrainingRun(name="tiny", window=512, windows=2, steps=6, settings=TINY),)
    quick = setting.quick
    billion = TrainingRun(
        name="billion_32k", window=32768, windows=4, steps=7 if quick else 16, settings=BILLION
    )
    stack_64k = TrainingRun(
        name="stack_64k", window=65536, windows=1, steps=7 if quick else 12, settings=LAYERS_7B
    )
    stack_128k = TrainingRun(
        name="stack_128k",
        window=131072,
        windows=1,
        steps=7 if quick else 12,
        settings={**LAYERS_7B, "model.num_layers": 2, **FULL},
    )
    recomputed = TrainingRun(
        name="stack_64k_recomputed",
        window=65536,
        windows=1,
        steps=7 if quick else 12,
        settings={**LAYERS_7B, **FULL},
    )
    compiled = TrainingRun(
        name="billion_32k_compiled",
        window=32768,
        windows=4,
        steps=7 if quick else 16,
        settings={**BILLION, "training.compile": True},
    )
    return billion, stack_64k, stack_128k, recomputed, compiled


def balanced(setting: Setting) -> TrainingRun:
    """Returns the run that is trained by Plain-4D, the paper's system and ours.

    It takes eight GPUs, or two processes on a CPU.
    """
    if setting.device == "cpu":
        settings = {**TINY, "parallel.cp": 2}
        return TrainingRun(name="systems", window=512, windows=2, steps=6, settings=settings)
    settings = {**LAYERS_7B, "model.num_layers": 8, **EIGHT}
    steps = 10 if setting.quick else 30
    return TrainingRun(name="systems", window=65536, windows=4, steps=steps, settings=settings)


def restarted(setting: Setting) -> TrainingRun:
    """Returns the small run that is killed and resumed."""
    sizes = {} if setting.device == "cpu" else {"model.hidden_size": 512, "model.num_heads": 4}
    return TrainingRun(
        name="restarted",
        window=1024 if setting.device == "cuda" else 256,
        windows=2,
        steps=12,
        settings={
            **TINY,
            **sizes,
            "model.num_kv_heads": 4,
            "checkpoint.interval": 2,
            "kernels.deterministic": True,
        },
    )
