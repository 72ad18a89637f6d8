"""Adapters to frameworks, one small file each. None is imported with the package."""
