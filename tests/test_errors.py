import pytest

from pfedbayes.errors import LONGEST, UserError


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb\r\tc", r"a\nb\r\tc"),
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("bytes \udcff", r"bytes \udcff"),
        ("\u202etfel", r"\u202etfel"),
        ("größer als 5\u00a0%: :cat: [bold]x[/]", "größer als 5\u00a0%: :cat: [bold]x[/]"),
    ],
)
def test_a_message_is_one_line_that_a_terminal_shows_as_it_is(text, shown):
    assert str(UserError(text)) == shown


def test_a_long_value_does_not_hide_the_cause():
    message = str(UserError(f"cannot read {'x' * 10**6} (File name too long): give another path"))
    assert len(message) < LONGEST + 10
    assert message.startswith("cannot read xxx")
    assert message.endswith("(File name too long): give another path")
