# SPDX-License-Identifier: Apache-2.0
"""The general adapter, which prunes image models of vLLM without knowing them.

The parent's `embed_multimodal` gives the rows of all visual tokens. Relevance is the best match of
a row with the words of the question, as the paper does it for Qwen2.5-VL. Importance is the
attention received in the tower's last layer, or, if that cannot be read, the distance of a row from
the mean row. A family (`families/`) overrides hooks of this adapter for the models it knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import supports_mrope
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.multimodal.processing import BaseMultiModalProcessor
from vllm.transformers_utils.config import uses_mrope

from anchorprune_vllm.api.processor import WORD_EMBEDDINGS
from anchorprune_vllm.api.requests import refuse_overrides
from anchorprune_vllm.config import PruneConfig
from anchorprune_vllm.item_fields import each_alone
from anchorprune_vllm.log import active_line, logger
from anchorprune_vllm.media_tokens import MODALITIES, media_token_ids
from anchorprune_vllm.methods.registry import Signal, method_of
from anchorprune_vllm.models.families.base import Family
from anchorprune_vllm.models.general.media_batch import GeneralMedia
from anchorprune_vllm.models.general.processor import pruning_processor
from anchorprune_vllm.models.general.tower_signals import TowerSignals
from anchorprune_vllm.models.linear_positions import (
    LinearPositionsModel,
    has_positions_in_channels,
)
from anchorprune_vllm.models.pruned_model import PrunedModel
from anchorprune_vllm.plan import ItemPlan, MediaTokens, PlanFields, read_counts
from anchorprune_vllm.prompt_layout import PromptLayout
from anchorprune_vllm.selection.device import to_device
from anchorprune_vllm.signals.features import Relevance
from anchorprune_vllm.worker.feature_cache import FeatureCache
from anchorprune_vllm.worker.positions import CHANNELS, MediaPositions, MediaSpan
from anchorprune_vllm.worker.pruner import MediaBatch

_CACHE_PAGE = 256
_LIKE_IMPORTANCE: frozenset[Signal] = frozenset({"keys", "object_attention"})
"""Signals that cannot be replaced by the rows themselves if the tower's order is unknown."""


class GeneralModel(Family, PrunedModel):
    """A mixin that prunes any image model; list it before vLLM's model."""

    modalities = MODALITIES
    has_mrope: bool
    has_data_parallel_tower = False
    _is_known = False
    """Whether a first item has been embedded, so that widths and the tower's order are known."""
    must_be_full = False
    """Whether the reduced level is refused, which must happen before the server is ready."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.tower_signals = TowerSignals(self)

    @property
    def must_learn_first(self) -> bool:
        """Return whether a dummy item must be embedded before a smaller one is sent.

        It shows what no family states.
        """
        is_unstated = type(self).tower_order is Family.tower_order
        return self._pruner is not None and (self.must_be_full or is_unstated)

    @classmethod
    def check(cls, model_config: Any, config: PruneConfig) -> None:
        name = model_config.architecture
        refused = method_of(config).needs & _LIKE_IMPORTANCE
        if refused and cls.tower_order is Family.tower_order:
            raise ValueError(
                f"anchorprune: the method {config.method} needs {', '.join(sorted(refused))} of "
                f"the vision tower, and no family states the order of the tower of {name}; choose "
                "another method, or have a family state it (docs/your-own-model.md)"
            )
        if config.text_encoder is not None:
            raise ValueError(
                f"anchorprune: {name} needs no text encoder, because questions are matched with "
                "its own word embeddings; leave out --anchorprune-text-encoder"
            )
        if config.similarity != "negated":
            raise ValueError(
                f"anchorprune: similarity is for CLIP and SigLIP pairs; {name} matches words with "
                "its own embeddings: leave it out"
            )
        if cls.has_mrope and config.positions == "compact":
            raise ValueError(
                "anchorprune: positions 'compact' are for models with 1-D positions; "
                f"{name} has M-RoPE: leave positions out or choose 'native'"
            )
        is_native = config.has_native_positions(cls.default_positions)
        if is_native and not media_token_ids(model_config.hf_config):
            way_out = "--anchorprune-budget" if cls.has_mrope else "the setting positions"
            raise ValueError(
                f"anchorprune: the configuration of {name} does not name the tokens that stand for "
                f"images, so native positions cannot be kept; leave out {way_out}"
            )
        if getattr(model_config, "uses_xdrope_dim", 0):
            raise ValueError(
                f"anchorprune: {name} has XD-RoPE, whose positions cannot be kept; leave out "
                "--anchorprune-budget"
            )
        takes_embeddings = cls.takes_embeddings or not cls.has_mrope
        if not takes_embeddings and model_config.multimodal_config.enable_mm_embeds:
            raise ValueError(
                f"anchorprune: positions of the client's own embeddings are not known for {name}; "
                "leave out --enable-mm-embeds"
            )
        if config.level == "full" and model_config.multimodal_config.skip_mm_profiling:
            raise ValueError(
                f"anchorprune: the setting level is 'full', and whether {name} is served at the "
                "full level is found out when vLLM profiles it; leave out --skip-mm-profiling"
            )
        if _is_data_parallel(model_config) and not cls.can_be_data_parallel:
            raise ValueError(
                "anchorprune: the attention of a data-parallel vision tower cannot be read for "
                f"{name}; leave out --mm-encoder-tp-mode data"
            )

    def _make_relevance(self, config: PruneConfig, vllm_config: VllmConfig) -> Relevance:
        logger.info_once(active_line(config, WORD_EMBEDDINGS))
        if vllm_config.compilation_config.cudagraph_mm_encoder:
            # These graphs would bypass `embed_multimodal`, and with it the pruner.
            vllm_config.compilation_config.cudagraph_mm_encoder = False
            logger.warning_once("AnchorPrune: CUDA graphs of the vision encoder are switched off")
        self.has_data_parallel_tower = _is_data_parallel(vllm_config.model_config)
        self.must_be_full = config.level == "full" and "importance" in self.needs
        device = vllm_config.device_config.device
        capacity = config.feature_cache_mb * 2**20
        self._make_cache = partial(FeatureCache, capacity, _CACHE_PAGE, device=device)

        def embed_words(ids: Tensor) -> Tensor:
            return self.embed_text(to_device(ids, device))

        return self.relevance(embed_words, config.matching, self.embedding_size)

    def _cache_page(self) -> int:
        return _CACHE_PAGE

    def _row_widths(self) -> dict[str, int]:
        return {"embeddings": self.embedding_size}

    def _key_shape(self) -> tuple[int, int]:
        # The first item shows which attention is read; nothing is cached before that.
        return self.tower_signals.key_shape if self._is_known else (1, 1)

    def _media(
        self, modality: str, kwargs: dict[str, Any], plans: Sequence[ItemPlan]
    ) -> MediaBatch:
        media = GeneralMedia(self, modality, kwargs, plans)
        if not self._is_known:  # a dummy item, except on a CPU, where vLLM may make none
            self._learn(media, plans[0].tokens)
        return media

    def _learn(self, media: GeneralMedia, tokens: MediaTokens) -> None:
        """Learn from the first item how wide rows are and which tower tokens make them up.

        Raises ValueError if the item does not have the rows that were counted for it.
        """

        def run() -> Tensor:
            (embedded,) = media.embed_unpruned([0])
            return embedded

        rows = run()
        name = type(self).__name__
        chosen = self.candidates(tokens)
        found = len(rows) if chosen is None else len(chosen)
        if len(rows) != tokens.unpruned or found != tokens.candidates:
            raise ValueError(
                f"anchorprune: {name} cannot be pruned: it makes {len(rows)} rows of an image for "
                f"which its prompt has {tokens.unpruned} tokens, and its units have "
                f"{tokens.candidates} candidates, of which {found} are among the rows; leave out "
                "--anchorprune-budget"
            )
        if self.tower_signals.needed:
            self.tower_signals.learn([tokens], lambda: media.candidate_rows(tokens, run()))
            if self.tower_signals.order is None:
                self._serve_reduced(name)
            else:
                words = "AnchorPrune: %s is pruned at the full level, %s"
                logger.info_once(words, name, self._told())
        self._is_known = True
        wide = {"embeddings": ((rows.shape[1],), rows.dtype)}
        layout = {**self._feature_layout(rows.dtype), **wide}
        assert self._pruner is not None
        self._pruner.use_cache(lambda: self._make_cache(layout))

    def _told(self) -> str:
        """Return the part of a log line that says how the tower's order is known."""
        if not self.tower_signals.is_stated:
            return "by an order of its vision tower that was found at load"
        family = type(self).__mro__[1]  # `generalize` puts it there
        return f"as the family {family.__module__}:{family.__name__} states"

    def _serve_reduced(self, name: str) -> None:
        """Warn that importance does not come from the tower, or raise ValueError if it must."""
        found = (
            f"{name} is pruned at the reduced level: it is not known which tokens of its vision "
            "tower make up a row, so importance comes from the rows"
        )
        lacking = self.needs & _LIKE_IMPORTANCE
        if lacking:
            raise ValueError(
                f"anchorprune: {name}'s vision tower is not as its family states, and the method "
                f"needs {', '.join(sorted(lacking))} of it; choose another method"
            )
        if self.must_be_full:
            raise ValueError(
                f"anchorprune: {found}; the setting level is 'full', which refuses that: set it to "
                "'any', have a family state the order (docs/your-own-model.md), choose a method "
                "without importance such as divprune, or leave out --anchorprune-budget"
            )
        logger.warning_once("AnchorPrune: %s", found)

    def embed_unpruned(self, **kwargs: Any) -> Sequence[Tensor]:
        """Return the model's own rows of each item."""
        return super(PrunedModel, self).embed_multimodal(**kwargs)  # type: ignore[misc]

    # -- positions -------------------------------------------------------------------------------

    def positions_of(
        self, modality: str, item: MultiModalKwargsItem, plan: ItemPlan
    ) -> MediaPositions | None:
        """Return the native positions of an item, or None if positions are compact.

        They are those of its candidates; of all its embeddings if the plan keeps all; and of all
        its tokens if the plan moves text.
        """
        if not self._native_positions:
            return None
        relative, _ = self._positions_in_item(modality, item, plan.layout)
        if plan.moves_text:
            return MediaPositions(relative.T)
        embedded = relative.T[_mask(plan.layout)]
        chosen = None if plan.keeps_all else self.candidates(plan.tokens)
        return MediaPositions(embedded if chosen is None else embedded[chosen])

    def _span(self, feature: MultiModalFeatureSpec) -> MediaSpan:
        place, item, fields = feature.mm_position, feature.data, PlanFields.of(feature.modality)
        given: Any = item
        if item is None or fields.counts not in item:  # the client's own embeddings
            if not self.has_mrope:
                return super()._span(feature)
            layout = PromptLayout.of([0] * place.length)
            _, extent = self._positions_in_item(feature.modality, item, layout)
            return MediaSpan(place.offset, place.length, extent)
        layout = PromptLayout.from_tensor(given[fields.layout].data)
        relative, extent = self._positions_in_item(feature.modality, item, layout)
        kept, tokens = read_counts(given[fields.counts].data)
        text = relative.masked_fill(_mask(layout), -1)
        if not tokens.are_all_kept(kept):
            if layout.moves_text:
                return MediaSpan(place.offset, place.length, extent)
            text = text[:, torch.tensor(layout.stays(layout.shares(kept)), device="cpu")]
        return MediaSpan(place.offset, place.length, extent, text)

    def _given_positions(self, embeddings: Sequence[Tensor], **kwargs: Any) -> list[MediaPositions]:
        modality = next((name for name in MODALITIES if f"{name}_grid_thw" in kwargs), None)
        if modality is None or not self.has_mrope:  # positions of audio are consecutive, too
            return super()._given_positions(embeddings, **kwargs)
        count = len(embeddings)
        told = {name: value for name, value in kwargs.items() if len(value) == count}
        positions = []
        for number, rows in enumerate(embeddings):
            item = each_alone({name: value[number] for name, value in told.items()})
            layout = PromptLayout.of([0] * len(rows))
            relative, _ = self._positions_in_item(modality, item, layout)
            positions.append(MediaPositions(relative.T))
        return positions

    def _positions_in_item(
        self, modality: str, item: Any, layout: PromptLayout
    ) -> tuple[Tensor, int]:
        """Return the positions [CHANNELS, length] of an item's tokens in a prompt of it alone.

        The second result is the position that a token after the item would have.
        """
        tokens = layout.tokens()
        if not self.has_mrope:
            places = torch.arange(len(tokens), device="cpu")
            return places.expand(CHANNELS, -1), len(tokens)
        mask = _mask(layout)
        feature = MultiModalFeatureSpec(
            data=item,
            modality=modality,
            identifier="",
            mm_position=PlaceholderRange(0, len(tokens), None if bool(mask.all()) else mask),
        )
        model: Any = super(PrunedModel, self)
        positions, delta = model.get_mrope_input_positions(tokens, [feature])
        return positions.long().cpu(), len(tokens) + int(delta)


def _is_data_parallel(model_config: Any) -> bool:
    return getattr(model_config.multimodal_config, "mm_encoder_tp_mode", None) == "data"


def _mask(layout: PromptLayout) -> Tensor:
    return torch.tensor(layout.is_embedding(), device="cpu")


class LinearGeneralModel(GeneralModel, LinearPositionsModel):
    """A mixin that prunes any image model with ordinary, 1-D rotary embeddings."""


def keeps_mrope(model: type, hf_config: Any) -> bool:
    """Return whether vLLM keeps M-RoPE positions for a model.

    Its class and its config must both say so: EXAONE 4.5 inherits from the class of Qwen2.5-VL, but
    has ordinary rotary embeddings.
    """
    return (
        supports_mrope(model) and uses_mrope(hf_config) and not has_positions_in_channels(hf_config)
    )


@cache
def generalize(model: type, family: Any, has_mrope: bool) -> type:
    """Return the class that prunes an image model of vLLM, with the hooks of its family.

    Without a budget in its config, the model is served as it is.
    """
    mixin = GeneralModel if has_mrope else LinearGeneralModel
    bases = (mixin, model) if family is Family else (family, mixin, model)
    plain: Any = model._processor_factory  # type: ignore[attr-defined]

    class Served(*bases):  # type: ignore[misc]
        default_positions = "native" if has_mrope else "compact"

        # vLLM inspects the signature to see how to call it.
        def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix)

    Served.__name__ = Served.__qualname__ = f"Pruned{model.__name__}"
    Served.has_mrope = has_mrope

    def make_processor(info: Any, dummy_inputs: Any) -> BaseMultiModalProcessor:
        processor = plain.processor(info, dummy_inputs)
        if PruneConfig.of_model(info.ctx.model_config.hf_config) is None:
            return refuse_overrides(processor)
        kind: Any = type(processor)
        return pruning_processor(kind, family, Served.default_positions)(info, dummy_inputs)

    register = MULTIMODAL_REGISTRY.register_processor(
        make_processor, info=plain.info, dummy_inputs=plain.dummy_inputs
    )
    return register(Served)
