"""Draw the pictures of docs/kernels.md: `python docs/pictures/draw.py`.

`MEMORY` is the map of shared memory; `tests/kernels/test_machine_code_memory.py` compares it with
what the compiler reports.
"""

from html import escape
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
LIMIT = 227 * 1024  # bytes that a program may use on Hopper
INK, MUTED, GRID = "#1f2430", "#6b7280", "#e5e7eb"
WEIGHTS, ROWS, OUT, Z, SMALL = "#2563eb", "#93c5fd", "#f59e0b", "#10b981", "#9ca3af"
IDLE = "#f3f4f6"


# --- shared memory --------------------------------------------------------------------------------
class Region(NamedTuple):
    """`count` buffers of one shape in shared memory."""

    name: str
    colour: str
    count: int
    shape: tuple[int, ...]
    itemsize: int

    @property
    def size(self) -> int:
        size = self.count * self.itemsize
        for n in self.shape:
            size *= n
        return size


class Memory(NamedTuple):
    """Shared memory of a kernel. `barriers` counts the padding between them; `arguments` are the
    values that the compiler hands to the other warpgroups, and a byte for each of their warps."""

    kernel: str
    regions: tuple[Region, ...]
    barriers: int
    arguments: int

    @property
    def size(self) -> int:
        return sum(r.size for r in self.regions) + self.barriers + self.arguments


MEMORY = (
    Memory("up", (
        Region("W1", WEIGHTS, 4, (256, 64), 2),
        Region("X", ROWS, 8, (64, 64), 2),
        Region("Z and A", OUT, 4, (64, 64), 2),
    ), 64, 168),
    Memory("gemm", (
        Region("W", WEIGHTS, 3, (256, 64), 2),
        Region("rows", ROWS, 6, (64, 64), 2),
        Region("Y", OUT, 2, (64, 256), 2),
    ), 56, 152),
    Memory("dz", (
        Region("W2", WEIGHTS, 6, (32, 256), 2),
        Region("dO", ROWS, 12, (64, 32), 2),
        Region("Z, then dZ", Z, 8, (64, 64), 2),
        Region("A'", OUT, 4, (64, 32), 2),
    ), 160, 232),
    Memory("wgrad", (
        Region("right", WEIGHTS, 4, (64, 256), 2),
        Region("left", ROWS, 8, (64, 64), 2),
        Region("dW", OUT, 4, (64, 64), 2),
    ), 64, 184),
    Memory("fp8_up", (
        Region("W1", WEIGHTS, 4, (256, 128), 1),
        Region("X", ROWS, 8, (64, 128), 1),
        Region("Z, then A", OUT, 4, (64, 64), 2),
    ), 64, 216),
    Memory("fp8_gemm", (
        Region("W", WEIGHTS, 3, (256, 128), 1),
        Region("rows", ROWS, 6, (64, 128), 1),
        Region("Y", OUT, 2, (64, 256), 2),
    ), 56, 168),
    Memory("fp8_dz", (
        Region("W2", WEIGHTS, 6, (256, 64), 1),
        Region("dO", ROWS, 12, (64, 64), 1),
        Region("Z, then dZ and dZᵀ", Z, 8, (64, 64), 2),
        Region("A'ᵀ", OUT, 4, (32, 64), 1),
        Region("factors of rows", SMALL, 10, (64,), 4),
        Region("factors of columns", SMALL, 16, (32,), 4),
        Region("factors of blocks", SMALL, 4, (64,), 4),
        Region("slots", SMALL, 2, (64,), 4),
    ), 160, 328),
    Memory("fp8_wgrad", (
        Region("other_t", WEIGHTS, 3, (128, 128), 1),
        Region("rows", ROWS, 6, (128, 128), 1),
        Region("dW", OUT, 8, (32, 128), 2),
        Region("scales of columns", SMALL, 8, (32,), 4),
    ), 56, 200),
)  # fmt: skip


# --- drawing --------------------------------------------------------------------------------------
class Picture:
    def __init__(self, width: int, height: int, title: str, description: str):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            'font-family="system-ui, sans-serif" font-size="12">',
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(description)}</desc>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        ]

    def box(self, x, y, width, height, fill, text="", ink="#ffffff"):
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" '
            'stroke="#ffffff"/>'
        )
        if text:
            self.text(x + width / 2, y + height / 2 + 4, text, ink, "middle")

    def text(self, x, y, text, ink=INK, anchor="start", weight="normal"):
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" fill="{ink}" text-anchor="{anchor}" '
            f'font-weight="{weight}">{escape(text)}</text>'
        )

    def line(self, x1, y1, x2, y2, ink=MUTED, dashed=False):
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{ink}"{dash}/>'
        )

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>\n"])


def shared_memory() -> str:
    """A bar for each kernel, to scale, with the bytes of each region."""
    left, scale, bar = 84, 880 / LIMIT, 34
    picture = Picture(
        1000, 62 * len(MEMORY) + 66, "Shared memory of the Hopper kernels",
        "For each kernel a bar of its buffers, to scale. The bytes stand under each bar.",
    )  # fmt: skip
    for i, memory in enumerate(MEMORY):
        y, x = 20 + 62 * i, float(left)
        picture.text(left - 8, y + 22, memory.kernel, anchor="end", weight="bold")
        for region in memory.regions:
            width = region.size * scale
            light = region.colour in (ROWS, OUT)
            label = f"{region.name}: {region.count} × {'×'.join(map(str, region.shape))}"
            picture.box(x, y, width, bar, region.colour, label if width > 110 else "",
                        INK if light else "#ffffff")  # fmt: skip
            x += width
        rest = memory.barriers + memory.arguments
        small = [
            f"{r.name} {r.size}"
            for r in memory.regions
            if r.size * scale <= 110 and r.colour != SMALL
        ]
        if factors := sum(r.size for r in memory.regions if r.colour == SMALL):
            small.append(f"factors {factors}")
        sizes = [f"{r.size // 1024} KiB" for r in memory.regions if r.size * scale > 110]
        note = " + ".join([*sizes, *small, f"barriers and arguments {rest}"])
        picture.text(left, y + bar + 15, f"{note} = {memory.size} bytes", MUTED)
    end = left + LIMIT * scale
    picture.line(end, 10, end, 62 * len(MEMORY) + 20, INK, dashed=True)
    picture.text(end, 62 * len(MEMORY) + 36, f"{LIMIT} bytes: what a program may use", anchor="end")
    legend = (
        (WEIGHTS, "ring: weights or wide operand"), (ROWS, "ring: rows, one box per consumer"),
        (Z, "epilogue, in place"), (OUT, "output buffers"), (SMALL, "factors, scales, slots"),
    )  # fmt: skip
    x = left
    for colour, name in legend:
        picture.box(x, 62 * len(MEMORY) + 46, 12, 12, colour)
        picture.text(x + 17, 62 * len(MEMORY) + 56, name, MUTED)
        x += 40 + 6.3 * len(name)
    return str(picture)


def timeline() -> str:
    """Two tiles of six steps through a ring buffer of four stages."""
    steps, stages, unit, epilogue, left = 6, 4, 46, 140, 104
    picture = Picture(
        1000, 260, "Producer and consumer warpgroups over time",
        "The producer fills four stages ahead. Each consumer waits for a full stage, starts its "
        "wgmma and releases the stage of the step before. While the consumers run the epilogue of "
        "a tile, the producer fills the stages of the next tile and then waits.",
    )  # fmt: skip
    full: list[float] = []  # when a step's stage is full
    free: list[float] = []  # when it is empty again
    loads, waits, mmas, tails = [], [], [], []
    clock, busy = 0.0, 0.0
    for step in range(2 * steps):
        ready = free[step - stages] if step >= stages else 0.0
        if step < len(free) + stages and ready > clock:
            waits.append((clock, ready))
        start = max(clock, ready)
        clock = start + 0.8 * unit
        loads.append((start, clock, step))
        full.append(clock)
        begin = max(busy, full[step])
        busy = begin + unit
        mmas.append((begin, busy, step))
        free.append(busy + (0 if (step + 1) % steps == 0 else 0.35 * unit))
        if (step + 1) % steps == 0:
            tails.append((busy, busy + epilogue))
            busy += epilogue
    scale = (1000 - left - 16) / busy
    rows = {"producer": 34, "consumer 0": 98, "consumer 1": 162}
    for name, y in rows.items():
        picture.text(left - 10, y + 22, name, anchor="end", weight="bold")
        picture.box(left, y, busy * scale, 36, IDLE)
    shades = (WEIGHTS, "#1d4ed8")
    for start, end, step in loads:
        picture.box(left + start * scale, 34, (end - start) * scale, 36,
                    shades[step // steps], f"{step % stages}")  # fmt: skip
    for start, end in waits:
        if (end - start) * scale > 60:
            picture.text(left + (start + end) / 2 * scale, 56, "waits: empty", MUTED, "middle")
    for consumer in (98, 162):
        for start, end, step in mmas:
            picture.box(left + start * scale, consumer, (end - start) * scale, 36,
                        ("#10b981", "#047857")[step // steps], f"{step % stages}")  # fmt: skip
        for tile, (start, end) in enumerate(tails):
            picture.box(left + start * scale, consumer, (end - start) * scale, 36,
                        OUT, f"epilogue {tile}", INK)  # fmt: skip
    picture.text(left, 20, "TMA and cp.async into stage 0 … 3 (light: tile 0, dark: tile 1)", MUTED)
    picture.text(left, 92, "wgmma on stage 0 … 3, 64 rows of the tile", MUTED)
    picture.text(left, 156, "the same steps, the other 64 rows", MUTED)
    store = tails[0][1] * scale
    picture.box(left + store, 208, 3.2 * unit * scale, 16, "#fde68a", "TMA stores of tile 0", INK)
    picture.text(left, 220, "TMA, in the background", MUTED)
    picture.line(left, 236, left + busy * scale, 236, GRID)
    picture.text(left + busy * scale, 252, "time (not to scale)", MUTED, "end")
    return str(picture)


def laps() -> str:
    """The buffers of Z of one consumer in the dZ GEMM: eight slices, two laps, four buffers."""
    left, unit, top = 104, 98, 40
    picture = Picture(
        1000, 262, "Buffers of Z in the epilogue of the dZ GEMM",
        "Slices 0 to 3 of Z are loaded under the main loop. Slice s is computed in buffer s mod 4; "
        "its dZ is stored from there. One slice later the buffer is free and takes slice s + 4.",
    )  # fmt: skip
    for buffer in range(4):
        y = top + 46 * buffer
        picture.text(left - 10, y + 22, f"buffer {buffer}", anchor="end", weight="bold")
        picture.box(left, y, 9 * unit, 36, IDLE)
        picture.box(left, y, unit, 36, "#a7f3d0", f"load Z {buffer}", INK)
        for lap in range(2):
            s = 4 * lap + buffer
            x = left + (1 + s) * unit
            if lap == 1:
                start = left + (s - 1) * unit  # during slice s − 2: s − 4 has been stored
                picture.box(start, y, unit, 36, "#a7f3d0", f"load Z {s}", INK)
            picture.box(x, y, unit, 36, Z, f"slice {s}")
            width = unit if s < 7 else 0
            if width:
                picture.box(x + unit, y, 0.9 * width, 36, "#fde68a", f"store dZ {s}", INK)
    picture.text(left, 26, "main loop", MUTED)
    picture.text(left + unit, 26, "lap 0", MUTED)
    picture.text(left + 5 * unit, 26, "lap 1", MUTED)
    picture.line(left + unit, 14, left + unit, 228, MUTED, dashed=True)
    picture.line(left + 5 * unit, 14, left + 5 * unit, 228, MUTED, dashed=True)
    picture.text(left + 9 * unit, 250, "time (not to scale)", MUTED, "end")
    return str(picture)


PICTURES = {
    "shared-memory.svg": shared_memory,
    "timeline.svg": timeline,
    "laps.svg": laps,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")
