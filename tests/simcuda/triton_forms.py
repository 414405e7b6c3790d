# SPDX-License-Identifier: Apache-2.0
"""For which kinds of arguments Triton would have compiled our kernels, had they been compiled.

Triton compiles a kernel anew for other dtypes, for pointers that are not aligned, for whole numbers
that are 1 or divide by 16, and for other constants. The interpreter compiles nothing; this notes
what each launch would have asked for.
"""

from __future__ import annotations

import sys
from typing import Any

launched_forms: set[str] = set()
"""Of our kernels, since the process started."""


def note_form(executor: Any, args: Any, kwargs: Any) -> None:
    """Note a launch, if the kernel is ours."""
    function = executor.fn
    if not function.__module__.startswith("anchorprune_vllm."):
        return
    kernel = getattr(sys.modules[function.__module__], function.__name__)
    general = kernel.kwargs["do_not_specialize"] or ()
    given = {**dict(zip(executor.arg_names, args, strict=False)), **kwargs}
    kinds = [
        f"{name}: {_kind(value, name in executor.constexprs, name in general)}"
        for name, value in given.items()
    ]
    launched_forms.add(f"{function.__name__}({', '.join(kinds)})")


def _kind(value: Any, is_constant: bool, is_general: bool) -> str:
    if is_constant:
        return str(value)
    if hasattr(value, "data_ptr"):
        return f"{value.dtype}, {'' if value.data_ptr() % 16 == 0 else 'not '}aligned"
    if is_general or not isinstance(value, int):
        return type(value).__name__
    return "1" if value == 1 else f"int{', of 16' if value % 16 == 0 else ''}"
