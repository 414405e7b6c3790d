# SPDX-License-Identifier: Apache-2.0
"""Importance from an attention of a vision tower: the last one, unless the family says which."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import MMEncoderAttention

from anchorprune_vllm.models.tower_order import TowerOrder, possible_orders, probe
from anchorprune_vllm.plan import MediaTokens
from anchorprune_vllm.selection.host import to_device

if TYPE_CHECKING:
    from anchorprune_vllm.models.general import GeneralModel

Take = Callable[[Sequence[MediaTokens]], list[Tensor] | None]


class TowerImportance:
    """Looks into an attention of a tower, once it is known which one."""

    def __init__(self, model: GeneralModel) -> None:
        parent: Any = model
        self._model = model
        self._candidates = [m for m in parent.modules() if isinstance(m, MMEncoderAttention)]
        self._attention: Any = model.tower_attention()
        if self._attention is not None:
            self._candidates = [self._attention]
        self.order: TowerOrder | None = None
        """How the attention's tokens become rows; None: importance comes from elsewhere."""
        self._is_stated = False

    def learn(self, media: Sequence[MediaTokens], run: Callable[[], Tensor]) -> None:
        """Learn where to look: from the model's family, or by running the tower some times.

        media: the tokens of the items whose candidates `run` embeds: [candidates, H].
        """
        called: list[tuple[Any, list[int]]] = []

        def note(module: Any, args: Any, kwargs: Any) -> None:
            called.append((module, _segments(module, args, kwargs)))

        with ExitStack() as hooks:
            for module in self._candidates:
                handle = module.register_forward_pre_hook(note, with_kwargs=True)
                hooks.callback(handle.remove)
            run()
        if not called:
            return
        self._attention = called[-1][0]
        calls = [lengths for module, lengths in called if module is self._attention]
        segments = [length for lengths in calls for length in lengths]
        self.order = self._stated_order(media, segments)
        self._is_stated = self.order is not None
        if self.order is None:
            self.order = probe(possible_orders(media, segments), media, self._attention, run)

    def _has_grids(self, media: Sequence[MediaTokens]) -> bool:
        """Whether the order can be applied to these items.

        Where no family states it, the grid of a unit may be unknown, and is then taken for one row:
        nothing of the tower's own grid can be found in that.
        """
        if self._is_stated or self.order is None or not self.order.needs_grids:
            return True
        grids = [grid for tokens in media for grid in tokens.grids]
        return all(rows != 1 or columns == 1 for rows, columns in grids)

    def _stated_order(
        self, media: Sequence[MediaTokens], segments: Sequence[int]
    ) -> TowerOrder | None:
        """Return the order that the family states; None: it states none that fits this tower."""
        candidates = sum(tokens.candidates for tokens in media)
        stated = self._model.tower_order(sum(segments) // candidates)
        if stated is None:
            return None
        real = stated.segments(media)
        chosen = self._model.unpadded(real)
        fits = real == segments if chosen is None else int(chosen[-1]) < sum(segments)
        return stated if fits else None

    @contextmanager
    def tapped(self) -> Iterator[Take]:
        """While entered, the attention is looked into; then, what is yielded gives importance."""
        taken: list[tuple[Tensor, Tensor]] = []

        def tap(module: Any, args: Any, kwargs: Any) -> None:
            taken.append(_query_and_key(module, args, kwargs))

        with ExitStack() as hooks:
            if self.order is not None:
                handle = self._attention.register_forward_pre_hook(tap, with_kwargs=True)
                hooks.callback(handle.remove)
            yield lambda media: self._received(taken, media)

    def _received(
        self, taken: Sequence[tuple[Tensor, Tensor]], media: Sequence[MediaTokens]
    ) -> list[Tensor] | None:
        """Return the importance [N] of each item's tokens; None: it is not to be had."""
        if self.order is None or not taken or not self._has_grids(media):
            return None
        query, key = (torch.cat(parts) for parts in zip(*taken, strict=True))
        segments = self.order.segments(media)
        chosen = self._model.unpadded(segments)
        if chosen is not None:
            chosen = to_device(chosen, query.device)
            query, key = query[chosen], key[chosen]
        if sum(segments) != len(query):
            return None
        summed = self._model.importance(query, key, segments, self._attention.scale)
        heads = query.shape[1]
        ranks = get_tensor_model_parallel_world_size()
        if ranks > 1:
            # Every rank must see the same. Where all have all heads, all are counted alike.
            summed = tensor_model_parallel_all_reduce(summed)
        groups = to_device(self.order.groups(media), summed.device)
        of_rows = summed[groups].mean(1) / (heads * ranks)
        return list(of_rows.split([tokens.candidates for tokens in media]))


def _query_and_key(module: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
    """Return what goes into an attention as [tokens, heads, head size] each."""
    query, key = args[:2] if len(args) > 1 else (kwargs["query"], kwargs["key"])
    query = query.reshape(-1, module.num_heads, module.head_size)
    key = key.reshape(-1, module.num_kv_heads, module.head_size)
    if module.num_kv_heads != module.num_heads:
        key = key.repeat_interleave(module.num_heads // module.num_kv_heads, dim=1)
    return query, key


def _segments(module: Any, args: Any, kwargs: Any) -> list[int]:
    """Return how many tokens attend to each other. It waits for the device, at load alone."""
    query = args[0] if args else kwargs["query"]
    bounds = args[3] if len(args) > 3 else kwargs.get("cu_seqlens")
    if bounds is not None:
        return bounds.diff().tolist()
    tokens = query.numel() // (module.num_heads * module.head_size)
    batch = query.shape[0] if query.ndim > 2 else 1
    return [tokens // batch] * batch
