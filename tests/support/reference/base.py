# SPDX-License-Identifier: Apache-2.0
"""What the references of all models have in common."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, AutoProcessor

from anchorprune_vllm.selection import KeptTokens
from tests.support.dialects import in_dialect
from tests.support.reference.selection import Tokens, anchor_of, select

_REMEMBERED = 64
EAGER = {"attn_implementation": "eager", "dtype": torch.float32}


class Reference(ABC):
    """A model in transformers. `media` is an image, or a video as vLLM takes it."""

    placeholders: tuple[str, ...] = ("<image>",)
    is_native = False

    def __init__(self, model: Path) -> None:
        self._load(model)
        self._made: dict[tuple[str, int], tuple[Any, Any]] = {}

    def _load(self, model: Path) -> None:
        self.model = self._read_model(model).eval()
        self.processor = AutoProcessor.from_pretrained(model)
        self.tokenizer = self.processor.tokenizer
        self.embed_words = self.model.get_input_embeddings()
        self.language_model, self.lm_head = self._text_parts()

    def _read_model(self, model: Path) -> Any:
        return AutoModelForImageTextToText.from_pretrained(model, **EAGER)

    def _text_parts(self) -> tuple[Any, Any]:
        """The language model without its head, and the head."""
        return self.model.model.language_model, self.model.lm_head

    @abstractmethod
    def unpruned(self, media: Any) -> int:
        """Placeholders of an unpruned prompt."""

    @abstractmethod
    def unit_sizes(self, media: Any) -> list[int]:
        """Candidates of each unit that has any."""

    @abstractmethod
    def tower_size(self, media: Any) -> int:
        """Length of the vision tower's input."""

    @abstractmethod
    def method_signals(self, media: Any) -> tuple[Tensor, Tensor]:
        """For the other methods: keys [N, heads, head size] and object attention [N]."""

    @abstractmethod
    def _tokens(self, media: Any) -> Tokens: ...

    @abstractmethod
    def _relevance(self, tokens: Tokens, question: str) -> np.ndarray: ...

    @abstractmethod
    def embed(self, media: Any) -> Tensor:
        """Candidates as the language model gets them: [N, H]."""

    @torch.inference_mode()
    def kept(self, media: Any, question: str, budget: int) -> list[int]:
        """Indices of the kept candidates, ascending."""
        tokens = self._once(media, self._tokens)
        relevance = self._relevance(tokens, question) if question else None
        return self._select(tokens, relevance, budget)

    def _select(self, tokens: Tokens, relevance: np.ndarray | None, budget: int) -> list[int]:
        return select(tokens, relevance, budget)

    @torch.inference_mode()
    def anchor_size(self, media: Any, question: str, budget: int) -> int:
        """How many of them are the anchor."""
        tokens = self._once(media, self._tokens)
        return len(anchor_of(tokens, self._relevance(tokens, question), budget))

    @torch.inference_mode()
    def answer(
        self,
        prompt: str,
        media: list[Any],
        kept: list[list[int]],
        n: int,
        *,
        start: bool = True,
        native: bool | None = None,
    ) -> list[int]:
        """Greedy answer, up to `n` token ids, when only the `kept` candidates of media are seen.

        `start`: the prompt begins with the tokenizer's start token. `native`: with the positions
        of the unpruned prompt; default: as the plugin does it for this model.
        """
        rows, positions = self.pruned_prompt(prompt, media, kept, n, start=start, native=native)
        return self.greedy(rows, n, positions)

    @torch.inference_mode()
    def scored_answer(
        self, prompt: str, media: list[Any], kept: list[list[int]], n: int
    ) -> list[tuple[int, float]]:
        """The same, each token with the logarithm of its probability."""
        rows, positions = self.pruned_prompt(prompt, media, kept, n)
        return self._scored(rows, n, positions)

    @torch.inference_mode()
    def scores(
        self, prompt: str, media: list[Any], kept: list[list[int]], answer: list[int]
    ) -> Tensor:
        """Logarithms of the probabilities of all tokens at each place of an answer: [n, V]."""
        rows, positions = self.pruned_prompt(prompt, media, kept, len(answer))
        words = self.embed_words(torch.tensor(answer))[None]
        states = self.hidden_states(torch.cat([rows, words], dim=1), positions)
        return self.lm_head(states[-1 - len(answer) : -1]).log_softmax(-1)

    @torch.inference_mode()
    def layer_inputs(self, prompt: str, media: list[Any], kept: list[list[int]]) -> Tensor:
        """What enters each layer of the language model, and what leaves it: [layers + 1, T, H]."""
        rows, positions = self.pruned_prompt(prompt, media, kept, 0)
        seen: list[Tensor] = []
        with ExitStack() as hooks:
            for layer in self.language_model.layers:
                note = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
                hooks.enter_context(note)
            states = self.hidden_states(rows, positions)
        return torch.stack([*seen, states])

    def pruned_prompt(
        self,
        prompt: str,
        media: list[Any],
        kept: list[list[int]],
        n: int,
        *,
        start: bool = True,
        native: bool | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Embeddings [1, T, H], and positions [C, T + n] of them and of the answer."""
        rows = [self._rows_of(item, indices) for item, indices in zip(media, kept, strict=True)]
        embeddings = self.embed_prompt(prompt, rows, start=start)
        if self.is_native if native is None else native:
            return embeddings, self.native_positions(prompt, media, kept, n, start=start)
        return embeddings, _in_line(embeddings, n)

    @torch.inference_mode()
    def answer_with(
        self, prompt: str, media: Any, kept: KeptTokens, n: int, *, native: bool
    ) -> list[int]:
        """The same of one item whose tokens may be merged."""
        positions = None
        if native:
            positions = self.native_positions(prompt, [media], [kept.indices.tolist()], n)
        if kept.weights is None:
            rows = self.embed(media)[kept.indices]
        else:
            rows = self._embed_merged(media, kept.weights.float())
        return self.greedy(self.embed_prompt(prompt, [rows]), n, positions)

    def _embed_merged(self, media: Any, weights: Tensor) -> Tensor:
        """Sums of candidates, by weights [K, N], as the language model gets them: [K, H]."""
        return weights @ self.embed(media)

    def grids(self, media: Any) -> list[tuple[int, int]]:
        """Rows and columns of each unit that has candidates; default: squares."""
        return [(math.isqrt(size), math.isqrt(size)) for size in self.unit_sizes(media)]

    def greedy(self, embeddings: Tensor, n: int, positions: Tensor | None = None) -> list[int]:
        """Up to `n` tokens behind [1, T, H]; default positions: one after the other."""
        if positions is None:
            positions = _in_line(embeddings, n)
        return [token for token, _ in self._scored(embeddings, n, positions)]

    def _scored(self, embeddings: Tensor, n: int, positions: Tensor) -> list[tuple[int, float]]:
        answer: list[tuple[int, float]] = []
        for _ in range(n):
            states = self.hidden_states(embeddings, positions)
            score, token = self.lm_head(states[-1]).log_softmax(-1).max(-1)
            answer.append((int(token), float(score)))
            if token == self.tokenizer.eos_token_id:
                break
            following = self.embed_words(token[None, None])
            embeddings = torch.cat([embeddings, following], dim=1)
        return answer

    def hidden_states(self, embeddings: Tensor, positions: Tensor) -> Tensor:
        """Of the language model's last layer: [T, H], from [1, T, H] and the first T positions."""
        positions = self._position_ids(positions[:, : embeddings.shape[1]])
        return self.language_model(
            inputs_embeds=embeddings, position_ids=positions
        ).last_hidden_state[0]

    def embed_prompt(self, prompt: str, media: list[Tensor], *, start: bool = True) -> Tensor:
        """[1, T, H], from the prompt's words and the rows of each item."""
        rows = []
        ids = iter(self.prompt_ids(prompt, start=start))
        for item in [*media, None]:
            text = []
            for token in ids:
                if token in self.placeholder_ids():
                    break
                text.append(token)
            rows.append(self.embed_words(torch.tensor(text, dtype=torch.long)))
            if item is not None:
                rows.append(item)
        return torch.cat(rows)[None]

    def _once(self, media: Any, make: Callable[[Any], Any]) -> Any:
        """What `make` gives, remembered for a while: towers are slow."""
        key = make.__name__, id(media)
        if key not in self._made:
            if len(self._made) == _REMEMBERED:
                del self._made[next(iter(self._made))]
            self._made[key] = media, make(media)  # the media too: its id is not given to another
        return self._made[key][1]

    def native_positions(
        self, prompt: str, media: list[Any], kept: list[list[int]], n: int, *, start: bool = True
    ) -> Tensor:
        """Positions [C, T + n] of a pruned prompt and its answer: those of the unpruned one."""
        ids: list[int] = []
        stays: list[int] = []
        items = iter(zip(media, kept, strict=True))
        for token in self.prompt_ids(prompt, start=start):
            if token in self.placeholder_ids():
                item, indices = next(items)
                stays += [len(ids) + place for place in self._places_that_stay(item, indices)]
                ids += self._ids_of(item, token)
            else:
                stays.append(len(ids))
                ids.append(token)
        whole = self._unpruned_positions(ids, media)
        answer = whole.max() + 1 + torch.arange(n).expand(len(whole), -1)
        return torch.cat([whole[:, stays], answer], dim=1)

    def _places_of(self, media: Any) -> list[int]:
        """Where each candidate stands among the unpruned tokens of its item."""
        return list(range(self.unpruned(media)))

    def _ids_of(self, media: Any, token: int) -> list[int]:
        """Unpruned tokens of an item that `token` stands for in a prompt."""
        return [token] * self.unpruned(media)

    def _places_that_stay(self, media: Any, kept: list[int]) -> list[int]:
        """Which of its unpruned tokens are left of an item, in the order of its rows."""
        places = self._places_of(media)
        return [places[i] for i in kept]

    def _rows_of(self, media: Any, kept: list[int]) -> Tensor:
        """What is left of an item, as the language model gets it: [tokens, H]."""
        return self._once(media, self.embed)[kept]

    def _unpruned_positions(self, ids: list[int], media: list[Any]) -> Tensor:
        """[C, T]."""
        return torch.arange(len(ids))[None]

    def given_prompt(self, prompt: str, media: list[Any]) -> dict[str, Any]:
        """A prompt with media as vLLM takes it."""
        return {"prompt": prompt}

    def prompt_ids(self, prompt: str, *, start: bool = True) -> list[int]:
        """Token ids with one placeholder per item."""
        return self.tokenizer(
            in_dialect(prompt, self.tokenizer), add_special_tokens=start
        ).input_ids

    def chat_prompt(self, question: str, images: int = 1) -> str:
        """What the chat template makes of a message."""
        content = [{"type": "image"}] * images + [{"type": "text", "text": question}]
        message = {"role": "user", "content": content}
        return self.processor.apply_chat_template([message], add_generation_prompt=True)

    def placeholder_ids(self) -> list[int]:
        return self.tokenizer.convert_tokens_to_ids(list(self.placeholders))

    def _position_ids(self, positions: Tensor) -> Tensor:
        return positions


def _in_line(embeddings: Tensor, n: int) -> Tensor:
    return torch.arange(embeddings.shape[1] + n)[None]


def encoder_layers(tower: nn.Module) -> list[nn.Module]:
    """Of a CLIP or SigLIP vision tower."""
    (layers,) = [part for name, part in tower.named_modules() if name.endswith("encoder.layers")]
    return list(layers)


@contextmanager
def keys_of(layer: Any) -> Iterator[list[Tensor]]:
    """What a layer's attention has for keys, [tiles, tokens, heads, head size], while entered."""
    seen: list[Tensor] = []
    heads = layer.self_attn.num_heads
    hook = layer.self_attn.k_proj.register_forward_hook(
        lambda module, args, keys: seen.append(keys.unflatten(-1, (heads, -1)))
    )
    with hook:
        yield seen


def is_image(media: Any) -> bool:
    return isinstance(media, Image.Image)
