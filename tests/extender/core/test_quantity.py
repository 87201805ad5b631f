import contextlib
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.quantity import _MAX_VALUE, parse_quantity, parse_whole

BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}
DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}

decimals = st.decimals(min_value=0, max_value=10**6, allow_nan=False, places=3)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        pytest.param("0", Fraction(0), id="zero"),
        pytest.param("+1", Fraction(1), id="plus sign"),
        pytest.param("-1.5", Fraction(-3, 2), id="negative"),
        pytest.param(".5", Fraction(1, 2), id="no whole part"),
        pytest.param("5.", Fraction(5), id="no fraction after the point"),
        pytest.param("1E", Fraction(10**18), id="E alone is exa"),
        pytest.param("1E3", Fraction(1000), id="E with digits is an exponent"),
        pytest.param("1e-3", Fraction(1, 1000), id="negative exponent"),
        pytest.param("0.5Gi", Fraction(2**29), id="fraction of a binary unit"),
        pytest.param(7, Fraction(7), id="bare JSON integer"),
        pytest.param(1.5, Fraction(3, 2), id="bare JSON number"),
        pytest.param(1e16, Fraction(10**16), id="JSON number that Python writes as 1e+16"),
        pytest.param("100E", Fraction(_MAX_VALUE), id="capped as Kubernetes does"),
        pytest.param(10**30, Fraction(_MAX_VALUE), id="huge integer is capped"),
    ],
)
def test_a_quantity_is_exact(text: object, value: Fraction) -> None:
    assert parse_quantity(text) == value


def test_space_around_a_quantity_is_left_out_as_kubernetes_does() -> None:
    assert parse_quantity(" 1\n") == 1


NO_QUANTITIES: list[object] = [
    *("", " ", ".", "1 Gi", "20GB", "20gb", "1K", "1ki", "1mi", "1e", "1e1.5", "0x10"),
    *(
        "1_000",
        "1,5",
        "--1",
        "nan",
        "inf",
        "Gi",
        "\N{ARABIC-INDIC DIGIT ONE}",
        "\N{SUPERSCRIPT TWO}",
    ),
    *(None, True, [], {}),
]


@pytest.mark.parametrize("text", NO_QUANTITIES)
def test_an_invalid_quantity_is_refused_with_the_allowed_form(text: object) -> None:
    with pytest.raises(ValueError, match=r"is not a quantity: must be .*Gi"):
        parse_quantity(text)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_invalid_number_is_refused(number: float) -> None:
    with pytest.raises(ValueError, match=r"is not a quantity"):
        parse_quantity(number)


def test_an_overlong_text_is_quoted_in_part_only() -> None:
    with pytest.raises(ValueError, match=r"is not a quantity") as refusal:
        parse_quantity("9" * 1_000_000)

    assert len(str(refusal.value)) < 400


@pytest.mark.parametrize("text", ["1e999999999", "1e-999999999", "9" * 60 + "E999"])
def test_a_huge_exponent_is_refused_at_once(text: str) -> None:
    with pytest.raises(ValueError, match="the exponent must be at most 99"):
        parse_quantity(text)  # 10 ** 999999999 would take minutes and gigabytes


@given(decimals, st.sampled_from(sorted(BINARY)))
def test_binary_suffixes_multiply_by_powers_of_1024(number: Decimal, suffix: str) -> None:
    assert parse_quantity(f"{number:f}{suffix}") == Fraction(number) * BINARY[suffix] or (
        Fraction(number) * BINARY[suffix] > _MAX_VALUE
    )


@given(decimals, st.sampled_from(sorted(DECIMAL)))
def test_decimal_suffixes_equal_their_exponents(number: Decimal, suffix: str) -> None:
    assert parse_quantity(f"{number:f}{suffix}") == parse_quantity(f"{number:f}e{DECIMAL[suffix]}")


@given(st.integers(0, _MAX_VALUE))
def test_a_count_survives_writing_and_reading(count: int) -> None:
    assert parse_whole(str(count)) == count
    assert parse_whole(count) == count


@given(st.integers(0, 10**9))
def test_a_count_in_thousandths_is_rounded_up(thousandths: int) -> None:
    count = parse_whole(f"{thousandths}m")

    assert 0 <= count * 1000 - thousandths < 1000


@pytest.mark.parametrize("text", ["-1", "-500m", -2])
def test_a_negative_count_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"is negative: must be 0 or more"):
        parse_whole(text)


@given(st.text() | st.from_regex(r"[+-]?[0-9.]{0,70}[a-zA-Z]{0,3}[0-9+-]{0,20}") | st.floats())
def test_any_input_is_a_quantity_or_a_value_error(value: object) -> None:
    quantity = Fraction(0)
    with contextlib.suppress(ValueError):
        quantity = parse_quantity(value)

    assert abs(quantity) <= _MAX_VALUE
