"""The command `epdd`: `main.py` has its verbs."""
