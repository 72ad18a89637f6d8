"""Tables of steps where more than the layer counts: the host, models of transformers, trainings."""

from collections.abc import Sequence

from sonicmoe.tools.tables import table

from . import training_step_report
from .results import Record
from .section import Section, newest


def graphs(records: Sequence[Record]) -> Section | None:
    found = newest(records, "graphs", "layer", "precision", "mode")
    if not found:
        return None
    places = {(r["layer"], r["precision"]): i for i, r in reversed(list(enumerate(found)))}
    found = sorted(found, key=lambda r: places[r["layer"], r["precision"]])
    rows = [
        (r["layer"], r["precision"], r["mode"], f"{r['wall_ms']:.2f}", f"{r['gpu_busy_ms']:.2f}",
         f"{r['wall ÷ gpu_busy']:.2f}", f"{r['dense_ms'] / r['wall_ms']:.2f}")
        for r in found
    ]  # fmt: skip
    caption = (
        "A training step of the layer, ms by the clock and on the GPU; the last column: speed "
        "relative to dense cuBLAS in bf16. calling_thread, one_core and stack are eager too: "
        "backward in the calling thread; all threads on one core; a layer of a stack of eight."
    )
    before = dict.fromkeys(r["layer"] for r in found if r.get("profiled") != "afterwards")
    if before:
        caption += (
            " Timed in a process in which PyTorch's profiler had run, where eager and compiled "
            f"launches may take longer: {'; '.join(before)}."
        )
    head = ("T,H,I,E,K", "precision", "mode", "wall", "GPU-busy", "wall ÷ busy", "dense ÷ wall")
    return Section("CUDA graphs", caption, table(head, rows), found)


def models(records: Sequence[Record]) -> Section | None:
    found = [r for r in records if r.get("part") == "model"]
    if not found:
        return None
    found = [r for r in found if r["date"] == found[-1]["date"]]
    rows = [
        (r["case"], r["shape"].rpartition(", ")[2], r["candidate"], f"{r['fwd_bwd_ms']:.0f}",
         f"{r['peak_mib'] / 1024:.1f}")
        for r in found
    ]  # fmt: skip
    caption = (
        "Forward and backward in transformers, random weights, 4 sequences of 4096 tokens, no "
        "checkpointing, no optimizer."
    )
    head = ("model", "intermediate size", "experts", "ms", "peak GiB")
    return Section("Models of transformers", caption, table(head, rows), found)


def steps(records: Sequence[Record]) -> Section | None:
    found = [r for r in records if r.get("kind") == "training step" and "failed" not in r]
    if not found:
        return None
    shown = training_step_report.newest(found)
    caption = "`sonicmoe train` on one GPU, random tokens; then where the GPU's time goes."
    tables = [training_step_report.step_table(shown), training_step_report.part_table(shown)]
    return Section("Training steps", caption, "\n\n".join(tables), shown)
