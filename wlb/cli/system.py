"""The option `--system NAME`: settings of another training system, such as Megatron-LM."""

import sys
from dataclasses import replace

from wlb.memory import planned_gib
from wlb.packing import first_with_room
from wlb.spec import RunSpec, load, system_choices


def with_system(name: str, overrides: list[str], system: str) -> list[str]:
    """Return the overrides KEY=VALUE of a training system, followed by the overrides of the user.

    With the system's overrides, wlb trains as this system would, for example Megatron-LM. Later
    overrides replace earlier ones, so the user's overrides have priority. A system may have several
    alternatives, of which the first one that leaves enough memory for packing is used. If this is
    not alternative 1, a line on stderr says so.

    Args:
        name: Preset or TOML file of the run.
        overrides: The user's values of --set.
        system: Name of the system; "" for none.
    """
    if not system:
        return overrides
    choices = system_choices(system, planned_gib=planned_gib(load(name, overrides)))
    alternatives = [[*choice, *overrides] for choice in choices]
    if len(alternatives) == 1:
        return alternatives[0]
    index = first_with_room([_with_vocabulary(load(name, a)) for a in alternatives])
    # Say that another alternative is used, because the user expects the first one.
    if index:
        differs = ", ".join(a for a in choices[index] if a not in choices[0])
        print(
            f"--system {system}: the settings of alternative {system}:{index + 1} are used "
            f"({differs}), because the settings of alternative {system}:1 leave too little memory "
            f"for packing",
            file=sys.stderr,
        )
    return alternatives[index]


def _with_vocabulary(spec: RunSpec) -> RunSpec:
    """Return the run with model.vocab_size set, to estimate its memory without opening a store.

    The value is data.bpe_vocab_size, from which the vocabulary of a token store may differ.
    """
    size = spec.model.vocab_size or spec.data.bpe_vocab_size
    return replace(spec, model=replace(spec.model, vocab_size=size))
