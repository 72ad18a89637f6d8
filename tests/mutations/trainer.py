"""The trainer, its data and its checkpoints; `generate`."""

from mutations.mutation import Mutation

_DATA = "trainer/tests/test_data.py"
_KERNELS = "trainer/tests/test_trainer_kernels.py"

_FOUND = [
    Mutation(
        "two runs get the same folder", "run.py",
        "            folder.mkdir(parents=True)\n",
        "            folder.mkdir(parents=True, exist_ok=True)\n",
        "trainer/tests/test_run_folder.py -k same_folder",
    ),
    Mutation(
        "a run in progress is resumed", "run.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB",
        "trainer/tests/test_run_folder.py -k in_progress",
    ),
    Mutation(
        "an error of the first rank stays there", "parallel.py",
        "            both = [result, error]\n", "            both = [result, None]\n",
        "trainer/tests/test_run_folder.py -k every_rank",
    ),
    Mutation(
        "the manifest has no checksum of its own", "checkpoint.py",
        "found != _manifest(files) or ", "", "trainer/tests/test_damage.py -k flipped_bit",
    ),
    Mutation(
        "an empty manifest is accepted", "checkpoint.py",
        " or files.keys() != {_STATE}", "", "trainer/tests/test_damage.py -k manifest",
    ),
    Mutation(
        "damaged checkpoints count as kept", "checkpoint.py",
        "        elif step <= newest and _is_sound(path):\n", "        else:\n",
        "trainer/tests/test_damage.py -k displace",
    ),
    Mutation(
        "a checkpoint may run code", "checkpoint.py",
        "weights_only=True", "weights_only=False", "trainer/tests/test_damage.py -k run_code",
    ),
    Mutation(
        "a checkpoint is not flushed to the disk", "checkpoint.py",
        "        os.fsync(handle)\n", "        pass\n",
        "trainer/tests/test_damage.py -k on_the_disk",
    ),
    Mutation(
        "the random state is not restored", "checkpoint.py",
        '    torch.set_rng_state(state["rng"].cpu())\n', "",
        "trainer/tests/test_step.py -k random_router",
    ),
    Mutation(
        "validation in training mode", "loop.py",
        "        self.model.eval()\n", "", "trainer/tests/test_step.py -k eval_mode",
    ),
    Mutation(
        "gradients are not clipped", "loop.py",
        "optim.step(self.model, self.optimizer, c.gradient_clip)",
        "optim.step(self.model, self.optimizer, math.inf)",
        "trainer/tests/test_step.py -k clipped",
    ),
    Mutation(
        "weight decay on the norms", "optim.py",
        '"params": scales, "weight_decay": 0.0', '"params": scales, "weight_decay": 0.1',
        "trainer/tests/test_step.py -k decay",
    ),
    Mutation(
        "a loss that is not finite goes unnoticed", "loop.py",
        "            if not math.isfinite(loss + norm):\n", "            if False:\n",
        "trainer/tests/test_not_finite.py -k advice",
    ),
    Mutation(
        "weights that are not finite are saved", "loop.py",
        "            if name is not None:\n", "            if False:\n",
        "trainer/tests/test_not_finite.py -k after_it",
    ),
    Mutation(
        "a validation loss that is not finite goes unnoticed", "loop.py",
        "        if not math.isfinite(self.validation_loss):\n", "        if False:\n",
        "trainer/tests/test_not_finite.py -k after_it",
    ),
    Mutation(
        "the checkpoint right before a bad step is offered again", "loop.py",
        "        if bad_step is not None:\n", "        if False:\n",
        "trainer/tests/test_not_finite.py -k advice",
    ),
    Mutation(
        "validation windows from the start of the text only", "batches.py",
        "chosen = [i * self.windows // count for i in range(count)]", "chosen = list(range(count))",
        f"{_DATA} -k validation_windows",
    ),
    Mutation(
        "a corpus folder written without an atomic rename", "corpus.py",
        "try:\n        os.rename(work, folder)\n", "try:\n        shutil.copytree(work, folder)\n",
        f"{_DATA} -k one_rename",
    ),
    Mutation(
        "a continued run may build another corpus than it began with", "corpus.py",
        "    if key and key != wanted:\n", "    if False:\n", f"{_DATA} -k began_with",
    ),
    Mutation(
        "a checkpoint is continued on another corpus", "loop.py",
        'if state["corpus"] != self.corpus_key:', "if False:", f"{_DATA} -k another_corpus",
    ),
    Mutation(
        "checksums of a cached corpus are not compared", "corpus.py",
        "if _size_and_sha256(folder / name) != expected:", "if False:",
        f"{_DATA} -k damaged_cache",
    ),
    Mutation(
        "two processes build a corpus at once", "corpus.py",
        "            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n", "            pass\n",
        f"{_DATA} -k two_at_once",
    ),
    Mutation(
        "a gzip file may unpack to any size", "text.py",
        "if is_gzip and size > LARGEST_UNPACKED:", "if False:", f"{_DATA} -k bomb",
    ),
    Mutation(
        "micro-batch losses are summed", "loop.py",
        "((loss + aux_loss) / len(pieces)).backward()", "(loss + aux_loss).backward()",
        "trainer/tests/test_step.py -k mean_over_micro_batches",
    ),
    Mutation(
        "the auxiliary loss is not trained", "loop.py",
        "((loss + aux_loss) / len(pieces)).backward()", "(loss / len(pieces)).backward()",
        "trainer/tests/test_step.py -k mean_over_micro_batches",
    ),
    Mutation(
        "every epoch has the same order", "batches.py",
        "seed * 1_000_003 + epoch", "seed * 1_000_003",
        "trainer/tests/test_data.py -k order_of_its_own",
    ),
    Mutation(
        "later checkpoints count as kept", "checkpoint.py",
        "        elif step <= newest and _is_sound(path):\n", "        elif _is_sound(path):\n",
        "trainer/tests/test_damage.py -k later_checkpoints",
    ),
    Mutation(
        "top-p drops the token that crosses it", "generate.py",
        "probability.cumsum(-1) - probability > top_p", "probability.cumsum(-1) > top_p",
        "trainer/tests/test_after.py -k top_p",
    ),
    Mutation(
        "top-p keeps the likeliest and drops the token that crosses it", "generate.py",
        "probability[probability.cumsum(-1) - probability > top_p] = 0",
        "probability[1:][probability.cumsum(-1)[1:] > top_p] = 0",
        "trainer/tests/test_after.py -k top_p",
    ),
    Mutation(
        "generation reads one token past the context", "generate.py",
        "if filled + len(unread) > model.config.context:",
        "if filled + len(unread) > model.config.context + 1:",
        "trainer/tests/test_after.py -k no_more_than_the_context",
    ),
    Mutation(
        "a long prompt is read past the context", "generate.py",
        "ids[-model.config.context :]", "ids[-model.config.context - 1 :]",
        "trainer/tests/test_after.py -k no_more_than_the_context",
    ),
    Mutation(
        "a temperature may be infinite", "generate.py",
        "if not 0 <= temperature < math.inf:", "if not 0 <= temperature:",
        "trainer/tests/test_after.py -k generate_continues",
    ),
    Mutation(
        "a temperature may be NaN", "generate.py",
        "if not 0 <= temperature < math.inf:", "if temperature < 0 or temperature == math.inf:",
        "trainer/tests/test_after.py -k generate_continues",
    ),
    Mutation(
        "clipping is forgotten in bf16", "adamw.py",
        "        g32 = g32 * (1 / divisor)\n", "        pass\n",
        "trainer/tests/test_clipping.py -k moments",
    ),
    Mutation(
        "FlexAttention is not used where runs must repeat", "attention.py",
        "        if mask is not None:\n", "        if False:\n",
        "trainer/tests/test_attention.py -k which_kernel",
    ),
    Mutation(
        "every validation batch weighs the same", "loop.py",
        "torch.ones_like(total[1])]) * sequences", "torch.ones_like(total[1])])",
        "trainer/tests/test_step.py -k eval_mode",
    ),
    Mutation(
        "a sequence that all ranks read counts once per rank", "loop.py",
        "                mine = slice(1)\n",
        "                mine, sequences = slice(1), 1\n",
        "trainer/tests/test_parallel.py -k experts_spread_over",
    ),
    Mutation(
        "the learning rate of the step before", "loop.py",
        "optim.learning_rate(c, self.step)\n", "optim.learning_rate(c, max(self.step - 1, 0))\n",
        "trainer/tests/test_step.py -k own_learning_rate",
    ),
    Mutation(
        "the biases of sigmoid routers follow the load of one rank", "loop.py",
        "all_reduce=self.world.sum", "all_reduce=lambda load: load",
        "trainer/tests/test_parallel.py -k experts_spread_over",
    ),
    Mutation(
        "a continued run has a shorter warm-up", "run.py",
        '{"warmup_steps": config.warmup_steps, **overrides}', "overrides",
        "trainer/tests/test_run_folder.py -k keeps_its_warm_up",
    ),
    Mutation(
        "several tokens that continue a text see each other's future", "attention.py",
        "    if queries > 1:\n", "    if False:\n", "trainer/tests/test_attention.py -k no_later",
    ),
    Mutation(
        "dW of the head is summed in bf16", "cross_entropy.py",
        "dw = torch.zeros_like(w, dtype=total.dtype)", "dw = torch.zeros_like(w)",
        "trainer/tests/test_cross_entropy.py -k chunks_change",
    ),
    Mutation(
        "dW of the head is a sum of rounded chunks", "cross_entropy.py",
        "        total.addmm_(left.to(total.dtype), right.to(total.dtype))\n",
        "        total.add_(left @ right)\n",
        "trainer/tests/test_cross_entropy.py -k chunks_change",
    ),
    Mutation(
        "dW of the head is a sum of the means of chunks", "cross_entropy.py",
        "_add_gemm(dw, dlogits.mT, x[part])",
        "_add_gemm(dw, dlogits.mT * (rows / chunk / len(dlogits)), x[part])",
        "trainer/tests/test_cross_entropy.py -k chunks_change",
    ),
    Mutation(
        "the second moment in bf16 is rounded to the nearest", "adamw.py",
        "v.copy_(rounded_stochastically(v32, noise >> 16))", "v.copy_(v32)",
        "trainer/tests/test_adamw.py -k shrink",
    ),
    Mutation(
        "AdamW's kernel rounds the second moment to the nearest", "kernels/adamw.py",
        "rounded_stochastically(v, noise >> 16)", "v.to(tl.bfloat16)",
        f"{_KERNELS} -k in_proportion", interpreted=True,
    ),
    Mutation(
        "AdamW's kernel rounds weight and second moment by the same bits", "kernels/adamw.py",
        "rounded_stochastically(v, noise >> 16)", "rounded_stochastically(v, noise & 0xFFFF)",
        f"{_KERNELS} -k in_proportion", interpreted=True,
    ),
    Mutation(
        "AdamW's kernel does not clip", "kernels/adamw.py",
        "        g *= 1 / tl.load(divisor)\n", "        pass\n",
        f"{_KERNELS} -k in_proportion", interpreted=True,
    ),
    Mutation(
        "AdamW's kernel does not correct the second moment", "kernels/adamw.py",
        "tl.sqrt(v / correction2)", "tl.sqrt(v)",
        f"{_KERNELS} -k in_proportion", interpreted=True,
    ),
    Mutation(
        "AdamW's kernel adds epsilon under the root", "kernels/adamw.py",
        "(tl.sqrt(v / correction2) + eps)", "tl.sqrt(v / correction2 + eps)",
        f"{_KERNELS} -k in_proportion", interpreted=True,
    ),
    Mutation(
        "the loss kernel does not rescale its sum", "kernels/cross_entropy.py",
        "total * tl.exp(peak - base) + ", "total + ",
        f"{_KERNELS} -k losses_of_rows", interpreted=True,
    ),
    Mutation(
        "the loss kernel leaves out the last logit", "kernels/cross_entropy.py",
        "mask=start + column < V, other=float(\"-inf\")",
        "mask=start + column < V - 1, other=float(\"-inf\")",
        f"{_KERNELS} -k losses_of_rows", interpreted=True,
    ),
    Mutation(
        "the loss kernel's gradient forgets the target", "kernels/cross_entropy.py",
        "tl.exp(x - lse) - (start + column == target).to(tl.float32)", "tl.exp(x - lse)",
        f"{_KERNELS} -k losses_of_rows", interpreted=True,
    ),
]  # fmt: skip

MUTATIONS = [m._replace(package="trainer/src/sonicmoe_trainer") for m in _FOUND]
