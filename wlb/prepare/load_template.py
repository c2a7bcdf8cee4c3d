"""Load chat templates: the built-in ones by name, and those of models from files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from wlb.plan import UserError
from wlb.plan.read_file import malformed, read_object, read_text
from wlb.prepare.chat_template import ChatTemplate
from wlb.prepare.encode import token_text

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"

CHATML = ChatTemplate(
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{{ m['content'] }}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    name="chatml",
    variables={},
    special_tokens=("<|im_start|>", "<|im_end|>"),
)
"""ChatML. It adds no system message, and the newline after a message is not trained."""

LLAMA3 = ChatTemplate(
    "{{ '<|begin_of_text|>' }}{% for m in messages %}{{ '<|start_header_id|>' + "
    "('ipython' if m['role'] == 'tool' else m['role']) + '<|end_header_id|>\\n\\n' }}"
    "{{ m['content'] | trim }}{{ '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    name="llama3",
    variables={},
    special_tokens=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
)
"""The template of Llama 3.0. (The template of Llama 3.1 adds a date to the system message.)"""

BUILT_IN = {template.name: template for template in (CHATML, LLAMA3)}


def load_template(name: str | Path, variables: Mapping[str, Any] | None = None) -> ChatTemplate:
    """Load a chat template by name or from a file.

    Special tokens such as bos_token are read from the tokenizer_config.json beside the template.

    Args:
        name: "chatml", "llama3", the folder of a model (with chat_template.jinja, or with a
            tokenizer_config.json that has a chat_template), a tokenizer_config.json, or a file with
            a Jinja template.
        variables: Values of other variables of the template, such as date_string. None = no values.

    Raises:
        UserError: There is no such template, or it cannot be used.
    """
    given = dict(variables or {})
    if str(name) in BUILT_IN:
        if given:
            raise UserError(
                f"the built-in chat template {name} takes no variables; leave out the variables "
                f"{sorted(given)}"
            )
        return BUILT_IN[str(name)]
    path, config_path = template_files(name)
    config = read_object(config_path, wide=True) if config_path.is_file() else {}
    remedy = "give the chat template of a model"
    with malformed(path, remedy):
        is_config = path.suffix == ".json"
        source = _source_of(config, path) if is_config else read_text(path, remedy=remedy)
    tokens = {key: token_text(value) for key, value in config.items() if key.endswith("_token")}
    known = {key: value for key, value in tokens.items() if value is not None}
    template = ChatTemplate(source, name=str(name), variables={**known, **given})
    template.check_source()
    return template


def template_files(name: str | Path) -> tuple[Path, Path]:
    """Return the path of a template's file, and the path of the tokenizer_config.json beside it.

    There may be no file at the second path.

    Args:
        name: The folder of a model, a tokenizer_config.json, or a file with a Jinja template.

    Raises:
        UserError: There is no template.
    """
    path = Path(name)
    if path.is_dir():
        path = path / TEMPLATE_FILE if (path / TEMPLATE_FILE).is_file() else path / CONFIG_FILE
    if not path.is_file():
        raise UserError(
            f"there is no chat template {name}; give one of {', '.join(BUILT_IN)}, a model's "
            f"folder, a {CONFIG_FILE}, or a file with a Jinja template"
        )
    return path, path if path.suffix == ".json" else path.with_name(CONFIG_FILE)


def _source_of(config: dict[str, Any], path: Path) -> str:
    """Return the template in a tokenizer_config.json. If it has several, return the default one.

    Args:
        config: Content of the file.
        path: The file, for error messages.
    """
    found: Any = config.get("chat_template")
    if isinstance(found, list):
        named = {t["name"]: t["template"] for t in cast(list[dict[str, str]], found)}
        found = named.get("default")
    if not isinstance(found, str):
        raise UserError(
            f"{path} has no chat template: its key chat_template must be a template, or a list "
            "with a template named default; give a file that contains the chat template"
        )
    return found
