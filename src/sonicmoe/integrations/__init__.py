"""Adapters for other frameworks, one small file each; `import sonicmoe` imports none of them."""
