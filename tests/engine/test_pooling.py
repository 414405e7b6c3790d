# SPDX-License-Identifier: Apache-2.0
"""A model that embeds prompts (`--convert embed`) is pruned as one that answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.support.dialects import in_dialect
from tests.support.engine import make_engine, media_of, request
from tests.support.pictures import QUESTIONS, picture
from tests.support.reference import Reference

WORDS = "Where is the dog?"


@pytest.mark.parametrize("any_model", ["llava-1.5", "qwen2.5-vl"], indirect=True)
@pytest.mark.parametrize("positions", ["native", None])
def test_embeddings_are_those_of_the_reference(
    any_model: Path, reference: Reference, positions: str | None
) -> None:
    override = {"query": WORDS}
    asked = [request(QUESTIONS[i], picture(795 + i), override=override) for i in range(3)]
    ends_in_image = {"prompt": f"USER: {QUESTIONS[0]} <image>"}
    asked.append({**request("", picture(798), override=override), **ends_in_image})
    settings = {"positions": positions}
    with make_engine(any_model, 16, settings=settings, runner="pooling", convert="embed") as llm:
        dialect = llm.get_tokenizer()
        prompts = [{**item, "prompt": in_dialect(item["prompt"], dialect)} for item in asked]
        given = [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)]
    for item, embedding in zip(asked, given, strict=True):
        torch.testing.assert_close(
            torch.tensor(embedding), expected(reference, item, positions), rtol=1e-3, atol=1e-3
        )


def expected(reference: Reference, item: dict, positions: str | None) -> torch.Tensor:
    """The last token's state, normalised, as vLLM pools."""
    (image,), prompt = media_of(item), item["prompt"]
    kept = reference.kept(image, WORDS, 16)
    with torch.inference_mode():
        embeddings = reference.embed_prompt(prompt, [reference.embed(image)[kept]])
        if positions == "native" or reference.is_native:
            places = reference.native_positions(prompt, [image], [kept], 0)
        else:
            places = torch.arange(embeddings.shape[1])[None]
        return F.normalize(reference.hidden_states(embeddings, places)[-1], dim=0)
