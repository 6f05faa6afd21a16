"""Flags of the command line and of the scripts."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """The description is printed as it is written; a wrong flag is one line on stderr and exit code 2."""

    def __init__(self, about: str | None, prog: str | None = None, epilog: str | None = None):
        written = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=prog, description=about, epilog=epilog, formatter_class=written)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")
