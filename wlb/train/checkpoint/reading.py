"""Tensors of a checkpoint's files into those of the ranks, from any layout into any other."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import distributed as dist
from torch.distributed.checkpoint import hf_storage, state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from wlb.plan import RunError
from wlb.plan.read_file import WRONG_SHAPE, told
from wlb.train.checkpoint.folder import DamagedCheckpoint


class CheckpointReader:
    """Reads the tensors of `saved_in`. names: of all of them, for which headers are read once.

    DamagedCheckpoint for files that are no tensors, or not those that are wanted; RunError for
    those that cannot be read now.
    """

    def __init__(self, saved_in: Path) -> None:
        self._saved_in, self._reader = saved_in, _Reader(str(saved_in))

    @property
    def names(self) -> set[str]:
        with self._readable():
            return set(self._reader.read_metadata().state_dict_metadata)

    def load(self, tensors: dict[str, Any], group: dist.ProcessGroup | None) -> None:
        """Fill `tensors`, whole ones or DTensors, in place; a collective call."""
        with self._readable():
            state_dict_loader.load(tensors, storage_reader=self._reader, process_group=group)

    @contextmanager
    def _readable(self) -> Generator[None]:
        try:
            yield
        except CheckpointException as error:
            # It derives from BaseException, so other handlers would not see it.
            raise self._refusal(next((c for c, _ in error.failures.values()), error)) from error
        except (SafetensorError, OSError, *WRONG_SHAPE) as error:
            raise self._refusal(error) from error

    def _refusal(self, cause: BaseException) -> Exception:
        if isinstance(cause, OSError):
            return RunError(f"the checkpoint {self._saved_in} cannot be read: {cause}")
        return DamagedCheckpoint(
            f"the checkpoint {self._saved_in} does not hold the tensors of this model "
            f"({told(cause)}); use another one"
        )


class _Reader(hf_storage.HuggingFaceStorageReader):
    """Reads the headers of all files only once."""

    _known: Metadata | None = None

    def read_metadata(self) -> Metadata:
        if self._known is None:
            self._known = super().read_metadata()
        return self._known
