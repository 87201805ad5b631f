#!/bin/sh
# Puts a program together in a new folder: the packages that its lock file names, our own modules,
# and nothing else. The same inputs make the same files, wherever and whenever it runs.
#
#   images/build.sh extender|agent FOLDER
#
# PYTHON: the interpreter that it is for (python3 unless set). INSTALLED: where the folder will be
# when the program runs, if not where it is made.
set -eu
program=$1
folder=$2
python=${PYTHON:-python3}
installed=${INSTALLED:-$folder}
root=$(cd "$(dirname "$0")/.." && pwd)

case $program in
extender) modules="extender agent/__init__.py agent/report.py" ;;
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
# Hashes and wheels alone: nothing unknown is taken, and nothing is compiled.
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
    --require-hashes --only-binary :all: --target "$folder" \
    --requirement "$root/images/$program.txt"
# Scripts name the interpreter that built them; the program is started with `python -m`.
rm -rf "$folder/bin"
# A third of NumPy's files are its own tests.
find "$folder/numpy" -type d -name tests -prune -exec rm -rf {} +

for module in $modules; do
    mkdir -p "$folder/$(dirname "$module")"
    cp -R "$root/$module" "$folder/$module"
done
# What people ask it with runs where they are.
rm -rf "$folder/extender/cli"
# What reads the extender's own settings, and follows their file, stays with the extender.
if [ "$program" = agent ]; then
    rm "$folder/extender/runtime/metrics.py" "$folder/extender/settings/config.py" \
        "$folder/extender/settings/reload.py" "$folder/extender/settings/settings_file.py"
fi
find "$folder" -name __pycache__ -prune -exec rm -rf {} +
# What `--version` asks for.
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$root/pyproject.toml")
mkdir "$folder/idlegpu-$version.dist-info"
printf 'Metadata-Version: 2.4\nName: idlegpu\nVersion: %s\n' "$version" \
    >"$folder/idlegpu-$version.dist-info/METADATA"

# The file system is read-only where it runs, so this is the time to compile. Checked by no time of
# a file (unchecked-hash), and with no trace of this folder's name.
PYTHONHASHSEED=0 "$python" -m compileall -q -j 1 --invalidation-mode unchecked-hash \
    -s "$folder" -p "$installed" "$folder"
# Whoever it runs as reads all of it, whatever the modes of the checkout (umask 077): nothing here is secret,
# and nothing is a program of its own.
find "$folder" -type d -exec chmod 755 {} +
find "$folder" -type f -exec chmod 644 {} +
find "$folder" -exec touch -h -d 2020-01-01T00:00:00Z {} +
