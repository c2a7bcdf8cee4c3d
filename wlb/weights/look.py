"""Load a trained model into one process to look at it: `wlb.weights.load("runs/demo")`.

It gives the logits of tokens, and continues a text greedily with a KV cache. A model with linear
layers has no cache here and recomputes the whole text for each token. For more than a look, export
the model (`wlb export`) and serve it with transformers or vLLM.
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
"""Attention kernel: output from queries, keys, values and segments."""


@dataclass(slots=True)
class _CachedAttention:
    """Attention with a KV cache: new rows attend to all rows so far.

    It implements `wlb.model.Attend`. The layers call it in order, so it counts them.
    """

    attention: _Attention
    model: ModelSpec
    # Keys and values of each attention layer.
    cache: list[tuple[Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor]])
    layer: int = 0  # the attention layer whose turn it is

    @property
    def _num_attention_layers(self) -> int:
        """Return the number of layers with keys; linear layers have none."""
        return self.model.num_layers - self.model.num_linear_layers

    @property
    def num_rows(self) -> int:
        """Return the number of rows in the cache."""
        return self.cache[0][0].shape[0] if self.cache else 0

    def begin(self, k_TGD: Tensor, v_TGD: Tensor) -> tuple[Tensor, Tensor]:
        """Add a layer's new keys and values to the cache, and return all of them."""
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
        """Return the output of the new queries over all keys of the layer."""
        k_SGD, v_SGD = begun
        rows = [0, q_THD.shape[0]], [0, k_SGD.shape[0]]
        # `begin` has already counted this layer.
        slides = self.model.slides((self.layer - 1) % self._num_attention_layers)
        scores = Scores.of(self.model, slides=slides)
        segments = Segments.from_offsets(*rows, device=q_THD.device, scores=scores)
        return self.attention(q_THD, k_SGD, v_SGD, segments), None

    def add(self, x_TC: Tensor, y_TC: Tensor, attended: None) -> Tensor:
        """Add the layer's output to the residual stream."""
        return x_TC + y_TC


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """The model of a checkpoint, in one process."""

    folder: Path  # folder of the checkpoint
    module: Llama = field(repr=False)
    tokenizer: FoundTokenizer = field(repr=False)
    stops: tuple[int, ...]  # ids of the tokens that end generation
    attention: str  # name of the attention kernel

    @property
    def chats(self) -> bool:
        """Return whether it was trained on conversations."""
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
        """Return the most likely next tokens, including the one that ends generation.

        Args:
            tokens: Ids of the text so far.
            most: Most tokens to return.
            stops: Ids that end generation in place of the model's; () means none.
        """
        ending = set(self.stops if stops is None else stops)
        cache, ids = self._fresh(), self._checked(tokens)
        made: list[int] = []
        has_cache = not self.module.spec.linear.num_value_heads
        while len(made) < most and not (made and made[-1] in ending):
            new = self._head(self._forward(ids, cache)[-1:]).argmax(-1)
            made.append(int(new))
            # States of linear layers are not cached, so such a model computes the text anew.
            ids, cache = (new, cache) if has_cache else (torch.cat([ids, new]), self._fresh())
        return made

    def encode(self, text: str) -> list[int]:
        """Return the tokens that a continuation of `text` starts from.

        If the model chats, `text` is a user's message. It is written with the chat template, up to
        where the assistant's answer begins. Without a tokenizer this is a UserError.
        """
        if self.chats:
            return self._prompt_of(text)
        return [*self.tokenizer.before, *self.encode_plain(text)]

    def encode_plain(self, text: str) -> list[int]:
        """Return the tokens of a text as it is, without special tokens."""
        if self.tokenizer.is_bytes and self.tokenizer.file is None:
            return byte_ids(text).tolist()
        return load_tokenizer(self._file()).encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, without special tokens."""
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
        """Return the tokens before an assistant's answer to this message, as in training."""
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
        """Return the ids as a tensor, after checking shape and range."""
        device = next(self.module.parameters()).device
        ids = torch.as_tensor(tokens, dtype=torch.int64, device=device)
        size = self.module.spec.vocab_size
        if ids.dim() != 1 or not ids.numel() or int(ids.min()) < 0 or int(ids.max()) >= size:
            raise UserError(
                f"tokens have shape {tuple(ids.shape)} and begin with "
                f"{ids.flatten()[:8].tolist()}, but must be one list of at least one token id in "
                f"[0, {size})"
            )
        return ids

    def _fresh(self) -> _CachedAttention:
        def attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
            return attend(q, k, v, segments, backend=self.attention)

        return _CachedAttention(attention, self.module.spec)

    @torch.no_grad()
    def _forward(self, ids_T: Tensor, cache: _CachedAttention) -> Tensor:
        """Return the hidden states of new tokens, shape [T, C]; extends the cache."""
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
        """Return the logits of hidden states, without the vocabulary's padding."""
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
    """Load a checkpoint of any layout, or the newest one of a run, into one process.

    Args:
        source: The checkpoint or the run's folder.
        dtype: "float32" or "bfloat16". None keeps the saved type (float32 if tensors differ).
        device: Device of the model.
        tokenizer: A tokenizer.json in place of the tokenizer of the run's token store.

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
