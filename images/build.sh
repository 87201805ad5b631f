#!/bin/sh
# Assembles a program in a new folder: the packages of its lock file, our own modules, and nothing else.
# The same inputs give the same files, wherever and whenever it runs.
#
#   images/build.sh extender|agent FOLDER
#
# PYTHON: the interpreter to build for (default python3). INSTALLED: the folder's path when the program
# runs, if it differs from FOLDER.
set -eu
program=$1
folder=$2
python=${PYTHON:-python3}
installed=${INSTALLED:-$folder}
root=$(cd "$(dirname "$0")/.." && pwd)

case $program in
extender) modules="extender agent/__init__.py agent/report/__init__.py agent/report/contract.py" ;;
agent) modules="agent worker_device extender/__init__.py extender/core extender/settings extender/runtime" ;;
*)
    echo "$program: must be extender or agent" >&2
    exit 2
    ;;
esac
if [ -e "$folder" ]; then
    echo "$folder: must not be there yet" >&2
    exit 2
fi

umask 022
mkdir -p "$folder"
# Only wheels with known hashes: nothing unknown is installed and nothing is compiled.
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
    --require-hashes --only-binary :all: --target "$folder" \
    --requirement "$root/images/$program.txt"
# Remove scripts, which name the build's interpreter, and their hashes; the program is started with `python -m`.
rm -rf "$folder/bin"
sed -i '/^\(\.\.\/\)*bin\//d' "$folder"/*.dist-info/RECORD
# A third of NumPy's files are its own tests.
find "$folder/numpy" -type d -name tests -prune -exec rm -rf {} +

for module in $modules; do
    mkdir -p "$folder/$(dirname "$module")"
    cp -R "$root/$module" "$folder/$module"
done
# The command line runs on the user's machine.
rm -rf "$folder/extender/cli"
# These modules read the extender's own settings and watch their file.
if [ "$program" = agent ]; then
    rm "$folder/extender/runtime/metrics.py" "$folder/extender/settings/config.py" \
        "$folder/extender/settings/reload.py"
fi
find "$folder" -name __pycache__ -prune -exec rm -rf {} +
# Needed by `--version`.
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$root/pyproject.toml")
mkdir "$folder/idlegpu-$version.dist-info"
printf 'Metadata-Version: 2.4\nName: idlegpu\nVersion: %s\n' "$version" \
    >"$folder/idlegpu-$version.dist-info/METADATA"

# Compile now, because the file system is read-only at run time. unchecked-hash: no file times and no
# trace of this folder's name.
PYTHONHASHSEED=0 "$python" -m compileall -q -j 1 --invalidation-mode unchecked-hash \
    -s "$folder" -p "$installed" "$folder"
# Readable by any user, also if the checkout is not (umask 077): nothing here is secret, and
# nothing is executable.
find "$folder" -type d -exec chmod 755 {} +
find "$folder" -type f -exec chmod 644 {} +
find "$folder" -exec touch -h -d 2020-01-01T00:00:00Z {} +
