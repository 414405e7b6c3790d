# SPDX-License-Identifier: Apache-2.0
# What the scripts of this folder share. They define `usage` and then source this file.

fail() {
    printf "${0##*/}: %s\n" "$@" >&2
    exit 2
}

# Sets `dry_run`, and `further` to the arguments behind --.
read_arguments() { # what goes behind --, arguments ...
    local behind=$1
    shift
    dry_run=false
    while [ $# -gt 0 ]; do
        case $1 in
            --help | -h) usage && exit 0 ;;
            --dry-run) dry_run=true ;;
            --) shift && break ;;
            *) fail "unknown argument '$1'; $behind go behind --, the rest is in --help" ;;
        esac
        shift
    done
    further=("$@")
}

need_whole_numbers() { # names of variables ...
    local name
    for name in "$@"; do
        [[ ${!name} =~ ^[1-9][0-9]*$ ]] || fail "$name is '${!name}': give a positive whole number"
    done
}

need_command() { # name of the variable that holds it, its usual name
    command -v "${!1}" >/dev/null ||
        fail "there is no '${!1}': name it, $1=/path/to/bin/$2, or activate the environment that" \
            "has it (after \`make setup\`: source .venv/bin/activate)"
}

show() { printf '%q ' "$@" && echo; }
