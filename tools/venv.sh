#!/bin/sh
# Makes the virtual environment FOLDER with PYTHON unless it is whole already, and names what the system lacks for that.
#
#     tools/venv.sh FOLDER PYTHON
#
# One that was left half made, by an interruption or without Debian's python3-venv, is made anew.
set -eu
folder=$1 python=$2

missing() {
    echo "make: $1" >&2
    exit 1
}

command -v "$python" >/dev/null ||
    missing "no $python here; epdd needs Python 3.11 or newer (Debian: apt install python3 python3-venv)"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    missing "$("$python" --version) is too old; epdd needs 3.11 or newer: name one, like make PYTHON=python3.13 serve"
command -v g++ >/dev/null || command -v c++ >/dev/null ||
    echo "make: no C++ compiler, so CPUs decode at half the speed (Debian: apt install g++, then the same again)" >&2
"$folder/bin/python" -m pip --version >/dev/null 2>&1 && exit 0
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    missing "$python cannot make virtual environments (Debian: apt install python3-venv)"
"$python" -m venv --clear "$folder"
