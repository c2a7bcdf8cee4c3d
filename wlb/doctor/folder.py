"""Checks whether all ranks see the run's output folder and its token stores."""

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

# Seconds that a quick examination waits until a file of rank 0 appears on the other nodes.
QUICK_WITHIN_S = 15.0
_TRIED_BYTES = 1 << 12  # bytes written once, to find out whether files can be written to a folder


def shared_folder(patient: Patient) -> Finding:
    """Check that run.output_dir can be written and that all ranks see what rank 0 writes there.

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
    seen = "every rank sees it" if patient.world.world_size > 1 else "seen by one process only"
    return passed(check, f"{folder.absolute()}: {seen}")


def token_stores(patient: Patient) -> Finding:
    """Check that this node can open the token stores that the run names.

    If the run names none, nothing is checked: training makes the store from `data.corpus`.
    """
    check, data = "token stores", patient.spec.data
    prefixes = [data.store, data.heldout_store, *(prefix for prefix, _ in parse_blend(data.blend))]
    given = [prefix for prefix in prefixes if prefix]
    if not given:
        return skipped(
            check, f"the configuration names none; one is made from data.corpus = {data.corpus}"
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
        otherwise: The size to return without a store, or if the store does not record its size.
    """
    try:
        return open_store(store).vocab_size or otherwise if store else otherwise
    except (UserError, OSError):
        return otherwise
