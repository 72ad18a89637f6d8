"""Where the trainer was in 0.1; importing it, or a module of it, says where it is now."""

raise ImportError(
    "sonicmoe.train is now sonicmoe_trainer, a package of its own. Install it: pip install "
    "sonicmoe-trainer, or pip install ./trainer in a clone of SonicMoE."
)
