"""Every exception of a decoder becomes one typed error."""

import pytest
import yaml

from agent.report.contract import ReportError, decode_update
from extender.runtime.decoding import MalformedError, decode_with
from extender.runtime.yaml_documents import _MOST_REPEATED, yaml_documents

DEEP = 100_000


@pytest.mark.parametrize(
    "error", [RecursionError(), KeyError("tag"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")]
)
def test_every_exception_of_a_decoder_becomes_one_error(error: Exception) -> None:
    def decoder(_: bytes) -> None:
        raise error

    with pytest.raises(MalformedError) as raised:
        decode_with(decoder, b"")

    assert raised.value.__cause__ is error


def test_an_update_of_an_agent_that_is_nested_too_deeply_is_refused() -> None:
    array_of_one = b"\x91"
    content = b"\x82\xa7version\x01\xa5extra" + array_of_one * DEEP + b"\xc0"

    with pytest.raises(ReportError, match="cannot read update: nested too deeply"):
        decode_update(content)


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
        + "".join(
            f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
            for before, name in zip("abcdefgh", "bcdefghi", strict=True)
        ),
        "&a [*a]",
        "a: &a {x: 1}\n"
        + "".join(
            f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 10)}], {name}: 1}}\n"
            for before, name in zip("abcdefgh", "bcdefghi", strict=True)
        ),
    ],
    ids=["aliases-of-aliases", "an-alias-of-itself", "merged-maps"],
)
def test_aliases_that_expand_without_bound_are_refused(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match=f"more than {_MOST_REPEATED} values"):
        yaml_documents(text)


def test_an_alias_stands_for_what_it_names() -> None:
    assert yaml_documents("a: &a [1]\nb: *a\n---\nc: 2") == [{"a": [1], "b": [1]}, {"c": 2}]
