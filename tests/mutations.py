"""Break each promise on purpose and see a test fail: `python tests/mutations.py [--gpu]`.

A mutation changes one place in a copy of the source; the tests named with it must then fail.
Without `--gpu` those that need none. What survives is printed and makes the exit status 1.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutation(NamedTuple):
    broken: str
    file: str
    old: str
    new: str
    tests: str
    gpu: bool = False
    interpreted: bool = False


_SYNC = ("    target = target_of(x)\n", "    int(expert_start[-1])\n    target = target_of(x)\n")
_LAYER = "tests/interpreted/test_interpreted_layer.py"
_ROUTING = "tests/interpreted/test_interpreted_routing.py"
_DATA = "tests/train/test_data.py"

MUTATIONS = [
    Mutation(
        "the host reads a value", "launch/grouped_gemm.py", *_SYNC, "tests/test_no_waiting.py",
    ),
    Mutation(
        "a boolean index in the backward pass", "routing/token_rounding.py",
        "        dlogits = ops.round_logits_backward(",
        "        dscore[dscore > 0]\n        dlogits = ops.round_logits_backward(",
        "tests/test_no_waiting.py",
    ),
    Mutation(
        "dX without the router's share", "autograd.py",
        "ops.router_gradient_into(dx, dlogits, weight)", "pass", "tests/test_published.py",
    ),
    Mutation(
        "main_grad is overwritten", "reference/grouped_gemm.py",
        "main_grad.add_(dw2)", "main_grad.copy_(dw2)", "tests/test_main_grad.py",
    ),
    Mutation(
        "main_grad is overwritten by the kernel", "kernels/triton/wgrad.py",
        "            acc += tl.load(ptr, mask=inside, other=0.0)\n", "            pass\n",
        f"{_LAYER} -k buffer", interpreted=True,
    ),
    Mutation(
        "gradients of fp32 weights are rounded", "launch/grouped_gemm.py",
        "torch.float32 if fp32_dw else w1.dtype", "w1.dtype",
        f"{_LAYER} -k fp32_weights", interpreted=True,
    ),
    Mutation(
        "a checkpoint computes the output again", "checkpoint.py",
        "return None if hooks is None else []", "return None",
        "tests/integrations/test_checkpointing.py",
    ),
    Mutation(
        "the gradient of the output is lost in a checkpoint", "checkpoint.py",
        "        return dout, None\n", "        return None, None\n",
        "tests/integrations/test_checkpointing.py",
    ),
    Mutation(
        "the loss comes after the experts", "moe.py",
        "            out = finish(out, deferred)\n",
        "            out = finish(out, deferred)\n"
        "            if aux_loss is not None:\n"
        "                aux_loss = self._aux_loss(logits, r, p.counts, name)\n",
        "tests/integrations/test_checkpointing.py",
    ),
    Mutation(
        "an adapter without its scale", "kernels/transpose.py",
        "tile.to(tl.float32) * scale", "tile.to(tl.float32)",
        "tests/interpreted/test_interpreted_lora.py -k ranks", interpreted=True,
    ),
    Mutation(
        "another expert's rows in a weight gradient", "kernels/triton/wgrad.py",
        "    ok = rows < end\n    if TMA:\n", "    ok = rows < end + BLOCK_K\n    if TMA:\n",
        f"{_LAYER} -k zipf", interpreted=True,
    ),
    Mutation(
        "the last span of a long expert is left out", "kernels/spans.py",
        "for j in tl.range(0, spans):", "for j in tl.range(0, spans - 1):",
        f"{_LAYER} -k long", interpreted=True,
    ),
    Mutation(
        "the rows past the last whole band are left out", "kernels/tile_order.py",
        "tl.where(band == bands - 1, tl.maximum(m_tiles - first, 1), HIGH)", "HIGH",
        "tests/interpreted/test_interpreted_tiles.py", interpreted=True,
    ),
    Mutation(
        "ties go to the higher index", "kernels/topk.py",
        "| (0xFFFF - column)", "| column", _ROUTING, interpreted=True,
    ),
    Mutation(
        "the bias reaches the weights", "kernels/sigmoid.py",
        "    score = a * scale\n", "    score = (a + tl.load(bias + chosen)) * scale\n",
        _ROUTING, interpreted=True,
    ),
    Mutation(
        "a softmax without its other experts", "kernels/balance.py",
        "s[None, :] - inner[:, None] +", "s[None, :] +", _ROUTING, interpreted=True,
    ),
    Mutation(
        "a slot whose expert is not here gets a row", "kernels/permute.py",
        "    here = (expert >= 0) & (expert < num_experts)\n", "    here = expert < num_experts\n",
        _ROUTING, interpreted=True,
    ),
    Mutation(
        "a long batch waits for its permutation and sums to be compiled", "precompile.py",
        "BATCHES = (8, 2048)\n", "BATCHES = (8,)\n", "tests/test_warmup.py",
    ),
    Mutation(
        "a short batch waits for its permutation to be compiled", "precompile.py",
        "BATCHES = (8, 2048)\n", "BATCHES = (2048,)\n", "tests/test_warmup.py",
    ),
    Mutation(
        "launchers loaded side by side", "launch/triton_locks.py",
        "        with loading:\n", "        if True:\n", "tests/test_warmup.py",
    ),
    Mutation(
        "a kernel is launched with another dtype than it was compiled for", "launch/launcher.py",
        'kinds.append(a.dtype if address & 15 == 0 else (a.dtype, "unaligned"))',
        "kinds.append(address & 15 == 0)", "tests/test_launch.py",
    ),
    Mutation(
        "the host waits", "launch/grouped_gemm.py", *_SYNC,
        "tests/gpu/test_gpu_promises.py -k never_wait", gpu=True,
    ),
    Mutation(
        "the host waits in a graph", "launch/grouped_gemm.py", *_SYNC,
        "tests/gpu/test_gpu_promises.py -k cuda_graph", gpu=True,
    ),
    Mutation(
        "gathered rows at 32 bits", "kernels/hopper/ring.py",
        "upper.to(gl.int64) * K", "upper * K",
        "tests/gpu/test_gpu_large.py -k more_elements", gpu=True,
    ),
    Mutation(
        "combined rows at 32 bits", "kernels/combine.py",
        "y + row.to(tl.int64) * H + h", "y + row * H + h",
        "tests/gpu/test_gpu_large.py -k more_elements", gpu=True,
    ),
    Mutation(
        "logits at 32 bits", "kernels/topk.py",
        "    ptr = logits + token.to(tl.int64)[:, None] * logits_stride + e[None, :]\n    NARROW",
        "    ptr = logits + token[:, None] * logits_stride + e[None, :]\n    NARROW",
        "tests/gpu/test_gpu_large.py -k logits", gpu=True,
    ),
    Mutation(
        "rows in the order of arrival", "kernels/permute.py",
        "i + tl.load(to_row + p.to(tl.int64) * num_experts + expert, mask=here, other=0)",
        "tl.atomic_add(to_row + expert, 1, mask=here)",
        "tests/gpu/test_gpu_promises.py -k bitwise", gpu=True,
    ),
    Mutation(
        "another expert's rows in a weight gradient on Hopper", "kernels/hopper/wgrad.py",
        "            ok = k + r < end\n", "            ok = k + r < end + BLOCK_K\n",
        "tests/gpu/test_gpu_promises.py -k nan", gpu=True,
    ),
    Mutation(
        "main_grad of the wrong columns", "kernels/hopper/wgrad.py",
        "        column = n0 + i * PIECE\n        if out_fp32",
        "        column = n0\n        if out_fp32",
        "tests/gpu/test_gpu_stages.py -k buffer", gpu=True,
    ),
    Mutation(
        "rows of an FP8 weight gradient in order", "kernels/hopper/fp8_wgrad.py",
        "    return (row & ~9) | ((row & 1) << 3) | ((row >> 3) & 1)", "    return row",
        "tests/test_machine_code_fp8.py -k order",
    ),
    Mutation(
        "another expert's rows in an FP8 weight gradient", "kernels/hopper/fp8_wgrad.py",
        "        return gl.where(row < end, row, -1)", "        return row",
        "tests/gpu/test_gpu_fp8_wgrad.py -k nan", gpu=True,
    ),
    Mutation(
        "FP8 weights outlive the step of a fused optimizer", "fp8_weights.py",
        "    _optimizer_steps += 1\n", "    pass\n", "tests/test_fp8_weights.py -k fused",
    ),
    Mutation(
        "FP8 weights outlive their storage", "fp8_weights.py",
        "return storage, w.data_ptr(), w._version", "return w._version",
        "tests/test_fp8_weights.py -k assigned",
    ),
    Mutation(
        "FP8 weights outlive a write through .data", "fp8_weights.py",
        "        q1, q2 = self._weights\n", "        return self._weights\n",
        "tests/test_fp8_weights.py -k refresh",
    ),
    Mutation(
        "changed FP8 weights are not compared with what is cached", "kernels/quantize.py",
        "tl.where(is_stale, float(\"nan\"), s)", "s",
        "tests/interpreted/test_interpreted_quantize.py -k changed", interpreted=True,
    ),
    Mutation(
        "each call compares the same sample of cached FP8 weights", "fp8_weights.py",
        "(self._sample + 1)", "(self._sample + 0)",
        "tests/test_fp8_weights.py -k another_sample",
    ),
    Mutation(
        "FP8 weights outlive an all-gather of FSDP2", "fp8_weights.py",
        "and not _fsdp2_is_used()", "", "tests/test_fp8_weights.py -k fsdp2",
    ),
    Mutation(
        "FP8: one scale for all rows of dZ", "reference/fp8.py",
        "dz_scale = power_of_two_scale(bound)",
        "dz_scale = power_of_two_scale(bound.amax().expand_as(bound))",
        "tests/test_fp8.py -k worst",
    ),
    Mutation(
        "FP8: a bound of dZ that does not hold", "reference/fp8.py",
        "SLACK = 1.6\n", "SLACK = 0.02\n", "tests/test_fp8.py -k saturates",
    ),
    Mutation(
        "FP8: the transposed operand of frozen weights", "autograd_fp8.py",
        "+ (() if need_dz_t else dz_t)", "", "tests/test_fp8.py -k not_needed",
    ),
    Mutation(
        "FP8: Z is kept though it is recomputed", "autograd_fp8.py",
        "options.gate_up, keep_z, backend\n", 'options.gate_up, "keep", backend\n',
        "tests/test_peak.py -k fp8",
    ),
    Mutation(
        "FP8: one scale of Z for all blocks of a row", "reference/fp8.py",
        "power_of_two_scale(zmax).T", "power_of_two_scale(zmax.amax(0).expand_as(zmax)).T",
        "tests/test_fp8_memory.py -k other_sizes",
    ),
    Mutation(
        "FP8: weights are kept though they are quantized again", "autograd_fp8.py",
        "return w if w.w8_t is not None else Fp8Weight()", "return w",
        "tests/test_fp8_memory.py -k to_the_byte",
    ),
    Mutation(
        "FP8: weight gradients in bf16 without the scores", "reference/fp8.py",
        "scored_activation(z, zmax, scores, p, activation, gate_up)\n            dw2",
        "scored_activation(z, zmax, None, p, activation, gate_up)\n            dw2",
        "tests/test_fp8_memory.py -k weight_gradients_in_bf16",
    ),
    Mutation(
        "FP8: a slice reads the first columns of the weights", "launch/fp8.py",
        "w8=w.w8[:, columns]", "w8=w.w8[:, :width]",
        "tests/test_machine_code_fp8.py -k slices",
    ),
    Mutation(
        "A' of the next slot", "kernels/bf16_operands.py",
        "tl.load(scores + slot, mask=used", "tl.load(scores + slot + 1, mask=used",
        "tests/interpreted/test_interpreted_quantize.py -k scored", interpreted=True,
    ),
    Mutation(
        "two runs get the same folder", "train/run.py",
        "            folder.mkdir(parents=True)\n",
        "            folder.mkdir(parents=True, exist_ok=True)\n",
        "tests/train/test_run_folder.py -k same_folder",
    ),
    Mutation(
        "a run in progress is resumed", "train/run.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB",
        "tests/train/test_run_folder.py -k in_progress",
    ),
    Mutation(
        "an error of the first rank stays there", "train/parallel.py",
        "            both = [result, error]\n", "            both = [result, None]\n",
        "tests/train/test_run_folder.py -k every_rank",
    ),
    Mutation(
        "the manifest has no checksum of its own", "train/checkpoint.py",
        "found != _manifest(files) or ", "", "tests/train/test_damage.py -k flipped_bit",
    ),
    Mutation(
        "an empty manifest is accepted", "train/checkpoint.py",
        " or files.keys() != {_STATE}", "", "tests/train/test_damage.py -k manifest",
    ),
    Mutation(
        "damaged checkpoints count as kept", "train/checkpoint.py",
        "        elif step <= newest and _is_sound(path):\n", "        else:\n",
        "tests/train/test_damage.py -k displace",
    ),
    Mutation(
        "a checkpoint may run code", "train/checkpoint.py",
        "weights_only=True", "weights_only=False", "tests/train/test_damage.py -k run_code",
    ),
    Mutation(
        "a checkpoint is not flushed to the disk", "train/checkpoint.py",
        "        os.fsync(handle)\n", "        pass\n", "tests/train/test_damage.py -k on_the_disk",
    ),
    Mutation(
        "the random state is not restored", "train/checkpoint.py",
        '    torch.set_rng_state(state["rng"].cpu())\n', "",
        "tests/train/test_step.py -k random_router",
    ),
    Mutation(
        "validation in training mode", "train/loop.py",
        "        self.model.eval()\n", "", "tests/train/test_step.py -k eval_mode",
    ),
    Mutation(
        "gradients are not clipped", "train/loop.py",
        "parallel.clip_gradients(self.model.parameters(), c.gradient_clip)",
        "parallel.clip_gradients(self.model.parameters(), math.inf)",
        "tests/train/test_step.py -k clipped",
    ),
    Mutation(
        "weight decay on the norms", "train/optim.py",
        '"params": scales, "weight_decay": 0.0', '"params": scales, "weight_decay": 0.1',
        "tests/train/test_step.py -k decay",
    ),
    Mutation(
        "a loss that is not finite goes unnoticed", "train/loop.py",
        "            if not math.isfinite(loss + norm):\n", "            if False:\n",
        "tests/train/test_not_finite.py -k advice",
    ),
    Mutation(
        "weights that are not finite are saved", "train/loop.py",
        "            if name is not None:\n", "            if False:\n",
        "tests/train/test_not_finite.py -k after_it",
    ),
    Mutation(
        "a validation loss that is not finite goes unnoticed", "train/loop.py",
        "        if not math.isfinite(self.validation_loss):\n", "        if False:\n",
        "tests/train/test_not_finite.py -k after_it",
    ),
    Mutation(
        "the checkpoint right before a bad step is offered again", "train/loop.py",
        "        if bad_step is not None:\n", "        if False:\n",
        "tests/train/test_not_finite.py -k advice",
    ),
    Mutation(
        "validation windows from the start of the text only", "train/batches.py",
        "chosen = [i * self.windows // count for i in range(count)]", "chosen = list(range(count))",
        f"{_DATA} -k validation_windows",
    ),
    Mutation(
        "a corpus folder written without an atomic rename", "train/corpus.py",
        "try:\n        os.rename(work, folder)\n", "try:\n        shutil.copytree(work, folder)\n",
        f"{_DATA} -k one_rename",
    ),
    Mutation(
        "a continued run may build another corpus than it began with", "train/corpus.py",
        "    if key and key != wanted:\n", "    if False:\n", f"{_DATA} -k began_with",
    ),
    Mutation(
        "a checkpoint is continued on another corpus", "train/loop.py",
        'if state["corpus"] != self.corpus_key:', "if False:", f"{_DATA} -k another_corpus",
    ),
    Mutation(
        "checksums of a cached corpus are not compared", "train/corpus.py",
        "if _size_and_sha256(folder / name) != expected:", "if False:",
        f"{_DATA} -k damaged_cache",
    ),
    Mutation(
        "two processes build a corpus at once", "train/corpus.py",
        "            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n", "            pass\n",
        f"{_DATA} -k two_at_once",
    ),
    Mutation(
        "a gzip file may unpack to any size", "train/text.py",
        "if is_gzip and size > LARGEST_UNPACKED:", "if False:", f"{_DATA} -k bomb",
    ),
    Mutation(
        "the statistics count added pairs as dropped", "routing/statistics.py",
        "dropped=(choice - rows)", "dropped=(rows - choice)",
        "tests/routing/test_routers.py -k dropped_and_added",
    ),
    Mutation(
        "verify judges norms alone", "bench/verify.py",
        " and passed(self.slices)", "", "tests/bench/test_verify.py -k small_rows",
    ),
    Mutation(
        "verify takes rows of dW2 for columns", "bench/slices.py",
        '"w2": -2}', '"w2": -1}', "tests/bench/test_verify.py -k overflows",
    ),
    Mutation(
        "results that overflow in ours alone are left out", "bench/slices.py",
        "overflow = ~plain.isfinite()", "overflow = ~(plain + got.to(plain)).isfinite()",
        "tests/test_trained_values.py -k alone",
    ),
    Mutation(
        "all experts have their outlier in one row", "bench/values.py",
        "row = _one_of(weight.shape[1], (len(weight), 1), generator)",
        "row = _one_of(weight.shape[1], (1, 1), generator)",
        "tests/bench/test_values.py -k of_their_own",
    ),
    Mutation(
        "a tuned table may hold values of other types", "tuning/table.py",
        "if type(values[name]) is not kind:", "if False:", "tests/tuning/test_table.py",
    ),
]  # fmt: skip


def verdict(mutation: Mutation) -> str:
    """What the first failing test said, or nothing if all passed."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source)
        file = source / "sonicmoe" / mutation.file
        text = file.read_text()
        if mutation.old not in text:
            raise SystemExit(f"{mutation.broken}: {mutation.file} has no {mutation.old!r}")
        file.write_text(text.replace(mutation.old, mutation.new, 1))
        environment = os.environ | {"PYTHONPATH": str(source)}
        if mutation.interpreted:
            environment["TRITON_INTERPRET"] = "1"
        tests, *choice = mutation.tests.split(" -k ")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-o", "addopts=", tests]
        command += ["-p", "no:cacheprovider", *(["-k", choice[0]] if choice else [])]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode > 1:  # neither passed nor failed nor crashed: not run at all
            raise SystemExit(f"{mutation.broken}:\n{done.stdout}{done.stderr}")
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return "" if done.returncode == 0 else (failed or ["crashed"])[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="those that need a GPU instead")
    parser.add_argument("--only", default="", metavar="TEXT", help="in what is broken")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    chosen = [m for m in MUTATIONS if m.gpu == args.gpu and args.only in m.broken]
    alive = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for mutation, failed in zip(chosen, pool.map(verdict, chosen), strict=True):
            alive += not failed
            print(f"{'caught  ' if failed else 'SURVIVES'} {mutation.broken}: {failed}", flush=True)
    print(f"{len(chosen) - alive} of {len(chosen)} caught")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
