"""What a server takes: whole requests, start, memory, beside other servers."""
