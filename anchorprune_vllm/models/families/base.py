# SPDX-License-Identifier: Apache-2.0
"""What a family tells the general adapter: small hooks, each with the answer of a model unknown."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import Any

from torch import Tensor, nn
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.multimodal.processing import BaseProcessingInfo

from anchorprune_vllm.config import Matching
from anchorprune_vllm.models.general.tower_order import TowerOrder
from anchorprune_vllm.plan import MediaTokens
from anchorprune_vllm.prompt_layout import PromptLayout
from anchorprune_vllm.signals.attention import received_attention
from anchorprune_vllm.signals.features import Relevance
from anchorprune_vllm.signals.word_matching import EmbedWords, WordMatching


class Family:
    """The hooks of the general adapter: a family overrides those of which it knows better.

    A family is mixed into vLLM's model, so `self` is the model in the hooks of the worker. The
    class methods are called without a model, by the processor of prompts and by the worker.
    """

    # -- called without a model ------------------------------------------------------------------

    video_margin: int | None = None
    """Where a video has text between its frames, and it may be embedded in the worker like text
    anywhere: how many of its text tokens, at either end, belong to no frame. Then the budget goes
    to any frames. None: the text stays in the prompt, and each frame has a fixed share.

    The language model may look neither at the ids of tokens nor at where an item begins or ends.
    """

    takes_embeddings = False
    """Whether the client's own embeddings of a model with M-RoPE come with their grid, and are all
    tokens of their item. Otherwise they are refused, as their positions are not known."""

    can_be_data_parallel = False
    """Whether the tower, `visual`, may give each rank some of the images. It is called with patches
    and grids (frames, rows, columns), and its attentions and their order are stated below."""

    @classmethod
    def target(cls, info: BaseProcessingInfo, modality: str, replaced: list[int]) -> list[int]:
        """Return the tokens that stand for one item in a prompt as it arrives, once per item.

        replaced: the tokens that vLLM replaces with those of the item.
        """
        return replaced

    @classmethod
    def units(
        cls, hf_config: Any, modality: str, item: MultiModalKwargsItem, layout: PromptLayout
    ) -> MediaTokens:
        """Return the units of an image or video (tiles, frames) and the grid of each.

        Only candidates are counted in units; `unpruned` counts all embeddings. Where text divides
        the item (`layout.unit_sizes`), each of these parts must be a unit.

        Args:
            hf_config: the configuration of the checkpoint.
            modality: "image" or "video".
            item: what the model's own processor made of it, by the names of the model's arguments.
            layout: the item's tokens in the unpruned prompt.
        """
        sizes = layout.unit_sizes
        widths = (layout.runs[0],) if layout.is_in_rows else tuple(map(square_side, sizes))
        grid = _grid_of_patches(modality, item)
        if grid is not None:  # some of the patches make up a token
            frames, rows, columns = grid
            merge = max(1, isqrt(frames * rows * columns // layout.embeddings))
            rows, columns = rows // merge, columns // merge
            if frames * rows * columns == layout.embeddings:
                sizes = (rows * columns,) * frames if len(sizes) == 1 else sizes
                widths = (columns,) * len(sizes)
        return MediaTokens(layout.embeddings, sizes, widths)

    @classmethod
    def candidates(cls, tokens: MediaTokens) -> Tensor | None:
        """Return which rows of an unpruned item are candidates; None: all of them.

        Newlines and separators among the rows are none. Int64 [candidates], ascending, on the CPU.
        """
        return None

    # -- called on the model ---------------------------------------------------------------------

    def tower_attention(self) -> nn.Module | None:
        """Return the attention that importance is read from; None: the last that the tower calls.

        A module with the inputs and attributes of vLLM's `MMEncoderAttention`.
        """
        return None

    def object_attention(self) -> nn.Module | None:
        """Return the attention in which HiPrune sees objects; None: the one in the middle.

        A module as above. Where it is stated, so is the other.
        """
        return None

    def tower_order(self, ratio: int) -> TowerOrder | None:
        """Return how the tokens of that attention become rows; None: it is found out at load.

        ratio: the tower's tokens for each candidate, a class token not counted.
        """
        return None

    def unpadded(self, segments: Sequence[int]) -> Tensor | None:
        """Return which tokens of that attention are no padding; None: there is none.

        segments: how many tokens of each part are none. Int64, their sum in all, on the CPU.
        """
        return None

    def importance(
        self, query: Tensor, key: Tensor, segments: Sequence[int], scale: float
    ) -> Tensor:
        """Return the importance of each token of the tower, summed over the heads of this rank.

        Args:
            query: [T, heads, head size], as it enters the attention.
            key: like `query`.
            segments: how many tokens attend to each other, one part behind the other; T in all.
            scale: the factor of the products of queries and keys.

        Returns:
            float32 [T]; by default the attention received from an average token.
        """
        return received_attention(query, key, segments, scale)

    def relevance(self, embed_words: EmbedWords, matching: Matching, size: int) -> Relevance:
        """Return what compares candidates with questions; by default, word matching.

        Args:
            embed_words: the language model's table: token ids [M] on the CPU to rows [M, H].
            matching: how a candidate is compared with several words.
            size: H; what lies behind the first H columns of a row is not compared.
        """
        return WordMatching(embed_words, matching, size)


def _grid_of_patches(modality: str, item: Any) -> tuple[int, int, int] | None:
    """Return frames, rows and columns, where a processor tells them of all of an item at once."""
    for name in (f"{modality}_grid_thw", f"{modality}_grid_hws"):
        if name in item:
            numbers = item[name].data.flatten().tolist()
            if len(numbers) in (2, 3):
                frames, rows, columns = (1, *numbers)[-3:]
                return frames, rows, columns
    return None


def square_side(size: int) -> int:
    """Return the side of a square of so many tokens; if it is none, all are one row."""
    side = isqrt(size)
    return side if side * side == size else size
