# SPDX-License-Identifier: Apache-2.0
"""Products of bfloat16 in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np


def multiply_bfloat16(interpreter: Any) -> None:
    """Mend tl.dot: Triton 3.9's interpreter multiplies the bits of bfloat16 as if integers."""
    builder, handle, tl = interpreter.InterpreterBuilder, interpreter.TensorHandle, interpreter.tl
    dot = builder.create_dot

    def as_float32(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        bits = operand.data.astype(np.uint32) << 16  # bfloat16 is the upper half of float32
        return handle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, as_float32(a), as_float32(b), *rest)

    builder.create_dot = create_dot
