# Sourced by the other scripts with the extras they need: `source scripts/env.sh demo`.
# Leaves a `python` that has torch and this repository: an active environment that has torch, else .venv.

step() { printf '\n[%3d s] %s\n' "$SECONDS" "$*"; }
patiently() {  # runs a silent command, with a dot every two seconds as a sign of life
    while sleep 2 && kill -0 $$ 2>/dev/null; do printf .; done &
    local dots=$! status=0
    "$@" || status=$?
    kill "$dots"
    wait "$dots" 2>/dev/null || true
    echo
    return "$status"
}
has_torch() { "$1" -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("torch"))' 2>/dev/null; }

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=..." >&2; exit 1; }
if [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] || ! has_torch python; then
    if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        step "Creating .venv"
        # A torch that the machine's Python has (as in GPU images) stays in use.
        has_torch "$python" && site=--system-site-packages
        "$python" -m venv ${site:-} .venv || { echo "On Debian: apt install python3-venv" >&2; exit 1; }
    fi
    source .venv/bin/activate
fi
if ! has_torch python; then
    step "Installing PyTorch (TORCH_SPEC chooses which)"
    patiently python -m pip install --quiet --disable-pip-version-check ${TORCH_SPEC:-torch==2.13.0}
fi
stamp=$(python -c 'import sys; print(sys.prefix)')/.dbo-moe-$1-$(cksum <pyproject.toml | cut -d' ' -f1)
if ! [ "$PWD" = "$(cat "$stamp" 2>/dev/null)" ]; then
    step "Installing this repository with [$1]"
    patiently python -m pip install --quiet --disable-pip-version-check -e ".[$1]"
    echo "$PWD" >"$stamp"
fi
# torchrun would set 1 and say so at length; ranks share the cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(python -c 'import os; print(max(1, (os.cpu_count() or 2) // 2))')}
