"""`python -m epdd`: the only way to start the daemon, since spawned children re-import the main module."""

if __name__ == "__main__":
    try:
        # Here and not above: a Ctrl-C while it is imported, which takes half a second, needs no traceback either.
        import signal
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})     # `epdd serve` blocks it
        from epdd.daemon import main
        code = main()
    except KeyboardInterrupt:
        code = 130
    raise SystemExit(code)
