# SPDX-License-Identifier: Apache-2.0
"""What the plugin puts into vLLM, and where."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

import pytest
from vllm import ModelRegistry

import anchorprune_vllm
from anchorprune_vllm.models import ARCHITECTURES, model_class
from anchorprune_vllm.vllm_patches import PATCHES, Patch


def test_entry_point() -> None:
    (found,) = entry_points(group="vllm.general_plugins", name="anchorprune")
    assert found.load() is anchorprune_vllm.register


def test_model_is_registered_with_a_processor_of_its_own(subtests: pytest.Subtests) -> None:
    for architecture in ARCHITECTURES:
        with subtests.test(architecture=architecture):
            anchorprune_vllm.register()
            model = model_class(architecture)
            assert ModelRegistry.models[architecture].load_model_cls() is model
            # A subclass silently inherits its parent's processor otherwise.
            assert "_processor_factory" in vars(model)


def test_llava_video_has_a_tokenizer_and_a_renderer() -> None:
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers.registry import TokenizerRegistry

    anchorprune_vllm.register()
    assert TokenizerRegistry.load_tokenizer_cls("llava_qwen").__name__ == "LlavaVideoTokenizer"
    assert RENDERER_REGISTRY.load_renderer_cls("llava_qwen").__name__ == "HfRenderer"


def test_registering_twice_patches_once() -> None:
    anchorprune_vllm.register()
    once = {patch.name: patched(patch) for patch in PATCHES}
    anchorprune_vllm.register()
    assert {patch.name: patched(patch) for patch in PATCHES} == once


def patched(patch: Patch) -> object:
    module, owner = patch.owner.split(":")
    return vars(getattr(importlib.import_module(module), owner))[patch.name]
