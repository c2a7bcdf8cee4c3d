"""`wlb completion`: a script that completes commands, options, presets and keys in bash or zsh."""

import argparse
from collections.abc import Iterator
from typing import Any

from wlb.spec import KNOWN_SYSTEMS, RunSpec, list_keys, presets

_DESCRIPTION = """\
Print a script that completes wlb's commands, options, presets and --set KEY= in a shell.

  echo 'source <(wlb completion bash)' >> ~/.bashrc
  echo 'source <(wlb completion zsh)' >> ~/.zshrc       after the line that runs compinit"""

_SCRIPT = """\
# Completion of wlb, made by `wlb completion {shell}`.
_wlb() {{
    # An option's values follow it, so the last option before the cursor counts, not the last word.
    local word=${{COMP_WORDS[COMP_CWORD]}} command=${{COMP_WORDS[1]}} last= words= i
    for ((i = COMP_CWORD - 1; i > 1; i--)); do
        if [[ ${{COMP_WORDS[i]}} == -* ]]; then last=${{COMP_WORDS[i]}} && break; fi
    done
    if ((COMP_CWORD == 1)); then
        words="{commands}"
    elif [[ $last == --set && $word != -* ]]; then
        words="{keys}"
        compopt -o nospace 2>/dev/null
    elif [[ $last == --system && $word != -* ]]; then
        words="{systems}"
    else
        case $command in
{cases}
        esac
        if [[ $word != -* ]]; then
            words="$words {presets}"
            compopt -o default 2>/dev/null
        fi
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -F _wlb wlb
"""
_ZSH = "autoload -Uz bashcompinit && bashcompinit\n"


def add_parser(commands: Any) -> None:
    """Add the parser of `wlb completion` to the subparsers `commands`."""
    parser = commands.add_parser(
        "completion",
        help="print a script that completes commands and keys in bash or zsh",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=("bash", "zsh"))
    parser.set_defaults(run=run, commands=commands)


def run(options: argparse.Namespace) -> int:
    """Print the script and return the exit status."""
    parsers: dict[str, argparse.ArgumentParser] = options.commands.choices
    script = _SCRIPT.format(
        shell=options.shell,
        commands=" ".join(parsers),
        keys=" ".join(f"{key.name}=" for key in list_keys(RunSpec)),
        systems=" ".join(KNOWN_SYSTEMS),
        presets=" ".join(presets()),
        cases="\n".join(
            f'            {name}) words="{" ".join(_words(parser))}" ;;'
            for name, parser in parsers.items()
        ),
    )
    print((_ZSH if options.shell == "zsh" else "") + script, end="")
    return 0


def _words(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the options of a command, then the names and options of its subcommands."""
    for action in parser._actions:  # pyright: ignore[reportPrivateUsage]
        yield from (name for name in action.option_strings if name.startswith("--"))
        if isinstance(action, argparse._SubParsersAction):  # pyright: ignore[reportPrivateUsage]
            for name, inner in action.choices.items():
                yield name
                yield from _words(inner)
