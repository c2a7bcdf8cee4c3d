"""Read the keys of records with which other trainers mark what is trained.

wlb trains an assistant's message as a whole or not at all, and each record once. wlb obeys a key
that says whether a whole message is trained. A key that says anything else, such as a weight of 0.5
or a mask of tokens, raises a UserError. So no token is trained that the data marks as not trained.
A key whose value is null counts as absent.
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

    trained: int = 1  # the value that means "trained"
    # Whether trainers that read this key can also train messages of other roles, such as users.
    any_role: bool = False


# The comments name the trainers that read a key.
MESSAGE_MARKS = {
    "weight": MessageMark(),  # OpenAI, Mistral, Fireworks
    "loss": MessageMark(),  # ms-swift
    "loss_scale": MessageMark(),  # ms-swift, where it may also be a factor such as 0.5
    "loss_weight": MessageMark(),  # LLaMA-Factory v1, where it may also be a factor
    "step_loss_mask": MessageMark(),  # slime
    "train": MessageMark(any_role=True),  # axolotl: message_field_training in its documentation
    "training": MessageMark(any_role=True),  # axolotl: its internal name for the same
    "trainable": MessageMark(any_role=True),  # tinker-cookbook
    "loss_mask": MessageMark(any_role=True),
    "masked": MessageMark(trained=0, any_role=True),  # torchtune
}
"""Keys of a message that wlb obeys. A part of a content must not mark itself as not trained."""

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
# An unknown key is refused if a word of its name begins with one of these, as in train_detail of
# axolotl.
_OF_TRAINING = ("train", "untrain", "mask", "unmask", "loss", "weight")
# An unknown key is also refused if a word of its name begins with one of these and its value is not
# text. With text it is accepted, because a key such as learning_goal may contain ordinary text.
_OF_LEARNING = ("ignore", "learn", "supervis")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordMark:
    """A key of a record with which other trainers change how the record is trained."""

    # Values with which other trainers do what wlb does anyway. Records with other values are
    # refused. None means that only the value 0 is refused: many data sets use the key for something
    # else, so other values say nothing about training.
    harmless: tuple[int, ...] | None
    remedy: str  # end of the error message: why the value is refused, and what to do


_ASKED = RecordMark(
    harmless=(0,), remedy="but wlb trains only messages of assistants; remove the key"
)
_TOKENS = RecordMark(
    harmless=(),
    remedy="but wlb cannot leave out single tokens of a message; remove the key, and write "
    '"train": false into messages that should not be trained',
)
_FACTOR = RecordMark(
    harmless=(1,),
    remedy="but wlb trains every record with weight 1; leave out records of weight 0, put "
    "records of other weights into separate stores (data.blend), or remove the key",
)
_WHOLE = RecordMark(
    harmless=None,
    remedy="but wlb cannot leave out a record; remove the record from the data, or remove the key",
)

# The comments name the trainers that read a key.
RECORD_MARKS = {
    "train_on_input": _ASKED,  # torchtune
    "train_on_inputs": _ASKED,  # axolotl
    "train_on_prompt": _ASKED,  # LLaMA-Factory
    "mask_history": RecordMark(  # LLaMA-Factory
        harmless=(0,),
        remedy="but wlb cannot do this for a single record; use --turns last to train only the "
        "last reply of every conversation, and remove the key",
    ),
    "mask": RecordMark(  # NeMo: the role whose messages are not trained
        harmless=(), remedy="but wlb trains only messages of assistants; remove the key"
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
"""Keys of a record that are refused unless their value is harmless."""


def check_record(record: Mapping[str, Any], *, besides: str = "") -> None:
    """Raise UserError if keys of a record ask for training that wlb does not support.

    Args:
        record: The record. The case of its keys does not matter.
        besides: Key of the text, if the record is plain text; "" for any other record. In a record
            of plain text, values that are text or objects are not checked. For example, a table
            of products may have a column "weight" with "5 kg".
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
            raise UserError(f"the record has {key} = {_short(value)}, {mark.remedy}")


def is_trained(message: Mapping[str, Any], name: str, *, is_assistant: bool) -> bool:
    """Return whether a message may be trained, according to those of its keys in `MESSAGE_MARKS`.

    These are keys such as "train" and "weight", whose value 0 or 1 says whether other trainers
    train the message. A message without such keys may be trained.

    Args:
        message: The message in the record.
        name: Name of the message for error messages, such as "message 2".
        is_assistant: Whether an assistant wrote the message.

    Raises:
        UserError: The value of such a key is not 0 or 1, two keys contradict each other, or a key
            asks for training a message that is not an assistant's (only keys with `any_role`, with
            which other trainers train messages of any role).
    """
    found: dict[str, bool] = {}
    for key, value in message.items():
        if value is None or (mark := MESSAGE_MARKS.get(key)) is None:
            continue
        if not isinstance(value, int | float) or value not in (0, 1):
            raise UserError(
                f"{name} has {key} = {_short(value)}, but wlb trains a whole message or nothing "
                f"of it; use 0 or 1 (false or true)"
            )
        found[key] = value == mark.trained
        if found[key] and mark.any_role and not is_assistant:
            raise UserError(
                f"{name} has {key} = {_short(value)}, but wlb trains only messages of "
                f"assistants; remove the key"
            )
    if len(set(found.values())) > 1:
        given = " and ".join(f"{key} = {_short(message[key])}" for key in found)
        raise UserError(
            f"{name} has {given}, which contradict each other; keep only one of these keys"
        )
    return all(found.values())


def unread_keys(
    data: Mapping[str, Any], name: str, *, read: Collection[str], is_part: bool = False
) -> Iterator[str]:
    """Yield the keys of a message, or of a part of its content, that have a value but are not read.

    Args:
        data: The message or the part.
        name: Name of the message or part for error messages.
        read: Keys that wlb reads.
        is_part: Whether `data` is a part of a message's content.

    Raises:
        UserError: A part of the content is marked as not trained, which is impossible because wlb
            trains a message as a whole; or the name of an unknown key suggests that the key decides
            what is trained.
    """
    for key, value in data.items():
        # A null value counts as absent. Keys that mark a message as trained are read by
        # `is_trained`.
        if value is None or key in read or (key in MESSAGE_MARKS and not is_part):
            continue
        # Ignore empty values, such as an empty list of spans in a column of a table.
        if value in ("", [], {}):
            continue
        if is_part and key in MESSAGE_MARKS:
            if value not in (0, 1) or value != MESSAGE_MARKS[key].trained:
                raise UserError(
                    f"{name} has {key} = {_short(value)}, but wlb trains a whole message or "
                    f"nothing of it; mark the message instead of a part, or split the message"
                )
        elif _may_be_about_training(key, value):
            raise UserError(
                f"{name} has {key} = {_short(value)}, an unknown key that, by its name, may be a "
                f'loss mask or weight; remove it, and write "train": false into messages that '
                f"should not be trained"
            )
        else:
            yield shortened(key, 60)


def _may_be_about_training(key: str, value: object) -> bool:
    beginnings = _OF_TRAINING if isinstance(value, str) else (*_OF_TRAINING, *_OF_LEARNING)
    return any(word.lower().startswith(beginnings) for word in _WORD.findall(key))


def _short(value: object) -> str:
    return shortened(repr(value), 60)
