"""Helpers for answers of the API."""


def missing(reported: object, typed: object, at: str = "") -> list[str]:
    """Return the paths at which the typed answer lacks or changes a value."""
    if isinstance(reported, dict) and isinstance(typed, dict):
        return [
            place
            for key, value in reported.items()
            for place in (
                missing(value, typed[key], f"{at}.{key}") if key in typed else [f"{at}.{key}"]
            )
        ]
    if isinstance(reported, list) and isinstance(typed, list) and len(reported) == len(typed):
        pairs = enumerate(zip(reported, typed, strict=True))
        return [place for n, (one, two) in pairs for place in missing(one, two, f"{at}[{n}]")]
    return [] if reported == typed else [at]
