"""`python -m epdd`: the only way to start the daemon, since spawned children re-import the main module."""

from epdd.daemon import main

if __name__ == "__main__":
    raise SystemExit(main())
