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
    """{field of a dataclass: (the comment line above its section, its trailing comment)}."""
    section, found = "", {}
    for title, name, text in re.findall(r"^    (?:# (.*)|(\w+): .*?  # (.*))$", inspect.getsource(cls), re.M):
        section = title or section
        found |= {name: (section, text)} if name else {}
    return found


def parse(argv, prog, about, classes, examples):
    """{flag: value} of the flags given in argv. The fields of dataclasses are the flags, their comments the help."""
    epilog = "\n  ".join(["examples:", *examples])
    parser = argparse.ArgumentParser(prog, description=about, epilog=epilog, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.error = lambda message: sys.exit(f"{prog}: {message} (see {prog} --help)")
    groups = {}
    for f, (section, meaning) in ((f, comments(cls)[f.name]) for cls in classes for f in fields(cls)):
        kind = f.type
        shown = f.default if f.default not in ("", ()) else "none"
        how = {"help": f"{meaning} (default: {shown})".replace("%", "%%"), "default": argparse.SUPPRESS}
        if kind is bool:
            how |= {"action": argparse.BooleanOptionalAction}
        else:
            convert, word = KINDS[kind]
            how |= dict(type=_named(convert, word), metavar=word.split()[-1].upper())
            how |= {"action": "append"} if kind == tuple[str, ...] else {}
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        groups[section].add_argument(f"--{f.name}", **how)
    given = vars(parser.parse_args(argv))
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def _named(convert, word):
    """`convert` under the name that argparse puts into its errors."""

    def value(text):
        return convert(text)

    value.__name__ = word
    return value
