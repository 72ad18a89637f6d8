"""Progress of a long measurement: a bar in a terminal, a few lines elsewhere."""

import sys
from typing import TextIO

WIDTH = 24


class Bar:
    """Call it before each step with a few words about it."""

    def __init__(self, total: int, file: TextIO | None = None) -> None:
        self.total, self.done, self.file = total, 0, file or sys.stderr
        self.live = self.file.isatty()
        self.last = ""

    def __call__(self, what: str) -> None:
        if self.live:
            filled = WIDTH * self.done // max(self.total, 1)
            bar = "█" * filled + "░" * (WIDTH - filled)
            self._draw(f"{bar} {self.done}/{self.total} {what}")
        elif what.split(":")[0] != self.last:  # a log needs the candidates, not every step
            self.last = what.split(":")[0]
            print(f"{self.done}/{self.total} {self.last}", file=self.file, flush=True)
        self.done += 1

    def close(self) -> None:
        if self.live:
            self._draw("")

    def _draw(self, line: str) -> None:
        print(f"\r{line[:119]:<119}\r", end="", file=self.file, flush=True)
