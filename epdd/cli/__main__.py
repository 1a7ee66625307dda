"""The `epdd` command, by its script or as `python -m epdd.cli`."""


def main() -> int:
    try:
        # Here and not above: a Ctrl-C while it is imported needs no traceback either.
        from epdd.cli.main import main as run
        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
