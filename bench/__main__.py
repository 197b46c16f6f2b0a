"""python -m bench lists all that can be measured; python -m bench NAME ... runs one of them."""

import ast
import runpy
import sys
from pathlib import Path


def main():
    files = sorted(path for path in Path(__file__).parent.glob("*.py") if not path.name.startswith("_"))
    about = {path.stem: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) for path in files}
    if not sys.argv[1:]:
        for name, text in about.items():
            print(f"python -m bench {name:16} {text.splitlines()[0]}")
    elif sys.argv[1] not in about:
        sys.exit(f"bench: {sys.argv[1]!r} is unknown: give one of {', '.join(about)}")
    else:
        sys.argv[:2] = [f"bench.{sys.argv[1]}"]
        runpy.run_module(f"bench.{sys.argv[0].removeprefix('bench.')}", run_name="__main__")


if __name__ == "__main__":
    main()
