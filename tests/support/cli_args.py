# SPDX-License-Identifier: Apache-2.0
"""The parser of `vllm serve`, which is in another place since vLLM 0.33."""

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser
except ModuleNotFoundError:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser

__all__ = ["make_arg_parser"]
