# SPDX-License-Identifier: Apache-2.0
"""The hooks through which a family tells the general adapter about its models.

Each hook has a default, which is used for models that have no family.
"""

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
    """The hooks of the general adapter; a family overrides those for which it knows better.

    A family is mixed into vLLM's model, so `self` is the model in the hooks of the worker. The
    class methods are called without a model, by the prompt processor and by the worker.
    """

    # -- called without a model ------------------------------------------------------------------

    video_margin: int | None = None
    """For videos with text between their frames: the number of text tokens at either end that
    belong to no frame. The worker then embeds the text, and the budget goes to any frames. If it is
    None, the text stays in the prompt, and each frame has a fixed share of the budget.

    A number requires a language model that depends neither on the ids of tokens nor on where an
    item begins or ends.
    """

    takes_embeddings = False
    """Whether a model with M-RoPE accepts the client's own embeddings, which must come with their
    grid and be all tokens of their item. Otherwise they are refused, because their positions are
    not known."""

    can_be_data_parallel = False
    """Whether the tower, `visual`, may give each rank some of the images. This requires that it is
    called with patches and grids (frames, rows, columns), and that the family states its attentions
    and their order."""

    @classmethod
    def target(cls, info: BaseProcessingInfo, modality: str, replaced: list[int]) -> list[int]:
        """Return the tokens that stand for one item in a prompt when it arrives.

        They occur once per item. `replaced` are the tokens that vLLM replaces with the item's own.
        """
        return replaced

    @classmethod
    def units(
        cls, hf_config: Any, modality: str, item: MultiModalKwargsItem, layout: PromptLayout
    ) -> MediaTokens:
        """Return the units of an image or video (tiles, frames) and the grid of each.

        Units count only candidates, while `unpruned` counts all embeddings. Where text divides the
        item (`layout.unit_sizes`), each of these parts must be a unit.

        Args:
            hf_config: The configuration of the checkpoint.
            modality: "image" or "video".
            item: The outputs of the model's own processor, by the names of the model's arguments.
            layout: The item's tokens in the unpruned prompt.
        """
        sizes = layout.unit_sizes
        widths = (layout.runs[0],) if layout.is_in_rows else tuple(map(square_side, sizes))
        grid = _grid_of_patches(modality, item)
        if grid is not None:  # several patches make up a token
            frames, rows, columns = grid
            merge = max(1, isqrt(frames * rows * columns // layout.embeddings))
            rows, columns = rows // merge, columns // merge
            if frames * rows * columns == layout.embeddings:
                sizes = (rows * columns,) * frames if len(sizes) == 1 else sizes
                widths = (columns,) * len(sizes)
        return MediaTokens(layout.embeddings, sizes, widths)

    @classmethod
    def candidates(cls, tokens: MediaTokens) -> Tensor | None:
        """Return the indices of an unpruned item's rows that are candidates; None means all.

        Newlines and separators are not candidates. The indices are int64 [candidates], ascending,
        on the CPU.
        """
        return None

    # -- called on the model ---------------------------------------------------------------------

    def tower_attention(self) -> nn.Module | None:
        """Return the attention that importance is read from; None means the last one called.

        It is a module with the inputs and attributes of vLLM's `MMEncoderAttention`.
        """
        return None

    def object_attention(self) -> nn.Module | None:
        """Return the attention in which HiPrune finds objects; None means the one in the middle.

        It is a module as for `tower_attention`, and a family that states it states both.
        """
        return None

    def tower_order(self, ratio: int) -> TowerOrder | None:
        """Return how the tokens of the tower become rows; None means it is found out at load.

        `ratio` is the number of the tower's tokens per candidate, without class tokens.
        """
        return None

    def unpadded(self, segments: Sequence[int]) -> Tensor | None:
        """Return the indices of the tower's tokens that are not padding; None if there is none.

        `segments` are the numbers of such tokens in each part. The indices are int64 on the CPU, as
        many as the sum of `segments`.
        """
        return None

    def importance(
        self, query: Tensor, key: Tensor, segments: Sequence[int], scale: float
    ) -> Tensor:
        """Return the importance of each token of the tower, summed over the heads of this rank.

        Args:
            query: The query as it enters the attention, [T, heads, head size].
            key: The key, likewise.
            segments: The lengths of the parts whose tokens attend to each other, T in total.
            scale: The factor of the products of queries and keys.

        Returns:
            A float32 tensor [T], by default the attention received from an average token.
        """
        return received_attention(query, key, segments, scale)

    def relevance(self, embed_words: EmbedWords, matching: Matching, size: int) -> Relevance:
        """Return what compares candidates with questions; by default, word matching.

        Args:
            embed_words: A function from token ids [M] on the CPU to word embeddings [M, H].
            matching: How a candidate is compared with several words.
            size: H; columns of a row after the first H are not compared.
        """
        return WordMatching(embed_words, matching, size)


def _grid_of_patches(modality: str, item: Any) -> tuple[int, int, int] | None:
    """Return frames, rows and columns of an item's patches, or None if no single grid is given."""
    for name in (f"{modality}_grid_thw", f"{modality}_grid_hws"):
        if name in item:
            numbers = item[name].data.flatten().tolist()
            if len(numbers) in (2, 3):
                frames, rows, columns = (1, *numbers)[-3:]
                return frames, rows, columns
    return None


def square_side(size: int) -> int:
    """Return the side of a square of `size` tokens, or `size` if they do not form a square."""
    side = isqrt(size)
    return side if side * side == size else size
