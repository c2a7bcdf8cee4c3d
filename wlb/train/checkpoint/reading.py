"""Reads a checkpoint's files into this rank's tensors. The layout of ranks may have changed.

Errors of torch and safetensors are replaced by errors whose message is one line and names the
checkpoint.
"""

from collections.abc import Collection, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import distributed as dist
from torch.distributed.checkpoint import hf_storage, state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from wlb.model import Llama
from wlb.model.expert_layer import BALANCE
from wlb.model.llama import HEAD
from wlb.plan import RunError, UserError
from wlb.plan.read_file import WRONG_SHAPE, describe_error
from wlb.spec import ModelSpec
from wlb.train.checkpoint import folder as checkpoint
from wlb.train.checkpoint.folder import DamagedCheckpoint
from wlb.train.checkpoint.headers import checked_headers

_MODEL = "model."
"""Prefix of the names of a model's tensors in files."""


def check_names(saved_in: Path, names: Collection[str], model: ModelSpec) -> None:
    """Check that a checkpoint has exactly the tensors of `model`.

    If a tensor of the checkpoint, such as the weight of a norm, were not used, the run would
    silently train another model. Tensors that balance the load of experts may be missing or unused,
    because a run may begin with their initial values.

    Args:
        saved_in: The checkpoint, for messages.
        names: Names of the checkpoint's tensors.
        model: The whole model of the run, of which a rank may have only a part.

    Raises:
        UserError: If the checkpoint has tensors that the model lacks.
        DamagedCheckpoint: If the checkpoint lacks tensors of the model.
    """
    with torch.device("meta"):
        wanted = {f"{_MODEL}{name}" for name in Llama(model).state_dict()}
    if model.tied_embeddings:
        wanted.discard(f"{_MODEL}{HEAD}")
    saved = {name for name in names if name.startswith(_MODEL)}
    unread, missing = (
        sorted(name.removeprefix(_MODEL) for name in found if not name.endswith(BALANCE))
        for found in (saved - wanted, wanted - saved)
    )
    if unread:
        raise UserError(
            f"the checkpoint {saved_in} has {len(unread)} tensors that the run's model "
            f"does not have, such as {unread[0]}; set the model.* keys to the "
            "values of the run that saved it"
        )
    if missing:
        raise DamagedCheckpoint(
            f"the checkpoint {saved_in} lacks {len(missing)} tensors of the run's "
            f"model, such as {missing[0]}; use another checkpoint"
        )


def check_headers(saved_in: Path) -> None:
    """Check the headers of all files of a checkpoint.

    The check takes 46 us for each tensor in each file, so one rank makes it for all ranks.

    Args:
        saved_in: The checkpoint.

    Raises:
        DamagedCheckpoint: If the files do not have each element of each tensor exactly once.
        UserError: If the operating system cannot read a file.
    """
    try:
        checked_headers(saved_in, remedy="use another checkpoint")
    except UserError as error:
        raise DamagedCheckpoint(
            f"the checkpoint {saved_in} is damaged or incomplete: {error}"
        ) from error
    except OSError as error:
        raise UserError(
            f"the checkpoint {saved_in} cannot be read: {error}; correct this, or resume "
            "from another checkpoint"
        ) from error


class CheckpointReader:
    """Reads the tensors of the checkpoint `saved_in`.

    Its methods raise DamagedCheckpoint if the files do not have the requested tensors, and RunError
    if the operating system cannot read the files.
    """

    def __init__(self, saved_in: Path) -> None:
        self._saved_in, self._reader = saved_in, TensorFiles(str(saved_in))

    @property
    def names(self) -> set[str]:
        """Names of all tensors in the checkpoint."""
        with self._readable():
            return set(self._reader.read_metadata().state_dict_metadata)

    def load(self, tensors: dict[str, Any], group: dist.ProcessGroup | None) -> None:
        """Read values from the checkpoint into existing tensors. A collective call.

        Args:
            tensors: Tensors or DTensors, by their names in files. Their values are overwritten.
            group: Ranks that load together; None for a single process.

        Raises:
            DamagedCheckpoint: If a tensor is missing in the files or has another dtype there. The
                floating-point weights of an imported model are converted instead.
        """
        with self._readable():
            known = self._reader.read_metadata().state_dict_metadata
            self._check_dtypes({n: known[n] for n in tensors if n in known}, tensors)
            state_dict_loader.load(tensors, storage_reader=self._reader, process_group=group)

    def _check_dtypes(self, known: dict[str, Any], tensors: dict[str, Any]) -> None:
        """Raise DamagedCheckpoint if a saved tensor has another dtype than the tensor to fill.

        `known` has torch's metadata of the saved tensors, and `tensors` has the tensors to fill.
        The keys of both are the tensors' names in files.
        """
        is_import = checkpoint.is_import(self._saved_in)
        for name, about in known.items():
            saved, wanted = about.properties.dtype, tensors[name].dtype
            converts = is_import and name.startswith(_MODEL) and saved.is_floating_point
            if saved != wanted and not converts:
                raise DamagedCheckpoint(
                    f"the checkpoint {self._saved_in} has {name} in {saved}, but a run "
                    f"saves this tensor in {wanted}; use another checkpoint"
                )

    @contextmanager
    def _readable(self) -> Generator[None]:
        """Replace errors of torch and safetensors in the block by DamagedCheckpoint or RunError."""
        try:
            yield
        except CheckpointException as error:
            # torch's CheckpointException has the errors of all ranks. Explain the first of them.
            raise self._refusal(next((c for c, _ in error.failures.values()), error)) from error
        except DamagedCheckpoint:
            raise
        except (SafetensorError, OSError, *WRONG_SHAPE) as error:
            raise self._refusal(error) from error

    def _refusal(self, cause: BaseException) -> Exception:
        """Return the error to raise instead of `cause`, with a message of one line.

        It is a RunError if `cause` is an OSError, else a DamagedCheckpoint.
        """
        if isinstance(cause, OSError):
            return RunError(f"the checkpoint {self._saved_in} cannot be read: {cause}")
        return DamagedCheckpoint(
            f"the tensors of the checkpoint {self._saved_in} do not fit the run's "
            f"model ({describe_error(cause)}); use another checkpoint"
        )


class TensorFiles(hf_storage.HuggingFaceStorageReader):
    """torch's reader of safetensors files, changed so that it reads the headers only once."""

    _known: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """Return torch's metadata of all tensors: names, shapes and positions in the files."""
        if self._known is None:
            self._known = super().read_metadata()
        return self._known
