# SPDX-License-Identifier: Apache-2.0
"""Visual-token pruning for vLLM: keep the K visual tokens that a question needs.

Importing this package is fast, because torch and vLLM are not loaded until they are needed.
"""

from anchorprune_vllm.config import PruneConfig

__version__ = "0.1.0"
__all__ = ["PruneConfig", "__version__", "register"]


def register() -> None:
    """Register the plugin; vLLM calls this in each process (`vllm.general_plugins`)."""
    from anchorprune_vllm.plugin import register_plugin

    register_plugin()
