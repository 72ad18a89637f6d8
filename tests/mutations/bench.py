"""Values like those of trained models, and errors by slice."""

from mutations.mutation import Mutation

MUTATIONS = [
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
        "tests/experts/test_trained_values.py -k alone",
    ),
    Mutation(
        "all experts have their outlier in one row", "bench/values.py",
        "row = _one_of(weight.shape[1], (len(weight), 1), generator)",
        "row = _one_of(weight.shape[1], (1, 1), generator)",
        "tests/bench/test_values.py -k of_their_own",
    ),
]  # fmt: skip
