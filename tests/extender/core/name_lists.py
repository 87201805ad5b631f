"""Lists of node names as JSON."""

import json
from collections.abc import Sequence

from hypothesis import strategies as st

PLAIN = st.characters(min_codepoint=32, max_codepoint=126, exclude_characters='",\\')
"""Characters that Go writes into a list unescaped, except the comma; node names consist of these.
"""


node_names = st.integers(6, 40).flatmap(
    lambda shortest: st.lists(
        st.text(PLAIN, min_size=shortest, max_size=(shortest + 2) // 8 * 16 - 2),
        min_size=1,
        max_size=60,
        unique=True,
    )
)
"""Names of a cluster's nodes, of similar length."""


def written(names: Sequence[str]) -> bytes:
    """Return names as kube-scheduler writes them."""
    return json.dumps(list(names), separators=(",", ":")).encode()
