"""Names out of a trace, as they may be shown: not too long, and without characters that do something instead of being seen."""

from __future__ import annotations

import unicodedata

LONGEST = 160


def shown(text: str) -> str:
    """Control and formatting characters (also those that turn the direction of the text round) become U+FFFD.

    This does not make it HTML or a terminal's markup: whoever writes it there escapes it.
    """
    cut = text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
    return "".join("\ufffd" if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") else char for char in cut)
