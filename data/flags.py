"""The command line, whose flags are the fields of dataclasses and their trailing comments; and what scripts share."""

import argparse
import contextlib
import difflib
import importlib
import inspect
import math
import os
import re
import signal
import sys
import textwrap
from dataclasses import fields
from functools import cache


def to_int(text):
    """A whole number flag's value."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None


def to_float(text):
    """A number flag's value; NaN and infinities are refused."""
    with contextlib.suppress(ValueError):
        if math.isfinite(value := float(text)):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is no finite number")


def to_ints(text):
    """A tuple flag's value: whole numbers separated by commas."""
    return tuple(to_int(part) for part in text.split(",") if part)


def to_int_or_ints(text):
    """A whole number, or a tuple of them if there are commas."""
    found = to_ints(text) if "," in text else to_int(text)
    if found == ():
        raise argparse.ArgumentTypeError(f"{text!r} holds no number")
    return found


KINDS = {  # type of a field: (function that converts its text, what --help shows for the value)
    int: (to_int, "NUMBER"),
    float: (to_float, "NUMBER"),
    str: (str, "TEXT"),
    tuple: (to_ints, "1,2,..."),
    int | tuple: (to_int_or_ints, "1,2,..."),
    int | str: (str, "TEXT"),
    tuple[str, ...]: (str, "TEXT"),  # the flag may be given several times
}


ALIASES = {  # what other tools call a flag of ours
    "batch_size": "batch",
    "learning_rate": "lr",
    "max_iters": "steps",
    "max_steps": "steps",
    "max_new_tokens": "n_tokens",
    "num_samples": "n_samples",
    "block_size": "tgt_len",
    "seq_len": "tgt_len",
    "out_dir": "out",
    "checkpoint": "run",
    "device": "devices",
    "weights": "init",
}


@cache
def field_comments(cls):
    """{field of a dataclass: (the comment line above its section, its trailing comment)}."""
    section, found = "", {}
    source = textwrap.dedent(inspect.getsource(cls))
    for title, name, text in re.findall(r"^    (?:# (.*)|(\w+): .*?  # (.*))$", source, re.M):
        section = title or section
        if name:
            found[name] = (section, text)
    missing = [f.name for f in fields(cls) if f.name not in found]
    if missing:
        raise ValueError(
            f"{cls.__name__}.{missing[0]} has no comment behind it on its line: its --help is that comment"
        )
    return found


def parse(argv, prog, description, classes, examples, *, hidden=(), choices=None, bare="data"):
    """{flag: value} of the flags given in argv. Every field of the dataclasses is a flag, except those in `hidden`.

    choices: {field: allowed texts}. bare: the flag that is suggested for a word without one.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog,
        description=description,
        epilog="\n  ".join(["examples:", *examples]),
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def fail(message):
        if message.endswith("expected one argument"):
            message += ": if it begins with --, write --FLAG=--TEXT"
        sys.exit(f"{prog}: {printable(message)} (see {prog} --help)")

    parser.error = fail
    groups, repeatable, texts = {}, set(), set()
    for f, (section, comment) in [(f, field_comments(cls)[f.name]) for cls in classes for f in fields(cls)]:
        if f.name in hidden:
            continue
        default = f.default if f.default not in ("", ()) else "none"
        options = {"help": f"{comment} (default: {default})".replace("%", "%%")}
        if f.type is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif choices and f.name in choices:
            options["choices"] = choices[f.name]
        else:
            options["type"], options["metavar"] = KINDS[f.type]
        if f.type == tuple[str, ...]:
            options["action"] = "append"
            repeatable.add(f.name)
        if f.type in (str, int | str):
            texts.add(f.name)
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        groups[section].add_argument(f"--{f.name}", **options)
    known = {name for action in parser._actions for name in action.option_strings}
    given, unknown = parser.parse_known_args(join_dashes(argv, known))
    if unknown:
        fail(f"unrecognized arguments: {' '.join(unknown)}{suggestion(unknown[0], known, given, bare)}")
    names = [word.partition("=")[0].removeprefix("--").removeprefix("no-") for word in argv if word[:2] == "--"]
    for name, value in vars(given).items():
        if names.count(name) > 1 and name not in repeatable:
            fail(f"--{name} is given {names.count(name)} times: give it once")
        if value == "" and name in texts:
            fail(f"{name} is empty: give a value, or leave --{name} out")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in vars(given).items()}


def join_dashes(argv, known):
    """argv with a value that begins with a dash put behind its flag's equals sign: argparse takes it for a flag."""
    joined = []
    for word in argv:
        if joined and joined[-1] in known and word[:1] == "-" and word[:2] != "--" and word not in known:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def suggestion(word, known, given, bare):
    """What may have been meant by a word that is no flag: the end of an error message. bare: see `parse`."""
    if not word.startswith("-"):
        if bare == "data" and "data" in given:
            return ": --data takes one text: python -m data.prepare FILE FILE --out DIR joins several"
        return f": write --{bare} {word}"
    name = word.partition("=")[0].lstrip("-")
    close = [f"--{ALIASES[name]}"] if name in ALIASES else difflib.get_close_matches(f"--{name}", sorted(known), 1)
    return f": write {close[0]}" if close and close[0] in known else ""


def import_tool(name, flag):
    """The module tools.NAME, which --FLAG needs. ValueError if there is no such file."""
    try:
        return importlib.import_module(f"tools.{name}")
    except ModuleNotFoundError as e:
        if e.name not in ("tools", f"tools.{name}"):
            raise
        missing = f"--{flag} needs tools/{name}.py, which is missing"
        raise ValueError(f"{missing}: restore the folder tools/, or leave the flag out") from None


def write_stdout(data):
    """Writes bytes to standard output unchanged and at once, whatever the locale."""
    out = getattr(sys.stdout, "buffer", None)
    if not out:
        return print(data.decode("utf-8", "replace"), end="", flush=True)
    sys.stdout.flush()
    out.write(data)
    out.flush()


def print_status(*words):
    """Prints a line for people to standard error. What becomes of it never stops the work: it may be closed or full."""
    if sys.stderr is not None:  # print would take standard output instead
        with contextlib.suppress(OSError, ValueError):
            print(printable(" ".join(map(str, words))), file=sys.stderr, flush=True)


def fail(prog, message):
    """Ends a script with an error of one line, whatever names of a file are in it."""
    line = printable(str(message)).replace("\n", "\\n")
    sys.exit(f"{prog}: {line}")


# C0 and C1 but newline and tab, marks and overrides of direction, line and paragraph separators, lone surrogates.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text):
    """Text that a terminal or browser shows and never obeys: control characters are escapes such as \\x1b."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def print_result(text):
    """Prints a line to standard output. Once that is closed or full, says so and goes on without it."""
    try:
        write_stdout(f"{text}\n".encode("utf-8", "surrogateescape"))
    except (OSError, ValueError) as e:
        discard_stdout()
        print_status(f"standard output takes no more ({e}): going on without it")


def discard_stdout():
    """Sends standard output nowhere from now on, so that the exit doesn't fail for what is left to write."""
    sys.stdout = open(os.devnull, "w")
    with contextlib.suppress(OSError):
        os.dup2(sys.stdout.fileno(), 1)


def is_out_of_memory(error):
    """Whether a JaxRuntimeError says that memory ran out."""
    return "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)


def exit_at_once(number=signal.SIGINT, frame=None):
    """Ends the process as Ctrl-C does: one line, exit code 130, no traceback. A signal handler, too."""
    with contextlib.suppress(OSError):
        os.write(2, b"stopped at once\n")  # print may be what was interrupted
    os._exit(130)  # sys.exit would take JAX down in the middle of its work, and crash


def exit_on_interrupt():
    """Makes Ctrl-C end the process at once: what a script calls first, since importing jax takes a while."""
    signal.signal(signal.SIGINT, exit_at_once)


def use_huge_pages():
    """Starts this process again with glibc's huge pages (Linux), which make a training step on a CPU a tenth faster.

    XLA allocates a step's temporaries anew each time; in pages of 4 KiB that is tens of thousands of page faults.
    GLIBC_TUNABLES must be set before a process starts. With glibc.malloc.hugetlb in it nothing happens.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform == "linux" and "glibc.malloc.hugetlb" not in tunables and sys.gettrace() is None:
        os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, [tunables, "glibc.malloc.hugetlb=1"]))
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def run_script(main):
    """Calls a script's main. Ctrl-C ends it with one line and exit code 130, whatever swallows KeyboardInterrupt."""
    interrupted = False
    unraisablehook = sys.unraisablehook

    def handler(number, frame):
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    def hook(args):
        if args.exc_type is KeyboardInterrupt:  # in a callback, where Python prints an exception and goes on
            exit_at_once()
        unraisablehook(args)

    signal.signal(signal.SIGINT, handler)
    sys.unraisablehook = hook
    try:
        main()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the exit itself must not be interrupted
        sys.unraisablehook = unraisablehook
        if interrupted:
            exit_at_once()
