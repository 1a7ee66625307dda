"""Programs around epdd; run from the repository's root, `python -m tools.NAME`."""
