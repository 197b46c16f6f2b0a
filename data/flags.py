"""The command line: the fields of dataclasses are the flags, their trailing comments the help."""

import argparse
import inspect
import math
import re
import sys
from dataclasses import fields
from functools import cache


def finite(text):
    """A float flag's value; NaN and infinities are refused."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def numbers(text):
    """A tuple flag's value: whole numbers between commas."""
    return tuple(int(part) for part in text.split(",") if part)


def one_or_more(text):
    """A whole number, or a tuple of them where there are commas."""
    return numbers(text) if "," in text else int(text)


KINDS = {int: (int, "whole number"), float: (finite, "number"), str: (str, "text"), tuple: (numbers, "numbers 1,2,...")}
KINDS |= {int | tuple: (one_or_more, "whole number, or several 1,2,...")}
KINDS |= {int | str: (str, "text"), tuple[str, ...]: (str, "text")}  # the latter may be given several times


@cache
def comments(cls):
    """{field of a dataclass: its trailing comment}."""
    return dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(cls), re.M))


def parse(argv, prog, about, groups, epilog=None):
    """{flag: value} of the flags given in argv. A dataclass's fields are the flags, their comments the help."""
    parser = argparse.ArgumentParser(prog, description=about, epilog=epilog, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.error = lambda message: sys.exit(f"{prog}: {message} (see {prog} --help)")
    for title, cls in groups.items():
        group = parser.add_argument_group(title)
        for f in fields(cls):
            kind, shown = f.type, f.default if f.default not in ("", ()) else "none"
            text = f"{comments(cls)[f.name]} (default: {shown})".replace("%", "%%")
            if kind is bool:
                action = argparse.BooleanOptionalAction
                group.add_argument(f"--{f.name}", action=action, default=argparse.SUPPRESS, help=text)
            else:
                convert, word = KINDS[kind]
                how = dict(type=_named(convert, word), metavar=word.split()[-1].upper(), default=argparse.SUPPRESS)
                how |= {"action": "append"} if kind == tuple[str, ...] else {}
                group.add_argument(f"--{f.name}", help=text, **how)
    given = vars(parser.parse_args(argv))
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def _named(convert, word):
    """`convert` under the name that argparse puts into its errors."""

    def value(text):
        return convert(text)

    value.__name__ = word
    return value
