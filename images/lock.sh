#!/bin/sh
# Writes the images' lock files: the packages in *.in, in the versions of requirements.txt, with which
# the tests run. Needs uv; `make lock` installs it.
#
#   UV=uv images/lock.sh
set -eu
cd "$(dirname "$0")/.."
for program in extender agent; do
    ${UV:-uv} pip compile --quiet --universal --python-version 3.11 --generate-hashes \
        --no-emit-index-url --no-annotate --no-header \
        --constraint requirements.txt "images/$program.in" --output-file "images/$program.txt"
done
