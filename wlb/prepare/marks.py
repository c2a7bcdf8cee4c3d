"""Keys by which other trainers mark what is trained: their meaning, or the reason they are refused.

wlb trains an assistant's message as a whole or not at all, and each record once. A mark that says
so is obeyed; one that says anything else is a UserError with its key, value and remedy, so that no
label is trained that was marked as not trained. Null is an absent key.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from wlb.plan import UserError
from wlb.plan.errors import shortened


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageMark:
    """A key of a message whose value, 0 or 1, says whether the message is trained."""

    trained: int = 1  # the value of a message that is trained
    any_role: bool = False  # whether its trainers train messages of users by it too


MESSAGE_MARKS = {
    "weight": MessageMark(),  # OpenAI, Mistral, Fireworks
    "loss": MessageMark(),  # ms-swift
    "loss_scale": MessageMark(),  # ms-swift, where it may be a factor as well
    "loss_weight": MessageMark(),  # LLaMA-Factory v1, likewise
    "step_loss_mask": MessageMark(),  # slime
    "train": MessageMark(any_role=True),  # axolotl: message_field_training in its documentation
    "training": MessageMark(any_role=True),  # axolotl: its own name for the same
    "trainable": MessageMark(any_role=True),  # tinker-cookbook
    "loss_mask": MessageMark(any_role=True),
    "masked": MessageMark(trained=0, any_role=True),  # torchtune
}
"""What is obeyed in a message. Its parts and its other keys can only be refused: see
`is_trained`."""

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_OF_TRAINING = ("train", "untrain", "mask", "unmask", "loss", "weight")
"""Beginnings of words of a key's name, as in train_detail (axolotl's spans of characters)."""
_OF_LEARNING = ("ignore", "learn", "supervis")
"""The same, where the value is not a text: `learning_goal` may well be one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordMark:
    """A key of a record. harmless: values by which a trainer would do what wlb does anyway; None
    for all but 0, as for a key that many data sets have for something else.
    """

    harmless: tuple[int, ...] | None
    remedy: str


_ASKED = RecordMark(
    harmless=(0,), remedy="wlb trains what assistants say, not what they are asked: remove the key"
)
_TOKENS = RecordMark(
    harmless=(),
    remedy="wlb takes no mask of tokens: mark whole messages with train = false, or remove the key",
)
_FACTOR = RecordMark(
    harmless=(1,),
    remedy="wlb trains every record alike: leave out records of weight 0, put those of other "
    "weights into stores of their own (data.blend), or remove the key",
)
_WHOLE = RecordMark(harmless=None, remedy="leave out the record, or remove the key")

RECORD_MARKS = {
    "train_on_input": _ASKED,  # torchtune
    "train_on_inputs": _ASKED,  # axolotl
    "train_on_prompt": _ASKED,  # LLaMA-Factory
    "mask_history": RecordMark(  # LLaMA-Factory
        harmless=(0,), remedy="give --turns last for all records, and remove the key"
    ),
    "mask": RecordMark(  # NeMo: the role whose messages are not trained
        harmless=(), remedy="wlb trains what assistants say and nothing else: remove the key"
    ),
    "loss_mask": _TOKENS,  # slime, verl
    "response_loss_mask": _TOKENS,  # ms-swift
    "response_mask": _TOKENS,  # verl
    "completion_mask": _TOKENS,  # TRL
    "assistant_masks": _TOKENS,  # TRL, transformers
    "mask_ranges": _TOKENS,
    "weight": _FACTOR,  # Fireworks
    "sample_weight": _FACTOR,
    "loss_weight": _FACTOR,
    "loss_scale": _FACTOR,
    "train": _WHOLE,
    "training": _WHOLE,
    "trainable": _WHOLE,
    "loss": _WHOLE,
}


def check_record(record: Mapping[str, Any], *, besides: str = "") -> None:
    """UserError for a record marked otherwise than wlb trains it.

    Args:
        record: Upper and lower case of its keys are the same.
        besides: The key of the text, in a record of plain text. Texts and objects under other keys
            say nothing there: a table of goods may have the column "weight" with "5 kg".
    """
    for key, value in record.items():
        mark = RECORD_MARKS.get(key.lower())
        if mark is None or value is None or key == besides:
            continue
        if besides and isinstance(value, str | Mapping):
            continue
        number = value if isinstance(value, int | float) else None
        is_harmless = number != 0 if mark.harmless is None else number in mark.harmless
        if not is_harmless:
            raise UserError(f"the record has {key} = {_short(value)}; {mark.remedy}")


def is_trained(message: Mapping[str, Any], name: str, *, is_assistant: bool) -> bool:
    """Whether a message may be trained; UserError with its `name` for marks that say anything else.

    Those are a factor, a mark of a part, marks that contradict each other, and a message of another
    than an assistant that is to be trained.
    """
    found: dict[str, bool] = {}
    for key, value in message.items():
        if value is None or (mark := MESSAGE_MARKS.get(key)) is None:
            continue
        if not isinstance(value, int | float) or value not in (0, 1):
            raise UserError(
                f"{name} has {key} = {_short(value)}; it must be 0 or 1 (false or true), as wlb "
                f"trains a message or does not"
            )
        found[key] = value == mark.trained
        if found[key] and mark.any_role and not is_assistant:
            raise UserError(
                f"{name} has {key} = {_short(value)} and is not an assistant's; wlb trains what "
                f"assistants say and nothing else: remove the key"
            )
    if len(set(found.values())) > 1:
        given = " and ".join(f"{key} = {_short(message[key])}" for key in found)
        raise UserError(f"{name} has {given}, which contradict each other; keep one of them")
    return all(found.values())


def unread_keys(
    data: Mapping[str, Any], name: str, *, read: Collection[str], is_part: bool = False
) -> Iterator[str]:
    """The keys of a message, or of a part of its content, that say something and are not read; the
    middle of a very long one is left out.

    UserError with `name` for a part that is marked as not trained, and for a key that is not known
    and whose name speaks of training.
    """
    for key, value in data.items():
        # An empty list of spans, such as a table's column has, says nothing.
        if value is None or key in read or (key in MESSAGE_MARKS and not is_part):
            continue
        if value in ("", [], {}):
            continue
        if is_part and key in MESSAGE_MARKS:
            if value not in (0, 1) or value != MESSAGE_MARKS[key].trained:
                raise UserError(
                    f"{name} has {key} = {_short(value)}; wlb trains a message as a whole: mark "
                    f"the message, or split it"
                )
        elif _speaks_of_training(key, value):
            raise UserError(
                f"{name} has {key} = {_short(value)}, a key that wlb does not know and that may "
                f"say what is trained; mark whole messages with train = false, or remove the key"
            )
        else:
            yield shortened(key, 60)


def _speaks_of_training(key: str, value: object) -> bool:
    beginnings = _OF_TRAINING if isinstance(value, str) else (*_OF_TRAINING, *_OF_LEARNING)
    return any(word.lower().startswith(beginnings) for word in _WORD.findall(key))


def _short(value: object) -> str:
    return shortened(repr(value), 60)
