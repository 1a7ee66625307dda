"""The endpoints: what each asks of the daemon, and the answers as clients get them."""
