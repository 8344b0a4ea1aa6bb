"""Progress of a long reading of text."""

import sys
import time


class Progress:
    """A bar on a terminal, otherwise a plain line every ten seconds and one at the end."""

    def __init__(self, total: int | None) -> None:
        self.total, self.bytes, self.documents, self.tokens = total, 0, 0, 0
        self.started = self.said = time.monotonic()
        self.bar = None

    def __enter__(self) -> "Progress":
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as Bar

            rate = DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
            self.bar = Bar(TextColumn("Tokenising"), BarColumn(), *rate, console=Console(stderr=True))
            self.task = self.bar.add_task("", total=self.total)
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()
        elif error[0] is None:
            self._say()

    def advance(self, size: int, tokens: int) -> None:
        self.bytes, self.documents, self.tokens = self.bytes + size, self.documents + 1, self.tokens + tokens
        if self.bar is not None:
            self.bar.advance(self.task, size)
        elif time.monotonic() - self.said > 10:
            self._say()

    def _say(self) -> None:
        self.said = time.monotonic()
        share = f" ({min(self.bytes / self.total, 1):.0%})" if self.total else ""
        print(
            f"Tokenised {self.documents:,} documents, {self.bytes / 1e6:.1f} MB{share}, {self.tokens:,} tokens "
            f"in {self.said - self.started:.0f} s",
            file=sys.stderr,
            flush=True,
        )
