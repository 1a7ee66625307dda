"""`epdd`, for people: `main.py` has its verbs."""
