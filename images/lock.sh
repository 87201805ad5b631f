#!/bin/sh
# Writes the images' lock files anew: what *.in name, in the versions of requirements.txt, which the
# tests run with. Needs uv; `make lock` has it.
#
#   UV=uv images/lock.sh
set -eu
cd "$(dirname "$0")/.."
for program in extender agent; do
    ${UV:-uv} pip compile --quiet --universal --python-version 3.11 --generate-hashes \
        --no-emit-index-url --no-annotate --no-header \
        --constraint requirements.txt "images/$program.in" --output-file "images/$program.txt"
done
