"""Every exception of a decoder becomes one typed error."""

import json

import pytest
import yaml

from agent.report.contract import ReportError, decode_update
from extender.runtime import yaml_documents as yaml_documents_module
from extender.runtime.decoding import MalformedError, decode_with, excess_values, shallow_json
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


@pytest.mark.parametrize(
    "anchored", ["[" + "x, " * 99 + "x]", "{" + ", ".join(f"k{at}: x" for at in range(50)) + "}"]
)
def test_aliases_may_stand_for_as_many_values_as_the_limit(
    anchored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(yaml_documents_module, "_MOST_REPEATED", 303)

    def text(aliases: int) -> str:
        return f"- &a {anchored}\n" + "- *a\n" * aliases

    assert len(yaml_documents(text(3))) == 1  # each stands for 101 values
    with pytest.raises(yaml.YAMLError, match="more than 303 values"):
        yaml_documents(text(4))


def test_as_many_values_as_the_limit_are_decoded() -> None:
    most = 200_000 + 240_000 // 24

    assert excess_values((b"," * most).ljust(240_000)) == ""
    assert excess_values((b"," * (most + 1)).ljust(240_000)).startswith(f"{most + 1} commas")


def test_values_that_nest_too_deeply_are_null_and_all_others_stay() -> None:
    def nested(depth: int) -> str:
        return '{"a": ' * depth + "1" + "}" * depth

    text = '{"x": "[[{\\"", "deep": %s, "shallow": %s, "y": [1, {"z": "}]"}]}'

    assert json.loads(shallow_json((text % (nested(200), nested(127))).encode())) == json.loads(
        text % (nested(127).replace("1", "null"), nested(127))
    )
    assert shallow_json(b'{"a": [1]}') == b'{"a": [1]}'


def test_an_alias_stands_for_what_it_names() -> None:
    assert yaml_documents("a: &a [1]\nb: *a\n---\nc: 2") == [{"a": [1], "b": [1]}, {"c": 2}]
