"""From a preset or TOML to running ranks: store, layout, device, and which processes are the ranks.

Under torchrun or Slurm the ranks are those given; otherwise as many local processes are started as
the layout asks for (a single rank runs in this one). Everything that can be refused is refused
before a rank computes.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist
from rich.console import Console

from wlb.data import BlendedStore, StoreName, open_store
from wlb.launch.local import run_local
from wlb.packing import with_s_max
from wlb.parallel import world as worlds
from wlb.parallel.mesh import limit_collectives
from wlb.parallel.world import DeviceChoice, World
from wlb.plan import digest
from wlb.prepare import docstring_prefix, prepare, prepare_docstrings, text_documents
from wlb.spec import Recompute, RunSpec, apply, check, resolve_dp
from wlb.spec.blend import parse_blend
from wlb.train import checkpoint
from wlb.train.faults.lock import RunLock
from wlb.train.faults.stop import Signals, StoppedEarly, StopRequest
from wlb.train.job import Job, directory_of
from wlb.train.loop import run_rank
from wlb.train.memory import budget_of, hold_against, within
from wlb.train.optimizer import peak_missed, rate_change
from wlb.train.refuse import (
    begins_with,
    computed_by,
    model_change,
    priced_by,
    profile_of,
    refuse_early,
)
from wlb.train.telemetry.calibrate import profile_path

PREPARE_TIMEOUT_S = 24 * 3600.0
"""How long given ranks wait for rank 0 to make the token store."""
_TRIED_BYTES = 1 << 12
SPLIT_SEED = 0
"""Which documents are held out does not follow run.seed: runs of several seeds share them."""
DOCSTRINGS, STDLIB = "docstrings", "stdlib"
_STOPPED = "stopped by a signal before training began: there is nothing to save"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """Prefixes of the stores of a run; heldout is empty where there is none."""

    train: StoreName
    heldout: str
    vocab_size: int
    note: str


def open_stores(spec: RunSpec, console: Console, signals: Signals | None = None) -> Stores:
    """The stores of a run, made from data.corpus where data.store is empty and they are missing.

    StoppedEarly if one of `signals` comes while a corpus is read.
    """
    name = spec.data.blend or spec.data.store
    if name:
        store = open_store(name)
        vocab = spec.model.vocab_size or store.vocab_size
        if not vocab:
            raise ValueError(
                f"the store {store.prefix} does not say how large its vocabulary is; set "
                f"model.vocab_size"
            )
        note = f"{store.num_documents:,} documents, {store.num_tokens:,} tokens"
        if isinstance(store, BlendedStore):
            total = sum(store.weights)
            shares = zip(store.stores, store.weights, strict=True)
            note += "; " + ", ".join(f"{s.prefix} {w / total:.1%}" for s, w in shares)
        return Stores(train=name, heldout=spec.data.heldout_store, vocab_size=vocab, note=note)
    if spec.data.corpus == DOCSTRINGS:
        return _docstring_stores(spec, console)
    prefix = _store_prefix(spec)
    with console.status(f"token store of {spec.data.corpus}") as status:

        def progress(done: int, total: int) -> None:
            status.update(f"token store of {spec.data.corpus}: {done / max(1, total):.0%}")
            if signals is not None:
                signals.check()

        made = prepare(
            text_documents(spec.data.corpus),
            prefix,
            vocab_size=spec.data.bpe_vocab_size,
            heldout_fraction=spec.data.heldout_fraction,
            seed=SPLIT_SEED,
            progress=progress,
        )
    left_out = ", ".join(f"{count} {why}" for why, count in made.skipped.items() if count)
    how = "reused" if made.reused else f"made in {made.time_s:.1f} s"
    note = f"{made.num_documents:,} documents, {made.num_tokens:,} tokens ({how})"
    if left_out:
        note += f"; left out: {left_out}"
    vocab = spec.model.vocab_size or made.vocab_size
    heldout = made.heldout if made.num_heldout_documents else ""
    return Stores(train=made.train, heldout=heldout, vocab_size=vocab, note=note)


def _docstring_stores(spec: RunSpec, console: Console) -> Stores:
    data = spec.data
    with console.status("token store of conversations about Python's docstrings"):
        made = prepare_docstrings(
            data.cache_dir,
            vocab_size=data.bpe_vocab_size,
            limit=data.context_window,
            heldout_fraction=data.heldout_fraction,
            seed=SPLIT_SEED,
        )
    how = f"made in {made.made_s:.1f} s" if made.made_s else "reused"
    return Stores(
        train=made.train,
        heldout=made.heldout,
        vocab_size=spec.model.vocab_size or made.vocab_size,
        note=f"{made.num_documents:,} conversations, {made.num_tokens:,} tokens, "
        f"{made.num_targets / made.num_tokens:.0%} trained ({how})",
    )


def train_store(spec: RunSpec) -> StoreName:
    """The name of a run's token store, whether or not that has been made."""
    data = spec.data
    if data.blend or data.store:
        return data.blend or data.store
    if data.corpus == DOCSTRINGS:
        prefix = docstring_prefix(
            data.cache_dir,
            vocab_size=data.bpe_vocab_size,
            limit=data.context_window,
            heldout_fraction=data.heldout_fraction,
            seed=SPLIT_SEED,
        )
        return str(prefix)
    return f"{_store_prefix(spec)}-train"


def _store_prefix(spec: RunSpec) -> Path:
    """Where the store of data.corpus lies: one for each corpus, vocabulary and held-out share."""
    data = spec.data
    is_builtin = data.corpus == STDLIB
    corpus = data.corpus if is_builtin else str(Path(data.corpus).resolve())
    mark = digest(corpus, data.bpe_vocab_size, str(data.heldout_fraction)) % 16**6
    name = corpus if is_builtin else Path(corpus).name
    return Path(data.cache_dir) / f"{name}-bpe{data.bpe_vocab_size}-{mark:06x}"


def ready(spec: RunSpec, stores: Stores, world_size: int) -> RunSpec:
    """The spec with dp and vocabulary filled in, checked against the store."""
    spec = resolve_dp(spec, world_size)
    store = open_store(stores.train)
    if store.vocab_size and store.vocab_size > stores.vocab_size:
        raise ValueError(
            f"model.vocab_size = {stores.vocab_size} is smaller than the {store.vocab_size} "
            f"entries of the store {store.prefix}; raise it or set it to 0"
        )
    return check(replace(spec, model=replace(spec.model, vocab_size=stores.vocab_size)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """What a run was started with besides its spec. resume: what `--resume` was given
    (`checkpoint.resolve_resume`), None without it. calibrate: as `train` takes it."""

    resume: str | None
    calibrate: str | None
    console: Console
    started_s: float
    signals: Signals


def train(
    spec: RunSpec,
    *,
    resume: str | None,
    console: Console,
    calibrate: str | None = None,
    signals: Signals | None = None,
) -> None:
    """Run a spec to its end on the ranks there are.

    resume: what `--resume` was given (`checkpoint.resolve_resume`), None without it.
    calibrate: name or path of a kernel profile to fit and write (empty: a name made from the one
    that priced the run); None to write none. signals: caught already; None to catch them here.
    """
    if calibrate is not None:
        _refuse_calibration(spec)
    with Signals() if signals is None else nullcontext(signals) as caught:
        order = _Order(
            resume=resume,
            calibrate=calibrate,
            console=console,
            started_s=time.time(),
            signals=caught,
        )
        world = worlds.discover()
        try:
            if world is not None:
                _given_ranks(spec, world, order)
            else:
                _own_ranks(spec, order)
        except StoppedEarly:
            console.print(_STOPPED)


def _own_ranks(spec: RunSpec, order: _Order) -> None:
    """This process, or as many local ones as the layout asks for."""
    world_size = spec.parallel.world_size
    choice = worlds.choose_device(spec.run.device, local_ranks=world_size)
    checked = resolve_dp(spec, world_size)
    order.console.print(_why(checked, choice, None))
    with closing(RunLock(directory_of(checked), order.console)) as lock:
        job = _claimed_job(checked, world_size, choice, order, lock)
        if world_size == 1:
            request = StopRequest(checked.run.stop_file, rank=0, signals=order.signals)
            _started_rank(World(), job, choice.kind, request)
            return
        with tempfile.TemporaryDirectory(prefix="wlb-stop-") as folder:
            told = Path(folder) / "told"
            order.signals.pass_on(told)
            run_local(
                _rank,
                world_size,
                job,
                choice.kind,
                told,
                device=choice.kind,
                awaits_report=bool(checked.training.heartbeat_s),
            )


def _given_ranks(spec: RunSpec, world: World, order: _Order) -> None:
    """Under torchrun or Slurm: rank 0 makes the store, the others wait and open it."""
    choice = worlds.choose_device(
        spec.run.device, local_ranks=world.local_world_size, one_gpu_each=world.one_gpu_each
    )
    checked = resolve_dp(spec, world.world_size)
    device = worlds.rank_device(world, choice.kind)
    # Bounds the meeting of the ranks too, where one that failed before it would be waited for.
    worlds.init(world, device, timeout_s=spec.training.timeout_s)
    try:
        # Rank 0 may take hours to tokenise a corpus while the others wait for its answer.
        limit_collectives(max(PREPARE_TIMEOUT_S, spec.training.timeout_s))
        with closing(RunLock(directory_of(checked), order.console)) as lock:
            answer: list[Job | str | None] = [None]
            if world.rank == 0:
                order.console.print(_why(checked, choice, world))
                try:
                    answer = [_claimed_job(checked, world.world_size, choice, order, lock)]
                except (ValueError, OSError) as error:
                    answer = [str(error)]
                except StoppedEarly:
                    order.console.print(_STOPPED)
            dist.broadcast_object_list(answer, src=0)
            job = answer[0]
            if isinstance(job, str):
                raise ValueError(job)
            if job is not None:
                limit_collectives(spec.training.timeout_s)
                request = StopRequest(spec.run.stop_file, rank=world.rank, signals=order.signals)
                run_rank(world, job, device, request)
    finally:
        worlds.shutdown()


def _rank(world: World, job: Job, device_kind: str, told: Path | None = None) -> None:
    """A local rank of a process that makes `told` when it is asked to stop."""
    with Signals() as signals:
        request = StopRequest(job.spec.run.stop_file, rank=world.rank, signals=signals, told=told)
        _started_rank(world, job, device_kind, request)


def _started_rank(world: World, job: Job, device_kind: str, request: StopRequest) -> None:
    device = worlds.rank_device(world, device_kind)
    worlds.init(world, device, timeout_s=job.spec.training.timeout_s)
    try:
        run_rank(world, job, device, request)
    finally:
        worlds.shutdown()


def _claimed_job(
    spec: RunSpec, world_size: int, choice: DeviceChoice, order: _Order, lock: RunLock
) -> Job:
    """The job, its stores made and its folder this run's own; StoppedEarly if a signal came."""
    stores = open_stores(spec, order.console, order.signals)
    order.console.print(f"corpus: {stores.note}")
    if lock.directory.exists():
        # Before its checkpoints are looked at: another process might still write some.
        _claimed(spec, lock.take)
    job = _job(spec, stores, world_size, choice, order)
    order.signals.check()
    claim_directory(job, order.console, lock)
    return job


def _job(
    spec: RunSpec,
    stores: Stores,
    world_size: int,
    choice: DeviceChoice,
    order: _Order,
) -> Job:
    console, calibrate = order.console, order.calibrate
    filled = ready(spec, stores, world_size)
    budget = budget_of(filled, choice.kind)
    filled = with_s_max(filled, memory_gib=budget.gib if budget else None)
    filled, lowered = within(filled, budget)
    memory = lowered + hold_against(filled, budget)
    directory = directory_of(spec)
    p = filled.parallel
    title = (
        f"{spec.run.name}: {filled.model.num_parameters / 1e6:.1f}M parameters, TP {p.tp} x "
        f"CP {p.cp} x PP {p.pp} x DP {p.dp} on {choice.kind}, {filled.num_micro_batches} "
        f"micro-batches of about {filled.data.context_window} tokens"
    )
    saved = checkpoint.resolve_resume(directory / "checkpoints", order.resume)
    init_from = None
    if saved is None:
        init_from = begins_with(spec)
        for key, path in _inputs(spec):
            _refuse_in_older_run(directory, key, path)
    planner = refuse_early(
        filled,
        train=stores.train,
        heldout=stores.heldout,
        device=choice.kind,
        resume=saved,
        init_from=init_from,
    )
    for line in memory:
        console.print(line)
    console.print(computed_by(filled, choice.kind))
    console.print(priced_by(planner))
    if init_from is not None:
        console.print(f"weights of {init_from}")
    begun = saved or init_from
    if begun is not None and (change := model_change(filled.model, begun)):
        console.print(change)
    for line in _rates(filled, saved):
        console.print(line)
    target: Path | None = None
    if calibrate is not None:
        target = profile_path(
            calibrate, priced_by=profile_of(planner).name, folder=Path(spec.run.output_dir)
        )
    return Job(
        spec=filled,
        train_store=stores.train,
        heldout_store=stores.heldout,
        resume=saved,
        title=title,
        started_s=order.started_s,
        calibrate=target,
        init_from=init_from,
    )


def _rates(spec: RunSpec, saved: Path | None) -> Iterator[str]:
    """What is worth knowing of the learning rate before training begins, in lines."""
    if missed := peak_missed(spec):
        yield missed
    if saved is None:
        return
    run = checkpoint.read_run(saved)
    before = apply(
        RunSpec(), {"training": run["spec"]["training"]}, source=str(saved), is_stored=True
    ).training
    if change := rate_change(spec, before, run["step"]):
        yield change


def _inputs(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Paths that a run reads, by their keys."""
    data = spec.data
    yield "cost.profile", spec.cost.profile
    yield "checkpoint.init_from", spec.checkpoint.init_from
    yield "packing.packs", spec.packing.packs
    yield "data.heldout_store", data.heldout_store
    yield "data.store", data.store
    for prefix, _ in parse_blend(data.blend):
        yield "data.blend", prefix
    if not (data.store or data.blend or data.corpus in (STDLIB, DOCSTRINGS)):
        yield "data.corpus", data.corpus


def _refuse_in_older_run(directory: Path, key: str, path: str) -> None:
    folder, given = directory.absolute(), Path(path).absolute()
    if path and (folder == given or folder in given.parents):
        raise ValueError(
            f"{key} = {path} lies in {directory}, the folder of a run of this name, which is about "
            f"to be moved aside; copy it elsewhere or set run.name"
        )


def _refuse_calibration(spec: RunSpec) -> None:
    telemetry, steps, recompute = spec.telemetry, spec.training.steps, spec.training.recompute
    if not telemetry.enabled:
        raise ValueError("--calibrate needs measured times; set telemetry.enabled = true")
    if steps <= telemetry.warmup_steps:
        raise ValueError(
            f"--calibrate: training.steps = {steps} are all warm-up (telemetry.warmup_steps = "
            f"{telemetry.warmup_steps}); train more steps"
        )
    if recompute != Recompute.NONE:
        raise ValueError(
            f"--calibrate fits forward and backward apart, but with training.recompute = "
            f"{recompute} backward holds forward work; set training.recompute = none (with a "
            f"shorter data.context_window if that does not fit)"
        )


def claim_directory(job: Job, console: Console, lock: RunLock) -> None:
    """The run's folder, this process's alone; an older run of the same name is moved aside, never
    overwritten.

    ValueError where nothing can be written there, or another process trains that run.
    """

    def claim() -> None:
        lock.take()
        _claim(job, console)
        with tempfile.TemporaryFile(dir=job.directory) as file:
            file.write(bytes(_TRIED_BYTES))

    _claimed(job.spec, claim)


def _claimed(spec: RunSpec, claim: Callable[[], None]) -> None:
    try:
        claim()
    except OSError as error:
        raise ValueError(
            f"run.output_dir = {spec.run.output_dir}: nothing can be written to "
            f"{directory_of(spec)} ({error}); set run.output_dir to a folder with room for you to "
            f"write"
        ) from None


def _claim(job: Job, console: Console) -> None:
    directory = job.directory
    if job.resume is not None:
        console.print(f"going on from {job.resume}")
        for path in checkpoint.prepare_for_resume(job.checkpoints, job.resume):
            console.print(f"a later checkpoint is now {path}")
    elif directory.exists() and any(directory.iterdir()):
        number = 1
        while (aside := directory.with_name(f"{directory.name}.{number}")).exists():
            number += 1
        directory.rename(aside)
        console.print(f"an older run of this name is now {aside}")
    directory.mkdir(parents=True, exist_ok=True)


def _why(spec: RunSpec, choice: DeviceChoice, world: World | None) -> str:
    p = spec.parallel
    layout = f"TP {p.tp} x CP {p.cp} x PP {p.pp} x DP {max(1, p.dp)}"
    if world is not None:
        ranks = f"{world.world_size} ranks given by {world.origin}"
    elif p.world_size == 1:
        ranks = "1 rank in this process (not started by torchrun or Slurm)"
    else:
        ranks = f"{p.world_size} local ranks (not started by torchrun or Slurm)"
    backend = "NCCL" if choice.kind == "cuda" else "Gloo"
    return f"{ranks} for {layout}; {choice.kind} with {backend}: {choice.reason}"
