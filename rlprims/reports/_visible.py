"""Text that is safe to show."""

# Shown by name, so that a response can neither control a terminal nor reverse the text around it.
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SURROGATES = range(0xD800, 0xE000)
_NAMES = {code: f"⟨U+{code:04X}⟩" for code in (*_CONTROLS, *_SURROGATES) if chr(code) not in "\t\n"}


def visible(text: str) -> str:
    """The text with names in place of characters that control a terminal or reorder text; tab and newline stay.

    >>> visible("\\x1b[2J")
    '⟨U+001B⟩[2J'
    """
    return text.translate(_NAMES)
