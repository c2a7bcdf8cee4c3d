"""Saves checkpoints in a thread. Training waits only until its state is copied to host memory.

The thread writes the copy with torch.distributed.checkpoint and hashes the files. Rank 0 writes the
manifest and gives the folder its final name. The threads of all ranks communicate in a separate
Gloo group, so that their messages do not mix with messages of training. One save runs at a time.

A save that fails does not damage older checkpoints, and every rank learns of the failure. If the
disk is full and there are several checkpoints, the oldest one is removed, and the save is tried
once more.
"""

import contextlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import hf_storage, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from wlb import __version__
from wlb.cost.machine import program_version
from wlb.parallel.collectives import agree
from wlb.parallel.host import host_group
from wlb.parallel.mesh import Mesh
from wlb.parallel.world import device_thread
from wlb.plan import PlannerState, RunError, UserError
from wlb.spec import ModelSpec, RunSpec
from wlb.train.checkpoint import folder as checkpoint
from wlb.train.checkpoint.held_folder import HeldFolder
from wlb.train.checkpoint.host_memory import give_back_freed
from wlb.train.checkpoint.reading import CheckpointReader, check_headers, check_names
from wlb.train.checkpoint.room import is_full, says_full, to_drop, to_prune
from wlb.train.checkpoint.tensors import (
    Stages,
    all_tensors,
    host_copy,
    rng_states,
    set_optimizers,
    set_rng,
    set_weights,
    tensors_to_read,
    weights,
    without_copies,
)
from wlb.train.optimizer import Optimizers

_TIMEOUT = timedelta(hours=2)
"""Timeout of the collectives in a save.

The timeout is long, because one rank may finish writing its files much later than others."""


class CheckpointError(RunError):
    """Raised if a checkpoint could not be written. Older checkpoints are not damaged.

    Attributes:
        is_full: Whether the save failed because the disk is full.
    """

    def __init__(self, message: str, *, is_full: bool = False) -> None:
        super().__init__(message)
        self.is_full = is_full


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Result of one save of a checkpoint, which is complete or has failed."""

    step: int  # number of updates that the saved weights have had
    # Seconds for which the save stopped training on the host: the wait for the end of the previous
    # save, and the start of the copy. On a GPU, the copy itself takes more time on the device.
    stall_s: float
    write_s: float  # seconds from when training stopped for the save until the save ended
    num_bytes: int = 0  # size of the checkpoint, exact on rank 0 only; 0 if the save failed
    error: str = ""  # why the save failed; "" for a complete checkpoint
    dropped: str = ""  # checkpoint that was removed because the disk was full; "" for none


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """A copy of training's state, which the writing thread saves as a checkpoint."""

    step: int  # number of updates that the weights have had
    tensors: dict[str, Any]  # copies of tensors in host memory, by their names in checkpoint files
    # CUDA event after which `tensors` are complete; None on a CPU, where they are complete already.
    copied: torch.cuda.Event | None
    # Contents of the JSON files that rank 0 writes, by file name.
    # Empty on a rank that does not have the planner's state.
    json_files: dict[str, dict[str, Any]]
    began_s: float  # time.perf_counter when training stopped for this save
    stall_s: float  # seconds that training waited: from `began_s` until the copy was started


class CheckpointSaver:
    """Saves checkpoints on one rank.

    All ranks construct it and call the same methods in the same order.

    Args:
        directory: Folder of the checkpoints, in the run's folder. The run's folder must exist. This
            object keeps the run's folder open, so that checkpoints are written to the same folder
            even if it is renamed.
        spec: The run, for run.json.
        mesh: This rank's place in the layout.
        stages: This rank's parts of the model, by stage number.
        optimizers: The optimisers of these stages.
        profile: Name of the kernel profile, for run.json.
        origin: Checkpoint with which the run began; None for random weights. If `origin` records
            that its model was imported, this record is copied to the new checkpoints.
    """

    def __init__(
        self,
        directory: Path,
        spec: RunSpec,
        mesh: Mesh,
        *,
        stages: Stages,
        optimizers: Optimizers,
        profile: str,
        origin: Path | None = None,
    ) -> None:
        self.spec, self.mesh = spec, mesh
        self._held = HeldFolder(directory.parent)
        self.directory = self._held.path / directory.name
        self.stages, self.optimizers = stages, optimizers
        self._about = {"spec": spec.to_dict(), "profile": profile}
        if mesh.rank == 0:
            self._about["written_by"] = {
                "wlb": __version__,
                "source": program_version(),
                "torch": torch.__version__,
            }
        if origin is not None and "imported" in (run := checkpoint.read_run(origin)):
            self._about["imported"] = run["imported"]
        group = dist.new_group(backend="gloo", timeout=_TIMEOUT, group_desc="checkpoints")
        # new_group returns another type only to ranks outside of the group, and no rank is outside.
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        self._pool = device_thread("checkpoint", mesh.device)
        self._pending: Future[Saved] | None = None

    def save(
        self, step: int, state: PlannerState | None, *, began_s: float | None = None
    ) -> list[Saved]:
        """Copy the state of training, and start to save the copy in a thread.

        The previous save is waited for. Training continues during the new one.

        Args:
            step: Number of updates so far.
            state: The planner's state, which rank 0 writes. Other ranks may pass None.
            began_s: When training began to wait, by time.perf_counter. None means now.

        Returns:
            A list with the result of the previous save. The list is empty if there was none, or if
                `wait` has returned its result already.
        """
        began_s = time.perf_counter() if began_s is None else began_s
        ended = self.wait()
        tensors = without_copies(self.stages, all_tensors(self.stages, self.optimizers))
        tensors |= rng_states(self.mesh.rank)
        copies = {name: host_copy(tensor) for name, tensor in tensors.items()}
        task = _Task(
            step=step,
            tensors=copies,
            copied=_event(self.mesh.device),
            json_files=self._json_files(step, state) if state is not None else {},
            began_s=began_s,
            stall_s=time.perf_counter() - began_s,
        )
        self._pending = self._pool.submit(self._write, task)
        return ended

    def _json_files(self, step: int, state: PlannerState) -> dict[str, dict[str, Any]]:
        """Return the contents of planner.json and run.json, by file name.

        Training waits for this function. It returns copies, because training goes on while the
        thread writes the files, and may change the originals.
        """
        planner = state.to_json()
        run = {"step": step, **self._about, "planner": checkpoint.planner_of(planner)}
        return {checkpoint.PLANNER: planner, checkpoint.RUN: deepcopy(run)}

    def poll(self) -> list[Saved]:
        """Return a list with the result of the current save, or an empty list if it has not ended.

        This function does not wait. `wait` will return the same result once more.
        """
        pending = self._pending
        return [pending.result()] if pending is not None and pending.done() else []

    def wait(self) -> list[Saved]:
        """Wait for the current save, and return a list with its result.

        The list is empty if there is no save, or if an earlier `wait` has returned the result.
        """
        pending, self._pending = self._pending, None
        return [] if pending is None else [pending.result()]

    def finish_for_reading(self) -> None:
        """Wait until the current save has ended on all ranks, so that all can read the checkpoint.

        `wait` still returns the result of the save afterwards. A collective call.
        """
        if self._pending is not None:
            self._pending.result()
        dist.barrier(group=self._group)

    def close(self) -> None:
        """Wait for the current save, and close the run's folder, which was kept open."""
        self._pool.shutdown(wait=True)
        self._held.close()

    def _write(self, task: _Task) -> Saved:
        """Write a checkpoint, in the saving thread. The result describes a failure, if any."""
        num_bytes, error, dropped = 0, "", list[str]()
        try:
            if task.copied is not None:
                task.copied.synchronize()
            num_bytes = self._write_or_make_space(task, dropped)
        # A failure does not end training. CheckpointException is listed too, because it is not a
        # subclass of Exception.
        except (Exception, CheckpointException) as failure:
            error = self._held.named(_cause_of(failure))
            if self.mesh.rank == 0:
                with contextlib.suppress(OSError):
                    shutil.rmtree(self._partial(task.step), ignore_errors=True)
        write_s = time.perf_counter() - task.began_s
        # By now, copies of earlier saves and host tensors of earlier steps have been freed. Return
        # their memory to the operating system.
        give_back_freed()
        return Saved(
            step=task.step,
            stall_s=task.stall_s,
            write_s=write_s,
            num_bytes=num_bytes,
            error=error,
            dropped="".join(dropped),
        )

    def _partial(self, step: int) -> Path:
        return self.directory / f"partial-{step:08d}"

    def _write_or_make_space(self, task: _Task, dropped: list[str]) -> int:
        """Write a checkpoint. If the disk is full, remove the oldest checkpoint and try once more.

        Args:
            task: The state to write.
            dropped: An empty list. If a checkpoint is removed, its name is appended.

        Returns:
            The size of the new checkpoint in bytes.
        """
        try:
            return self._write_all(task)
        except (Exception, CheckpointException) as failure:
            # `failure` is the same on all ranks, so all ranks try again together.
            if not is_full(failure):
                raise
            self._on_rank_0(lambda: self._drop_oldest(task.step, dropped))
            shared = [dropped]
            dist.broadcast_object_list(shared, src=0, group=self._group)
            dropped[:] = shared[0]
            if not dropped:
                raise
        return self._write_all(task)

    def _drop_oldest(self, step: int, dropped: list[str]) -> None:
        """Remove the incomplete checkpoint of `step`, and the oldest complete one.

        The newest complete checkpoint that is not damaged is kept in any case. The name of the
        removed complete checkpoint is appended to `dropped`.
        """
        shutil.rmtree(self._partial(step), ignore_errors=True)
        oldest = to_drop(self.directory)
        if oldest is not None:
            _remove(oldest)
            dropped.append(oldest.name)

    def _write_all(self, task: _Task) -> int:
        """Write all files of a checkpoint, give it its final name, and return its size in bytes."""
        partial = self._partial(task.step)
        # On return from `_on_rank_0`, the folder exists, so that all ranks can write to it.
        self._on_rank_0(lambda: self._make_folder(partial))
        state_dict_saver.save(
            task.tensors,
            storage_writer=hf_storage.HuggingFaceStorageWriter(str(partial), save_distributed=True),
            process_group=self._group,
        )
        # `_all_files` returns when all ranks have hashed their files, so rank 0 can list all files.
        files = self._all_files(partial)
        self._on_rank_0(lambda: self._complete(task, partial, files))
        return sum(about["bytes"] for about in files.values())

    def _on_rank_0(self, action: Callable[[], None]) -> None:
        """Run `action` on rank 0. If it fails, all ranks raise CheckpointError."""
        failed: list[tuple[str, bool]] = [("", False)]
        if self.mesh.rank == 0:
            try:
                action()
            except Exception as failure:
                failed = [(_cause_of(failure), says_full(failure))]
        dist.broadcast_object_list(failed, src=0, group=self._group)
        what, is_disk_full = failed[0]
        if what:
            raise CheckpointError(what, is_full=is_disk_full)

    def _make_folder(self, partial: Path) -> None:
        """Make the empty folder `partial` for a checkpoint."""
        if partial.exists():
            shutil.rmtree(partial)
        self.directory.mkdir(exist_ok=True)
        partial.mkdir()

    def _all_files(self, partial: Path) -> dict[str, dict[str, Any]]:
        """Return the manifest entries of the files that all ranks wrote to the folder `partial`.

        Each rank hashes its own files. A collective call.

        Returns:
            The size and the checksum of each file (`manifest_entry`), by file name.

        Raises:
            CheckpointError: If a rank cannot read its files. All ranks raise it.
        """
        own: dict[str, dict[str, Any]] | str
        try:
            paths = sorted(partial.glob(f"shard-{self.mesh.rank + 1:05d}-*"))
            own = {path.name: checkpoint.manifest_entry(path) for path in paths}
        except OSError as error:
            own = f"rank {self.mesh.rank}: {error}"
        written: list[Any] = [None] * self.mesh.world_size
        dist.all_gather_object(written, own, group=self._group)
        if problems := [found for found in written if isinstance(found, str)]:
            raise CheckpointError(problems[0])
        return {name: about for found in written for name, about in found.items()}

    def _complete(self, task: _Task, partial: Path, files: dict[str, dict[str, Any]]) -> None:
        """Write the JSON files and the manifest, rename the folder, and remove old checkpoints.

        `files` are the manifest entries of the files that the ranks wrote to the folder `partial`.
        """
        assert task.json_files, "rank 0 gets the planner's state with every plan"
        for name, data in task.json_files.items():
            checkpoint.write_json(partial / name, data)
            files[name] = checkpoint.manifest_entry(partial / name)
        # Other ranks may have written their files on other nodes. If the nodes do not share the
        # folder, rank 0 does not see these files, and the checkpoint is useless.
        if problem := checkpoint.first_unseen(partial, files, within_s=checkpoint.SEEN_WITHIN_S):
            raise CheckpointError(
                f"rank 0 on {socket.gethostname()} does not see files that other ranks "
                f"wrote: {problem}. Set run.output_dir to a folder that all nodes "
                "share"
            )
        checkpoint.write_manifest(partial, files)
        _sync_folder(partial)
        # Everything in the folder is on disk now, so it may get its final name.
        self._publish(partial, task.step)
        for old in to_prune(self.directory, self.spec):
            _remove(old)

    def _publish(self, partial: Path, step: int) -> None:
        """Rename the complete checkpoint `partial` to its final name.

        An older checkpoint with this name is moved aside first, and removed after the new one has
        its name. So a crash in between loses neither of the two.
        """
        final = checkpoint.folder_of(self.directory, step)
        replaced = checkpoint.replaced_of(self.directory, step)
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        try:
            partial.rename(final)
        except OSError:
            if replaced.exists():
                replaced.rename(final)
            raise
        _sync_folder(self.directory)
        shutil.rmtree(replaced, ignore_errors=True)


def load(saved_in: Path, mesh: Mesh, *, stages: Stages, optimizers: Optimizers) -> int:
    """Load a checkpoint's weights, optimiser state and random state into this rank's objects.

    The checkpoint may have been saved with another layout of ranks. A collective call.

    Args:
        saved_in: The checkpoint.
        mesh: This rank's place in the layout.
        stages: This rank's parts of the model, by stage number.
        optimizers: The optimisers of these stages.

    Returns:
        The number of updates that the weights have had.

    Raises:
        DamagedCheckpoint: If a file has a wrong checksum. All ranks raise it.
    """
    _verify(saved_in, mesh)
    tensors = all_tensors(stages, optimizers)
    rng = rng_states(mesh.rank)
    reader = CheckpointReader(saved_in)
    known = reader.names
    check_names(saved_in, known, _model(stages))
    # If the run had fewer ranks when the checkpoint was saved, the checkpoint has no random state
    # for the additional ranks. They keep the one with which they were seeded.
    rng = {name: value for name, value in rng.items() if name in known}
    in_files = tensors_to_read(saved_in, stages, tensors) | rng
    reader.load(in_files, host_group())
    set_weights(stages, tensors)
    set_optimizers(stages, optimizers, tensors)
    set_rng(rng, mesh.rank)
    # Hyper-parameters come from the current spec, not from the checkpoint.
    optimizers.configure()
    return int(checkpoint.read_run(saved_in)["step"])


def load_sound(
    saved_in: Path, mesh: Mesh, stages: Stages, optimizers: Optimizers, falls_back: bool
) -> tuple[int, Path]:
    """Load a checkpoint as `load` does, or an older one if it is damaged and `falls_back` is true.

    In the latter case the damaged checkpoint is renamed, and rank 0 prints a warning. A collective
    call.

    Args:
        saved_in: The checkpoint.
        mesh: This rank's place in the layout.
        stages: This rank's parts of the model, by stage number.
        optimizers: The optimisers of these stages.
        falls_back: Whether to load the newest older checkpoint that is not damaged, instead of
            raising DamagedCheckpoint.

    Returns:
        The number of updates that the weights have had, and the checkpoint that was loaded.

    Raises:
        DamagedCheckpoint: If the checkpoint is damaged and no other one may be loaded.
    """
    while True:
        try:
            return load(saved_in, mesh, stages=stages, optimizers=optimizers), saved_in
        except checkpoint.DamagedCheckpoint as error:
            found: list[Path | None] = [None]
            if falls_back and mesh.rank == 0:
                found = [_set_aside(saved_in, str(error))]
            if falls_back and mesh.world_size > 1:
                dist.broadcast_object_list(found, src=0, group=host_group())
            if found[0] is None:
                raise
            saved_in = found[0]


def _set_aside(damaged: Path, why: str) -> Path | None:
    """Rename a damaged checkpoint, and return the newest older one that is not damaged.

    If there is no such checkpoint, nothing is renamed, and None is returned. `why` says what is
    damaged, for the warning.
    """
    before = checkpoint.sound_before(damaged)
    if before is not None:
        sys.stderr.write(f"wlb train: WARNING: {why}. Now resuming from {before}\n")
        for path in checkpoint.prepare_for_resume(damaged.parent, before):
            sys.stderr.write(f"wlb train: a checkpoint that cannot be used was renamed to {path}\n")
        sys.stderr.flush()
    return before


def load_weights(saved_in: Path, mesh: Mesh | None, *, stages: Stages) -> None:
    """Load only a checkpoint's weights into this rank's stages. A collective call.

    The checkpoint may have been saved with another layout of ranks.

    Args:
        saved_in: The checkpoint.
        mesh: This rank's place in the layout; None for a single process.
        stages: This rank's parts of the model, by stage number.
    """
    if mesh is None:
        checkpoint.check_share(saved_in, index=0, num=1)
        check_headers(saved_in)
    else:
        _verify(saved_in, mesh)
    tensors = weights(stages)
    reader = CheckpointReader(saved_in)
    check_names(saved_in, reader.names, _model(stages))
    in_files = tensors_to_read(saved_in, stages, tensors)
    reader.load(in_files, host_group())
    set_weights(stages, tensors)


def _model(stages: Stages) -> ModelSpec:
    return next(iter(stages.values())).spec


def _verify(saved_in: Path, mesh: Mesh) -> None:
    """Check a checkpoint before it is loaded. A collective call.

    Each rank checks the checksums of its share of the files, and rank 0 checks the headers of all
    files. If a rank finds a problem, all ranks raise an error.
    """
    problem = None
    try:
        # Rank 0 may have renamed the folder just now, which other nodes may notice a little later.
        if mesh.world_size > 1:
            checkpoint.await_files(saved_in)
        checkpoint.check_share(saved_in, index=mesh.rank, num=mesh.world_size)
        if mesh.rank == 0:
            check_headers(saved_in)
    except UserError as error:
        problem = error
    group = host_group() if mesh.world_size > 1 else None
    try:
        agree({"checkpoint": saved_in.name}, problem, group=group)
    except UserError as error:
        is_damaged = problem is None or isinstance(problem, checkpoint.DamagedCheckpoint)
        all_damaged: list[Any] = [is_damaged]
        if group is not None:
            all_damaged = [None] * group.size()
            dist.all_gather_object(all_damaged, is_damaged, group=group)
        # Call the checkpoint damaged, unless any rank failed for another reason. If a node cannot
        # read a file, for example, the checkpoint itself may be sound.
        if all(all_damaged):
            raise checkpoint.DamagedCheckpoint(str(error)) from error
        raise


def _event(device: torch.device) -> torch.cuda.Event | None:
    """Record a CUDA event behind the present work of the current stream; return None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def _cause_of(failure: BaseException) -> str:
    """Return the text of an error, for a message.

    torch's CheckpointException has the errors of several ranks. The text of the lowest rank's error
    is returned.
    """
    failures = getattr(failure, "failures", None)
    if failures:
        rank, (cause, _) = next(iter(sorted(failures.items())))
        return f"rank {rank}: {cause}"
    return str(failure) or repr(failure)


def _remove(checkpoint_folder: Path) -> None:
    """Remove a checkpoint.

    Its folder is renamed first, so that a crash during the removal leaves no folder that looks like
    a complete checkpoint. Errors are ignored, because a folder that cannot be removed, for example
    on NFS while a file in it is read, only costs disk space.
    """
    partial = checkpoint_folder.with_name(f"partial-old-{checkpoint_folder.name}")
    with contextlib.suppress(OSError):
        checkpoint_folder.rename(partial)
        shutil.rmtree(partial)


def _sync_folder(path: Path) -> None:
    """Sync a folder to disk, so that the names of the files in it survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
