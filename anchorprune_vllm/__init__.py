# SPDX-License-Identifier: Apache-2.0
"""Visual-token pruning for vLLM: keep the K visual tokens that a question needs.

Importing this package is light: neither torch nor vLLM is loaded until needed.
"""

from anchorprune_vllm.config import PruneConfig

__version__ = "0.1.0"
__all__ = ["PruneConfig", "__version__", "register"]


def register() -> None:
    """Entry point of `vllm.general_plugins`; vLLM calls it in each of its processes."""
    from anchorprune_vllm.plugin import register_plugin

    register_plugin()
