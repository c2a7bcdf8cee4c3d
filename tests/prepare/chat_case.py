"""Provides a tokenizer with readable ids: bytes are their own ids, and special tokens follow."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from wlb.prepare.chat import TooLong, fit
from wlb.prepare.conversation import conversation_of
from wlb.prepare.load_template import CHATML, LLAMA3

CHATML_TOKENS = list(CHATML.special_tokens)
LLAMA3_TOKENS = list(LLAMA3.special_tokens)


def byte_names() -> list[str]:
    """Returns the character that stands for each byte in byte-level BPE."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    names = {b: chr(b) for b in printable}
    names |= {b: chr(256 + i) for i, b in enumerate(others)}
    return [names[b] for b in range(256)]


def byte_tokenizer(special: list[str], *, ordinary: tuple[str, ...] = ()) -> Tokenizer:
    """Returns a tokenizer of 256 bytes, `special` tokens from id 256 on, and `ordinary` tokens.

    Ordinary tokens are added tokens that are not special.
    """
    vocab = {name: b for b, name in enumerate(byte_names())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in special])
    tokenizer.add_tokens([AddedToken(s, special=False, normalized=False) for s in ordinary])
    return tokenizer


def shown(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    """Decodes tokens into a list of texts, with each special token as a separate entry."""
    out: list[str] = []
    text = bytearray()
    for token in [*tokens, None]:
        if token is not None and token < 256:
            text.append(token)
            continue
        if text:
            out.append(text.decode())
            text = bytearray()
        if token is not None:
            out.append(tokenizer.id_to_token(token))
    return out


def trained(tokenizer: Tokenizer, made) -> list[list[str]]:
    """Decodes each span of tokens that is trained."""
    return [shown(tokenizer, made.tokens[a:b].tolist()) for a, b in made.trained.tolist()]


def documents_of(encoder, record, *, limit=None, too_long=TooLong.SPLIT):
    """Returns the documents of one record that have at least one trained token."""
    made = fit(encoder.encode(conversation_of(record)), limit, too_long)
    return [part for part in made if part.num_targets]
