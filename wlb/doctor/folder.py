"""Checks that ranks can use the run's output folder and open its token stores."""

import tempfile
from pathlib import Path

from wlb.data import TokenStore, open_store
from wlb.data.folder import make_folder
from wlb.doctor.facts import Patient
from wlb.doctor.finding import Finding, failed, passed, skipped
from wlb.plan import UserError
from wlb.spec.blend import parse_blend
from wlb.train.checkpoint.folder import SEEN_WITHIN_S
from wlb.train.checkpoint.shared_folder import refuse_unshared

# Seconds for which a quick examination waits until other nodes see a file that rank 0 wrote.
QUICK_WITHIN_S = 15.0
_TRIED_BYTES = 1 << 12  # size of the temporary file that tests whether a folder can be written


def shared_folder(patient: Patient) -> Finding:
    """Check that ranks can write to run.output_dir and see the files that rank 0 writes there.

    The folder is created if it does not exist. A collective call.
    """
    check, folder = "shared folder", Path(patient.spec.run.output_dir)
    try:
        if patient.world.world_size > 1:
            within_s = QUICK_WITHIN_S if patient.is_quick else SEEN_WITHIN_S
            refuse_unshared(folder, patient.world, within_s=within_s)
        make_folder(folder)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_TRIED_BYTES))
    except (UserError, OSError) as error:
        remedy = "set run.output_dir to a folder that all nodes share and you may write to"
        return failed(check, str(error), remedy)
    seen = "every rank sees it" if patient.world.world_size > 1 else "this process can write to it"
    return passed(check, f"{folder.absolute()}: {seen}")


def token_stores(patient: Patient) -> Finding:
    """Check that this node can open the token stores that the run names.

    If the run names no store, nothing is checked, because training makes one from `data.corpus`.
    """
    check, data = "token stores", patient.spec.data
    prefixes = [data.store, data.heldout_store, *(prefix for prefix, _ in parse_blend(data.blend))]
    given = [prefix for prefix in prefixes if prefix]
    if not given:
        return skipped(
            check, f"none is configured; training makes one from data.corpus = {data.corpus}"
        )
    try:
        sizes = [TokenStore(prefix).num_tokens for prefix in given]
    except (UserError, OSError) as error:
        return failed(
            check,
            str(error),
            "make the store with `wlb prepare`, or give a path that all nodes see",
        )
    return passed(check, f"{', '.join(given)}: {sum(sizes):,} tokens")


def vocabulary_of(store: str, otherwise: int) -> int:
    """Return the size of a store's vocabulary.

    Args:
        store: Prefix of the store; "" for none.
        otherwise: The size to return if there is no store, if it cannot be opened, or if it does
            not record the size of its vocabulary.
    """
    try:
        return open_store(store).vocab_size or otherwise if store else otherwise
    except (UserError, OSError):
        return otherwise
