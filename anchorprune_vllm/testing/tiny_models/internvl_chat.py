# SPDX-License-Identifier: Apache-2.0
"""InternVL and its relatives in InternVL's own format: tiles, and a thumbnail.

The hub's configuration of `InternVLChatModel` comes with code of its own. Here transformers'
configuration of LLaVA stands in for it, as it keeps entries that it does not know. The weights are
those of Qianfan-OCR, whose names in the hub's format transformers knows.
"""

from typing import Any

from transformers import (
    GotOcr2ImageProcessor,
    PreTrainedTokenizerFast,
    QianfanOCRConfig,
    QianfanOCRForConditionalGeneration,
    QianfanOCRProcessor,
    Qwen3Config,
)

from anchorprune_vllm.testing.tiny_models.checkpoint import (
    TOWER,
    Checkpoint,
    make_tokenizer,
    text_config,
)

_TILE, _PATCH, _MAX_TILES = 112, 14, 6
_TOKENS = (_TILE // _PATCH // 2) ** 2


def internvl_chat() -> Checkpoint:
    return _checkpoint(architecture="InternVLChatModel", video="<video>\n")


def skywork_r1v() -> Checkpoint:
    return _checkpoint(architecture="SkyworkR1VChatModel")


def h2ovl() -> Checkpoint:
    """Describe a model that may cut an image into tiles twice, and here does not.

    With `use_msac`, an image has more tiles alone in its prompt than among others, and vLLM's
    encoder cache takes the one for the other.
    """
    config = _hub_config() | {"use_msac": False}
    return _checkpoint(architecture="H2OVLChatModel", config_json=config)


def qianfan_ocr() -> Checkpoint:
    config = _hub_config()
    vision = config["vision_config"] | {"model_type": "qianfan_ocr_vision"}
    return _checkpoint(config_json=config | {"model_type": "qianfan_ocr", "vision_config": vision})


def _checkpoint(**others: Any) -> Checkpoint:
    tokenizer = make_tokenizer(
        ["<image>", "<video>", "<|video_pad|>"],
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
    )
    size = {"height": _TILE, "width": _TILE}
    processor = QianfanOCRProcessor(
        image_processor=GotOcr2ImageProcessor(
            size=size, crop_to_patches=True, min_patches=1, max_patches=_MAX_TILES
        ),
        tokenizer=tokenizer,
        image_seq_length=_TOKENS,
    )
    return Checkpoint(
        QianfanOCRForConditionalGeneration,
        _config(tokenizer),
        processor,
        image="<image>\n",
        visual_tokens=(112, 112),
        hub_names={"language_model.model.encoder.": "language_model.model."},
        **{"config_json": _hub_config()} | others,
    )


def _config(tokenizer: PreTrainedTokenizerFast) -> QianfanOCRConfig:
    return QianfanOCRConfig(
        vision_config={**TOWER, "image_size": _TILE, "patch_size": _PATCH},
        text_config=text_config(Qwen3Config, tokenizer, head_dim=64).to_dict(),
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=_TOKENS,
    )


def _hub_config() -> dict[str, Any]:
    return {
        "model_type": "llava",
        "vision_config": {
            **TOWER,
            "model_type": "clip_vision_model",
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-6,
            "image_size": _TILE,
            "patch_size": _PATCH,
            "qkv_bias": True,
            "qk_normalization": False,
            "norm_type": "layer_norm",
        },
        "force_image_size": _TILE,
        "downsample_ratio": 0.5,
        "dynamic_image_size": True,
        "min_dynamic_patch": 1,
        "max_dynamic_patch": _MAX_TILES,
        "use_thumbnail": True,
        "select_layer": -1,
        "ps_version": "v2",
        "template": "internvl2_5",
    }
