# SPDX-License-Identifier: Apache-2.0
"""Models whose prompts have no placeholder: vLLM puts the image before all text."""

from __future__ import annotations

from pathlib import Path

import pytest

from anchorprune_vllm.testing.demo_models.make import make_demo_model
from anchorprune_vllm.testing.local_model import LocalModel, plans_of
from tests.support.pictures import picture

QUESTION = "What color is the circle?"


@pytest.mark.parametrize("arch", ["blip2", "paligemma"])
def test_the_question_is_read_and_the_image_pruned(arch: str, tmp_path: Path, rank: None) -> None:
    make_demo_model(tmp_path / "model", arch=arch)
    model = LocalModel(tmp_path / "model", max_model_len=None, limit_mm_per_prompt={"image": 1})
    tokenizer = model.processor.info.get_tokenizer()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
    )
    processed = model.process(prompt, picture(1, (300, 200)), budget=12)
    (plan,) = plans_of(processed)
    assert tokenizer.decode(plan.query_ids.flatten()) == QUESTION
    assert len(model.embed(processed)[0]) == 12
    (place,) = processed["mm_placeholders"]["image"]
    assert place.get_num_embeds() == 12
