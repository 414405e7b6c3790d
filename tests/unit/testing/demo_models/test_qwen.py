# SPDX-License-Identifier: Apache-2.0
"""The demo Qwen2.5-VL reads like the hub's, and is lively enough to test pruning with."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import normalize
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

from anchorprune_vllm.testing.demo_models.make import describe, make_demo_model
from anchorprune_vllm.testing.demo_models.tokenizers import WORDS
from tests.support.pictures import QUESTIONS, picture

TEXTS = [
    "What color is the car?",
    "  two  spaces, a tab\tand\n\nlines ",
    "Où est le chien? 犬はどこ 🐕‍🦺",
    "\x00 \u200b I'LL count 1234 [INST]",
    "",
]


@pytest.fixture(scope="module")
def demo(demo_models):
    return demo_models("qwen2.5-vl")


@pytest.fixture(scope="module")
def processor(demo):
    return AutoProcessor.from_pretrained(demo)


@pytest.fixture(scope="module")
def model(demo):
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(
        demo, attn_implementation="eager"
    ).eval()


def test_describe(demo, tmp_path):
    line = describe(demo)
    assert line.startswith(
        "Qwen2_5_VLForConditionalGeneration: 144 visual tokens per small image, up to 1296 per "
        "large one, 0.8"
    )
    assert "CLIP" not in line
    make_demo_model(tmp_path, arch="qwen2.5-vl", image_size=28)
    assert ": 4 visual tokens per small image, up to 36 per large one, " in describe(tmp_path)


def test_config_names_the_tokenizer_s_special_tokens(demo, processor):
    config = json.loads((demo / "config.json").read_text())
    tokens = {
        "bos_token_id": "<|endoftext|>",
        "eos_token_id": "<|im_end|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
        "vision_token_id": "<|vision_pad|>",
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
    }
    for name, token in tokens.items():
        assert processor.tokenizer.encode(token) == [config[name]]
    assert {*tokens.values(), "<|im_start|>"} == set(processor.tokenizer.all_special_tokens)
    assert processor.tokenizer.eos_token == "<|im_end|>"
    assert processor.tokenizer.pad_token == "<|endoftext|>"


# --- text ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_text_round_trips(processor, text):
    assert processor.tokenizer.decode(processor.tokenizer(text).input_ids) == text


def test_the_pipeline_is_qwen2_s(demo, processor):
    written = json.loads((demo / "tokenizer.json").read_text())
    # transformers takes only the vocabulary and the merges from the file.
    made = json.loads(processor.tokenizer.backend_tokenizer.to_str())
    for part in ("added_tokens", "normalizer", "pre_tokenizer", "decoder"):
        assert written[part] == made[part]


def test_words_are_single_tokens(processor):
    words = [" " + word for word in WORDS.split()]
    chat = ["system", "user", "assistant", "You", " helpful", " assistant", "What", "\n"]
    assert {len(processor.tokenizer.encode(word)) for word in words + chat} == {1}


def test_special_tokens_are_left_out_of_answers(processor):
    specials = "<|im_start|><|vision_start|><|image_pad|><|vision_end|><|im_end|><|endoftext|>"
    ids = processor.tokenizer.encode("one" + specials + " dog")
    assert processor.tokenizer.decode(ids, skip_special_tokens=True) == "one dog"


def test_chat_template_renders_as_the_hub_s(processor):
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is "},
                {"type": "image"},
                {"type": "video"},
                {"type": "text", "text": "?"},
            ],
        },
        {"role": "assistant", "content": "A dog."},
    ]
    system = {"role": "system", "content": "Be brief."}
    rendered = (
        "<|im_start|>user\nWhat is <|vision_start|><|image_pad|><|vision_end|>"
        "<|vision_start|><|video_pad|><|vision_end|>?<|im_end|>\n"
        "<|im_start|>assistant\nA dog.<|im_end|>\n"
    )
    default = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    assert processor.apply_chat_template(messages) == default + rendered
    with_system = processor.apply_chat_template([system, *messages], add_generation_prompt=True)
    own = default.replace("You are a helpful assistant.", "Be brief.")
    assert with_system == own + rendered + "<|im_start|>assistant\n"


# --- pictures and videos ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((420, 560), [40, 30]),
        ((1008, 1008), [72, 72]),
        ((2016, 2016), [72, 72]),
        ((10, 10), [24, 24]),  # never less than 336 x 336 pixels
    ],
)
def test_one_placeholder_per_four_patches(processor, size, grid):
    inputs = processor(text="<|image_pad|>", images=Image.new("RGB", size), return_tensors="pt")
    assert inputs.image_grid_thw.tolist() == [[1, *grid]]
    assert inputs.input_ids.tolist() == [[processor.image_token_id] * (grid[0] * grid[1] // 4)]
    assert inputs.pixel_values.shape == (grid[0] * grid[1], 3 * 2 * 14 * 14)


def test_two_frames_of_a_video_are_one_step_in_time(processor):
    frames = np.zeros((6, 420, 336, 3), dtype=np.uint8)
    metadata = {"fps": 4.0, "total_num_frames": 6, "frames_indices": list(range(6))}
    inputs = processor(
        text="<|video_pad|>",
        videos=[frames],
        video_metadata=[metadata],
        do_sample_frames=False,
        return_tensors="pt",
    )
    assert inputs.video_grid_thw.tolist() == [[3, 30, 24]]
    assert inputs.input_ids.tolist() == [[processor.video_token_id] * 540]
    assert inputs.second_per_grid_ts.tolist() == [0.5]


# --- liveliness ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def signals(model, processor):
    """Of each picture: attention that tokens receive in the last block [N], tokens [N, D]."""
    seen: list[torch.Tensor] = []
    plain = modeling_qwen2_5_vl.eager_attention_forward

    def spy(*args, **options):
        output, attention = plain(*args, **options)
        seen.append(attention)
        return output, attention

    def look(image):
        inputs = processor.image_processor(image, return_tensors="pt")
        tokens = model.model.visual(inputs.pixel_values, inputs.image_grid_thw).pooler_output
        patches = seen[-1].mean((0, 1, 2))  # of the last block: all look at all
        assert len(patches) == 4 * len(tokens)
        return patches.view(-1, 4).sum(1), normalize(tokens, dim=-1)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(modeling_qwen2_5_vl, "eager_attention_forward", spy)
        return [look(picture(seed, (260, 200))) for seed in range(4)]


def test_attention_is_far_from_uniform(signals):
    for attention, _ in signals:
        tenth = len(attention) // 10
        assert attention.topk(tenth).values.sum() > 0.25  # a uniform one has 0.1


def test_token_distances_lie_on_both_sides_of_tau(signals):
    for _, tokens in signals:
        distances = 1 - tokens @ tokens.T
        upper = torch.ones_like(distances, dtype=torch.bool).triu(1)
        assert 0.05 < (distances[upper] < 0.2).float().mean() < 0.9


def test_questions_rank_tokens_differently(model, processor, signals):
    words = normalize(model.get_input_embeddings().weight.detach(), dim=-1)
    for _, tokens in signals:
        first = [
            (tokens @ words[processor.tokenizer.encode(question)].T).amax(1).topk(16).indices
            for question in QUESTIONS[:3]
        ]
        for one, other in itertools.combinations(first, 2):
            assert len(set(one.tolist()) & set(other.tolist())) <= 8
