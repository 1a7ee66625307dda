"""`python -m epdd.cli`: the `epdd` command where its script is not on the path."""

from epdd.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
