"""Settings file as the kubelet mounts it from a ConfigMap: behind two symlinks."""

import itertools
import shutil
from pathlib import Path
from typing import Final

NAME: Final = "settings.yaml"


class ConfigMap:
    """Mounted ConfigMap: `settings.yaml -> ..data/settings.yaml`, `..data -> ..2026_x`.

    Args:
        folder: folder of the mount.
        text: initial content of the file.
    """

    def __init__(self, folder: Path, text: str) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        folder.mkdir(parents=True, exist_ok=True)
        self.write(text)
        self.path.symlink_to(Path("..data") / NAME)

    @property
    def path(self) -> Path:
        """Path for `--config`."""
        return self._folder / NAME

    def write(self, text: str) -> None:
        """Replace the whole directory behind `..data` by one rename, and remove the old one."""
        data = self._folder / "..data"
        old = data.resolve() if data.is_symlink() else None
        new = self._folder / f"..2026_10_08_{next(self._numbers)}"
        new.mkdir()
        (new / NAME).write_text(text, encoding="utf-8")
        fresh = self._folder / "..data_tmp"
        fresh.symlink_to(new.name)
        fresh.rename(data)
        if old is not None:
            shutil.rmtree(old)
