# shellcheck shell=bash
# Makes this repository's Python environment once and puts it first on PATH. To be sourced:
#
#     source examples/environment.sh
#
# Complete and unchanged: nothing is printed, no network is needed. Interrupted or outdated (pyproject.toml or
# constraints.txt changed): it is repaired in place. Sets BDLM_PYTHON, the interpreter to use.
#
#   BDLM_VENV      folder of the environment (default: .venv in the repository root)
#   BDLM_PYTHON    an interpreter that already has everything (a container's): used as it is, nothing is installed
#   BDLM_EXTRAS    extras of pyproject.toml to install (default: test; on a GPU machine: test,gpu)
#   BDLM_PIP_ARGS  more arguments for pip, for example torch without CUDA (some 200 MB instead of some GB):
#                  BDLM_PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"

BDLM_ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

bdlm_say() { printf '[environment] %s\n' "$*" >&2; }

# True for a command that really runs Python 3.12 and can make an environment: a pyenv shim may exist and fail,
# and Debian ships python3.12 without ensurepip.
bdlm_is_python312() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1
}

# Prints the path of a usable Python 3.12, or fails.
bdlm_find_python() {
    local candidate pyenv_root
    local candidates=(python3.12 python3 python)
    if pyenv_root=$(pyenv root 2>/dev/null) || pyenv_root=${PYENV_ROOT:-}; then
        candidates+=("$pyenv_root"/versions/3.12*/bin/python)
    fi
    candidates+=(/usr/local/bin/python3.12 /opt/homebrew/bin/python3.12)
    for candidate in "${candidates[@]}"; do
        if bdlm_is_python312 "$candidate"; then
            command -v -- "$candidate"
            return 0
        fi
    done
    return 1
}

bdlm_explain_python() {
    bdlm_say "error: no Python 3.12 with venv and ensurepip was found (tried python3.12, python3, python, pyenv, uv)."
    bdlm_say "Install one of:"
    bdlm_say "    Debian, Ubuntu   apt-get install python3.12 python3.12-venv"
    bdlm_say "    pyenv            pyenv install 3.12"
    bdlm_say "    uv               https://docs.astral.sh/uv (it fetches Python 3.12 by itself)"
    bdlm_say "or name an interpreter that has this repository's packages: BDLM_PYTHON=/path/to/python"
}

# What a complete environment was made from: changes with the requirements, the extras and the place of the checkout.
bdlm_environment_key() {
    { cat -- "$BDLM_ROOT/pyproject.toml" "$BDLM_ROOT/constraints.txt"; printf '%s\n' "$BDLM_ROOT" "${BDLM_EXTRAS:-test}"; } |
        cksum | tr ' ' '-'
}

# Writes the state file at once, so that an interruption leaves the old state or the new one.
bdlm_write_state() {
    printf '%s\n' "$2" >"$1/.bdlm-environment.new" && mv -f -- "$1/.bdlm-environment.new" "$1/.bdlm-environment"
}

# True when an interpreter finds these modules (they are not imported, which would take seconds).
bdlm_has_modules() {
    "$1" -c 'import importlib.util as u, sys; sys.exit(not all(u.find_spec(m) for m in sys.argv[1:]))' "${@:2}" >/dev/null 2>&1
}

bdlm_is_complete() {
    local state
    [[ -f $1/.bdlm-environment ]] || return 1
    state=$(<"$1/.bdlm-environment")
    [[ $state == "$2" ]] || return 1
    bdlm_has_modules "$1/bin/python" torch megatron.core megatron.bdlm
}

# A folder that holds something else is never emptied.
bdlm_claim() {
    if [[ -d $1 && -n $(ls -A -- "$1") && ! -f $1/pyvenv.cfg ]] && ! compgen -G "$1/.bdlm-*" >/dev/null; then
        bdlm_say "error: BDLM_VENV=$1 is a folder with other files; name a new folder, for example $BDLM_ROOT/.venv"
        return 1
    fi
    mkdir -p -- "$1"
}

# Makes $1 a Python 3.12 environment with pip; an unusable one is emptied first.
bdlm_make_venv() {
    local venv=$1 python
    if bdlm_is_python312 "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        return 0
    fi
    bdlm_write_state "$venv" incomplete || return 1
    find "$venv" -mindepth 1 -maxdepth 1 ! -name '.bdlm-*' -exec rm -rf -- {} + || return 1
    if python=$(bdlm_find_python); then
        bdlm_say "making $venv with $python"
        "$python" -m venv "$venv" || return 1
    elif command -v uv >/dev/null 2>&1; then
        bdlm_say "making $venv with uv"
        uv venv --quiet --allow-existing --seed --python 3.12 "$venv" || { bdlm_explain_python; return 1; }
    else
        bdlm_explain_python
        return 1
    fi
}

bdlm_install() {
    local venv=$1 key=$2 extras=${BDLM_EXTRAS:-test} pip_args=()
    read -r -a pip_args <<<"${BDLM_PIP_ARGS:-}"
    bdlm_make_venv "$venv" || return 1
    bdlm_write_state "$venv" incomplete || return 1
    bdlm_say "installing packages into $venv (first time: PyPI's torch brings CUDA libraries, several GB and minutes;"
    bdlm_say "a smaller one without CUDA: BDLM_PIP_ARGS=\"--extra-index-url https://download.pytorch.org/whl/cpu\")"
    if ! (cd -- "$BDLM_ROOT" && "$venv/bin/python" -m pip install --disable-pip-version-check \
        ${pip_args[@]+"${pip_args[@]}"} -c constraints.txt -e ".[$extras]" >&2); then
        bdlm_say "error: pip could not install the packages (its message stands above; no network? disk full?)."
        bdlm_say "What was downloaded stays: the same command continues."
        return 1
    fi
    if ! "$venv/bin/python" -c 'import torch, megatron.core, megatron.bdlm' >&2; then
        bdlm_say "error: the packages are installed but do not import; the message above says which"
        return 1
    fi
    bdlm_write_state "$venv" "$key" || return 1
    bdlm_say "ready: $venv"
}

bdlm_environment() {
    local venv=${BDLM_VENV:-$BDLM_ROOT/.venv} key
    if [[ -n ${BDLM_PYTHON:-} && ${BDLM_PYTHON:-} != "$venv/bin/python" ]]; then
        if ! bdlm_has_modules "$BDLM_PYTHON" torch megatron.core; then
            bdlm_say "error: BDLM_PYTHON=$BDLM_PYTHON does not have torch and megatron.core; unset it to have $venv made"
            return 1
        fi
        BDLM_PYTHON=$(command -v -- "$BDLM_PYTHON")
    else
        [[ $venv == /* ]] || venv=$PWD/$venv
        key=$(bdlm_environment_key)
        if ! bdlm_is_complete "$venv" "$key"; then
            bdlm_claim "$venv" || return 1
            # One maker at a time: a second start waits and then finds it complete. Without flock: no waiting.
            (
                if command -v flock >/dev/null 2>&1; then
                    exec 9>"$venv/.bdlm-lock" && flock 9
                fi
                bdlm_is_complete "$venv" "$key" || bdlm_install "$venv" "$key"
            ) || return 1
        fi
        BDLM_PYTHON=$venv/bin/python
    fi
    PATH=$(dirname -- "$BDLM_PYTHON"):$PATH
    # From a checkout that BDLM_PYTHON does not have installed, our portion of the namespace is found here.
    PYTHONPATH=$BDLM_ROOT${PYTHONPATH:+:$PYTHONPATH}
    export PATH PYTHONPATH BDLM_PYTHON
}

bdlm_environment
