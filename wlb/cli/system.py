"""`--system NAME`: expands to --set overrides, in the alternative for which memory suffices."""

import sys
from dataclasses import replace

from wlb.memory import planned_gib
from wlb.packing import first_with_room
from wlb.spec import RunSpec, load, system_choices


def with_system(name: str, overrides: list[str], system: str) -> list[str]:
    """Return the overrides of a system, followed by the user's, which win.

    Of the system's alternatives, the first that leaves packing enough memory is chosen. If it is
    not the first one, a line on stderr says so. The user's overrides may change the memory.

    Args:
        name: Preset or TOML file of the run.
        overrides: The user's KEY=VALUE.
        system: Name of the system; "" for none.
    """
    if not system:
        return overrides
    choices = system_choices(system, planned_gib=planned_gib(load(name, overrides)))
    alternatives = [[*choice, *overrides] for choice in choices]
    if len(alternatives) == 1:
        return alternatives[0]
    index = first_with_room([_with_vocabulary(load(name, a)) for a in alternatives])
    # Say so, because a user expects the first alternative.
    if index:
        differs = ", ".join(a for a in choices[index] if a not in choices[0])
        print(
            f"--system {system} is {system}:{index + 1} ({differs}): without it memory leaves "
            f"packing too little room",
            file=sys.stderr,
        )
    return alternatives[index]


def _with_vocabulary(spec: RunSpec) -> RunSpec:
    """Fill in the vocabulary size of data.corpus, because no store is opened here.

    The size of a store's vocabulary may be another one.
    """
    size = spec.model.vocab_size or spec.data.bpe_vocab_size
    return replace(spec, model=replace(spec.model, vocab_size=size))
