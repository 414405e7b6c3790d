# SPDX-License-Identifier: Apache-2.0
"""Model classes that transformers lacks, for their weights."""

from torch import Tensor, nn
from transformers import (
    LlavaConfig,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    PreTrainedModel,
    Qwen2ForCausalLM,
    SiglipVisionModel,
)


class Eagle2_5_VLForConditionalGeneration(PreTrainedModel):
    """Eagle 2.5, which is never run here: InternVL's projector behind a SigLIP tower."""

    config_class = LlavaConfig  # the hub's comes with code of its own

    def __init__(self, config: LlavaConfig) -> None:
        super().__init__(config)
        inputs, outputs = 4 * config.vision_config.hidden_size, config.text_config.hidden_size
        self.vision_model = SiglipVisionModel(config.vision_config)
        self.mlp1 = nn.Sequential(
            nn.LayerNorm(inputs),
            nn.Linear(inputs, outputs),
            nn.GELU(),
            nn.Linear(outputs, outputs),
        )
        self.language_model = Qwen2ForCausalLM(config.text_config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.language_model.get_output_embeddings()


class _Projector(nn.Module):
    """Two layers behind a norm."""

    def __init__(self, config: LlavaOnevisionConfig, factor: int) -> None:
        super().__init__()
        inputs, outputs = config.vision_config.hidden_size, config.text_config.hidden_size
        self.pre_norm = nn.LayerNorm(inputs, eps=1e-6)
        self.linear_1 = nn.Linear(inputs, factor * outputs)
        self.linear_2 = nn.Linear(factor * outputs, outputs)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.linear_1(self.pre_norm(rows)))
        return self.linear_2(hidden)


class RForConditionalGeneration(LlavaOnevisionForConditionalGeneration):
    """R-4B: LLaVA-OneVision with another projector."""

    factor = 1
    """How much wider the projector is inside than the language model."""

    def __init__(self, config: LlavaOnevisionConfig) -> None:
        super().__init__(config)
        self.model.multi_modal_projector = _Projector(config, self.factor)


class BeeForConditionalGeneration(RForConditionalGeneration):
    """Bee-8B: the same with a wider projector."""

    factor = 4
