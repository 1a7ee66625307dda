"""`python -m epdd` starts the daemon.  Nothing else does, because spawned children import the main module again."""

if __name__ == "__main__":
    try:
        # Imported inside `try`, so that Ctrl-C during the import, which takes half a second, prints no traceback.
        import signal
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})     # `epdd serve` blocks it
        from epdd.daemon import main
        code = main()
    except KeyboardInterrupt:
        code = 130
    raise SystemExit(code)
