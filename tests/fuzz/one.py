"""Fuzz one target in this process: `python -m tests.fuzz.one TARGET LIBFUZZER-OPTION...`."""

import asyncio
import gc
import sys


def main(name: str, options: list[str]) -> None:
    """Run until libFuzzer's options stop it or a body fails; Atheris ends the process."""
    import atheris  # noqa: PLC0415 - not every Python has it, and this module is imported by tests

    with atheris.instrument_imports(include=["agent", "extender"], enable_loader_override=False):
        from tests.fuzz.judging import judged  # noqa: PLC0415 - instrumented as imported
        from tests.fuzz.targets import targets  # noqa: PLC0415 - likewise
    gc.freeze()
    with asyncio.Runner() as runner:
        target = judged(targets(runner)[name]())
        atheris.Setup([name, *options], target)
        atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
