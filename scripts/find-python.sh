#!/bin/sh
# Print the path of the first Python >= 3.12 that can make a virtual environment.
#
# Each candidate is run, not only looked up: pyenv puts a shim on PATH for every
# version that it holds, and a shim of a version that is not selected fails.
set -u

# Prints the interpreter's own path, so that a shim is left behind.
probe() {
    "$1" -c '
import ensurepip, sys, venv
sys.exit("too old") if sys.version_info < (3, 12) else print(sys.executable)
' </dev/null 2>/dev/null
}

if [ -n "${PYTHON:-}" ]; then
    probe "$PYTHON" && exit 0
    echo "PYTHON=$PYTHON is no Python >= 3.12 with venv and ensurepip;" \
        "looking for another." >&2
fi

pyenv_root=$(pyenv root 2>/dev/null) || pyenv_root=${HOME:-}/.pyenv
for candidate in \
    python3.12 python3.13 python3.14 python3 python \
    "$pyenv_root"/versions/3.1[2-9]*/bin/python; do
    probe "$candidate" && exit 0
done

echo "No Python >= 3.12 with the venv and ensurepip modules among \$PYTHON," \
    "python3.12 to python3.14, python3 and python on PATH, and pyenv's versions:" \
    "install one (Debian and Ubuntu: python3.12 and python3.12-venv), or name one" \
    "with 'make TARGET PYTHON=/path/to/python'." >&2
exit 1
