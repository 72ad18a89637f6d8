"""Device code of the trainer."""
