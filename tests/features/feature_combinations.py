"""Sets of features: the product of groups, and covering arrays."""

from collections.abc import Iterator
from itertools import combinations, product

from feature_list import BY_NAME, FEATURES, Feature, reasons

Combination = tuple[Feature, ...]
# What chooses the kernels, and what one set of kernels is used for.
OF_KERNELS = ("precision", "biases", "LoRA", "activation", "gate_up")
OF_CALLS = ("memory", "frozen", "entry point")


def name_of(features: Combination) -> str:
    return ", ".join(feature.name for feature in features) or "no feature"


def products(groups: tuple[str, ...], without: tuple[str, ...] = ()) -> Iterator[Combination]:
    """One feature or none of each group, in all combinations that can work."""
    choices = [
        [None, *(f for f in FEATURES if f.group == group and f.name not in without)]
        for group in groups
    ]
    for chosen in product(*choices):
        features = tuple(feature for feature in chosen if feature is not None)
        if not reasons(features):
            yield features


def kernels() -> list[Combination]:
    """Without fp32, which has kernels of its own; gate and up have an order if there is a gate."""
    ungated = {BY_NAME["gelu"], BY_NAME["concatenated"]}
    return [f for f in products(OF_KERNELS, without=("fp32",)) if not ungated <= set(f)]


def calls(of: Combination) -> list[Combination]:
    """All combinations of these features with those of `OF_CALLS`; `experts` is the default."""
    both = (of + others for others in products(OF_CALLS, without=("experts",)))
    return [features for features in both if not reasons(features)]


def covering(strength: int) -> list[Combination]:
    """Combinations in which each valid set of `strength` features is at least once (greedy)."""
    left = {
        frozenset(chosen)
        for chosen in combinations(FEATURES, strength)
        if len({f.group for f in chosen}) == strength and not reasons(chosen)
    }
    order = {feature: i for i, feature in enumerate(FEATURES)}
    found = []
    while left:
        row = set(min(left, key=lambda chosen: sorted(order[f] for f in chosen)))
        while (best := _best(row, left, strength)) is not None:
            row.add(best)
        left -= {frozenset(chosen) for chosen in combinations(row, strength)}
        found.append(tuple(sorted(row, key=order.__getitem__)))
    return found


def _best(row: set[Feature], left: set[frozenset[Feature]], strength: int) -> Feature | None:
    """The feature that covers most together with those of a row; None if none covers anything."""
    groups, best, most = {f.group for f in row}, None, 0
    for feature in FEATURES:
        if feature.group in groups or reasons((*row, feature)):
            continue
        others = combinations(row, strength - 1)
        covered = sum(frozenset((feature, *chosen)) in left for chosen in others)
        if covered > most:
            best, most = feature, covered
    return best
