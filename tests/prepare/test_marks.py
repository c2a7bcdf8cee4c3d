"""Tests which tokens are trained of literal records with marks of other trainers."""

import pytest

from tests.prepare.chat_case import CHATML_TOKENS, byte_tokenizer, trained
from wlb.prepare import BadRecord, ChatEncoder
from wlb.prepare.conversation import conversation_of
from wlb.prepare.encode import TextChoice, byte_vocabulary
from wlb.prepare.load_template import CHATML
from wlb.prepare.marks import RECORD_MARKS

ONE, TWO = "one<|im_end|>", "two<|im_end|>"


def talk(first: dict, second: dict | None = None, **asked) -> dict:
    """Returns a record of two turns; the marks `first` and `second` are of the answers, `asked` of
    the first question.
    """
    return {
        "messages": [
            {"role": "user", "content": "a", **asked},
            {"role": "assistant", "content": "one", **first},
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": "two", **(second or {})},
        ]
    }


def trained_of(record: dict) -> list[str]:
    """Returns the text of each trained span, tokens that end a turn by name."""
    tokenizer = byte_tokenizer(CHATML_TOKENS)
    made = ChatEncoder(tokenizer, CHATML).encode(conversation_of(record))
    return ["".join(span) for span in trained(tokenizer, made)]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (talk({}), [ONE, TWO]),
        # OpenAI, Mistral, Fireworks
        (talk({"weight": 0}), [TWO]),
        (talk({"weight": 1}, {"weight": 0}, weight=1), [ONE]),
        # axolotl, with message_field_training: train, training
        (talk({"train": False}, {"train": True}, train=False), [TWO]),
        (talk({"training": False}), [TWO]),
        (
            {
                "conversations": [
                    {"from": "human", "value": "a", "train": False},
                    {"from": "gpt", "value": "one", "train": True},
                    {"from": "human", "value": "b"},
                    {"from": "gpt", "value": "two", "train": False},
                ]
            },
            [ONE],
        ),
        # ms-swift, whose marks of messages of users have no effect
        (talk({"loss": False}, {"loss": True}, loss=True), [TWO]),
        (talk({"loss_scale": 0.0}, {"loss_scale": 1.0}), [TWO]),
        # LLaMA-Factory v1, whose texts are values
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "value": "a"}],
                        "loss_weight": 0.0,
                    },
                    {
                        "role": "assistant",
                        "content": [{"type": "text", "value": "one"}],
                        "loss_weight": 1.0,
                    },
                ]
            },
            [ONE],
        ),
        (talk({"loss_weight": 0.0}), [TWO]),
        # slime, tinker-cookbook, torchtune
        (talk({"step_loss_mask": 0}), [TWO]),
        (talk({"trainable": False}, trainable=False), [TWO]),
        (talk({"masked": True}, {"masked": False}, masked=True), [TWO]),
        (talk({"loss_mask": 0}, {"loss_mask": 1}, loss_mask=0), [TWO]),
        # Marks that agree, a null, and a mark of all parts
        (talk({"weight": 0, "train": False, "masked": True}), [TWO]),
        (talk({"train": None, "loss_mask": None}), [ONE, TWO]),
        (talk({"content": [{"type": "text", "text": "one", "train": True}]}), [ONE, TWO]),
        # Marks of records that say what is done anyway
        ({**talk({}), "train_on_input": False, "mask_history": False}, [ONE, TWO]),
        ({**talk({}), "weight": 1.0, "train": True, "loss_mask": None}, [ONE, TWO]),
        # Not a mark but a figure that some data sets have
        ({**talk({}), "loss": 2.25, "train": "split a"}, [ONE, TWO]),
    ],
)
def test_marks_are_obeyed(record, expected) -> None:
    assert trained_of(record) == expected


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (talk({"loss_scale": 2.0}), r"message 1 has loss_scale = 2.0, .*; use 0 or 1"),
        (talk({"loss_weight": 0.5}), r"message 1 has loss_weight = 0.5, .*; use 0 or 1"),
        (talk({"train": "false"}), r"message 1 has train = 'false', .*; use 0 or 1"),
        (talk({"loss_mask": [0, 1]}), r"message 1 has loss_mask = \[0, 1\], .*; use 0 or 1"),
        (talk({"weight": float("nan")}), "message 1 has weight = nan, .*; use 0 or 1"),
        (
            talk({"weight": 1, "train": False}),
            "message 1 has weight = 1 and train = False, which contradict each other",
        ),
        (
            talk({}, train=True),
            "message 0 has train = True, but wlb trains only messages of assistants",
        ),
        (
            talk({}, masked=False),
            "message 0 has masked = False, but wlb trains only messages of assistants",
        ),
        (
            talk({"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}),
            r"message 1 has train_detail = \[.*, an unknown key that, by its name, may be",
        ),
        (talk({"noLoss": True}), "message 1 has noLoss = True, an unknown key that"),
        (talk({"is_masked": False}), "message 1 has is_masked = False, an unknown key that"),
        (
            talk({"content": [{"type": "text", "text": "one", "train": False}]}),
            "a part of content of message 1 has train = False, but wlb trains a whole message",
        ),
        (
            talk({"reasoning_content": [{"type": "text", "text": "hm", "weight": 0}]}),
            "a part of reasoning_content of message 1 has weight = 0, but wlb trains a whole",
        ),
        (
            {**talk({}), "train_on_input": True},
            "the record has train_on_input = True, but wlb trains",
        ),
        ({**talk({}), "mask_history": True}, "mask_history = True, .*; use --turns last"),
        (
            {**talk({}), "loss_mask": [0, 0]},
            r"the record has loss_mask = \[0, 0\], but wlb cannot leave out single",
        ),
        (
            {**talk({}), "completion_mask": "0"},
            "the record has completion_mask = '0', but wlb cannot",
        ),
        (
            {**talk({}), "mask": "User"},
            "the record has mask = 'User', but wlb trains only messages",
        ),
        (
            {**talk({}), "weight": 0.5},
            "the record has weight = 0.5, but wlb trains every record with weight 1",
        ),
        (
            {"instruction": "a", "output": "one", "train": False},
            "the record has train = False, .*; remove the record",
        ),
        (
            {"prompt": "a", "completion": "one", "loss": 0},
            "the record has loss = 0, .*; remove the record",
        ),
        (
            {**talk({}), "Train_On_Input": True},
            "the record has Train_On_Input = True, but wlb trains",
        ),
        (talk({"ignore": True}), "message 1 has ignore = True, an unknown key that"),
        (talk({"isLearned": 0}), "message 1 has isLearned = 0, an unknown key that"),
    ],
)
def test_marks_that_cannot_be_obeyed_are_refused_by_name(record, message) -> None:
    with pytest.raises(ValueError, match=message):
        conversation_of(record)


def test_other_keys_are_found_and_not_those_that_are_read_or_say_nothing() -> None:
    answer = {"id": 7, "refusal": None, "annotations": [], "glossary": "x", "thinking": "hm"}
    answer |= {"train_detail": [], "learning_goal": "to read"}
    call = {"function": {"name": "f", "arguments": {}}}
    record = {
        "messages": [
            {"role": "user", "content": "a", "name": "Ann", "tool_call_id": ""},
            {"role": "assistant", "content": None, "tool_calls": [call], "weight": 0},
            {"role": "tool", "content": "1", "name": "f", "tool_call_id": "c", "label": False},
            {"role": "assistant", "content": [{"type": "text", "text": "b", "cache": 1}], **answer},
        ]
    }
    unread = [message.unread for message in conversation_of(record).messages]
    assert unread == [("name",), (), ("label",), ("id", "glossary", "learning_goal", "cache")]
    turn = {"from": "gpt", "value": "b", "content": "c", "role": None}
    made = conversation_of({"conversations": [{"from": "human", "value": "a"}, turn]})
    assert made.messages[1].unread == ("content",)
    long = talk({"k" * 1000: 1})
    assert [len(key) for key in conversation_of(long).messages[1].unread] == [60]


def test_a_record_of_text_has_no_marks() -> None:
    encoder = TextChoice().open("", byte_vocabulary())
    kept = {"loss": 2.25, "train_on_input": False, "mask": None, "weight": "5 kg"}
    (made,) = encoder.encode({"text": "ab", **kept})
    assert made.tokens.tolist() == [97, 98, 257]
    with pytest.raises(BadRecord, match=r"the record has loss_mask = \[0, 1\]") as refused:
        encoder.encode({"text": "ab", "loss_mask": [0, 1]})
    assert refused.value.reason == "not_text"
    masked = TextChoice(text_key="mask").open("", byte_vocabulary())
    assert masked.encode({"mask": "a"})[0].tokens.tolist() == [97, 257]


def test_columns_of_marks_are_read() -> None:
    names = ["text", "id", "loss_mask", "weight"]
    assert TextChoice().columns(names) == ("text", "loss_mask", "weight")
    assert TextChoice(text_key="weight").columns(names) == ("weight", "loss_mask")
    assert set(RECORD_MARKS) > {"train_on_input", "train_on_prompt", "mask_history", "loss_mask"}
