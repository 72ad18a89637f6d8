"""Progress of a training run: a live line in a terminal, plain lines elsewhere."""

import sys
from typing import Any


def human(value: float, unit: str = "", digits: int = 3) -> str:
    """1234567 → "1.23M"."""
    for limit, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.{digits}g}{letter}{unit}"
    return f"{value:.{digits}g}{unit}"


def count(value: float, digits: int = 3) -> str:
    """1234567890 → "1.23B"."""
    return human(value, "", digits).replace("G", "B")


def human_bytes(value: float) -> str:
    for limit, letter in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(value) >= limit:
            return f"{value / limit:.1f} {letter}"
    return f"{value:.0f} B"


def describe(record: dict[str, Any]) -> str:
    """One measurement in words."""
    parts = [
        f"loss {record['loss']:.3f}",
        f"{count(record['tokens_per_second'])} tokens/s",
        f"{human(record['flops_per_second'], 'FLOP/s')}",
    ]
    if record.get("peak_share") is not None:
        parts[-1] += f" ({record['peak_share']:.1%} of peak)"
    parts += [human_bytes(record["memory"]), f"gradient norm {record['gradient_norm']:.2f}"]
    if record.get("balance") is not None:
        parts.append(f"balance {record['balance']:.2f}")
    return "  ".join(parts)


class Plain:
    """Lines of text."""

    def start(self, first_step: int, steps: int) -> None:
        self._steps = steps
        self.say("(balance: 1 when all experts get the same share, E when one gets everything)")

    def say(self, message: str) -> None:
        print(message, flush=True)

    def busy(self, message: str) -> None:
        """Report work before the first measurement."""
        self.say(message)

    def train(self, record: dict[str, Any]) -> None:
        self.say(
            f"step {record['step']:>{len(str(self._steps))}}/{self._steps}  {describe(record)}"
        )

    def validation(self, record: dict[str, Any]) -> None:
        step = f"step {record['step']:>{len(str(self._steps))}}/{self._steps}"
        self.say(f"{step}  validation loss {record['loss']:.3f}")

    def stop(self) -> None:
        pass


class Live(Plain):
    """A bar with the latest measurement; messages scroll above it."""

    def start(self, first_step: int, steps: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        done, what = TextColumn("[bold]{task.completed}/{task.total}"), "{task.description}"
        columns = (done, BarColumn(bar_width=24), TimeRemainingColumn(), TextColumn(what))
        self._bar = Progress(*columns)
        super().start(first_step, steps)
        self._held = ""
        self._task = self._bar.add_task("", total=steps, completed=first_step)
        self._bar.start()

    def say(self, message: str) -> None:
        bar = getattr(self, "_bar", None)
        if bar is None:
            return super().say(message)
        bar.console.print(message, markup=False, highlight=False, soft_wrap=True)

    def busy(self, message: str) -> None:
        self._bar.update(self._task, description=message)

    def train(self, record: dict[str, Any]) -> None:
        text = describe(record) + self._held
        self._bar.update(self._task, completed=record["step"], description=text)

    def validation(self, record: dict[str, Any]) -> None:
        self._held = f"  validation {record['loss']:.3f}"

    def stop(self) -> None:
        self._bar.stop()


class Silent(Plain):
    """Ranks other than the first."""

    def start(self, first_step: int, steps: int) -> None:
        pass

    def say(self, message: str) -> None:
        pass

    def train(self, record: dict[str, Any]) -> None:
        pass

    def validation(self, record: dict[str, Any]) -> None:
        pass


def display(first_rank: bool = True) -> Plain:
    if not first_rank:
        return Silent()
    return Live() if sys.stdout.isatty() else Plain()
