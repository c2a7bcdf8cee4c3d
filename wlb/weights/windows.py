"""Read and write in config.json which layers have a sliding window.

A sliding layer is one with a window.

| models | layers with a window |
|---|---|
| Llama | none |
| Mistral, Qwen3-MoE | all |
| Gemma | all except every n-th |
| Qwen2, Qwen3 | as listed in `layer_types`, otherwise layers with index >= `max_window_layers` |

Qwen models have windows only if `use_sliding_window` is true.
"""

from typing import Any, cast

from wlb.plan import UserError
from wlb.plan.read_file import Fields
from wlb.spec import ModelSpec

_FULL, _SLIDING = "full_attention", "sliding_attention"
WINDOW, _FIRST = 4096, 28
"""transformers' defaults for `sliding_window` and `max_window_layers`."""
_PERIODS = {"gemma2": 2, "gemma3_text": 6}
"""By model_type, the n of Gemma models, in which every n-th layer has no sliding window.

The config.json of a Gemma 3 may set another n."""


def flag(keys: Fields, name: str) -> bool:
    """Return the value of a key that must be true or false; a missing key or null means false."""
    value = keys.values.get(name)
    if value not in (None, False, True):
        raise keys.error(name, "must be true or false")
    return bool(value)


def read_window(keys: Fields, model_type: str) -> dict[str, Any]:
    """Return the fields of `ModelSpec` that describe a config.json's sliding windows.

    Raises:
        UserError: `ModelSpec` cannot describe which layers have a window.
    """
    window, num_layers = _window(keys, model_type), keys.whole("num_hidden_layers", at_most=10_000)
    types = _layer_types(keys, num_layers)
    if model_type == "qwen3_moe" and window:
        _check_all_slide(keys)
    if model_type in ("llama", "mistral", "qwen3_moe"):
        # transformers ignores layer_types in these families, so refuse a list of other layer types.
        slide = [window > 0] * num_layers
        if types is not None and types != slide:
            raise keys.error("layer_types", f"contradicts a window of {window or 'no'} tokens")
    elif types is None and model_type in _PERIODS:
        every = keys.whole("sliding_window_pattern", _PERIODS[model_type])
        slide = [(i + 1) % every > 0 for i in range(num_layers)]
    elif types is None:
        first = keys.whole("max_window_layers", _FIRST, at_least=0)
        slide = [window > 0 and i >= first for i in range(num_layers)]
    else:
        slide = types
    if not any(slide):
        return {}
    if not window:
        raise keys.error(
            "layer_types",
            "lists layers with a sliding window, but sliding_window is not in use; correct one of "
            "the two",
        )
    return {"sliding_window": window, **_pattern(keys, slide)}


def _check_all_slide(keys: Fields) -> None:
    """Raise UserError for a Qwen3-MoE with max_window_layers above 0.

    max_window_layers is how many layers at the beginning have no window. transformers 5 ignores the
    key, but some versions of transformers 4 do not, so it is not certain what the model computes.
    """
    if keys.whole("max_window_layers", 0, at_least=0):
        raise keys.error(
            "max_window_layers",
            "takes the sliding window from the first layers in transformers 4, but not in "
            "transformers 5; set max_window_layers to 0, or use_sliding_window to false",
        )


def _window(keys: Fields, model_type: str) -> int:
    """Return the window of sliding layers in tokens; 0 if the model has no sliding layers."""
    values = keys.values
    is_used = flag(keys, "use_sliding_window")
    if model_type in _PERIODS and values.get("sliding_window", WINDOW) is None:
        raise keys.error(
            "sliding_window",
            f"must be a number of tokens, because a {model_type} has layers with a sliding window",
        )
    if model_type == "mistral" or model_type in _PERIODS:
        value = values.get("sliding_window", WINDOW)
        return 0 if value is None else keys.whole("sliding_window", WINDOW)
    if model_type.startswith("qwen") and is_used:
        is_null = "sliding_window" in values and values["sliding_window"] is None
        return 0 if is_null else keys.whole("sliding_window", WINDOW)
    if is_used:
        raise keys.error(
            "use_sliding_window", f"must be false, because a {model_type} has no sliding windows"
        )
    if values.get("sliding_window") is not None and values.get("use_sliding_window") is not False:
        raise keys.error(
            "sliding_window",
            "has a value, but use_sliding_window does not say whether the window is used; if not, "
            "set sliding_window to null",
        )
    return 0


def _layer_types(keys: Fields, num_layers: int) -> list[bool] | None:
    """Return for each layer whether it has a window; None if layer_types is missing or empty."""
    value: Any = keys.values.get("layer_types")
    if value is None or value == []:
        return None
    named = cast("list[Any]", value) if isinstance(value, list) else []
    if not named or any(one not in (_FULL, _SLIDING) for one in named):
        raise keys.error("layer_types", f"must contain only {_FULL} and {_SLIDING}")
    if len(named) != num_layers:
        raise keys.error("layer_types", f"must have {num_layers} entries, one for each layer")
    return [one == _SLIDING for one in named]


def _pattern(keys: Fields, slide: list[bool]) -> dict[str, int]:
    """Return the `ModelSpec` fields that say which layers have no window: full_every, full_first.

    Args:
        keys: Keys of config.json, for the error message.
        slide: For each layer whether it has a sliding window. At least one layer must have one.

    Raises:
        UserError: `ModelSpec` cannot describe this pattern.
    """
    leading = slide.index(True)
    full = next((i for i in range(leading, len(slide)) if not slide[i]), None)
    periods = [0] if full is None else [n for n in range(2, full + 2) if (full + 1) % n == 0]
    # Try all patterns that `ModelSpec` can describe.
    for every in periods:
        for first in (0, leading):
            made = ModelSpec(
                num_layers=len(slide), sliding_window=1, full_every=every, full_first=first
            )
            if [made.slides(i) for i in range(len(slide))] == slide:
                return {"full_every": every, "full_first": first}
    raise keys.error(
        "layer_types",
        "must have full attention either in every n-th layer or in the first layers, because wlb "
        "supports no other pattern",
    )


def window_json(spec: ModelSpec, model_type: str) -> dict[str, Any]:
    """Return the keys of config.json that describe a model's sliding windows.

    Args:
        spec: The model.
        model_type: The model_type of the config.json.

    Raises:
        UserError: This model_type cannot have these windows.
    """
    window = spec.sliding_window or None
    if model_type == "mistral":
        if spec.full_every or spec.full_first:
            raise UserError(
                f"model.full_every = {spec.full_every} and model.full_first = {spec.full_first} "
                "cannot be exported, because Mistral, the closest model type of Hugging Face, "
                "has windows in all layers; train with both set to 0"
            )
        return {"sliding_window": window}
    if model_type == "llama":
        return {}
    types = [_SLIDING if spec.slides(i) else _FULL for i in range(spec.num_layers)]
    if model_type in _PERIODS:
        # Older versions of transformers read sliding_window_pattern instead of layer_types.
        period = {"sliding_window_pattern": spec.full_every} if spec.full_every else {}
        return {"sliding_window": window, "layer_types": types} | period
    # Write both keys, because transformers reads layer_types, and others read max_window_layers.
    config = {"use_sliding_window": window is not None, "sliding_window": window}
    first = types.index(_SLIDING) if window else spec.num_layers
    return config | {"max_window_layers": first, "layer_types": types}
