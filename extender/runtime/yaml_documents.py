"""Read YAML from untrusted sources, with a bound on the expansion of aliases."""

import sys
from typing import Any, Final

import yaml
from typing_extensions import override  # in typing from Python 3.12 on

_MOST_REPEATED: Final = 100_000
"""Maximum number of values that the aliases of a document may add."""


class BoundedLoader(yaml.SafeLoader):
    """YAML's safe loader, in which aliases may add at most `_MOST_REPEATED` values.

    An alias takes a few bytes and stands for a whole subtree: with twenty lines of nested aliases,
    code that walks the document visits billions of values.
    """

    @override
    def construct_document(self, node: yaml.Node) -> Any:  # the library's
        """Build the document after a check of its size."""
        counts: dict[int, int] = {}
        if _count(node, counts) > len(counts) + _MOST_REPEATED:
            problem = f"its aliases stand for more than {_MOST_REPEATED} values"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_document(node)


def yaml_documents(text: str) -> list[object]:
    """Parse all documents of a YAML text.

    Raises:
        yaml.YAMLError: the text is not YAML, or its aliases expand too far.
        ValueError, RecursionError: a value is invalid or nested too deeply.
    """
    return list(yaml.load_all(text, BoundedLoader))


def _count(node: yaml.Node, counts: dict[int, int]) -> int:
    """Count a node and the values below it, with aliases expanded."""
    if id(node) in counts:
        return counts[id(node)]
    counts[id(node)] = sys.maxsize  # a node that contains itself has no end
    total = 1
    if isinstance(node, yaml.SequenceNode):
        total += sum(_count(item, counts) for item in node.value)
    elif isinstance(node, yaml.MappingNode):
        total += sum(_count(key, counts) + _count(value, counts) for key, value in node.value)
    counts[id(node)] = total
    return total
