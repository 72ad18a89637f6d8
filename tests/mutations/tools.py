"""The tools: cost, verify, values like those of trained models, errors by slice."""

from mutations.mutation import Mutation

MUTATIONS = [
    Mutation(
        "verify judges norms alone", "tools/verify.py",
        " and passed(self.slices)", "", "tests/tools/test_verify.py -k small_rows",
    ),
    Mutation(
        "cost reads dZ once for all slices of dX", "tools/cost.py",
        'slices * q["z"]', 'q["z"]', "tests/test_cost.py -k slices",
    ),
    Mutation(
        "verify takes rows of dW2 for columns", "tools/slices.py",
        '"w2": -2}', '"w2": -1}', "tests/tools/test_verify.py -k overflows",
    ),
    Mutation(
        "results that overflow in ours alone are left out", "tools/slices.py",
        "overflow = ~plain.isfinite()", "overflow = ~(plain + got.to(plain)).isfinite()",
        "tests/experts/test_trained_values.py -k alone",
    ),
    Mutation(
        "all experts have their outlier in one row", "tools/values.py",
        "row = _one_of(weight.shape[1], (len(weight), 1), generator)",
        "row = _one_of(weight.shape[1], (1, 1), generator)",
        "tests/tools/test_values.py -k of_their_own",
    ),
]  # fmt: skip
