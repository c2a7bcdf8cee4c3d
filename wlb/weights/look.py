"""Load a trained model into one process to try it out: `wlb.weights.load("runs/demo")`.

The loaded model computes logits, and continues a text with the most likely tokens, using a KV
cache. With linear-attention layers there is no cache, and each token recomputes the whole text.
For serious use, export the model (`wlb export`) and run it in transformers or vLLM.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from wlb.kernels import Scores, Segments, attend, select_backend
from wlb.model import LayerRows, LinearRows, Llama, Rows, capped, inverse_frequencies, rope_tables
from wlb.model.delta_rule import SpanLayout
from wlb.plan import UserError
from wlb.prepare import ChatEncoder, ChatTemplate, load_tokenizer
from wlb.prepare.conversation import Conversation, Message, Role
from wlb.prepare.encode import byte_ids
from wlb.spec import AttentionBackend, Dtype, ModelSpec
from wlb.train.checkpoint import folder as checkpoint
from wlb.weights.hub_export import stops_of, tensor_dtype
from wlb.weights.saved import open_saved
from wlb.weights.tokenizer import FoundTokenizer, check_tokenizer, tokenizer_of_run

_Attention = Callable[[Tensor, Tensor, Tensor, Segments], Tensor]
"""Attention function: returns the output for queries, keys, values and their segments."""


@dataclass(slots=True)
class _CachedAttention:
    """Attention with a KV cache: new tokens attend to all tokens so far.

    It implements the protocol `wlb.model.Attend`. The model calls it for one layer after the other,
    so a counter says which layer's cache to use.
    """

    attention: _Attention
    model: ModelSpec
    # Keys and values of all tokens so far, for each attention layer.
    cache: list[tuple[Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor]])
    layer: int = 0  # index of the attention layer that calls next

    @property
    def _num_attention_layers(self) -> int:
        """Return the number of layers with keys and values; linear-attention layers have none."""
        return self.model.num_layers - self.model.num_linear_layers

    @property
    def num_rows(self) -> int:
        """Return the number of tokens in the cache."""
        return self.cache[0][0].shape[0] if self.cache else 0

    def begin(self, k_TGD: Tensor, v_TGD: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values to the current layer's cache; return those of all tokens so far.

        Args:
            k_TGD: Keys of the new tokens.
            v_TGD: Values of the new tokens.
        """
        if self.layer == len(self.cache):
            self.cache.append((k_TGD, v_TGD))
        else:
            k, v = self.cache[self.layer]
            self.cache[self.layer] = (torch.cat([k, k_TGD]), torch.cat([v, v_TGD]))
        found = self.cache[self.layer]
        self.layer = (self.layer + 1) % self._num_attention_layers
        return found

    def attend(
        self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, begun: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, None]:
        """Return the attention output of the new tokens over all tokens so far.

        Args:
            q_THD: Queries of the new tokens.
            k_TGD: Not used, because `begun` includes it.
            v_TGD: Not used, because `begun` includes it.
            begun: Keys and values of all tokens so far, from `begin`.
        """
        k_SGD, v_SGD = begun
        rows = [0, q_THD.shape[0]], [0, k_SGD.shape[0]]
        # Subtract 1, because `begin` has already set `layer` to the next layer.
        slides = self.model.slides((self.layer - 1) % self._num_attention_layers)
        scores = Scores.of(self.model, slides=slides)
        segments = Segments.from_offsets(*rows, device=q_THD.device, scores=scores)
        return self.attention(q_THD, k_SGD, v_SGD, segments), None

    def add(self, x_TC: Tensor, y_TC: Tensor, attended: None) -> Tensor:
        """Return x_TC + y_TC. `attended` is always None here, and is not used."""
        return x_TC + y_TC


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that was loaded from a checkpoint into one process, with its tokenizer."""

    folder: Path  # folder of the checkpoint
    module: Llama = field(repr=False)  # the model in evaluation mode
    tokenizer: FoundTokenizer = field(repr=False)  # the tokenizer, or why none was found
    stops: tuple[int, ...]  # ids of the tokens that end generation
    attention: str  # name of the attention kernel

    @property
    def chats(self) -> bool:
        """Return whether the model was trained on conversations."""
        return self.tokenizer.chat is not None

    def logits(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Return the logits of one document, float32 [T, vocab_size].

        Args:
            tokens: Ids of the document's tokens, shape [T] with T >= 1.

        Raises:
            UserError: An id is outside of the vocabulary.
        """
        return self._head(self._forward(self._checked(tokens), self._fresh()))

    def greedy(
        self, tokens: Sequence[int] | Tensor, *, most: int = 64, stops: Iterable[int] | None = None
    ) -> list[int]:
        """Continue a text with the most likely token each time; return the new tokens.

        If a token of `stops` ends generation, it is the last of the new tokens.

        Args:
            tokens: Ids of the text so far.
            most: Largest number of tokens to return.
            stops: Ids of tokens that end generation. None means the model's `stops`; () means that
                only `most` ends generation.
        """
        ending = set(self.stops if stops is None else stops)
        cache, ids = self._fresh(), self._checked(tokens)
        made: list[int] = []
        has_cache = not self.module.spec.linear.num_value_heads
        while len(made) < most and not (made and made[-1] in ending):
            new = self._head(self._forward(ids, cache)[-1:]).argmax(-1)
            made.append(int(new))
            # Without a cache for linear-attention layers, recompute the whole text.
            ids, cache = (new, cache) if has_cache else (torch.cat([ids, new]), self._fresh())
        return made

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt that `greedy` can continue.

        If the model was trained on conversations, `text` is a user's message, and the tokens are
        the conversation in the chat template up to the beginning of the assistant's answer.

        Args:
            text: The text or message.

        Raises:
            UserError: The model has no tokenizer.
        """
        if self.chats:
            return self._prompt_of(text)
        return [*self.tokenizer.before, *self.encode_plain(text)]

    def encode_plain(self, text: str) -> list[int]:
        """Return the tokens of a text without special tokens or chat template."""
        if self.tokenizer.is_bytes and self.tokenizer.file is None:
            return byte_ids(text).tolist()
        return load_tokenizer(self._file()).encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, leaving out special tokens."""
        if self.tokenizer.is_bytes and self.tokenizer.file is None:
            return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")
        return load_tokenizer(self._file()).decode(list(tokens), skip_special_tokens=True)

    def _file(self) -> Path:
        if self.tokenizer.file is None:
            raise UserError(
                f"the model has no tokenizer ({self.tokenizer.why}); give one with load(..., "
                "tokenizer=FILE)"
            )
        return self.tokenizer.file

    def _prompt_of(self, text: str) -> list[int]:
        """Return the tokens of a conversation up to the beginning of the assistant's answer.

        Args:
            text: The user's message.
        """
        chat = self.tokenizer.chat
        assert chat is not None
        template = ChatTemplate(chat.template, name=str(self.folder), variables=chat.variables)
        conversation = (
            Message(role=Role.USER, content=text),
            Message(role=Role.ASSISTANT, content="x"),
        )
        encoder = ChatEncoder(load_tokenizer(self._file()), template)
        made = encoder.encode(Conversation(messages=conversation))
        return list(islice(made.tokens.tolist(), int(made.trained[0, 0])))

    def _checked(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Return token ids as a tensor, after checking that they are 1-D and in the vocabulary."""
        device = next(self.module.parameters()).device
        ids = torch.as_tensor(tokens, dtype=torch.int64, device=device)
        size = self.module.spec.vocab_size
        if ids.dim() != 1 or not ids.numel() or int(ids.min()) < 0 or int(ids.max()) >= size:
            first = [int(token) for token in ids.flatten()[:8]]
            raise UserError(
                f"tokens have shape {tuple(ids.shape)} and begin with {first}, but must be a list "
                f"of at least one token id, each between 0 and {size - 1}"
            )
        return ids

    def _fresh(self) -> _CachedAttention:
        def attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
            return attend(q, k, v, segments, backend=self.attention)

        return _CachedAttention(attention, self.module.spec)

    @torch.no_grad()
    def _forward(self, ids_T: Tensor, cache: _CachedAttention) -> Tensor:
        """Return the final hidden states of new tokens, shape [T, C], and extend the cache."""
        positions = torch.arange(
            cache.num_rows, cache.num_rows + ids_T.shape[0], device=ids_T.device
        )
        spec = self.module.spec

        def of(*, slides: bool) -> LayerRows:
            frequencies = inverse_frequencies(spec, ids_T.device, slides=slides)
            return LayerRows(*rope_tables(positions, frequencies), cache)

        linear = LinearRows(SpanLayout.of([ids_T.shape[0]], ids_T.device), None)
        rows = Rows(**of(slides=False)._asdict(), sliding=of(slides=True), linear=linear)
        return self.module.model(ids_T, rows)

    @torch.no_grad()
    def _head(self, x_TC: Tensor) -> Tensor:
        """Return the logits of final hidden states, without the rows that pad the vocabulary."""
        spec = self.module.spec
        logits_TV = (x_TC @ self.module.head.weight.t())[:, : spec.vocab_size].float()
        return capped(logits_TV, spec.logit_softcap)


def load(
    source: str | Path,
    *,
    dtype: Dtype | str | None = None,
    device: str = "cpu",
    tokenizer: str | Path | None = None,
) -> LoadedModel:
    """Load the model of a checkpoint into one process, however many ranks saved it.

    Args:
        source: A checkpoint, or the folder of a run, whose newest checkpoint is loaded.
        dtype: "float32" or "bfloat16". None keeps the saved dtype (float32 if tensors differ).
        device: Device of the model.
        tokenizer: A tokenizer.json. None means the tokenizer that the run's token store names.

    Raises:
        UserError: The checkpoint cannot be loaded.
    """
    saved = open_saved(checkpoint.resolve(Path(source), str(source)))
    taken = tensor_dtype(saved, None if dtype is None else Dtype(dtype))
    found = tokenizer_of_run(saved.run)
    found = found if tokenizer is None else found.with_file(Path(tokenizer))
    if found.file is not None:
        check_tokenizer(found.file, saved.spec.vocab_size)
    with torch.device("meta"):
        module = Llama(saved.spec).to(taken)
    module = module.to_empty(device=device).requires_grad_(False)
    for name, value in module.state_dict().items():
        read = saved.read([name], taken)[name]
        value[: read.shape[0]] = read
        value[read.shape[0] :] = 0.0
    backend = select_backend(
        AttentionBackend.AUTO,
        device=torch.device(device),
        dtype=taken,
        head_size=saved.spec.head_size,
        scores=Scores.of(saved.spec, slides=saved.spec.num_sliding_layers > 0),
    )
    return LoadedModel(
        folder=saved.folder,
        module=module.eval(),
        tokenizer=found,
        stops=stops_of(saved.run, found),
        attention=backend,
    )
