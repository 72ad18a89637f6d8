"""Deliberate faults of the source, each with the tests that notice it; one file per area."""

from mutations import (
    fp8,
    integrations,
    kernels,
    launch,
    layer,
    modules,
    packed,
    routing,
    tools,
    trainer,
)
from mutations.mutation import Mutation as Mutation

AREAS = {
    "tools": tools.MUTATIONS,
    "fp8": fp8.MUTATIONS,
    "integrations": integrations.MUTATIONS,
    "kernels": kernels.MUTATIONS,
    "launch": launch.MUTATIONS,
    "layer": layer.MUTATIONS,
    "modules": modules.MUTATIONS,
    "packed": packed.MUTATIONS,
    "routing": routing.MUTATIONS,
    "trainer": trainer.MUTATIONS,
}
MUTATIONS = [mutation for area in AREAS.values() for mutation in area]
