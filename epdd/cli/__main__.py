"""The `epdd` command, by its script or as `python -m epdd.cli`."""


def main() -> int:
    try:
        # Imported inside `try`, so that Ctrl-C during the import prints no traceback.
        from epdd.cli.main import main as run
        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
